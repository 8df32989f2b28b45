"""AdamW as torch has it, in one fused kernel wherever torch can, with a step() that returns metrics.

Which parameters are decayed is decided by the parameter groups; the learning rate's course by schedules.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainwright.backends import has_fused_optimizers

# torch wraps a class's step() in profiling and hooks when its first object is made. Calling super().step() would run
# a user's step hooks twice in a process that also made a plain torch AdamW, so we call the function inside the wraps.
_update_parameters = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay: torch's algorithm and torch's defaults, but fused where possible.

    `fused=None` means: one kernel for all parameters if every one is floating point on a device that has the kernel
    (CPU, CUDA), else torch's own choice. The fused kernel is the fastest, and the only one that can skip an update
    with infinite gradients without the host waiting for the device. `True` and `False` are passed on to torch.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        entries = _read_once(params)
        if fused is None and all(_has_fused_kernel(tensor) for tensor in _tensors_of(entries)):
            fused = True
        super().__init__(
            entries,
            lr=lr,
            betas=(betas[0], betas[1]),  # YAML knows only lists
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            capturable=capturable,
            fused=fused,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        """Updates the parameters in place and returns the optimizer's metrics, of which AdamW has none.

        A closure is run as in torch, but what it returns is dropped: the loop has the loss already.
        """
        _update_parameters(self, closure)
        return {}


def _read_once(params: Iterable[Any]) -> list[Any]:
    """Returns the parameters or groups as lists: they are read here and again by torch, and may be generators."""
    if isinstance(params, Tensor):
        raise TypeError("AdamW got one tensor. Give an iterable of tensors, such as model.parameters().")
    return [
        {**entry, "params": list(entry["params"])}
        if isinstance(entry, dict) and isinstance(entry["params"], Iterator)
        else entry
        for entry in params
    ]


def _tensors_of(entries: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors in what torch's optimizers take: tensors, (name, tensor) pairs, or groups of either."""
    for entry in entries:
        if isinstance(entry, dict):
            members = entry["params"]
            yield from [members] if isinstance(members, Tensor) else _tensors_of(members)
        else:
            yield entry[1] if isinstance(entry, tuple) else entry


def _has_fused_kernel(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and has_fused_optimizers(parameter.device)
