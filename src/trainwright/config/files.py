"""Reads a config file with all files that it `extends` and its group files (groups.py), and saves one.

A file becomes a tree of settings with line numbers (yaml_text.py); schema.py validates the settings.
python_files.py executes config files in Python.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.config import signature, yaml_text
from trainwright.config.groups import Group, GroupReader, packaged_folder
from trainwright.config.problems import describe, did_you_mean, suggest
from trainwright.config.python_files import read_python
from trainwright.config.required import located_at
from trainwright.config.yaml_text import Node, Origin, absolute, map_strings, merge
from trainwright.errors import ConfigError, TrustError
from trainwright.tracebacks import shown_path

_FILE_REFERENCE = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[A-Za-z_][\w.]*)")
"""A component in a file, such as `hooks/info.py:InfoHook`."""


_MAX_LETTERS = 10_000_000
_RUN_CONFIG = "config.yaml"
_RUN_FILES = ("environment.json", "metrics.json", "log.txt", "checkpoints")
"""A config.yaml next to one of these, or with `project_dir`, is the config of a run folder."""


@dataclass(frozen=True)
class ConfigDocument:
    """The settings of a file merged with those that it extends, and the folder to which paths are relative."""

    settings: Node
    project_dir: Path
    untrusted_file: str | None = None
    """The file among them that belongs to a run folder and is not signed by this user; None if there is none."""
    groups: tuple[Group, ...] = ()
    """The group files used by the settings."""


def read_document(path: str | os.PathLike[str], *, trust: bool | None = None) -> ConfigDocument:
    """Return the file at `path` merged with the files that it extends.

    `trust` True trusts every file; None trusts files that do not belong to a run folder or are signed; False trusts
    only signed files. An untrusted file cannot extend a Python file.
    """
    return _read(Path(path), (), shown=shown_path(path), trust=trust)


def resolve_document(
    settings: Node,
    folder: Path,
    chain: tuple[Path, ...] = (),
    *,
    trust: bool | None = None,
    untrusted_file: str | None = None,
) -> ConfigDocument:
    """Return `settings` of a file in `folder`, merged with the files that they extend.

    A saved run's `project_dir` replaces `folder`. `chain` has the files being read, outermost first.
    `untrusted_file` is the file of `settings` if it is not trusted; the files that it extends are then not trusted
    either.
    """
    given = settings.value.get("project_dir")
    if given is not None and not isinstance(given.value, str):
        raise ConfigError(f"project_dir: must be text, got {describe(given.value)}.", where=given.origin)
    project_dir = absolute(folder / given.value) if given is not None else folder
    merged, found = Node({}, settings.origin), untrusted_file
    groups = group_reader(project_dir)
    own = groups.expand(settings.without("extends", "project_dir"))
    used = groups.used
    for entry in _extended(settings):
        path, is_packaged = _find_extended(entry, folder)
        trust_base = True if is_packaged else False if untrusted_file is not None else trust
        shown = _shown_packaged(path) if is_packaged else None
        base = _read(path, chain, shown=shown, extended_at=entry.origin, trust=trust_base)
        extended = _relative_to(project_dir, base)
        if entry.origin is not None:
            extended = located_at(extended, entry.origin._replace(given_as=f"extends: {entry.value}"))
        merged, found = merge(merged, extended), found or base.untrusted_file
        used = [*base.groups, *used]
    return ConfigDocument(merge(merged, own), project_dir, found, tuple(used))


def merge_files(document: ConfigDocument, paths: Iterable[str | os.PathLike[str]]) -> ConfigDocument:
    """Return `document` with the files merged into it in order; the project folder does not change."""
    for path in paths:
        added = read_document(path)
        document = ConfigDocument(
            merge(document.settings, _relative_to(document.project_dir, added)),
            document.project_dir,
            document.untrusted_file or added.untrusted_file,
            (*document.groups, *added.groups),
        )
    return document


def group_reader(folder: Path) -> GroupReader:
    """Return the reader of the group files for a file in `folder`."""
    return GroupReader(folder, lambda file: parse_file(file, shown_path(file)))


def save_document(path: str | os.PathLike[str], settings: dict[str, Any], *, is_signed: bool = False) -> None:
    """Write `settings` as YAML atomically; with `is_signed`, with this user's signature."""
    text = yaml_text.write(settings)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(signature.sign(text) if is_signed else text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _read(
    path: Path,
    chain: tuple[Path, ...],
    *,
    shown: str | None = None,
    extended_at: Origin | None = None,
    trust: bool | None = None,
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
        if trust is False:
            raise TrustError(
                f"extends: reading this run folder would run {shown}. Read that file, and run it with --trust "
                "(trust=True) if you trust who wrote it.",
                where=extended_at,
            )
        settings, is_untrusted = read_python(file, text, shown)
        return resolve_document(
            settings, file.parent, (*chain, file), trust=trust, untrusted_file=shown if is_untrusted else None
        )
    settings = yaml_text.parse(text, lambda line: Origin(shown, line))
    if settings.value is None:
        raise ConfigError("the file is empty. A run needs at least data and trainer.", where=Origin(shown, 1))
    if not isinstance(settings.value, dict):
        problem = f"the file must be a mapping (key: value), got {describe(settings.plain())}."
        raise ConfigError(problem, where=settings.origin)
    is_of_run = trust is False or (
        file.name == _RUN_CONFIG
        and ("project_dir" in settings.value or any((file.parent / name).exists() for name in _RUN_FILES))
    )
    is_trusted = trust is True or not is_of_run or signature.is_signed(text)
    return resolve_document(
        Node(settings.value, Origin(shown, 1)),
        file.parent,
        (*chain, file),
        trust=trust or None,
        untrusted_file=None if is_trusted else shown,
    )


def parse_file(path: Path, shown: str) -> Node:
    """Return the settings of one YAML file, without those that it extends; messages call the file `shown`."""
    return yaml_text.parse(_text_of(path, shown), lambda line: Origin(shown, line))


def _text_of(path: Path, shown: str) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_MAX_LETTERS + 1)  # a link may refer to an endless device
    except FileNotFoundError as error:
        folder = path.parent
        kind = "*.py" if path.suffix == ".py" else "*.y*ml"
        siblings = sorted(file.name for file in folder.glob(kind)) if folder.is_dir() else []
        hint = suggest(path.name, siblings) if siblings else "Check the path; it is relative to the current folder."
        name = path.as_posix().removesuffix(".yaml")
        if f"{name}.yaml" in _packaged_files():
            hint = f"It is a packaged config: write a run file with `extends: {name}` and your own settings."
        raise ConfigError(f"there is no such file. {hint}", where=Origin(shown, 1)) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError("the file is not UTF-8 text. Save it as UTF-8.", where=Origin(shown, line)) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}.", where=Origin(shown, 1)) from error
    if len(text) > _MAX_LETTERS:
        raise ConfigError(f"the file is larger than {_MAX_LETTERS:,} letters. Is it a config?", where=Origin(shown, 1))
    return text


def _extended(settings: Node) -> Iterator[Node]:
    node = settings.value.get("extends", Node(None))
    entries = node.value if isinstance(node.value, tuple) else (node,) if node.value is not None else ()
    for entry in entries:
        if not isinstance(entry.value, str):
            problem = f"extends: must be a name, a file or a list of them; got {describe(entry.plain())}."
            raise ConfigError(problem, where=entry.origin)
        yield entry


def _find_extended(entry: Node, folder: Path) -> tuple[Path, bool]:
    """Return the file that `entry` names in the folder of the extending one (False), or a packaged one (True)."""
    name: str = entry.value
    with suppress(OSError):  # the name is too long
        if (folder / name).is_file():
            return folder / name, False
    packaged = _packaged_files()
    found = [path for path in packaged if path == f"{name}.yaml" or path.endswith(f"/{name}.yaml")]
    if len(found) > 1:
        choices = " or ".join(path.removesuffix(".yaml") for path in found)
        problem = f'extends: "{name}" is the name of several packaged files. Use {choices}.'
        raise ConfigError(problem, where=entry.origin)
    if found:
        return packaged[found[0]], True
    known = [*(path.removesuffix(".yaml") for path in packaged), *sorted(file.name for file in folder.glob("*.yaml"))]
    near = did_you_mean(name, [*known, *(Path(path).stem for path in packaged)])
    problem = f'extends: no file "{name}" in {shown_path(folder)}, and no packaged config of that name.{near}'
    raise ConfigError(f"{problem} Known: {', '.join(known)}.", where=entry.origin)


def _packaged_files() -> dict[str, Path]:
    """Return the paths of packaged configs by name (`experiments/digits.yaml`), without sharding rules."""
    folder = packaged_folder()
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
    return {path: folder / path for path in paths if not path.startswith("sharding/")}


def _shown_packaged(path: Path) -> str:
    """Return the name of a packaged file in messages: without the folder of the installation."""
    folder = packaged_folder()
    return (
        f"trainwright/{folder.name}/{path.relative_to(folder).as_posix()}" if path.is_relative_to(folder) else str(path)
    )


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
