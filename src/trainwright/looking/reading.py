"""Reads the first samples of a set where training or evaluation meets them, and the batch that is made of them.

The loaders themselves read (data/loader.py, data/stream_loader.py), with a collator that keeps the samples, so their
order and their randomness are those of the run. No workers are started and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trainwright.config import BatchPlan, RunConfig
from trainwright.data.collators import refuse_lists
from trainwright.data.failures import OnError
from trainwright.data.fetch import Collator, Failure
from trainwright.data.loader import EvalData, TrainData
from trainwright.data.stream import is_stream
from trainwright.data.stream_loader import EvalStream, StreamData
from trainwright.data.view import View
from trainwright.data.workers import LoaderOptions

Loader: TypeAlias = "TrainData | StreamData | EvalData | EvalStream"


@dataclass
class Kept:
    """A batch and the samples that it was made of."""

    samples: list[Any]
    batch: Any = None
    error: Exception | None = None
    """Why the collator made none."""


class Keeper:
    """A collator that keeps the samples beside the batch, and an error of the collator instead of raising it."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator
        self.wants_batch = True
        self.draws_nothing = bool(getattr(collator, "draws_nothing", False))

    def __call__(self, samples: list[Any]) -> Kept:
        """Collates, while a batch is wanted."""
        if not self.wants_batch:
            return Kept(samples)
        try:
            # A copy of the list, for a collator may empty it.
            batch = self.collator(list(samples))
            refuse_lists(batch)
        except Exception as error:
            return Kept(samples, error=error)
        return Kept(samples, batch)


class FailureList(OnError):  # noqa: N818  # no exception: what is done about failures
    """Takes note of rows that cannot be read, in memory alone and without a limit."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__(skips=skips)
        self.failures: list[Failure] = []

    def note(self, failures: Sequence[Failure], *, of: str = "data.train") -> None:
        """Keeps them, each once."""
        self.failures += [each for each in dict.fromkeys(failures) if each not in self.failures]


@dataclass
class Reading:
    """A set that is being read: its loader, and what was met on the way."""

    loader: Loader
    keeper: Keeper
    listed: FailureList
    view: View
    batch_size: int
    """Samples of a batch, over all ranks."""
    first: Kept | None = field(default=None, init=False)
    """The first batch, once `samples` has begun."""

    def samples(self, wanted: Callable[[], int]) -> Iterator[tuple[int, int | None, Any]]:
        """Yields position, index in the dataset (None in a stream) and sample, until as many as wanted were given.

        It ends after one epoch, so that no sample is given twice.
        `wanted` is asked again at each batch, as the first one tells how much more there is to know.
        """
        given = 0
        for number, kept in enumerate(self.loader.batches(_as_they_are)):
            self.keeper.wants_batch = False
            self.first = self.first or kept
            places = self._places(number, kept)
            for place, sample in zip(places, kept.samples, strict=False):
                if given >= wanted() or (place is not None and place[0] >= len(self.loader.dataset)):
                    return
                yield given if place is None else place[0], None if place is None else place[1], sample
                given += 1
            if given >= wanted():
                return

    def _places(self, number: int, kept: Kept) -> list[tuple[int, int] | None]:
        """Returns position and index of each sample of a batch; rows that were left out have none."""
        order = order_of(self.loader)
        if order is None:
            return [None] * len(kept.samples)
        start = number * self.batch_size
        stop = start + self.batch_size
        if isinstance(self.loader, EvalData):
            stop = min(stop, len(self.loader))
        begin, end = self.view.part(start, stop)
        indices = order.indices(begin, end).tolist()
        dataset = self.loader.dataset
        skipped = {each.row for each in self.listed.failures}
        rows = whole_rows(dataset, indices)
        places = zip(range(begin, end), indices, rows, strict=True)
        return [(position, index) for position, index, row in places if row not in skipped]


def order_of(loader: Loader) -> Any:
    """Returns which sample stands at which position; None for a stream, which has no index."""
    return loader.order if isinstance(loader, (TrainData, EvalData)) else None


def whole_rows(dataset: Any, indices: list[int]) -> list[int]:
    """Returns the rows of the dataset that a split's part was cut from."""
    while hasattr(type(dataset), "indices_in_whole"):
        dataset, indices = dataset.dataset, dataset.indices_in_whole(indices)
    return indices


def read_training(config: RunConfig, dataset: Any, collator: Collator, plan: BatchPlan, view: View) -> Reading:
    """Prepares to read training data, which may be a dataset, a stream or a loader that a trainer made."""
    section = config.data
    if isinstance(dataset, (TrainData, StreamData)):
        return _take_over(dataset, config, view, dataset.global_batch_size)
    keeper, listed = Keeper(collator), FailureList(skips=section.on_error == "skip")
    common: dict[str, Any] = {
        "collator": keeper,
        "seed": config.seed,
        "view": view,
        "on_error": listed,
        "global_batch_size": plan.global_batch_size,
        "shuffle": section.shuffle,
    }
    if is_stream(dataset):
        # The number of workers decides how a stream is laid out; they are counted, and not started.
        options = LoaderOptions(section.workers)
        stream = StreamData(dataset, block_size=section.shuffle_buffer, options=options, **common)
        stream.options = LoaderOptions()
        return Reading(stream, keeper, listed, view, plan.global_batch_size)
    data = TrainData(dataset, group_by_length=section.group_by_length, **common)
    return Reading(data, keeper, listed, view, plan.global_batch_size)


def read_evaluation(
    config: RunConfig, name: str, dataset: Any, collator: Collator, plan: BatchPlan, view: View
) -> Reading:
    """Prepares to read an evaluation set: each sample once, in its order."""
    batch_size = config.evaluation.batch_size or plan.micro_batch_size * view.size
    if isinstance(dataset, (EvalData, EvalStream)):
        return _take_over(dataset, config, view, dataset.global_batch_size)
    keeper, listed = Keeper(collator), FailureList(skips=config.data.on_error == "skip")
    kind = EvalStream if is_stream(dataset) else EvalData
    loader = kind(
        dataset,
        name=name,
        collator=keeper,
        global_batch_size=batch_size,
        seed=config.seed,
        view=view,
        on_error=listed,
    )
    return Reading(loader, keeper, listed, view, batch_size)


def _take_over(loader: Loader, config: RunConfig, view: View, batch_size: int) -> Reading:
    """Lets a loader that a trainer made keep its samples, without its workers."""
    keeper, listed = Keeper(loader.collator), FailureList(skips=config.data.on_error == "skip")
    loader.collator, loader.options, loader.on_error = keeper, LoaderOptions(), listed
    return Reading(loader, keeper, listed, loader.view, batch_size)


def _as_they_are(batches: Iterator[Any]) -> Iterator[Any]:
    return batches
