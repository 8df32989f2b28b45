"""`trainwright estimate`: the memory of one rank and the disk of one checkpoint, by stepping on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainwright.analysis.fake_ranks import ImaginaryRun, imagine
from trainwright.autotune.micro_batch import HEADROOM
from trainwright.backends.private_torch import TorchDispatchMode, tree_leaves
from trainwright.config import RunConfig
from trainwright.parallel.mesh import AXES, local

PARAMETERS, GRADIENTS, STATES, BUFFERS = "parameters", "gradients", "optimizer states", "buffers"
BATCH, GATHERED, COMMUNICATION = "batch", "gathered parameters", "communication buffers"
ACTIVATIONS, TEMPORARY = "activations", "temporary tensors"
KINDS = (PARAMETERS, BUFFERS, GRADIENTS, STATES, BATCH, ACTIVATIONS, GATHERED, COMMUNICATION, TEMPORARY)

BLOCK_BYTES = 512
"""A GPU's allocator gives memory in such blocks."""


class HeldBytes(TorchDispatchMode):
    """Within it every storage that is made or resized is counted. `peak` says what was held when most was."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.most: dict[str, int] = dict.fromkeys(KINDS, 0)
        """The most of each kind since `begin_peak`, not all at one time."""
        self._total = 0
        self._highest = 0
        self._is_forward = False
        self._peak_number: int | None = None
        self._number = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int, str, int]] = {}

    @property
    def total(self) -> int:
        """The bytes that are held now."""
        return self._total

    def name(self, tensors: Iterable[Any], kind: str) -> None:
        """Counts tensors (of DTensors the local part) as a kind, whatever they were."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = local(tensor).untyped_storage()
                self._forget(id(storage))
                self._note(storage, kind)

    def begin_peak(self) -> None:
        """Lets the peak count from here on."""
        self._highest = 0
        self.most = {kind: self.now[kind] for kind in KINDS}
        self._look()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within it new tensors are kept for the backward if they are still there at its end."""
        start, self._is_forward, self._peak_number = self._number, True, None
        try:
            yield
        finally:
            self._is_forward = False
            for key, (reference, size, kind, number) in list(self._storages.items()):
                if number <= start or kind not in (TEMPORARY, COMMUNICATION):
                    continue
                self._storages[key] = (reference, size, ACTIVATIONS, number)
                self.now[kind] -= size
                self.now[ACTIVATIONS] += size
                self.most[ACTIVATIONS] = max(self.most[ACTIVATIONS], self.now[ACTIVATIONS])
                if self._peak_number is not None and number <= self._peak_number:
                    # Most was held within this forward, and this was part of it.
                    self.peak[kind] -= size
                    self.peak[ACTIVATIONS] += size
            self._peak_number = None

    def __enter__(self) -> HeldBytes:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = _resizing(self._resize, self)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations follow, on local tensors
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return result  # questions such as where a tensor lies
        kind = TEMPORARY
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            kind = COMMUNICATION
            self._rename([each for each in tree_leaves(args) if isinstance(each, torch.Tensor)])
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not isinstance(each, DTensor):
                self._note(each.untyped_storage(), kind)
        return result

    def _rename(self, tensors: Iterable[torch.Tensor]) -> None:
        """What a collective reads or writes is its buffer, unless it is known to be something else."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            entry = self._storages.get(id(storage))
            if entry is not None and entry[2] == TEMPORARY:
                self._storages[id(storage)] = (entry[0], entry[1], COMMUNICATION, entry[3])
                self.now[TEMPORARY] -= entry[1]
                self.now[COMMUNICATION] += entry[1]
                self.most[COMMUNICATION] = max(self.most[COMMUNICATION], self.now[COMMUNICATION])

    def _note(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        if key in self._storages:
            return
        self._number += 1
        reference = weakref.ref(storage, lambda _: self._forget(key))
        size = _round_up(storage.nbytes())
        self._storages[key] = (reference, size, kind, self._number)
        self._add(size, kind)

    def _forget(self, key: int) -> None:
        entry = self._storages.pop(key, None)
        if entry is not None:
            self._add(-entry[1], entry[2])

    def _follow(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size: that is how FSDP takes and frees whole parameters."""
        entry = self._storages.get(id(storage))
        if entry is not None:
            kind = GATHERED if entry[2] in (TEMPORARY, ACTIVATIONS) else entry[2]
            self._add(-entry[1], entry[2])
            size = _round_up(storage.nbytes())
            self._storages[id(storage)] = (entry[0], size, kind, entry[3])
            self._add(size, kind)

    def _add(self, size: int, kind: str) -> None:
        self.now[kind] += size
        self._total += size
        if size > 0:
            self.most[kind] = max(self.most[kind], self.now[kind])
            self._look()

    def _look(self) -> None:
        if self._total > self._highest:
            self._highest = self._total
            self.peak = {kind: self.now[kind] for kind in KINDS}
            self._peak_number = self._number if self._is_forward else None


def _resizing(resize: Callable[..., Any], watch: HeldBytes) -> Callable[..., Any]:
    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        if id(storage) not in watch._storages:
            watch._note(storage, TEMPORARY)
        result = resize(storage, size)
        watch._follow(storage)
        return result

    return resize_and_note


def _round_up(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


AVERAGES = "averaged weights"
_GROWING = (ACTIVATIONS, TEMPORARY, BATCH)
"""What grows with the micro-batch, more or less in proportion."""


@dataclass(frozen=True)
class Estimate:
    """What one rank of a run needs, in bytes."""

    world_size: int
    rank: int
    axes: dict[str, int]
    micro_batch_size: int
    gradient_accumulation_steps: int
    batch_shapes: dict[str, list[int]]
    num_parameters: int
    most: dict[str, int]
    """The most of each kind that is held at any time of a step; not all at once."""
    at_peak: dict[str, int]
    """What is held when most is."""
    checkpoint_bytes: int
    """On disk, all ranks together."""
    remarks: list[str]

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return sum(self.at_peak.values())

    def fits(self, memory: int) -> bool:
        """Would it fit a device of so many bytes, with some room left for what is not counted?"""
        return self.peak_bytes <= (1.0 - HEADROOM) * memory

    def largest_micro_batch(self, memory: int) -> int:
        """Returns about how many samples of this shape would fit; 0: not even one."""
        growing = sum(self.at_peak[kind] for kind in _GROWING) / self.micro_batch_size
        fixed = self.peak_bytes - growing * self.micro_batch_size
        return max(int(((1.0 - HEADROOM) * memory - fixed) / growing), 0) if growing else 0

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, for JSON."""
        return asdict(self) | {"peak_bytes": self.peak_bytes}


def estimate(config: RunConfig, *, world_size: int, rank: int = 0, sequence_length: int | None = None) -> Estimate:
    """Builds and steps a run on imaginary ranks, and returns what one of them needs."""
    with imagine(config, world_size=world_size, rank=rank, sequence_length=sequence_length) as run:
        watch = watch_step(run)
        averages = _average_bytes(run)
        shared = {AVERAGES: averages} if averages else {}
        return Estimate(
            world_size=world_size,
            rank=rank,
            axes={axis: run.mesh.sizes[axis] for axis in AXES if run.mesh.sizes[axis] > 1},
            micro_batch_size=run.plan.micro_batch_size,
            gradient_accumulation_steps=run.plan.gradient_accumulation_steps,
            batch_shapes=run.batch_shapes(),
            num_parameters=run.whole.num_parameters,
            most=watch.most | shared,
            at_peak=watch.peak | shared,
            checkpoint_bytes=_checkpoint_bytes(run),
            remarks=_remarks(run),
        )


def watch_step(run: ImaginaryRun) -> HeldBytes:
    """Runs a first step, in which optimizers make their states, then watches a second one."""
    trainer, watch = run.trainer, HeldBytes()
    parameters = list(trainer.model.parameters())
    with _marked_forwards(run, watch), watch:
        watch.name(parameters, PARAMETERS)
        watch.name(trainer.model.buffers(), BUFFERS)
        watch.name(tree_leaves(run.batch), BATCH)
        run.step(1)
        watch.name(states_of(run), STATES)
        watch.begin_peak()
        run.step()
        watch.name([each.grad for each in parameters if each.grad is not None], GRADIENTS)
    return watch


def states_of(run: ImaginaryRun) -> list[torch.Tensor]:
    """Returns the tensors that the optimizers keep from step to step."""
    states = [dict(state) for each in run.trainer.optimizers.values() for state in each.state.values()]
    return [each for each in tree_leaves(states) if isinstance(each, torch.Tensor)]


@contextmanager
def _marked_forwards(run: ImaginaryRun, watch: HeldBytes) -> Iterator[None]:
    """Tells the watch when forwards begin and end, and which tensors are gradients."""
    trainer = run.trainer
    parameters = list(trainer.model.parameters())
    inner: Callable[[Any], Any] = trainer.run_forward

    def run_forward(batch: Any) -> Any:
        watch.name([each.grad for each in parameters if each.grad is not None], GRADIENTS)
        with watch.forward():
            return inner(batch)

    def note(parameter: torch.Tensor) -> None:
        watch.name([parameter.grad], GRADIENTS)

    trained: list[Any] = [each for each in parameters if each.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(note) for each in trained]
    trainer.run_forward = run_forward  # type: ignore[method-assign]
    if run.mesh.size("pipeline") > 1:  # whose schedule calls the model itself
        forwards = ExitStack()

        def begin(*_: Any) -> None:
            forwards.enter_context(watch.forward())

        def end(*_: Any) -> None:
            forwards.close()

        hooks += [trainer.model.register_forward_pre_hook(begin), trainer.model.register_forward_hook(end)]
    try:
        yield
    finally:
        del trainer.run_forward  # the class's own is there again
        for hook in hooks:
            hook.remove()


def _average_bytes(run: ImaginaryRun) -> int:
    """What hooks keep of the weights, in fp32 at least."""
    copies = sum(getattr(hook, "copies_of_weights", 0) for hook in run.trainer.hooks)
    weights = [local(each) for each in run.trainer.model.parameters() if each.is_floating_point()]
    return copies * sum(each.numel() * max(each.element_size(), 4) for each in weights)


def _checkpoint_bytes(run: ImaginaryRun) -> int:
    """Everything of parameters' shape that is saved: weights, optimizer states, averages, over all ranks once."""
    own = sum(each.numel() * each.element_size() for each in run.trainer.model.parameters())
    states = sum(each.numel() * each.element_size() for each in states_of(run))  # of a DTensor: the whole
    share = run.whole.parameter_bytes / own if own else 1.0  # a pipeline's stage holds some of the layers
    copies = sum(getattr(hook, "copies_of_weights", 0) for hook in run.trainer.hooks)
    return round(run.whole.saved_bytes + states * share + copies * 4 * run.whole.num_parameters)


def _remarks(run: ImaginaryRun) -> list[str]:
    found = []
    if run.config.trainer.micro_batch_size == "auto":
        found.append("micro_batch_size is auto: counted with the rank's whole batch in one forward.")
    reserved = {} if run.config.model is None else run.config.model.reserved
    if "offload" in reserved:
        found.append("model.offload is not counted: the tensors that it names are counted as if they stayed.")
    if run.mesh.size("pipeline") > 1:
        found.append("Stages of a pipeline differ: see the first rank of another with --rank.")
    if run.config.runtime.mode != "eager":
        found.append(f"Counted as in mode eager; {run.config.runtime.mode} usually needs less.")
    return found
