"""Keeps named tensors in host memory between forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
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
from trainwright.backends.private_torch import FakeTensor, version_of
from trainwright.config.problems import suggest
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.memory.module_paths import Around, Forward, by_path, parts_of, put_around, read_names
from trainwright.models.layers.annotations import name_tensor
from trainwright.parallel.mesh import is_split, local

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**27
"""The largest block of host memory. torch's allocator of pinned memory rounds a block up to a power of two: one block
of 2.6 GiB would need 4 GiB. Pinning a block takes tens of milliseconds, and torch reuses it in later steps."""


class HostCopies:
    """The host copies of one forward pass, in order.

    Each copy has finished before the next begins, and the device's memory is released then. `record_stream` would
    release it at a time that depends on how far the host runs ahead: in a long context, by the whole forward pass.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._last: HostCopy | None = None

    def of(self, tensor: Tensor) -> HostCopy:
        """Starts a copy of the tensor's whole storage."""
        is_host = tensor.is_meta or reads_at_once(tensor.device)
        if not is_host and self._stream is None:
            self._stream = torch.Stream(tensor.device)
        self.finish()
        self._last = HostCopy(tensor.detach(), None if is_host else self._stream, self._last)
        return self._last

    def finish(self) -> None:
        """Makes the device wait for the last copy, and releases its memory there."""
        if self._last is not None:
            self._last.finish()


class HostCopy:
    """A copy of one storage on the host.

    Memory of the device is allocated and freed in the order of the stream that computes. The copy stream waits for it
    before it reads or writes, and it waits for the copy stream before the memory is used or freed.
    """

    def __init__(self, tensor: Tensor, stream: Any, previous: HostCopy | None) -> None:
        """Copies on a stream; without a stream, the tensor's own memory is the copy."""
        self._source: Tensor | None = None
        """The tensor that the copy reads."""
        self._returning: Tensor | None = None
        """The tensor that a copy back writes."""
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._device = tensor.device
        self._num_bytes = data.nbytes
        self._stream = stream
        self._previous = previous
        self._returned: ref[Tensor] | None = None
        if stream is None:
            self._host, self._shared, self._version = [data], tensor, version_of(tensor)
            return
        self._host = [buffer for block in torch.split(data, BLOCK_BYTES) for buffer in host_buffers([block])]
        self._source = data
        self._copy(self._host, torch.split(data, BLOCK_BYTES))

    def __del__(self) -> None:
        # A copy back that was not used, for example after an error, may still be writing.
        if self._source is not None or self._returning is not None:
            self._wait()

    def data(self) -> Tensor:
        """Returns the bytes on the device, which are kept as long as they are referenced."""
        if self._stream is None:
            reject_changed(self._shared, self._version)
            return self._host[0]
        returned = None if self._returned is None else self._returned()
        if returned is None:
            self.begin_return()
            self.finish()
            returned, self._returning = self._returning, None
            assert returned is not None
            self._returned = ref(returned)
            if self._previous is not None:
                self._previous.begin_return()
        return returned

    def begin_return(self) -> None:
        """Starts to copy the bytes back to the device, without waiting."""
        if self._stream is not None and self._returning is None:
            self._returning = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
            self._copy(torch.split(self._returning, BLOCK_BYTES), self._host)

    def finish(self) -> None:
        """Makes the device wait for the copies, and releases the tensor that was copied."""
        if self._source is not None or self._returning is not None:
            self._wait()
        self._source = None

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def _wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)


class OffloadedTensor:
    """A tensor, or a view, of a storage with a host copy."""

    def __init__(self, copy: HostCopy, tensor: Tensor) -> None:
        own = local(tensor)
        self._copy = copy
        self._dtype = own.dtype
        self._view = (own.storage_offset(), own.shape, own.stride())
        self._layout: tuple[Any, ...] | None = None
        if is_split(tensor):
            self._layout = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())  # type: ignore[attr-defined]

    def tensor(self) -> Tensor:
        """Returns a bitwise identical tensor."""
        data = self._copy.data()
        offset, shape, stride = self._view
        length = data.numel() - data.numel() % self._dtype.itemsize
        own = data[:length].view(self._dtype).as_strided(shape, stride, offset)
        if self._layout is None:
            return own
        from torch.distributed.tensor import DTensor

        mesh, placements, whole_shape, whole_stride = self._layout
        return DTensor.from_local(own, mesh, placements, run_check=False, shape=whole_shape, stride=whole_stride)


def reject_changed(tensor: Tensor, version: int) -> None:
    """Rejects a saved tensor that was changed in place: with hooks on saved tensors, torch does not check this."""
    if version_of(tensor) != version:
        raise TrainwrightError(
            f"A tensor of shape {tuple(tensor.shape)} was changed in place between forward and backward, but the "
            "backward needs its value. Use an operation that is not in place (no trailing underscore, no +=)."
        )


LABEL = "offload"


def offload_tensors(model: nn.Module, given: Any, *, is_whole: bool = True, where: object | None = None) -> list[str]:
    """Offloads the tensors of a setting, in place; returns the paths of the affected modules."""
    chosen = choose_parts(model, given, is_whole=is_whole)
    for module, names in chosen.values():
        put_around(module, partial(Offloaded, names=names, rejects=is_whole, where=where))
    return list(chosen)


def choose_parts(model: nn.Module, given: Any, *, is_whole: bool = True) -> dict[str, tuple[nn.Module, frozenset[str]]]:
    """Returns the modules of a setting and the tensors to offload in each, by path, without a change."""
    chosen: dict[str, tuple[nn.Module, frozenset[str]]] = {}
    for path, own in by_path(LABEL, given, ()).items():
        label = f'{LABEL}."{path}"' if path else LABEL
        expected = "names of tensors, such as [decoder_input], or a mapping from paths to names"
        names = read_names(label, own, expected=expected)
        for name, module in parts_of(label, model, path, is_whole=is_whole).items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                raise ConfigError(f"{label}: {name} is a list of modules, which is never called. Use {name}.* instead.")
            if name in chosen:
                raise ConfigError(f"{label}: {name} is set twice. Keep one of the two.")
            chosen[name] = (module, frozenset(names))
    return chosen


@contextmanager
def offloading(names: Iterable[str]) -> Iterator[SavedTensorMode]:
    """Offloads the tensors of these names that are saved inside."""
    watch = SavedTensorMode(frozenset(names))
    with saved_tensors_hooks(watch.pack, unpack), watch:
        yield watch
    watch.close()


class Offloaded(Around):
    """A forward whose named tensors are offloaded. Its first pass checks the names."""

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
            self._check_names(watch)
        return outputs

    def _check_names(self, watch: SavedTensorMode) -> None:
        for name in sorted(self._names):
            if name not in watch.received and self._rejects:
                known = suggest(name, sorted(watch.received)) if watch.received else "See name_tensor."
                raise ConfigError(f'model.{LABEL}: the model names no tensor "{name}". {known}', where=self._where)
            if name not in watch.moved:
                logger.warning(
                    'model.%s: no tensor named "%s" is saved for the backward pass, so none is offloaded. Of a '
                    "recomputed layer only the inputs are saved.",
                    *(LABEL, name),
                )


class _Saved:
    """The value that autograd saves for one tensor: the tensor itself or, once it is named, its host copy."""

    __slots__ = ("__weakref__", "content", "version")

    def __init__(self, content: Tensor | OffloadedTensor) -> None:
        self.content = content
        self.version = version_of(content) if isinstance(content, Tensor) else 0


class SavedTensorMode(TorchFunctionMode):
    """Records names and the tensors that autograd saves, in either order, during one forward pass.

    Tensors are identified by their storage, which a saved tensor (such as a view) shares with the named one. Weak
    references to storages prevent a reused address from being mistaken for the same tensor.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.received: set[str] = set()
        """All names."""
        self.moved: set[str] = set()
        """The names of offloaded tensors."""
        self._names = names
        self._copies = HostCopies()
        self._named: dict[StorageWeakRef, tuple[str, int, HostCopy | None]] = {}
        self._saved: dict[StorageWeakRef, WeakSet[_Saved]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records calls of `name_tensor`, and runs every call."""
        if func is name_tensor:
            self._record_name(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        """Ends the pass: drops all names, and the last tensor that was copied."""
        self._copies.finish()
        self._named, self._saved = {}, {}

    def pack(self, tensor: Tensor) -> _Saved:
        """Called with each tensor that autograd saves; returns its replacement."""
        storage = _storage(tensor)
        if storage is None:
            return _Saved(tensor)
        if storage in self._named and self._named[storage][1] == version_of(local(tensor)):
            return _Saved(self._move(storage, tensor))
        saved = _Saved(tensor)
        self._saved.setdefault(storage, WeakSet()).add(saved)
        return saved

    def _record_name(self, tensor: Tensor, name: str) -> None:
        self.received.add(name)
        storage = _storage(tensor)
        if name not in self._names or storage is None or isinstance(tensor, nn.Parameter):
            return
        version = version_of(local(tensor))
        self._named[storage] = (name, version, None)
        # A recomputed layer saves its inputs before it runs, and therefore before it names them.
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
    """Returns the storage of a tensor on this rank; None for tensor subclasses, except for those of an estimate."""
    own = local(tensor)
    if type(own) not in (Tensor, nn.Parameter, FakeTensor) or (own is tensor) == is_split(tensor):
        return None
    return StorageWeakRef(own.untyped_storage())  # type: ignore[no-untyped-call]
