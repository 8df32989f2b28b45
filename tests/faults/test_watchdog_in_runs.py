"""A rank that is put to sleep: the report names it and its phase, all leave with 75, and the same command goes on."""

import time
from functools import partial

import pytest
from tests.faults.runs import assert_same_end, log_of, what_is_left
from tests.faults.two_ranks import Fault, Run, sleep_for_ever, train_two
from tests.messages import mentions

from trainwright.errors import HANG_EXIT_CODE
from trainwright.parallel.replicate import GradientSum

# The watch is impatient only with phases that it has seen five times.
OVERRIDES = ("trainer.max_steps=9", "checkpoint.every_steps=3", "evaluation.every_steps=5", "watchdog.min_seconds=1.0")
STEP = 8


@pytest.fixture
def undisturbed(make_undisturbed):
    """The folder of a run that nothing happened to, by the number of ranks."""
    return partial(make_undisturbed, OVERRIDES)


def report_of(folder, step=STEP):
    return (folder / "watchdog" / f"step-{step:08d}" / "report.txt").read_text("utf-8")


def assert_goes_on(folder, undisturbed, num_ranks):
    assert train_two(folder, *OVERRIDES, num_ranks=num_ranks) == [0] * num_ranks
    assert_same_end(undisturbed(num_ranks), folder)


@pytest.mark.parametrize(
    ("rank", "phase", "name"),
    [
        *((0, "data", "data"), (1, "forward", "step")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "data", "data"), (0, "forward", "step"))),
    ],
)
def test_a_rank_that_sleeps_is_named_with_its_phase(rank, phase, name, tmp_path, undisturbed, tried):
    tried("one of two ranks sleeps in data loading or forward")
    run = Run(tmp_path / "run", *OVERRIDES, faults=[Fault(phase, sleep_for_ever, ranks=(rank,), step=STEP)])
    assert run.wait() == [HANG_EXIT_CODE] * 2
    line = f"Rank {rank} is stuck in {name} for"
    assert report_of(tmp_path / "run").startswith(line)
    assert mentions(report_of(tmp_path / "run"), 1 - rank)
    assert line in log_of(tmp_path / "run")
    stacks = (tmp_path / "run" / "watchdog" / f"step-{STEP:08d}" / f"rank-{rank}.txt").read_text("utf-8")
    assert "sleep_for_ever" in stacks
    assert_goes_on(tmp_path / "run", undisturbed, 2)


def test_a_rank_that_sleeps_in_the_midst_of_a_collective_is_named(tmp_path, undisturbed, tried):
    tried("one of two ranks sleeps in the all-reduce of the gradients")

    def make_sleepy():
        reduce, count = GradientSum.reduce, iter(range(1, 100))

        def sleepy(self, totals, **rest):
            if self._ranks.rank == 1 and next(count) == STEP:
                self._enter("reduce")
                sleep_for_ever(None)
            return reduce(self, totals, **rest)

        GradientSum.reduce = sleepy

    run = Run(tmp_path / "run", *OVERRIDES, prepare=make_sleepy)
    assert run.wait() == [HANG_EXIT_CODE] * 2
    assert report_of(tmp_path / "run").startswith("Rank 1 is stuck in reduce for")
    assert_goes_on(tmp_path / "run", undisturbed, 2)


def test_one_process_that_sleeps_leaves_too(tmp_path, undisturbed, tried):
    tried("one process sleeps")
    run = Run(tmp_path / "run", *OVERRIDES, num_ranks=1, faults=[Fault("forward", sleep_for_ever, step=STEP)])
    assert run.wait() == [HANG_EXIT_CODE]
    assert report_of(tmp_path / "run").startswith("The run is stuck in step for")
    assert_goes_on(tmp_path / "run", undisturbed, 1)


def test_a_slow_first_step_and_an_evaluation_of_another_length_are_no_hangs(tmp_path, undisturbed, tried):
    tried("a slow first step, and an evaluation that is slower than the previous ones")

    def slow(trainer):
        time.sleep(1.3)

    first = Fault("forward", slow, ranks=(0,), step=1)
    later = Fault("evaluation", slow, ranks=(1,), step=9)
    assert train_two(tmp_path / "run", *OVERRIDES, faults=[first, later]) == [0, 0]
    assert not (tmp_path / "run" / "watchdog").exists()
    assert what_is_left(tmp_path / "run")["step"] == 9
    assert_same_end(undisturbed(2), tmp_path / "run")
