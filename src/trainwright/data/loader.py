"""Batches by global position, for training (endless, shuffled) and evaluation (once, in order).

Which index is at which position is order.py's; streams have stream_loader.py.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainwright.data.collators import reject_lists
from trainwright.data.fetch import Collator, OnError, SampleFetcher, Span, View, count_samples
from trainwright.data.order import Indices, Order, mix_seed, permute
from trainwright.data.workers import LoaderOptions, ToDevice, deliver
from trainwright.errors import DataError

logger = logging.getLogger(__name__)


class LeftOut:
    """Windows of places, disjoint and in order."""

    def __init__(self) -> None:
        self._windows: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._windows)

    def __contains__(self, place: int) -> bool:
        return any(start <= place < stop for start, stop in self._windows)

    def add(self, start: int, stop: int) -> None:
        """Leaves out the batches that begin at the places start … stop−1."""
        if not 0 <= start < stop:
            raise DataError(f"leave_out: the places {start} to {stop} are no window. Give 0 ≤ start < stop.")
        joined: list[tuple[int, int]] = []
        for first, last in sorted([*self._windows, (start, stop)]):
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
            else:
                joined.append((first, last))
        self._windows = joined

    def add_all(self, windows: Iterable[Sequence[int]]) -> None:
        """Adds saved windows to those that are there, which a state from before them does not know."""
        for start, stop in windows:
            self.add(int(start), int(stop))

    def to_list(self) -> list[list[int]]:
        """Returns the windows as plain values."""
        return [list(window) for window in self._windows]


_WINDOW_STREAM = 0x714D  # keeps the seeds of windows apart from those of epochs

BATCHES_PER_WINDOW = 64
"""More make batches more equal, and less random."""


class LengthOrder:
    """The order of a dataset whose samples' lengths are known, window by window."""

    def __init__(self, lengths: Any, *, seed: int, shuffle: bool, global_batch_size: int) -> None:
        self.size = len(lengths)
        self._lengths = np.asarray(lengths)
        self._order = Order(self.size, seed=seed, shuffle=shuffle)
        self._seed = seed
        self._batch_size = global_batch_size
        self._window_size = BATCHES_PER_WINDOW * global_batch_size
        self._window = (-1, -1)
        self._sorted: Indices = np.empty(0, dtype=np.int64)

    def indices(self, start: int, stop: int) -> Indices:
        """Returns the sample index at each global position of start … stop−1."""
        pieces = []
        while start < stop:
            first, last = self._find_window(start)
            piece = self._sort(first, last)[start - first : stop - first]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _find_window(self, position: int) -> tuple[int, int]:
        """Returns the first position of a window and the one behind its last."""
        begin = position // self.size * self.size
        aligned = -(-begin // self._batch_size) * self._batch_size
        if position < aligned:
            return begin, min(aligned, begin + self.size)
        first = aligned + (position - aligned) // self._window_size * self._window_size
        return first, min(first + self._window_size, begin + self.size)

    def _sort(self, first: int, last: int) -> Indices:
        if (first, last) != self._window:
            indices = self._order.indices(first, last)
            indices = indices[np.argsort(self._lengths[indices], kind="stable")]
            batches = [indices[begin : begin + self._batch_size] for begin in range(0, len(indices), self._batch_size)]
            # The last one may be short: it stays last, so that the others begin where batches begin.
            num_whole, key = len(batches) - 1, mix_seed(self._seed, _WINDOW_STREAM, first)
            turns = permute(np.arange(num_whole), num_whole, key=key)
            self._sorted = np.concatenate([*(batches[turn] for turn in turns.tolist()), batches[-1]])
            self._window = (first, last)
        return self._sorted


def lengths_of(dataset: Any, label: str) -> Any:
    """Returns the lengths of a dataset's samples, or says how it could know them."""
    lengths = getattr(dataset, "lengths", None)
    if lengths is None:
        raise DataError(
            f"data.group_by_length: {label} is a {type(dataset).__name__}, which does not know the lengths of its "
            "samples. Give it an attribute `lengths`, or tokenize it with data.process, whose result has them."
        )
    return lengths


class TrainData:
    """The endless stream of training batches, from any position.

    Iterating goes on from `position`, which grows by one global batch at each `next`, when the batch is
    returned. With `num_samples` the stream ends exactly there, with a smaller last batch. A dataset that
    says itself in which order it is read has a method `make_order` (see mix.py).
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collator: Collator,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        group_by_length: bool = False,
        view: View | None = None,
        options: LoaderOptions | None = None,
        on_error: OnError | None = None,
        num_samples: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.collator = collator
        self.global_batch_size = global_batch_size
        self.num_samples = num_samples
        self.position = 0
        self.samples_in_hand = 0
        """This rank's samples in the batch that was returned last."""
        self.places_in_hand = (0, 0)
        """The places of that batch over all ranks: its first, and the one behind its last."""
        self.view = view or View()
        self.options = options or LoaderOptions()
        self.on_error = on_error or OnError()
        self._size = count_samples(dataset, "data.train")
        if global_batch_size > self._size:
            raise DataError(
                f"trainer.global_batch_size: {global_batch_size} is more than the {self._size} samples of data.train, "
                f"so that one batch would hold samples twice. Use at most {self._size}."
            )
        self.order: Any
        arguments: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "global_batch_size": global_batch_size}
        if group_by_length:
            self.order = LengthOrder(lengths_of(dataset, "data.train"), **arguments)
        elif hasattr(type(dataset), "make_order"):
            self.order = dataset.make_order(**arguments)
        else:
            self.order = Order(self._size, seed=seed, shuffle=shuffle)
        self._seed = seed
        self._left_out = LeftOut()
        self._left_out_counts: dict[str, int] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._after_left_out(self.position) // self._size

    @property
    def places(self) -> int:
        """The same as `position`: no place of a batch is left empty."""
        return self.position

    def __len__(self) -> int:
        return self._size

    @property
    def counts(self) -> dict[str, int]:
        """How many of the samples so far came from each source of a mixture; empty where there is but one."""
        counts: dict[str, int] = self.order.counts(self.position) if hasattr(self.order, "counts") else {}
        return {name: count - self._left_out_counts.get(name, 0) for name, count in counts.items()}

    def leave_out(self, start: int, stop: int) -> None:
        """Never again returns the batches that begin at the places start … stop−1, nor fetches them.

        They count as consumed when they are passed. What was fetched ahead is not called back: close the iterator
        first and call `batches` anew. The windows are saved.
        """
        self._left_out.add(start, stop)

    def samples_at(self, start: int, stop: int) -> list[int] | None:
        """Returns which samples of the dataset stand at these places; None where data has no index."""
        found: list[int] = self.order.indices(start, stop).tolist()
        return found

    def batches(self, to_device: ToDevice) -> Generator[Any, None, None]:
        """Returns the batches from `position` on, each counted when it is returned."""
        spans = (
            Span.of(start, stop, self.view)
            for start, stop in self._spans(self.position)
            if not self._left_out or start not in self._left_out
        )
        fetcher = SampleFetcher(self.dataset, self.order, self.collator, self._seed, skips_errors=self.on_error.skips)
        is_first = True
        for batch, span, fetched in deliver(fetcher, spans, self.options, to_device, label="data.train"):
            if is_first:
                reject_lists(batch)
                is_first = False
            self.on_error.note(fetched.failures)
            self.samples_in_hand, self.places_in_hand = fetched.num_samples, span.batch
            self._go_to(*span.batch)
            yield batch
        if self.num_samples is not None and self.position < self.num_samples:
            self._go_to(self.num_samples, self.num_samples)

    def _go_to(self, start: int, stop: int) -> None:
        """Counts a batch, and what was left out before it."""
        if start > self.position and hasattr(self.order, "counts"):
            before, behind = self.order.counts(self.position), self.order.counts(start)
            for name, count in behind.items():
                self._left_out_counts[name] = self._left_out_counts.get(name, 0) + count - before[name]
        self.position = stop

    def _after_left_out(self, position: int) -> int:
        """Returns where the next batch that is returned begins."""
        if not self._left_out:
            return position
        return next((start for start, _ in self._spans(position) if start not in self._left_out), position)

    def _spans(self, position: int) -> Iterator[tuple[int, int]]:
        while self.num_samples is None or position < self.num_samples:
            # After a ragged end the next batch is short too: batches then begin again where an order cuts them.
            stop = (position // self.global_batch_size + 1) * self.global_batch_size
            if self.num_samples is not None:
                stop = min(stop, self.num_samples)
            yield position, stop
            position = stop

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, samples returned so far over all ranks, and what else the order depends on."""
        return {
            "position": self.position,
            "num_samples": self._size,
            "global_batch_size": self.global_batch_size,
            "left_out": self._left_out.to_list(),
            "left_out_counts": dict(self._left_out_counts),
        }

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Joins the ranks' states, which are all the same."""
        return states[0]

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changes: bool = False) -> None:
        """Goes on at a saved position, whatever the number of ranks and workers was.

        After a rollback in the same process, what was left out since the state was saved stays left out.
        """
        if "progress" in state:
            raise DataError("data.train has an index now, but the checkpoint was made with a stream.")
        self.position = int(state["position"])
        self._left_out.add_all(state.get("left_out", ()))
        self._left_out_counts = {name: int(count) for name, count in state.get("left_out_counts", {}).items()}
        before = int(state.get("num_samples", self._size))
        if before != self._size:
            problem = f"data.train has {self._size:,} samples now, and had {before:,} at the checkpoint"
            if not accept_changes:
                raise DataError(
                    f"{problem}, so that what follows is another order. Put the data back, or go on in spite of it "
                    "with --accept-changes."
                )
            logger.warning("%s: samples of this epoch may come twice, or not at all.", problem)
        elif state.get("global_batch_size") != self.global_batch_size and not isinstance(self.order, Order):
            logger.warning("The order depends on the batch size: samples of this epoch may come twice, or not at all.")


class EvalData:
    """One evaluation set: each sample once, in order, whatever the number of ranks."""

    def __init__(
        self,
        dataset: Any,
        *,
        name: str,
        collator: Collator,
        global_batch_size: int,
        seed: int,
        view: View | None = None,
        options: LoaderOptions | None = None,
        on_error: OnError | None = None,
        max_batches: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.collator = collator
        self.samples_in_hand = 0
        self.view = view or View()
        self.options = options or LoaderOptions()
        self.on_error = on_error or OnError()
        self._size = count_samples(dataset, f"data.eval.{name}")
        self.global_batch_size = global_batch_size
        self._stop = self._size if max_batches is None else min(self._size, max_batches * global_batch_size)
        self.order = Order(self._size, seed=seed, shuffle=False)
        self._seed = seed

    def __len__(self) -> int:
        return self._size

    def batches(self, to_device: ToDevice) -> Generator[Any, None, None]:
        """Returns this rank's batches; every rank gets as many, a stand-in where the ragged end has none for it."""
        spans = (
            Span.of(start, min(start + self.global_batch_size, self._stop), self.view)
            for start in range(0, self._stop, self.global_batch_size)
        )
        fetcher = SampleFetcher(self.dataset, self.order, self.collator, self._seed, skips_errors=self.on_error.skips)
        label = f"data.eval.{self.name}"
        for batch, _, fetched in deliver(fetcher, spans, self.options, to_device, label=label):
            self.on_error.note(fetched.failures, of=label)
            self.samples_in_hand = fetched.num_samples
            yield batch
