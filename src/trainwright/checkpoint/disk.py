"""The disk operations of a checkpoint: write and sync a file, rename, lock, link.

store.py combines them; tensor_files.py has the file format of tensors. A test kills the process before each of these
operations.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from trainwright.checkpoint.manifest import FileFact
from trainwright.errors import CheckpointError

logger = logging.getLogger(__name__)

# On file systems without locks, the writer of a folder that has not changed for this long is considered dead.
ABANDONED_SECONDS = 3600.0


def write_file(path: Path, content: bytes) -> FileFact:
    """Writes a new file, syncs it, and returns its size and hash."""
    with created(path) as descriptor:
        write_all(descriptor, content)
        os.fsync(descriptor)
    return FileFact(len(content), hashlib.sha256(content).hexdigest())


@contextmanager
def created(path: Path) -> Iterator[int]:
    """Creates a file that must not exist, with the permissions of the umask; closes it at the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Writes all of `content`: one write(2) accepts at most 2 GiB, and less if the disk is nearly full."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def synced_file(folder: Path, name: str) -> Iterator[Callable[[bytes | memoryview], object]]:
    """Creates a file that must not exist; yields the function that appends to it, and syncs it at the end."""
    with created(folder / name) as descriptor:
        yield partial(write_all, descriptor)
        os.fsync(descriptor)


def range_reader(path: Path) -> Callable[[int, int], bytes]:
    """Returns a function that reads the bytes of a file between two offsets, fewer at its end.

    The file is opened by each call, because a checkpoint may have more files than a process may open. Raises if the
    file is replaced between two calls, because the bytes would belong to different checkpoints.
    """
    opened: tuple[int, ...] | None = None

    def read(start: int, stop: int) -> bytes:
        nonlocal opened
        try:
            with path.open("rb", buffering=0) as file:
                facts = os.fstat(file.fileno())
                identity = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
                opened = opened or identity
                if identity != opened:
                    raise CheckpointError("The file was changed while it was read.", where=path)
                return _read_all(file.fileno(), start, min(stop, facts.st_size))
        except OSError as error:
            raise CheckpointError(f"The file cannot be read: {error}.", where=path) from error

    return read


def _read_all(descriptor: int, start: int, stop: int) -> bytes:
    """Reads a range: one read(2) returns at most 2 GiB."""
    blocks = []
    while start < stop and (block := os.pread(descriptor, stop - start, start)):
        blocks.append(block)
        start += len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def hash_file(path: Path) -> str:
    """Returns a file's sha256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents, and syncs its name to the disk."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def rename(source: Path, target: Path) -> None:
    """Renames a folder; fails if the target is a nonempty folder, so nothing is overwritten."""
    source.rename(target)


def sync_folder(folder: Path) -> None:
    """Syncs the names in `folder` to the disk; otherwise a power failure may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE mounts cannot sync folders; the server is responsible there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def names_in(folder: Path) -> list[str]:
    """Returns the names in a folder, sorted; none if it does not exist."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []


def point_link(link: Path, target: str | None) -> None:
    """Points `link` to `target` in the same folder atomically; None removes it.

    Links are for users, so a failure (no links on this mount, a real folder of that name) is only logged at the debug
    level.
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
    """Holds a lock on `folder` that survives a rename and that the kernel releases when this process dies.

    A process id would not work, because a restarted container often has the same one.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _try_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def is_abandoned(folder: Path) -> bool:
    """Returns True if no process holds the lock of `folder`; without locks, if it has not changed for long."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        free = _try_lock(descriptor)
        if free is None:
            times = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
            return time.time() - max(times) > ABANDONED_SECONDS
        return free
    except FileNotFoundError:
        # It was committed in the meantime.
        return False
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Returns whether the lock was free, or None if the file system has no locks (some NFS and Lustre mounts)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
