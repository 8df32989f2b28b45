"""Graph mode: a step that is captured once and replayed, and the guards that tell what a replay would not repeat.

Batches of one shape share a recording. The first updates of a shape warm up; then Python runs once more, captured.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.backends.backend import Recording
from trainwright.backends.private_torch import tree_flatten, tree_flatten_with_path, tree_unflatten
from trainwright.config import RunConfig
from trainwright.errors import ConfigError, HostReadError, TrainwrightError
from trainwright.events import Mean
from trainwright.loop.compiled_forward import look_before_first_step
from trainwright.loop.hook import HOOK_EVENTS
from trainwright.loop.update import StepResult, is_watched, knows_found_inf
from trainwright.optim.device_step import prepare_for_capture, sync_captured_rates
from trainwright.parallel.collectives import Ranks
from trainwright.tracebacks import user_location
from trainwright.user_code.mutations import line_of_change

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)


class HostNumber:
    """An attribute that rejects to be read while a step is recorded; `is_recording` of its owner says when."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._key = f"_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> int:
        if instance is None:
            return self  # type: ignore[return-value]  # the descriptor itself, as Python's own do
        if instance.is_recording:
            advice = "Use self.step_tensor, the same number on the device." if self._name == "step" else ""
            raise HostReadError(
                f"{self._name} is read, but Python runs only once in graph mode, so that it would stay the same in "
                f"every update. {advice}".rstrip()
            )
        try:
            value: int = instance.__dict__[self._key]
        except KeyError:
            raise AttributeError(self._name) from None
        return value

    def __set__(self, instance: Any, value: int) -> None:
        instance.__dict__[self._key] = value


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
        self._updater = trainer.context.updater
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
        name in HOOK_EVENTS or (callable(each) and not isinstance(each, BuiltinFunctionType) and not _is_ours(each))
        for name, each in vars(hook).items()
    )


def _is_ours(value: Any) -> bool:
    return f"{getattr(value, '__module__', None)}.".startswith("trainwright.")


class KeptValues:
    """What hangs on a model's modules, the trainer, the task and the optimizers before a step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._fingerprint = Fingerprint(trainer)
        self._generators = {
            name: value
            for name, value in self._fingerprint.objects()
            if isinstance(value, np.random.Generator | np.random.RandomState | random.Random)
        }
        self._draws = self._stand()

    def reject_changes(self) -> list[Change]:
        """Rejects what the step has replaced or counted: a replay would leave it as it is.

        Returns what optimizers made of their state: an update that does so is not like those that follow.
        """
        changes = self._fingerprint.changes()
        for change in changes:
            if not change.is_state:
                reject_change(change, self._trainer)
        now = self._stand()
        drawn = next((name for name, state in self._draws.items() if now[name] != state), None)
        if drawn is not None:
            raise TrainwrightError(
                f"runtime.mode graph: the step draws from {drawn}, which would give the same in every replay. Draw "
                "with torch, or in the dataset."
            )
        return changes

    def _stand(self) -> dict[str, Any]:
        """Returns where the generators stand that a replay does not move on."""
        common: Any = np.random.get_state()
        stand: dict[str, Any] = {
            "Python's or numpy's random numbers": (random.getstate(), common[1].tobytes(), common[2])
        }
        for name, each in self._generators.items():
            stand[name] = _state_of(each)
        return stand


def reject_change(change: Change, trainer: Trainer) -> NoReturn:
    """Rejects what a step changes in Python, by its name and, where that is found, its line."""
    name, before, now, _ = change
    if now is ABSENT:
        act = "takes it away"
    elif isinstance(now, Tensor):
        act = "puts another tensor there"
    else:
        act = f"changes it from {'nothing' if before is ABSENT else _short(before)} to {_short(now)}"
    raise TrainwrightError(
        f"runtime.mode graph: {name} would stay as it is, but the step {act}, which a replay does not. "
        "Keep it in a buffer and write it in place (buffer.copy_(value), buffer.add_(1)), or return it as a "
        "metric.",
        where=line_of_change(name, users_classes(trainer)),
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


MAX_RECORDINGS = 8
"""Shapes of batches that are recorded; each holds memory of its own on a GPU. Others run as they are written."""

MAX_SHAPES = 256
"""Shapes of batches that are counted; of more, those that came first are forgotten."""

# So many shapes without one that came often enough to be recorded are worth a warning.
_MANY_SHAPES = 32

# A recording that served for fewer updates was not worth its cost; after so many of them none is made any more.
_FEW_REPLAYS = 10
_MAX_SHORT = 3

Fill = Callable[[list[Tensor]], Any]
"""Makes a value anew from the tensors of a replay."""


class _Signature(NamedTuple):
    """What a recording holds for: another batch needs another one."""

    structure: Any
    shapes: tuple[Any, ...]
    """Of each tensor shape, strides, dtype and device; of other values what they are."""
    same: tuple[int, ...] | None
    """Of each tensor the first that is the same object; None where all are different ones."""
    num_samples: int


class _Outcome:
    """How to read what a run of the step returned; on a CPU, which runs it each time, of the last run."""

    read: Fill
    rate: float


@dataclass(slots=True)
class _Recorded:
    """A recording, and how to read what it returns."""

    recording: Recording
    outcome: _Outcome
    rate_of: str | None
    """The optimizer whose learning rate is the step's; None where the step returned a number of its own."""
    reads_step_tensor: bool
    fingerprint: Fingerprint
    compared_at: tuple[int, ...]
    """Where the run stood when the fingerprint was last compared."""


class RecordedStep:
    """Makes updates from recordings; `run` is `train_step` to the loop."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._recordings: dict[_Signature, _Recorded] = {}
        self._num_runs: dict[_Signature, int] = {}
        self._is_prepared = False
        self._notified: set[str] = set()
        self._num_runs_in_python = 0
        self._num_replays = 0
        """Since recordings were last dropped."""
        self._num_short = self._num_unsettled = 0
        self._captured: list[torch.optim.Optimizer] = []
        self._users_act = users_act_between_steps(trainer)
        updater = trainer.context.updater
        self._recorders: list[Any] = [each for each in (trainer, updater, updater.watch) if each is not None]

    def run(self, batch: Any) -> StepResult:
        """Makes one update from one batch."""
        if not self._is_prepared:
            self._prepare_optimizers()
        for optimizer in self._captured:
            sync_captured_rates(optimizer)
        inputs, signature, rebuild = _take_apart(batch, self._trainer.samples_in_hand)
        recorded = self._recordings.get(signature) if signature is not None else None
        if recorded is not None and self._holds(recorded):
            if recorded.reads_step_tensor:
                _ = self._trainer.step_tensor
            self._num_replays += 1
            try:
                with _explaining_reads():
                    outputs = recorded.recording.replay(inputs)
            except (IndexError, RuntimeError) as error:
                self._fail_as_written(batch, error)
            return self._finish(recorded, outputs)
        self._num_runs_in_python += 1
        if not self._may_record(signature, batch):
            with self._trainer.backend.warming_up():
                return self._trainer.train_step(batch)
        return self._record(signature, inputs, rebuild)

    def _fail_as_written(self, batch: Any, error: Exception) -> NoReturn:
        """Runs a step whose replay has failed as it is written: that fails with the user's line, and is explained."""
        try:
            self._trainer.train_step(batch)
        except Exception as explained:
            raise explained from None
        raise error

    def forget(self) -> None:
        """Drops all recordings; the next updates warm up again."""
        self._recordings, self._num_runs, self._is_prepared = {}, {}, False

    def _holds(self, recorded: _Recorded) -> bool:
        """Is everything as it was when a step was recorded? If not, the recordings are dropped.

        Asked only after code other than ours has run, for asking takes some microseconds.
        """
        end = self._trainer.step_end
        now = (self._num_runs_in_python, end.evaluated_step, end.written_step, end.saved_step)
        if not self._users_act and recorded.compared_at == now:
            return True
        recorded.compared_at = now
        changes = recorded.fingerprint.changes()
        if changes:
            self._drop(changes)
        return not changes

    def _drop(self, changes: list[Change]) -> None:
        """Drops all recordings; the next updates warm up again, for optimizers may have to make state."""
        self._num_short = self._num_short + 1 if self._num_replays < _FEW_REPLAYS else 0
        self._num_replays = 0
        self.forget()
        names = ", ".join(change.name for change in changes[:4]) + (", ..." if len(changes) > 4 else "")
        logger.info("runtime.mode graph: the step is recorded again, because of a change of %s.", names)
        if self._num_short == _MAX_SHORT:
            logger.warning(
                "runtime.mode graph: every few updates something changes that a recorded step cannot follow (%s), so "
                "the steps run without a graph. Keep it in a tensor that is written in place, or use mode compile.",
                names,
            )

    def _prepare_optimizers(self) -> None:
        """Gives optimizers rates that a recording reads anew; those that cannot be recorded step after each replay."""
        self._is_prepared = True
        updater = self._trainer.context.updater
        gates = updater.watch is not None and updater.watch.gates
        for name, entry in updater.optimizers.items():
            # Python that hooks into a step would not run in a replay.
            can_be = not is_watched(entry.optimizer) and (not gates or knows_found_inf(entry.optimizer))
            if can_be and prepare_for_capture(entry.optimizer, self._trainer.device):
                updater.after_replay.discard(name)
            elif name not in updater.after_replay:
                updater.after_replay.add(name)
                logger.info(
                    "runtime.mode graph: the optimizer %s (%s) cannot be recorded and steps after each replay. Fused "
                    "and capturable optimizers without hooks can.",
                    name,
                    type(entry.optimizer).__name__,
                )
        self._captured = [
            entry.optimizer for name, entry in updater.optimizers.items() if name not in updater.after_replay
        ]

    def _may_record(self, signature: _Signature | None, batch: Any) -> bool:
        """Counts an update of this kind; tells whether its kind has warmed up and is one to record."""
        if signature is None:
            self._tell(
                "others",
                "runtime.mode graph: batches hold %s, of which it cannot be told whether they are the same in another "
                "batch, so their steps run without a graph. Give tensors, numbers or texts.",
                _others(batch),
            )
            return False
        num_runs = self._num_runs.get(signature, 0)
        self._num_runs[signature] = num_runs + 1
        if len(self._num_runs) > MAX_SHAPES:
            self._num_runs.pop(next(iter(self._num_runs)))
        if len(self._num_runs) > _MANY_SHAPES and not self._recordings:
            self._tell(
                "unlike",
                "runtime.mode graph: hardly two batches are alike, so steps run without a graph: they differ in %s. "
                "Pad the samples to fixed lengths, and leave out what the step does not need.",
                _others(batch) or "their shapes",
            )
        if num_runs < self._trainer.backend.num_warm_ups or self._num_short >= _MAX_SHORT:
            return False
        if len(self._recordings) < MAX_RECORDINGS:
            return True
        self._tell(
            "shapes",
            "runtime.mode graph: batches have come in more than %d shapes, and others run without a graph; this "
            "one is %s. Pad or pack the samples to fixed lengths.",
            MAX_RECORDINGS,
            [list(each[0]) for each in signature.shapes if isinstance(each[0], torch.Size)],
        )
        return False

    def _tell(self, subject: str, warning: str, *values: Any) -> None:
        """Warns once of each subject."""
        if subject not in self._notified:
            self._notified.add(subject)
            logger.warning(warning, *values)

    def _record(self, signature: Any, inputs: list[Tensor], rebuild: Fill) -> StepResult:
        """Makes an update that is recorded; it counts like any other."""
        trainer, updater = self._trainer, self._trainer.context.updater
        outcome = _Outcome()

        def run(given: list[Tensor]) -> list[Tensor]:
            with self._recording():
                result = trainer.train_step(rebuild(given))
                outcome.rate = result[3]
                tensors: list[Tensor] = []
                parts = (
                    tuple(result),
                    trainer.loss_weight,
                    updater.take_postponed(),
                    updater.watch.take_calls() if updater.watch is not None else [],
                    trainer.storage.end_recording(),
                )
                outcome.read = _reader(parts, tensors)
            return tensors

        parameters = [
            parameter
            for optimizer in trainer.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        kept = KeptValues(trainer)
        _ = trainer.step_tensor  # filled, for a step that is recorded reads it as it is
        trainer.has_read_step_tensor = False
        with _explaining_reads():
            recording, values = trainer.backend.record(run, inputs, parameters=parameters)
        state_changes = kept.reject_changes()
        rate_of = next((name for name, rate in updater.rates.items() if rate is outcome.rate), None)
        recorded = _Recorded(
            recording, outcome, rate_of, trainer.has_read_step_tensor, Fingerprint(trainer), compared_at=()
        )
        if state_changes:
            # State was made: this update was another than those that follow, and is recorded again.
            self._num_unsettled += 1
            if self._num_unsettled > _MAX_SHORT:
                reject_change(state_changes[0], self._trainer)
        else:
            self._recordings[signature] = recorded
        return self._finish(recorded, values, is_first=True)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Lets the trainer, the updater and the storage set aside what the host does after each replay."""
        self._trainer.storage.begin_recording()
        for each in self._recorders:
            each.is_recording = True
        try:
            yield
        finally:
            for each in self._recorders:
                each.is_recording = False
            self._trainer.storage.end_recording()
            self._trainer.context.updater.take_postponed()

    def _finish(self, recorded: _Recorded, values: list[Tensor], *, is_first: bool = False) -> StepResult:
        """Notes on the host what a run of the graph gave, as `train_step` would have."""
        trainer, updater = self._trainer, self._trainer.context.updater
        (loss, metrics, grad_norm, rate), weight, postponed, calls, puts = recorded.outcome.read(values)
        trainer.loss_weight = weight
        if updater.watch is not None:
            for call in calls:
                updater.watch.keep_again(call, step=updater.step)
        trainer.storage.put_again(puts)
        if is_first:
            self._warn_of_frozen({**metrics, **{name: value for name, value, *_ in puts}})
        for name, hold in postponed:
            metrics.update(updater.step_now(name, hold))
        if len(updater.rates) > 1:
            metrics.update({f"lr/{name}": rate for name, rate in updater.rates.items()})
        if recorded.rate_of is not None:
            rate = updater.rates[recorded.rate_of]
        return StepResult(loss, metrics, grad_norm, rate)

    def _warn_of_frozen(self, metrics: Mapping[str, Any]) -> None:
        frozen = [name for name, value in metrics.items() if not isinstance(value, Tensor | Mean)]
        frozen = [name for name in frozen if not name.startswith("lr/")]
        if frozen:
            logger.warning(
                "runtime.mode graph: the metrics %s are no tensors: they stay what they were when the step was "
                "recorded.",
                ", ".join(frozen),
            )


@contextmanager
def _explaining_reads() -> Iterator[None]:
    """Says where a step that cannot be captured reads something on the host, and what to do instead."""
    try:
        yield
    except HostReadError as error:
        raise TrainwrightError(
            f"runtime.mode graph: this cannot be recorded. {error.problem} Keep values on the device, move what "
            "the host does into a hook, or use mode compile.",
            where=user_location(error),
        ) from error


def _take_apart(batch: Any, num_samples: int) -> tuple[list[Tensor], _Signature | None, Fill]:
    """Returns a batch's tensors, what a recording of it holds for, and what puts such tensors together again.

    Nothing holds, None, for a batch with values that cannot be compared.
    """
    if type(batch) is dict and all(type(value) is Tensor for value in batch.values()):
        keys = tuple(batch)
        inputs = list(batch.values())
        shapes = tuple([(each.shape, each.stride(), each.dtype, each.device) for each in inputs])
        signature = _Signature(keys, shapes, _sameness(inputs), num_samples)
        return inputs, signature, lambda given: dict(zip(keys, given, strict=True))
    leaves, structure = tree_flatten(batch)
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def rebuild(given: list[Tensor]) -> Any:
        rest = iter(given)
        return tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    known = tuple([_known(leaf) for leaf in leaves])
    if None in known:
        return inputs, None, rebuild
    return inputs, _Signature(str(structure), known, _sameness(inputs), num_samples), rebuild


def _sameness(inputs: list[Tensor]) -> tuple[int, ...] | None:
    places = [id(each) for each in inputs]
    return None if len(set(places)) == len(places) else tuple([places.index(each) for each in places])


def _known(leaf: Any) -> Any:
    """What stands for a value of a batch: a recording holds for that alone; None: nothing does."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return "numpy", leaf.dtype.str, leaf.shape, leaf.tobytes()
    if type(leaf) in PLAIN or isinstance(leaf, torch.dtype | torch.device):
        return type(leaf), repr(leaf)  # 1, 1.0 and True are equal, as 0.0 and -0.0 are
    return None


def _others(batch: Any) -> str:
    """Names the values of a batch that are no tensors."""
    leaves, _ = tree_flatten_with_path(batch)
    found = {str(path[0]) if path else "": type(leaf).__name__ for path, leaf in leaves if not isinstance(leaf, Tensor)}
    return ", ".join(f"{name.strip('[]')} ({kind})" for name, kind in found.items())


def _reader(value: Any, tensors: list[Tensor]) -> Fill:
    """Returns what makes `value` anew from the tensors of a replay; adds its own tensors to `tensors`."""
    if isinstance(value, Tensor):
        place = len(tensors)
        tensors.append(value.detach())
        return lambda given: given[place]
    if isinstance(value, Mean):
        total, count = _reader(value.total, tensors), _reader(value.count, tensors)
        return lambda given: Mean(total(given), count(given))
    if isinstance(value, Mapping):
        parts = {name: _reader(each, tensors) for name, each in value.items()}
        return lambda given: {name: part(given) for name, part in parts.items()}
    if isinstance(value, tuple | list):
        each_of = [_reader(each, tensors) for each in value]
        if isinstance(value, list):
            return lambda given: [part(given) for part in each_of]
        make = getattr(type(value), "_make", tuple)  # a NamedTuple's own way
        return lambda given: make([part(given) for part in each_of])
    return lambda given: value


class StepRunner:
    """Makes the updates of one run, in its mode."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._recorded = RecordedStep(trainer) if trainer.config.runtime.mode == "graph" else None
        self.run: Callable[[Any], StepResult] = trainer.train_step
        """Makes one update from one batch."""
        if trainer.config.runtime.mode != "eager":
            self.run = self._run_first

    def forget(self) -> None:
        """Forgets what was recorded: the run has gone back, and its optimizers hold other tensors now."""
        if self._recorded is not None:
            self._recorded.forget()

    def _run_first(self, batch: Any) -> StepResult:
        """Looks for what cannot be compiled before minutes go into compiling."""
        look_before_first_step(self._trainer, batch)
        self.run = self._trainer.train_step if self._recorded is None else self._recorded.run
        return self.run(batch)


def reject_unrecorded(config: RunConfig, ranks: Ranks) -> None:
    """Rejects what cannot run as one graph."""
    if config.runtime.mode != "graph":
        return
    where = config.origin("runtime.mode")
    if config.runtime.precision == "fp16":
        raise ConfigError(
            "runtime.mode: graph does not go with precision fp16, whose loss scale the host follows. Use bf16, or "
            "mode compile.",
            where=where,
        )
    if ranks.size > 1:
        axes = ", ".join(f"{axis} {size}" for axis, size in ranks.mesh.sizes.items() if size > 1)
        raise ConfigError(
            f"runtime.mode: graph is for one process, and here are {ranks.size} ({axes}): what ranks tell each other "
            "within a step (FSDP2 on streams of its own) is not recorded. Use mode compile.",
            where=where,
        )
