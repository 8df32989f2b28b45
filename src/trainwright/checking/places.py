"""Finds the user's line: of a setting, of a running frame, of a traceback, of a function or an attribute.

What counts as the user's is everything but Python's library, installed packages and trainwright itself;
installed files of classes that the config names count too.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

import trainwright
from trainwright.checking.findings import Place
from trainwright.config import Origin
from trainwright.config.tree import shown_path

PACKAGE = str(Path(trainwright.__file__).parent) + "/"
TORCH = str(Path(torch.__file__).parent) + "/"
_INSTALLED = ("site-packages", "dist-packages")


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


def of_setting(origin: Origin | None, words: Iterable[str] = ()) -> Place | None:
    """Returns the line of a setting; the first of `words` that stands in it is the culprit."""
    if origin is None:
        return None
    if not origin.line:  # an override: the text is its own source
        text = origin.file.removeprefix("override ")
        return Place(origin.file, 0, text, _find_word(text, words))
    text = _source_line(origin.file, origin.line)
    columns = _find_word(text, words)
    if columns is None and origin.line == 1:
        text = ""  # the file as a whole: a section that it lacks has no line
    return Place(origin.file, origin.line, text, columns)


def of_frame(frame: FrameType) -> Place:
    """Returns the line that a frame is at, with the expression that it is evaluating."""
    return _of_instruction(frame.f_code, frame.f_lasti, frame.f_lineno)


def of_traceback(error: BaseException, users: UserFiles) -> Place | None:
    """Returns the innermost line in the user's files that an exception passed; None where it passed none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        text = error.text or ""
        start = max((error.offset or 1) - 1, 0)
        columns = (start, max(start + 1, (error.end_offset or 0) - 1)) if error.offset else None
        return Place(shown_path(error.filename), error.lineno, text.rstrip("\n"), columns)
    found: TracebackType | None = None
    link = error.__traceback__
    while link is not None:
        if link.tb_frame.f_code.co_filename in users:
            found = link
        link = link.tb_next
    if found is None:
        return None
    return _of_instruction(found.tb_frame.f_code, found.tb_lasti, found.tb_lineno)


def of_function(function: Callable[..., Any], users: UserFiles, words: Sequence[str] = ()) -> Place | None:
    """Returns the `def` line of a user's function, with one of its parameters or its name as the culprit."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename not in users:
        return None
    names = [*words, code.co_name]
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        return Place(shown_path(code.co_filename), code.co_firstlineno)
    start = next((number for number, line in enumerate(lines) if re.match(r"\s*(async\s+)?def\b", line)), 0)
    # A parameter may stand on a line of its own; the signature ends where the body begins.
    for word in names:
        for number in range(start, len(lines)):
            columns = _find_word(lines[number], [word])
            if columns is not None:
                return Place(shown_path(code.co_filename), first + number, lines[number].rstrip("\n"), columns)
            if re.search(r":\s*(#.*)?$", lines[number]):
                break
    return Place(shown_path(code.co_filename), first + start, lines[start].rstrip("\n"))


def of_return(function: Callable[..., Any], users: UserFiles) -> Place | None:
    """Returns the only `return` of a user's function, or its `def` line where it has none or several."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename not in users:
        return None
    try:
        tree = ast.parse(Path(code.co_filename).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return of_function(function, users)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        if code.co_firstlineno in (node.lineno, *(each.lineno for each in node.decorator_list)):
            returns = [each for each in ast.walk(node) if isinstance(each, ast.Return) and each.value is not None]
            if len(returns) == 1 and returns[0].value is not None:
                return _of_expression(code.co_filename, returns[0].value)
    return of_function(function, users)


def of_attribute(owner: type, name: str, users: UserFiles) -> Place | None:
    """Returns the line of a user's class where `self.NAME` is made, or the class's own."""
    for each in owner.__mro__:
        try:
            file = inspect.getfile(each)
            if file not in users:
                continue
            lines, first = inspect.getsourcelines(each)
        except (OSError, TypeError):
            continue
        for number, line in enumerate(lines):
            found = re.search(rf"\bself\.{re.escape(name)}(?=\s*[:=])", line)
            if found:
                return Place(shown_path(file), first + number, line.rstrip("\n"), found.span())
        if each is owner:
            return Place(shown_path(file), first, lines[0].rstrip("\n"), _find_word(lines[0], [owner.__name__]))
    return None


def _of_instruction(code: CodeType, instruction: int, line: int) -> Place:
    file = code.co_filename
    start, end, left, right = next(islice(code.co_positions(), instruction // 2, None), (None, None, None, None))
    columns = None
    if start is not None and left is not None and right is not None:
        line = start
        text = _source_line(file, line)
        last = right if end == start else len(text.encode())
        columns = (_characters(text, left), _characters(text.rstrip(), last))
    return Place(shown_path(file), line, _source_line(file, line), columns)


def _of_expression(file: str, node: ast.expr) -> Place:
    text = _source_line(file, node.lineno)
    last = node.end_col_offset if node.end_lineno == node.lineno and node.end_col_offset else len(text.encode())
    return Place(shown_path(file), node.lineno, text, (_characters(text, node.col_offset), _characters(text, last)))


def _characters(text: str, num_bytes: int) -> int:
    """Returns how many characters a number of UTF-8 bytes are: Python counts columns in bytes."""
    return len(text.encode()[:num_bytes].decode(errors="replace"))


def _source_line(file: str, line: int) -> str:
    linecache.checkcache(file)
    return linecache.getline(file, line).rstrip("\n")


def _find_word(text: str, words: Iterable[str]) -> tuple[int, int] | None:
    body = text.partition(" #")[0]
    for word in words:
        found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", body) if word else None
        if found:
            return found.span()
    return None
