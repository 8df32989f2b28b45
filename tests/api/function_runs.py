"""Small runs by functions; and those that test_swissarmytransformer_ranks.py repeats on two processes."""

import json
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from trainwright import get_args, training_main


class Classifier(torch.nn.Module):
    def __init__(self, args=None, width=8):
        super().__init__()
        self.args = args
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in "12")
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Points(Dataset):
    """Points with their classes, as tuples; the path says how many there are, and an offset."""

    def __init__(self, path, args=None):
        self.path = path
        size, _, self.first = str(path).partition("+")
        self.size, self.first = int(size), int(self.first or 0)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        number = self.first + index
        x = torch.sin(torch.arange(4) * (number + 1.0))
        return x, torch.tensor(number % 3), torch.tensor(number)


def forward_step(data_iterator, model, args, timers):
    timers("batch generator").start()
    x, labels, _ = next(data_iterator)
    timers("batch generator").stop()
    logits = model(x)
    return cross_entropy(logits, labels), {"acc": (logits.argmax(-1) == labels).float().mean()}


def flags(*words):
    always = ["--train-data", "24", "--batch-size", "4", "--lr", "0.01", "--log-interval", "1", "--device", "cpu"]
    return get_args([*always, *words])


def run(*words, model_cls=Classifier, forward_step_function=forward_step, create=Points, args=None, **functions):
    args = args or flags(*words)
    return training_main(args, model_cls, forward_step_function, create, **functions)


def lines(name="run", folder="runs"):
    return [json.loads(line) for line in (Path(folder) / name / "metrics.json").read_text("utf-8").splitlines()]


def losses(name="run", folder="runs"):
    return [line["loss"] for line in lines(name, folder) if "loss" in line]


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def step_of_cases(data_iterator, model, args, timers):
    """A step whose second update has a metric that is infinite on one rank, and one that only one rank has."""
    step_of_cases.calls += model.training
    x, labels, numbers = next(data_iterator)
    losses = cross_entropy(model(x), labels, reduction="none")
    is_last_rank = args.rank == args.world_size - 1
    metrics = {"rank": torch.tensor(float(args.rank))} if model.training else {"number": numbers}
    if is_last_rank and model.training:
        metrics["of_last"] = torch.tensor(5.0)
        metrics["odd"] = torch.tensor(float("inf") if args.spoil and step_of_cases.calls == 2 else 1.0)
    return losses.mean(), metrics


def run_cases(folder, batch_size):
    """The runs of which test_swissarmytransformer_ranks.py compares one process and two."""
    gathered = {}
    cases = {"zero0": "0", "zero2": "2", "zero3": "3", "spoilt": "0"}
    for name, stage in cases.items():
        step_of_cases.calls = 0
        given = ["--experiment-name", name, "--save", str(folder), "--train-iters", "4", "--valid-data", "9+50"]
        args = flags(
            *given, "--zero-stage", stage, "--batch-size", str(batch_size), "--eval-batch-size", str(batch_size)
        )
        args.spoil = name == "spoilt"

        def handle(metrics, name=name):
            gathered[name] = metrics["number"].tolist()
            return {"sum": metrics["number"].sum()}

        torch.manual_seed(5)
        training_main(args, Classifier(), step_of_cases, Points, handle)
    args = flags("--save", str(folder), "--train-iters", "1")
    args.experiment_name = f"at-{time.time_ns()}-{args.rank}"
    training_main(args, Classifier(), forward_step, Points)
    return gathered
