"""When Python looks for garbage: between steps of a run, at moments when somebody waits anyway, and never within one.

Left to itself the collector runs after so many new objects, in the midst of a step, on one rank and then on another,
and walks over all that torch has ever made: up to half a second, in which the device runs dry and other ranks wait.
Only reference cycles need it; everything else is freed at once, here as ever.
"""

from __future__ import annotations

import gc
from types import TracebackType

MOST_STEPS = 20
"""So many steps at most go by without a collection: a cycle may hold a batch, or other memory of the device."""
FIRST_STEPS = 5
"""The first collection comes early. It looks at all that compilers have made, up to a second long, beside which the
compilation took a minute; at step 20 it would be a pause that nobody expects."""
FULL_EVERY = 50
"""Every so many collections look at all objects since the beginning; the others only at those of the last steps."""
OF_PYTHON = 1000
"""With fewer objects set aside nobody has done it: Python 3.12 begins with 375, and whoever imports torch has more."""
LONG_RUN = 100
"""A run of so many steps first looks at all that was left by what came before it, which takes a moment."""


class Garbage:
    """Holds the collector while it is a run's context; `tidy` then collects where that is due.

        with Garbage(num_steps=1000) as garbage:
            for each step:
                ... the update ...
                garbage.tidy(is_due=the step is logged, evaluated or saved)

    What was there at the beginning, and what the first collection leaves (code that was compiled meanwhile), is set
    aside: later collections look only at what came after it. Whoever has switched the collector off, or has set
    objects aside, keeps charge of that. Afterwards nothing is set aside, and the collector runs as it did.
    """

    def __init__(self, *, num_steps: int = 0) -> None:
        self._is_long = num_steps >= LONG_RUN
        self._is_active = False
        self._sets_aside = False
        self._num_collections = 0
        self._steps_since = 0

    def __enter__(self) -> Garbage:
        if gc.isenabled():
            self._is_active, self._sets_aside = True, gc.get_freeze_count() < OF_PYTHON
            self._num_collections = self._steps_since = 0
            gc.disable()
            if self._sets_aside:
                # What is garbage already would be kept to the run's end.
                gc.collect(2 if self._is_long else 1)
                gc.freeze()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._is_active:
            self._is_active = False
            if self._sets_aside:
                gc.unfreeze()
            gc.enable()

    def tidy(self, *, is_due: bool) -> None:
        """Ends a step: collects if that is due, and every so many steps in any case. Else it costs 0.1 µs."""
        self._steps_since += 1
        if is_due or self._steps_since >= (MOST_STEPS if self._num_collections else FIRST_STEPS):
            self.collect()

    def collect(self) -> None:
        """Frees what only cycles hold, in a few microseconds for each step since the last time."""
        self._steps_since = 0
        if not self._is_active:
            return
        self._num_collections += 1
        gc.collect(2 if self._num_collections % FULL_EVERY == 0 else 1)
        if self._sets_aside and self._num_collections == 1:
            gc.freeze()
