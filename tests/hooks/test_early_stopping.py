"""Stopping when a metric no longer improves."""

import json
import math
from pathlib import Path

import pytest
from tests.messages import raises

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.errors import ConfigError
from trainwright.hooks.early_stopping import EarlyStopping

PROJECT = Path(__file__).parents[1] / "project"


class Scripted(Trainer):
    """Evaluates to the numbers of a list, one an evaluation."""

    values = ()

    def eval_step(self, batch):
        return {"score": float(self.values[self.step - 1])}


def train(tmp_path, values, arguments="patience: 2", *overrides):
    class Mine(Scripted):
        pass

    Mine.values = values
    config = RunConfig.load(
        PROJECT / "run.yaml",
        [
            f"output_dir={tmp_path}",
            f"trainer.max_steps={len(values)}",
            "trainer.schedule={type: constant}",
            "evaluation={every_steps: 1}",
            f"hooks=[{{type: early_stopping, metric: valid/score, {arguments}}}]",
            *overrides,
        ],
    )
    trainer = build_trainer(config, Mine)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("values", "arguments", "stops_at"),
    [
        ([5, 4, 4, 4, 1, 1], "patience: 2", 4),
        ([5, 4, 6, 3, 6, 6, 0], "patience: 2", 6),
        ([1, 2, 2, 1, 9, 9], "patience: 2, mode: max", 4),
        ([5, 4.95, 4.92, 4.5, 4.45, 4.4], "patience: 2, min_delta: 0.1", 3),
        ([5, math.nan, math.nan, 1], "patience: 2", 3),
        ([math.nan, 5, math.nan, 4, 3, 2], "patience: 2", 6),
        ([math.nan, math.nan, 5], "patience: 2", 2),
        ([5, 4, 3, 2, 1], "patience: 1", 5),
    ],
)
def test_patience_is_evaluations_in_a_row_without_improvement(tmp_path, values, arguments, stops_at):
    trainer = train(tmp_path, values, arguments)
    assert trainer.step == stops_at
    assert (trainer.stop_reason is not None) == (stops_at < len(values))


def test_the_step_at_which_a_run_stops_is_written_and_saved(tmp_path):
    trainer = train(tmp_path, [5, 4, 4, 4, 1, 1])
    last = json.loads((trainer.folder / "metrics.json").read_text().splitlines()[-1])
    assert last["step"] == 4
    assert "loss" in last
    assert trainer.context.store.newest_intact() == 4
    assert trainer.stop_reason == "valid/score has not improved on 4.0 for 2 evaluations"


def test_a_stopped_run_stays_stopped_when_it_is_built_again(tmp_path):
    values = [5, 4, 4, 4, 1, 1]
    train(tmp_path, values)
    before = (tmp_path / "small" / "metrics.json").read_bytes()
    again = train(tmp_path, values)
    assert again.step == 4
    assert not again.interrupted
    assert (tmp_path / "small" / "metrics.json").read_bytes() == before
    assert train(tmp_path, values, "patience: 3").step == 6


def test_a_resumed_run_continues_counting(tmp_path):
    assert train(tmp_path, [5, 4, 6]).step == 3
    assert train(tmp_path, [5, 4, 6, 6, 6]).step == 4


@pytest.mark.parametrize("metric", ["score", "vaild/score", "test/score"])
def test_a_metric_of_no_evaluation_set_is_rejected_before_the_first_step(tmp_path, metric):
    hooks = f"hooks=[{{type: early_stopping, metric: {metric}}}]"
    with raises(ConfigError, "valid/loss"):
        train(tmp_path, [1, 2], "patience: 2", hooks)
    assert not (tmp_path / "small" / "metrics.json").exists()


@pytest.mark.parametrize("metric", ["valid/sore", "valid/score/macro"])
def test_a_metric_that_no_evaluation_has_is_rejected_with_the_known_ones(tmp_path, metric):
    hooks = f"hooks=[{{type: early_stopping, metric: {metric}}}]"
    with raises(ConfigError, metric, "valid/score"):
        train(tmp_path, [1, 2], "patience: 2", hooks)


def test_the_test_set_does_not_count(tmp_path):
    test = "data.test={type: parts.py:Points, size: 5}"
    trainer = train(tmp_path, [3, 2, 1], "patience: 1", test)
    assert trainer.step == 3
    assert trainer.stop_reason is None


@pytest.mark.parametrize(("arguments", "message"), [({"mode": "up"}, ("up",)), ({"patience": 0}, ("0",))])
def test_settings_that_cannot_work_are_rejected(arguments, message):
    with raises(ConfigError, *message):
        EarlyStopping("valid/loss", **arguments)
