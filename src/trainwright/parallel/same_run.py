"""Are all ranks in the same run? Settings, code and versions are compared before anything is built.

Ranks that differ would train something that nobody asked for, or wait for each other forever. Every rank gets the same
answer, through the store by which they found each other: no collective can be stuck by then.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from trainwright.built_ins import KIND_FOLDERS
from trainwright.config import RunConfig
from trainwright.errors import TrainwrightError
from trainwright.parallel.first_error import RaisedByAll

ANSWER_SECONDS = 25.0
"""How long a rank may take to answer once it has come. One that does not has died, and all are gone within 30 s."""

_MAX_FILES = 2000
"""So many files of a package are compared; hashing them takes a tenth of a second."""
_MAX_SHOWN = 3
_DIGITS_OF_A_CLOCK = 4  # hours and minutes
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class RunFacts:
    """What must be equal on all ranks, each as a name and a short text."""

    settings: Mapping[str, str]
    """The config's settings: dotted name → value as JSON."""
    code: Mapping[str, str]
    """Files → a hash of what is in them."""
    versions: Mapping[str, str]
    """Of Python and torch; trainwright is compared by its files."""


def facts_of(config: RunConfig) -> RunFacts:
    """Returns the facts of this process: what it was told to run, and with which code.

    The code is trainwright's own, what lies beside the YAML file and in its folders of components, and the packages
    that the config names.
    """
    settings = {**dict(_flatten(config.to_dict())), "name": _without_clock(config.name)}
    code = {f"trainwright/{name}": digest for name, digest in _hashes(_PACKAGE, "**/*.py")}
    for pattern in ("*.py", *(f"{folder}/**/*.py" for folder in KIND_FOLDERS.values())):
        code.update(_hashes(config.project_dir, pattern))
    for name in _named_modules(config):
        code.update(_named_code(name, config.project_dir))
    versions = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    return RunFacts(settings, code, versions)


def _without_clock(name: str) -> str:
    """Returns a run's name; without its digits where it may have been made of a clock, which ranks read apart.

    The first rank's is taken for all then (build.py).
    """
    return re.sub(r"\d", "0", name) if len(re.findall(r"\d", name)) >= _DIGITS_OF_A_CLOCK else name


def refuse_other_runs(store: Store, rank: int, size: int, facts: RunFacts) -> None:
    """Raises the same error on every rank if any has other facts than the first; every rank must call it."""
    store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    own = {"size": {"WORLD_SIZE": str(size)}, **asdict(facts)}
    if rank == 0:
        store.set("facts", json.dumps(own))
        verdicts = _collect(store, [f"verdict/{other}" for other in range(1, size)])
        store.set("verdict", next(filter(None, verdicts), ""))
    else:
        first = json.loads(_wait_for(store, "facts", "Rank 0"))
        store.set(f"verdict/{rank}", _difference(first, own, rank))
    verdict = _wait_for(store, "verdict", "Rank 0")
    if verdict:
        store.set(f"heard/{rank}", "1")
        if rank == 0:  # it may keep the store, and must not leave before the others have read it
            _collect(store, [f"heard/{other}" for other in range(1, size)])
        raise RaisedByAll(verdict)


def _difference(first: Mapping[str, Mapping[str, str]], own: Mapping[str, Mapping[str, str]], rank: int) -> str:
    """Says how this rank differs from the first, or nothing if it does not."""
    who = f"Rank {rank} (on {socket.gethostname()})"
    for kind, advice in (
        ("size", "Every rank needs the same WORLD_SIZE; another run may be using this MASTER_PORT."),
        ("versions", "Use the same environment on every machine."),
        ("settings", "Start every rank with the same file and the same overrides."),
        ("code", "Give every machine the same files, or a shared folder."),
    ):
        names = sorted(first[kind].keys() | own[kind].keys())
        different = [name for name in names if first[kind].get(name) != own[kind].get(name)]
        if not different:
            continue
        if kind == "code":
            shown = [f"{name} {_absence(first[kind], own[kind], name)}" for name in different[:_MAX_SHOWN]]
        else:
            shown = [
                f"{name} is {own[kind].get(name, 'not set')}, on rank 0 {first[kind].get(name, 'not set')}"
                for name in different[:_MAX_SHOWN]
            ]
        rest = f"; and {len(different) - _MAX_SHOWN} more" if len(different) > _MAX_SHOWN else ""
        what = {"settings": "other settings", "code": "other code"}.get(kind, "another environment")
        return f"{who} has {what} than rank 0: {'; '.join(shown)}{rest}. {advice}"
    return ""


def _absence(first: Mapping[str, str], own: Mapping[str, str], name: str) -> str:
    if name not in own:
        return "is missing"
    return "differs" if name in first else "is not on rank 0"


def _collect(store: Store, keys: Sequence[str]) -> list[str]:
    return [_wait_for(store, key, f"Rank {key.rpartition('/')[2]}") for key in keys]


def _wait_for(store: Store, key: str, who: str) -> str:
    try:
        return str(store.get(key), "utf-8")
    except RuntimeError as error:  # of torch: a timeout, or a connection that was closed
        raise TrainwrightError(
            f"{who} came and then did not answer within {ANSWER_SECONDS:.0f} s: it has died at start-up. "
            "Its own output says why."
        ) from error


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value, default=str, sort_keys=True)


def _hashes(folder: Path, pattern: str) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob(pattern))[:_MAX_FILES]:
        if path.is_file():
            yield path.relative_to(folder).as_posix(), _hash(path)


def _hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _named_modules(config: RunConfig) -> set[str]:
    """The files and modules that the config takes classes from, and those that it imports."""

    def types(value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            kind = value.get("type")
            if isinstance(kind, str) and ":" in kind:
                yield kind.rpartition(":")[0]
            for item in value.values():
                yield from types(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from types(item)

    return {*types(config.to_dict()), *config.imports}


def _named_code(name: str, folder: Path) -> dict[str, str]:
    """Hashes of a file that a config names, or of the package of a module that it names."""
    if name.endswith(".py") or "/" in name:
        path = folder / name
        return {name: _hash(path)} if path.is_file() else {}
    top = name.partition(".")[0]
    if top in (_PACKAGE.name, *sys.stdlib_module_names):
        return {}
    if (folder / top).is_dir():
        return {f"{top}/{file}": digest for file, digest in _hashes(folder / top, "**/*.py")}
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return {}  # whoever imports it says what is wrong
    if found is None or found.origin is None:
        return {}
    if found.submodule_search_locations is None:
        return {top: _hash(Path(found.origin))}
    return {f"{top}/{file}": digest for file, digest in _hashes(Path(found.origin).parent, "**/*.py")}
