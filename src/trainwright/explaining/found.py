"""The classes that a config names, found and read: which methods they replace, and where these are written.

Importing a user's file is all that happens to it; no class is made into an object. What cannot be found is kept
as a problem, in words. What is told of all this is story.py's.
"""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import trainwright
from trainwright import registry
from trainwright.config import Component, RunConfig
from trainwright.errors import TrainwrightError
from trainwright.loop.task import Task
from trainwright.loop.trainer import Trainer
from trainwright.tracebacks import shown_path
from trainwright.user_code import parameters_of

OURS = "trainwright's own"
_PACKAGE = Path(trainwright.__file__).parent


@dataclass(frozen=True)
class Act:
    """Something that is called: its name, where it is written, and its first docstring line."""

    name: str
    place: str
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
