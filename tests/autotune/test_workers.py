"""What `tune batch` and `tune workers` measure, on real runs."""

from pathlib import Path

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright import RunConfig
from trainwright.api.tune import best_micro_batch, tune_micro_batch, tune_workers
from trainwright.autotune.micro_batch import MicroBatchTime, doubling_sizes
from trainwright.autotune.workers import WorkerTime, enough_workers
from trainwright.errors import ConfigError

PROJECT = Path(__file__).parents[1] / "project"


def load(*overrides):
    return RunConfig.load(PROJECT / "run.yaml", ["data.train.size=400", *overrides])


class Limited(nn.Module):
    """A model on a device with memory for six samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels):
        if len(x) > 6:
            raise torch.OutOfMemoryError(f"Tried to allocate {len(x)} samples.")
        return nn.functional.cross_entropy(self.layer(x), labels)


LIMITED = "model={type: 'tests.autotune.test_workers:Limited'}"


def test_sizes_double_and_end_with_the_batch():
    assert [doubling_sizes(size) for size in (1, 8, 12, 7)] == [[1], [1, 2, 4, 8], [1, 2, 4, 12], [1, 7]]


def test_micro_batches_are_measured_until_memory_runs_out(tmp_path):
    seen = []
    overrides = ("trainer.global_batch_size=16", LIMITED, "evaluation={}")
    found = tune_micro_batch(load(*overrides), tmp_path, progress=seen.append)
    assert [each.size for each in found] == [1, 2, 4, 8]
    assert [each.seconds_per_sample is not None for each in found] == [True, True, True, False]
    assert seen == found
    assert best_micro_batch(found).size in (1, 2, 4)
    assert list(tmp_path.rglob("metrics.json")) == []


def test_the_largest_size_may_exceed_the_batch_of_the_run(tmp_path):
    found = tune_micro_batch(load("trainer.micro_batch_size=auto"), tmp_path, largest=32)
    assert [each.size for each in found] == [1, 2, 4, 8, 16, 32]
    assert all(each.peak_bytes for each in found)


def test_a_size_that_is_slightly_slower_and_smaller_is_preferred():
    times = [MicroBatchTime(1, 2.0), MicroBatchTime(2, 1.01), MicroBatchTime(4, 1.0), MicroBatchTime(8, None)]
    assert best_micro_batch(times).size == 2
    assert best_micro_batch([MicroBatchTime(1, None)]) is None


def test_settings_that_contradict_a_choice_of_micro_batches_are_rejected(tmp_path):
    with raises(ConfigError, "optimizer_in_backward"):
        tune_micro_batch(load("trainer.optimizer_in_backward=true", "trainer.max_grad_norm=null"), tmp_path)
    with raises(ConfigError, "budget"):
        tune_micro_batch(load("model.activation_checkpointing={budget: auto}"), tmp_path)


def test_slow_data_is_measured_and_workers_hide_it(tmp_path):
    slow = "data.train={type: tests.autotune.slow_points:SlowPoints, size: 400, seconds: 0.004}"
    alone, two = tune_workers(load(slow), tmp_path, counts=[0, 2], num_steps=10)
    assert alone.wait_seconds >= 8 * 0.004
    assert alone.share > 0.5
    assert two.num_workers == 2
    assert list(tmp_path.rglob("step-*")) == []


def test_arguments_of_workers_are_left_out_without_workers(tmp_path):
    config = load("data.num_workers=1", "data.loader={prefetch_factor: 2}")
    (found,) = tune_workers(config, tmp_path, counts=[0], num_steps=5)
    assert found.num_workers == 0


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ([WorkerTime(0, 0.001, 0.1), WorkerTime(1, 0.0, 0.09)], 0),
        ([WorkerTime(0, 0.05, 0.1), WorkerTime(1, 0.002, 0.06), WorkerTime(2, 0.0, 0.05)], 1),
        ([WorkerTime(0, 0.05, 0.1), WorkerTime(1, 0.03, 0.08)], 1),
    ],
)
def test_the_smallest_number_that_is_enough_is_suggested(times, chosen):
    assert enough_workers(times).num_workers == chosen
