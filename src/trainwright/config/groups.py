"""Config groups: `trainer=lm-xl`, or `trainer: lm-xl` in a file, is the section in configs/trainer/lm-xl.yaml.

The folder `configs` is next to the file that uses the name, or in the package. A group file contains one section, a
component or a list, which replaces the name in the file that uses it; its `extends` names other files of its folder.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainwright.config.builtin import BUILT_INS
from trainwright.config.problems import describe, did_you_mean, dotted
from trainwright.config.yaml_text import MAX_DEPTH, TOO_DEEP, KeyPath, Node, Origin, merge
from trainwright.errors import ConfigError
from trainwright.tracebacks import shown_path

FOLDER = "configs"
_NAME = re.compile(r"\w[\w.+-]*")
_MAX_NAME = 100
_MAX_FILES = 200
"""The maximum number of group files of one file; links between folders could be cyclic."""

KINDS: Mapping[str, str] = {
    "train": "dataset",
    "eval": "dataset",
    "test": "dataset",
    "hooks": "hook",
    "writers": "writer",
    "metrics": "metric",
    "benchmarks": "benchmark",
    "rewards": "reward",
}
"""The kind of component of a key, for keys whose name differs from the kind."""


class Group(NamedTuple):
    """The use of a group file."""

    path: KeyPath
    """The setting, without indices of lists."""
    name: str
    file: str
    """The group file, for messages."""
    where: Origin | None
    """The source location of the name."""


ReadFile = Callable[[Path], Node]
"""Parses a YAML file."""


def packaged_folder() -> Path:
    """Return the folder of the packaged configs."""
    return Path(str(importlib.resources.files("trainwright"))) / FOLDER


def kind_at(path: KeyPath) -> str | None:
    """Return the kind of component that the setting at `path` has; None if it has none."""
    keys = [*map(str, path)]
    if len(keys) > 1 and keys[-2] in ("eval", "metrics"):
        return KINDS[keys[-2]]
    kind = KINDS.get(keys[-1], keys[-1]) if keys else ""
    return kind if kind in BUILT_INS else None


def group_names(folder: Path, path: KeyPath) -> list[str]:
    """Return the names of the groups of the setting at `path`, for a file in `folder`."""
    return sorted({file.stem for each in _group_folders(folder, path) for file in each.glob("*.yaml")})


def missing(name: str, folder: Path, path: KeyPath) -> str:
    """Describe why a name is not a group of the setting at `path`."""
    known = group_names(folder, path)
    below = f"{FOLDER}/{'/'.join(map(str, path))}"
    if known:
        return f'there is no file "{name}.yaml" in {below}.{did_you_mean(name, known)} Known: {", ".join(known)}.'
    problem = f"must be a mapping (key: value), got {describe(name)}."
    return f"{problem} A name stands for a file in {below} next to the run file, and there is none."


class GroupReader:
    """Replaces the names of groups in the settings of a file in `folder`, and lists them in `used`."""

    def __init__(self, folder: Path, read: ReadFile) -> None:
        self.used: list[Group] = []
        self._folder = folder
        self._read = read
        self._num_files = 0
        self._known: dict[KeyPath, list[Path]] = {}

    def expand(self, node: Node, path: KeyPath = ()) -> Node:
        """Return the value at `path` with each name of a group replaced by the contents of its file."""
        if len(path) > MAX_DEPTH:
            raise ConfigError(TOO_DEEP, where=node.origin)
        if isinstance(node.value, str):
            return self._named(node, path)
        if isinstance(node.value, tuple):
            return Node(tuple(self.expand(item, path) for item in node.value), node.origin)
        if not isinstance(node.value, dict):
            return node
        if path and "extends" in node.value and self._folders(path):
            return self._extended(node, path, ())
        return Node({key: self.expand(item, (*path, key)) for key, item in node.value.items()}, node.origin)

    def _named(self, node: Node, path: KeyPath) -> Node:
        file = self._find(node.value, path)
        if file is None:
            return node
        group, kind = Group(path, node.value, shown_path(file), node.origin), kind_at(path)
        if kind is not None and group.name in BUILT_INS[kind]:
            raise ambiguous(group, kind)
        self.used.append(group)
        return self._contents(file, path, ())

    def _contents(self, file: Path, path: KeyPath, chain: tuple[Path, ...]) -> Node:
        shown = shown_path(file)
        self._num_files += 1
        if self._num_files > _MAX_FILES:
            raise ConfigError(
                f"more than {_MAX_FILES} group files are used. Use fewer of them.", where=Origin(shown, 1)
            )
        section = self._read(file)
        if not isinstance(section.value, dict | tuple):
            problem = f"the file must have the section {dotted(path)} (key: value), got {describe(section.value)}."
            raise ConfigError(problem, where=Origin(shown, 1))
        section = Node(section.value, Origin(shown, 1))
        return (
            self.expand(section, path)
            if isinstance(section.value, tuple)
            else self._extended(section, path, (*chain, file))
        )

    def _extended(self, section: Node, path: KeyPath, chain: tuple[Path, ...]) -> Node:
        """Return the mapping `section` merged with the groups of the same setting that it extends."""
        extended = section.value.get("extends", Node(()))
        merged = Node({}, section.origin)
        for entry in extended.value if isinstance(extended.value, tuple) else (extended,):
            if not isinstance(entry.value, str):
                problem = f"must be the name of a file in {FOLDER}, or a list; got {describe(entry.plain())}."
                raise ConfigError(f"{dotted(path)}.extends: {problem}", where=entry.origin)
            file = self._find(entry.value, path)
            if file is None:
                problem = missing(entry.value, self._folder, path)
                raise ConfigError(f"{dotted(path)}.extends: {problem}", where=entry.origin)
            if file in chain:
                names = " → ".join(each.stem for each in (*chain, file))
                problem = f"the files extend each other: {names}. Remove one of these extends."
                raise ConfigError(f"{dotted(path)}.extends: {problem}", where=entry.origin)
            merged = merge(merged, self._contents(file, path, chain), path)
        own = {key: self.expand(item, (*path, key)) for key, item in section.value.items() if key != "extends"}
        return merge(merged, Node(own, section.origin), path)

    def _find(self, name: str, path: KeyPath) -> Path | None:
        if not path or not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
            return None
        files = (folder / f"{name}.yaml" for folder in self._folders(path))
        return next((file for file in files if file.is_file()), None)

    def _folders(self, path: KeyPath) -> list[Path]:
        if path not in self._known:
            self._known[path] = _group_folders(self._folder, path)
        return self._known[path]


def ambiguous(group: Group, kind: str) -> ConfigError:
    """Return the error for a name that is both a group file and a component."""
    advice = f"Rename the file, or write {{type: {group.name}}} for the {kind}."
    problem = f'"{group.name}" is both the file {group.file} and the name of a component ({kind}).'
    return ConfigError(f"{dotted(group.path)}: {problem} {advice}", where=group.where)


def _group_folders(folder: Path, path: KeyPath) -> list[Path]:
    """Return the existing folders of the groups of a setting, in the order in which they are searched."""
    keys = [str(key) for key in path]
    if any(not _NAME.fullmatch(key) or len(key) > _MAX_NAME for key in keys):
        return []
    roots = [folder / FOLDER, *([folder] if folder.name == FOLDER else []), packaged_folder()]
    found = [root.joinpath(*keys) for root in roots]
    with suppress(OSError):  # the path is too long
        return [each for each in found if each.is_dir()]
    return []
