"""Builds loaders from `data` sections: datasets with nested sources and processing, batches, the number of steps."""

from __future__ import annotations

import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainwright.benchmarks.benchmark import ConfiguredBenchmark
from trainwright.config import BatchPlan, Component, ProcessSection, RunConfig
from trainwright.data.fetch import OnError, View, is_stream, reject_loader
from trainwright.data.loader import EvalData, MadeBatches, TrainData
from trainwright.data.process import ProcessedStream, describe_input, fingerprint_function
from trainwright.data.samplers import SamplerOrder
from trainwright.data.stream_loader import EvalStream, EvaluationData, StreamData, TrainingData
from trainwright.data.workers import LoaderOptions
from trainwright.errors import ComponentError, ConfigError, DataError
from trainwright.loop.evaluation import EvaluatedSet
from trainwright.loop.trainer import Trainer
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
        """Returns the dataset of a component; `label` is its setting, for errors."""
        nested = self._build_nested(label, component)
        dataset = self._make(label, component, nested)
        return dataset if nested else self._apply_process(component, dataset)

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
            # create_dataset(path, args) reads attributes.
            arguments.pop("args", None)
            given = component.to_dict().get("args") or {}
            if not isinstance(given, dict):
                raise ConfigError(f"{label}.args: must be a mapping, got {given!r}.", where=component.origin)
            provided["args"] = Namespace(**given)
        if nested:  # `instantiate` passes only those of `provided` that the dataset accepts
            registry.check_arguments(
                target,
                {**arguments, **nested},
                label=label,
                where=component.origin,
                provided=(*provided, "project_dir"),
                origin_of=self._origin_of,
            )
        plain = Component(component.type, **arguments).located_at(component.origin)
        return registry.instantiate(
            "dataset", plain, project_dir=self._project_dir, label=label, origin_of=self._origin_of, **provided
        )

    def _build_nested(self, label: str, component: Component) -> dict[str, Any]:
        """Returns the datasets in `source` and `sources`, and the weights of the sources."""

        def build(name: str, values: Mapping[str, Any]) -> Any:
            arguments = {key: value for key, value in values.items() if key != "weight"}
            return self.build(f"{label}.{name}", Component.from_mapping(arguments).located_at(component.origin))

        nested: dict[str, Any] = {}
        inner = component.arguments.get("source")
        if isinstance(inner, Mapping) and _is_component(inner):
            nested["source"] = build("source", inner)
        several = component.arguments.get("sources")
        if isinstance(several, Mapping) and several and all(_is_component(each) for each in several.values()):
            weights = {name: each["weight"] for name, each in several.items() if "weight" in each}
            if weights and "weights" in component.arguments:
                raise ConfigError(
                    f"{label}.weights: each source has a weight already. Remove one of the two.",
                    where=component.origin,
                )
            if weights and len(weights) < len(several):
                missing = ", ".join(name for name in several if name not in weights)
                raise ConfigError(f"{label}.sources: no weight for {missing}. Set a weight for all, or for none.")
            nested["sources"] = {name: build(f"sources.{name}", each) for name, each in several.items()}
            if weights:
                nested["weights"] = weights
        return nested

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
                f"data.process.{min(taken)} is a setting of data.process and a parameter of {process.type}, which does "
                "not receive it. Rename the parameter.",
                where=process.origin,
            )
        registry.check_arguments(
            function,
            arguments,
            label="data.process",
            where=process.origin,
            provided=tuple(parameters_of(function) or ())[:1],  # the row, under any name
            origin_of=self._origin_of,
        )
        from trainwright.data.process import processed  # needs the package datasets

        if is_stream(dataset):
            if options.num_workers:
                raise ConfigError(
                    f"data.process.num_workers: {type(dataset).__name__} is a stream, whose rows are processed by the "
                    "data workers as they are read. Set data.num_workers instead.",
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


class Loaders:
    """Wraps datasets into loaders, over which the loop iterates."""

    def __init__(self, config: RunConfig, batch: BatchPlan, collator: Any, ranks: Ranks, folder: Path) -> None:
        self._config = config
        self._batch = batch
        self._ranks = ranks
        data = config.data
        self._common: dict[str, Any] = {
            "collator": collator,
            "seed": config.seed,
            "view": View(ranks.mesh.data_rank, ranks.mesh.num_data_ranks),
            "options": LoaderOptions(data.num_workers, data.loader),
            "on_error": OnError(skips=data.on_error == "skip", at_most=data.max_skipped, folder=folder),
        }

    def for_training(
        self, dataset: Any, sampler: Any = None, *, makes_batches: bool = False
    ) -> tuple[TrainingData, int]:
        """Returns the training batches and the number of steps that the run's limits allow.

        `sampler` defines their order. If the trainer `makes_batches` there is no dataset.
        """
        with add_location(self._config):
            data = self._made_batches() if makes_batches else self._training_data(dataset, sampler)
        reject_parts_of_epochs(self._config, data)
        max_steps, data.num_samples = limits(self._config, data)
        return data, max_steps

    def _made_batches(self) -> MadeBatches:
        config = self._config
        reject_without_dataset(config)
        if self._batch.splits_by_size and self._ranks.mesh.size("pipeline") > 1:
            raise ConfigError(
                "trainer.micro_batch_size: a pipeline needs the same number of micro-batches in every step, but "
                "next_train_inputs may return any number of samples. Set gradient_accumulation_steps instead, or "
                "global_batch_size.",
                where=config.origin("trainer.micro_batch_size"),
            )
        return MadeBatches(
            global_batch_size=self._batch.global_batch_size,
            varies=self._batch.varies,
            sum_counts=self._ranks.sum_sample_counts,
            origin_of=config.origin,
            **self._common,
        )

    def _training_data(self, dataset: Any, sampler: Any) -> TrainingData:
        section = self._config.data
        reject_loader(dataset, "data.train")
        if isinstance(dataset, (TrainData, StreamData)):
            for name, is_given in (("sampler", sampler is not None), ("last_batch", section.last_batch is not None)):
                if is_given:
                    raise ConfigError(
                        f"data.{name}: has no effect, because build_train_data returns a {type(dataset).__name__}. "
                        f"Set it there: {name}=….",
                        where=self._config.origin(f"data.{name}"),
                    )
            return dataset
        if sampler is not None:
            reject_sampler(self._config, dataset)
            if section.shuffle:
                raise ConfigError(
                    "data.shuffle: true contradicts the sampler of build_sampler, which defines the order. Remove it.",
                    where=self._config.origin("data.shuffle"),
                )
        self._reject_last_batch(dataset)
        options: dict[str, Any] = {
            "global_batch_size": self._batch.global_batch_size,
            "shuffle": section.shuffles,
            **self._common,
        }
        if section.group_by_length and (is_stream(dataset) or hasattr(type(dataset), "make_order")):
            kind = "a stream" if is_stream(dataset) else "a mixture"
            raise ConfigError(
                f"data.group_by_length: has no effect, because data.train is {kind}. Remove it.",
                where=self._config.origin("data.group_by_length"),
            )
        if is_stream(dataset):
            return StreamData(
                dataset,
                block_size=section.shuffle_buffer,
                sum_counts=self._ranks.sum_sample_counts,
                drops_short=section.last_batch == "drop",
                **options,
            )
        last_batch = section.last_batch or "straddle"
        data = TrainData(
            dataset, group_by_length=section.group_by_length, sampler=sampler, last_batch=last_batch, **options
        )
        if isinstance(data.order, SamplerOrder):
            self._check_sampler(data.order)
        return data

    def _check_sampler(self, order: SamplerOrder) -> None:
        """Rejects a sampler that differs between ranks, and a setting that a batch sampler decides; collective."""
        if order.has_batches and self._config.data.last_batch is not None:
            raise ConfigError(
                "data.last_batch: has no effect, because data.sampler is a batch sampler, which decides it "
                "(drop_last). Remove it.",
                where=self._config.origin("data.last_batch"),
            )
        if len(set(self._ranks.gather(order.digest))) > 1:
            raise ConfigError(
                "data.sampler: its passes differ between ranks, but every rank needs the same order, which the loop "
                "divides among the ranks. Do not read the rank in the sampler.",
                where=self._config.origin("data.sampler"),
            )

    def _reject_last_batch(self, dataset: Any) -> None:
        """Rejects a value of `last_batch` that the dataset does not support."""
        last_batch, problem = self._config.data.last_batch, None
        if is_stream(dataset) and last_batch == "straddle":
            problem = "data.train is a stream, and each of its passes ends with a smaller batch. Use short or drop."
        elif last_batch == "drop" and hasattr(type(dataset), "make_order"):
            problem = "drop cannot be used with a mixture, because it would drop samples of any source. Use short."
        elif last_batch == "short" and getattr(dataset, "same_source_batches", False):
            problem = (
                "short shifts the first samples of batches, but with same_source_batches their positions must be "
                "multiples of trainer.global_batch_size. Remove one of the two."
            )
        if problem is not None:
            raise ConfigError(f"data.last_batch: {problem}", where=self._config.origin("data.last_batch"))

    def for_evaluation(self, name: str, dataset: Any) -> EvaluationData:
        """Returns the batches of an evaluation set."""
        if isinstance(dataset, (EvalData, EvalStream)):
            return dataset
        arguments = {
            "name": name,
            "global_batch_size": self._config.evaluation.batch_size
            or self._batch.micro_batch_size * self._ranks.mesh.num_data_ranks,
            "max_batches": self._config.evaluation.max_batches,
            **self._common,
        }
        with add_location(self._config):
            reject_loader(dataset, f"data.eval.{name}")
            if is_stream(dataset):
                return EvalStream(dataset, sum_counts=self._sum_counts, **arguments)
            return EvalData(dataset, **arguments)

    def _sum_counts(self, num_samples: int, num_alive: int, num_gone: int) -> tuple[int, ...]:
        """Sums the counts of a batch over ranks; samples that ranks share count once, and every rank that stops
        counts."""
        is_loss_rank = self._ranks.mesh.is_loss_rank
        return self._ranks.sum_counts(num_samples * is_loss_rank, num_alive * is_loss_rank, num_gone)


@contextmanager
def add_location(config: RunConfig) -> Iterator[None]:
    """Adds the line of the setting to an error that starts with its name (`data.train: …`)."""
    try:
        yield
    except (DataError, ConfigError) as error:
        where = config.origin(error.problem.partition(":")[0])
        if error.where is not None or where is None:
            raise
        raise type(error)(error.problem, where=where) from error


def reject_without_dataset(config: RunConfig) -> None:
    """Rejects settings that have no meaning if `next_train_inputs` makes the batches."""
    data, trainer, anomalies = config.data, config.trainer, config.anomalies
    without = "there is no training dataset, because next_train_inputs makes the batches"
    unused = {
        "data.split": data.split is not None,
        "data.group_by_length": data.group_by_length,
        "data.sampler": data.sampler is not None,
        "data.last_batch": data.last_batch is not None,
        **{
            f"trainer.{name}": getattr(trainer, name) is not None
            for name in ("max_epochs", "max_samples", "max_tokens")
        },
    }
    for name, is_given in unused.items():
        if is_given:
            advice = "Use max_steps." if name.startswith("trainer.") else "Remove it."
            raise ConfigError(f"{name}: {without}. {advice}", where=config.origin(name))
    for name in ("non_finite", "spike"):
        if getattr(anomalies, name) == "rollback":
            raise ConfigError(
                f"anomalies.{name}: rollback leaves out the samples of the anomaly, but {without}, and would make the "
                "same batch again. Use skip or raise.",
                where=config.origin(f"anomalies.{name}"),
            )


def reject_sampler(config: RunConfig, dataset: Any) -> None:
    """Rejects a sampler for a dataset that has no index, or that defines its own order."""
    problem = None
    if is_stream(dataset):
        problem = f"data.train is a stream ({type(dataset).__name__}), whose samples have no index to draw. Remove it."
    elif hasattr(type(dataset), "make_order"):
        problem = "data.train is a mixture, which defines its own order: use its weights. Remove the sampler."
    if problem is not None:
        raise ConfigError(f"data.sampler: {problem}", where=config.origin("data.sampler"))


def reject_parts_of_epochs(config: RunConfig, data: TrainingData) -> None:
    """Rejects periods in epochs if there are no epochs or their length is unknown."""
    for section in ("evaluation", "checkpoint", "log"):
        every, name = getattr(config, section).every_epochs, f"{section}.every_epochs"
        problem = None
        if every is not None and isinstance(data, MadeBatches):
            problem = "there are no epochs without a training dataset (data.train). Use every_steps."
        elif every is not None and every % 1 and isinstance(data, StreamData):
            problem = (
                f"{every:g}, but data.train is a stream, whose length is unknown. Use a whole number, or every_steps."
            )
        if problem is not None:
            raise ConfigError(f"{name}: {problem}", where=config.origin(name))


def may_make_batches(trainer_class: type[Trainer], config: RunConfig) -> bool:
    """Returns True if the config has no `data.train` and the trainer overrides `next_train_inputs`.

    The trainer then makes the batches, unless it or the task builds a dataset.
    """
    return config.data.train is None and trainer_class.next_train_inputs is not Trainer.next_train_inputs


def limits(config: RunConfig, data: TrainingData, *, steps_done: int = 0) -> tuple[int, int | None]:
    """Resolves max_steps, max_epochs, max_samples and max_tokens: the first limit that is reached ends the run.

    Returns the number of steps, including `steps_done`, and of samples if the last batch may be short. For a stream,
    epochs count passes over it, not samples.
    """
    trainer = config.trainer
    where = config.origin("trainer")
    samples = []
    if isinstance(data, StreamData):
        epochs = trainer.max_epochs or 1
        if epochs != int(epochs):
            raise ConfigError(
                f"trainer.max_epochs: {epochs:g}, but data.train is a stream, whose length is unknown. Use an integer, "
                "or max_samples.",
                where=config.origin("trainer.max_epochs"),
            )
        data.num_passes = int(epochs)
    elif trainer.max_epochs is not None and not isinstance(data, MadeBatches):
        samples.append(data.position_after(trainer.max_epochs))
        if not samples[0]:
            num_samples = data.position_after(1)
            raise ConfigError(
                f"trainer.max_epochs: {trainer.max_epochs:g} epochs of {num_samples} samples are 0 samples. Use more.",
                where=config.origin("trainer.max_epochs"),
            )
    if isinstance(data, MadeBatches) and trainer.max_steps is None:
        raise ConfigError(
            "trainer.max_steps is required, because there is no training dataset (data.train).", where=where
        )
    if trainer.max_samples is not None:
        samples.append(trainer.max_samples)
    if trainer.max_tokens is not None:
        per_sample = getattr(data.dataset, "tokens_per_sample", None)
        if per_sample is None:
            raise ConfigError(
                f"trainer.max_tokens: {type(data.dataset).__name__} has no attribute `tokens_per_sample`. Add it, or "
                "use max_steps, max_samples or max_epochs.",
                where=config.origin("trainer.max_tokens"),
            )
        samples.append(math.ceil(trainer.max_tokens / per_sample))
    if isinstance(data, TrainData):
        left = [data.count_batches(number) for number in samples]
    else:  # after a short last batch the next one is short too: batches begin at multiples
        size, start = data.global_batch_size, data.order_position
        left = [math.ceil(number / size) - start // size if number > start else 0 for number in samples]
    steps = [steps_done + number for number in left]
    if trainer.max_steps is not None:
        steps.append(trainer.max_steps)
    if not steps and isinstance(data, StreamData):
        raise ConfigError(
            "trainer: data.train is a stream, whose length is unknown. Set max_steps or max_samples too, because "
            "schedules need an end. The run ends earlier if the stream ends.",
            where=where,
        )
    if not steps:
        raise ConfigError("trainer: max_steps, max_epochs, max_samples or max_tokens is required.", where=where)
    return min(steps), min(samples) if samples else None


def describe_size(data: TrainingData | EvaluatedSet) -> str:
    """Returns the number of samples as text, if it is known."""
    if isinstance(data, MadeBatches):
        return "batches made by next_train_inputs"
    return f"{len(data):,} samples" if isinstance(data, (TrainData, EvalData, ConfiguredBenchmark)) else "a stream"
