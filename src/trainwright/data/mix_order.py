"""Which source each sample of a mixture comes from: a pure function of (seed, position), like order.py's.

Positions come in blocks of 10,000, and in each block every source has exactly its share of places; a keyed
permutation says which. So shares hold over any whole block, and each source runs through epochs of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from trainwright.data.order import Indices, Order, mix_seed, permute
from trainwright.errors import ConfigError

BLOCK = 10_000
"""Choices in whose course every source has exactly its share; its inverse is the smallest share."""

_SOURCE_STREAM, _CHOICE_STREAM = 0x50C3, 0xC401  # keep the sources' own orders and the choice between them apart


def block_shares(weights: Mapping[str, float]) -> Indices:
    """Returns how many of a block's places each source has, by largest remainder; refuses a share below one place."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ConfigError(
                f"The weight of source {name} is {weight!r}. Use a number above 0, or leave the source out.",
                where="mix",
            )
    total = math.fsum(weights.values())
    places = {name: weight / total * BLOCK for name, weight in weights.items()}
    for name, exact in places.items():
        # A hair of tolerance: a weight of exactly one place must not fail by the rounding of a division.
        if exact < 1 - 1e-9:
            raise ConfigError(
                f"The weight {weights[name]} of source {name} is {exact / BLOCK:.2g} of the sum of all weights "
                f"({total:g}); the smallest share is one sample in {BLOCK}. Raise the weight or leave the source out.",
                where="mix",
            )
    wanted = np.array(list(places.values()))
    shares: Indices = np.maximum(np.floor(wanted), 1).astype(np.int64)
    missing = BLOCK - int(shares.sum())
    shares[np.argsort(-(wanted - shares), kind="stable")[:missing]] += 1
    return shares


class Choices:
    """The endless sequence of choices between sources, by their shares of a block.

    Shuffled, each block is a permutation of its own; otherwise each is the same even interleaving. The block in
    hand is kept, as it takes about a millisecond.
    """

    def __init__(self, shares: Indices, *, seed: int, shuffle: bool = True) -> None:
        self.shares = shares
        self._seed = seed
        self._shuffle = shuffle
        self._number = -1
        self._sources: Indices = np.empty(0, dtype=np.int64)
        self._uses: Indices = np.empty(0, dtype=np.int64)

    def block(self, number: int) -> tuple[Indices, Indices]:
        """Returns the source at each place of a block, and how often that source was chosen before, ever."""
        if number != self._number:
            sources = self._interleave(number)
            by_source = np.argsort(sources, kind="stable")
            firsts = np.cumsum(self.shares) - self.shares
            sorted_sources = sources[by_source]
            uses = np.empty_like(sources)
            uses[by_source] = np.arange(BLOCK) - firsts[sorted_sources] + number * self.shares[sorted_sources]
            self._number, self._sources, self._uses = number, sources, uses
        return self._sources, self._uses

    def between(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Returns the same for the choices start … stop−1."""
        pieces = []
        while start < stop:
            number, place = divmod(start, BLOCK)
            end = min(place + stop - start, BLOCK)
            pieces.append([column[place:end] for column in self.block(number)])
            start += end - place
        sources, uses = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
        return sources, uses

    def counts(self, stop: int) -> Indices:
        """Returns how often each source is chosen among the first `stop` choices."""
        number, place = divmod(stop, BLOCK)
        counts = number * self.shares
        if place:
            counts = counts + np.bincount(self.block(number)[0][:place], minlength=len(self.shares))
        return counts

    def _interleave(self, number: int) -> Indices:
        table = np.repeat(np.arange(len(self.shares)), self.shares)
        if self._shuffle:
            key = mix_seed(self._seed, _CHOICE_STREAM, number)
            return table[permute(np.arange(BLOCK, dtype=np.int64), BLOCK, key=key)]
        # The k-th of a source's n places stands at (k + 1/2) / n of the block.
        moments = np.concatenate([(np.arange(share) + 0.5) / share for share in self.shares])
        return table[np.argsort(moments, kind="stable")]


class MixOrder(Protocol):
    """What a mixture's order offers: that of order.Order, and how many samples came from each source."""

    size: int
    """Samples per epoch: those of all sources together."""

    def indices(self, start: int, stop: int) -> Indices:
        """Returns the sample index at each global position of start … stop−1."""
        ...

    def counts(self, position: int) -> dict[str, int]:
        """Returns how many of the first `position` samples come from each source."""
        ...


class WeightedOrder:
    """The order of a mixture with weights: every `unit` positions in a row come from one source.

    `unit` is 1, or the global batch size where a batch shall hold samples of one source only. The n-th use of a
    source is the n-th sample of its own endless order, so it is covered exactly, epoch by epoch of its own.
    """

    def __init__(
        self, sizes: Mapping[str, int], shares: Indices, *, seed: int, shuffle: bool = True, unit: int = 1
    ) -> None:
        self.size = sum(sizes.values())
        self._names = list(sizes)
        self._starts = _starts(list(sizes.values()))
        self._unit = unit
        self._choices = Choices(shares, seed=seed, shuffle=shuffle)
        self._count_choices = Choices(shares, seed=seed, shuffle=shuffle)
        self._orders = [
            Order(size, seed=mix_seed(seed, _SOURCE_STREAM, number), shuffle=shuffle)
            for number, size in enumerate(sizes.values())
        ]
        self._chunk_start = 0
        self._chunk: Indices = np.empty(0, dtype=np.int64)

    def indices(self, start: int, stop: int) -> Indices:
        """Returns the sample index at each global position of start … stop−1."""
        begin = start - self._chunk_start
        if begin < 0 or stop - self._chunk_start > len(self._chunk):
            length = max(min(Order.CHUNK, Order.CHUNK_EPOCHS * self.size), stop - start)
            self._chunk_start, begin = start, 0
            self._chunk = self._compute(start, start + length)
        return self._chunk[begin : begin + stop - start]

    def counts(self, position: int) -> dict[str, int]:
        """Returns how many of the first `position` samples come from each source, in at most a millisecond."""
        chosen, rest = divmod(position, self._unit)
        counts = self._count_choices.counts(chosen) * self._unit
        if rest:
            counts[self._count_choices.between(chosen, chosen + 1)[0]] += rest
        return dict(zip(self._names, counts.tolist(), strict=True))

    def _compute(self, start: int, stop: int) -> Indices:
        first = start // self._unit
        sources, uses = self._choices.between(first, -(-stop // self._unit))
        if self._unit > 1:
            choices, places = np.divmod(np.arange(start, stop, dtype=np.int64), self._unit)
            sources, uses = sources[choices - first], uses[choices - first] * self._unit + places
        indices = np.empty_like(sources)
        for source in np.unique(sources):
            here = np.flatnonzero(sources == source)
            # The uses of a source in consecutive positions are consecutive themselves.
            use = int(uses[here[0]])
            indices[here] = self._starts[source] + self._orders[source].indices(use, use + len(here))
        return indices


class ConcatenatedOrder:
    """The order of a mixture without weights: every epoch visits every sample of every source once."""

    _COUNT_CHUNK = 1 << 18

    def __init__(self, sizes: Mapping[str, int], *, seed: int, shuffle: bool = True) -> None:
        self.size = sum(sizes.values())
        self._sizes = sizes
        self._starts = _starts(list(sizes.values()))
        self._shuffle = shuffle
        self._order = Order(self.size, seed=seed, shuffle=shuffle)
        self._count_order = Order(self.size, seed=seed, shuffle=shuffle)
        self._counted = (0, np.zeros(len(sizes), dtype=np.int64))

    def indices(self, start: int, stop: int) -> Indices:
        """Returns the sample index at each global position of start … stop−1."""
        return self._order.indices(start, stop)

    def counts(self, position: int) -> dict[str, int]:
        """Returns how many of the first `position` samples come from each source.

        A shuffled epoch is counted on from the position asked for last; the first question after a resume counts
        from the epoch's start, at about 10 million samples a second.
        """
        epochs, rest = divmod(position, self.size)
        sizes = np.array(list(self._sizes.values()))
        counts = epochs * sizes
        if not self._shuffle:
            counts = counts + np.clip(rest - self._starts, 0, sizes)
        elif rest:
            counts = counts + self._count_epoch(epochs, rest)
        return dict(zip(self._sizes, counts.tolist(), strict=True))

    def _count_epoch(self, epoch: int, rest: int) -> Indices:
        begin = epoch * self.size
        reached, counts = self._counted
        if not begin <= reached <= begin + rest:
            reached, counts = begin, np.zeros_like(counts)
        while reached < begin + rest:
            stop = min(reached + self._COUNT_CHUNK, begin + rest)
            found = sources_of(self._count_order.indices(reached, stop), self._starts)
            reached, counts = stop, counts + np.bincount(found, minlength=len(counts))
        self._counted = reached, counts
        return counts


def sources_of(indices: Indices, starts: Indices) -> Indices:
    """Returns the number of the source that each index of the concatenation belongs to."""
    return np.searchsorted(starts, indices, side="right") - 1


def _starts(sizes: Sequence[int]) -> Indices:
    lengths = np.array(sizes, dtype=np.int64)
    return np.cumsum(lengths) - lengths
