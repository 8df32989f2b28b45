"""A step that is recorded once and replayed: forward, backward, clipping, judging and the optimizer in one launch.

Batches of one shape share a recording. The first updates of a shape are made as they are written: they warm up. Then
Python runs once more, recorded; from then on the host copies the batch, launches, and notes what came out. Optimizers
that cannot be recorded step after each replay. What cannot be repeated is refused with the user's line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from trainwright.backends.recording import Recording
from trainwright.errors import HostReadError, TrainwrightError
from trainwright.events import Mean
from trainwright.loop.fingerprint import PLAIN, Change, Fingerprint, users_act_between_steps
from trainwright.loop.kept_values import KeptValues, refuse_change
from trainwright.loop.step_unless import is_watched, knows_found_inf
from trainwright.loop.update import StepResult
from trainwright.optim.capture import prepare_for_capture, settle_rates
from trainwright.tracebacks import user_place

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

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
        self._told: set[str] = set()
        self._num_runs_in_python = 0
        self._num_replays = 0
        """Since recordings were last dropped."""
        self._num_short = self._num_unsettled = 0
        self._captured: list[torch.optim.Optimizer] = []
        self._users_act = users_act_between_steps(trainer)
        updater = trainer.surroundings.updater
        self._recorders: list[Any] = [each for each in (trainer, updater, updater.watch) if each is not None]

    def run(self, batch: Any) -> StepResult:
        """Makes one update from one batch."""
        if not self._is_prepared:
            self._prepare_optimizers()
        for optimizer in self._captured:
            settle_rates(optimizer)
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
        updater = self._trainer.surroundings.updater
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
        if subject not in self._told:
            self._told.add(subject)
            logger.warning(warning, *values)

    def _record(self, signature: Any, inputs: list[Tensor], rebuild: Fill) -> StepResult:
        """Makes an update that is recorded; it counts like any other."""
        trainer, updater = self._trainer, self._trainer.surroundings.updater
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
        state_changes = kept.refuse_changes()
        rate_of = next((name for name, rate in updater.rates.items() if rate is outcome.rate), None)
        recorded = _Recorded(
            recording, outcome, rate_of, trainer.has_read_step_tensor, Fingerprint(trainer), compared_at=()
        )
        if state_changes:
            # State was made: this update was another than those that follow, and is recorded again.
            self._num_unsettled += 1
            if self._num_unsettled > _MAX_SHORT:
                refuse_change(state_changes[0], self._trainer)
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
            self._trainer.surroundings.updater.take_postponed()

    def _finish(self, recorded: _Recorded, values: list[Tensor], *, is_first: bool = False) -> StepResult:
        """Notes on the host what a run of the graph gave, as `train_step` would have."""
        trainer, updater = self._trainer, self._trainer.surroundings.updater
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
            where=user_place(error),
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
