"""Detects edits of user code between two starts of a run, by a hash of a function or a class and the code that it uses.

The hash covers the source of the function, or of the methods of the class, and of user functions and classes that these
refer to by name (a loss function, a block of a model), recursively, and numbers outside of it that it reads.
Comments, docstrings, formatting, the values of other variables and code of installed packages do not count. A function
without source, defined by `exec`, and a lambda, whose source is a whole statement, are compared by their bytecode.
Imports no torch.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from trainwright.user_code.locations import is_user_file

_DIGITS = 12


def fingerprint(*targets: Any) -> str:
    """Returns a hash of the code of functions, classes or objects; for objects, of their class."""
    seen: set[int] = set()
    texts = [text for target in targets for text in _texts(target, seen)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:_DIGITS]


def is_users(target: Any) -> bool:
    """Returns True for a function or a class outside installed packages; one of a notebook or of `exec` counts."""
    functions = [target] if isinstance(target, FunctionType) else list(_functions_of(target))
    files = {each.__code__.co_filename for each in functions}
    named = {file for file in files if not file.startswith("<")}
    if named:
        return any(map(is_user_file, named))
    # Defined by `exec`, like the methods of a dataclass and of a namedtuple.
    module_file = getattr(sys.modules.get(target.__module__), "__file__", None)
    return bool(files) and (module_file is None or is_user_file(module_file))


def users_functions(value: Any) -> Iterator[FunctionType]:
    """Yields a user's function, or those that a function of this package, such as that of a hook, calls."""
    if isinstance(value, FunctionType):
        if is_users(value):
            yield value
        else:
            for each in _closure(value).values():
                yield from users_functions(each)


def _texts(target: Any, seen: set[int]) -> Iterator[str]:
    """Yields the code of a target and of all that it uses, each once."""
    while isinstance(target, functools.partial):
        yield from (repr(each) for each in target.args if _is_plain(each))
        yield from (f"{name}={each!r}" for name, each in sorted(target.keywords.items()) if _is_plain(each))
        target = target.func
    target = _plain_function(target)
    if not isinstance(target, FunctionType | type):
        target = type(target)
    for each in (target,) if isinstance(target, FunctionType) else target.__mro__:
        if id(each) in seen or not is_users(each):
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            yield _code_text(each)
            yield from (f"{name}={value!r}" for name, value in _constants(each))
            used: Iterable[Any] = _used_by(each)
        else:
            yield each.__name__
            used = _functions_of(each)
        for other in used:
            yield from _texts(other, seen)


def _plain_function(value: Any) -> Any:
    """Returns the function of a method, a static or class method, or a decorator that has `__wrapped__`."""
    value = getattr(value, "__func__", value)
    return inspect.unwrap(value) if hasattr(value, "__wrapped__") else value


def _functions_of(kind: type) -> Iterator[FunctionType]:
    """Yields the methods that a class itself defines, including those of properties."""
    for value in vars(kind).values():
        accessors = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
        for function in map(_plain_function, accessors):
            if isinstance(function, FunctionType):
                yield function


def _code_text(function: FunctionType) -> str:
    """Returns the source of a function without comments, docstrings and formatting, or otherwise its bytecode."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return repr(_bytecode(function.__code__))
    definition = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return repr(_bytecode(function.__code__))
    for node in ast.walk(definition):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(definition)


def _bytecode(code: CodeType) -> tuple[Any, ...]:
    constants = tuple(
        _bytecode(each)
        if isinstance(each, CodeType)
        else sorted(map(repr, each))  # the order of a set differs between processes
        if isinstance(each, frozenset)
        else each
        for each in code.co_consts
    )
    return (code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)


def _used_by(function: FunctionType) -> Iterator[Any]:
    """Yields the user functions, classes and callable objects that a function refers to by name."""
    names = dict.fromkeys(_names(function.__code__))
    known = {**function.__globals__, **_closure(function)}
    for name in names:
        value = known.get(name)
        is_module = isinstance(value, ModuleType)  # losses.focal
        for each in (getattr(value, attribute, None) for attribute in names) if is_module else (value,):
            if callable(each):
                yield each


def _closure(function: FunctionType) -> dict[str, Any]:
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            continue  # assigned later
    return values


def _constants(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the numbers outside a function that it reads and does not assign, such as a temperature."""
    used = list(_instructions(function.__code__))
    assigned = {name for operation, name in used if operation in ("STORE_DEREF", "STORE_GLOBAL")}
    read = {name for operation, name in used if operation == "LOAD_GLOBAL"} & function.__globals__.keys()
    values = {**{name: function.__globals__[name] for name in read}, **_closure(function)}
    for name, value in sorted(values.items()):
        if isinstance(value, bool | int | float) and name not in assigned:
            yield name, value


def _instructions(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Yields the operations of a function and of those that it defines, each with its argument."""
    yield from ((each.opname, each.argval) for each in dis.get_instructions(code))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | type(None))
