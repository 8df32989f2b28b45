"""`trainer.micro_batch_size: auto`: finds the largest micro-batch whose step fits into memory.

Each rank runs trial steps alone, as a run of one process; all ranks use the smallest result. The trial steps and the
exchange of results are also used by activation_checkpointing.py.
"""

from __future__ import annotations

import copy
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch

from trainwright.backends import Backend
from trainwright.checkpoint import run_folder as run_folders
from trainwright.config import RunConfig, resolve_batch
from trainwright.data.loader import MadeBatches, TrainData
from trainwright.errors import ConfigError, OutOfMemory, TrainwrightError
from trainwright.loop.state import count_samples
from trainwright.loop.trainer import Trainer, TrainIterator
from trainwright.loop.update import StepResult
from trainwright.memory.out_of_memory import advice_for, is_out_of_memory
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import set_gradient_dtype
from trainwright.parallel.processes import local_size
from trainwright.progress import progress

logger = logging.getLogger(__name__)

HEADROOM = 0.05
"""The fraction of the memory that stays free, for later batches, collectives and fragmentation."""
TRIAL_DATA: Mapping[str, Any] = {
    "data.num_workers": 0,
    "data.loader": {},
    "data.sampler": None,
    "data.last_batch": None,
}
"""Settings of a trial, which reads one batch."""
_LABEL = "trainer.micro_batch_size: auto"
_NUM_MICRO_BATCHES = 2  # from the second micro-batch on there are gradients in addition to the activations
_MEASURED_SECONDS = 1.0
_MAX_REPEATS = 5

Found = TypeVar("Found")


@dataclass(frozen=True)
class MicroBatchTime:
    """The cost of a step with micro-batches of this size; a size that does not fit has no time."""

    size: int
    seconds_per_sample: float | None
    peak_bytes: int | None = None
    """The peak memory of the process on the device, if the system knows it."""


def micro_batch_sizes(rank_batch_size: int) -> list[int]:
    """Returns the sizes into which a rank's batch can be divided evenly: its divisors, ascending."""
    small = [size for size in range(1, int(rank_batch_size**0.5) + 1) if rank_batch_size % size == 0]
    return sorted({*small, *(rank_batch_size // size for size in small)})


def largest_that_fits(candidates: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Returns the largest of the ascending candidates that fits, or None if the first does not fit.

    If one fits, all smaller ones must. Strides double until a candidate does not fit; then the rest is bisected. A
    candidate much larger than the last that fits is never tried: at most 2 log₂ n trials, most of them small.
    """
    fitting, too_large, stride = -1, len(candidates), 1
    while fitting + 1 < too_large:
        is_growing = too_large == len(candidates)
        probe = min(fitting + stride, too_large - 1) if is_growing else (fitting + too_large) // 2
        if fits(candidates[probe]):
            fitting, stride = probe, stride * 2
        else:
            too_large = probe
    return candidates[fitting] if fitting >= 0 else None


class Growth:
    """Predicts the memory of a larger micro-batch from that of a smaller one.

    A GPU raises out-of-memory. Linux instead kills a process that uses too much host memory, so a size is tried there
    only if there is enough memory, assuming the same number of bytes per sample as before.
    """

    def __init__(
        self, backend: Backend, *, num_fixed_bytes: int = 0, num_sharing: int = 1, headroom: float = HEADROOM
    ) -> None:
        """`num_fixed_bytes` do not depend on the samples: the gradients. `num_sharing` processes share the memory.

        `headroom` is the share of the memory that stays free.
        """
        self._headroom = headroom
        self._backend = backend
        self._num_fixed_bytes = num_fixed_bytes
        self._num_sharing = num_sharing
        self._bytes_per_sample: float | None = None

    def leaves_room(self, num_samples: int) -> bool:
        """Returns True if a micro-batch of this size probably fits, or if nothing is known."""
        room = self._backend.memory_room()
        if room is None or self._bytes_per_sample is None:
            return True
        needed = self._num_fixed_bytes + self._bytes_per_sample * num_samples
        return needed <= (1.0 - self._headroom) * room / self._num_sharing

    @contextmanager
    def measuring(self, num_samples: int) -> Iterator[None]:
        """Measures the memory that a micro-batch of this size needs inside the block."""
        self._backend.begin_peak()
        before = self._backend.memory().in_use
        yield
        peak = self._backend.memory().peak
        if before is not None and peak is not None:
            # Other constant memory is attributed to the samples too, so the result is an upper bound that improves with
            # the size.
            self._bytes_per_sample = max(peak - before - self._num_fixed_bytes, 0) / num_samples


def settle_micro_batch(
    config: RunConfig,
    assemble: Callable[[RunConfig, Path], Trainer],
    *,
    backend: Backend,
    ranks: Ranks,
    folder: Path | None,
) -> RunConfig:
    """Returns the config with a number instead of `micro_batch_size: auto`, the same on every rank.

    `assemble` builds a trainer of one process in a given folder. `folder` is the folder of a run that resumes, or None.
    Its own number is used again if it divides the rank's batch and the device is the same.
    """
    where = config.origin("trainer.micro_batch_size")
    reject_sharded(_LABEL, "Set a number; `trainwright estimate` says what fits.", ranks, where)
    largest = resolve_batch(config, ranks.size).micro_batch_size
    saved = config_of_earlier_start(folder, backend, ranks)
    found = None if saved is None else saved.trainer.micro_batch_size
    if isinstance(found, int) and largest % found == 0:
        logger.info("%s: %d, as in the earlier start of this run", _LABEL, found)
        return config.derive({"trainer.micro_batch_size": found})
    logger.info("%s: finding how many of %d samples fit into memory at once", _LABEL, largest)
    trial = config.derive({"trainer.global_batch_size": largest, "trainer.micro_batch_size": largest, **TRIAL_DATA})

    def find(empty: Path) -> int | None:
        with trial_steps(assemble(trial, empty), largest, ranks) as steps:
            sizes = micro_batch_sizes(largest)
            if len(sizes) > 1 and not steps.can_run(sizes[0]):
                sizes = sizes[1:]
            return largest_that_fits(sizes, steps.fits)

    smallest = trial.derive({"trainer.micro_batch_size": 1})
    problem = "the smallest micro-batch does not fit"
    number = min(find_on_ranks(_LABEL, find, problem, smallest, backend=backend, ranks=ranks, where=where))
    logger.info("%s: %d of %d samples at once", _LABEL, number, largest)
    return config.derive({"trainer.micro_batch_size": number})


def measure_micro_batches(
    trainer: Trainer, largest: int, *, headroom: float, progress: Callable[[MicroBatchTime], None] | None = None
) -> list[MicroBatchTime]:
    """Measures micro-batches of doubling size, up to `largest` or the first that does not fit.

    Each size divides `largest`, the number of samples of the trainer's batch.
    """
    found: list[MicroBatchTime] = []
    sizes = doubling_sizes(largest)
    with (
        trainer.backend.limited_memory(1.0 - headroom),
        trial_steps(trainer, largest, Ranks(), headroom=headroom) as steps,
    ):
        if len(sizes) > 1 and not steps.can_run(sizes[0]):
            sizes = sizes[1:]
        for size in sizes:
            fits = steps.fits(size)
            found.append(MicroBatchTime(size, *steps.measure(size)) if fits else MicroBatchTime(size, None))
            if progress is not None:
                progress(found[-1])
            if not fits:
                break
    return found


def doubling_sizes(rank_batch_size: int) -> list[int]:
    """Returns divisors of a batch size, each at least twice the previous one, and the size itself.

    >>> doubling_sizes(24)
    [1, 2, 4, 8, 24]
    """
    chosen: list[int] = []
    for size in micro_batch_sizes(rank_batch_size):
        if not chosen or size >= 2 * chosen[-1]:
            chosen.append(size)
    return chosen if chosen[-1] == rank_batch_size else [*chosen, rank_batch_size]


def reject_sharded(label: str, instead: str, ranks: Ranks, where: Any) -> None:
    """Rejects a search if a rank has only a shard of the model, because each rank searches independently."""
    if ranks.mesh.is_split:
        axes = ", ".join(f"{axis} {size}" for axis, size in ranks.mesh.sizes.items() if size > 1)
        raise ConfigError(
            f"{label} needs the whole model on each rank, but the mesh ({axes}) splits it. {instead}", where=where
        )


def find_on_ranks(
    label: str,
    find: Callable[[Path], Found | None],
    problem: str,
    smallest: RunConfig,
    *,
    backend: Backend,
    ranks: Ranks,
    where: Any,
) -> list[Found]:
    """Calls `find` on every rank with an empty folder, and returns the results of all ranks.

    If `find` runs out of memory or returns None on a rank, all raise OutOfMemory with `problem` and advice for the
    config that needs the least memory. Any other failure is raised on all ranks, as text on the others.
    """
    failure: Exception | None = None
    found: Found | None = None
    try:
        with (
            TemporaryDirectory(prefix="trainwright-") as empty,
            backend.limited_memory(1.0 - HEADROOM),
            progress(f"Trying values of {label}"),
        ):
            found = find(Path(empty))
    except Exception as error:
        if not is_out_of_memory(error):  # otherwise the model, its optimizer or a batch alone is too large
            failure = error
    backend.release_memory()
    answers = ranks.gather((found, None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(answers):
        if text is not None:
            raise TrainwrightError(f"{label}: the trial failed on rank {rank}. {text}")
    fitting = [each for each, _ in answers if each is not None]
    if len(fitting) < len(answers):
        if smallest.runtime.precision == "auto":
            smallest = smallest.derive({"runtime.precision": backend.choose_precision()})
        advice = "".join(f"\n  - {each}" for each in advice_for(smallest))
        raise OutOfMemory(
            f"{label}: {problem} into the memory of {backend.describe()}, of which {HEADROOM:.0%} stays free. What "
            f"could change:{advice}",
            where=where,
        )
    return fitting


def config_of_earlier_start(folder: Path | None, backend: Backend, ranks: Ranks) -> RunConfig | None:
    """Returns the config of the run in this folder if it ran on the same kind of device; the first rank reads it."""
    found: RunConfig | None = None
    if folder is not None and ranks.is_first:
        try:
            saved = run_folders.read_config(folder)
            environment = json.loads((folder / run_folders.ENVIRONMENT_FILE).read_text(encoding="utf-8"))
            # On another device, the largest size may differ, and results differ in their last bits anyway.
            if saved is not None and environment.get("device") == backend.describe():
                found = saved
        except (OSError, ValueError, TrainwrightError) as error:
            # Whether the run can resume from such a folder is decided later.
            logger.debug("Nothing is known from an earlier start: %s", error)
    return ranks.broadcast(found)


@contextmanager
def trial_steps(trainer: Trainer, largest: int, ranks: Ranks, *, headroom: float = HEADROOM) -> Iterator[TrialSteps]:
    """Yields an object that runs steps with one batch of the `largest` longest samples; then restores all state.

    On a device without out-of-memory errors a step is tried if it leaves the `headroom` free.
    """
    data = trainer.train_data
    assert data is not None
    if trainer.varying_memory:
        raise ConfigError(
            "trainer.micro_batch_size and model.activation_checkpointing: auto measures one step, but "
            f"{trainer.varying_memory} Set a number."
        )
    if isinstance(data, MadeBatches):
        raise ConfigError(
            "trainer.micro_batch_size and model.activation_checkpointing: auto tries batches of data.train, but there "
            "is no training dataset, because next_train_inputs makes the batches. Set a number."
        )
    with _state_restored(trainer), trainer.storage:
        lengths = getattr(data.dataset, "lengths", None)
        if isinstance(data, TrainData) and lengths is not None and len(lengths) == len(data):
            data.order = _LongestFirst(lengths)
        with TrainIterator(data, trainer.batches_to_device) as iterator:
            yield TrialSteps(trainer, iterator, largest, sums_gradients=ranks.size > 1, headroom=headroom)


class TrialSteps:
    """Runs steps with one batch, divided into micro-batches of any size."""

    def __init__(
        self,
        trainer: Trainer,
        iterator: TrainIterator,
        largest: int,
        *,
        sums_gradients: bool,
        headroom: float = HEADROOM,
    ) -> None:
        self._trainer = trainer
        self._largest = largest
        self._sums_gradients = sums_gradients
        parameters = list(trainer.model.parameters())
        gradients = sum(each.nbytes for each in parameters if each.requires_grad)
        self._growth = Growth(trainer.backend, num_fixed_bytes=gradients, num_sharing=local_size(), headroom=headroom)
        self._has_stepped = False
        # Occupies the memory of hooks that will keep copies of the weights.
        num_copies = sum(getattr(hook, "copies_of_weights", 0) for hook in trainer.hooks)
        self._copies = [torch.empty_like(each) for _ in range(num_copies) for each in parameters]
        self._batch = trainer.next_train_inputs(iterator)
        fetched = None if iterator.fetched.value is None else iterator.fetched
        self._num_samples = count_samples(self._batch, fetched)

    def can_run(self, size: int) -> bool:
        """Returns False if steps with micro-batches of this size raise ValueError, as batch normalization of one."""
        try:
            self.fits(size)
        except ValueError as error:
            logger.debug("Micro-batches of %d cannot be trained: %s", size, error)
            return False
        return True

    def fits(self, size: int) -> bool:
        """Runs a step with micro-batches of this size; returns True if there is enough memory for it."""
        self._trainer.backend.release_memory()
        does_fit = self._growth.leaves_room(size) and self.run(size, lambda: self._growth.measuring(size))
        logger.debug("Micro-batches of %d %s", size, "fit" if does_fit else "do not fit")
        return does_fit

    def run(self, size: int, measuring: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Runs a step, inside `measuring`, without an estimate before; returns True if there is enough memory."""
        trainer = self._trainer
        trainer.set_num_micro_batches(self._largest // size, limit=_NUM_MICRO_BATCHES)
        try:
            if not self._has_stepped:
                # Only the second step has the optimizer's state in addition to the activations.
                self._run_step()
                self._has_stepped = True
            with measuring():
                self._run_step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            for optimizer in trainer.optimizers.values():
                optimizer.zero_grad(set_to_none=True)
        return True

    def measure(self, size: int) -> tuple[float, int | None]:
        """Returns the seconds per sample and the peak memory of a step with micro-batches of this size, which fit.

        A step of many small micro-batches is measured in part: as many as take about a second.
        """
        trainer, num_micro_batches = self._trainer, self._largest // size
        backend = trainer.backend
        limit = min(num_micro_batches, _NUM_MICRO_BATCHES)
        backend.begin_peak()
        seconds = [self._time_step(size, limit)]
        peak = backend.memory().peak
        limit = min(num_micro_batches, max(limit, round(limit * _MEASURED_SECONDS / max(seconds[0], 1e-6))))
        num_repeats = max(1, min(_MAX_REPEATS, round(_MEASURED_SECONDS / (seconds[0] * limit / _NUM_MICRO_BATCHES))))
        seconds = [self._time_step(size, limit) for _ in range(num_repeats)]
        for optimizer in trainer.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        return statistics.median(seconds) / (limit * size), peak

    def _time_step(self, size: int, limit: int) -> float:
        self._trainer.set_num_micro_batches(self._largest // size, limit=limit)
        start = time.perf_counter()
        float(self._run_step().loss)  # waits for the device
        return time.perf_counter() - start

    def _run_step(self) -> StepResult:
        trainer = self._trainer
        trainer.storage.step = 1
        trainer.context.updater.begin_step(0)
        trainer.seed_step()
        trainer.set_batch(self._batch, self._num_samples)
        with trainer.gather_mixed:
            result = trainer.train_step(self._batch)
        if self._sums_gradients:
            # The sum over ranks copies every gradient into a bucket (parallel/replicate.py).
            packed = [torch.empty_like(each.grad) for each in trainer.model.parameters() if each.grad is not None]
            del packed
        return result


class _LongestFirst:
    """An order of samples by descending length: the first batch is the largest possible one."""

    def __init__(self, lengths: Any) -> None:
        self._indices = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")

    def indices(self, start: int, stop: int) -> Any:
        """Returns the samples at the positions start … stop−1."""
        return self._indices[np.arange(start, stop) % len(self._indices)]


@contextmanager
def _state_restored(trainer: Trainer) -> Iterator[None]:
    """Restores model, optimizers and data: a user may pass the same objects to the run itself."""
    model, data = trainer.model, trainer.train_data
    assert data is not None
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [parameter.grad for parameter in model.parameters()]
    states = {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in trainer.optimizers.items()}
    position, order = data.state_dict(), getattr(data, "order", None)
    try:
        yield
    finally:
        for module, own in buffers:
            module._buffers.update(own)
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = None
            set_gradient_dtype(parameter, parameter.dtype)
            parameter.grad = gradient
        for name, optimizer in trainer.optimizers.items():
            optimizer.load_state_dict(states[name])
        if order is not None:
            data.order = order  # type: ignore[union-attr]  # only TrainData has one
        data.load_state_dict(position)
