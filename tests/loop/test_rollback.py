"""What a run does about anomalies: where it goes back to, what it counts, and what stays as it was."""

import json
import random
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from tests.faults.runs import assert_same_end
from tests.loop.small_runs import PLAIN, AnomalyRecorder, CountEvaluations, at, be_lazy, lines_of, make, run, store_of
from tests.messages import mentions, raises

from trainwright import Hook, Trainer
from trainwright.checkpoint.background import BackgroundSaver
from trainwright.checkpoint.manifest import UnreachableError
from trainwright.errors import AnomalyError, CheckpointError

BACK = "anomalies={non_finite: rollback}"
SNAPSHOTS = "anomalies={non_finite: rollback, snapshot_every_steps: 4}"
RARE = "checkpoint.every_steps=100"
REPLACING = "tests.loop.small_runs:Replacing"
STREAM = "data.train={type: tests.project.parts:PointStream, size: 40}"


# anomalies that nobody has looked at yet


def test_data_that_ends_behind_an_anomaly_that_nobody_has_seen_is_gone_back_in(tmp_path, monkeypatch):
    settings = (*PLAIN[:3], STREAM, BACK, "trainer.max_steps=100", "checkpoint.every_steps=3", "data.shuffle=false")
    eager = run(tmp_path / "eager", *settings, bad=[32])
    be_lazy(monkeypatch)
    lazy = run(tmp_path / "lazy", *settings, bad=[32])
    assert (lazy.step, lazy.stop_reason) == (eager.step, eager.stop_reason) == (4, "the training data ended")
    assert store_of(tmp_path / "lazy").steps() == [3, 4]
    assert_same_end(tmp_path / "eager", tmp_path / "lazy")


def test_a_skipped_last_update_that_nobody_has_seen_is_told_when_the_data_ends(tmp_path, monkeypatch):
    be_lazy(monkeypatch)
    recorder = AnomalyRecorder()
    settings = (*PLAIN[:3], STREAM, "anomalies={non_finite: skip}", "trainer.max_steps=100", RARE)
    trainer = run(tmp_path / "run", *settings, "log.every_steps=100", bad=[32], hooks=[recorder])
    assert (trainer.step, recorder.anomalies) == (5, [(5, "non_finite")])
    assert all(bool(torch.isfinite(each).all()) for each in store_of(tmp_path / "run").read(5, "model").values())


@pytest.mark.parametrize("anomalies", [BACK, SNAPSHOTS, "anomalies={non_finite: skip}"])
def test_a_device_that_runs_ahead_ends_as_one_that_does_not(anomalies, tmp_path, monkeypatch):
    settings = ("trainer.max_steps=14", "checkpoint.every_steps=5", "log.every_steps=6", "evaluation.every_steps=7")
    run(tmp_path / "eager", *settings, anomalies, bad=[16, 64], hooks=[CountEvaluations()])
    be_lazy(monkeypatch)
    run(tmp_path / "lazy", *settings, anomalies, bad=[16, 64], hooks=[CountEvaluations()])
    assert_same_end(tmp_path / "eager", tmp_path / "lazy")


# where it goes back to


@pytest.mark.parametrize("back_to", [(SNAPSHOTS, RARE), (BACK, "checkpoint.every_steps=4")])
@pytest.mark.parametrize("accept_changes", [False, True])
def test_a_parameter_that_was_unfrozen_after_the_restored_step_is_frozen_again(accept_changes, back_to, tmp_path):
    seen = []

    class Unfreeze(Hook):
        def before_step(self):
            seen.append((self.trainer.step, self.trainer.model.layers[0].weight.requires_grad))

        def after_step(self):
            if self.trainer.step == 5:
                self.trainer.model.layers[0].requires_grad_(True)

    settings = (*PLAIN, *back_to, "model.freeze='layers.0.*'")
    run(tmp_path, *settings, "trainer.max_steps=2")
    run(tmp_path, *settings, "trainer.max_steps=7", bad=[48], hooks=[Unfreeze()], accept_changes=accept_changes)
    frozen, trained = [(2, False), (3, False), (4, False)], [(5, True), (6, True)]
    assert seen == [*frozen, *trained, (4, False), *trained]


@pytest.mark.parametrize("back_to", [(SNAPSHOTS, RARE), (BACK, "checkpoint.every_steps=4"), (BACK, RARE)])
def test_evaluations_of_undone_steps_are_made_again_and_counted_once(back_to, tmp_path):
    counting = CountEvaluations()
    settings = ("trainer.max_steps=9", "evaluation.every_steps=3", "log.every_steps=3")
    run(tmp_path / "run", *settings, *back_to, bad=[56], hooks=[counting])  # step 8: evaluated at 3 and 6 before
    assert counting.count == 3
    assert [line["step"] for line in lines_of(tmp_path / "run") if "valid/loss" in line] == [3, 6, 9]


def test_a_step_that_was_left_before_its_evaluation_is_gone_back_to_and_then_evaluated(tmp_path):
    class Leaves(Trainer):
        def eval_step(self, batch):
            if self.step == 4 and leaves:
                self.interrupt("SIGTERM")
            return super().eval_step(batch)

    settings = (BACK, "trainer.max_steps=8", "checkpoint.every_steps=7", "log.every_steps=8", "model.dropout=0.0")
    leaves = False
    run(tmp_path / "whole", *settings, trainer=Leaves, bad=[40], hooks=[CountEvaluations()])
    leaves = True
    first = run(tmp_path / "halves", *settings, trainer=Leaves, bad=[40], hooks=[CountEvaluations()])
    assert (first.step, first.interrupted, first.state.has_unfinished_step) == (4, True, True)
    leaves = False
    counting, recorder = CountEvaluations(), AnomalyRecorder()
    second = run(tmp_path / "halves", *settings, trainer=Leaves, bad=[40], hooks=[counting, recorder])
    assert (second.step, counting.count, recorder.anomalies) == (8, 2, [(6, "non_finite")])
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


def test_the_copy_that_a_resumed_run_begins_with_holds_its_generators(tmp_path):
    class Draws(Hook):
        def __init__(self):
            self.drawn = {}

        def before_train(self):
            random.random()

        def before_step(self):
            self.drawn.setdefault(self.trainer.step + 1, []).append(random.random())

    def damage(trainer):
        path = trainer.context.store.path(4) / "training.json"
        path.write_bytes(path.read_bytes()[:-1])

    settings = (*PLAIN, BACK, "checkpoint.every_steps=4", "trainer.max_steps=6")
    run(tmp_path / "run", *settings, hooks=[at(4, lambda trainer: trainer.interrupt("SIGTERM"))])
    draws = Draws()
    run(tmp_path / "run", *settings, bad=[40], hooks=[draws, at(5, damage)])  # step 6 goes back to the copy
    assert sorted(draws.drawn) == [5, 6]
    for twice in draws.drawn.values():
        assert twice[0] == twice[1]


def test_going_back_is_no_phase_of_a_step_that_hangs(tmp_path):
    trainer = make(tmp_path / "run", *PLAIN, BACK, "checkpoint.every_steps=4", bad=[40])
    store, phases = trainer.context.store, []
    verify = store.verify

    def noting(step):
        phases.append((step, trainer.heartbeat.current[0]))
        return verify(step)

    store.verify = noting
    trainer.train()
    assert phases == [(4, "save")]


@pytest.mark.parametrize("policy", ["raise", "skip", "rollback"])
def test_a_checkpoint_that_is_being_written_is_waited_for_and_named(policy, tmp_path):
    settings = (*PLAIN, f"anomalies={{non_finite: {policy}}}", "checkpoint.every_steps=3")
    trainer = make(tmp_path / "run", *settings, bad=[24])
    store = trainer.context.store
    write = store.write_snapshot

    def write_slowly(*arguments, **rest):
        time.sleep(0.1)
        return write(*arguments, **rest)

    store.write_snapshot = write_slowly
    with raises(AnomalyError, "00000003") if policy == "raise" else nullcontext():
        trainer.train()
    bundle = tmp_path / "run" / "anomalies" / "step-00000004" / "anomaly.json"
    assert json.loads(bundle.read_text("utf-8"))["newest_checkpoint"] == "step-00000003"


def test_an_anomaly_is_heard_of_though_saving_failed_too(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(BackgroundSaver.__init__.__kwdefaults__, "backoff", lambda attempt: 0.0)
    trainer = make(tmp_path / "run", *PLAIN, "checkpoint={every_steps: 3, max_failures: 1}", bad=[24])

    finish, is_waited_for = trainer._checkpointing.finish, threading.Event()

    def write_snapshot(*arguments, **rest):
        is_waited_for.wait()
        raise OSError("no space")

    def noting(**rest):
        if trainer.step == 4:
            is_waited_for.set()
        return finish(**rest)

    trainer.context.store.write_snapshot = write_snapshot
    trainer._checkpointing.finish = noting
    with raises(AnomalyError, "4"):
        trainer.train()
    assert "Saving failed too: " in caplog.text


def test_without_an_earlier_state_the_run_ends_with_the_anomaly(tmp_path):
    trainer = make(tmp_path / "run", *PLAIN, BACK, bad=[0])
    trainer._anomalies.take_snapshot = lambda *_: None
    with raises(AnomalyError, "1"):
        trainer.train()


# what is counted, and what stays


def test_a_skipped_update_that_is_met_again_after_going_back_counts_once(tmp_path):
    recorder = AnomalyRecorder()
    spikes = "anomalies={non_finite: skip, spike: rollback, spike_window: 8, spike_threshold: 1000, max_anomalies: 2}"
    settings = (*PLAIN, spikes, "trainer.max_steps=14", "checkpoint.every_steps=8")
    run(tmp_path / "run", *settings, bad=[72, 96], times={96: 1e6}, hooks=[recorder])
    assert recorder.anomalies == [(10, "non_finite"), (13, "spike"), (10, "non_finite")]
    assert store_of(tmp_path / "run").read(14, "training")["anomalies"]["num_anomalies"] == 2
    assert len(list((tmp_path / "run" / "anomalies").iterdir())) == 2


def test_too_many_anomalies_end_the_run_though_it_goes_back_each_time(tmp_path):
    settings = (*PLAIN, "anomalies={non_finite: rollback, max_anomalies: 2}", "checkpoint.every_steps=2")
    with raises(AnomalyError, "3", "anomalies.max_anomalies", "2"):
        run(tmp_path / "run", *settings, bad=[24, 32, 40])


class NanInputs(Trainer):
    def forward(self, **batch):
        if self.step == 3 and self.model.training:
            batch["x"] = batch["x"] * float("nan")
        return super().forward(**batch)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_skipped_update_leaves_a_buffer_that_is_replaced_as_it_was(is_lazy, tmp_path, monkeypatch):
    if is_lazy:
        be_lazy(monkeypatch)
    means = []

    class Notes(Hook):
        def after_step(self):
            means.append(self.trainer.model.mean.clone())

    settings = (*PLAIN, "anomalies={non_finite: skip}", "checkpoint.every_steps=4", f"model.type={REPLACING}")
    run(tmp_path / "run", *settings, trainer=NanInputs, hooks=[Notes()])
    assert torch.equal(means[2], means[3])
    assert not torch.equal(means[3], means[4])
    assert torch.equal(store_of(tmp_path / "run").read(4, "model")["mean"], means[3])


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(UnreachableError("no network"), marks=pytest.mark.slow),  # five seconds of retries
        *(CheckpointError("no"), OSError("stale handle")),
    ],
)
def test_a_store_that_cannot_be_listed_in_an_anomaly_does_not_end_the_run(error, tmp_path, caplog):
    def steps():
        raise error

    class Away(Hook):
        """The store is away for the length of one step."""

        def before_step(self):
            store = self.trainer.context.store
            if self.trainer.step == 4:
                store.steps = steps
            else:
                vars(store).pop("steps", None)

    settings = (*PLAIN, "anomalies={non_finite: skip}", "checkpoint.every_steps=3")
    trainer = run(tmp_path / "run", *settings, bad=[32], hooks=[Away()])
    assert trainer.step == 6
    assert mentions(caplog.text, error)


def test_a_store_that_cannot_be_listed_lets_the_run_go_back_to_its_copy(tmp_path, caplog):
    def away(trainer):
        def steps():
            raise OSError("stale handle")

        trainer.context.store.steps = steps

    def back(trainer):
        del trainer.context.store.steps

    class Returns(Hook):
        def on_anomaly(self, anomaly):
            self.is_gone = True

        def before_step(self):
            if getattr(self, "is_gone", False) and "steps" in vars(self.trainer.context.store):
                back(self.trainer)

    trainer = run(tmp_path / "run", *PLAIN, SNAPSHOTS, bad=[40], hooks=[at(6, away), Returns()])
    assert trainer.step == 6
    assert "Rolled back to step 4. Data positions 40 to 47 are skipped." in caplog.text
