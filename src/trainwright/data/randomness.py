"""The global generators of torch, Python and numpy: seeding them, preserving them, and detecting draws from them.

Seeding all three takes about 10 µs, and most datasets draw from one of them or from none. fetch.py therefore seeds for
each sample only the generators that a DrawDetector has seen in use.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

SEEDERS: dict[str, Callable[[int], Any]] = {
    "torch": torch.default_generator.manual_seed,
    "python": random.seed,
    "numpy": lambda seed: np.random.seed(seed & 0xFFFFFFFF),
}
"""The function that seeds each global generator."""

_START_SEED = 0
_PYTHON_START = random.Random(_START_SEED).getstate()
_PYTHON_FIRST = random.Random(_START_SEED).random()
_NUMPY_FIRST = np.random.RandomState(_START_SEED).random()


def seed_generators(seed: int, which: Iterable[str] = tuple(SEEDERS)) -> None:
    """Seeds the global generators of torch, Python and numpy, or only those named in `which`."""
    for name in which:
        SEEDERS[name](seed)


_SPARE = np.random.MT19937(_START_SEED)
"""Replaces numpy's bit generator in `preserve_generators`."""


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restores the global generators on exit, also after an error. Inside, numpy's generator has an undefined state:
    seed it.

    numpy's bit generator is exchanged for another one, because reading its state would take 50 µs. The second number of
    a pair that `np.random.randn` has computed is lost, because it is not part of the bit generator.
    """
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    # numpy's type stubs lack these two functions.
    numpy_bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    is_nested = numpy_bits is _SPARE
    np.random.set_bit_generator(np.random.MT19937(_START_SEED) if is_nested else _SPARE)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_bit_generator(numpy_bits)  # type: ignore[attr-defined]


class DrawDetector:
    """Detects which global generators were drawn from since `start`.

    Comparing the states of Python's and numpy's generators would take 60 µs. They are instead set to a known state
    whose next number is known. Callers that need the previous states preserve them.
    """

    def __init__(self) -> None:
        self._torch_state = b""

    def start(self) -> None:
        """Starts a detection; replaces the states of Python's and numpy's generators."""
        self._torch_state = torch.default_generator.get_state().numpy().tobytes()  # torch.equal takes 4 times as long
        random.setstate(_PYTHON_START)
        np.random.seed(_START_SEED)

    def drawn(self) -> frozenset[str]:
        """Returns the names of the generators that were used. This call draws itself, so call `start` before the next
        one."""
        used = []
        if torch.default_generator.get_state().numpy().tobytes() != self._torch_state:
            used.append("torch")
        if random.random() != _PYTHON_FIRST:
            used.append("python")
        if np.random.random() != _NUMPY_FIRST:
            used.append("numpy")
        return frozenset(used)
