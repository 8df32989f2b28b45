"""Finds the user's line: of a setting, of a traceback, of a function or an attribute.

Which files are the user's, and the line of a running frame, are loop/user_lines.py's.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from trainwright.config import Origin
from trainwright.loop.user_lines import Place, UserFiles, characters, of_instruction, source_line
from trainwright.tracebacks import shown_path


def of_setting(origin: Origin | None, words: Iterable[str] = ()) -> Place | None:
    """Returns the line of a setting; the first of `words` that stands in it is the culprit."""
    if origin is None:
        return None
    if not origin.line:  # an override: the text is its own source
        text = origin.file.removeprefix("override ")
        return Place(origin.file, 0, text, _find_word(text, words))
    text = source_line(origin.file, origin.line)
    columns = _find_word(text, words)
    if columns is None and origin.line == 1:
        text = ""  # the file as a whole: a section that it lacks has no line
    return Place(origin.file, origin.line, text, columns)


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
    return of_instruction(found.tb_frame.f_code, found.tb_lasti, found.tb_lineno)


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


def _of_expression(file: str, node: ast.expr) -> Place:
    text = source_line(file, node.lineno)
    last = node.end_col_offset if node.end_lineno == node.lineno and node.end_col_offset else len(text.encode())
    return Place(shown_path(file), node.lineno, text, (characters(text, node.col_offset), characters(text, last)))


def _find_word(text: str, words: Iterable[str]) -> tuple[int, int] | None:
    body = text.partition(" #")[0]
    for word in words:
        found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", body) if word else None
        if found:
            return found.span()
    return None
