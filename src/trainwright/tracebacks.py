"""Tracebacks with the user's frames in full and all other frames folded, for the command line.

A TrainwrightError is shown without a traceback.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections import Counter
from itertools import groupby
from pathlib import Path

_PACKAGE = Path(__file__).parent
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))


def fold(error: BaseException) -> str:
    """Returns the traceback with consecutive frames that are not the user's folded into one line.

    Nothing is folded if no frame is the user's, because the error is then in the package.
    """
    whole = traceback.TracebackException.from_exception(error)
    frames = list(whole.stack)
    if not any(_owner(frame) is None for frame in frames):
        return "".join(whole.format())
    lines = ["Traceback (most recent call last; -v shows every frame):\n"]
    for is_user, group in groupby(frames, key=lambda frame: _owner(frame) is None):
        block = list(group)
        lines += traceback.StackSummary.from_list(block).format() if is_user else [_count(block)]
    return "".join([*lines, *whole.format_exception_only()])


def user_location(error: BaseException) -> str | None:
    """Returns `file:line` of the user's innermost frame in an error's traceback, or in that of its cause."""
    each: BaseException | None = error
    while each is not None:
        frames = traceback.extract_tb(each.__traceback__)
        found = next((frame for frame in reversed(frames) if _owner(frame) is None), None)
        if found is not None:
            return f"{found.filename}:{found.lineno}"
        each = each.__cause__ or each.__context__
    return None


def _count(frames: list[traceback.FrameSummary]) -> str:
    owners = Counter(_owner(frame) for frame in frames)
    return "  … " + ", ".join(f"{count} frame{'s'[: count > 1]} of {owner}" for owner, count in owners.items()) + "\n"


def _owner(frame: traceback.FrameSummary) -> str | None:
    """Returns the package of a frame's code, or None for user code."""
    path = Path(frame.filename)
    if path.is_relative_to(_PACKAGE):
        return "trainwright"
    for library in _LIBRARIES:
        if path.is_relative_to(library):
            first = path.relative_to(library).parts
            if first[0] in ("site-packages", "dist-packages"):
                first = first[1:]
            return Path(first[0]).stem
    return "python" if frame.filename.startswith("<") else None


def shown_path(path: str | os.PathLike[str]) -> str:
    """Returns the path, or the path relative to the current directory if that is shorter."""
    given = os.fspath(path)
    relative = os.path.relpath(given)
    return relative if len(relative) < len(given) else given
