"""Numbers of the trainer that the host counts: a recorded step must not read them, for it would keep what it read."""

from __future__ import annotations

from typing import Any

from trainwright.errors import HostReadError


class HostNumber:
    """An attribute that refuses to be read while a step is recorded; `is_recording` of its owner says when."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._key = f"_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> int:
        if instance is None:
            return self  # type: ignore[return-value]  # the descriptor itself, as Python's own do
        if instance.is_recording:
            advice = "Use self.step_tensor, the same number on the device." if self._name == "step" else ""
            raise HostReadError(
                f"{self._name} is read, but Python runs only once in graph mode, so that it would stay the same in "
                f"every update. {advice}".rstrip()
            )
        try:
            value: int = instance.__dict__[self._key]
        except KeyError:
            raise AttributeError(self._name) from None
        return value

    def __set__(self, instance: Any, value: int) -> None:
        instance.__dict__[self._key] = value
