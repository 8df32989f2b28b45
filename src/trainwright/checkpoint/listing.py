"""Lists the checkpoints in a folder or at a URL by their manifests and file sizes, without reading tensors.

For `trainwright checkpoints`; a run itself uses its store, which compares hashes. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.checkpoint.manifest import MANIFEST, STEP_NAME, UnreachableError, read_manifest
from trainwright.checkpoint.remote_files import RemoteFolder, is_address, local_path
from trainwright.config import RunConfig
from trainwright.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""

_SET_ASIDE_NAME = re.compile(r"damaged-step-(\d{8,})(?:-\d+)?")
_REPLACED_NAME = re.compile(r"\.aside-step-(\d{8,})-[0-9a-f]+")


@dataclass(frozen=True)
class Listed:
    """One checkpoint, as described by its manifest and the sizes of its files."""

    step: int
    name: str
    size: int
    """Bytes of all its files, intact or not."""
    created: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None
    """The damage; None if none is visible without reading the content."""
    is_unfinished: bool = False
    """True while it is uploaded to a remote folder, or if its writer died; it is not yet a checkpoint."""
    is_set_aside: bool = False
    """True if it is damaged and kept under another name; a run ignores it."""


def checkpoints_location(run: Path, config: RunConfig) -> str | Path:
    """Returns the folder or address of a run's checkpoints: in the run folder, or `checkpoint.folder`/name."""
    chosen = config.checkpoint.folder
    if chosen is None:
        return run / CHECKPOINTS
    # By name, because the runs of a sweep share the setting and must not load each other's weights.
    return f"{chosen.rstrip('/')}/{config.name}" if is_address(chosen) else local_path(chosen) / config.name


def list_checkpoints(folder: str | Path) -> list[Listed]:
    """Returns the checkpoints in a folder or at an address, ascending by step; damaged ones set aside come last."""
    found = _list_remote(str(folder)) if is_address(folder) else _list_local(local_path(folder))
    return sorted(found, key=lambda one: (one.is_set_aside, one.step))


def _list_local(folder: Path) -> Iterator[Listed]:
    try:
        paths = {path.name: path for path in folder.iterdir() if not path.is_symlink() and path.is_dir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"The folder cannot be listed: {error}.", where=folder) from error
    for name, path in paths.items():
        plain, aside, replaced = (one.fullmatch(name) for one in (STEP_NAME, _SET_ASIDE_NAME, _REPLACED_NAME))
        # A checkpoint that is being replaced counts as long as no folder has its final name.
        if replaced and f"step-{replaced[1]}" not in paths:
            plain = replaced
        if plain:
            yield _describe(int(plain[1]), name, _sizes(path), partial(read_manifest, path))
        elif aside:
            yield Listed(int(aside[1]), name, _total(_sizes(path)), is_set_aside=True)


def _list_remote(address: str) -> Iterator[Listed]:
    remote = RemoteFolder(address)
    folders = remote.step_folders()
    newest = {folder.step: folder.number for folder in folders if folder.is_committed}
    for folder in folders:
        sizes = {name: file.size for name, file in folder.files.items()}
        total = _total(sizes)
        if folder.is_set_aside:
            yield Listed(folder.step, folder.name, total, is_set_aside=True)
        elif folder.files and folder.number >= newest.get(folder.step, 0):
            # Folders with lower numbers were replaced, or are leftovers of dead writers.
            if not folder.is_committed:
                yield Listed(folder.step, folder.name, total, is_unfinished=True)
            else:
                yield _describe(folder.step, folder.name, sizes, partial(remote.manifest, folder))


def _describe(step: int, name: str, sizes: Mapping[str, int | None], read: Callable[[], dict[str, Any]]) -> Listed:
    total = _total(sizes)
    if MANIFEST not in sizes:
        return Listed(step, name, total, problem=f"{MANIFEST} is missing")
    try:
        manifest = read()
        created = datetime.fromisoformat(manifest["created"])
        wrong = [
            f"{file} is missing" if file not in sizes else f"{file} has {sizes[file]} bytes instead of {facts['size']}"
            for file, facts in manifest["files"].items()
            if file not in sizes or sizes[file] not in (None, facts["size"])
        ]
        metrics = {metric: float(value) for metric, value in manifest["metrics"].items()}
        if manifest["step"] != step:
            wrong.append(f"the manifest is of step {manifest['step']}")
    except UnreachableError:
        raise
    except CheckpointError as error:
        return Listed(step, name, total, problem=error.problem.rstrip("."))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Listed(step, name, total, problem=f"The manifest is damaged: {error!r}")
    return Listed(step, name, total, created, metrics, "; ".join(wrong) or None)


def _sizes(folder: Path) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {}
    try:
        for path in folder.iterdir():
            sizes[path.name] = path.stat().st_size
    except OSError:
        """Deleted by the run in the meantime; the caller reports what is missing."""
    return sizes


def _total(sizes: Mapping[str, int | None]) -> int:
    return sum(size or 0 for size in sizes.values())
