"""Writes `metrics.csv`: one row per log line, one column per name. A name that appears later adds a column."""

from __future__ import annotations

import csv
import io
from numbers import Real
from pathlib import Path

from trainwright.errors import TrainwrightError
from trainwright.events import EventStorage
from trainwright.writers.writer import RunInfo, Writer

FILE_NAME = "metrics.csv"


class CsvWriter(Writer):
    """Appends the numbers of each log line to `metrics.csv` in the run folder; cells without a value are empty.

    A resumed run first removes the rows after its checkpoint, as in metrics.json.
    """

    stores = ()

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / FILE_NAME
        self._names: list[str] = []

    def begin(self, run: RunInfo) -> None:
        """Removes rows after the step from which the run continues, and an incomplete row."""
        if not self.path.exists():
            return
        text = self.path.read_bytes().decode("utf-8", errors="replace")
        header, *rows = [*csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))] or [[]]
        self._names = header
        kept = [row for row in rows if len(row) == len(self._names) and row[0].isdecimal() and int(row[0]) <= run.step]
        if len(kept) < len(rows) or not text.endswith("\n"):
            self._rewrite(kept)

    def write(self, storage: EventStorage) -> None:
        """Appends one row. NaN and infinities are written as nan, inf and -inf."""
        line = {name: value for name, value in storage.line.items() if isinstance(value, Real)}
        added = [name for name in line if name not in self._names]
        try:
            if added:
                rows = self._read_rows() if self._names else []
                self._names += added
                self._rewrite([row + [""] * len(added) for row in rows])
            with self.path.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow([line.get(name, "") for name in self._names])
        except OSError as error:
            raise TrainwrightError(
                f"{self.path} cannot be written ({error.strerror}). Free some space and run the same command again: "
                "it resumes from the last checkpoint."
            ) from error

    def _read_rows(self) -> list[list[str]]:
        with self.path.open(encoding="utf-8", newline="") as file:
            return list(csv.reader(file))[1:]

    def _rewrite(self, rows: list[list[str]]) -> None:
        """Replaces the file atomically: a kill leaves the old or the new one."""
        replacement = self.path.with_suffix(".csv.part")
        with replacement.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([self._names, *rows])
        replacement.replace(self.path)
