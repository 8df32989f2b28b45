"""Encodes nested plain values, tensors and arrays as JSON and named tensors, and decodes them exactly.

Sharded tensors are encoded as the shards of this rank, and assembled from the shards of several files.
"""

from __future__ import annotations

import base64
import math
import random
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from trainwright.errors import CheckpointError
from trainwright.parallel.mesh import is_split, local

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor is sharded over ranks: torch's mesh, and a placement for each of its axes."""

    mesh: Any
    placements: tuple[Any, ...]

    def is_written_here(self, first_of_stage: int, number: int = 0) -> bool:
        """Returns True if this rank, among those with the same shard, writes the tensor of this number.

        Replicas take turns by number, those along the replicated axes of the mesh that contains the first rank of the
        pipeline stage.
        """
        coordinate = self.mesh.get_coordinate()
        if coordinate is None or not bool((self.mesh.mesh == first_of_stage).any()):
            return False
        replica, num_replicas = 0, 1
        for axis, placement in enumerate(self.placements):
            if placement.is_replicate():
                replica = replica * self.mesh.size(axis) + coordinate[axis]
                num_replicas *= self.mesh.size(axis)
        return replica == number % num_replicas

    def region(self, shape: Sequence[int]) -> tuple[Sizes, Sizes]:
        """Returns the offset of this rank's shard of a tensor of that shape in each dim, and its sizes."""
        coordinate = self.mesh.get_coordinate()
        offsets, sizes = [0] * len(shape), list(shape)
        axes = [axis for axis, placement in enumerate(self.placements) if hasattr(placement, "dim")]
        # A strided placement means that the later axes shard first: FSDP shards the shards along `tensor`.
        for axis in sorted(axes, key=lambda axis: hasattr(self.placements[axis], "split_factor")):
            dim = self.placements[axis].dim
            chunk = -(-sizes[dim] // self.mesh.size(axis))
            start = min(chunk * coordinate[axis], sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(chunk, sizes[dim] - start)
        return tuple(offsets), tuple(sizes)


@dataclass(frozen=True)
class ShardLocation:
    """The location of a shard in the full tensor."""

    offsets: Sizes
    shape: Sizes
    """The shape of the full tensor."""
    layout: TensorLayout | None = None
    """The sharding in this run; None for a full tensor."""


def shard_location_of(tensor: Any) -> ShardLocation | str:
    """Returns the location of this rank's shard of a DTensor, or the reason why it cannot be saved."""
    layout = layout_of(tensor)
    if any(placement.is_partial() for placement in layout.placements):
        return f"a DTensor with partial sums ({layout.placements}). Save it after redistribute()"
    offsets, sizes = layout.region(tensor.shape)
    if sizes != tuple(local(tensor).shape):
        return f"a DTensor whose shard is {tuple(local(tensor).shape)} instead of {sizes}. Save its full_tensor()"
    return ShardLocation(offsets, tuple(tensor.shape), layout)


class StoredShard(Protocol):
    """A tensor whose values are read from a file when they are needed."""

    shape: torch.Size
    dtype: torch.dtype

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Returns a copy of the rows from `first` to before `last`; for a scalar, the scalar."""


class SplitTensor:
    """A tensor in shards, which are copied or read from their files only when a region is read.

    `shards` are pairs of offsets and shard; together they are the full tensor, or the available part of it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        shards: Sequence[tuple[Sizes, torch.Tensor | StoredShard]],
        *,
        layout: TensorLayout | None = None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.shards = list(shards)
        self.dtype = self.shards[0][1].dtype
        self.layout = layout

    @torch.no_grad()
    def copy_into(self, target: torch.Tensor, offsets: Sequence[int] | None = None) -> None:
        """Fills a plain tensor with the region of its shape at `offsets`; by default at 0."""
        starts = tuple(offsets or (0,) * len(self.shape))
        missing = target.numel()
        for begins, shard in self.shards:
            bounds = [
                (max(start, begin), min(start + size, begin + length))
                for start, size, begin, length in zip(starts, target.shape, begins, shard.shape, strict=True)
            ]
            if any(first >= last for first, last in bounds):
                continue
            if not isinstance(shard, torch.Tensor):
                # A scalar has no rows, and is read whole.
                first, last = (bounds[0][0] - begins[0], bounds[0][1] - begins[0]) if bounds else (0, 1)
                shard, begins = shard.rows(first, last), (*(begin + first for begin in begins[:1]), *begins[1:])
            target[_slices(bounds, starts)].copy_(shard[_slices(bounds, begins)])
            missing -= math.prod(last - first for first, last in bounds)
        if missing != 0:
            problem = f"{missing} of {target.numel()} values are in no shard, or in several"
            raise CheckpointError(f"{problem}. Use another step.")

    def whole(self, *, device: str | torch.device = "cpu") -> torch.Tensor:
        """Returns a copy of the full tensor."""
        result = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.copy_into(result)
        return result

    def as_dtensor(self, layout: TensorLayout) -> torch.Tensor:
        """Returns it as a DTensor, with this rank's shard on the device of the layout."""
        from torch.distributed.tensor import DTensor

        offsets, sizes = layout.region(self.shape)
        shard = torch.empty(sizes, dtype=self.dtype, device=layout.mesh.device_type)
        self.copy_into(shard, offsets)
        strides = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            shard, layout.mesh, layout.placements, run_check=False, shape=self.shape, stride=strides
        )


def _slices(bounds: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first - offset, last - offset) for (first, last), offset in zip(bounds, offsets, strict=True))


def as_split(tensor: torch.Tensor | StoredShard | SplitTensor) -> SplitTensor:
    """Returns a tensor as a SplitTensor with one shard."""
    if isinstance(tensor, SplitTensor):
        return tensor
    return SplitTensor(tensor.shape, [((0,) * len(tensor.shape), tensor)])


def fill(target: torch.Tensor, source: torch.Tensor | SplitTensor) -> None:
    """Copies values of the same shape into a tensor in place; into a DTensor, those of this rank's shard."""
    offsets = None
    if is_split(target):
        location = shard_location_of(target)
        if isinstance(location, str):
            raise CheckpointError(f"Values cannot be loaded into {location}.")
        offsets = location.offsets
    as_split(source).copy_into(local(target), offsets)


def shard_like(like: torch.Tensor, value: Any) -> Any:
    """Returns state of a parameter, such as a momentum, sharded like the parameter.

    This holds for the parameter's shape, and for that of a matrix with 1 in place of some sizes (Adafactor's
    factors). Any other tensor is full.
    """
    if not isinstance(value, torch.Tensor | SplitTensor) or (isinstance(value, torch.Tensor) and is_split(value)):
        return value
    if is_split(like) and len(value.shape) == like.ndim:
        pairs = list(zip(value.shape, like.shape, strict=True))
        keeps = [own == other for own, other in pairs]
        is_factor = like.ndim > 1 and any(keeps) and all(own in (1, other) for own, other in pairs)
        if all(keeps) or is_factor:
            from torch.distributed.tensor import Replicate

            layout = layout_of(like)
            # Dims of size 1 are replicated.
            placements = tuple(
                placement if placement.is_replicate() or keeps[placement.dim] else Replicate()
                for placement in layout.placements
            )
            return as_split(value).as_dtensor(TensorLayout(layout.mesh, placements))
    return as_whole(value)


def layout_of(tensor: Any) -> TensorLayout:
    """Returns how a DTensor is sharded."""
    return TensorLayout(tensor.device_mesh, tuple(tensor.placements))


def as_whole(value: torch.Tensor | SplitTensor) -> torch.Tensor:
    """Returns the full tensor; a DTensor if the other shards are on other ranks."""
    if isinstance(value, torch.Tensor):
        return value
    return value.whole() if value.layout is None else value.as_dtensor(value.layout)


def map_tensors(state: Any, change: Any) -> Any:
    """Returns nested values with `change(tensor, key)` for each tensor; `key` is that of the innermost mapping.

    A tensor that occurs several times is changed once, so that tied ones stay tied.
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

_HINTS: Mapping[Any, str] = {
    (set, frozenset): "a set has no order. Save sorted(...) of it, a list",
    (deque,): "save list(...) of it",
    (np.random.Generator,): "save its bit_generator.state, a dict",
    (random.Random,): "save its getstate(), a tuple",
    (np.random.RandomState,): "save its get_state(), a tuple",
    (torch.Generator,): "save its get_state(), a tensor",
    (torch.nn.Module, torch.optim.Optimizer): "save its state_dict()",
}
"""Advice on what to save instead of values of these types."""

# The dtypes that safetensors supports since 0.4.5. Others (complex, other floats) are stored as bytes.
# In the sort order of safetensors, widest first, so that every tensor is aligned to its element size.
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

# Deeper than any real state and far below Python's recursion limit, so a list that contains itself raises a clear
# error.
MAX_DEPTH = 100

# safetensors stores its own header under this name; a tensor with that name makes the file unreadable.
RESERVED_KEY = "__metadata__"

KeyPath = tuple[str, ...]


class Encoded(NamedTuple):
    """A state as JSON and tensors, some of which may be this rank's shards of larger ones."""

    tree: Any
    tensors: Mapping[str, torch.Tensor]
    shard_locations: Mapping[str, ShardLocation] = MappingProxyType({})
    """The location of each shard in the full tensor, by key."""
    split_paths: Sequence[tuple[str, Sizes]] = ()
    """The path and full shape of every sharded tensor: the same on all ranks that have shards of it."""


def encode(state: Any, *, name: str = "state", accepts_shards: bool = False) -> Encoded:
    """Returns the JSON tree of `state` and its tensors by dotted key; `name` starts the paths in errors.

    The tensors are detached and contiguous, on their devices, and share memory with `state` unless a copy is needed:
    write them before the next update. The same view (tied weights) is stored once. Mappings are decoded as dict,
    parameters as plain tensors, and subclasses of str, int and float as the base type. With `accepts_shards` a DTensor
    is encoded as this rank's shard, under the same key on every rank; without, it raises.
    """
    encoder = _Encoder(name, accepts_shards=accepts_shards)
    return Encoded(encoder.encode(state, ()), encoder.tensors, encoder.shard_locations, encoder.split_paths)


def decode(tree: Any, tensors: Mapping[str, torch.Tensor | SplitTensor]) -> Any:
    """Returns the state from the result of `encode`; tensors stay on their device and tied ones are one object.

    A SplitTensor remains a SplitTensor. The tree may come from an untrusted file: only plain values, tensors and arrays
    are created, independent of its contents.
    """
    try:
        return _Decoder(tensors).decode(tree)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error) as error:
        problem = f"The description of the state is damaged: {type(error).__name__}: {error}".rstrip(".")
        raise CheckpointError(f"{problem}. Use another step.") from error


class _Encoder:
    """The state of one encoding: the tensors so far, and their storages and views."""

    def __init__(self, name: str, *, accepts_shards: bool) -> None:
        self.name = name
        self.tensors: dict[str, torch.Tensor] = {}
        self.shard_locations: dict[str, ShardLocation] = {}
        self.split_paths: list[tuple[str, tuple[int, ...]]] = []
        self._accepts_shards = accepts_shards
        # The source tensors are kept alive: the address of a freed storage could be reused and look like a tie.
        self._views: dict[tuple[object, ...], tuple[dict[str, Any], torch.Tensor]] = {}
        self._storages: set[tuple[object, ...]] = set()

    def encode(self, value: Any, path: KeyPath) -> Any:
        if len(path) > MAX_DEPTH:
            raise self._rejection(path, f"is nested more than {MAX_DEPTH} deep, or contains itself", value)
        # numpy first, because its float64 is also a Python float, and its str_ a str.
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
        hint = next((hint for kinds, hint in _HINTS.items() if isinstance(value, kinds)), None)
        raise self._rejection(path, "cannot be saved" + ("" if hint is None else f": {hint}"), value)

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
            # It would be decoded as a plain tuple, which would fail only at resume.
            raise self._rejection(path, "cannot be saved: a named tuple. Save its _asdict()", value)
        items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items

    def _encode_array(self, value: np.ndarray[Any, Any], path: KeyPath) -> dict[str, Any]:
        if type(value) not in (np.ndarray, np.memmap):
            raise self._rejection(
                path, "cannot be saved: it is a subclass of numpy.ndarray. Save np.asarray() of it", value
            )
        dtype = self._numpy_dtype(value, path)
        # As bytes, because torch does not have all of numpy's dtypes (dates, text, big-endian). Costs two copies.
        content = np.ndarray((value.nbytes,), dtype=np.uint8, buffer=bytearray(value.tobytes()))
        key = self._free_key(path)
        self.tensors[key] = torch.from_numpy(content)
        return {"$array": key, "dtype": dtype, "shape": list(value.shape)}

    def _numpy_dtype(self, value: np.ndarray[Any, Any] | np.generic, path: KeyPath) -> str:
        dtype = value.dtype
        # The string form of structured and foreign dtypes (bfloat16 of ml_dtypes) contains only their size.
        if dtype.hasobject or np.dtype(dtype.str) != dtype:
            raise self._rejection(path, f"cannot be saved: the numpy dtype {dtype} has no exact name", value)
        return str(dtype.str)

    def _encode_tensor(self, value: torch.Tensor, path: KeyPath) -> dict[str, Any]:
        if self._accepts_shards and is_split(value):
            return self._encode_shard(value, path)
        tensor = value.detach()
        problem = _tensor_problem(tensor)
        if problem is not None:
            raise self._rejection(path, f"cannot be saved: {problem}", value)
        # All empty tensors have the same null address, so they are never tied.
        if tensor.numel() == 0:
            return self._store_tensor(tensor.clone(), path)
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        layout = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        view = (*storage, *layout, tensor.is_conj(), tensor.is_neg())
        if view in self._views:
            return self._views[view][0]
        # safetensors writes memory unchanged, so lazy conjugation and negation must be resolved first.
        content = tensor.resolve_conj().resolve_neg().contiguous()
        if storage in self._storages and content.data_ptr() == tensor.data_ptr():
            content = content.clone()
        node = self._store_tensor(content, path)
        self._storages.add(storage)
        self._views[view] = (node, value)
        return node

    def _encode_shard(self, value: torch.Tensor, path: KeyPath) -> dict[str, Any]:
        """Encodes this rank's shard of a DTensor; a tied shard is stored once."""
        location = shard_location_of(value)
        problem = location if isinstance(location, str) else _tensor_problem(local(value))
        if problem is None and value.dtype not in DTYPE_NAMES:
            problem = f"a DTensor of dtype {value.dtype}. Save a view of it in another dtype"
        if problem is not None:
            raise self._rejection(path, f"cannot be saved: {problem}", value)
        assert isinstance(location, ShardLocation)
        self.split_paths.append((".".join(path), location.shape))
        node = self._encode_tensor(local(value), path)
        self.shard_locations[node["$tensor"]] = location
        return node

    def _store_tensor(self, tensor: torch.Tensor, path: KeyPath) -> dict[str, Any]:
        key = self._free_key(path)
        if tensor.dtype in DTYPE_NAMES:
            self.tensors[key] = tensor
            return {"$tensor": key}
        self.tensors[key] = tensor.reshape(-1).view(torch.uint8)
        return {"$tensor": key, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}

    def _free_key(self, path: KeyPath) -> str:
        # {"a": {"b": x}, "a.b": y} has the keys "a.b" and "a.b#2"; the tree refers to both.
        wanted = ".".join(path).encode(errors="backslashreplace").decode() if path else self.name
        key, number = wanted, 1
        while key in self.tensors or key == RESERVED_KEY:
            number += 1
            key = f"{wanted}#{number}"
        return key

    def _rejection(self, path: KeyPath, problem: str, value: Any) -> CheckpointError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        # A list that contains itself has a path of 100 equal keys; eight of them are sufficient.
        location = ".".join((self.name, *path[:8])) + (".…" if len(path) > 8 else "")
        return CheckpointError(f"{problem} (got {kind}). A checkpoint can contain {ALLOWED}.", where=location)


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    if type(tensor) is not torch.Tensor:
        return "a tensor subclass has more than its values. Save its plain tensor (of a DTensor: full_tensor())"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"a tensor of layout {tensor.layout} and dtype {tensor.dtype}. Save its dense values"
    if tensor.is_meta:
        return "a meta tensor has no values. Save it after the model is materialized"
    return None


def _encode_plain(value: bool | int | float | str | bytes | None) -> Any:
    """Returns JSON for a scalar; tags encode what JSON cannot represent exactly."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Python prints integers of more than 4,300 digits only in hex.
        return int(value) if abs(value) < 2**128 else {"$int": hex(value)}
    if isinstance(value, float):
        # JSON has no nan and inf, and there are 2**52 nans: keep the bits.
        return float(value) if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair (in file names) is not UTF-8, and two halves would be merged in JSON.
        return {"$str": text.encode("utf-8", "surrogatepass").hex()}
    return text


class _Decoder:
    """The state of one decoding: the stored tensors, and those that were restored to another dtype."""

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
        # A plain dict has no key that starts with "$": `encode` writes those as {"$dict": …}.
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
        # The copy is writable; an array over bytes is not.
        return _numpy_from(content, node["dtype"], tuple(node["shape"])).copy()

    def _decode_tensor(self, node: dict[str, Any]) -> torch.Tensor | SplitTensor:
        key = node["$tensor"]
        if "dtype" not in node:
            return self._tensor(key)
        if key not in self._restored:
            dtype = getattr(torch, node["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise CheckpointError(f"{node['dtype']!r} is not the dtype of a tensor. Use another step.")
            self._restored[key] = self._plain(key).clone().view(dtype).reshape(node["shape"])
        return self._restored[key]

    def _plain(self, key: str) -> torch.Tensor:
        tensor = self._tensor(key)
        return tensor if isinstance(tensor, torch.Tensor) else tensor.whole()

    def _tensor(self, key: str) -> torch.Tensor | SplitTensor:
        if key not in self._stored:
            problem = f"The tensor {key!r} is missing; its file has {len(self._stored)} others."
            raise CheckpointError(f"{problem} Both files must be from one checkpoint: use another step.")
        return self._stored[key]


def _numpy_from(content: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    # The constructor below accepts them, so bytes of the file would become addresses of objects and execute code.
    if not isinstance(dtype, str) or kind.hasobject:
        raise CheckpointError(
            f"An array of {dtype!r} contains addresses and is never saved. Do not use this checkpoint."
        )
    # np.frombuffer rejects empty buffers and zero-width text; the constructor accepts both.
    return np.ndarray(shape, dtype=kind, buffer=content)
