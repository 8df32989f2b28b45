"""`trainwright explain`: the loop as a run executes it, with the user code that each phase calls.

Reads classes and the config; builds nothing except shipped models on the meta device, to count the matches of rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from trainwright.build.data import may_make_batches
from trainwright.config import (
    CheckpointSection,
    Component,
    EvaluationSection,
    LogSection,
    ModelSection,
    RunConfig,
    resolve_batch,
)
from trainwright.config.frozen import thaw
from trainwright.config.sections import benchmark_name
from trainwright.config.trainer_options import reward_component
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.hooks.preemption import ObeyPreemption
from trainwright.hooks.throughput import TimeSteps
from trainwright.hooks.watchdog import Watchdog
from trainwright.loop.hook import Hook
from trainwright.loop.task import Task
from trainwright.loop.trainer import Trainer
from trainwright.models.from_config import claimed_modules, freeze, read_freeze
from trainwright.models.lora import add_lora
from trainwright.models.model import Model, check_type
from trainwright.models.names import as_globs, matched_parameters
from trainwright.models.peft_adapters import read_peft_settings
from trainwright.models.presets import preset_settings
from trainwright.models.pretrained import CONFIG_FILE, home_folders, on_meta, read_config_file
from trainwright.models.quantize import choose_quantized, count_weights, quantize_model, read_quantize
from trainwright.optim.param_groups import describe_unowned, make_groups, read_rules
from trainwright.registry import resolve as registry
from trainwright.registry.trust import reject_untrusted
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import PACKAGE, definition_of, is_user_file, parameters_of
from trainwright.user_code.methods import names_used

OURS = "trainwright's own"

DEFAULT_HOOKS: tuple[type[Hook], ...] = (TimeSteps, ObeyPreemption, Watchdog)
"""The hooks that every run has, in order, before those of the config."""


@dataclass(frozen=True)
class Line:
    """One line of the explanation: a heading, a phase of the loop, a call in it, or a problem."""

    kind: Literal["heading", "phase", "call", "problem"]
    text: str
    depth: int = 0
    location: str = ""
    """`file:line` of the definition of the called object."""
    remark: str = ""
    """For a call, the first line of its docstring."""
    is_user_code: bool = False


@dataclass(frozen=True)
class HookUse:
    """A hook as named by the config; `function` is the one that an `every` calls, at the event `event`."""

    target: Any
    period: str = ""
    function: Any = None
    event: str = "after_step"


@dataclass
class Found:
    """The classes that a config names, and those that were not found."""

    trainer: type[Trainer] = Trainer
    task: type[Task] | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    """By the dotted name of the section."""
    hooks: list[HookUse] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    """By the dotted name of the section."""


def find_all(config: RunConfig) -> Found:
    """Finds every class that the config names."""
    reject_untrusted(config)
    found = Found()

    def find(label: str, kind: str, name: str, where: object | None) -> Any:
        try:
            target = registry.find(kind, name, project_dir=config.project_dir, where=where, label=label)
        except TrainwrightError as error:
            found.problems[label] = str(error).replace(".call.type:", ".call:")
            return None
        found.parts[label] = target
        return target

    try:
        registry.import_modules(config.imports, project_dir=config.project_dir, where=config.origin("imports"))
        registry.reject_ambiguous(config.groups, project_dir=config.project_dir)
    except TrainwrightError as error:
        found.problems["imports"] = str(error)
    for label, kind, component in components_of(config):
        # An override of the type alone is more precise than the origin of its component.
        find(label, kind, component.type, config.written_at((*label.split("."), "type")) or component.origin)
    trainer = find("trainer", "trainer", config.trainer.type, config.origin("trainer.type"))
    if isinstance(trainer, type) and issubclass(trainer, Trainer):
        found.trainer = trainer
    elif trainer is not None:
        found.problems["trainer"] = f"trainer.type: {config.trainer.type} is not a subclass of Trainer."
    task = found.parts.get("task", Task)
    found.task = task if isinstance(task, type) and not overridden(found.trainer, "build_task", Trainer) else None
    for number, component in enumerate(config.hooks):
        if f"hooks.{number}" in found.parts:
            found.hooks.append(_hook_use(found.parts[f"hooks.{number}"], component, f"hooks.{number}", find))
    return found


def components_of(config: RunConfig) -> Iterator[tuple[str, str, Component]]:
    """Yields the dotted name, the kind and the section of each component of the config except the trainer."""
    single: list[tuple[str, str, Component | None]] = [
        ("task", "task", config.task),
        ("model", "model", config.model),
        ("data.collator", "collator", config.data.collator),
        ("data.train", "dataset", config.data.train),
        ("data.sampler", "sampler", config.data.sampler),
        *((f"data.eval.{name}", "dataset", each) for name, each in config.data.eval.items()),
        ("data.test", "dataset", config.data.test),
        ("trainer.optimizer", "optimizer", config.trainer.optimizer),
        ("trainer.schedule", "schedule", config.trainer.schedule),
    ]
    for name, entry in config.trainer.optimizers.items():
        single.append((f"trainer.optimizers.{name}.optimizer", "optimizer", entry.optimizer))
        single.append((f"trainer.optimizers.{name}.schedule", "schedule", entry.schedule))
    single += [(f"hooks.{number}", "hook", each) for number, each in enumerate(config.hooks)]
    single += [(f"writers.{number}", "writer", each) for number, each in enumerate(config.writers)]
    single += [(f"evaluation.metrics.{name}", "metric", each) for name, each in config.evaluation.metrics.items()]
    benchmarks = enumerate(config.evaluation.benchmarks)
    single += [(f"evaluation.benchmarks.{number}", "benchmark", each) for number, each in benchmarks]
    rewards = config.trainer.options.get("rewards", ())
    if config.trainer.type == "grpo":
        single += [
            (f"trainer.rewards.{number}", "reward", reward_component(each)) for number, each in enumerate(rewards)
        ]
    for label, kind, component in single:
        if component is not None:
            yield label, kind, component


def _hook_use(target: Any, component: Component, label: str, find: Callable[..., Any]) -> HookUse:
    if component.type == "every":
        steps, epochs, call = (component.arguments.get(name) for name in ("steps", "epochs", "call"))
        function = find(f"{label}.call", "hook", str(call), component.origin)
        period, event = (steps, "after_step") if epochs is None else (epochs, "after_epoch")
        return HookUse(target, f"every {period} {'steps' if epochs is None else 'epochs'}", function, event)
    period = component.arguments.get("every_steps")
    if period is None and "every_steps" in (parameters := parameters_of(target) or {}):
        period = parameters["every_steps"].default
    return HookUse(target, f"every {period} steps" if isinstance(period, int) and period > 1 else "")


def overridden(cls: type, method: str, contract: type) -> bool:
    """Returns True if a class overrides a method of its contract."""
    own, original = getattr(cls, method, None), getattr(contract, method, None)
    return getattr(own, "__func__", own) is not getattr(original, "__func__", original)


def overrides_of(cls: type, method: str, contract: type) -> list[tuple[type, Any]]:
    """Returns (class, function) for each override, in call order; one that calls super() is followed by the next."""
    found: list[tuple[type, Any]] = []
    for owner in cls.__mro__:
        if method not in vars(owner):
            continue
        if owner is contract and not found:
            break
        function = inspect.unwrap(getattr(vars(owner)[method], "__func__", vars(owner)[method]))
        found.append((owner, function))
        if owner is contract or "super" not in names_used(function):
            break
    return found


def calls_of(cls: type, method: str, contract: type) -> list[Line]:
    """Returns the functions that a call of a contract's method reaches, in call order; none if it is not overridden."""
    return [
        call_of(function, f"{owner.__name__}.{method}", f"{OURS}, by super()" if owner is contract else None)
        for owner, function in overrides_of(cls, method, contract)
    ]


def call_of(target: Any, name: str | None = None, remark: str | None = None) -> Line:
    """Returns the line for a class or function that is called."""
    name = getattr(target, "__qualname__", repr(target)) if name is None else name
    remark = first_line(target) if remark is None else remark
    found = definition_of(target)
    if found is None:
        return Line("call", name, remark=remark)
    path = Path(found[0])
    shown = shown_path(path)
    if path.is_relative_to(PACKAGE):
        shown = path.relative_to(Path(PACKAGE).parent).as_posix()
    elif "site-packages" in path.parts:
        shown = "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    location = f"{shown}:{found[1]}"
    return Line("call", name, location=location, remark=remark, is_user_code=is_user_file(found[0]))


def first_line(target: Any) -> str:
    """Returns the first line of the docstring of a class or function; an inherited one, or a type's, does not count."""
    text = getattr(target, "__doc__", None)
    lines = ("" if text is None or text == type(target).__doc__ else text).strip().splitlines()
    return lines[0].strip() if lines else ""


class ModelRules:
    """The lines for the rules of the model and its optimizers, in the order in which a build applies them.

    `model` is a shipped model on the meta device, to which the rules are applied; None if it is not known.
    """

    def __init__(self, config: RunConfig, target: Any) -> None:
        self.config = config
        self.model: nn.Module | None = None
        self.of_model: list[Line] = []
        self.of_optimizers: dict[str, list[Line]] = {}
        if config.model is not None:
            reserved = config.model.reserved
            self._build(config.model, target)
            rules = {
                "replace": self._replace,
                "peft": self._peft,
                "lora": self._lora,
                "quantize": self._quantize,
                "freeze": self._freeze,
            }
            for key, explain_rule in rules.items():
                if reserved.get(key) is not None:
                    self._attempt(f"model.{key}", explain_rule, reserved[key])
            self._count(reserved)
        self._optimizers()

    def _attempt(self, label: str, explain_rule: Callable[..., None], *arguments: Any) -> None:
        """Explains one rule; if it raises, the error is a problem and the model is no longer known."""
        try:
            explain_rule(*arguments)
        except TrainwrightError as error:
            problem = error.problem
            section, _, key = label.rpartition(".")
            if section and problem.startswith(key):
                problem = f"{section}.{problem}"
            elif not problem.startswith(label):
                problem = f"{label}: {problem}"
            where = error.where if error.where is not None else self.config.origin(label)
            self.of_model.append(Line("problem", f"{where}: {problem}" if where is not None else problem, 2))
            self.model = None

    def _build(self, section: ModelSection, target: Any) -> None:
        arguments = dict(section.arguments)
        preset, given = arguments.pop("preset", None), section.reserved.get("pretrained")
        if preset is not None:
            self.of_model.append(_rule(f"preset {preset}", f"but {_settings_text(arguments)}" if arguments else ""))
        folder = self._pretrained(given) if given is not None else None
        is_shipped = isinstance(target, type) and issubclass(target, Model) and target.is_shipped()
        if is_shipped and (given is None or folder is not None):
            self._attempt("model", self._build_on_meta, target, arguments, preset, folder)

    def _build_on_meta(self, target: Any, arguments: dict[str, Any], preset: str | None, folder: Path | None) -> None:
        settings = arguments
        if preset is not None:
            settings = preset_settings(target, preset)
            words = _settings_text(settings) + (f", but {_settings_text(arguments)}" if arguments else "")
            self.of_model[0] = _rule(f"preset {preset}", words)
            settings |= arguments
        elif folder is not None:
            config = read_config_file(folder)
            check_type(target, config)
            settings = target.settings_from_hugging_face(config) | arguments
        registry.check_arguments(target, settings, label="model")
        with on_meta():
            self.model = target(**settings)

    def _pretrained(self, given: Any) -> Path | None:
        """Explains the origin of the weights, and returns the folder if it is on this machine."""
        settings = given if isinstance(given, Mapping) else {"folder": given}
        name, home = settings.get("folder"), settings.get("home_path")
        options = _settings_text({key: value for key, value in settings.items() if key != "folder"})
        also = f"; {options}" if options else ""
        homes = home_folders() if home is None else [Path(str(home)).expanduser()]
        folders = [parent / Path(str(name)).expanduser() for parent in (Path(self.config.project_dir), *homes)]
        folder = next((each for each in folders if (each / CONFIG_FILE).is_file()), None)
        if folder is None:
            remark = f"is not a folder on this machine; training looks for it when it starts{also}"
        else:
            files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
            size = sum(file.stat().st_size for file in files)
            held = f"{len(files)} file{'s' if len(files) != 1 else ''} of weights, {size / 1e6:,.1f} MB"
            remark = f"from {shown_path(folder)}: {held}{also}"
        self.of_model.append(_rule(f"pretrained {name}", remark))
        return folder

    def _replace(self, given: Any) -> None:
        rules = {glob: str(rule["type"] if isinstance(rule, Mapping) else rule) for glob, rule in _mapping(given)}
        owners = {} if self.model is None else claimed_modules(self.model, rules)
        for glob, name in rules.items():
            where = self.config.origin("model.replace")
            registry.find("model", name, project_dir=self.config.project_dir, where=where, label="model.replace")
            modules = [path for path, owner in owners.items() if owner == glob]
            self.of_model.append(_rule(f'replace "{glob}"', f"by {name}{_counted(modules, 'module')}"))
        self.model = None  # the parameters of the new modules are not known

    def _lora(self, given: Any) -> None:
        settings: dict[str, Any] = {
            key: list(value) if isinstance(value, tuple) else value for key, value in _mapping(given)
        }
        registry.check_arguments(add_lora, settings, label="model.lora", provided=("model",))
        globs = as_globs("lora.match", settings["match"])
        words = _settings_text({key: value for key, value in settings.items() if key != "match"})
        layers = [] if self.model is None else add_lora(self.model, **settings)
        remark = f"adapters of {words}" if words else "adapters"
        self.of_model.append(_rule(f'lora "{", ".join(globs)}"', remark + _counted(layers, "layer")))

    def _quantize(self, given: Any) -> None:
        settings = read_quantize(thaw(given))
        layers = [] if self.model is None else choose_quantized(self.model, settings)
        if self.model is not None:
            quantize_model(self.model, thaw(given))
        globs = "the layers with an adapter" if settings.match is None else f'"{", ".join(settings.match)}"'
        self.of_model.append(_rule(f"quantize {globs}", f"stored as {settings.type}{_counted(layers, 'layer')}"))

    def _peft(self, given: Any) -> None:
        adapter = read_peft_settings(thaw(given), origin=self.config.origin)
        settings = {key: value for key, value in _mapping(given) if key not in ("type", "peft_type")}
        name = type(adapter).__name__
        self.of_model.append(_rule(f"peft {name}", _settings_text(thaw(settings)) or "with peft's defaults"))
        self.model = None  # peft may compute with the weights, so it is not applied on the meta device

    def _freeze(self, given: Any) -> None:
        for glob, rule in [(glob, each) for each in read_freeze(given) for glob in each.globs]:
            names = [] if self.model is None else matched_parameters("freeze", glob, self.model)
            own = {} if self.model is None else dict(self.model.named_parameters(remove_duplicate=False))
            limits = [
                f" until {word} {limit}" for word, limit in zip(("step", "epoch"), rule[1:], strict=True) if limit
            ]
            remark = _weights(own[name] for name in names) if names else ""
            self.of_model.append(_rule(f'freeze "{glob}"{"".join(limits)}', remark))
        if self.model is not None:
            freeze(self.model, given)

    def _count(self, reserved: Mapping[str, Any]) -> None:
        if self.model is None:
            return
        parameters = list(self.model.parameters())
        total = count_weights(self.model)
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        share = "all" if trained == total else f"{trained:,} ({100 * trained / max(total, 1):.3g} %)"
        also = "; besides adapters, also weights that files lack" if {"lora", "pretrained"} <= set(reserved) else ""
        self.of_model.append(_rule(f"{total:,} weights", f"of which {share} are trained{also}"))

    def _optimizers(self) -> None:
        trainer = self.config.trainer
        named = () if self.model is None else self.model.named_parameters()
        trainable = {name: each for name, each in named if each.requires_grad}
        if trainer.optimizer is not None:
            self._groups("trainer.optimizer", trainer.optimizer, trainable)
        for name, entry in trainer.optimizers.items():
            own = {key: each for key, each in trainable.items() if any(fnmatchcase(key, glob) for glob in entry.match)}
            label = f"trainer.optimizers.{name}.optimizer"
            words = "" if self.model is None else _weights(own.values())
            self.of_optimizers[label] = [_rule(f"{name}: match {', '.join(entry.match)}", words)]
            self._groups(label, entry.optimizer, own)

    def _groups(self, label: str, component: Component, owned: Mapping[str, Tensor]) -> None:
        out = self.of_optimizers.setdefault(label, [])
        try:
            groups = component.arguments.get("groups", ())
            rules = read_rules(groups, label=f"{label}.groups", origin=self.config.origin)
            if self.model is not None:
                others = describe_unowned(self.model, owned)
                make_groups(owned, rules, label=f"{label}.groups", origin=self.config.origin, others=others)
        except TrainwrightError as error:
            out.append(Line("problem", str(error), 2))
            return
        left = dict(owned)
        for rule in rules:
            names = [name for name in left if any(fnmatchcase(name, glob) for glob in rule.globs)]
            found = "" if self.model is None else f": {_weights(left.pop(name) for name in names)}"
            out.append(_rule(f'group "{", ".join(rule.globs)}"', f"{_settings_text(rule.settings)}{found}"))
        if rules and left:
            out.append(_rule("the rest", f"the optimizer's own settings: {_weights(left.values())}"))


def _rule(text: str, remark: str) -> Line:
    return Line("phase", text, 2, remark=remark)


def _mapping(given: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"must be a mapping, got {given!r}.")
    return given.items()


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in settings.items())


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{_settings_text(value)}}}"
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list | tuple) else str(value)


def _counted(names: list[str], what: str) -> str:
    shown = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
    return f": {len(names)} {what}{'s' if len(names) != 1 else ''} ({shown})" if names else ""


def _weights(parameters: Iterable[Tensor]) -> str:
    sizes = [each.numel() for each in parameters]
    return f"{len(sizes)} parameter{'s' if len(sizes) != 1 else ''}, {sum(sizes):,} weights"


def explain(config: RunConfig) -> list[Line]:
    """Returns the run as lines: how its parts are built, then its loop."""
    explanation = _Explanation(config)
    explanation.add_construction()
    explanation.add_loop()
    return explanation.lines


class _Explanation:
    """Collects the lines: the construction in the order of build/run.py, the loop in the order of loop/trainer.py."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.found = find_all(config)
        self.components = list(components_of(config))
        self.lines: list[Line] = []

    def phase(self, text: str, calls: list[Line], depth: int, *, default: str = OURS, remark: str = "") -> None:
        """Adds a phase and the calls in it; `default` is its remark if there are none."""
        self.lines.append(Line("phase", text, depth, remark=remark if calls else default))
        self.lines += [replace(call, depth=depth + 1) for call in calls]

    def problem(self, label: str, depth: int = 2) -> None:
        """Adds the problem with a component, if it has one."""
        if label in self.found.problems:
            self.lines.append(Line("problem", self.found.problems[label], depth))

    def trainer_calls(self, method: str) -> list[Line]:
        """Returns the overrides of a Trainer method, in call order."""
        return calls_of(self.found.trainer, method, Trainer)

    def task_calls(self, method: str) -> list[Line]:
        """Returns the overrides of a Task method, in call order."""
        return calls_of(self.found.task, method, Task) if self.found.task else []

    def trainer_phases(self, *methods: str) -> None:
        """Adds a phase of depth 2 for each Trainer method."""
        for method in methods:
            self.phase(method, self.trainer_calls(method), 2)

    # construction

    def add_construction(self) -> None:
        """Adds the lines about the construction of each part."""
        if self.config.groups:
            self.lines.append(Line("heading", "Group files"))
        for group in self.config.groups:
            text = f"{'.'.join(map(str, group.path))}: {group.name}"
            self.lines.append(Line("phase", text, 1, remark=f"{group.file}, named at {group.where}"))
        self.lines.append(Line("heading", "Construction, in this order"))
        self.problem("imports", 1)
        self._part("task", ["task"], "build_task", default="Task: forward calls model(**batch)")
        if self.trainer_calls("build_parts"):
            self._part("rewards" if self._labels("reward") else "parts", self._labels("reward"), "build_parts")
        self._part("model", ["model"], "build_model", task_method="build_model")
        rules = ModelRules(self.config, self.found.parts.get("model"))
        if not self.task_calls("build_model"):
            self.lines += rules.of_model
        split = self._split()
        self._part("data.collator", ["data.collator"], "build_collator")
        made = may_make_batches(self.found.trainer, self.config)
        missing = "none: next_train_inputs makes the batches" if made else "none"
        self._part(
            "data.train",
            ["data.train"],
            "build_train_data",
            task_method="build_dataset",
            default=missing,
            remark=split,
        )
        if self.config.data.sampler is not None or self.trainer_calls("build_sampler"):
            self._part("data.sampler", ["data.sampler"], "build_sampler")
        sets = [f"data.eval.{name}" for name in self.config.data.eval]
        self._part("data.eval", sets, "build_eval_data", task_method="build_dataset", default=split or "none")
        if self.config.data.test is not None:
            self._part("data.test", ["data.test"], None, task_method="build_dataset")
        if self.trainer_calls("build_frozen_models"):
            self._part("frozen models", [], "build_frozen_models")
        optimizers = self._labels("optimizer")
        self._part("optimizers", optimizers, "build_optimizers")
        for label in optimizers:
            self.lines += rules.of_optimizers.get(label, [])
        self._part("schedules", self._labels("schedule"), None, default="a constant learning rate")
        self._hooks()
        self._part("writers", self._labels("writer"), "build_writers")
        if self.config.evaluation.metrics:
            self._part("metrics", self._labels("metric"), None)
        if self.config.evaluation.benchmarks:
            self._part("benchmarks", self._labels("benchmark"), None)
        self._trainer()

    def _labels(self, kind: str) -> list[str]:
        return [label for label, each, _ in self.components if each == kind]

    def _part(
        self,
        name: str,
        labels: list[str],
        trainer_method: str | None,
        *,
        task_method: str | None = None,
        default: str = "none",
        remark: str = "",
    ) -> None:
        """Adds the origin of a part: the method of the trainer or the task that overrides the default, or its
        section."""
        calls = self.trainer_calls(trainer_method) if trainer_method else []
        prefix = "what it asks `build` for: " if calls else ""
        if not calls and task_method is not None:
            calls = self.task_calls(task_method)
            prefix = "has no effect and will be rejected: " if calls else ""
        sections = [
            self._section(label, component, prefix)
            for label, _, component in self.components
            if label in labels and label in self.found.parts
        ]
        has_problem = any(label in self.found.problems for label in labels)
        self.phase(name, [*calls, *sections], 1, default="" if has_problem else default, remark=remark)
        for label in labels:
            self.problem(label)

    def _section(self, label: str, component: Component, prefix: str = "") -> Line:
        found = call_of(self.found.parts[label])
        where = self.config.written_at((*label.split("."), "type")) or "default"
        named = label.split(".")[2:3] if label.startswith(("data.eval.", "evaluation.metrics.", "trainer.opt")) else []
        name = "".join(f"{each}: " for each in named) + component.type
        return replace(found, text=f"{name} ({where})", remark=f"{prefix}{found.remark}")

    def _split(self) -> str:
        split, names = self.config.data.split, self.config.data.cut_off
        if isinstance(split, tuple):
            return f"data.train is split {' : '.join(f'{one:g}' for one in split)} by data.split"
        sizes = " and ".join(f"{getattr(split, name):,} samples for {name}" for name in names)
        return f"data.split takes {sizes} from data.train" if names else ""

    def _hooks(self) -> None:
        calls = self.trainer_calls("build_hooks")
        remark = "it may add or remove hooks; the others are those of build.hooks()" if calls else ""
        calls += [call_of(each) for each in DEFAULT_HOOKS]
        for number, component in enumerate(self.config.hooks):
            label = f"hooks.{number}"
            if label not in self.found.parts:
                continue
            call = self._section(label, component)
            if component.type == "every":
                function, steps = component.arguments.get("call"), component.arguments.get("steps")
                call = replace(call, remark=f"calls {function} every {steps} steps")
            elif not isinstance(self.found.parts[label], type):
                call = replace(call, remark="returns a hook; its events are known only once it is built")
            calls.append(call)
        self.phase("hooks, in the order of their calls", calls, 1, remark=remark)
        for number in range(len(self.config.hooks)):
            self.problem(f"hooks.{number}")
            self.problem(f"hooks.{number}.call")

    def _trainer(self) -> None:
        found = call_of(self.found.trainer)
        where = self.config.written_at(("trainer", "type")) or "default"
        named = replace(found, text=f"{found.text} ({where})")
        calls = [named, *self.trainer_calls("__init__"), *self.trainer_calls("post_init")]
        options = ", ".join(f"{name}: {_shown(value)}" for name, value in self.config.trainer.options.items())
        self.phase("trainer", calls, 1, remark=f"with {options}" if options else "")
        self.problem("trainer")

    # the loop

    def add_loop(self) -> None:
        """Adds the lines of the loop."""
        self.lines.append(Line("heading", f"The loop: {self._limits()}; {self._batch()}"))
        if overridden(self.found.trainer, "train", Trainer):
            self.phase("train", self.trainer_calls("train"), 0, remark="is the loop itself, or wraps it")
        self._event("load_state_dict", 0, "where the run resumes from a checkpoint")
        self._event("before_train", 0)
        self.lines.append(Line("phase", "while step < max_steps:"))
        self._event("before_epoch", 1, "if a new epoch begins")
        self._event("before_step", 1)
        self.phase("batch = next_train_inputs(iterator)", self.trainer_calls("next_train_inputs"), 1)
        self._train_step()
        self.lines.append(Line("phase", "step += 1", 1))
        self._event("after_step", 1)
        self._evaluate()
        self._event("after_epoch", 1, "if an epoch ended")
        self._write()
        self._save()
        self._event("after_train", 0, "not after an error or an interruption")
        self._event("close", 0, "always, also after an error")
        self._other_overrides()

    def _limits(self) -> str:
        names = ("steps", "epochs", "samples", "tokens")
        given = [(getattr(self.config.trainer, f"max_{name}"), name) for name in names]
        limits = [f"{value:,g} {name}" for value, name in given if value is not None]
        if not limits:
            return "without a limit, which training will reject"
        return f"up to {limits[0]}" if len(limits) == 1 else f"until the first of {', '.join(limits)}"

    def _batch(self) -> str:
        try:
            plan = resolve_batch(self.config, 1, makes_batches=may_make_batches(self.found.trainer, self.config))
        except TrainwrightError as error:
            return str(error)
        if plan.varies:
            size = f" in micro-batches of {plan.micro_batch_size}" if plan.splits_by_size else ""
            return f"as many samples a step as next_train_inputs returns{size}"
        split = f" in {plan.gradient_accumulation_steps} micro-batches" if plan.gradient_accumulation_steps > 1 else ""
        return f"{plan.global_batch_size} samples a step{split}"

    def _event(self, event: str, depth: int, remark: str = "") -> None:
        """Adds an event with the hooks that override it, in the order of their calls; trainer and task also have
        state."""
        calls = [*self.trainer_calls(event), *self.task_calls(event)] if event.endswith("state_dict") else []
        for use in [*(HookUse(each) for each in DEFAULT_HOOKS), *self.found.hooks]:
            found: list[Line] = []
            if use.function is not None and event == use.event:
                found = [call_of(use.function)]
            elif isinstance(use.target, type) and overridden(use.target, event, Hook):
                found = calls_of(use.target, event, Hook)
            period = f"{use.period}: " if use.period and event.endswith(("_step", "_epoch")) else ""
            calls += [replace(each, remark=f"{period}{each.remark}") for each in found]
        self.phase(event, calls, depth, default="no hook", remark=remark)

    def _train_step(self) -> None:
        self.phase("result = train_step(batch)", self.trainer_calls("train_step"), 1)
        for method in ("begin_update", "micro_batches", "run_forward"):
            if overridden(self.found.trainer, method, Trainer):
                self.trainer_phases(method)
        forward = self.trainer_calls("forward")
        functions = [function for _, function in overrides_of(self.found.trainer, "forward", Trainer)]
        if not functions or any("task" in names_used(function) for function in functions):
            forward += self.task_calls("forward")
        model = self.found.parts.get("model")
        builds_model = self.trainer_calls("build_model") or self.task_calls("build_model")
        if isinstance(model, type) and not builds_model and hasattr(model, "forward"):
            remark = ": ".join(filter(None, ("the model", first_line(model.forward))))
            forward.append(call_of(model.forward, remark=remark))
        self.phase("forward, for each micro-batch", forward, 2)
        optimizers = [replace(each, remark="builds the optimizers") for each in self.trainer_calls("build_optimizers")]
        classes = [self.found.parts[label] for label in self._labels("optimizer") if label in self.found.parts]
        steps = [call_of(each.step, f"{each.__name__}.step") for each in classes if hasattr(each, "step")]
        in_backward = ", during the backward pass" if self.config.trainer.optimizer_in_backward else ""
        self.phase(f"the optimizer's step{in_backward}", optimizers[:1] or steps, 2)

    def _evaluate(self) -> None:
        data = self.config.data
        builders = self.trainer_calls("build_eval_data") or self.task_calls("build_dataset")
        sets = [*data.eval] or [name for name in data.cut_off if name != "test"]
        sets += [benchmark_name(each) for each in self.config.evaluation.benchmarks]
        if not sets and not builders and data.test is None:
            self.lines.append(Line("phase", "evaluate", 1, remark="never: there is no evaluation set (data.eval)"))
            return
        names = f"the sets of {builders[0].text}" if builders else ", ".join(sets)
        test = "; test once, at the end" if data.test is not None or "test" in data.cut_off else ""
        when = f"{names}: {_period(self.config.evaluation)}{test}" if names else "test, at the end"
        self.lines.append(Line("phase", "evaluate", 1, remark=when))
        self._event("before_eval", 2)
        self.trainer_phases("eval_begin", "next_eval_inputs", "eval_step")
        if self.task_calls("aggregate_logs"):
            self.phase("aggregate_logs", self.task_calls("aggregate_logs"), 2)
        self.phase("eval_end", [*self.trainer_calls("eval_end"), *self.task_calls("reduce_aggregated_logs")], 2)
        self._event("after_eval", 2)

    def _write(self) -> None:
        writers = [self.found.parts[label] for label in self._labels("writer") if label in self.found.parts]
        calls = [call_of(each.write) for each in writers if hasattr(each, "write")]
        self.lines.append(Line("phase", "write", 1, remark=_period(self.config.log)))
        self.trainer_phases("train_loop_end")
        self.phase("the writers", self.trainer_calls("build_writers") or calls, 2, default="none")
        self.trainer_phases("train_loop_begin")

    def _save(self) -> None:
        best = self.config.checkpoint.keep_best
        when = _period(self.config.checkpoint)
        if best is not None:
            when += f"; and when {best.metric} is the {'lowest' if best.mode == 'min' else 'highest'} so far"
        self.lines.append(Line("phase", "save", 1, remark=when))
        self._event("state_dict", 2)
        self._event("after_save", 2)

    def _other_overrides(self) -> None:
        """Adds the methods that a user trainer overrides and that are not in any phase."""
        shown = {line.text for line in self.lines if line.kind == "call"}
        names = [name for name in sorted(vars(Trainer)) if not name.startswith(("__", "build_"))]
        overrides = [call for name in names for call in self.trainer_calls(name)]
        calls = [call for call in overrides if call.text not in shown]
        if calls:
            self.phase("also overridden", calls, 0)


def _period(section: EvaluationSection | CheckpointSection | LogSection) -> str:
    steps, epochs = section.every_steps, section.every_epochs
    if steps == 1:
        return "every step"
    periods = [f"every {steps:,} steps"] if steps is not None else []
    if epochs is not None:
        periods.append("every epoch" if epochs == 1 else f"every {epochs:g} epochs")
    return f"{', '.join(periods)}, and at the end" if periods else "once, at the end"
