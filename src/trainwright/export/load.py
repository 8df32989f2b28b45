"""Loads the trained model of a run, from anywhere, in a process without the training's set-up."""

from __future__ import annotations

from pathlib import Path

import torch

from trainwright.build import build_model
from trainwright.checkpoint import contents
from trainwright.checkpoint.folder import CHECKPOINTS, find_run, read_config
from trainwright.checkpoint.resume import pick_step
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError


def load_checkpoint(
    run_or_folder: str | Path, step: int | str = "latest", *, device: str | torch.device = "cpu", strict: bool = True
) -> torch.nn.Module:
    """Returns the model of a run as it was at a step, in evaluation mode, on a device.

    `run_or_folder` is a run folder or one of its checkpoints; `step` is "latest", "best" (by the run's
    keep_best) or a number. `strict=False` accepts missing and unexpected weights and names them.
    """
    folder, named_step = find_run(Path(run_or_folder))
    if named_step is not None and step not in ("latest", named_step):
        raise CheckpointError(f"{run_or_folder} is one checkpoint, but step {step} is asked for. Give the run folder.")
    config = read_config(folder)
    assert config is not None  # find_run saw it
    store = CheckpointStore(folder / CHECKPOINTS)
    chosen = pick_step(store, step if named_step is None else named_step, best=config.checkpoint.keep_best)
    if config.model is None and config.task is None and config.trainer.type == "trainer":
        raise CheckpointError(
            f"{folder} was made from a model object, of which it keeps no recipe. Make the model yourself and load "
            f"{store.path(chosen) / 'model.safetensors'} into it with safetensors.torch.load_model."
        )
    model = build_model(config)
    contents.restore_model(store, chosen, model, strict=strict)
    return model.to(device).eval()
