"""What two processes train over every kind of data, undisturbed and in two parts; for test_data_two_processes.py."""

import json
import os
import signal
from pathlib import Path

import torch
from tests.data.kinds import SOURCES
from tests.distributed.forked_launch import forget_groups

from trainwright import Hook, RunConfig, Trainer, build_trainer
from trainwright.data.collators import Stack
from trainwright.parallel import processes

PROJECT = Path(__file__).parents[1] / "project"
WITH_WORKERS = ("a plain iterable that ends", "a mixture of streams")
RUNS = [(source, 2 if source in WITH_WORKERS else 0) for source in SOURCES]
"""Kinds of data and numbers of workers; in one process every kind is tried with and without them."""
OTHER_RUNS = [(source, 0 if source in WITH_WORKERS else 2) for source in SOURCES]


class StopAtFour(Hook):
    def after_step(self):
        if self.trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


class Noting(Stack):
    """Remembers the first value of each sample."""

    def __init__(self):
        self.seen = []

    def __call__(self, samples):
        self.seen.append([sample["x"][0].item() for sample in samples])
        return super().__call__(samples)


class Watched(Trainer):
    """Counts the samples that it was given."""

    @classmethod
    def build_collator(cls, build):
        return Noting()

    def train_step(self, batch):
        self.given = [*getattr(self, "given", []), *batch["x"][: self.batch.num_samples, 0].tolist()]
        return super().train_step(batch)


def load(folder, name, *overrides):
    common = (f"output_dir={folder}", f"name={name}", "data.shuffle_buffer=20", "trainer.micro_batch_size=2")
    mesh = f"runtime.mesh={{replicate: {processes.world_size()}}}"
    return RunConfig.load(PROJECT / "run.yaml", (*common, mesh, "evaluation.metrics={}", *overrides))


def train_by(config):
    forget_groups()
    build_trainer(config).train()


def main(folder, runs):
    results = {}
    for number, (source, workers) in enumerate(runs):
        overrides = (*SOURCES[source], f"data.num_workers={workers}")
        train_by(load(folder, f"whole-{number}", *overrides))
        train_by(load(folder, f"parts-{number}", *overrides, f"hooks=[{{type: {__file__}:StopAtFour}}]"))
        train_by(load(folder, f"parts-{number}", *overrides))
    # Shards of 23 rows and 2 ranks: one rank runs out before the other.
    for name in ("PointStream", "ShardedPoints"):
        train = f"data.train={{type: parts.py:{name}, size: 23}}"
        uneven = build_trainer(load(folder, f"uneven-{name}", train, "data.eval={}", "model.dropout=0.0"), Watched)
        uneven.train()
        results[name] = [
            uneven.ranks.gather(uneven.given),
            uneven.ranks.gather(uneven.step),
            uneven.train_data.samples_seen,
        ]
        own = torch.cat([parameter.detach().flatten() for parameter in uneven.model.parameters()])
        results[f"{name} equal"] = all(torch.equal(own, other) for other in uneven.ranks.gather(own))
    if processes.rank_and_size().rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))
