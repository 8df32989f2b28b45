"""Overrides from the command line: `trainer.max_steps=5`, `hooks.0.steps=5`, `data.eval={}`.

An override replaces the value at its path, or adds a key. schema.py validates the result.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainwright.config import yaml_text
from trainwright.config.problems import describe
from trainwright.config.yaml_text import Node, Origin, expand_shorthand
from trainwright.errors import ConfigError


def apply_overrides(settings: Node, overrides: Iterable[str]) -> Node:
    """Return `settings` with the overrides applied in order."""
    for text in overrides:
        path, value = parse_override(text)
        settings = replace_at(settings, path, value)
    return settings


def parse_override(text: str) -> tuple[tuple[str, ...], Node]:
    """Return the path and the value of `a.b=value`; the value is YAML."""
    where = Origin(f"override {text}", 0)
    left, equals, right = text.partition("=")
    path = tuple(part.strip() for part in left.split("."))
    if not equals or not all(path):
        problem = "an override is written key=value, such as trainer.max_steps=5"
        missing = "it has no =" if not equals else "a component of the key is empty"
        raise ConfigError(f"{problem}; {missing}.", where=where)
    if path[0] in ("extends", "project_dir"):
        raise ConfigError(f"{path[0]}: is read from the file only. Set it there.", where=where)
    if right.lstrip().startswith("*"):
        quoted = f"""'{left}="{right.strip()}"'"""
        problem = "a value that begins with * is an alias in YAML. Quote the value, and the override as well"
        raise ConfigError(f"{'.'.join(path)}: {problem}: {quoted}.", where=where)
    return path, yaml_text.parse(right, lambda line: where)


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
        raise ConfigError(f"{problem} Replace the list whole: {here}=[…].", where=where)
    return int(key)
