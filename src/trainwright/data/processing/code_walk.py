"""What a function or a class does, as a digest: a walk through the code that runs and all that it uses.

Code counts as it runs, not as its text: with it count its defaults, its closure, and the globals, functions and classes
of the user's own files that it uses, and in turn what those use. Comments and places do not count. Of a library's
functions only the name counts. Of the user's files that are imported inside of a function, the text counts.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import importlib.util
import json
import logging
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(Ellipsis))
_NOT_MEMBERS = frozenset(
    {"__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl"}
)
# The places of attributes in classes that are written in C, and of __slots__: their names say all.
_DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)


def digest_of(value: Any) -> str:
    """Returns a digest of a value, which changes with the code that it uses of the user's files."""
    return _Walk().digest_of(value)


class _Walk:
    """Goes through what a value is made of and hashes it; an object that was met before counts by its turn."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is an object's own only while it lives

    def digest_of(self, value: Any) -> str:
        """Returns the digest of one value."""
        self._add(value)
        return self._hash.hexdigest()

    def _say(self, *words: object) -> None:
        self._hash.update("\0".join(map(str, words)).encode("utf-8", "surrogatepass") + b"\1")

    def _add(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._say(type(value).__name__, repr(value))
            return
        if id(value) in self._seen:
            self._say("again", self._seen[id(value)])
            return
        # Whether two equal constants are one object depends on how the module was loaded, so those count in full.
        if not isinstance(value, (tuple, frozenset, types.CodeType)):
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
        if not (self._add_code(value) or self._add_container(value)):
            self._add_object(value)

    def _add_code(self, value: Any) -> bool:
        if isinstance(value, functools.partial):
            self._say("partial")
            for part in (value.func, value.args, value.keywords):
                self._add(part)
        elif isinstance(value, types.MethodType):
            self._say("method")
            self._add(value.__func__)
            self._add(value.__self__)
        elif isinstance(value, (types.FunctionType, type)):
            # The function that was asked for counts in full wherever it stands; what it uses, if it is the user's.
            if len(self._seen) > 1 and own_file(value) is None:
                self._say("of a library", value.__module__, value.__qualname__)
            elif isinstance(value, type):
                self._add_class(value)
            else:
                self._add_function(value)
        elif isinstance(value, types.CodeType):
            self._add_code_object(value)
        elif isinstance(value, types.ModuleType):
            # What is used of an own one counts by itself, under whatever name the file was loaded.
            self._say("module", value.__name__ if own_file(value) is None else "")
        elif isinstance(value, types.BuiltinFunctionType):
            self._say("built-in", value.__module__, value.__qualname__)
            if not isinstance(value.__self__, (types.ModuleType, type(None))):
                self._add(value.__self__)  # `words.append`: what it is bound to
        elif hasattr(value, "__wrapped__"):  # functools.lru_cache and the like
            self._say("wrapped", type(value).__name__)
            self._add(value.__wrapped__)
        else:
            return False
        return True

    def _add_function(self, function: types.FunctionType) -> None:
        self._say("function")
        self._add(function.__code__)
        self._add(function.__defaults__)
        self._add(function.__kwdefaults__)
        code = function.__code__
        # What the code itself sets (`global tokenizer`) it has made: a trace of its use, not a thing that it is given.
        made = set(_names_with(code, "STORE_GLOBAL", "STORE_DEREF"))
        attributes = sorted(set(_names_in(code)))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._add_used(None if name in made else cell.cell_contents, attributes)
            except ValueError:
                self._say("empty cell")  # a recursive inner function before its own definition
        for name in sorted(set(_names_with(code, "LOAD_GLOBAL", "LOAD_NAME")) - made):
            if name in function.__globals__:
                self._say("global", name)
                self._add_used(function.__globals__[name], attributes)
        for file in _files_imported_by(function):
            self._say("imported inside", hashlib.sha256(Path(file).read_bytes()).hexdigest())

    def _add_used(self, value: Any, attributes: Sequence[str], *, through: frozenset[int] = frozenset()) -> None:
        """Adds a value that code uses, and of an own module the attributes that the code may mean.

        `pkg.text.clean(…)` is three names, and each may be a module of its own.
        """
        self._add(value)
        if not isinstance(value, types.ModuleType) or id(value) in through or own_file(value) is None:
            return
        for attribute in attributes:
            if attribute in vars(value):
                self._say("attribute", attribute)
                self._add_used(vars(value)[attribute], attributes, through=through | {id(value)})

    def _add_code_object(self, code: types.CodeType) -> None:
        self._say("code", code.co_code.hex(), code.co_flags, code.co_argcount, code.co_kwonlyargcount)
        for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_consts):
            for item in part:
                self._add(item)
            self._say("end")
        self._say(code.co_exceptiontable.hex())

    def _add_class(self, owner: type) -> None:
        self._say("class", owner.__qualname__)
        for base in owner.__bases__:
            self._add(base)
        for name, member in sorted(vars(owner).items()):
            if name in _NOT_MEMBERS:
                continue
            self._say("member", name)
            if isinstance(member, (staticmethod, classmethod)):
                self._add(member.__func__)
            elif isinstance(member, property):
                self._add([member.fget, member.fset, member.fdel])
            elif isinstance(member, functools.cached_property):
                self._add(member.func)
            elif isinstance(member, _DESCRIPTORS):
                self._say("descriptor", member.__name__)
            else:
                self._add(member)

    def _add_container(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            self._say(type(value).__name__, len(value))
            for item in value:
                self._add(item)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._say("dict", len(value))
            for key, item in value.items():
                self._add(key)
                self._add(item)
        elif isinstance(value, (set, frozenset)):
            # The order of a set of texts differs from process to process.
            self._say("set", *sorted(digest_of(item) for item in value))
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            self._say("tensor", value.dtype, tuple(value.shape))
            self._hash.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
            self._say("array", value.dtype, value.shape)
            self._hash.update(np.ascontiguousarray(value).tobytes())
        else:
            return False
        return True

    def _add_object(self, value: Any) -> None:
        """Adds an object by its class and what it would tell a copy of itself, or else by its attributes.

        A lock or an open file tells nothing at all.
        """
        is_own = own_file(type(value)) is not None
        self._say("object", "" if is_own else type(value).__module__, type(value).__qualname__)
        try:
            reduce = copyreg.dispatch_table.get(type(value))  # regular expressions and the like
            parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:  # it forbids copies of itself
            if is_own:
                self._add(type(value))
            state = getattr(value, "__dict__", None)
            if not isinstance(state, dict):
                name = type(value).__qualname__
                logger.warning("The function uses a %s, of which no change would be noticed: rebuild after one.", name)
            self._say("opaque")
            self._add(state)
            return
        if type(value).__module__.startswith("transformers."):
            parts = _without_traces_of_use(parts)
        for part in parts if isinstance(parts, tuple) else (parts,):
            # The last two of the five are iterators over the items of lists and dicts.
            self._add(list(part) if isinstance(part, Iterator) else part)


def _without_traces_of_use(parts: Any) -> Any:
    """Takes from a tokenizer of transformers what its calls leave in it: how the last text was cut and padded.

    Or else the key of a second dataset would depend on whether the first one was processed or found.
    """
    if not isinstance(parts, tuple) or len(parts) < 3 or not isinstance(parts[2], dict):
        return parts
    state = {name: item for name, item in parts[2].items() if name != "deprecation_warnings"}
    if hasattr(state.get("_tokenizer"), "to_str"):
        state["_tokenizer"] = {**json.loads(state["_tokenizer"].to_str()), "truncation": None, "padding": None}
    return (*parts[:2], state)


def _names_with(code: types.CodeType, *operations: str) -> Iterator[str]:
    """Yields the names in the instructions of these kinds, inner functions' included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in operations:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_with(constant, *operations)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[2])}
    return tuple(str(Path(path).resolve()) + os.sep for path in paths)


def own_file(value: Any) -> str | None:
    """Returns the file of a function, class or module that is the user's own; None for a library's and for ours."""
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    code = getattr(value, "__code__", None)
    if file is None and isinstance(module, types.ModuleType) and getattr(module, "__path__", None):
        # A folder of modules without an __init__.py.
        folder = str(Path(next(iter(module.__path__))).resolve())
        return None if (folder + os.sep).startswith(_library_folders()) else folder
    if file is None and module is None and code is not None and Path(code.co_filename).is_file():
        file = code.co_filename  # a module that is no longer loaded
    if file is None:
        # What was typed into a notebook or a console has no file, but its code is there all the same.
        return None if code is None or module is not sys.modules.get("__main__") else str(code.co_filename)
    resolved = str(Path(file).resolve())
    if resolved.startswith(_library_folders()) or not resolved.endswith(".py"):
        return None
    return resolved


def _files_imported_by(function: types.FunctionType) -> list[str]:
    """Returns the user's own files that a function imports inside its body, loaded already or not."""
    names: set[str] = set()
    for level, listed, name in _imports_in(function.__code__):
        package = function.__globals__.get("__package__") or ""
        try:
            whole = importlib.util.resolve_name("." * level + name, package)
        except ImportError:
            continue  # it will fail when it is called
        names |= {whole, *(f"{whole}.{each}" for each in listed)}
    files = {_file_of_module(name) for name in names}
    return sorted(file for file in files if file is not None)


def _file_of_module(name: str) -> str | None:
    top = name.partition(".")[0]
    try:
        # Of a library not even the place is looked for below its top, which would import it.
        spec = importlib.util.find_spec(top)
        if spec is None or not any(map(_is_own_place, [spec.origin, *(spec.submodule_search_locations or ())])):
            return None
        spec = spec if name == top else importlib.util.find_spec(name)
    except Exception:  # a name inside of a module, or a package that fails
        return None
    origin = None if spec is None else spec.origin
    return origin if _is_own_place(origin) and str(origin).endswith(".py") else None


def _is_own_place(path: str | None) -> bool:
    # "built-in" and "frozen" are no places.
    return path is not None and os.sep in path and not f"{Path(path).resolve()}{os.sep}".startswith(_library_folders())


def _imports_in(code: types.CodeType) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """Yields level, listed names and module of each import, inner functions' included."""
    constants: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level, listed = constants[-2:]
            yield level, listed or (), instruction.argval
        if instruction.opname.startswith("LOAD_"):  # EXTENDED_ARG may stand between
            constants.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports_in(constant)
