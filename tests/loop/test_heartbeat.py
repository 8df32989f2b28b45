"""What a rank says that it is doing, and how long that usually takes."""

import threading
import time

import pytest

from trainwright.loop.heartbeat import NUM_REMEMBERED, PHASES, WORK, Heartbeat


def test_a_run_begins_by_starting_up():
    phase, step, since = Heartbeat().current
    assert (phase, step) == ("start-up", 0)
    assert 0 <= time.monotonic() - since < 60


def test_the_seconds_of_a_phase_are_those_of_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("trainwright.loop.heartbeat.monotonic", lambda: now[0])
    phases = Heartbeat()
    for phase, seconds in [("data", 1.0), ("step", 4.0), ("reduce", 8.0), ("data", 2.0), ("data", 6.0), ("leave", 0.0)]:
        phases.enter(phase, 3)
        now[0] += seconds
    assert phases.current == ("leave", 3, 121.0)
    assert phases.seconds_in("data") == 9.0
    assert phases.median_seconds("data") == 2.0
    assert phases.num_finished("data") == 3
    assert phases.seconds_at_work() == 13.0  # without the reduction, in which a rank waits for others
    assert phases.median_seconds("leave") is None  # not finished yet
    assert phases.seconds_in("start-up") == 0.0


def test_only_the_last_ones_make_the_median(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("trainwright.loop.heartbeat.monotonic", lambda: now[0])
    phases = Heartbeat()
    for seconds in [100.0] * 60 + [1.0] * NUM_REMEMBERED:
        phases.enter("step", 1)
        now[0] += seconds
    phases.enter("hooks", 1)
    assert phases.median_seconds("step") == 1.0
    assert phases.num_finished("step") == 60 + NUM_REMEMBERED


def test_work_is_made_of_phases():
    assert set(WORK) < set(PHASES)


def test_an_unknown_phase_is_rejected_by_name():
    phases = Heartbeat()
    phases.enter("sleep", 1)
    with pytest.raises(KeyError, match="sleep"):
        phases.enter("data", 1)


def test_another_thread_may_read_at_any_time():
    phases, errors, done = Heartbeat(), [], threading.Event()

    def read():
        try:
            while not done.is_set():
                phase, _, since = phases.current
                assert phase in PHASES
                assert since <= time.monotonic()
                phases.median_seconds("data")
                phases.seconds_at_work()
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(20_000):
        phases.enter(PHASES[step % len(PHASES)], step)
    done.set()
    reader.join()
    assert errors == []
