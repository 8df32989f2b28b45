"""Named experiments: `@experiment("name")` on a function that returns a config, found again by its name."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainwright.config import Origin, RunConfig
from trainwright.config.problems import describe, nearest
from trainwright.config.python_files import files_beside
from trainwright.config.schema import layered_config
from trainwright.config.yaml_text import absolute
from trainwright.errors import ConfigError, shorten_tracebacks
from trainwright.registry import resolve as registry
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import location_of

Function = TypeVar("Function", bound=Callable[[], Any])

EXPERIMENTS = "experiments"
"""The folder and (with .py) the file in the current folder where experiments are looked for."""


@dataclass(frozen=True)
class Experiment:
    """A function that returns a config, and the place where it is written."""

    name: str
    function: Callable[[], Any]
    file: str
    line: int

    @property
    def where(self) -> Origin:
        """The place, for messages."""
        return Origin(shown_path(self.file), self.line)

    @property
    def folder(self) -> Path:
        """Where the relative files of its config start: its own folder, or the one that holds `experiments/`."""
        folder = absolute(self.file).parent
        return folder.parent if folder.name == EXPERIMENTS else folder


# Filled by @experiment when users' modules are imported; like sys.modules, it lives as long as the process.
_registered: dict[str, Experiment] = {}


def experiment(name: str) -> Callable[[Function], Function]:
    """Makes a function known as an experiment: it takes nothing, and returns a RunConfig or a dict of settings."""
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
            raise ConfigError(f"{problem}: {error}. Give them defaults.", where=found.where) from error
        taken = _registered.get(name)
        if taken is not None and not _is_same(taken, found):
            raise ConfigError(
                f'there is an experiment "{name}" already, at {taken.where}. Give one of the two another name.',
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
    """Returns the config of an experiment, with the files laid over it, later ones last, and then the overrides.

    An override is `a.b=value`, or a YAML mapping that is laid over like a file. `imports` names the modules or files
    that define experiments; without any, those of `experiments/` and `experiments.py` in the current folder are
    imported. What the program has defined itself is known anyway.
    """
    shorten_tracebacks()
    _import(list(imports))
    found = _registered.get(name)
    if found is None:
        raise ConfigError(_unknown(name))
    made = found.function()
    if not isinstance(made, RunConfig | Mapping):
        problem = f'the experiment "{name}" returned {describe(made)}. Return a RunConfig or a dict of settings.'
        raise ConfigError(problem, where=found.where)
    return layered_config(
        made, name=name, folder=found.folder, where=found.where, files=config_files, overrides=overrides
    )


def split_overrides(text: str) -> list[str]:
    """Returns the overrides in `a.b=1,c=[2, 3]` one by one; a YAML mapping such as `{a: {b: 1}}` is one."""
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
        # A comma in a value, such as a list without brackets, begins no override.
        if "=" in part or not overrides:
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
        # The folder that an experiment's config starts from is its project: the file is then run once.
        folder = (
            (file.parent.parent if file.parent.name == EXPERIMENTS else file.parent) if file.suffix == ".py" else here
        )
        try:
            with _siblings(file, folder) if file.suffix == ".py" else nullcontext():
                registry.import_modules(
                    [str(file.relative_to(folder)) if file.suffix == ".py" else name], project_dir=folder
                )
        except ConfigError as error:
            # What @experiment rejects is explained; that an import failed with it would only hide it.
            raise (error.__cause__ if isinstance(error.__cause__, ConfigError) else error) from None


@contextmanager
def _siblings(file: Path, folder: Path) -> Iterator[None]:
    """Lets a file with experiments import those beside it: `from .base import …`, `import base`, as a script could."""
    inner = file.parent.relative_to(folder).parts
    with ExitStack() as names:
        for depth in range(len(inner) + 1):
            below = folder.joinpath(*inner[:depth])
            if below.is_dir():
                names.enter_context(files_beside(below, ".".join((registry.PROJECT_PACKAGE, *inner[:depth]))))
        yield


def _unknown(name: str) -> str:
    if not _registered:
        return (
            f'experiment: there is no "{name}", for none is defined. Put @experiment("{name}") before a function that '
            f"returns a config, in {EXPERIMENTS}.py or a file of {EXPERIMENTS}/ in the current folder, or name its "
            "module with --imports."
        )
    near = nearest(name, _registered)
    guess = f' Did you mean "{near}"?' if near else ""
    known = ", ".join(f"{each.name} ({each.where})" for _, each in sorted(_registered.items()))
    return f'experiment: there is no "{name}".{guess} Known: {known}. Other modules are named with --imports.'


def _is_same(first: Experiment, second: Experiment) -> bool:
    """Is it one function, whose file was run again? A notebook's cells are a file each; there the name decides."""
    if (first.file, first.line) == (second.file, second.line):
        return True
    is_notebook = not hasattr(sys.modules.get("__main__"), "__file__")
    names = [(each.function.__module__, each.function.__qualname__) for each in (first, second)]
    return is_notebook and names[0] == names[1] and names[0][0] == "__main__"
