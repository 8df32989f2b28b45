"""The decision which rank is missing, the report of a rank, and which processes it may end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import mentions

from trainwright.hooks.watchdog import (
    LEFT,
    RankStatus,
    describe,
    end_process,
    find_missing,
    identify_process,
    is_debugged,
    is_hang,
    is_in_collective,
    limit_seconds,
    write_rank_report,
)
from trainwright.loop.heartbeat import PHASES, Heartbeat


def at(phase="reduce", step=1204, *, seconds=612.0, usual=0.2, limit=600.0, begun=None, waits=False):
    return RankStatus(phase, step, seconds, usual, limit, begun, waits)


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
    statuses = {0: WAITING, 1: WAITING, 2: others, 3: WAITING}
    assert find_missing(statuses) == [2], missing
    assert is_hang(statuses, [2])


def test_a_rank_that_does_not_answer_comes_before_all_others():
    assert find_missing({0: None, 1: at("data", 1, begun=0), 2: WAITING}) == [0]


def test_no_rank_is_missing_if_all_have_the_same_status():
    statuses = {0: WAITING, 1: WAITING}
    assert find_missing(statuses) == []
    assert is_hang(statuses, [])
    assert "All 2 ranks are stuck in reduce for 612 s at step 1204" in describe(statuses, [])


def test_a_rank_that_is_stuck_after_the_others_left_is_missing():
    assert find_missing({0: at("hooks"), 1: LEFT}) == [0]


def test_a_rank_within_its_limits_is_busy_and_not_stuck():
    busy = at("hooks", seconds=700.0, limit=1800.0, begun=6)
    statuses = {0: WAITING, 1: busy}
    assert find_missing(statuses) == [1]
    assert not is_hang(statuses, [1])


def test_the_overdue_one_of_two_ranks_behind_is_named():
    busy, stuck = at("step", seconds=1.0, begun=6), at("data", begun=6)
    assert find_missing({0: WAITING, 1: busy, 2: stuck}) == [2]


@pytest.mark.parametrize(
    ("statuses", "line"),
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
def test_the_line_names_the_stuck_rank_its_phase_and_the_waiting_ranks(statuses, line):
    assert describe(statuses, find_missing(statuses)) == line


status = st.builds(
    RankStatus,
    phase=st.sampled_from(PHASES),
    step=st.integers(0, 3),
    seconds=st.floats(0, 1e4),
    usual=st.none() | st.floats(0, 1e3),
    limit=st.floats(1, 1e4),
    num_collectives=st.none() | st.integers(0, 3),
    is_waiting=st.booleans(),
    has_left=st.booleans(),
)


@given(st.dictionaries(st.integers(0, 6), st.none() | status, min_size=2))
def test_every_state_of_the_ranks_gets_a_line(statuses):
    missing = find_missing(statuses)
    assert set(missing) <= set(statuses)
    is_hang(statuses, missing)
    assert describe(statuses, missing).endswith(".")


@given(status)
def test_a_status_can_be_sent_as_json(status):
    assert RankStatus(**json.loads(json.dumps(asdict(status)))) == status


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
        ("hooks", 0.001, 50, 1800.0),  # sometimes nothing, sometimes a long call
        ("evaluate", 200.0, 50, 4000.0),
    ],
)
def test_the_limit_of_a_phase_follows_from_its_past_durations(phase, seconds, times, limit, monkeypatch):
    phases = finished(phase, seconds, times, monkeypatch)
    assert limit_seconds(phases, phase, factor=20.0, min_seconds=600.0) == pytest.approx(limit)


STATUS = RankStatus("data", 7, 612.0, 0.2, 600.0, None, is_waiting=False)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux identifies processes")
def test_only_the_identified_process_is_ended(sleeper):
    identity = identify_process(sleeper.pid)
    pid, started, *rest = identity.split()
    for other in ("", " ".join([pid, str(int(started) + 1), *rest]), " ".join([pid, started, rest[0], "elsewhere"])):
        assert not end_process(other)
    assert sleeper.poll() is None
    assert end_process(identity)
    assert sleeper.wait(timeout=30) == -signal.SIGKILL
    assert not end_process(identity)


def test_a_process_that_has_ended_has_no_identity():
    assert identify_process(2**30) == ""


def test_the_report_has_the_stacks_of_all_threads_but_the_writing_one(tmp_path):
    begun, done = threading.Event(), threading.Event()

    def wait_for_rows():
        begun.set()
        done.wait()

    stuck = threading.Thread(target=wait_for_rows, name="stuck")
    stuck.start()
    begun.wait()
    try:
        write_rank_report(
            tmp_path / "watchdog", 3, STATUS, Heartbeat(), thread=stuck.ident, data_position="At sample 12."
        )
        assert not is_in_collective(stuck.ident)
        assert not is_debugged(stuck.ident)
    finally:
        done.set()
        stuck.join()
    text = (tmp_path / "watchdog" / "rank-3.txt").read_text()
    assert f"Rank 3, process {os.getpid()}" in text
    assert mentions(text, "7", "612.0", "0.2", "600")
    assert "At sample 12." in text
    assert "stuck (training), innermost last:" in text
    assert "in wait_for_rows" in text
    assert "test_the_report_has" not in text
    assert not (tmp_path / "watchdog" / "rank-3-collectives.json").exists()


def test_a_thread_inside_torch_s_collectives_is_recognized():
    begun, lock = threading.Event(), threading.Lock()
    # As if torch's own file waited there: it is the innermost Python code that counts.
    waiting = compile("begun.set(); lock.acquire()", dist.distributed_c10d.__file__, "exec")
    lock.acquire()
    thread = threading.Thread(target=exec, args=(waiting, {"begun": begun, "lock": lock}))
    thread.start()
    begun.wait()
    try:
        for _ in range(1000):  # until it has come from `set` to `acquire`
            if is_in_collective(thread.ident):
                break
            time.sleep(0.01)
        assert is_in_collective(thread.ident)
    finally:
        lock.release()
        thread.join()
    assert not is_in_collective(thread.ident)
