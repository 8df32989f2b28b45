"""The cache folder: what can be made or fetched again, kept between runs.

Files and folders arrive there whole or not at all: they are made beside their place and renamed into it, so that a
run that is killed leaves nothing half done and several processes may make the same entry at once.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def cache_root(cache_dir: str | Path | None) -> Path:
    """Returns the folder that holds all caches: `cache_dir`, or `trainwright` in $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trainwright"


def sync_folder(folder: Path) -> None:
    """Puts the names in `folder` on the disk; without it a rename may be undone by a power cut."""
    if os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network mounts cannot sync folders; there a power cut is the server's concern.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def rename_unless_taken(staging: Path, folder: Path) -> None:
    """Moves the finished folder into place in one act; where another process was first, its folder stands."""
    try:
        staging.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextmanager
def staged_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file to write that appears at `path` when the block ends well, in one act, and not at all otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with staging.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # without it a crash of the machine can leave the name on an empty file
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
