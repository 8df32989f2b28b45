"""Resolves a component's `type` to a class: "adamw", "my_pkg.optim:Lion", "optimizers/lion.py:Lion", "lion.Lion".

plugins.py lists the names that installed packages declare.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from trainwright.config import Component, Origin
from trainwright.config.builtin import BUILT_INS, IN_CODE, KIND_FOLDERS
from trainwright.config.frozen import thaw
from trainwright.config.groups import FOLDER, Group, ambiguous, group_names, kind_at
from trainwright.config.problems import did_you_mean, nearest
from trainwright.config.python_files import folder_package
from trainwright.config.yaml_text import absolute
from trainwright.errors import ComponentError, ConfigError, TrainwrightError
from trainwright.registry.plugins import Plugin, find_plugin, forget_installed, installed
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import is_standard_library, is_user_code, is_user_file, location_of, parameters_of

PROJECT_PACKAGE = "trainwright_project"
"""The package of the project's folder: its files import each other relatively, without a sys.path entry."""

_NO_COMPONENT = "is a builtin or in Python's standard library, which has no {kind}. Name your own class or function."

Target = TypeVar("Target", bound=Callable[..., Any])
OriginOf = Callable[[str], Origin | None]
"""`RunConfig.origin`: where a setting such as `trainer.optimizer.lr` is written."""


# Filled by @register when user modules are imported; it exists as long as the process, like sys.modules.
_registered: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in KIND_FOLDERS}
# The modules and the registered components of projects that this process used before the current one, by folder.
_other_projects: dict[str, tuple[dict[str, ModuleType], dict[str, dict[str, Callable[..., Any]]]]] = {}


def register(kind: str, name: str) -> Callable[[Target], Target]:
    """Register a class or function under a short name, which settings can then use as `type`.

    The module must be imported before the run is built: name it in `imports`, or install it as a plugin.

    Args:
        kind: `trainer`, `model`, `optimizer`, `schedule`, `loss`, `dataset`, `collator`, `sampler`, `metric`,
            `benchmark`, `reward`, `hook`, `writer`, `task`, `tokenizer` or `transform`.
        name: The short name. One that another class or function has raises.

    >>> from trainwright import Hook
    >>> @register("hook", "say_hello")
    ... class SayHello(Hook):
    ...     def before_train(self):
    ...         print("Hello.")
    """
    _check_kind(kind)

    def decorate(target: Target) -> Target:
        taken: Any = _registered[kind].get(name) or BUILT_INS[kind].get(name)
        location = taken if isinstance(taken, str) or taken is None else _describe_target(taken)
        own = _describe_target(target)
        if taken is not None and taken is not target and location not in (_reference(target), own):
            problem = f'The {kind} "{name}" is already registered by {location}; {own} needs another name.'
            raise ComponentError(problem)
        _registered[kind][name] = target
        return target

    return decorate


def find(
    kind: str,
    type_name: str,
    *,
    project_dir: str | os.PathLike[str],
    where: object | None = None,
    label: str = "",
    base: type | None = None,
) -> Callable[..., Any]:
    """Return the class or function that `type_name` names; errors mention `where` and the setting `label`.

    A class must be a subclass of `base`. Builtins and the standard library are rejected: nothing there is a component.
    """
    target = _find_located(kind, type_name, project_dir, where=where, label=label)
    if not callable(target):
        raise _labelled(f"{type_name} is a {type(target).__name__}, not a class or a function.", label, where)
    problem = _why_no_component(kind, target, base)
    if problem is not None:
        raise _labelled(f"{type_name} {problem}", label and f"{label}.type", where)
    return target  # type: ignore[no-any-return]  # callable, as just checked


def _find_located(
    kind: str, type_name: str, project_dir: str | os.PathLike[str], *, where: object | None, label: str
) -> Any:
    """Return the object that `type_name` names in this project; errors mention `where` and the setting."""
    _check_kind(kind)
    folder = absolute(project_dir)
    enter_project(folder)
    try:
        return _find(kind, type_name, folder, label)
    except ComponentError as error:
        if error.where is not None or (where is None and not label):
            raise
        raise _labelled(error.problem, label and f"{label}.type", where) from error.__cause__


def project_folder() -> Path | None:
    """Return the folder of the current project, or None."""
    package = sys.modules.get(PROJECT_PACKAGE)
    return None if package is None else Path(next(iter(package.__path__)))


def import_modules(names: Iterable[str], *, project_dir: str | os.PathLike[str], where: object | None = None) -> None:
    """Import modules that register components, from Python's path or else from the project's folder."""
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
    """Reject arguments that `target` does not accept, and missing ones.

    `provided` names the arguments that the caller adds, such as the parameters of an optimizer. With `origin_of`, an
    error about an argument names the line of that argument instead of `where`, the line of the component.
    """
    by_name, accepts_any = _keyword_parameters(target)
    provided = set(provided)
    name = getattr(target, "__name__", repr(target))
    unknown = [] if accepts_any else [argument for argument in arguments if argument not in by_name]
    problems = [f'{name} has no argument "{argument}".{did_you_mean(argument, by_name)}' for argument in unknown]
    for parameter in by_name.values():
        if parameter.default is parameter.empty and parameter.name not in {*arguments, *provided}:
            problems.append(f'{name} needs the argument "{parameter.name}". Add it next to type.')
    if problems:
        if unknown and origin_of is not None:
            where = origin_of(f"{label}.{unknown[0]}")
        shown = [one.replace(annotation=one.empty) for one in by_name.values() if one.name not in provided]
        signature = ", ".join(map(str, shown)) or "none"
        raise _labelled(f"{' '.join(problems)} Its parameters: {signature}.", label, where)


def _keyword_parameters(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters that can be given by name, and True if `target` accepts any further name."""
    parameters = parameters_of(target)
    if parameters is None:  # Python has no signature for it, as for a builtin
        return {}, True
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    by_name = {name: one for name, one in parameters.items() if one.kind in kinds}
    return by_name, any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def instantiate(
    kind: str,
    component: Component,
    *,
    project_dir: str | os.PathLike[str],
    label: str,
    origin_of: OriginOf | None = None,
    base: type | None = None,
    num_inputs: int = 0,
    **provided: Any,
) -> Any:
    """Find the component's class, check its arguments, build the components among them and call it.

    The class receives those of `provided` that its signature accepts; arguments of the config take precedence. With
    `origin_of`, errors name the line or the override of the argument in question. A user's function that needs
    `num_inputs` further arguments is not called: it is itself the collator, the transform or the loss.
    """
    where = component.origin
    target = find(kind, component.type, project_dir=project_dir, where=where, label=label, base=base)
    arguments = thaw(component.arguments)
    inputs = _inputs(target, arguments)
    is_function = num_inputs > 0 and len(inputs) == num_inputs
    names = (*provided, "project_dir", *(inputs if is_function else ()))
    check_arguments(target, arguments, label=label, where=where, provided=names, origin_of=origin_of)
    inner = {name: value for name, value in provided.items() if name == "run_seed"}
    nested = _Nested(kind, project_dir, where, origin_of, inner)
    arguments = {
        name: value if name in component.verbatim else nested.build(value, name, f"{label}.{name}")
        for name, value in arguments.items()
    }
    if is_function:
        return functools.partial(target, **arguments)
    by_name, accepts_any = _keyword_parameters(target)
    accepted = {name: value for name, value in provided.items() if accepts_any or name in by_name}
    if "project_dir" in by_name:
        accepted["project_dir"] = project_dir
    try:
        return target(**{**accepted, **arguments})
    except TrainwrightError:
        raise
    except Exception as error:
        folder = absolute(project_dir)
        problem = f"{component.type} could not be built: {_explain(error, folder)}"
        # The error does not name an argument; one that an override has changed is the most likely cause.
        locations = [origin_of(f"{label}.{name}") for name in arguments] if origin_of is not None else []
        overridden = next((location for location in locations if location is not None and location.is_override), None)
        raise _labelled(problem, label, overridden or where) from error


@dataclass(frozen=True)
class _Nested:
    """Builds the components among the arguments of a component of this kind."""

    kind: str
    project_dir: str | os.PathLike[str]
    where: Any
    origin_of: OriginOf | None
    provided: Mapping[str, Any]

    def build(self, value: Any, name: str, label: str) -> Any:
        """Return a plain value with every mapping that names a component replaced by its object, in lists too.

        Short names are those of the kind that the argument `name` is named after (`transform`, `target_transform`,
        `transforms`) and of the outer component's kind. A mapping whose `type` is neither such a name nor a path is
        the user's own value.
        """
        if isinstance(value, list):
            return [self.build(item, name, f"{label}.{number}") for number, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        kind = self._kind_of(value.get("type"), name)
        if kind is None:
            return {key: self.build(item, str(key), f"{label}.{key}") for key, item in value.items()}
        where = self.where if self.origin_of is None else self.origin_of(f"{label}.type")
        component = Component.from_mapping(value).located_at(where)
        found = _find_located(kind, component.type, self.project_dir, where=where, label=label)
        if not callable(found) and not inspect.ismodule(found):  # a constant, such as torch:float32
            if component.arguments:
                problem = f"{component.type} is a {type(found).__name__}, which has no arguments. Remove them."
                raise _labelled(problem, label, where)
            return found
        options: dict[str, Any] = {"project_dir": self.project_dir, "origin_of": self.origin_of, **self.provided}
        try:
            return instantiate(kind, component, label=label, num_inputs=1, **options)
        except ConfigError as error:
            if error.where is not None:
                raise
            raise _labelled(error.problem, label, where) from error.__cause__

    def _kind_of(self, type_name: Any, argument: str) -> str | None:
        """Return the kind in which a nested `type` is searched; None if it names no component."""
        if not isinstance(type_name, str) or not type_name:
            return None
        last = argument.rpartition("_")[2]
        kinds = [kind for kind, folder in KIND_FOLDERS.items() if last in (kind, folder)]
        kinds += [self.kind]
        for kind in kinds:
            names = [*BUILT_INS[kind], *_registered[kind], *installed(kind)]
            if type_name in names or nearest(type_name, names, cutoff=0.8) is not None:
                return kind  # a misspelled one is not found, and the error suggests the name
        stem, dot, _ = type_name.partition(".")
        if ":" not in type_name and (not dot or not all(part.isidentifier() for part in type_name.split("."))):
            return None
        folders = {kind: absolute(self.project_dir) / KIND_FOLDERS[kind] for kind in kinds}
        return next((kind for kind, folder in folders.items() if (folder / f"{stem}.py").is_file()), kinds[0])


def _inputs(target: Any, given: Mapping[str, Any]) -> list[str]:
    """Return the positional arguments that a user's function needs in addition to those that are given."""
    if not inspect.isfunction(target) or not is_user_code(target):
        return []
    named = inspect.signature(target).parameters.values()
    missing = [each for each in named if each.default is each.empty and each.name not in given]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in missing] if all(each.kind in positional for each in missing) else []


def _find(kind: str, type_name: str, folder: Path, label: str) -> Any:
    plugin = find_plugin(kind, type_name)
    if type_name in _registered[kind]:
        target = _registered[kind][type_name]
        if plugin is not None and _load_plugin(kind, plugin, folder) is not target:
            raise ComponentError(
                f'the {kind} "{type_name}" is registered by {_describe_target(target)} and by {plugin.distribution} '
                f"({plugin.reference}). Use another name, or uninstall the package."
            )
        return target
    if plugin is not None:
        return _load_plugin(kind, plugin, folder)
    if type_name in BUILT_INS[kind]:
        module_name, _, name = BUILT_INS[kind][type_name].partition(":")
        return _member(_import(module_name, folder), name)
    file, colon, name = type_name.rpartition(":")
    if type_name.startswith(IN_CODE):
        raise ComponentError(f"{name} was given in code and cannot be imported. Pass it again, or name its file.")
    if colon and (file.endswith(".py") or "/" in file):
        return _member(_load_file(folder / file, folder), name)
    if colon:
        module = _import(file, folder)
        if is_standard_library(module):
            raise ComponentError(f"{type_name} {_NO_COMPONENT.format(kind=kind)}")
        return _member(module, name)
    stem, dot, name = type_name.partition(".")
    path = folder / KIND_FOLDERS[kind] / f"{stem}.py"
    if dot and path.is_file():
        return _member(_load_file(path, folder), name)
    problem = _unknown(kind, type_name, folder, label)
    forget_installed()  # in a notebook, the package may be installed later
    raise ComponentError(problem)


def _load_plugin(kind: str, plugin: Plugin, folder: Path) -> Any:
    module_name, _, name = plugin.reference.partition(":")
    try:
        return _member(_import(module_name, folder), name)
    except ComponentError as error:
        problem = f'the {kind} "{plugin.name}" of {plugin.distribution} cannot be used: {error.problem}'
        raise ComponentError(problem) from error.__cause__


def _why_no_component(kind: str, target: Any, base: type | None) -> str | None:
    """Return the reason why a class or function cannot be a component and must not be called; None if it can."""
    if is_standard_library(target):
        return _NO_COMPONENT.format(kind=kind)
    if base is None or not isinstance(target, type) or issubclass(target, base):
        return None
    if target.__new__ is not object.__new__:
        return None  # it may create an object of another class
    return f"is not a subclass of {base.__name__}."


def reject_ambiguous(groups: Iterable[Group], *, project_dir: str | os.PathLike[str]) -> None:
    """Raise for a group file whose name is also that of a registered, installed or project component.

    config/groups.py compares the names with the built-in components.
    """
    folder = absolute(project_dir)
    for group in groups:
        kind = kind_at(group.path)
        if kind is None:
            continue
        stem, dot, _ = group.name.partition(".")
        in_project = bool(dot) and (folder / KIND_FOLDERS[kind] / f"{stem}.py").is_file()
        if in_project or group.name in _registered[kind] or find_plugin(kind, group.name) is not None:
            raise ambiguous(group, kind)


def _unknown(kind: str, type_name: str, folder: Path, label: str) -> str:
    kind_folder = folder / KIND_FOLDERS[kind]
    names = sorted({*BUILT_INS[kind], *_registered[kind], *installed(kind)})
    in_project = [f"{path.stem}.{name}" for path in sorted(kind_folder.glob("*.py")) for name in _defined_in(path)]
    path = tuple(key for key in label.split(".") if key and not key.isdecimal())
    groups = group_names(folder, path) if path else []
    hint = did_you_mean(type_name, [*names, *in_project, *groups])
    if not hint and type_name.count(".") > 1 and ":" not in type_name:
        hint = ' Did you mean "{}:{}"?'.format(*type_name.rsplit(".", 1))
    known = f" Known: {', '.join(names)};" if names else ""
    in_folder = f" in {KIND_FOLDERS[kind]}/: {', '.join(in_project)};" if in_project else ""
    in_folder += f" in {FOLDER}/{'/'.join(path)}/: {', '.join(groups)};" if groups else ""
    return (
        f'no {kind} "{type_name}".{hint}{known}{in_folder} or use an import path such as my_pkg.module:Name, '
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
            # dir() lists the members that a package such as transformers imports on first access.
            near = did_you_mean(name, [word for word in {**public, **dict.fromkeys(dir(module))} if word[0] != "_"])
            raise ComponentError(f'{source} has no "{name}".{near}{listed}')
    return value


def _defined_in(path: Path) -> list[str]:
    """Return the public classes of a file, which is parsed but not executed."""
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
        # If the module itself is missing, rather than one that it imports, the project may have it.
        if not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{error.name}."):
            raise ComponentError(f"importing {name} failed: {_explain(error, folder)}") from error
    path = folder.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return _load_file(file, folder)
    raise ComponentError(f'no module "{name}" on Python\'s path or in {folder}. Check its name.')


def _load_file(path: Path, folder: Path) -> ModuleType:
    """Return the module of a file; the file is executed at most once in a process."""
    if not path.is_file():
        near = did_you_mean(path.name, [file.name for file in sorted(path.parent.glob("*.py"))])
        raise ComponentError(f"no file {shown_path(path)}.{near} Paths are relative to {folder}.")
    if (folder / "datasets" / "__init__.py").exists():
        raise ComponentError(
            f"{shown_path(folder / 'datasets' / '__init__.py')} makes the folder a package that hides Hugging Face's "
            "`datasets`. Delete that file; the folder works without it."
        )
    real = path.resolve()
    name = _project_name(path, folder)
    loaded = _loaded_from(real, likely_name=name)
    if loaded is not None:
        return loaded
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name) if name else _execute(path)
        # A folder of the same name hides the file from the import system.
        return module if name is None or _is_from(module, real) else _execute(path)
    except (Exception, SystemExit) as error:
        problem = f"{shown_path(path)} cannot be imported: {_explain(error, folder)}{_relative_hint(error, folder)}"
        raise ComponentError(problem) from error


def enter_project(folder: Path) -> None:
    """Make `trainwright_project` the package of this folder; modules of another project are kept for its return."""
    package = sys.modules.get(PROJECT_PACKAGE)
    if package is not None and list(package.__path__) == [str(folder)]:
        return
    if package is not None:
        modules = {name: module for name, module in sys.modules.items() if _is_project_name(name)}
        registered = {
            kind: {name: target for name, target in targets.items() if _is_project_name(target.__module__)}
            for kind, targets in _registered.items()
        }
        for module_name in modules:
            del sys.modules[module_name]
        for kind, targets in registered.items():
            for name in targets:
                del _registered[kind][name]
        _other_projects[package.__path__[0]] = (modules, registered)
    modules, registered = _other_projects.pop(
        str(folder), ({PROJECT_PACKAGE: folder_package(PROJECT_PACKAGE, folder)}, {})
    )
    sys.modules.update(modules)
    for kind, targets in registered.items():
        _registered[kind].update(targets)


def _is_project_name(module_name: str | None) -> bool:
    return f"{module_name}.".startswith(f"{PROJECT_PACKAGE}.")


def _project_name(path: Path, folder: Path) -> str | None:
    """Return the file's module name in `trainwright_project`; None if it is outside or its path is not a name."""
    inside = Path(os.path.normpath(path))
    if not inside.is_relative_to(folder):
        return None
    parts = inside.relative_to(folder).with_suffix("").parts
    parts = parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts
    return ".".join((PROJECT_PACKAGE, *parts)) if all(part.isidentifier() for part in parts) else None


def _execute(path: Path) -> ModuleType:
    """Execute a file outside the project's package under a unique module name."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"{PROJECT_PACKAGE}_{''.join(letter if letter.isalnum() else '_' for letter in path.stem)}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses and pickle look the module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _loaded_from(real: Path, *, likely_name: str | None) -> ModuleType | None:
    # The likely name first, because checking the thousands of modules of torch takes milliseconds.
    likely = sys.modules.get(likely_name) if likely_name else None
    if likely is not None and _is_from(likely, real):
        return likely
    return next((module for module in list(sys.modules.values()) if _is_from(module, real)), None)


def _is_from(module: ModuleType, real: Path) -> bool:
    file = getattr(module, "__file__", None)
    # Compare the end of the text first, because resolving the path of every loaded module would take a second.
    return isinstance(file, str) and file.endswith(real.name) and Path(file).resolve() == real


def _check_kind(kind: str) -> None:
    if kind not in KIND_FOLDERS:
        raise ComponentError(f'no kind "{kind}".{did_you_mean(kind, KIND_FOLDERS)} Known: {", ".join(KIND_FOLDERS)}.')


def _labelled(problem: str, label: str, where: object | None) -> ComponentError:
    return ComponentError(f"{label}: {problem}" if label else problem, where=where)


def _explain(error: BaseException, folder: Path) -> str:
    """Return the error in one line, with the location in user code that caused it."""
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


def _describe_target(target: Any) -> str:
    location = location_of(target)
    return f"{_reference(target)} ({shown_path(location)})" if location else _reference(target)


def _reference(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"
