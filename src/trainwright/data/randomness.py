"""The generators that a sample may draw from: seeding them, and noticing in microseconds who drew.

Seeding torch's, Python's and numpy's generators costs 7 µs, for every sample; most datasets draw from one, or none.
So samples are fetched under a Watch, and seeded are only the generators that it has seen drawn from.
"""

from __future__ import annotations

import _random
import ctypes
import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

_WORDS = 624  # of the Mersenne Twister, which Python and numpy share; the place of the next word is kept beside them
_NUM_BYTES = 4 * (_WORDS + 1)

_PYTHON: Any = random.getstate.__self__  # type: ignore[attr-defined]  # the Random that the module's functions use


def _seed_python(seed: int) -> None:
    """Does what `random.seed` does for a whole number, half a microsecond sooner."""
    _random.Random.seed(_PYTHON, seed)
    _PYTHON.gauss_next = None


SEEDERS: dict[str, Callable[[int], Any]] = {
    "torch": torch.default_generator.manual_seed,
    "python": _seed_python,
    "numpy": lambda seed: np.random.seed(seed & 0xFFFFFFFF),
}
"""Each global generator, and how it is seeded."""


def seed_generators(seed: int, which: Iterable[str] = tuple(SEEDERS)) -> None:
    """Seeds the global generators of torch, Python and numpy, or some of them."""
    for name in which:
        SEEDERS[name](seed)


_NONE: frozenset[str] = frozenset()


class Watch:
    """Remembers the generators' states, tells which have changed, and puts them back.

    Asking Python and numpy for their states takes 10 and 35 µs and makes hundreds of objects, so their memory is
    compared instead (under 1 µs); the states themselves are fetched only where it is not as this watch last saw it.
    Both may hold back the second half of a pair of normal numbers, which the memory does not show: then they are
    asked after all.
    """

    def __init__(self) -> None:
        self._generators: dict[str, _Watched] = {"torch": _Torch(), "python": _Python(), "numpy": _Numpy()}

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        # Addresses mean nothing in another process: a spawned worker looks for its own.
        return Watch, ()

    def begin(self) -> None:
        """Remembers the states."""
        for generator in self._generators.values():
            generator.begin()

    def drawn(self, but: frozenset[str] = frozenset()) -> frozenset[str]:
        """Returns the generators that were used since `begin`, leaving out some that were seeded meanwhile."""
        drawn = [name for name, generator in self._generators.items() if name not in but and generator.has_changed()]
        return frozenset(drawn) if drawn else _NONE

    def restore(self, which: Iterable[str] = tuple(SEEDERS)) -> None:
        """Puts the states of `begin` back."""
        for name in which:
            self._generators[name].restore()


class _Watched:
    """One global generator: its state, and its memory where that can be read."""

    def __init__(self) -> None:
        self.state: Any = None
        self._memory: bytes | None = None
        self._holds_normal = True

    def begin(self) -> None:
        """Fetches the state, unless the memory shows that it is the one from before."""
        memory = self.read_memory()
        if memory is None or memory != self._memory or self._holds_normal:
            self.state, self._memory = self.get(), memory
            self._holds_normal = self.holds_normal(self.state)

    def has_changed(self) -> bool:
        """Is the state another than at `begin`?"""
        if self._memory is None or self._holds_normal:
            return repr(self.get()) != repr(self.state)
        return self.read_memory() != self._memory

    def restore(self) -> None:
        """Puts the state of `begin` back."""
        self.put(self.state)

    def get(self) -> Any:
        """Returns the state."""
        raise NotImplementedError

    def put(self, state: Any) -> None:
        """Sets the state."""
        raise NotImplementedError

    def read_memory(self) -> bytes | None:
        """Returns the generator's memory, or None where it is not where it should be."""
        raise NotImplementedError

    def holds_normal(self, state: Any) -> bool:
        """Does the state hold back a normal number?"""
        raise NotImplementedError


class _Torch(_Watched):
    """Torch's generator of the CPU, whose state is a tensor that is quickly fetched and compared."""

    def begin(self) -> None:
        self.state = self.get()
        self._memory = self._bytes(self.state)

    def has_changed(self) -> bool:
        return self._bytes(self.get()) != self._memory

    def get(self) -> Any:
        return torch.default_generator.get_state()

    def put(self, state: Any) -> None:
        torch.default_generator.set_state(state)

    def _bytes(self, state: Any) -> bytes:
        return ctypes.string_at(state.data_ptr(), state.numel())  # torch.equal takes three times as long


class _Python(_Watched):
    """Python's `random`."""

    def __init__(self) -> None:
        super().__init__()
        self._address = self._find()

    def get(self) -> Any:
        return random.getstate()

    def put(self, state: Any) -> None:
        random.setstate(state)

    def holds_normal(self, state: Any) -> bool:
        return state[2] is not None

    def read_memory(self) -> bytes | None:
        return None if self._address is None else ctypes.string_at(self._address, _NUM_BYTES)

    def _find(self) -> int | None:
        """CPython keeps the place and the words behind the object's head; compared with the state to be sure."""
        address = id(_PYTHON) + object.__basicsize__
        *words, place = random.getstate()[1]
        expected = np.array([place, *words], dtype=np.uint32).tobytes()
        return address if ctypes.string_at(address, _NUM_BYTES) == expected else None


class _Numpy(_Watched):
    """Numpy's global generator; somebody may have given it another kind than the Mersenne Twister."""

    def get(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # said of other kinds, whose state comes as a dict
            return np.random.get_state()

    def put(self, state: Any) -> None:
        np.random.set_state(state)

    def restore(self) -> None:
        generator = np.random.mtrand.get_bit_generator()
        if self._memory is None or self._holds_normal or type(generator) is not np.random.MT19937:
            super().restore()
            return
        np.random.seed(0)  # forgets a normal number that was held back since; then 35 µs of set_state are not needed
        ctypes.memmove(generator.ctypes.state_address, self._memory, _NUM_BYTES)

    def holds_normal(self, state: Any) -> bool:
        return not isinstance(state, tuple) or bool(state[3])

    def read_memory(self) -> bytes | None:
        generator = np.random.mtrand.get_bit_generator()
        if type(generator) is not np.random.MT19937:
            return None
        return ctypes.string_at(generator.ctypes.state_address, _NUM_BYTES)
