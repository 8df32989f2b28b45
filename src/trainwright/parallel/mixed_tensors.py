"""Gathers sharded tensors (DTensors) that user code combines with plain tensors, as in `loss + penalty`.

torch would treat a plain scalar as equal on all ranks, although each rank has the loss of its own samples; a sum with a
sharded value would be wrong, and its backward would fail. How parameters are sharded is in fully_shard.py and
tensor.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from trainwright.errors import TrainwrightError
from trainwright.user_code.locations import is_user_file, line_of_frame

AddGradient = Callable[[nn.Parameter, Tensor], None]

_READS = frozenset({Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__bool__})
"""Functions that read values on the host, for which torch reads this rank's part of a sum."""


def full(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor as a plain tensor, with gradient; collective over the ranks of its mesh.

    Each rank propagates the gradient of its own loss. They are averaged over the ranks of the mesh, as in FSDP; ranks
    that share samples have equal gradients.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    gathered: Tensor = _Full.apply(tensor)  # type: ignore[no-untyped-call]
    return gathered


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.layout = tensor.device_mesh, tensor.placements
        return tensor.full_tensor()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        mesh, placements = ctx.layout
        # Not Partial("avg"), because gloo has no average.
        shares = DTensor.from_local(gradient / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
        reduced = shares.redistribute(placements=[Replicate()] * mesh.ndim)
        return reduced.redistribute(
            placements=[Replicate() if placement.is_partial() else placement for placement in placements]
        )


class _Used(torch.autograd.Function):
    """A sharded parameter as user code uses it: its gradient goes to `add_gradient`, and not to `.grad`."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, add_gradient: AddGradient) -> Tensor:
        ctx.parameter, ctx.add_gradient = parameter, add_gradient
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.add_gradient(ctx.parameter, gradient)
        return None, None


class GatherMixed(TorchFunctionMode):
    """A context for user code around a sharded model, in which operations on DTensors and plain tensors gather first.

    In-place operations, whose target may be the DTensor, are excluded, and so is code in which it is `suspended`, such
    as the model's forward, which has its own sharding rules. Collective: all ranks run the same code. `add_gradient`
    receives the gradients of parameters that are used here; None leaves them to `.grad`.
    """

    def __init__(self, model: nn.Module, *, add_gradient: AddGradient | None = None) -> None:
        super().__init__()
        self._add_gradient = add_gradient
        self._sharded = set() if add_gradient is None else {id(each) for each in model.parameters()}
        """The parameters of the model, by id; FSDP replaces them while they are gathered."""
        self._is_rejecting = False
        self._num_entered = 0
        """The nesting depth of the context; only the outermost entry has an effect."""
        self._num_suspended = 0
        """The number of running forwards of the model and other sections of non-user code."""
        self._is_popped = False
        """True while it is suspended and removed from torch's stack of modes."""
        model.register_forward_pre_hook(self._suspend, prepend=True)
        model.register_forward_hook(self._resume, always_call=True)

    def __enter__(self) -> GatherMixed:
        self._num_entered += 1
        if self._num_entered == 1:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._num_entered -= 1
        if self._num_entered == 0:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def rejecting(self) -> Iterator[None]:
        """A context in which gathering raises, for a trial of code that is then compiled."""
        self._is_rejecting = True
        try:
            with self:
                yield
        finally:
            self._is_rejecting = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context with torch's own operations, for a backward or an optimizer's step."""
        self._suspend()
        try:
            yield
        finally:
            self._resume()

    def _suspend(self, *unused: Any) -> None:
        self._num_suspended += 1
        # Removed from the stack, because torch.compile would trace a mode and each operation would call it.
        if self._num_suspended == 1 and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self._is_popped = True
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _resume(self, *unused: Any) -> None:
        self._num_suspended -= 1
        if self._num_suspended == 0 and self._is_popped:
            self._is_popped = False
            super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._num_suspended == 0:
            # None for plain tensors. Parameters that are gathered, or not sharded at all, may have another mesh.
            meshes = {getattr(each, "device_mesh", None) for each in _tensors((*args, *kwargs.values()))}
            if meshes - {None} and not _acts_on_tensor(func, kwargs):
                gathers = len(meshes) > 1 or func in _READS
                if gathers and self._is_rejecting:
                    _reject_compiled(func)
                convert = partial(self._convert, gathers=gathers)
                args, kwargs = (
                    _map_tensors(convert, args),
                    {name: _map_tensors(convert, kwargs[name]) for name in kwargs},
                )
        return func(*args, **kwargs)

    def _convert(self, tensor: Tensor, *, gathers: bool) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) in self._sharded and tensor.requires_grad and torch.is_grad_enabled():
            tensor = _Used.apply(tensor, self._add_gradient)  # type: ignore[no-untyped-call]
        return full(tensor) if gathers else tensor


def _reject_compiled(func: Callable[..., Any]) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    raise TrainwrightError(
        f"runtime.mode compile: {getattr(func, '__name__', 'an operation')} combines sharded parameters with plain "
        "tensors, or reads them, in a forward that is compiled as a whole: each rank would compute with its own part. "
        "Compute it in train_step or a hook, use runtime.mode: eager, or runtime.mesh.fsdp instead of tensor.",
        where=None if frame is None else str(line_of_frame(frame)),
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _map_tensors(convert: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    return type(value)(_map_tensors(convert, each) for each in value) if type(value) in (list, tuple) else value


def _acts_on_tensor(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Returns True for attributes, hooks and in-place operations, which concern the tensor itself and not its
    values."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        is_augmented = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        return is_augmented or name in ("__get__", "__set__", "__delete__", "__setitem__")
    return kwargs.get("out") is not None or name.endswith("_") or name.startswith(("register_", "retain_", "backward"))
