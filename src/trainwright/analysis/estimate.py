"""`trainwright estimate`: the memory of one rank and the size of one checkpoint, from steps on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainwright.analysis.fake_ranks import ImaginaryRun, imagine
from trainwright.autotune.micro_batch import HEADROOM
from trainwright.backends.private_torch import TorchDispatchMode, tree_leaves
from trainwright.config import RunConfig
from trainwright.parallel.mesh import local

PARAMETERS, GRADIENTS, STATES, BUFFERS = "parameters", "gradients", "optimizer states", "buffers"
BATCH, GATHERED, COMMUNICATION = "batch", "gathered parameters", "communication buffers"
ACTIVATIONS, TEMPORARY = "activations", "temporary tensors"
KINDS = (PARAMETERS, BUFFERS, GRADIENTS, STATES, BATCH, ACTIVATIONS, GATHERED, COMMUNICATION, TEMPORARY)

BLOCK_BYTES = 512
"""The allocator of a GPU rounds up to such blocks."""


@dataclass
class _Storage:
    reference: weakref.ref[Any]
    size: int
    kind: str
    number: int
    """In the order of allocation."""


class HeldBytes(TorchDispatchMode):
    """Counts every storage that is allocated or resized in its context; `peak` is the maximum of the total."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_gpu = on_gpu
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.most: dict[str, int] = dict.fromkeys(KINDS, 0)
        """The maximum of each kind since `begin_peak`, not all at one time."""
        self._highest = 0
        self._is_forward = False
        self._peak_number: int | None = None
        self._number = 0
        self._storages: dict[int, _Storage] = {}

    @property
    def total(self) -> int:
        """The bytes that are currently allocated."""
        return sum(self.now.values())

    def label(self, tensors: Iterable[Any], kind: str) -> None:
        """Counts tensors (for DTensors, the local shard) as a kind, even if they had another kind."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = local(tensor).untyped_storage()
                self._remove(id(storage))
                self._add(storage, kind)

    def begin_peak(self) -> None:
        """Starts to measure the peak from here."""
        self._highest = 0
        self.most = {kind: self.now[kind] for kind in KINDS}
        self._update_peak()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Counts new tensors that still exist at the end of the block as activations."""
        start, self._is_forward, self._peak_number = self._number, True, None
        try:
            yield
        finally:
            self._is_forward = False
            for each in self._storages.values():
                if each.number <= start or each.kind not in (TEMPORARY, COMMUNICATION):
                    continue
                if self._peak_number is not None and each.number <= self._peak_number:
                    # The peak was within this forward, and includes this storage.
                    self.peak[each.kind] -= each.size
                    self.peak[ACTIVATIONS] += each.size
                self._set_kind(each, ACTIVATIONS)
            self._peak_number = None

    def __enter__(self) -> HeldBytes:
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            self._add(storage, TEMPORARY)
            result = resize(storage, size)
            self._update_size(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors follow
        workspace = _workspace(func, args) if self._on_gpu else 0
        self._count(workspace, TEMPORARY)
        try:
            result = self._run(func, args, kwargs or {})
        finally:
            self._count(-workspace, TEMPORARY)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result  # for example the device of a tensor
        is_collective = func.namespace in ("c10d", "_c10d_functional", "_dtensor")
        for each in tree_leaves(args) if is_collective else ():
            entry = self._storages.get(id(each.untyped_storage())) if isinstance(each, torch.Tensor) else None
            if entry is not None and entry.kind == TEMPORARY:
                self._set_kind(entry, COMMUNICATION)
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not isinstance(each, DTensor):
                self._add(each.untyped_storage(), COMMUNICATION if is_collective else TEMPORARY)
        return result

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        if key not in self._storages:
            self._number += 1
            reference = weakref.ref(storage, lambda _: self._remove(key))
            self._storages[key] = _Storage(reference, _round_up(storage.nbytes()), kind, self._number)
            self._count(self._storages[key].size, kind)

    def _remove(self, key: int) -> None:
        entry = self._storages.pop(key, None)
        if entry is not None:
            self._count(-entry.size, entry.kind)

    def _update_size(self, storage: torch.UntypedStorage) -> None:
        """Tracks a storage whose size changes, as when FSDP gathers and frees full parameters."""
        entry = self._storages[id(storage)]
        self._count(-entry.size, entry.kind)
        entry.kind = GATHERED if entry.kind in (TEMPORARY, ACTIVATIONS) else entry.kind
        entry.size = _round_up(storage.nbytes())
        self._count(entry.size, entry.kind)

    def _set_kind(self, entry: _Storage, kind: str) -> None:
        self.now[entry.kind] -= entry.size
        self.now[kind] += entry.size
        self.most[kind] = max(self.most[kind], self.now[kind])
        entry.kind = kind

    def _count(self, size: int, kind: str) -> None:
        self.now[kind] += size
        if size > 0:
            self.most[kind] = max(self.most[kind], self.now[kind])
            self._update_peak()

    def _update_peak(self) -> None:
        if self.total > self._highest:
            self._highest = self.total
            self.peak = {kind: self.now[kind] for kind in KINDS}
            self._peak_number = self._number if self._is_forward else None


def _workspace(func: Any, args: tuple[Any, ...]) -> int:
    """Returns the temporary memory of the backward kernels of attention on a GPU, which those of a CPU do not need.

    They sum the gradient of the queries in fp32 and, with fewer key heads, have gradients of keys and values for each
    query head.
    """
    name = func.name()
    if not (name.startswith("aten::_scaled_dot_product_") and name.partition(".")[0].endswith("_backward")):
        return 0
    query, key = args[1], args[2]
    expanded = 2 * query.nbytes if key.shape[1] != query.shape[1] else 0
    return int(query.numel() * 4 + expanded)


def _round_up(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


AVERAGES = "averaged weights"
_GROWING = (ACTIVATIONS, TEMPORARY, BATCH)
"""The kinds that grow with the micro-batch, nearly in proportion."""


@dataclass(frozen=True)
class Estimate:
    """The memory and disk of one rank of a run, in bytes."""

    world_size: int
    rank: int
    axes: dict[str, int]
    micro_batch_size: int
    gradient_accumulation_steps: int
    batch_shapes: dict[str, list[int]]
    num_parameters: int
    most: dict[str, int]
    """The maximum of each kind during a step; not all at one time."""
    at_peak: dict[str, int]
    """Each kind at the time of the peak."""
    checkpoint_bytes: int
    """On disk, all ranks together."""
    remarks: list[str]

    @property
    def peak_bytes(self) -> int:
        """The maximum at one time."""
        return sum(self.at_peak.values())

    def fits(self, memory: int) -> bool:
        """Returns True if it fits on a device with this many bytes, with headroom for memory that is not counted."""
        return self.peak_bytes <= (1.0 - HEADROOM) * memory

    def largest_micro_batch(self, memory: int) -> int:
        """Returns the approximate number of samples of this shape that fit; 0 if not even one does."""
        growing = sum(self.at_peak[kind] for kind in _GROWING) / self.micro_batch_size
        fixed = self.peak_bytes - growing * self.micro_batch_size
        return max(int(((1.0 - HEADROOM) * memory - fixed) / growing), 0) if growing else 0

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, for JSON."""
        return asdict(self) | {"peak_bytes": self.peak_bytes}


def estimate(config: RunConfig, *, world_size: int, rank: int = 0, sequence_length: int | None = None) -> Estimate:
    """Builds a run on fake ranks, runs two steps, and returns the memory of one rank."""
    with imagine(config, world_size=world_size, rank=rank, sequence_length=sequence_length) as run:
        held = measure_step(run)
        averages = _average_bytes(run)
        shared = {AVERAGES: averages} if averages else {}
        return Estimate(
            **run.facts(),
            most=held.most | shared,
            at_peak=held.peak | shared,
            checkpoint_bytes=_checkpoint_bytes(run),
            remarks=_remarks(run),
        )


def measure_step(run: ImaginaryRun) -> HeldBytes:
    """Runs a first step, in which optimizers create their states, then measures a second one."""
    model, held = run.trainer.model, HeldBytes(on_gpu=run.on_gpu)
    with _marked_forwards(run, held), held:
        for each in (model, *run.trainer.context.frozen_models.values()):
            held.label(each.parameters(), PARAMETERS)
            held.label(each.buffers(), BUFFERS)
        held.label(tree_leaves(run.batch), BATCH)
        run.step(1)
        held.label(states_of(run), STATES)
        held.begin_peak()
        run.step()
        held.label([each.grad for each in model.parameters()], GRADIENTS)
    return held


def states_of(run: ImaginaryRun) -> list[torch.Tensor]:
    """Returns the tensors that the optimizers keep from step to step."""
    states = [dict(state) for each in run.trainer.optimizers.values() for state in each.state.values()]
    return [each for each in tree_leaves(states) if isinstance(each, torch.Tensor)]


@contextmanager
def _marked_forwards(run: ImaginaryRun, held: HeldBytes) -> Iterator[None]:
    """Marks the beginning and end of each forward, and which tensors are gradients."""
    model = run.trainer.model

    @contextmanager
    def forward() -> Iterator[None]:
        held.label([each.grad for each in model.parameters()], GRADIENTS)
        with held.forward():
            yield

    trained: list[Any] = [each for each in model.parameters() if each.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(lambda one: held.label([one.grad], GRADIENTS)) for each in trained]
    run.forward_contexts.append(forward)
    if run.mesh.size("pipeline") > 1:  # the schedule calls the model itself
        stack = ExitStack()
        hooks.append(model.register_forward_pre_hook(lambda *_: stack.enter_context(held.forward())))
        hooks.append(model.register_forward_hook(lambda *_: stack.close()))
    try:
        yield
    finally:
        run.forward_contexts.remove(forward)
        for hook in hooks:
            hook.remove()


def _average_bytes(run: ImaginaryRun) -> int:
    """Returns the size of the copies of the weights that hooks keep, in fp32 at least."""
    copies = sum(getattr(hook, "copies_of_weights", 0) for hook in run.trainer.hooks)
    weights = [local(each) for each in run.trainer.model.parameters() if each.is_floating_point()]
    return copies * sum(each.numel() * max(each.element_size(), 4) for each in weights)


def _checkpoint_bytes(run: ImaginaryRun) -> int:
    """Returns the size of the weights, optimizer states and averages of all ranks."""
    own = sum(each.numel() * each.element_size() for each in run.trainer.model.parameters())
    states = sum(each.numel() * each.element_size() for each in states_of(run))  # of a DTensor: the full tensor
    share = run.whole.parameter_bytes / own if own else 1.0  # a pipeline stage has some of the layers
    copies = sum(getattr(hook, "copies_of_weights", 0) for hook in run.trainer.hooks)
    return round(run.whole.saved_bytes + states * share + copies * 4 * run.whole.num_parameters)


def _remarks(run: ImaginaryRun) -> list[str]:
    found = []
    if run.config.trainer.micro_batch_size == "auto":
        found.append("micro_batch_size is auto: counted with the rank's whole batch in one forward.")
    if run.config.runtime.precision == "auto":
        precision = run.trainer.config.runtime.precision
        device = "a GPU" if precision == "bf16" else "a CPU"
        found.append(f"runtime.precision is auto: counted in {precision}, as on {device}. Set it to count another.")
    reserved = {} if run.config.model is None else run.config.model.reserved
    if "offload" in reserved and run.on_gpu:
        found.append(f"model.offload keeps {run.host.most / 1e9:.1f} GB on the host, in addition.")
    elif "offload" in reserved:
        found.append("model.offload has no effect on runtime.device: cpu. Set it to auto to count a GPU.")
    if run.mesh.size("pipeline") > 1:
        found.append("Pipeline stages differ: use --rank to see the first rank of another.")
    if run.config.runtime.mode != "eager":
        found.append(f"Counted as in mode eager; {run.config.runtime.mode} usually needs less.")
    return found
