"""What a forward keeps on its model between steps: in a recorded step Python runs once, so it would never change again.

Tensors that are written in place are recorded like any other operation; what is replaced, or counted, is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainwright.errors import TrainwrightError

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

_COUNTED = (int, float, bool, str)


class KeptValues:
    """The tensors and numbers that hang on a model's modules and on the task, as they are now."""

    def __init__(self, trainer: Trainer) -> None:
        self._owners: dict[str, Any] = {"task": trainer.task}
        if isinstance(trainer.model, nn.Module):
            self._owners |= {name or type(trainer.model).__name__: each for name, each in trainer.model.named_modules()}
        self._before = {(owner, name): value for owner, name, value in self._values()}

    def refuse_changes(self) -> None:
        """Refuses what has been replaced or counted since: a replay would leave it as it is."""
        for owner, name, value in self._values():
            before = self._before.get((owner, name), value)
            if value is before or (isinstance(value, _COUNTED) and value == before):
                continue
            act = (
                "puts another tensor there" if isinstance(value, Tensor) else f"changes it from {before!r} to {value!r}"
            )
            raise TrainwrightError(
                f"runtime.mode graph: {owner}.{name} would stay as it is, but the step {act}, which a replay does not. "
                "Keep it in a buffer and write it in place (buffer.copy_(value), buffer.add_(1)), or return it as a "
                "metric."
            )

    def _values(self) -> Iterator[tuple[str, str, Any]]:
        for owner, each in self._owners.items():
            kept = {**vars(each), **getattr(each, "_buffers", {})} if hasattr(each, "__dict__") else {}
            for name, value in kept.items():
                if isinstance(value, Tensor | int | float | str):
                    yield owner, name, value
