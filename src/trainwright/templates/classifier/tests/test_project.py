"""Trains the project for a few seconds: the loss falls, and a stopped run resumes exactly. Run: pytest"""

import json
from pathlib import Path

from trainwright import RunConfig, run_experiment

RUN = Path(__file__).parents[1] / "run.yaml"


def train(folder, *overrides):
    config = RunConfig.load(
        RUN, [f"output_dir={folder}", "log.every_steps=1", "writers=[json]", "hooks=[]", *overrides]
    )
    _, logs = run_experiment(config)
    lines = (Path(folder) / config.name / "metrics.json").read_text().splitlines()
    return logs, [json.loads(line)["loss"] for line in lines]


def test_it_learns(tmp_path):
    logs, losses = train(tmp_path, "trainer.max_steps=200")
    assert losses[-1] < losses[0]
    assert logs["valid/accuracy"] > 0.6  # one in three by guessing


def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    schedule = "trainer.schedule={type: constant}"  # a cosine over 5 steps is not one over 10
    _, whole = train(tmp_path / "whole", schedule, "trainer.max_steps=10")
    train(tmp_path / "halves", schedule, "trainer.max_steps=5")
    _, halves = train(tmp_path / "halves", schedule, "trainer.max_steps=10")
    assert halves == whole
