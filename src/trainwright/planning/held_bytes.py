"""Watches how many bytes are held at once while something runs, on real or imaginary tensors.

Every storage that an operation makes is counted until it is freed. Who holds it is known for parameters, gradients and
optimizer states, which are named before; what collectives read and write is noted as such; what is still there when a
forward ends is kept for the backward; all else comes and goes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainwright.backends.private_torch import TorchDispatchMode, tree_leaves
from trainwright.parallel.local import local

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
