"""Which batches of the training data are never returned: those that a rolled-back run must not meet again.

Windows are of places, which count all samples of all ranks in the order of data; a batch is left out if its first place
is in one. Places go on counting what was left out, so whatever depends on them is as it would have been.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainwright.errors import DataError


class LeftOut:
    """Windows of places, disjoint and in order."""

    def __init__(self) -> None:
        self._windows: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._windows)

    def __contains__(self, place: int) -> bool:
        return any(start <= place < stop for start, stop in self._windows)

    def add(self, start: int, stop: int) -> None:
        """Leaves out the batches that begin at the places start … stop−1."""
        if not 0 <= start < stop:
            raise DataError(f"leave_out: the places {start} to {stop} are no window. Give 0 ≤ start < stop.")
        joined: list[tuple[int, int]] = []
        for first, last in sorted([*self._windows, (start, stop)]):
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
            else:
                joined.append((first, last))
        self._windows = joined

    def add_all(self, windows: Iterable[Sequence[int]]) -> None:
        """Adds saved windows to those that are there, which a state from before them does not know."""
        for start, stop in windows:
            self.add(int(start), int(stop))

    def to_list(self) -> list[list[int]]:
        """Returns the windows as plain values."""
        return [list(window) for window in self._windows]
