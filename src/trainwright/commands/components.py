"""`trainwright components [KIND] [NAME]`: lists the components that a run file may name, and their YAML.

registry/catalogue.py reads the source files, without executing them. Recipes, packaged files that a run file extends,
are listed like a kind of component; config/required.py reads them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from trainwright.commands.terminal import show_rows
from trainwright.config import yaml_text
from trainwright.config.builtin import KIND_FOLDERS
from trainwright.config.problems import nearest
from trainwright.config.required import Recipe, example_lines, packaged_recipes
from trainwright.errors import ComponentError
from trainwright.log import align_columns
from trainwright.models.presets import preset_sizes
from trainwright.registry.catalogue import Catalogue, Entry, Parameter, read_catalogue

SECTIONS = {
    "trainer": "trainer",
    "model": "model",
    "optimizer": "trainer.optimizer",
    "schedule": "trainer.schedule",
    "dataset": "data.train",
    "collator": "data.collator",
    "sampler": "data.sampler",
    "hook": "hooks",
    "writer": "writers",
    "metric": "evaluation.metrics.NAME",
    "benchmark": "evaluation.benchmarks",
    "task": "task",
    "loss": "trainer.loss",
    "reward": "trainer.rewards",
    "transform": "data.train.transform",
    "tokenizer": "data.collator.tokenizer",
}
"""The setting of each kind of component in a run file."""

RECIPE = "recipe"
_LISTS = ("hook", "writer", "benchmark", "reward")
# The components that are arguments of another one, and an example of that one.
_OUTER = {
    "transform": "torchvision.datasets:ImageFolder",
    "tokenizer": "transformers:DataCollatorWithPadding",
    "reward": "grpo",
}
# evaluation.metrics reads these two: the output and the field of the batch that the metric receives.
_METRIC_INPUTS = (Parameter("outputs", "'logits'", "str"), Parameter("labels", "'labels'", "str"))
_OF_ALL_BENCHMARKS = (
    Parameter("name", "None", "str | None"),
    Parameter("batch_size", "8", "int"),
    Parameter("log_samples", "100", "int"),
)
_READ_BY_BUILD = {"metric": _METRIC_INPUTS, "benchmark": _OF_ALL_BENCHMARKS}


def _complete_kind(incomplete: str) -> list[str]:
    return [kind for kind in (*KIND_FOLDERS, RECIPE) if kind.startswith(incomplete)]


def _complete_name(context: typer.Context, incomplete: str) -> list[str]:
    kind = str(context.params.get("kind"))
    if kind in (RECIPE, f"{RECIPE}s"):
        return [name for name in map(_short_name, packaged_recipes()) if name.startswith(incomplete)]
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
        Path, typer.Option(help="The folder (or the run file in it) whose components are listed too.")
    ] = Path(),
) -> None:
    """List the components that a run file may name: built-in ones, those of installed packages and your folders, and
    recipes."""
    folder = project.parent if project.is_file() else project
    if not folder.is_dir():
        raise ComponentError(f"--project: there is no folder {project}. Pass the folder of your run file.")
    kinds = (*KIND_FOLDERS, RECIPE)
    kind = {**{plural: one for one, plural in KIND_FOLDERS.items()}, f"{RECIPE}s": RECIPE}.get(kind or "", kind)
    if kind is not None and kind not in kinds and name is None:
        kind, name = None, kind  # `components cosine`: the name alone
    if kind is not None and kind not in kinds:
        raise ComponentError(f'no kind "{kind}". {_suggest(kind, {each: each for each in kinds})}{_kinds()}')
    recipes = packaged_recipes() if kind in (None, RECIPE) else ()
    catalogue = read_catalogue(folder, [each for each in KIND_FOLDERS if kind in (None, each)])
    if name is None:
        _show_list(catalogue, recipes)
        return
    named = [recipe for recipe in recipes if name in (recipe.name, _short_name(recipe))]
    if kind == RECIPE and not named:
        names = {each: each for each in map(_short_name, recipes)}
        raise ComponentError(f'no recipe "{name}". {_suggest(name, names)}Known: {", ".join(names)}.')
    found = [entry for entry in catalogue.entries if _is_named(entry, name)]
    if not found and not named:
        types = {entry.type.rpartition(".")[2]: entry.type for entry in catalogue.entries}  # `Class` of `file.Class`
        types |= {entry.type: entry.type for entry in catalogue.entries}
        types |= {each: each for each in map(_short_name, recipes)}
        others = {each: each for each in kinds} if kind is None else {}
        known = _kinds() if kind is None else f"Known: {', '.join(entry.type for entry in catalogue.entries)}."
        unreadable = ", ".join(one.location for one in catalogue.unreadable)
        hidden = f" It may be in a file that cannot be read: {unreadable}." if unreadable else ""
        what = "kind and no component" if kind is None else kind
        raise ComponentError(f'no {what} "{name}". {_suggest(name, {**types, **others})}{known}{hidden}')
    _warn(catalogue)
    for entry in found if kind is None else found[:1]:
        _show_one(entry)
    for recipe in named:
        _show_recipe(recipe)


def _show_list(catalogue: Catalogue, recipes: Sequence[Recipe]) -> None:
    rows = [(entry.kind, entry.type, _summary(entry), _parameters(entry)) for entry in catalogue.entries]
    rows += [
        (RECIPE, each.name, each.summary, ", ".join(setting.name for setting in each.required)) for each in recipes
    ]
    if not sys.stdout.isatty():
        show_rows(("kind", "name", "what it is", "parameters"), rows)
    else:
        for kind in dict.fromkeys(row[0] for row in rows):
            Console(highlight=False).print(f"[bold]{kind}[/bold] [dim]in {SECTIONS.get(kind, 'extends')}[/dim]")
            own = [row[1:] for row in rows if row[0] == kind]
            show_rows(("name", "what it is", "parameters"), own, wrapped=("what it is", "parameters"))
            print()
        print("One in full: trainwright components KIND NAME")
    _warn(catalogue)


def _short_name(recipe: Recipe) -> str:
    return recipe.name.rpartition("/")[2]


def _show_recipe(recipe: Recipe) -> None:
    """Prints the file of a recipe, and the run file that extends it with examples of the required settings."""
    print(f"{RECIPE} {recipe.name}\n")
    _print_yaml(recipe.text)
    print("\nIn a run file, with your own values:\n")
    _print_yaml("\n".join([f"extends: {recipe.name}", *example_lines(recipe.required)]) + "\n")


def _summary(entry: Entry) -> str:
    origin = f" (from {entry.distribution})" if entry.distribution else ""
    return f"{entry.summary or '–'}{origin}"


def _warn(catalogue: Catalogue) -> None:
    for location, problem in catalogue.unreadable:
        print(f"warning: {location}: {problem}. Its components are not listed; correct the file.", file=sys.stderr)


def _is_named(entry: Entry, name: str) -> bool:
    """Returns True if `name` refers to this entry: its name in a run file, its class, or its file and class."""
    stem, _, own = entry.type.partition(".")
    return name in (entry.type, own, *entry.registered, f"{KIND_FOLDERS[entry.kind]}/{stem}.py:{own}")


def _suggest(word: str, types: Mapping[str, str]) -> str:
    near = nearest(word, types)
    return f'Did you mean "{types[near]}"? ' if near else ""


def _kinds() -> str:
    return f"Kinds: {', '.join((*KIND_FOLDERS, RECIPE))}."


def _all_parameters(entry: Entry) -> tuple[Parameter, ...]:
    return (*entry.signature.parameters, *_READ_BY_BUILD.get(entry.kind, ()))


def _parameters(entry: Entry) -> str:
    words = [str(one) for one in _all_parameters(entry)]
    words += [f"… (see {entry.signature.open_to})"] if entry.signature.open_to else []
    presets = _presets(entry)
    words += [f"preset: {' | '.join(presets)}"] if presets else []
    return ", ".join(words) or "none"


def _presets(entry: Entry) -> Mapping[str, int]:
    return preset_sizes().get(entry.type, {}) if entry.kind == "model" else {}


def _show_one(entry: Entry) -> None:
    print(f"{entry.kind} {entry.type}   {entry.location}\n")
    print(entry.doc or "It has no docstring.")
    if entry.distribution:
        print(f"\nInstalled with {entry.distribution}.")
    parameters = _all_parameters(entry)
    if parameters:
        print("\nParameters:")
        rows = [(one.name, "required" if one.default is None else one.default, one.annotation) for one in parameters]
        print("\n".join(f"  {line}" for line in align_columns(rows)))
    if entry.signature.open_to:
        print(f"  {entry.signature.open_to} accepts further ones.")
    if entry.kind == "trainer":
        print("\nIts settings are those of the trainer section: see trainwright config --schema.")
    presets = _presets(entry)
    if presets:
        print(f"\nPresets of all arguments, as in {{type: {entry.type}, preset: {next(iter(presets))}}}:")
        sizes = [(name, f"{size:,} weights") for name, size in presets.items()]
        print("\n".join(f"  {line}" for line in align_columns(sizes)))
    for short in entry.registered:
        print(f'\nIt is "{short}" too, once `imports` names its file: {entry.location.rpartition(":")[0]}.')
    print("\nIn a run file:\n")
    _print_yaml(snippet(entry))


def _print_yaml(text: str) -> None:
    if sys.stdout.isatty():
        Console().print(Syntax(text, "yaml", theme="ansi_dark", background_color="default"))
    else:
        print(text, end="")


def snippet(entry: Entry) -> str:
    """Returns the component as YAML in its section: required arguments blank, others in comments."""
    sections = SECTIONS[entry.kind].replace("NAME", entry.type.rpartition(".")[2].lower()).split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    if entry.kind in _OUTER:
        lines.insert(-1, f"{'  ' * (len(sections) - 1)}type: {yaml_text.write_inline(_OUTER[entry.kind])}")
    first = "  " * len(sections) + ("- " if entry.kind in _LISTS else "")
    inner = " " * len(first)
    lines.append(f"{first}type: {yaml_text.write_inline(entry.type)}")
    parameters = _all_parameters(entry)
    for one in parameters:
        if one.default is None:
            lines.append(f"{inner}{one.name}:  # required{f' ({one.annotation})' if one.annotation else ''}")
    lines += [f"{inner}# {one.name}: {_default(one.default)}" for one in parameters if one.default is not None]
    return "\n".join(lines) + "\n"


def _default(python: str) -> str:
    """Returns a default in YAML, or in Python where YAML has no such value."""
    try:
        value = ast.literal_eval(python)
        return yaml_text.write_inline(list(value) if isinstance(value, tuple) else value)
    except Exception:
        return f"…  (in Python: {python})"
