"""Loads the trained model of a run or an export, from anywhere, in a process without the training's setup."""

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
from trainwright.checkpoint import contents
from trainwright.checkpoint.encoding import SplitTensor
from trainwright.checkpoint.folder import find_run, read_config
from trainwright.checkpoint.listing import checkpoints_location
from trainwright.checkpoint.remote_store import AnyStore, open_store
from trainwright.checkpoint.resume import pick_step
from trainwright.config import RunConfig
from trainwright.config.files import save_document
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
from trainwright.registry.builtin import BUILT_INS

logger = logging.getLogger(__name__)

FORMATS = ("huggingface", "safetensors")
EXPORT_FILE = "export.json"


def find_source(run_or_checkpoint: Path) -> tuple[Path, int | None]:
    """Does what find_run does, and of a folder that was exported says what it is and who reads it."""
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
                f"{run_or_checkpoint} is a model folder{of_run} in Hugging Face's layout, not a run. Give the run's "
                "folder. This one is read by AutoModel.from_pretrained, `trainwright generate` and model.pretrained."
            ) from error
        raise CheckpointError(
            f"{run_or_checkpoint} holds the weights{of_run} under their own names (--format safetensors) and is no "
            "run. Give the run's folder, or one that was exported without --format."
        ) from error


@contextmanager
def export_folder(folder: Path, *, run: str, file_format: str, overwrite: bool = False) -> Iterator[Path]:
    """Gives an empty folder to write an export into, whose files are those of `folder` at the end.

    Files of an earlier export are replaced and gone where they are not written anew; all others are kept.
    """
    check_target(folder)
    earlier = earlier_files(folder)
    if earlier is None and not overwrite:
        raise CheckpointError(
            f"{folder} has files and is no earlier export, so nothing is written there. Choose another folder, or "
            "replace the files of the same names: --overwrite (overwrite=True)."
        )
    with staged(folder, replaces=earlier or (), first=EXPORT_FILE) as staging:
        yield staging
        for path in staging.glob("*config.json"):
            _forget_paths(path)
        written = sorted({*(path.name for path in staging.iterdir()), EXPORT_FILE})
        _reject_other_weights(folder, {*written, *(earlier or ())}, written)
        facts = {"written_by": "trainwright", "run": run, "format": file_format}
        # Moved first, with the files that are yet to go: whoever is killed between two moves can export again.
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
            "%s: kept, though this export did not write them: %s. Remove those that belong to another model: "
            "whoever loads the folder may read them.",
            folder,
            listed(left),
        )


def _reject_other_weights(folder: Path, ours: Collection[str], written: Collection[str]) -> None:
    """Rejects a folder with weights of others that every reader would take before those that are written in shards."""
    other = folder / WEIGHTS_FILE
    if INDEX_FILE in written and WEIGHTS_FILE not in ours and other.exists():
        raise CheckpointError(
            f"{other} is not of an earlier export, and would be read in place of the shards that are written. Move it "
            "away, or choose another folder."
        )


def earlier_files(folder: Path) -> list[str] | None:
    """Returns the files that an earlier export wrote, none for a fresh folder; None where the files are others'."""
    if not folder.is_dir() or not {*folder.iterdir()} - {*abandoned(folder)}:
        return []
    facts = _facts_of(folder)
    if "written_by" not in facts:
        return None
    # Only names of this folder: a file that was tampered with must not name others.
    files = [name for name in facts.get("files", ()) if isinstance(name, str) and Path(name).name == name]
    return [name for name in files if (folder / name).is_file()]


def _facts_of(folder: Path) -> Mapping[str, Any]:
    """What the export.json of a folder says; nothing where there is none."""
    path = folder / EXPORT_FILE
    content = read_json(path) if path.is_file() else None
    return content if isinstance(content, Mapping) else {}


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of the model beside its weights, where there are any."""
    if settings:
        save_document(folder / SECTION_FILE, settings)


def without_paths(value: Any) -> Any:
    """Returns settings in which a path that begins at a root or a home is its last part: nobody else has it."""
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    if isinstance(value, Path):
        value = str(value)
    return re.split(r"[/\\]", value)[-1] if isinstance(value, str) and is_path(value) else value


def is_path(text: str) -> bool:
    """Is this a path of one machine alone: one that begins at a root, a drive or a home?"""
    return PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute() or text.startswith("~")


def _forget_paths(path: Path) -> None:
    """Takes out of a JSON file what libraries tell in it of where a model or tokenizer was read from."""
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
    store = open_store(checkpoints_location(folder, config))
    chosen = pick_step(store, step if named_step is None else named_step, best=config.checkpoint.keep_best)
    if config.model is None and config.task is None and config.trainer.type == "trainer":
        raise CheckpointError(
            f"{folder} was made from a model object, of which it keeps no recipe. Make the model yourself and load "
            f"the weights into it: model.load_state_dict(open_store({str(store.folder)!r}).read({chosen}, 'model')), "
            "with open_store from trainwright.checkpoint.remote_store."
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
