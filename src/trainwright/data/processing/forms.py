"""What the columns of Arrow cannot say of a sample: which keys it lacks, and the dtype and shape of its empty arrays.

In a column every dict has the keys of all, and an empty list is a list of anything. The form of a sample says what is
otherwise; most samples have none. It is kept as JSON beside the columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Place = tuple[str | int, ...]
"""The keys and indices that lead to a value in a sample."""


class Empty(NamedTuple):
    """An array without elements."""

    place: Place
    dtype: str
    shape: tuple[int, ...]


def forms_of(samples: Sequence[Mapping[str, Any]], empties: Sequence[Sequence[Empty]]) -> list[str | None]:
    """Returns the form of each sample of a batch, or None where the columns say all."""
    dicts = [list(_dicts_in(sample)) for sample in samples]
    keys: dict[Place, dict[str, None]] = {}
    for found in dicts:
        for place, value in found:
            keys.setdefault(_column_of(place), {}).update(dict.fromkeys(value))
    forms: list[str | None] = []
    for found, empty in zip(dicts, empties, strict=True):
        lacking = [[*place, key] for place, value in found for key in keys[_column_of(place)] if key not in value]
        forms.append(json.dumps({"lacking": lacking, "empty": empty}) if lacking or empty else None)
    return forms


def restore(sample: dict[str, Any], form: str) -> None:
    """Makes a sample that was read from the columns what it was."""
    facts = json.loads(form)
    for place, dtype, shape in facts["empty"]:
        _parent_of(sample, place)[place[-1]] = torch.empty(shape, dtype=getattr(torch, dtype))
    for place in facts["lacking"]:
        # Where the whole batch lacks the key, there is no column to take it from.
        _parent_of(sample, place).pop(place[-1], None)


def _parent_of(sample: Any, place: Sequence[str | int]) -> Any:
    """Returns the dict or list that holds a place; a tensor on the way there was a list of unequal empty arrays."""
    for step in place[:-1]:
        if isinstance(sample[step], torch.Tensor):
            sample[step] = list(sample[step].unbind())
        sample = sample[step]
    return sample


def _dicts_in(value: Any, place: Place = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    if isinstance(value, dict):
        yield place, value
        for key, item in value.items():
            if isinstance(item, (dict, list)):
                yield from _dicts_in(item, (*place, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, (dict, list)):
                yield from _dicts_in(item, (*place, index))


def _column_of(place: Place) -> Place:
    """Returns the place without its indices: all elements of a list are in one column."""
    return tuple(0 if isinstance(step, int) else step for step in place)
