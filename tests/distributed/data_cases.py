"""What two processes train over every kind of data, undisturbed and in two parts; run by test_data_two_processes.py."""

import json
import os
import signal
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.data.kinds import SOURCES  # noqa: E402

from trainwright import Hook, RunConfig, Trainer, build_trainer  # noqa: E402
from trainwright.data.collators import Stack  # noqa: E402

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


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
        self.given = [*getattr(self, "given", []), *batch["x"][: self.samples_in_hand, 0].tolist()]
        return super().train_step(batch)


def load(folder, name, *overrides):
    common = (f"output_dir={folder}", f"name={name}", "data.shuffle_buffer=20", "trainer.micro_batch_size=2")
    mesh = f"runtime.mesh={{replicate: {WORLD}}}"
    return RunConfig.load(ROOT / "tests/project/run.yaml", (*common, mesh, "evaluation.metrics={}", *overrides))


def main(folder):
    results = {}
    for number, source in enumerate(SOURCES):
        for workers in (0, 2):
            overrides = (*SOURCES[source], f"data.workers={workers}")
            build_trainer(load(folder, f"whole-{number}-{workers}", *overrides)).train()
            stop = f"hooks=[{{type: {__file__}:StopAtFour}}]"
            build_trainer(load(folder, f"parts-{number}-{workers}", *overrides, stop)).train()
            build_trainer(load(folder, f"parts-{number}-{workers}", *overrides)).train()
    # Shards of 23 rows and 2 ranks: one rank runs out before the other.
    for name in ("PointStream", "ShardedPoints"):
        train = f"data.train={{type: parts.py:{name}, size: 23}}"
        uneven = build_trainer(load(folder, f"uneven-{name}", train, "data.eval={}", "model.dropout=0.0"), Watched)
        uneven.train()
        results[name] = [
            uneven.ranks.gather(uneven.given),
            uneven.ranks.gather(uneven.step),
            uneven.train_data.position,
        ]
        own = torch.cat([parameter.detach().flatten() for parameter in uneven.model.parameters()])
        results[f"{name} equal"] = all(torch.equal(own, other) for other in uneven.ranks.gather(own))
    if RANK == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
    from trainwright.parallel.processes import leave

    leave()
