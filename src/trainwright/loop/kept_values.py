"""What a step keeps in Python between updates: in a recorded step Python runs once, so it would never change again.

Tensors that are written in place are recorded like any other operation; what is replaced, counted or collected is not,
nor what generators other than torch's draw. What is looked at is fingerprint.py's.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from torch import Tensor

from trainwright.errors import TrainwrightError
from trainwright.loop.fingerprint import ABSENT, Change, Fingerprint, users_classes
from trainwright.loop.kept_lines import line_of_change

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer


class KeptValues:
    """What hangs on a model's modules, the trainer, the task and the optimizers before a step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._fingerprint = Fingerprint(trainer)
        self._generators = {
            name: value
            for name, value in self._fingerprint.objects()
            if isinstance(value, np.random.Generator | np.random.RandomState | random.Random)
        }
        self._draws = self._stand()

    def refuse_changes(self) -> list[Change]:
        """Refuses what the step has replaced or counted: a replay would leave it as it is.

        Returns what optimizers made of their state: an update that does so is not like those that follow.
        """
        changes = self._fingerprint.changes()
        for change in changes:
            if not change.is_state:
                refuse_change(change, self._trainer)
        now = self._stand()
        drawn = next((name for name, state in self._draws.items() if now[name] != state), None)
        if drawn is not None:
            raise TrainwrightError(
                f"runtime.mode graph: the step draws from {drawn}, which would give the same in every replay. Draw "
                "with torch, or in the dataset."
            )
        return changes

    def _stand(self) -> dict[str, Any]:
        """Returns where the generators stand that a replay does not move on."""
        common: Any = np.random.get_state()
        stand: dict[str, Any] = {
            "Python's or numpy's random numbers": (random.getstate(), common[1].tobytes(), common[2])
        }
        for name, each in self._generators.items():
            stand[name] = _state_of(each)
        return stand


def refuse_change(change: Change, trainer: Trainer) -> NoReturn:
    """Refuses what a step changes in Python, by its name and, where that is found, its line."""
    name, before, now, _ = change
    if now is ABSENT:
        act = "takes it away"
    elif isinstance(now, Tensor):
        act = "puts another tensor there"
    else:
        act = f"changes it from {'nothing' if before is ABSENT else _short(before)} to {_short(now)}"
    raise TrainwrightError(
        f"runtime.mode graph: {name} would stay as it is, but the step {act}, which a replay does not. "
        "Keep it in a buffer and write it in place (buffer.copy_(value), buffer.add_(1)), or return it as a "
        "metric.",
        where=line_of_change(name, users_classes(trainer)),
    )


def _short(value: Any) -> str:
    text = f"a {type(value).__name__}" if hasattr(value, "__dict__") else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state()
        return state[1].tobytes(), state[2]
    return str(generator.bit_generator.state)
