"""Curves read from a growing metrics.json, and their decimation and smoothing."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.watch.series import Curve, MetricsFile, curve_json
from trainwright.writers.curves import kept_indices

VALUES = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=300)


def lines_of(*lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def points(file, name):
    curve = file.curve(name)
    return list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.json"


# reading


def test_lines_that_are_added_are_read_without_the_earlier_ones(path, monkeypatch):
    path.write_text(lines_of({"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "valid/loss": 2.5}))
    file = MetricsFile(path)
    file.update()
    assert points(file, "loss") == [(1, 3), (2, 2)]
    read = []
    add = file._add
    monkeypatch.setattr(file, "_add", lambda lines: (read.extend(lines), add(lines)))
    with path.open("a") as more:
        more.write(lines_of({"step": 3, "loss": 1.0}))
    before = file.version
    file.update()
    assert len(read) == 1
    assert file.version != before
    assert points(file, "loss") == [(1, 3), (2, 2), (3, 1)]
    assert points(file, "valid/loss") == [(2, 2.5)]
    file.update()
    assert len(read) == 1


def test_a_half_written_line_is_read_when_it_is_complete(path):
    path.write_text(lines_of({"step": 1, "loss": 3.0}) + '{"step": 2, "lo')
    file = MetricsFile(path)
    file.update()
    assert points(file, "loss") == [(1, 3)]
    with path.open("a") as more:
        more.write('ss": 2.0}\n')
    file.update()
    assert points(file, "loss") == [(1, 3), (2, 2)]


@pytest.mark.parametrize("replaces", [True, False])
def test_a_file_that_was_cut_back_or_replaced_is_read_from_its_start(path, replaces):
    path.write_text(lines_of(*({"step": step, "loss": 1.0} for step in range(1, 6))))
    file = MetricsFile(path)
    file.update()
    # As on resume, with lines as long as before, in a new file or in place.
    text = lines_of(*({"step": step, "loss": 2.0} for step in range(1, 7)))
    if replaces:
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").replace(path)
    else:
        path.write_text(text)
    file.update()
    assert points(file, "loss") == [(step, 2) for step in range(1, 7)]
    path.write_text(lines_of({"step": 1, "loss": 4.0}))
    file.update()
    assert points(file, "loss") == [(1, 4)]


@pytest.mark.parametrize(
    "damage",
    [
        "not json", "[1, 2]", "3", '{"loss": 1}', '{"step": "7", "loss": 1}', '{"step": NaN, "loss": 1}', "\0" * 9,
        '{"step": 2, "loss": 1}, {"step": 3, "loss": 1}', "[" * 100_000, '{"step": ' + "9" * 400 + ', "loss": 2}', "",
    ],
)  # fmt: skip
def test_damaged_lines_are_skipped(path, damage):
    path.write_text(lines_of({"step": 1, "loss": 3.0}) + damage + "\n" + lines_of({"step": 4, "loss": 2.0}))
    file = MetricsFile(path)
    file.update()
    assert points(file, "loss") == [(1, 3), (4, 2)]


def test_an_integer_that_is_too_large_for_a_float_is_a_gap(path):
    path.write_text(lines_of({"step": 1, "loss": 10**400}, {"step": 2, "loss": 2}))
    file = MetricsFile(path)
    file.update()
    assert points(file, "loss") == [(1, math.inf), (2, 2)]


def test_invalid_utf8_costs_its_line_only(path):
    path.write_bytes(b'{"step": 1, "loss": 1}\n{"step": 2, "\xff": 1}\n{"step": 3, "loss": 1}\n')
    file = MetricsFile(path)
    file.update()
    assert points(file, "loss") == [(1, 1), (3, 1)]


def test_null_is_a_gap_and_texts_are_kept_apart(path):
    path.write_text(
        lines_of({"step": 1, "loss": None, "sample": "a"}, {"step": 2, "loss": 1.5, "flag": True, "list": [1]})
    )
    file = MetricsFile(path)
    file.update()
    (_, first), (_, second) = points(file, "loss")
    assert math.isnan(first)
    assert second == 1.5
    assert list(file.names) == ["loss"]
    assert file.texts() == {"sample": [(1, "a")], "flag": [(2, "true")], "list": [(2, "[1]")]}


def test_of_two_lines_with_a_step_the_last_counts_and_steps_ascend(path):
    path.write_text(lines_of({"step": 5, "a": 1.0}, {"step": 3, "a": 2.0}, {"step": 5, "a": 3.0}))
    file = MetricsFile(path)
    file.update()
    assert points(file, "a") == [(3, 2), (5, 3)]


def test_a_deleted_file_has_no_curves(path):
    path.write_text(lines_of({"step": 1, "loss": 3.0}))
    file = MetricsFile(path)
    file.update()
    before = file.version
    path.unlink()
    file.update()
    assert points(file, "loss") == []
    assert file.version != before


def test_a_file_with_a_name_per_line_does_not_fill_the_memory(path):
    path.write_text(lines_of(*({"step": step, f"name {step}": 1.0} for step in range(3000))))
    file = MetricsFile(path)
    file.update()
    assert len(file.names) == 1000


def test_a_sample_is_spread_over_the_file(path):
    path.write_text(lines_of(*({"step": step, "loss": step / 7} for step in range(1, 20_001))))
    file = MetricsFile(path)
    file.sample(100)
    assert file.is_sample
    curve = file.curve("loss")
    assert 95 <= len(curve.steps) <= 101
    assert np.diff(curve.steps).max() < 400
    assert curve.steps[-1] == 20_000
    file.update()
    assert not file.is_sample
    assert len(file.curve("loss").steps) == 20_000


def test_a_sample_has_lines_that_are_longer_than_a_block_of_it(path):
    many = {f"metric {number}": 0.123456789 for number in range(500)}
    path.write_text(lines_of(*({"step": step, "loss": 1.0, **many} for step in range(1, 101))))
    file = MetricsFile(path)
    file.sample(10)
    assert len(file.curve("loss").steps) >= 10
    assert file.curve("loss").steps[-1] == 100


def test_a_long_file_is_read_in_blocks(path):
    path.write_text(lines_of(*({"step": step, "loss": 1.0} for step in range(1, 2001))))
    file = MetricsFile(path)
    calls = 1
    while file.update(max_bytes=1000):
        calls += 1
    assert len(file.curve("loss").steps) == 2000
    assert calls >= 1
    path.write_text('{"step": 1, "text": "' + "x" * 600_000 + '"}\n' + lines_of({"step": 2, "loss": 1.0}))
    file.update()
    assert points(file, "loss") == [(2, 1)]


# decimation


@given(VALUES, st.integers(2, 60))
@settings(max_examples=200)
def test_decimation_keeps_order_ends_extremes_and_gaps(values, max_points):
    array = np.array(values)
    kept = kept_indices(array, max_points)
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    finite = array[np.isfinite(array)]
    if len(finite):
        own = array[kept]
        own = own[np.isfinite(own)]
        assert own.min() == finite.min()
        assert own.max() == finite.max()
    assert np.isfinite(array).all() == np.isfinite(array[kept]).all()
    # Per interval the two extremes and a gap, and the ends.
    assert len(kept) <= max(len(values) if len(values) <= max_points else 0, 3 * max(max_points // 2, 1) + 2)


@given(VALUES, st.integers(0, 299), st.integers(0, 299))
def test_a_range_has_its_points_and_one_more_on_each_side(values, one, other):
    low, high = sorted((one, other))
    steps = np.arange(len(values), dtype=float)
    part = Curve(steps, np.array(values)).between(low, high).steps.tolist()
    wanted = [step for step in steps.tolist() if low <= step <= high]
    assert [step for step in part if low <= step <= high] == wanted
    assert len(part) - len(wanted) <= 2


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=200), st.floats(0, 1))
def test_smoothing_is_the_mean_of_a_centered_window(values, share):
    array = np.array(values)
    smooth = Curve(np.arange(len(array)), array).smooth(share).values
    radius = int(len(array) * share / 2)
    for index in {0, len(array) // 2, len(array) - 1}:
        half = min(radius, index, len(array) - 1 - index)
        assert smooth[index] == pytest.approx(array[index - half : index + half + 1].mean(), abs=1e-6)


def test_smoothing_ignores_gaps_and_keeps_small_differences_of_large_values():
    values = 1e9 + np.arange(100) * 1e-3
    values[50] = np.nan
    smooth = Curve(np.arange(100), values).smooth(0.1).values
    assert np.isfinite(smooth).all()
    assert np.abs(smooth - (1e9 + np.arange(100) * 1e-3)).max() < 1e-3


def test_the_best_is_the_first_of_the_finite_extremes():
    curve = Curve(np.arange(5.0), np.array([np.nan, 2.0, 1.0, 1.0, np.inf]))
    assert curve.best("min") == (2, 1)
    assert curve.best("max") == (1, 2)
    assert Curve(np.arange(1.0), np.array([np.nan])).best("min") is None


@given(VALUES)
def test_a_curve_is_strict_json(values):
    curve = Curve(np.arange(len(values)), np.array(values))
    found = json.loads(curve_json(curve, 50, smoothing=0.1), parse_constant=lambda name: pytest.fail(name))
    assert len(found["x"]) == len(found["y"])
    for value, index in zip(found["y"], found["x"], strict=True):
        expected = values[int(index)]
        assert value is None if not math.isfinite(expected) else value == pytest.approx(expected, rel=1e-5)
