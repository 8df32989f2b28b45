"""Turns a nest of plain values, tensors and arrays into JSON and named tensors, and back, bit for bit.

No files and no pickle here: `store.py` writes the result as one .json and one .safetensors file. In the tree a
JSON object whose first key starts with "$" stands for what JSON lacks: `{"$tensor": "model.weight"}`,
`{"$tuple": [1, 2]}`. Everything else reads as itself.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from trainwright.checkpoint.split_tensors import Place, SplitTensor, place_of
from trainwright.errors import CheckpointError
from trainwright.parallel.local import is_split, local

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
    """A state as JSON and tensors, of which some may be this rank's pieces of larger ones."""

    tree: Any
    tensors: dict[str, torch.Tensor]
    places: dict[str, Place]
    """Of each piece, by its key, where it lies in the whole."""
    split_paths: list[tuple[str, tuple[int, ...]]]
    """The path and whole shape of every tensor in pieces: the same on all ranks that hold pieces of it."""


def encode_split(state: Any, *, name: str = "state") -> Encoded:
    """Encodes as `encode` does, and of a DTensor takes this rank's piece; its key is the same on every rank."""
    encoder = _Encoder(name, takes_pieces=True)
    return Encoded(encoder.encode(state, ()), encoder.tensors, encoder.places, encoder.split_paths)


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

    Tensors in pieces come out as they were given.

    The tree may come from anywhere: whatever it says, nothing but plain values, tensors and arrays is made.
    """
    try:
        return _Decoder(tensors).decode(tree)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error) as error:
        problem = f"What describes the state is damaged: {type(error).__name__}: {error}".rstrip(".")
        raise CheckpointError(f"{problem}. Use another step.") from error


class _Encoder:
    """One encoding: the tensors so far, and which storages and views they came from."""

    def __init__(self, name: str, *, takes_pieces: bool = False) -> None:
        self.name = name
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: dict[str, Place] = {}
        self.split_paths: list[tuple[str, tuple[int, ...]]] = []
        self._takes_pieces = takes_pieces
        # Views keep their source tensors alive: a freed storage's address could come back as a false tie.
        self._views: dict[tuple[object, ...], tuple[dict[str, Any], torch.Tensor]] = {}
        self._storages: set[tuple[object, ...]] = set()

    def encode(self, value: Any, path: KeyPath) -> Any:
        if len(path) > MAX_DEPTH:
            raise self._refusal(path, f"is nested more than {MAX_DEPTH} deep, or contains itself", value)
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
            raise self._refusal(path, "cannot be saved: a set has no order. Save sorted(...) of it, a list", value)
        raise self._refusal(path, "cannot be saved", value)

    def _encode_mapping(self, value: Mapping[Any, Any], path: KeyPath) -> dict[str, Any]:
        for key in value:
            if not isinstance(key, (str, int)) or isinstance(key, np.generic):
                raise self._refusal(path, f"has the key {key!r}; keys must be str or int", key)
        items = [(_encode_plain(key), self.encode(item, (*path, str(key)))) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$dict": [[key, item] for key, item in items]}

    def _encode_sequence(self, value: list[Any] | tuple[Any, ...], path: KeyPath) -> Any:
        if hasattr(value, "_fields"):
            # It would come back as a bare tuple and fail far from here, at resume.
            raise self._refusal(path, "cannot be saved: a named tuple. Save its _asdict()", value)
        items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items

    def _encode_array(self, value: np.ndarray[Any, Any], path: KeyPath) -> dict[str, Any]:
        if type(value) not in (np.ndarray, np.memmap):
            raise self._refusal(path, "cannot be saved: it is more than a plain array", value)
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
            raise self._refusal(path, f"cannot be saved: the numpy dtype {dtype} has no exact name", value)
        return str(dtype.str)

    def _encode_tensor(self, value: torch.Tensor, path: KeyPath) -> dict[str, Any]:
        if self._takes_pieces and is_split(value):
            return self._encode_piece(value, path)
        tensor = value.detach()
        problem = _tensor_problem(tensor)
        if problem is not None:
            raise self._refusal(path, f"cannot be saved: {problem}", value)
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

    def _encode_piece(self, value: torch.Tensor, path: KeyPath) -> dict[str, Any]:
        """Encodes this rank's part of a DTensor; of the same one met twice (tied weights), once."""
        place = place_of(value)
        problem = place if isinstance(place, str) else _tensor_problem(local(value))
        if problem is None and value.dtype not in NATIVE_DTYPES:
            problem = f"a DTensor of dtype {value.dtype}. Save a view of it in another"
        if problem is not None:
            raise self._refusal(path, f"cannot be saved: {problem}", value)
        assert isinstance(place, Place)
        self.split_paths.append((".".join(path), place.shape))
        node = self._encode_tensor(local(value), path)
        self.places[node["$tensor"]] = place
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

    def _refusal(self, path: KeyPath, problem: str, value: Any) -> CheckpointError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        # A list that holds itself has a path of 100 equal pieces; eight of them show where to look.
        place = ".".join((self.name, *path[:8])) + (".…" if len(path) > 8 else "")
        return CheckpointError(f"{problem} (got {kind}). A checkpoint holds {ALLOWED}.", where=place)


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    if type(tensor) is not torch.Tensor:
        return "a tensor subclass is more than its values. Save the plain tensor in it (of a DTensor: full_tensor())"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"a tensor of layout {tensor.layout} and dtype {tensor.dtype}. Save its dense values"
    if tensor.is_meta:
        return "a meta tensor has no values. Save it after the model is materialised"
    return None


def _encode_plain(value: bool | int | float | str | bytes | None) -> Any:
    """Return JSON for a scalar; the tags hold what JSON would lose or Python would refuse to write."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Python refuses to print integers of more than 4,300 digits in decimal, never in hex.
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
    # np.frombuffer refuses empty buffers and zero-width text; the constructor takes both.
    return np.ndarray(shape, dtype=kind, buffer=content)
