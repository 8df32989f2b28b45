"""Required settings: `path: ${required:chats, such as chats.jsonl}` is set by the file that extends this one.

The text after `required:` describes the setting; the text after the last `, such as ` is an example in YAML. A run that
does not set such a setting raises. The packaged recipes in configs/recipes/ use required settings for the user's
choices.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from trainwright.config import yaml_text
from trainwright.config.groups import packaged_folder
from trainwright.config.problems import dotted
from trainwright.config.yaml_text import KeyPath, Node, Origin
from trainwright.errors import ConfigError

_REQUIRED = re.compile(r"\$\{required:(?P<text>[^{}]*)\}")
_EXAMPLE = ", such as "
RECIPES = "recipes"
"""The folder of the recipes among the packaged configs."""


class Required(NamedTuple):
    """A required setting."""

    path: KeyPath
    meaning: str
    example: Any
    """A plain value; None without an example."""
    where: Origin | None

    @property
    def name(self) -> str:
        """The dotted name."""
        return dotted(self.path)


class Recipe(NamedTuple):
    """A packaged recipe; `name` is what `extends` names."""

    name: str
    summary: str
    required: tuple[Required, ...]
    text: str


def required_settings(node: Node, path: KeyPath = ()) -> Iterator[Required]:
    """Yield the required settings at and below `path` that are not set."""
    if isinstance(node.value, dict):
        for key, item in node.value.items():
            yield from required_settings(item, (*path, key))
    elif isinstance(node.value, tuple):
        for index, item in enumerate(node.value):
            yield from required_settings(item, (*path, index))
    elif isinstance(node.value, str) and (found := _REQUIRED.fullmatch(node.value)) is not None:
        meaning, _, example = " ".join(found["text"].split()).rpartition(_EXAMPLE)
        value = yaml_text.parse(example, lambda _: None).plain() if meaning else None
        yield Required(path, meaning or example, value, node.origin)


def located_at(node: Node, where: Origin) -> Node:
    """Return the settings of an extended file with its required settings located where it is extended."""
    if isinstance(node.value, dict):
        return Node({key: located_at(item, where) for key, item in node.value.items()}, node.origin)
    if isinstance(node.value, tuple):
        return Node(tuple(located_at(item, where) for item in node.value), node.origin)
    is_required = isinstance(node.value, str) and _REQUIRED.fullmatch(node.value) is not None
    return Node(node.value, where) if is_required else node


def reject_missing(settings: Node) -> None:
    """Reject required settings that are not set, all in one error with an example."""
    missing = list(required_settings(settings))
    if not missing:
        return
    # In the order of a run file: the model first.
    missing.sort(key=lambda each: (each.where is None, each.where or Origin("", 0), each.path[0] != "model"))
    what = "a required setting is" if len(missing) == 1 else f"{len(missing)} required settings are"
    lines = [f"  {each.name}: {each.meaning}" for each in missing]
    example = [f"  {line}" for line in example_lines(missing)]
    raise ConfigError(
        "\n".join([f"{what} not set:", *lines, "Set them in the run file, for example:", *example]),
        where=missing[0].where,
    )


def example_lines(required: Iterable[Required]) -> list[str]:
    """Return lines of a run file that set the required settings to their examples, one line for each section."""
    sections: dict[str, Any] = {}
    for each in required:
        below = sections
        # A list is replaced completely.
        keys = [str(key) for key in itertools.takewhile(lambda key: isinstance(key, str), each.path)]
        for key in keys[:-1]:
            below = below.setdefault(key, {})
        below[keys[-1]] = "…" if each.example is None or len(keys) < len(each.path) else each.example
    return [f"{name}: {yaml_text.write_inline(value)}" for name, value in sections.items()]


def packaged_recipes() -> tuple[Recipe, ...]:
    """Return the packaged recipes by name. The first line of their files is a comment, the summary."""
    found = []
    for path in sorted((packaged_folder() / RECIPES).glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        settings = yaml_text.parse(text, lambda _: None)
        summary = text.partition("\n")[0].removeprefix("# ")
        found.append(Recipe(f"{RECIPES}/{path.stem}", summary, tuple(required_settings(settings)), text))
    return tuple(found)
