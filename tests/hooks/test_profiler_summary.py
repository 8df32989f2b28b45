"""How the time of a trace is assigned to rows, on traces written by hand, and the summary of a profile."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import mentions, raises

from trainwright.errors import TrainwrightError
from trainwright.hooks.flops import MatrixRate
from trainwright.hooks.profiler import ProfileSummary, Shares, round_to_hundred, share_out
from trainwright.loop.heartbeat import PhaseTrace


def summary(**changes):
    shares = Shares({"data": 0.1, "forward": 0.6, "backward": 1.2, "idle": 0.1}, has_device=True)
    figures = {
        "first_step": 11,
        "last_step": 20,
        "shares": shares,
        "seconds_per_step": 0.1,
        "is_timed": True,
        "samples_per_step": 8.0,
        "tokens_per_step": 16384.0,
        "flops_per_step": 40 * 10**12,
        "is_counted": True,
        "matrix_rate": MatrixRate(800e12, 8192, torch.bfloat16),
        "known_peak": ("H200", 1000e12),
        "trace": Path("runs/a/profile/steps-11-20-rank-0.json.gz"),
    }
    return ProfileSummary(**(figures | changes))


def test_the_summary_has_all_figures_and_fits_on_a_screen():
    text = summary().text()
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    assert lines[0] == "Profile of steps 11 to 20: 200.00 ms a step; 100.00 ms without the profiler"
    assert mentions(text, "80.0 samples/s", "163,840 tokens/s", "400 TFLOP/s", "40 TFLOP")
    assert mentions(text, "50.0%", "800 TFLOP/s", "bfloat16", "8192 × 8192")
    assert mentions(text, "40.0%", "1 PFLOP/s", "H200")
    labels = [line.split("  ")[1].strip() for line in lines[1:8]]
    assert [label.split(" ")[0] for label in labels] == (
        ["data", "host", "forward", "backward", "optimizer", "communication", "idle"]
    )


def test_a_profile_of_captures_and_replays_says_so():
    mixed = summary(shares=Shares({"forward": 1.0, "replay": 1.0}, has_device=True)).text()
    assert "Not all of these steps were replays" in mixed
    assert "replays" not in summary(shares=Shares({"replay": 1.0}, has_device=True)).text()
    assert "replays" not in summary().text()


def test_a_replayed_update_is_shown_as_one():
    text = summary(shares=Shares({"replay": 1.0, "idle": 1.0}, has_device=True)).text()
    assert "update         50.0 %" in text
    assert "forward " not in text


def test_unknown_figures_are_named():
    text = summary(flops_per_step=None, tokens_per_step=None).text()
    assert "FLOP/s unknown" in text
    assert "tokens" not in text
    assert "MFU" not in text
    assert "estimated: 6 × parameters × tokens" in summary(is_counted=False).text()
    assert "MFU of the vendor's peak: unknown" in summary(known_peak=None).text()
    assert summary(flops_per_step=None).to_dict()["share_of_matrix_rate"] is None


def test_the_file_has_the_same_figures():
    figures = summary().to_dict()
    assert figures["share_of_matrix_rate"] == pytest.approx(0.5)
    assert figures["share_of_known_peak"] == pytest.approx(0.4)
    assert figures["tokens_per_second"] == pytest.approx(163840)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(lambda amounts: sum(amounts) > 1e-3))
def test_percentages_add_up_to_a_hundred(amounts):
    rounded = round_to_hundred(dict(enumerate(amounts)))
    assert sum(round(10 * each) for each in rounded.values()) == 1000
    for number, amount in enumerate(amounts):
        assert rounded[number] == pytest.approx(100 * amount / sum(amounts), abs=0.1001)


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


def test_on_a_cpu_the_ranges_are_the_rows():
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


def test_evaluating_and_saving_are_not_counted():
    events = [*STEP, named("evaluate", 70, 1000), named("host", 1000, 1010)]
    assert microseconds(events) == {"data": 10, "forward": 20, "backward": 30, "optimizer": 10, "host": 10}
    events += ran(100, 900, launched=80) + ran(900, 1005, launched=81) + ran(15, 70, launched=12)
    assert microseconds(events) == {"data": 10, "forward": 55, "idle": 5, "host": 10}


def test_work_launched_before_the_first_range_is_not_counted():
    assert microseconds([*STEP, *ran(0, 10, launched=-5), *ran(10, 70, launched=12)]) == {"data": 10, "forward": 60}


def test_a_kernel_without_a_launch_belongs_to_the_range_of_the_host():
    kernel, _ = ran(35, 50, launched=0)
    assert microseconds([*STEP, kernel])["backward"] == 15


def test_a_replay_is_one_row():
    events = [named("data", 0, 10), named("replay", 10, 20), named("host", 20, 30), *ran(12, 60, launched=11)]
    assert microseconds(events) == {"data": 10, "replay": 48, "idle": 2}


def test_a_trace_without_ranges_is_rejected():
    with raises(TrainwrightError):
        share_out(ran(0, 1, launched=0))
