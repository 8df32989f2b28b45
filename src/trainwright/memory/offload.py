"""Keeps named tensors in host memory between forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from trainwright.backends import host_buffers, reads_at_once
from trainwright.backends.private_torch import version_of
from trainwright.config.problems import describe, suggest
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.memory.module_paths import Around, Forward, by_path, parts_of, put_around
from trainwright.models.layers.annotations import name_tensor
from trainwright.parallel.mesh import is_split, local

logger = logging.getLogger(__name__)


class HostCopies:
    """The copies of one forward pass, in their order."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._last: HostCopy | None = None

    def of(self, tensor: Tensor) -> HostCopy:
        """Begins a copy of all that the tensor's storage holds."""
        stays = tensor.is_meta or reads_at_once(tensor.device)
        if not stays and self._stream is None:
            self._stream = torch.Stream(tensor.device)
        self._last = HostCopy(tensor.detach(), None if stays else self._stream, self._last)
        return self._last


class HostCopy:
    """The bytes of one storage, on the host."""

    def __init__(self, tensor: Tensor, stream: Any, previous: HostCopy | None) -> None:
        """Copies over a stream; without one the tensor's own memory is the copy."""
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._device = tensor.device
        self._stream = stream
        self._previous = previous
        self._arriving: Tensor | None = None
        self._arrived: ref[Tensor] | None = None
        if stream is None:
            self._host, self._shared, self._version = data, tensor, version_of(tensor)
            return
        [self._host] = host_buffers([data])
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            self._host.copy_(data, non_blocking=True)
        # Else the allocator could give the memory away while it is being copied.
        data.record_stream(stream)

    def data(self) -> Tensor:
        """Returns the bytes on the device; who holds them decides how long they stay there."""
        if self._stream is None:
            reject_changed(self._shared, self._version)
            return self._host
        arrived = None if self._arrived is None else self._arrived()
        if arrived is None:
            self.begin_return()
            arrived, self._arriving = self._arriving, None
            assert arrived is not None
            current = torch.accelerator.current_stream(self._device)
            current.wait_stream(self._stream)
            arrived.record_stream(current)
            self._arrived = ref(arrived)
            if self._previous is not None:
                self._previous.begin_return()
        return arrived

    def begin_return(self) -> None:
        """Begins to copy the bytes back to the device, without waiting."""
        if self._stream is not None and self._arriving is None:
            with self._stream:
                self._arriving = self._host.to(self._device, non_blocking=True)


class OffloadedTensor:
    """A tensor that lies, whole or in part, in a storage that was copied."""

    def __init__(self, copy: HostCopy, tensor: Tensor) -> None:
        own = local(tensor)
        self._copy = copy
        self._dtype = own.dtype
        self._place = (own.storage_offset(), own.shape, own.stride())
        self._layout: tuple[Any, ...] | None = None
        if is_split(tensor):
            self._layout = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())  # type: ignore[attr-defined]

    def tensor(self) -> Tensor:
        """Returns the tensor as it was, bit for bit."""
        data = self._copy.data()
        own = torch.empty(0, dtype=self._dtype, device=data.device).set_(data.untyped_storage(), *self._place)
        if self._layout is None:
            return own
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self._layout
        return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


def reject_changed(tensor: Tensor, version: int) -> None:
    """Rejects a saved tensor that was written to since: with hooks on saved tensors, torch leaves this to the hooks."""
    if version_of(tensor) != version:
        raise TrainwrightError(
            f"A tensor of shape {tuple(tensor.shape)} was changed in place between forward and backward, which needs "
            "it as it was. Use an operation that is not in place (no trailing underscore, no +=)."
        )


LABEL = "offload"


def offload_tensors(model: nn.Module, given: Any, *, is_whole: bool = True, where: object | None = None) -> list[str]:
    """Has the tensors that a setting names wait on the host, in place; returns the names of the parts concerned."""
    chosen = choose_parts(model, given, is_whole=is_whole)
    for part, names in chosen.values():
        put_around(part, partial(Offloaded, names=names, rejects=is_whole, where=where))
    return list(chosen)


def choose_parts(model: nn.Module, given: Any, *, is_whole: bool = True) -> dict[str, tuple[nn.Module, frozenset[str]]]:
    """Returns the parts of a model and the tensors that wait on the host in each, by name, changing nothing."""
    chosen: dict[str, tuple[nn.Module, frozenset[str]]] = {}
    for path, own in by_path(LABEL, given, ()).items():
        label = f'{LABEL}."{path}"' if path else LABEL
        names = (own,) if isinstance(own, str) else own
        if (
            not isinstance(names, list | tuple)
            or not names
            or not all(isinstance(each, str) and each for each in names)
        ):
            raise ConfigError(
                f"{label}: must be names of tensors, such as [decoder_input], or a mapping from paths to names; "
                f"got {describe(own)}."
            )
        for name, part in parts_of(label, model, path, is_whole=is_whole).items():
            if isinstance(part, nn.ModuleList | nn.ModuleDict):
                raise ConfigError(
                    f"{label}: {name} is a list of modules, which is never called. Name {name}.* instead."
                )
            if name in chosen:
                raise ConfigError(f"{label}: {name} is named twice. Keep one of the two.")
            chosen[name] = (part, frozenset(names))
    return chosen


@contextmanager
def offloading(names: Iterable[str]) -> Iterator[SavedTensorMode]:
    """Has the tensors of these names that are saved within wait on the host."""
    watch = SavedTensorMode(frozenset(names))
    with saved_tensors_hooks(watch.pack, unpack), watch:
        yield watch
    watch.close()


class Offloaded(Around):
    """A forward whose named tensors wait on the host. Its first pass tells whether the names are right."""

    def __init__(self, forward: Forward, names: frozenset[str], *, rejects: bool, where: object | None) -> None:
        super().__init__(forward)
        self._names = names
        self._rejects = rejects
        self._where = where
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward; without gradients nothing is saved."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        with offloading(self._names) as watch:
            outputs = self.inner(*args, **kwargs)
        if not self._has_run:
            self._has_run = True
            self._judge(watch)
        return outputs

    def _judge(self, watch: SavedTensorMode) -> None:
        for name in sorted(self._names):
            if name not in watch.received and self._rejects:
                known = suggest(name, sorted(watch.received)) if watch.received else "It names none; see name_tensor."
                raise ConfigError(f'model.{LABEL}: the model names no tensor "{name}". {known}', where=self._where)
            if name not in watch.moved:
                logger.warning(
                    'model.%s: no tensor named "%s" is saved for the backward pass, so none waits on the host. In a '
                    "layer that is recomputed only its inputs are.",
                    LABEL,
                    name,
                )


class _Saved:
    """What autograd holds of one tensor: the tensor itself or, once it was named, its place in a copy on the host."""

    __slots__ = ("__weakref__", "content", "version")

    def __init__(self, content: Tensor | OffloadedTensor) -> None:
        self.content = content
        self.version = version_of(content) if isinstance(content, Tensor) else 0


class SavedTensorMode(TorchFunctionMode):
    """Listens for names and to what autograd saves, in either order, during one forward pass.

    Tensors are known by their storage, which a saved tensor shares with the one that was named: a view of it, or
    the same under another name. Weak references to storages keep an address from being taken for a later tensor's.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.received: set[str] = set()
        """All names that were told."""
        self.moved: set[str] = set()
        """Those of which something waits on the host."""
        self._names = names
        self._copies = HostCopies()
        self._named: dict[StorageWeakRef, tuple[str, int, HostCopy | None]] = {}
        self._saved: dict[StorageWeakRef, WeakSet[_Saved]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Passes every call on."""
        if func is name_tensor:
            self._hear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        """Ends the pass: nothing is named any more."""
        self._named, self._saved = {}, {}

    def pack(self, tensor: Tensor) -> _Saved:
        """Is given each tensor that autograd saves, and returns what it holds instead."""
        storage = _storage(tensor)
        if storage is None:
            return _Saved(tensor)
        if storage in self._named and self._named[storage][1] == version_of(local(tensor)):
            return _Saved(self._move(storage, tensor))
        saved = _Saved(tensor)
        self._saved.setdefault(storage, WeakSet()).add(saved)
        return saved

    def _hear(self, tensor: Tensor, name: str) -> None:
        self.received.add(name)
        storage = _storage(tensor)
        if name not in self._names or storage is None or isinstance(tensor, nn.Parameter):
            return
        version = version_of(local(tensor))
        self._named[storage] = (name, version, None)
        # A recomputed layer saves its inputs before it runs, and with that before it names them.
        for saved in self._saved.pop(storage, ()):
            if isinstance(saved.content, Tensor) and saved.version == version:
                saved.content = self._move(storage, saved.content)

    def _move(self, storage: StorageWeakRef, tensor: Tensor) -> OffloadedTensor:
        name, version, copy = self._named[storage]
        if copy is None:
            copy = self._copies.of(local(tensor))
            self._named[storage] = (name, version, copy)
            self.moved.add(name)
        return OffloadedTensor(copy, tensor)


def unpack(saved: _Saved) -> Tensor:
    """Returns the tensor that autograd saved."""
    content = saved.content
    if isinstance(content, OffloadedTensor):
        return content.tensor()
    reject_changed(content, saved.version)
    return content


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    """The storage that a tensor lies in on this rank; None for tensors of which nobody but their class knows."""
    own = local(tensor)
    if type(own) not in (Tensor, nn.Parameter) or (own is tensor) == is_split(tensor):
        return None
    return StorageWeakRef(own.untyped_storage())  # type: ignore[no-untyped-call]
