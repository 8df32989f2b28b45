"""Mixes sources of which at least one is a stream: sample by sample, in shares by weight, until all have ended.

Which source is next depends on (seed, epoch, samples so far) alone, and a source that has ended drops out. The state
is the sources' states and how far the choice is, so that a resumed run goes on without reading anything again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainwright.data.fetch import draws_nothing
from trainwright.data.mix_order import BLOCK, Choices, block_shares
from trainwright.data.order import chain_seed, mix_seed, permute
from trainwright.data.source_pass import SourcePass
from trainwright.data.stream import is_stream
from trainwright.errors import DataError

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
