"""The training batches as one iterator that can begin anew where the data's position says."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any

from trainwright.backends import Backend
from trainwright.data.stream_loader import TrainingData


class Feed(Iterator[Any]):
    """Iterates over training data on the device; after `start_anew` from the position that the data has then.

    Closing it ends the loader's workers.
    """

    def __init__(self, data: TrainingData, backend: Backend) -> None:
        self._data = data
        self._backend = backend
        self._batches: Generator[Any, None, None] = data.batches(backend.to_device)

    def __next__(self) -> Any:
        return next(self._batches)

    def start_anew(self) -> None:
        """Forgets what was fetched ahead: the run has gone back to an earlier position."""
        self._batches.close()
        self._batches = self._data.batches(self._backend.to_device)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._batches.close()
