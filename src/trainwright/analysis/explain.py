"""`trainwright explain`: the loop as a run will execute it, with the user's code in its place, read from classes."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from torch import Tensor, nn

import trainwright
from trainwright.config import Component, ModelSection, RunConfig, resolve_batch
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.hooks.preemption import ObeyPreemption
from trainwright.hooks.throughput import TimeSteps
from trainwright.hooks.watchdog import Watchdog
from trainwright.loop.hook import Hook
from trainwright.loop.task import Task
from trainwright.loop.trainer import Trainer
from trainwright.models.from_config import claimed_modules, freeze
from trainwright.models.lora import add_lora
from trainwright.models.model import Model, check_type
from trainwright.models.names import as_globs, matched_parameters
from trainwright.models.presets import preset_settings
from trainwright.models.pretrained import CONFIG_FILE, home_folders, on_meta, read_config_file
from trainwright.optim.param_groups import describe_unowned, make_groups, read_rules
from trainwright.registry import resolve as registry
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import parameters_of

OURS = "trainwright's own"
_PACKAGE = Path(trainwright.__file__).parent


@dataclass(frozen=True)
class Act:
    """Something that is called: its name, where it is written, and its first docstring line."""

    name: str
    location: str
    remark: str
    is_users: bool


@dataclass(frozen=True)
class HookUse:
    """A hook as the config names it; `function` is what an `every` calls."""

    target: Any
    period: str = ""
    function: Any = None


@dataclass
class Found:
    """The classes that a config names, and what could not be found."""

    trainer: type[Trainer] = Trainer
    task: type[Task] | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    hooks: list[HookUse] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def find_all(config: RunConfig) -> Found:
    """Finds every class that the config names; what is missing becomes a problem under its dotted name."""
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
    except TrainwrightError as error:
        found.problems["imports"] = str(error)
    for label, kind, component in components_of(config):
        # The type may have been overridden in a component that the file begins: its own place says more.
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
    """Yields each component of the config with its dotted name and kind, in the order of building."""
    single: list[tuple[str, str, Component | None]] = [
        ("task", "task", config.task),
        ("model", "model", config.model),
        ("data.collator", "collator", config.data.collator),
        ("data.train", "dataset", config.data.train),
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
    for label, kind, component in single:
        if component is not None:
            yield label, kind, component


def _hook_use(target: Any, component: Component, label: str, find: Callable[..., Any]) -> HookUse:
    if component.type == "every":
        steps, call = component.arguments.get("steps"), component.arguments.get("call")
        function = find(f"{label}.call", "hook", str(call), component.origin)
        return HookUse(target, f"every {steps} steps", function)
    period = component.arguments.get("every_steps")
    if period is None and "every_steps" in (parameters := parameters_of(target) or {}):
        period = parameters["every_steps"].default
    return HookUse(target, f"every {period} steps" if isinstance(period, int) and period > 1 else "")


def overridden(cls: type, method: str, contract: type) -> bool:
    """Does this class replace a method of its contract?"""
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
        if owner is contract or "super" not in names_in(function):
            break
    return found


def acts_of(cls: type, method: str, contract: type) -> list[Act]:
    """Returns who acts where a contract's method is called, in call order; nobody where it is not overridden."""
    acts = []
    for owner, function in overrides_of(cls, method, contract):
        remark = f"{OURS}, by super()" if owner is contract else first_line(function)
        acts.append(Act(f"{owner.__name__}.{method}", _place(function), remark, _is_users(function)))
    return acts


def act_of(target: Any, remark: str | None = None) -> Act:
    """Returns a class or function as one who acts; without a remark, its own first docstring line is it."""
    name = getattr(target, "__qualname__", repr(target))
    return Act(name, _place(target), first_line(target) if remark is None else remark, _is_users(target))


def names_in(function: Any) -> set[str]:
    """Returns the attributes and names that a function uses, its inner functions included."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    waiting, names = [code] if code else [], set()
    while waiting:
        one = waiting.pop()
        names |= {*one.co_names}
        waiting += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    return names


def first_line(target: Any) -> str:
    """Returns the first docstring line, or nothing."""
    # The object's own: a class without words would show those of the class that it inherits from.
    words = (getattr(target, "__doc__", None) or "").strip()
    return words.splitlines()[0].strip() if words else ""


def _file(target: Any) -> Path | None:
    try:
        return Path(inspect.getfile(inspect.unwrap(target)))
    except (TypeError, OSError):
        return None


def _is_users(target: Any) -> bool:
    file = _file(target)
    if file is None:
        return False
    libraries = (sysconfig.get_path("stdlib"), _PACKAGE)
    return "site-packages" not in file.parts and not any(file.is_relative_to(one) for one in libraries)


def _place(target: Any) -> str:
    """Returns file:line of the `def` or `class`, with a library's file named from its package on."""
    file = _file(target)
    if file is None:
        return ""
    shown = shown_path(file)
    if file.is_relative_to(_PACKAGE):
        shown = file.relative_to(_PACKAGE.parent).as_posix()
    elif "site-packages" in file.parts:
        shown = "/".join(file.parts[file.parts.index("site-packages") + 1 :])
    try:
        source, first = inspect.getsourcelines(inspect.unwrap(target))
    except (OSError, TypeError):
        return shown
    words = ("def ", "class ", "async ")
    below = next((number for number, line in enumerate(source) if line.lstrip().startswith(words)), 0)
    return f"{shown}:{first + below}"


MOST_SHOWN = 2


@dataclass(frozen=True)
class ExplainedRule:
    """A rule of the run file and what it does, or a problem in words."""

    text: str
    remark: str = ""
    is_problem: bool = False


class Weights:
    """Reads the rules of a config in the order in which they act; `model` is None once it cannot be known."""

    def __init__(self, config: RunConfig, target: Any) -> None:
        self.config = config
        self.section = config.model
        self.of_model: list[ExplainedRule] = []
        self.of_optimizers: dict[str, list[ExplainedRule]] = {}
        self.model: nn.Module | None = None
        if self.section is not None:
            reserved = self.section.reserved
            self._build(self.section, target)
            for key, tell in (("replace", self._replace), ("lora", self._lora), ("freeze", self._freeze)):
                if key in reserved:
                    self._try(f"model.{key}", lambda tell=tell, key=key: tell(reserved[key]))
            self._count()
        self._optimizers()

    def _try(self, label: str, tell: Any) -> None:
        """Runs one of the methods below; what it rejects is a problem, and the model is known no longer."""
        try:
            tell()
        except TrainwrightError as error:
            words = error.problem
            section, _, key = label.rpartition(".")
            if section and words.startswith(key):
                words = f"{section}.{words}"  # freeze.py speaks of `freeze`, wherever that stands
            elif not words.startswith(label):
                words = f"{label}: {words}"
            where = error.where if error.where is not None else self.config.origin(label)
            self.of_model.append(ExplainedRule(f"{where}: {words}" if where is not None else words, is_problem=True))
            self.model = None

    def _build(self, section: ModelSection, target: Any) -> None:
        is_shipped = isinstance(target, type) and issubclass(target, Model) and target.is_shipped()
        arguments = dict(section.arguments)
        preset = arguments.pop("preset", None)
        if preset is not None:
            self.of_model.append(ExplainedRule(f"preset {preset}", f"but {_words(arguments)}" if arguments else ""))
        given = section.reserved.get("pretrained")
        folder = self._pretrained(given) if given is not None else None

        def make() -> None:
            settings = arguments
            if preset is not None:
                settings = preset_settings(target, preset)
                words = _words(settings) + (f", but {_words(arguments)}" if arguments else "")
                self.of_model[0] = ExplainedRule(f"preset {preset}", words)
                settings |= arguments
            elif folder is not None:
                config = read_config_file(folder)
                check_type(target, config)
                settings = target.settings_from_hugging_face(config) | arguments
            registry.check_arguments(target, settings, label="model")
            with on_meta():
                self.model = target(**settings)

        if is_shipped and (given is None or folder is not None):
            self._try("model", make)

    def _pretrained(self, given: Any) -> Path | None:
        """Says where the weights come from, and returns the folder if it is on this machine."""
        settings = given if isinstance(given, Mapping) else {"folder": given}
        name = settings.get("folder")
        options = _words({key: value for key, value in settings.items() if key != "folder"})
        also = f"; {options}" if options else ""
        homes = home_folders() if settings.get("home_path") is None else [Path(str(settings["home_path"])).expanduser()]
        locations = [Path(self.config.project_dir), *homes]
        folders = [location / Path(str(name)).expanduser() for location in locations]
        folder = next((each for each in folders if (each / CONFIG_FILE).is_file()), None)
        if folder is None:
            found = "is not in these words on this machine; it is looked for when training starts"
            self.of_model.append(ExplainedRule(f"pretrained {name}", f"{found}{also}"))
            return None
        files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
        size = sum(file.stat().st_size for file in files)
        held = f"{len(files)} file{'s' if len(files) != 1 else ''} of weights, {_bytes(size)}"
        self.of_model.append(ExplainedRule(f"pretrained {name}", f"from {shown_path(folder)}: {held}{also}"))
        return folder

    def _replace(self, given: Any) -> None:
        rules = {glob: _type_of(rule) for glob, rule in _mapping(given).items()}
        locations = {} if self.model is None else claimed_modules(self.model, rules)
        for glob, name in rules.items():
            where = self.config.origin("model.replace")
            registry.find("model", name, project_dir=self.config.project_dir, where=where, label="model.replace")
            names = [location for location, owner in locations.items() if owner == glob]
            self.of_model.append(ExplainedRule(f'replace "{glob}"', f"by {name}{_counted(names, 'module')}"))
        self.model = None  # what the new modules hold is known once they are made

    def _lora(self, given: Any) -> None:
        settings: dict[str, Any] = {
            key: list(value) if isinstance(value, tuple) else value for key, value in _mapping(given).items()
        }
        registry.check_arguments(add_lora, settings, label="model.lora", provided=("model",))
        said = _words({key: value for key, value in settings.items() if key != "match"})
        globs = as_globs("lora.match", settings["match"])
        layers = [] if self.model is None else add_lora(self.model, **settings)
        beside = ", ".join(globs)
        words = f"adapters of {said}" if said else "adapters"
        self.of_model.append(ExplainedRule(f'lora "{beside}"', words + _counted(layers, "layer")))

    def _freeze(self, given: Any) -> None:
        for glob in as_globs("freeze", given):
            names = [] if self.model is None else matched_parameters("freeze", glob, self.model)
            own = {} if self.model is None else dict(self.model.named_parameters(remove_duplicate=False))
            self.of_model.append(
                ExplainedRule(f'freeze "{glob}"', _weights(own[name] for name in names) if names else "")
            )
        if self.model is not None:
            freeze(self.model, given)

    def _count(self) -> None:
        if self.model is None:
            return
        parameters = list(self.model.parameters())
        total = sum(each.numel() for each in parameters)
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        share = "all" if trained == total else f"{trained:,} ({100 * trained / max(total, 1):.3g} %)"
        reserved = self.section.reserved if self.section is not None else {}
        also = "; beside adapters also what the files lack" if {"lora", "pretrained"} <= set(reserved) else ""
        self.of_model.append(ExplainedRule(f"{total:,} weights", f"of which {share} are trained{also}"))

    def _optimizers(self) -> None:
        trainer = self.config.trainer
        trainable = {} if self.model is None else dict(self.model.named_parameters())
        trainable = {name: each for name, each in trainable.items() if each.requires_grad}
        if trainer.optimizer is not None:
            self._groups("trainer.optimizer", trainer.optimizer, trainable)
        for name, entry in trainer.optimizers.items():
            own = {key: each for key, each in trainable.items() if any(fnmatchcase(key, glob) for glob in entry.match)}
            label = f"trainer.optimizers.{name}.optimizer"
            words = "" if self.model is None else _weights(own.values())
            self.of_optimizers[label] = [ExplainedRule(f"{name}: match {', '.join(entry.match)}", words)]
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
            out.append(ExplainedRule(str(error), is_problem=True))
            return
        left = dict(owned)
        for rule in rules:
            names = [name for name in left if any(fnmatchcase(name, glob) for glob in rule.globs)]
            found = "" if self.model is None else f": {_weights(left.pop(name) for name in names)}"
            out.append(ExplainedRule(f'group "{", ".join(rule.globs)}"', f"{_words(rule.settings)}{found}"))
        if rules and left:
            out.append(ExplainedRule("the rest", f"the optimizer's own settings: {_weights(left.values())}"))


def _mapping(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"must be a mapping, got {given!r}.")
    return given


def _type_of(rule: Any) -> str:
    return str(rule.get("type") if isinstance(rule, Mapping) else rule)


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in settings.items())


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{_words(value)}}}"
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list | tuple) else str(value)


def _counted(names: list[str], what: str) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:MOST_SHOWN]) + (", …" if len(names) > MOST_SHOWN else "")
    return f": {len(names)} {what}{'s' if len(names) != 1 else ''} ({shown})"


def _weights(parameters: Iterable[Tensor]) -> str:
    sizes = [each.numel() for each in parameters]
    return f"{len(sizes)} parameter{'s' if len(sizes) != 1 else ''}, {sum(sizes):,} weights"


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB"


DEFAULT_HOOKS: tuple[type[Hook], ...] = (TimeSteps, ObeyPreemption, Watchdog)
"""The classes of the hooks that every run has, in order: parts.py makes them before those of the config."""


@dataclass(frozen=True)
class Line:
    """One line of the explanation: a heading, a phase of the loop, somebody who acts in it, or a problem."""

    kind: Literal["heading", "phase", "act", "problem"]
    text: str
    depth: int = 0
    location: str = ""
    remark: str = ""
    is_users: bool = False


def explain(config: RunConfig) -> list[Line]:
    """Returns the run as lines: how its parts are built, then its loop."""
    found = find_all(config)
    return [*_Construction(config, found).lines(), *_Loop(config, found).lines()]


class _Writer:
    """Collects lines for a config and the classes found for it."""

    def __init__(self, config: RunConfig, found: Found) -> None:
        self.config = config
        self.found = found
        self.out: list[Line] = []

    def phase(self, text: str, acts: list[Act], *, depth: int, nobody: str = OURS, remark: str = "") -> None:
        """Adds a phase and who acts in it; where nobody does, one line says so."""
        self.out.append(Line("phase", text, depth, remark=remark if acts else nobody))
        for act in acts:
            self.out.append(Line("act", act.name, depth + 1, act.location, act.remark, act.is_users))

    def problem(self, label: str, *, depth: int = 1) -> None:
        """Adds the problem with a part, if it has one."""
        if label in self.found.problems:
            self.out.append(Line("problem", self.found.problems[label], depth))

    def trainer_acts(self, method: str) -> list[Act]:
        """The overrides of a Trainer method, in call order."""
        return acts_of(self.found.trainer, method, Trainer)

    def task_acts(self, method: str) -> list[Act]:
        """The overrides of a Task method, in call order."""
        return acts_of(self.found.task, method, Task) if self.found.task else []


class _Construction(_Writer):
    """How the parts are made, in the order of build.py."""

    def lines(self) -> list[Line]:
        """Returns the lines."""
        self.out.append(Line("heading", "Construction, in this order"))
        self.problem("imports")
        self._part("task", ["task"], "build_task", ours="Task: forward calls model(**batch)")
        self._part("model", ["model"], "build_model", task_method="build_model")
        weights = Weights(self.config, self.found.parts.get("model"))
        if not self.task_acts("build_model"):
            self._rules(weights.of_model)
        self._part("data.collator", ["data.collator"], "build_collator")
        self._part("data.train", ["data.train"], "build_train_data", task_method="build_dataset")
        sets = [f"data.eval.{name}" for name in self.config.data.eval]
        self._part("data.eval", sets, "build_eval_data", task_method="build_dataset", ours=self._cut() or "none")
        if self.config.data.test is not None:
            self._part("data.test", ["data.test"], None, task_method="build_dataset")
        optimizers = [label for label, kind, _ in components_of(self.config) if kind == "optimizer"]
        self._part("optimizers", optimizers, "build_optimizers", ours="none")
        for label in optimizers:
            self._rules(weights.of_optimizers.get(label, []))
        schedules = [label for label, kind, _ in components_of(self.config) if kind == "schedule"]
        self._part("schedules", schedules, None, ours="a constant learning rate")
        self._hooks()
        self._part("writers", [f"writers.{n}" for n in range(len(self.config.writers))], "build_writers", ours="none")
        if self.config.evaluation.metrics:
            self._part("metrics", [f"evaluation.metrics.{name}" for name in self.config.evaluation.metrics], None)
        self._trainer()
        return self.out

    def _part(
        self,
        name: str,
        labels: list[str],
        trainer_method: str | None,
        *,
        task_method: str | None = None,
        ours: str = "none",
    ) -> None:
        """Says who makes a part: the trainer's or the task's own method, or its section."""
        acts = self.trainer_acts(trainer_method) if trainer_method else []
        builds_itself = "what it asks `build` for: " if acts else ""
        if not acts and task_method is not None:
            acts = self.task_acts(task_method)
            builds_itself = "has no effect and will be rejected: " if acts else ""
        given = [
            self._section_act(label, component, builds_itself)
            for label, _, component in components_of(self.config)
            if label in labels and label in self.found.parts
        ]
        nobody = "" if any(label in self.found.problems for label in labels) else ours
        self.phase(name, [*acts, *given], depth=1, nobody=nobody, remark=self._cut() if name == "data.train" else "")
        for label in labels:
            self.problem(label, depth=2)

    def _rules(self, rules: list[ExplainedRule]) -> None:
        """Adds what the rules of a section do, below it."""
        for rule in rules:
            self.out.append(Line("problem" if rule.is_problem else "phase", rule.text, 2, remark=rule.remark))

    def _section_act(self, label: str, component: Component, prefix: str) -> Act:
        found = act_of(self.found.parts[label])
        where = self.config.written_at((*label.split("."), "type")) or "default"
        named = label.split(".")[2:3] if label.startswith(("data.eval.", "evaluation.metrics.", "trainer.opt")) else []
        name = "".join(f"{each}: " for each in named) + component.type
        return Act(f"{name} ({where})", found.location, f"{prefix}{found.remark}", found.is_users)

    def _cut(self) -> str:
        split, names = self.config.data.split, self.config.data.cut_off
        if isinstance(split, tuple):
            return f"data.train is cut {' : '.join(f'{one:g}' for one in split)} by data.split"
        sizes = " and ".join(f"{getattr(split, name):,} samples for {name}" for name in names)
        return f"data.split cuts {sizes} off from data.train" if names else ""

    def _hooks(self) -> None:
        acts = self.trainer_acts("build_hooks")
        remark = "it may add or drop hooks; the others are what build.hooks() gives it" if acts else ""
        defaults = [act_of(each) for each in DEFAULT_HOOKS]
        given = [self._hook(number, each) for number, each in enumerate(self.config.hooks)]
        listed = [*acts, *defaults, *filter(None, given)]
        self.phase("hooks, in the order of their calls", listed, depth=1, remark=remark)
        for number in range(len(self.config.hooks)):
            self.problem(f"hooks.{number}", depth=2)
            self.problem(f"hooks.{number}.call", depth=2)

    def _hook(self, number: int, component: Component) -> Act | None:
        label = f"hooks.{number}"
        if label not in self.found.parts:
            return None
        act = self._section_act(label, component, "")
        if component.type == "every":
            remark = f"calls {component.arguments.get('call')} every {component.arguments.get('steps')} steps"
            return Act(act.name, act.location, remark, act.is_users)
        if not isinstance(self.found.parts[label], type):
            return Act(
                act.name, act.location, "makes a hook; when that acts is known only once it is made", act.is_users
            )
        return act

    def _trainer(self) -> None:
        found = act_of(self.found.trainer)
        where = self.config.written_at(("trainer", "type")) or "default"
        named = Act(f"{found.name} ({where})", found.location, found.remark, found.is_users)
        acts = [named, *self.trainer_acts("__init__"), *self.trainer_acts("post_init")]
        options = ", ".join(f"{name}: {value}" for name, value in self.config.trainer.options.items())
        self.phase("trainer", acts, depth=1, remark=f"with {options}" if options else "")
        self.problem("trainer", depth=2)


class _Loop(_Writer):
    """The loop of loop/trainer.py, line by line."""

    def lines(self) -> list[Line]:
        """Returns the lines."""
        self.out.append(Line("heading", f"The loop: {self._limits()}; {self._batch()}"))
        if overridden(self.found.trainer, "train", Trainer):
            self.phase("train", self.trainer_acts("train"), depth=0, remark="is the loop itself, or goes around it")
        self._event("load_state_dict", 0, "where the run goes on from a checkpoint")
        self._event("before_train", 0)
        self.out.append(Line("phase", "while step < max_steps:"))
        self._event("before_step", 1)
        self.phase("batch = next_train_inputs(iterator)", self.trainer_acts("next_train_inputs"), depth=1)
        self._train_step()
        self.out.append(Line("phase", "step += 1", 1))
        self._event("after_step", 1)
        self._evaluate()
        self._write()
        self._save()
        self._event("after_train", 0, "not after an error or an interruption")
        self._event("close", 0, "always, also after an error")
        self._rest()
        return self.out

    def _limits(self) -> str:
        trainer = self.config.trainer
        names = ("steps", "epochs", "samples", "tokens")
        given = [(getattr(trainer, f"max_{name}"), name) for name in names]
        limits = [f"{value:,g} {name}" for value, name in given if value is not None]
        if not limits:
            return "without a limit, which training will reject"
        return f"up to {limits[0]}" if len(limits) == 1 else f"until the first of {', '.join(limits)}"

    def _batch(self) -> str:
        try:
            plan = resolve_batch(self.config, 1)
        except TrainwrightError as error:
            return str(error)
        cut = f" in {plan.gradient_accumulation_steps} micro-batches" if plan.gradient_accumulation_steps > 1 else ""
        return f"{plan.global_batch_size} samples a step{cut}"

    def _event(self, event: str, depth: int, when: str = "") -> None:
        """Adds an event with the hooks that act in it, in the order of their calls."""
        self.phase(event, self._hook_acts(event), depth=depth, nobody="no hook", remark=when)

    def _hook_acts(self, event: str) -> list[Act]:
        acts = []
        for use in [*(HookUse(each) for each in DEFAULT_HOOKS), *self.found.hooks]:
            if use.function is not None and event == "after_step":
                found = act_of(use.function)
                acts.append(Act(found.name, found.location, f"{use.period}: {found.remark}", found.is_users))
            elif isinstance(use.target, type) and overridden(use.target, event, Hook):
                for found in acts_of(use.target, event, Hook):
                    period = f"{use.period}: " if use.period and event.endswith("_step") else ""
                    acts.append(Act(found.name, found.location, f"{period}{found.remark}", found.is_users))
        return acts

    def _train_step(self) -> None:
        acts = self.trainer_acts("train_step")
        self.phase("result = train_step(batch)", acts, depth=1)
        for method in ("begin_update", "micro_batches", "run_forward"):
            if self.trainer_acts(method):
                self.phase(method, self.trainer_acts(method), depth=2)
        forward = self.trainer_acts("forward")
        functions = [function for _, function in overrides_of(self.found.trainer, "forward", Trainer)]
        if not functions or any("task" in names_in(function) for function in functions):
            forward += self.task_acts("forward")
        model = self.found.parts.get("model")
        builds_model = self.trainer_acts("build_model") or self.task_acts("build_model")
        if isinstance(model, type) and not builds_model and hasattr(model, "forward"):
            # An inherited forward is torch's stub for a missing one, or that of the class that wrote it.
            forward.append(act_of(model.forward, ": ".join(filter(None, ("the model", first_line(model.forward))))))
        self.phase("forward, for each micro-batch", forward, depth=2)
        self.phase("the optimizer's step", self._optimizer_acts(), depth=2)

    def _optimizer_acts(self) -> list[Act]:
        acts = self.trainer_acts("build_optimizers")[:1]
        if acts:
            return [Act(acts[0].name, acts[0].location, "makes the optimizers", acts[0].is_users)]
        labels = [label for label, kind, _ in components_of(self.config) if kind == "optimizer"]
        classes = [self.found.parts[label] for label in labels if label in self.found.parts]
        steps = [(each, act_of(each.step)) for each in classes if hasattr(each, "step")]
        return [Act(f"{each.__name__}.step", act.location, act.remark, act.is_users) for each, act in steps]

    def _evaluate(self) -> None:
        when = self._when(self.config.evaluation.every_steps)
        builders = self.trainer_acts("build_eval_data") or self.task_acts("build_dataset")
        sets = [*self.config.data.eval] or [name for name in self.config.data.cut_off if name != "test"]
        if not sets and not builders and self.config.data.test is None:
            self.out.append(Line("phase", "evaluate", 1, remark="never: there is no evaluation set (data.eval)"))
            return
        names = f"the sets of {builders[0].name}" if builders else ", ".join(sets)
        has_test = self.config.data.test is not None or "test" in self.config.data.cut_off
        test = "; test once, at the end" if has_test else ""
        self.out.append(Line("phase", "evaluate", 1, remark=f"{names}: {when}{test}" if names else "test, at the end"))
        self._event("before_eval", 2)
        for method in ("eval_begin", "next_eval_inputs", "eval_step"):
            self.phase(method, self.trainer_acts(method), depth=2)
        if self.task_acts("aggregate_logs"):
            self.phase("aggregate_logs", self.task_acts("aggregate_logs"), depth=2)
        self.phase("eval_end", [*self.trainer_acts("eval_end"), *self.task_acts("reduce_aggregated_logs")], depth=2)
        self._event("after_eval", 2)

    def _write(self) -> None:
        labels = [f"writers.{number}" for number in range(len(self.config.writers))]
        writers = [self.found.parts[label] for label in labels if label in self.found.parts]
        self.out.append(Line("phase", "write", 1, remark=self._when(self.config.log.every_steps)))
        self.phase("train_loop_end", self.trainer_acts("train_loop_end"), depth=2)
        acts = self.trainer_acts("build_writers") or [act_of(each.write) for each in writers if hasattr(each, "write")]
        self.phase("the writers", acts, depth=2, nobody="none")
        self.phase("train_loop_begin", self.trainer_acts("train_loop_begin"), depth=2)

    def _save(self) -> None:
        best = self.config.checkpoint.keep_best
        when = self._when(self.config.checkpoint.every_steps)
        if best is not None:
            when += f"; and when {best.metric} is the {'lowest' if best.mode == 'min' else 'highest'} so far"
        self.out.append(Line("phase", "save", 1, remark=when))
        self._event("state_dict", 2)
        self._event("after_save", 2)

    def _when(self, every_steps: int | None) -> str:
        if every_steps is None:
            return "once, at the end"
        return "every step" if every_steps == 1 else f"every {every_steps:,} steps, and at the end"

    def _rest(self) -> None:
        """Names what else a user's trainer replaces, so that no override goes unseen."""
        shown = {line.text for line in self.out if line.kind == "act"}
        skipped = {"__init__", "post_init", "train"} | {name for name in dir(Trainer) if name.startswith("build_")}
        acts = []
        for name in sorted(vars(Trainer)):
            is_plain = not name.startswith("__") and name not in skipped
            if is_plain and overridden(self.found.trainer, name, Trainer):
                acts += [act for act in self.trainer_acts(name) if act.name not in shown]
        if acts:
            self.phase("also replaced", acts, depth=0)
