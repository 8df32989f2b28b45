"""Turns a component's `type` into a class: "adamw", "my_pkg.optim:Lion", "optimizers/lion.py:Lion", "lion.Lion"."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from trainwright.config import Component, Origin
from trainwright.config.frozen import thaw
from trainwright.config.problems import nearest
from trainwright.config.yaml_text import absolute
from trainwright.errors import ComponentError, TrainwrightError
from trainwright.registry.builtin import BUILT_INS, KIND_FOLDERS
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import is_user_file, location_of, parameters_of

PROJECT_PACKAGE = "trainwright_project"
"""The package whose folder is the project's: its files import each other relatively, without a sys.path entry."""

Target = TypeVar("Target", bound=Callable[..., Any])
OriginOf = Callable[[str], Origin | None]
"""Where a setting such as `trainer.optimizer.lr` was written: `RunConfig.origin`."""


class _Project(NamedTuple):
    modules: dict[str, ModuleType]
    registered: list[tuple[str, str, Callable[..., Any]]]


# Filled by @register when users' modules are imported; like sys.modules, it lives as long as the process.
_registered: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in KIND_FOLDERS}
# Projects that were left for another one in this process: their modules and what these registered, by folder.
_left_projects: dict[str, _Project] = {}


def register(kind: str, name: str) -> Callable[[Target], Target]:
    """Make a class or function known under a short name: `@register("optimizer", "lion")`."""
    _check_kind(kind)

    def decorate(target: Target) -> Target:
        taken: Any = _registered[kind].get(name) or BUILT_INS[kind].get(name)
        location = taken if isinstance(taken, str) or taken is None else _location_of(taken)
        if taken is not None and taken is not target and location not in (_reference(target), _location_of(target)):
            raise ComponentError(
                f'The {kind} "{name}" is registered already, by {location}; '
                f"{_location_of(target)} cannot take the name too. "
                "Choose another name."
            )
        _registered[kind][name] = target
        return target

    return decorate


def find(
    kind: str, type_name: str, *, project_dir: str | os.PathLike[str], where: object | None = None, label: str = ""
) -> Callable[..., Any]:
    """Return the class or function that `type_name` names; `where` and `label` say who asks, for the error."""
    _check_kind(kind)
    folder = absolute(project_dir)
    enter_project(folder)
    try:
        target = _find(kind, type_name, folder)
    except ComponentError as error:
        if error.where is not None or (where is None and not label):
            raise
        raise _labelled(error.problem, label and f"{label}.type", where) from error.__cause__
    if not callable(target):
        raise _labelled(f"{type_name} is a {type(target).__name__}, not a class or a function.", label, where)
    return target  # type: ignore[no-any-return]  # callable, as just checked


def project_folder() -> Path | None:
    """Return the folder of the project whose files are loaded, if any."""
    package = sys.modules.get(PROJECT_PACKAGE)
    return None if package is None else Path(next(iter(package.__path__)))


def import_modules(names: Iterable[str], *, project_dir: str | os.PathLike[str], where: object | None = None) -> None:
    """Import the modules that register components: from Python's path, or else from the project's folder."""
    folder = absolute(project_dir)
    enter_project(folder)
    for name in names:
        try:
            if name.endswith(".py"):
                _load_file(folder / name, folder)
            else:
                _import(name, folder)
        except ComponentError as error:
            raise _labelled(error.problem, "imports", where) from error.__cause__


def check_arguments(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    label: str,
    where: object | None = None,
    provided: Iterable[str] = (),
    origin_of: OriginOf | None = None,
) -> None:
    """Reject arguments that `target` does not take, or that it needs and nobody gives.

    `provided` names what the caller adds by itself, such as the parameters of an optimizer. With `origin_of` an error
    about an argument names the line of that argument, and not `where`, that of the component.
    """
    parameters, provided = parameters_of(target), set(provided)
    if parameters is None:
        return  # the call itself will tell
    by_name = {
        name: one for name, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    name = getattr(target, "__name__", repr(target))
    problems = []
    unknown = [] if takes_any else [argument for argument in arguments if argument not in by_name]
    for argument in unknown:
        problems.append(f'{name} takes no argument "{argument}".{_did_you_mean(argument, by_name)}')
    for parameter in by_name.values():
        if parameter.default is parameter.empty and parameter.name not in {*arguments, *provided}:
            problems.append(f'{name} needs the argument "{parameter.name}". Give it beside type.')
    if problems:
        if unknown and origin_of is not None:
            where = origin_of(f"{label}.{unknown[0]}")
        signature = ", ".join(_show_parameter(one) for one in by_name.values() if one.name not in provided) or "none"
        raise _labelled(f"{' '.join(problems)} Its parameters: {signature}.", label, where)


def instantiate(
    kind: str,
    component: Component,
    *,
    project_dir: str | os.PathLike[str],
    label: str,
    origin_of: OriginOf | None = None,
    **provided: Any,
) -> Any:
    """Find the component's class, check its arguments and call it.

    Of `provided` it gets what its signature accepts; an argument in the config wins over one provided. With
    `origin_of` errors name the line or the override of the argument that they are about.
    """
    where = component.origin
    target = find(kind, component.type, project_dir=project_dir, where=where, label=label)
    arguments = thaw(component.arguments)
    names = (*provided, "project_dir")
    check_arguments(target, arguments, label=label, where=where, provided=names, origin_of=origin_of)
    accepted = {name: value for name, value in provided.items() if _accepts(target, name)}
    if "project_dir" in (parameters_of(target) or {}):
        accepted["project_dir"] = project_dir
    try:
        return target(**{**accepted, **arguments})
    except TrainwrightError:
        raise  # it already says in words what is wrong
    except Exception as error:
        folder = absolute(project_dir)
        problem = f"{component.type} could not be built: {_explain(error, folder)}"
        # Which argument it is about is not known; one that an override has changed is likelier than those of the file.
        locations = [origin_of(f"{label}.{name}") for name in arguments] if origin_of is not None else []
        overridden = next((location for location in locations if location is not None and location.is_override), None)
        raise _labelled(problem, label, overridden or where) from error


def _find(kind: str, type_name: str, folder: Path) -> Any:
    if type_name in _registered[kind]:
        return _registered[kind][type_name]
    if type_name in BUILT_INS[kind]:
        module_name, _, name = BUILT_INS[kind][type_name].partition(":")
        return _member(_import(module_name, folder), name)
    file, colon, name = type_name.rpartition(":")
    if colon and (file.endswith(".py") or "/" in file):
        return _member(_load_file(folder / file, folder), name)
    if colon:
        return _member(_import(file, folder), name)
    stem, dot, name = type_name.partition(".")
    path = folder / KIND_FOLDERS[kind] / f"{stem}.py"
    if dot and path.is_file():
        return _member(_load_file(path, folder), name)
    raise ComponentError(_unknown(kind, type_name, folder))


def _unknown(kind: str, type_name: str, folder: Path) -> str:
    kind_folder = folder / KIND_FOLDERS[kind]
    names = sorted({*BUILT_INS[kind], *_registered[kind]})
    beside = [f"{path.stem}.{name}" for path in sorted(kind_folder.glob("*.py")) for name in _defined_in(path)]
    hint = _did_you_mean(type_name, [*names, *beside])
    if not hint and type_name.count(".") > 1 and ":" not in type_name:
        hint = ' Did you mean "{}:{}"?'.format(*type_name.rsplit(".", 1))
    known = f" Known: {', '.join(names)};" if names else ""
    in_folder = f" in {KIND_FOLDERS[kind]}/: {', '.join(beside)};" if beside else ""
    return (
        f'no {kind} "{type_name}".{hint}{known}{in_folder} or give an import path such as my_pkg.module:Name, '
        f"a file such as {KIND_FOLDERS[kind]}/mine.py:Name, or mine.Name for a file in {kind_folder}."
    )


def _member(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
        if value is None:
            public = {word: one for word, one in vars(module).items() if not word.startswith("_") and callable(one)}
            defined = [word for word, one in public.items() if getattr(one, "__module__", None) == module.__name__]
            listed = f" It defines: {', '.join(defined)}." if defined else ""
            file = getattr(module, "__file__", None)
            source = shown_path(file) if file else f"The module {module.__name__}"
            # A package that imports its parts when they are asked for (transformers) lists them by dir alone.
            near = _did_you_mean(name, [word for word in {**public, **dict.fromkeys(dir(module))} if word[0] != "_"])
            raise ComponentError(f'{source} has no "{name}".{near}{listed}')
    return value


def _defined_in(path: Path) -> list[str]:
    """Return the public classes of a file, read without running it."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return []
    return [one.name for one in body if isinstance(one, ast.ClassDef) and not one.name.startswith("_")]


def _import(name: str, folder: Path) -> ModuleType:
    """Import a module from Python's path, or else from the project's folder."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ComponentError(f'"{name}" is not the name of a module, such as my_pkg.module.')
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        # The module itself is missing, rather than one that it imports: the project may have it.
        if not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{error.name}."):
            raise ComponentError(f"importing {name} failed: {_explain(error, folder)}") from error
    path = folder.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return _load_file(file, folder)
    raise ComponentError(f'there is no module "{name}", neither on Python\'s path nor in {folder}. Check its name.')


def _load_file(path: Path, folder: Path) -> ModuleType:
    """Return the module of a file; the file is executed at most once in a process."""
    if not path.is_file():
        near = _did_you_mean(path.name, [file.name for file in sorted(path.parent.glob("*.py"))])
        raise ComponentError(f"there is no file {shown_path(path)}.{near} Paths are relative to {folder}.")
    _reject_hidden_datasets(folder)
    real = path.resolve()
    name = _project_name(path, folder)
    loaded = _loaded_from(real, likely_name=name)
    if loaded is not None:
        return loaded
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name) if name else _execute(path)
        # A folder of the same name hides the file from the import system; then the file is meant.
        return module if name is None or _is_from(module, real) else _execute(path)
    except (Exception, SystemExit) as error:
        problem = f"{shown_path(path)} cannot be imported: {_explain(error, folder)}{_relative_hint(error, folder)}"
        raise ComponentError(problem) from error


def enter_project(folder: Path) -> None:
    """Make `trainwright_project` this folder; another project's parts are set aside until it comes back."""
    package = sys.modules.get(PROJECT_PACKAGE)
    if package is not None and list(package.__path__) == [str(folder)]:
        return
    if package is not None:
        modules = {name: module for name, module in sys.modules.items() if _is_project_name(name)}
        registered = [
            (kind, name, target)
            for kind, names in _registered.items()
            for name, target in names.items()
            if _is_project_name(target.__module__)
        ]
        for module_name in modules:
            del sys.modules[module_name]
        for kind, name, _ in registered:
            del _registered[kind][name]
        _left_projects[package.__path__[0]] = _Project(modules, registered)
    entered = _left_projects.pop(str(folder), _Project({PROJECT_PACKAGE: _project_package(folder)}, []))
    sys.modules.update(entered.modules)
    for kind, name, target in entered.registered:
        _registered[kind][name] = target


def _is_project_name(module_name: str | None) -> bool:
    return f"{module_name}.".startswith(f"{PROJECT_PACKAGE}.")


def _reject_hidden_datasets(folder: Path) -> None:
    file = folder / "datasets" / "__init__.py"
    if file.exists():
        raise ComponentError(
            f"{shown_path(file)} makes the folder a package that hides Hugging Face's `datasets`. "
            "Delete that file; the folder works without it."
        )


def _project_package(folder: Path) -> ModuleType:
    package = ModuleType(PROJECT_PACKAGE, "The files beside the YAML file of the run.")
    package.__spec__ = ModuleSpec(PROJECT_PACKAGE, None, is_package=True)
    package.__spec__.submodule_search_locations = [str(folder)]
    package.__path__ = [str(folder)]
    return package


def _project_name(path: Path, folder: Path) -> str | None:
    """Return the file's module name below `trainwright_project`; None where it cannot have one."""
    inside = Path(os.path.normpath(path))
    if not inside.is_relative_to(folder):
        return None
    parts = inside.relative_to(folder).with_suffix("").parts
    parts = parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts
    return ".".join((PROJECT_PACKAGE, *parts)) if all(part.isidentifier() for part in parts) else None


def _execute(path: Path) -> ModuleType:
    """Run a file that has no place in the project's package, under a name that no other file has."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"{PROJECT_PACKAGE}_{''.join(letter if letter.isalnum() else '_' for letter in path.stem)}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _loaded_from(real: Path, *, likely_name: str | None) -> ModuleType | None:
    # Under its likely name first: a look at each of the thousands of modules of torch takes milliseconds.
    likely = sys.modules.get(likely_name) if likely_name else None
    if likely is not None and _is_from(likely, real):
        return likely
    return next((module for module in list(sys.modules.values()) if _is_from(module, real)), None)


def _is_from(module: ModuleType, real: Path) -> bool:
    file = getattr(module, "__file__", None)
    # Its end first, as a text: making and resolving a path for every module that torch loads would take a second.
    return isinstance(file, str) and file.endswith(real.name) and Path(file).resolve() == real


def _check_kind(kind: str) -> None:
    if kind not in KIND_FOLDERS:
        raise ComponentError(f'no kind "{kind}".{_did_you_mean(kind, KIND_FOLDERS)} Known: {", ".join(KIND_FOLDERS)}.')


def _labelled(problem: str, label: str, where: object | None) -> ComponentError:
    return ComponentError(f"{label}: {problem}" if label else problem, where=where)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = nearest(word, known)
    return f' Did you mean "{near}"?' if near else ""


def _explain(error: BaseException, folder: Path) -> str:
    """Return the error in one line, with the place in the user's own code that led to it."""
    text = f"{type(error).__name__}: {error}".removesuffix(".")
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({shown_path(error.filename or '?')}:{error.lineno})."
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    users = [one for one in frames if is_user_file(one.filename, folder)]
    location = next(reversed(users or frames), None)
    return f"{text} ({shown_path(location.filename)}:{location.lineno})." if location else f"{text}."


def _relative_hint(error: BaseException, folder: Path) -> str:
    first = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not first or not ((folder / first).is_dir() or (folder / f"{first}.py").is_file()):
        return ""
    return f' Files of a project import each other relatively: "from .{first} import …" or "from ..{first} import …".'


def _location_of(target: Any) -> str:
    where = location_of(target)
    return _reference(target) if where is None else f"{_reference(target)} ({shown_path(where)})"


def _reference(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"


def _accepts(target: Callable[..., Any], name: str) -> bool:
    parameters = parameters_of(target)
    if parameters is None or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return True
    found = parameters.get(name)
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


def _show_parameter(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}"
