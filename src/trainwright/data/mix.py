"""mix: several datasets as one, in given proportions.

The source of each sample is a pure function of (seed, position) where all sources have an index (`MixOrder`); streams
are mixed sample by sample until all have ended (`MixedStream`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from trainwright.data.fetch import draws_nothing, fetch, has_index, is_stream
from trainwright.data.order import Indices, Order, chain_seed, mix_seed, permute
from trainwright.data.streams import SourcePass
from trainwright.errors import ConfigError, DataError

BLOCK = 10_000
"""Choices in whose course every source has exactly its share; its inverse is the smallest share."""

_SOURCE_STREAM, _CHOICE_STREAM = 0x50C3, 0xC401  # keep the sources' own orders and the choice between them apart


def block_shares(weights: Mapping[str, float]) -> Indices:
    """Returns how many of a block's places each source has, by largest remainder; rejects a share below one place."""
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


_STREAM_STREAM, _ROWS_STREAM, _SHARD_STREAM = 0x57E4, 0x4025, 0x54A2  # keep the three uses of the seed apart

State = dict[str, Any]


class MixedStream:
    """Samples of several sources, each from one of them; without weights the sources have equal shares.

    A source with an index is read as a stream too, in an order of its own for each epoch. What the mixture can do
    (`num_shards`, `shard`, `state_dict`, `load_state_dict`) is what all of its sources can do; the others of these
    names are not there. Shards are mixtures of the sources' shards, and choose differently from each other.
    """

    def __init__(
        self, sources: Mapping[str, Any], weights: Mapping[str, float] | None = None, *, run_seed: int = 0
    ) -> None:
        self.source_names = list(sources)
        self.weights = {name: 1.0 if weights is None else weights[name] for name in self.source_names}
        block_shares(self.weights)  # a wrong weight is said before any data is read
        self.run_seed = run_seed
        self.sources = {
            name: source if is_stream(source) else RowStream(source, seed=mix_seed(run_seed, number))
            for number, (name, source) in enumerate(sources.items())
        }
        self.draws_nothing = all(draws_nothing(source) for source in self.sources.values())
        self._epoch = 0
        self._seed: int | None = None
        self._start: State | None = None
        self._pass: MixedPass | None = None

    @property
    def num_shards(self) -> int:
        """The most parts that every source can be read in."""
        return min(source.num_shards for source in self.sources.values())

    @property
    def shard(self) -> Callable[..., MixedStream]:
        """`shard(num_shards=, index=)` returns one of disjoint parts that together are the whole."""
        self._require("shard")
        return self._shard

    @property
    def state_dict(self) -> Callable[[], State]:
        """`state_dict()` returns where the pass begun last stands."""
        self._require("state_dict")
        return self._state_dict

    @property
    def load_state_dict(self) -> Callable[[Mapping[str, Any]], None]:
        """`load_state_dict(state)` lets the next pass go on from there."""
        self._require("load_state_dict")
        return self._load_state_dict

    @property
    def tokens_per_sample(self) -> int:
        """The tokens in each sample, where all sources say so and agree."""
        return common_tokens_per_sample(self.sources)

    def set_epoch(self, epoch: int) -> None:
        """Says which pass begins next: each has its own order of choices."""
        self._epoch = epoch

    def seed_rows(self, seed: int) -> None:
        """Says with which randomness rows are read: each with its own, so that one can be read again."""
        self._seed = seed

    @property
    def latest_source(self) -> str | None:
        """The source of the sample that was given last."""
        return None if self._pass is None else self._pass.latest_source

    def __iter__(self) -> MixedPass:
        start, self._start = self._start, None
        self._pass = MixedPass(self, start or self._initial_state(), seed=self._seed)
        return self._pass

    def _shard(self, num_shards: int, index: int) -> MixedStream:
        shards = {name: source.shard(num_shards=num_shards, index=index) for name, source in self.sources.items()}
        # Shards that chose alike would fill a batch, which takes from all of them, with one source.
        seed = self.run_seed if num_shards == 1 else mix_seed(self.run_seed, _SHARD_STREAM, num_shards, index)
        mixed = MixedStream(shards, self.weights, run_seed=seed)
        mixed._epoch = self._epoch
        return mixed

    def _state_dict(self) -> State:
        if self._start is not None:
            return self._start
        return self._initial_state() if self._pass is None else self._pass.state()

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        if list(state["taken"]) != self.source_names:
            raise DataError(
                f"mix: the saved position is one in {', '.join(state['taken'])}, but the sources are "
                f"{', '.join(self.source_names)}. Go on with the same sources in the same order, or start afresh."
            )
        self._epoch = int(state["epoch"])
        self._start = dict(state)

    def _initial_state(self) -> State:
        taken = dict.fromkeys(self.source_names, 0)
        return {"epoch": self._epoch, "choice": 0, "ended": [], "taken": taken, "sources": {}}

    def _require(self, name: str) -> None:
        for source_name, source in self.sources.items():
            if not hasattr(source, name):
                raise AttributeError(f"source {source_name} has no {name}")


class MixedPass:
    """One pass over a mixture, from a state of it."""

    def __init__(self, mixed: MixedStream, state: State, *, seed: int | None) -> None:
        self._mixed = mixed
        self._epoch = int(state["epoch"])
        self._choice = int(state["choice"])
        self._ended: list[str] = list(state["ended"])
        self._taken: dict[str, int] = dict(state["taken"])
        self._passes = {
            name: SourcePass(
                source,
                state=state["sources"].get(name),
                epoch=self._epoch,
                seed=None if seed is None else chain_seed(number, state=seed),
            )
            for number, (name, source) in enumerate(mixed.sources.items())
            if name not in self._ended
        }
        self.latest_source: str | None = None
        self._block = -1
        self._names: list[str] = []
        self._places: list[int] = []

    def __iter__(self) -> MixedPass:
        return self

    def __next__(self) -> Any:
        while self._passes:
            name = self._choose()
            source = self._passes[name]
            try:
                sample = source.take()
            except StopIteration:
                self._drop(name)
                continue
            except Exception as error:
                # The choice stands, so that what cannot be read takes no place from its source's share.
                error.add_note(f"in source {name} of a mix")
                if source.has_ended:
                    self._drop(name)
                raise
            self._choice += 1
            self._taken[name] += 1
            self.latest_source = name
            return sample
        raise StopIteration

    def state(self) -> State:
        """Returns where the next sample is: what the sources say, and how far the choice between them is."""
        states = {name: source.state() for name, source in self._passes.items()}
        return {
            "epoch": self._epoch,
            "choice": self._choice,
            "ended": list(self._ended),
            "taken": dict(self._taken),
            "sources": {name: state for name, state in states.items() if state is not None},
        }

    def _choose(self) -> str:
        block, place = divmod(self._choice, BLOCK)
        if block != self._block:
            self._block, self._names = block, list(self._passes)
            shares = block_shares({name: self._mixed.weights[name] for name in self._names})
            gone = [self._mixed.source_names.index(name) for name in sorted(self._ended)]
            seed = mix_seed(self._mixed.run_seed, _STREAM_STREAM, self._epoch, *gone)
            self._places = Choices(shares, seed=seed).block(block)[0].tolist()
        return self._names[self._places[place]]

    def _drop(self, name: str) -> None:
        """Goes on without a source: a sequence of choices between the others begins."""
        del self._passes[name]
        self._ended.append(name)
        self._choice, self._block = 0, -1


class RowStream:
    """A dataset with an index, read as a stream: places start … stop−1 of each epoch's own permutation.

    One of `num_shards` parts is a range of places, so parts are disjoint within an epoch, and any place is found
    without reading those before it.
    """

    def __init__(self, dataset: Any, *, seed: int, start: int = 0, stop: int | None = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.draws_nothing = draws_nothing(dataset)
        self._start = start
        self._stop = stop
        self._epoch = 0
        self._place: int | None = None
        self._pass: RowPass | None = None

    @property
    def stop(self) -> int:
        """The place behind the last one; that of the whole is asked for only when it is needed."""
        return len(self.dataset) if self._stop is None else self._stop

    @property
    def num_shards(self) -> int:
        """The most parts: those of one row each."""
        return self.stop - self._start

    @property
    def tokens_per_sample(self) -> int:
        """What the dataset says."""
        tokens: int = self.dataset.tokens_per_sample
        return tokens

    def shard(self, num_shards: int, index: int) -> RowStream:
        """Returns one of `num_shards` ranges of places, of sizes as equal as can be."""
        start, length = self._start, self.stop - self._start
        edges = [start + length * number // num_shards for number in (index, index + 1)]
        part = RowStream(self.dataset, seed=self.seed, start=edges[0], stop=edges[1])
        part._epoch = self._epoch
        return part

    def set_epoch(self, epoch: int) -> None:
        """Says which pass begins next: each has a permutation of its own."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch and place of the next row."""
        if self._place is not None or self._pass is None:
            return {"epoch": self._epoch, "place": self._start if self._place is None else self._place}
        return {"epoch": self._pass.epoch, "place": self._pass.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Lets the next pass go on at a saved place."""
        self._epoch, self._place = int(state["epoch"]), int(state["place"])

    def __iter__(self) -> RowPass:
        place = self._start if self._place is None else self._place
        self._place = None
        self._pass = RowPass(self.dataset, epoch=self._epoch, place=place, stop=self.stop, seed=self.seed)
        return self._pass


class RowPass:
    """One pass over places of a permutation; a row that raises is passed over."""

    _CHUNK = 1024

    def __init__(self, dataset: Any, *, epoch: int, place: int, stop: int, seed: int) -> None:
        self.epoch = epoch
        self.place = place
        self._dataset = dataset
        self._stop = stop
        self._key = mix_seed(seed, _ROWS_STREAM, epoch)
        self._indices: list[int] = []

    def __iter__(self) -> RowPass:
        return self

    def __next__(self) -> Any:
        if self.place >= self._stop:
            raise StopIteration
        if not self._indices:
            # Many places at once, for a call costs about 200 µs however many they are; last first, to be popped.
            places = np.arange(self.place, min(self.place + self._CHUNK, self._stop), dtype=np.int64)
            self._indices = permute(places, len(self._dataset), key=self._key)[::-1].tolist()
        index = self._indices.pop()
        self.place += 1
        try:
            return self._dataset[index]
        except StopIteration as error:  # it would look like the end of the data
            raise DataError(f"Sample {index} of {type(self._dataset).__name__} raised StopIteration.") from error
        except Exception as error:
            error.add_note(f"while reading sample {index} of {type(self._dataset).__name__}")
            raise


def common_tokens_per_sample(sources: Mapping[str, Any]) -> int:
    """Returns the tokens in each sample, or raises AttributeError where sources do not say so or disagree."""
    tokens = {source.tokens_per_sample for source in sources.values()}
    if len(tokens) != 1:
        raise AttributeError(f"the sources have samples of {', '.join(map(str, sorted(tokens)))} tokens")
    return int(tokens.pop())


def mix(
    sources: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    *,
    same_source_batches: bool = False,
    run_seed: int = 0,
) -> Mix | MixedStream:
    """Makes one dataset of several.

    With `weights` each source has its share of the samples, whatever its size: a small one is repeated, each of its
    epochs shuffled anew. Without them an epoch is every sample of every source once; of streams, whose size nobody
    knows, each then has an equal share. `same_source_batches` gives every global batch samples of one source only;
    without weights a source then has a share of the batches as its share of the samples.
    """
    _check_arguments(sources, weights)
    if not any(is_stream(source) for source in sources.values()):
        return Mix(sources, weights, same_source_batches=same_source_batches)
    if same_source_batches:
        streams = ", ".join(name for name, source in sources.items() if is_stream(source))
        raise ConfigError(
            f"same_source_batches needs sources with an index, but {streams} can only be read as a stream. "
            "Leave it out, or give datasets with `__len__` and `__getitem__`.",
            where="mix",
        )
    return MixedStream(sources, weights, run_seed=run_seed)


class Mix(Dataset[Any]):
    """Sources with an index, as one dataset: index i counts through the sources, one after the other.

    The training loader asks `make_order` in which order the samples come; read by index, weights play no part.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        same_source_batches: bool = False,
    ) -> None:
        self.sources = dict(sources)
        self.names = list(sources)
        self.weights = None if weights is None else {name: weights[name] for name in self.names}
        self.same_source_batches = same_source_batches
        self.draws_nothing = all(draws_nothing(source) for source in self.sources.values())
        if self.weights is not None:
            block_shares(self.weights)  # a wrong weight is said before any data is read

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the source of a sample, and its number there."""
        before = 0
        for name, size in self.sizes.items():
            if index < before + size:
                return f"source {name}", index - before
            before += size
        raise IndexError(index)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of samples of each source."""
        sizes = {name: len(source) for name, source in self.sources.items()}
        for name, size in sizes.items():
            if size == 0:
                raise DataError(
                    f"mix: source {name} is empty. Check the path or filter that makes it, or leave it out."
                )
        return sizes

    @cached_property
    def _starts(self) -> Indices:
        sizes = np.array(list(self.sizes.values()), dtype=np.int64)
        return np.cumsum(sizes) - sizes

    @property
    def tokens_per_sample(self) -> int:
        """The tokens in each sample, where all sources say so and agree."""
        return common_tokens_per_sample(self.sources)

    @property
    def lengths(self) -> Indices:
        """The tokens of every sample, where all sources know theirs."""
        return np.concatenate([np.asarray(source.lengths) for source in self.sources.values()])

    def __len__(self) -> int:
        return sum(self.sizes.values())

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Fetches a batch with one call to each source that has a part in it."""
        wanted = self._checked(indices)
        numbers = sources_of(wanted, self._starts)
        samples: list[Any] = [None] * len(wanted)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            own = (wanted[places] - self._starts[number]).tolist()
            fetched = fetch(self.sources[self.names[number]], own)
            for place, sample in zip(places.tolist(), fetched, strict=True):
                samples[place] = sample
        return samples

    def source_of(self, indices: Sequence[int]) -> list[str]:
        """Returns the name of the source that each sample comes from."""
        return [self.names[number] for number in sources_of(self._checked(indices), self._starts)]

    def make_order(self, *, seed: int, shuffle: bool, global_batch_size: int) -> MixOrder:
        """Returns the order of training: which sample stands at which global position."""
        if self.weights is None and not self.same_source_batches:
            return ConcatenatedOrder(self.sizes, seed=seed, shuffle=shuffle)
        shares = block_shares(self.weights or self.sizes)
        if not self.same_source_batches:
            return WeightedOrder(self.sizes, shares, seed=seed, shuffle=shuffle)
        for name, size in self.sizes.items():
            if size < global_batch_size:
                raise DataError(
                    f"mix: with same_source_batches a batch of {global_batch_size} would hold samples of source {name} "
                    f"twice, which has {size}. Use a trainer.global_batch_size of at most {size}, or leave it out."
                )
        return WeightedOrder(self.sizes, shares, seed=seed, shuffle=shuffle, unit=global_batch_size)

    def _checked(self, indices: Sequence[int]) -> Indices:
        wanted = np.asarray(indices, dtype=np.int64)
        size = len(self)
        # Iterating ends at an IndexError, and the index behind the last of a source belongs to another.
        if wanted.size and not -size <= wanted.min() <= wanted.max() < size:
            raise IndexError(f"index {list(indices)} is outside of a mix of {size} samples")
        return np.where(wanted < 0, wanted + size, wanted)


def reject_a_mixture_in_order(source: Any, *, name: str, reader: str) -> None:
    """Rejects a source whose weights would have no effect, because `reader` reads it by its index."""
    if isinstance(source, Mix) and (source.weights is not None or source.same_source_batches):
        setting = "weights" if source.weights is not None else "same_source_batches"
        raise ConfigError(
            f"{name} is a mix with {setting}, which would have no effect: {reader} reads every sample of it alike. "
            "Put the mix outermost, or leave the setting out.",
            where=reader,
        )


def _check_arguments(sources: Mapping[str, Any], weights: Mapping[str, float] | None) -> None:
    for setting, value in (("sources", sources), ("weights", weights)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{setting} is {value!r}. Give a mapping by name, such as {{a: …, b: …}}.", where="mix")
    if not sources:
        raise ConfigError("sources is empty. Name at least one dataset.", where="mix")
    for name, source in sources.items():
        if not is_stream(source) and not (has_index(source) and hasattr(source, "__len__")):
            raise ConfigError(
                f"Source {name} is a {type(source).__name__}, which has neither `__len__` and `__getitem__` nor "
                "`__iter__`. Give a dataset.",
                where="mix",
            )
        reject_a_mixture_in_order(source, name=f"Source {name}", reader="mix")
    if weights is not None and weights.keys() != sources.keys():
        without = ", ".join(sources.keys() - weights.keys())
        problem = (
            f"{without} has no weight" if without else f"{', '.join(weights.keys() - sources.keys())} is no source"
        )
        raise ConfigError(
            f"{problem}, but {', '.join(weights) or 'none'} has one. Give every source a weight, or none of them.",
            where="mix",
        )
