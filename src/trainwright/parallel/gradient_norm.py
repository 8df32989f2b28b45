"""The norm of all gradients where each rank holds some of them, or a part of each.

Ranks add up the squares of what they hold. What several ranks hold copies of is divided by their number first, so
that each value counts once, whatever is split along which axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from trainwright.parallel.local import is_split, own_gradient
from trainwright.parallel.mesh import Mesh


class GradientNorm:
    """Measures the gradients of a model that is split over ranks.

    `num_stages` says of parameters, by their id, how many stages of a pipeline hold them, where that is not one.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], mesh: Mesh, *, num_stages: Mapping[int, int] | None = None
    ) -> None:
        self._parameters = list(parameters)
        stages = num_stages or {}
        self._copies = [num_copies(each, mesh) * stages.get(id(each), 1) for each in self._parameters]

    def gradients(self) -> list[torch.Tensor]:
        """Returns what of the gradients lies on this rank, laid out as the parameters are."""
        return [gradient for each in self._parameters if (gradient := own_gradient(each)) is not None]

    @torch.no_grad()
    def measure(self) -> torch.Tensor:
        """Returns the 2-norm of all gradients together; every rank of the run must ask."""
        held: dict[int, list[torch.Tensor]] = {}
        for parameter, copies in zip(self._parameters, self._copies, strict=True):
            gradient = own_gradient(parameter)
            if gradient is not None:
                held.setdefault(copies, []).append(gradient)
        first = self._parameters[0]
        total = torch.zeros((), dtype=torch.float64, device=first.device)
        for copies, gradients in held.items():
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
            total += norms.square().sum() / copies
        dist.all_reduce(total)
        return total.sqrt().to(torch.promote_types(first.dtype, torch.float32))


def num_copies(parameter: torch.Tensor, mesh: Mesh) -> int:
    """Returns how many ranks hold the same values of a parameter as this one."""
    copies = mesh.size("replicate", "data", "context", "tensor")
    if is_split(parameter):
        layout = parameter.device_mesh  # type: ignore[attr-defined]  # a DTensor
        for number, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                copies //= layout.size(number)
    return copies
