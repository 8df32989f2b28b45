"""What a recorded step depends on that is no value of a tensor: settings, flags, and which tensors lie where.

Python runs once in a recorded step, so what it looked at stays decided: a dropout's rate, which parameters are frozen,
an optimizer's weight decay. A fingerprint is taken with each recording and compared before a replay; kept_values.py
compares one from before a step with what the step left behind. Globals and class attributes of the user's files
belong to it; what closures hold, other files, large containers and containers within containers are not seen.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.loop.hook import MOMENTS
from trainwright.loop.host_number import HostNumber
from trainwright.loop.step_unless import is_watched

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

PLAIN = (bool, int, float, complex, str, bytes, type(None))
ABSENT = object()
"""Stands for the value of what was not there."""

_CLIPPING = ("max_grad_norm", "max_grad_value", "global_batch_size")
_TORCHS_OWN = frozenset(vars(nn.Module()))
_OF_MODULES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_NO_HELPERS = (type, ModuleType, FunctionType, MethodType, Tensor, torch.Generator)
_LIBRARIES = ("torch.", "trainwright.", "builtins.", "numpy.", "logging.", "_thread.")
_REQUIRES_GRAD = attrgetter("requires_grad")
_MOST_ENTRIES = 1000  # of a container: to compare a whole vocabulary would cost more than a step


class Change(NamedTuple):
    """Something that is not what it was; `before` or `now` is ABSENT where it is new or gone."""

    name: str
    before: Any
    now: Any
    is_state: bool
    """Is it an optimizer's state?"""


class Fingerprint:
    """Settings and tensors of a model, its trainer, task and recorded optimizers, as they are now.

    `changes` costs about 1 µs for each module while nothing has changed: objects are compared by identity first.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._updater = trainer.surroundings.updater
        self._own = _own_names()
        self._take()

    def changes(self) -> list[Change]:
        """Returns what is not as it was; values that are equal, but other objects, are taken for the same."""
        values = self._read()
        if len(values) == len(self._values) and all(map(is_, values, self._values)) and self._lie() == self._places:
            return []
        before, now = dict(zip(self._names, self._values, strict=True)), dict(zip(self._name(), values, strict=True))
        found = [
            Change(name[0], before.get(name, ABSENT), now.get(name, ABSENT), name[1])
            for name in {**before, **now}
            if _differs(before.get(name, ABSENT), now.get(name, ABSENT))
        ]
        num_tensors = len(self._tensors)
        for number, (one, other) in enumerate(zip(self._places, self._lie(), strict=True)):
            if one != other:
                what = "requires_grad" if number >= num_tensors else "data"
                found.append(Change(f"{self._tensors[number % num_tensors][0]}.{what}", one, other, False))
        if not found:
            self._take()
        return found

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Yields every value that was looked at, with its name."""
        for (name, _), value in zip(self._names, self._values, strict=True):
            yield name, value

    def _take(self) -> None:
        self._tables: list[tuple[str, Mapping[Any, Any]]] = []
        self._rows: list[tuple[str, Iterable[Any]]] = []
        self._tensors: list[tuple[str, Tensor]] = []
        self._seen: set[int] = set()
        model, task = self._trainer.model, self._trainer.task
        self._add_modules(type(model).__name__, model, is_root=True)
        if hasattr(task, "__dict__"):
            self._add_table("task", vars(task))
        for name, value in vars(self._trainer).items():
            if name not in self._own:
                self._add_content(f"trainer.{name}", value)
        self._add_classes()
        updater = self._updater
        self._optimizers = [
            (name, entry.optimizer) for name, entry in updater.optimizers.items() if name not in updater.after_replay
        ]
        self._bare = [tensor for _, tensor in self._tensors]
        self._values, self._names, self._places = self._read(), self._name(), self._lie()

    def _read(self) -> list[Any]:
        """Returns all values, in the order of `_name`."""
        trainer, own, updater = self._trainer, self._own, self._updater
        values = [trainer.model, trainer.task, updater.max_grad_norm, updater.max_grad_value, updater.global_batch_size]
        for _, table in self._tables:
            values += table.values()
        for _, row in self._rows:
            values += row
        values += [value for name, value in vars(trainer).items() if name not in own]
        for _, optimizer in self._optimizers:
            values += (optimizer.param_groups, optimizer.state, is_watched(optimizer))
            for group in optimizer.param_groups:
                values += group.values()
            for state in optimizer.state.values():
                values += state.values()
        return values

    def _name(self) -> list[tuple[str, bool]]:
        """Returns the name of each value, and whether it is an optimizer's state."""
        names = ["trainer.model", "trainer.task", *(f"updater.{name}" for name in _CLIPPING)]
        for label, table in self._tables:
            names += [f"{label}.{key}" if isinstance(key, str) else f"{label}[{key!r}]" for key in table]
        for label, row in self._rows:
            names += [f"{label}[{number}]" for number, _ in enumerate(row)]
        named = [(name, False) for name in names]
        named += [(f"trainer.{name}", False) for name in vars(self._trainer) if name not in self._own]
        for label, optimizer in self._optimizers:
            label = f"optimizer {label}"
            named += [(f"{label}.param_groups", False), (f"{label}.state", True), (f"{label}'s step hooks", False)]
            for number, group in enumerate(optimizer.param_groups):
                named += [(f"{label}.param_groups[{number}][{key!r}]", False) for key in group]
            for number, state in enumerate(optimizer.state.values()):
                named += [(f"{label}.state[{number}][{key!r}]", True) for key in state]
        return named

    def _lie(self) -> list[int]:
        """Returns where parameters and buffers lie, then which of them require gradients."""
        return [*map(Tensor.data_ptr, self._bare), *map(_REQUIRES_GRAD, self._bare)]

    def _add_modules(self, label: str, root: Any, *, is_root: bool = False) -> None:
        if not isinstance(root, nn.Module):
            return
        for path, module in root.named_modules():
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            name = (path if is_root else f"{label}.{path}") if path else label
            self._add_table(name, vars(module), without=_TORCHS_OWN)
            for key in _OF_MODULES:
                held = vars(module)[key]
                self._tables.append((name if key in ("_parameters", "_buffers") else f"{name}.{key}", held))
                self._tensors += [
                    (f"{name}.{each}", tensor)
                    for each, tensor in held.items()
                    if isinstance(tensor, Tensor) and tensor.layout is torch.strided
                ]

    def _add_classes(self) -> None:
        """Looks at what the user's classes hold themselves, and at the globals of the files that they are in."""
        kinds = users_classes(self._trainer)
        files = dict.fromkeys(kind.__module__ for kind in kinds)
        tables: list[tuple[str, Mapping[str, Any]]] = [(f"class {kind.__qualname__}", vars(kind)) for kind in kinds]
        tables += [(name.rpartition(".")[2], vars(sys.modules[name])) for name in files if name in sys.modules]
        for label, table in tables:
            self._add_table(label, table, without=frozenset(name for name in table if name.startswith("__")))

    def _add_table(self, label: str, table: Mapping[Any, Any], *, without: frozenset[str] = frozenset()) -> None:
        """Looks at an object's attributes, and one level down into what they hold."""
        self._tables.append((label, table))
        for name, value in list(table.items()):
            if name not in without:
                self._add_content(f"{label}.{name}", value)

    def _add_content(self, label: str, value: Any) -> None:
        if isinstance(value, (*PLAIN, tuple)) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._add_modules(label, value)
            return
        self._seen.add(id(value))
        if isinstance(value, dict | list | set | deque):
            if len(value) <= _MOST_ENTRIES:
                (self._tables if isinstance(value, dict) else self._rows).append((label, value))  # type: ignore[arg-type]
        elif _is_helper(value):
            self._tables.append((label, vars(value)))


def users_classes(trainer: Trainer) -> list[type]:
    """Returns the classes of the trainer, the task and the model's modules that are no library's, and their bases."""
    owners = [trainer, trainer.task, *(trainer.model.modules() if isinstance(trainer.model, nn.Module) else ())]
    kinds = (kind for owner in owners for kind in type(owner).__mro__)
    return [kind for kind in dict.fromkeys(kinds) if not _is_of_library(kind)]


def _is_helper(value: Any) -> bool:
    """Is it a plain object of the user's, whose attributes a step may read?"""
    if isinstance(value, (*_NO_HELPERS, nn.Module, torch.optim.Optimizer)) or not hasattr(value, "__dict__"):
        return False
    return not _is_of_library(type(value))


def _is_of_library(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_LIBRARIES)


def _differs(before: Any, now: Any) -> bool:
    """Would a step that reads `now` do otherwise than one that read `before`?"""
    if before is now:
        return False
    if type(before) is not type(now):
        return True
    if isinstance(before, PLAIN):
        return bool(before != now)
    if isinstance(before, dict):
        return before.keys() != now.keys() or any(_differs(value, now[key]) for key, value in before.items())
    if isinstance(before, tuple | list):
        return len(before) != len(now) or any(map(_differs, before, now))
    return True


def _own_names() -> frozenset[str]:
    """Returns the attributes that trainers have by themselves: a user's own are all others."""
    from trainwright.loop.trainer import Trainer as Contract

    names = set(dir(Contract))
    for name, value in vars(Contract).items():
        if isinstance(value, HostNumber):
            names.add(f"_{name}")
        functions = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        for function in functions:
            names |= _names_in(function)
    return frozenset(names)


def _names_in(function: Callable[..., Any] | None) -> set[str]:
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return set(code.co_names) if code is not None else set()


def users_act_between_steps(trainer: Trainer) -> bool:
    """Does code of the user's run between updates, which may change what a recording has decided?"""
    from trainwright.loop.trainer import Trainer as Contract

    if any(not _is_ours(type(hook)) or _holds_users_code(hook) for hook in trainer.hooks):
        return True
    inside = ("forward", "train_step", "__init__", "post_init")
    for kind in type(trainer).__mro__:
        if kind is Contract:
            return False
        if not _is_ours(kind) and any(
            isinstance(value, FunctionType) and name not in inside for name, value in vars(kind).items()
        ):
            return True
    return False


def _holds_users_code(hook: Any) -> bool:
    """Was a hook of ours given functions, for a moment or to call at one?"""
    return any(
        name in MOMENTS or (callable(each) and not isinstance(each, BuiltinFunctionType) and not _is_ours(each))
        for name, each in vars(hook).items()
    )


def _is_ours(value: Any) -> bool:
    return f"{getattr(value, '__module__', None)}.".startswith("trainwright.")
