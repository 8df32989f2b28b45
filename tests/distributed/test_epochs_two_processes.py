"""Two real processes: the ends of epochs, samplers and a rank without samples, against one process."""

import json
import os

import pytest
from tests.faults.hooks import At
from tests.faults.runs import lines_of, stderr_of
from tests.faults.two_ranks import Run
from torch.utils.data import Sampler

from trainwright import Hook

# 17 samples in batches of 8: the last batch of an epoch has one, so that a rank has none.
COMMON = (
    "data.train={type: tests.project.parts:Points, size: 17}",
    "model.dropout=0.0",
    "trainer.micro_batch_size=2",
    "trainer.max_steps=null",
    "trainer.max_epochs=3",
    "trainer.schedule=null",
    "evaluation={every_epochs: 1}",
    "checkpoint={every_epochs: 1, keep_last: 9}",
    "log={every_steps: 1}",
)
SHORT = (*COMMON, "data.last_batch=short")
SAMPLER = "data.sampler={type: 'torch.utils.data:SubsetRandomSampler', indices: [1, 3, 5, 7, 9, 11, 13, 15, 16]}"
WEIGHTED = f"data.sampler={{type: weighted, weights: {list(range(17))}, num_samples: 17, replacement: false}}"
BATCHES = (
    "data.sampler={type: 'torch.utils.data:BatchSampler', sampler: 'torch.utils.data:RandomSampler', drop_last: false}"
)
STREAM = ("data.train={type: tests.project.parts:PointStream, size: 17}", "trainer.max_steps=50")
MESHES = {"one": (1, "{}"), "two replicas": (2, "{replicate: 2}"), "two shards": (2, "{fsdp: 2}")}
CASES = {
    "short": SHORT,
    "drop": (*COMMON, "data.last_batch=drop"),
    "sampler": (*SHORT, SAMPLER),
    "weighted": (*SHORT, WEIGHTED.replace("num_samples: 17", "num_samples: 16")),
    "batches": (*COMMON, BATCHES),
}


class Events(Hook):
    """Appends the events of each rank to a file."""

    def __init__(self, folder):
        self.folder = folder

    def note(self, event):
        rank = int(os.environ.get("RANK", "0"))
        with (self.folder / f"events-{rank}.txt").open("a") as file:
            file.write(json.dumps([event, self.trainer.epoch, self.trainer.step]) + "\n")

    def before_epoch(self):
        self.note("before")

    def after_epoch(self):
        self.note("after")


class OfRank(Sampler):
    """Reads the rank, as no sampler may."""

    def __iter__(self):
        return iter(range(int(os.environ.get("RANK", "0")), 17))


def train(folder, mesh, *overrides, hooks=()):
    num_ranks, axes = MESHES[mesh]
    return Run(folder, *overrides, f"runtime.mesh={axes}", num_ranks=num_ranks, hooks=hooks).wait()


def assert_close(left, right):
    whole, other = lines_of(left), lines_of(right)
    assert [line["step"] for line in whole] == [line["step"] for line in other]
    for one, two in zip(whole, other, strict=True):
        for name in one.keys() & {"loss", "grad_norm", "valid/loss"}:
            assert one[name] == pytest.approx(two[name], rel=1e-4), (one["step"], name)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_updates_of_one(name, tmp_path):
    assert train(tmp_path / "one", "one", *CASES[name]) == [0]
    assert train(tmp_path / "two", "two replicas", *CASES[name]) == [0, 0]
    assert_close(tmp_path / "one", tmp_path / "two")


def test_shards_make_the_updates_of_one_process_and_one_process_continues_them(tmp_path):
    settings = (*SHORT, SAMPLER)
    assert train(tmp_path / "one", "one", *settings) == [0]
    leave = [lambda: At(3, lambda trainer: trainer.interrupt("enough for now"))]
    train(tmp_path / "two", "two shards", *settings, hooks=leave)
    assert train(tmp_path / "two", "one", *settings) == [0]
    assert_close(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("kind", ["index", "stream"])
def test_epochs_begin_and_end_on_both_ranks_together(kind, tmp_path):
    settings = (*SHORT, *(STREAM if kind == "stream" else ()))
    assert train(tmp_path / "two", "two replicas", *settings, hooks=[lambda: Events(tmp_path)]) == [0, 0]
    events = [(tmp_path / f"events-{rank}.txt").read_text() for rank in (0, 1)]
    assert events[0] == events[1]
    found = [json.loads(line) for line in events[0].splitlines()]
    assert found == [
        [name, epoch, 3 * epoch + add] for epoch in range(3) for name, add in (("before", 0), ("after", 3))
    ]


def test_a_sampler_that_reads_the_rank_is_rejected(tmp_path):
    sampler = "data.sampler={type: 'tests.distributed.test_epochs_two_processes:OfRank'}"
    running = Run(tmp_path / "two", *COMMON, sampler)
    assert running.wait() == [2, 2]
    assert "data.sampler: its passes differ between ranks" in stderr_of(running.place_of_stderr(0))
