"""`trainwright config RUN.yaml`: every setting of a run and its origin; the schema; the differences of two runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from trainwright.commands.terminal import MISSING, Overrides, load_run, named_run, show_rows
from trainwright.config import Component, Frozen, RunConfig, yaml_text
from trainwright.config.builtin import BUILT_INS
from trainwright.config.frozen import same, thaw
from trainwright.config.interpolation import escape_plain
from trainwright.config.json_schema import run_schema, with_references
from trainwright.config.sections import Section
from trainwright.config.yaml_text import KeyPath
from trainwright.errors import ConfigError

DEFAULT, OVERRIDE = "default", "override"
_MAX_WIDTH = 60  # origins are in one column, but a single long setting must not move all of them out of view


class Setting(NamedTuple):
    """One line of a config in YAML. A line that only opens a section has no origin."""

    text: str
    name: str
    value: Any
    origin: str


def config(
    run: Annotated[
        Path | None,
        typer.Argument(help="The run's YAML file, its folder, or its name.", metavar="RUN", callback=named_run),
    ] = None,
    overrides: Overrides = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of run files, for your editor.")
    ] = False,
    diff: Annotated[
        Path | None,
        typer.Option(help="Print only the differences to this file or run folder; exits with 1 if there are any."),
    ] = None,
) -> None:
    """Print every setting of a run, with the file and line that set it."""
    if schema:
        print(json.dumps(schema_of_runs(), indent=2, ensure_ascii=False))
        return
    if run is None:
        raise ConfigError("config needs a run. Pass its YAML file or folder: trainwright config run.yaml; or --schema.")
    loaded = load_run(run, overrides)
    if diff is None:
        _show(list(settings_of(loaded)))
    elif _show_differences(loaded, load_run(diff), str(run), str(diff)):
        raise typer.Exit(1)


def schema_of_runs() -> dict[str, Any]:
    """Returns the JSON Schema of run files, with the names of the built-in components."""
    return with_references(run_schema({kind: tuple(names) for kind, names in BUILT_INS.items()}))


def settings_of(loaded: RunConfig) -> Iterator[Setting]:
    """Yields every setting as a line of YAML; loading all lines returns an equal config."""
    yield from _below(loaded, loaded, (), "", "")


def _below(loaded: RunConfig, value: Any, path: KeyPath, indent: str, first: str) -> Iterator[Setting]:
    """Yields the lines below a mapping or a list; `first` begins the first line instead of `indent`."""
    for key, item in _items(value):
        inner, lead = (*path, key), first or indent
        first = ""
        is_list_item = isinstance(key, int)
        label = "" if is_list_item else f"{yaml_text.write_inline(key)}:"
        if not _is_branch(item):
            text = yaml_text.write_inline(escape_plain(thaw(item)))
            yield Setting(f"{lead}{label} {text}", ".".join(map(str, inner)), item, _origin(loaded, inner))
        elif is_list_item:
            yield from _below(loaded, item, inner, f"{indent}  ", f"{lead}- ")
        else:
            yield Setting(f"{lead}{label}", ".".join(map(str, inner)), None, "")
            yield from _below(loaded, item, inner, f"{indent}  ", "")


def _items(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, tuple):
        return list(enumerate(value))
    return list(value) if isinstance(value, Section) else list(value.items())


def _is_branch(value: Any) -> bool:
    """Returns True for values of several lines: sections, components, mappings, and lists of components."""
    if isinstance(value, tuple):
        return any(isinstance(item, Component) for item in value)
    return isinstance(value, Section) or (isinstance(value, Frozen) and bool(value))


def _origin(loaded: RunConfig, path: KeyPath) -> str:
    where = loaded.written_at(path)
    if where is None:
        return DEFAULT
    return str(where) if where.line else OVERRIDE


def _show(settings: list[Setting]) -> None:
    width = min(max(len(setting.text) for setting in settings), _MAX_WIDTH)
    console = Console(highlight=False, soft_wrap=True)
    for text, _, _, origin in settings:
        # As a comment, so that the output is a run file.
        comment = f"  # {origin}" if origin else ""
        if not sys.stdout.isatty():
            print(f"{text:{width}}{comment}".rstrip())
            continue
        style = {DEFAULT: "dim", OVERRIDE: "yellow"}.get(origin, "")
        console.print(Text(f"{text:{width}}", style=style) + Text(comment, style=style or "green"))


def _show_differences(one: RunConfig, other: RunConfig, one_name: str, other_name: str) -> bool:
    """Prints each setting that differs, with both origins; returns True if there is one."""
    left, right = ({each.name: each for each in settings_of(each) if each.origin} for each in (one, other))
    rows = []
    for name in dict.fromkeys([*left, *right]):
        first, second = left.get(name), right.get(name)
        if first is not None and second is not None:
            is_unset_name = name == "name" and first.origin == second.origin == DEFAULT  # two files, two names
            is_equal = is_unset_name or same(first.value, second.value)
        else:
            # Empty on one side, and several lines on the other: `task: null` and `task.type: …`.
            is_equal = any(each.startswith(f"{name}.") for each in (left if first is None else right))
        if not is_equal:
            rows.append((name, _described(first), _described(second)))
    if rows:
        show_rows(("setting", one_name, other_name), rows)
    else:
        print(f"No setting differs between {one_name} and {other_name}.")
    return bool(rows)


def _described(setting: Setting | None) -> str:
    return MISSING if setting is None else f"{yaml_text.write_inline(thaw(setting.value))} ({setting.origin})"
