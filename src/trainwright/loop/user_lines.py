"""Which files are the user's own, and which of their lines a running frame is at.

What counts as the user's is everything but Python's library, installed packages and trainwright itself; installed
files of classes that the config names count too. Lines of settings and of definitions are checking/places.py's.
"""

from __future__ import annotations

import inspect
import linecache
import sysconfig
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import trainwright
from trainwright.tracebacks import shown_path

PACKAGE = str(Path(trainwright.__file__).parent) + "/"
TORCH = str(Path(torch.__file__).parent) + "/"
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Place:
    """A line of the user's: `file:line`, its text, and which characters of it are the culprit."""

    file: str
    """As shown: relative to the current folder where that is shorter."""
    line: int
    """From 1; 0 for an override on the command line, which has no lines."""
    text: str = ""
    """The source line, without its end; empty where it cannot be read."""
    columns: tuple[int, int] | None = None
    """The culprit's first character and the one after its last; None: the whole line."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class UserFiles:
    """Knows which files are the user's own."""

    def __init__(self, project_dir: Path) -> None:
        self._project = project_dir
        self._library = sysconfig.get_path("stdlib")
        self._known: dict[str, bool] = {}

    def include(self, target: Any) -> None:
        """Counts the file of a class that the config names as the user's, wherever it is installed."""
        try:
            file = inspect.getfile(inspect.unwrap(target))
        except (TypeError, OSError):
            return
        if not file.startswith((PACKAGE, TORCH)):
            self._known[file] = True

    def __contains__(self, file: str) -> bool:
        if file not in self._known:
            self._known[file] = self._judge(file)
        return self._known[file]

    def _judge(self, file: str) -> bool:
        if file.startswith(("<", PACKAGE, TORCH)):
            return False
        path = Path(file)
        if any(part in _INSTALLED for part in path.parts):
            return False
        return path.is_relative_to(self._project) or not path.is_relative_to(self._library)


def of_frame(frame: FrameType) -> Place:
    """Returns the line that a frame is at, with the expression that it is evaluating."""
    return of_instruction(frame.f_code, frame.f_lasti, frame.f_lineno)


def of_instruction(code: CodeType, instruction: int, line: int) -> Place:
    """Returns the line of one instruction of a function, with the expression that it belongs to."""
    file = code.co_filename
    start, end, left, right = next(islice(code.co_positions(), instruction // 2, None), (None, None, None, None))
    columns = None
    if start is not None and left is not None and right is not None:
        line = start
        text = source_line(file, line)
        last = right if end == start else len(text.encode())
        columns = (characters(text, left), characters(text.rstrip(), last))
    return Place(shown_path(file), line, source_line(file, line), columns)


def source_line(file: str, line: int) -> str:
    """Returns a line of a file without its end; empty where there is none."""
    linecache.checkcache(file)
    return linecache.getline(file, line).rstrip("\n")


def characters(text: str, num_bytes: int) -> int:
    """Returns how many characters a number of UTF-8 bytes are: Python counts columns in bytes."""
    return len(text.encode()[:num_bytes].decode(errors="replace"))
