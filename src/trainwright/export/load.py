"""Loads the trained model of a run, from anywhere, in a process without the training's set-up."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from trainwright import registry
from trainwright.backends import checked_device
from trainwright.build import build_model
from trainwright.built_ins import BUILT_INS
from trainwright.checkpoint import contents
from trainwright.checkpoint.folder import read_config
from trainwright.checkpoint.listing import checkpoints_place
from trainwright.checkpoint.open_store import AnyStore, open_store
from trainwright.checkpoint.resume import pick_step
from trainwright.checkpoint.split_tensors import SplitTensor
from trainwright.config import RunConfig
from trainwright.errors import CheckpointError
from trainwright.export.folders import find_source
from trainwright.models.from_config import build_model_section
from trainwright.models.model import Model
from trainwright.models.pretrained import allocate, on_meta
from trainwright.models.pretrained_facts import read_facts


def load_checkpoint(
    run_or_folder: str | Path, step: int | str = "latest", *, device: str | torch.device = "cpu", strict: bool = True
) -> torch.nn.Module:
    """Returns the model of a run as it was at a step, in evaluation mode, on a device.

    `run_or_folder` is a run folder or one of its checkpoints; `step` is "latest", "best" (by the run's
    keep_best) or a number. `strict=False` accepts missing and unexpected weights and names them.
    """
    device = checked_device(device)
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
            f"the weights into it: model.load_state_dict(open_store({str(store.folder)!r}).read({chosen}, 'model')), "
            "with open_store from trainwright.checkpoint.open_store."
        )
    model = _build_for(store, chosen, config, folder)
    contents.restore_model(store, chosen, model, strict=strict)
    return model.to(device).eval()


def _build_for(store: AnyStore, step: int, config: RunConfig, folder: Path) -> torch.nn.Module:
    """Builds the model that a checkpoint's weights are copied into, which is mapped from its file meanwhile.

    Of a model that is ours alone no weight is drawn first. Any other is built in full, in the run's randomness: what
    a user's code makes beside its weights, or from them, is what it was in the run.
    """
    model = _build_empty(config, folder)
    if model is not None:
        saved = store.read_split(step, "model")
        dtypes = {name: each.dtype for name, each in saved.items() if isinstance(each, torch.Tensor | SplitTensor)}
        if _holds_all(model, dtypes):
            allocate(model, dtypes)
            return model
    return build_model(config, folder=folder)


def _build_empty(config: RunConfig, folder: Path) -> torch.nn.Module | None:
    """Builds a shipped model on the meta device; None where anything of a user's takes part, or it has buffers."""
    section = config.model
    if section is None or section.type not in BUILT_INS["model"] or "replace" in section.reserved:
        return None
    if config.imports or config.task is not None or config.trainer.type not in BUILT_INS["trainer"]:
        return None
    project_dir = Path(config.project_dir)
    target = registry.find("model", section.type, project_dir=project_dir, where=section.origin, label="model")
    if not (isinstance(target, type) and issubclass(target, Model) and target.is_shipped()):
        return None  # a user has registered another under that name
    kept = read_facts(folder) if "pretrained" in section.reserved else None
    if "pretrained" in section.reserved and kept is None:
        return None  # the folder is read again
    with on_meta():
        model, _ = build_model_section(section, project_dir=project_dir, origin=config.origin, kept=kept)
    return None if any(True for _ in model.buffers()) else model


def _holds_all(model: torch.nn.Module, saved: Collection[str]) -> bool:
    """Does the checkpoint hold every parameter, a tied one under any of its names?"""
    every = model.named_parameters(remove_duplicate=False)
    present = {id(parameter) for name, parameter in every if name in saved}
    return all(id(parameter) in present for parameter in model.parameters())
