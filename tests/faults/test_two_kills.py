"""kill -9 of one rank of two, or of both, at a random step: the same command goes on and ends with the same bits."""

import itertools
import random
import signal

import pytest
from tests.faults.runs import SMALL, assert_same_end, lines_of, store_of
from tests.faults.two_ranks import PHASES, Fault, Run, send, share_writing, train_two

POINTS = {
    "map": ("data.train={type: tests.project.parts:Points, size: 50, noise: 0.1}",),
    "iterable": (
        "data.train={type: tests.project.parts:ShardedPoints, size: 90, noise: 0.1}",
        "data.shuffle_buffer=20",
    ),
}
ACCUMULATIONS = {
    1: ("trainer.global_batch_size=8", "trainer.micro_batch_size=4"),
    3: ("trainer.global_batch_size=12", "trainer.micro_batch_size=2"),
}
STRUCK_PHASES = tuple(phase for phase in PHASES if phase not in ("start-up", "before_train", "commit"))
VICTIMS = ((0,), (1,), (0, 1))
# Any value of a case is in one of these; the other combinations are `make test-slow`'s.
PAIRED = [("map", 0, 3, True), ("iterable", 2, 1, False)]
MATRIX = [
    pytest.param(*case, marks=[] if case in PAIRED else [pytest.mark.slow])
    for case in itertools.product(POINTS, (0, 2), ACCUMULATIONS, (False, True))
]
# A few phases with one rank or the other; all with both by `make test-slow`.
CHOSEN = ((1, "start-up"), (1, "forward"), (0, "evaluation"), (0, "commit"))
IN_PHASES = [
    pytest.param(victim, phase, marks=[] if (victim, phase) in CHOSEN else [pytest.mark.slow])
    for phase in PHASES
    for victim in (0, 1)
    if victim == 0 or phase != "commit"  # the first rank alone writes
]

_undisturbed = {}


@pytest.fixture
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing happened to, made once for all cases that must end like it.

    Asynchronous saving changes no bit. Nor do workers, but for streams, whose shards they divide among them.
    """

    def folder(kind, accumulation, workers=0):
        workers = workers if kind == "iterable" else 0
        if (kind, accumulation, workers) not in _undisturbed:
            place = tmp_path_factory.mktemp("undisturbed") / "run"
            overrides = (*SMALL, *POINTS[kind], *ACCUMULATIONS[accumulation], f"data.num_workers={workers}")
            assert train_two(place, *overrides) == [0, 0]
            _undisturbed[kind, accumulation, workers] = place
        return _undisturbed[kind, accumulation, workers]

    return folder


def assert_killed(codes, victims):
    """The victims are dead; a rank that has lost the other one does not stay, and does not end as if all were well."""
    assert [code for rank, code in enumerate(codes) if rank in victims] == [-signal.SIGKILL] * len(victims)
    assert all(code in (1, 2, -signal.SIGKILL) for code in codes), codes


@pytest.mark.parametrize(("kind", "workers", "accumulation", "asynchronous"), MATRIX)
def test_a_run_whose_ranks_are_killed_ends_as_if_nothing_had_happened(
    kind, workers, accumulation, asynchronous, tmp_path, undisturbed, tried
):
    drawn = random.Random(f"{kind} {workers} {accumulation} {asynchronous}")
    overrides = (*SMALL, *POINTS[kind], *ACCUMULATIONS[accumulation])
    overrides += (f"data.num_workers={workers}", f"checkpoint.asynchronous={str(asynchronous).lower()}")
    # Twice in a row, the second time later; with workers once, for they are slow to start. They also hold a dead rank's
    # connections for up to five seconds, until they see that it is gone, so that both ranks are killed.
    steps = [drawn.randint(2, 3), drawn.randint(4, 6)][workers // 2 :]
    tried("kill -9 of one of two ranks, or of both", cases=len(steps))
    for step in steps:
        victims, phase = drawn.choice(VICTIMS) if workers == 0 else (0, 1), drawn.choice(STRUCK_PHASES)
        fault = Fault(phase, send(signal.SIGKILL), ranks=victims, step=step)
        assert_killed(train_two(tmp_path / "run", *overrides, faults=[fault]), victims)
    assert train_two(tmp_path / "run", *overrides) == [0, 0]
    assert_same_end(undisturbed(kind, accumulation, workers), tmp_path / "run")


@pytest.mark.parametrize(("victim", "phase"), IN_PHASES)
def test_a_rank_that_is_killed_in_any_phase_loses_nothing(victim, phase, tmp_path, undisturbed, tried):
    tried("kill -9 of one of two ranks, in each phase")
    overrides = (*SMALL, *POINTS["map"], *ACCUMULATIONS[1])
    fault = Fault(phase, send(signal.SIGKILL), ranks=(victim,), step=4)
    assert_killed(train_two(tmp_path / "run", *overrides, faults=[fault]), (victim,))
    assert train_two(tmp_path / "run", *overrides) == [0, 0]
    assert_same_end(undisturbed("map", 1), tmp_path / "run")


@pytest.mark.parametrize(
    ("victim", "phase"), [(1, "forward"), (1, "after_save"), pytest.param(0, "commit", marks=pytest.mark.slow)]
)
def test_a_replica_that_is_killed_while_both_write_loses_nothing(victim, phase, tmp_path, undisturbed, tried):
    tried("kill -9 of one of two ranks that write a replicated model together")
    overrides = (*SMALL, *POINTS["map"], *ACCUMULATIONS[1])
    fault = Fault(phase, send(signal.SIGKILL), ranks=(victim,), step=4)
    assert_killed(train_two(tmp_path / "run", *overrides, faults=[fault], prepare=share_writing), (victim,))
    assert train_two(tmp_path / "run", *overrides, prepare=share_writing) == [0, 0]
    assert_same_end(undisturbed("map", 1), tmp_path / "run")
    newest = store_of(tmp_path / "run").path(6)
    assert (newest / "model.safetensors").exists()
    assert (newest / "model.rank-00001.safetensors").exists()
    assert (newest / "optimizers.rank-00001.safetensors").exists()


def test_a_rank_that_is_killed_while_its_workers_live_loses_nothing(tmp_path, undisturbed, tried):
    tried("kill -9 of one of two ranks, whose data workers survive")
    overrides = (*SMALL, *POINTS["map"], *ACCUMULATIONS[1], "data.num_workers=1")
    fault = Fault("forward", send(signal.SIGKILL), ranks=(0,), step=5)
    assert_killed(train_two(tmp_path / "run", *overrides, faults=[fault]), (0,))
    assert train_two(tmp_path / "run", *overrides) == [0, 0]
    assert_same_end(undisturbed("map", 1), tmp_path / "run")


def test_a_run_of_two_that_was_killed_goes_on_in_one_process(tmp_path, tried):
    tried("kill -9 of one of two ranks, resumed by a single process")
    # Without dropout and noise: what a rank draws depends on how many there are.
    overrides = (*SMALL, "log.every_steps=1", "data.train.noise=0.0", "model.dropout=0.0", *ACCUMULATIONS[1])
    assert train_two(tmp_path / "undisturbed", *overrides) == [0, 0]
    fault = Fault("forward", send(signal.SIGKILL), ranks=(1,), step=5)
    assert_killed(train_two(tmp_path / "run", *overrides, faults=[fault]), (1,))
    assert store_of(tmp_path / "run").steps()[-1] == 4
    assert Run(tmp_path / "run", *overrides, num_ranks=1).wait() == [0]
    whole, resumed = lines_of(tmp_path / "undisturbed"), lines_of(tmp_path / "run")
    assert len(whole) == len(resumed)
    for left, right in zip(whole, resumed, strict=True):
        assert left == pytest.approx(right, rel=1e-6, abs=1e-6)
