"""A folder behind an address of fsspec (`s3://bucket/run`), as far as checkpoints need one: few verbs, one error.

Which file means what is remote_store.py's. Nothing here imports torch, so that `trainwright checkpoints` answers at
once. Object stores know no folders and no renaming; what is put under one name is there whole or not at all.
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from trainwright.checkpoint.manifest import MANIFEST, read_manifest
from trainwright.data.sources.locations import install_hint
from trainwright.errors import CheckpointError

logger = logging.getLogger(__name__)

DAMAGED_MANIFEST = "MANIFEST.damaged.json"
"""What a manifest is called from when its checkpoint was found damaged; it is kept, and counts no more."""

BLOCK_BYTES = 8 << 20

_TAKE_NAME = re.compile(r"step-(\d{8,})(?:-([2-9]|[1-9]\d+))?")
_LOCAL_SCHEMES = ("file://", "local://")
_TIMES = ("mtime", "last_modified", "LastModified", "updated", "created")
_Answer = TypeVar("_Answer")


class UnreachableError(CheckpointError):
    """A remote folder did not answer, or rejected: that says nothing of what lies there."""


@dataclass(frozen=True)
class RemotePath:
    """An address for messages and hooks: joined with `/`, shown without a password. It opens nothing."""

    address: str

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.address.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.rstrip("/").rpartition("/")[2]

    def __str__(self) -> str:
        return without_secrets(self.address)


def is_address(folder: str | Path) -> bool:
    """Says whether `folder` is an address of another machine, rather than a path of this one."""
    return isinstance(folder, str) and "://" in folder and not folder.startswith(_LOCAL_SCHEMES)


def local_path(folder: str | Path) -> Path:
    """Returns the path of a folder on this machine; `file://` in front of it says nothing more."""
    return Path(re.sub(r"^(?:file|local)://", "", str(folder)))


def without_secrets(text: str) -> str:
    """Returns `text` with the user and password before a host's name left out."""
    return re.sub(r"://[^/@\s]*@", "://…@", text)


@dataclass(frozen=True)
class RemoteFile:
    """What a listing says of one file; None where the file system does not tell."""

    size: int | None
    modified: float | None


@dataclass(frozen=True)
class Take:
    """One folder of a step: `step-00000020`, or `step-00000020-2` for what replaces it.

    Nothing can be renamed, so a replacement has a name of its own and the old one stays whole until it is there.
    """

    step: int
    number: int
    files: Mapping[str, RemoteFile] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"step-{self.step:08d}" + ("" if self.number == 1 else f"-{self.number}")

    @property
    def is_committed(self) -> bool:
        """Is its manifest there?"""
        return MANIFEST in self.files

    @property
    def is_set_aside(self) -> bool:
        """Was it found damaged, and kept?"""
        return DAMAGED_MANIFEST in self.files and not self.is_committed

    def is_silent(self, seconds: float) -> bool:
        """Says whether no file changed for so long. Where nobody tells the time, it is not."""
        times = [file.modified for file in self.files.values()]
        return all(one is not None and time.time() - one > seconds for one in times)


class RemoteFolder:
    """The files below one address. A missing one is FileNotFoundError; whatever else goes wrong, UnreachableError."""

    def __init__(self, address: str) -> None:
        self.path = RemotePath(address)

    def takes(self, step: int | None = None) -> list[Take]:
        """Returns the folders of all steps, or of one, ascending by step and number, each with its files."""
        found = []
        for name, (kind, _) in self._listed("").items():
            match = _TAKE_NAME.fullmatch(name)
            if match is None or kind != "directory":
                continue
            take = Take(int(match[1]), int(match[2] or 1))
            # "step-000000005" has the wrong width: nobody would find it again.
            if take.name == name and step in (None, take.step):
                found.append(take)
        found.sort(key=lambda take: (take.step, take.number))
        return [Take(take.step, take.number, self._files_in(take.name)) for take in found]

    def manifest(self, take: Take) -> dict[str, Any]:
        """Returns what the manifest of a take says, or raises its damage."""
        where = self.path / take.name / MANIFEST
        try:
            raw = self.read(f"{take.name}/{MANIFEST}")
        except FileNotFoundError as error:
            raise CheckpointError("The manifest is missing.", where=where) from error
        with tempfile.TemporaryDirectory(prefix="trainwright-") as temporary:
            (Path(temporary) / MANIFEST).write_bytes(raw)
            try:
                content = read_manifest(Path(temporary))
            except CheckpointError as error:
                # The same error, of the file that was asked for instead of its copy.
                raise type(error)(error.problem, where=where) from error
            except (KeyError, RecursionError) as error:
                raise CheckpointError(f"The manifest is damaged: {error!r}.", where=where) from error
        if not _has_its_shape(content):
            raise CheckpointError("The manifest is damaged: an entry is missing or of another kind.", where=where)
        return content

    def read(self, name: str) -> bytes:
        """Returns the content of a small file."""
        return bytes(self._ask(name, lambda files, path: files.cat_file(path)))

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yields the content of a large file, block by block."""
        with self._ask(name, lambda files, path: files.open(path, "rb")) as file:
            while block := self._ask(name, lambda files, path: file.read(BLOCK_BYTES)):
                yield block

    def size(self, name: str) -> int | None:
        """Returns a file's size, asked anew; None where the file system does not tell."""
        return _size_in(self._ask(name, lambda files, path: files.info(path)))

    def put(self, name: str, content: bytes) -> None:
        """Puts a small file and reads it back: what is not there as it was put is an error."""
        self._ask_with_folder(name, lambda files, path: files.pipe_file(path, content))
        try:
            arrived = self.read(name)
        except FileNotFoundError as error:
            raise UnreachableError("The file was put, but is not there.", where=self.path / name) from error
        if arrived != content:
            problem = f"The file was put with {len(content)} bytes, but reads back otherwise ({len(arrived)} bytes)"
            raise UnreachableError(f"{problem}.", where=self.path / name)

    def upload(self, source: Path, name: str) -> None:
        """Puts a large file and asks for its size: a part of it, or nothing, is an error."""
        self._ask_with_folder(name, lambda files, path: files.put_file(str(source), path))
        expected = source.stat().st_size
        try:
            size = self.size(name)
        except FileNotFoundError as error:
            raise UnreachableError("The file was put, but is not there.", where=self.path / name) from error
        if size is not None and size != expected:
            raise UnreachableError(f"Of {expected} bytes, {size} arrived.", where=self.path / name)

    def delete(self, name: str) -> None:
        """Removes a file; one that is not there is none to remove."""
        with suppress(FileNotFoundError):
            self._ask(name, lambda files, path: files.rm_file(path))

    def delete_take(self, take: Take) -> None:
        """Removes a folder, its manifest first: from then on it is none any more, wherever this is cut short."""
        self.delete(f"{take.name}/{MANIFEST}")
        for name in take.files:
            if name != MANIFEST:
                self.delete(f"{take.name}/{name}")
        try:
            self._ask(take.name, lambda files, path: files.rmdir(path))
        except (OSError, CheckpointError) as error:
            logger.debug("%s has no folders to remove: %s", self.path, error)

    def _files_in(self, name: str) -> dict[str, RemoteFile]:
        return {inner: file for inner, (kind, file) in self._listed(name).items() if kind == "file"}

    def _listed(self, name: str) -> dict[str, tuple[str, RemoteFile]]:
        """Returns the entries of a folder; none where there is no such folder.

        By `ls`, not `find`: that leaves out what it cannot list, and a checkpoint that is not seen is lost.
        """
        try:
            entries = self._ask(name, lambda files, path: files.ls(path, detail=True))
        except FileNotFoundError:
            return {}
        found = {}
        for entry in entries:
            own_name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            found[own_name] = (str(entry["type"]), RemoteFile(_size_in(entry), _time_in(entry)))
        return found

    def _ask_with_folder(self, name: str, act: Callable[[Any, str], _Answer]) -> _Answer:
        """Acts, and where a folder is missing makes it and acts again; object stores need none."""
        try:
            return self._ask(name, act)
        except FileNotFoundError:
            parent = name.rpartition("/")[0]
            self._ask(parent, lambda files, path: files.makedirs(path, exist_ok=True))
        try:
            return self._ask(name, act)
        except FileNotFoundError as error:
            raise UnreachableError(f"The file cannot be put: {error}.", where=self.path / name) from error

    def _ask(self, name: str, act: Callable[[Any, str], _Answer]) -> _Answer:
        path = self.path / name if name else self.path
        try:
            import fsspec  # type: ignore[import-untyped]  # it comes without types

            # Asked for anew at each use: file systems with an event loop do not survive a fork.
            files, inner = fsspec.url_to_fs(path.address)
            # A listing that was kept from before an upload would say that it failed.
            files.invalidate_cache()
            return act(files, inner)
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has errors of its own
            told = without_secrets(f"{type(error).__name__}: {error}").rstrip(".")
            advice = "Check the address, the access to it and the network."
            if isinstance(error, ImportError):
                advice = install_hint(path.address)
            raise UnreachableError(f"It cannot be reached: {told}. {advice}", where=path) from error


def _has_its_shape(content: Mapping[str, Any]) -> bool:
    """Says whether every entry is there and what readers take it for; its own hash anybody can write."""
    try:
        # A name is one of this folder: "../x" and "/x" would have other people's files read.
        whole = all(
            "/" not in name
            and name not in ("", ".", "..")
            and facts.keys() == {"size", "sha256"}
            and isinstance(facts["size"], int)
            and isinstance(facts["sha256"], str)
            for name, facts in content["files"].items()
        )
        numbers = all(isinstance(value, int | float) for value in content["metrics"].values())
        names = isinstance(content["parts"], list) and all(isinstance(part, str) for part in content["parts"])
        return whole and numbers and names and isinstance(content["step"], int) and isinstance(content["created"], str)
    except (KeyError, TypeError, AttributeError):
        return False


def _size_in(entry: Mapping[str, Any]) -> int | None:
    size = entry.get("size")
    return None if size is None else int(size)


def _time_in(entry: Mapping[str, Any]) -> float | None:
    for key in _TIMES:
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    return None
