"""Turns a nest of plain values, tensors and arrays into JSON and named tensors, and back, bit for bit.

Sharded tensors are encoded as the shards that this rank holds, and assembled from the shards of several files.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from trainwright.errors import CheckpointError
from trainwright.parallel.mesh import is_split, local

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor is laid out over ranks: torch's mesh, and a placement for each of its axes."""

    mesh: Any
    placements: tuple[Any, ...]

    def is_written_here(self, first_of_stage: int) -> bool:
        """Says whether this rank is the first of those with the same shard.

        That is: the first along every axis of the mesh with copies; and of equal meshes, in the one with the first
        rank of all that have the same layers.
        """
        coordinate = self.mesh.get_coordinate()
        if coordinate is None or not bool((self.mesh.mesh == first_of_stage).any()):
            return False
        pairs = zip(self.placements, coordinate, strict=True)
        return all(number == 0 for placement, number in pairs if placement.is_replicate())

    def region(self, shape: Sequence[int]) -> tuple[Numbers, Numbers]:
        """Returns where this rank's shard of a tensor of that shape begins in each dim, and its sizes."""
        coordinate = self.mesh.get_coordinate()
        offsets, sizes = [0] * len(shape), list(shape)
        axes = [
            axis for axis, placement in enumerate(self.placements) if placement.is_shard() or _is_strided(placement)
        ]
        # A strided placement says that the axes after it have cut first: FSDP cuts what `tensor` has left of a dim.
        for axis in sorted(axes, key=lambda axis: _is_strided(self.placements[axis])):
            dim = self.placements[axis].dim
            chunk = -(-sizes[dim] // self.mesh.size(axis))
            start = min(chunk * coordinate[axis], sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(chunk, sizes[dim] - start)
        return tuple(offsets), tuple(sizes)


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


@dataclass(frozen=True)
class ShardLocation:
    """Where a shard lies in the whole tensor."""

    offsets: Numbers
    shape: Numbers
    """Of the whole."""
    layout: TensorLayout | None = None
    """How it lay over the ranks of this run; None of a tensor that was whole."""


def shard_location_of(tensor: Any) -> ShardLocation | str:
    """Returns where this rank's shard of a DTensor lies, or a sentence that says why it cannot be saved."""
    layout = TensorLayout(tensor.device_mesh, tuple(tensor.placements))
    if any(placement.is_partial() for placement in layout.placements):
        return f"a DTensor that waits for a sum ({layout.placements}). Save it after redistribute()"
    offsets, sizes = layout.region(tensor.shape)
    if sizes != tuple(local(tensor).shape):
        return f"a DTensor whose part is {tuple(local(tensor).shape)} instead of {sizes}. Save its full_tensor()"
    return ShardLocation(offsets, tuple(tensor.shape), layout)


class SplitTensor:
    """A tensor in shards, none of which is copied until somebody asks for a region.

    `shards` are (where it begins, the shard); together they are the whole, or what of it is at hand.
    """

    def __init__(
        self,
        shape: Sequence[int],
        shards: Sequence[tuple[Numbers, torch.Tensor]],
        *,
        layout: TensorLayout | None = None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.shards = list(shards)
        self.dtype = self.shards[0][1].dtype
        self.layout = layout

    @torch.no_grad()
    def copy_into(self, target: torch.Tensor, offsets: Sequence[int] | None = None) -> None:
        """Fills a plain tensor with the region of its shape that begins at `offsets`; by default at the beginning."""
        starts = tuple(offsets or (0,) * len(self.shape))
        missing = target.numel()
        for begins, shard in self.shards:
            bounds = [
                (max(start, begin), min(start + size, begin + length))
                for start, size, begin, length in zip(starts, target.shape, begins, shard.shape, strict=True)
            ]
            if any(first >= last for first, last in bounds):
                continue
            into = tuple(
                slice(first - start, last - start) for (first, last), start in zip(bounds, starts, strict=True)
            )
            source = tuple(
                slice(first - begin, last - begin) for (first, last), begin in zip(bounds, begins, strict=True)
            )
            target[into].copy_(shard[source])
            missing -= math.prod(last - first for first, last in bounds)
        if missing != 0:
            problem = f"Of {target.numel()} values {missing} are in no shard, or in several"
            raise CheckpointError(f"{problem}. Use another step.")

    def whole(self, *, device: str | torch.device = "cpu") -> torch.Tensor:
        """Returns all of it, in memory of its own."""
        made = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.copy_into(made)
        return made

    def as_dtensor(self, layout: TensorLayout) -> torch.Tensor:
        """Returns it laid out over ranks, with this rank's shard on the device of the layout."""
        from torch.distributed.tensor import DTensor

        offsets, sizes = layout.region(self.shape)
        shard = torch.empty(sizes, dtype=self.dtype, device=layout.mesh.device_type)
        self.copy_into(shard, offsets)
        strides = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            shard, layout.mesh, layout.placements, run_check=False, shape=self.shape, stride=strides
        )


def as_split(tensor: torch.Tensor | SplitTensor) -> SplitTensor:
    """Returns a tensor as one in shards, of which it is the only one."""
    if isinstance(tensor, SplitTensor):
        return tensor
    return SplitTensor(tensor.shape, [((0,) * tensor.ndim, tensor)])


def fill(target: torch.Tensor, source: torch.Tensor | SplitTensor) -> None:
    """Copies values into a tensor in place, into a DTensor those of this rank's shard; the shapes are equal."""
    offsets = None
    if is_split(target):
        location = shard_location_of(target)
        if isinstance(location, str):
            raise CheckpointError(f"Nothing can be read into {location}.")
        offsets = location.offsets
    as_split(source).copy_into(local(target), offsets)


def laid_out_as(like: torch.Tensor, value: Any) -> Any:
    """Returns what belongs to a parameter, such as a momentum, laid out as the parameter is.

    Where it has the parameter's shape, or that of a matrix with 1 in place of some sizes (Adafactor's factors).
    Anything else is whole.
    """
    if not isinstance(value, torch.Tensor | SplitTensor) or is_split_already(value):
        return value
    if is_split(like) and len(value.shape) == like.ndim:
        pairs = list(zip(value.shape, like.shape, strict=True))
        keeps = [own == other for own, other in pairs]
        is_factor = like.ndim > 1 and any(keeps) and all(own in (1, other) for own, other in pairs)
        if all(keeps) or is_factor:
            return as_split(value).as_dtensor(_without(layout_of(like), keeps))
    return as_whole(value)


def is_split_already(value: Any) -> bool:
    """Is it a DTensor?"""
    return isinstance(value, torch.Tensor) and is_split(value)


def layout_of(tensor: Any) -> TensorLayout:
    """Returns how a DTensor is laid out."""
    return TensorLayout(tensor.device_mesh, tuple(tensor.placements))


def _without(layout: TensorLayout, keeps: Sequence[bool]) -> TensorLayout:
    """Returns the layout in which dims that are not kept lie whole on every rank."""
    from torch.distributed.tensor import Replicate

    placements = tuple(
        placement if placement.is_replicate() or keeps[placement.dim] else Replicate()
        for placement in layout.placements
    )
    return TensorLayout(layout.mesh, placements)


def as_whole(value: torch.Tensor | SplitTensor) -> torch.Tensor:
    """Returns a tensor in one shard; of one whose other shards are on other ranks, a DTensor."""
    if isinstance(value, torch.Tensor):
        return value
    return value.whole() if value.layout is None else value.as_dtensor(value.layout)


def map_tensors(state: Any, change: Any) -> Any:
    """Returns a nest in which each tensor is `change(tensor, key)`; `key` is that of the innermost mapping.

    A tensor that is met under several names is changed once, so that tied ones stay tied.
    """
    known: dict[int, Any] = {}

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, torch.Tensor | SplitTensor):
            if id(value) not in known:
                known[id(value)] = change(value, key)
            return known[id(value)]
        if isinstance(value, Mapping):
            return {inner: walk(item, str(inner)) for inner, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(walk(item, key) for item in value)
        return value

    return walk(state, "")


ALLOWED = (
    "None, bool, int, float, str, bytes, torch.Tensor, numpy arrays and scalars, "
    "and dicts (with str or int keys), lists and tuples of them"
)

# The dtypes that safetensors has known since 0.4.5. Others (complex, exotic floats) are stored as their bytes.
NATIVE_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    }
)

# Deeper than any real state and far from Python's recursion limit, so a list that holds itself gets a clear error.
MAX_DEPTH = 100

# safetensors keeps its own header under this name; a tensor called so makes the file unreadable.
RESERVED_KEY = "__metadata__"

KeyPath = tuple[str, ...]


class Encoded(NamedTuple):
    """A state as JSON and tensors, of which some may be this rank's shards of larger ones."""

    tree: Any
    tensors: dict[str, torch.Tensor]
    shard_locations: dict[str, ShardLocation]
    """Of each shard, by its key, where it lies in the whole."""
    split_paths: list[tuple[str, tuple[int, ...]]]
    """The path and whole shape of every tensor in shards: the same on all ranks that hold shards of it."""


def encode_split(state: Any, *, name: str = "state") -> Encoded:
    """Encodes as `encode` does, and of a DTensor takes this rank's shard; its key is the same on every rank."""
    encoder = _Encoder(name, takes_shards=True)
    return Encoded(encoder.encode(state, ()), encoder.tensors, encoder.shard_locations, encoder.split_paths)


def encode(state: Any, *, name: str = "state") -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON-able tree of `state` and its tensors by dotted key; `name` starts the paths in errors.

    The tensors are detached and contiguous, on the device they were on, and share memory with `state` where no copy
    is needed: write them before the next update. The same view met twice (tied weights) is stored once. Mappings
    come back as dict, parameters as plain tensors, subclasses of str, int and float as those.
    """
    encoder = _Encoder(name)
    return encoder.encode(state, ()), encoder.tensors


def decode(tree: Any, tensors: Mapping[str, torch.Tensor | SplitTensor]) -> Any:
    """Rebuild the state from what `encode` returned; tensors stay on their device and tied ones are one object.

    Tensors in shards come out as they were given.

    The tree may come from anywhere: whatever it says, nothing but plain values, tensors and arrays is made.
    """
    try:
        return _Decoder(tensors).decode(tree)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error) as error:
        problem = f"What describes the state is damaged: {type(error).__name__}: {error}".rstrip(".")
        raise CheckpointError(f"{problem}. Use another step.") from error


class _Encoder:
    """One encoding: the tensors so far, and which storages and views they came from."""

    def __init__(self, name: str, *, takes_shards: bool = False) -> None:
        self.name = name
        self.tensors: dict[str, torch.Tensor] = {}
        self.shard_locations: dict[str, ShardLocation] = {}
        self.split_paths: list[tuple[str, tuple[int, ...]]] = []
        self._takes_shards = takes_shards
        # Views keep their source tensors alive: a freed storage's address could come back as a false tie.
        self._views: dict[tuple[object, ...], tuple[dict[str, Any], torch.Tensor]] = {}
        self._storages: set[tuple[object, ...]] = set()

    def encode(self, value: Any, path: KeyPath) -> Any:
        if len(path) > MAX_DEPTH:
            raise self._rejection(path, f"is nested more than {MAX_DEPTH} deep, or contains itself", value)
        # numpy first: its float64 is also a Python float, and its str_ a str.
        if isinstance(value, np.generic):
            dtype = self._numpy_dtype(value, path)
            return {"$scalar": value.tobytes().hex(), "dtype": dtype}
        if isinstance(value, np.ndarray):
            return self._encode_array(value, path)
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path)
        if isinstance(value, (list, tuple)):
            return self._encode_sequence(value, path)
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return _encode_plain(value)
        if isinstance(value, (set, frozenset)):
            raise self._rejection(path, "cannot be saved: a set has no order. Save sorted(...) of it, a list", value)
        raise self._rejection(path, "cannot be saved", value)

    def _encode_mapping(self, value: Mapping[Any, Any], path: KeyPath) -> dict[str, Any]:
        for key in value:
            if not isinstance(key, (str, int)) or isinstance(key, np.generic):
                raise self._rejection(path, f"has the key {key!r}; keys must be str or int", key)
        items = [(_encode_plain(key), self.encode(item, (*path, str(key)))) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$dict": [[key, item] for key, item in items]}

    def _encode_sequence(self, value: list[Any] | tuple[Any, ...], path: KeyPath) -> Any:
        if hasattr(value, "_fields"):
            # It would come back as a bare tuple and fail far from here, at resume.
            raise self._rejection(path, "cannot be saved: a named tuple. Save its _asdict()", value)
        items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items

    def _encode_array(self, value: np.ndarray[Any, Any], path: KeyPath) -> dict[str, Any]:
        if type(value) not in (np.ndarray, np.memmap):
            raise self._rejection(path, "cannot be saved: it is more than a plain array", value)
        dtype = self._numpy_dtype(value, path)
        # As bytes, because torch lacks some of numpy's dtypes (dates, text, big-endian). Costs two copies of the array.
        content = np.ndarray((value.nbytes,), dtype=np.uint8, buffer=bytearray(value.tobytes()))
        key = self._free_key(path)
        self.tensors[key] = torch.from_numpy(content)
        return {"$array": key, "dtype": dtype, "shape": list(value.shape)}

    def _numpy_dtype(self, value: np.ndarray[Any, Any] | np.generic, path: KeyPath) -> str:
        dtype = value.dtype
        # Structured and foreign dtypes (bfloat16 of ml_dtypes) are only a size in their string form.
        if dtype.hasobject or np.dtype(dtype.str) != dtype:
            raise self._rejection(path, f"cannot be saved: the numpy dtype {dtype} has no exact name", value)
        return str(dtype.str)

    def _encode_tensor(self, value: torch.Tensor, path: KeyPath) -> dict[str, Any]:
        if self._takes_shards and is_split(value):
            return self._encode_shard(value, path)
        tensor = value.detach()
        problem = _tensor_problem(tensor)
        if problem is not None:
            raise self._rejection(path, f"cannot be saved: {problem}", value)
        # Every empty tensor has the same null address, so emptiness is never a tie.
        if tensor.numel() == 0:
            return self._store_tensor(tensor.clone(), path)
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        layout = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        view = (*storage, *layout, tensor.is_conj(), tensor.is_neg())
        if view in self._views:
            return self._views[view][0]
        # safetensors writes memory as it lies: lazy conjugation and negation must happen first.
        content = tensor.resolve_conj().resolve_neg().contiguous()
        if storage in self._storages and content.data_ptr() == tensor.data_ptr():
            content = content.clone()
        node = self._store_tensor(content, path)
        self._storages.add(storage)
        self._views[view] = (node, value)
        return node

    def _encode_shard(self, value: torch.Tensor, path: KeyPath) -> dict[str, Any]:
        """Encodes this rank's part of a DTensor; of the same one met twice (tied weights), once."""
        location = shard_location_of(value)
        problem = location if isinstance(location, str) else _tensor_problem(local(value))
        if problem is None and value.dtype not in NATIVE_DTYPES:
            problem = f"a DTensor of dtype {value.dtype}. Save a view of it in another"
        if problem is not None:
            raise self._rejection(path, f"cannot be saved: {problem}", value)
        assert isinstance(location, ShardLocation)
        self.split_paths.append((".".join(path), location.shape))
        node = self._encode_tensor(local(value), path)
        self.shard_locations[node["$tensor"]] = location
        return node

    def _store_tensor(self, tensor: torch.Tensor, path: KeyPath) -> dict[str, Any]:
        key = self._free_key(path)
        if tensor.dtype in NATIVE_DTYPES:
            self.tensors[key] = tensor
            return {"$tensor": key}
        self.tensors[key] = tensor.reshape(-1).view(torch.uint8)
        return {"$tensor": key, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}

    def _free_key(self, path: KeyPath) -> str:
        # {"a": {"b": x}, "a.b": y} gives "a.b" and "a.b#2"; the tree says which is which.
        wanted = ".".join(path).encode(errors="backslashreplace").decode() if path else self.name
        key, number = wanted, 1
        while key in self.tensors or key == RESERVED_KEY:
            number += 1
            key = f"{wanted}#{number}"
        return key

    def _rejection(self, path: KeyPath, problem: str, value: Any) -> CheckpointError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        # A list that holds itself has a path of 100 equal keys; eight of them show where to look.
        location = ".".join((self.name, *path[:8])) + (".…" if len(path) > 8 else "")
        return CheckpointError(f"{problem} (got {kind}). A checkpoint holds {ALLOWED}.", where=location)


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    if type(tensor) is not torch.Tensor:
        return "a tensor subclass is more than its values. Save the plain tensor in it (of a DTensor: full_tensor())"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"a tensor of layout {tensor.layout} and dtype {tensor.dtype}. Save its dense values"
    if tensor.is_meta:
        return "a meta tensor has no values. Save it after the model is materialised"
    return None


def _encode_plain(value: bool | int | float | str | bytes | None) -> Any:
    """Return JSON for a scalar; the tags hold what JSON would lose or Python would reject to write."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Python rejects to print integers of more than 4,300 digits in decimal, never in hex.
        return int(value) if abs(value) < 2**128 else {"$int": hex(value)}
    if isinstance(value, float):
        # JSON has no nan and inf, and nan has 2**52 forms: keep the bits.
        return float(value) if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    text = str.__str__(value)
    # Half a surrogate pair (odd file names) is no UTF-8, and two halves would merge in JSON.
    return text if text.isascii() or _is_unicode(text) else {"$str": text.encode("utf-8", "surrogatepass").hex()}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Decoder:
    """One decoding: the stored tensors, and those already given a dtype of their own."""

    def __init__(self, tensors: Mapping[str, torch.Tensor | SplitTensor]) -> None:
        self._stored = tensors
        self._restored: dict[str, torch.Tensor] = {}
        self._readers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "$dict": lambda node: {self.decode(key): self.decode(item) for key, item in node["$dict"]},
            "$tuple": lambda node: tuple(self.decode(item) for item in node["$tuple"]),
            "$int": lambda node: int(node["$int"], 16),
            "$float": lambda node: struct.unpack(">d", bytes.fromhex(node["$float"]))[0],
            "$str": lambda node: bytes.fromhex(node["$str"]).decode("utf-8", "surrogatepass"),
            "$bytes": lambda node: base64.b64decode(node["$bytes"]),
            "$scalar": lambda node: _numpy_from(bytes.fromhex(node["$scalar"]), node["dtype"], ())[()],
            "$array": self._decode_array,
            "$tensor": self._decode_tensor,
        }

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        # A plain dict never has a key that starts with "$": `encode` writes those as {"$dict": …}.
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self.decode(item) for key, item in node.items()}
        if tag not in self._readers:
            known = ", ".join(self._readers)
            problem = f"The tag {tag!r} is unknown (known: {known})."
            raise CheckpointError(f"{problem} Read this checkpoint with the trainwright that wrote it.")
        return self._readers[tag](node)

    def _decode_array(self, node: dict[str, Any]) -> np.ndarray[Any, Any]:
        content = self._plain(node["$array"]).cpu().numpy().tobytes()
        # The copy makes it writable: an array over bytes is not.
        return _numpy_from(content, node["dtype"], tuple(node["shape"])).copy()

    def _decode_tensor(self, node: dict[str, Any]) -> torch.Tensor | SplitTensor:
        key = node["$tensor"]
        if "dtype" not in node:
            return self._tensor(key)
        if key not in self._restored:
            dtype = getattr(torch, node["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise CheckpointError(f"{node['dtype']!r} is no dtype of a tensor. Use another step.")
            self._restored[key] = self._plain(key).clone().view(dtype).reshape(node["shape"])
        return self._restored[key]

    def _plain(self, key: str) -> torch.Tensor:
        tensor = self._tensor(key)
        return tensor if isinstance(tensor, torch.Tensor) else tensor.whole()

    def _tensor(self, key: str) -> torch.Tensor | SplitTensor:
        if key not in self._stored:
            problem = f"The tensor {key!r} is missing; its file holds {len(self._stored)} others."
            raise CheckpointError(f"{problem} Both files must be of one checkpoint: use another step.")
        return self._stored[key]


def _numpy_from(content: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    # The constructor below takes them: bytes of the file would become addresses of objects, and run what lies there.
    if not isinstance(dtype, str) or kind.hasobject:
        raise CheckpointError(f"An array of {dtype!r} is never saved: it holds addresses. Do not use this checkpoint.")
    # np.frombuffer rejects empty buffers and zero-width text; the constructor takes both.
    return np.ndarray(shape, dtype=kind, buffer=content)
