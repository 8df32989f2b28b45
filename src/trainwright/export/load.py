"""Loads the trained model of a run, from anywhere, in a process without the training's set-up."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from trainwright.build import build_model
from trainwright.checkpoint import contents
from trainwright.checkpoint.folder import read_config
from trainwright.checkpoint.listing import checkpoints_place
from trainwright.checkpoint.open_store import AnyStore, open_store
from trainwright.checkpoint.resume import pick_step
from trainwright.config import RunConfig
from trainwright.errors import CheckpointError
from trainwright.export.folders import find_source
from trainwright.models.empty import allocate, build_empty


def load_checkpoint(
    run_or_folder: str | Path, step: int | str = "latest", *, device: str | torch.device = "cpu", strict: bool = True
) -> torch.nn.Module:
    """Returns the model of a run as it was at a step, in evaluation mode, on a device.

    `run_or_folder` is a run folder or one of its checkpoints; `step` is "latest", "best" (by the run's
    keep_best) or a number. `strict=False` accepts missing and unexpected weights and names them.
    """
    folder, named_step = find_source(Path(run_or_folder))
    if named_step is not None and step not in ("latest", named_step):
        raise CheckpointError(f"{run_or_folder} is one checkpoint, but step {step} is asked for. Give the run folder.")
    config = read_config(folder)
    assert config is not None  # find_source saw it
    store = open_store(checkpoints_place(folder, config))
    chosen = pick_step(store, step if named_step is None else named_step, best=config.checkpoint.keep_best)
    if config.model is None and config.task is None and config.trainer.type == "trainer":
        raise CheckpointError(
            f"{folder} was made from a model object, of which it keeps no recipe. Make the model yourself and load "
            f"{store.path(chosen) / 'model.safetensors'} into it with safetensors.torch.load_model."
        )
    model = _build_for(store, chosen, config, folder)
    contents.restore_model(store, chosen, model, strict=strict)
    return model.to(device).eval()


def _build_for(store: AnyStore, step: int, config: RunConfig, folder: Path) -> torch.nn.Module:
    """Builds the model that a checkpoint's weights are loaded into, without drawing what they replace.

    At the peak there are the model and, mapped from its file, the checkpoint. A model whose class does not allow
    it, or of which the checkpoint lacks weights, is built in full.
    """
    model = build_empty(lambda: build_model(config, folder=folder))
    dtypes = {name: each.dtype for name, each in store.read(step, "model").items() if isinstance(each, torch.Tensor)}
    if model is None or not _holds_all(model, dtypes):
        return build_model(config, folder=folder)
    allocate(model, dtypes)
    return model


def _holds_all(model: torch.nn.Module, saved: Collection[str]) -> bool:
    """Does the checkpoint hold every parameter, a tied one under any of its names?"""
    every = model.named_parameters(remove_duplicate=False)
    present = {id(parameter) for name, parameter in every if name in saved}
    return all(id(parameter) in present for parameter in model.parameters())
