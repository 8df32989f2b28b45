"""Looks at the data of a run: one set in full, the others briefly.

    look_at(config) = build_sets → read_training → samples, first batch, lengths, mixture, remarks

An error of the collator or of another set is kept until all else is known: whoever looks at data often does so
because of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from trainwright.config import BatchPlan, RunConfig, known_data_ranks, micro_batch_alone, resolve_batch
from trainwright.data.fetch import Collator, count_samples
from trainwright.data.loader import TrainData
from trainwright.data.stream import is_stream
from trainwright.data.stream_loader import StreamData
from trainwright.data.tokenizer import tokenizer_of
from trainwright.data.view import View
from trainwright.errors import ConfigError
from trainwright.loaders import limits
from trainwright.looking import remarks
from trainwright.looking.batch import look_at_batch, num_tokens
from trainwright.looking.facts import Batch, DataSet, Lengths, Look, Plan, Sample, Split, Tokens
from trainwright.looking.lengths import length_of, summarise, unit_of
from trainwright.looking.mixture import look_at_mixture, source_row
from trainwright.looking.reading import Kept, Loader, Reading, order_of, read_evaluation, read_training, whole_rows
from trainwright.looking.sets import (
    TRAIN,
    RunSet,
    build_sets,
    choose,
    decoder_of,
    nest_of,
)
from trainwright.looking.values import describe_sample


def look_at(config: RunConfig, *, run: str = "", show: int = 3, samples: int = 1000, name: str | None = None) -> Look:
    """Looks at the training set and briefly at the others; with `name` at that set alone.

    `show` samples are described, and at most `samples` are read for their lengths.
    """
    sets, collator = build_sets(config)
    chosen = choose(sets, name or TRAIN)
    full = _Full(config, chosen, collator, show=show, samples=samples)
    found = [full.look()]
    failure = full.failure
    for each in sets.values() if name is None else ():
        if each is not chosen:
            brief, error = _look_briefly(each)
            found.append(brief)
            failure = failure or error
    return Look(run, tuple(found), failure)


def _look_briefly(one: RunSet) -> tuple[DataSet, Exception | None]:
    nest = nest_of(one.dataset, one.component)
    try:
        size = _size_of(one)
        tokens = _declared_tokens(one.dataset, size)
        return DataSet(one.name, one.label, nest, size, _split_of(one.dataset), _fill_of(one.dataset), tokens), None
    except Exception as error:
        return DataSet(one.name, one.label, nest, None, error=f"{type(error).__name__}: {error}"), error


class _Full:
    """One set that is looked at in full."""

    def __init__(self, config: RunConfig, one: RunSet, collator: Collator, *, show: int, samples: int) -> None:
        self.failure: Exception | None = None
        self._config = config
        self._set = one
        self._collator = collator
        self._show, self._most = show, samples
        self._batch_plan = _batch_plan(config, one.name)
        self._view = View(0, known_data_ranks(config))
        self._decode = decoder_of(one.dataset, collator)
        self._shown: list[Sample] = []
        self._counted: list[int] = []
        self._unit: str | None = None
        self._example: Any = None
        self._token_range = remarks.TokenRange()

    def look(self) -> DataSet:
        """Reads what is needed, and describes it."""
        one, dataset = self._set, self._set.dataset
        size = _size_of(one)
        reading = self._open()
        plan = self._plan(reading.loader)
        declared = _declared_tokens(dataset, size)
        self._read(reading, size, wants_lengths=declared is None)
        kept = reading.first or Kept([])
        self.failure = kept.error
        batch = self._look_at_batch(kept)
        lengths = self._lengths(dataset, size)
        mixture = look_at_mixture(dataset, order_of(reading.loader), None if plan is None else plan.samples)
        return DataSet(
            name=one.name,
            label=one.label,
            nest=nest_of(dataset, one.component),
            num_samples=size,
            split=_split_of(dataset),
            fill=_fill_of(dataset),
            tokens=declared or self._estimated_tokens(size, lengths, kept),
            plan=plan,
            samples=tuple(self._shown),
            batch=batch,
            lengths=lengths,
            mixture=mixture,
            remarks=tuple(self._remarks(reading, kept, batch)),
            error=None if kept.error is None else f"{type(kept.error).__name__}: {kept.error}",
        )

    def _open(self) -> Reading:
        one = self._set
        if one.name == TRAIN:
            return read_training(self._config, one.data, self._collator, self._batch_plan, self._view)
        return read_evaluation(self._config, one.name, one.data, self._collator, self._batch_plan, self._view)

    def _plan(self, loader: Loader) -> Plan | None:
        if not isinstance(loader, (TrainData, StreamData)):
            return None
        try:
            steps, most = limits(self._config, loader)
        except ConfigError:  # a run without a limit, which training refuses; its data can be looked at all the same
            return None
        finally:
            if isinstance(loader, StreamData):
                loader.num_passes = 1
        samples = steps * loader.global_batch_size
        samples = samples if most is None else min(samples, most)
        return Plan(steps, samples, samples / len(loader) if isinstance(loader, TrainData) else None)

    def _read(self, reading: Reading, size: int | None, *, wants_lengths: bool) -> None:
        """Reads as many samples as there is something to learn from: those shown, and those counted."""
        limit = self._most if size is None else min(self._most, size)
        show = self._show if size is None else min(self._show, size)

        def wanted() -> int:
            return max(show, limit) if wants_lengths and self._unit is not None else max(show, 1)

        for number, (position, index, sample) in enumerate(reading.samples(wanted)):
            if number == 0:
                self._example, self._unit = sample, unit_of(sample)
            if number < show:
                self._shown.append(self._describe(position, index, sample))
            if number < limit:
                length = None if self._unit is None else length_of(sample, self._unit)
                self._counted += [] if length is None else [length]
                self._token_range.note(sample, f"The sample at position {position:,}")

    def _describe(self, position: int, index: int | None, sample: Any) -> Sample:
        fields = describe_sample(sample, self._decode)
        if index is None:
            return Sample(position, None, None, fields)
        [row] = whole_rows(self._set.dataset, [index])
        source, row = source_row(self._set.dataset, row)
        return Sample(position, row, source, fields)

    def _look_at_batch(self, kept: Kept) -> Batch | None:
        if kept.error is not None or not kept.samples:
            return None
        self._token_range.note(kept.batch, "The first batch")
        return look_at_batch(
            kept.batch,
            kept.samples,
            rank=self._view.rank,
            num_ranks=self._view.size,
            micro_batch_size=self._batch_plan.micro_batch_size if self._set.name == TRAIN else None,
            decode=self._decode,
        )

    def _lengths(self, dataset: Any, size: int | None) -> Lengths | None:
        known = _known_lengths(dataset, size)
        if known is not None:
            return summarise(known, "tokens", is_whole=True)
        equal = _equal_length(dataset)
        if equal is not None:
            return Lengths("tokens", size, True, equal, equal, equal, equal, ())
        if self._unit is None or not self._counted:
            return None
        return summarise(self._counted, self._unit, is_whole=len(self._counted) == size)

    def _estimated_tokens(self, size: int | None, lengths: Lengths | None, kept: Kept) -> Tokens | None:
        is_whole = False
        if lengths is not None and lengths.unit.startswith("tokens"):
            mean, is_whole = float(np.mean(self._counted)), lengths.is_whole
        else:
            in_batch = None if kept.error is not None or not kept.samples else num_tokens(kept.batch)
            if in_batch is None:
                return None
            mean = in_batch / len(kept.samples)
        return Tokens(None if size is None else round(mean * size), mean, is_estimate=not is_whole)

    def _remarks(self, reading: Reading, kept: Kept, batch: Batch | None) -> Iterator[str]:
        tokenizer = tokenizer_of(self._set.dataset) or tokenizer_of(self._collator)
        yield from remarks.remarks_on_tokens(self._config, self._token_range, tokenizer)
        if batch is not None:
            yield from remarks.remarks_on_batch(batch, self._example, kept.batch)
        yield from remarks.remarks_on_samples(self._shown)
        yield from remarks.remarks_on_failures(reading.listed.failures)


def _batch_plan(config: RunConfig, name: str) -> BatchPlan:
    if name == TRAIN:
        return resolve_batch(config, known_data_ranks(config))
    # As an evaluation alone: it needs no batch arithmetic.
    micro = micro_batch_alone(config)
    return BatchPlan(micro, micro, 1)


def _size_of(one: RunSet) -> int | None:
    return None if is_stream(one.dataset) else count_samples(one.dataset, one.label)


def _split_of(dataset: Any) -> Split | None:
    return Split(len(dataset), len(dataset.dataset)) if hasattr(type(dataset), "indices_in_whole") else None


def _fill_of(dataset: Any) -> float | None:
    fill = getattr(dataset, "fill", None)
    return float(fill) if isinstance(fill, (int, float)) else None


def _declared_tokens(dataset: Any, size: int | None) -> Tokens | None:
    """Returns what a dataset says of its tokens itself."""
    per_sample = _equal_length(dataset)
    if per_sample is not None:
        return Tokens(None if size is None else per_sample * size, float(per_sample), is_estimate=False)
    known = _known_lengths(dataset, size)
    if known is None:
        return None
    total = int(np.sum(known))
    return Tokens(total, total / len(known), is_estimate=False)


def _equal_length(dataset: Any) -> int | None:
    """Returns the tokens of each sample where a dataset says that all have as many."""
    per_sample = getattr(dataset, "tokens_per_sample", None)
    return per_sample if isinstance(per_sample, int) else None


def _known_lengths(dataset: Any, size: int | None) -> Any:
    """Returns the tokens of every sample where a dataset knows them; a split's part offers those of the whole."""
    known = getattr(dataset, "lengths", None)
    if known is None or callable(known) or not size or len(known) != size:
        return None
    lengths = np.asarray(known)
    return lengths if lengths.dtype.kind in "iu" and lengths.ndim == 1 else None
