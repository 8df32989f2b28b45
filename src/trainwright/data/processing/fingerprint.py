"""The key of the processed-data cache: a function's source, its arguments, and what the dataset holds.

A function is known by its name and source text, and by the values bound to it (a partial's arguments, defaults, a
closure). What it calls is not followed: `version` stands for that. A dataset is known by its component in the config:
the source of the class or function that it names, its arguments, and the files among them. Files are known by size and
time of change, not by their content, which may be terabytes; those behind a URL by what the server tells.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import inspect
import json
import os
import site
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from trainwright import registry
from trainwright.data.processing.build_once import CACHE_TAG
from trainwright.data.sources.locations import remote_version
from trainwright.errors import ConfigError

# Names no input: where something is cached does not change what it is, and the folder changes with every use.
_NOT_INPUT = frozenset({"cache_dir", "type"})
_FILE_URL, _HUB_URL = "file://", "hf://"

Version: TypeAlias = str | int | float | None
"""What a user changes when something has changed that the key does not see."""


def fingerprint_function(function: Callable[..., Any], *, version: Version = None, where: object | None = None) -> str:
    """Returns a digest of a function's name, its source and the values bound to it.

    Raises ConfigError, located at `where`, if the source cannot be read or a bound value has no text, unless a
    `version` stands for them.
    """
    code, bound = _unbind(function)
    name = name_of(function)
    source = _source_of(code)
    if source is None and version is None:
        raise ConfigError(
            f"The source of {name} cannot be read, so the cache key cannot include it. Define the function in a file, "
            "or set `version` and change it whenever the function changes.",
            where=where,
        )
    values = _Reading((), asks_servers=False, accepts_objects=version is not None, where=where)
    described = [(key, values.describe(value, name=key, label=f"{name}: {key}")) for key, value in bound]
    return _digest([_full_name(code), source, described])


def canonical_arguments(arguments: Mapping[str, Any], label: str, *, version: Version = None) -> str:
    """Returns arguments as one text, with the size and time of each file that they name.

    Refuses what JSON has no words for, unless a `version` stands for it: two such values could not be told apart.
    """
    reading = _Reading(_folders(registry.project_folder(), Path.cwd()), accepts_objects=version is not None)
    described = {
        name: reading.describe(value, name=name, label=f"{label}: the argument {name}")
        for name, value in arguments.items()
    }
    return json.dumps(described, sort_keys=True, ensure_ascii=False)


def describe_input(
    component: Mapping[str, Any],
    dataset: Any,
    *,
    target: Callable[..., Any] | None = None,
    project_dir: str | os.PathLike[str] | None = None,
    run_seed: int | None = None,
    version: Version = None,
) -> str:
    """Returns one text that changes when a component of the config gives other samples.

    It holds the arguments, with size and time of change of the files, folders and globs among them, and the source of
    the user's own class or function: `target`, which the component names, and the class of the dataset that came of it.
    Relative paths start at `project_dir` for a target that takes it; others may also mean the working directory, so
    that both count. `run_seed` counts for a target that takes it, and for an unknown one.
    """
    names = _parameter_names(target)
    project = registry.project_folder() if project_dir is None else Path(project_dir)
    folders = _folders(project) if project_dir is not None and "project_dir" in names else _folders(project, Path.cwd())
    tells_itself = hasattr(type(dataset), "fingerprint") or "fingerprint" in getattr(dataset, "__dict__", ())
    reading = _Reading(folders, asks_servers=not tells_itself, accepts_objects=tells_itself or version is not None)
    facts: dict[str, Any] = {
        "component": {name: reading.describe(value, name=name, label=name) for name, value in component.items()}
    }
    for role, code in (("target", target), ("class", type(dataset))):
        if code is not None and not _is_library(inspect.unwrap(code)):
            facts[role] = _describe_code(inspect.unwrap(code))
    if run_seed is not None and "run_seed" not in component and (target is None or "run_seed" in names):
        facts["run_seed"] = run_seed
    return json.dumps(facts, sort_keys=True, ensure_ascii=False)


def fingerprint_source(source: Any) -> str | None:
    """Returns what the dataset says itself of its content: `fingerprint`, an attribute or a method, if it has one."""
    found = getattr(source, "fingerprint", None)
    found = found() if callable(found) else found
    return None if found is None else str(found)


def name_of(function: Callable[..., Any]) -> str:
    """Returns a function's name for people: of a partial that of the function inside."""
    inner = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "lambda" if name == "<lambda>" else str(name)


def _unbind(function: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """Returns the function or class whose source says what a callable does, and the values that it holds."""
    bound: list[tuple[str, Any]] = []
    while True:
        bound += _held_by(function)
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):  # functools.wraps and functools.lru_cache
            function = function.__wrapped__
        else:
            break
    is_instance = not inspect.isclass(function) and not inspect.isroutine(function)
    return type(function) if is_instance else function, bound


def _held_by(function: Any) -> list[tuple[str, Any]]:
    """Returns what a callable holds itself: arguments of a partial, a closure and defaults, or attributes."""
    if isinstance(function, functools.partial):
        keywords = [(f"its argument {name}", value) for name, value in function.keywords.items()]
        return [("its positional arguments", function.args), *keywords]
    if isinstance(function, types.FunctionType):
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
        defaults = [(f"the default of {each.name}", each.default) for each in parameters]
        variables = inspect.getclosurevars(function).nonlocals
        return [
            *(pair for pair in defaults if pair[1] is not inspect.Parameter.empty),
            *((f"the variable {name}", value) for name, value in variables.items()),
        ]
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    if inspect.isclass(owner):
        return [("its class", owner)]
    if inspect.isroutine(owner) or hasattr(owner, "__wrapped__"):
        return []
    attributes = getattr(owner, "__dict__", {"itself": owner})  # of an object that does not tell, itself
    return [("its class", type(owner)), *((f"its attribute {name}", value) for name, value in attributes.items())]


def _full_name(code: Any) -> str:
    return f"{code.__module__}:{code.__qualname__}"


def _is_code(value: Any) -> bool:
    """Is this a class or a plain function? A method or a partial holds values, too."""
    if inspect.isbuiltin(value):
        return value.__self__ is None or inspect.ismodule(value.__self__)
    return inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value) if callable(value) else value)


def _describe_code(code: Any) -> dict[str, Any]:
    """Returns the name of a function or class, and its source if it is the user's own."""
    return {"code": _full_name(code), "source": None if _is_library(code) else _source_of(code)}


def _source_of(code: Any) -> str | None:
    """Returns the source text of a function or class; None where Python cannot read it."""
    try:
        return _lambda_source(code) if code.__name__ == "<lambda>" else inspect.getsource(code)
    except (OSError, TypeError):
        return None


def _lambda_source(function: Any) -> str:
    """Returns all lines of a lambda, of which `inspect.getsource` may cut off the last ones.

    With them it returns where the body stands, since one line may hold several lambdas.
    """
    lines, first = inspect.findsource(function)
    places = [place for place in function.__code__.co_positions() if None not in place]
    last = max((end for _, end, _, _ in places if end is not None), default=first + 1)
    columns = sorted({(start, end) for _, _, start, end in places})
    return f"{''.join(lines[first:last])}{columns}"


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[2])}
    return tuple(str(Path(path).resolve()) + os.sep for path in paths)


def _is_library(code: Any) -> bool:
    """Is this a library's function or class, or ours, or one without a file? Its name alone tells it then."""
    try:
        file = inspect.getsourcefile(code)
    except TypeError:
        return True
    return file is None or str(Path(file).resolve()).startswith(_library_folders())


@dataclass(frozen=True)
class _Reading:
    """From the arguments of a component or a function to plain values, files with what is known of them."""

    folders: Sequence[Path]
    """Where a relative path may start; the files in all of them count."""
    asks_servers: bool = True
    accepts_objects: bool = False
    """Whether an object without a text is known by its class alone, since something else tells of its content."""
    where: object | None = None
    """Where the value is set, for errors."""

    def describe(self, value: Any, *, name: str, label: str) -> Any:
        """Returns a value as JSON has it; `name` is the argument's, `label` says where it stands, for errors."""
        if isinstance(value, (str, os.PathLike)):
            text = os.fspath(value)
            files = None if name in _NOT_INPUT else self._describe_path(text)
            return text if files is None else {"path": text, **files}
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, Mapping):
            return {str(key): self.describe(item, name=str(key), label=f"{label}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.describe(item, name=name, label=f"{label}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return sorted(json.dumps(self.describe(item, name=name, label=label)) for item in value)
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if _is_code(value):
            return _describe_code(inspect.unwrap(value))
        if self.accepts_objects:
            return {"object": _full_name(type(value))}
        raise ConfigError(
            f"{label} is of type {type(value).__name__}, which the cache key cannot describe. Use numbers, strings, "
            "lists and mappings, create the object inside the function, or set `version` and change it whenever the "
            "object changes.",
            where=self.where,
        )

    def _describe_path(self, text: str) -> dict[str, Any] | None:
        """Returns the number, size and a digest of the files that a text names; None if it names none."""
        text = text.removeprefix(_FILE_URL)
        if not text or "\0" in text or "\n" in text:
            return None
        if "://" in text:
            # The hub's datasets are known by the fingerprint of the library that reads them.
            version = remote_version(text) if self.asks_servers and not text.startswith(_HUB_URL) else None
            return None if version is None else {"files": len(version), "digest": _digest(version)}
        relative = Path.home() / text[2:] if text.startswith("~/") else Path(text)
        paths = dict.fromkeys(folder / relative for folder in self.folders)  # an absolute one is the same for each
        files = [facts for path in paths for root in _roots_of(path) for facts in _files_below(root)]
        if not files:
            return None
        return {"files": len(files), "bytes": sum(size for _, size, _ in files), "digest": _digest(files)}


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _folders(*folders: Path | None) -> list[Path]:
    return list(dict.fromkeys(folder.absolute() for folder in folders if folder is not None))


def _parameter_names(target: Callable[..., Any] | None) -> tuple[str, ...]:
    try:
        return () if target is None else tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a class that is written in C tells nothing
        return ()


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
