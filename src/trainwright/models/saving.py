"""Writes a module as a folder in Hugging Face's layout: config.json and safetensors, in shards where it is large.

The folder is made beside its place and renamed into it, so that nobody ever sees half of one.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

SETTINGS_FILE = "config.yaml"
"""The run's settings, which go with weights that have no config.json."""


def write_folder(
    model: nn.Module,
    folder: Path,
    config: Mapping[str, Any],
    *,
    key_map: KeyMap | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Writes a model's config.json, with its dtype, and its weights; returns the folder.

    A model folder that exists is replaced, and its other files (a tokenizer, a README) are kept. A folder that is
    neither empty nor a model's is refused.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}. Use a number of bytes, such as 5000000000.")
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    with staged(folder) as staging:
        write_json(staging / CONFIG_FILE, {**config, "dtype": str(dtype).removeprefix("torch.")})
        write_weights(model, staging, key_map=key_map or KeyMap(), max_shard_bytes=max_shard_bytes)
    return folder


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Gives a folder to write a model into, which takes the place of `folder` at the end; an error leaves no trace.

    A model folder that exists is replaced, and its files that are no weights are kept unless they were written anew.
    """
    _check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f".{folder.name}.writing-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    try:
        yield staging
        _keep_other_files(folder, staging)
        _swap(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write_weights(model: nn.Module, folder: Path, *, key_map: KeyMap, max_shard_bytes: int) -> None:
    """Writes the weights under the files' keys: one safetensors file, or shards with an index; tied ones once.

    Peak memory is the model plus one shard, which is what must be copied (from a device, or transposed).
    """
    state = model.state_dict()
    ties = shared_names(model)
    names = [name for name in state if name == ties.get(name, (name,))[0]]
    shards = split_into_shards({name: state[name].nbytes for name in names}, max_bytes=max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in shard:
            key, transpose = key_map.to_theirs(name)
            tensors[key] = _as_stored(state[name], transpose=transpose)
            weight_map[key] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
        # The library makes files that only their owner reads; a folder that others may read has readable files.
        (folder / file).chmod(folder.stat().st_mode & 0o666)
        _sync(folder / file)
    if len(shards) > 1:
        total = {"total_size": sum(state[name].nbytes for name in names)}
        write_json(folder / INDEX_FILE, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})


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


def is_model_folder(folder: Path) -> bool:
    """Says whether a folder holds a model: its settings, and weights."""
    has_settings = any((folder / name).is_file() for name in (CONFIG_FILE, SETTINGS_FILE))
    weights = (WEIGHTS_FILE, INDEX_FILE, PICKLED_FILE, PICKLED_INDEX_FILE)
    return has_settings and any((folder / name).is_file() for name in weights)


def _as_stored(tensor: Tensor, *, transpose: bool) -> Tensor:
    if tensor.is_meta:
        raise CheckpointError("The model is on the meta device and has no weights to write. Load or draw them first.")
    return (tensor.t() if transpose else tensor).cpu().contiguous()


def _check_target(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a model is written as a folder. Choose another place.")
    if any(folder.iterdir()) and not is_model_folder(folder):
        raise CheckpointError(
            f"{folder} has files and is no model folder, so nothing is written there. Choose another, or empty it."
        )


def _keep_other_files(folder: Path, staging: Path) -> None:
    if not folder.exists():
        return
    for path in folder.iterdir():
        is_weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        if is_weights or (staging / path.name).exists():
            continue
        if path.is_dir():
            shutil.copytree(path, staging / path.name, symlinks=True)
        else:
            shutil.copy2(path, staging / path.name)


def _swap(staging: Path, folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        aside = folder.parent / f".{folder.name}.replaced-{uuid.uuid4().hex[:8]}"
        folder.rename(aside)
        staging.rename(folder)
        shutil.rmtree(aside)
    else:
        if folder.is_dir():
            folder.rmdir()  # an empty one, which not every system renames over
        staging.rename(folder)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
