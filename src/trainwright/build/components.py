"""Builds each object of a run from its section of the config, for the `build_*` methods of a Trainer."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.utils.data import DistributedSampler

from trainwright.benchmarks.benchmark import Benchmark, ConfiguredBenchmark
from trainwright.build.data import DatasetBuilder, add_location, may_make_batches, reject_sampler
from trainwright.checkpoint.base_weights import hash_weights, weights_of
from trainwright.checkpoint.run_folder import run_folder
from trainwright.config import Component, DataSection, ModelSection, RunConfig, resolve_batch
from trainwright.config.builtin import IN_CODE
from trainwright.config.problems import raise_all, suggest
from trainwright.config.schema import check_options
from trainwright.config.sections import benchmark_name
from trainwright.data.collators.fields import NamedFields, reject_own_generator
from trainwright.data.fetch import is_stream
from trainwright.data.samplers import reject_distributed
from trainwright.data.split import sizes_by_ratio, split
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.hooks.compilation import WatchCompilation
from trainwright.hooks.preemption import ObeyPreemption
from trainwright.hooks.throughput import TimeSteps
from trainwright.hooks.watchdog import Watchdog
from trainwright.loop.hook import Hook
from trainwright.loop.metrics import ConfiguredMetric, never_distributed, reject_no_metric, reject_rank_metric
from trainwright.loop.outputs import ConfiguredLoss
from trainwright.loop.task import Task, overrides
from trainwright.loop.trainer import Trainer
from trainwright.models.fp8 import Fp8Layers
from trainwright.models.from_config import (
    FreezeRule,
    build_model_section,
    build_without_memory,
    is_as_shipped,
    read_freeze,
)
from trainwright.models.pretrained_facts import PretrainedFacts
from trainwright.optim.param_groups import (
    check_settings,
    classify_parameters,
    describe_unowned,
    drop_other_stages,
    first_idle_stage,
    make_optimizer,
    parameters_of_all_stages,
    reject_other_than_matrices,
    whole_of,
)
from trainwright.optim.torch_schedules import TorchSchedule, accepts_optimizer, missing_lengths
from trainwright.optim.trainable import OptimizerRecipe
from trainwright.parallel.collectives import Ranks
from trainwright.registry import resolve as registry
from trainwright.registry.trust import reject_untrusted
from trainwright.trainers.classification import ClassificationTrainer
from trainwright.user_code.constructors import check_constructor
from trainwright.user_code.locations import is_user_code, location_of, parameters_of
from trainwright.user_code.methods import reject_half_state, reject_task_methods, reject_wrong_methods
from trainwright.user_code.signatures import first_argument
from trainwright.writers.writer import Writer

logger = logging.getLogger(__name__)


MIN_REFERENCED_SHARE = 0.1
"""The minimum share of a model's bytes for frozen pretrained weights to be stored by reference."""


class Build:
    """Builds each object as described by the config (`Builder` in loop/trainer.py), and records the used sections."""

    def __init__(
        self,
        config: RunConfig,
        *,
        ranks: Ranks | None = None,
        folder: Path | None = None,
        kept: PretrainedFacts | None = None,
        referenced: Mapping[str, str] = MappingProxyType({}),
        sections: Collection[str] = (),
    ) -> None:
        """`kept` are the pretrained facts of an earlier start, if the weights come from a checkpoint.

        `referenced` are the weights that its checkpoints store by reference, each with its source; in this case the
        folder is read again. `sections` are those that will be built; default: all. An untrusted config that names code
        in them raises.
        """
        reject_untrusted(config, sections=sections)
        self.config = config
        self.project_dir = config.project_dir
        self.ranks = ranks or Ranks()
        self._folder = folder or run_folder(config)
        self._kept = kept
        self._referenced = referenced
        self._loaded: dict[int, str] = {}
        """The hashes of weights of the pretrained folder by the id of the parameter."""
        self.base_hashes: dict[str, str] = {}
        """The hashes of the built model's weights that checkpoints may store by reference."""
        self._reader: str | None = None
        self.frozen_digests: dict[str, str] = {}
        """A digest of the weights of each frozen model, by name."""
        self.kept_of: Callable[[ModelSection], PretrainedFacts | None] = lambda section: None
        """The facts of a pretrained folder from which a frozen model is built without weights, for an estimate."""
        self._sections: dict[int, Mapping[str, Any]] = {}
        """The model sections of further models, by the id of the model."""
        self.pretrained_facts: PretrainedFacts | None = None
        self.fp8_layers: Fp8Layers | None = None
        """Which layers of the built model train in fp8; None without runtime.precision fp8."""
        self.first_has_weights = False
        """True if only the first rank has weights; on the other ranks, the model is on the meta device."""
        self._trainer_class: type[Trainer] | None = None
        self._task: Task | None = None
        self._data_task: Task | None = None
        """The task if it builds the datasets."""
        self.recipes: dict[str, OptimizerRecipe] = {}
        """Records of how the optimizers of the config were built, by name."""
        self.used: set[str] = set()
        """The sections from which an object was built."""
        self._splits: dict[str, Any] | None = None
        self._datasets = DatasetBuilder(
            project_dir=self.project_dir, seed=config.seed, process=config.data.process, origin_of=config.origin
        )
        registry.import_modules(config.imports, project_dir=self.project_dir, where=config.origin("imports"))
        registry.reject_ambiguous(config.groups, project_dir=self.project_dir)

    # For the build_* methods of a Trainer.

    def task(self) -> Task:
        """The `task` section, or the default task."""
        self.used.add("task")
        section = self.config.task
        if section is None:
            return Task()
        if section.type.startswith(IN_CODE):
            name = section.type.partition(":")[2]
            short = name.rpartition(".")[2]
            raise ConfigError(
                f"task: this run was trained with a task given in code ({name}), whose arguments are not in the "
                f"config. Pass it again, run_experiment(config, task={short}(…)), or name it in the config: "
                f"task: {{type: file.py:{short}}}.",
                where=self.config.origin("task"),
            )
        task: Task = self._make("task", "task", section, base=Task)
        return task

    def model(self) -> torch.nn.Module:
        """The task's model if it builds one, otherwise the `model` section.

        If the model is sharded and no user code reads its weights, only the first rank creates them, because a machine
        may not have memory for one copy of a large model per rank.
        """
        if self._task is not None and overrides(self._task, "build_model", Task):
            return self._task.build_model()
        self.used.add("model")
        section = self.config.model
        if section is None:
            where = self.config.origin("model")
            problem = "model is required, for example {type: llama, …} or {type: models/net.py:Net}."
            if where is not None and where.file.endswith(".py"):
                problem += " A Python file defines it in `config`, or in a variable `model`."
            raise ConfigError(problem, where=where)
        project_dir, origin = Path(self.project_dir), self.config.origin
        if self.ranks.mesh.is_split and section.reserved.get("quantize") is not None:
            raise ConfigError(
                "model.quantize supports only runtime.mesh.replicate, because codes of 4 and 8 bits are not sharded. "
                "Remove the other axes, or remove quantize.",
                where=origin("model.quantize"),
            )
        is_split = self.ranks.size > 1 and self.ranks.mesh.is_split
        self.first_has_weights = is_split and self._reader is None and is_as_shipped(section, project_dir=project_dir)
        if self.first_has_weights:
            return self._model_of_first(section)
        model, self.pretrained_facts = build_model_section(
            section, project_dir=project_dir, origin=origin, kept=self._kept, reader=self._reader or self._base_reader
        )
        self._hash_loaded(model, self.pretrained_facts)
        return model

    def first_model(self) -> torch.nn.Module:
        """Another copy of the model, with its weights before the first step.

        The caller seeds the generators as for the model. Pretrained weights are read again, also in a run that
        resumes.
        """
        assert self._trainer_class is not None
        again = copy.copy(self)
        again._kept = None if self.config.model is None else self.kept_of(self.config.model)
        return self._trainer_class.build_model(again)

    def model_of(self, label: str, section: Mapping[str, Any]) -> torch.nn.Module:
        """The model of another model section; `label` is the setting, such as `trainer.teacher`."""
        own = self.config.model
        if "type" not in section and own is None:
            where = self.config.origin(label)
            raise ConfigError(f"{label}.type is required, because there is no model section. Add it.", where=where)
        named = ModelSection.from_mapping(section if own is None else {"type": own.type, **section})
        named = cast(ModelSection, named.located_at(self.config.origin(label)))
        try:
            model, _ = build_model_section(
                named,
                project_dir=Path(self.project_dir),
                origin=lambda setting: self.config.origin(f"{label}.{setting.partition('.')[2]}"),
                kept=self.kept_of(named),
            )
        except TrainwrightError as error:
            problem = error.problem.replace("model", label, 1) if error.problem.startswith("model") else error.problem
            raise type(error)(problem, where=error.where) from error
        self._sections[id(model)] = named
        return model

    def part(self, kind: str, label: str, section: Mapping[str, Any], *, called_with: Sequence[str] = ()) -> Any:
        """The object of another component; `label` is the setting, such as `trainer.rewards.0`.

        A function that has one of the parameters `called_with` is itself the object and is not called.
        """
        component = Component.from_mapping(section).located_at(self.config.origin(label))
        where, project_dir = component.origin, self.project_dir
        target = registry.find(kind, component.type, project_dir=project_dir, where=where, label=label)
        if not is_called_later(target, called_with):
            try:
                return self._make(kind, label, component)
            except ConfigError as error:
                if error.where is not None:
                    raise
                raise type(error)(f"{label}: {error.problem}", where=where) from error
        arguments, names = component.arguments.to_dict(), tuple(parameters_of(target) or ())
        registry.check_arguments(
            target, arguments, label=label, where=where, provided=names, origin_of=self.config.origin
        )
        return partial(target, **arguments)

    def config_of(self, model: torch.nn.Module) -> RunConfig:
        """A config with the model section of a model of `model_of`; the run's config for any other model."""
        section = self._sections.get(id(model))
        return self.config if section is None else self.config.derive({"model": section})

    def optimizers(self, model: torch.nn.Module) -> dict[str, torch.optim.Optimizer]:
        """The `trainer.optimizer` section over all parameters, or each of `trainer.optimizers` over its own."""
        self.used |= {"trainer.optimizer", "trainer.optimizers"}
        trainer = self.config.trainer
        trainable = self._trainable(model)
        self.recipes = {}
        if not trainer.optimizers:
            if trainer.optimizer is None:
                raise ConfigError(
                    "trainer.optimizer is required, for example {type: adamw, lr: 1e-3}.",
                    where=self.config.origin("trainer"),
                )
            return {"main": self._recorded("main", "trainer.optimizer", trainer.optimizer, ("*",), trainable, model)}
        shares = _share_out(trainable, {name: entry.match for name, entry in trainer.optimizers.items()}, self.config)
        return {
            name: self._recorded(
                name, f"trainer.optimizers.{name}.optimizer", entry.optimizer, entry.match, shares[name], model
            )
            for name, entry in trainer.optimizers.items()
        }

    def freeze_rules(self) -> list[FreezeRule]:
        """The entries of `model.freeze` if any of them ends during the run; empty otherwise."""
        given = {} if self.config.model is None else self.config.model.reserved
        rules = read_freeze(given["freeze"]) if "freeze" in given else []
        return rules if any(any(rule[1:]) for rule in rules) else []

    def train_data(self) -> Any:
        """The task's training dataset if it builds one, otherwise `data.train` after `data.split`.

        None if there is none and the trainer overrides `next_train_inputs`, which then makes the batches.
        """
        if self._data_task is not None:
            return self._data_task.build_dataset("train")
        self.used.add("data.train")
        if self._trainer_class is not None and may_make_batches(self._trainer_class, self.config):
            return None
        if self.config.data.cut_off:
            return self._split_train_data()["train"]
        return self._dataset("data.train", self.config.data.train)

    def sampler(self, dataset: Any) -> Any:
        """The `data.sampler` section, a sampler of the dataset; None without one."""
        self.used.add("data.sampler")
        section = self.config.data.sampler
        if section is None:
            return None
        reject_sampler(self.config, dataset)
        batch_size = resolve_batch(self.config, self.ranks.mesh.num_data_ranks).global_batch_size
        with add_location(self.config):
            return self._sampler("data.sampler", section, dataset, batch_size)

    def _sampler(self, label: str, section: Component, dataset: Any, batch_size: int) -> Any:
        """Builds a sampler with those in its arguments; its constructor receives the dataset if it has a parameter."""
        arguments = dict(section.arguments)
        for name, value in section.arguments.items():
            value = {"type": value} if name == "sampler" and isinstance(value, str) else value
            if isinstance(value, Mapping) and isinstance(value.get("type"), str):
                inner = Component.from_mapping(value).located_at(section.origin)
                arguments[name] = self._sampler(f"{label}.{name}", inner, dataset, batch_size)
        target = registry.find("sampler", section.type, project_dir=self.project_dir, where=section.origin, label=label)
        if isinstance(target, type) and issubclass(target, DistributedSampler):
            reject_distributed(target)
        names = parameters_of(target) or {}
        offered = {"dataset": dataset, "data_source": dataset, "batch_size": batch_size}
        where, origin_of = section.origin, self.config.origin
        registry.check_arguments(target, arguments, label=label, where=where, provided=offered, origin_of=origin_of)
        provided = {name: value for name, value in offered.items() if name in names and name not in arguments}
        built = {name: value for name, value in arguments.items() if value is not section.arguments.get(name)}
        plain = {name: value for name, value in arguments.items() if name not in built}
        bare = Component(section.type, **plain).located_at(section.origin)
        return self._make("sampler", label, bare, **provided, **built)

    def eval_data(self) -> dict[str, Any]:
        """The evaluation datasets by name: the task's, those of `data.eval`, or `valid` of `data.split`."""
        if self._data_task is not None:
            valid = self._data_task.build_dataset("valid")
            return {} if valid is None else {"valid": valid}
        self.used.add("data.eval")
        section = self.config.data.eval
        if "test" in section and self.config.data.test is not None:
            where = self.config.origin("data.eval.test")
            raise ConfigError("data.eval.test and data.test would both be named test. Rename the former.", where=where)
        if section:
            if "valid" in self.config.data.cut_off:
                logger.warning("data.split: valid is not used, because there is data.eval. Remove one of the two.")
            return {name: self._dataset(f"data.eval.{name}", component) for name, component in section.items()}
        return {name: split for name, split in self._split_train_data().items() if name == "valid"}

    def test_data(self) -> Any:
        """The dataset that is evaluated once, at the end, or None."""
        if self._data_task is not None:
            return self._data_task.build_dataset("test")
        self.used.add("data.test")
        if self.config.data.test is not None:
            return self._dataset("data.test", self.config.data.test)
        return self._split_train_data().get("test")

    def collator(self) -> Callable[[list[Any]], Any]:
        """The `data.collator` section: an object, or a plain function of the samples."""
        self.used.add("data.collator")
        collator: Callable[[list[Any]], Any] = self._make(
            "collator", "data.collator", self.config.data.collator, num_inputs=1
        )
        return collator

    def hooks(self) -> list[Hook]:
        """The default hooks, then those of the `hooks` section."""
        self.used.add("hooks")
        own = [self._make("hook", f"hooks.{number}", each) for number, each in enumerate(self.config.hooks)]
        return [
            TimeSteps(),
            ObeyPreemption(self.config.preemption),
            Watchdog(self.config.watchdog),
            *([] if self.config.runtime.mode == "eager" else [WatchCompilation()]),
            *own,
        ]

    def writers(self) -> list[Writer]:
        """The `writers` section, on the first rank."""
        self.used.add("writers")
        if not self.ranks.is_first:
            return []
        return [
            self._make("writer", f"writers.{number}", each, folder=self._folder)
            for number, each in enumerate(self.config.writers)
        ]

    def loss(self, device: torch.device) -> ConfiguredLoss | None:
        """The `trainer.loss` section, on the device: a function of the outputs and the labels."""
        self.used.add("trainer.loss")
        section, label = self.config.trainer.loss, "trainer.loss"
        if section is None:
            return None
        # A list in YAML; torch's losses accept tensors only.
        weights = {
            name: torch.tensor(section[name], dtype=torch.float32)
            for name in ("weight", "pos_weight")
            if isinstance(section.get(name), tuple)
        }
        plain = Component(section.type, **{key: each for key, each in section.arguments.items() if key not in weights})
        loss = self._make("loss", label, plain.located_at(section.origin), num_inputs=2, **weights)
        reject_loss(loss, label, self.config.origin)
        if isinstance(loss, torch.nn.Module):
            loss = loss.to(device)
        return ConfiguredLoss(loss, section.origin)

    def name_fields(
        self, collator: Callable[[list[Any]], Any], trainer_class: type[Trainer], model: torch.nn.Module | None
    ) -> Callable[[list[Any]], Any]:
        """Returns the collator, which receives tuple samples with the names of `data.fields`.

        Without the setting a classification trainer reads a pair as the model's first parameter and the label.
        """
        config = self.config
        reject_own_generator(collator, where=config.origin("data.collator.seed"))
        if config.data.fields is not None:
            return NamedFields(collator, config.data.fields, where=config.origin("data.fields"))
        if model is None or not issubclass(trainer_class, ClassificationTrainer):
            return collator
        if trainer_class.train_step is not Trainer.train_step:
            return collator  # it may read pairs itself
        own = trainer_class.forward if trainer_class.forward is not Trainer.forward else type(model).forward
        first = first_argument(own) or first_argument(type(model).forward)
        return collator if first is None else NamedFields(collator, (first, "labels"), has_default_names=True)

    def component(self, section: str, model: torch.nn.Module | None = None) -> Any:
        """The object of one section by its dotted name; raises if the config has no such component."""
        builders = self._builders(model)
        if section not in builders:
            advice = " A trainer needs all sections: use build_trainer(config)." if section == "trainer" else ""
            raise ConfigError(
                f"build_component: the config has no component {section!r}.{advice} {suggest(section, builders)}",
                where=self.config.origin(section),
            )
        is_optimizer = section.startswith("trainer.optimizer") and not section.endswith(".schedule")
        if is_optimizer and model is None:
            raise ConfigError(
                f"build_component: {section} needs the model whose parameters it updates. Pass it as model=…, for "
                'example model=build_component(config, "model").',
                where=self.config.origin(section),
            )
        if model is not None and not is_optimizer:
            raise ConfigError(f"build_component: model has no effect on {section}. Remove it.")
        return builders[section]()

    def _builders(self, model: torch.nn.Module | None) -> dict[str, Callable[[], Any]]:
        """Returns what builds each component of the config, by its dotted name."""
        config, builders = self.config, dict[str, Callable[[], Any]]()
        data, trainer = config.data, config.trainer
        if config.task is not None:
            builders["task"] = self.task
        if config.model is not None:
            builders["model"] = self.model
        if data.train is not None:
            builders["data.train"] = self.train_data
        if data.sampler is not None:
            builders["data.sampler"] = lambda: self.sampler(self.train_data())
        sets = [f"data.eval.{name}" for name in data.eval or data.cut_off if name != "test"]
        builders |= {label: partial(self._eval_set, label.rpartition(".")[2]) for label in sets}
        if len(sets) == 1:
            builders["data.eval"] = builders[sets[0]]
        if data.test is not None or "test" in data.cut_off:
            builders["data.test"] = self.test_data
        builders["data.collator"] = self.collator
        names = {"trainer.optimizer": "main"} if trainer.optimizer is not None else {}
        names |= {f"trainer.optimizers.{name}": name for name in trainer.optimizers}
        for label, name in names.items():
            builders[label] = lambda name=name: self.optimizers(cast(torch.nn.Module, model))[name]  # type: ignore[misc]
        if trainer.loss is not None:
            builders["trainer.loss"] = lambda: cast(ConfiguredLoss, self.loss(torch.device("cpu"))).function
        if trainer.schedule is not None:
            builders["trainer.schedule"] = lambda: self._schedule("trainer.schedule", trainer.schedule, model)
        for name, entry in trainer.optimizers.items():
            if entry.schedule is not None:
                label = f"trainer.optimizers.{name}.schedule"
                builders[label] = partial(self._schedule, label, entry.schedule, model)
        for name in config.evaluation.metrics:
            builders[f"evaluation.metrics.{name}"] = partial(self._metric, name)
        for number in range(len(config.evaluation.benchmarks)):
            builders[f"evaluation.benchmarks.{number}"] = lambda number=number: self._benchmark(number, None).benchmark  # type: ignore[misc]
        for number, each in enumerate(config.hooks):
            builders[f"hooks.{number}"] = partial(self._make, "hook", f"hooks.{number}", each)
        for number, each in enumerate(config.writers):
            label = f"writers.{number}"
            builders[label] = partial(self._make, "writer", label, each, folder=self._folder)
        return builders

    def _eval_set(self, name: str) -> Any:
        if name in self.config.data.eval:
            return self._dataset(f"data.eval.{name}", self.config.data.eval[name])
        return self._split_train_data()[name]

    def _metric(self, name: str) -> Any:
        found = self.metrics(Task(), torch.device("cpu"))
        return next(each.metric for each in found if each.name == name)

    # For build_trainer alone.

    def trainer_class(self) -> type[Trainer]:
        """The class that `trainer.type` names."""
        where, name = self.config.origin("trainer.type"), self.config.trainer.type
        if name.startswith(IN_CODE):
            name = name.partition(":")[2]
            raise ConfigError(
                f"trainer: this run was trained with a class given in code ({name}), which a later process cannot "
                "import: it is defined inside a function, in a notebook, or in a program without "
                f'`if __name__ == "__main__":`. Pass it again, run_experiment(config, '
                f"trainer={name.rpartition('.')[2]}), or move it to the top level of its own file.",
                where=where,
            )
        found = registry.find("trainer", name, project_dir=self.project_dir, where=where, label="trainer")
        if not (isinstance(found, type) and issubclass(found, Trainer)):
            raise ConfigError(f"trainer.type: {name} is not a subclass of Trainer.", where=where)
        return found

    def options(self) -> Any:
        """The options of a built-in trainer, or of a subclass, from the `trainer` section; None if it has none."""
        kind = None if self._trainer_class is None else self._trainer_class.options_section
        if kind is None:
            return None
        given = self.config.trainer.options
        raise_all(check_options(kind, given), lambda path: self.config.origin(".".join(map(str, path))))
        return kind.model_validate({name: value for name, value in given.items() if name in kind.model_fields})

    def take_trainer(self, trainer_class: type[Trainer]) -> None:
        """Sets the class that calls these methods, because a custom `build_model` may read the weights."""
        reject_wrong_methods(trainer_class, Trainer)
        reject_half_state(trainer_class, Trainer)
        self._trainer_class = trainer_class
        check_constructor(trainer_class)
        if is_user_code(trainer_class.build_model):
            self._reader = f"{trainer_class.__name__}.build_model"

    def take_task(self, task: Task) -> None:
        """Sets the task whose `build_*` methods replace sections."""
        reject_half_state(type(task), Task)
        reject_task_methods(type(task), Task)
        self._task = task
        self._data_task = task if overrides(task, "build_dataset", Task) else None

    def schedules(self, optimizers: Mapping[str, torch.optim.Optimizer], max_steps: int) -> dict[str, Any]:
        """The schedule of each optimizer: its own, or `trainer.schedule`; None for the optimizer's own rates."""
        trainer = self.config.trainer
        schedules: dict[str, Any] = {}
        for name, optimizer in optimizers.items():
            label, component = "trainer.schedule", trainer.schedule
            if name in trainer.optimizers:
                label, component = f"trainer.optimizers.{name}.schedule", trainer.optimizers[name].schedule
            schedules[name] = self._schedule(label, component, optimizer, max_steps)
        return schedules

    def _schedule(self, label: str, component: Component | None, optimizer: Any, max_steps: int = 0) -> Any:
        """Builds a schedule: a function of the step, or a scheduler of `optimizer` such as torch's."""
        if component is None:
            return None
        target = registry.find(
            "schedule", component.type, project_dir=self.project_dir, where=component.origin, label=label
        )
        if not accepts_optimizer(target):
            return self._make("schedule", label, component)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"build_component: {label} is a scheduler of torch, which needs an optimizer. Build it in Python, or "
                "use build_trainer(config).",
                where=component.origin,
            )
        arguments = dict(component.arguments)
        options = {key: arguments.pop(key) for key in ("step_on",) if key in arguments}
        if "metric" in arguments and "metric" not in inspect.signature(target).parameters:
            options["metric"] = arguments.pop("metric")
        bare = Component(component.type, **arguments).located_at(component.origin)
        with warnings.catch_warnings():
            # Nested schedulers step during their construction.
            warnings.filterwarnings("ignore", message=".*(lr_scheduler.step|optimizer.step)")
            length: int | None = max_steps
            if options.get("step_on") == "epoch":
                max_epochs = self.config.trainer.max_epochs
                length = None if max_epochs is None else math.ceil(max_epochs)
            scheduler = self._scheduler(label, bare, target, optimizer, length)
        schedule = TorchSchedule(scheduler, **options, label=label, where=component.origin)
        schedule.check_length(max_steps)
        if schedule.metric is not None and not self._evaluates_repeatedly():
            raise ConfigError(
                f"{label}: follows {schedule.metric} of the evaluations, but none runs before the end of the run. Set "
                "evaluation.every_steps and data.eval.",
                where=component.origin,
            )
        return schedule

    def _evaluates_repeatedly(self) -> bool:
        evaluation = self.config.evaluation
        return any(getattr(evaluation, name, None) is not None for name in ("every_steps", "every_epochs"))

    def _scheduler(self, label: str, component: Component, target: Any, optimizer: Any, length: int | None) -> Any:
        """Builds a scheduler, and those that are nested in its arguments, over an optimizer."""
        if "optimizer" in component.arguments:
            raise ConfigError(f"{label}.optimizer: is the run's optimizer. Remove it.", where=component.origin)
        lengths = missing_lengths(target, component.arguments, length)
        registry.check_arguments(
            target,
            component.arguments,
            label=label,
            where=component.origin,
            provided=("optimizer", *lengths),
            origin_of=self.config.origin,
        )
        plain, built = dict[str, Any](), dict[str, Any]()
        for name, value in component.arguments.items():
            entries = value if isinstance(value, list | tuple) else [value]
            if entries and all(isinstance(each, Mapping) and "type" in each for each in entries):
                made = []
                for number, each in enumerate(entries):
                    place = f"{label}.{name}.{number}" if isinstance(value, list | tuple) else f"{label}.{name}"
                    nested = Component.from_mapping(each).located_at(self.config.origin(place) or component.origin)
                    found = registry.find(
                        "schedule", nested.type, project_dir=self.project_dir, where=nested.origin, label=place
                    )
                    made.append(self._scheduler(place, nested, found, optimizer, length))
                built[name] = made if isinstance(value, list | tuple) else made[0]
            elif name in ("lr_lambda", "scale_fn") and all(isinstance(each, str) for each in entries):
                functions = [
                    registry.find(
                        "schedule", each, project_dir=self.project_dir, where=component.origin, label=f"{label}.{name}"
                    )
                    for each in entries
                ]
                built[name] = functions if isinstance(value, list | tuple) else functions[0]
            else:
                plain[name] = value
        bare = Component(component.type, **plain).located_at(component.origin)
        return self._make("schedule", label, bare, optimizer=optimizer, **built, **lengths)

    def metrics(self, task: Task, device: torch.device) -> list[ConfiguredMetric]:
        """The `evaluation.metrics` section and the metrics of the task, on the device."""
        made = []
        for name, component in self.config.evaluation.metrics.items():
            arguments = dict(component.arguments)
            outputs, labels = arguments.pop("outputs", "logits"), arguments.pop("labels", "labels")
            label = f"evaluation.metrics.{name}"
            try:
                metric = self._make(
                    "metric", label, Component(component.type, **arguments).located_at(component.origin)
                )
            except ConfigError as error:  # of a built-in metric, which does not know the label
                if error.where is not None or error.problem.startswith(label):
                    raise
                argument = error.problem.partition(":")[0]
                origin = self.config.origin(f"{label}.{argument}" if argument in arguments else label)
                raise ConfigError(f"{label}: {error.problem}", where=origin) from error
            reject_no_metric(metric, label, self.config.origin(label))
            made.append(ConfiguredMetric(name, metric, outputs, labels, self.config.origin(label)))
        label, where = f"{type(task).__name__}.build_metrics", location_of(type(task).build_metrics)
        built = task.build_metrics()
        if not isinstance(built, Mapping):
            problem = f"{label} returned a {type(built).__name__}. Return a dict of metrics by name, or {{}}."
            raise ConfigError(problem, where=where)
        for name, metric in built.items():
            reject_no_metric(metric, f"{label}, {name}", where)
            made.append(ConfiguredMetric(name, metric, "logits", "labels"))
        for each in made:
            reject_rank_metric(each, self.ranks.mesh.num_data_ranks)
            if isinstance(each.metric, torch.nn.Module):
                never_distributed(each.metric).to(device)
        return made

    def benchmarks(self, model: torch.nn.Module) -> list[ConfiguredBenchmark]:
        """The `evaluation.benchmarks` section, with the samples, which are checked for this model."""
        if self.config.evaluation.benchmarks and self.ranks.mesh.size("pipeline") > 1:
            raise ConfigError(
                "evaluation.benchmarks: no rank of runtime.mesh.pipeline has the whole model, which benchmarks call. "
                "Remove them, evaluate them after the training, or use fsdp.",
                where=self.config.origin("evaluation.benchmarks"),
            )
        return [self._benchmark(number, model) for number in range(len(self.config.evaluation.benchmarks))]

    def _benchmark(self, number: int, model: torch.nn.Module | None) -> ConfiguredBenchmark:
        """Builds a benchmark, reads its samples and, if a model is passed, checks that they are valid for it."""
        component, label = self.config.evaluation.benchmarks[number], f"evaluation.benchmarks.{number}"
        given = dict(component.arguments)
        settings = {name: given.pop(name) for name in ("batch_size", "log_samples") if name in given}
        given.pop("name", None)
        plain = Component(component.type, **given).located_at(component.origin)
        try:
            benchmark = self._make("benchmark", label, plain, base=Benchmark)
            samples = benchmark.load()
            if not len(samples):
                raise DataError(f"{type(benchmark).__name__}.load returned no samples.")
            if model is not None:
                benchmark.check(model, samples)
        except (ConfigError, DataError) as error:
            if error.where is not None or error.problem.startswith(label):
                raise
            setting = error.problem.partition(":")[0]
            where = self.config.origin(f"{label}.{setting}" if setting in given else label) or component.origin
            separator = "." if setting in given else ": "
            raise type(error)(f"{label}{separator}{error.problem}", where=where) from error
        name = benchmark_name(component)
        return ConfiguredBenchmark(name, benchmark, samples, where=self.config.origin(label), **settings)

    def reject_unused(self) -> None:
        """Rejects sections that have no effect because the Trainer or Task builds the object itself."""
        config = self.config
        optimizer = "trainer.optimizers" if config.trainer.optimizers else "trainer.optimizer"
        given: dict[str, tuple[bool, str]] = {
            "task": (config.task is not None, "task()"),
            "model": (config.model is not None, "model()"),
            optimizer: (bool(config.trainer.optimizer or config.trainer.optimizers), "optimizers(model)"),
            "data.train": (config.data.train is not None, "train_data()"),
            "data.sampler": (config.data.sampler is not None, "sampler(dataset)"),
            "data.eval": (bool(config.data.eval), "eval_data()"),
            "data.test": (config.data.test is not None, "test_data()"),
            "data.split": (config.data.split is not None, "train_data()"),
            "data.process": (config.data.process is not None, "train_data()"),
            "data.collator": (config.data.collator != DataSection().collator, "collator()"),
            "hooks": (bool(config.hooks), "hooks()"),
            "writers": (config.writers != RunConfig().writers, "writers()"),
        }
        for section, (is_given, offer) in given.items():
            if is_given and section not in self.used:
                raise ConfigError(
                    f"{section}: has no effect, because the trainer or task builds this itself. Remove the section, or "
                    f"use it there with build.{offer}.",
                    where=config.origin(section),
                )

    def _model_of_first(self, section: ModelSection) -> torch.nn.Module:
        """Builds the model with weights on the first rank, without memory on the others; collective.

        All ranks receive the facts of the pretrained folder, or the error of the first rank.
        """
        project_dir, origin = Path(self.project_dir), self.config.origin
        model: torch.nn.Module | None = None
        facts: PretrainedFacts | None = None
        failure: Exception | None = None
        if self.ranks.is_first:
            try:
                model, facts = build_model_section(
                    section, project_dir=project_dir, origin=origin, kept=self._kept, reader=self._base_reader
                )
                self._hash_loaded(model, facts)
            except Exception as error:
                failure = error
        problem = failure
        if failure is not None and not isinstance(failure, TrainwrightError):  # possibly one that cannot be pickled
            problem = TrainwrightError(f"Rank 0 could not build the model: {type(failure).__name__}: {failure}")
        self.pretrained_facts, problem = self.ranks.broadcast((facts, problem))
        if problem is not None:
            raise failure or problem
        if model is None:
            model = build_without_memory(section, project_dir=project_dir, origin=origin, kept=self.pretrained_facts)
        return model

    @property
    def _base_reader(self) -> str | None:
        source = next(iter(self._referenced.values()), None)
        return None if source is None else f"a checkpoint, which refers to frozen weights in {source},"

    def _hash_loaded(self, model: torch.nn.Module, facts: PretrainedFacts | None) -> None:
        """Hashes the weights of the pretrained folder that checkpoints may store by reference, on the first rank."""
        if facts is None or not self.ranks.is_first:
            return
        # User code that receives the model next may freeze any of them.
        own = {
            name: each
            for name, each in weights_of(model).items()
            if name in facts.loaded and (self._reader is not None or not each.requires_grad or name in self._referenced)
        }
        self._loaded = {id(own[name]): digest for name, digest in hash_weights(own).items()}

    def take_model(self, model: torch.nn.Module) -> None:
        """Finds the weights of the built model that checkpoints may store by reference; collective.

        They are frozen and equal to those of the pretrained folder. Not for a small share of the model, because the run
        would need the folder at each start. Called before the model is sharded.
        """
        found: dict[str, str] = {}
        if self._loaded:
            own = {
                name: each
                for name, each in weights_of(model).items()
                if not each.requires_grad or name in self._referenced
            }
            if self._reader is None:
                found = {name: self._loaded[id(each)] for name, each in own.items() if id(each) in self._loaded}
            else:  # user code may have changed or renamed them
                known = set(self._loaded.values())
                found = {name: digest for name, digest in hash_weights(own).items() if digest in known}
            self._loaded = {}
            num_bytes = sum(each.nbytes for each in {id(own[name]): own[name] for name in found}.values())
            if num_bytes < MIN_REFERENCED_SHARE * sum(each.nbytes for each in model.parameters()):
                found = {name: digest for name, digest in found.items() if name in self._referenced}
        self.base_hashes = self.ranks.broadcast(found)

    def _make(self, kind: str, label: str, component: Component, **provided: Any) -> Any:
        provided = {"project_dir": self.project_dir, **provided}
        return registry.instantiate(kind, component, label=label, origin_of=self.config.origin, **provided)

    def _optimizer(
        self, label: str, component: Component, owned: Mapping[str, Any], model: torch.nn.Module
    ) -> torch.optim.Optimizer:
        arguments, origin = dict(component.arguments), self.config.origin
        groups = arguments.pop("groups", ())
        bare = Component(component.type, **arguments).located_at(component.origin)
        where, base = bare.origin, torch.optim.Optimizer
        target = registry.find(
            "optimizer", bare.type, project_dir=self.project_dir, where=where, label=label, base=base
        )
        needs_kinds = getattr(target, "needs_parameter_kinds", False)
        provided = ("params", "kinds") if needs_kinds else ("params",)
        check_settings(target, arguments, label=label, origin=origin, provided=provided)
        if target is getattr(torch.optim, "Muon", None):
            reject_other_than_matrices(owned, label=label, where=origin(label))

        def make(params: list[dict[str, Any]]) -> torch.optim.Optimizer:
            # A custom optimizer may iterate over its parameters, so it receives groups only if there are several.
            is_plain = len(params) == 1 and not needs_kinds and params[0].keys() <= {"params", "param_names"}
            # Kinds are passed only if requested: a constructor with **kwargs would receive them too.
            whole = whole_of(model)
            extra = {"kinds": classify_parameters(model) if whole is None else whole.kinds} if needs_kinds else {}
            given = params[0]["params"] if is_plain else params
            made: torch.optim.Optimizer = self._make("optimizer", label, bare, params=given, **extra)
            return made

        others = describe_unowned(model, owned)
        optimizer = make_optimizer(make, owned, groups, label=label, origin=origin, others=others)
        if whole_of(model) is not None:
            drop_other_stages(optimizer, model)
        return optimizer

    def _recorded(
        self,
        name: str,
        label: str,
        component: Component,
        match: tuple[str, ...],
        owned: Mapping[str, Any],
        model: torch.nn.Module,
    ) -> torch.optim.Optimizer:
        """Builds an optimizer and records its groups, for parameters that become trainable during the run."""
        optimizer = self._optimizer(label, component, owned, model)
        make = partial(self._optimizer, label, component, model=model)
        self.recipes[name] = OptimizerRecipe(optimizer, owned, match, lambda parameters: make(owned=parameters))
        return optimizer

    def _trainable(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Returns the trainable parameters, those of all stages of a pipeline. Rejects a stage without trainable
        parameters."""
        parameters = parameters_of_all_stages(model)
        seen: set[int] = set()
        trainable = {}
        for name, parameter in parameters.items():  # tied parameters by their first name
            if parameter.requires_grad and id(parameter) not in seen:
                trainable[name] = parameter
            seen.add(id(parameter))
        problem = None
        if not trainable:
            problem = "the model has no parameter that requires a gradient."
        elif (stage := first_idle_stage(model, trainable)) is not None:
            problem = (
                f"stage {stage} of the pipeline has no parameter that requires a gradient, but every stage needs one."
            )
        if problem is None:
            return trainable
        if self.config.model is not None and "freeze" in self.config.model.reserved:
            where = self.config.origin("model.freeze")
            raise ConfigError(f"model.freeze: {problem} Name fewer parameters.", where=where)
        raise ConfigError(problem[0].upper() + problem[1:])

    def _dataset(self, label: str, component: Component | None) -> Any:
        if component is None:
            instead = " Or override next_train_inputs to make the batches." if label == "data.train" else ""
            raise ConfigError(
                f"{label} is required, for example {{type: datasets/mine.py:Mine}}.{instead}",
                where=self.config.origin(label),
            )
        self.used.add("data.process")
        dataset = self._datasets.build(label, component)
        if label != "data.train" and getattr(dataset, "weights", None) and hasattr(type(dataset), "make_order"):
            raise ConfigError(
                f"{label}: weights have no effect in an evaluation, which uses each sample once. Remove them.",
                where=self.config.origin(label),
            )
        return dataset

    def _split_train_data(self) -> dict[str, Any]:
        """Returns the splits of `data.split` by name, without empty evaluation sets."""
        if self._splits is None:
            self._splits = {}
            if self.config.data.cut_off:
                self.used.add("data.split")
                self._splits = self._divide(self._dataset("data.train", self.config.data.train))
        return self._splits

    def _divide(self, whole: Any) -> dict[str, Any]:
        data, where = self.config.data, self.config.origin("data.split")
        if is_stream(whole) or hasattr(type(whole), "make_order"):
            kind = "a stream" if is_stream(whole) else "a mixture"
            raise ConfigError(f"data.split: data.train is {kind}, which cannot be split. Use data.eval.", where=where)
        if hasattr(type(whole), "repack"):  # splits documents, because chunks of one document must not be in two sets
            return {name: whole.repack(split) for name, split in self._divide(whole.source).items()}
        if isinstance(data.split, tuple):
            sizes = sizes_by_ratio(len(whole), data.split)
        else:
            rest = [getattr(data.split, name) for name in data.cut_off]
            sizes = [len(whole) - sum(rest), *rest]
            if sizes[0] < 1:
                raise ConfigError(
                    f"data.split: {' + '.join(map(str, rest))} of {len(whole)} samples are split off, leaving none "
                    "for training.",
                    where=where,
                )
        splits = dict(zip(("train", *data.cut_off), split(whole, sizes, seed=self.config.seed), strict=True))
        for name in [name for name, each in splits.items() if not len(each)]:
            logger.warning("data.split: %d samples are too few for a set %s: it is omitted.", len(whole), name)
            del splits[name]
        return splits


def is_called_later(target: Any, called_with: Sequence[str]) -> bool:
    """Returns True for a function that is itself the object, because it has one of the parameters `called_with`."""
    return inspect.isfunction(target) and not inspect.signature(target).parameters.keys().isdisjoint(called_with)


def reject_loss(loss: Any, label: str, origin: registry.OriginOf) -> None:
    """Rejects an object that is not a valid `trainer.loss`, or whose value would depend on how a batch is split."""
    kind = type(loss).__name__
    if not callable(loss):
        raise ConfigError(f"{label}: {kind} cannot be called with outputs and labels.", where=origin(label))
    if not isinstance(loss, torch.nn.Module):
        return
    if any(True for _ in loss.parameters()):
        raise ConfigError(
            f"{label}: {kind} has parameters, which no optimizer would update. Make it a part of the model, as its "
            "attribute criterion.",
            where=origin(label),
        )
    required = [
        name
        for name, each in (parameters_of(loss.forward) or {}).items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    if len(required) > 2:
        raise ConfigError(
            f"{label}: {kind} needs {', '.join(required)}, but a loss receives the outputs and the labels. Compute it "
            "in the trainer's forward.",
            where=origin(label),
        )
    if getattr(loss, "reduction", "mean") != "mean":
        raise ConfigError(
            f"{label}.reduction: {loss.reduction} has no mean over a batch that is split into micro-batches or over "
            "ranks. Use mean, or compute the loss in the trainer's forward, which may return Mean(total, count).",
            where=origin(f"{label}.reduction"),
        )


def _share_out(
    parameters: Mapping[str, Any], globs: Mapping[str, tuple[str, ...]], config: RunConfig
) -> dict[str, dict[str, Any]]:
    """Assigns each parameter to the one optimizer whose `match` matches its name."""
    shares: dict[str, dict[str, Any]] = {name: {} for name in globs}
    where = config.origin("trainer.optimizers")
    for name, parameter in parameters.items():
        owners = [owner for owner, patterns in globs.items() if any(fnmatchcase(name, glob) for glob in patterns)]
        if len(owners) != 1:
            problem = f"two optimizers own it: {' and '.join(owners)}" if owners else "no optimizer owns it"
            raise ConfigError(
                f"trainer.optimizers: {name}: {problem}. Adjust their `match`, or freeze it with model.freeze.",
                where=where,
            )
        shares[owners[0]][name] = parameter
    for owner, owned in shares.items():
        if not owned:
            problem = f"{globs[owner]} matches no parameter that is trained."
            raise ConfigError(f"trainer.optimizers.{owner}.match: {problem}", where=where)
    return shares


def describe_dtypes(model: torch.nn.Module) -> str:
    """Returns the dtypes of weights that are not all float32, and warns of trained float16 weights."""
    if any(each.dtype == torch.float16 and each.requires_grad for each in model.parameters()):
        logger.warning(
            "Trained weights are float16: small gradients and updates underflow to 0, and loss scaling does not help "
            "the weights. Use fp32 weights (model.dtype) with runtime.precision for speed, or bf16 weights."
        )
    # Integers are the codes of quantized weights, which are logged separately.
    names = sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.is_floating_point()})
    return "" if names in ([], ["float32"]) else f" in {' and '.join(names)}"
