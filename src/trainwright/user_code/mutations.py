"""Finds the line of user code that changes a Python value during a step, for the error of graph mode.

Only the name of the value is known, so the first line that assigns that name, or mutates its value, is reported.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator

from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import SourceLocation, parse_file, source_line

_MUTATING_METHODS = (
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert"),
    *("pop", "popleft", "remove", "setdefault", "update"),
)


def line_of_change(name: str, kinds: Iterable[type]) -> SourceLocation | None:
    """Returns the line in the files of these classes that changes the value `name`; None if none is found.

    `name` is the path of a fingerprint, such as Net.count, Net.seen[3] or mine.calls.
    """
    words = re.sub(r"\[[^\]]*\]$", "", name).split(".")
    files = list(dict.fromkeys(file for kind in kinds if (file := _file_of(kind)) is not None))
    for word in reversed(words[1:]):  # an entry of a dict is changed through the name of the dict
        for file in files:
            line = min(_changes(parse_file(file), word), default=None)
            if line is not None:
                return SourceLocation(shown_path(file), line, source_line(file, line))
    return None


def _file_of(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except TypeError:
        return None


def _changes(tree: ast.AST, word: str) -> Iterator[int]:
    """Yields the lines in functions other than constructors that assign the name or mutate its value."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
            continue
        for node in ast.walk(function):
            if any(_has_name(target, word) for target in _changed_by(node)):
                yield node.lineno  # type: ignore[attr-defined]  # statements and calls have lines


def _changed_by(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATING_METHODS:
        return [node.func.value]
    return []


def _has_name(target: ast.expr, word: str) -> bool:
    while isinstance(target, ast.Subscript):
        target = target.value
    return word == (target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", None))
