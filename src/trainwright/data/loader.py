"""Batches by global position, for training (endless, shuffled) and evaluation (once, in order).

`MadeBatches` replaces a dataset if the trainer makes the batches. order.py defines the index at each position;
stream_loader.py is for streams.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from trainwright.data.collators import reject_lists
from trainwright.data.fetch import Collator, Fetched, OnError, SampleFetcher, Span, View, count_samples
from trainwright.data.file_list import reject_changed_files, saved_files
from trainwright.data.order import Indices, Order, mix_seed, permute
from trainwright.data.samplers import (
    LastBatch,
    SamplerOrder,
    order_of_sampler,
    reject_large_batch,
    reject_other_sampler,
)
from trainwright.data.workers import LoaderOptions, WorkerFetcher, serve_in_workers
from trainwright.errors import DataError

logger = logging.getLogger(__name__)

ToDevice = Callable[[Iterator[Any]], Iterator[Any]]
"""Maps an iterator of host batches to one of device batches; it may run ahead of the consumer."""


class Fetcher(WorkerFetcher, Protocol):
    """Fetches in a worker or in the run's process."""

    def fetch(self, request: Any) -> Fetched:
        """Fetches in the run's process; preserves its generators."""
        ...


def host_batches(
    fetcher: Fetcher, requests: Iterator[Any], options: LoaderOptions, queue: deque[tuple[Any, Fetched]], *, label: str
) -> Iterator[Any]:
    """Yields each batch; appends its request and the other fetched values to `queue`, which stays on the host."""
    if options.num_workers > 0:
        for request, fetched in serve_in_workers(fetcher, requests, options, label=label):
            queue.append((request, fetched))
            yield fetched.batch
        return
    for request in requests:
        fetched = fetcher.fetch(request)
        queue.append((request, fetched))
        yield fetched.batch


class SkippedPositions:
    """Ranges of positions that are skipped, disjoint and sorted."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def __contains__(self, position: int) -> bool:
        return any(start <= position < stop for start, stop in self.ranges)

    def add(self, start: int, stop: int) -> None:
        """Skips the batches that begin at positions start … stop−1."""
        if not 0 <= start < stop:
            raise DataError(f"skip_positions: {start} to {stop} is not a range. Use 0 ≤ start < stop.")
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.ranges, (start, stop)]):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self.ranges = merged

    def add_all(self, ranges: Iterable[Sequence[int]]) -> None:
        """Adds saved ranges to the current ones, which an earlier state does not contain."""
        for start, stop in ranges:
            self.add(int(start), int(stop))


def rank_spans(
    start: int,
    limit: int | None,
    batch_size: int,
    view: View,
    skipped: SkippedPositions | None = None,
    *,
    stop_of: Callable[[int], int] | None = None,
) -> Iterator[Span]:
    """Yields a rank's span of each batch from position `start` to `limit`, without those that begin in `skipped`.

    `stop_of` returns where the batch of a position ends. By default batches begin at multiples of `batch_size`, so the
    batch after a ragged start is short.
    """
    while limit is None or start < limit:
        stop = (start // batch_size + 1) * batch_size if stop_of is None else stop_of(start)
        if limit is not None:
            stop = min(stop, limit)
        if skipped is None or not skipped.ranges or start not in skipped:
            first, last = view.share(start, stop)
            if first < last:
                yield Span(first, last, False, (start, stop))
            else:
                yield Span(max(first - 1, 0), max(first, 1), True, (start, stop))
        start = stop


_WINDOW_STREAM = 0x714D  # separates the seeds of windows from those of epochs

BATCHES_PER_WINDOW = 64
"""A larger number makes the lengths within a batch more similar, and the order less random."""


class LengthOrder(Order):
    """The order of a dataset with known lengths: window by window, batches of samples of similar length.

    Batches begin at multiples of the batch size, or with `from_epoch` at those within an epoch.
    """

    def __init__(
        self,
        lengths: Any,
        *,
        seed: int,
        shuffle: bool,
        global_batch_size: int,
        epoch_size: int | None = None,
        from_epoch: bool = False,
    ) -> None:
        super().__init__(len(lengths), seed=seed, shuffle=shuffle, epoch_size=epoch_size)
        self._from_epoch = from_epoch
        self._lengths = np.asarray(lengths)
        self._batch_size = global_batch_size
        self._window_size = BATCHES_PER_WINDOW * global_batch_size
        self._window = (-1, -1)
        self._sorted: Indices = np.empty(0, dtype=np.int64)

    def indices(self, start: int, stop: int) -> Indices:
        """Returns the sample index at each global position of start … stop−1."""
        chunks = [np.empty(0, dtype=np.int64)]
        while start < stop:
            first, last = self._find_window(start)
            chunks.append(self._sort(first, last)[start - first : stop - first])
            start += len(chunks[-1])
        return np.concatenate(chunks)

    def _find_window(self, position: int) -> tuple[int, int]:
        """Returns the start and stop positions of a window."""
        begin, end = self.epoch_span(position)
        aligned = begin if self._from_epoch else -(-begin // self._batch_size) * self._batch_size
        if position < aligned:
            return begin, min(aligned, end)
        first = aligned + (position - aligned) // self._window_size * self._window_size
        return first, min(first + self._window_size, end)

    def _sort(self, first: int, last: int) -> Indices:
        if (first, last) != self._window:
            indices = super().indices(first, last)
            indices = indices[np.argsort(self._lengths[indices], kind="stable")]
            batches = [indices[begin : begin + self._batch_size] for begin in range(0, len(indices), self._batch_size)]
            # The last one may be short. It stays last, so the others begin at batch boundaries.
            num_whole, key = len(batches) - 1, mix_seed(self.seed, _WINDOW_STREAM, first)
            turns = permute(np.arange(num_whole), num_whole, key=key)
            self._sorted = np.concatenate([*(batches[turn] for turn in turns.tolist()), batches[-1]])
            self._window = (first, last)
        return self._sorted


def lengths_of(dataset: Any, label: str) -> Any:
    """Returns the lengths of a dataset's samples; raises DataError if it does not provide them."""
    lengths = getattr(dataset, "lengths", None)
    if lengths is None:
        raise DataError(
            f"data.group_by_length: {label} is a {type(dataset).__name__} without an attribute `lengths`. Add the "
            "attribute, or tokenize the dataset with data.process, whose result has it."
        )
    return lengths


class BatchLoader:
    """The common attributes of training and evaluation data."""

    def __init__(
        self,
        dataset: Any,
        *,
        collator: Collator,
        global_batch_size: int,
        seed: int,
        view: View | None = None,
        options: LoaderOptions | None = None,
        on_error: OnError | None = None,
    ) -> None:
        self.dataset = dataset
        self.collator = collator
        self.global_batch_size = global_batch_size
        self.batch_num_samples = 0
        """This rank's samples in the last batch."""
        self.batch_ignored = (0, 0)
        """In training, the ignored labels in it, and the samples without any other label."""
        self.view = view or View()
        self.options = options or LoaderOptions()
        self.on_error = on_error or OnError()
        self.seed = seed

    def stop_of_batch(self, start: int) -> int:
        """Returns the position at which a batch ends that begins at `start`."""
        return start + self.global_batch_size

    @cached_property
    def files(self) -> list[str]:
        """The files of the dataset, for checkpoints."""
        return saved_files(self.dataset)


class TrainData(BatchLoader):
    """The endless sequence of training batches, from any position.

    `batches` continues from `order_position`, which grows by one global batch when a batch is returned. With
    `num_samples` the sequence ends exactly there, with a smaller last batch. A dataset with its own order has a
    method `make_order` (see mix.py).
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        group_by_length: bool = False,
        sampler: Any = None,
        last_batch: LastBatch = "straddle",
        num_samples: int | None = None,
        **common: Any,
    ) -> None:
        """`sampler` draws the order instead (samplers.py). `last_batch` defines the end of an epoch."""
        super().__init__(dataset, global_batch_size=global_batch_size, seed=seed, **common)
        self.num_samples = num_samples
        self.samples_seen = 0
        """Samples returned so far over all ranks, including skipped ones."""
        self.order_position = 0
        """The position in the order after the last batch; unlike for a stream, equal to `samples_seen`."""
        self.batch_positions = (0, 0)
        """The positions of the last batch over all ranks: start and stop."""
        self._size = count_samples(dataset, "data.train")
        self.last_batch = last_batch
        self.sampler = sampler
        self.order: Any
        arguments: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "global_batch_size": global_batch_size}
        if sampler is None and last_batch != "short":
            reject_large_batch(global_batch_size, self._size, of="data.train")
        epoch_size = self._size // global_batch_size * global_batch_size if last_batch == "drop" else None
        if sampler is not None:
            self.order = order_of_sampler(
                sampler, size=self._size, seed=seed, batch_size=global_batch_size, last_batch=last_batch
            )
        elif group_by_length:
            lengths = lengths_of(dataset, "data.train")
            from_epoch = last_batch != "straddle"
            self.order = LengthOrder(lengths, **arguments, epoch_size=epoch_size, from_epoch=from_epoch)
        elif hasattr(type(dataset), "make_order"):
            self.order = dataset.make_order(**arguments)
        else:
            self.order = Order(self._size, seed=seed, shuffle=shuffle, epoch_size=epoch_size)
        self._is_drawn = isinstance(self.order, SamplerOrder)
        """True if a sampler draws the samples in this process, whose epochs may differ in length."""
        self._stop_of: Callable[[int], int] | None = None
        if self._is_drawn and self.order.has_stops:
            self._stop_of = self.order.batch_stop
        elif last_batch == "short":
            self._stop_of = self._stop_in_epoch
        self._skipped = SkippedPositions()
        self._skipped_counts: dict[str, int] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the next sample that is returned."""
        position = self._next_position if self._skipped.ranges else self.order_position
        return self.order.epoch_at(position) if self._is_drawn else position // self.order.epoch_size  # type: ignore[no-any-return]

    @property
    def _next_position(self) -> int:
        """The position of the next sample that is returned; after the last one, `num_samples`."""
        position, limit = self.order_position, self.num_samples
        if not self._skipped.ranges:
            return position
        spans = rank_spans(position, limit, self.global_batch_size, View(), self._skipped, stop_of=self._stop_of)
        return next((span.start for span in spans), position if limit is None else max(position, limit))

    @property
    def is_at_end(self) -> bool:
        """True if `num_samples` were returned or skipped."""
        return self.num_samples is not None and self._next_position >= self.num_samples

    def __len__(self) -> int:
        return self._size

    def epochs_at(self, position: int) -> Fraction:
        """Returns the number of epochs that the positions before this one cover."""
        epoch = int(self.order.epoch_at(position) if self._is_drawn else position // self.order.epoch_size)
        begin, end = self.order.epoch_span(position)
        return epoch + Fraction(position - begin, end - begin)

    def position_after(self, epochs: float) -> int:
        """Returns the position at which a number of epochs has ended."""
        if self._is_drawn:
            return int(self.order.position_after(epochs))
        return round(epochs * int(self.order.epoch_size))

    def count_batches(self, stop: int) -> int:
        """Returns the number of batches from `order_position` to a position; the last one may be short."""
        start, size = self.order_position, self.global_batch_size
        if stop <= start:
            return 0
        if self._stop_of is None:
            return math.ceil(stop / size) - start // size
        if self._is_drawn:
            return int(self.order.count_batches(start, stop))
        length: int = self.order.epoch_size
        in_epochs = (stop // length - start // length) * math.ceil(length / size)
        return in_epochs + math.ceil(stop % length / size) - start % length // size

    def stop_of_batch(self, start: int) -> int:
        """Returns the position at which a batch ends that begins at `start`."""
        return super().stop_of_batch(start) if self._stop_of is None else self._stop_of(start)

    def _stop_in_epoch(self, position: int) -> int:
        """Returns where the batch of a position ends if batches begin with the epoch."""
        begin, end = self.order.epoch_span(position)
        size = self.global_batch_size
        return min(begin + ((position - begin) // size + 1) * size, end)  # type: ignore[no-any-return]

    @property
    def counts(self) -> dict[str, int]:
        """The number of samples seen of each source of a mixture; empty for a single source."""
        counts = self._counts_at(self.order_position)
        return {name: count - self._skipped_counts.get(name, 0) for name, count in counts.items()}

    def skip_positions(self, start: int, stop: int) -> None:
        """Skips the batches that begin at positions start … stop−1: they are not fetched and not returned.

        They count as seen when the run passes them. The ranges are saved. Batches that were fetched ahead are not
        affected: close the iterator first and call `batches` again.
        """
        self._skipped.add(start, stop)

    def samples_at(self, start: int, stop: int) -> list[int] | None:
        """Returns the sample indices at positions start … stop−1; None for data without an index."""
        found: list[int] = self.order.indices(start, stop).tolist()
        return found

    def batches(self, to_device: ToDevice) -> Generator[Any, None, None]:
        """Yields the batches from `order_position` on; each is counted when it is returned."""
        spans = rank_spans(
            self.order_position,
            self.num_samples,
            self.global_batch_size,
            self.view,
            self._skipped,
            stop_of=self._stop_of,
        )
        order = self.order
        if self._is_drawn:
            spans = map(self._with_indices, spans)
            order = Order(self._size, seed=self.seed)  # only for placeholders; a sampler stays in this process
        fetcher = SampleFetcher(self.dataset, order, self.collator, self.seed, skips_errors=self.on_error.skips)
        queue: deque[tuple[Any, Fetched]] = deque()
        is_first = True
        for batch in to_device(host_batches(fetcher, spans, self.options, queue, label="data.train")):
            if is_first:
                reject_lists(batch)
                is_first = False
            span, fetched = queue.popleft()
            if fetched.failures:
                self.on_error.note(fetched.failures)
            start, stop = self.batch_positions = span.batch
            if start > self.order_position:
                self._count_skipped(start)
            self.batch_num_samples, self.batch_ignored = fetched.num_samples, fetched.count_ignored()
            self.samples_seen = self.order_position = stop
            yield batch
        if self.num_samples is not None and self.order_position < self.num_samples:
            self._count_skipped(self.num_samples)
            self.samples_seen = self.order_position = self.num_samples

    def _with_indices(self, span: Span) -> Span:
        """Adds the samples that the sampler has drawn for a span; a placeholder is the first sample of the batch."""
        start, stop = (span.batch[0], span.batch[0] + 1) if span.is_stand_in else (span.start, span.stop)
        return span._replace(indices=tuple(self.order.indices(start, stop).tolist()))

    def _counts_at(self, position: int) -> dict[str, int]:
        return self.order.counts(position) if hasattr(self.order, "counts") else {}

    def _count_skipped(self, stop: int) -> None:
        """Counts the samples that were skipped between `order_position` and `stop`, by source."""
        before = self._counts_at(self.order_position)
        for name, count in self._counts_at(stop).items():
            self._skipped_counts[name] = self._skipped_counts.get(name, 0) + count - before[name]

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of samples seen so far over all ranks, and the other values on which the order depends."""
        return {
            "position": self.samples_seen,
            "num_samples": self._size,
            "global_batch_size": self.global_batch_size,
            "files": self.files,
            "left_out": [list(each) for each in self._skipped.ranges],
            "left_out_counts": dict(self._skipped_counts),
            **({} if self.sampler is None else {"sampler": self.order.state_dict(self.order_position)}),
        }

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Merges the ranks' states, which are all equal."""
        return states[0]

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changes: bool = False) -> None:
        """Continues at a saved position, for any number of ranks and workers.

        After a rollback in the same process, positions that were skipped since the state was saved stay skipped.
        """
        reject_made_batches(state)
        if "progress" in state:
            raise DataError("data.train has an index, but the checkpoint was saved with a stream.")
        self.samples_seen = self.order_position = int(state["position"])
        self._skipped.add_all(state.get("left_out", ()))
        self._skipped_counts = {name: int(count) for name, count in state.get("left_out_counts", {}).items()}
        reject_changed_files(state.get("files", self.files), self.files, accept_changes=accept_changes)
        if self.sampler is not None:
            self.order.load_state_dict(state.get("sampler"), self.order_position, accept_changes=accept_changes)
        elif "sampler" in state:
            reject_other_sampler("a sampler", accept_changes=accept_changes)
        before = int(state.get("num_samples", self._size))
        if before != self._size:
            problem = f"data.train has {self._size:,} samples, but the checkpoint was saved with {before:,}"
            if not accept_changes:
                raise DataError(
                    f"{problem}, so the order is different. Restore the data, or continue with --accept-changes."
                )
            logger.warning("%s: samples of this epoch may be repeated or omitted.", problem)
        elif state.get("global_batch_size") != self.global_batch_size and (
            type(self.order) is not Order or self.last_batch != "straddle"
        ):
            logger.warning("The order depends on the batch size: samples of this epoch may be repeated or omitted.")


class MadeBatches(BatchLoader):
    """The training data of a run without a dataset: `Trainer.next_train_inputs` makes each batch itself.

    It counts the samples; there are no epochs.
    """

    epoch = 0
    num_samples: int | None = None
    is_at_end = False

    def __init__(
        self,
        *,
        varies: bool,
        sum_counts: Callable[..., tuple[int, ...]],
        origin_of: Callable[[str], object] = lambda setting: None,
        **common: Any,
    ) -> None:
        """If the number of samples `varies`, batches may have any; otherwise each has `global_batch_size`.

        `sum_counts` sums counts of samples over the ranks; `origin_of` returns where a setting is written, for errors.
        """
        super().__init__(None, **common)
        self._varies = varies
        self.samples_seen = 0
        """Samples of all batches so far, over all ranks."""
        self.batch_positions = (0, 0)
        self.has_ended = False
        """True if `next_train_inputs` has raised StopIteration on some rank."""
        self.counts: dict[str, int] = {}
        self._sum_counts = sum_counts
        self._origin_of = origin_of

    @property
    def order_position(self) -> int:
        """The samples so far: batches have no other order."""
        return self.samples_seen

    def batches(self, to_device: ToDevice) -> Generator[Any, None, None]:
        """Returns a generator that raises at the first `next`, because there is nothing to fetch."""
        self.has_ended = False
        return self._nothing()

    def _nothing(self) -> Generator[Any, None, None]:
        yield from ()
        raise DataError(
            "data.train: there is no dataset, so next(iterator) has no batch. Make the batch in next_train_inputs "
            "without the iterator, or name a dataset.",
            where=self._origin_of("data.train"),
        )

    def add_batch(self, num_samples: int | None) -> list[int] | None:
        """Counts a batch of this rank; returns the number of samples of each data rank. Collective.

        None stands for a rank whose `next_train_inputs` has ended; then it returns None on every rank.
        """
        own = 0 if num_samples is None else num_samples + 1
        rank, num_ranks = self.view.rank, self.view.size
        totals = self._sum_counts(*(own if number == rank else 0 for number in range(num_ranks)))
        self.has_ended = 0 in totals
        if self.has_ended:
            return None
        counts = [total - 1 for total in totals]
        if not any(counts):
            raise DataError("next_train_inputs returned a batch without samples: dim 0 of its tensors is 0.")
        expected = self.global_batch_size // num_ranks
        wrong = [number for number, count in enumerate(counts) if count != expected]
        if wrong and not self._varies:
            on_rank = f" on data rank {wrong[0]}" if num_ranks > 1 else ""
            each = f", {expected} for each of {num_ranks} data ranks" if num_ranks > 1 else ""
            raise DataError(
                f"trainer.global_batch_size: {self.global_batch_size} samples{each}, but next_train_inputs returned "
                f"{counts[wrong[0]]}{on_rank} (dim 0 of its tensors). Return {expected}, or set global_batch_size: "
                "null for batches of any size.",
                where=self._origin_of("trainer.global_batch_size"),
            )
        start, self.samples_seen = self.samples_seen, self.samples_seen + sum(counts)
        self.batch_num_samples, self.batch_positions = own - 1, (start, self.samples_seen)
        return counts

    def skip_positions(self, start: int, stop: int) -> None:
        """Not called: without a dataset a rollback is rejected."""
        raise AssertionError("a batch that next_train_inputs makes cannot be skipped")

    def epochs_at(self, position: int) -> Fraction:
        """Not called: without a dataset there are no epochs."""
        raise AssertionError("without a dataset there are no epochs")

    def samples_at(self, start: int, stop: int) -> list[int] | None:
        """Returns None: the samples have no index."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of samples so far."""
        return {"position": self.samples_seen, "made": True}

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Merges the ranks' states, which are all equal."""
        return states[0]

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changes: bool = False) -> None:
        """Continues to count; the trainer has the state of the code that makes the batches."""
        if "made" not in state:
            raise DataError("data.train is null, but the checkpoint was saved with a dataset.")
        self.samples_seen = int(state["position"])


def reject_made_batches(state: Mapping[str, Any]) -> None:
    """Rejects the saved state of a run without a dataset."""
    if "made" in state:
        raise DataError("data.train is a dataset, but the checkpoint was saved without one (data.train: null).")


class EvalData(BatchLoader):
    """One evaluation set: each sample once, in order, for any number of ranks."""

    def __init__(self, dataset: Any, *, name: str, max_batches: int | None = None, **common: Any) -> None:
        super().__init__(dataset, **common)
        self.name = name
        self._size = count_samples(dataset, f"data.eval.{name}")
        self._stop = self._size if max_batches is None else min(self._size, max_batches * self.global_batch_size)
        self.order = Order(self._size, seed=self.seed, shuffle=False)

    def __len__(self) -> int:
        return self._size

    def batches(self, to_device: ToDevice) -> Generator[Any, None, None]:
        """Yields this rank's batches, the same number on every rank; a rank without samples in the last one has a
        placeholder."""
        spans = rank_spans(0, self._stop, self.global_batch_size, self.view)
        fetcher = SampleFetcher(self.dataset, self.order, self.collator, self.seed, skips_errors=self.on_error.skips)
        queue: deque[tuple[Any, Fetched]] = deque()
        label = f"data.eval.{self.name}"
        for batch in to_device(host_batches(fetcher, spans, self.options, queue, label=label)):
            _, fetched = queue.popleft()
            self.on_error.note(fetched.failures, of=label)
            self.batch_num_samples = fetched.num_samples
            yield batch
