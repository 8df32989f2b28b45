"""Config files: reading one with everything that it `extends`, and saving one whole.

A file is read into a tree of settings (tree.py) that remembers its lines. Nothing is checked here but the
file itself: what the settings mean is in schema.py. How a Python file becomes settings is in python_files.py.
"""

from __future__ import annotations

import importlib.resources
import os
import re
import tempfile
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
"""A component in a file: `hooks/info.py:InfoHook`."""


@dataclass(frozen=True)
class ConfigDocument:
    """The settings of a file and of all that it extends, and the folder that relative paths start from."""

    settings: Node
    project_dir: Path


def read_document(path: str | os.PathLike[str]) -> ConfigDocument:
    """Return the file at `path`, laid over the files that it extends."""
    return _read(Path(path), (), shown=shown_path(path))


def resolve_document(settings: Node, folder: Path, chain: tuple[Path, ...] = ()) -> ConfigDocument:
    """Return `settings`, which were written in `folder`, laid over all that they extend.

    A saved run's `project_dir` takes the place of `folder`. `chain` holds the files being read, outermost first.
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


def lay_over(document: ConfigDocument, paths: Iterable[str | os.PathLike[str]]) -> ConfigDocument:
    """Return `document` with the files laid over it, each over the ones before; the folder stays its own."""
    settings = document.settings
    for path in paths:
        settings = merge(settings, _relative_to(document.project_dir, read_document(path)))
    return ConfigDocument(settings, document.project_dir)


def save_document(path: str | os.PathLike[str], settings: dict[str, Any]) -> None:
    """Write `settings` as YAML; a reader finds the earlier file or the whole of this one, never a part."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = yaml_text.write(settings)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes a private file; a run's config is as readable as any other file of the run.
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(
    path: Path, chain: tuple[Path, ...], *, shown: str | None = None, extended_at: Origin | None = None
) -> ConfigDocument:
    file = absolute(path)
    shown = shown or shown_path(file)
    if file in chain:
        names = " → ".join(shown_path(one) for one in (*chain, file))
        raise ConfigError(f"extends: the files extend each other: {names}. Break the circle.", where=extended_at)
    text = _text_of(path, shown)
    if file.suffix == ".py":
        return resolve_document(read_python(file, text, shown), file.parent, (*chain, file))
    settings = yaml_text.parse(text, lambda line: Origin(shown, line))
    if settings.value is None:
        raise ConfigError("the file is empty. A run has at least data and trainer.", where=Origin(shown, 1))
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
    """Return the file beside the extending one, or else the packaged one, that `entry` names."""
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
    beside = sorted(file.name for file in folder.glob("*.yaml"))
    problem = f'extends: no file "{name}" in {shown_path(folder)}, and no packaged config of that name.'
    raise ConfigError(f"{problem} {suggest(name, [*names, *beside])}", where=entry.origin)


def _packaged_files() -> dict[str, Path]:
    """Return the packaged configs: `experiments/digits.yaml` → where it lies. Sharding rules are no config."""
    folder = Path(str(importlib.resources.files("trainwright"))) / "configs"
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
    return {path: folder / path for path in paths if not path.startswith("sharding/")}


def _relative_to(project_dir: Path, base: ConfigDocument) -> Node:
    """Return the settings of an extended file with its `file.py:Name` made relative to the given file's folder."""
    if base.project_dir == project_dir:
        return base.settings

    def rewrite(text: str) -> str:
        match = _FILE_REFERENCE.fullmatch(text)
        if match is None or Path(match["file"]).is_absolute():
            return text
        return f"{Path(os.path.relpath(base.project_dir / match['file'], project_dir)).as_posix()}:{match['name']}"

    return map_strings(base.settings, rewrite)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
