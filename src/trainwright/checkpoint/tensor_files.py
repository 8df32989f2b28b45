"""Safetensors files of a checkpoint: writing and hashing in one pass, and the files that a part consists of."""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from trainwright.checkpoint.disk import created, write_all, write_file
from trainwright.checkpoint.encoding import DTYPE_NAMES, Encoded, ShardLocation, Sizes, SplitTensor, decode
from trainwright.checkpoint.manifest import FileFact
from trainwright.errors import CheckpointError

_ORDER = {dtype: number for number, dtype in enumerate(DTYPE_NAMES)}

# Large, because a background thread waits for the GIL after each chunk.
CHUNK_BYTES = 16 * 2**20
# From this size on, hashing in a separate thread saves more than starting one costs.
THREADED_HASH_BYTES = 64 * 2**20
# safetensors does not read a longer header.
MAX_HEADER_BYTES = 100_000_000


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str]) -> FileFact:
    """Writes `tensors` to a new file, syncs it, and returns its size and hash.

    The tensors must be contiguous and of the dtypes in `DTYPE_NAMES` (as `encode` returns them). Those on a device are
    copied to the host chunk by chunk. For shards of larger tensors, `metadata` contains torch's DCP_SHARDING_INFO.
    """
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name.encode()))
    header, size = _header(path, {name: tensors[name] for name in names}, metadata)
    with created(path) as descriptor, _hashing(is_threaded=size >= THREADED_HASH_BYTES) as (digest, add):
        add(header)
        write_all(descriptor, header)
        for name in names:
            for chunk in _chunks(tensors[name]):
                add(chunk)
                write_all(descriptor, chunk)
        os.fsync(descriptor)
    return FileFact(size, digest.hexdigest())


def _header(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Returns the bytes before the tensors, and the size of the whole file."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        problem = f"{len(tensors)} tensors need a header of {len(text)} bytes, but readers accept {MAX_HEADER_BYTES}"
        raise CheckpointError(f"{problem}. Save fewer, larger tensors.", where=path)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + start


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields a tensor's bytes, little-endian, as views of its memory if it is on the host."""
    width = tensor.element_size()
    for shard in torch.split(tensor.reshape(-1), CHUNK_BYTES // width):
        content = shard.cpu().view(torch.uint8).numpy()
        if sys.byteorder == "big":
            content = content.view(np.dtype(f"u{width}")).byteswap().view(np.uint8)
        if len(content):
            yield content.data


@contextmanager
def _hashing(*, is_threaded: bool) -> Iterator[tuple[hashlib._Hash, Callable[[bytes | memoryview], None]]]:
    """Yields a sha256 and the function that adds a chunk to it, which is complete at the end.

    For a large file the hash is computed in a thread, concurrently with writing.
    """
    digest = hashlib.sha256()
    if not is_threaded:
        yield digest, digest.update
        return
    # Short, because a chunk that was copied from a device uses additional memory.
    chunks: queue.Queue[bytes | memoryview | None] = queue.Queue(maxsize=4)

    def run() -> None:
        while (chunk := chunks.get()) is not None:
            digest.update(chunk)

    thread = threading.Thread(target=run, name="hash", daemon=True)
    thread.start()
    try:
        yield digest, chunks.put
    finally:
        chunks.put(None)
        thread.join()


# The keys that torch's HuggingFaceStorageReader reads; the full shape is our addition.
SHARDING_INFO, OFFSETS, WHOLE_SHAPE = "DCP_SHARDING_INFO", "saved_offsets", "whole_shape"

# transformers requires the format.
METADATA: Mapping[str, str] = {"format": "pt"}


def write_part(folder: Path, part: str, encoded: Encoded) -> dict[str, FileFact]:
    """Writes and syncs rank 0's files of a part, and returns their manifest entries."""
    files: dict[str, FileFact] = {}
    tree, tensors, shard_locations, _ = encoded
    whole = {key: tensor for key, tensor in tensors.items() if key not in shard_locations}
    if whole:
        files[f"{part}.safetensors"] = write_tensors(folder / f"{part}.safetensors", whole, metadata=METADATA)
    if shard_locations:
        shards = {key: tensors[key] for key in shard_locations}
        files |= write_share(folder, part, encoded._replace(tensors=shards), rank=0)
    if not _is_flat(tree):
        text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
        files[f"{part}.json"] = write_file(folder / f"{part}.json", text.encode())
    return files


def write_share(folder: Path, part: str, encoded: Encoded, *, rank: int) -> dict[str, FileFact]:
    """Writes and syncs the file with one rank's tensors of a part; no file if it has none."""
    if not encoded.tensors:
        return {}
    info = {}
    for key, tensor in encoded.tensors.items():
        location = encoded.shard_locations.get(key) or ShardLocation((0,) * tensor.ndim, tuple(tensor.shape))
        info[key] = {OFFSETS: location.offsets, WHOLE_SHAPE: location.shape}
    metadata = {**METADATA, SHARDING_INFO: json.dumps(info, separators=(",", ":"))}
    name = f"{part}.rank-{rank:05d}.safetensors"
    return {name: write_tensors(folder / name, encoded.tensors, metadata=metadata)}


def file_names(part: str, files: Collection[str]) -> list[str]:
    """Returns the files of a checkpoint that belong to a part."""
    own = re.compile(rf"{re.escape(part)}(\.rank-\d{{5,}})?\.safetensors|{re.escape(part)}\.json")
    return [name for name in files if own.fullmatch(name)]


def share_names(part: str, files: Collection[str]) -> list[str]:
    """Returns the files of a part that contain shards; none if one process wrote it."""
    return [name for name in file_names(part, files) if name.startswith(f"{part}.rank-")]


def read_part(folder: Path, part: str, files: Collection[str], *, device: str = "cpu") -> Any:
    """Returns the state of a part; tensors in shards are SplitTensors, mapped from their files."""
    names, shares = file_names(part, files), share_names(part, files)
    tensors: dict[str, torch.Tensor | SplitTensor] = {}
    if f"{part}.safetensors" in names:
        with safe_open(folder / f"{part}.safetensors", framework="pt", device=device) as file:
            tensors.update({key: file.get_tensor(key) for key in sorted(file.keys())})
    if shares:
        tensors |= _read_shares([folder / name for name in shares], device=device)
        tensors = {key: tensors[key] for key in sorted(tensors)}
    if f"{part}.json" not in names:
        return tensors
    return decode(json.loads((folder / f"{part}.json").read_bytes()), tensors)


def _read_shares(paths: list[Path], *, device: str) -> dict[str, torch.Tensor | SplitTensor]:
    shapes: dict[str, Sizes] = {}
    shards: dict[str, list[tuple[Sizes, torch.Tensor]]] = {}
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            try:
                info = json.loads((file.metadata() or {})[SHARDING_INFO])
                for key in sorted(file.keys()):
                    shard = file.get_tensor(key)
                    offsets, shape = _sizes(info[key][OFFSETS]), _sizes(info[key][WHOLE_SHAPE])
                    _check_shard(shard, offsets, shape, shapes.setdefault(key, shape))
                    shards.setdefault(key, []).append((offsets, shard))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"The locations of its shards are damaged: {error!r}.", where=path) from error
    return {key: _joined(key, shapes[key], found, device=device) for key, found in shards.items()}


def _sizes(value: Any) -> Sizes:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError(f"{value!r} is not a list of sizes")
    return tuple(value)


def _check_shard(shard: torch.Tensor, offsets: Sizes, shape: Sizes, first_shape: Sizes) -> None:
    if not len(offsets) == len(shape) == shard.ndim or shape != first_shape:
        raise ValueError(
            f"a shard of {tuple(shard.shape)} at {offsets} of {shape}, but of {first_shape} in another file"
        )
    if any(start + size > whole for start, size, whole in zip(offsets, shard.shape, shape, strict=True)):
        raise ValueError(f"a shard of {tuple(shard.shape)} at {offsets} is beyond {shape}")


def _joined(
    key: str, shape: Sizes, shards: list[tuple[Sizes, torch.Tensor]], *, device: str
) -> torch.Tensor | SplitTensor:
    if len({shard.dtype for _, shard in shards}) != 1:
        raise CheckpointError(f"The shards of {key!r} have different dtypes. Use another step.")
    if (found := sum(shard.numel() for _, shard in shards)) != math.prod(shape):
        problem = f"The shards of {key!r} hold {found} values instead of {math.prod(shape)}"
        raise CheckpointError(f"{problem}. Use another step.")
    if len(shards) == 1:
        return shards[0][1].to(device)
    return SplitTensor(shape, shards)


def _is_flat(tree: Any) -> bool:
    """Returns True if the tensors sorted by key are the state: a dict of tensors in that order, none tied.

    safetensors does not keep the order of keys; a state in another order is described by its .json.
    """
    if not isinstance(tree, dict) or not tree or list(tree) != sorted(tree):
        return False
    return all(node == {"$tensor": key} for key, node in tree.items())
