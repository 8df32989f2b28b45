"""Named tensors wait in host memory between forward and backward.

    model.offload: [decoder_input]

A model names a tensor by `name_tensor(hidden, "decoder_input")` (models/layers/named_tensors.py). What autograd saves
of it for the backward pass is copied to the host beside the computation, and comes back when it is needed. With
`model.remat` of the blocks their inputs are all that is left on the device, and offloading those leaves nothing.
How bytes travel is in host_copies.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from trainwright.backends.private_torch import version_of
from trainwright.config.problems import describe, suggest
from trainwright.errors import ConfigError
from trainwright.memory.forwards import Around, Forward, put_around
from trainwright.memory.host_copies import HostCopies, HostCopy, Piece, refuse_changed
from trainwright.memory.places import by_path, parts_of
from trainwright.models.layers.named_tensors import name_tensor
from trainwright.parallel.local import is_split, local

logger = logging.getLogger(__name__)

LABEL = "offload"


def offload_tensors(model: nn.Module, given: Any, *, is_whole: bool = True, where: object | None = None) -> list[str]:
    """Has the tensors that a setting names wait on the host, in place; returns the names of the parts concerned."""
    chosen = choose_parts(model, given, is_whole=is_whole)
    for part, names in chosen.values():
        put_around(part, partial(Offloaded, names=names, refuses=is_whole, where=where))
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
def offloading(names: Iterable[str]) -> Iterator[Watch]:
    """Has the tensors of these names that are saved within wait on the host."""
    watch = Watch(frozenset(names))
    with saved_tensors_hooks(watch.pack, unpack), watch:
        yield watch
    watch.close()


class Offloaded(Around):
    """A forward whose named tensors wait on the host. Its first pass tells whether the names are right."""

    def __init__(self, forward: Forward, names: frozenset[str], *, refuses: bool, where: object | None) -> None:
        super().__init__(forward)
        self._names = names
        self._refuses = refuses
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

    def _judge(self, watch: Watch) -> None:
        for name in sorted(self._names):
            if name not in watch.heard and self._refuses:
                known = suggest(name, sorted(watch.heard)) if watch.heard else "It names none; see name_tensor."
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

    def __init__(self, content: Tensor | Piece) -> None:
        self.content = content
        self.version = version_of(content) if isinstance(content, Tensor) else 0


class Watch(TorchFunctionMode):
    """Listens for names and to what autograd saves, in either order, during one forward pass.

    Tensors are known by their storage, which a saved tensor shares with the one that was named: a view of it, or
    the same under another name. Weak references to storages keep an address from being taken for a later tensor's.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.heard: set[str] = set()
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
        self.heard.add(name)
        storage = _storage(tensor)
        if name not in self._names or storage is None or isinstance(tensor, nn.Parameter):
            return
        version = version_of(local(tensor))
        self._named[storage] = (name, version, None)
        # A recomputed layer saves its inputs before it runs, and with that before it names them.
        for saved in self._saved.pop(storage, ()):
            if isinstance(saved.content, Tensor) and saved.version == version:
                saved.content = self._move(storage, saved.content)

    def _move(self, storage: StorageWeakRef, tensor: Tensor) -> Piece:
        name, version, copy = self._named[storage]
        if copy is None:
            copy = self._copies.of(local(tensor))
            self._named[storage] = (name, version, copy)
            self.moved.add(name)
        return Piece(copy, tensor)


def unpack(saved: _Saved) -> Tensor:
    """Returns the tensor that autograd saved."""
    content = saved.content
    if isinstance(content, Piece):
        return content.tensor()
    refuse_changed(content, saved.version)
    return content


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    """The storage that a tensor lies in on this rank; None for tensors of which nobody but their class knows."""
    own = local(tensor)
    if type(own) not in (Tensor, nn.Parameter) or (own is tensor) == is_split(tensor):
        return None
    return StorageWeakRef(own.untyped_storage())  # type: ignore[no-untyped-call]
