"""Small projects in folders, as a user keeps them: written, trained and looked at by the tests of the APIs."""

import json
import os
from pathlib import Path
from textwrap import dedent

import torch
from tests.faults.runs import fork, stderr_of
from tests.faults.two_ranks import free_port

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


def on_two_ranks(folder, act):
    """Calls `act(rank)` in two forked children that are the ranks of one run; both must end well."""
    port = free_port()

    def prepare(rank):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")

    places = [folder / f"rank-{rank}" for rank in range(2)]
    children = [fork(lambda rank=rank: act(rank), places[rank], lambda rank=rank: prepare(rank)) for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0], [stderr_of(place)[-3000:] for place in places]
