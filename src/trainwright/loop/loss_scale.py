"""Loss scaling for fp16: keeps small gradients in range, and skips updates whose gradients overflowed.

All on the device: the scale follows the overflows without the host looking. How an update is skipped is
step_unless.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class LossScale:
    """A scale that halves when gradients overflow and doubles after `growth_interval` updates without."""

    def __init__(self, device: torch.device, *, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._good_updates = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_interval = growth_interval

    def follow(self, overflowed: torch.Tensor) -> None:
        """Adjusts the scale after an update; `overflowed` is a 0-dim bool on the device."""
        self._good_updates.add_(1).mul_(~overflowed)
        grown = self._good_updates == self._growth_interval
        # Not below 2^-14: a scale that has run down to 0 in a bad stretch would never come back.
        self.scale.mul_(torch.where(overflowed, 0.5, torch.where(grown, 2.0, 1.0))).clamp_(min=2.0**-14)
        self._good_updates.mul_(~grown)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the scale and how long it has held."""
        return {"scale": self.scale, "good_updates": self._good_updates}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores `state_dict` in place."""
        self.scale.copy_(state["scale"])
        self._good_updates.copy_(state["good_updates"])
