"""`trainwright evaluate RUN`: evaluates a checkpoint of a run and prints the metrics."""

from __future__ import annotations

from trainwright.commands.terminal import CheckpointStep, Overrides, RunPath, Trust, Weights, load_run
from trainwright.errors import ConfigError
from trainwright.safe_text import json_text


def evaluate(
    run: RunPath,
    overrides: Overrides = None,
    step: CheckpointStep = "latest",
    weights: Weights = None,
    trust: Trust = False,
) -> None:
    """Evaluate a checkpoint on the run's evaluation sets and print the metrics as JSON."""
    from trainwright.api.run import run_experiment

    if step not in ("latest", "best") and not step.isdecimal():
        raise ConfigError(f"--step: {step!r} is not a checkpoint. Use latest, best or a number.")
    model_dir = str(run) if run.is_dir() else None
    config = load_run(run, overrides, trust=trust)
    _, logs = run_experiment(config, mode="eval", model_dir=model_dir, step=step, weights=weights)
    print(json_text(logs, indent=2))
