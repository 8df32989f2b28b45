"""Locations of files: resolves a `path` of a run file, local or remote, and opens the files.

A path is a file, a glob, a folder or a list of those; `s3://…`, `https://…`, `memory://…` go through fsspec. This
module is independent of the files' contents. Remote and compressed files can be read in place, or fetched into the
cache once.
"""

from __future__ import annotations

import bz2
import difflib
import glob
import gzip
import hashlib
import io
import json
import logging
import lzma
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from trainwright.data.cache import cache_root, staged_file
from trainwright.errors import ConfigError, DataError
from trainwright.progress import progress
from trainwright.safe_text import is_masked

logger = logging.getLogger(__name__)

Paths = str | Path | Sequence[str | Path]

COMPRESSIONS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

# Few large reads, because each takes a round trip for a remote file and a system call for a local one.
_BUFFER_BYTES = 1 << 20

# The extra with the packages that fsspec needs for a protocol; "fsspec" for all others.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}

# Properties that change with the content of a remote file; a file system provides some of these.
_VERSION_FACTS = ("size", "mtime", "created", "last_modified", "LastModified", "etag", "ETag", "md5Hash", "Content-MD5")


@dataclass(frozen=True)
class FileLocation:
    """One file: a local path or a URL, and its size in bytes if the file system knows it."""

    name: str
    size: int | None
    label: str = ""
    """Its name relative to the folder that the path names, or the last part, so it does not depend on the folder's
    location."""

    @property
    def is_remote(self) -> bool:
        """True for a URL."""
        return "://" in self.name

    @property
    def compression(self) -> str | None:
        """The suffix of a compressed file; None for other files."""
        suffix = Path(self.name).suffix.lower()
        return suffix if suffix in COMPRESSIONS else None

    def open(self) -> IO[bytes]:
        """Opens the file's stored bytes to read and to seek in."""
        if not self.is_remote:
            return Path(self.name).open("rb", buffering=_BUFFER_BYTES)
        files, path = _open_file_system(self.name)
        return io.BufferedReader(files.open(path, "rb"), _BUFFER_BYTES)

    def open_content(self) -> io.BufferedReader:
        """Opens the content, decompressed. Seeking forward in a compressed file reads the bytes in between."""
        file = self.open()
        if self.compression is not None:
            return io.BufferedReader(COMPRESSIONS[self.compression](file), _BUFFER_BYTES)
        return file  # type: ignore[return-value]  # a buffered binary file is one

    def fetch(self, cache_dir: str | Path | None) -> Path:
        """Returns a local file with the content: the file itself, or a copy in the cache, which is made once."""
        if not self.is_remote and self.compression is None:
            return Path(self.name)
        facts = json.dumps([self.name, *self.version()], default=str)
        stem = self.name.rstrip("/").replace("\\", "/").rpartition("/")[2].removesuffix(self.compression or "")
        digest = hashlib.sha256(facts.encode()).hexdigest()[:24]
        copy = cache_root(cache_dir) / "files" / f"{digest}-{stem[-80:]}"
        if not copy.is_file():
            what = f"{'Downloading' if self.is_remote else 'Unpacking'} {stem}"
            with (
                staged_file(copy) as target,
                self.open_content() as source,
                progress(what, unit="bytes") as advance,
            ):
                while block := source.read(8 * _BUFFER_BYTES):
                    target.write(block)
                    advance(len(block))
        return copy

    def version(self) -> list[Any]:
        """Returns values that change with the content: size and modification time, or the properties that a server
        reports."""
        if not self.is_remote:
            facts = Path(self.name).stat()
            return [facts.st_size, facts.st_mtime_ns]
        files, path = _open_file_system(self.name)
        # For http, the key contains only the URL, so the properties that the server reports are added.
        return [files.ukey(path), *_facts_in(files.info(path))]


def find_files(paths: Paths, *, suffixes: Sequence[str], project_dir: str | Path | None) -> list[FileLocation]:
    """Returns the files that `paths` name, in the order given, those of a folder or a glob sorted by name.

    For a folder, these are all files below it with one of `suffixes`, also compressed; hidden files are skipped.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise ConfigError("path is an empty list. Name at least one file, glob or folder.")
    found: list[FileLocation] = []
    for path in given:
        text = os.fspath(path).removeprefix("file://")
        found += _find_remote(text, suffixes) if "://" in text else _find_local(text, suffixes, project_dir)
    return found


def _find_local(text: str, suffixes: Sequence[str], project_dir: str | Path | None) -> list[FileLocation]:
    path = Path(project_dir or ".").absolute() / Path(text).expanduser()
    if path.is_file():
        names = [path]
    elif path.is_dir():
        below = (each.relative_to(path) for each in path.rglob("*"))
        names = [path / each for each in sorted(below) if _is_wanted(each.parts, suffixes)]
    else:
        names = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207  # Path.glob takes no whole path
    files = [
        FileLocation(str(name), name.stat().st_size, _label(name.as_posix(), path.as_posix()))
        for name in names
        if name.is_file()
    ]
    if not files:
        nearest = _nearest_local(path)
        raise _nothing_found(text, whole=str(path), is_folder=path.is_dir(), suffixes=suffixes, nearest=nearest)
    return files


def _find_remote(url: str, suffixes: Sequence[str]) -> list[FileLocation]:
    files, path = _open_file_system(url)
    try:
        found = _list_remote(files, path, url)
    except Exception as error:  # file systems raise various types
        raise DataError(
            f"path: {url} cannot be looked up: {type(error).__name__}: {error}. Check the address and the access to it."
        ) from error
    is_folder = path not in found and not glob.has_magic(path)
    root = path.rstrip("/") + "/"
    located = [
        FileLocation(files.unstrip_protocol(name), each.get("size"), _label(name, path))
        for name, each in sorted(found.items())
        if each.get("type") == "file"
        and (not is_folder or _is_wanted(name.removeprefix(root).strip("/").split("/"), suffixes))
    ]
    if not located:
        folder, _, name = path.rstrip("/").rpartition("/")
        try:
            siblings = [str(each).rstrip("/").rpartition("/")[2] for each in files.ls(folder, detail=False)]
        except Exception:  # a folder that cannot be listed: the message has no suggestion
            siblings = []
        close = difflib.get_close_matches(name, siblings, n=1)
        nearest = str(files.unstrip_protocol(f"{folder}/{close[0]}")) if close else None
        raise _nothing_found(url, whole=url, is_folder=bool(found), suffixes=suffixes, nearest=nearest)
    return located


def _list_remote(files: Any, path: str, url: str) -> dict[str, Any]:
    """Returns the files that a remote path names, with the properties that the file system reports."""
    if glob.has_magic(path) and not url.startswith(("http://", "https://")):  # there a ? begins the query
        found: dict[str, Any] = files.glob(path, detail=True)
    elif files.isfile(path):
        found = {path: files.info(path)}
    else:
        found = files.find(path, detail=True) if files.isdir(path) else {}
    return found


def _open_file_system(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL and the path in it.

    It is created for each use, because file systems with an event loop do not survive a fork into a worker.
    """
    if is_masked(url):
        raise DataError(
            f"path: {url} has no credentials, because a run does not save them. Set the whole address again, such as "
            "data.train.path=…."
        )
    try:
        import fsspec  # type: ignore[import-untyped]  # it comes without types

        files, path = fsspec.url_to_fs(url)
    except ImportError as error:
        raise DataError(f"path: {url} cannot be opened: {error}. {install_hint(url)}") from error
    except ValueError as error:
        raise DataError(f"path: {url} cannot be opened: {error}.") from error
    return files, path


def install_hint(url: str) -> str:
    """Returns advice on installing the packages for a URL, because fsspec includes none for object stores."""
    protocol = url.partition("://")[0].rpartition("::")[2]
    return f"Install what it needs: pip install 'trainwright[{_EXTRAS.get(protocol, 'fsspec')}]'."


def remote_version(url: str) -> list[Any] | None:
    """Returns values that change with the files at a URL; None if they are unknown or the text is not a URL.

    Takes one or two requests. Errors are ignored here: the reader of the files reports them.
    """
    protocol, separator, rest = url.partition("://")
    if not separator or not rest:
        return None
    try:
        import fsspec

        if protocol.partition("::")[0] not in fsspec.available_protocols():
            return None
        found = _list_remote(*_open_file_system(url), url)
    except Exception as error:
        logger.debug("Nothing is known of %s: %s", url, error)
        return None
    return [[name, *map(str, _facts_in(each))] for name, each in sorted(found.items())] or None


def list_locations(files: Sequence[FileLocation]) -> list[str]:
    """Returns the names and sizes of files in order, without adjacent repetitions, for later comparison."""
    named = [f"{each.label} ({each.size} bytes)" for each in files]
    return [name for name, _ in groupby(named)]


def fingerprint_files(files: Sequence[FileLocation]) -> str:
    """Returns a digest that changes with the files' names, sizes and times of change; their content is not read."""
    facts = json.dumps([[file.label, *file.version()] for file in files], default=str)
    return hashlib.sha256(facts.encode("utf-8", "surrogatepass")).hexdigest()


def _facts_in(found: Mapping[str, Any]) -> list[Any]:
    return [found.get(fact) for fact in _VERSION_FACTS]


def _label(name: str, path: str) -> str:
    """Returns a file's name relative to the given folder, or to the last folder before a glob's star."""
    folders = path.rstrip("/").split("/")
    if name != path and glob.has_magic(path):
        folders = folders[: next(number for number, each in enumerate(folders) if glob.has_magic(each))]
    return "/".join(name.split("/")[-1:] if name == path else name.split("/")[len(folders) :])


def _is_wanted(parts: Sequence[str], suffixes: Sequence[str]) -> bool:
    if any(part.startswith(".") for part in parts):
        return False
    name = parts[-1].lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return name.endswith(tuple(suffixes))


def _nothing_found(
    given: str, *, whole: str, is_folder: bool, suffixes: Sequence[str], nearest: str | None
) -> DataError:
    shown = given if given == whole else f"{given} ({whole})"
    if is_folder:
        return DataError(
            f"path: the folder {shown} contains no file with the suffix {', '.join(suffixes)}. "
            "Use a glob for other suffixes."
        )
    hint = f' Did you mean "{nearest}"?' if nearest else " Relative paths start at the project folder."
    return DataError(f"path: no file {shown}.{hint}")


def _nearest_local(path: Path) -> str | None:
    """Returns the existing name that is nearest to the first part of the path that does not exist."""
    missing = path
    while not missing.parent.is_dir() and missing.parent != missing:
        missing = missing.parent
    try:
        siblings = [each.name for each in missing.parent.iterdir()]
    except OSError:
        return None  # a folder that may not be listed: the message has no suggestion
    close = difflib.get_close_matches(missing.name, siblings, n=1)
    return str(missing.parent / close[0]) if close else None
