"""Compares the rate that `trainwright tune lr` suggests with a grid of rates, on four small problems.

    python benchmarks/tune_lr.py                # measures; a few minutes on one CPU core
    python benchmarks/tune_lr.py --only sgd     # one problem
    python benchmarks/tune_lr.py --summary      # writes results/tune_lr.md from results/tune_lr.json

Each problem is trained with every rate of the grid, two per decade, and with the suggestion. The loss is the last one
of the validation set. The suggestion comes from the range test with its defaults.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
from pathlib import Path

import torch
from torch import nn

from trainwright import RunConfig
from trainwright.api.run import run_experiment
from trainwright.api.tune import tune_learning_rate

RESULTS = Path(__file__).parent / "results"
GRID = [round(10 ** (power / 2), 12) for power in range(-10, 3)]

DIGITS = {
    "train": {"type": "digits", "part": "train"},
    "eval": {"valid": {"type": "digits", "part": "valid"}},
    "collator": {"type": "image", "mean": 0.3, "std": 0.4},
}


class Perceptron(nn.Module):
    """Two hidden layers on the pixels of a digit."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, pixel_values, labels=None):
        logits = self.layers(pixel_values)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


def perceptron(optimizer):
    return {
        "model": {"type": f"{Path(__file__).name}:Perceptron"},
        "data": DIGITS,
        "trainer": {
            "max_steps": 300,
            "global_batch_size": 32,
            "optimizer": optimizer,
            "schedule": {"type": "cosine", "warmup_steps": 20},
        },
    }


VIT = {
    "model": {
        "type": "vit",
        "num_labels": 10,
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "initializer_range": 0.1,
    },
    "data": DIGITS,
    "trainer": {
        "type": "classification",
        "max_steps": 300,
        "global_batch_size": 32,
        "max_grad_norm": 1.0,
        "optimizer": {"type": "adamw", "lr": 1e-3, "weight_decay": 0.05},
        "schedule": {"type": "cosine", "warmup_steps": 20},
    },
}
SOURCE = {"type": "stdlib_code", "sequence_length": 64, "vocab_size": 512}
LANGUAGE_MODEL = {
    "model": {
        "type": "llama",
        "preset": "tiny",
        "vocab_size": 512,
        "hidden_size": 64,
        "num_layers": 2,
        "max_positions": 64,
    },
    "data": {"train": {**SOURCE, "part": "train"}, "eval": {"valid": {**SOURCE, "part": "valid"}}},
    "trainer": {
        "type": "language_model",
        "max_steps": 200,
        "global_batch_size": 16,
        "max_grad_norm": 1.0,
        "optimizer": {"type": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        "schedule": {"type": "cosine", "warmup_steps": 20},
    },
    "evaluation": {"max_batches": 10},
}
PROBLEMS = {
    "digits, vision transformer, adamw": VIT,
    "source code, Llama, adamw": LANGUAGE_MODEL,
    "digits, perceptron, sgd": perceptron({"type": "torch.optim:SGD", "lr": 1e-3, "momentum": 0.9}),
    "digits, perceptron, adamw": perceptron({"type": "adamw", "lr": 1e-3}),
}


def config_of(problem, folder, **overrides):
    settings = {
        "name": "run",
        "seed": 1,
        "output_dir": str(folder),
        "checkpoint": {"every_steps": None},
        "writers": [],
        "runtime": {"device": "cpu"},
        "anomalies": {"non_finite": "skip", "max_anomalies": 1000},
        **PROBLEMS[problem],
    }
    texts = [f"{name}={value}" for name, value in overrides.items()]
    return RunConfig.from_dict(settings, texts, project_dir=Path(__file__).parent)


def final_loss(problem, rate):
    """Trains with this rate; returns the last validation loss, infinite if training diverged."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _, logs = run_experiment(config_of(problem, folder, **{"trainer.optimizer.lr": rate}))
        except Exception as error:
            print(f"  {rate:g}: {type(error).__name__}")
            return math.inf
    loss = logs["valid/loss"]
    return loss if math.isfinite(loss) else math.inf


def measure(problem):
    with tempfile.TemporaryDirectory() as folder:
        result, _ = tune_learning_rate(config_of(problem, folder), Path(folder))
    grid = {}
    for rate in GRID:
        grid[rate] = final_loss(problem, rate)
        print(f"  {rate:.1e}: {grid[rate]:.4f}", flush=True)
    found = result.suggestion.rate
    return {
        "rates": result.rates,
        "losses": result.losses,
        "diverged": result.diverged,
        "grid": [[rate, loss if math.isfinite(loss) else None] for rate, loss in grid.items()],
        "suggested": found,
        "loss_with_suggestion": None if found is None else final_loss(problem, found),
    }


def summarize(found):
    lines = [
        "# The rate that `trainwright tune lr` suggests, compared with a grid",
        "",
        "```",
        "OMP_NUM_THREADS=1 python benchmarks/tune_lr.py",
        "```",
        f"CPU, 1 thread, torch {torch.__version__}. The grid has two rates per decade, from 1e-5 to 10.",
        "Every run has a warm-up of 20 steps and a cosine schedule: 200 steps for Llama, 300 for others. The loss is",
        "the last one of the validation set. Good rates are those of the grid within 25 % of its lowest loss.",
        "",
        "| problem | suggested rate | loss with it | best rate of the grid | its loss | good rates |",
        "|---|---|---|---|---|---|",
    ]
    for problem, each in found.items():
        grid = [(rate, loss) for rate, loss in each["grid"] if loss is not None]
        rate, best = min(grid, key=lambda pair: pair[1])
        good = [rate for rate, loss in grid if loss <= 1.25 * best]
        lines.append(
            f"| {problem} | {each['suggested']:.1e} | {each['loss_with_suggestion']:.3f} | {rate:.1e} | {best:.3f} | "
            f"{min(good):.0e} to {max(good):.0e} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("trainwright").setLevel(logging.ERROR)
    path = RESULTS / "tune_lr.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for problem in PROBLEMS:
        if not options.summary and options.only in problem:
            print(problem, flush=True)
            found[problem] = measure(problem)
            path.write_text(json.dumps(found, indent=1) + "\n")
    text = summarize(found)
    (RESULTS / "tune_lr.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
