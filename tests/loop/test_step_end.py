"""The end of a step: what is looked at, evaluated, written and saved, also where the run goes back meanwhile."""

import pytest
from tests.faults.runs import assert_same_end
from tests.faults.two_ranks import Run
from tests.loop.small_runs import PLAIN, CountEvaluations, at, be_lazy, lines_of, make, run, store_of

from trainwright import Hook, Trainer
from trainwright.errors import AnomalyError

EVERY_FOUR = ("log.every_steps=4", "evaluation.every_steps=4", "trainer.max_steps=12", "checkpoint.keep_last=50")
BACK_TO = {
    "a copy": ("anomalies={non_finite: rollback, snapshot_every_steps: 4}", "checkpoint.every_steps=100"),
    "a checkpoint": ("anomalies={non_finite: rollback}", "checkpoint.every_steps=4"),
    "a copy beside a checkpoint": (
        "anomalies={non_finite: rollback, snapshot_every_steps: 4}",
        "checkpoint.every_steps=4",
    ),
    "the start": ("anomalies={non_finite: rollback}", "checkpoint.every_steps=100"),
}


def interrupt(trainer):
    trainer.interrupt("SIGTERM")


def stop(trainer):
    trainer.stop("enough")


# requests that come in the step in which the run goes back


@pytest.mark.parametrize("back_to", BACK_TO)
def test_a_run_told_to_leave_while_it_goes_back_saves_that_state_and_goes_on_as_if_it_had_not_left(back_to, tmp_path):
    settings, begun = (*EVERY_FOUR, *BACK_TO[back_to]), 0 if back_to == "the start" else 4
    run(tmp_path / "whole", *settings, bad=[40], hooks=[CountEvaluations()])
    first = run(tmp_path / "halves", *settings, bad=[40], hooks=[CountEvaluations(), at(6, interrupt)])
    assert (first.step, first.interrupted, first.stop_reason) == (begun, True, "SIGTERM")
    store = store_of(tmp_path / "halves")
    assert store.steps() == [begun]
    assert store.read(begun, "training")["data"]["left_out"]
    assert store.metrics(begun).keys() == ({"valid/loss", "valid/accuracy"} if begun else set())
    counting = CountEvaluations()
    second = run(tmp_path / "halves", *settings, bad=[40], hooks=[counting])
    assert (second.step, counting.count) == (12, 3)
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.parametrize("back_to", BACK_TO)
def test_a_run_that_is_to_stop_while_it_goes_back_ends_with_that_step(back_to, tmp_path):
    counting, begun = CountEvaluations(), 0 if back_to == "the start" else 4
    trainer = run(tmp_path / "run", *EVERY_FOUR, *BACK_TO[back_to], bad=[40], hooks=[counting, at(6, stop)])
    assert (trainer.step, trainer.is_finished, trainer.interrupted) == (begun, True, False)
    assert trainer.stop_reason == "enough"
    assert (store_of(tmp_path / "run").steps(), counting.count) == ([begun], 1)
    evaluated = [line for line in lines_of(tmp_path / "run") if "valid/loss" in line]
    # That step was not evaluated again if it had been.
    assert trainer.eval_logs == {name: value for name, value in evaluated[-1].items() if "/" in name}
    assert [line["step"] for line in evaluated][-1] == begun
    assert make(tmp_path / "run", *EVERY_FOUR, *BACK_TO[back_to]).is_finished


def test_a_stop_while_the_run_goes_back_into_a_log_window_writes_what_it_holds(tmp_path):
    settings = (*PLAIN, "anomalies={non_finite: rollback, snapshot_every_steps: 5}", "checkpoint.every_steps=100")
    run(tmp_path / "run", *settings, "trainer.max_steps=12", bad=[40], hooks=[at(6, stop)])
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [3, 5]


# saves that are asked for


def test_a_save_that_was_asked_for_in_an_undone_step_is_forgotten(tmp_path):
    settings = (*PLAIN, "anomalies={non_finite: rollback}", "checkpoint={every_steps: 3, keep_last: 9}")
    trainer = run(tmp_path / "run", *settings, bad=[32], hooks=[at(5, lambda trainer: trainer.save())])
    assert store_of(tmp_path / "run").steps() == [3, 6]
    assert trainer.step == 6


class SaveOnOneRank(Hook):
    rank = 0

    def after_step(self):
        if self.trainer.step == 3 and self.trainer.ranks.rank == self.rank:
            self.trainer.save()


class SaveOnTheOther(SaveOnOneRank):
    rank = 1


@pytest.mark.parametrize("hook", [SaveOnOneRank, SaveOnTheOther])
def test_a_save_that_one_rank_asks_for_is_made_by_all(hook, tmp_path):
    settings = (*PLAIN, "checkpoint={every_steps: 100, keep_last: 9}")
    ended = Run(tmp_path / "run", *settings, hooks=[hook])
    assert ended.wait(seconds=30) == [0, 0], ended.said(0)
    assert store_of(tmp_path / "run").steps() == [4, 6]


# evaluations


class EvaluateInAStep(Hook):
    """Evaluates in the midst of step 3."""

    logs = None

    def after_step(self):
        if self.trainer.step == 3:
            self.logs = self.trainer.evaluate()


def test_an_evaluation_that_a_hook_makes_is_not_left_in_its_midst(tmp_path):
    class Told(Trainer):
        def eval_step(self, batch):
            if self.step == 3:
                self.interrupt("SIGTERM")
            return super().eval_step(batch)

    hook = EvaluateInAStep()
    trainer = run(tmp_path / "run", "checkpoint.every_steps=100", trainer=Told, hooks=[hook])
    assert (trainer.step, trainer.interrupted, trainer.state.has_unfinished_step) == (3, True, False)
    assert hook.logs.keys() == {"valid/loss", "valid/accuracy"}
    assert store_of(tmp_path / "run").steps() == [3]


# anomalies are looked at before anything leaves a step, and not before


def looks_of(trainer):
    """The steps at whose end the trainer looks for anomalies, as a list that grows."""
    watch, steps = trainer.context.updater.detector, []
    look = watch.look

    def noting():
        steps.append(trainer.step)
        return look()

    watch.look = noting
    return steps


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("log.every_steps=5", [5, 10, 12]),
        ("checkpoint.every_steps=5", [5, 10, 12]),
        ("checkpoint.every_samples=40", [5, 10, 12]),
        ("evaluation.every_steps=5", [5, 10, 12]),
        ("anomalies={non_finite: rollback, snapshot_every_steps: 5}", [5, 10, 12]),
        ("anomalies={non_finite: skip}", [12]),
    ],
)
def test_a_device_that_runs_ahead_is_waited_for_only_before_something_leaves_a_step(
    setting, expected, tmp_path, monkeypatch
):
    be_lazy(monkeypatch)
    quiet = ("log.every_steps=100", "checkpoint.every_steps=100", "evaluation={}", "trainer.max_steps=12")
    trainer = make(tmp_path / "run", *quiet, setting)
    steps = looks_of(trainer)
    trainer.train()
    assert steps == expected


def test_on_a_device_that_reads_at_once_an_anomaly_is_acted_on_in_its_own_step(tmp_path):
    trainer = make(tmp_path / "run", *PLAIN, "log.every_steps=100", "checkpoint.every_steps=100", bad=(24,))
    with pytest.raises(AnomalyError):
        trainer.train()
    assert trainer.step == 4
