"""Fetches batches by global position, for training (endless, shuffled) and evaluation (once, in order).

The state of training data is one number, the samples that were returned; what workers have fetched ahead
does not count. A rank or worker is a view of positions, so their number changes nothing in the order.
See fetch.py for how one sample is fetched, order.py for which.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainwright.data.collators import refuse_lists
from trainwright.data.fetch import Collator, SampleFetcher, count_samples
from trainwright.data.order import Order
from trainwright.errors import DataError
from trainwright.events.storage import forget_storages

_WORKER_GRACE_SECONDS = 30


@dataclass(frozen=True)
class View:
    """Which data rank this process is, of how many."""

    rank: int = 0
    size: int = 1

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Returns this rank's contiguous share of positions; ranks in order give the whole again."""
        length = stop - start
        return start + length * self.rank // self.size, start + length * (self.rank + 1) // self.size


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are fetched; none of it changes what is in them."""

    workers: int = 0
    arguments: Mapping[str, Any] | None = None
    """Further arguments of torch's DataLoader, used when there are workers."""


class TrainData:
    """The endless stream of training batches, from any position.

    Iterating goes on from `position`, which grows by one global batch at each `next`, when the batch is
    returned. With `num_samples` the stream ends exactly there, with a smaller last batch.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collator: Collator,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        view: View | None = None,
        options: LoaderOptions | None = None,
        num_samples: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.collator = collator
        self.global_batch_size = global_batch_size
        self.num_samples = num_samples
        self.position = 0
        self.samples_in_hand = 0
        """This rank's samples in the batch that was returned last."""
        self._view = view or View()
        self._options = options or LoaderOptions()
        self._size = count_samples(dataset, "data.train")
        if global_batch_size > self._size:
            raise DataError(
                f"trainer.global_batch_size: {global_batch_size} is more than the {self._size} samples of data.train, "
                f"so that one batch would hold samples twice. Use at most {self._size}."
            )
        self._fetcher = SampleFetcher(dataset, Order(self._size, seed=seed, shuffle=shuffle), collator, seed)

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.position // self._size

    def __len__(self) -> int:
        return self._size

    def batches(self, to_device: Callable[[Iterator[Any]], Iterator[Any]]) -> Generator[Any, None, None]:
        """Returns the batches from `position` on, each counted when it is returned.

        `to_device` maps an iterator of host batches to one of device batches and may run ahead of it.
        """
        spans = self._spans(self.position)
        is_first = True
        for share in to_device(_fetch_spans(self._fetcher, spans, self._view, self._options)):
            batch, self.samples_in_hand, global_samples = share
            if is_first:
                refuse_lists(batch)
                is_first = False
            self.position += global_samples
            yield batch

    def _spans(self, position: int) -> Iterator[tuple[int, int]]:
        while self.num_samples is None or position < self.num_samples:
            stop = position + self.global_batch_size
            if self.num_samples is not None:
                stop = min(stop, self.num_samples)
            yield position, stop
            position = stop

    def state_dict(self) -> dict[str, int]:
        """Returns the position: samples returned so far, over all ranks."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on at a saved position, whatever the number of ranks and workers was."""
        self.position = int(state["position"])


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
        max_batches: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.collator = collator
        self.samples_in_hand = 0
        self._view = view or View()
        self._options = options or LoaderOptions()
        self._size = count_samples(dataset, f"data.eval.{name}")
        self._batch_size = global_batch_size
        self._stop = self._size if max_batches is None else min(self._size, max_batches * global_batch_size)
        self._fetcher = SampleFetcher(dataset, Order(self._size, seed=seed, shuffle=False), collator, seed)

    def __len__(self) -> int:
        return self._size

    def batches(self, to_device: Callable[[Iterator[Any]], Iterator[Any]]) -> Generator[Any, None, None]:
        """Returns this rank's batches; every rank gets as many, a stand-in where the ragged end has none for it."""
        spans = ((start, min(start + self._batch_size, self._stop)) for start in range(0, self._stop, self._batch_size))
        for share in to_device(_fetch_spans(self._fetcher, spans, self._view, self._options)):
            batch, self.samples_in_hand, _ = share
            yield batch


Share = tuple[Any, int, int]
"""A batch, how many of its samples count on this rank, and how many the global batch has."""


def _fetch_spans(
    fetcher: SampleFetcher, spans: Iterator[tuple[int, int]], view: View, options: LoaderOptions
) -> Iterator[Share]:
    """Yields this rank's share of each span of global positions."""
    if options.workers == 0:
        for start, stop in spans:
            own_start, own_stop = view.part(start, stop)
            yield fetcher.fetch_batch(*_stand_in(own_start, own_stop)), own_stop - own_start, stop - start
        return
    sizes: list[tuple[int, int]] = []

    def positions() -> Iterator[range]:
        for start, stop in spans:
            own_start, own_stop = view.part(start, stop)
            sizes.append((own_stop - own_start, stop - start))
            yield range(*_stand_in(own_start, own_stop))

    loader: DataLoader[Any] = DataLoader(
        fetcher,
        batch_sampler=positions(),  # type: ignore[arg-type]  # any iterable of position lists
        collate_fn=fetcher.collator,
        num_workers=options.workers,
        worker_init_fn=_prepare_worker,
        # The loader draws a seed at its start; from a generator of its own, for the run's is not to be disturbed.
        generator=torch.Generator(),
        **dict(options.arguments or {}),
    )
    batches = iter(loader)
    try:
        for batch in batches:
            own, whole = sizes.pop(0)
            yield batch, own, whole
    finally:
        # torch would do it when the iterator dies, but a traceback keeps that alive until the interpreter's exit,
        # which then waits for workers that still hope to serve.
        batches._shutdown_workers()  # type: ignore[attr-defined]


def _stand_in(start: int, stop: int) -> tuple[int, int]:
    """A rank without samples fetches the one before its place, so that it takes part with weight 0."""
    return (start, stop) if stop > start else (max(start - 1, 0), max(start, 1))


def _prepare_worker(_: int) -> None:
    """Lets workers outlive a signal to the whole process group until the step is finished and saved."""
    forget_storages()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not ignored for ever: a worker that hangs in a user's code must still be possible to end.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_WORKER_GRACE_SECONDS))
