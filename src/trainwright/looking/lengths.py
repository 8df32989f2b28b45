"""How long samples are: which field tells, how it is counted, and the counts as a few bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwright.looking.facts import Bar, Lengths
from trainwright.looking.values import fields_of, is_token_field

MOST_BARS = 12
_STEPS = (1, 2, 5)


def unit_of(sample: Any) -> str | None:
    """Returns what a sample's length is counted in, tokens before characters; None where it has none."""
    fields = fields_of(sample)
    name = next((name for name, value in fields if is_token_field(name) and hasattr(value, "__len__")), None)
    if name is not None:
        return f"tokens of {name}"
    texts = [name for name, value in fields if isinstance(value, str)]
    if not texts:
        return None
    return f"characters of {'text' if 'text' in texts else ', '.join(texts)}"


def length_of(sample: Any, unit: str) -> int | None:
    """Returns a sample's length, of all fields that the unit names; None where it has none of them."""
    names = unit.split(" of ", 1)[1].split(", ")
    lengths = [len(value) for name, value in fields_of(sample) if name in names and hasattr(value, "__len__")]
    return sum(lengths) if lengths else None


def summarise(counted: Sequence[int], unit: str, *, is_whole: bool) -> Lengths:
    """Returns the numbers and the bars; no bars where all are equal."""
    lengths = np.sort(np.asarray(counted, dtype=np.int64))
    low, high = int(lengths[0]), int(lengths[-1])
    median, p95 = (int(np.percentile(lengths, share, method="inverted_cdf")) for share in (50, 95))
    return Lengths(unit, len(lengths), is_whole, low, median, p95, high, _bars(lengths, low, high))


def _bars(lengths: Any, low: int, high: int) -> tuple[Bar, ...]:
    """Returns at most MOST_BARS bars of equal, round width.

    A long tail would leave one bar with everything: what is beyond three times the 95th percentile shares the last.
    """
    if low == high:
        return ()
    p95 = int(np.percentile(lengths, 95, method="inverted_cdf"))
    top = high if high <= 3 * max(p95, 1) else p95
    width = _round_width(low, top, MOST_BARS if top == high else MOST_BARS - 1)
    first = low // width * width
    edges = list(range(first, top + 1, width))
    bars = [Bar(start, start + width - 1, _between(lengths, start, start + width)) for start in edges]
    if top < high:
        end = edges[-1] + width
        bars.append(Bar(end, high, _between(lengths, end, high + 1)))
    return tuple(bars)


def _round_width(low: int, high: int, most: int) -> int:
    """Returns the smallest of 1, 2, 5, 10, 20 … that needs at most so many bars."""
    power = 1
    while True:
        for step in _STEPS:
            width = step * power
            if high // width - low // width + 1 <= most:
                return width
        power *= 10


def _between(lengths: Any, start: int, stop: int) -> int:
    return int(np.searchsorted(lengths, stop) - np.searchsorted(lengths, start))
