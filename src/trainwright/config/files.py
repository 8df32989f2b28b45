"""Reads a config file with all files that it `extends`, and saves one.

A file becomes a tree of settings with line numbers (yaml_text.py); schema.py validates the settings.
python_files.py executes config files in Python.
"""

from __future__ import annotations

import importlib.resources
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.config import yaml_text
from trainwright.config.problems import describe, suggest
from trainwright.config.python_files import read_python
from trainwright.config.yaml_text import Node, Origin, absolute, map_strings, merge
from trainwright.errors import ConfigError
from trainwright.tracebacks import shown_path

_FILE_REFERENCE = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[A-Za-z_][\w.]*)")
"""A component in a file, such as `hooks/info.py:InfoHook`."""


@dataclass(frozen=True)
class ConfigDocument:
    """The settings of a file merged with those it extends, and the folder that relative paths start from."""

    settings: Node
    project_dir: Path


def read_document(path: str | os.PathLike[str]) -> ConfigDocument:
    """Return the file at `path` merged with the files that it extends."""
    return _read(Path(path), (), shown=shown_path(path))


def resolve_document(settings: Node, folder: Path, chain: tuple[Path, ...] = ()) -> ConfigDocument:
    """Return `settings`, which are written in `folder`, merged with all that they extend.

    A saved run's `project_dir` replaces `folder`. `chain` has the files being read, outermost first.
    """
    given = settings.value.get("project_dir")
    if given is not None and not isinstance(given.value, str):
        raise ConfigError(f"project_dir: must be text, got {describe(given.value)}.", where=given.origin)
    project_dir = absolute(folder / given.value) if given is not None else folder
    merged = Node({}, settings.origin)
    for entry in _extended(settings):
        base = _read(_find_extended(entry, folder), chain, extended_at=entry.origin)
        merged = merge(merged, _relative_to(project_dir, base))
    return ConfigDocument(merge(merged, settings.without("extends", "project_dir")), project_dir)


def merge_files(document: ConfigDocument, paths: Iterable[str | os.PathLike[str]]) -> ConfigDocument:
    """Return `document` with the files merged into it in order; the project folder does not change."""
    settings = document.settings
    for path in paths:
        settings = merge(settings, _relative_to(document.project_dir, read_document(path)))
    return ConfigDocument(settings, document.project_dir)


def save_document(path: str | os.PathLike[str], settings: dict[str, Any]) -> None:
    """Write `settings` as YAML, atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(yaml_text.write(settings))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _read(
    path: Path, chain: tuple[Path, ...], *, shown: str | None = None, extended_at: Origin | None = None
) -> ConfigDocument:
    file = absolute(path)
    shown = shown or shown_path(file)
    if file in chain:
        names = " → ".join(shown_path(one) for one in (*chain, file))
        raise ConfigError(
            f"extends: the files extend each other: {names}. Remove one of these extends.", where=extended_at
        )
    text = _text_of(path, shown)
    if file.suffix == ".py":
        return resolve_document(read_python(file, text, shown), file.parent, (*chain, file))
    settings = yaml_text.parse(text, lambda line: Origin(shown, line))
    if settings.value is None:
        raise ConfigError("the file is empty. A run needs at least data and trainer.", where=Origin(shown, 1))
    if not isinstance(settings.value, dict):
        problem = f"the file must be a mapping (key: value), got {describe(settings.plain())}."
        raise ConfigError(problem, where=settings.origin)
    return resolve_document(Node(settings.value, Origin(shown, 1)), file.parent, (*chain, file))


def _text_of(path: Path, shown: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        folder = path.parent
        kind = "*.py" if path.suffix == ".py" else "*.y*ml"
        siblings = sorted(file.name for file in folder.glob(kind)) if folder.is_dir() else []
        hint = suggest(path.name, siblings) if siblings else "Check the path; it is relative to the current folder."
        raise ConfigError(f"there is no such file. {hint}", where=Origin(shown, 1)) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError("the file is not UTF-8 text. Save it as UTF-8.", where=Origin(shown, line)) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}.", where=Origin(shown, 1)) from error


def _extended(settings: Node) -> Iterator[Node]:
    node = settings.value.get("extends", Node(None))
    entries = node.value if isinstance(node.value, tuple) else (node,) if node.value is not None else ()
    for entry in entries:
        if not isinstance(entry.value, str):
            problem = f"extends: must be a name, a file or a list of them; got {describe(entry.plain())}."
            raise ConfigError(problem, where=entry.origin)
        yield entry


def _find_extended(entry: Node, folder: Path) -> Path:
    """Return the file in the folder of the extending one, or else the packaged one, that `entry` names."""
    name: str = entry.value
    if (folder / name).is_file():
        return folder / name
    packaged = _packaged_files()
    found = [path for path in packaged if path == f"{name}.yaml" or path.endswith(f"/{name}.yaml")]
    if len(found) > 1:
        choices = " or ".join(path.removesuffix(".yaml") for path in found)
        problem = f'extends: "{name}" is the name of several packaged files. Use {choices}.'
        raise ConfigError(problem, where=entry.origin)
    if found:
        return packaged[found[0]]
    names = [Path(path).stem for path in packaged]
    in_folder = sorted(file.name for file in folder.glob("*.yaml"))
    problem = f'extends: no file "{name}" in {shown_path(folder)}, and no packaged config of that name.'
    raise ConfigError(f"{problem} {suggest(name, [*names, *in_folder])}", where=entry.origin)


def _packaged_files() -> dict[str, Path]:
    """Return the paths of packaged configs by name (`experiments/digits.yaml`), without sharding rules."""
    folder = Path(str(importlib.resources.files("trainwright"))) / "configs"
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
    return {path: folder / path for path in paths if not path.startswith("sharding/")}


def _relative_to(project_dir: Path, base: ConfigDocument) -> Node:
    """Return the settings of an extended file with `file.py:Name` relative to `project_dir`."""
    if base.project_dir == project_dir:
        return base.settings

    def rewrite(text: str) -> str:
        match = _FILE_REFERENCE.fullmatch(text)
        if match is None or Path(match["file"]).is_absolute():
            return text
        return f"{Path(os.path.relpath(base.project_dir / match['file'], project_dir)).as_posix()}:{match['name']}"

    return map_strings(base.settings, rewrite)
