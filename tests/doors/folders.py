"""Small projects in folders, as a user keeps them: written, trained and looked at by the tests of the doors."""

import json
from pathlib import Path
from textwrap import dedent

import torch

from trainwright import RunConfig, build_trainer
from trainwright.checkpoint.store import CheckpointStore

TIMED = ("_per_second", "_per_step", "slowest_rank_share", "hours")


def write(folder, files):
    """Writes the files of a project: path → text."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return folder


def load(folder, *overrides, file="run.yaml"):
    """The config of a project, whose runs land in its folder `runs`."""
    return RunConfig.load(folder / file, [f"output_dir={folder / 'runs'}", *overrides])


def train(folder, *overrides, trainer_class=None):
    """Trains a project's run, or goes on with it, and returns the trainer."""
    trainer = build_trainer(load(folder, *overrides), trainer_class)
    trainer.train()
    return trainer


def lines(folder, name="mine"):
    """The lines of a run's log without its clock."""
    written = (folder / "runs" / name / "metrics.json").read_text("utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.endswith(TIMED)} for line in written]


def store_of(folder, name="mine") -> CheckpointStore:
    """The checkpoints of a run."""
    return CheckpointStore(Path(folder) / "runs" / name / "checkpoints")


def equal_weights(one, other):
    """Do two models have equal weights, bit for bit?"""
    weights, others = one.state_dict(), other.state_dict()
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
