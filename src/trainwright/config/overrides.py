"""Overrides from the command line: `trainer.max_steps=5`, `hooks.0.steps=5`, `data.eval={}`, `~trainer.schedule`.

An override replaces the value at its path, or adds a key; with ~ it removes one. schema.py validates the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trainwright.config import yaml_text
from trainwright.config.problems import describe, did_you_mean, dotted, suggest
from trainwright.config.yaml_text import (
    MAX_DEPTH,
    REMOVAL,
    REMOVAL_KEY,
    TOO_DEEP,
    KeyPath,
    Node,
    Origin,
    expand_shorthand,
)
from trainwright.errors import ConfigError


def apply_overrides(
    settings: Node, overrides: Iterable[str], expand: Callable[[Node, KeyPath], Node] = lambda value, path: value
) -> Node:
    """Return `settings` with the overrides applied in order; `expand` replaces the names of groups in their values."""
    for text in overrides:
        if text.lstrip().startswith(REMOVAL):
            settings = remove_at(settings, *parse_removal(text))
        else:
            path, value = parse_override(text)
            settings = replace_at(settings, path, expand(value, without_indices(settings, path)))
    return settings


def without_indices(settings: Node, path: tuple[str, ...]) -> KeyPath:
    """Return the path without the indices of lists."""
    keys: list[str] = []
    node: Node | None = settings
    for key in path:
        if node is not None and isinstance(node.value, tuple):
            node = node.value[int(key)] if key.isdecimal() and int(key) < len(node.value) else None
        else:
            keys.append(key)
            node = node.value.get(key) if node is not None and isinstance(node.value, dict) else None
    return tuple(keys)


def parse_removal(text: str) -> tuple[tuple[str, ...], Origin]:
    """Return the path of `~a.b`, and the origin for messages."""
    where = Origin(f"override {text}", 0)
    left, equals, right = text.strip().removeprefix(REMOVAL).partition("=")
    if equals:
        problem = f"{REMOVAL} removes a setting and has no value. Write {REMOVAL}{left}, or {left}={right}"
        raise ConfigError(f"{problem} without {REMOVAL}.", where=where)
    path = _path(left, where)
    if not all(path):
        raise ConfigError(f"a removal is written {REMOVAL}key, such as {REMOVAL}trainer.schedule.", where=where)
    return path, where


def reject_removals(settings: Node, path: KeyPath = ()) -> None:
    """Raise for a key `~name` of a file that has a value, or that removed nothing from the extended files."""
    if isinstance(settings.value, tuple):
        for index, item in enumerate(settings.value):
            reject_removals(item, (*path, index))
    for key, item in settings.value.items() if isinstance(settings.value, dict) else ():
        if not REMOVAL_KEY.fullmatch(key):
            reject_removals(item, (*path, key))
            continue
        name = key.removeprefix(REMOVAL)
        problem = f"{REMOVAL} removes a setting and has no value. Write `{key}:` with nothing after it."
        if item.value is None:
            known = [each for each in settings.value if not REMOVAL_KEY.fullmatch(each)]
            problem = f"there is nothing to remove: no extended file sets {dotted((*path, name))}."
            problem += did_you_mean(name, known) or " Remove this line."
        raise ConfigError(f"{dotted((*path, key))}: {problem}", where=item.origin)


def remove_at(settings: Node, path: tuple[str, ...], where: Origin, done: tuple[str, ...] = ()) -> Node:
    """Return `settings` without the setting at `path`; `done` is the path of `settings`."""
    key, rest = path[0], path[1:]
    settings = expand_shorthand(settings, done)
    if isinstance(settings.value, tuple):
        index = _index(key, settings, ".".join(done), where)
        inner = [remove_at(settings.value[index], rest, where, (*done, key))] if rest else []
        return Node((*settings.value[:index], *inner, *settings.value[index + 1 :]), settings.origin)
    values = settings.value if isinstance(settings.value, dict) else {}
    if key not in values:
        name = ".".join((*done, key))
        known = f" {suggest(key, values)}" if values else ""
        raise ConfigError(f"{name}: there is nothing to remove, because it is not set.{known}", where=where)
    if not rest:
        return settings.without(key)
    return Node({**values, key: remove_at(values[key], rest, where, (*done, key))}, settings.origin)


def parse_override(text: str) -> tuple[tuple[str, ...], Node]:
    """Return the path and the value of `a.b=value`; the value is YAML."""
    where = Origin(f"override {text}", 0)
    left, equals, right = text.partition("=")
    path = _path(left, where)
    if not equals or not all(path):
        problem = "an override is written key=value, such as trainer.max_steps=5"
        missing = "it has no =" if not equals else "a part of the key is empty"
        raise ConfigError(f"{problem}; {missing}.", where=where)
    if path[0] in ("extends", "project_dir"):
        raise ConfigError(f"{path[0]}: is read from the file only. Set it there.", where=where)
    if right.lstrip().startswith("*"):
        quoted = f"""'{left}="{right.strip()}"'"""
        problem = "a value that begins with * is an alias in YAML. Quote the value, and the override as well"
        raise ConfigError(f"{'.'.join(path)}: {problem}: {quoted}.", where=where)
    return path, yaml_text.parse(right, lambda line: where)


def _path(text: str, where: Origin) -> tuple[str, ...]:
    path = tuple(part.strip() for part in text.split("."))
    if len(path) > MAX_DEPTH:
        raise ConfigError(TOO_DEEP, where=where)
    return path


def parse_mapping(text: str) -> Node:
    """Return the settings of an override that is a YAML mapping."""
    where = Origin(f"override {text}", 0)
    return yaml_text.parse(text, lambda line: where)


def replace_at(settings: Node, path: tuple[str, ...], value: Node, *, done: tuple[str, ...] = ()) -> Node:
    """Return `settings` with `value` at `path`; `done` is the path of `settings`, for messages."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    here = ".".join(done)
    if isinstance(settings.value, tuple):
        index = _index(key, settings, here, value.origin)
        items = list(settings.value)
        items[index] = replace_at(items[index], rest, value, done=(*done, key))
        return Node(tuple(items), settings.origin)
    branch = _branch(settings, done, value)
    below = branch.get(key, Node({}, value.origin))
    return Node({**branch, key: replace_at(below, rest, value, done=(*done, key))}, settings.origin or value.origin)


def _branch(settings: Node, done: tuple[str, ...], value: Node) -> dict[str, Node]:
    """Return the mapping that receives a key; a missing one is empty, a bare component becomes a mapping."""
    settings = expand_shorthand(settings, done)
    if settings.value is None:
        return {}
    if isinstance(settings.value, dict):
        return settings.value
    if isinstance(settings.value, str) and _may_be_component(done):
        return {"type": settings}
    problem = f"{'.'.join(done)}: is {describe(settings.plain())}, so it has no keys."
    raise ConfigError(f"{problem} Replace it whole: {'.'.join(done)}=….", where=value.origin)


def _may_be_component(path: tuple[str, ...]) -> bool:
    # `name.x=1` must not turn the run's name into a mapping.
    if path in (("model", "lora"), ("model", "freeze")):
        return False
    return path[0] in ("task", "model", "hooks", "writers") or (len(path) > 1 and path[0] in _HOLD_COMPONENTS)


_HOLD_COMPONENTS = ("data", "trainer", "evaluation")


def _index(key: str, settings: Node, here: str, where: Origin | None) -> int:
    length = len(settings.value)
    if not key.isdecimal():
        raise ConfigError(f'{here}: is a list of {length}; "{key}" is not an index such as {here}.0.', where=where)
    if int(key) >= length:
        known = f"0 to {length - 1}" if length else "none"
        problem = f"{here}: is a list of {length}, so there is no index {key} (known: {known})."
        raise ConfigError(f"{problem} Replace the whole list: {here}=[…].", where=where)
    return int(key)
