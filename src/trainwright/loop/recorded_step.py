"""A step that is recorded once and replayed: forward, backward, clipping, judging and the optimizer in one launch.

Batches of one shape share a recording. The first updates of a shape are made as they are written: they warm up. Then
Python runs once more, recorded; from then on the host copies the batch, launches, and notes what came out. Optimizers
that cannot be recorded step after each replay. What cannot be repeated is refused with the user's line.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainwright.backends.recording import Recording
from trainwright.errors import HostReadError, TrainwrightError
from trainwright.events import Mean
from trainwright.loop.kept_values import KeptValues
from trainwright.loop.step_unless import knows_found_inf
from trainwright.loop.update import StepResult
from trainwright.optim.capture import prepare_for_capture
from trainwright.tracebacks import user_place

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

MAX_RECORDINGS = 8
"""Shapes of batches that are recorded; each holds memory of its own on a GPU. Others run as they are written."""

Fill = Callable[[list[Tensor]], Any]
"""Makes a value anew from the tensors of a replay."""


class _Signature(NamedTuple):
    """What a recording holds for: another batch needs another one."""

    structure: Any
    shapes: tuple[Any, ...]
    num_samples: int


@dataclass(slots=True)
class _Recorded:
    """A recording, and how to read what it returns."""

    recording: Recording
    read: Fill
    rate_of: str | None
    """The optimizer whose learning rate is the step's; None where the step returned a number of its own."""
    reads_step_tensor: bool


class RecordedStep:
    """Makes updates from recordings; `run` is `train_step` to the loop."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._recordings: dict[_Signature, _Recorded] = {}
        self._num_runs: dict[_Signature, int] = {}
        self._is_prepared = False
        self._has_warned = False
        updater = trainer.surroundings.updater
        self._recorders: list[Any] = [each for each in (trainer, updater, updater.watch) if each is not None]

    def run(self, batch: Any) -> StepResult:
        """Makes one update from one batch."""
        if not self._is_prepared:
            self._prepare_optimizers()
        inputs, signature, rebuild = _take_apart(batch, self._trainer.samples_in_hand)
        recorded = self._recordings.get(signature)
        if recorded is not None:
            trainer = self._trainer
            if recorded.reads_step_tensor:
                _ = trainer.step_tensor
            return self._finish(recorded, recorded.recording.replay(inputs))
        num_runs = self._num_runs.get(signature, 0)
        self._num_runs[signature] = num_runs + 1
        if num_runs < self._trainer.backend.num_warm_ups or not self._may_record(signature):
            with self._trainer.backend.warming_up():
                return self._trainer.train_step(batch)
        return self._record(signature, inputs, rebuild)

    def forget(self) -> None:
        """Drops all recordings; the next updates warm up again."""
        self._recordings, self._num_runs, self._is_prepared = {}, {}, False

    def _prepare_optimizers(self) -> None:
        """Gives optimizers rates that a recording reads anew; those that cannot be recorded step after each replay."""
        self._is_prepared = True
        updater = self._trainer.surroundings.updater
        gates = updater.watch is not None and updater.watch.gates
        for name, entry in updater.optimizers.items():
            can_hold = not gates or knows_found_inf(entry.optimizer)
            if can_hold and prepare_for_capture(entry.optimizer, self._trainer.device):
                updater.after_replay.discard(name)
            elif name not in updater.after_replay:
                updater.after_replay.add(name)
                logger.info(
                    "runtime.mode graph: the optimizer %s (%s) cannot be recorded and steps after each replay. Fused "
                    "and capturable optimizers can.",
                    name,
                    type(entry.optimizer).__name__,
                )

    def _may_record(self, signature: _Signature) -> bool:
        if len(self._recordings) < MAX_RECORDINGS:
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "runtime.mode graph: batches have come in more than %d shapes, and others run without a graph; this "
                "one is %s. Pad or pack the samples to fixed lengths.",
                MAX_RECORDINGS,
                [list(shape[0]) for shape in signature.shapes if isinstance(shape, tuple)],
            )
        return False

    def _record(self, signature: _Signature, inputs: list[Tensor], rebuild: Fill) -> StepResult:
        """Makes an update that is recorded; it counts like any other."""
        trainer, updater = self._trainer, self._trainer.surroundings.updater
        read: list[Fill] = []
        rates: list[float] = []

        def run(given: list[Tensor]) -> list[Tensor]:
            result = trainer.train_step(rebuild(given))
            rates.append(result[3])
            tensors: list[Tensor] = []
            outcome = (
                tuple(result),
                trainer.loss_weight,
                updater.take_postponed(),
                updater.watch.take_calls() if updater.watch is not None else [],
                trainer.storage.end_recording(),
            )
            read.append(_reader(outcome, tensors))
            return tensors

        with self._recording():
            recording, values = trainer.backend.record(run, inputs)
        rate_of = next((name for name, rate in updater.rates.items() if rate is rates[0]), None)
        recorded = _Recorded(recording, read[0], rate_of, trainer.has_read_step_tensor)
        self._recordings[signature] = recorded
        return self._finish(recorded, values, is_first=True)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Watches a step that is recorded; what would stay the same in every replay is refused."""
        trainer = self._trainer
        kept = KeptValues(trainer)
        draws = _draws()
        updater = trainer.surroundings.updater
        _ = trainer.step_tensor  # filled, for a step that is recorded reads it as it is
        trainer.has_read_step_tensor = False
        trainer.storage.begin_recording()
        for each in self._recorders:
            each.is_recording = True
        try:
            yield
        except HostReadError as error:
            raise TrainwrightError(
                f"runtime.mode graph: this cannot be recorded. {error.problem} Keep values on the device, move what "
                "the host does into a hook, or use mode compile.",
                where=user_place(error),
            ) from error
        finally:
            for each in self._recorders:
                each.is_recording = False
            trainer.storage.end_recording()
            updater.take_postponed()
        kept.refuse_changes()
        if _draws() != draws:
            raise TrainwrightError(
                "runtime.mode graph: the step draws from Python's or numpy's random numbers, which would be the same "
                "in every replay. Draw with torch, or in the dataset."
            )

    def _finish(self, recorded: _Recorded, values: list[Tensor], *, is_first: bool = False) -> StepResult:
        """Notes on the host what a run of the graph gave, as `train_step` would have."""
        trainer, updater = self._trainer, self._trainer.surroundings.updater
        (loss, metrics, grad_norm, rate), weight, postponed, calls, puts = recorded.read(values)
        trainer.loss_weight = weight
        if updater.watch is not None:
            for call in calls:
                updater.watch.keep_again(call, step=updater.step)
        trainer.storage.put_again(puts)
        if is_first:
            self._warn_of_frozen(metrics)
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


def _take_apart(batch: Any, num_samples: int) -> tuple[list[Tensor], _Signature, Fill]:
    """Returns a batch's tensors, what a recording of it holds for, and what puts such tensors together again."""
    if type(batch) is dict and all(type(value) is Tensor for value in batch.values()):
        keys = tuple(batch)
        inputs = list(batch.values())
        shapes = tuple([(each.shape, each.dtype, each.device) for each in inputs])
        return inputs, _Signature(keys, shapes, num_samples), lambda given: dict(zip(keys, given, strict=True))
    leaves, structure = tree_flatten(batch)
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shapes = tuple(
        [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else _known(leaf) for leaf in leaves]
    )

    def rebuild(given: list[Tensor]) -> Any:
        rest = iter(given)
        return tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    return inputs, _Signature(str(structure), shapes, num_samples), rebuild


def _known(leaf: Any) -> Any:
    """What stands for a batch's value that is no tensor: a recording holds for that value alone."""
    return leaf if isinstance(leaf, str | bytes | int | float | bool | type(None)) else repr(leaf)


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
        return lambda given: [part(given) for part in each_of]
    return lambda given: value


def _draws() -> tuple[Any, ...]:
    """Where Python's and numpy's generators stand."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2]
