"""What saving beside training promises the loop: who hears of a commit and when, who waits, how a failure surfaces."""

import errno
import itertools
import json
import os
import time

import pytest
from tests.faults.runs import SMALL, assert_same_end, config_of, in_child, log_of, stderr_of, store_of
from tests.faults.two_ranks import Fault, Run, train_two
from tests.messages import mentions, raises

from trainwright import Hook, Trainer, build_trainer
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError

EVERY_TWO = (*SMALL, "checkpoint.keep_last=null")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run of two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train_two(folder, *EVERY_TWO) == [0, 0]
    return folder


class NoteSaves(Hook):
    """Writes down what this rank hears of saves: the step it is at, the checkpoint, whether it is whole by then."""

    def after_save(self, path):
        note = {"at": self.trainer.step, "of": int(path.name[5:]), "whole": (path / "MANIFEST.json").is_file()}
        with (self.trainer.folder / f"saves-{self.trainer.ranks.rank}").open("a") as file:
            print(json.dumps(note), file=file)


def saves(folder, rank=0):
    path = folder / f"saves-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fail_at(*steps, error=None):
    """Makes every attempt to commit one of these steps fail."""

    def fail(self, staging, step):
        if step in steps:
            raise error or OSError(errno.EIO, "the disk is on fire")
        commit(self, staging, step)

    commit = CheckpointStore._commit

    def prepare():
        CheckpointStore._commit = fail

    return prepare


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_every_rank_hears_of_each_save_at_the_same_step_after_its_commit(asynchronous, tmp_path):
    overrides = (*EVERY_TWO, f"checkpoint.asynchronous={asynchronous}")
    assert train_two(tmp_path / "run", *overrides, hooks=[NoteSaves]) == [0, 0]
    first, second = saves(tmp_path / "run", 0), saves(tmp_path / "run", 1)
    assert first == second
    assert [save["of"] for save in first] == store_of(tmp_path / "run").steps() == [2, 4, 6]
    assert all(save["whole"] and save["at"] >= save["of"] for save in first)


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_nobody_hears_of_a_save_that_failed_and_the_run_goes_on(asynchronous, tmp_path, undisturbed, tried):
    tried("a save that fails, with two ranks")
    overrides = (*EVERY_TWO, f"checkpoint.asynchronous={asynchronous}")
    assert train_two(tmp_path / "run", *overrides, hooks=[NoteSaves], prepare=fail_at(4)) == [0, 0]
    for rank in range(2):
        assert [save["of"] for save in saves(tmp_path / "run", rank)] == [2, 6]
    assert store_of(tmp_path / "run").steps() == [2, 6]
    assert "Step 4 is not saved (failure 1 of 3" in log_of(tmp_path / "run")
    assert_same_end(undisturbed, tmp_path / "run")


def test_training_goes_on_beside_a_save_and_the_next_save_waits_for_it(tmp_path):
    begun, ended = tmp_path / "begun", tmp_path / "ended"

    def slow(trainer):
        begun.touch()
        time.sleep(0.5)
        ended.touch()

    class Watch(Hook):
        def after_step(self):
            if self.trainer.step == 3:
                while not begun.exists():
                    time.sleep(0.001)
                assert not ended.exists()  # the third update was made beside the save of the second
                (tmp_path / "beside").touch()

        def after_save(self, path):
            assert ended.exists()

    faults = [Fault("commit", slow, ranks=(0,), step=2)]
    run = Run(tmp_path / "run", *EVERY_TWO, "checkpoint.every_steps=2", num_ranks=1, faults=faults, hooks=[Watch])
    assert run.wait() == [0], run.said(0)
    assert (tmp_path / "beside").exists()
    assert store_of(tmp_path / "run").steps() == [2, 4, 6]


def test_the_run_does_not_end_before_its_last_save(tmp_path):
    def slow(trainer):
        time.sleep(0.5)

    faults = [Fault("commit", slow, ranks=(0,), step=6)]
    assert train_two(tmp_path / "run", *EVERY_TWO, hooks=[NoteSaves], faults=faults) == [0, 0]
    assert store_of(tmp_path / "run").steps() == [2, 4, 6]
    assert [save["of"] for save in saves(tmp_path / "run", 1)] == [2, 4, 6]


class LoseFolder(Hook):
    """The checkpoints folder is gone, and nothing can be written in its place."""

    def before_train(self):
        if self.trainer.ranks.is_first:
            folder = self.trainer.folder / "checkpoints"
            if folder.exists():
                folder.rmdir()
            folder.touch()


@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.parametrize("max_failures", [1, 2])
def test_saving_that_fails_for_good_ends_every_rank_with_its_cause(max_failures, asynchronous, tmp_path, tried):
    tried("a checkpoints folder that is removed, with two ranks")
    overrides = (*EVERY_TWO, f"checkpoint.max_failures={max_failures}", f"checkpoint.asynchronous={asynchronous}")
    run = Run(tmp_path / "run", *overrides, hooks=[LoseFolder, NoteSaves])
    assert run.wait() == [2, 2]
    for rank in range(2):
        assert mentions(run.said(rank), "checkpoint.max_failures", max_failures)
        assert "Not a directory" in run.said(rank) or "File exists" in run.said(rank)
        assert saves(tmp_path / "run", rank) == []


def test_a_failed_last_save_ends_every_rank_with_an_error(tmp_path, undisturbed, tried):
    tried("the last save of a run fails, with two ranks")
    run = Run(tmp_path / "run", *EVERY_TWO, prepare=fail_at(6))
    assert run.wait() == [2, 2]
    assert all("the disk is on fire" in run.said(rank) for rank in range(2))
    assert train_two(tmp_path / "run", *EVERY_TWO) == [0, 0]
    assert_same_end(undisturbed, tmp_path / "run")


def test_an_unexpected_error_in_the_background_ends_every_rank_with_its_cause(tmp_path, tried):
    tried("an unexpected error while a checkpoint is written, with two ranks")
    run = Run(tmp_path / "run", *EVERY_TWO, prepare=fail_at(2, error=ZeroDivisionError("by chance")))
    assert run.wait() == [2, 2]
    # The first rank to fail shows it; the others' words are in their logs.
    assert any("ZeroDivisionError('by chance')" in run.said(rank) for rank in range(2))


class SlowSteps(Trainer):
    """Steps that take a while, and differently long on each rank; notes when each save begins."""

    def forward(self, **batch):
        time.sleep(0.01 + 0.01 * self.ranks.rank)
        return super().forward(**batch)

    def save(self):
        if self.state.phase == "between_steps":
            with (self.folder / f"times-{self.ranks.rank}").open("a") as file:
                print(time.monotonic(), file=file)
        return super().save()


def test_saves_by_the_clock_come_at_the_same_steps_on_all_ranks_and_not_too_often(tmp_path):
    overrides = ("trainer.max_steps=60", "checkpoint={every_steps: null, every_minutes: 0.004, keep_last: null}")
    overrides += ("evaluation.every_steps=null", "trainer.micro_batch_size=4")
    assert train_two(tmp_path / "run", *overrides, trainer=SlowSteps, hooks=[NoteSaves]) == [0, 0]
    assert saves(tmp_path / "run", 0) == saves(tmp_path / "run", 1)
    assert [save["of"] for save in saves(tmp_path / "run")] == store_of(tmp_path / "run").steps()
    # The last step is saved in any case.
    times = [float(line) for line in (tmp_path / "run" / "times-0").read_text().splitlines()[:-1]]
    assert len(times) > 2
    assert all(later - earlier > 0.23 for earlier, later in itertools.pairwise(times)), times


def test_saves_by_samples_and_those_to_keep_are_the_same_with_two_ranks(tmp_path):
    by_samples = ("checkpoint={every_steps: null, every_samples: 20, keep_last: null}", "trainer.max_steps=6")
    assert train_two(tmp_path / "samples", *by_samples, hooks=[NoteSaves]) == [0, 0]
    assert [save["of"] for save in saves(tmp_path / "samples", 1)] == [3, 5, 6]  # after 24, 40 and 48 samples
    kept = ("trainer.max_steps=12", "checkpoint={every_steps: 2, keep_last: 1, keep_every: 4}")
    assert train_two(tmp_path / "every", *kept) == [0, 0]
    assert store_of(tmp_path / "every").steps() == [4, 8, 12]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_checkpoint_is_kept_with_two_ranks(mode, tmp_path):
    best = (f"checkpoint={{every_steps: 6, keep_last: 1, keep_best: {{metric: valid/loss, mode: {mode}}}}}",)
    best += ("trainer.max_steps=12", "evaluation.every_steps=2", "trainer.optimizer.lr=0.1")
    assert train_two(tmp_path / "run", *best, hooks=[NoteSaves]) == [0, 0]
    assert saves(tmp_path / "run", 0) == saves(tmp_path / "run", 1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.json").read_text().splitlines()]
    losses = {line["step"]: line["valid/loss"] for line in lines if "valid/loss" in line}
    expected = (min if mode == "min" else max)(losses, key=lambda step: losses[step])
    assert store_of(tmp_path / "run").steps() == sorted({expected, 12})
    assert os.readlink(tmp_path / "run" / "checkpoints" / "best") == f"step-{expected:08d}"  # noqa: PTH115


class SaveTwice(Hook):
    """Asks twice for a checkpoint in the midst of a step, on the last rank alone."""

    def after_step(self):
        if self.trainer.step == 3 and self.trainer.ranks.rank == self.trainer.ranks.size - 1:
            self.trainer.save()
            self.trainer.save()


@pytest.mark.parametrize(("num_ranks", "steps"), [(1, [3, 6]), (2, [4, 6])])
def test_asking_twice_on_any_rank_saves_once_on_all(num_ranks, steps, tmp_path):
    overrides = (*EVERY_TWO, "checkpoint.every_steps=null")
    assert train_two(tmp_path / "run", *overrides, num_ranks=num_ranks, hooks=[SaveTwice, NoteSaves]) == [0] * num_ranks
    for rank in range(num_ranks):
        assert [save["of"] for save in saves(tmp_path / "run", rank)] == steps


class SaveAtTheEnd(Hook):
    """Removes the run's last checkpoint and saves it again, twice, when training has ended."""

    def after_train(self):
        self.trainer.ranks.barrier()
        if self.trainer.ranks.is_first:
            store_of(self.trainer.folder).delete(6)
        self.trainer.ranks.barrier()
        for _ in range(2):
            assert self.trainer.save().is_dir()


def test_a_save_after_the_last_step_is_there_when_it_returns(tmp_path):
    slow = Fault("commit", lambda trainer: time.sleep(0.2), step=6, times=3)
    run = Run(tmp_path / "run", *EVERY_TWO, hooks=[SaveAtTheEnd, NoteSaves], faults=[slow])
    assert run.wait() == [0, 0], run.said(0)
    assert saves(tmp_path / "run", 0) == saves(tmp_path / "run", 1)
    assert [save["of"] for save in saves(tmp_path / "run")] == [2, 4, 6, 6, 6]
    assert store_of(tmp_path / "run").newest_intact() == 6


def test_a_failed_save_after_the_last_step_is_told_and_can_be_tried_again(tmp_path):
    def act():
        trainer = build_trainer(config_of(tmp_path / "run", *EVERY_TWO))
        trainer.train()
        commit = CheckpointStore._commit
        fail_at(6)()
        with raises(CheckpointError):
            trainer.save()
        CheckpointStore._commit = commit
        store_of(tmp_path / "run").delete(6)
        trainer.save()
        assert store_of(tmp_path / "run").newest_intact() == 6

    assert in_child(act, tmp_path / "run") == 0, stderr_of(tmp_path / "run")
