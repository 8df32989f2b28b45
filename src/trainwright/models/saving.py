"""Writes a module as a folder in Hugging Face's layout: config.json and safetensors, in shards where it is large.

Files are made in a folder of their own and moved when all are there, the one that makes a model of them last, so that
nobody ever reads half of one. What others have put into the folder is left alone. A writer that was killed leaves the
folder that it made files in; the next one removes it, and may write anew what is half moved.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # no POSIX: then nobody can tell that a writer is gone, and nothing is removed
    fcntl = None  # type: ignore[assignment]

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.key_map import KeyMap
from trainwright.models.pretrained import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLED_FILE,
    PICKLED_INDEX_FILE,
    WEIGHTS_FILE,
    shared_names,
)

SETTINGS = (CONFIG_FILE, "adapter_config.json")
"""The files without which nobody takes a folder for a model's or an adapter's."""

SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def write_folder(
    model: nn.Module,
    folder: Path,
    config: Mapping[str, Any],
    *,
    key_map: KeyMap | None = None,
    max_shard_bytes: int = 5_000_000_000,
    leave_out: Collection[str] = (),
) -> Path:
    """Writes a model's config.json, with its dtype, and its weights; returns the folder.

    In a model's folder that exists these files are replaced. A folder that is neither empty nor a model's is refused.
    `leave_out` names sub-modules whose weights are not written.
    """
    check_target(folder)
    if not is_model_folder(folder) and has_files_of_others(folder):
        raise CheckpointError(
            f"{folder} has files and is no model folder, so nothing is written there. Choose another, or empty it."
        )
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    with staged(folder, replaces=model_files(folder)) as staging:
        write_json(staging / CONFIG_FILE, {**config, "dtype": str(dtype).removeprefix("torch.")})
        write_weights(
            model,
            staging,
            key_map=key_map or KeyMap(),
            max_shard_bytes=max_shard_bytes,
            leave_out=leave_out,
        )
    return folder


@contextmanager
def staged(folder: Path, *, replaces: Collection[str] = (), first: str | None = None) -> Iterator[Path]:
    """Gives an empty folder to write files into, which are those of `folder` at the end; an error leaves no trace.

    A folder that exists loses the files that `replaces` names, and keeps all others that were not written anew.
    `first` names a written file that takes its place before any other file goes or comes.
    """
    check_target(folder)
    exists = folder.is_dir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    stale = abandoned(folder)
    # Inside of a folder that exists: it may be a mount or a link, and only files in it can be moved to it at no cost.
    place = folder if exists else folder.parent
    staging = place / f"{_staging_start(folder)}{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    try:
        with _held(staging):
            yield staging
            if exists:
                _move_in(staging, folder, replaces, first)
            else:
                staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    for left in stale:  # only now: until all is written anew they tell that what lies beside them is half moved
        if left.is_dir() and not _is_held(left):
            shutil.rmtree(left, ignore_errors=True)


def abandoned(folder: Path) -> list[Path]:
    """Returns the folders that killed writers of this folder left, in it or beside it; those of living ones are not."""
    if fcntl is None:
        return []
    places = [place for place in (folder, folder.parent) if place.is_dir()]
    found = [path for place in places for path in place.iterdir() if path.name.startswith(_staging_start(folder))]
    return [path for path in found if not path.is_symlink() and path.is_dir() and not _is_held(path)]


def has_files_of_others(folder: Path) -> bool:
    """Does a folder hold anything, though no killed writer left its own there? Then it was writing what there is."""
    return folder.is_dir() and any(folder.iterdir()) and not any(one.parent == folder for one in abandoned(folder))


def check_target(folder: Path) -> None:
    """Refuses a place that cannot be a folder."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a model is written as a folder. Choose another place.")


def write_weights(
    model: nn.Module, folder: Path, *, key_map: KeyMap, max_shard_bytes: int, leave_out: Collection[str] = ()
) -> None:
    """Writes the weights under the files' keys: one safetensors file, or shards with an index; tied ones once.

    Peak memory is the model plus one shard, which is what must be copied (from a device, or transposed).
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}. Use a number of bytes, such as 5000000000.")
    state = model.state_dict()
    ties = shared_names(model)
    kept = [name for name in state if not name.startswith(tuple(f"{one}." for one in leave_out))]
    names = [name for name in kept if name == ties.get(name, (name,))[0]]
    shards = split_into_shards({name: state[name].nbytes for name in names}, max_bytes=max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in shard:
            key, transpose = key_map.to_theirs(name)
            tensors[key] = as_stored(state[name], transpose=transpose)
            weight_map[key] = file
        write_tensors(tensors, folder / file)
    if len(shards) > 1:
        total = {"total_size": sum(state[name].nbytes for name in names)}
        write_json(folder / INDEX_FILE, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file, and makes sure that it is on the disk."""
    save_file(tensors, path, metadata={"format": "pt"})
    # The library makes files that only their owner reads; a folder that others may read has readable files.
    path.chmod(path.parent.stat().st_mode & 0o666)
    _sync(path)


def split_into_shards(sizes: Mapping[str, int], *, max_bytes: int) -> list[list[str]]:
    """Groups names, in order, into shards of at most `max_bytes`; a larger weight has a shard of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file, readable and with sorted keys, and makes sure that it is on the disk."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    _sync(path)


def as_stored(tensor: Tensor, *, transpose: bool = False) -> Tensor:
    """Returns a tensor as files hold it: on the CPU and contiguous; no copy is made where it is so already."""
    if tensor.is_meta:
        raise CheckpointError("The model is on the meta device and has no weights to write. Load or draw them first.")
    return (tensor.t() if transpose else tensor).cpu().contiguous()


def is_model_folder(folder: Path) -> bool:
    """Says whether a folder holds a model: its settings, and weights."""
    weights = (WEIGHTS_FILE, INDEX_FILE, PICKLED_FILE, PICKLED_INDEX_FILE)
    return (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in weights)


def model_files(folder: Path) -> set[str]:
    """Returns the names of those files of a folder that are a model's, as they are written here."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if name in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE) or SHARD_NAME.fullmatch(name)}


def _move_in(staging: Path, folder: Path, replaces: Collection[str], first: str | None) -> None:
    """Moves files into a folder that has some: settings leave first and come last, as nothing is read without them."""
    written = [path.name for path in staging.iterdir()]
    for name in written:
        if (folder / name).is_dir():
            raise CheckpointError(f"{folder / name} is a folder, and a file of that name is to be written. Rename it.")
    if first is not None:
        written.remove(first)
        (staging / first).replace(folder / first)
    for name in sorted({*written, *replaces} - {first}, key=lambda name: name not in SETTINGS):
        (folder / name).unlink(missing_ok=True)
    for name in sorted(written, key=lambda name: name in SETTINGS):
        (staging / name).rename(folder / name)
    staging.rmdir()


def _staging_start(folder: Path) -> str:
    """How the names of the folders begin in which files for this folder are made."""
    return f".{folder.name}.writing-"


@contextmanager
def _held(staging: Path) -> Iterator[None]:
    """Locks a folder as long as its writer lives: the system lets go of it, however the process ends."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks, where _is_held finds all held
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # who asks whether it is held has it for a moment
        yield
    finally:
        os.close(descriptor)


def _is_held(staging: Path) -> bool:
    """Is the writer of this folder alive, as far as can be told?"""
    try:
        descriptor = os.open(staging, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
