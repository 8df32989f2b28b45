"""Runs with optimizers whose state is quantized; test_quantized_optimizers.py starts it in a process of its own."""

import json
import sys
import warnings
from pathlib import Path

import torch

from trainwright import RunConfig, build_trainer

PROJECT = Path(__file__).parents[1] / "project"
OPTIMIZERS = [
    {"type": "torchao.optim:AdamW8bit", "lr": 0.01},
    {"type": "torchao.optim:AdamW4bit", "lr": 0.01},
    {"type": "torchao.optim:AdamWFp8", "lr": 0.01},
    {"type": "bitsandbytes.optim:AdamW8bit", "lr": 0.01, "min_8bit_size": 16},
    {"type": "bitsandbytes.optim:Lion8bit", "lr": 0.001, "min_8bit_size": 16},
]


def train(folder, optimizer, max_steps):
    settings = {
        "name": "run",
        "output_dir": str(folder),
        "data": {"train": {"type": "parts.py:Points", "size": 16}},
        "model": {"type": "parts.py:Net", "width": 2048},
        "trainer": {
            "max_steps": max_steps,
            "global_batch_size": 8,
            "optimizer": optimizer,
            "schedule": {"type": "torch.optim.lr_scheduler:ExponentialLR", "gamma": 0.9},
        },
        "writers": [],
    }
    trainer = build_trainer(RunConfig.from_dict(settings, project_dir=PROJECT))
    trainer.train()
    return trainer


def main(folder):
    results = {}
    for number, optimizer in enumerate(OPTIMIZERS):
        whole = train(folder / f"whole{number}", optimizer, 4)
        train(folder / f"halves{number}", optimizer, 2)
        halves = train(folder / f"halves{number}", optimizer, 4)
        states = [dict(each.model.state_dict()) for each in (whole, halves)]
        kinds = {type(each).__name__ for values in halves.optimizers["main"].state.values() for each in values.values()}
        results[optimizer["type"]] = {
            "is_equal": all(torch.equal(states[0][name], states[1][name]) for name in states[0]),
            "kinds": sorted(kinds),
            "rate": float(halves.optimizers["main"].param_groups[0]["lr"]),
        }
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
