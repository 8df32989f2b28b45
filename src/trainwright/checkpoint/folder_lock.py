"""Prevents a second process from using a folder, and renames the folder of an earlier run. Does not import torch."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
from pathlib import Path
from typing import IO

from trainwright.errors import CheckpointError

LOCK_FILE = ".lock"
OLD = ".old"
"""The suffix of an earlier run folder that --fresh has renamed."""


def set_aside(folder: Path) -> Path | None:
    """Renames the folder of an earlier run to NAME.old, replacing the previous one, and returns its new path."""
    if not folder.exists():
        return None
    aside = folder.with_name(folder.name + OLD)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    else:
        aside.unlink(missing_ok=True)
    folder.rename(aside)
    return aside


class FolderLock:
    """Prevents a second process from using a run folder; the kernel releases the lock when this process dies.

    A POSIX record lock belongs only to this process: forked loader workers, which may outlive a killed run for some
    seconds, do not hold it. If the file system does not support locks, none is used.
    """

    def __init__(self, folder: Path, *, enabled: bool = True) -> None:
        self._path = folder / LOCK_FILE
        self._enabled = enabled
        self._file: IO[str] | None = None

    def __enter__(self) -> FolderLock:
        if self._enabled:
            self._file = self._path.open("a+", encoding="utf-8")
            self._acquire(self._file)
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {platform.node()}")
            self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()  # releases the lock
            self._file = None

    def reject_if_held(self) -> None:
        """Raises if another process holds the lock; does not access the folder's files."""
        if self._enabled and self._path.exists():
            with self._path.open("r+", encoding="utf-8") as file:
                self._acquire(file)

    def _acquire(self, file: IO[str]) -> None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise CheckpointError(
                f"{self._path.parent} is in use by {holder}. Wait for it, stop it, or choose another name."
            ) from error
        except OSError:
            """A file system without locks."""
