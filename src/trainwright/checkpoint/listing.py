"""What checkpoints a folder or an address holds, by manifests and sizes alone: no tensor is opened, no content read.

For people who ask (`trainwright checkpoints`); a run itself asks its store, which hashes. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from trainwright.checkpoint.manifest import MANIFEST, STEP_NAME, read_manifest
from trainwright.checkpoint.remote_files import RemoteFolder, UnreachableError, is_address, local_path
from trainwright.config import RunConfig
from trainwright.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""As folder.py names it; that imports torch. A test compares."""

_SET_ASIDE_NAME = re.compile(r"damaged-step-(\d{8,})(?:-\d+)?")
_Source = TypeVar("_Source")
_REPLACED_NAME = re.compile(r"\.aside-step-(\d{8,})-[0-9a-f]+")


@dataclass(frozen=True)
class Listed:
    """One checkpoint, as its manifest and the sizes of its files say."""

    step: int
    name: str
    size: int
    """Bytes of all its files, whether or not they are whole."""
    created: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None
    """What is wrong with it; None: nothing that can be seen without reading it."""
    is_unfinished: bool = False
    """Is it being put to a remote folder, or was left there by a writer that died? It is no checkpoint."""
    is_set_aside: bool = False
    """Was it found damaged before, and kept under another name? A run takes no notice of it."""


def checkpoints_location(run: Path, config: RunConfig) -> str | Path:
    """Returns where a run's checkpoints go: its own folder for them, or one of its name below `checkpoint.folder`."""
    chosen = config.checkpoint.folder
    if chosen is None:
        return run / CHECKPOINTS
    # By name, for the runs of a sweep share a setting and must not take up each other's weights.
    return f"{chosen.rstrip('/')}/{config.name}" if is_address(chosen) else local_path(chosen) / config.name


def list_checkpoints(place: str | Path) -> list[Listed]:
    """Returns what lies in a folder or behind an address, ascending by step; those set aside after the others."""
    found = _list_remote(str(place)) if is_address(place) else _list_local(local_path(place))
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
        # A checkpoint that is being replaced counts while nothing bears its own name.
        if replaced and f"step-{replaced[1]}" not in paths:
            plain = replaced
        if plain:
            yield _describe(int(plain[1]), name, _sizes(path), read_manifest, path)
        elif aside:
            yield Listed(int(aside[1]), name, _total(_sizes(path)), is_set_aside=True)


def _list_remote(address: str) -> Iterator[Listed]:
    folder = RemoteFolder(address)
    takes = folder.takes()
    newest = {take.step: take.number for take in takes if take.is_committed}
    for take in takes:
        sizes = {name: file.size for name, file in take.files.items()}
        total = _total(sizes)
        if take.is_set_aside:
            yield Listed(take.step, take.name, total, is_set_aside=True)
        elif take.files and take.number >= newest.get(take.step, 0):
            # Below the newest lie those that were replaced, and what dead writers left.
            if not take.is_committed:
                yield Listed(take.step, take.name, total, is_unfinished=True)
            else:
                yield _describe(take.step, take.name, sizes, folder.manifest, take)


def _describe(
    step: int, name: str, sizes: Mapping[str, int | None], read: Callable[[_Source], dict[str, Any]], place: _Source
) -> Listed:
    total = _total(sizes)
    if MANIFEST not in sizes:
        return Listed(step, name, total, problem=f"{MANIFEST} is missing")
    try:
        manifest = read(place)
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
        """Deleted by the run while we look; what is missing is said by the caller."""
    return sizes


def _total(sizes: Mapping[str, int | None]) -> int:
    return sum(size or 0 for size in sizes.values())
