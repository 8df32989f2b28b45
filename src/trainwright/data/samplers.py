"""Orders that a sampler defines: `weighted`, and any torch Sampler or BatchSampler.

The weighted sampler is a pure function of (seed, position), like the default order. A torch sampler is iterated in the
run's process: one pass is one epoch, drawn with generators that are seeded from (seed, epoch). Ranks and workers
receive their parts of the drawn indices. loader.py makes batches of an order.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import math
import operator
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, WeightedRandomSampler

from trainwright.data.order import Indices, Order, mix_seed
from trainwright.data.randomness import preserve_generators, seed_generators
from trainwright.errors import ConfigError, DataError
from trainwright.registry import resolve as registry

logger = logging.getLogger(__name__)

LastBatch = Literal["straddle", "short", "drop"]
Weights = npt.NDArray[np.float64]

_DRAW_STREAM, _PASS_STREAM = 0xD4A3, 0x5A3F  # separate the uses of the seed
_PLAIN = (bool, int, float, str, type(None))
_MIN_LIMIT = 1_000_000
"""The number of indices after which a pass counts as endless, unless the dataset is large."""


def reject_large_batch(batch_size: int, epoch_size: int, *, of: str) -> None:
    """Rejects a batch that is larger than an epoch."""
    if batch_size > epoch_size:
        raise DataError(
            f"trainer.global_batch_size: {batch_size} is more than the {epoch_size} samples of {of}, so one batch "
            f"would contain samples twice. Use at most {epoch_size}."
        )


def order_of_sampler(sampler: Any, *, size: int, seed: int, batch_size: int, last_batch: LastBatch) -> Any:
    """Returns the order that a sampler defines over the `size` samples of the training set."""
    if isinstance(sampler, WeightedSampler):
        length = sampler.num_samples
        if last_batch != "short":
            reject_large_batch(batch_size, length, of="an epoch of data.sampler")
        if last_batch == "drop":
            length = length // batch_size * batch_size
        return WeightedSamples(sampler.weights, seed=seed, epoch_size=length, replacement=sampler.replacement)
    return SamplerOrder(sampler, size=size, seed=seed, batch_size=batch_size, last_batch=last_batch)


# weights


class WeightedSampler:
    """Draws samples with probabilities proportional to their weights, like torch's WeightedRandomSampler.

    `weights` has a number ≥ 0 for each sample of the training set: a list, a file (.json, .npy, .csv or .txt), or a
    function that receives the dataset and returns them, such as `weights.py:balance` or `my_pkg.module:balance`. An
    epoch has `num_samples` samples, by default as many as the dataset. With `replacement` each is drawn independently;
    without, no sample occurs twice in an epoch.
    """

    def __init__(
        self,
        weights: Any,
        replacement: bool = True,
        num_samples: int | None = None,
        *,
        dataset: Any,
        project_dir: str | Path = ".",
    ) -> None:
        if not isinstance(replacement, bool):
            raise ConfigError(f"data.sampler.replacement: must be true or false, got {replacement!r}.")
        if num_samples is not None and (not isinstance(num_samples, int) or num_samples < 1):
            raise ConfigError(f"data.sampler.num_samples: must be a positive whole number, got {num_samples!r}.")
        self.weights = _check_weights(_read_weights(weights, dataset, Path(project_dir)), len(dataset))
        self.replacement = replacement
        self.num_samples = len(self.weights) if num_samples is None else num_samples
        num_drawable = int(np.count_nonzero(self.weights))
        if not replacement and self.num_samples > num_drawable:
            given = "" if num_samples is None else f" num_samples {num_samples}, but"
            raise ConfigError(
                f"data.sampler.replacement: false with{given} {num_drawable} of {len(self.weights)} weights above 0: "
                f"without replacement an epoch has at most {num_drawable} samples. Set num_samples to at most that, or "
                "replacement: true."
            )


def _read_weights(weights: Any, dataset: Any, folder: Path) -> Any:
    if callable(weights):
        return weights(dataset)
    if not isinstance(weights, str):
        return weights
    path = folder / weights
    readers = {".json": _read_json, ".npy": _read_npy, ".csv": _read_numbers, ".txt": _read_numbers}
    if path.suffix in readers:
        if not path.is_file():
            raise ConfigError(f"data.sampler.weights: no file {path}. Paths are relative to {folder}.")
        try:
            return readers[path.suffix](path)
        except (ValueError, OSError) as error:
            raise ConfigError(f"data.sampler.weights: {path} cannot be read: {error}.") from error
    if path.suffix in (".pt", ".pth", ".pkl", ".pickle"):
        raise ConfigError(
            f"data.sampler.weights: {weights} is a pickle, which may run code when it is read. Save the weights with "
            "numpy.save as .npy."
        )
    function = registry.find("sampler", weights, project_dir=folder, label="data.sampler.weights")
    return function(dataset)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _read_npy(path: Path) -> Any:
    return np.load(path)


def _read_numbers(path: Path) -> list[float]:
    """Reads one number per line; the first line of a .csv file may be a name."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    wide = next((number for number, row in enumerate(rows, 1) if len(row) > 1), None)
    if wide is not None:
        raise ValueError(f"row {wide} has {len(rows[wide - 1])} columns instead of one")
    if rows and path.suffix == ".csv":
        try:
            float(rows[0][0])
        except ValueError:
            rows = rows[1:]
    return [float(row[0]) for row in rows]


def _check_weights(weights: Any, size: int) -> Weights:
    if isinstance(weights, torch.Tensor):
        weights = weights.detach().cpu().double().numpy()
    try:
        found = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data.sampler.weights: must be numbers, got {type(weights).__name__}: {error}.") from error
    if found.ndim != 1 or len(found) != size:
        shape = f"{len(found)} weights" if found.ndim == 1 else f"an array of shape {list(found.shape)}"
        raise ConfigError(
            f"data.sampler.weights: {shape}, but data.train has {size} samples. Provide one number for each sample."
        )
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if wrong.size:
        raise ConfigError(
            f"data.sampler.weights: the weight of sample {wrong[0]} is {found[wrong[0]]}. Use finite numbers ≥ 0."
        )
    if not found.any():
        raise ConfigError(f"data.sampler.weights: all {size} weights are 0, so that no sample can be drawn.")
    return found


class WeightedSamples(Order):
    """The order of a weighted sampler: the sample at a position is a pure function of the seed and the position."""

    def __init__(self, weights: Weights, *, seed: int, epoch_size: int, replacement: bool) -> None:
        super().__init__(len(weights), seed=seed, epoch_size=epoch_size)
        self._weights = weights
        self._replacement = replacement
        self._sums = np.cumsum(weights)
        self._last = int(np.flatnonzero(weights)[-1])
        self._drawn: tuple[int, Indices] = (-1, np.empty(0, np.int64))
        if not replacement:
            self.CHUNK_EPOCHS = 1  # a whole epoch is sorted at once

    def _compute(self, positions: Indices) -> Indices:
        epochs, offsets = np.divmod(positions, self.epoch_size)
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            draw = self._draw_independently if self._replacement else self._draw_once
            indices[here] = draw(epoch, offsets[here])
        return indices

    def _draw_independently(self, epoch: int, offsets: Indices) -> Indices:
        numbers = _uniform(offsets, key=mix_seed(self.seed, _DRAW_STREAM, epoch)) * self._sums[-1]
        # A weight of 0 does not change the cumulative sum, so it is never drawn; the last one could be, by rounding.
        found: Indices = np.minimum(np.searchsorted(self._sums, numbers, side="right"), self._last)
        return found

    def _draw_once(self, epoch: int, offsets: Indices) -> Indices:
        if self._drawn[0] != epoch:
            # The order of exponential variables with these rates is that of successive draws without replacement.
            key = mix_seed(self.seed, _DRAW_STREAM, epoch)
            uniform = 1.0 - _uniform(np.arange(self.size, dtype=np.int64), key=key)  # in (0, 1]
            with np.errstate(divide="ignore", invalid="ignore"):  # in logarithms: a small weight must not overflow
                times = np.where(self._weights > 0, np.log(-np.log(uniform)) - np.log(self._weights), np.inf)
            self._drawn = epoch, np.argsort(times, kind="stable")[: self.epoch_size]
        return self._drawn[1][offsets]

    def state_dict(self, position: int) -> dict[str, Any]:
        """Returns an identifier of the weights; the loader has the position."""
        return {"digest": _digest(self._weights)}

    def load_state_dict(self, state: Mapping[str, Any] | None, position: int, *, accept_changes: bool) -> None:
        """Rejects weights that differ from those of the checkpoint."""
        _reject_other_order(state, _digest(self._weights), "other weights", accept_changes=accept_changes)


def _uniform(numbers: Indices, *, key: int) -> Weights:
    """Returns a uniform number in [0, 1) for each number: the finalizer of splitmix64, with 53 bits."""
    with np.errstate(over="ignore"):
        mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _digest(values: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def _reject_other_order(state: Mapping[str, Any] | None, digest: str, change: str, *, accept_changes: bool) -> None:
    if state is None or state.get("digest") != digest:
        reject_other_sampler(change if state is not None else "no sampler", accept_changes=accept_changes)


def reject_other_sampler(saved_with: str, *, accept_changes: bool) -> None:
    """Raises for a checkpoint that was saved with another order, or warns if the change is accepted."""
    problem = f"data.sampler: the checkpoint was saved with {saved_with}, so the order is different"
    if not accept_changes:
        raise DataError(f"{problem}. Restore what it was, or continue with --accept-changes.")
    logger.warning("%s: samples of this epoch may be repeated or omitted.", problem)


# torch's samplers


class _Epoch(NamedTuple):
    """One pass of a sampler."""

    begin: int
    """Its first position."""
    size: int
    num_batches: int
    """0 if batches may straddle epochs."""
    attributes: Mapping[str, Any]
    """The attributes of the sampler that its passes change, as they were before this one."""


class SamplerOrder:
    """The order of a torch sampler: its passes one after another, each an epoch.

    The first pass is drawn at construction, the others when a batch needs them. The positions of earlier epochs are
    kept; their indices are drawn again if needed.
    """

    def __init__(self, sampler: Any, *, size: int, seed: int, batch_size: int, last_batch: LastBatch) -> None:
        reject_distributed(sampler)
        if not hasattr(sampler, "__iter__"):
            raise ConfigError(
                f"data.sampler: it must be iterable, but this is of type {type(sampler).__name__}. Use a torch Sampler "
                "or BatchSampler."
            )
        if isinstance(sampler, WeightedRandomSampler) and len(sampler.weights) != size:
            raise ConfigError(
                f"data.sampler: WeightedRandomSampler has {len(sampler.weights)} weights, but the dataset has {size} "
                "samples. Use one weight per sample: class_weights[labels]."
            )
        self.size = size
        self.seed = seed
        self._sampler = sampler
        self._name = type(sampler).__name__
        self._batch_size = batch_size
        self._last_batch = last_batch
        self._first_epoch = 0
        self._changing: set[str] = set()
        """The names of plain attributes that a pass has changed."""
        self._attributes_before: dict[str, Any] = {}
        """Their values before the last pass that was drawn."""
        self._next_attributes: dict[str, Any] = {}
        self._drawn: dict[int, tuple[Indices, Indices | None]] = {}
        """The indices of the last epochs that were drawn, and where batches end unless they straddle epochs."""
        self._has_batches = self._declared = False
        self._num_items = 0
        self._epochs: list[_Epoch] = []
        self._extend()
        first, (indices, stops) = self._epochs[0], self._drawn[0]
        self.digest = _digest(np.concatenate([indices, [-1], [] if stops is None else stops]).astype(np.int64))
        """Identifies the first pass: the same on all ranks and when a run resumes."""
        if stops is None:
            reject_large_batch(batch_size, first.size, of=f"one pass of {self._name}")
        is_declared = hasattr(sampler, "__len__") and len(sampler) == self._num_items
        self._declared = is_declared and (not self._has_batches or type(sampler) is BatchSampler)
        """True if every pass is expected to have as many samples as the first."""

    @property
    def has_stops(self) -> bool:
        """True if batches end with an epoch, or where a batch sampler ends them."""
        return self._has_batches or self._last_batch == "short"

    @property
    def has_batches(self) -> bool:
        """True for a batch sampler, which yields global batches."""
        return self._has_batches

    # Positions.

    def epoch_at(self, position: int) -> int:
        """Returns the epoch of a position."""
        while position > self._end:
            self._extend()
        if position == self._end:
            return self._first_epoch + len(self._epochs)
        return self._first_epoch + self._number_at(position)

    def epoch_span(self, position: int) -> tuple[int, int]:
        """Returns the first position of the epoch of a position, and the first one after it."""
        epoch = self._epoch(position)
        return epoch.begin, epoch.begin + epoch.size

    def batch_stop(self, position: int) -> int:
        """Returns where the batch of a position ends, if batches do not straddle epochs."""
        epoch = self._epoch(position)
        _, stops = self._indices_of(self._number_at(position))
        assert stops is not None
        return epoch.begin + int(stops[np.searchsorted(stops, position - epoch.begin, side="right")])

    def indices(self, start: int, stop: int) -> Indices:
        """Returns the sample index at each position of start … stop−1."""
        chunks = [np.empty(0, dtype=np.int64)]
        while start < stop:
            epoch = self._epoch(start)
            indices, _ = self._indices_of(self._number_at(start))
            chunks.append(indices[start - epoch.begin : stop - epoch.begin])
            start += len(chunks[-1])
        return np.concatenate(chunks)

    def position_after(self, epochs: float) -> int:
        """Returns the position at which a number of epochs has ended; draws them unless all have the same size.

        After a resume, the epochs before the current one are not known; a smaller number ends where the current one
        begins.
        """
        first, rest = self._epochs[0], max(epochs - self._first_epoch, 0)
        if self._declared:
            return first.begin + round(rest * first.size)
        whole = int(rest)
        while len(self._epochs) < math.ceil(rest):
            self._extend()
        last = self._epochs[whole] if rest > whole else None
        begin = self._epochs[whole - 1].begin + self._epochs[whole - 1].size if whole else first.begin
        return begin + (round((rest - whole) * last.size) if last is not None else 0)

    def count_batches(self, start: int, stop: int) -> int:
        """Returns the number of batches between two positions, if they do not straddle epochs."""
        count = 0
        while start < stop:
            epoch = self._epoch(start)
            _, stops = self._indices_of(self._number_at(start))
            assert stops is not None
            before = int(np.searchsorted(stops, start - epoch.begin, side="right"))
            count += min(int(np.searchsorted(stops, stop - epoch.begin, side="left")) + 1, len(stops)) - before
            start = epoch.begin + epoch.size
            if self._declared and stop > start:
                num_epochs = (stop - start) // epoch.size
                count, start = count + num_epochs * epoch.num_batches, start + num_epochs * epoch.size
                rest, stops = stop - start, self._indices_of(0)[1]
                assert stops is not None
                return count + (int(np.searchsorted(stops, rest, side="left")) + 1 if rest else 0)
        return count

    @property
    def _end(self) -> int:
        return self._epochs[-1].begin + self._epochs[-1].size

    def _epoch(self, position: int) -> _Epoch:
        while position >= self._end:
            self._extend()
        return self._epochs[self._number_at(position)]

    def _number_at(self, position: int) -> int:
        return bisect_right(self._epochs, position, key=lambda epoch: epoch.begin) - 1

    # Passes.

    def _extend(self) -> None:
        """Draws the epoch after the last one that is known."""
        number = len(self._epochs)
        begin = self._end if self._epochs else 0
        indices, stops = self._draw(self._first_epoch + number, self._next_attributes)
        self._next_attributes = self._attributes()
        num_batches, attributes = 0 if stops is None else len(stops), self._attributes_before
        self._epochs.append(_Epoch(begin, len(indices), num_batches, attributes))
        self._keep(number, indices, stops)
        if number and self._declared and len(indices) != self._epochs[0].size:
            self._declared = False
            logger.warning(
                "data.sampler: a pass of %s has %d samples, but the first one had %d, from which the number of steps "
                "was computed.",
                self._name,
                len(indices),
                self._epochs[0].size,
            )

    def _indices_of(self, number: int) -> tuple[Indices, Indices | None]:
        if number not in self._drawn:
            self._keep(number, *self._draw(self._first_epoch + number, self._epochs[number].attributes))
        return self._drawn[number]

    def _keep(self, number: int, indices: Indices, stops: Indices | None) -> None:
        self._drawn[number] = indices, stops
        for other in list(self._drawn)[: max(len(self._drawn) - 3, 0)]:
            del self._drawn[other]

    def _draw(self, epoch: int, attributes: Mapping[str, Any]) -> tuple[Indices, Indices | None]:
        """Returns the indices of one pass, and where batches end."""
        samplers = list(_nested(self._sampler))
        for name, value in attributes.items():
            number, _, attribute = name.partition(".")
            setattr(samplers[int(number)], attribute, value)
        seed = mix_seed(self.seed, _PASS_STREAM, epoch)
        for each in samplers:
            _seed_own_generators(each, seed)
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        before = _plain_attributes(samplers)
        limit = max(_MIN_LIMIT, 100 * self.size)
        with preserve_generators():
            seed_generators(seed)
            drawn = list(islice(iter(self._sampler), limit + 1))
        if len(drawn) > limit:
            raise DataError(
                f"data.sampler: a pass of {self._name} has more than {limit:,} items for {self.size:,} samples. One "
                "pass is one epoch: end it, for example after as many samples as the dataset has."
            )
        after = _plain_attributes(samplers)
        changed = {name for name, value in before.items() if name in after and after[name] != value}
        self._changing |= changed
        self._attributes_before = {name: before[name] for name in sorted(self._changing) if name in before}
        return self._flatten(drawn, epoch)

    def _attributes(self) -> dict[str, Any]:
        present = _plain_attributes(list(_nested(self._sampler)))
        return {name: present[name] for name in sorted(self._changing) if name in present}

    def _flatten(self, drawn: list[Any], epoch: int) -> tuple[Indices, Indices | None]:
        where = f"data.sampler: the pass of {self._name} for epoch {epoch}"
        if not drawn:
            raise DataError(f"{where} is empty.")
        stops: Indices | None = None
        self._has_batches, self._num_items = _is_batch(drawn[0]), len(drawn)
        if self._has_batches:
            sizes = [len(each) if _is_batch(each) else 0 for each in drawn]
            wrong = next((n for n, length in enumerate(sizes) if not 0 < length <= self._batch_size), None)
            if wrong is not None:
                raise DataError(
                    f"{where} has {sizes[wrong]} samples in batch {wrong}, but a global batch has 1 to "
                    f"trainer.global_batch_size {self._batch_size}, which the ranks share. Set "
                    f"trainer.global_batch_size to the largest batch, {max(sizes)}, or change the sampler."
                )
            stops = np.cumsum(sizes, dtype=np.int64)
            drawn = list(chain.from_iterable(drawn))
        try:
            indices = np.fromiter(map(operator.index, drawn), np.int64, len(drawn))
        except TypeError as error:
            kind = next((type(each).__name__ for each in drawn if not hasattr(each, "__index__")), "value")
            raise DataError(f"{where} has a {kind} instead of an index: {error}.") from error
        outside = indices[(indices < 0) | (indices >= self.size)]
        if outside.size:
            raise DataError(f"{where} has the index {outside[0]}, but data.train has {self.size} samples.")
        size = self._batch_size
        if self._last_batch == "short" and stops is None:
            stops = np.minimum(np.arange(1, -(-len(indices) // size) + 1, dtype=np.int64) * size, len(indices))
        elif self._last_batch == "drop" and stops is None:
            reject_large_batch(size, len(indices), of=f"one pass of {self._name}")
            indices = indices[: len(indices) // size * size]
        return indices, stops

    # State.

    def state_dict(self, position: int) -> dict[str, Any]:
        """Returns the epoch of a position, its first position, and the state that the sampler needs to draw it
        again."""
        begin, attributes = position, dict(self._next_attributes)
        if position != self._end:
            found = self._epochs[self._number_at(position)]
            begin, attributes = found.begin, dict(found.attributes)
        return {"digest": self.digest, "epoch": self.epoch_at(position), "begin": begin, "attributes": attributes}

    def load_state_dict(self, state: Mapping[str, Any] | None, position: int, *, accept_changes: bool) -> None:
        """Continues within a saved epoch."""
        _reject_other_order(state, self.digest, f"another order than {self._name}'s", accept_changes=accept_changes)
        if state is None or "epoch" not in state:
            return
        self._first_epoch, self._drawn, self._epochs = int(state["epoch"]), {}, []
        begin, attributes = int(state["begin"]), dict(state["attributes"])
        indices, stops = self._draw(self._first_epoch, attributes)
        self._next_attributes = self._attributes()
        self._epochs = [_Epoch(begin, len(indices), 0 if stops is None else len(stops), attributes)]
        self._keep(0, indices, stops)


def reject_distributed(sampler: Any) -> None:
    """Rejects a sampler that divides samples among the ranks."""
    for each in _nested(sampler):
        kind = each if isinstance(each, type) else type(each)
        if issubclass(kind, DistributedSampler) or {"num_replicas", "rank"} <= vars(each).keys():
            raise ConfigError(
                f"data.sampler: {kind.__name__} returns the samples of one rank, but every rank needs the order of "
                "all: the loop divides each global batch among the ranks. Use a sampler for one process, such as "
                "torch.utils.data:RandomSampler."
            )


def _nested(sampler: Any) -> Iterator[Any]:
    """Yields a sampler and the samplers in its attributes."""
    pending, seen = [sampler], set[int]()
    while pending:
        each = pending.pop(0)
        if id(each) in seen or not hasattr(each, "__dict__"):
            continue
        seen.add(id(each))
        yield each
        pending += [value for value in vars(each).values() if isinstance(value, Sampler)]


def _seed_own_generators(sampler: Any, seed: int) -> None:
    for value in vars(sampler).values():
        if isinstance(value, torch.Generator):
            value.manual_seed(seed)
        elif isinstance(value, random.Random):
            value.seed(seed)
        elif isinstance(value, np.random.RandomState):
            value.seed(seed & 0xFFFFFFFF)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = type(value.bit_generator)(seed).state


def _plain_attributes(samplers: Sequence[Any]) -> dict[str, Any]:
    return {
        f"{number}.{name}": value
        for number, sampler in enumerate(samplers)
        for name, value in vars(sampler).items()
        if isinstance(value, _PLAIN)
    }


def _is_batch(item: Any) -> bool:
    return isinstance(item, list | tuple) or (isinstance(item, np.ndarray | torch.Tensor) and item.ndim > 0)
