"""Settings before they are checked: a tree that remembers where each value was written.

files.py and overrides.py grow and change the tree; schema.py checks it. A node is immutable, so merging
and overriding return other trees.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]


class Origin(NamedTuple):
    """Where a setting was written.

    Reads as `run.yaml:14`, `override trainer.max_steps=5` (line 0) or `script.py:8: --train-iters`.
    """

    file: str
    line: int
    given_as: str = ""
    """The flag or argument by which a program gave the setting; empty in a file and in an override."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.given_as}" if self.given_as else place

    @classmethod
    def parse(cls, text: str | None, given_as: str = "") -> Origin | None:
        """Return the origin that `file:line` names; None where the text is no such thing."""
        file, colon, line = (text or "").rpartition(":")
        return cls(file, int(line), given_as) if colon and line.isdecimal() else None

    @property
    def is_override(self) -> bool:
        """Was it given on the command line, and not in a file?"""
        return self.line == 0


@dataclass(frozen=True)
class Node:
    """One value: a scalar, a tuple of nodes or a dict of nodes; `origin` is None where it is not known."""

    value: Any
    origin: Origin | None = None

    def plain(self) -> Any:
        """Return the value as plain dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value

    def origins(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Origin]]:
        """Yield the path (an index as text) and the origin of this node and of each one below it."""
        if self.origin is not None:
            yield path, self.origin
        below: Any = ()
        if isinstance(self.value, dict):
            below = self.value.items()
        elif isinstance(self.value, tuple):
            below = ((str(index), node) for index, node in enumerate(self.value))
        for key, node in below:
            yield from node.origins((*path, key))

    def without(self, *keys: str) -> Node:
        """Return this mapping less `keys`."""
        return Node({key: node for key, node in self.value.items() if key not in keys}, self.origin)


def plant(value: Any, origins: Mapping[KeyPath, Origin], path: KeyPath = ()) -> Node:
    """Return the tree of a plain value; each node gets the origin that `origins` has for its path.

    A value may be a node, which has its own origin.
    """
    if isinstance(value, Node):
        return Node(plant(value.value, origins, path).value, value.origin)
    grown: Any = value
    if isinstance(value, Mapping):
        grown = {key: plant(item, origins, (*path, key)) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        grown = tuple(plant(item, origins, (*path, str(index))) for index, item in enumerate(value))
    return Node(grown, origins.get(path))


def merge(earlier: Node, later: Node, path: KeyPath = ()) -> Node:
    """Return `earlier` with `later` laid over it: mappings merge, anything else replaces.

    A mapping that changes `type` replaces the earlier one whole: its arguments would be wrong for another class.
    """
    if isinstance(later.value, dict):
        earlier = spelled_out(earlier, path)
    if not isinstance(earlier.value, dict) or not isinstance(later.value, dict) or _types_differ(earlier, later, path):
        return later
    merged = dict(earlier.value)
    for key, node in later.value.items():
        merged[key] = merge(merged[key], node, (*path, key)) if key in merged else node
    return Node(merged, later.origin)


def spelled_out(node: Node, path: KeyPath) -> Node:
    """Return a bare `model.pretrained` as the mapping that it is short for; any other node as it is."""
    is_short = path == ("model", "pretrained") and isinstance(node.value, str)
    return Node({"folder": node}, node.origin) if is_short else node


def _types_differ(earlier: Node, later: Node, path: KeyPath) -> bool:
    first, second = earlier.value.get("type"), later.value.get("type")
    if path == ("trainer",):
        return False  # its limits, batches and optimizer are no constructor's arguments: they hold for any trainer
    if path == ("data", "eval") and (first is None) != (second is None):
        return True  # one bare component over named sets, or the other way: they cannot be mixed
    return first is not None and second is not None and bool(first.value != second.value)


def map_strings(node: Node, change: Callable[[str], str]) -> Node:
    """Return the tree with each text value replaced by `change` of it."""
    value = node.value
    if isinstance(value, str):
        value = change(value)
    elif isinstance(value, dict):
        value = {key: map_strings(item, change) for key, item in value.items()}
    elif isinstance(value, tuple):
        value = tuple(map_strings(item, change) for item in value)
    return Node(value, node.origin)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path. Links are kept, as resolve() would not: a user knows a folder by the link's name."""
    return Path(os.path.abspath(path))  # noqa: PTH100
