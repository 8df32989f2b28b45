"""The files of one part of a checkpoint: its tree, its tensors, and of split tensors a file for each rank with pieces.

    model.json  model.safetensors             the first rank's: the tree, where one is needed, and what is whole
    model.rank-00003.safetensors              pieces, and where each lies in the whole, as torch's DCP notes it

So HuggingFaceStorageReader reads a split model as well. What makes a folder of such files a checkpoint is store.py's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainwright.checkpoint.disk import FileFact, write_file
from trainwright.checkpoint.encoding import decode
from trainwright.checkpoint.split_tensors import Numbers, Place, SplitTensor
from trainwright.checkpoint.staging import EncodedPart
from trainwright.checkpoint.tensor_files import write_tensors
from trainwright.errors import CheckpointError

# The names that torch's HuggingFaceStorageReader looks for; the shape of the whole is ours, in the same place.
SHARDING_INFO, OFFSETS, WHOLE_SHAPE = "DCP_SHARDING_INFO", "saved_offsets", "whole_shape"

# transformers wants the format named.
METADATA: Mapping[str, str] = {"format": "pt"}


def write_part(folder: Path, encoded: EncodedPart) -> dict[str, FileFact]:
    """Write the first rank's files of a part, each synced, and return what the manifest says of them."""
    files: dict[str, FileFact] = {}
    part, tree, tensors, places = encoded
    whole = {key: tensor for key, tensor in tensors.items() if key not in places}
    if whole:
        files[f"{part}.safetensors"] = write_tensors(folder / f"{part}.safetensors", whole, metadata=METADATA)
    if places:
        pieces = {key: tensors[key] for key in places}
        files |= write_share(folder, encoded._replace(tensors=pieces), rank=0)
    if not _is_flat(tree):
        text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
        files[f"{part}.json"] = write_file(folder / f"{part}.json", text.encode())
    return files


def write_share(folder: Path, encoded: EncodedPart, *, rank: int) -> dict[str, FileFact]:
    """Write what one rank holds of a part into a file of its own, synced; none where it holds nothing."""
    part, _, tensors, places = encoded
    if not tensors:
        return {}
    info = {}
    for key, tensor in tensors.items():
        place = places.get(key) or Place((0,) * tensor.ndim, tuple(tensor.shape))
        info[key] = {OFFSETS: place.offsets, WHOLE_SHAPE: place.shape}
    metadata = {**METADATA, SHARDING_INFO: json.dumps(info, separators=(",", ":"))}
    name = f"{part}.rank-{rank:05d}.safetensors"
    return {name: write_tensors(folder / name, tensors, metadata=metadata)}


def file_names(part: str, files: Collection[str]) -> list[str]:
    """Return those of a checkpoint's files that belong to a part."""
    own = re.compile(rf"{re.escape(part)}(\.rank-\d{{5,}})?\.safetensors|{re.escape(part)}\.json")
    return [name for name in files if own.fullmatch(name)]


def share_names(part: str, files: Collection[str]) -> list[str]:
    """Return those of a part's files that hold pieces; none where one process wrote it."""
    return [name for name in file_names(part, files) if name.startswith(f"{part}.rank-")]


def read_part(folder: Path, part: str, files: Collection[str], *, device: str = "cpu") -> Any:
    """Return the state of a part; tensors in pieces are SplitTensors, mapped from their files."""
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
    pieces: dict[str, list[tuple[Numbers, torch.Tensor]]] = {}
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            try:
                info = json.loads((file.metadata() or {})[SHARDING_INFO])
                for key in sorted(file.keys()):
                    piece = file.get_tensor(key)
                    offsets, shape = _numbers(info[key][OFFSETS]), _numbers(info[key][WHOLE_SHAPE])
                    _check_piece(piece, offsets, shape, shapes.setdefault(key, shape))
                    pieces.setdefault(key, []).append((offsets, piece))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"It does not say where its pieces belong: {error!r}.", where=path) from error
    return {key: _joined(key, shapes[key], found, device=device) for key, found in pieces.items()}


def _numbers(value: Any) -> Numbers:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError(f"{value!r} is no list of sizes")
    return tuple(value)


def _check_piece(piece: torch.Tensor, offsets: Numbers, shape: Numbers, first_shape: Numbers) -> None:
    if not len(offsets) == len(shape) == piece.ndim or shape != first_shape:
        raise ValueError(f"a piece of {tuple(piece.shape)} at {offsets} of {shape}, of which others say {first_shape}")
    if any(start + size > whole for start, size, whole in zip(offsets, piece.shape, shape, strict=True)):
        raise ValueError(f"a piece of {tuple(piece.shape)} at {offsets} is beyond {shape}")


def _joined(
    key: str, shape: Numbers, pieces: list[tuple[Numbers, torch.Tensor]], *, device: str
) -> torch.Tensor | SplitTensor:
    if len({piece.dtype for _, piece in pieces}) != 1:
        raise CheckpointError(f"The pieces of {key!r} are of several dtypes. Use another step.")
    if (found := sum(piece.numel() for _, piece in pieces)) != math.prod(shape):
        problem = f"The pieces of {key!r} hold {found} values instead of {math.prod(shape)}"
        raise CheckpointError(f"{problem}. Use another step.")
    if len(pieces) == 1:
        return pieces[0][1].to(device)
    return SplitTensor(shape, pieces)


def _is_flat(tree: Any) -> bool:
    """Say whether the tensors alone, sorted by key, are the state: a dict of tensors, in that order, none tied.

    safetensors forgets the order of its keys; a state in another order is described by its .json.
    """
    if not isinstance(tree, dict) or not tree or list(tree) != sorted(tree):
        return False
    return all(node == {"$tensor": key} for key, node in tree.items())
