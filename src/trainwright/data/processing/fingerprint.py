"""What a function does and what a dataset holds, as a few hexadecimal digits: the key of the processed-data cache.

A function is known by the code that runs, not by its text: with it count its defaults, its closure, and the globals,
functions and classes of the user's own files that it uses, and in turn what those use. Comments and places do not
count. Of a library's functions only the name counts, and what a function imports inside its body is not followed.
Files are known by size and time of change, not by their content, which may be terabytes.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import glob
import hashlib
import inspect
import json
import logging
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright import registry
from trainwright.data.processing.build_once import CACHE_TAG
from trainwright.errors import ConfigError

logger = logging.getLogger(__name__)

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(Ellipsis))
# Names no input: where something is cached does not change what it is, and the folder changes with every use.
_NOT_INPUT = frozenset({"cache_dir", "type"})


def fingerprint_function(function: Callable[..., Any]) -> str:
    """Returns a digest of what a function does, which changes with the code that it uses of the user's files."""
    return _Walk().digest_of(function)


def canonical_arguments(arguments: Mapping[str, Any], label: str) -> str:
    """Returns arguments as one text, with the size and time of each local file that they name.

    Refuses what JSON has no words for: two such values could not be told apart.
    """
    described = {name: _describe(value, f"{label}: the argument {name}", name) for name, value in arguments.items()}
    return json.dumps(described, sort_keys=True, ensure_ascii=False)


def describe_input(component: Mapping[str, Any], dataset: Any) -> str:
    """Returns one text that changes when a component of the config gives other samples.

    It holds the type and the arguments, size and time of change of the local files, folders and globs among them,
    and for a user's own class the hash of its file.
    """

    def of_object(value: Any) -> Any:
        return {"object": _Walk().digest_of(value)}

    described = {name: _describe(value, name, name, of_object) for name, value in component.items()}
    file = _own_file(type(dataset))
    if file is not None:
        described["file of its class"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return json.dumps(described, sort_keys=True, ensure_ascii=False)


def fingerprint_source(source: Any) -> str | None:
    """Returns what the dataset says itself of its content: `fingerprint`, an attribute or a method, if it has one."""
    found = getattr(source, "fingerprint", None)
    found = found() if callable(found) else found
    return None if found is None else str(found)


def _describe(value: Any, label: str, name: str, of_object: Callable[[Any], Any] | None = None) -> Any:
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        files = None if name in _NOT_INPUT else describe_path(text)
        return text if files is None else {"path": text, **files}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _describe(item, f"{label}.{key}", str(key), of_object) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_describe(item, f"{label}[{place}]", name, of_object) for place, item in enumerate(value)]
    if of_object is not None:
        return of_object(value)
    raise ConfigError(
        f"{label} is a {type(value).__name__}, which has no text to know it by, so that the cache could not tell "
        "it from another. Use numbers, texts, lists and mappings, and make the object inside the function."
    )


def describe_path(text: str) -> dict[str, Any] | None:
    """Returns the number, size and a digest of the local files that a text names; None if it names none."""
    if not text or "\0" in text or "\n" in text or "://" in text:
        return None
    relative = Path.home() / text[2:] if text.startswith("~/") else Path(text)
    for base in (Path.cwd(), registry.project_folder()):
        roots = [] if base is None else _roots_of(base / relative)
        if roots:
            files = [facts for root in roots for facts in _files_below(root)]
            digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
            return {"files": len(files), "bytes": sum(size for _, size, _ in files), "digest": digest[:32]}
    return None


def _roots_of(path: Path) -> list[Path]:
    """Returns the file or folder, or what a glob finds."""
    if os.path.lexists(path):  # also says no to what is too long for a name
        return [path]
    if not glob.has_magic(str(path)):
        return []
    return [Path(found) for found in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207  # it is absolute


def _files_below(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, size and time of change of a file, or of all files in a folder, but for caches inside it."""
    if root.is_dir():
        for folder, folders, names in os.walk(root):
            if CACHE_TAG in names:
                folders.clear()
                continue
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                yield from _facts_of(path, path.relative_to(root).as_posix())
    else:
        yield from _facts_of(root, root.name)


def _facts_of(path: Path, name: str) -> Iterator[tuple[str, int, int]]:
    try:
        facts = path.stat()
    except OSError:
        return  # a dangling link, or removed since
    yield name, facts.st_size, facts.st_mtime_ns


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
            if len(self._seen) > 1 and _own_file(value) is None:
                self._say("of a library", value.__module__, value.__qualname__)
            elif isinstance(value, type):
                self._add_class(value)
            else:
                self._add_function(value)
        elif isinstance(value, types.CodeType):
            self._add_code_object(value)
        elif isinstance(value, types.ModuleType):
            # What is used of an own one counts by itself, under whatever name the file was loaded.
            self._say("module", value.__name__ if _own_file(value) is None else "")
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
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._add(None if name in made else cell.cell_contents)
            except ValueError:
                self._say("empty cell")  # a recursive inner function before its own definition
        attributes = sorted(set(_names_in(code)))
        for name in sorted(set(_names_with(code, "LOAD_GLOBAL", "LOAD_NAME")) - made):
            if name in function.__globals__:
                value = function.__globals__[name]
                self._say("global", name)
                self._add(value)
                if isinstance(value, types.ModuleType) and _own_file(value) is not None:
                    # `text.clean(…)`: the attributes of an own module that the code may mean.
                    for attribute in attributes:
                        if attribute in vars(value):
                            self._say("attribute", attribute)
                            self._add(vars(value)[attribute])

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
            if name in ("__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__"):
                continue
            self._say("member", name)
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if isinstance(member, property):
                self._add([member.fget, member.fset])
            elif isinstance(member, (*_PLAIN, types.FunctionType, type, list, tuple, dict, set, frozenset)):
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
            self._say("set", *sorted(_Walk().digest_of(item) for item in value))
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
        """Adds an object by its class and what it would tell a copy of itself; a lock or an open file tells nothing."""
        is_own = _own_file(type(value)) is not None
        self._say("object", "" if is_own else type(value).__module__, type(value).__qualname__)
        try:
            reduce = copyreg.dispatch_table.get(type(value))  # regular expressions and the like
            parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:
            name = type(value).__qualname__
            logger.warning("The function uses a %s, of which no change would be noticed: rebuild after one.", name)
            self._say("opaque")
            if is_own:
                self._add(type(value))
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
    paths |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
    return tuple(str(Path(path).resolve()) + os.sep for path in paths)


def _own_file(value: Any) -> str | None:
    """Returns the file of a function, class or module that is the user's own; None for a library's and for ours."""
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if file is None:
        code = getattr(value, "__code__", None)
        # What was typed into a notebook or a console has no file, but its code is there all the same.
        return None if code is None or module is not sys.modules.get("__main__") else str(code.co_filename)
    resolved = str(Path(file).resolve())
    if resolved.startswith(_library_folders()) or not resolved.endswith(".py"):
        return None
    return resolved


def name_of(function: Callable[..., Any]) -> str:
    """Returns a function's name for people: of a partial that of the function inside."""
    inner = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "lambda" if name == "<lambda>" else str(name)
