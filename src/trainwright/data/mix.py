"""mix: several datasets as one, in given proportions.

If all sources have an index, the source of each sample is a pure function of (seed, position) (`Mix`, `WeightedOrder`,
`ConcatenatedOrder`); streams are mixed sample by sample until all have ended (`MixedStream`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainwright.data.fetch import draws_nothing, fetch, has_index, is_stream, positive_indices
from trainwright.data.order import Indices, Order, chain_seed, mix_seed, permute
from trainwright.data.streams import DerivedStream, SourcePass
from trainwright.errors import ConfigError, DataError

BLOCK = 10_000
"""The number of choices in which every source has exactly its share; its inverse is the smallest share."""

# Separate the uses of the seed.
_SOURCE_STREAM, _CHOICE_STREAM, _STREAM_STREAM, _ROWS_STREAM, _SHARD_STREAM = 0x50C3, 0xC401, 0x57E4, 0x4025, 0x54A2

State = dict[str, Any]


def block_shares(weights: Mapping[str, float]) -> Indices:
    """Returns each source's number of choices in a block, by largest remainder; rejects a share below one."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ConfigError(f"The weight of source {name} is {weight!r}. Use a number above 0.", where="mix")
    total = math.fsum(weights.values())
    wanted = np.array([weight / total * BLOCK for weight in weights.values()])
    for name, exact in zip(weights, wanted, strict=True):
        # With a tolerance, because a weight of exactly one choice must not fail by rounding.
        if exact < 1 - 1e-9:
            raise ConfigError(
                f"The weight {weights[name]} of source {name} is {exact / BLOCK:.2g} of the sum of all weights "
                f"({total:g}), but the smallest share is one in {BLOCK}. Raise the weight or remove the source.",
                where="mix",
            )
    shares: Indices = np.maximum(np.floor(wanted), 1).astype(np.int64)
    missing = BLOCK - int(shares.sum())
    shares[np.argsort(-(wanted - shares), kind="stable")[:missing]] += 1
    return shares


class Choices:
    """The endless sequence of choices between sources, by their shares of a block.

    If shuffled, each block has its own permutation; otherwise, all blocks have the same even interleaving. The current
    block is kept, because it takes about a millisecond to compute.
    """

    def __init__(self, shares: Indices, *, seed: int, shuffle: bool = True) -> None:
        self.shares = shares
        self._seed = seed
        self._shuffle = shuffle
        self._number = -1
        self._sources: Indices = np.empty(0, dtype=np.int64)
        self._uses: Indices = np.empty(0, dtype=np.int64)

    def block(self, number: int) -> tuple[Indices, Indices]:
        """Returns the source of each choice of a block, and how often that source was chosen before, in all blocks."""
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
        chunks = []
        while start < stop:
            number, offset = divmod(start, BLOCK)
            end = min(offset + stop - start, BLOCK)
            chunks.append([column[offset:end] for column in self.block(number)])
            start += end - offset
        sources, uses = (np.concatenate(columns) for columns in zip(*chunks, strict=True))
        return sources, uses

    def counts(self, stop: int) -> Indices:
        """Returns how often each source is chosen among the first `stop` choices."""
        number, offset = divmod(stop, BLOCK)
        counts = number * self.shares
        if offset:
            counts = counts + np.bincount(self.block(number)[0][:offset], minlength=len(self.shares))
        return counts

    def _interleave(self, number: int) -> Indices:
        table = np.repeat(np.arange(len(self.shares)), self.shares)
        if self._shuffle:
            key = mix_seed(self._seed, _CHOICE_STREAM, number)
            return table[permute(np.arange(BLOCK, dtype=np.int64), BLOCK, key=key)]
        # The k-th of a source's n choices is at (k + 1/2) / n of the block.
        times = np.concatenate([(np.arange(share) + 0.5) / share for share in self.shares])
        return table[np.argsort(times, kind="stable")]


class WeightedOrder(Order):
    """The order of a mixture with weights: each `unit` consecutive positions come from one source.

    `unit` is 1, or the global batch size if a batch contains samples of one source only. The n-th use of a source is
    the n-th sample of that source's own endless order.
    """

    def __init__(
        self, sizes: Mapping[str, int], shares: Indices, *, seed: int, shuffle: bool = True, unit: int = 1
    ) -> None:
        super().__init__(sum(sizes.values()), seed=seed, shuffle=shuffle)
        self._names = list(sizes)
        self._starts = _starts(sizes)
        self._unit = unit
        self._choices = Choices(shares, seed=seed, shuffle=shuffle)
        self._count_choices = Choices(shares, seed=seed, shuffle=shuffle)
        self._orders = [
            Order(size, seed=mix_seed(seed, _SOURCE_STREAM, number), shuffle=shuffle)
            for number, size in enumerate(sizes.values())
        ]

    def counts(self, position: int) -> dict[str, int]:
        """Returns the number of samples of each source among the first `position`, in at most a millisecond."""
        chosen, rest = divmod(position, self._unit)
        counts = self._count_choices.counts(chosen) * self._unit
        if rest:
            counts[self._count_choices.between(chosen, chosen + 1)[0]] += rest
        return dict(zip(self._names, counts.tolist(), strict=True))

    def _compute(self, positions: Indices) -> Indices:
        choices, offsets = np.divmod(positions, self._unit)
        first = int(choices[0])
        sources, uses = self._choices.between(first, int(choices[-1]) + 1)
        sources, uses = sources[choices - first], uses[choices - first] * self._unit + offsets
        indices: Indices = np.empty_like(sources)
        for source in np.unique(sources):
            here = np.flatnonzero(sources == source)
            # The uses of a source in consecutive positions are consecutive.
            use = int(uses[here[0]])
            indices[here] = self._starts[source] + self._orders[source].indices(use, use + len(here))
        return indices


class ConcatenatedOrder(Order):
    """The order of a mixture without weights: every epoch contains every sample of every source once."""

    _COUNT_CHUNK = 1 << 18

    def __init__(self, sizes: Mapping[str, int], *, seed: int, shuffle: bool = True) -> None:
        super().__init__(sum(sizes.values()), seed=seed, shuffle=shuffle)
        self._sizes = sizes
        self._starts = _starts(sizes)
        self._count_order = Order(self.size, seed=seed, shuffle=shuffle)
        self._counted = (0, np.zeros(len(sizes), dtype=np.int64))

    def counts(self, position: int) -> dict[str, int]:
        """Returns the number of samples of each source among the first `position`.

        A shuffled epoch is counted from the previous call's position; the first call after a resume counts from the
        start of the epoch, at about 10 million samples per second.
        """
        epoch, rest = divmod(position, self.size)
        sizes = np.array(list(self._sizes.values()))
        counts = epoch * sizes
        if not self.shuffle:
            counts = counts + np.clip(rest - self._starts, 0, sizes)
        elif rest:
            begin = epoch * self.size
            reached, found = self._counted
            if not begin <= reached <= position:
                reached, found = begin, np.zeros_like(found)
            while reached < position:
                stop = min(reached + self._COUNT_CHUNK, position)
                sources = _sources_of(self._count_order.indices(reached, stop), self._starts)
                reached, found = stop, found + np.bincount(sources, minlength=len(found))
            self._counted = reached, found
            counts = counts + found
        return dict(zip(self._sizes, counts.tolist(), strict=True))


def _sources_of(indices: Indices, starts: Indices) -> Indices:
    """Returns the number of the source that each index of the concatenation belongs to."""
    return np.searchsorted(starts, indices, side="right") - 1


def _starts(sizes: Mapping[str, int]) -> Indices:
    lengths = np.array(list(sizes.values()), dtype=np.int64)
    return np.cumsum(lengths) - lengths


class MixedStream(DerivedStream):
    """Samples of several sources, each from one of them; without weights the sources have equal shares.

    A source with an index is read as a stream too, in a different order for each epoch. Shards are mixtures of the
    sources' shards, with different choices.
    """

    def __init__(
        self, sources: Mapping[str, Any], weights: Mapping[str, float] | None = None, *, run_seed: int = 0
    ) -> None:
        self.source_names = list(sources)
        self.weights = {name: 1.0 if weights is None else weights[name] for name in self.source_names}
        block_shares(self.weights)  # rejects a wrong weight before any data is read
        self.run_seed = run_seed
        self.sources = {
            name: source if is_stream(source) else RowStream(source, seed=mix_seed(run_seed, number))
            for number, (name, source) in enumerate(sources.items())
        }
        super().__init__(list(self.sources.values()))

    @property
    def tokens_per_sample(self) -> int:
        """The tokens in each sample, if all sources have the same number."""
        return common_tokens_per_sample(self.sources)

    @property
    def latest_source(self) -> str | None:
        """The source of the last sample."""
        return None if self.current_pass is None else self.current_pass.latest_source

    def _read(self, start: Mapping[str, Any] | None) -> MixedPass:
        return MixedPass(self, start or self._initial_state(), seed=self.seed)

    def _shard(self, num_shards: int, index: int) -> MixedStream:
        shards = {name: source.shard(num_shards=num_shards, index=index) for name, source in self.sources.items()}
        # With equal choices in all shards, a batch, which is read from all of them, would contain only one source.
        seed = self.run_seed if num_shards == 1 else mix_seed(self.run_seed, _SHARD_STREAM, num_shards, index)
        mixed = MixedStream(shards, self.weights, run_seed=seed)
        mixed.epoch = self.epoch
        return mixed

    def _state_dict(self) -> State:
        return super()._state_dict() or self._initial_state()

    def _load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if state is not None and list(state["taken"]) != self.source_names:
            raise DataError(
                f"mix: the saved state has the sources {', '.join(state['taken'])}, but the run has "
                f"{', '.join(self.source_names)}. Use the same sources in the same order, or start a new run."
            )
        self.epoch = None if state is None else int(state["epoch"])
        self._start = state

    def _initial_state(self) -> State:
        taken = dict.fromkeys(self.source_names, 0)
        return {"epoch": self.epoch or 0, "choice": 0, "ended": [], "taken": taken, "sources": {}}


class MixedPass:
    """One pass over a mixture, from a state of it."""

    def __init__(self, mixed: MixedStream, state: Mapping[str, Any], *, seed: int | None) -> None:
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
        self._choices: list[str] = []

    def __iter__(self) -> MixedPass:
        return self

    def __next__(self) -> Any:
        while self._passes:
            name = self._choose()
            source = self._passes[name]
            try:
                sample = source.take()
            except StopIteration:
                self._remove(name)
                continue
            except Exception as error:
                # The choice is made again, so an unreadable row does not reduce its source's share.
                error.add_note(f"in source {name} of a mix")
                if source.has_ended:
                    self._remove(name)
                raise
            self._choice += 1
            self._taken[name] += 1
            self.latest_source = name
            return sample
        raise StopIteration

    def state(self) -> State:
        """Returns the position of the next sample: the sources' states and the number of choices."""
        states = {name: source.state() for name, source in self._passes.items()}
        return {
            "epoch": self._epoch,
            "choice": self._choice,
            "ended": list(self._ended),
            "taken": dict(self._taken),
            "sources": {name: state for name, state in states.items() if state is not None},
        }

    def _choose(self) -> str:
        block, offset = divmod(self._choice, BLOCK)
        if block != self._block:
            names = list(self._passes)
            shares = block_shares({name: self._mixed.weights[name] for name in names})
            ended = [self._mixed.source_names.index(name) for name in sorted(self._ended)]
            seed = mix_seed(self._mixed.run_seed, _STREAM_STREAM, self._epoch, *ended)
            self._block = block
            self._choices = [names[number] for number in Choices(shares, seed=seed).block(block)[0]]
        return self._choices[offset]

    def _remove(self, name: str) -> None:
        """Continues without a source, with a new sequence of choices between the others."""
        del self._passes[name]
        self._ended.append(name)
        self._choice, self._block = 0, -1


class RowStream:
    """A dataset with an index as a stream: positions start … stop−1 of each epoch's permutation.

    A shard is a range of positions, so the shards of an epoch are disjoint, and a state needs no rows to be read
    again. A row that raises is skipped. Each pass reads a copy (SourcePass), so the object is its own iterator.
    """

    _CHUNK = 1024

    def __init__(self, dataset: Any, *, seed: int, start: int = 0, stop: int | None = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.draws_nothing = draws_nothing(dataset)
        self._start = start
        self._stop = stop
        self._epoch = 0
        self._position = start
        self._is_resumed = False
        self._indices: list[int] = []

    @property
    def num_shards(self) -> int:
        """The largest number of shards, of one row each."""
        return (len(self.dataset) if self._stop is None else self._stop) - self._start

    @property
    def tokens_per_sample(self) -> int:
        """The dataset's attribute."""
        tokens: int = self.dataset.tokens_per_sample
        return tokens

    def shard(self, num_shards: int, index: int) -> RowStream:
        """Returns one of `num_shards` ranges of positions of about equal sizes."""
        edges = [self._start + self.num_shards * number // num_shards for number in (index, index + 1)]
        shard = RowStream(self.dataset, seed=self.seed, start=edges[0], stop=edges[1])
        shard._epoch = self._epoch
        return shard

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass; each has a different permutation."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch and the position of the next row."""
        return {"epoch": self._epoch, "place": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Lets the next pass start at a saved position."""
        self._epoch, self._position, self._is_resumed = int(state["epoch"]), int(state["place"]), True

    def __iter__(self) -> RowStream:
        if not self._is_resumed:
            self._position = self._start
        self._is_resumed, self._indices = False, []
        return self

    def __next__(self) -> Any:
        stop = self._start + self.num_shards
        if self._position >= stop:
            raise StopIteration
        if not self._indices:
            # Many positions at once, because a call takes about 200 µs for any number; reversed for pop().
            positions = np.arange(self._position, min(self._position + self._CHUNK, stop), dtype=np.int64)
            key = mix_seed(self.seed, _ROWS_STREAM, self._epoch)
            self._indices = permute(positions, len(self.dataset), key=key)[::-1].tolist()
        index = self._indices.pop()
        self._position += 1
        try:
            return self.dataset[index]
        except StopIteration as error:  # it would look like the end of the data
            raise DataError(f"Sample {index} of {type(self.dataset).__name__} raised StopIteration.") from error
        except Exception as error:
            error.add_note(f"while reading sample {index} of {type(self.dataset).__name__}")
            raise


def common_tokens_per_sample(sources: Mapping[str, Any]) -> int:
    """Returns the tokens in each sample; raises AttributeError if sources have none or different numbers."""
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
    """Combines several datasets.

    With `weights`, each source has its share of the samples, independent of its size: a small source is repeated, with
    a different shuffle in each of its epochs. Without weights an epoch contains every sample of every source once;
    streams, whose sizes are unknown, have equal shares. `same_source_batches` fills every global batch from one source;
    without weights, a source's share of the batches is its share of the samples.
    """
    _check_arguments(sources, weights)
    streams = [name for name, source in sources.items() if is_stream(source)]
    if not streams:
        return Mix(sources, weights, same_source_batches=same_source_batches)
    if same_source_batches:
        raise ConfigError(
            f"same_source_batches needs sources with an index, but {', '.join(streams)} can only be read as a stream. "
            "Remove it, or use datasets with `__len__` and `__getitem__`.",
            where="mix",
        )
    return MixedStream(sources, weights, run_seed=run_seed)


class Mix(Dataset[Any]):
    """Sources with an index as one dataset: the concatenation of the sources.

    The training loader calls `make_order` for the order of the samples; weights do not affect access by index.
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
        self.draws_nothing = all(map(draws_nothing, self.sources.values()))
        if self.weights is not None:
            block_shares(self.weights)  # rejects a wrong weight before any data is read

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the source of a sample, and its index there."""
        [number] = _sources_of(self._check_indices([index]), self._starts).tolist()
        return f"source {self.names[number]}", index - int(self._starts[number])

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of samples of each source."""
        sizes = {name: len(source) for name, source in self.sources.items()}
        for name, size in sizes.items():
            if size == 0:
                raise DataError(f"mix: source {name} is empty. Check its path or filter, or remove it.")
        return sizes

    @cached_property
    def _starts(self) -> Indices:
        return _starts(self.sizes)

    @property
    def tokens_per_sample(self) -> int:
        """The tokens in each sample, if all sources have the same number."""
        return common_tokens_per_sample(self.sources)

    @property
    def lengths(self) -> Indices:
        """The tokens of every sample, if all sources have `lengths`."""
        return np.concatenate([np.asarray(source.lengths) for source in self.sources.values()])

    def __len__(self) -> int:
        return sum(self.sizes.values())

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Fetches a batch with one call per source."""
        wanted = self._check_indices(indices)
        numbers = _sources_of(wanted, self._starts)
        samples: list[Any] = [None] * len(wanted)
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            fetched = fetch(self.sources[self.names[number]], (wanted[here] - self._starts[number]).tolist())
            for offset, sample in zip(here.tolist(), fetched, strict=True):
                samples[offset] = sample
        return samples

    def source_of(self, indices: Sequence[int]) -> list[str]:
        """Returns the name of the source of each sample."""
        return [self.names[number] for number in _sources_of(self._check_indices(indices), self._starts)]

    def make_order(self, *, seed: int, shuffle: bool, global_batch_size: int) -> ConcatenatedOrder | WeightedOrder:
        """Returns the training order: which sample is at which global position."""
        if self.weights is None and not self.same_source_batches:
            return ConcatenatedOrder(self.sizes, seed=seed, shuffle=shuffle)
        unit = global_batch_size if self.same_source_batches else 1
        for name, size in self.sizes.items():
            if size < unit:
                raise DataError(
                    f"mix: with same_source_batches a batch of {unit} would contain samples of source {name}, which "
                    f"has {size}, twice. Use a trainer.global_batch_size of at most {size}, or remove the setting."
                )
        shares = block_shares(self.weights or self.sizes)
        return WeightedOrder(self.sizes, shares, seed=seed, shuffle=shuffle, unit=unit)

    def _check_indices(self, indices: Sequence[int]) -> Indices:
        return positive_indices(indices, size=len(self), of="samples of a mix")


def reject_a_mixture_in_order(source: Any, *, name: str, reader: str) -> None:
    """Rejects a source whose weights have no effect, because `reader` reads it by its index."""
    if isinstance(source, Mix) and (source.weights is not None or source.same_source_batches):
        setting = "weights" if source.weights is not None else "same_source_batches"
        raise ConfigError(
            f"{name} is a mix with {setting}, which has no effect because {reader} reads all samples in order. "
            "Use mix as the outermost dataset, or remove the setting.",
            where=reader,
        )


def check_dataset(source: Any, *, name: str, reader: str) -> None:
    """Rejects a source that is neither a map-style dataset nor a stream."""
    if not is_stream(source) and not (has_index(source) and hasattr(source, "__len__")):
        raise ConfigError(
            f"{name} is a {type(source).__name__}, which has neither `__len__` and `__getitem__` nor `__iter__`. "
            "Use a dataset.",
            where=reader,
        )
    reject_a_mixture_in_order(source, name=name, reader=reader)


def _check_arguments(sources: Mapping[str, Any], weights: Mapping[str, float] | None) -> None:
    for setting, value in (("sources", sources), ("weights", weights)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{setting} is {value!r}. Use a mapping by name, such as {{a: …, b: …}}.", where="mix")
    if not sources:
        raise ConfigError("sources is empty. Name at least one dataset.", where="mix")
    for name, source in sources.items():
        check_dataset(source, name=f"Source {name}", reader="mix")
    if weights is not None and weights.keys() != sources.keys():
        raise ConfigError(
            f"weights has {', '.join(weights) or 'no names'}, but sources has {', '.join(sources)}. Set a weight for "
            "every source, or for none.",
            where="mix",
        )
