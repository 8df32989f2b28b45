"""Describes the values of a sample or a batch: texts, tokens and what they decode to, tensors, small images.

Nothing here knows where a sample comes from; reading.py does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.labels import IGNORED_LABEL
from trainwright.looking.facts import Values

"""The label of a place that is not learnt."""

Decode = Callable[[list[int]], str | None]
"""From tokens to their text; None where they have none."""

_LONGEST_TEXT = 2000
_MOST_IDS = 64
_FEW = 0.05  # where fewer labels are left out, the text that is learnt says nothing beside that of the tokens
_LARGEST_DRAWING = 40  # pixels a side: a larger image says nothing in characters
_FINE_DRAWING = 16  # up to here a pixel is two characters of one line; above, half a line of one character
_SHADES = " ░▒▓█"


def fields_of(sample: Any) -> list[tuple[str, Any]]:
    """Returns the fields of a sample or a batch by name; places of a tuple are named by their number."""
    return list(_fields(sample, "")) or [("value", sample)]


def _fields(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        pairs = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = list(zip(value._fields, value, strict=True))
    elif isinstance(value, (tuple, list)) and (not name or isinstance(value, tuple)) and tensor_of(value) is None:
        pairs = [(str(number), each) for number, each in enumerate(value)]
    else:
        yield name or "value", value
        return
    for key, each in pairs:
        yield from _fields(each, f"{name}.{key}" if name else key)


def tensor_of(value: Any) -> Tensor | None:
    """Returns an array, a number or a list of numbers as a tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        leaf = value
        while isinstance(leaf, (list, tuple)) and leaf:
            leaf = leaf[0]
        if not isinstance(leaf, Number) or isinstance(leaf, complex):
            return None
    elif not isinstance(value, (np.ndarray, np.generic, int, float)):
        return None
    try:
        return torch.as_tensor(np.asarray(value))
    except (ValueError, TypeError, OverflowError):  # ragged, or of a kind that torch has no type for
        return None


def is_token_field(name: str) -> bool:
    """Does a field of this name hold tokens?"""
    return name.rsplit(".", 1)[-1].endswith("input_ids")


def is_label_field(name: str) -> bool:
    """Does a field of this name hold labels?"""
    return name.rsplit(".", 1)[-1].endswith("labels")


def describe_sample(sample: Any, decode: Decode) -> tuple[Values, ...]:
    """Describes each field of a sample."""
    fields = fields_of(sample)
    tokens = next((tensor_of(value) for name, value in fields if name == "input_ids"), None)
    return tuple(_describe(name, value, decode, tokens) for name, value in fields)


def describe_batch(batch: Any) -> tuple[Values, ...]:
    """Describes each field of a batch, without what is in it."""
    return tuple(
        Values(name, _type_name(value), device=str(tensor.device), **_statistics(tensor))
        if (tensor := tensor_of(value)) is not None
        else Values(name, _type_name(value), text=f"{len(value)} values" if hasattr(value, "__len__") else None)
        for name, value in fields_of(batch)
    )


def _describe(name: str, value: Any, decode: Decode, tokens: Tensor | None) -> Values:
    tensor = tensor_of(value)
    if tensor is None:
        return Values(name, _type_name(value), text=_in_short(value))
    kind = _type_name(value)
    is_whole = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != torch.bool
    if tensor.ndim == 0:
        return Values(name, kind, (), text=_in_short(tensor.item()), **_extremes(tensor))
    if is_whole and tensor.ndim == 1 and is_token_field(name):
        return _describe_tokens(Values(name, kind, is_tokens=True, **_statistics(tensor)), tensor, decode)
    if is_whole and is_label_field(name):
        return _describe_labels(Values(name, kind, **_statistics(tensor)), tensor, decode, tokens)
    return Values(name, kind, drawing=draw(tensor), **_statistics(tensor))


def _describe_tokens(values: Values, tensor: Tensor, decode: Decode) -> Values:
    text = decode(tensor[:_LONGEST_TEXT].tolist())
    return _with(values, text=None if text is None else text[:_LONGEST_TEXT], ids=None if text else _ids(tensor))


def _describe_labels(values: Values, labels: Tensor, decode: Decode, tokens: Tensor | None) -> Values:
    is_learnt = labels != IGNORED_LABEL
    values = _with(values, num_ignored=int((~is_learnt).sum()))
    if tokens is None or tokens.shape != labels.shape:
        return values
    if bool((labels == tokens)[is_learnt].all()):
        values = _with(values, is_as_input_ids=True)
    if (values.num_ignored or 0) > _FEW * labels.numel() and bool(is_learnt.any()):
        text = decode(labels[is_learnt][:_LONGEST_TEXT].tolist())
        values = _with(values, text=None if text is None else text[:_LONGEST_TEXT])
    return values


def _with(values: Values, **changes: Any) -> Values:
    return Values(**{**vars(values), **changes})


def _statistics(tensor: Tensor) -> dict[str, Any]:
    return {"shape": tuple(tensor.shape), **_extremes(tensor)}


def _extremes(tensor: Tensor) -> dict[str, Any]:
    if not tensor.numel() or tensor.is_complex():
        return {}
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    number = float if tensor.is_floating_point() else int
    low, high = (number(each.item()) for each in torch.aminmax(tensor))
    return {"minimum": low, "mean": float(tensor.to(torch.float64).mean()), "maximum": high}


def _type_name(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype)
    return type(value).__name__


def _in_short(value: Any) -> str:
    """Returns a value that is no tensor as text."""
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes"
    if hasattr(value, "mode") and hasattr(value, "size"):  # PIL's
        width, height = value.size
        return f"an image of {width} × {height}, {value.mode}"
    if isinstance(value, (list, tuple, Mapping)):
        try:
            return json.dumps(value, ensure_ascii=False)[:_LONGEST_TEXT]
        except (TypeError, ValueError):
            return f"{len(value)} values, {repr(value)[:_LONGEST_TEXT]}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value)[:_LONGEST_TEXT]


def _ids(tensor: Tensor) -> str:
    shown = " ".join(map(str, tensor[:_MOST_IDS].tolist()))
    return f"{shown} …" if len(tensor) > _MOST_IDS else shown


def draw(tensor: Tensor) -> tuple[str, ...]:
    """Returns a small grey image [height, width] or [1, height, width] as lines of shades; () for anything else."""
    if tensor.ndim == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 2 or not 4 <= min(tensor.shape) <= max(tensor.shape) <= _LARGEST_DRAWING:
        return ()
    if max(tensor.shape) > 4 * min(tensor.shape) or tensor.is_complex():
        return ()
    pixels = tensor.to(torch.float64)
    low, high = float(pixels.min()), float(pixels.max())
    if not high > low:  # one shade, or not a number
        return ()
    pixels = (pixels - low) / (high - low)
    times = 2 if max(tensor.shape) <= _FINE_DRAWING else 1
    if times == 1:
        pixels = torch.stack([rows.mean(0) for rows in torch.split(pixels, 2)])
    levels = (pixels * len(_SHADES)).to(torch.int64).clamp(max=len(_SHADES) - 1)
    return tuple("".join(_SHADES[level] * times for level in row) for row in levels.tolist())
