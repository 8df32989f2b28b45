"""What of a tensor lies on this rank: split parameters and their gradients are DTensors, all others themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part, which shares memory with the tensor; outside of autograd."""
    # Not `to_local()`: it is differentiable and, from torch 2.13 on, returns a view of a parameter's local tensor.
    part: torch.Tensor = tensor._local_tensor if is_split(tensor) else tensor  # type: ignore[attr-defined]
    return part


def is_split(tensor: torch.Tensor) -> bool:
    """Does this tensor lie on several ranks, as a DTensor?"""
    # Asked of the tensor and not of its class, whose module takes as long to import as half of torch.
    return hasattr(tensor, "device_mesh")


def own_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of a parameter's gradient, laid out as the parameter is; None where there is none.

    The gradient of a parameter that ranks along `tensor` have copies of may come as a part of a sum on each of them;
    it is summed here, and left so.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if is_split(gradient):
        placements = parameter.placements  # type: ignore[attr-defined]  # both are DTensors
        if gradient.placements != placements:  # type: ignore[attr-defined]
            gradient = parameter.grad = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return local(gradient)


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and buffers under all of their names, computed buffers too."""
    parameters = module.named_parameters(remove_duplicate=False)
    return chain(parameters, module.named_buffers(remove_duplicate=False))
