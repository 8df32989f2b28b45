"""The few acts on a local disk that a checkpoint is made of: write and sync a file, rename, lock, link.

What they are put together to is store.py's, the tensors' file format tensor_files.py's. Each act here is one that a
test kills the process before.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

# Where the file system has no locks, a folder that nobody touched for so long is taken for a dead writer's.
SECONDS_OF_SILENCE = 3600.0


@dataclass(frozen=True)
class FileFact:
    """What the manifest says of a file."""

    size: int
    """Bytes."""
    sha256: str
    """The hash of all of them, in hex."""


def write_file(path: Path, content: bytes) -> FileFact:
    """Write a file that is not there yet, sync it, and return its size and hash."""
    with created(path) as descriptor:
        write_all(descriptor, content)
        os.fsync(descriptor)
    return FileFact(len(content), hashlib.sha256(content).hexdigest())


@contextmanager
def created(path: Path) -> Iterator[int]:
    """Open a file that must not exist, as readable as the umask lets it be, and close it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of `content`: one write(2) takes at most 2 GiB, and less where a disk is nearly full."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def hash_file(path: Path) -> str:
    """Return a file's sha256 in hex; reads all of it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; its name is then on the disk."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def rename(source: Path, target: Path) -> None:
    """Rename a folder; onto another that is not empty it fails, so nothing is ever overwritten."""
    source.rename(target)


def sync_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk; without it a rename may be undone by a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE mounts cannot sync folders; there a power cut is the server's concern.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; a folder that is not there is empty."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []


def point_link(link: Path, target: str | None) -> None:
    """Make `link` point to `target` beside it, in one act; None removes it.

    Links are for people, so one that cannot be made (no links on this mount, a real folder of that name) is only
    noted at the debug level.
    """
    temporary = link.with_name(f".{link.name}-{secrets.token_hex(4)}")
    try:
        if (str(link.readlink()) if link.is_symlink() else None) == target:
            return
        if target is None:
            link.unlink()
            return
        temporary.symlink_to(target, target_is_directory=True)
        temporary.replace(link)
    except (OSError, NotImplementedError) as error:
        logger.debug("The link %s was not moved: %s", link, error)
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder`, under whatever name, that the kernel lets go when this process dies.

    Process ids would not do: a container that starts again often has the same one.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _try_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def is_abandoned(folder: Path) -> bool:
    """Say whether nobody holds the lock of `folder`; where there are no locks, whether it is long untouched."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        free = _try_lock(descriptor)
        if free is None:
            times = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
            return time.time() - max(times) > SECONDS_OF_SILENCE
        return free
    except FileNotFoundError:
        # It was committed while we looked.
        return False
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Return whether the lock was free, or None where the file system has no locks (some NFS and Lustre mounts)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
