"""The contract of a writer. Writers exist only on the first rank."""

from __future__ import annotations

from trainwright.events import EventStorage


class Writer:
    """Receives each log line: override `write`."""

    def write(self, storage: EventStorage) -> None:
        """Called at each log line; `storage.line` is that line: `step`, then name → value."""
        raise NotImplementedError(f"{type(self).__name__} must override write(storage).")

    def close(self) -> None:
        """Called once at the end, also after an error."""
