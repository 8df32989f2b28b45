"""Named experiments: `@experiment("name")` registers a function that returns a config."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainwright.config import Origin, RunConfig
from trainwright.config.problems import describe, did_you_mean
from trainwright.config.python_files import folder_modules
from trainwright.config.schema import layered_config
from trainwright.config.yaml_text import absolute
from trainwright.errors import ConfigError, shorten_tracebacks
from trainwright.registry import resolve as registry
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import location_of

Function = TypeVar("Function", bound=Callable[[], Any])

EXPERIMENTS = "experiments"
"""The folder, and with .py the file, in the current directory that define experiments."""


@dataclass(frozen=True)
class Experiment:
    """A function that returns a config, and its source location."""

    name: str
    function: Callable[[], Any]
    file: str
    line: int

    @property
    def where(self) -> Origin:
        """The source location, for messages."""
        return Origin(shown_path(self.file), self.line)


def _project_folder(file: Path) -> Path:
    """Returns the project folder of a file with experiments: its folder, or the parent of `experiments/`."""
    return file.parent.parent if file.parent.name == EXPERIMENTS else file.parent


# Filled by @experiment when user modules are imported; it exists as long as the process, like sys.modules.
_registered: dict[str, Experiment] = {}


def experiment(name: str) -> Callable[[Function], Function]:
    """Registers a function without arguments that returns a RunConfig or a dict of settings.

    `load_experiment(name)` and `trainwright train --experiment name` find it.

    >>> @experiment("small")
    ... def small():
    ...     return {"model": {"type": "llama", "preset": "tiny"}, "trainer": {"max_steps": 100}}
    >>> load_experiment("small", overrides=["trainer.max_steps=50"]).trainer.max_steps
    50
    """
    if not isinstance(name, str) or not name:
        shown = getattr(name, "__name__", "mine")
        raise ConfigError(
            f'@experiment needs a name, got {describe(name)}. Write @experiment("{shown}").', where=location_of(name)
        )

    def decorate(function: Function) -> Function:
        code = inspect.unwrap(function).__code__
        found = Experiment(name, function, code.co_filename, code.co_firstlineno)
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            problem = f'the experiment "{name}" is called without arguments, but {function.__name__} needs some'
            raise ConfigError(f"{problem}: {error}. Add defaults.", where=found.where) from error
        taken = _registered.get(name)
        if taken is not None and not _is_same(taken, found):
            raise ConfigError(
                f'the experiment "{name}" is already defined at {taken.where}. Rename one of the two.',
                where=found.where,
            )
        _registered[name] = found
        return function

    return decorate


def load_experiment(
    name: str,
    *,
    config_files: Iterable[str | os.PathLike[str]] = (),
    overrides: Iterable[str] = (),
    imports: Iterable[str] = (),
) -> RunConfig:
    """Returns the config of an experiment, with the files merged into it in order, and then the overrides.

    Args:
        name: The name that the function was registered with.
        config_files: YAML files.
        overrides: Settings, as `a.b=value` or as a YAML mapping that is merged like a file.
        imports: The modules or files that define experiments. Default: `experiments/` and `experiments.py` in the
            current directory. Experiments that the program defines are always known.
    """
    shorten_tracebacks()
    _import(list(imports))
    found = _registered.get(name)
    if found is None:
        raise ConfigError(_unknown(name))
    result = found.function()
    if not isinstance(result, RunConfig | Mapping):
        problem = f'the experiment "{name}" returned {describe(result)}. Return a RunConfig or a dict of settings.'
        raise ConfigError(problem, where=found.where)
    return layered_config(
        result,
        name=name,
        folder=_project_folder(absolute(found.file)),
        where=found.where,
        files=config_files,
        overrides=overrides,
    )


def split_overrides(text: str) -> list[str]:
    """Splits `a.b=1,c=[2, 3],~d` into overrides; a YAML mapping such as `{a: {b: 1}}` is a single one."""
    if text.lstrip().startswith("{"):
        return [text]
    parts = [""]
    depth, quote = 0, ""
    for letter in text:
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    overrides: list[str] = []
    for part in parts:
        # A comma in a value, such as a list without brackets, does not start an override.
        if "=" in part or part.strip().startswith("~") or not overrides:
            overrides.append(part.strip())
        else:
            overrides[-1] += f",{part}"
    return overrides


def _import(imports: list[str]) -> None:
    here = Path.cwd()
    names = imports or [
        *sorted(str(file.relative_to(here)) for file in (here / EXPERIMENTS).glob("*.py")),
        *([f"{EXPERIMENTS}.py"] if (here / f"{EXPERIMENTS}.py").is_file() else []),
    ]
    for name in names:
        file = absolute(name)
        is_file = file.suffix == ".py"
        folder = _project_folder(file) if is_file else here
        try:
            # Files with experiments import their siblings: `from .base import …`, or `import base`, as a script does.
            with ExitStack() as modules:
                inner = file.parent.relative_to(folder).parts if is_file else ()
                for depth in range(len(inner) + 1) if is_file else ():
                    below = folder.joinpath(*inner[:depth])
                    if below.is_dir():
                        package = ".".join((registry.PROJECT_PACKAGE, *inner[:depth]))
                        modules.enter_context(folder_modules(below, package))
                registry.import_modules([str(file.relative_to(folder)) if is_file else name], project_dir=folder)
        except ConfigError as error:
            # An error of @experiment needs no "import failed" around it.
            raise (error.__cause__ if isinstance(error.__cause__, ConfigError) else error) from None


def _unknown(name: str) -> str:
    if not _registered:
        return (
            f'experiment: there is no "{name}", because none is defined. Add @experiment("{name}") to a function that '
            f"returns a config, in {EXPERIMENTS}.py or a file of {EXPERIMENTS}/ in the current directory, or set its "
            "module with --imports."
        )
    known = ", ".join(f"{each.name} ({each.where})" for _, each in sorted(_registered.items()))
    problem = f'experiment: there is no "{name}".{did_you_mean(name, _registered)}'
    return f"{problem} Known: {known}. Set other modules with --imports."


def _is_same(first: Experiment, second: Experiment) -> bool:
    """Returns True for one function whose file was executed again. Each cell of a notebook is a file, so names are
    compared."""
    if (first.file, first.line) == (second.file, second.line):
        return True
    is_notebook = not hasattr(sys.modules.get("__main__"), "__file__")
    names = [(each.function.__module__, each.function.__qualname__) for each in (first, second)]
    return is_notebook and names[0] == names[1] and names[0][0] == "__main__"
