"""The run folder: config.yaml, environment.json, log.txt, metrics.json, checkpoints/, exports/.

Decided once, by the first rank. Whether a run goes on from what lies there is resume.py's.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import IO

import numpy as np
import torch

from trainwright.checkpoint.listing import checkpoints_location, list_checkpoints
from trainwright.checkpoint.manifest import STEP_NAME
from trainwright.config import RunConfig
from trainwright.config.yaml_text import absolute
from trainwright.errors import CheckpointError, ConfigError

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
LOG_FILE = "log.txt"
CHECKPOINTS = "checkpoints"
LOCK_FILE = ".lock"
_TRAINER = "trainer"  # in environment.json: beside a config that names the trainer, it has no such key


def run_folder(config: RunConfig) -> Path:
    """Returns output_dir/name; touches nothing."""
    return Path(config.output_dir) / config.name


def set_aside(folder: Path) -> Path | None:
    """Renames an earlier run's folder out of the way and returns where it went; nothing is deleted."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


class FolderLock:
    """Keeps a second process out of a run folder while one trains in it; the system frees it when that one dies.

    A POSIX record lock belongs to this process alone: forked loader workers, which may outlive a killed run for
    some seconds, do not hold it.
    """

    def __init__(self, folder: Path, *, enabled: bool = True) -> None:
        self._path = folder / LOCK_FILE
        self._enabled = enabled and fcntl is not None
        self._file: IO[str] | None = None

    def __enter__(self) -> FolderLock:
        if self._enabled:
            self._file = self._path.open("a+", encoding="utf-8")
            self._take(self._file)
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {platform.node()}")
            self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()  # which frees the lock
            self._file = None

    def reject_if_held(self) -> None:
        """Raises if another process holds the lock; touches nothing."""
        if self._enabled and self._path.exists():
            with self._path.open("r+", encoding="utf-8") as file:
                self._take(file)

    def _take(self, file: IO[str]) -> None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise CheckpointError(
                f"{self._path.parent} is in use by {holder}. Wait for it, end it, or choose another name."
            ) from error
        except OSError:
            """A file system without locks: the run goes on without one."""


def claim_checkpoints(config: RunConfig, *, fresh: bool) -> None:
    """Prepares a folder of its own that `checkpoint.folder` asks for; with `fresh` an earlier one is set aside."""
    if config.checkpoint.folder is None:
        return
    place, where = checkpoints_location(run_folder(config), config), config.origin("checkpoint.folder")
    if isinstance(place, Path):
        if fresh:
            set_aside(place)
        prepare(place, setting="checkpoint.folder", where=where)
    elif fresh and list_checkpoints(place):
        raise ConfigError(
            f"checkpoint.folder: {place} holds checkpoints, which --fresh cannot set aside there. Choose another name, "
            "or remove them.",
            where=where,
        )


def prepare(folder: Path, *, setting: str = "output_dir", where: object | None = None) -> None:
    """Makes the folder, or says why it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{setting}: the run folder {folder} cannot be written ({error.strerror}). "
            f"Choose another with {setting}=… or name=….",
            where=where,
        ) from error


def save_settings(folder: Path, config: RunConfig, device: str, *, trainer: str | None = None) -> None:
    """Writes config.yaml and environment.json, where they are not there with the same content.

    `trainer` is the class that trains, where the config names another one.
    """
    saved = read_config(folder)
    if saved is None or saved != config:
        config.save(folder / CONFIG_FILE)
    facts = _environment(device) if trainer is None else {**_environment(device), _TRAINER: trainer}
    environment = json.dumps(facts, indent=2) + "\n"
    path = folder / ENVIRONMENT_FILE
    if not path.exists() or path.read_text(encoding="utf-8") != environment:
        path.write_text(environment, encoding="utf-8")


def read_config(folder: Path) -> RunConfig | None:
    """Returns the config that a run folder was made with, if it has one."""
    path = folder / CONFIG_FILE
    return RunConfig.load(path) if path.exists() else None


def read_trainer(folder: Path) -> str | None:
    """Returns the class that has trained a run where its config names another one; None: it does not."""
    try:
        return dict(json.loads((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8"))).get(_TRAINER)
    except (OSError, ValueError, TypeError):
        return None


def find_run(run_or_checkpoint: Path, *, where: object | None = None) -> tuple[Path, int | None]:
    """Returns the run folder, and the step if the path is one of its checkpoints (or the checkpoints folder).

    `where` says what gave the path, for the error.
    """
    path = absolute(run_or_checkpoint)
    if (path / CONFIG_FILE).exists():
        return path, None
    if path.name == CHECKPOINTS and (path.parent / CONFIG_FILE).exists():
        return path.parent, None
    step = STEP_NAME.fullmatch(path.name)
    if step and path.is_dir() and (path.parent.parent / CONFIG_FILE).exists():
        return path.parent.parent, int(step[1])
    why = f"it has no {CONFIG_FILE}" if path.exists() else "there is no such folder"
    raise CheckpointError(
        f"{run_or_checkpoint} is no run folder: {why}. Give a folder such as runs/NAME, "
        "or one of its checkpoints/step-….",
        where=where,
    )


def _environment(device: str) -> dict[str, str]:
    # Versions and hardware only: no variables, no paths, nothing that could be a secret.
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "device": device,
        "byteorder": sys.byteorder,
    }
