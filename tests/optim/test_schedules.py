"""Schedules: exact end points, bounds and monotony for any run, and clear rejections."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.errors import ConfigError
from trainwright.optim.schedules import (
    Constant,
    Cosine,
    InverseSquareRoot,
    Linear,
    Polynomial,
    Step,
    WarmupStableDecay,
)

fractions = st.floats(0.0, 1.0)


@st.composite
def runs(draw):
    """A run's length and a warm-up that fits into it."""
    max_steps = draw(st.integers(1, 300))
    return max_steps, draw(st.integers(0, max_steps))


def decaying(warmup, minimum):
    return [
        Linear(warmup_steps=warmup, minimum=minimum),
        Cosine(warmup_steps=warmup, minimum=minimum),
        Polynomial(warmup_steps=warmup, minimum=minimum, power=1.7),
    ]


def every_kind(warmup, minimum=0.0):
    return [
        *decaying(warmup, minimum),
        Constant(warmup_steps=warmup),
        InverseSquareRoot(warmup_steps=warmup),
        Step(warmup_steps=warmup, every_steps=7, factor=0.5),
        *(
            WarmupStableDecay(warmup_steps=warmup, decay_steps=0, minimum=minimum, shape=shape)
            for shape in ("linear", "cosine", "sqrt")
        ),
    ]


@given(runs(), fractions)
def test_every_schedule_rises_then_never_rises_again_within_its_range(run, minimum):
    max_steps, warmup = run
    peak = max(warmup - 1, 0)
    for schedule in every_kind(warmup, minimum):
        factors = [schedule(step, max_steps) for step in range(max_steps)]
        assert factors[peak] == 1.0
        assert all(factor < 1.0 for factor in factors[:peak])
        assert all(0.0 <= factor <= 1.0 for factor in factors)
        assert factors[: peak + 1] == sorted(factors[: peak + 1])
        assert all(later <= earlier + 1e-12 for earlier, later in pairwise(factors[peak:]))


@given(runs(), fractions)
def test_decaying_schedules_end_at_exactly_the_minimum(run, minimum):
    max_steps, warmup = run
    for schedule in decaying(warmup, minimum):
        expected = minimum if max_steps - 1 > max(warmup - 1, 0) else 1.0
        assert schedule(max_steps - 1, max_steps) == expected


@given(runs(), fractions, st.sampled_from(["linear", "cosine", "sqrt"]), st.data())
def test_warmup_stable_decay_is_one_up_to_its_decay_and_ends_at_exactly_the_minimum(run, minimum, shape, data):
    max_steps, warmup = run
    peak = max(warmup - 1, 0)
    decay = data.draw(st.integers(0, max_steps - 1 - peak))
    schedule = WarmupStableDecay(warmup_steps=warmup, decay_steps=decay, shape=shape, minimum=minimum)
    factors = [schedule(step, max_steps) for step in range(max_steps)]
    assert set(factors[peak : max_steps - decay]) == {1.0}
    assert factors[-1] == (minimum if decay else 1.0)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(factors[peak:]))


@given(st.integers(1, 500), fractions)
def test_fractions_that_fill_the_run_are_taken_for_every_length(max_steps, warmup_fraction):
    schedule = WarmupStableDecay(warmup_fraction=warmup_fraction, decay_fraction=1.0 - warmup_fraction)
    assert 0.0 <= schedule(max_steps - 1, max_steps) <= 1.0


@given(runs(), st.integers(0, 1000))
def test_steps_beyond_the_run_hold_the_last_value(run, excess):
    max_steps, warmup = run
    for schedule in every_kind(warmup):
        assert schedule(max_steps + excess, max_steps) == schedule(max_steps - 1, max_steps)


def test_warm_up_rises_by_equal_parts_to_exactly_one():
    factors = [Constant(warmup_steps=4)(step, 10) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_without_warm_up_the_first_update_has_the_whole_rate():
    assert all(schedule(0, 100) == 1.0 for schedule in every_kind(0))


def test_a_warm_up_fraction_is_a_part_of_the_run():
    assert Cosine(warmup_fraction=0.29)(28, 100) == 1.0
    assert Cosine(warmup_fraction=0.29)(27, 100) == 28 / 29


def test_linear_falls_by_equal_parts():
    assert [Linear()(step, 5) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [Linear(minimum=0.5)(step, 3) for step in range(3)] == [1.0, 0.75, 0.5]


def test_cosine_is_half_way_in_the_middle():
    assert Cosine(minimum=0.1)(50, 101) == pytest.approx(0.55)


def test_polynomial_of_power_one_is_linear():
    assert [Polynomial(power=1)(step, 9) for step in range(9)] == [Linear()(step, 9) for step in range(9)]


def test_inverse_square_root_halves_at_four_times_the_peak():
    schedule = InverseSquareRoot(warmup_steps=10)
    assert schedule(9, 100) == 1.0
    assert schedule(39, 100) == pytest.approx(0.5)
    assert schedule(39, 100) == schedule(39, 1000)


def test_step_drops_after_every_so_many_updates_from_the_peak():
    assert [Step(every_steps=2, factor=0.5)(step, 6) for step in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert Step(every_steps=2, factor=0.5, warmup_steps=4)(5, 10) == 0.5


def test_step_drops_at_its_milestones():
    schedule = Step(milestones=[2, 3], factor=0.5)
    assert [schedule(step, 5) for step in range(5)] == [1.0, 1.0, 0.5, 0.25, 0.25]


def test_the_sqrt_decay_is_steep_at_first():
    schedule = WarmupStableDecay(decay_steps=4, shape="sqrt")
    assert [schedule(step, 10) for step in range(5, 10)] == [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]


def test_a_tenth_of_the_run_decays_unless_told_otherwise():
    assert WarmupStableDecay()(89, 100) == 1.0
    assert WarmupStableDecay()(90, 100) == pytest.approx(0.9)


def test_a_longer_run_derives_the_course_anew():
    schedule = Linear()
    assert (schedule(5, 11), schedule(5, 21)) == (0.5, 0.75)


def test_a_run_shorter_than_its_warm_up_ends_on_the_way_up():
    assert [Cosine(warmup_steps=40)(step, 3) for step in range(3)] == [1 / 40, 2 / 40, 3 / 40]


def test_a_decay_longer_than_the_rest_begins_at_the_peak():
    schedule = WarmupStableDecay(warmup_steps=6, decay_steps=50)
    assert [schedule(step, 10) for step in (5, 9)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(warmup_steps=5, warmup_fraction=0.1), ("warmup_steps", "5", "warmup_fraction")),
        (lambda: Cosine(warmup_steps=-1), ("warmup_steps", "1")),
        (lambda: Cosine(warmup_steps=2.5), ("warmup_steps", "2.5")),
        (lambda: Linear(warmup_fraction=1.5), ("warmup_fraction", "1.5")),
        (lambda: Linear(warmup_fraction=math.nan), ("warmup_fraction",)),
        (lambda: Linear(minimum=-0.1), ("-0.1",)),
        (lambda: Linear(minimum="low"), ("low",)),
        (lambda: Polynomial(power=0), ("0",)),
        (lambda: Step(), ("every_steps",)),
        (lambda: Step(every_steps=3, milestones=[4]), ()),
        (lambda: Step(every_steps=0), ("every_steps", "0")),
        (lambda: Step(milestones=[5, 3]), ()),
        (lambda: Step(every_steps=3, factor=2.0), ("2.0",)),
        (lambda: WarmupStableDecay(decay_steps=3, decay_fraction=0.1), ()),
        (lambda: WarmupStableDecay(shape="square"), ()),
        (lambda: Step(milestones=[3], warmup_steps=5)(6, 10), ("3",)),
    ],
)
def test_settings_that_cannot_work_are_rejected_with_their_values(make, message):
    with raises(ConfigError, *message):
        make()
