"""What a set is mixed of: each source's size, weight, share of the first positions, and epochs in the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.data.stream import is_stream
from trainwright.looking.facts import MixedSource, Mixture
from trainwright.looking.sets import inner_datasets

POSITIONS = 10_000
"""Over how many positions shares are counted: data/mix_order.py keeps them exactly over as many."""


def look_at_mixture(dataset: Any, order: Any, run_samples: int | None) -> Mixture | None:
    """Describes the mixture that a set is, or is made of; None where there is none.

    `order` is the set's own, which counts the sources only where the mixture is outermost.
    """
    mix, is_outermost = _find_mix(dataset)
    if mix is None:
        return None
    weights = getattr(mix, "weights", None) or {}
    sizes = {name: _size_of(each) for name, each in mix.sources.items()}
    positions: int | None = None
    counted: Mapping[str, int] = {}
    total: Mapping[str, int] = {}
    if is_outermost and hasattr(order, "counts"):
        positions = POSITIONS
        counted = order.counts(POSITIONS)
        total = order.counts(run_samples) if run_samples else {}
    shares = _expected_shares(weights, sizes)
    rows = []
    for name, size in sizes.items():
        share = counted[name] / POSITIONS if counted else shares.get(name)
        epochs = total[name] / size if total and size else None
        rows.append(MixedSource(name, size, weights.get(name), share, epochs))
    return Mixture(tuple(rows), positions)


def source_row(dataset: Any, index: int) -> tuple[str | None, int]:
    """Returns the source that a sample of a mixture comes from and its row there; (None, index) for other data."""
    if not (hasattr(dataset, "source_of") and hasattr(dataset, "sizes")):
        return None, index
    [name] = dataset.source_of([index])
    for each, size in dataset.sizes.items():
        if each == name:
            break
        index -= size
    return name, index


def _find_mix(dataset: Any) -> tuple[Any, bool]:
    """Returns the outermost mixture and whether nothing is around it."""
    is_outermost = True
    while dataset is not None:
        if isinstance(getattr(dataset, "sources", None), Mapping):
            return dataset, is_outermost
        is_outermost = False
        inner = getattr(dataset, "dataset", None)
        dataset = inner if inner is not None else inner_datasets(dataset).get("source")
    return None, False


def _size_of(source: Any) -> int | None:
    # A mixture with a stream in it reads those with an index as streams too (data/mix_stream.py).
    rows = getattr(source, "dataset", source)
    return None if is_stream(rows) else len(rows)


def _expected_shares(weights: Mapping[str, float], sizes: Mapping[str, int | None]) -> dict[str, float]:
    """Returns the shares that weights give, or else sizes, where all are known."""
    parts = dict(weights) or {name: float(size) for name, size in sizes.items() if size is not None}
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()} if total and len(parts) == len(sizes) else {}
