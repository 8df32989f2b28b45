"""A folder at an fsspec address (`s3://bucket/run`): list, read, put and delete files, with one kind of error.

remote_store.py defines the meaning of the files. This module does not import torch, so that `trainwright checkpoints`
starts fast. Object stores have no folders and no rename; uploads are atomic.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from trainwright.checkpoint.manifest import MANIFEST, UnreachableError, parse_manifest
from trainwright.data.sources.locations import install_hint
from trainwright.errors import CheckpointError
from trainwright.safe_text import is_masked, mask_secrets

logger = logging.getLogger(__name__)

DAMAGED_MANIFEST = "MANIFEST.damaged.json"
"""The name of the manifest of a damaged checkpoint; its files are kept, but it no longer counts."""

BLOCK_BYTES = 8 << 20
# The number of windows of each open file that are kept in memory.
_WINDOW_BYTES = 1 << 18
_NUM_WINDOWS = 16

_FOLDER_NAME = re.compile(r"step-(\d{8,})(?:-([2-9]|[1-9]\d+))?")
_LOCAL_SCHEMES = ("file://", "local://")
_TIMES = ("mtime", "last_modified", "LastModified", "updated", "created")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RemotePath:
    """A URL for messages and hooks: joined with `/`, printed without a password. It opens no file."""

    address: str

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.address.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.address.rstrip("/").rpartition("/")[2]

    def __str__(self) -> str:
        return mask_secrets(self.address)


def is_address(folder: str | Path) -> bool:
    """Returns True if `folder` is a remote URL and not a local path."""
    return isinstance(folder, str) and "://" in folder and not folder.startswith(_LOCAL_SCHEMES)


def local_path(folder: str | Path) -> Path:
    """Returns the path of a folder on this machine, without a leading `file://`."""
    return Path(re.sub(r"^(?:file|local)://", "", str(folder)))


@dataclass(frozen=True)
class RemoteFile:
    """The properties of a file in a listing; None if the file system does not report them."""

    size: int | None
    modified: float | None


@dataclass(frozen=True)
class StepFolder:
    """One folder of a step: `step-00000020`, or `step-00000020-2` for its replacement.

    Nothing can be renamed, so a replacement has another name, and the old folder stays complete until it is committed.
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
        """True if its manifest exists."""
        return MANIFEST in self.files

    @property
    def is_set_aside(self) -> bool:
        """True if it is damaged and was kept."""
        return DAMAGED_MANIFEST in self.files and not self.is_committed

    def is_unchanged_for(self, seconds: float) -> bool:
        """Returns True if no file changed in this time; False if modification times are not known."""
        times = [file.modified for file in self.files.values()]
        return all(modified is not None and time.time() - modified > seconds for modified in times)


class RemoteFolder:
    """The files below one address. A missing file is FileNotFoundError; any other failure is UnreachableError."""

    def __init__(self, address: str) -> None:
        self.path = RemotePath(address)

    def step_folders(self, step: int | None = None) -> list[StepFolder]:
        """Returns the folders of all steps, or of one, ascending by step and number, each with its files."""
        found = []
        for name, (kind, _) in self._list("").items():
            match = _FOLDER_NAME.fullmatch(name)
            if match is None or kind != "directory":
                continue
            key = (int(match[1]), int(match[2] or 1))
            # "step-000000005" has the wrong width: the name could not be derived from the step.
            if StepFolder(*key).name == name and step in (None, key[0]):
                files = {inner: file for inner, (kind, file) in self._list(name).items() if kind == "file"}
                found.append(StepFolder(*key, files))
        return sorted(found, key=lambda folder: (folder.step, folder.number))

    def manifest(self, folder: StepFolder) -> dict[str, Any]:
        """Returns the entries of the manifest of a step folder; raises damage."""
        where = self.path / folder.name / MANIFEST
        try:
            raw = self.read(f"{folder.name}/{MANIFEST}")
        except FileNotFoundError as error:
            raise CheckpointError("The manifest is missing.", where=where) from error
        return parse_manifest(raw, where=where)

    def read(self, name: str) -> bytes:
        """Returns the content of a small file."""
        return bytes(self._call(name, lambda files, path: files.cat_file(path)))

    def range_reader(self, name: str, size: int) -> Callable[[int, int], bytes]:
        """Returns a function that reads the bytes of a file of this size between two offsets; fewer at the end of the
        file.

        Small ranges are read together with adjacent bytes, because each request takes long.
        """

        def read(start: int, stop: int) -> bytes:
            stop = min(stop, size)
            try:
                content = bytes(self._call(name, lambda files, path: files.cat_file(path, start=start, end=stop)))
            except FileNotFoundError as error:
                raise CheckpointError(f"The file is missing; {MANIFEST} names it.", where=self.path / name) from error
            if len(content) != stop - start:
                problem = f"Only {len(content)} of {stop - start} bytes arrived"
                raise UnreachableError(f"{problem}.", where=self.path / name)
            return content

        @lru_cache(maxsize=_NUM_WINDOWS)
        def window(number: int) -> bytes:
            return read(number * _WINDOW_BYTES, (number + 1) * _WINDOW_BYTES)

        def read_ahead(start: int, stop: int) -> bytes:
            stop = min(stop, size)
            if start >= stop:
                return b""
            if stop - start > _WINDOW_BYTES // 4:
                return read(start, stop)
            first, last = start // _WINDOW_BYTES, (stop - 1) // _WINDOW_BYTES
            content = window(first) if first == last else window(first) + window(last)
            return content[start - first * _WINDOW_BYTES : stop - first * _WINDOW_BYTES]

        return read_ahead

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yields the content of a large file, block by block."""
        with self._call(name, lambda files, path: files.open(path, "rb")) as file:
            while block := self._call(name, lambda files, path: file.read(BLOCK_BYTES)):
                yield block

    def put(self, name: str, content: bytes) -> None:
        """Puts a small file and reads it back; raises if it differs."""
        self._put(name, lambda files, path: files.pipe_file(path, content))
        try:
            arrived = self.read(name)
        except FileNotFoundError as error:
            raise UnreachableError("The file was put, but does not exist.", where=self.path / name) from error
        if arrived != content:
            problem = f"The file was put with {len(content)} bytes, but reads back differently ({len(arrived)} bytes)"
            raise UnreachableError(f"{problem}.", where=self.path / name)

    @contextmanager
    def created(self, name: str) -> Iterator[Callable[[bytes | memoryview], object]]:
        """Uploads a large file as a stream; yields the function that appends to it, and asks for its size at the end.

        After an error part of the file may exist.
        """
        file = self._put(name, lambda files, path: files.open(path, "wb"))
        expected = 0

        def write(content: bytes | memoryview) -> None:
            nonlocal expected
            self._call(name, lambda files, path: file.write(content))
            expected += len(content)

        try:
            yield write
            self._call(name, lambda files, path: file.close())
        except BaseException:
            # Now instead of when the object is garbage-collected, which could be after the folder is deleted.
            for end in ("discard", "close"):
                with suppress(Exception):
                    getattr(file, end)()
            raise
        try:
            size = _size_in(self._call(name, lambda files, path: files.info(path)))
        except FileNotFoundError as error:
            raise UnreachableError("The file was put, but does not exist.", where=self.path / name) from error
        if size is not None and size != expected:
            raise UnreachableError(f"Only {size} of {expected} bytes arrived.", where=self.path / name)

    def delete(self, name: str) -> None:
        """Removes a file, if it exists."""
        with suppress(FileNotFoundError):
            self._call(name, lambda files, path: files.rm_file(path))

    def delete_folder(self, folder: StepFolder) -> None:
        """Removes a step folder, its manifest first: from then on it is not a checkpoint, even if the removal is
        interrupted."""
        self.delete(f"{folder.name}/{MANIFEST}")
        for name in folder.files:
            if name != MANIFEST:
                self.delete(f"{folder.name}/{name}")
        try:
            self._call(folder.name, lambda files, path: files.rmdir(path))
        except (OSError, CheckpointError) as error:
            logger.debug("%s has no folders to remove: %s", self.path, error)

    def _list(self, name: str) -> dict[str, tuple[str, RemoteFile]]:
        """Returns the entries of a folder; none if it does not exist.

        Uses `ls` and not `find`, which omits folders that it cannot list: a checkpoint that is not listed is lost.
        """
        try:
            entries = self._call(name, lambda files, path: files.ls(path, detail=True))
        except FileNotFoundError:
            return {}
        return {
            str(entry["name"]).rstrip("/").rpartition("/")[2]: (
                str(entry["type"]),
                RemoteFile(_size_in(entry), _time_in(entry)),
            )
            for entry in entries
        }

    def _put(self, name: str, operation: Callable[[Any, str], _Result]) -> _Result:
        """Uploads a file; if its folder is missing, creates the folder and tries again. Object stores need none."""
        try:
            return self._call(name, operation)
        except FileNotFoundError:
            parent = name.rpartition("/")[0]
            self._call(parent, lambda files, path: files.makedirs(path, exist_ok=True))
        try:
            return self._call(name, operation)
        except FileNotFoundError as error:
            raise UnreachableError(f"The file cannot be put: {error}.", where=self.path / name) from error

    def _call(self, name: str, operation: Callable[[Any, str], _Result]) -> _Result:
        path = self.path / name if name else self.path
        if is_masked(path.address):
            raise UnreachableError(
                "The address has no credentials, because a run does not save them. Set it again: checkpoint.folder=….",
                where=path,
            )
        try:
            import fsspec  # type: ignore[import-untyped]  # it has no type hints

            # Looked up at each use, because file systems with an event loop do not survive a fork.
            files, inner = fsspec.url_to_fs(path.address)
            # A listing cached before an upload would make the upload look failed.
            files.invalidate_cache()
            return operation(files, inner)
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has its own exceptions
            problem = mask_secrets(f"{type(error).__name__}: {error}").rstrip(".")
            advice = "Check the address, the access to it and the network."
            if isinstance(error, ImportError):
                advice = install_hint(path.address)
            raise UnreachableError(f"It cannot be reached: {problem}. {advice}", where=path) from error


def _size_in(entry: Mapping[str, Any]) -> int | None:
    size = entry.get("size")
    return None if size is None else int(size)


def _time_in(entry: Mapping[str, Any]) -> float | None:
    for key in _TIMES:
        value = entry.get(key)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
