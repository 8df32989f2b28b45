"""Where a user's functions stand and from where ours are called: for errors that name the user's file and line.

Whether a function takes what it is about to be handed is loop/calls.py's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

# Frames of these stand between a user's call and ours, and are not the user's.
_NOT_USERS = (f"{Path(__file__).parent}{os.sep}", argparse.__file__, contextlib.__file__, functools.__file__)


def place_of(target: Any) -> str | None:
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
