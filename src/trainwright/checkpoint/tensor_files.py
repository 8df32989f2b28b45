"""Writes a .safetensors file and hashes it on the way: no reading back, no second copy of the tensors in memory.

safetensors' own `save_file` gives no hash, and its `save` gives all bytes at once. The bytes here are the same as
theirs (a test compares), so every reader of safetensors reads them, `torch.distributed.checkpoint`'s
HuggingFaceStorageReader included. Reading is safetensors' own.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from trainwright.checkpoint.disk import FileFact, created, write_all
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
# safetensors refuses to read a longer header.
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
    for piece in torch.split(tensor.reshape(-1), CHUNK_BYTES // width):
        content = piece.cpu().view(torch.uint8).numpy()
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
