"""Preference losses: equal to TRL's, exact for any micro-batches, with a reference that does not move."""

import json
from pathlib import Path

import pytest
from tests.references import preference_cases as cases
from tests.trainers import preference_runs as runs

from trainwright import build_trainer

TRL = json.loads((Path(__file__).parents[1] / "references" / "preferences_trl.json").read_text())
PAIRED = [name for name in cases.LOSSES if name != "kto"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    runs.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def singles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("singles")
    runs.prepare(folder, paired=False)
    return folder


def train(folder, tmp_path, *overrides, **settings):
    content = runs.settings(folder, **settings)
    content["output_dir"] = str(tmp_path / "runs")
    trainer = build_trainer(runs.load(folder, content, *overrides))
    trainer.train()
    return trainer, runs.lines_of(tmp_path)


@pytest.mark.parametrize("model", ["transformers:LlamaForCausalLM", "llama"])
@pytest.mark.parametrize("loss_type", cases.LOSSES)
def test_losses_and_metrics_are_those_of_trl(pairs, singles, tmp_path, loss_type, model):
    folder = singles if loss_type == "kto" else pairs
    _, lines = train(folder, tmp_path, loss_type=loss_type, model=model, **cases.LOSSES[loss_type])
    assert len(lines) == len(TRL[loss_type]) == cases.STEPS
    for line, expected in zip(lines, TRL[loss_type], strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        # Rewards are differences of numbers near 50, whose last bit in fp32 is 4e-6.
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-5)
