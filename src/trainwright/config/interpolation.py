"""References between settings: `name: lm-${seed}`, `lr: ${trainer.optimizer.lr}`, `path: ${env:DATA}/train`.

References are resolved after extended files, groups and overrides are merged, so they follow an override. A value that
consists of one reference has the type of its target; a reference within text must be a number, a boolean or text. `$${`
is a literal `${`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from trainwright.config.problems import describe, dotted, suggest
from trainwright.config.yaml_text import MAX_DEPTH, TOO_DEEP, KeyPath, Node, expand_shorthand, map_strings
from trainwright.errors import ConfigError, TrustError

_MARK = re.compile(r"\$\$\{|\$\{(?P<inner>[^{}]*)\}|\$\{")
_PATH = re.compile(r"[\w-]+(?:\.[\w-]+)*")
_ENVIRONMENT = re.compile(r"env:(?P<name>[A-Za-z_]\w*)(?:,(?P<default>.*))?", re.DOTALL)
_SECRET = re.compile(
    r"secret|token(?!i|s)|passw|passphrase|credential|auth(?!or)|(?:api|access|private|signing)_?key|(?:^|_)(?:key|pwd)$",
    re.IGNORECASE,
)
"""Names of environment variables whose values must not be saved."""
_MAX_REPEATED = 20_000
"""The maximum number of values that references may repeat, as for YAML aliases."""
_MAX_LETTERS = 100_000
_MAX_SHOWN = 60


def interpolate(settings: Node, defaults: Node, *, untrusted_file: str | None = None) -> Node:
    """Return `settings` with all references resolved; `defaults` has the values of settings that are not set.

    The origin of a resolved value is that of the reference. Settings of an untrusted file cannot read the
    environment.
    """
    return _Resolver(settings, defaults, untrusted_file).resolve(settings, ())


def escape(settings: Node) -> Node:
    """Return resolved settings such that `interpolate` returns them unchanged."""
    return map_strings(settings, escape_text)


def escape_text(text: str) -> str:
    """Return text with `${` escaped."""
    return text.replace("${", "$${")


def escape_plain(value: Any) -> Any:
    """Return plain settings with `escape_text` applied to each text."""
    if isinstance(value, str):
        return escape_text(value)
    if isinstance(value, Mapping):
        return {key: escape_plain(item) for key, item in value.items()}
    return [escape_plain(item) for item in value] if isinstance(value, list | tuple) else value


class _Resolver:
    def __init__(self, settings: Node, defaults: Node, untrusted_file: str | None) -> None:
        self._settings = settings
        self._defaults = defaults
        self._untrusted_file = untrusted_file
        self._open: list[KeyPath] = []  # the texts being resolved, outermost first
        self._resolved: dict[KeyPath, Node] = {}  # texts with references, by path
        self._sizes: dict[int, tuple[Node, int]] = {}  # by id; the node is kept, so that its id is not reused
        self._depth = 0
        self._num_repeated = 0

    def resolve(self, node: Node, path: KeyPath) -> Node:
        if isinstance(node.value, str):
            return self._resolve_text(node, path) if "${" in node.value else node
        if not isinstance(node.value, dict | tuple):
            return node
        if self._depth > MAX_DEPTH:
            raise ConfigError(TOO_DEEP, where=node.origin)
        self._depth += 1
        try:
            if isinstance(node.value, dict):
                value: Any = {key: self.resolve(item, (*path, key)) for key, item in node.value.items()}
            else:
                value = tuple(self.resolve(item, (*path, str(index))) for index, item in enumerate(node.value))
        finally:
            self._depth -= 1
        return Node(value, node.origin)

    def _resolve_text(self, node: Node, path: KeyPath) -> Node:
        if path in self._resolved:
            return self._resolved[path]
        self._enter(node, path)
        try:
            resolved = self._substitute(node, path)
        finally:
            self._open.pop()
        self._resolved[path] = resolved
        return resolved

    def _enter(self, node: Node, path: KeyPath) -> None:
        if path in self._open:
            names = " → ".join(dotted(each) for each in (*self._open[self._open.index(path) :], path))
            self._reject(node, path, f"the references lead back to it: {names}. Remove one of them.")
        if len(self._open) > MAX_DEPTH:
            self._reject(node, path, f"more than {MAX_DEPTH} references follow each other. Use fewer of them.")
        self._open.append(path)

    def _substitute(self, node: Node, path: KeyPath) -> Node:
        text: str = node.value
        origin = node.origin
        refers = any(mark[0] != "$${" for mark in _MARK.finditer(text))
        if refers and origin is not None and not origin.is_override:
            shown = " ".join(text.split())
            shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[: _MAX_SHOWN - 1]}…"
            origin = origin._replace(given_as=shown)
        whole = _MARK.fullmatch(text)
        if whole is not None and whole["inner"] is not None:
            target = self._value(whole["inner"], node, path)
            self._num_repeated += self._size(target)
            if self._num_repeated > _MAX_REPEATED:
                self._reject(node, path, f"the references repeat more than {_MAX_REPEATED:,} values. Use fewer.")
            return Node(target.value, origin)
        pieces, end = [], 0
        for mark in _MARK.finditer(text):
            pieces.append(text[end : mark.start()])
            end = mark.end()
            pieces.append("${" if mark[0] == "$${" else self._text(mark, node, path))
        pieces.append(text[end:])
        if sum(map(len, pieces)) > _MAX_LETTERS:
            self._reject(node, path, f"the references make a text of more than {_MAX_LETTERS:,} letters.")
        return Node("".join(pieces), origin)

    def _text(self, mark: re.Match[str], node: Node, path: KeyPath) -> str:
        if mark["inner"] is None:
            self._reject(node, path, "${ has no }. Write ${section.key}, or $${ for the text ${.")
        value = self._value(mark["inner"], node, path).value
        if isinstance(value, bool):
            return "true" if value else "false"
        if not isinstance(value, str | int | float):
            problem = f"{mark[0]} is {describe(Node(value).plain())}, which cannot be a part of a text."
            self._reject(node, path, f"{problem} Refer to a number or a text.")
        return str(value)

    def _value(self, inner: str, node: Node, path: KeyPath) -> Node:
        """Return the resolved value that the reference `${inner}` in `node` names."""
        name = inner.strip()
        variable = _ENVIRONMENT.fullmatch(name)
        if variable is not None:
            return Node(self._variable(variable["name"], variable["default"], node, path))
        if _PATH.fullmatch(name) is None:
            problem = (
                f"${{{inner}}} is not a reference. Write ${{section.key}}, ${{env:NAME}} for an environment variable"
            )
            self._reject(node, path, f"{problem}, or $${{ for the text ${{.")
        return self.resolve(*self._locate(name, node, path))

    def _locate(self, name: str, node: Node, path: KeyPath) -> tuple[Node, KeyPath]:
        """Return the value at the dotted `name`, with its own references unresolved, and its path."""
        found: Node = self._settings
        done: KeyPath = ()
        for key in name.split("."):
            written_at = done
            found, done = self._follow(found, done)
            found = expand_shorthand(found, written_at)
            below = _below(found, key) or self._default((*done, key))
            if below is None:
                self._reject(node, path, f"${{{name}}}: {self._unknown(found, done, key)}")
            found, done = below, (*done, key)
        return found, done

    def _follow(self, node: Node, path: KeyPath) -> tuple[Node, KeyPath]:
        """Return the mapping or list that a reference on the path to a setting names; any other value unchanged."""
        whole = _MARK.fullmatch(node.value) if isinstance(node.value, str) else None
        if whole is None or whole["inner"] is None or _PATH.fullmatch(whole["inner"].strip()) is None:
            return node, path
        self._enter(node, path)
        try:
            return self._follow(*self._locate(whole["inner"].strip(), node, path))
        finally:
            self._open.pop()

    def _default(self, path: KeyPath) -> Node | None:
        node: Node | None = self._defaults
        for key in path:
            node = None if node is None else _below(node, str(key))
        return node

    def _unknown(self, found: Node, done: KeyPath, key: str) -> str:
        known = [*found.value] if isinstance(found.value, dict) else []
        default = self._default(done)
        if default is not None and isinstance(default.value, dict):
            known += [each for each in default.value if each not in known]
        if isinstance(found.value, tuple):
            return f'{dotted(done)} is a list of {len(found.value)}, so there is no index "{key}".'
        if not known:
            return f"{dotted(done)} is {describe(found.plain())}, so it has no keys."
        where = f" in {dotted(done)}" if done else ""
        return f'there is no setting "{key}"{where}. {suggest(key, known)}'

    def _variable(self, name: str, default: str | None, node: Node, path: KeyPath) -> str:
        if self._untrusted_file is not None and (node.origin is None or not node.origin.is_override):
            raise TrustError(
                f"{dotted(path)}: reading this run folder would read the environment variable {name}. Use --trust "
                "(trust=True) if you trust who wrote it.",
                where=node.origin,
            )
        if _SECRET.search(name):
            problem = (
                f"the environment variable {name} looks like a secret, and its value would be saved in config.yaml"
            )
            self._reject(node, path, f"{problem}. Read it in the code that needs it: os.environ[{name!r}].")
        value = os.environ.get(name, default)
        if value is None:
            problem = f"the environment variable {name} is not set"
            self._reject(node, path, f"{problem}. Set it, or add a default: ${{env:{name},value}}.")
        try:
            value.encode()
        except UnicodeEncodeError:
            self._reject(node, path, f"the environment variable {name} is not valid Unicode.")
        return value

    def _size(self, node: Node) -> int:
        """Return the number of values in a resolved tree, which may contain a node several times."""
        if not isinstance(node.value, dict | tuple):
            return 1
        if id(node) not in self._sizes:
            below = node.value.values() if isinstance(node.value, dict) else node.value
            self._sizes[id(node)] = (node, 1 + sum(map(self._size, below)))
        return self._sizes[id(node)][1]

    def _reject(self, node: Node, path: KeyPath, text: str) -> NoReturn:
        raise ConfigError(f"{dotted(path)}: {text}", where=node.origin)


def _below(node: Node, key: str) -> Node | None:
    if isinstance(node.value, dict):
        found: Node | None = node.value.get(key)
        return found
    if isinstance(node.value, tuple):
        return node.value[int(key)] if key.isdecimal() and int(key) < len(node.value) else None
    # A component that is given as a bare type.
    return node if key == "type" and isinstance(node.value, str) else None
