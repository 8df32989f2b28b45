"""Finds state that a checkpoint does not contain: values that a step changes and that loading does not restore.

`find_unsaved` runs the step after a checkpoint twice, each time from the loaded checkpoint. It covers attributes of the
trainer, the task, the user's hooks and the model's modules, attributes of their classes, and globals of their files.
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from operator import length_hint
from types import FrameType, GeneratorType
from typing import Any

import numpy as np
import torch

from trainwright.checkpoint.base_weights import bit_checksums
from trainwright.events import Mean
from trainwright.loop.trainer import Trainer
from trainwright.user_code.locations import (
    SourceLocation,
    UserFiles,
    is_user_code,
    line_of_attribute,
    line_of_frame,
    line_of_function,
)
from trainwright.user_code.mutations import line_of_change

_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)
_CONTAINERS: tuple[Any, ...] = ([], (), "", b"", {}, {}.items(), {}.values(), set(), range(0))
_ITERATORS = tuple(type(iter(each)) for each in _CONTAINERS)
_MAX_DEPTH = 8
_MAX_VALUES = 50_000  # of all digests of one kind of object; an environment may contain many objects
_MAX_BYTES = 2**26  # of a tensor or array

SAME_LOSS = 1e-5
"""The relative difference from which two losses of the same step differ; likewise for the size of an update below."""
SAME_UPDATE = 1e-3


@dataclass(frozen=True)
class Unsaved:
    """A value that a step changes and that loading a checkpoint does not restore."""

    name: str
    """The class and the attribute, `Carried.hidden`, or the file and its global."""
    remedy: str
    """Advice on where to store it: a complete sentence."""
    location: SourceLocation | None


@dataclass(frozen=True)
class Comparison:
    """The result of running the same step twice."""

    unsaved: list[Unsaved]
    unrestored: list[tuple[str, list[str], SourceLocation | None]]
    """Classes, keys of their state that `load_state_dict` does not restore, and its line."""
    difference: str
    """How the second run of the step differs from the first; empty if it does not."""


@dataclass(frozen=True)
class _Owner:
    """An object or a namespace with values."""

    name: str
    values: Callable[[], Mapping[str, Any]]
    remedy: str
    ignored: frozenset[str] = frozenset()
    target: object | None = None
    """The object, to observe which attributes a step reads; None for a namespace."""
    kinds: tuple[type, ...] = ()
    """The classes in whose files the values are changed."""


@dataclass
class RepeatedStep:
    """What one step gave."""

    loss: float
    weights: dict[str, torch.Tensor]


def find_unsaved(
    trainer: Trainer, users: UserFiles, *, checkpoint: int, step: Callable[[], RepeatedStep | None]
) -> Comparison | None:
    """Loads a checkpoint and runs a step, twice; returns None if a step cannot run.

    A value that differs after the step, and is not what it was once the checkpoint is loaded again, is unsaved. It is
    omitted if the step assigns it before reading it.
    """
    owners = list(_owners_of(trainer, users))
    trainer.restore_checkpoint(checkpoint)
    start = {name: value.clone() for name, value in _weights(trainer).items()}
    before = _digests(owners, trainer)
    with _observed(owners, users) as accesses:
        first = step()
    after = _digests(owners, trainer)
    trainer.restore_checkpoint(checkpoint)
    restored, unrestored = _digests(owners, trainer), list(_find_unrestored(trainer, users, checkpoint))
    second = None if first is None else step()
    if first is None or second is None:
        return None
    unsaved = []
    for key, digest in after.items():
        is_changed = digest != before.get(key)
        access = accesses.get(key)
        owner, name = owners[key[0]], key[1]
        if owner.name in [each for each, _, _ in unrestored]:
            continue
        if is_changed and restored.get(key) != before.get(key) and (access is None or access.is_read_first):
            unsaved.append(Unsaved(f"{owner.name}.{name}", owner.remedy, _find_line(owner, name, access, users)))
    return Comparison(unsaved, unrestored, _difference(start, first, second))


def _find_unrestored(
    trainer: Trainer, users: UserFiles, checkpoint: int
) -> Iterator[tuple[str, list[str], SourceLocation | None]]:
    """Yields the user's objects that do not have the state of a checkpoint that was just loaded."""
    training = trainer.context.store.read(checkpoint, "training")
    saved: list[tuple[Any, Any]] = [
        (each, training[name]["shared"])
        for name, each in (("trainer", trainer), ("task", trainer.task))
        if name in training
    ]
    saved += [(hook, training["hooks"].get(key)) for key, hook in trainer.hook_states().items()]
    for owner, state in saved:
        if not isinstance(state, Mapping) or not any(_is_of(each, users) for each in type(owner).__mro__):
            continue
        now, reader = owner.state_dict(), _Reader(trainer)
        keys = [str(key) for key in state if key not in now or reader.digest(state[key]) != reader.digest(now[key])]
        if keys:
            yield type(owner).__name__, keys, line_of_function(type(owner).load_state_dict, users)


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in trainer.model.named_parameters() if each.requires_grad}


def outcome_of(trainer: Trainer, loss: float) -> RepeatedStep:
    """Returns the result of the last step."""
    return RepeatedStep(loss, {name: value.clone() for name, value in _weights(trainer).items()})


def _difference(start: Mapping[str, torch.Tensor], first: RepeatedStep, second: RepeatedStep) -> str:
    if not abs(first.loss - second.loss) <= SAME_LOSS * max(abs(first.loss), abs(second.loss)):
        return f"its loss is {second.loss:.6g} instead of {first.loss:.6g}"
    if first.weights.keys() != second.weights.keys():
        return "it updates other parameters"
    for name, value in first.weights.items():
        size = float((value - start[name]).norm()) if name in start else 0.0
        if float((value - second.weights[name]).norm()) > SAME_UPDATE * size:
            return f"it updates {name} differently"
    return ""


def _find_line(owner: _Owner, name: str, access: _Access | None, users: UserFiles) -> SourceLocation | None:
    """Returns the line that assigns a value, or otherwise the last line that reads it, which may change it in place."""
    found = None if access is None else access.assigned or access.read
    if found is None and owner.target is not None:
        found = line_of_attribute(type(owner.target), name, users)
    return found or line_of_change(f"{owner.name}.{name}", owner.kinds)


# What belongs to the user.


def _owners_of(trainer: Trainer, users: UserFiles) -> Iterator[_Owner]:
    """Yields the trainer, the task, the user's hooks and modules, then their classes and files."""

    def in_state_dict(owner: object) -> str:
        return f"return it from {type(owner).__name__}.state_dict() and restore it in load_state_dict(state)."

    buffer = "make it a buffer (register_buffer), or return it from get_extra_state() of the module."
    objects: list[tuple[Any, str, frozenset[str]]] = [
        (trainer, in_state_dict(trainer), frozenset({*trainer.own_attributes, *dir(Trainer)}))
    ]
    objects.append((trainer.task, in_state_dict(trainer.task), frozenset()))
    objects += [(each, in_state_dict(each), frozenset({"trainer"})) for each in trainer.hooks]
    objects += [(each, buffer, _MODULE_ATTRIBUTES) for each in trainer.model.modules()]
    kinds: dict[type, None] = {}
    for target, remedy, ignored in objects:
        own = [each for each in type(target).__mro__ if _is_of(each, users)]
        if own and hasattr(target, "__dict__"):
            kinds |= dict.fromkeys(own)
            values = functools.partial(vars, target)
            yield _Owner(type(target).__name__, values, remedy, ignored, target, tuple(own))
    remedy = "keep it in an attribute of the trainer, the task or a hook, and return that from state_dict()."
    for kind in kinds:
        yield _Owner(kind.__name__, functools.partial(vars, kind), remedy, kinds=(kind,))
    for file in dict.fromkeys(kind.__module__ for kind in kinds):
        module = sys.modules.get(file)
        if module is not None:
            own = [kind for kind in kinds if kind.__module__ == file]
            yield _Owner(file.rpartition(".")[2], functools.partial(vars, module), remedy, kinds=tuple(own))


def _is_of(kind: type, users: UserFiles) -> bool:
    try:
        return is_user_code(kind) and inspect.getfile(kind) in users
    except (OSError, TypeError):
        return False


# Which attributes a step reads.

_Key = tuple[int, str]
"""The number of the owner, and the name of the attribute."""


@dataclass
class _Access:
    is_read_first: bool
    read: SourceLocation | None = None
    """The last line that reads it."""
    assigned: SourceLocation | None = None
    """The last line that assigns it."""


@contextmanager
def _observed(owners: Iterable[_Owner], users: UserFiles) -> Iterator[dict[_Key, _Access]]:
    """Records how the attributes of objects are accessed: read or assigned first, and the last lines that do so.

    Attribute access is replaced on the classes, not on other classes for the objects, because user code may compare
    the class of an object.
    """
    accesses: dict[_Key, _Access] = {}
    numbers = {id(owner.target): number for number, owner in enumerate(owners) if owner.target is not None}
    kinds = {type(owner.target): None for owner in owners if owner.target is not None}

    def note(target: object, name: str, *, is_read: bool) -> None:
        number = numbers.get(id(target))
        if number is None or name.startswith("__"):
            return
        frame: FrameType | None = sys._getframe(2)
        line = line_of_frame(frame) if frame is not None and frame.f_code.co_filename in users else None
        known = accesses.setdefault((number, name), _Access(is_read))
        if line is not None and is_read:
            known.read = line
        elif line is not None:
            known.assigned = line

    def observe(kind: type) -> dict[str, Any]:
        read: Any = kind.__getattribute__
        assign: Any = kind.__setattr__

        def get(self: object, name: str) -> Any:
            value = read(self, name)
            note(self, name, is_read=True)
            return value

        def set_(self: object, name: str, value: Any) -> None:
            note(self, name, is_read=False)
            assign(self, name, value)

        return {"__getattribute__": get, "__setattr__": set_}

    # All are looked up before any is replaced: a class may inherit from another one.
    observers = {kind: observe(kind) for kind in kinds}
    replaced: list[tuple[type, str, Any]] = []
    missing = object()
    try:
        for kind, methods in observers.items():
            for name, method in methods.items():
                with suppress(TypeError):  # a class of an extension; then all of its attributes count as read
                    before = vars(kind).get(name, missing)
                    setattr(kind, name, method)
                    replaced.append((kind, name, before))
        yield accesses
    finally:
        for kind, name, before in replaced:
            if before is missing:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


# Identity of a value.


def _digests(owners: Iterable[_Owner], trainer: Trainer) -> dict[_Key, Hashable]:
    """Returns a digest of every value, equal for equal contents."""
    found: dict[_Key, Hashable] = {}
    for number, owner in enumerate(owners):
        reader = _Reader(trainer)
        for name, value in list(owner.values().items()):
            is_special = name.startswith("__") or name in owner.ignored
            if not is_special and not isinstance(value, property | classmethod | staticmethod):
                found[number, name] = reader.digest(value)
    return found


class _Reader:
    """Reads the contents of values; the parts of the run that checkpoints contain count as equal."""

    def __init__(self, trainer: Trainer) -> None:
        model, optimizers = trainer.model, trainer.optimizers.values()
        saved = [trainer, trainer.task, *trainer.hooks, *model.modules(), *optimizers, torch.default_generator]
        self._saved = {id(each): each for each in saved}
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [each for one in optimizers for state in one.state.values() for each in state.values()]
        self._addresses = {_address(each) for each in tensors if isinstance(each, torch.Tensor)}
        self._num_values = 0
        self._open: set[int] = set()

    def digest(self, value: Any, depth: int = 0) -> Hashable:
        """Returns a value that is equal for equal contents; a constant for objects without contents, or with too
        many."""
        self._num_values += 1
        if isinstance(value, _PLAIN):
            return type(value).__name__, repr(value)
        kind = type(value).__qualname__
        if id(value) in self._saved or id(value) in self._open or depth > _MAX_DEPTH or self._num_values > _MAX_VALUES:
            return kind
        self._open.add(id(value))
        try:
            contents = self._contents(value)
            if isinstance(contents, Mapping):
                return kind, tuple((repr(key), self.digest(item, depth + 1)) for key, item in contents.items())
            if isinstance(contents, list):
                return kind, tuple(self.digest(item, depth + 1) for item in contents)
            return kind, contents
        except Exception:  # of a user's class; values that cannot be read are not reported
            return kind
        finally:
            self._open.discard(id(value))

    def _contents(self, value: Any) -> Any:
        """Returns the parts of a value as a mapping or a list, or a digest of it."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.nbytes <= _MAX_BYTES:
            return value.dtype.str, value.shape, hash(value.tobytes())
        if isinstance(value, np.generic):
            return value.tobytes()
        generator = _state_of_generator(value)
        if generator is not None:
            return [generator]
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            return [value.state_dict()]
        if isinstance(value, logging.Logger):  # caches which levels are enabled
            return None
        if isinstance(value, dict):  # not the items that a subclass makes when they are looked up
            return dict(dict.items(value))
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, list | tuple | deque):
            return list(value)
        if isinstance(value, set | frozenset):
            return tuple(sorted(map(str, map(self.digest, value))))
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            return None if frame is None else [frame.f_lasti, dict(frame.f_locals)]
        if isinstance(value, _ITERATORS):
            return length_hint(value)
        if isinstance(value, functools.partial):
            return [*value.args, *value.keywords.values()]
        if type(value).__module__ == "itertools":
            return repr(value) if repr(value).startswith(("count(", "repeat(")) else None
        if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value):
            return None
        if not is_user_code(type(value)) and not isinstance(value, Mean):
            return None
        slots = [name for each in type(value).__mro__ for name in _names(getattr(each, "__slots__", ()))]
        return {**getattr(value, "__dict__", {}), **{name: getattr(value, name, None) for name in slots}}

    def _of_tensor(self, value: torch.Tensor) -> Hashable:
        if value.layout != torch.strided or value.is_meta or value.nbytes > _MAX_BYTES:
            return None
        if _address(value) in self._addresses:
            return "a weight"
        return str(value.dtype), tuple(value.shape), tuple(bit_checksums([value]))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() and tensor.layout == torch.strided else id(tensor)


def _names(slots: Any) -> tuple[str, ...]:
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _state_of_generator(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, random.Random):
        return value.getstate()
    return value.get_state() if isinstance(value, torch.Generator) else None
