"""Graph mode: a step that is captured once as a CUDA graph and replayed for every batch of the same shapes.

The first updates of a shape warm up; then Python runs once more, captured. On a CPU the step runs eagerly each time,
under the same guards (guards.py). The trainer passes its `train_step`; this module knows no trainer.

With several ranks a graph contains the collectives of its step. NCCL requires that all ranks capture an operation in
the same step, and that either all ranks replay the graphs of that capture or none does. Before each update the ranks
therefore exchange a number that identifies the shapes of all batches, so that all make the same decision.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from trainwright.backends import Backend, Capture
from trainwright.backends.backend import Recording
from trainwright.backends.private_torch import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from trainwright.compile.guards import (
    SCALARS,
    Change,
    Fingerprint,
    GuardedObjects,
    MutationGuard,
    reject_change,
)
from trainwright.config import RunConfig
from trainwright.data.order import mix_seed
from trainwright.errors import ConfigError, HostReadError, TrainwrightError
from trainwright.events import EventStorage, Mean
from trainwright.optim.device_step import (
    has_step_hooks,
    prepare_for_capture,
    supports_found_inf,
    sync_captured_rates,
)
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import Mesh, is_split
from trainwright.parallel.replicate import MissingGradientError
from trainwright.progress import progress
from trainwright.tracebacks import user_location

logger = logging.getLogger(__name__)

MAX_GRAPHS = 8
"""The maximum number of batch shapes that are captured; each graph has its own memory on a GPU. Other shapes run
eagerly."""

GRAPH_AXES = ("replicate", "fsdp")
"""The mesh axes whose collectives a graph may contain."""

MAX_SHAPES = 256
"""The maximum number of batch shapes that are counted; beyond it, the oldest are dropped."""

# A warning is logged after this many shapes if none is frequent enough to be captured.
_MANY_SHAPES = 32

# A graph that was replayed fewer times was not worth the capture; after this many such graphs, capturing stops.
_FEW_REPLAYS = 10
_MAX_SHORT_LIVED = 3

Fill = Callable[[list[Tensor]], Any]
"""Rebuilds a value from the tensors of a replay."""


class StepTensor:
    """The number of completed updates on the device, for code that a graph repeats."""

    def __init__(self, device: torch.device, capture: Capture) -> None:
        self._tensor = torch.zeros((), dtype=torch.int64, device=device)
        self._capture = capture
        self.was_read = False

    def read(self, step: int) -> Tensor:
        """Returns the tensor, set to `step` unless a step is being captured."""
        self.was_read = True
        return self._tensor if self._capture.is_active else self._tensor.fill_(step)


class CapturedUpdater(Protocol):
    """The interface of loop/update.py's Updater for graph mode."""

    optimizers: dict[str, Any]
    step: int
    rates: dict[str, float]
    after_replay: set[str]
    skips_updates: bool
    detector: Any
    """An AnomalyDetector of anomaly/detection.py, or None."""

    def reshard(self) -> None:
        """Frees parameters that code between steps has gathered, because a captured step gathers them itself."""

    def take_postponed(self) -> list[tuple[str, Tensor | bool]]:
        """Returns the optimizers to step after a replay."""

    def step_optimizer(self, name: str, skip: Tensor | bool, grad_scale: Tensor | None = None) -> dict[str, Any]:
        """Steps an optimizer and returns its metrics."""


class StepOutcome(NamedTuple):
    """The result of an update."""

    result: tuple[Any, dict[str, Any], Any, float]
    """The loss, metrics, gradient norm and learning rate: the fields of a StepResult."""
    weight: Any
    """The weight of the loss."""


class _Signature(NamedTuple):
    """The batches that a graph is valid for."""

    structure: Any
    shapes: tuple[Any, ...]
    """Shape, strides, dtype and device of each tensor; the other values themselves."""
    same: tuple[int, ...] | None
    """For each tensor the first that is the same object; None if all differ."""
    num_samples: int
    of_all_ranks: int = 0
    """A number that changes with the signature of any rank; 0 for a single process."""


class _Outputs:
    """Reads the result of the step; on a CPU, where the step runs each time, that of the last run."""

    read: Fill
    rate: float


@dataclass(slots=True)
class _Graph:
    """A captured step, and a function that reads its result."""

    recording: Recording
    outputs: _Outputs
    rate_of: str | None
    """The optimizer whose learning rate is the step's; None if the step returned its own number."""
    reads_step_tensor: bool
    fingerprint: Fingerprint
    compared_at: tuple[int, ...]
    """The state of the run when the fingerprint was last compared."""


class GraphStep:
    """Makes updates by replaying captured steps."""

    def __init__(
        self,
        train_step: Callable[[Any], Any],
        *,
        backend: Backend,
        capture: Capture,
        storage: EventStorage,
        updater: CapturedUpdater,
        guarded: GuardedObjects,
        step_tensor: StepTensor,
        read_weight: Callable[[], Any],
        read_progress: Callable[[], tuple[int, ...]],
        has_user_code_between_steps: bool,
        sum_over_ranks: Callable[..., tuple[int, ...]] | None = None,
    ) -> None:
        """`read_progress` returns the completed steps, then numbers that change when user code has run.

        `sum_over_ranks` returns sums of integers over all ranks (`Ranks.sum_counts`); None for a single process.
        """
        self._train_step = train_step
        self._backend = backend
        self._capture = capture
        self._storage = storage
        self._updater = updater
        self._guarded = guarded
        self._step_tensor = step_tensor
        self._read_weight = read_weight
        self._read_progress = read_progress
        self._compares_always = has_user_code_between_steps
        self._sum_over_ranks = sum_over_ranks
        self._salt = secrets.randbits(48)
        self._is_unsettled = False
        """True if the last capture created state, in which case this rank has discarded its graph."""
        self._graphs: dict[_Signature, _Graph] = {}
        self._num_runs: dict[_Signature, int] = {}
        self._is_prepared = self._was_prepared_to_skip = False
        self._warned: set[str] = set()
        self._num_eager_runs = 0
        self._num_replays = 0
        """Counted since graphs were last dropped."""
        self._num_short_lived = self._num_unsettled = 0
        self._captured: list[torch.optim.Optimizer] = []

    def run(self, batch: Any, num_samples: int) -> StepOutcome:
        """Makes one update from one batch."""
        self._updater.reshard()
        # The first update shows whether the loss counts labels, in which case updates may be skipped.
        if not self._is_prepared or self._was_prepared_to_skip != self._updater.skips_updates:
            self._prepare_optimizers()
        for optimizer in self._captured:
            sync_captured_rates(optimizer)
        inputs, signature, rebuild = _take_apart(batch, num_samples)
        if any(each.requires_grad for each in inputs):
            _reject_gradients(batch)
        if self._sum_over_ranks is not None:
            signature = self._agree(signature)
        graph = self._graphs.get(signature) if signature is not None else None
        if graph is not None and (self._sum_over_ranks is not None or self._is_valid(graph)):  # `_agree` checked it
            if graph.reads_step_tensor:
                self._step_tensor.read(self._read_progress()[0])
            self._num_replays += 1
            try:
                with self._explaining():
                    outputs = graph.recording.replay(inputs)
            except (IndexError, RuntimeError) as error:
                self._fail_eagerly(batch, error)
            return self._finish(graph, outputs)
        self._num_eager_runs += 1
        if not self._may_capture(signature, batch):
            with self._backend.warming_up():
                return StepOutcome(self._train_step(batch), self._read_weight())
        return self._capture_step(signature, inputs, rebuild)

    def reset(self) -> None:
        """Drops all graphs; the next updates warm up again. Called after a rollback, because optimizers have other
        tensors."""
        self._graphs, self._num_runs, self._is_prepared = {}, {}, False

    def close(self) -> None:
        """Drops all graphs. Called at the end of training, because NCCL cannot close a group that a graph uses."""
        self._graphs.clear()

    def _fail_eagerly(self, batch: Any, error: Exception) -> NoReturn:
        """Runs a step whose replay failed again in eager mode, so that the error names the user's line.

        With several ranks, the error is raised unchanged, because the other ranks would not join a second run.
        """
        if self._sum_over_ranks is not None:
            raise error
        try:
            self._train_step(batch)
        except Exception as explained:
            raise explained from None
        raise error

    def _agree(self, signature: _Signature | None) -> _Signature | None:
        """Returns the signature with the number of all ranks, None if any rank has none. Collective, between hosts.

        If a value that a graph depends on has changed on any rank, all ranks drop their graphs.
        """
        assert self._sum_over_ranks is not None
        changes = next((found for graph in self._graphs.values() if (found := self._changes_of(graph))), [])
        own = 0 if signature is None else number_of(signature, salt=self._salt)
        number, num_without, num_changed, num_unsettled = self._sum_over_ranks(
            own, int(signature is None), int(bool(changes)), int(self._is_unsettled)
        )
        self._is_unsettled = False
        if num_changed:
            self._drop(changes)
        if num_unsettled:
            self._graphs.clear()
        return None if signature is None or num_without else signature._replace(of_all_ranks=number)

    def _is_valid(self, graph: _Graph) -> bool:
        """Returns True if nothing has changed since the capture; drops all graphs otherwise."""
        changes = self._changes_of(graph)
        if changes:
            self._drop(changes)
        return not changes

    def _changes_of(self, graph: _Graph) -> list[Change]:
        """Returns what has changed since the capture.

        Compares only after user code has run, because a comparison takes some microseconds.
        """
        if not self._compares_always:
            now = (self._num_eager_runs, *self._read_progress()[1:])
            if graph.compared_at == now:
                return []
            graph.compared_at = now
        return graph.fingerprint.changes()

    def _drop(self, changes: list[Change]) -> None:
        """Drops all graphs; the next updates warm up again, because optimizers may have to create state."""
        self._num_short_lived = self._num_short_lived + 1 if self._num_replays < _FEW_REPLAYS else 0
        self._num_replays = 0
        self.reset()
        names = ", ".join(change.name for change in changes[:4]) + (", ..." if len(changes) > 4 else "")
        names = names or "a value on another rank"
        logger.info("runtime.mode graph: capturing the step again because %s changed.", names)
        if self._num_short_lived == _MAX_SHORT_LIVED:
            logger.warning(
                "runtime.mode graph: values that a graph cannot follow change every few updates (%s), so the steps run "
                "without a graph. Keep them in tensors that are written in place, or use mode compile.",
                names,
            )

    def _prepare_optimizers(self) -> None:
        """Moves the learning rates of optimizers to the device; optimizers that cannot be captured step after each
        replay."""
        self._is_prepared = True
        updater = self._updater
        skips = self._was_prepared_to_skip = updater.skips_updates
        for name, entry in updater.optimizers.items():
            optimizer = entry.optimizer
            # Python code that hooks into a step would not run in a replay.
            can_be = not has_step_hooks(optimizer) and (not skips or supports_found_inf(optimizer))
            if can_be and prepare_for_capture(optimizer, self._backend.device):
                updater.after_replay.discard(name)
            elif name not in updater.after_replay:
                updater.after_replay.add(name)
                logger.info(
                    "runtime.mode graph: the optimizer %s (%s) cannot be captured and steps after each replay. Fused "
                    "and capturable optimizers without hooks can.",
                    name,
                    type(optimizer).__name__,
                )
        captured = {
            name: entry.optimizer for name, entry in updater.optimizers.items() if name not in updater.after_replay
        }
        self._guarded.optimizers = captured
        self._captured = list(captured.values())

    def _may_capture(self, signature: _Signature | None, batch: Any) -> bool:
        """Counts an update of this signature; returns True if it has warmed up and should be captured."""
        if signature is None:
            self._warn_once(
                "values",
                "runtime.mode graph: batches hold %s, which cannot be compared between batches, so their steps run "
                "without a graph. Use tensors, numbers or strings.",
                _non_tensors(batch) or "values on another rank",
            )
            return False
        num_runs = self._num_runs.get(signature, 0)
        self._num_runs[signature] = num_runs + 1
        if len(self._num_runs) > MAX_SHAPES:
            self._num_runs.pop(next(iter(self._num_runs)))
        if len(self._num_runs) > _MANY_SHAPES and not self._graphs:
            self._warn_once(
                "distinct",
                "runtime.mode graph: almost every batch differs from the others in %s, so steps run without a graph. "
                "Pad the samples to fixed lengths, and leave out what the step does not need.",
                _non_tensors(batch) or "its shapes",
            )
        if num_runs < self._backend.num_warm_ups or self._num_short_lived >= _MAX_SHORT_LIVED:
            return False
        if len(self._graphs) < MAX_GRAPHS:
            return True
        self._warn_once(
            "shapes",
            "runtime.mode graph: batches have more than %d shapes; further shapes, such as %s, run without a graph. "
            "Pad or pack the samples to fixed lengths.",
            MAX_GRAPHS,
            [list(each[0]) for each in signature.shapes if isinstance(each[0], torch.Size)],
        )
        return False

    def _warn_once(self, subject: str, warning: str, *values: Any) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning(warning, *values)

    def _capture_step(self, signature: Any, inputs: list[Tensor], rebuild: Fill) -> StepOutcome:
        """Makes an update that is captured; it counts like any other."""
        with progress("Capturing the step"):
            return self._capture_update(signature, inputs, rebuild)

    def _capture_update(self, signature: Any, inputs: list[Tensor], rebuild: Fill) -> StepOutcome:
        updater, storage = self._updater, self._storage
        outputs = _Outputs()

        def run(given: list[Tensor]) -> list[Tensor]:
            with self._capturing():
                result = self._train_step(rebuild(given))
                outputs.rate = result[3]
                tensors: list[Tensor] = []
                parts = (
                    tuple(result),
                    self._read_weight(),
                    updater.take_postponed(),
                    updater.detector.take_calls() if updater.detector is not None else [],
                    storage.end_recording(),
                )
                outputs.read = _reader(parts, tensors)
            return tensors

        parameters = [
            parameter
            for entry in updater.optimizers.values()
            for group in entry.optimizer.param_groups
            for parameter in group["params"]
        ]
        guard = MutationGuard(self._guarded)
        self._step_tensor.read(self._read_progress()[0])  # filled, because the captured step reads it unchanged
        self._step_tensor.was_read = False
        with self._explaining():
            recording, values = self._backend.record(run, inputs, parameters=parameters)
        state_changes = guard.reject_changes()
        rate_of = next((name for name, rate in updater.rates.items() if rate is outputs.rate), None)
        graph = _Graph(
            recording, outputs, rate_of, self._step_tensor.was_read, Fingerprint(self._guarded), compared_at=()
        )
        if state_changes:
            # State was created, so this update differs from the following ones, and the next one is captured instead.
            self._is_unsettled = True
            self._num_unsettled += 1
            if self._num_unsettled > _MAX_SHORT_LIVED:
                reject_change(state_changes[0], self._guarded)
        else:
            self._graphs[signature] = graph
        return self._finish(graph, values, is_first=True)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Marks the step as captured: updater, detector and storage record the work of the host after each replay."""
        self._storage.begin_recording()
        self._capture.is_active = True
        try:
            yield
        finally:
            self._capture.is_active = False
            self._storage.end_recording()
            self._updater.take_postponed()

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Explains why a step cannot be captured: the host reads a value, or a gradient is missing on this rank."""
        try:
            yield
        except HostReadError as error:
            raise TrainwrightError(
                f"runtime.mode graph: this step cannot be captured. {error.problem} Keep values on the device, move "
                "code for the host into a hook, or use mode compile.",
                where=user_location(error),
            ) from error
        except MissingGradientError as error:
            missing = {id(parameter) for parameter in error.parameters}
            names = [name for name, each in self._guarded.trainer.model.named_parameters() if id(each) in missing]
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise TrainwrightError(
                f"runtime.mode graph: {shown} got no gradient in this step on this rank. A graph of several ranks "
                "cannot follow which ranks have one. Use every trained parameter in each step, freeze the others "
                "(model.freeze), or use mode compile."
            ) from error

    def _finish(self, graph: _Graph, values: list[Tensor], *, is_first: bool = False) -> StepOutcome:
        """Does the host's part of `train_step` with the values of a replay."""
        updater = self._updater
        (loss, metrics, grad_norm, rate), weight, postponed, calls, puts = graph.outputs.read(values)
        if updater.detector is not None:
            for call in calls:
                updater.detector.repeat(call, step=updater.step)
        self._storage.put_again(puts)
        if is_first:
            self._warn_of_constants({**metrics, **{name: value for name, value, *_ in puts}})
        for name, skip in postponed:
            metrics.update(updater.step_optimizer(name, skip))
        if len(updater.rates) > 1:
            metrics.update({f"lr/{name}": each for name, each in updater.rates.items()})
        if graph.rate_of is not None:
            rate = updater.rates[graph.rate_of]
        return StepOutcome((loss, metrics, grad_norm, rate), weight)

    def _warn_of_constants(self, metrics: Mapping[str, Any]) -> None:
        constant = [name for name, value in metrics.items() if not isinstance(value, Tensor | Mean)]
        constant = [name for name in constant if not name.startswith("lr/")]
        if constant:
            logger.warning(
                "runtime.mode graph: the metrics %s are not tensors, so they keep the values of the captured step.",
                ", ".join(constant),
            )


def _take_apart(batch: Any, num_samples: int) -> tuple[list[Tensor], _Signature | None, Fill]:
    """Returns the tensors of a batch, its signature, and a function that puts other tensors in their places.

    The signature is None for a batch with values that cannot be compared.
    """
    if type(batch) is dict and all(type(value) is Tensor for value in batch.values()):
        keys = tuple(batch)
        inputs = list(batch.values())
        shapes = tuple([(each.shape, each.stride(), each.dtype, each.device) for each in inputs])
        signature = _Signature(keys, shapes, _identities(inputs), num_samples)
        return inputs, signature, lambda given: dict(zip(keys, given, strict=True))
    leaves, structure = tree_flatten(batch)
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def rebuild(given: list[Tensor]) -> Any:
        rest = iter(given)
        return tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    known = tuple([_comparable(leaf) for leaf in leaves])
    if None in known:
        return inputs, None, rebuild
    return inputs, _Signature(str(structure), known, _identities(inputs), num_samples), rebuild


def number_of(signature: Hashable, *, salt: int) -> int:
    """Returns a 48-bit number for the signature of a rank's batch, so that the sum over thousands of ranks fits into 64
    bits.

    Each rank has its own `salt`, so the sum changes if two ranks exchange their shapes. Python's hash of a tuple is
    nearly linear: `hash((salt, signature))` would not detect a third of such exchanges.
    """
    return mix_seed(salt, hash(signature)) & (2**48 - 1)


def _identities(inputs: list[Tensor]) -> tuple[int, ...] | None:
    ids = [id(each) for each in inputs]
    return None if len(set(ids)) == len(ids) else tuple([ids.index(each) for each in ids])


def _comparable(leaf: Any) -> Any:
    """Returns a hashable description of a value of a batch, equal only for equal values; None if there is none."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return "numpy", leaf.dtype.str, leaf.shape, leaf.tobytes()
    if type(leaf) in SCALARS or isinstance(leaf, torch.dtype | torch.device):
        return type(leaf), repr(leaf)  # 1, 1.0 and True are equal, as are 0.0 and -0.0
    return None


def _non_tensors(batch: Any) -> str:
    """Names the values of a batch that are not tensors."""
    leaves, _ = tree_flatten_with_path(batch)
    found = {str(path[0]) if path else "": type(leaf).__name__ for path, leaf in leaves if not isinstance(leaf, Tensor)}
    return ", ".join(f"{name.strip('[]')} ({kind})" for name, kind in found.items())


def _reject_gradients(batch: Any) -> NoReturn:
    """Raises for a batch whose tensors require gradients: a graph reads copies of them."""
    leaves, _ = tree_flatten_with_path(batch)
    names = [keystr(path).strip("[]'") for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    raise TrainwrightError(
        f"runtime.mode graph: the batch has tensors that require gradients ({', '.join(names)}), but a graph reads "
        "copies of them. Compute them in forward, or use mode eager or compile."
    )


def _reader(value: Any, tensors: list[Tensor]) -> Fill:
    """Returns a function that rebuilds `value` from the tensors of a replay; adds its own tensors to `tensors`."""
    if isinstance(value, Tensor):
        if is_split(value):
            raise TrainwrightError(
                f"runtime.mode graph: the step returns or puts a sharded tensor (a DTensor of shape "
                f"{list(value.shape)}), which a replay cannot copy. Use its full value, value.full_tensor(), or mode "
                "compile."
            )
        tensors.append(value.detach())
        return itemgetter(len(tensors) - 1)
    if isinstance(value, Mean):
        total, count = _reader(value.total, tensors), _reader(value.count, tensors)
        return lambda given: Mean(total(given), count(given))
    if isinstance(value, Mapping):
        readers = {name: _reader(each, tensors) for name, each in value.items()}
        return lambda given: {name: read(given) for name, read in readers.items()}
    if isinstance(value, tuple | list):
        each_of = [_reader(each, tensors) for each in value]
        if isinstance(value, list):
            return lambda given: [read(given) for read in each_of]
        make = getattr(type(value), "_make", tuple)  # of a NamedTuple
        return lambda given: make([read(given) for read in each_of])
    return lambda given: value


def uncaptured_axes(mesh: Mesh) -> list[str]:
    """Returns the axes of a mesh whose collectives a graph cannot contain."""
    return [axis for axis, size in mesh.sizes.items() if size > 1 and axis not in GRAPH_AXES]


def reject_ungraphable(config: RunConfig, ranks: Ranks) -> None:
    """Raises for settings that cannot run as one graph."""
    if config.runtime.mode != "graph":
        return
    where = config.origin("runtime.mode")
    if config.runtime.precision == "fp16":
        raise ConfigError(
            "runtime.mode graph does not support precision fp16, because the host adjusts its loss scale. Use bf16, or "
            "mode compile.",
            where=where,
        )
    others = uncaptured_axes(ranks.mesh)
    if others:
        axis = others[0]
        raise ConfigError(
            f"runtime.mode graph supports several processes along {' and '.join(GRAPH_AXES)}, but this run has "
            f"{ranks.mesh.size(axis)} along {axis}, whose collectives inside of layers are not captured. Use mode "
            "compile, or other axes of runtime.mesh.",
            where=where,
        )
