"""Finds the line of user source that changes a Python value during a step, for graph mode's error about it.

The value is known by name only, so the first line that binds that name, or changes what it holds, is reported.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import SourceLocation, source_line

_CHANGING = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popleft",
        "remove",
        "setdefault",
        "update",
    ]
)


def line_of_change(name: str, kinds: Iterable[type]) -> SourceLocation | None:
    """Returns where a function in the files of these classes changes what is called `name`; None: it is not found.

    `name` is a fingerprint's, such as Net.count, Net.seen[3] or mine.calls.
    """
    words = re.sub(r"\[[^\]]*\]$", "", name).split(".")
    files = list(dict.fromkeys(file for kind in kinds if (file := _file_of(kind)) is not None))
    for word in reversed(words[1:]):  # an entry of a dict is changed through the dict's own name
        for file in files:
            line = min(_changes(_parsed(file), word), default=None)
            if line is not None:
                return SourceLocation(shown_path(file), line, source_line(file, line))
    return None


def _file_of(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except TypeError:
        return None


def _parsed(file: str) -> ast.AST:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _changes(tree: ast.AST, word: str) -> Iterator[int]:
    """Yields the lines within functions, but constructors, that bind the word or change what it holds."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
            continue
        for node in ast.walk(function):
            if any(_is_called(target, word) for target in _changed_by(node)):
                yield node.lineno  # type: ignore[attr-defined]  # statements and calls have lines


def _changed_by(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
        return [node.func.value]
    return []


def _is_called(target: ast.expr, word: str) -> bool:
    while isinstance(target, ast.Subscript):
        target = target.value
    return (
        target.attr == word if isinstance(target, ast.Attribute) else isinstance(target, ast.Name) and target.id == word
    )
