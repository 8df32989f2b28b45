"""Trains the project for a few seconds, also on your own texts; a stopped run resumes. Run: pytest"""

import json
from pathlib import Path

from trainwright import RunConfig, run_experiment

RUN = Path(__file__).parents[1] / "run.yaml"


def train(folder, *overrides):
    quick = ["log.every_steps=1", "evaluation.max_batches=2", "trainer.schedule={type: constant}", "writers=[json]"]
    config = RunConfig.load(RUN, [f"output_dir={folder}", *quick, *overrides])
    _, logs = run_experiment(config)
    lines = (Path(folder) / config.name / "metrics.json").read_text().splitlines()
    return logs, [json.loads(line)["loss"] for line in lines]


def test_it_learns(tmp_path, capsys):
    logs, losses = train(tmp_path, "trainer.max_steps=20")
    assert losses[-1] < losses[0] - 0.5
    assert logs["valid/perplexity"] < 512  # the number of tokens: what guessing would give
    assert "--- step 20" in capsys.readouterr().out


def test_it_learns_from_text_files(tmp_path):
    (tmp_path / "poem.txt").write_text("the rain in spain stays mainly in the plain\n" * 100)
    sets = [{"type": "text_files.TextFiles", "folder": str(tmp_path), "part": part} for part in ("train", "valid")]
    data = [f"data.train={json.dumps(sets[0])}", f"data.eval.valid={json.dumps(sets[1])}"]
    _, losses = train(tmp_path, "trainer.max_steps=10", *data)
    assert losses[-1] < losses[0]


def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    _, whole = train(tmp_path / "whole", "trainer.max_steps=6")
    train(tmp_path / "halves", "trainer.max_steps=3")
    _, halves = train(tmp_path / "halves", "trainer.max_steps=6")
    assert halves == whole
