"""Which labels supervised fine-tuning accepts, and its accuracy."""

import json
import logging

import pytest
import torch
from tests.messages import check_message, raises

from trainwright import RunConfig, build_trainer
from trainwright.errors import DataError
from trainwright.trainers.sft import check_labels

RUN = """
name: sft
output_dir: {folder}
writers: [json]
log: {{every_steps: 1}}
model: {{type: llama, vocab_size: 260, hidden_size: 16, num_layers: 1, num_heads: 2}}
data:
  train: {{type: chat, path: chats.jsonl, tokenizer: bytes}}
  eval: {{valid: {{type: chat, path: chats.jsonl, tokenizer: bytes}}}}
  collator: {{type: padded, tokenizer: bytes}}
trainer: {{type: sft, max_steps: 2, global_batch_size: 4, optimizer: {{type: adamw, lr: 1.0e-2}}}}
"""


@pytest.fixture
def project(tmp_path):
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "two three"}]
    rows = [{"messages": turns[:1]}, *({"messages": turns * number} for number in (1, 2, 3, 1))]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path))
    return tmp_path


def build(project, *overrides):
    return build_trainer(RunConfig.load(project / "run.yaml", overrides))


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_the_accuracy_is_that_of_all_trained_tokens(project, micro_batch_size):
    trainer = build(project, f"trainer.micro_batch_size={micro_batch_size}", "trainer.optimizer.lr=1.0e-30")
    trainer.train()
    lines = [json.loads(line) for line in (project / "sft" / "metrics.json").read_text().splitlines()]
    correct = count = 0
    with torch.no_grad():
        for sample in trainer.train_data.dataset:
            predicted = trainer.model(sample["input_ids"][None])["logits"][0, :-1].argmax(-1)
            targets = sample["labels"][1:]
            correct += int((predicted == targets).sum())
            count += int((targets != -100).sum())
    assert count == 7 * len("two three<|im_end|>")
    assert lines[-1]["valid/token_accuracy"] == pytest.approx(correct / count)


def test_the_log_says_how_many_tokens_are_trained(project, caplog):
    caplog.set_level(logging.INFO)
    build(project)
    [message] = [message for message in caplog.messages if "first sample" in message]
    check_message(message, len("two three<|im_end|>"), "first sample")


@pytest.mark.parametrize("row", [{"input_ids": [1, 2, 3]}, {"messages": [{"role": "user", "content": "a"}]}])
def test_samples_without_labels_warn(row, project, caplog):
    (project / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    build(project, "data.train={type: json_lines, path: rows.jsonl}", "data.eval={}")
    [message] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    check_message(message, "labels", *row, "data.train.type: chat")


@pytest.mark.parametrize("labels", [[2, 3, -100], [1, 2], [1, 2, 4]])
def test_labels_that_are_not_the_tokens_are_rejected(labels):
    with raises(DataError, "labels", "input_ids", "-100", "shifts"):
        check_labels({"input_ids": [1, 2, 3], "labels": labels})


@pytest.mark.parametrize("labels", [[1, 2, 3], [-100, 2, -100], [-100] * 3])
def test_labels_that_are_tokens_or_ignored_are_accepted(labels):
    check_labels({"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor(labels)})
