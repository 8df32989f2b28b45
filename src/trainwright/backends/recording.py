"""What graph mode asks of a backend: a function that runs once, guarded, and can then be repeated.

On a GPU the repetition is a CUDA graph (cuda_graphs.py). A CPU runs the function again, eagerly: the guards are the
same, so a run that passes them on a CPU can be captured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.errors import HostReadError

# Methods that copy values to the host without an operation of their own.
_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})

Run = Callable[[list[Tensor]], list[Tensor]]


class Recording(Protocol):
    """A function that ran once and can be repeated."""

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Repeats it with inputs of the same shapes; returns new tensors, one for each output.

        The parameters it was given have the gradients of this repetition afterwards.
        """
        ...


class EagerRecording:
    """Repeats a function by calling it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Calls the function."""
        return self._run(list(inputs))


def run_guarded(run: Run, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Runs a function that a CUDA graph could capture; raises HostReadError where it could not."""
    with _NoConversions(), _NoDataDependence():
        return run(list(inputs))


class _NoConversions(TorchFunctionMode):
    """Rejects methods that copy values to the host below the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Called for every function of torch, with the mode off."""
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise HostReadError(f"The values of a tensor are read by the host, by {name}.")
        return func(*args, **(kwargs or {}))


class _NoDataDependence(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Rejects operations whose result on the host, or whose shape, depends on values, and what follows a seeding."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = torch.default_generator.initial_seed()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Called for every operation that reaches a kernel."""
        if torch.default_generator.initial_seed() != self._seed:
            raise HostReadError("Before this line torch's generator is seeded, which a replay does not repeat.")
        if torch.Tag.data_dependent_output in func.tags:
            raise HostReadError("The value of a tensor is read by the host.")
        if torch.Tag.dynamic_output_shape in func.tags and not _has_known_shape(func, args):
            name = func._schema.name.removeprefix("aten::")
            raise HostReadError(f"The shape of what {name} returns depends on values.")
        return func(*args, **(kwargs or {}))


def _has_known_shape(operation: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for indexing by integers, whose shape follows from the indices; a mask counts its values."""
    if operation is not torch.ops.aten.index.Tensor:
        return False
    return all(each is None or each.dtype not in (torch.bool, torch.uint8) for each in args[1])
