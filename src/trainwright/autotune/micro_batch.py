"""`trainer.micro_batch_size: auto`: finds the largest micro-batch whose step fits into memory."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch

from trainwright.backends import Backend
from trainwright.checkpoint import folder as run_folders
from trainwright.config import BatchPlan, RunConfig, resolve_batch
from trainwright.data.loader import TrainData
from trainwright.errors import OutOfMemory, TrainwrightError
from trainwright.loop.trainer import Trainer
from trainwright.memory.out_of_memory import advice_for, is_out_of_memory
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.processes import local_size

logger = logging.getLogger(__name__)

HEADROOM = 0.05
"""The share of the memory that stays free: later batches, collectives and a fragmented allocator need some."""


def micro_batch_sizes(rank_batch_size: int) -> list[int]:
    """Returns the sizes into which a rank's batch can be cut evenly, ascending: its divisors."""
    small = [size for size in range(1, int(rank_batch_size**0.5) + 1) if rank_batch_size % size == 0]
    return sorted({*small, *(rank_batch_size // size for size in small)})


def largest_that_fits(candidates: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Returns the largest of the ascending candidates that fits, or None if not even the first does.

    Where one fits, all before it must. It goes up in strides that double and then halves what is left, so that a
    candidate much larger than one that is known to fit is never the next: 2 log₂ n trials at most, most of them small.
    """
    fitting, too_large, stride = -1, len(candidates), 1
    while fitting + 1 < too_large:
        goes_up = too_large == len(candidates)
        probe = min(fitting + stride, too_large - 1) if goes_up else (fitting + too_large) // 2
        if fits(candidates[probe]):
            fitting, stride = probe, stride * 2
        else:
            too_large = probe
    return candidates[fitting] if fitting >= 0 else None


class Growth:
    """Guesses what a larger micro-batch takes from what a smaller one took, where trying it could end the process.

    A GPU rejects what it does not have. The system's main memory is promised freely, and who then uses too much of it
    is killed, so there a candidate is tried only if as much again for each sample would leave room.
    """

    def __init__(self, backend: Backend, *, num_fixed_bytes: int = 0, num_sharing: int = 1) -> None:
        """`num_fixed_bytes` are taken by each step whatever its samples are: the gradients.

        `num_sharing` processes, this one included, take from the same memory at the same time.
        """
        self._backend = backend
        self._num_fixed_bytes = num_fixed_bytes
        self._num_sharing = num_sharing
        self._taken_per_sample: float | None = None

    def leaves_room(self, num_samples: int) -> bool:
        """Would a micro-batch of so many samples probably fit? Yes where nothing is known."""
        room = self._backend.memory_room()
        if room is None or self._taken_per_sample is None:
            return True
        taken = self._num_fixed_bytes + self._taken_per_sample * num_samples
        return taken <= (1.0 - HEADROOM) * room / self._num_sharing

    @contextmanager
    def measuring(self, num_samples: int) -> Iterator[None]:
        """Notes what is taken within, by a micro-batch of so many samples."""
        self._backend.begin_peak()
        before = self._backend.memory().in_use
        yield
        peak = self._backend.memory().peak
        if before is not None and peak is not None:
            # What else does not grow with the samples is counted as if it did: on the safe side, and less and less.
            self._taken_per_sample = max(peak - before - self._num_fixed_bytes, 0) / num_samples


Found = TypeVar("Found")

LOADING_ALONE: Mapping[str, Any] = {"data.num_workers": 0, "data.loader": {}}
"""What a trial says of its data: it reads one batch."""
_MICRO_BATCHES_TRIED = 2  # from the second micro-batch on there are gradients beside the activations


def settle_micro_batch(
    config: RunConfig,
    assemble: Callable[[RunConfig, Path], Trainer],
    *,
    backend: Backend,
    ranks: Ranks,
    folder: Path | None,
) -> RunConfig:
    """Returns the config with a number in place of `micro_batch_size: auto`, the same on every rank.

    `assemble` builds a trainer of one process in a given folder. `folder` is that of a run that goes on: its own number
    is taken again, as long as it divides the rank's batch and the device is the same one. None: the run begins.
    """
    largest = resolve_batch(config, ranks.size).micro_batch_size
    found = _number_of_before(folder, backend, ranks)
    if found is not None and largest % found == 0:
        logger.info("trainer.micro_batch_size: auto: %d, as the run found before", found)
        return config.derive({"trainer.micro_batch_size": found})
    logger.info("trainer.micro_batch_size: auto: trying which of %d samples fit into memory at once", largest)
    # Each rank tries by itself, as a run of one process with its share of the batch: where only one has too little
    # memory, nobody waits for it in a collective.
    trial = config.derive({"trainer.global_batch_size": largest, "trainer.micro_batch_size": largest, **LOADING_ALONE})
    answers = find_on_ranks(
        "trainer.micro_batch_size: auto",
        lambda empty: _find(lambda: assemble(trial, empty), largest, backend, ranks),
        backend=backend,
        ranks=ranks,
    )
    number = min(answers)
    if number == 0:
        advice = "".join(f"\n  - {each}" for each in advice_for(trial.derive({"trainer.micro_batch_size": 1})))
        raise OutOfMemory(
            f"trainer.micro_batch_size: auto: not even the smallest micro-batch fits into the memory of "
            f"{backend.describe()}, of which {HEADROOM:.0%} stay free. What could change:{advice}",
            where=config.origin("trainer.micro_batch_size"),
        )
    logger.info("trainer.micro_batch_size: auto: %d of %d samples at once", number, largest)
    return config.derive({"trainer.micro_batch_size": number})


def find_on_ranks(label: str, find: Callable[[Path], Found], *, backend: Backend, ranks: Ranks) -> list[Found]:
    """Has every rank find something by trials of its own, in an empty folder; returns what each found, to all.

    Where one fails, all do: with its own error there, with its words elsewhere.
    """
    failure: Exception | None = None
    found: list[Found] = []
    try:
        with TemporaryDirectory(prefix="trainwright-") as empty:
            found = [find(Path(empty))]
    except Exception as error:
        failure = error
    backend.release_memory()
    answers = ranks.gather((found, None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for rank, (_, problem) in enumerate(answers):
        if problem is not None:
            raise TrainwrightError(f"{label}: the trial failed on rank {rank}. {problem}")
    return [each for own, _ in answers for each in own]


def _number_of_before(folder: Path | None, backend: Backend, ranks: Ranks) -> int | None:
    saved = config_of_before(folder, backend, ranks)
    number = None if saved is None else saved.trainer.micro_batch_size
    return number if isinstance(number, int) else None


def config_of_before(folder: Path | None, backend: Backend, ranks: Ranks) -> RunConfig | None:
    """What the run in this folder had found, on a device like this one; the first rank looks for all."""
    found: RunConfig | None = None
    if folder is not None and ranks.is_first:
        try:
            saved = run_folders.read_config(folder)
            environment = json.loads((folder / run_folders.ENVIRONMENT_FILE).read_text(encoding="utf-8"))
            # On another device another number may be the largest, and results differ in their last bits anyway.
            if saved is not None and environment.get("device") == backend.describe():
                found = saved
        except (OSError, ValueError, TrainwrightError) as error:
            # Whether the run can go on from such a folder is judged later, and for all of it.
            logger.debug("Nothing is known from before: %s", error)
    return ranks.broadcast(found)


def _find(assemble: Callable[[], Trainer], largest: int, backend: Backend, ranks: Ranks) -> int:
    """Returns the largest micro-batch that fits on this rank; 0 if none does."""
    try:
        with backend.limited_memory(1.0 - HEADROOM):
            return _find_with(assemble(), largest, ranks)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return 0  # the model alone, its optimizer or a batch is too much


def _find_with(trainer: Trainer, largest: int, ranks: Ranks) -> int:
    with steps_tried(trainer, largest, ranks) as trial:
        sizes = micro_batch_sizes(largest)
        if len(sizes) > 1 and not trial.runs(sizes[0]):
            sizes = sizes[1:]
        return largest_that_fits(sizes, trial.fits) or 0


@contextmanager
def steps_tried(trainer: Trainer, largest: int, ranks: Ranks) -> Iterator[StepTrial]:
    """Gives what makes steps of one batch of `largest` samples, the longest there are; leaves all as it was."""
    data = trainer.train_data
    assert data is not None
    with _put_back(trainer), trainer.storage:
        if isinstance(data, TrainData):
            _take_longest(data)
        with closing(data.batches(trainer.backend.to_device)) as iterator:
            yield StepTrial(trainer, iterator, largest, sums_gradients=ranks.size > 1)


class StepTrial:
    """Makes steps of one batch, cut into micro-batches of any size."""

    def __init__(self, trainer: Trainer, iterator: Iterator[Any], largest: int, *, sums_gradients: bool) -> None:
        self._trainer = trainer
        self._largest = largest
        self._sums_gradients = sums_gradients
        gradients = sum(each.nbytes for each in trainer.model.parameters() if each.requires_grad)
        self._growth = Growth(trainer.backend, num_fixed_bytes=gradients, num_sharing=local_size())
        self._has_stepped = False
        self._answers: dict[int, bool] = {}
        self._copies = _copies_of_hooks(trainer)
        self._batch = trainer.next_train_inputs(iterator)
        assert trainer.train_data is not None
        self._num_samples = trainer.train_data.batch_num_samples
        self._micro_batches = trainer.micro_batches
        trainer.micro_batches = self._first_micro_batches  # type: ignore[method-assign]  # of this object, which is thrown away

    def runs(self, size: int) -> bool:
        """Can steps be made of micro-batches of this size at all? Batch normalisation makes none of one sample."""
        try:
            self.fits(size)
        except ValueError as error:
            logger.debug("No step can be made of micro-batches of %d: %s", size, error)
            return False
        return True

    def fits(self, size: int) -> bool:
        """Makes a step with micro-batches of this size; returns whether there was memory for it."""
        if size not in self._answers:
            self._answers[size] = self._try(size)
            logger.debug("Micro-batches of %d %s", size, "fit" if self._answers[size] else "do not fit")
        return self._answers[size]

    def _try(self, size: int) -> bool:
        self._trainer.backend.release_memory()
        return self._growth.leaves_room(size) and self.steps(size, lambda: self._growth.measuring(size))

    def steps(self, size: int, measuring: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Makes a step whatever it takes, the last within `measuring`; returns whether there was memory for it."""
        trainer = self._trainer
        plan = BatchPlan(self._largest, size, self._largest // size)
        trainer.context = replace(trainer.context, batch=plan)
        try:
            if not self._has_stepped:
                # Only the second step has the optimizer's state beside the activations.
                self._step()
                self._has_stepped = True
            with measuring():
                self._step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            for optimizer in trainer.optimizers.values():
                optimizer.zero_grad(set_to_none=True)
        return True

    def _step(self) -> None:
        trainer = self._trainer
        trainer.storage.step = 1
        trainer.context.updater.set_rates(0)
        trainer.seed_step()
        trainer.samples_in_hand = self._num_samples
        trainer.train_step(self._batch)

    def _first_micro_batches(self, batch: Any) -> Iterator[Any]:
        """Yields as many micro-batches as memory can tell apart; the others would need no more."""
        yield from islice(self._micro_batches(batch), _MICRO_BATCHES_TRIED)
        if self._sums_gradients:
            # The sum over ranks packs every gradient once more (parallel/replicate.py).
            packed = [torch.empty_like(each.grad) for each in self._trainer.model.parameters() if each.grad is not None]
            del packed


def _copies_of_hooks(trainer: Trainer) -> list[torch.Tensor]:
    """Takes as much memory as hooks will take that keep copies of the weights."""
    num_copies = sum(getattr(hook, "copies_of_weights", 0) for hook in trainer.hooks)
    return [torch.empty_like(each) for _ in range(num_copies) for each in trainer.model.parameters()]


def _take_longest(data: TrainData) -> None:
    """Lets a throw-away loader begin with the longest samples, where the dataset knows their lengths."""
    lengths = getattr(data.dataset, "lengths", None)
    if lengths is not None and len(lengths) == len(data):
        data.order = _LongestFirst(lengths)


class _LongestFirst:
    """An order of samples by falling length: the first batch is the largest that there can be."""

    def __init__(self, lengths: Any) -> None:
        self._indices = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")

    def indices(self, start: int, stop: int) -> Any:
        """Returns the samples at the places start … stop−1."""
        return self._indices[np.arange(start, stop) % len(self._indices)]


@contextmanager
def _put_back(trainer: Trainer) -> Iterator[None]:
    """Leaves model, optimizers and data as they were: a user may hand the same objects to the run itself."""
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
            parameter.grad = gradient
        for name, optimizer in trainer.optimizers.items():
            optimizer.load_state_dict(states[name])
        if order is not None:
            data.order = order  # type: ignore[union-attr]  # only such data has one
        data.load_state_dict(position)
