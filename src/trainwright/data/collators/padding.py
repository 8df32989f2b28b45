"""How wide a batch of token sequences is, and the filling of its rows. What may stand in a row is samples.py's.

Rows are numpy arrays: assigning 32 of them takes half the time of torch's pad_sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.data.collators.samples import sample_error
from trainwright.errors import ConfigError

SIDES = ("right", "left")

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Width:
    """From the lengths of a batch's samples to the width of its rows.

    The longest sample decides, after the cut at `max_length`: rounded up to a multiple, or to the next bucket, so
    that a compiled model sees few shapes.

    >>> Width(buckets=(128, 256, 512)).of([90, 130], "input_ids")
    256
    """

    max_length: int | None = None
    multiple: int | None = None
    buckets: Sequence[int] = ()
    of_labels: bool = False
    """Are the settings called max_label_length and label_buckets? For errors only."""

    def __post_init__(self) -> None:
        longest, multiple, buckets = self.max_length, self.multiple, list(self.buckets)
        for setting, value in ((self._max_name, longest), ("pad_to_multiple_of", multiple)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{setting} is {value!r}. Use a whole number of at least 1, or leave it out.")
        if any(type(one) is not int or one < 1 for one in buckets) or buckets != sorted(set(buckets)):
            raise ConfigError(f"{self._buckets_name} is {buckets}. Use growing whole numbers, such as [128, 256, 512].")
        if buckets and multiple is not None:
            raise ConfigError(f"{self._buckets_name} and pad_to_multiple_of both say how wide a batch is. Remove one.")
        if buckets and longest is not None and longest > buckets[-1]:
            raise ConfigError(
                f"{self._max_name} is {longest}, more than the last of {self._buckets_name}, {buckets[-1]}. "
                "Lower it, or add a bucket."
            )
        if multiple is not None and longest is not None and longest % multiple:
            raise ConfigError(
                f"{self._max_name} is {longest}, not a multiple of pad_to_multiple_of, {multiple}: rows could get "
                f"longer than it. Use {longest // multiple * multiple or multiple}."
            )

    @property
    def _max_name(self) -> str:
        return "max_label_length" if self.of_labels else "max_length"

    @property
    def _buckets_name(self) -> str:
        return "label_buckets" if self.of_labels else "buckets"

    def cut(self, lengths: Sequence[int]) -> Sequence[int]:
        """Returns how many tokens of each sample stay."""
        limit = self.max_length
        return lengths if limit is None else [min(length, limit) for length in lengths]

    def of(self, lengths: Sequence[int], field: str) -> int:
        """Returns the width of a batch whose samples have these lengths."""
        longest = max(self.cut(lengths))
        if self.multiple is not None:
            return -(-longest // self.multiple) * self.multiple
        if not self.buckets:
            return longest
        place = bisect_left(self.buckets, longest)
        if place == len(self.buckets):
            raise sample_error(
                lengths.index(longest),
                field,
                f"has {longest} tokens, more than the last of {self._buckets_name}, {self.buckets[-1]}. "
                f"Add a bucket, or set {self._max_name} to cut what is longer.",
            )
        return self.buckets[place]


def check_side(side: str) -> None:
    """Refuses a side that rows do not have."""
    if side not in SIDES:
        raise ConfigError(f'side is "{side}". Use one of: {", ".join(SIDES)}.')


def pad_rows(rows: Sequence[Array], width: int, value: float, *, side: str = "right", dtype: Any = np.int64) -> Array:
    """Returns the rows as one array [rows, width, ...], each filled up with `value`; a longer one loses its end."""
    padded = np.full((len(rows), width, *rows[0].shape[1:]), value, dtype)
    if side == "left":
        for place, row in zip(padded, rows, strict=True):
            place[max(width - len(row), 0) :] = row[:width]
    else:
        for place, row in zip(padded, rows, strict=True):
            place[: len(row)] = row[:width]
    return padded


def mark_tokens(lengths: Sequence[int], width: int, *, side: str = "right") -> npt.NDArray[np.int64]:
    """Returns the attention mask [rows, width]: 1 for a sample's tokens, 0 for what fills the row up."""
    counts = np.array(lengths)[:, None]
    places = np.arange(width)
    return (places < counts if side == "right" else places >= width - counts).astype(np.int64)
