"""Config files in Python: executes one and returns its settings with the line of each.

A file defines `config` (a RunConfig or a dict), or a variable for each section. The file, and the modules in its folder
that it imports, are executed each time it is read; sys.path does not change. Nothing is built here: components contain
the names by which the registry finds their classes (component.py).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from trainwright.config.component import type_of
from trainwright.config.frozen import plain_scalar
from trainwright.config.interpolation import escape_plain
from trainwright.config.problems import Problem, describe, raise_all
from trainwright.config.sections import Section
from trainwright.config.yaml_text import (
    MAX_DEPTH,
    TOO_DEEP,
    KeyPath,
    Node,
    Origin,
    map_strings,
    nearest_origin,
    to_tree,
)
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.tracebacks import shown_path, user_location

_ESSENTIAL = {"task", "model", "data", "trainer"}  # a file without any of these does not define a run
_DEFAULT_NAME = "run"  # a RunConfig with this default is named after the file, as for YAML


def read_python(path: Path, source: str, shown: str) -> tuple[Node, bool]:
    """Execute the file at `path`, whose text is `source`, and return its settings; `shown` is its name in messages.

    Also return whether they come from an untrusted run folder that the file has loaded.
    """
    from trainwright.config.schema import RunConfig  # it imports this file

    values = vars(_run(path, shown))
    lines = _Lines(source)
    if "config" in values:
        found: Any = values["config"]
        if not isinstance(found, Mapping | RunConfig):
            problem = f"config: must be a RunConfig or a dict, got {describe(found)}."
            raise ConfigError(problem, where=Origin(shown, lines.of("config")))
        numbers = {(): lines.of("config"), **dict(lines.below("config"))}
    else:
        given = {name: values.get(name) for name in (*RunConfig.model_fields, "extends")}
        found = {name: each for name, each in given.items() if each is not None and not isinstance(each, ModuleType)}
        _reject_other_name(values, found, lines, shown)
        if not found:
            problem = "the file defines neither `config` nor a section such as `trainer`. Add config = {…}."
            raise ConfigError(problem, where=Origin(shown, 1))
        numbers = {(): 1, **{key: number for name in found for key, number in lines.below(name, (name,))}}
    origins = {key: Origin(shown, number) for key, number in numbers.items()}
    settings = as_settings(found, origins)
    tree = map_strings(to_tree(settings, origins), lambda text: _relative(text, path.parent))
    return tree, isinstance(found, RunConfig) and found.untrusted_file is not None


def _reject_other_name(values: Mapping[str, Any], found: Mapping[str, Any], lines: _Lines, shown: str) -> None:
    """Reject settings in a variable with another name than `config`, if the file does not define a run otherwise."""
    if found.keys() & _ESSENTIAL:
        return
    for name, value in values.items():
        is_config = isinstance(value, Section) and type(value).model_fields.keys() >= _ESSENTIAL
        is_mapping = isinstance(value, Mapping) and bool(value.keys() & _ESSENTIAL)
        if not name.startswith("_") and (is_mapping or is_config):
            problem = f"{name}: has settings, but only the variable config is read. Rename it to config."
            raise ConfigError(problem, where=Origin(shown, lines.of(name)))


def as_settings(found: Any, origins: Mapping[KeyPath, Origin]) -> dict[str, Any]:
    """Return a RunConfig or a mapping that Python code has created as plain settings.

    `origins` has the location of the code at (), and the lines of single settings. The project folder of a RunConfig
    is kept unless it is the current folder.
    """
    if isinstance(found, Mapping):
        return as_yaml_value(found, (), origins)  # type: ignore[no-any-return]  # a dict, as for every mapping
    settings: dict[str, Any] = escape_plain(found.to_dict())  # its references are already resolved
    if settings["name"] == _DEFAULT_NAME:
        del settings["name"]
    return settings if found.project_dir == Path.cwd() else {**settings, "project_dir": str(found.project_dir)}


def as_yaml_value(value: Any, path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Any:
    """Return a Python value as plain dicts, lists and scalars; a class or function may be a `type`.

    A Node keeps its origin. A value that YAML cannot represent raises: a saved run must load back equal.
    """
    if len(path) > MAX_DEPTH:
        _reject(path[:1], TOO_DEEP, origins)
    if isinstance(value, Node):
        known = origins if value.origin is None else {**origins, path: value.origin}
        return Node(as_yaml_value(value.value, path, known), value.origin)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        for key in (key for key in value if not isinstance(key, str)):
            _reject(path, f"a key must be text, got {key!r}. Use {str(key)!r}.", origins)
        return {
            str(key): type_of(item) if key == "type" and callable(item) else as_yaml_value(item, (*path, key), origins)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [as_yaml_value(item, (*path, str(index)), origins) for index, item in enumerate(value)]
    if isinstance(value, Section):
        return as_yaml_value(value.to_dict(), path, origins)
    plain = plain_scalar(value)
    if value is not None and plain is None:
        advice = "Use text, numbers, lists or mappings, and Component(…) for a class or function."
        _reject(path, f"a {type(value).__name__} cannot be saved as YAML: {value!r}. {advice}", origins)
    return plain


def _reject(path: KeyPath, text: str, origins: Mapping[KeyPath, Origin]) -> NoReturn:
    raise_all([Problem(path, text)], lambda path: nearest_origin(origins, path))
    raise AssertionError  # raise_all has raised


def _relative(text: str, folder: Path) -> str:
    """Return `file.py:Name` with a path relative to the config's folder, so that the folder can be moved."""
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not Path(file).is_relative_to(folder):
        return text
    return f"{Path(file).relative_to(folder).as_posix()}:{name}"


def _run(path: Path, shown: str) -> ModuleType:
    """Execute the file as a module of a package that represents its folder."""
    package = f"trainwright_project_{hashlib.sha256(str(path.parent.resolve()).encode()).hexdigest()[:8]}"
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        del sys.modules[name]
    sys.modules[package] = folder_package(package, path.parent)
    name = f"{package}.{path.stem}"
    loader = _Uncached(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # a loader was given
    module = module_from_spec(spec)
    # The registry finds classes here instead of executing the file again.
    sys.modules[name] = module
    importlib.invalidate_caches()
    try:
        with folder_modules(path.parent, package):
            loader.exec_module(module)
    except TrainwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise _explained(error, path, shown) from error
    return module


class _Uncached(SourceFileLoader):
    """Ignores cached bytecode, because its timestamp has a resolution of one second, in which a config may change
    twice."""

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
    text = f"running it failed: {type(error).__name__}: {error}".rstrip(".")
    location = user_location(error)
    return ConfigError(f"{text}.", where=Origin(shown, 1) if location is None else shown_path(location))


@contextmanager
def folder_modules(folder: Path, package: str) -> Iterator[None]:
    """Let `import base` find base.py in the folder, as for a script there; remove these modules afterwards."""
    modules = {file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/__init__.py")}
    modules -= sys.stdlib_module_names
    # A folder without __init__.py, such as datasets/, must not hide an installed package, so it is searched last.
    others = {each.name for each in folder.iterdir() if each.is_dir()} - modules - sys.stdlib_module_names
    stale = {name for name in others if name in sys.modules and not _would_be_found(name)}
    foreign = {name for name in modules | stale if name in sys.modules and not _is_in(name, folder)}
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in foreign}
    found: list[str] = []
    first, last = _Finder(package, modules, found), _Finder(package, others, found)
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
    """Return True if the program has imported this module from the folder; it is then used without executing it
    again."""
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)


def _would_be_found(name: str) -> bool:
    """Return False for a loaded module that remains from a config in another folder and that Python would not find."""
    finders = (getattr(each, "find_spec", None) for each in sys.meta_path)
    specs = (find(name, None) for find in finders if find is not None)
    found = next((spec for spec in specs if spec is not None), None)
    loaded = getattr(sys.modules[name], "__spec__", None)
    if loaded is None:
        return True  # created by a program, not imported
    return found is not None and bool(found.origin == loaded.origin)


class _Finder(MetaPathFinder):
    """Finds top-level modules and their submodules in the package that represents a config's folder."""

    def __init__(self, package: str, names: set[str], found: list[str]) -> None:
        self._package = package
        self._names = names
        self._found = found  # shared with the other finder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of `fullname` if its first component is a file or folder next to the config."""
        first = fullname.partition(".")[0]
        if first not in self._names and (first == fullname or first not in self._found):
            return None
        self._found.append(fullname)
        return ModuleSpec(fullname, _Alias(f"{self._package}.{fullname}"))


class _Alias(Loader):
    """Gives a module a second name temporarily."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its first name."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore its spec, which Python has replaced; the module is already executed."""
        module.__spec__ = self._spec


class _Lines:
    """The lines on which a Python file assigns its variables and their settings."""

    def __init__(self, source: str) -> None:
        self._assigned: dict[str, tuple[int, ast.expr]] = {}
        for node in ast.parse(source).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(value, ast.expr):
                    self._assigned[target.id] = (node.lineno, value)

    def of(self, name: str) -> int:
        """Return the line on which a variable is assigned; 1 if it is imported."""
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
