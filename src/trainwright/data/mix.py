"""mix: several datasets as one, in given shares.

Sources with an index make a `Mix`, whose samples are those of its sources one after the other; in which order they
are trained on is mix_order.py's. As soon as one source is a stream they make a `MixedStream` (mix_stream.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainwright.data.fetch import draws_nothing, fetch
from trainwright.data.mix_order import ConcatenatedOrder, MixOrder, WeightedOrder, block_shares, sources_of
from trainwright.data.mix_stream import MixedStream, common_tokens_per_sample
from trainwright.data.order import Indices
from trainwright.data.stream import has_index, is_stream
from trainwright.errors import ConfigError, DataError


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


def refuse_a_mixture_in_order(source: Any, *, name: str, reader: str) -> None:
    """Refuses a source whose weights would have no effect, because `reader` reads it by its index."""
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
        refuse_a_mixture_in_order(source, name=f"Source {name}", reader="mix")
    if weights is not None and weights.keys() != sources.keys():
        without = ", ".join(sources.keys() - weights.keys())
        problem = (
            f"{without} has no weight" if without else f"{', '.join(weights.keys() - sources.keys())} is no source"
        )
        raise ConfigError(
            f"{problem}, but {', '.join(weights) or 'none'} has one. Give every source a weight, or none of them.",
            where="mix",
        )
