"""Config files in Python: running one, and taking its settings with the line of each.

A file defines `config` (a RunConfig or a dict), or a variable for each section. It and the files beside it that it
imports are run anew whenever it is read, as YAML is read anew; nothing stays on Python's path. Components hold the
words by which the registry finds their classes, so that nothing is built here (component.py).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from trainwright.config.component import type_of
from trainwright.config.frozen import plain_scalar
from trainwright.config.problems import describe, dotted
from trainwright.config.sections import Section
from trainwright.config.yaml_text import KeyPath, Node, Origin, map_strings, plant
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.tracebacks import shown_path

SECTIONS = (
    "name",
    "output_dir",
    "seed",
    "extends",
    "imports",
    "task",
    "model",
    "data",
    "trainer",
    "evaluation",
    "checkpoint",
    "hooks",
    "writers",
    "log",
    "runtime",
    "anomalies",
    "preemption",
    "watchdog",
)
"""The variables that are taken from a file without a `config`."""

_ESSENTIAL = {"task", "model", "data", "trainer"}  # a file without any of these says nothing of what is trained
_DEFAULT_NAME = "run"  # of a RunConfig that was given none: it gets the file's, as a YAML file's run does


def read_python(path: Path, source: str, shown: str) -> Node:
    """Run the file at `path`, whose text is `source`, and return its settings; `shown` is its name in messages."""
    where = Origin(shown, 1)
    values = vars(_run(path, shown))
    lines = _Lines(source)
    if "config" in values:
        found, line = values["config"], lines.of("config")
        if not isinstance(found, Mapping) and not _is_run_config(found):
            problem = f"config: must be a RunConfig or a dict, got {describe(found)}."
            raise ConfigError(problem, where=Origin(shown, line))
        places = dict(lines.below("config"))
    else:
        found = {name: values[name] for name in SECTIONS if _is_setting(values.get(name))}
        _reject_other_name(values, found, lines, shown)
        if not found:
            problem = "the file defines neither `config` nor a section such as `trainer`. Add config = {…}."
            raise ConfigError(problem, where=where)
        line, places = 1, {key: number for name in found for key, number in lines.below(name, (name,))}
    origins = {(): Origin(shown, line), **{key: Origin(shown, number) for key, number in places.items()}}
    settings = as_settings(found, origins)
    return map_strings(plant(settings, origins), lambda text: _relative(text, path.parent))


def _reject_other_name(values: Mapping[str, Any], found: Mapping[str, Any], lines: _Lines, shown: str) -> None:
    """Rejects settings in a variable of another name than `config`, where nothing else says what a run is."""
    if found.keys() & _ESSENTIAL:
        return
    for name, value in values.items():
        is_mapping = isinstance(value, Mapping) and bool(value.keys() & _ESSENTIAL)
        if not name.startswith("_") and (is_mapping or _is_run_config(value)):
            problem = f"{name}: holds settings, but the variable that is read is called config. Call it that."
            raise ConfigError(problem, where=Origin(shown, lines.of(name)))


def as_settings(found: Any, origins: Mapping[KeyPath, Origin]) -> dict[str, Any]:
    """Return a RunConfig or a mapping that Python code has made as plain settings.

    `origins` says where that code is, at (), and which lines of it hold single settings. Of a RunConfig the project's
    folder is kept, unless it is only the current one.
    """
    if not _is_run_config(found):
        return _plain(found, (), origins)  # type: ignore[no-any-return]  # a mapping gives a dict
    settings: dict[str, Any] = found.to_dict()
    if settings["name"] == _DEFAULT_NAME:
        del settings["name"]
    return settings if found.project_dir == Path.cwd() else {**settings, "project_dir": str(found.project_dir)}


def _is_run_config(found: Any) -> bool:
    return isinstance(found, Section) and hasattr(found, "project_dir")  # its own file imports this one


def _is_setting(value: Any) -> bool:
    return value is not None and not isinstance(value, ModuleType)


def _plain(value: Any, path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Any:
    """Return a value as YAML would hold it; a class or function may stand as a `type`."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            problem = f"a key must be text, got {wrong!r}. Use {str(wrong)!r}."
            raise ConfigError(f"{dotted(path)}: {problem}" if path else problem, where=_nearest(path, origins))
        return {
            key: type_of(item) if key == "type" and callable(item) else _plain(item, (*path, key), origins)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*path, str(index)), origins) for index, item in enumerate(value)]
    if isinstance(value, Section):
        return _plain(value.to_dict(), path, origins)
    plain = plain_scalar(value)
    if value is not None and plain is None:
        problem = f"a {type(value).__name__} cannot be saved as YAML: {value!r}."
        advice = "Write a class or function as Component(…), and else text, numbers, lists or mappings."
        raise ConfigError(f"{dotted(path)}: {problem} {advice}", where=_nearest(path, origins))
    return plain


def _nearest(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Origin | None:
    """Return where a setting is written, or the nearest one above it."""
    return next((origins[path[:end]] for end in range(len(path), -1, -1) if path[:end] in origins), None)


def _relative(text: str, folder: Path) -> str:
    """Return a component of a file below the config's folder as a path from there: the folder may be moved."""
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not Path(file).is_relative_to(folder):
        return text
    return f"{Path(file).relative_to(folder).as_posix()}:{name}"


def _run(path: Path, shown: str) -> ModuleType:
    """Run the file as a module of a package that is its folder."""
    package = f"trainwright_project_{hashlib.sha256(str(path.parent.resolve()).encode()).hexdigest()[:8]}"
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        del sys.modules[name]
    sys.modules[package] = folder_package(package, path.parent)
    name = f"{package}.{path.stem}"
    loader = _Uncached(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # a loader was given
    module = module_from_spec(spec)
    # The registry takes classes from here rather than run the file once more.
    sys.modules[name] = module
    importlib.invalidate_caches()
    try:
        with files_beside(path.parent, package):
            loader.exec_module(module)
    except TrainwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise _explained(error, path, shown) from error
    return module


class _Uncached(SourceFileLoader):
    """Compiles the file as it is now: bytecode is compared by seconds, and a config may change twice in one."""

    def get_code(self, fullname: str) -> Any:
        """Return the code of the file."""
        return self.source_to_code(self.get_data(self.path), self.path)


def folder_package(name: str, folder: Path) -> ModuleType:
    """Return a package whose modules are the files of `folder`."""
    package = ModuleType(name, f"The files in {folder}.")
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    package.__spec__.submodule_search_locations = [str(folder)]
    package.__path__ = [str(folder)]
    return package


def _explained(error: BaseException, path: Path, shown: str) -> ConfigError:
    if isinstance(error, SyntaxError):
        file = shown if error.filename == str(path) else shown_path(error.filename or shown)
        return ConfigError(f"cannot be read as Python: {error.msg}.", where=Origin(file, error.lineno or 1))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(path.parent)]
    text = f"running it failed: {type(error).__name__}: {error}".rstrip(".")
    last = own[-1] if own else None
    file = shown if last is None or last.filename == str(path) else shown_path(last.filename)
    return ConfigError(f"{text}.", where=Origin(file, 1 if last is None else last.lineno or 1))


@contextmanager
def files_beside(folder: Path, package: str) -> Iterator[None]:
    """Let `import base` find base.py in the folder, as a script there would; afterwards nothing of it is left."""
    beside = {file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/__init__.py")}
    beside -= sys.stdlib_module_names
    # A folder without __init__.py, such as datasets/, must not hide an installed package: it is looked at last.
    others = {each.name for each in folder.iterdir() if each.is_dir()} - beside - sys.stdlib_module_names
    left = {name for name in others if name in sys.modules and not _would_be_found(name)}
    strange = {name for name in beside | left if name in sys.modules and not _is_in(name, folder)}
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in strange}
    found: list[str] = []
    first, last = _Finder(package, beside, found), _Finder(package, others, found)
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    try:
        yield
    finally:
        sys.meta_path.remove(first)
        sys.meta_path.remove(last)
        for name in found:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def _is_in(name: str, folder: Path) -> bool:
    """Has the program itself imported this very file? Then there is one module of it, not two."""
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)


def _would_be_found(name: str) -> bool:
    """Does Python's path still lead to a loaded module, if it ever did? Else a run in another folder has left it."""
    finders = (getattr(each, "find_spec", None) for each in sys.meta_path)
    specs = (find(name, None) for find in finders if find is not None)
    found = next((spec for spec in specs if spec is not None), None)
    loaded = getattr(sys.modules[name], "__spec__", None)
    if loaded is None:
        return True  # a program has made it, and nothing else can stand for it
    return found is not None and bool(found.origin == loaded.origin)


class _Finder(MetaPathFinder):
    """Finds top-level names, and what is below them, in the package that a config's folder is."""

    def __init__(self, package: str, names: set[str], found: list[str]) -> None:
        self._package = package
        self._names = names
        self._found = found  # by this finder or the other one

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import `fullname`, if its first part is a file or folder beside the config."""
        first = fullname.partition(".")[0]
        if first not in self._names and (first == fullname or first not in self._found):
            return None
        self._found.append(fullname)
        return ModuleSpec(fullname, _Same(f"{self._package}.{fullname}"))


class _Same(Loader):
    """Gives a module a second name for a while."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give it back its own spec, which Python has just replaced; it has been run."""
        module.__spec__ = self._spec


class _Lines:
    """Where a Python file writes what its variables hold, as far as its text shows it."""

    def __init__(self, source: str) -> None:
        self._assigned: dict[str, tuple[int, ast.expr]] = {}
        for node in ast.parse(source).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(value, ast.expr):
                    self._assigned[target.id] = (node.lineno, value)

    def of(self, name: str) -> int:
        """Return the line on which a variable is assigned; 1 where it is imported."""
        return self._assigned[name][0] if name in self._assigned else 1

    def below(self, name: str, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
        """Yield the path and the line of each setting in a variable."""
        if name in self._assigned:
            line, value = self._assigned[name]
            yield path, line
            yield from self._within(value, path, (name,))

    def _within(self, node: ast.expr, path: KeyPath, open_names: tuple[str, ...]) -> Iterator[tuple[KeyPath, int]]:
        if isinstance(node, ast.Name):
            if node.id in self._assigned and node.id not in open_names:
                yield from self._within(self._assigned[node.id][1], path, (*open_names, node.id))
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:  # **base
                    yield from self._within(value, path, open_names)
                elif isinstance(key, ast.Constant):
                    yield from self._entry(key.value, value, key.lineno, path, open_names)
        elif isinstance(node, ast.Call):  # Component(Net, width=3), dict(a=1), RunConfig.from_dict({…})
            for argument in node.args:
                yield from self._within(argument, path, open_names)
            for keyword in node.keywords:
                if keyword.arg is not None:
                    yield from self._entry(keyword.arg, keyword.value, keyword.lineno, path, open_names)
        elif isinstance(node, ast.List | ast.Tuple):
            for index, value in enumerate(node.elts):
                yield from self._entry(str(index), value, value.lineno, path, open_names)

    def _entry(
        self, key: Any, value: ast.expr, line: int, path: KeyPath, open_names: tuple[str, ...]
    ) -> Iterator[tuple[KeyPath, int]]:
        yield (*path, key), line
        yield from self._within(value, (*path, key), open_names)
