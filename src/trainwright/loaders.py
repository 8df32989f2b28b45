"""From datasets to what the loop iterates over, and how many steps the run's limits allow of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainwright.config import BatchPlan, RunConfig
from trainwright.data.failures import OnError
from trainwright.data.fetch import refuse_loader
from trainwright.data.loader import EvalData, TrainData
from trainwright.data.stream import is_stream
from trainwright.data.stream_loader import EvalStream, EvaluationData, StreamData, TrainingData
from trainwright.data.view import View
from trainwright.data.workers import LoaderOptions
from trainwright.errors import ConfigError, DataError
from trainwright.parallel.collectives import Ranks


class Loaders:
    """Wraps datasets into what the loop iterates over."""

    def __init__(self, config: RunConfig, batch: BatchPlan, collator: Any, ranks: Ranks, folder: Path) -> None:
        self._config = config
        self._batch = batch
        self._agree = ranks.sum_sample_counts
        self._ranks = ranks
        self._num_ranks = ranks.mesh.num_data_ranks
        data = config.data
        self._common: dict[str, Any] = {
            "collator": collator,
            "seed": config.seed,
            "view": View(ranks.mesh.data_rank, ranks.mesh.num_data_ranks),
            "options": LoaderOptions(data.workers, data.loader),
            "on_error": OnError(skips=data.on_error == "skip", at_most=data.max_skipped, folder=folder),
        }

    def for_training(self, dataset: Any) -> tuple[TrainingData, int]:
        """Returns the training batches and the number of steps that the run's limits allow."""
        with _locating(self._config):
            data = self._training_data(dataset)
        max_steps, data.num_samples = limits(self._config, data)
        return data, max_steps

    def _training_data(self, dataset: Any) -> TrainingData:
        section, batch_size = self._config.data, self._batch.global_batch_size
        refuse_loader(dataset, "data.train")
        if isinstance(dataset, (TrainData, StreamData)):
            return dataset
        if is_stream(dataset):
            self._refuse_grouping("is a stream")
            return StreamData(
                dataset,
                global_batch_size=batch_size,
                shuffle=section.shuffle,
                block_size=section.shuffle_buffer,
                agree=self._agree,
                **self._common,
            )
        if hasattr(type(dataset), "make_order"):
            self._refuse_grouping("is a mixture")
        options: dict[str, Any] = {"shuffle": section.shuffle, "group_by_length": section.group_by_length}
        return TrainData(dataset, global_batch_size=batch_size, **options, **self._common)

    def _refuse_grouping(self, why: str) -> None:
        if self._config.data.group_by_length:
            where = self._config.origin("data.group_by_length")
            raise ConfigError(f"data.group_by_length: has no effect, for data.train {why}. Remove it.", where=where)

    def for_evaluation(self, name: str, dataset: Any) -> EvaluationData:
        """Returns an evaluation set's batches."""
        if isinstance(dataset, (EvalData, EvalStream)):
            return dataset
        arguments = {
            "name": name,
            "global_batch_size": self._config.evaluation.batch_size or self._batch.micro_batch_size * self._num_ranks,
            "max_batches": self._config.evaluation.max_batches,
            **self._common,
        }
        with _locating(self._config):
            refuse_loader(dataset, f"data.eval.{name}")
            if is_stream(dataset):
                return EvalStream(dataset, agree=self._agree_or_leave, **arguments)
            return EvalData(dataset, **arguments)

    def _agree_or_leave(self, num_samples: int, num_alive: int, num_gone: int) -> tuple[int, ...]:
        """Sums what ranks say of a batch: samples that several share count once, whoever leaves counts."""
        speaks = self._ranks.mesh.speaks
        return self._ranks.sum_counts(num_samples * speaks, num_alive * speaks, num_gone)


@contextmanager
def _locating(config: RunConfig) -> Iterator[None]:
    """Lets an error that begins with a setting's name (`data.train: …`) name the line of that setting."""
    try:
        yield
    except DataError as error:
        where = config.origin(error.problem.partition(":")[0])
        if error.where is not None or where is None:
            raise
        raise DataError(error.problem, where=where) from error


def limits(config: RunConfig, data: TrainingData, *, steps_done: int = 0) -> tuple[int, int | None]:
    """Resolves max_steps, max_epochs, max_samples and max_tokens: the first to be reached ends the run.

    Returns the number of steps, those done included, and of samples where the last batch may end in the middle.
    A stream's epochs are no number of samples: they are the passes after which it ends.
    """
    trainer = config.trainer
    where = config.origin("trainer")
    samples = []
    if isinstance(data, StreamData):
        data.num_passes = _num_passes(config)
    elif trainer.max_epochs is not None:
        samples.append(round(trainer.max_epochs * len(data)))
        if not samples[0]:
            raise ConfigError(
                f"trainer.max_epochs: {trainer.max_epochs:g} of {len(data)} samples is none. Give more.",
                where=config.origin("trainer.max_epochs"),
            )
    if trainer.max_samples is not None:
        samples.append(trainer.max_samples)
    if trainer.max_tokens is not None:
        per_sample = getattr(data.dataset, "tokens_per_sample", None)
        if per_sample is None:
            raise ConfigError(
                f"trainer.max_tokens: {type(data.dataset).__name__} does not say how many tokens a sample has. "
                "Give it an attribute `tokens_per_sample`, or use max_steps, max_samples or max_epochs.",
                where=config.origin("trainer.max_tokens"),
            )
        samples.append(math.ceil(trainer.max_tokens / per_sample))
    size = data.global_batch_size  # a batch after a ragged end is short too, so that batches begin at its multiples
    left = [math.ceil(number / size) - data.places // size if number > data.places else 0 for number in samples]
    steps = [steps_done + number for number in left]
    if trainer.max_steps is not None:
        steps.append(trainer.max_steps)
    if not steps and isinstance(data, StreamData):
        raise ConfigError(
            "trainer: data.train is a stream, of which nobody knows the length. Give max_steps or max_samples too: "
            "schedules need an end. The run ends earlier if the stream does.",
            where=where,
        )
    if not steps:
        raise ConfigError("trainer: no limit. Give max_steps, max_epochs, max_samples or max_tokens.", where=where)
    return min(steps), min(samples) if samples else None


def _num_passes(config: RunConfig) -> int:
    """How often a stream is read: once, or max_epochs times."""
    epochs = config.trainer.max_epochs or 1
    if epochs != int(epochs):
        raise ConfigError(
            f"trainer.max_epochs: {epochs:g}, but data.train is a stream, of which nobody knows the half. "
            "Use a whole number, or max_samples.",
            where=config.origin("trainer.max_epochs"),
        )
    return int(epochs)


def describe_size(data: TrainingData | EvaluationData) -> str:
    """Says how many samples there are, where that is known."""
    return f"{len(data):,} samples" if isinstance(data, (TrainData, EvalData)) else "a stream"
