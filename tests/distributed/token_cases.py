"""Runs on rows with different numbers of labels, in any number of processes: models by name, and what is logged."""

import json
import os

import torch
import torch.nn.functional as F
from tests.distributed.forked_launch import forget_groups
from torch import nn

from trainwright import RunConfig, build_trainer
from trainwright.parallel.mesh import local

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, **NO_DROPOUT}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "llama": SIZES,
    "gpt2": SIZES,
    "bert": SIZES,
    "t5": SIZES,
    "tests.distributed.token_cases:WithCriterion": {},
    "transformers:LlamaForCausalLM": {"vocab_size": 50, **LLAMA},
    "transformers:GPT2LMHeadModel": {"vocab_size": 50, **GPT2},
    "transformers:BertForMaskedLM": {"vocab_size": 50, **BERT},
    "transformers:T5ForConditionalGeneration": {"vocab_size": 50, "decoder_start_token_id": 0, **T5},
}


AXES = ("replicate", "fsdp")


class Rows:
    """Eight rows of 12 tokens: the first has no label, the others from 2 to 12; `empty` rows after these have none."""

    def __init__(self, size=8, empty=0, labelled=True):
        self.labelled = labelled
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, 50, (size + empty, 12), generator=generator)
        self.labels = self.ids.clone()
        for row in range(1, size):
            self.labels[row, 2 + (row * 5) % 11 :] = -100
        self.labels[0] = self.labels[size:] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        sample = {"input_ids": self.ids[index], "labels": self.labels[index]}
        return sample if self.labelled else {"input_ids": self.ids[index]}


class Bigram(nn.Module):
    """A user's model, with a plain loss: a mean over the labels that count."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 50)

    def forward(self, input_ids, labels):
        return {"loss": F.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten())}


class Unlabelled(Bigram):
    """A model of data without labels."""

    def forward(self, input_ids):
        return self.table(input_ids).square().mean()


class WithCriterion(nn.Module):
    """The same, whose loss is its criterion's."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 50)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, input_ids):
        return {"logits": self.table(input_ids).transpose(1, 2)}


class Scores(nn.Module):
    """The same, without a loss: trainer.loss computes it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 50)

    def forward(self, input_ids):
        return self.table(input_ids).transpose(1, 2)


WEIGHTED = {"type": "cross_entropy", "weight": [1.0 + number % 5 for number in range(50)]}


def build(folder, name, model, *overrides, rows=None, **trainer):
    forget_groups()
    path = folder / f"{name}.yaml"
    settings = {
        "name": name,
        "output_dir": str(folder),
        "seed": 1,
        "model": model,
        "data": {"train": {"type": "tests.distributed.token_cases:Rows", **(rows or {})}},
        "trainer": {
            "max_steps": 1,
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "optimizer": {"type": "adamw", "lr": 1e-3},
            **trainer,
        },
        "log": {"every_steps": 1},
        "writers": ["json"],
        "runtime": {"device": "cpu"},
    }
    own = folder / f"{name}-{os.getpid()}"
    own.write_text(json.dumps(settings))  # JSON is YAML
    own.replace(path)  # each rank writes the same, and none reads half a file
    return build_trainer(RunConfig.load(path, overrides))


def train(folder, name, *arguments, **options):
    """Trains a run and returns its log."""
    build(folder, name, *arguments, **options).train()
    return read_log(folder, name)


def read_log(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.json").read_text().splitlines()]


def only_empty_rows(trainer):
    """Makes every label of the run's data one to ignore."""
    trainer.train_data.dataset.labels.fill_(-100)


def state_of(trainer):
    """The weights and the optimizer's state, as one list of numbers."""
    (optimizer,) = trainer.optimizers.values()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return [
        number for each in (*trainer.model.parameters(), *state) for number in local(each.detach()).flatten().tolist()
    ]


def step_on_nothing(folder, name, optimizer, *overrides):
    """Trains two steps, then one on labels that are all ignored; returns whether the state changed, and the log."""
    options = {"optimizer": optimizer, "micro_batch_size": 2}
    trainer = build(folder, name, {"type": "llama", **SIZES}, "trainer.max_steps=2", *overrides, **options)
    trainer.train()
    before = state_of(trainer)
    trainer = build(folder, name, {"type": "llama", **SIZES}, "trainer.max_steps=3", *overrides, **options)
    only_empty_rows(trainer)
    trainer.train()
    return before == state_of(trainer), read_log(folder, name)[-1]


def main(folder):
    """What two ranks show: the first step of every model, and an update without labels."""
    for number, (kind, settings) in enumerate(MODELS.items()):
        train(folder, f"model-{number}", {"type": kind, **settings})
    for axis in AXES:
        scores = {"type": "tests.distributed.token_cases:Scores"}
        train(folder, f"weighted-{axis}", scores, f"runtime.mesh={{{axis}: 2}}", loss=WEIGHTED)
    train(folder, "sharded", {"type": "llama", **SIZES}, "runtime.mesh={fsdp: 2}")
    optimizer = {"type": "adamw", "lr": 0.1, "weight_decay": 0.1}
    unchanged = [step_on_nothing(folder, f"empty-{axis}", optimizer, f"runtime.mesh={{{axis}: 2}}")[0] for axis in AXES]
    (folder / f"unchanged-{os.environ['RANK']}.json").write_text(json.dumps(unchanged))
    try:
        train(folder, "plain", {"type": "tests.distributed.token_cases:Bigram"}, "trainer.micro_batch_size=4")
    except Exception as error:
        (folder / f"plain-{os.environ['RANK']}.json").write_text(json.dumps([type(error).__name__, str(error)]))
