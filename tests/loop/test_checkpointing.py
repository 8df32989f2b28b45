"""Saving and restoring: when a checkpoint is due, what going back restores, and what every rank goes on with."""

import math
import os
import shutil
import signal

import pytest
import torch
from tests.faults.runs import assert_same_end
from tests.faults.two_ranks import Fault, Run, send, share_writing, train_two
from tests.loop.small_runs import PLAIN, at, make, run, store_of
from tests.messages import raises

from trainwright import Hook, Trainer
from trainwright.checkpoint import together
from trainwright.checkpoint.background import BackgroundSaver
from trainwright.config import KeepBest
from trainwright.errors import ConfigError
from trainwright.loop.checkpointing import BestCheckpoint

BACK = "anomalies={non_finite: rollback}"
ALL = "checkpoint.keep_last=null"


# when


class TwoBatches(Trainer):
    def next_train_inputs(self, iterator):
        next(iterator)
        return next(iterator)


@pytest.mark.parametrize(("trainer", "steps"), [(Trainer, [3, 6, 9, 10]), (TwoBatches, [2, 3, 5, 6, 8, 9, 10])])
def test_a_checkpoint_is_due_at_the_step_that_passes_so_many_samples(trainer, steps, tmp_path):
    settings = (*PLAIN, "trainer.max_steps=10", "checkpoint={every_samples: 24, keep_last: 50}")
    run(tmp_path / "run", *settings, trainer=trainer)
    assert store_of(tmp_path / "run").steps() == steps


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_save_after_training_is_there_when_it_returns(asynchronous, tmp_path):
    trainer = run(tmp_path / "run", *PLAIN, "checkpoint.every_steps=100", f"checkpoint.asynchronous={asynchronous}")
    heard = []
    trainer._hook_calls.call = lambda event, *arguments: heard.append((event, *arguments))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    path = trainer.save()
    store = store_of(tmp_path / "run")
    assert (store.steps(), path) == ([6], store.path(6))
    store.verify(6)
    assert heard == [("after_save", path)]


def test_a_checkpoint_whose_save_failed_is_made_when_its_step_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setitem(BackgroundSaver.__init__.__kwdefaults__, "backoff", lambda attempt: 0.0)
    trainer = make(tmp_path / "run", *PLAIN, BACK, ALL, "checkpoint.every_steps=3", "trainer.max_steps=8", bad=[48])
    store, failures = trainer.context.store, []
    write = store.write_snapshot

    def write_snapshot(step, *arguments, **rest):
        if step == 6 and len(failures) < 3:
            failures.append(step)
            raise OSError("no space")
        return write(step, *arguments, **rest)

    store.write_snapshot = write_snapshot
    trainer.train()  # step 7 goes back to 3, for 6 is not there
    assert len(failures) == 3
    assert store_of(tmp_path / "run").steps() == [3, 6, 8]


def test_a_checkpoint_that_was_damaged_is_written_again_when_its_step_is_made_again(tmp_path):
    def damage(trainer):
        path = trainer.context.store.path(4) / "training.json"
        path.write_bytes(path.read_bytes()[:-1])

    settings = (*PLAIN, BACK, ALL, "checkpoint.every_steps=2", "checkpoint.asynchronous=false")
    run(tmp_path / "run", *settings, bad=[40], hooks=[at(5, damage)])  # step 6 goes back to 2
    store = store_of(tmp_path / "run")
    assert store.steps() == [2, 4, 6]
    for step in store.steps():
        store.verify(step)


# what going back restores


class WeightDecays(Hook):
    def __init__(self):
        self.used = []

    def after_step(self):
        self.used.append((self.trainer.step, self.trainer.optimizers["main"].param_groups[0]["weight_decay"]))


@pytest.mark.parametrize("back_to", ["a checkpoint", "a copy"])
def test_going_back_keeps_the_settings_that_a_resumed_run_was_given(back_to, tmp_path):
    def optimizer(weight_decay):
        return f"trainer.optimizer={{type: adamw, lr: 1e-2, weight_decay: {weight_decay}}}"

    snapshots = BACK if back_to == "a checkpoint" else "anomalies={non_finite: rollback, snapshot_every_steps: 1}"
    settings = (*PLAIN, snapshots, "checkpoint.every_steps=4")
    run(tmp_path / "run", *settings, "trainer.max_steps=4", optimizer(0.1))
    decays = WeightDecays()
    run(
        tmp_path / "run",
        *(*settings, "trainer.max_steps=7", optimizer(0.5)),
        bad=[40],
        hooks=[decays],
        accept_changes=True,
    )
    again = [5, 6, 5, 6, 7] if back_to == "a checkpoint" else [5, 6, 6, 7]
    assert decays.used == [(step, 0.5) for step in again]


def test_going_back_takes_the_data_that_a_resumed_run_was_given(tmp_path):
    settings = (*PLAIN[:3], BACK, "checkpoint.every_steps=4")
    run(tmp_path / "run", *settings, "trainer.max_steps=4")
    more = ("trainer.max_steps=7", "data.train.size=60")
    assert run(tmp_path / "run", *settings, *more, bad=[40], accept_changes=True).step == 7


def test_going_back_leaves_nothing_of_an_undone_step_in_the_log(tmp_path):
    class Puts(Trainer):
        def train_step(self, batch):
            if self.train_data.order_position == 32:  # step 4, whose batch is bad
                self.storage.put_metric("note", "of an undone step", 1)
                self.storage.put_scalar("number", 1.0)
            return super().train_step(batch)

        def train_loop_end(self):
            windows.append(super().train_loop_end())
            return windows[-1]

    windows = []
    run(tmp_path / "run", *PLAIN, BACK, "checkpoint.every_steps=2", "log.every_steps=3", trainer=Puts, bad=[24])
    assert len(windows) == 3  # that of step 3 was made again
    assert not any({"note", "number"} & window.keys() for window in windows)
    assert all(math.isfinite(window["loss"]) for window in windows)
    assert windows[0]["loss"] == windows[1]["loss"]


# ranks


FEEDING_BACK = (*PLAIN, "model.type=tests.loop.small_runs:FeedingBack", "checkpoint.every_steps=6")


class NoteBuffers(Hook):
    """Keeps a file of the buffer after each step, one a rank."""

    def after_step(self):
        place = self.trainer.folder / f"buffer-{self.trainer.step}-{self.trainer.ranks.rank}.txt"
        place.write_text(str(self.trainer.model.mean.tolist()), "utf-8")


def test_every_rank_has_the_same_buffers_after_every_step(tmp_path):
    assert train_two(tmp_path / "run", *FEEDING_BACK, hooks=[NoteBuffers]) == [0, 0]
    for step in range(1, 7):
        first, second = ((tmp_path / "run" / f"buffer-{step}-{rank}.txt").read_text("utf-8") for rank in (0, 1))
        assert first == second


def test_buffers_that_a_step_computes_with_are_resumed_exactly_on_two_ranks(tmp_path):
    told = Fault("forward", send(signal.SIGTERM), ranks=(0,), step=3)
    assert train_two(tmp_path / "whole", *FEEDING_BACK) == [0, 0]
    left = Run(tmp_path / "halves", *FEEDING_BACK, faults=[told])
    assert left.wait() == [128 + signal.SIGTERM] * 2, left.said(0)
    assert train_two(tmp_path / "halves", *FEEDING_BACK) == [0, 0]
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


def test_a_buffer_that_is_replaced_is_saved_as_it_is(tmp_path):
    trainer = run(tmp_path / "run", *PLAIN, "model.type=tests.loop.small_runs:Replacing")
    saved = store_of(tmp_path / "run").read(6, "model")["mean"]
    assert torch.equal(saved, trainer.model.mean)
    assert saved.any()


def test_replicas_that_do_not_share_a_folder_leave_the_writing_to_the_first(tmp_path):
    def prepare():
        share_writing()
        together._sees_file = lambda *arguments: os.environ["RANK"] == "0"

    assert train_two(tmp_path / "run", "trainer.max_steps=4", prepare=prepare) == [0, 0]
    path = store_of(tmp_path / "run").path(4)
    assert not list(path.glob("*.rank-*"))
    assert (path / "model.safetensors").exists()


# the best


def best(mode="min"):
    return BestCheckpoint(KeepBest(metric="valid/loss", mode=mode))


@pytest.mark.parametrize(("mode", "step"), [("min", 3), ("max", 2)])
def test_the_best_is_the_first_of_the_best_values_and_never_nan(mode, step):
    so_far = best(mode)
    for number, value in enumerate([float("nan"), 2.0, 1.0, 1.0, 2.0, float("nan")], start=1):
        so_far.update(number, {"valid/loss": value})
    assert so_far.step == step


def test_the_best_is_recalled_from_the_checkpoints_that_are_there():
    so_far = best()
    so_far.update(9, {"valid/loss": 0.1})
    so_far.restore({2: {"valid/loss": 0.5}, 4: {}, 6: {"valid/loss": 0.3}})
    assert (so_far.step, so_far.value) == (6, 0.3)
    so_far.restore({})
    assert (so_far.step, so_far.value) == (None, None)


def test_a_metric_that_no_evaluation_gives_is_rejected_by_name():
    with raises(ConfigError, "valid/loss", "valid/accuracy"):
        best().update(1, {"valid/accuracy": 0.5})


def test_without_a_policy_nothing_is_the_best():
    so_far = BestCheckpoint(None)
    so_far.update(1, {})
    so_far.restore({1: {}})
    assert (so_far.step, so_far.metric) == (None, None)
