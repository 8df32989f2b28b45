"""`trainwright evaluate RUN`: evaluates a checkpoint of a run and prints the metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trainwright.config import RunConfig
from trainwright.errors import ConfigError


def evaluate(
    run: Annotated[Path, typer.Argument(help="The run's YAML file, or its folder.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to replace, such as evaluation.batch_size=64.", show_default=False),
    ] = None,
    step: Annotated[str, typer.Option(help="Which checkpoint: latest, best, or a number.")] = "latest",
) -> None:
    """Evaluate a checkpoint on the run's evaluation sets and print the metrics as JSON."""
    from trainwright.api.run import run_experiment

    if step not in ("latest", "best") and not step.isdecimal():
        raise ConfigError(f"--step: {step!r} is neither latest, nor best, nor a number.")
    is_folder = run.is_dir()
    if is_folder and not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.yaml. Give one such as runs/NAME, or a YAML file.")
    config = RunConfig.load(run / "config.yaml" if is_folder else run, overrides or [])
    _, logs = run_experiment(config, mode="eval", model_dir=str(run) if is_folder else None, step=step)
    print(json.dumps(logs, indent=2))
