"""`trainwright evaluate RUN`: evaluates a checkpoint of a run and prints the metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trainwright.config import RunConfig


def evaluate(
    run: Annotated[Path, typer.Argument(help="The run's YAML file, or its folder.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to replace, such as evaluation.batch_size=64.", show_default=False),
    ] = None,
    step: Annotated[str, typer.Option(help="Which checkpoint: latest, best, or a number.")] = "latest",
) -> None:
    """Evaluate a checkpoint on the run's evaluation sets and print the metrics as JSON."""
    from trainwright.main import run_experiment

    is_folder = run.is_dir()
    config = RunConfig.load(run / "config.yaml" if is_folder else run, overrides or [])
    _, logs = run_experiment(config, mode="eval", model_dir=str(run) if is_folder else None, step=step)
    print(json.dumps(logs, indent=2))
