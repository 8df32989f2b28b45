"""Curves as SVG: which points are drawn, and what a browser parses."""

import builtins
import math
from xml.etree import ElementTree

import pytest
from tests.messages import raises

from trainwright.errors import TrainwrightError
from trainwright.writers.curves import curve_svg, decimate, plot_curves

SVG = "{http://www.w3.org/2000/svg}"


def parsed(curves, **options):
    return ElementTree.fromstring(curve_svg(curves, **options))


def test_a_spike_of_one_step_survives_decimation():
    points = [(step, 1.0) for step in range(100_000)]
    points[51_234] = (51_234, 9.0)
    points[70_001] = (70_001, -9.0)
    kept = decimate(points, 500)
    assert len(kept) <= 502
    assert {(51_234, 9.0), (70_001, -9.0), points[0], points[-1]} <= {*kept}
    assert kept == sorted(kept)


def test_a_value_that_is_not_finite_survives_decimation_and_is_a_gap():
    points = [(step, math.nan if step == 5_000 else 1.0 + step % 2) for step in range(10_000)]
    assert any(math.isnan(value) for _, value in decimate(points, 100))
    path = parsed({"loss": points}).find(f".//{SVG}path").get("d")
    assert path.count("M") == 2
    assert "nan" not in path


def test_a_short_curve_is_drawn_as_it_is():
    root = parsed({"loss": [(0, 2.0), (5, 1.0), (10, 0.0)]}, width=168, height=152)
    assert root.find(f".//{SVG}path").get("d") == "M56.0,28.0L106.0,78.0L156.0,128.0"


def test_the_axis_ends_at_the_last_step_of_the_run():
    path = parsed({"loss": [(0, 2.0), (5, 1.0)]}, width=168, max_step=10).find(f".//{SVG}path").get("d")
    assert path.endswith("L106.0,176.0")


def test_a_single_point_is_a_dot_and_nothing_is_nothing():
    assert parsed({"valid/loss": [(3, 0.5)]}).find(f".//{SVG}circle") is not None
    assert curve_svg({}) == curve_svg({"loss": []}) == curve_svg({"loss": [(1, math.nan)]}) == ""


def test_a_constant_and_a_wide_range_are_drawn():
    for values in ([1.0, 1.0], [0.0, 0.0], [1e-6, 1e6], [-1e30, 1e30], [1e-300, 1e-299]):
        root = parsed({"loss": list(enumerate(values))})
        assert root.find(f".//{SVG}path").get("d").startswith("M56.0,")


def test_names_are_escaped_and_colors_follow_the_page():
    text = curve_svg({"<script>alert(1)</script>": [(1, 1.0), (2, 2.0)]})
    assert "<script" not in text
    assert "currentColor" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_plot_draws_the_named_curves_and_returns_the_axes():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    curves = {"loss": [(1, 3.0), (2, 2.0)], "valid/loss": [(2, 2.5)], "lr": [(1, 0.1)]}
    axes = plot_curves(curves, ["loss", "valid/loss"])
    assert [line.get_label() for line in axes.lines] == ["loss", "valid/loss"]
    assert axes.lines[0].get_xydata().tolist() == [[1, 3], [2, 2]]
    assert plot_curves(curves, ["lr"], ax=axes) is axes
    assert len(axes.lines) == 3
    pyplot.close(axes.figure)


def test_a_name_that_the_run_does_not_have_is_rejected_with_the_nearest():
    with raises(TrainwrightError, "valid/los", "valid/loss"):
        plot_curves({"loss": [(1, 1.0)], "valid/loss": [(1, 1.0)]}, ["valid/los"])
    with raises(TrainwrightError, "loss"):
        plot_curves({}, ["loss"])


def test_without_matplotlib_plot_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with raises(TrainwrightError, "matplotlib", "trainwright[plot]"):
        plot_curves({"loss": [(1, 1.0)]}, ["loss"])
