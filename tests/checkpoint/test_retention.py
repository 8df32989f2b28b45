"""Which checkpoints stay."""

from __future__ import annotations

import logging
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.checkpoint.retention import Retention, best_step, is_better, metrics_by_step, prune
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config import CheckpointSection
from trainwright.errors import ConfigError


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    for step, loss in [(10, 3.0), (20, 1.0), (30, math.nan), (40, 2.0), (50, 1.0)]:
        store.write(step, {"model": {"w": torch.full((2,), float(step))}}, metrics={"valid/loss": loss})
    return store


def without_metrics(*steps):
    return {step: {} for step in steps}


def test_all_but_the_last_are_deleted():
    assert Retention(2).to_delete(without_metrics(10, 20, 30, 40)) == [10, 20]
    assert Retention(2).to_delete(without_metrics(40, 10, 30, 20)) == [10, 20]
    assert Retention(5).to_delete(without_metrics(10, 20)) == []
    assert Retention(1).to_delete({}) == []


def test_the_best_is_kept():
    metrics = {10: {"loss": 1.0}, 20: {"loss": 2.0}, 30: {"loss": 3.0}}
    assert Retention(1, "loss", "min").to_delete(metrics) == [20]
    assert Retention(1, "loss", "max").to_delete(metrics) == [10, 20]
    assert Retention(1, "accuracy", "max").to_delete(metrics) == [10, 20]


def test_every_nth_is_kept():
    assert Retention(1, keep_every=20).to_delete(without_metrics(5, 10, 20, 30, 40, 50)) == [5, 10, 30]


def test_without_keep_last_nothing_is_deleted():
    assert Retention(None, keep_every=7).to_delete(without_metrics(10, 20, 30)) == []


def test_a_coming_checkpoint_counts_but_does_not_replace_the_newest():
    assert Retention(3).to_delete(without_metrics(10, 20, 30), num_coming=1) == [10]
    assert Retention(1).to_delete(without_metrics(10, 20, 30), num_coming=1) == [10, 20]
    assert Retention(1).to_delete(without_metrics(30), num_coming=5) == []


values = st.floats(allow_nan=True)
some_metrics = st.dictionaries(st.integers(0, 200), st.fixed_dictionaries({}, optional={"loss": values}), max_size=12)


@given(
    some_metrics,
    st.none() | st.integers(1, 5),
    st.none() | st.just("loss"),
    st.sampled_from(["min", "max"]),
    st.none() | st.integers(1, 50),
    st.integers(0, 2),
)
def test_the_newest_the_best_and_the_nth_are_never_deleted(metrics, last, metric, mode, every, coming):
    retention = Retention(last, metric, mode, every)
    deleted = retention.to_delete(metrics, num_coming=coming)
    assert deleted == sorted(set(deleted) & metrics.keys())
    kept = [step for step in sorted(metrics) if step not in deleted]
    assert kept[-1:] == sorted(metrics)[-1:]
    assert retention.best(metrics) not in deleted
    assert every is None or all(step % every for step in deleted)
    assert last is None or len(kept) >= min(len(metrics), last - coming)
    # What stays, stays: asking again deletes nothing more.
    assert retention.to_delete({step: metrics[step] for step in kept}, num_coming=coming) == []


def test_a_keep_last_that_would_delete_the_newest_is_rejected():
    with raises(ConfigError, "checkpoint.keep_last", "0"):
        Retention(0)


def test_a_period_of_nothing_is_rejected():
    with raises(ConfigError, "checkpoint.keep_every", "0"):
        Retention(3, keep_every=0)


def test_the_policy_is_that_of_the_section():
    best = {"metric": "valid/loss", "mode": "max"}
    section = CheckpointSection.model_validate({"keep_last": 4, "keep_best": best, "keep_every": 100})
    assert Retention.of(section) == Retention(4, "valid/loss", "max", 100)
    assert Retention.of(CheckpointSection(keep_last=None)) == Retention(None)


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


def test_an_unknown_mode_is_rejected():
    with raises(ConfigError, "lowest"):
        is_better(1.0, 2.0, "lowest")


def test_prune_keeps_the_newest_and_the_best(store):
    assert prune(store, Retention(1, "valid/loss", "min")) == [10, 30, 40]
    assert store.steps() == [20, 50]


def test_prune_without_a_metric_keeps_the_last(store):
    assert prune(store, Retention(2)) == [10, 20, 30]
    assert store.steps() == [40, 50]


def test_prune_without_keep_last_keeps_all(store):
    assert prune(store, Retention(None, "valid/loss", "min")) == []
    assert store.steps() == [10, 20, 30, 40, 50]


def test_only_committed_ones_count(store):
    (store.path(50) / "MANIFEST.json").unlink()
    (store.folder / ".staging-step-00000060-ab12cd34").mkdir()
    assert list(metrics_by_step(store)) == [10, 20, 30, 40]
    assert prune(store, Retention(1)) == [10, 20, 30]
    assert store.steps() == [40]


def test_a_damaged_manifest_does_not_push_out_an_intact_checkpoint(store, caplog):
    (store.path(50) / "MANIFEST.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert prune(store, Retention(1)) == [10, 20, 30]
    assert store.newest_intact() == 40
    assert "step-00000050" in caplog.text


def test_one_that_cannot_be_deleted_is_named_and_the_others_go(store, caplog, monkeypatch):
    discard = store._discard

    def resist(folder, step):
        if step == 20:
            raise PermissionError(1, "Operation not permitted")
        discard(folder, step)

    monkeypatch.setattr(store, "_discard", resist)
    assert prune(store, Retention(2)) == [10, 30]
    assert "An old checkpoint could not be deleted" in caplog.text
    assert store.steps() == [20, 40, 50]


def test_the_rules_need_no_torch():
    code = "import sys, trainwright.checkpoint.retention; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
