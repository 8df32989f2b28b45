"""What is done about rows that cannot be read: `data.on_error`.

`raise` ends the run with the row and its error. `skip` leaves such rows out, lists them in the run folder, and ends
the run when there are more than `data.max_skipped`. Each rank lists what it met; a row is listed once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainwright.data.fetch import Failure
from trainwright.errors import DataError

logger = logging.getLogger(__name__)

SKIPPED_ROWS = "skipped_rows.json"
"""The list in the run folder: one JSON object a line, as metrics.json."""


class OnError:
    """Takes note of rows that were left out."""

    def __init__(self, *, skips: bool = False, at_most: int = 100, folder: Path | None = None) -> None:
        self.skips = skips
        self._at_most = at_most
        self._file = None if folder is None else folder / SKIPPED_ROWS
        self._known: set[Failure] | None = None

    def note(self, failures: Sequence[Failure], *, of: str = "data.train") -> None:
        """Lists rows of a set that were left out; raises where they are too many."""
        if not failures:
            return
        if self._known is None:
            self._known = self._read()
        for failure in (replace(each, of=of) for each in failures):
            if failure in self._known:
                continue
            self._known.add(failure)
            self._list(failure)
            if len(self._known) > self._at_most:
                raise DataError(
                    f"data.on_error: skip, but {failure.describe()}, which makes {len(self._known)} such rows, and "
                    f"data.max_skipped is {self._at_most}. They are listed in {self._file}. Mend the data or raise it."
                )
            logger.warning("Left out: %s.", failure.describe())

    def _list(self, failure: Failure) -> None:
        if self._file is not None:
            # One write of one short line, appended: ranks may list rows at the same time.
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(failure.to_dict()) + "\n")

    def _read(self) -> set[Failure]:
        if self._file is None or not self._file.exists():
            return set()
        known = set()
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                known.add(Failure(**json.loads(line)))
            except (ValueError, TypeError):
                continue  # the last line of a run that was killed
        return known
