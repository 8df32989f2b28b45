"""Decides which code belongs to the user, and finds the lines of functions, frames, returns and attributes in it.

User code is everything except the standard library, installed packages and this package; installed files of classes
that the config names count as well. Imports no torch.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.util
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from trainwright.tracebacks import shown_path

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH_FILE = getattr(importlib.util.find_spec("torch"), "origin", None) or ""
TORCH = f"{Path(_TORCH_FILE).parent}{os.sep}" if _TORCH_FILE else "<no torch>"
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
# Frames of these files may come between the user's call and this package.
_CALLING = (PACKAGE, argparse.__file__, contextlib.__file__, functools.__file__)


def is_user_code(target: Any) -> bool:
    """Returns True for a class or function that is not defined in this package."""
    return not f"{getattr(target, '__module__', None)}.".startswith("trainwright.")


def is_standard_library(target: Any) -> bool:
    """Returns True for a module, class, function or method of Python itself, such as `os.system` and `str.join`.

    An object that user code has created, such as a `functools.partial`, is the user's own.
    """
    if inspect.ismodule(target):
        name: Any = target.__name__
    elif inspect.isclass(target) or inspect.isroutine(target):
        owner = getattr(target, "__objclass__", None) or target  # the class of a method of a C type
        name = getattr(owner, "__module__", None) or type(owner).__module__
    else:
        return False
    if str(name).partition(".")[0] not in sys.stdlib_module_names:
        return False
    # A user's file may have the name of a standard module, such as code.py.
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or (Path(file).is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in file)


def is_user_file(file: str, project_dir: Path | None = None) -> bool:
    """Returns True for a file outside this package, torch, the standard library and installed packages."""
    path = Path(file)
    if file.startswith(("<", PACKAGE, TORCH)) or {"site-packages", "dist-packages"} & {*path.parts}:
        return False
    is_in_project = project_dir is not None and path.is_relative_to(project_dir)
    return is_in_project or not path.is_relative_to(_STANDARD_LIBRARY)


class UserFiles:
    """The files of user code, for `file in users`."""

    def __init__(self, project_dir: Path) -> None:
        self._project_dir = project_dir
        self._known: dict[str, bool] = {}

    def include(self, target: Any) -> None:
        """Counts the file of a class that the config names as user code, also if it is installed."""
        try:
            file = inspect.getfile(inspect.unwrap(target))
        except (TypeError, OSError):
            return
        if not file.startswith((PACKAGE, TORCH)):
            self._known[file] = True

    def __contains__(self, file: str) -> bool:
        if file not in self._known:
            self._known[file] = is_user_file(file, self._project_dir)
        return self._known[file]

    def code_of(self, function: Callable[..., Any]) -> CodeType | None:
        """Returns the code object of a user function; None for any other function."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        return code if code is not None and code.co_filename in self else None


def name_of(target: Any) -> str:
    """Returns the name of a function or class, or of an object's class."""
    while isinstance(target, functools.partial):
        target = target.func
    return getattr(target, "__name__", type(target).__name__)


def describe_method(function: Any) -> str:
    """Returns the class and name of a method, or the name of a function, with its location: `Info.after_step (f.py:3)`.

    A function that calls a user's function has it as the attribute `user_function`.
    """
    while hasattr(function, "user_function"):
        function = function.user_function
    name = getattr(function, "__qualname__", name_of(function)).rpartition("<locals>.")[2]
    where = location_of(function)
    return name if where is None else f"{name} ({where})"


def parameters_of(target: Any) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters of a function or class by name; None if Python has no signature, as for a builtin."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def definition_of(target: Any) -> tuple[str, int] | None:
    """Returns the file and line of the `def` or `class` of a function, a class or an object's class."""
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isclass(target) and not inspect.isroutine(target):
        target = type(target)
    target = inspect.unwrap(target)
    try:
        source, first = inspect.getsourcelines(target)
    except (OSError, TypeError):
        code = getattr(target, "__code__", None)
        return None if code is None else (code.co_filename, code.co_firstlineno)
    keywords = ("def ", "class ", "async ")
    num_decorators = next((number for number, line in enumerate(source) if line.lstrip().startswith(keywords)), 0)
    return inspect.getfile(target), first + num_decorators


def location_of(target: Any) -> str | None:
    """Returns `file:line` of the definition of a function or class; None if Python has no source."""
    found = definition_of(target)
    return None if found is None else f"{found[0]}:{found[1]}"


def caller() -> str | None:
    """Returns `file:line` of the nearest frame outside this package, argparse, contextlib and functools."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_CALLING):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(frozen=True)
class SourceLocation:
    """A source line: `file:line`, its text, and the characters that a message refers to."""

    file: str
    """The displayed path: relative to the current folder if that is shorter."""
    line: int
    """From 1; 0 for an override on the command line, which has no lines."""
    text: str = ""
    """The source line without its newline; empty if it cannot be read."""
    columns: tuple[int, int] | None = None
    """The first character to mark and the one after the last; None: the whole line."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


def line_of_frame(frame: FrameType) -> SourceLocation:
    """Returns the line that a frame executes, with the expression that it evaluates."""
    return _line_of_instruction(frame.f_code, frame.f_lasti, frame.f_lineno)


def line_of_traceback(error: BaseException, users: UserFiles) -> SourceLocation | None:
    """Returns the innermost line of user code in an exception's traceback; None if there is none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        start = max((error.offset or 1) - 1, 0)
        columns = (start, max(start + 1, (error.end_offset or 0) - 1)) if error.offset else None
        return SourceLocation(shown_path(error.filename), error.lineno, (error.text or "").rstrip("\n"), columns)
    found, link = None, error.__traceback__
    while link is not None:
        if link.tb_frame.f_code.co_filename in users:
            found = link
        link = link.tb_next
    return None if found is None else _line_of_instruction(found.tb_frame.f_code, found.tb_lasti, found.tb_lineno)


def line_of_function(
    function: Callable[..., Any], users: UserFiles, parameters: Sequence[str] = ()
) -> SourceLocation | None:
    """Returns the line of the first of these parameters that a user function has, or of its `def`."""
    code = users.code_of(function)
    if code is None:
        return None
    definition = _definition(code)
    if definition is None:
        line = code.co_firstlineno
        return SourceLocation(shown_path(code.co_filename), line, source_line(code.co_filename, line))
    given = {each.arg: each for each in ast.walk(definition.args) if isinstance(each, ast.arg)}
    line = next((given[name].lineno for name in parameters if name in given), definition.lineno)
    return _line(code.co_filename, line, [*parameters, code.co_name])


def line_of_return(function: Callable[..., Any], users: UserFiles) -> SourceLocation | None:
    """Returns the only `return` of a user function, or its `def` line if it has none or several."""
    code = users.code_of(function)
    definition = None if code is None else _definition(code)
    if code is None or definition is None:
        return line_of_function(function, users)
    values = [each.value for each in ast.walk(definition) if isinstance(each, ast.Return) and each.value is not None]
    if len(values) != 1:
        return line_of_function(function, users)
    value = values[0]
    return _line_of_span(code.co_filename, value.lineno, value.end_lineno, value.col_offset, value.end_col_offset or 0)


def line_of_attribute(owner: type, name: str, users: UserFiles) -> SourceLocation | None:
    """Returns the line of a user class that assigns `self.NAME`, or the line of the class."""
    for each in owner.__mro__:
        try:
            file = inspect.getfile(each)
            lines, first = inspect.getsourcelines(each) if file in users else ([], 0)
        except (OSError, TypeError):
            continue
        for number, line in enumerate(lines, start=first):
            found = re.search(rf"\bself\.{re.escape(name)}(?=\s*[:=])", line)
            if found:
                return SourceLocation(shown_path(file), number, line.rstrip("\n"), found.span())
        if lines and each is owner:
            return _line(file, first, [owner.__name__])
    return None


def parse_file(file: str) -> ast.Module:
    """Returns the syntax tree of a file; an empty one if it cannot be read."""
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def source_line(file: str, line: int) -> str:
    """Returns a line of a file without its newline; empty if there is none."""
    linecache.checkcache(file)
    return linecache.getline(file, line).rstrip("\n")


def find_word(text: str, words: Iterable[str]) -> tuple[int, int] | None:
    """Returns the columns of the first of these words in a line, outside of a comment; None if it has none of them."""
    body = text.partition(" #")[0]
    for word in words:
        found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", body) if word else None
        if found:
            return found.span()
    return None


def _definition(code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for node in ast.walk(parse_file(code.co_filename)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != code.co_name:
            continue
        if code.co_firstlineno in (node.lineno, *(each.lineno for each in node.decorator_list)):
            return node
    return None


def _line(file: str, line: int, words: Sequence[str]) -> SourceLocation:
    text = source_line(file, line)
    return SourceLocation(shown_path(file), line, text, find_word(text, words))


def _line_of_instruction(code: CodeType, instruction: int, line: int) -> SourceLocation:
    file = code.co_filename
    start, end, left, right = next(islice(code.co_positions(), instruction // 2, None), (None, None, None, None))
    if start is None or left is None or right is None:
        return SourceLocation(shown_path(file), line, source_line(file, line))
    return _line_of_span(file, start, end, left, right)


def _line_of_span(file: str, start: int, end: int | None, left: int, right: int) -> SourceLocation:
    """Returns the first line of an expression; `left` and `right` are columns in bytes, as Python counts them."""
    text = source_line(file, start)
    encoded = text.rstrip().encode()
    stop = right if end == start else len(encoded)
    columns = (len(encoded[:left].decode(errors="replace")), len(encoded[:stop].decode(errors="replace")))
    return SourceLocation(shown_path(file), start, text, columns)
