"""Loads the trained model of a run in a process without the training setup; reads and writes export folders."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from trainwright.backends import checked_device
from trainwright.build.run import build_model
from trainwright.checkpoint import base_weights, contents
from trainwright.checkpoint.encoding import SplitTensor
from trainwright.checkpoint.listing import checkpoints_location
from trainwright.checkpoint.remote_store import AnyStore, open_store
from trainwright.checkpoint.resume import pick_step
from trainwright.checkpoint.run_folder import find_run, read_config
from trainwright.config import RunConfig
from trainwright.config.builtin import BUILT_INS
from trainwright.errors import CheckpointError
from trainwright.models.from_config import build_model_section
from trainwright.models.model import Model
from trainwright.models.pretrained import (
    CONFIG_FILE,
    INDEX_FILE,
    SECTION_FILE,
    WEIGHTS_FILE,
    allocate,
    listed,
    on_meta,
    read_json,
)
from trainwright.models.pretrained_facts import read_facts
from trainwright.models.saving import abandoned, check_target, model_files, staged, write_json
from trainwright.registry import resolve as registry
from trainwright.registry.trust import MODEL_SECTIONS, reject_untrusted

logger = logging.getLogger(__name__)

FORMATS = ("huggingface", "safetensors")
EXPORT_FILE = "export.json"


def find_source(run_or_checkpoint: Path) -> tuple[Path, int | None]:
    """Same as find_run, with a specific error for an exported folder."""
    try:
        return find_run(run_or_checkpoint)
    except CheckpointError as error:
        is_model = (run_or_checkpoint / CONFIG_FILE).is_file()
        if not is_model and not (run_or_checkpoint / SECTION_FILE).is_file():
            raise
        facts = _facts_of(run_or_checkpoint)
        of_run = f" of the run {facts['run']}" if "run" in facts else ""
        if is_model:
            raise CheckpointError(
                f"{run_or_checkpoint} is a model folder{of_run} in Hugging Face's layout, not a run. Pass the run "
                "folder. AutoModel.from_pretrained, `trainwright generate` and model.pretrained read this one."
            ) from error
        raise CheckpointError(
            f"{run_or_checkpoint} has the weights{of_run} under their own names (--format safetensors) and is not a "
            "run. Pass the run folder, or a folder that was exported without --format."
        ) from error


@contextmanager
def export_folder(folder: Path, *, run: str, file_format: str, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty folder for the files of an export, which are moved to `folder` at the end.

    Files of an earlier export are replaced or deleted; all others are kept.
    """
    check_target(folder)
    earlier = earlier_files(folder)
    if earlier is None and not overwrite:
        raise CheckpointError(
            f"{folder} is not empty and not an earlier export. Choose another folder, or replace the files of the same "
            "names: --overwrite (overwrite=True)."
        )
    with staged(folder, replaces=earlier or (), first=EXPORT_FILE) as staging:
        yield staging
        for path in staging.glob("*config.json"):
            _forget_paths(path)
        written = sorted({*(path.name for path in staging.iterdir()), EXPORT_FILE})
        _reject_other_weights(folder, {*written, *(earlier or ())}, written)
        facts = {"written_by": "trainwright", "run": run, "format": file_format}
        # Moved first, with the files that are yet to be deleted: a killed export can then be repeated.
        write_json(staging / EXPORT_FILE, {**facts, "files": sorted({*written, *(earlier or ())})})
    if set(earlier or ()) - set(written):
        draft = folder / f".{EXPORT_FILE}.writing"
        write_json(draft, {**facts, "files": written})
        draft.replace(folder / EXPORT_FILE)
    left = sorted({path.name for path in folder.iterdir()} - set(written))
    if earlier is not None:
        left = sorted({*left} & model_files(folder))
    if left:
        logger.warning(
            "%s: kept files that are not part of this export: %s. Delete those of another model, because programs that "
            "load the folder may read them.",
            folder,
            listed(left),
        )


def _reject_other_weights(folder: Path, ours: Collection[str], written: Collection[str]) -> None:
    """Rejects a folder with an unsharded weights file, which programs would load instead of the written shards."""
    other = folder / WEIGHTS_FILE
    if INDEX_FILE in written and WEIGHTS_FILE not in ours and other.exists():
        raise CheckpointError(
            f"{other} is not of an earlier export, and would be loaded instead of the written shards. Move it, or "
            "choose another folder."
        )


def earlier_files(folder: Path) -> list[str] | None:
    """Returns the files of an earlier export; [] for an empty folder, None for a folder with other files."""
    if not folder.is_dir() or not {*folder.iterdir()} - {*abandoned(folder)}:
        return []
    facts = _facts_of(folder)
    if "written_by" not in facts:
        return None
    # Only names in this folder: a manipulated file must not name others.
    files = [name for name in facts.get("files", ()) if isinstance(name, str) and Path(name).name == name]
    return [name for name in files if (folder / name).is_file()]


def _facts_of(folder: Path) -> Mapping[str, Any]:
    """Returns the content of a folder's export.json; {} if there is none."""
    path = folder / EXPORT_FILE
    content = read_json(path) if path.is_file() else None
    return content if isinstance(content, Mapping) else {}


def without_paths(value: Any) -> Any:
    """Returns settings with each absolute path replaced by its last component."""
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    if isinstance(value, Path):
        value = str(value)
    return re.split(r"[/\\]", value)[-1] if isinstance(value, str) and is_path(value) else value


def is_path(text: str) -> bool:
    """Returns True for a path that starts at a root, a drive or a home directory."""
    return PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute() or text.startswith("~")


def _forget_paths(path: Path) -> None:
    """Removes the absolute paths from a JSON file that libraries write for models and tokenizers."""
    content = json.loads(path.read_text("utf-8"))
    if not isinstance(content, dict):
        return
    kept = {
        key: value
        for key, value in content.items()
        if not (isinstance(value, str) and re.search("path|file|dir", key) and is_path(value))
    }
    if kept != content:
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_checkpoint(
    run_or_folder: str | Path,
    step: int | str = "latest",
    *,
    model: torch.nn.Module | None = None,
    weights: str | None = None,
    device: str | torch.device | None = None,
    strict: bool = True,
    trust: bool = False,
) -> torch.nn.Module:
    """Returns the model of a run at a step, in evaluation mode.

    Args:
        run_or_folder: A run folder, or one of its checkpoints.
        step: "latest", "best" (according to the run's `checkpoint.keep_best`) or a number.
        model: Receives the weights in place. By default the model is built as the config defines it.
        weights: "ema" (averaged), "raw" (trained), or None for those that the run's evaluations use.
        device: Default: the CPU, or the device of `model`.
        strict: False accepts missing and unexpected weights and logs them.
        trust: True imports the code of a foreign run folder. Its built-in components always load, and with `model` no
        code of the folder is imported.
    """
    target = None if device is None and model is not None else checked_device("cpu" if device is None else device)
    folder, named_step = find_source(Path(run_or_folder))
    if named_step is not None and step not in ("latest", named_step):
        raise CheckpointError(f"{run_or_folder} is a checkpoint of another step than {step}. Pass the run folder.")
    config = read_config(folder, trust=trust)
    assert config is not None  # find_source has checked it
    if model is None:
        reject_untrusted(config, sections=MODEL_SECTIONS)
    store = open_store(checkpoints_location(folder, config))
    chosen = pick_step(store, step if named_step is None else named_step, best=config.checkpoint.keep_best)
    if model is None and config.model is None and config.task is None and config.trainer.type == "trainer":
        raise CheckpointError(
            f"{folder} was trained with a model object, which is not in its config. Create the model and load the "
            f"weights into it: load_checkpoint({str(run_or_folder)!r}, {step!r}, model=model)."
        )
    averaged = contents.read_averaged(store, chosen, weights)
    if model is None:
        model = _build_for(store, chosen, config, folder, strict=strict)
    contents.restore_model(store, chosen, model, strict=strict)
    contents.load_averaged(averaged, model, source=store.path(chosen))
    return (model if target is None else model.to(target)).eval()


def _build_for(store: AnyStore, step: int, config: RunConfig, folder: Path, *, strict: bool) -> torch.nn.Module:
    """Builds the model for a checkpoint's weights.

    A built-in model is allocated without initialization, unless weights are stored by reference. Any other model is
    built with the run's seed, so that attributes that user code computes in the constructor are those of the run.
    """
    model = None if base_weights.PART in store.parts(step) else _build_empty(config, folder)
    if model is not None:
        saved = store.read_split(step, "model")
        # Before memory is allocated, because the config may describe another or an impossibly large model.
        contents.reject_other_model(saved, model, source=str(store.path(step)), strict=strict)
        dtypes = {name: each.dtype for name, each in saved.items() if isinstance(each, torch.Tensor | SplitTensor)}
        if _has_all(model, dtypes):
            allocate(model, dtypes)
            return model
    return build_model(config, folder=folder)


def _build_empty(config: RunConfig, folder: Path) -> torch.nn.Module | None:
    """Builds a built-in model on the meta device; None if user code is involved, or if it has buffers."""
    section = config.model
    if section is None or section.type not in BUILT_INS["model"] or {"replace", "peft"} & section.reserved.keys():
        return None
    if config.imports or config.task is not None or config.trainer.type not in BUILT_INS["trainer"]:
        return None
    project_dir = Path(config.project_dir)
    target = registry.find("model", section.type, project_dir=project_dir, where=section.origin, label="model")
    if not (isinstance(target, type) and issubclass(target, Model) and target.is_shipped()):
        return None  # another class is registered under that name
    kept = read_facts(folder) if "pretrained" in section.reserved else None
    if "pretrained" in section.reserved and kept is None:
        return None  # the folder is read again
    with on_meta():
        model, _ = build_model_section(section, project_dir=project_dir, origin=config.origin, kept=kept)
    return None if any(True for _ in model.buffers()) else model


def _has_all(model: torch.nn.Module, saved: Collection[str]) -> bool:
    """Returns True if the checkpoint has every parameter, tied ones under any of their names."""
    every = model.named_parameters(remove_duplicate=False)
    present = {id(parameter) for name, parameter in every if name in saved}
    return all(id(parameter) in present for parameter in model.parameters())
