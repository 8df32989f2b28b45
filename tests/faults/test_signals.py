"""A signal to any rank in any phase: all leave at one step, saved, with its code; the same command goes on exactly."""

import itertools
import os
import random
import signal
import time
from functools import partial

import pytest
from tests.faults.runs import SMALL, assert_same_end, log_of, store_of
from tests.faults.two_ranks import Fault, Run, send, sleep_for_ever, train_two
from tests.messages import mentions

from trainwright import Trainer
from trainwright.hooks import preemption as obey_preemption

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
WHILE_TRAINING = ("before_train", "data", "forward", "after_step", "evaluation", "commit", "after_save")
OVERRIDES = (*SMALL, "model.dropout=0.3", "hooks=[{type: ema, decay: 0.8}]")

# The next save waits for a commit, and comes two steps later: told at the first commit, a run has not ended by then.
AT = dict.fromkeys(WHILE_TRAINING, 4) | {"commit": 2}

SIGNALED_RANKS = {"first": (0,), "second": (1,), "both": (0, 1)}


def slow_but(chosen, *lists):
    """All combinations of the lists; those that are not chosen are `make test-slow`'s."""
    cases = itertools.product(*lists)
    return [pytest.param(*case, marks=[] if case in chosen else [pytest.mark.slow]) for case in cases]


# Every other phase with one of the three, and in the midst of a step with all of them.
TOLD_IN_PHASES = [
    *list(zip(WHILE_TRAINING, ("both", "first", "second", "both", "second", "first", "first"), strict=True))[::2],
    *(("forward", told) for told in SIGNALED_RANKS),
]


@pytest.fixture
def undisturbed(make_undisturbed):
    """The folder of a run that nothing happened to, by the number of ranks."""
    return partial(make_undisturbed, OVERRIDES)


def linger(number):
    """An act: a signal comes while the phase is under way, which takes a while."""

    def act(trainer):
        os.kill(os.getpid(), number)
        time.sleep(0.05)

    return act


def assert_left_saved_and_goes_on(folder, run, number, undisturbed, *, phase, at=4):
    num_ranks = len(run.children)
    assert run.wait() == [128 + number] * num_ranks
    # One process leaves with the step under way, several with the one after: they hear of it by a message.
    allowed = {"before_train": (None,), "commit": (2, 3, 4, 5), "after_save": (at, at + 1, at + 2)}
    saved = max(store_of(folder).steps(), default=None)
    assert saved in allowed.get(phase, (at,) if num_ranks == 1 else (at, at + 1))
    if saved is not None:
        assert mentions(log_of(folder), number.name, saved)
    assert train_two(folder, *OVERRIDES, num_ranks=num_ranks) == [0] * num_ranks
    assert_same_end(undisturbed(num_ranks), folder)


@pytest.mark.parametrize(
    ("phase", "number"), list(zip(WHILE_TRAINING, itertools.cycle((INT, TERM, USR1)), strict=False))
)
def test_one_process_that_is_told_to_leave_saves_its_step(phase, number, tmp_path, undisturbed, tried):
    tried("SIGINT, SIGTERM or SIGUSR1 in each phase, one process")
    run = Run(tmp_path / "run", *OVERRIDES, num_ranks=1, faults=[Fault(phase, linger(number), step=AT[phase])])
    assert_left_saved_and_goes_on(tmp_path / "run", run, number, undisturbed, phase=phase)


@pytest.mark.parametrize(("phase", "told"), slow_but(TOLD_IN_PHASES, WHILE_TRAINING, SIGNALED_RANKS))
def test_all_ranks_leave_at_one_step_whichever_is_told(phase, told, tmp_path, undisturbed, tried):
    if phase == "commit" and told != "first":
        pytest.skip("the first rank alone writes")
    tried("SIGTERM or SIGUSR1 to one of two ranks, or to both, in each phase")
    number = (TERM, USR1)[(WHILE_TRAINING.index(phase) + sum(SIGNALED_RANKS[told])) % 2]
    run = Run(
        tmp_path / "run", *OVERRIDES, faults=[Fault(phase, linger(number), ranks=SIGNALED_RANKS[told], step=AT[phase])]
    )
    assert_left_saved_and_goes_on(tmp_path / "run", run, number, undisturbed, phase=phase)


STREAM = (*OVERRIDES, "data.eval={valid: {type: tests.project.parts:PointStream, size: 33, seed: 1}}")


@pytest.fixture(scope="module")
def undisturbed_stream(tmp_path_factory):
    """The folder of a run with a stream to be evaluated on, that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "stream"
    assert train_two(folder, *STREAM) == [0, 0]
    return folder


@pytest.mark.parametrize("told", slow_but([("second",)], ("first", "second", "both")))
def test_an_evaluation_over_a_stream_is_abandoned_by_all_ranks(told, tmp_path, undisturbed_stream, tried):
    tried("SIGTERM to one of two ranks, or to both, during the evaluation of a stream")
    run = Run(tmp_path / "run", *STREAM, faults=[Fault("evaluation", linger(TERM), ranks=SIGNALED_RANKS[told], step=4)])
    assert run.wait(seconds=30) == [128 + TERM] * 2
    assert store_of(tmp_path / "run").steps()[-1] == 4
    assert train_two(tmp_path / "run", *STREAM) == [0, 0]
    assert_same_end(undisturbed_stream, tmp_path / "run")


@pytest.mark.parametrize(
    ("failing", "kind"), slow_but([(0, "Points"), (1, "PointStream")], (0, 1), ("Points", "PointStream"))
)
def test_an_evaluation_that_fails_on_one_rank_fails_on_both_and_keeps_the_step(failing, kind, tmp_path, tried):
    tried("an evaluation that fails on one of two ranks")

    def fail(trainer):
        raise ValueError("by chance")

    overrides = (*OVERRIDES, f"data.eval={{valid: {{type: tests.project.parts:{kind}, size: 33, seed: 1}}}}")
    run = Run(tmp_path / "run", *overrides, faults=[Fault("evaluation", fail, ranks=(failing,), step=4)])
    assert run.wait(seconds=30) == [1 if rank == failing else 2 for rank in range(2)]
    assert mentions(run.said(1 - failing), "ValueError", failing)
    assert store_of(tmp_path / "run").newest_intact() == 4


@pytest.mark.parametrize("number", [INT, TERM, USR1])
def test_a_process_that_is_told_to_leave_while_it_starts_leaves_at_once(number, tmp_path, tried):
    tried("SIGINT, SIGTERM or SIGUSR1 at start-up")
    assert train_two(tmp_path / "run", *OVERRIDES, num_ranks=1, faults=[Fault("start-up", send(number))]) == [
        128 + number
    ]
    assert store_of(tmp_path / "run").steps() == []


@pytest.mark.parametrize("told", slow_but([((1,),)], [(0,), (1,), (0, 1)]), ids=["first", "second", "both"])
def test_ranks_that_are_told_to_leave_while_they_start_leave_at_once(told, tmp_path, tried):
    tried("SIGTERM to one of two ranks, or to both, at start-up")
    codes = train_two(tmp_path / "run", *OVERRIDES, faults=[Fault("start-up", send(TERM), ranks=told)])
    # The other rank has lost its peer; a launcher sees the first to leave, and ends it.
    assert [codes[rank] for rank in told] == [128 + TERM] * len(told)
    assert all(codes)
    assert store_of(tmp_path / "run").steps() == []


@pytest.mark.parametrize("seed", slow_but([(0,)], range(4)))
def test_a_signal_at_any_moment_loses_nothing(seed, tmp_path, undisturbed, tried):
    tried("SIGTERM from outside at a random moment")
    drawn = random.Random(seed)
    run = Run(tmp_path / "run", *OVERRIDES)
    time.sleep(drawn.uniform(0.1, 0.7))
    rank = drawn.randrange(2)
    run.send(rank, TERM)
    codes = run.wait(as_launcher=True)
    # Before the command listens, and while a finished one exits, the signal ends it as the system does.
    assert codes[rank] in (0, 128 + TERM, -TERM), (codes, run.said(0), run.said(1))
    is_finished = store_of(tmp_path / "run").newest_intact() == 6
    assert is_finished or all(codes)
    assert train_two(tmp_path / "run", *OVERRIDES) == [0, 0]
    assert_same_end(undisturbed(2), tmp_path / "run")


@pytest.mark.parametrize(("num_ranks", "number"), slow_but([(1, USR1), (2, TERM)], (1, 2), (TERM, USR1)))
def test_a_run_that_cannot_end_its_step_leaves_at_the_deadline(num_ranks, number, tmp_path, undisturbed, tried):
    tried("SIGTERM or SIGUSR1 during a step that never ends")

    def stuck(trainer):
        os.kill(os.getpid(), number)
        sleep_for_ever(trainer)

    faults = [Fault("forward", stuck, step=5)]
    overrides = (*OVERRIDES, "preemption.deadline_seconds=0.5", "checkpoint.asynchronous=false")
    run = Run(tmp_path / "run", *overrides, num_ranks=num_ranks, faults=faults)
    assert run.wait(seconds=30) == [128 + number] * num_ranks
    assert store_of(tmp_path / "run").newest_intact() == 4
    assert f"Received {number.name}" in log_of(tmp_path / "run")
    assert "resumes from the newest checkpoint, or starts over if there is none" in log_of(tmp_path / "run")
    assert train_two(tmp_path / "run", *overrides, num_ranks=num_ranks) == [0] * num_ranks
    assert_same_end(undisturbed(num_ranks), tmp_path / "run")


def test_ranks_of_which_one_is_in_a_collective_for_ever_leave_at_the_deadline(tmp_path, undisturbed, tried):
    tried("SIGTERM while one rank waits forever for another")

    overrides = (*OVERRIDES, "preemption.deadline_seconds=0.5")
    run = Run(tmp_path / "run", *overrides, faults=[Fault("forward", sleep_for_ever, ranks=(1,), step=5)])
    while store_of(tmp_path / "run").steps()[-1:] != [4]:
        time.sleep(0.01)
    time.sleep(0.3)  # for rank 0 to be in the sum of the gradients; the outcome is the same if it is not there yet
    run.send(0, TERM)
    run.send(1, TERM)
    assert run.wait(seconds=30) == [128 + TERM, 128 + TERM]
    assert train_two(tmp_path / "run", *overrides) == [0, 0]
    assert_same_end(undisturbed(2), tmp_path / "run")


@pytest.mark.parametrize("number", slow_but([(INT,)], (TERM, USR1, INT)))
def test_a_second_signal_ends_the_run_at_once(number, tmp_path, undisturbed, tried):
    tried("a second signal during the step")

    def twice(trainer):
        for _ in range(2):
            os.kill(os.getpid(), number)
            time.sleep(0.1)
        raise AssertionError("still there")

    def hasten():
        obey_preemption.ECHO_SECONDS = 0.05

    run = Run(tmp_path / "run", *OVERRIDES, num_ranks=1, faults=[Fault("forward", twice, step=5)], prepare=hasten)
    # As if nobody listened: killed by the signal, or a KeyboardInterrupt.
    assert run.wait() == ([1] if number == INT else [-number]), run.said(0)
    assert "still there" not in run.said(0)
    assert store_of(tmp_path / "run").newest_intact() in (2, 4)
    assert train_two(tmp_path / "run", *OVERRIDES, num_ranks=1) == [0]
    assert_same_end(undisturbed(1), tmp_path / "run")


def test_the_same_signal_twice_within_two_seconds_is_one_request(tmp_path, undisturbed, tried):
    tried("a signal that a launcher forwards a second time")

    def twice(trainer):
        os.kill(os.getpid(), TERM)
        os.kill(os.getpid(), TERM)

    run = Run(tmp_path / "run", *OVERRIDES, num_ranks=1, faults=[Fault("forward", twice, step=4)])
    assert_left_saved_and_goes_on(tmp_path / "run", run, TERM, undisturbed, phase="forward")


class Reading:
    """Points of which one sends its reader a signal when it is fetched."""

    def __init__(self, points, number, times):
        self.points, self.number, self.times = points, number, times

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        if index == 7:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
                time.sleep(0.1)
        return self.points[index]


@pytest.mark.parametrize("number", [TERM, INT, pytest.param(USR1, marks=pytest.mark.slow)])
def test_a_signal_to_a_worker_of_the_loader_does_not_end_the_run(number, tmp_path, undisturbed, tried):
    tried("SIGINT, SIGTERM or SIGUSR1 to a worker of the data loader, twice")

    class WithReading(Trainer):
        @classmethod
        def build_train_data(cls, build):
            return Reading(super().build_train_data(build), number, times=2)

    def hasten():
        obey_preemption.ECHO_SECONDS = 0.05

    run = Run(tmp_path / "run", *OVERRIDES, "data.num_workers=1", num_ranks=1, trainer=WithReading, prepare=hasten)
    assert run.wait() == [0], run.said(0)
    assert_same_end(undisturbed(1), tmp_path / "run")
