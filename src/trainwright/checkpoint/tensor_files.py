"""Safetensors files of a checkpoint: written and hashed in one pass, and the files that one part of it consists of."""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import re
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from trainwright.checkpoint.disk import FileFact, created, write_all, write_file
from trainwright.checkpoint.encoding import Numbers, ShardLocation, SplitTensor, decode
from trainwright.checkpoint.snapshot import EncodedPart
from trainwright.errors import CheckpointError

# In the order that safetensors sorts by, first the widest: so every tensor is aligned to its own element size.
DTYPE_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: number for number, dtype in enumerate(DTYPE_NAMES)}

# Large, because a thread beside training waits for the interpreter's lock after each chunk.
CHUNK_BYTES = 16 * 2**20
# Above this, hashing in a thread of its own saves more than starting one costs.
HASH_BESIDE_BYTES = 64 * 2**20
# safetensors rejects to read a longer header.
MAX_HEADER_BYTES = 100_000_000


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str]) -> FileFact:
    """Write `tensors` to a file that is not there yet, sync it, and return its size and hash.

    The tensors must be contiguous and of the dtypes in `DTYPE_NAMES` (as `encode` gives them). Those on a device are
    copied to the host chunk by chunk. For shards of larger tensors, `metadata` takes torch's DCP_SHARDING_INFO.
    """
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name.encode()))
    header, size = _header(path, {name: tensors[name] for name in names}, metadata)
    with created(path) as descriptor, _Hashing(beside=size >= HASH_BESIDE_BYTES) as hashing:
        hashing.add(header)
        write_all(descriptor, header)
        for name in names:
            for chunk in _chunks(tensors[name]):
                hashing.add(chunk)
                write_all(descriptor, chunk)
        os.fsync(descriptor)
        return FileFact(size, hashing.finish())


def _header(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Return what stands before the tensors, and the size of the whole file."""
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
        problem = f"{len(tensors)} tensors need a header of {len(text)} bytes, and readers take {MAX_HEADER_BYTES}"
        raise CheckpointError(f"{problem}. Save fewer, larger tensors.", where=path)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + start


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes, little-endian, as views of its own memory where that is the host's."""
    width = tensor.element_size()
    for shard in torch.split(tensor.reshape(-1), CHUNK_BYTES // width):
        content = shard.cpu().view(torch.uint8).numpy()
        if sys.byteorder == "big":
            content = content.view(np.dtype(f"u{width}")).byteswap().view(np.uint8)
        if len(content):
            yield content.data


class _Hashing:
    """sha256 of chunk after chunk; of a large file in a thread, so that hashing and writing take turns no more."""

    def __init__(self, *, beside: bool) -> None:
        self._digest = hashlib.sha256()
        # Few, because a chunk that came from a device is memory of its own.
        self._waiting: queue.Queue[bytes | memoryview | None] = queue.Queue(maxsize=4)
        self._thread = threading.Thread(target=self._run, name="hash", daemon=True) if beside else None

    def __enter__(self) -> _Hashing:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def add(self, chunk: bytes | memoryview) -> None:
        if self._thread is None:
            self._digest.update(chunk)
        else:
            self._waiting.put(chunk)

    def finish(self) -> str:
        self._stop()
        return self._digest.hexdigest()

    def _stop(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (chunk := self._waiting.get()) is not None:
            self._digest.update(chunk)


# The names that torch's HuggingFaceStorageReader looks for; the shape of the whole is ours, in the same place.
SHARDING_INFO, OFFSETS, WHOLE_SHAPE = "DCP_SHARDING_INFO", "saved_offsets", "whole_shape"

# transformers wants the format named.
METADATA: Mapping[str, str] = {"format": "pt"}


def write_part(folder: Path, encoded: EncodedPart) -> dict[str, FileFact]:
    """Write the first rank's files of a part, each synced, and return what the manifest says of them."""
    files: dict[str, FileFact] = {}
    part, tree, tensors, shard_locations = encoded
    whole = {key: tensor for key, tensor in tensors.items() if key not in shard_locations}
    if whole:
        files[f"{part}.safetensors"] = write_tensors(folder / f"{part}.safetensors", whole, metadata=METADATA)
    if shard_locations:
        shards = {key: tensors[key] for key in shard_locations}
        files |= write_share(folder, encoded._replace(tensors=shards), rank=0)
    if not _is_flat(tree):
        text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
        files[f"{part}.json"] = write_file(folder / f"{part}.json", text.encode())
    return files


def write_share(folder: Path, encoded: EncodedPart, *, rank: int) -> dict[str, FileFact]:
    """Write what one rank holds of a part into a file of its own, synced; none where it holds nothing."""
    part, _, tensors, shard_locations = encoded
    if not tensors:
        return {}
    info = {}
    for key, tensor in tensors.items():
        place = shard_locations.get(key) or ShardLocation((0,) * tensor.ndim, tuple(tensor.shape))
        info[key] = {OFFSETS: place.offsets, WHOLE_SHAPE: place.shape}
    metadata = {**METADATA, SHARDING_INFO: json.dumps(info, separators=(",", ":"))}
    name = f"{part}.rank-{rank:05d}.safetensors"
    return {name: write_tensors(folder / name, tensors, metadata=metadata)}


def file_names(part: str, files: Collection[str]) -> list[str]:
    """Return those of a checkpoint's files that belong to a part."""
    own = re.compile(rf"{re.escape(part)}(\.rank-\d{{5,}})?\.safetensors|{re.escape(part)}\.json")
    return [name for name in files if own.fullmatch(name)]


def share_names(part: str, files: Collection[str]) -> list[str]:
    """Return those of a part's files that hold shards; none where one process wrote it."""
    return [name for name in file_names(part, files) if name.startswith(f"{part}.rank-")]


def read_part(folder: Path, part: str, files: Collection[str], *, device: str = "cpu") -> Any:
    """Return the state of a part; tensors in shards are SplitTensors, mapped from their files."""
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
    shapes: dict[str, Numbers] = {}
    shards: dict[str, list[tuple[Numbers, torch.Tensor]]] = {}
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            try:
                info = json.loads((file.metadata() or {})[SHARDING_INFO])
                for key in sorted(file.keys()):
                    shard = file.get_tensor(key)
                    offsets, shape = _numbers(info[key][OFFSETS]), _numbers(info[key][WHOLE_SHAPE])
                    _check_shard(shard, offsets, shape, shapes.setdefault(key, shape))
                    shards.setdefault(key, []).append((offsets, shard))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"It does not say where its shards belong: {error!r}.", where=path) from error
    return {key: _joined(key, shapes[key], found, device=device) for key, found in shards.items()}


def _numbers(value: Any) -> Numbers:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError(f"{value!r} is no list of sizes")
    return tuple(value)


def _check_shard(shard: torch.Tensor, offsets: Numbers, shape: Numbers, first_shape: Numbers) -> None:
    if not len(offsets) == len(shape) == shard.ndim or shape != first_shape:
        raise ValueError(f"a shard of {tuple(shard.shape)} at {offsets} of {shape}, of which others say {first_shape}")
    if any(start + size > whole for start, size, whole in zip(offsets, shard.shape, shape, strict=True)):
        raise ValueError(f"a shard of {tuple(shard.shape)} at {offsets} is beyond {shape}")


def _joined(
    key: str, shape: Numbers, shards: list[tuple[Numbers, torch.Tensor]], *, device: str
) -> torch.Tensor | SplitTensor:
    if len({shard.dtype for _, shard in shards}) != 1:
        raise CheckpointError(f"The shards of {key!r} are of several dtypes. Use another step.")
    if (found := sum(shard.numel() for _, shard in shards)) != math.prod(shape):
        problem = f"The shards of {key!r} hold {found} values instead of {math.prod(shape)}"
        raise CheckpointError(f"{problem}. Use another step.")
    if len(shards) == 1:
        return shards[0][1].to(device)
    return SplitTensor(shape, shards)


def _is_flat(tree: Any) -> bool:
    """Say whether the tensors alone, sorted by key, are the state: a dict of tensors, in that order, none tied.

    safetensors forgets the order of its keys; a state in another order is described by its .json.
    """
    if not isinstance(tree, dict) or not tree or list(tree) != sorted(tree):
        return False
    return all(node == {"$tensor": key} for key, node in tree.items())
