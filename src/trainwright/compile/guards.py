"""Finds Python values that a captured step changes, because a replay would not change them.

`MutationGuard` compares them before and after the captured step, and names the line of user code that changes one.
`Fingerprint` compares them before a replay: after a change the step is captured again. Both cover attributes of the
model's modules, the trainer, the task, user classes and their files, and the captured optimizers. They do not cover
objects that only a closure refers to.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.errors import TrainwrightError
from trainwright.optim.device_step import has_step_hooks, rate_stamp
from trainwright.parallel.mesh import is_split, local
from trainwright.user_code.locations import is_user_code
from trainwright.user_code.mutations import line_of_change

SCALARS = (bool, int, float, complex, str, bytes, type(None))
ABSENT = object()
"""The value of an attribute that does not exist."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_MODULE_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_NOT_INSPECTED = (type, ModuleType, FunctionType, MethodType, Tensor, torch.Generator)
_LIBRARIES = ("torch.", "trainwright.", "builtins.", "numpy.", "logging.", "_thread.")
_REQUIRES_GRAD = attrgetter("requires_grad")
_MAX_ENTRIES = 1000  # of a container: comparing a whole vocabulary would cost more than a step


class Change(NamedTuple):
    """A value that differs; `before` or `now` is ABSENT if it is new or gone."""

    name: str
    before: Any
    now: Any
    is_state: bool
    """True for the state of an optimizer."""


@dataclass
class GuardedObjects:
    """The objects whose values a captured step depends on."""

    trainer: Any
    own_attributes: Collection[str]
    """The attributes that every trainer has; all others are the user's."""
    settings: Callable[[], Mapping[str, Any]]
    """Returns numbers of the update that are fixed in a graph, such as max_grad_norm."""
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    """The captured optimizers; the others step after each replay."""

    def user_classes(self) -> list[type]:
        """Returns the classes of trainer, task and modules that belong to no library, and their bases."""
        model = self.trainer.model
        owners = [self.trainer, self.trainer.task, *(model.modules() if isinstance(model, nn.Module) else ())]
        classes = (each for owner in owners for each in type(owner).__mro__)
        return [each for each in dict.fromkeys(classes) if not _is_of_library(each)]


class Fingerprint:
    """The current guarded values.

    `changes` costs about 1 µs per module while nothing has changed: objects are first compared by identity, through
    views of their containers.
    """

    def __init__(self, objects: GuardedObjects) -> None:
        self._objects = objects
        self._take()

    def changes(self) -> list[Change]:
        """Returns the values that differ from those at construction, compared by value."""
        if self._is_unchanged():
            return []
        values = self._read()
        before, now = dict(zip(self._names, self._values, strict=True)), dict(zip(self._name(), values, strict=True))
        found = [
            Change(name[0], before.get(name, ABSENT), now.get(name, ABSENT), name[1])
            for name in {**before, **now}
            if _differs(before.get(name, ABSENT), now.get(name, ABSENT))
        ]
        num_tensors = len(self._tensors)
        for number, (one, other) in enumerate(zip(self._addresses, self._read_addresses(), strict=True)):
            if one != other:
                what = "requires_grad" if number >= num_tensors else "data"
                found.append(Change(f"{self._tensors[number % num_tensors][0]}.{what}", one, other, False))
        if not found:
            self._take()
        return found

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yields every guarded value with its name."""
        for (name, _), value in zip(self._names, self._values, strict=True):
            yield name, value

    def _take(self) -> None:
        self._tables: list[tuple[str, Mapping[Any, Any]]] = []
        self._rows: list[tuple[str, Collection[Any]]] = []
        self._dicts: list[dict[Any, Any]] = []
        self._tensors: list[tuple[str, Tensor]] = []
        objects = self._objects
        model, task = objects.trainer.model, objects.trainer.task
        # A script may have the trainer as a global, whose attributes are not the user's.
        self._seen: set[int] = {id(objects.trainer), id(task)}
        self._add_modules(type(model).__name__, model, is_root=True)
        if hasattr(task, "__dict__"):
            self._add_table("task", vars(task))
        for name, value in vars(objects.trainer).items():
            if name not in objects.own_attributes:
                self._add_content(f"trainer.{name}", value)
        self._add_classes()
        self._guarded_tensors = [tensor for _, tensor in self._tensors]
        self._has_shards = any(map(is_split, self._guarded_tensors))
        self._values, self._names, self._addresses = self._read(), self._name(), self._read_addresses()
        self._watch()

    def _watch(self) -> None:
        """Prepares `_is_unchanged`: collects views of everything that `_read` reads. Most tables of a module are
        empty."""
        objects = self._objects
        self._attributes = frozenset(vars(objects.trainer))
        self._user_attributes = [name for name in vars(objects.trainer) if name not in objects.own_attributes]
        self._sources: list[Collection[Any]] = [_values_of(table) for _, table in self._tables]
        self._sources += [row for _, row in self._rows]
        self._sources += [dict.keys(table) for table in self._dicts]
        for optimizer in objects.optimizers.values():
            groups, states = optimizer.param_groups, optimizer.state.values()
            self._sources += (groups, states, *(each.values() for each in (*groups, *states)))
        self._lengths = list(map(len, self._sources))
        self._filled = [each for each in self._sources if each]
        self._watched = [*self._read_single_values(), *chain.from_iterable(self._filled)]

    def _is_unchanged(self) -> bool:
        """Returns True if every guarded value is the same object, in the same memory, as at construction."""
        return (
            list(map(len, self._sources)) == self._lengths
            and vars(self._objects.trainer).keys() == self._attributes
            and all(map(is_, chain(self._read_single_values(), chain.from_iterable(self._filled)), self._watched))
            and self._read_addresses() == self._addresses
        )

    def _read_single_values(self) -> list[Any]:
        """Returns the values that are in no table or row."""
        objects = self._objects
        trainer = objects.trainer
        values = [trainer.model, trainer.task, *objects.settings().values()]
        values += [vars(trainer).get(name, ABSENT) for name in self._user_attributes]
        for optimizer in objects.optimizers.values():
            values += (optimizer.param_groups, optimizer.state, has_step_hooks(optimizer))
        return values

    def _read(self) -> list[Any]:
        """Returns all values, in the order of `_name`."""
        objects = self._objects
        values = [objects.trainer.model, objects.trainer.task, *objects.settings().values()]
        for _, table in self._tables:
            values += _values_of(table)
        for _, row in self._rows:
            values += row
        own = objects.own_attributes
        values += [value for name, value in vars(objects.trainer).items() if name not in own]
        for optimizer in objects.optimizers.values():
            values += (optimizer.param_groups, optimizer.state, has_step_hooks(optimizer))
            for group in optimizer.param_groups:
                values += group.values()
            for state in optimizer.state.values():
                values += state.values()
        return values

    def _name(self) -> list[tuple[str, bool]]:
        """Returns the name of each value, and whether it is the state of an optimizer."""
        objects = self._objects
        names = ["trainer.model", "trainer.task", *(f"trainer.{name}" for name in objects.settings())]
        for label, table in self._tables:
            names += [f"{label}.{key}" if isinstance(key, str) else f"{label}[{key!r}]" for key in table]
        for label, row in self._rows:
            names += [f"{label}[{number}]" for number, _ in enumerate(row)]
        named = [(name, False) for name in names]
        named += [(f"trainer.{name}", False) for name in vars(objects.trainer) if name not in objects.own_attributes]
        for label, optimizer in objects.optimizers.items():
            label = f"optimizer {label}"
            named += [(f"{label}.param_groups", False), (f"{label}.state", True), (f"{label}'s step hooks", False)]
            for number, group in enumerate(optimizer.param_groups):
                named += [(f"{label}.param_groups[{number}][{key!r}]", False) for key in group]
            for number, state in enumerate(optimizer.state.values()):
                named += [(f"{label}.state[{number}][{key!r}]", True) for key in state]
        return named

    def _read_addresses(self) -> list[int]:
        """Returns the addresses of parameters and buffers, then which of them require gradients."""
        tensors = self._guarded_tensors
        held = [local(each) for each in tensors] if self._has_shards else tensors
        return [*map(Tensor.data_ptr, held), *map(_REQUIRES_GRAD, tensors)]

    def _add_modules(self, label: str, root: Any, *, is_root: bool = False) -> None:
        if not isinstance(root, nn.Module):
            return
        for path, module in root.named_modules():
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            name = (path if is_root else f"{label}.{path}") if path else label
            self._add_table(name, vars(module), without=_MODULE_ATTRIBUTES)
            for key in _MODULE_TABLES:
                table = vars(module)[key]
                self._tables.append((name if key in ("_parameters", "_buffers") else f"{name}.{key}", table))
                self._tensors += [
                    (f"{name}.{each}", tensor)
                    for each, tensor in table.items()
                    if isinstance(tensor, Tensor) and tensor.layout is torch.strided
                ]

    def _add_classes(self) -> None:
        """Adds the attributes of user classes, and the globals of their files."""
        classes = self._objects.user_classes()
        modules = dict.fromkeys(each.__module__ for each in classes)
        tables: list[tuple[str, Mapping[str, Any]]] = [(f"class {each.__qualname__}", vars(each)) for each in classes]
        tables += [(name.rpartition(".")[2], vars(sys.modules[name])) for name in modules if name in sys.modules]
        for label, table in tables:
            self._add_table(label, table, without=frozenset(name for name in table if name.startswith("__")))

    def _add_table(self, label: str, table: Mapping[Any, Any], *, without: frozenset[str] = frozenset()) -> None:
        """Adds the attributes of an object, and one level below them."""
        self._tables.append((label, table))
        for name, value in list(table.items()):
            if name not in without:
                self._add_content(f"{label}.{name}", value)

    def _add_content(self, label: str, value: Any) -> None:
        if isinstance(value, (*SCALARS, tuple)) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._add_modules(label, value)
            return
        self._seen.add(id(value))
        if isinstance(value, dict | list | set | deque):
            if len(value) <= _MAX_ENTRIES:
                if isinstance(value, dict):
                    self._dicts.append(value)  # keys are compared too, because renaming a key keeps the values
                (self._tables if isinstance(value, dict) else self._rows).append((label, value))  # type: ignore[arg-type]
        elif _is_user_object(value):
            self._tables.append((label, vars(value)))


def _values_of(table: Mapping[Any, Any]) -> Collection[Any]:
    """Returns a live view of the values, because `values` of a subclass of dict may return a list or a generator."""
    return dict.values(table) if isinstance(table, dict) else table.values()


def _is_user_object(value: Any) -> bool:
    """Returns True for a plain object of a user class, whose attributes a step may read."""
    if isinstance(value, (*_NOT_INSPECTED, nn.Module, torch.optim.Optimizer)) or not hasattr(value, "__dict__"):
        return False
    return not _is_of_library(type(value))


def _is_of_library(each: type) -> bool:
    return f"{each.__module__}.".startswith(_LIBRARIES)


def _differs(before: Any, now: Any) -> bool:
    """Returns True if a step that reads `now` could behave differently from one that read `before`."""
    if before is now:
        return False
    if type(before) is not type(now):
        return True
    if isinstance(before, SCALARS):
        return bool(before != now)
    if isinstance(before, dict):
        return before.keys() != now.keys() or any(_differs(value, now[key]) for key, value in before.items())
    if isinstance(before, tuple | list):
        return len(before) != len(now) or any(map(_differs, before, now))
    return True


def has_user_code_between_steps(
    trainer_class: type, hooks: Iterable[object], *, contract: type, hook_events: Collection[str]
) -> bool:
    """Returns True if user code runs between updates, which may change what a graph depends on.

    `contract` is Trainer itself; its forward, step and constructors run inside updates, or before the first.
    """
    for hook in hooks:
        if is_user_code(type(hook)) or _holds_user_code(hook, hook_events):
            return True
    inside = ("forward", "train_step", "__init__", "post_init")
    for each in trainer_class.__mro__:
        if each is contract:
            return False
        if is_user_code(each) and any(
            isinstance(value, FunctionType) and name not in inside for name, value in vars(each).items()
        ):
            return True
    return False


def _holds_user_code(hook: object, events: Collection[str]) -> bool:
    """Returns True if one of our hooks has user functions."""
    return any(
        name in events or (callable(each) and not isinstance(each, BuiltinFunctionType) and is_user_code(each))
        for name, each in vars(hook).items()
    )


class MutationGuard:
    """The guarded values, and the states of generators, before a step."""

    def __init__(self, objects: GuardedObjects) -> None:
        self._objects = objects
        self._fingerprint = Fingerprint(objects)
        self._generators = {
            name: value
            for name, value in self._fingerprint.values()
            if isinstance(value, np.random.Generator | np.random.RandomState | random.Random)
        }
        self._states = self._generator_states()
        self._rates = self._rate_stamps()

    def reject_changes(self) -> list[Change]:
        """Raises if the step has assigned or counted a value, which a replay would not repeat.

        Returns the changes of optimizer state: an update that creates state differs from those that follow.
        """
        changes = self._fingerprint.changes()
        for change in changes:
            if not change.is_state:
                reject_change(change, self._objects)
        rates = self._rate_stamps()
        written = next((name for name, stamp in self._rates.items() if rates[name] != stamp), None)
        if written is not None:
            raise TrainwrightError(
                f"runtime.mode graph: the step writes {written} in place. Each replay would repeat the write, but the "
                "log and the schedule would not see it. Use a schedule, or write the rate in a hook."
            )
        now = self._generator_states()
        drawn = next((name for name, state in self._states.items() if now[name] != state), None)
        if drawn is not None:
            raise TrainwrightError(
                f"runtime.mode graph: the step draws from {drawn}, which would give the same numbers in every replay. "
                "Draw with torch, or in the dataset."
            )
        return changes

    def _rate_stamps(self) -> dict[str, Any]:
        """Returns a value that changes when a learning rate is written; it is a tensor that a step could write in
        place."""
        return {
            f"optimizer {label}.param_groups[{number}]['lr']": rate_stamp(group["lr"])
            for label, optimizer in self._objects.optimizers.items()
            for number, group in enumerate(optimizer.param_groups)
        }

    def _generator_states(self) -> dict[str, Any]:
        """Returns the states of the generators that a replay does not advance."""
        common: Any = np.random.get_state()
        states: dict[str, Any] = {
            "Python's or numpy's random numbers": (random.getstate(), common[1].tobytes(), common[2])
        }
        for name, each in self._generators.items():
            states[name] = _state_of(each)
        return states


def reject_change(change: Change, objects: GuardedObjects) -> NoReturn:
    """Raises for a Python value that a step changes, with its name and, if it is found, its line."""
    name, before, now, _ = change
    if now is ABSENT:
        action = "removes it"
    elif isinstance(now, Tensor):
        action = "assigns another tensor"
    else:
        action = f"changes it from {'nothing' if before is ABSENT else _short(before)} to {_short(now)}"
    raise TrainwrightError(
        f"runtime.mode graph: {name} would keep its value, but the step {action}, which a replay does not repeat. "
        "Store it in a buffer that is written in place (buffer.copy_(value), buffer.add_(1)), or return it as a "
        "metric.",
        where=line_of_change(name, objects.user_classes()),
    )


def _short(value: Any) -> str:
    text = f"a {type(value).__name__}" if hasattr(value, "__dict__") else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state()
        return state[1].tobytes(), state[2]
    return str(generator.bit_generator.state)
