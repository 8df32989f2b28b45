"""From `data` sections to loaders: datasets with nested sources and processing, batches, and the number of steps."""

from __future__ import annotations

import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainwright.config import BatchPlan, Component, ProcessSection, RunConfig
from trainwright.data.fetch import OnError, View, is_stream, reject_loader
from trainwright.data.loader import EvalData, TrainData
from trainwright.data.process import ProcessedStream, describe_input, fingerprint_function
from trainwright.data.stream_loader import EvalStream, EvaluationData, StreamData, TrainingData
from trainwright.data.workers import LoaderOptions
from trainwright.errors import ComponentError, ConfigError, DataError
from trainwright.parallel.collectives import Ranks
from trainwright.registry import resolve as registry
from trainwright.user_code.locations import parameters_of


class DatasetBuilder:
    """Builds the datasets of one run, each with its sources."""

    def __init__(
        self,
        *,
        project_dir: Path,
        seed: int,
        process: ProcessSection | None = None,
        origin_of: registry.OriginOf | None = None,
    ) -> None:
        self._project_dir = project_dir
        self._seed = seed
        self._process = process
        self._origin_of = origin_of

    def build(self, label: str, component: Component) -> Any:
        """Returns the dataset that a component names; `label` says where it stands, for errors."""
        nested = self._build_nested(label, component)
        if not nested:
            return self._apply_process(component, self._make(label, component, {}))
        return self._make(label, component, nested)

    def _make(self, label: str, component: Component, nested: Mapping[str, Any]) -> Any:
        arguments = {name: value for name, value in component.arguments.items() if name not in nested}
        target = registry.find(
            "dataset", component.type, project_dir=self._project_dir, where=component.origin, label=label
        )
        provided = dict(nested)
        names = parameters_of(target) or {}
        if "run_seed" in names:
            provided["run_seed"] = self._seed
        if "args" in names and inspect.isfunction(target):
            # create_dataset(path, args) reads them as attributes.
            arguments.pop("args", None)
            given = component.to_dict().get("args") or {}
            if not isinstance(given, dict):
                raise ConfigError(f"{label}.args: must be a mapping, got {given!r}.", where=component.origin)
            provided["args"] = Namespace(**given)
        plain = Component(component.type, **arguments).located_at(component.origin)
        return registry.instantiate(
            "dataset", plain, project_dir=self._project_dir, label=label, origin_of=self._origin_of, **provided
        )

    def _build_nested(self, label: str, component: Component) -> dict[str, Any]:
        """Returns the datasets that stand in `source` and `sources`, and the sources' weights."""
        nested: dict[str, Any] = {}
        inner = component.arguments.get("source")
        if isinstance(inner, Mapping) and _is_component(inner):
            nested["source"] = self.build(f"{label}.source", self._nested(component, inner))
        several = component.arguments.get("sources")
        if isinstance(several, Mapping) and several and all(_is_component(each) for each in several.values()):
            weights = {name: each["weight"] for name, each in several.items() if "weight" in each}
            if weights and "weights" in component.arguments:
                raise ConfigError(
                    f"{label}.weights: the sources have a weight each already. Keep one of the two.",
                    where=component.origin,
                )
            if weights and len(weights) < len(several):
                missing = ", ".join(name for name in several if name not in weights)
                raise ConfigError(f"{label}.sources: no weight for {missing}. Give all a weight, or none.")
            nested["sources"] = {
                name: self.build(f"{label}.sources.{name}", self._nested(component, each, without=("weight",)))
                for name, each in several.items()
            }
            if weights:
                nested["weights"] = weights
        return nested

    def _nested(self, outer: Component, values: Mapping[str, Any], without: tuple[str, ...] = ()) -> Component:
        kept = {name: value for name, value in values.items() if name not in without}
        return Component.from_mapping(kept).located_at(outer.origin)

    def _find_process(self, process: Component) -> Callable[..., Any]:
        try:
            return registry.find("dataset", process.type, project_dir=self._project_dir)
        except ComponentError as error:
            if error.problem.startswith("no dataset "):
                raise ComponentError(
                    f"data.process.type: no function {process.type!r}. Name one by its file, such as clean.tokenize "
                    "for one in datasets/clean.py, or by its import path, my_pkg.module:name.",
                    where=process.origin,
                ) from error
            raise ComponentError(f"data.process.type: {error.problem}", where=process.origin) from error

    def _apply_process(self, component: Component, dataset: Any) -> Any:
        process = self._process
        if process is None:
            return dataset
        function = self._find_process(process)
        arguments, options = process.arguments.to_dict(), process.options
        taken = process.reserved.keys() & set(parameters_of(function) or ())
        if taken:
            raise ConfigError(
                f"data.process.{min(taken)}: is a setting of data.process and a parameter of {process.type}, which "
                "would not get it. Rename the parameter.",
                where=process.origin,
            )
        registry.check_arguments(
            function,
            arguments,
            label="data.process",
            where=process.origin,
            provided=_first_parameter(function),
            origin_of=self._origin_of,
        )
        from trainwright.data.process import processed  # needs the package datasets

        if is_stream(dataset):
            if options.num_workers:
                raise ConfigError(
                    f"data.process.num_workers: {type(dataset).__name__} is a stream, whose rows are processed as they "
                    "are read, by the loader's workers. Set data.num_workers instead.",
                    where=process.origin,
                )
            return ProcessedStream(dataset, function, arguments)
        target = registry.find("dataset", component.type, project_dir=self._project_dir)
        return processed(
            dataset,
            function,
            arguments=arguments,
            input_key=describe_input(
                component.to_dict(),
                dataset,
                target=target,
                project_dir=self._project_dir,
                run_seed=self._seed,
                version=options.version,
            ),
            function_key=fingerprint_function(function, version=options.version, where=process.origin),
            version=options.version,
            num_workers=options.num_workers,
        )


def _is_component(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str)


def _first_parameter(function: Callable[..., Any]) -> tuple[str, ...]:
    """The row's parameter, whatever its name: it is no argument of the run file."""
    return tuple(parameters_of(function) or ())[:1]


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
            "options": LoaderOptions(data.num_workers, data.loader),
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
        reject_loader(dataset, "data.train")
        if isinstance(dataset, (TrainData, StreamData)):
            return dataset
        if is_stream(dataset):
            self._reject_grouping("is a stream")
            return StreamData(
                dataset,
                global_batch_size=batch_size,
                shuffle=section.shuffle,
                block_size=section.shuffle_buffer,
                sum_counts=self._agree,
                **self._common,
            )
        if hasattr(type(dataset), "make_order"):
            self._reject_grouping("is a mixture")
        options: dict[str, Any] = {"shuffle": section.shuffle, "group_by_length": section.group_by_length}
        return TrainData(dataset, global_batch_size=batch_size, **options, **self._common)

    def _reject_grouping(self, why: str) -> None:
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
            reject_loader(dataset, f"data.eval.{name}")
            if is_stream(dataset):
                return EvalStream(dataset, sum_counts=self._agree_or_leave, **arguments)
            return EvalData(dataset, **arguments)

    def _agree_or_leave(self, num_samples: int, num_alive: int, num_gone: int) -> tuple[int, ...]:
        """Sums what ranks say of a batch: samples that several share count once, whoever leaves counts."""
        is_loss_rank = self._ranks.mesh.is_loss_rank
        return self._ranks.sum_counts(num_samples * is_loss_rank, num_alive * is_loss_rank, num_gone)


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
    left = [
        math.ceil(number / size) - data.order_position // size if number > data.order_position else 0
        for number in samples
    ]
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
