"""Which data rank a process is, of how many, and which places of a batch are its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class View:
    """Which data rank this process is, of how many."""

    rank: int = 0
    size: int = 1

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Returns this rank's contiguous share of positions; ranks in order give the whole again."""
        length = stop - start
        return start + length * self.rank // self.size, start + length * (self.rank + 1) // self.size
