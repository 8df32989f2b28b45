"""`trainwright components [KIND] [NAME]`: what a run file may name, and how it is written there.

What there is comes from catalogue.py, which reads source files and runs none of them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from trainwright.commands.table import aligned, show_rows
from trainwright.config import yaml_text
from trainwright.config.problems import nearest
from trainwright.errors import ComponentError
from trainwright.models.presets import preset_sizes
from trainwright.registry.builtin import KIND_FOLDERS
from trainwright.registry.catalogue import Catalogue, Entry, Parameter, read_catalogue

SECTIONS = {
    "trainer": "trainer",
    "model": "model",
    "optimizer": "trainer.optimizer",
    "schedule": "trainer.schedule",
    "dataset": "data.train",
    "collator": "data.collator",
    "hook": "hooks",
    "writer": "writers",
    "metric": "evaluation.metrics.NAME",
    "task": "task",
}
"""Where a run file names each kind of component."""

_LISTS = ("hook", "writer")
# evaluation.metrics reads these two itself: what of the outputs and of the batch the metric is fed.
_FED = (Parameter("outputs", "'logits'", "str"), Parameter("labels", "'labels'", "str"))


def _complete_kind(incomplete: str) -> list[str]:
    return [kind for kind in KIND_FOLDERS if kind.startswith(incomplete)]


def _complete_name(context: typer.Context, incomplete: str) -> list[str]:
    kind = str(context.params.get("kind"))
    entries = read_catalogue(Path.cwd(), [kind] if kind in KIND_FOLDERS else []).entries
    return [entry.type for entry in entries if entry.type.startswith(incomplete)]


def components(
    kind: Annotated[
        str | None,
        typer.Argument(help="Only this kind, such as optimizer.", show_default=False, autocompletion=_complete_kind),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(help="All about this one, such as adamw.", show_default=False, autocompletion=_complete_name),
    ] = None,
    project: Annotated[
        Path, typer.Option(help="The folder (or the run file in it) whose own components are listed too.")
    ] = Path(),
) -> None:
    """List what a run file may name: built-in components and those in your own folders, with their parameters."""
    folder = project.parent if project.is_file() else project
    if not folder.is_dir():
        raise ComponentError(f"--project: there is no folder {project}. Give the folder that your run file is in.")
    if kind is None:
        _show_list(read_catalogue(folder))
        return
    singular = {plural: one for one, plural in KIND_FOLDERS.items()}.get(kind, kind)
    if singular in KIND_FOLDERS and name is None:
        _show_list(read_catalogue(folder, [singular]))
    elif singular in KIND_FOLDERS and name is not None:
        catalogue = read_catalogue(folder, [singular])
        _warn(catalogue)
        _show_one(_find(catalogue, name, what=singular))
    elif name is None:
        # `components cosine`: the name alone, where it is clear of which kind.
        catalogue = read_catalogue(folder)
        found = [entry for entry in catalogue.entries if _is_named(entry, kind)]
        if not found:
            near = _guess(kind, {**_names(catalogue), **{each: each for each in KIND_FOLDERS}})
            raise ComponentError(f'no kind and no component "{kind}". {near}{_kinds()}{_hidden(catalogue)}')
        _warn(catalogue)
        for entry in found:
            _show_one(entry)
    else:
        raise ComponentError(f'no kind "{kind}". {_guess(kind, {each: each for each in KIND_FOLDERS})}{_kinds()}')


def _show_list(catalogue: Catalogue) -> None:
    rows = [(entry.kind, entry.type, entry.summary or "–", _parameters(entry)) for entry in catalogue.entries]
    if not sys.stdout.isatty():
        show_rows(("kind", "name", "what it is", "parameters"), rows)
    else:
        for kind in dict.fromkeys(row[0] for row in rows):
            Console(highlight=False).print(f"[bold]{kind}[/bold] [dim]in {SECTIONS[kind]}[/dim]")
            own = [row[1:] for row in rows if row[0] == kind]
            show_rows(("name", "what it is", "parameters"), own, wrapped=("what it is", "parameters"))
            print()
        print("One in full: trainwright components KIND NAME")
    _warn(catalogue)


def _warn(catalogue: Catalogue) -> None:
    for location, problem in catalogue.unreadable:
        print(f"warning: {location}: {problem}. Its components are not listed; correct the file.", file=sys.stderr)


def _find(catalogue: Catalogue, name: str, *, what: str) -> Entry:
    found = [entry for entry in catalogue.entries if _is_named(entry, name)]
    if found:
        return found[0]
    known = f"Known: {', '.join(entry.type for entry in catalogue.entries)}."
    raise ComponentError(f'no {what} "{name}". {_guess(name, _names(catalogue))}{known}{_hidden(catalogue)}')


def _is_named(entry: Entry, name: str) -> bool:
    """Say whether `name` means this entry: as a run file writes it, by its class, or by its file and class."""
    stem, _, own = entry.type.partition(".")
    return name in (entry.type, own, *entry.registered, f"{KIND_FOLDERS[entry.kind]}/{stem}.py:{own}")


def _names(catalogue: Catalogue) -> dict[str, str]:
    """Return every word by which a component may be meant, and what a run file writes for it."""
    words = {entry.type.rpartition(".")[2]: entry.type for entry in catalogue.entries}
    return {**words, **{entry.type: entry.type for entry in catalogue.entries}}


def _guess(word: str, meanings: Mapping[str, str]) -> str:
    near = nearest(word, meanings)
    return f'Did you mean "{meanings[near]}"? ' if near else ""


def _kinds() -> str:
    return f"Kinds: {', '.join(KIND_FOLDERS)}."


def _hidden(catalogue: Catalogue) -> str:
    locations = ", ".join(one.location for one in catalogue.unreadable)
    return f" It may be in a file that cannot be read: {locations}." if locations else ""


def _all_parameters(entry: Entry) -> tuple[Parameter, ...]:
    return (*entry.signature.parameters, *(_FED if entry.kind == "metric" else ()))


def _parameters(entry: Entry) -> str:
    words = [str(one) for one in _all_parameters(entry)]
    words += [f"… (see {entry.signature.open_to})"] if entry.signature.open_to else []
    presets = preset_sizes().get(entry.type, {}) if entry.kind == "model" else {}
    words += [f"preset: {' | '.join(presets)}"] if presets else []
    return ", ".join(words) or "none"


def _show_one(entry: Entry) -> None:
    print(f"{entry.kind} {entry.type}   {entry.location}")
    print()
    print(entry.doc or "It has no docstring.")
    parameters = _all_parameters(entry)
    if parameters:
        print("\nParameters:")
        rows = [(one.name, "required" if one.default is None else one.default, one.annotation) for one in parameters]
        print("\n".join(f"  {line}" for line in aligned(rows)))
    if entry.signature.open_to:
        print(f"  Further ones are taken by {entry.signature.open_to}.")
    if entry.kind == "trainer":
        print("\nIts settings are those of the trainer section: see trainwright config --schema.")
    _show_presets(entry)
    for short in entry.registered:
        print(f'\nIt is "{short}" too, once `imports` names its file: {entry.location.rpartition(":")[0]}.')
    print("\nIn a run file:\n")
    text = snippet(entry)
    if sys.stdout.isatty():
        Console().print(Syntax(text, "yaml", theme="ansi_dark", background_color="default"))
    else:
        print(text, end="")


def _show_presets(entry: Entry) -> None:
    sizes = preset_sizes().get(entry.type, {}) if entry.kind == "model" else {}
    if sizes:
        print(f"\nPresets, which stand for the settings, as in {{type: {entry.type}, preset: {next(iter(sizes))}}}:")
        print("\n".join(f"  {line}" for line in aligned([(name, f"{size:,} weights") for name, size in sizes.items()])))


def snippet(entry: Entry) -> str:
    """Return the component as YAML in the section where it belongs: required arguments blank, others in comments."""
    *sections, last = SECTIONS[entry.kind].replace("NAME", entry.type.rpartition(".")[2].lower()).split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate([*sections, last])]
    indent = "  " * len(lines)
    first = f"{indent}- " if entry.kind in _LISTS else indent
    inner = " " * len(first)
    lines.append(f"{first}type: {_yaml(entry.type)}")
    for one in _all_parameters(entry):
        wanted = f" ({one.annotation})" if one.annotation else ""
        if one.default is None:
            lines.append(f"{inner}{one.name}:  # required{wanted}")
    for one in _all_parameters(entry):
        if one.default is not None:
            lines.append(f"{inner}# {one.name}: {_default(one.default)}")
    return "\n".join(lines) + "\n"


def _default(python: str) -> str:
    """Return a default as YAML writes it, or, where YAML cannot, as Python does."""
    try:
        value = ast.literal_eval(python)
        return _yaml(list(value) if isinstance(value, tuple) else value)
    except Exception:
        return f"…  (in Python: {python})"


def _yaml(value: object) -> str:
    return yaml_text.write_inline(value)
