"""Where user code is: source locations of functions, frames and calls, and which files belong to the user.

User code is everything except the standard library, installed packages and this package; installed files of classes
that the config names count as well. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from trainwright.tracebacks import shown_path

# Frames of these stand between a user's call and ours, and are not the user's.
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH_FILE = getattr(importlib.util.find_spec("torch"), "origin", None) or ""
TORCH = f"{Path(_TORCH_FILE).parent}{os.sep}" if _TORCH_FILE else "<no torch>"
_NOT_USERS = (PACKAGE, argparse.__file__, contextlib.__file__, functools.__file__)


def location_of(target: Any) -> str | None:
    """Returns `file:line` where a function or class is written; None where Python does not know."""
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isclass(target) and not inspect.isroutine(target):
        target = type(target)
    code = getattr(inspect.unwrap(target), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getfile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return None


def name_of(target: Any) -> str:
    """Returns what a user calls a function or class."""
    while isinstance(target, functools.partial):
        target = target.func
    return getattr(target, "__name__", type(target).__name__)


def parameters_of(target: Any) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters of a function or class by name; None where Python knows no signature, as of a builtin."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def caller() -> str | None:
    """Returns `file:line` of the nearest frame that is neither the package's nor argparse's: the user's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class SourceLocation:
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


def of_frame(frame: FrameType) -> SourceLocation:
    """Returns the line that a frame is at, with the expression that it is evaluating."""
    return of_instruction(frame.f_code, frame.f_lasti, frame.f_lineno)


def of_instruction(code: CodeType, instruction: int, line: int) -> SourceLocation:
    """Returns the line of one instruction of a function, with the expression that it belongs to."""
    file = code.co_filename
    start, end, left, right = next(islice(code.co_positions(), instruction // 2, None), (None, None, None, None))
    columns = None
    if start is not None and left is not None and right is not None:
        line = start
        text = source_line(file, line)
        last = right if end == start else len(text.encode())
        columns = (characters(text, left), characters(text.rstrip(), last))
    return SourceLocation(shown_path(file), line, source_line(file, line), columns)


def source_line(file: str, line: int) -> str:
    """Returns a line of a file without its end; empty where there is none."""
    linecache.checkcache(file)
    return linecache.getline(file, line).rstrip("\n")


def characters(text: str, num_bytes: int) -> int:
    """Returns how many characters a number of UTF-8 bytes are: Python counts columns in bytes."""
    return len(text.encode()[:num_bytes].decode(errors="replace"))
