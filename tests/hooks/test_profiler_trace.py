"""How the time of a trace is shared out, on traces written by hand."""

import pytest
from tests.messages import raises

from trainwright.errors import TrainwrightError
from trainwright.hooks.profiler import share_out
from trainwright.loop.heartbeat import PhaseTrace


def named(row, start, end):
    return {"ph": "X", "cat": "user_annotation", "name": PhaseTrace.PREFIX + row, "ts": start, "dur": end - start}


def ran(start, end, *, launched, name="gemm", number=[0]):  # noqa: B006 # counts over all calls
    """A kernel, and the host's call that launched it."""
    number[0] += 1
    tie = {"args": {"correlation": number[0]}}
    return [
        {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, **tie},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1, **tie},
    ]


def microseconds(events):
    return {row: round(seconds * 1e6, 6) for row, seconds in share_out(events).seconds.items()}


STEP = [named("data", 0, 10), named("forward", 10, 30), named("backward", 30, 60), named("optimizer", 60, 70)]


def test_on_a_cpu_the_ranges_are_the_answer():
    shares = share_out([*STEP, named("host", 70, 80)])
    assert microseconds([*STEP, named("host", 70, 80)]) == {
        **{"data": 10, "host": 10, "forward": 20, "backward": 30, "optimizer": 10},
    }
    assert not shares.has_device
    assert shares.total == pytest.approx(80e-6)


def test_a_kernel_belongs_to_the_range_that_launched_it_however_late_it_runs():
    events = [*STEP, named("host", 70, 80)]
    events += ran(12, 40, launched=11) + ran(40, 75, launched=31) + ran(75, 100, launched=61)
    assert microseconds(events) == {"data": 10, "forward": 28, "backward": 35, "optimizer": 25, "idle": 2}


def test_a_device_without_work_waits_for_data_for_the_host_or_is_idle():
    events = [named("host", 0, 10), *[{**each, "ts": each["ts"] + 10} for each in STEP]]
    events += ran(30, 35, launched=25)
    # The host: 0–10 hooks, 10–20 data, 20–80 the update, of which 5 have a kernel.
    assert microseconds(events) == {"host": 10, "data": 10, "forward": 5, "idle": 55}


def test_communication_counts_where_nothing_else_runs():
    events = STEP + ran(20, 60, launched=15) + ran(40, 70, launched=31, name="ncclDevKernel_AllReduce")
    assert microseconds(events) == {"data": 10, "forward": 40, "communication": 10, "idle": 10}


def test_copies_of_the_next_batch_count_as_data_only_if_nothing_is_computed():
    copy, call = ran(5, 30, launched=4)
    copy["cat"] = "gpu_memcpy"
    events = [*STEP, copy, call, *ran(20, 70, launched=12)]
    assert microseconds(events) == {"data": 20, "forward": 50}


def test_evaluating_and_saving_belong_to_no_step():
    events = [*STEP, named("evaluate", 70, 1000), named("host", 1000, 1010)]
    assert microseconds(events) == {"data": 10, "forward": 20, "backward": 30, "optimizer": 10, "host": 10}
    events += ran(100, 900, launched=80) + ran(900, 1005, launched=81) + ran(15, 70, launched=12)
    assert microseconds(events) == {"data": 10, "forward": 55, "idle": 5, "host": 10}


def test_what_was_launched_before_the_first_range_is_not_counted():
    assert microseconds([*STEP, *ran(0, 10, launched=-5), *ran(10, 70, launched=12)]) == {"data": 10, "forward": 60}


def test_a_kernel_without_a_launch_belongs_to_what_the_host_does():
    kernel, _ = ran(35, 50, launched=0)
    assert microseconds([*STEP, kernel])["backward"] == 15


def test_a_replay_is_one_row():
    events = [named("data", 0, 10), named("replay", 10, 20), named("host", 20, 30), *ran(12, 60, launched=11)]
    assert microseconds(events) == {"data": 10, "replay": 48, "idle": 2}


def test_a_trace_without_ranges_is_rejected():
    with raises(TrainwrightError):
        share_out(ran(0, 1, launched=0))
