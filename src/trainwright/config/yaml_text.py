"""Parses YAML into a tree of settings with the line of each value, and writes plain settings as YAML.

files.py and overrides.py merge trees; schema.py validates the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml
from yaml.nodes import MappingNode, ScalarNode, SequenceNode

from trainwright.errors import ConfigError

KeyPath: TypeAlias = tuple[str | int, ...]


class Origin(NamedTuple):
    """The source location of a setting.

    Shown as `run.yaml:14`, `override trainer.max_steps=5` (line 0) or `script.py:8: --train-iters`.
    """

    file: str
    line: int
    given_as: str = ""
    """The flag or argument of a program that sets it; empty for a file and an override."""

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}" if self.line else self.file
        return f"{location}: {self.given_as}" if self.given_as else location

    @classmethod
    def parse(cls, text: str | None, given_as: str = "") -> Origin | None:
        """Return the origin for `file:line`; None for other text."""
        file, colon, line = (text or "").rpartition(":")
        return cls(file, int(line), given_as) if colon and line.isdecimal() else None

    @property
    def is_override(self) -> bool:
        """True for an override on the command line."""
        return self.line == 0


@dataclass(frozen=True)
class Node:
    """One value: a scalar, a tuple of nodes or a dict of nodes; `origin` is None if it is not known."""

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
        """Yield the path (an index as text) and the origin of this node and of all nodes below it."""
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
        """Return this mapping without `keys`."""
        return Node({key: node for key, node in self.value.items() if key not in keys}, self.origin)


def nearest_origin(origins: Mapping[KeyPath, Origin], path: KeyPath) -> Origin | None:
    """Return the origin of the setting at `path`, or of the nearest key above it."""
    keys = tuple(map(str, path))
    return next((origins[keys[:end]] for end in range(len(keys), -1, -1) if keys[:end] in origins), None)


def to_tree(value: Any, origins: Mapping[KeyPath, Origin], path: KeyPath = ()) -> Node:
    """Return the tree of a plain value, with the origin that `origins` has for the path of each node.

    A value may be a node, which keeps its origin.
    """
    if isinstance(value, Node):
        return Node(to_tree(value.value, origins, path).value, value.origin)
    grown: Any = value
    if isinstance(value, Mapping):
        grown = {key: to_tree(item, origins, (*path, key)) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        grown = tuple(to_tree(item, origins, (*path, str(index))) for index, item in enumerate(value))
    return Node(grown, origins.get(path))


def merge(earlier: Node, later: Node, path: KeyPath = ()) -> Node:
    """Return `earlier` with `later` merged into it: mappings merge, any other value replaces.

    A mapping that changes `type` replaces the earlier one, whose arguments belong to another class. A key `~name`
    removes `name`; if there is no such key, it is kept, and overrides.py rejects it.
    """
    if isinstance(later.value, dict):
        earlier = expand_shorthand(earlier, path)
    if not isinstance(earlier.value, dict) or not isinstance(later.value, dict) or _types_differ(earlier, later, path):
        return later
    merged = dict(earlier.value)
    for key, node in later.value.items():
        if REMOVAL_KEY.fullmatch(key) and key.removeprefix(REMOVAL) in merged and node.value is None:
            del merged[key.removeprefix(REMOVAL)]
        else:
            merged[key] = merge(merged[key], node, (*path, key)) if key in merged else node
    return Node(merged, later.origin)


def expand_shorthand(node: Node, path: KeyPath) -> Node:
    """Return a bare `model.pretrained` as a mapping with `folder`; any other node unchanged."""
    is_short = path == ("model", "pretrained") and isinstance(node.value, str)
    return Node({"folder": node}, node.origin) if is_short else node


def _types_differ(earlier: Node, later: Node, path: KeyPath) -> bool:
    first, second = earlier.value.get("type"), later.value.get("type")
    if path == ("trainer",):
        return False  # its limits, batch sizes and optimizer apply to any trainer
    if path == ("data", "eval") and (first is None) != (second is None):
        return True  # a bare component and named sets cannot be merged
    return first is not None and second is not None and bool(first.value != second.value)


def map_strings(node: Node, change: Callable[[str], str]) -> Node:
    """Return the tree with `change` applied to each text value."""
    value = node.value
    if isinstance(value, str):
        value = change(value)
    elif isinstance(value, dict):
        value = {key: map_strings(item, change) for key, item in value.items()}
    elif isinstance(value, tuple):
        value = tuple(map_strings(item, change) for item in value)
    return Node(value, node.origin)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path without resolving links, because messages show the link's name."""
    return Path(os.path.abspath(path))  # noqa: PTH100


REMOVAL = "~"
"""The first letter of a key, or of an override, that removes a setting."""
REMOVAL_KEY = re.compile(rf"{REMOVAL}[A-Za-z_].*", re.DOTALL)
MAX_DEPTH = 64
"""Levels of nesting. Python's stack allows several times this depth in every function that walks a config."""
TOO_DEEP = f"the settings are nested more than {MAX_DEPTH} levels deep. Flatten them."
_MAX_REPEATED = 20_000
"""The maximum number of values that aliases may repeat; ten aliases of ten aliases, nine levels deep, would be a
billion."""
_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"

# PyYAML implements YAML 1.1, where `on` is true, 1e-4 is text and 12:30 is 750. Shared by reader and writer, so that a
# written value is equal after reading. A thousands separator is allowed every three digits only: 2024_01_02 is text.
_PLAIN_WORDS: tuple[tuple[str, str, str], ...] = (
    ("bool", r"true|True|false|False", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:_[0-9]{3})+|0x[0-9a-fA-F]+|0o[0-7]+)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_letters in _PLAIN_WORDS:
        for letter in first_letters:
            key = "" if letter == "\0" else letter
            table.setdefault(key, []).append((_TAG + tag, re.compile(rf"^(?:{pattern})\Z")))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803  # PyYAML's name
        """Limit the nesting of brackets, because PyYAML's time for each one grows with their number."""
        if self.flow_level >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=TOO_DEEP, problem_mark=self.get_mark())
        super().fetch_flow_collection_start(TokenClass)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value in full instead of using aliases."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> ScalarNode:
    # Only double quotes preserve line breaks and invisible characters.
    return dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)


def parse(text: str, origin_at: Callable[[int], Origin | None]) -> Node:
    """Return the settings in `text`; `origin_at(line)` returns the origin of a node on that line (from 1)."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        return Node(None, origin_at(1)) if root is None else _Reader(origin_at).read(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(_explain_syntax(error), where=origin_at(mark.line + 1 if mark else 1)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"not valid YAML: the character {chr(int(error.character))!r} is not allowed. Remove it."
        raise ConfigError(problem, where=origin_at(line)) from error
    except RecursionError as error:
        raise ConfigError(TOO_DEEP, where=origin_at(1)) from error


def write(settings: dict[str, Any]) -> str:
    """Return `settings` as YAML; `parse` returns an equal tree."""
    return _dump(settings, is_flow=False)


def write_inline(value: Any) -> str:
    """Return one value as YAML on one line, in the form that follows `key: `."""
    if isinstance(value, dict | list):
        return _dump(value, is_flow=True).rstrip("\n")
    # yaml.dump adds an end-of-document marker to a bare scalar.
    return _dump({"key": value}, is_flow=False).removeprefix("key: ").rstrip("\n")


def _dump(value: Any, *, is_flow: bool) -> str:
    # Long text is written on one line, so that grep finds it.
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=is_flow, sort_keys=False, allow_unicode=True, width=2**31
    )
    return text


def _explain_syntax(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be read"
    if problem == TOO_DEEP:
        return problem
    if "'\\t'" in problem:
        return "not valid YAML: a tab where only spaces are allowed. Indent with spaces."
    if "alias" in f"{error.context} {problem}":
        return f'not valid YAML: {problem}. A value that begins with * is an alias. Put a glob in quotes: "*.q_proj".'
    if problem.endswith("but got '{'"):
        problem = f"{problem}. Put a reference within braces in quotes: {{lr: '${{seed}}'}}"
    context = f" {error.context}" if error.context else ""
    started = f" (started at line {error.context_mark.line + 1})" if error.context and error.context_mark else ""
    return f"not valid YAML:{context}{started}: {problem}. Check brackets, quotes, colons and indentation here."


class _Reader:
    """Converts PyYAML's nodes to Node, and rejects values that a config cannot contain."""

    def __init__(self, origin_at: Callable[[int], Origin | None]) -> None:
        self.origin_at = origin_at
        self.open: list[yaml.Node] = []  # the nodes being read, outermost first: an alias of one of them is a cycle
        self.seen: set[int] = set()  # ids of nodes: PyYAML uses one object for all aliases of a value
        self.num_repeated = 0

    def read(self, node: yaml.Node, origin: Origin | None = None) -> Node:
        origin = origin or self.origin_of(node)
        if id(node) in self.seen:
            self.num_repeated += 1
            if self.num_repeated > _MAX_REPEATED:
                problem = f"the aliases (*name) repeat more than {_MAX_REPEATED:,} values. Write fewer of them."
                raise ConfigError(problem, where=origin)
        self.seen.add(id(node))
        if isinstance(node, ScalarNode):
            return Node(self.scalar(node), origin)
        if any(node is other for other in self.open):
            raise ConfigError("not valid here: an alias (*name) inside the value that it names.", where=origin)
        if len(self.open) >= MAX_DEPTH:
            raise ConfigError(TOO_DEEP, where=origin)
        self.open.append(node)
        try:
            if isinstance(node, MappingNode) and node.tag == _TAG + "map":
                return Node(self.mapping(node), origin)
            if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
                return Node(tuple(self.read(item) for item in node.value), origin)
        finally:
            self.open.pop()
        raise self.unknown_tag(node)

    def mapping(self, node: MappingNode) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        given: dict[str, Node] = {}
        for key_node, value_node in node.value:
            origin = self.origin_of(key_node)
            if key_node.tag == _MERGE:
                merged = {**self.merged(value_node), **merged}
                continue
            key = self.scalar(key_node) if isinstance(key_node, ScalarNode) else None
            if not isinstance(key, str):
                shown = getattr(key_node, "value", "") if isinstance(key_node, ScalarNode) else "a list or a mapping"
                problem = f'a key must be text, got {shown or "nothing"}. Put it in quotes: "{shown}": …'
                raise ConfigError(problem, where=origin)
            if key in given:
                problem = f'the key "{key}" is set twice, first at {given[key].origin}. Remove one.'
                raise ConfigError(problem, where=origin)
            # The origin is the line of the key, even if the value begins on the next line.
            given[key] = self.read(value_node, origin)
        return {**merged, **given}

    def merged(self, node: yaml.Node) -> dict[str, Node]:
        """Return the mappings of `<<: *name` or `<<: [*first, *second]`, merged; the first one wins."""
        merged: dict[str, Node] = {}
        for each in node.value if isinstance(node, SequenceNode) else [node]:
            value = self.read(each).value
            if not isinstance(value, dict):
                raise ConfigError("<< needs an alias of a mapping, such as <<: *defaults.", where=self.origin_of(each))
            merged = {**value, **merged}
        return merged

    def scalar(self, node: ScalarNode) -> Any:
        text: str = node.value
        kind = node.tag.removeprefix(_TAG)
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"the text {text!a} is not valid Unicode.", where=self.origin_of(node))
        try:
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                based = re.match(r"[-+]?0[xo]", text)
                return int(text, 0) if based else int(text)
            if kind == "float":
                return float(re.sub(r"^([-+]?)\.(?=[a-zA-Z])", r"\1", text))
        except (KeyError, ValueError) as error:
            raise ConfigError(f"{text!r} is not a {kind}.", where=self.origin_of(node)) from error
        if kind == "null":
            return None
        if kind in ("str", "merge"):
            return text
        raise self.unknown_tag(node)

    def unknown_tag(self, node: yaml.Node) -> ConfigError:
        shown = node.tag.replace(_TAG, "!!")
        problem = (
            f"the tag {shown} is not supported: a config has text, numbers, true, false, null, lists and mappings."
        )
        return ConfigError(f"{problem} Remove the tag.", where=self.origin_of(node))

    def origin_of(self, node: yaml.Node) -> Origin | None:
        return self.origin_at(node.start_mark.line + 1)
