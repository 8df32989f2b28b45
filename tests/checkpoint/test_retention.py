"""Which checkpoints stay."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from trainwright.checkpoint.retention import best_step, is_better, prune, to_delete
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import ConfigError


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    for step, loss in [(10, 3.0), (20, 1.0), (30, math.nan), (40, 2.0), (50, 1.0)]:
        store.write(step, {"model": {"w": torch.full((2,), float(step))}}, metrics={"valid/loss": loss})
    return store


def test_all_but_the_last_and_the_best_are_deleted():
    assert to_delete([10, 20, 30, 40], keep_last=2, best=None) == [10, 20]
    assert to_delete([40, 10, 30, 20], keep_last=2, best=10) == [20]
    assert to_delete([10, 20], keep_last=5, best=None) == []
    assert to_delete([], keep_last=1, best=None) == []


def test_without_keep_last_nothing_is_deleted():
    assert to_delete([10, 20, 30], keep_last=None, best=20) == []


def test_a_keep_last_that_would_delete_the_newest_is_refused():
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_last: 0 would delete"):
        to_delete([10, 20], keep_last=0, best=None)


def test_the_best_step_is_the_earliest_of_equals():
    metrics = {30: {"loss": 1.0}, 10: {"loss": 2.0}, 20: {"loss": 1.0}}
    assert best_step(metrics, metric="loss", mode="min") == 20
    assert best_step(metrics, metric="loss", mode="max") == 10


def test_nan_inf_and_missing_metrics_are_never_best():
    metrics = {10: {"acc": math.nan}, 20: {}, 30: {"acc": math.inf}, 40: {"acc": 0.1}, 50: {"acc": math.nan}}
    assert best_step(metrics, metric="acc", mode="max") == 40
    assert best_step({10: {"acc": math.nan}, 20: {}}, metric="acc", mode="max") is None


def test_better_means_strictly_and_finite():
    assert is_better(1.0, None, "min")
    assert is_better(1.0, math.nan, "max")
    assert is_better(1.0, 2.0, "min")
    assert not is_better(1.0, 2.0, "max")
    assert not is_better(1.0, 1.0, "min")
    assert not is_better(math.nan, None, "min")
    assert not is_better(math.nan, 1.0, "max")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="'lowest'"):
        is_better(1.0, 2.0, "lowest")


def test_prune_keeps_the_newest_and_the_best(store):
    assert prune(store, keep_last=1, metric="valid/loss", mode="min") == [10, 30, 40]
    assert store.steps() == [20, 50]


def test_prune_without_a_metric_keeps_the_last(store):
    assert prune(store, keep_last=2) == [10, 20, 30]
    assert store.steps() == [40, 50]


def test_prune_without_keep_last_keeps_all(store):
    assert prune(store, keep_last=None, metric="valid/loss", mode="min") == []
    assert store.steps() == [10, 20, 30, 40, 50]


def test_a_damaged_manifest_does_not_push_out_an_intact_checkpoint(store, caplog):
    (store.path(50) / "MANIFEST.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert prune(store, keep_last=1) == [10, 20, 30]
    assert store.newest_intact() == 40
    assert "step-00000050" in caplog.text
