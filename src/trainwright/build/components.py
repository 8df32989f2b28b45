"""Builds each part of a run from its section of the config: what a Trainer's `build_*` methods are offered."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainwright.build.data import DatasetBuilder
from trainwright.checkpoint.folder import run_folder
from trainwright.config import Component, DataSection, ModelSection, RunConfig
from trainwright.data.fetch import is_stream
from trainwright.data.split import sizes_by_ratio, split
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.hooks.compilation import WatchCompilation
from trainwright.hooks.preemption import ObeyPreemption
from trainwright.hooks.throughput import TimeSteps
from trainwright.hooks.watchdog import Watchdog
from trainwright.loop.hook import Hook
from trainwright.loop.metrics import ConfiguredMetric, reject_no_metric
from trainwright.loop.task import Task, overrides
from trainwright.loop.trainer import Trainer, reject_wrong_constructor
from trainwright.models.from_config import build_model_section, build_without_memory, is_as_shipped
from trainwright.models.pretrained_facts import PretrainedFacts
from trainwright.optim.param_groups import (
    check_settings,
    classify_parameters,
    defaults_of,
    first_idle_stage,
    has_strict_forms,
    make_optimizer,
    parameters_of_all_stages,
    reasons_of_others,
    reject_provided,
    take_out_others,
    whole_of,
)
from trainwright.parallel.collectives import Ranks
from trainwright.registry import resolve as registry
from trainwright.user_code.locations import is_user_code, location_of
from trainwright.user_code.methods import reject_wrong_methods
from trainwright.writers.writer import Writer

logger = logging.getLogger(__name__)


class Build:
    """Offers each part as the config describes it (see loop/trainer.py), and notes which sections were used."""

    def __init__(
        self,
        config: RunConfig,
        *,
        ranks: Ranks | None = None,
        folder: Path | None = None,
        kept: PretrainedFacts | None = None,
    ) -> None:
        """`kept` is what the pretrained folder told an earlier start: its weights then come from a checkpoint."""
        self.config = config
        self.project_dir = config.project_dir
        self._ranks = ranks or Ranks()
        self._folder = folder or run_folder(config)
        self._kept = kept
        self._reader: str | None = None
        self.pretrained_facts: PretrainedFacts | None = None
        self.first_has_weights = False
        """Has the first rank alone built weights, while the other ranks wait for them on the meta device?"""
        self._task: Task | None = None
        self._used: set[str] = set()
        self._splits: dict[str, Any] | None = None
        self._datasets = DatasetBuilder(
            project_dir=self.project_dir, seed=config.seed, process=config.data.process, origin_of=config.origin
        )
        registry.import_modules(config.imports, project_dir=self.project_dir, where=config.origin("imports"))

    # what a Trainer's build_* methods may ask for

    def task(self) -> Task:
        """The `task` section, or the default task."""
        self._used.add("task")
        return Task() if self.config.task is None else self._make("task", "task", self.config.task)

    def model(self) -> torch.nn.Module:
        """The task's model where it builds one, else the `model` section.

        Where ranks keep only parts of it, and nobody else's code sees it whole, the first rank alone makes weights:
        of a large model a machine holds one copy, but not one for each of its ranks.
        """
        if self._task is not None and overrides(self._task, "build_model", Task):
            return self._task.build_model()
        self._used.add("model")
        section = self.config.model
        if section is None:
            where = self.config.origin("model")
            problem = "model: there is none. Name one, such as {type: llama, …} or {type: models/net.py:Net}."
            if where is not None and where.file.endswith(".py"):
                problem += " A Python file says so in `config`, or in a variable `model`."
            raise ConfigError(problem, where=where)
        project_dir, origin = Path(self.project_dir), self.config.origin
        is_split = self._ranks.size > 1 and self._ranks.mesh.is_split
        self.first_has_weights = is_split and self._reader is None and is_as_shipped(section, project_dir=project_dir)
        if self.first_has_weights:
            return self._model_of_first(section)
        model, self.pretrained_facts = build_model_section(
            section, project_dir=project_dir, origin=origin, kept=self._kept, reader=self._reader
        )
        return model

    def optimizers(self, model: torch.nn.Module) -> dict[str, torch.optim.Optimizer]:
        """The `trainer.optimizer` section over all parameters, or each of `trainer.optimizers` over its own."""
        self._used |= {"trainer.optimizer", "trainer.optimizers"}
        trainer = self.config.trainer
        trainable = self._trainable(model)
        if not trainer.optimizers:
            if trainer.optimizer is None:
                raise ConfigError(
                    "trainer.optimizer: there is none. Name one, such as {type: adamw, lr: 1e-3}.",
                    where=self.config.origin("trainer"),
                )
            return {"main": self._optimizer("trainer.optimizer", trainer.optimizer, trainable, model)}
        shares = _share_out(trainable, {name: entry.match for name, entry in trainer.optimizers.items()}, self.config)
        return {
            name: self._optimizer(f"trainer.optimizers.{name}.optimizer", entry.optimizer, shares[name], model)
            for name, entry in trainer.optimizers.items()
        }

    def train_data(self) -> Any:
        """The task's training dataset where it builds one, else `data.train`, cut by `data.split`."""
        if self._task_builds_data():
            return self._task.build_dataset("train")  # type: ignore[union-attr]  # just asked
        self._used.add("data.train")
        if self.config.data.cut_off:
            return self._parts()["train"]
        return self._dataset("data.train", self.config.data.train)

    def eval_data(self) -> dict[str, Any]:
        """The evaluation datasets by name: the task's, those of `data.eval`, or the split's second part."""
        if self._task_builds_data():
            valid = self._task.build_dataset("valid")  # type: ignore[union-attr]  # just asked
            return {} if valid is None else {"valid": valid}
        self._used.add("data.eval")
        section = self.config.data.eval
        if "test" in section and self.config.data.test is not None:
            where = self.config.origin("data.eval.test")
            raise ConfigError("data.eval.test and data.test would share the name test. Rename the former.", where=where)
        if section:
            if "valid" in self.config.data.cut_off:
                logger.warning("data.split: nobody uses its part valid, for data.eval wins. Cut off no such part.")
            return {name: self._dataset(f"data.eval.{name}", component) for name, component in section.items()}
        return {name: part for name, part in self._parts().items() if name == "valid"}

    def test_data(self) -> Any:
        """The dataset that is evaluated once, at the end, or None."""
        if self._task_builds_data():
            return self._task.build_dataset("test")  # type: ignore[union-attr]  # just asked
        self._used.add("data.test")
        if self.config.data.test is not None:
            return self._dataset("data.test", self.config.data.test)
        return self._parts().get("test")

    def collator(self) -> Callable[[list[Any]], Any]:
        """The `data.collator` section: an object that the section makes, or a plain function of the samples."""
        self._used.add("data.collator")
        label, section = "data.collator", self.config.data.collator
        where = section.origin
        target = registry.find("collator", section.type, project_dir=self.project_dir, where=where, label=label)
        if _takes_samples(target, section.arguments):
            return partial(target, **section.arguments)
        collator: Callable[[list[Any]], Any] = self._make("collator", label, section)
        return collator

    def hooks(self) -> list[Hook]:
        """The default hooks, then those of the `hooks` section."""
        self._used.add("hooks")
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
        self._used.add("writers")
        if not self._ranks.is_first:
            return []
        return [
            self._make("writer", f"writers.{number}", each, folder=self._folder)
            for number, each in enumerate(self.config.writers)
        ]

    # what only build_trainer asks for

    def trainer_class(self) -> type[Trainer]:
        """The class that `trainer.type` names."""
        where = self.config.origin("trainer.type")
        found = registry.find(
            "trainer", self.config.trainer.type, project_dir=self.project_dir, where=where, label="trainer"
        )
        if not (isinstance(found, type) and issubclass(found, Trainer)):
            raise ConfigError(f"trainer.type: {self.config.trainer.type} is not a subclass of Trainer.", where=where)
        return found

    def take_trainer(self, trainer_class: type[Trainer]) -> None:
        """Notes the class that asks for the model: a `build_model` of a user's may read the weights that it gets."""
        reject_wrong_methods(trainer_class, Trainer)
        reject_wrong_constructor(trainer_class)
        owner = next(each for each in trainer_class.__mro__ if "build_model" in vars(each))
        if is_user_code(owner):
            self._reader = f"{owner.__name__}.build_model"

    def take_task(self, task: Task) -> None:
        """Notes the task whose `build_*` methods win over sections."""
        self._task = task

    def schedules(self, names: Mapping[str, Any]) -> dict[str, Callable[[int, int], float]]:
        """The schedule of each optimizer: its own, or `trainer.schedule`, or a constant rate."""
        trainer = self.config.trainer
        schedules = {}
        for name in names:
            label, component = "trainer.schedule", trainer.schedule
            if name in trainer.optimizers:
                label, component = f"trainer.optimizers.{name}.schedule", trainer.optimizers[name].schedule
            schedules[name] = self._make("schedule", label, component or Component("constant"))
        return schedules

    def metrics(self, task: Task, device: torch.device) -> list[ConfiguredMetric]:
        """The `evaluation.metrics` section and the task's own metrics, on the device."""
        made = []
        for name, component in self.config.evaluation.metrics.items():
            arguments = dict(component.arguments)
            outputs, labels = arguments.pop("outputs", "logits"), arguments.pop("labels", "labels")
            label = f"evaluation.metrics.{name}"
            metric = self._make("metric", label, Component(component.type, **arguments).located_at(component.origin))
            reject_no_metric(metric, label, self.config.origin(label))
            made.append(ConfiguredMetric(name, metric, outputs, labels, self.config.origin(label)))
        for name, metric in task.build_metrics().items():
            reject_no_metric(
                metric, f"{type(task).__name__}.build_metrics, {name}", location_of(type(task).build_metrics)
            )
            made.append(ConfiguredMetric(name, metric, "logits", "labels"))
        for each in made:
            if isinstance(each.metric, torch.nn.Module):
                each.metric.to(device)
                if self._ranks.mesh.loss_group is not None:  # torchmetrics' talk between ranks themselves
                    each.metric.process_group = self._ranks.mesh.loss_group
        return made

    def reject_unused(self) -> None:
        """Rejects sections that a Trainer's or Task's own build methods left without effect."""
        config = self.config
        optimizer = "trainer.optimizers" if config.trainer.optimizers else "trainer.optimizer"
        given: dict[str, tuple[bool, str]] = {
            "task": (config.task is not None, "task()"),
            "model": (config.model is not None, "model()"),
            optimizer: (bool(config.trainer.optimizer or config.trainer.optimizers), "optimizers(model)"),
            "data.train": (config.data.train is not None, "train_data()"),
            "data.eval": (bool(config.data.eval), "eval_data()"),
            "data.test": (config.data.test is not None, "test_data()"),
            "data.split": (config.data.split is not None, "train_data()"),
            "data.process": (config.data.process is not None, "train_data()"),
            "data.collator": (config.data.collator != DataSection().collator, "collator()"),
            "hooks": (bool(config.hooks), "hooks()"),
            "writers": (config.writers != RunConfig().writers, "writers()"),
        }
        for section, (is_given, offer) in given.items():
            if is_given and section not in self._used:
                raise ConfigError(
                    f"{section}: has no effect, for the trainer or task builds this itself. Remove the section, or use "
                    f"it there through build.{offer}.",
                    where=config.origin(section),
                )

    def _model_of_first(self, section: ModelSection) -> torch.nn.Module:
        """Builds weights on the first rank, and the same model without memory on the others; collective.

        What the first rank's pretrained folder told, or why there is no model, all ranks get to know.
        """
        project_dir, origin = Path(self.project_dir), self.config.origin
        model: torch.nn.Module | None = None
        facts: PretrainedFacts | None = None
        failure: Exception | None = None
        if self._ranks.is_first:
            try:
                model, facts = build_model_section(section, project_dir=project_dir, origin=origin, kept=self._kept)
            except Exception as error:
                failure = error
        problem = failure
        if failure is not None and not isinstance(failure, TrainwrightError):  # perhaps one that cannot be sent
            problem = TrainwrightError(f"Rank 0 could not build the model: {type(failure).__name__}: {failure}")
        self.pretrained_facts, problem = self._ranks.broadcast((facts, problem))
        if problem is not None:
            raise failure or problem
        if model is None:
            facts = self.pretrained_facts
            model = build_without_memory(section, project_dir=project_dir, origin=origin, kept=facts)
        return model

    def _make(self, kind: str, label: str, component: Component, **provided: Any) -> Any:
        provided = {"project_dir": self.project_dir, **provided}
        return registry.instantiate(kind, component, label=label, origin_of=self.config.origin, **provided)

    def _optimizer(
        self, label: str, component: Component, owned: Mapping[str, Any], model: torch.nn.Module
    ) -> torch.optim.Optimizer:
        arguments, origin = dict(component.arguments), self.config.origin
        groups = arguments.pop("groups", ())
        bare = Component(component.type, **arguments).located_at(component.origin)
        target = registry.find("optimizer", bare.type, project_dir=self.project_dir, where=bare.origin, label=label)
        needs_kinds = getattr(target, "needs_parameter_kinds", False)
        reject_provided(arguments, ("params", "kinds") if needs_kinds else ("params",), label=label, origin=origin)
        is_strict, defaults = has_strict_forms(target), defaults_of(target)
        check_settings(arguments, defaults, label=label, origin=origin, has_strict_forms=is_strict)

        def make(params: list[dict[str, Any]]) -> torch.optim.Optimizer:
            # A user's optimizer may go through its parameters itself: it gets groups only where there are some.
            is_plain = len(params) == 1 and not needs_kinds and params[0].keys() <= {"params", "param_names"}
            # Kinds are given to those that ask: a constructor that takes any keyword would be handed them too.
            whole = whole_of(model)
            extra = {"kinds": classify_parameters(model) if whole is None else whole.kinds} if needs_kinds else {}
            given = params[0]["params"] if is_plain else params
            made: torch.optim.Optimizer = self._make("optimizer", label, bare, params=given, **extra)
            return made

        others = reasons_of_others(parameters_of_all_stages(model), owned)
        optimizer = make_optimizer(make, owned, groups, label=label, origin=origin, others=others)
        if whole_of(model) is not None:
            take_out_others(optimizer, model)
        return optimizer

    def _trainable(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Returns the parameters that are trained; with a pipeline of all stages. Rejects a stage without any."""
        parameters = parameters_of_all_stages(model)
        seen: set[int] = set()
        trainable = {}
        for name, parameter in parameters.items():  # a tied one under its first name
            if parameter.requires_grad and id(parameter) not in seen:
                trainable[name] = parameter
            seen.add(id(parameter))
        problem = None
        if not trainable:
            problem = "the model has no parameter that requires a gradient: there is nothing to train."
        elif (stage := first_idle_stage(model, trainable)) is not None:
            problem = (
                f"stage {stage} of the pipeline has no parameter that requires a gradient, but every stage must have "
                "something to train."
            )
        if problem is None:
            return trainable
        if self.config.model is not None and "freeze" in self.config.model.reserved:
            where = self.config.origin("model.freeze")
            raise ConfigError(f"model.freeze: {problem} Name fewer parameters.", where=where)
        raise ConfigError(problem[0].upper() + problem[1:])

    def _dataset(self, label: str, component: Component | None) -> Any:
        if component is None:
            raise ConfigError(
                f"{label}: there is no dataset. Name one, such as {{type: datasets/mine.py:Mine}}.",
                where=self.config.origin(label),
            )
        self._used.add("data.process")
        dataset = self._datasets.build(label, component)
        if label != "data.train" and getattr(dataset, "weights", None) and hasattr(type(dataset), "make_order"):
            raise ConfigError(
                f"{label}: weights have no effect in an evaluation, which sees each sample once. Leave them out.",
                where=self.config.origin(label),
            )
        return dataset

    def _task_builds_data(self) -> bool:
        return self._task is not None and overrides(self._task, "build_dataset", Task)

    def _parts(self) -> dict[str, Any]:
        """The parts that `data.split` cuts, by name; an evaluation set that gets no sample is left out."""
        if self._splits is None:
            self._splits = {}
            if self.config.data.cut_off:
                self._used.add("data.split")
                self._splits = self._cut(self._dataset("data.train", self.config.data.train))
        return self._splits

    def _cut(self, whole: Any) -> dict[str, Any]:
        data, where = self.config.data, self.config.origin("data.split")
        if is_stream(whole) or hasattr(type(whole), "make_order"):
            kind = "a stream" if is_stream(whole) else "a mixture"
            raise ConfigError(f"data.split: data.train is {kind}, which is not cut. Give data.eval.", where=where)
        if hasattr(type(whole), "repack"):  # its documents are cut apart: pieces of one must not be in two sets
            return {name: whole.repack(part) for name, part in self._cut(whole.source).items()}
        if isinstance(data.split, tuple):
            sizes = sizes_by_ratio(len(whole), data.split)
        else:
            rest = [getattr(data.split, name) for name in data.cut_off]
            sizes = [len(whole) - sum(rest), *rest]
            if sizes[0] < 1:
                raise ConfigError(
                    f"data.split: {' + '.join(map(str, rest))} samples are cut off from {len(whole)}, which leaves "
                    "none for training.",
                    where=where,
                )
        parts = dict(zip(("train", *data.cut_off), split(whole, sizes, seed=self.config.seed), strict=True))
        for name in [name for name, part in parts.items() if not len(part)]:
            logger.warning("data.split: %d samples are too few for a set %s: there is none.", len(whole), name)
            del parts[name]
        return parts


def _takes_samples(target: Callable[..., Any], given: Mapping[str, Any]) -> bool:
    """Is it a user's function that lacks one argument, which is the list of samples? Then it is the collator itself."""
    if not inspect.isfunction(target) or not is_user_code(target):
        return False
    named = inspect.signature(target).parameters.values()
    missing = [each for each in named if each.default is each.empty and each.name not in given]
    return len(missing) == 1 and missing[0].kind in (missing[0].POSITIONAL_ONLY, missing[0].POSITIONAL_OR_KEYWORD)


def _share_out(
    parameters: Mapping[str, Any], globs: Mapping[str, tuple[str, ...]], config: RunConfig
) -> dict[str, dict[str, Any]]:
    """Gives each parameter to the one optimizer whose `match` names it; none and two are errors."""
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
    """Names the dtypes of weights that are not all float32, and warns of what training loses in float16."""
    if any(each.dtype == torch.float16 and each.requires_grad for each in model.parameters()):
        logger.warning(
            "Weights in float16 are trained: small gradients and updates become 0 in it, and a scaled loss does not "
            "help the weights. Use weights in fp32 (model.dtype), with runtime.precision for speed, or in bf16."
        )
    names = sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters()})
    return "" if names in ([], ["float32"]) else f" in {' and '.join(names)}"
