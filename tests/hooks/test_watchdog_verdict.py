"""Who is missing, judged by where every rank stands."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.hooks.watchdog import (
    LEFT,
    Standing,
    describe,
    find_missing,
    is_hang,
    limit_seconds,
)
from trainwright.loop.heartbeat import PHASES, Heartbeat


def at(phase="reduce", step=1204, *, seconds=612.0, usual=0.2, limit=600.0, begun=None, waits=False):
    return Standing(phase, step, seconds, usual, limit, begun, waits)


WAITING = at("reduce", begun=7, waits=True)


@pytest.mark.parametrize(
    ("others", "missing"),
    [
        (None, "a rank that does not answer"),
        (at("data", begun=6), "fewest collectives"),
        (at("reduce", begun=6), "fewest collectives, though in the same phase"),
        (at("hooks", 1205, begun=6), "fewest collectives, though it seems further"),
        (at("data", begun=7), "in no collective"),
        (at("save", begun=7), "in no collective, in a later phase"),
        (at("data", 1203, begun=None, waits=True), "the lowest step"),
        (at("data", begun=None, waits=True), "the earliest phase"),
        (LEFT, "a rank that left"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_found(others, missing):
    standings = {0: WAITING, 1: WAITING, 2: others, 3: WAITING}
    assert find_missing(standings) == [2], missing
    assert is_hang(standings, [2])


def test_a_rank_that_does_not_answer_comes_before_all_others():
    assert find_missing({0: None, 1: at("data", 1, begun=0), 2: WAITING}) == [0]


def test_ranks_that_stand_alike_miss_nobody():
    standings = {0: WAITING, 1: WAITING}
    assert find_missing(standings) == []
    assert is_hang(standings, [])
    assert "All 2 ranks are stuck in reduce for 612 s at step 1204" in describe(standings, [])


def test_who_is_stuck_after_the_others_left_is_missing_itself():
    assert find_missing({0: at("hooks"), 1: LEFT}) == [0]


def test_a_rank_within_its_limits_is_busy_and_not_stuck():
    busy = at("hooks", seconds=700.0, limit=1800.0, begun=6)
    standings = {0: WAITING, 1: busy}
    assert find_missing(standings) == [1]
    assert not is_hang(standings, [1])


def test_of_two_that_are_behind_the_overdue_one_is_named():
    busy, stuck = at("step", seconds=1.0, begun=6), at("data", begun=6)
    assert find_missing({0: WAITING, 1: busy, 2: stuck}) == [2]


@pytest.mark.parametrize(
    ("standings", "line"),
    [
        (
            {0: WAITING, 1: at("data"), 2: WAITING, 3: WAITING},
            "Rank 1 is stuck in data for 612 s at step 1204 (usually 0.2 s); ranks 0, 2, 3 wait for it.",
        ),
        (
            {0: at("data", seconds=2.04, usual=None), 1: at("data", seconds=2.04), 2: WAITING},
            "Ranks 0, 1 are stuck in data for 2 s at step 1204; rank 2 waits for them.",
        ),
        (
            {0: WAITING, 1: None},
            "Rank 1 does not answer: stopped, dead or blocked, at about step 1204; rank 0 waits for it.",
        ),
        ({0: LEFT, 1: WAITING}, "Rank 0 has left the training; rank 1 waits for it."),
        ({0: at("data")}, "The run is stuck in data for 612 s at step 1204 (usually 0.2 s)."),
        (
            {rank: at("data") if rank == 511 else WAITING for rank in range(1024)},
            "Rank 511 is stuck in data for 612 s at step 1204 (usually 0.2 s); ranks 0-510, 512-1023 wait for it.",
        ),
    ],
)
def test_the_line_says_who_is_stuck_where_and_who_waits(standings, line):
    assert describe(standings, find_missing(standings)) == line


standing = st.builds(
    Standing,
    phase=st.sampled_from(PHASES),
    step=st.integers(0, 3),
    seconds=st.floats(0, 1e4),
    usual=st.none() | st.floats(0, 1e3),
    limit=st.floats(1, 1e4),
    num_collectives=st.none() | st.integers(0, 3),
    is_waiting=st.booleans(),
    has_left=st.booleans(),
)


@given(st.dictionaries(st.integers(0, 6), st.none() | standing, min_size=2))
def test_every_state_of_the_ranks_gets_a_line(standings):
    missing = find_missing(standings)
    assert set(missing) <= set(standings)
    is_hang(standings, missing)
    assert describe(standings, missing).endswith(".")


@given(standing)
def test_a_standing_survives_as_a_note(standing):
    assert Standing.from_json(standing.to_json()) == standing
    json.loads(standing.to_json())


def finished(phase, seconds, times, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("trainwright.loop.heartbeat.monotonic", lambda: now[0])
    phases = Heartbeat()
    for _ in range(times):
        phases.enter(phase, 1)
        now[0] += seconds
    phases.enter("leave", 1)
    return phases


@pytest.mark.parametrize(
    ("phase", "seconds", "times", "limit"),
    [
        ("data", 0.2, 5, 600.0),
        ("data", 100.0, 5, 2000.0),
        ("step", 0.2, 4, 1800.0),  # the first ones may compile
        ("step", 1000.0, 1, 1800.0),
        ("start-up", 1.0, 0, 1800.0),
        ("hooks", 0.001, 50, 1800.0),  # now nothing, now a long act
        ("evaluate", 200.0, 50, 4000.0),
    ],
)
def test_a_phase_may_last_as_long_as_its_past_allows(phase, seconds, times, limit, monkeypatch):
    phases = finished(phase, seconds, times, monkeypatch)
    assert limit_seconds(phases, phase, factor=20.0, min_seconds=600.0) == pytest.approx(limit)
