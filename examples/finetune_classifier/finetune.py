"""Finetunes MiniLM to decide whether a sentence answers a question, with functions; see README.md."""

import ast
import sys
import sysconfig
from pathlib import Path

import torch
from torch.nn.functional import cosine_similarity, cross_entropy, pad

from trainwright import get_args, training_main
from trainwright.data.tokenizer import load_tokenizer
from trainwright.models.bert import Bert

LIBRARY, LENGTH = Path(sysconfig.get_path("stdlib")), 40


class AnswerJudge(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.bert = Bert.from_pretrained(args, "minilm", strict=False).bert  # the files have no head
        self.head = torch.nn.Linear(1, 2)

    def forward(self, tokens, texts):
        own = texts[:, None, :, None] == texts[:, None, None, :]  # question and answer do not attend to each other
        hidden = self.bert(tokens, own)
        question, answer = (((texts == number)[..., None] * hidden).sum(1) for number in (0, 1))
        return self.head(5 * cosine_similarity(question, answer)[:, None])


class QuestionsAndAnswers(torch.utils.data.Dataset):
    """Questions about functions; every second answer is the docstring of another function."""

    def __init__(self, folder, args):
        self.tokenizer, self.pairs = load_tokenizer("minilm"), []
        for path in sorted(Path(folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                answer = isinstance(node, ast.FunctionDef) and (ast.get_docstring(node) or "").split("\n\n")[0]
                if answer and len(answer.split()) > 3 and not node.name.startswith("_"):
                    self.pairs.append((f"What does {node.name.replace('_', ' ')} do?", answer))

    def __len__(self):
        return 2 * len(self.pairs)

    def __getitem__(self, index):
        number, is_right = index // 2, 1 - index % 2
        question, answer = self.pairs[number][0], self.pairs[number - 7 * (1 - is_right)][1]
        first, second = self.tokenizer.encode(question), self.tokenizer.encode(answer)[1:]
        tokens = torch.tensor(first + second)[:LENGTH]
        texts = torch.tensor([0] * len(first) + [1] * len(second))[:LENGTH]
        missing = (0, LENGTH - len(tokens))
        return pad(tokens, missing), pad(texts, missing, value=-1), torch.tensor(is_right)


def forward_step(data_iterator, model, args, timers):
    tokens, texts, labels = next(data_iterator)
    logits = model(tokens, texts)
    return cross_entropy(logits, labels), {"right": (logits.argmax(-1) == labels).float()}


def begin_with_similarity(args, model):
    model.head.weight.data = torch.tensor([[-1.0], [1.0]])  # an answer similar to its question is right
    model.head.bias.data = torch.tensor([1.5, -1.5])
    for parameter in model.head.parameters():
        parameter.lr_scale = 100.0


def handle_metrics(metrics):
    return {"accuracy": metrics["right"].mean(), "samples": len(metrics["right"])}


if __name__ == "__main__":
    data = ["--train-data", str(LIBRARY), "--valid-data", str(LIBRARY / "asyncio"), str(LIBRARY / "email")]
    settings = ["--experiment-name", "answers", "--mode", "finetune", "--train-iters", "100", "--batch-size", "16"]
    settings += ["--lr", "3e-5", "--warmup", "0.1", "--eval-interval", "50", "--log-interval", "10"]
    args = get_args([*data, *settings, *sys.argv[1:]])
    training_main(args, AnswerJudge, forward_step, QuestionsAndAnswers, handle_metrics, begin_with_similarity)
