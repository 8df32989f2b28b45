"""What a function does and what a dataset holds, as a few hexadecimal digits: the key of the processed-data cache.

A function is known by its code (code_walk.py), a dataset by its component in the config: the class or function that it
names, its arguments, and the files among them. Files are known by size and time of change, not by their content, which
may be terabytes; those behind a URL by what the server tells.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright import registry
from trainwright.data.processing.build_once import CACHE_TAG
from trainwright.data.processing.code_walk import digest_of, own_file
from trainwright.data.sources.locations import remote_version
from trainwright.errors import ConfigError

# Names no input: where something is cached does not change what it is, and the folder changes with every use.
_NOT_INPUT = frozenset({"cache_dir", "type"})
_FILE_URL, _HUB_URL = "file://", "hf://"


def fingerprint_function(function: Callable[..., Any]) -> str:
    """Returns a digest of what a function does, which changes with the code that it uses of the user's files."""
    return digest_of(function)


def canonical_arguments(arguments: Mapping[str, Any], label: str) -> str:
    """Returns arguments as one text, with the size and time of each file that they name.

    Refuses what JSON has no words for: two such values could not be told apart.
    """
    reading = _Reading(_folders(registry.project_folder(), Path.cwd()))
    described = {
        name: reading.describe(value, name=name, label=f"{label}: the argument {name}")
        for name, value in arguments.items()
    }
    return json.dumps(described, sort_keys=True, ensure_ascii=False)


def describe_input(
    component: Mapping[str, Any],
    dataset: Any,
    *,
    target: Callable[..., Any] | None = None,
    project_dir: str | os.PathLike[str] | None = None,
    run_seed: int | None = None,
) -> str:
    """Returns one text that changes when a component of the config gives other samples.

    It holds the arguments, with size and time of change of the files, folders and globs among them, and the code of the
    user's own class or function: `target`, which the component names, and the class of the dataset that came of it.
    Relative paths start at `project_dir` for a target that takes it; others may also mean the working directory, so
    that both count. `run_seed` counts for a target that takes it, and for an unknown one.
    """
    names = _parameter_names(target)
    project = registry.project_folder() if project_dir is None else Path(project_dir)
    folders = _folders(project) if project_dir is not None and "project_dir" in names else _folders(project, Path.cwd())
    tells_itself = hasattr(type(dataset), "fingerprint") or "fingerprint" in getattr(dataset, "__dict__", ())
    reading = _Reading(folders, asks_servers=not tells_itself, refuses_objects=False)
    facts: dict[str, Any] = {
        "component": {name: reading.describe(value, name=name, label=name) for name, value in component.items()}
    }
    for role, code in (("target", target), ("class", type(dataset))):
        if code is not None and own_file(code) is not None:
            facts[role] = digest_of(code)
    if run_seed is not None and "run_seed" not in component and (target is None or "run_seed" in names):
        facts["run_seed"] = run_seed
    return json.dumps(facts, sort_keys=True, ensure_ascii=False)


def fingerprint_source(source: Any) -> str | None:
    """Returns what the dataset says itself of its content: `fingerprint`, an attribute or a method, if it has one."""
    found = getattr(source, "fingerprint", None)
    found = found() if callable(found) else found
    return None if found is None else str(found)


@dataclass(frozen=True)
class _Reading:
    """From the arguments of a component or a function to plain values, files with what is known of them."""

    folders: Sequence[Path]
    """Where a relative path may start; the files in all of them count."""
    asks_servers: bool = True
    refuses_objects: bool = True

    def describe(self, value: Any, *, name: str, label: str) -> Any:
        """Returns a value as JSON has it; `name` is the argument's, `label` says where it stands, for errors."""
        if isinstance(value, (str, os.PathLike)):
            text = os.fspath(value)
            files = None if name in _NOT_INPUT else self._describe_path(text)
            return text if files is None else {"path": text, **files}
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, Mapping):
            return {str(key): self.describe(item, name=str(key), label=f"{label}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.describe(item, name=name, label=f"{label}[{place}]") for place, item in enumerate(value)]
        if not self.refuses_objects:
            return {"object": digest_of(value)}
        raise ConfigError(
            f"{label} is a {type(value).__name__}, which has no text to know it by, so that the cache could not tell "
            "it from another. Use numbers, texts, lists and mappings, and make the object inside the function."
        )

    def _describe_path(self, text: str) -> dict[str, Any] | None:
        """Returns the number, size and a digest of the files that a text names; None if it names none."""
        text = text.removeprefix(_FILE_URL)
        if not text or "\0" in text or "\n" in text:
            return None
        if "://" in text:
            # The hub's datasets are known by the fingerprint of the library that reads them.
            version = remote_version(text) if self.asks_servers and not text.startswith(_HUB_URL) else None
            return None if version is None else {"files": len(version), "digest": _digest(version)}
        relative = Path.home() / text[2:] if text.startswith("~/") else Path(text)
        paths = dict.fromkeys(folder / relative for folder in self.folders)  # an absolute one is the same for each
        files = [facts for path in paths for root in _roots_of(path) for facts in _files_below(root)]
        if not files:
            return None
        return {"files": len(files), "bytes": sum(size for _, size, _ in files), "digest": _digest(files)}


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _folders(*folders: Path | None) -> list[Path]:
    return list(dict.fromkeys(folder.absolute() for folder in folders if folder is not None))


def _parameter_names(target: Callable[..., Any] | None) -> tuple[str, ...]:
    try:
        return () if target is None else tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a class that is written in C tells nothing
        return ()


def _roots_of(path: Path) -> list[Path]:
    """Returns the file or folder, or what a glob finds."""
    if os.path.lexists(path):  # also says no to what is too long for a name
        return [path]
    if not glob.has_magic(str(path)):
        return []
    return [Path(found) for found in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207  # it is absolute


def _files_below(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, size and time of change of a file, or of all files in a folder, but for caches inside it."""
    if root.is_dir():
        for folder, folders, names in os.walk(root):
            if CACHE_TAG in names:
                folders.clear()
                continue
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                yield from _facts_of(path, path.relative_to(root).as_posix())
    else:
        yield from _facts_of(root, root.name)


def _facts_of(path: Path, name: str) -> Iterator[tuple[str, int, int]]:
    try:
        facts = path.stat()
    except OSError:
        return  # a dangling link, or removed since
    yield name, facts.st_size, facts.st_mtime_ns


def name_of(function: Callable[..., Any]) -> str:
    """Returns a function's name for people: of a partial that of the function inside."""
    inner = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "lambda" if name == "<lambda>" else str(name)
