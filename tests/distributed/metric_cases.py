"""Evaluations with built-in and torchmetrics' metrics; test_metrics_two_processes.py compares them with torchmetrics.

The model has no randomness, so that a test computes each metric of the whole set in one process by itself.
"""

import json
from pathlib import Path

import torch
from torch import nn

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.parallel import processes

SIZES = {"odd": 13, "one": 1}
"""The sets: one that two ranks cannot share equally, and one that a rank sees nothing of."""
WORDS = ("the", "cat", "sat", "on", "a", "mat", "dog", "ran")


def drawn(index, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + index))


def text(index, length):
    return " ".join(WORDS[int(each)] for each in drawn(index, length).mul(3).abs().long() % len(WORDS))


def sample(index):
    labels = drawn(index + 500, 4).mul(2).abs().long() % 6
    labels[index % 4] = -100
    return {
        "x": drawn(index, 6),
        "classes": torch.tensor(index * 7 % 6),
        "is_positive": torch.tensor(float(index % 3 == 0)),
        "columns": (drawn(index + 900, 3) > 0).float(),
        "target": drawn(index + 300, 1)[0],
        "tokens": labels,
        "number": torch.tensor(index),
    }


class Samples(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return sample(index)


class Heads(nn.Module):
    """Fixed scores of every kind; a parameter that adds nothing is trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def outputs(self, x):
        return {
            "logits": x * 2,
            "score": x[:, 0] * 0.4 + 0.5,  # in one batch all inside of 0 to 1, in another not
            "scores": x[:, :3],
            "value": x[:, 1:2],
            "token_logits": torch.sin(x[:, None, :] * torch.arange(1, 5)[:, None]) * 3,
        }

    def forward(self, x, number, **labels):
        return {"loss": x.mean() * self.weight, **self.outputs(x)}


class Writes(Trainer):
    """Evaluates with texts: those that the model wrote, and references that are not part of the batch."""

    def next_eval_inputs(self, iterator):
        batch, logs = super().next_eval_inputs(iterator)
        return batch, {**logs, "references": [[text(each, 7), text(each + 50, 6)] for each in batch["number"].tolist()]}

    def eval_step(self, batch):
        logs = super().eval_step(batch)
        logs["predictions"] = [text(each + 1, 7) for each in batch["number"].tolist()]
        return logs


METRICS = {
    "top3": {"type": "top_k_accuracy", "k": 3, "labels": "classes"},
    "f1": {"type": "f1", "labels": "classes"},
    "f1_each": {"type": "f1", "labels": "classes", "average": "none"},
    "precision": {"type": "precision", "labels": "classes", "average": "weighted"},
    "recall": {"type": "recall", "outputs": "score", "labels": "is_positive"},
    "f1_columns": {"type": "f1", "outputs": "scores", "labels": "columns", "average": "micro"},
    "f1_tokens": {"type": "f1", "outputs": "token_logits", "labels": "tokens"},
    "auroc": {"type": "auroc", "labels": "classes"},
    "auroc_binary": {"type": "auroc", "outputs": "score", "labels": "is_positive"},
    "perplexity": {"type": "perplexity", "outputs": "token_logits", "labels": "tokens", "shift": False},
    "perplexity_next": {"type": "perplexity", "outputs": "token_logits", "labels": "tokens", "shift": True},
    "mse": {"type": "mse", "outputs": "value", "labels": "target"},
    "rmse": {"type": "mse", "outputs": "value", "labels": "target", "squared": False},
    "mae": {"type": "mae", "outputs": "value", "labels": "target"},
    "bleu": {"type": "bleu", "outputs": "predictions", "labels": "references", "n_gram": 2},
    "rouge": {"type": "rouge", "outputs": "predictions", "labels": "references"},
    "pearson": {"type": "torchmetrics.regression:PearsonCorrCoef", "outputs": "first", "labels": "target"},
    "collection": {"type": "tests.distributed.metric_cases:collection", "labels": "classes"},
}


def collection():
    """Three metrics of torchmetrics, two of which share their state."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassRecall

    options = {"num_classes": 6, "average": "micro"}
    metrics = [MulticlassAccuracy(**options), MulticlassRecall(**options), MulticlassAUROC(num_classes=6)]
    return MetricCollection(metrics)


class First(Writes):
    def eval_step(self, batch):
        logs = super().eval_step(batch)
        logs.outputs = {**logs.outputs, "first": batch["x"][:, 0].contiguous()}
        return logs


def main(folder, mesh=None):
    """Evaluates the sets; the first rank writes the values."""
    config = RunConfig.from_dict(
        {
            "name": "metrics",
            "output_dir": str(folder),
            "model": {"type": "tests.distributed.metric_cases:Heads"},
            "data": {
                "train": {"type": "tests.distributed.metric_cases:Samples", "size": 8},
                "eval": {
                    name: {"type": "tests.distributed.metric_cases:Samples", "size": size}
                    for name, size in SIZES.items()
                },
            },
            "trainer": {
                "max_steps": 1,
                "global_batch_size": 4,
                "optimizer": {"type": "sgd", "lr": 0.1},
            },
            "evaluation": {"batch_size": 4, "metrics": METRICS},
            "writers": [],
            "runtime": {"device": "cpu", **({"mesh": mesh} if mesh else {})},
        }
    )
    logs = build_trainer(config, First).train()
    if processes.rank_and_size()[0] == 0:
        Path(folder, "results.json").write_text(json.dumps(logs))
