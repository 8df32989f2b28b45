"""Accuracy beside the loss."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright import RunConfig, Task, build_trainer
from trainwright.trainers.classification import ClassificationTrainer

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides):
    return RunConfig.load(
        PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.type=classification", "evaluation={}", *overrides]
    )


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "small" / "metrics.json").read_text().splitlines()]


def test_the_accuracy_of_an_evaluation_is_the_share_of_right_samples(tmp_path):
    trainer = build_trainer(load(tmp_path))
    logs = trainer.train()
    data = trainer.eval_data["valid"].dataset
    with torch.no_grad():
        right = trainer.model.eval()(data.x)["logits"].argmax(-1) == data.y
    assert logs["valid/accuracy"] == pytest.approx(right.double().mean().item())
    assert 0.3 < logs["valid/accuracy"] < 1.0


def test_the_accuracy_of_training_is_over_all_samples_of_the_window(tmp_path):
    right = []

    class Counting(ClassificationTrainer):
        def run_forward(self, batch):
            result = super().run_forward(batch)
            if self.model.training:
                right.extend((result.outputs["logits"].argmax(-1) == batch["labels"]).tolist())
            return result

    # An odd batch in micro-batches: means of unequal pieces.
    overrides = ["trainer.global_batch_size=9", "trainer.micro_batch_size=3", "trainer.max_steps=3"]
    build_trainer(load(tmp_path, *overrides), Counting).train()
    assert len(right) == 27
    assert lines(tmp_path)[-1]["accuracy"] == pytest.approx(sum(right) / 27)


class Given(nn.Module):
    """Gives back the logits that it is given, with a weight so that there is something to train."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits, labels):
        return {"loss": (logits * self.scale).mean(), "logits": logits}


class Fixed(Task):
    samples = ()

    def build_model(self):
        return Given()

    def build_dataset(self, split):
        return list(self.samples) if split == "train" else None


def train_on(tmp_path, logits, labels):
    class Mine(ClassificationTrainer):
        @classmethod
        def build_task(cls, build):
            task = Fixed()
            task.samples = [{"logits": one, "labels": label} for one, label in zip(logits, labels, strict=True)]
            return task

    size = len(labels)
    (tmp_path / "run.yaml").write_text(
        f"name: small\nwriters: [json]\ntrainer: {{max_steps: 1, global_batch_size: {size}, micro_batch_size: {size}, "
        "optimizer: {type: sgd, lr: 0.1}}\n"
    )
    build_trainer(RunConfig.load(tmp_path / "run.yaml", [f"output_dir={tmp_path}"]), Mine).train()
    return lines(tmp_path)[-1]


def test_labels_that_the_loss_ignores_do_not_count(tmp_path):
    logits = torch.eye(3)[torch.tensor([[0, 1], [2, 2]])]
    assert train_on(tmp_path, logits, torch.tensor([[0, -100], [2, 1]]))["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.randn(4, 3), torch.full((4, 3), 1 / 3)),  # soft labels
        (torch.randn(4), torch.tensor([0.0, 1.0, 1.0, 0.0])),  # one score a sample
        (torch.randn(4, 1), torch.tensor([0, 1, 1, 0])),
    ],
)
def test_labels_that_are_no_classes_have_no_accuracy(tmp_path, logits, labels):
    line = train_on(tmp_path, logits, labels)
    assert "loss" in line
    assert "accuracy" not in line
