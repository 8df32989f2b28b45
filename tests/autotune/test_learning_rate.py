"""The learning-rate range test: the rule, on curves and on real runs."""

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.forked_launch import launch_well
from tests.messages import raises

from trainwright import RunConfig
from trainwright.api.tune import tune_learning_rate
from trainwright.autotune.learning_rate import Divergence, ramp, smooth, suggest
from trainwright.errors import ConfigError

PROJECT = Path(__file__).parents[1] / "project"
RATES = ramp(1e-8, 10.0, 200)


def noise(size, scale, seed=0):
    generator = random.Random(seed)
    return [generator.gauss(0.0, scale) for _ in range(size)]


def falling(rate, *, at=1e-3, initial=2.3, lowest=0.8):
    """A loss that falls around the rate `at`, and diverges three decades above it."""
    fallen = 1 / (1 + (at / rate) ** 1.5)
    return initial - (initial - lowest) * fallen + (rate / (1000 * at)) ** 4


@given(st.floats(1e-6, 1e-3), st.floats(-5, 5), st.floats(0.1, 10.0), st.integers(0, 3))
def test_the_suggestion_is_below_the_minimum_and_ignores_scale_and_offset(at, offset, scale, seed):
    losses = [falling(rate, at=at) + each for rate, each in zip(RATES, noise(len(RATES), 0.02, seed), strict=True)]
    found = suggest(RATES, losses, diverged=True).rate
    assert found is not None
    assert at / 3 < found < 100 * at
    moved = suggest(RATES, [1.0 + scale * (loss - 2.3) + offset for loss in losses], diverged=True).rate
    assert moved is None or moved == found  # a descent below 2 % of a larger loss does not count


@pytest.mark.parametrize("losses", [[2.0] * 200, [2.0 + each for each in noise(200, 0.1)]], ids=["flat", "noisy"])
def test_a_curve_without_a_descent_has_no_suggestion(losses):
    found = suggest(RATES, losses, diverged=False)
    assert found.rate is None
    assert "flat" in found.reason


def test_a_loss_that_still_falls_at_the_highest_rate_has_no_suggestion():
    found = suggest(RATES, [2.0 - rate / 10 for rate in RATES], diverged=False)
    assert found.rate is None
    assert "--max" in found.reason


def test_a_loss_that_diverges_at_once_has_no_suggestion():
    assert "--min" in suggest(RATES[:6], [2.0] * 5 + [9.0], diverged=True).reason
    rising = suggest(RATES[:40], [2.0 + index**2 / 100 for index in range(40)], diverged=True)
    assert rising.rate is None
    assert "--min" in rising.reason


def test_smoothing_follows_a_line_exactly_and_reduces_noise():
    line = [math.log10(rate) for rate in RATES]
    assert smooth(RATES, line) == pytest.approx(line)
    spread = [abs(each) for each in smooth(RATES, noise(200, 1.0))[20:-20]]
    assert max(spread) < 1.0


@given(st.floats(-10, 10), st.floats(0.01, 10))
def test_divergence_is_a_loss_far_above_the_initial_one(initial, descent):
    divergence = Divergence()
    losses = [initial - descent * step / 30 for step in range(30)]
    assert not any(map(divergence.add, losses))
    limit = initial + max(descent, 0.5 * abs(initial))
    assert any(divergence.add(limit + 1.0) for _ in range(100))
    assert Divergence().add(math.nan)


def load(*overrides):
    return RunConfig.load(PROJECT / "run.yaml", ["data.train.size=400", "model.dropout=0", *overrides])


def run(folder, *overrides, **options):
    folder.mkdir()
    return tune_learning_rate(load(*overrides), folder, **{"lowest": 1e-5, "num_steps": 40, **options})


def test_a_test_is_repeatable_writes_no_checkpoint_and_does_not_depend_on_micro_batches(tmp_path):
    first, setting = run(tmp_path / "first")
    assert setting == "trainer.optimizer.lr"
    again, _ = run(tmp_path / "again", "trainer.micro_batch_size=2", "trainer.optimizer.lr=0.3")
    assert again.rates == first.rates
    assert again.losses == pytest.approx(first.losses, rel=1e-4)
    assert first.suggestion.rate is not None
    assert list(tmp_path.rglob("step-*")) == list(tmp_path.rglob("metrics.json")) == []


@pytest.mark.parametrize(
    "optimizer",
    [
        "{type: lion, lr: 1e-4}",
        "{type: muon, lr: 1e-2}",
        "{type: 'torch.optim:SGD', lr: 0.1, momentum: 0.9}",
        "{type: 'torch.optim:Adam', lr: 0.1, capturable: false, fused: false}",
        "{type: 'schedulefree:AdamWScheduleFree', lr: 0.1}",
    ],
)
def test_the_test_works_with_any_optimizer(tmp_path, optimizer):
    result, _ = run(tmp_path / "test", f"trainer.optimizer={optimizer}", "trainer.schedule=null", num_steps=20)
    assert len(result.losses) > 5
    assert all(map(math.isfinite, result.losses[:-1]))


def test_groups_keep_their_ratios(tmp_path, monkeypatch):
    seen = []
    from trainwright.autotune.learning_rate import RangeTest

    before = RangeTest.after_step

    def after_step(self):
        seen.append([float(group["lr"]) for group in self._entry.optimizer.param_groups])
        before(self)

    monkeypatch.setattr(RangeTest, "after_step", after_step)
    groups = "groups=[{match: '*.bias', lr: 0.1}]"
    result, _ = run(tmp_path / "plain", "trainer.optimizer.lr=0.01", f"trainer.optimizer.{groups}", num_steps=20)
    assert [sorted(rates) for rates in seen] == [pytest.approx([rate, 10 * rate]) for rate in result.rates]


def test_a_rate_that_is_a_tensor_is_written_in_place(tmp_path):
    adam = "{type: 'tests.autotune.layered_model:AdamWithTensorRate', lr: 0.1}"
    result, _ = run(tmp_path / "test", f"trainer.optimizer={adam}", num_steps=20)
    plain, _ = run(tmp_path / "plain", "trainer.optimizer={type: 'torch.optim:Adam', lr: 0.1}", num_steps=20)
    assert result.losses == pytest.approx(plain.losses, rel=1e-3)


def test_one_of_several_optimizers_is_named(tmp_path):
    several = (
        "trainer.optimizers={first: {optimizer: {type: adamw, lr: 1e-3}, match: 'layers.0*', schedule: cosine}, "
        "rest: {optimizer: {type: lion, lr: 1e-4}, match: 'layers.[1-9]*'}}"
    )
    overrides = ("trainer.optimizer=null", "trainer.schedule=null", several)
    with raises(ConfigError, "--optimizer", "first", "rest"):
        run(tmp_path / "none", *overrides)
    with raises(ConfigError, "frist", "first"):
        run(tmp_path / "wrong", *overrides, optimizer="frist")
    result, setting = run(tmp_path / "first", *overrides, optimizer="first", num_steps=20)
    assert setting == "trainer.optimizers.first.optimizer.lr"
    assert len(result.losses) > 5
    with raises(ConfigError, "--optimizer"):
        run(tmp_path / "one", optimizer="main")


def test_ranks_measure_the_same_curve_as_one_process(tmp_path):
    alone, _ = run(tmp_path / "alone", num_steps=20)
    shared = tmp_path / "shared"

    def act(folder):
        result, _ = tune_learning_rate(load(), shared, lowest=1e-5, num_steps=20)
        assert result.losses == pytest.approx(alone.losses, rel=1e-4)

    launch_well(tmp_path, 2, act)
