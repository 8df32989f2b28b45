"""Trains the project for a few seconds: the loss falls, and a stopped run resumes exactly. Run: pytest"""

import json
from pathlib import Path

import torch

from trainwright import RunConfig, load_checkpoint, run_experiment

RUN = Path(__file__).parents[1] / "run.yaml"


def train(folder, *overrides):
    quick = ["log.every_steps=1", "trainer.schedule={type: constant}", "writers=[json]"]
    config = RunConfig.load(RUN, [f"output_dir={folder}", *quick, *overrides])
    _, logs = run_experiment(config)
    lines = (Path(folder) / config.name / "metrics.json").read_text().splitlines()
    return logs, [json.loads(line) for line in lines]


def test_it_learns(tmp_path, capsys):
    logs, lines = train(tmp_path, "trainer.max_steps=100")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert logs["valid/noise_removed"] > 0.2
    assert "the best valid/loss was" in capsys.readouterr().out


def test_the_trained_model_works_outside_of_a_run(tmp_path):
    train(tmp_path, "trainer.max_steps=1")
    model = load_checkpoint(tmp_path / "waves")
    assert model(torch.zeros(1, 64)).shape == (1, 64)


def test_every_part_has_its_say_in_the_log(tmp_path):
    _, lines = train(tmp_path, "trainer.max_steps=2")
    assert {"error", "roughness", "step_loss_root", "saturated", "distance", "parameter_norm"} <= lines[-1].keys()


def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    _, whole = train(tmp_path / "whole", "trainer.max_steps=10")
    train(tmp_path / "halves", "trainer.max_steps=5")
    _, halves = train(tmp_path / "halves", "trainer.max_steps=10")
    assert [line["loss"] for line in halves] == [line["loss"] for line in whole]
