"""The summary of a profile."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import mentions

from trainwright.hooks.flops import MatrixRate
from trainwright.hooks.profiler import ProfileSummary, Shares, round_to_hundred


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


def test_it_fits_on_a_screen_and_says_all_of_it():
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


def test_a_profile_of_recording_and_replays_says_so():
    mixed = summary(shares=Shares({"forward": 1.0, "replay": 1.0}, has_device=True)).text()
    assert "Not all of these steps were replays" in mixed
    assert "replays" not in summary(shares=Shares({"replay": 1.0}, has_device=True)).text()
    assert "replays" not in summary().text()


def test_a_replayed_update_is_shown_as_one():
    text = summary(shares=Shares({"replay": 1.0, "idle": 1.0}, has_device=True)).text()
    assert "update         50.0 %" in text
    assert "forward " not in text


def test_what_nobody_knows_is_said():
    text = summary(flops_per_step=None, tokens_per_step=None).text()
    assert "FLOP/s unknown" in text
    assert "tokens" not in text
    assert "MFU" not in text
    assert "estimated: 6 × parameters × tokens" in summary(is_counted=False).text()
    assert "MFU unknown of the vendor's peak" in summary(known_peak=None).text()
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
