"""Safetensors files of a checkpoint: written and hashed in one pass, and read in ranges that are compared with their
hashes.

The functions that create and open them decide whether they are on a disk or at a URL.
"""

from __future__ import annotations

import hashlib
import json
import math
import queue
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.checkpoint.disk import synced_file
from trainwright.checkpoint.encoding import DTYPE_NAMES, Encoded, ShardLocation, Sizes, SplitTensor, as_split, decode
from trainwright.checkpoint.manifest import FileFact
from trainwright.errors import CheckpointError
from trainwright.progress import progress

_ORDER = {dtype: number for number, dtype in enumerate(DTYPE_NAMES)}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PIECE_DIGITS = 32

# The chunks are large, because a background thread waits for the GIL after each. Part of the format, because each chunk
# has a hash.
CHUNK_BYTES = 16 * 2**20
# From this size on, hashing in a separate thread is faster.
THREADED_HASH_BYTES = 64 * 2**20
# safetensors does not support a longer header.
MAX_HEADER_BYTES = 100_000_000


Write = Callable[[bytes | memoryview], object]
"""Appends to a file."""
CreateFile = Callable[[str], AbstractContextManager[Write]]
"""Creates a file of that name, which is complete when the context ends."""
ReadRange = Callable[[int, int], bytes]
"""Returns the bytes of a file between two offsets, fewer at its end."""
OpenFile = Callable[[str], ReadRange]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str]) -> FileFact:
    """Writes `tensors` to a new file, syncs it, and returns its size and hashes; otherwise like `save_tensors`."""
    return save_tensors(partial(synced_file, path.parent), path.name, tensors, metadata=metadata)


def save_tensors(
    create: CreateFile, name: str, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str]
) -> FileFact:
    """Writes `tensors` to the new file `name` and returns its size and hashes.

    The tensors must be contiguous and of the dtypes in `DTYPE_NAMES` (as `encode` returns them). Those on a device are
    copied to the host chunk by chunk. For shards of larger tensors, `metadata` contains torch's DCP_SHARDING_INFO.
    """
    keys = sorted(tensors, key=lambda key: (_ORDER[tensors[key].dtype], key.encode()))
    header, size = _header(name, {key: tensors[key] for key in keys}, metadata)
    digest, pieces = hashlib.sha256(), list[str]()
    is_threaded = size >= THREADED_HASH_BYTES
    chunks: Iterator[bytes | memoryview] = chain([header], *(_chunks(tensors[key]) for key in keys))
    # Two threads, because computing both hashes in one would take longer than writing to a fast disk.
    with (
        create(name) as write,
        _in_thread(digest.update, is_threaded=is_threaded) as add,
        _in_thread(lambda chunk: pieces.append(_piece_hash(chunk)), is_threaded=is_threaded) as add_piece,
    ):
        for chunk in chunks:
            add(chunk)
            add_piece(chunk)
            write(chunk)
    return FileFact(size, digest.hexdigest(), "".join(pieces))


def _header(name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Returns the bytes before the tensors, and the size of the whole file."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for key, tensor in tensors.items():
        stop = start + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        entries[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        problem = f"{len(tensors)} tensors need a header of {len(text)} bytes, but readers accept {MAX_HEADER_BYTES}"
        raise CheckpointError(f"{problem}. Save fewer, larger tensors.", where=name)
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
def _in_thread(act: Write, *, is_threaded: bool) -> Iterator[Write]:
    """Yields a function that calls `act`; if `is_threaded`, in a thread that is joined at the end."""
    if not is_threaded:
        yield act
        return
    # Short, because each chunk that was copied from a device needs additional memory.
    chunks: queue.Queue[bytes | memoryview | None] = queue.Queue(maxsize=4)

    def run() -> None:
        while (chunk := chunks.get()) is not None:
            act(chunk)

    thread = threading.Thread(target=run, name="hash", daemon=True)
    thread.start()
    try:
        yield chunks.put
    finally:
        chunks.put(None)
        thread.join()


# The keys that torch's HuggingFaceStorageReader reads; the full shape is our addition.
SHARDING_INFO, OFFSETS, WHOLE_SHAPE = "DCP_SHARDING_INFO", "saved_offsets", "whole_shape"

# transformers requires the format.
METADATA: Mapping[str, str] = {"format": "pt"}


@contextmanager
def writing(parts: Mapping[str, Encoded], create: CreateFile) -> Iterator[CreateFile]:
    """Yields a function that replaces `create` and shows the progress of writing the parts."""
    size = sum(tensor.nbytes for encoded in parts.values() for tensor in encoded.tensors.values())
    with progress("Saving a checkpoint", total=size, unit="bytes") as advance:

        @contextmanager
        def create_counted(name: str) -> Iterator[Write]:
            with create(name) as write:

                def write_counted(content: bytes | memoryview) -> None:
                    write(content)
                    advance(memoryview(content).nbytes)

                yield write_counted

        yield create_counted


def write_part(create: CreateFile, part: str, encoded: Encoded) -> dict[str, FileFact]:
    """Writes rank 0's files of a part, and returns their manifest entries."""
    files: dict[str, FileFact] = {}
    tree, tensors, shard_locations, _ = encoded
    whole = {key: tensor for key, tensor in tensors.items() if key not in shard_locations}
    if whole:
        files[f"{part}.safetensors"] = save_tensors(create, f"{part}.safetensors", whole, metadata=METADATA)
    if shard_locations:
        shards = {key: tensors[key] for key in shard_locations}
        files |= write_share(create, part, encoded._replace(tensors=shards), rank=0)
    if not _is_flat(tree):
        content = json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
        with create(f"{part}.json") as write:
            write(content)
        files[f"{part}.json"] = FileFact(len(content), hashlib.sha256(content).hexdigest())
    return files


def write_share(create: CreateFile, part: str, encoded: Encoded, *, rank: int) -> dict[str, FileFact]:
    """Writes the file with one rank's tensors of a part; no file if it has none."""
    if not encoded.tensors:
        return {}
    info = {}
    for key, tensor in encoded.tensors.items():
        location = encoded.shard_locations.get(key) or ShardLocation((0,) * tensor.ndim, tuple(tensor.shape))
        info[key] = {OFFSETS: location.offsets, WHOLE_SHAPE: location.shape}
    metadata = {**METADATA, SHARDING_INFO: json.dumps(info, separators=(",", ":"))}
    name = f"{part}.rank-{rank:05d}.safetensors"
    return {name: save_tensors(create, name, encoded.tensors, metadata=metadata)}


def file_names(part: str, files: Collection[str]) -> list[str]:
    """Returns the files of a checkpoint that belong to a part."""
    own = re.compile(rf"{re.escape(part)}(\.rank-\d{{5,}})?\.safetensors|{re.escape(part)}\.json")
    return [name for name in files if own.fullmatch(name)]


def share_names(part: str, files: Collection[str]) -> list[str]:
    """Returns the files of a part that contain shards; none if one process wrote it."""
    return [name for name in file_names(part, files) if name.startswith(f"{part}.rank-")]


def read_part(
    open_file: OpenFile, part: str, files: Mapping[str, FileFact], *, where: Any, is_verified: bool = False
) -> Any:
    """Returns the state of a part, with SplitTensors whose values are read when they are copied.

    The data is compared with its hashes unless `is_verified`. `where` is the folder, for messages.
    """
    names, shares = file_names(part, files), share_names(part, files)
    tensors: dict[str, torch.Tensor | SplitTensor] = {}

    def open_tensors(name: str) -> TensorFile:
        return TensorFile(open_file(name), files[name], where=where / name, is_verified=is_verified)

    if f"{part}.safetensors" in names:
        file = open_tensors(f"{part}.safetensors")
        tensors.update({key: as_split(file.tensors[key]) for key in sorted(file.tensors)})
    if shares:
        tensors |= _read_shares([open_tensors(name) for name in shares])
        tensors = {key: tensors[key] for key in sorted(tensors)}
    if f"{part}.json" not in names:
        return tensors
    name = f"{part}.json"
    content = open_file(name)(0, files[name].size + 1)
    sha256 = None if is_verified else hashlib.sha256(content).hexdigest()
    files[name].check(size=len(content), sha256=sha256, where=where / name)
    return decode(json.loads(content), tensors)


class TensorFile:
    """A safetensors file that is read in ranges, which are compared with the manifest.

    The hashed chunks are the header and the chunks of `CHUNK_BYTES` of each tensor. The header may come from an
    untrusted file, so it is validated as in safetensors: the tensors must fill the rest of the file, without gaps or
    overlaps.
    """

    def __init__(self, read: ReadRange, fact: FileFact, *, where: object, is_verified: bool) -> None:
        self._read, self.where = read, where
        hashes = "" if is_verified else fact.pieces
        self._hashes = [hashes[start : start + _PIECE_DIGITS] for start in range(0, len(hashes), _PIECE_DIGITS)]
        if not is_verified and not hashes:
            self._verify_whole(fact)
        length = int.from_bytes(self._range(0, 8), "little")
        if length > min(MAX_HEADER_BYTES, fact.size - 8):
            raise CheckpointError(f"The header has {length} bytes, and the file {fact.size}.", where=where)
        header = self.read_piece(0, 0, 8 + length)[8:]
        try:
            entries = json.loads(header)
            self.metadata: Mapping[str, str] = entries.pop("__metadata__", {})
            self.tensors = self._tensors(entries, 8 + length, fact.size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"The header is damaged: {error!r}.", where=where) from error

    def read_piece(self, number: int, start: int, stop: int) -> bytes:
        """Returns the chunk with these offsets in the file; raises if it differs from the manifest."""
        content = self._range(start, stop)
        if self._hashes and _piece_hash(content) != self._hashes[number]:
            problem = f"The content of bytes {start} to {stop} differs from its hash in the manifest"
            raise CheckpointError(f"{problem}. Check the disk or the network of this machine.", where=self.where)
        return content

    def _range(self, start: int, stop: int) -> bytes:
        content = self._read(start, stop)
        if len(content) != stop - start:
            raise CheckpointError(f"The file has {start + len(content)} bytes, not {stop}.", where=self.where)
        return content

    def _verify_whole(self, fact: FileFact) -> None:
        digest, size = hashlib.sha256(), 0
        while content := self._read(size, size + CHUNK_BYTES):
            digest.update(content)
            size += len(content)
        fact.check(size=size, sha256=digest.hexdigest(), where=self.where)

    def _tensors(self, entries: Mapping[str, Any], data_start: int, size: int) -> dict[str, StoredTensor]:
        found = {}
        start, num_pieces = 0, 1
        for key, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _DTYPES[entry["dtype"]], _sizes(entry["shape"])
            num_bytes = math.prod(shape) * dtype.itemsize
            if entry["data_offsets"] != [start, start + num_bytes]:
                raise ValueError(f"{key!r} of {num_bytes} bytes at {entry['data_offsets']} instead of {start}")
            found[key] = StoredTensor(self, dtype, shape, data_start + start, num_pieces)
            start += num_bytes
            num_pieces += -(-num_bytes // CHUNK_BYTES)
        if data_start + start != size or len(self._hashes) not in (0, num_pieces):
            raise ValueError(f"{data_start + start} of {size} bytes, {num_pieces} of {len(self._hashes)} pieces")
        return found


class StoredTensor:
    """A tensor in a file; reading rows reads the chunks that contain them."""

    def __init__(self, file: TensorFile, dtype: torch.dtype, shape: Sizes, start: int, first_piece: int) -> None:
        self.dtype, self.shape = dtype, torch.Size(shape)
        self._file, self._start, self._first_piece = file, start, first_piece

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Returns a copy of the rows from `first` to before `last`; for a scalar, the scalar."""
        width, num_bytes = self.dtype.itemsize, self.shape.numel() * self.dtype.itemsize
        shape = (last - first, *self.shape[1:]) if self.shape else ()
        row_bytes = math.prod(self.shape[1:]) * width
        result = np.empty(math.prod(shape) * width, dtype=np.uint8)
        begin = first * row_bytes
        for start in range(begin // CHUNK_BYTES * CHUNK_BYTES, begin + len(result), CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, num_bytes)
            number = self._first_piece + start // CHUNK_BYTES
            content = np.frombuffer(self._file.read_piece(number, self._start + start, self._start + stop), np.uint8)
            low, high = max(start, begin), min(stop, begin + len(result))
            result[low - begin : high - begin] = content[low - start : high - start]
        if sys.byteorder == "big":
            result = result.view(np.dtype(f"u{width}")).byteswap().view(np.uint8)
        return torch.from_numpy(result).view(self.dtype).reshape(shape)


def _piece_hash(content: bytes | memoryview) -> str:
    # Half of a sha256 is sufficient for a chunk, and keeps the manifests of models with many tensors small.
    return hashlib.sha256(content).hexdigest()[:_PIECE_DIGITS]


def _read_shares(files: Sequence[TensorFile]) -> dict[str, torch.Tensor | SplitTensor]:
    shapes: dict[str, Sizes] = {}
    shards: dict[str, list[tuple[Sizes, StoredTensor]]] = {}
    for file in files:
        try:
            info = json.loads(file.metadata[SHARDING_INFO])
            for key in sorted(file.tensors):
                shard = file.tensors[key]
                offsets, shape = _sizes(info[key][OFFSETS]), _sizes(info[key][WHOLE_SHAPE])
                _check_shard(shard, offsets, shape, shapes.setdefault(key, shape))
                shards.setdefault(key, []).append((offsets, shard))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"The locations of its shards are damaged: {error!r}.", where=file.where) from error
    return {key: _joined(key, shapes[key], found) for key, found in shards.items()}


def _sizes(value: Any) -> Sizes:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError(f"{value!r} is not a list of sizes")
    return tuple(value)


def _check_shard(shard: StoredTensor, offsets: Sizes, shape: Sizes, first_shape: Sizes) -> None:
    if not len(offsets) == len(shape) == len(shard.shape) or shape != first_shape:
        raise ValueError(
            f"a shard of {tuple(shard.shape)} at {offsets} of {shape}, but of {first_shape} in another file"
        )
    if any(start + size > whole for start, size, whole in zip(offsets, shard.shape, shape, strict=True)):
        raise ValueError(f"a shard of {tuple(shard.shape)} at {offsets} is beyond {shape}")


def _joined(key: str, shape: Sizes, shards: list[tuple[Sizes, StoredTensor]]) -> SplitTensor:
    if len({shard.dtype for _, shard in shards}) != 1:
        raise CheckpointError(f"The shards of {key!r} have different dtypes. Use another step.")
    if (found := sum(shard.shape.numel() for _, shard in shards)) != math.prod(shape):
        problem = f"The shards of {key!r} hold {found} values instead of {math.prod(shape)}"
        raise CheckpointError(f"{problem}. Use another step.")
    return SplitTensor(shape, shards)


def _is_flat(tree: Any) -> bool:
    """Returns True if the tensors sorted by key are the state: a dict of tensors in that order, none tied.

    safetensors does not keep the order of keys; a state in another order is described by its .json.
    """
    if not isinstance(tree, dict) or not tree or list(tree) != sorted(tree):
        return False
    return all(node == {"$tensor": key} for key, node in tree.items())
