"""What a check finds: each finding with its severity, its place in the user's files, and what to write instead.

How a place is found is places.py's, how an exception becomes a finding explain.py's, how findings look on a
terminal report.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainwright.loop.user_lines import Place

Severity = Literal["error", "remark"]


class AlreadyReported(Exception):  # noqa: N818 # nobody meets it: it ends a stage whose finding is noted
    """Raised where going on makes no sense, because what would fail next has been noted in better words."""


@dataclass(frozen=True)
class Finding:
    """One problem. `problem` and `advice` are whole sentences; `advice` says what to write instead."""

    severity: Severity
    problem: str
    advice: str = ""
    place: Place | None = None


class Findings:
    """All that was found, in the order of the stages; the same thing twice counts once."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Finding] = {}

    def add(self, finding: Finding) -> None:
        """Adds a finding, unless the same problem was found at the same line; an error replaces a remark."""
        key = (str(finding.place) if finding.place is not None else None, finding.problem)
        if key not in self._found or (finding.severity, self._found[key].severity) == ("error", "remark"):
            self._found[key] = finding

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def count(self, severity: Severity) -> int:
        """Returns how many findings have this severity."""
        return sum(finding.severity == severity for finding in self)
