"""What a run of training_main begins with where --load names another run: in --mode pretrain a copy of its state.

The copy is the run's own only when the run has begun. If its settings are refused it is taken away again, and a note
in the run folder tells a copy that nobody took away, for the process was killed, from what the run has saved itself.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainwright.checkpoint.folder import CHECKPOINTS, CONFIG_FILE, ENVIRONMENT_FILE, find_run, run_folder
from trainwright.checkpoint.listing import checkpoints_place
from trainwright.checkpoint.open_store import open_store
from trainwright.config import Origin, RunConfig
from trainwright.config.tree import absolute
from trainwright.doors.function_model import find_checkpoint
from trainwright.errors import CheckpointError
from trainwright.user_code import caller

logger = logging.getLogger(__name__)

NOTE = "begun_from.json"
"""In the run folder: what --load named, and the step that was copied."""


def is_spent(load: Path, config: RunConfig) -> bool:
    """Is what --load names gone, and needed no more, because the run has a checkpoint of its own to go on from?"""
    if load.exists():
        return False
    return open_store(checkpoints_place(run_folder(config), config)).newest_intact(set_aside=False) is not None


@contextmanager
def begun_from(load: Path, config: RunConfig) -> Iterator[None]:
    """Lets a run without a checkpoint begin with a copy of another run's: all of its state, and its settings.

    If what is done within fails before the run has begun, the copy goes.
    """
    folder = absolute(run_folder(config))
    _begin(load, folder)
    try:
        yield
    except BaseException:
        _discard_copy(folder)
        raise


def _begin(load: Path, folder: Path) -> None:
    _discard_copy(folder)
    note = _read_note(folder)
    own = open_store(folder / CHECKPOINTS).steps()
    if own and note is not None and note["load"] == str(absolute(load)):
        logger.info("--load %s: the run has begun from it, and goes on from step %d.", load, own[-1])
        return
    store, step = find_checkpoint(load)
    source = Path(str(store.path(step)))
    if source.parent == folder / CHECKPOINTS:
        return  # the run's own: it goes on from there anyway
    if own:
        begun = "at step 0" if note is None else f"with {note['load']}"
        raise CheckpointError(
            f"{load} has no effect, for {folder} has begun {begun} and is at step {own[-1]}. Leave it out to go on "
            "from there, or give the run another --experiment-name.",
            where=Origin.parse(caller(), "--load"),
        )
    if not source.is_dir():
        problem = f"{source} lies on no disk of this machine. Copy it here, or name a copy of it."
        raise CheckpointError(problem, where=Origin.parse(caller(), "--load"))
    _copy(load, source, folder, step)
    logger.info("The run begins with a copy of %s", source)


def _copy(load: Path, source: Path, folder: Path, step: int) -> None:
    """Copies a checkpoint under another name and renames it, so that a run that dies meanwhile finds none."""
    staging = folder / CHECKPOINTS / f".copying-{source.name}"
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(source, staging)
    # The note and the settings come first: a checkpoint without them could be anybody's.
    note = {"load": str(absolute(load)), "step": step}
    (folder / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")
    (folder / ENVIRONMENT_FILE).unlink(missing_ok=True)  # of one that died before its first checkpoint
    shutil.copy2(find_run(load)[0] / CONFIG_FILE, folder / CONFIG_FILE)
    staging.rename(folder / CHECKPOINTS / source.name)


def _discard_copy(folder: Path) -> None:
    """Takes a copy away from which no run has begun: one that has says where, in environment.json."""
    note = _read_note(folder)
    if note is None or (folder / ENVIRONMENT_FILE).exists():
        return
    store = open_store(folder / CHECKPOINTS)
    if store.steps() == [note["step"]]:
        store.delete(note["step"])
        (folder / CONFIG_FILE).unlink(missing_ok=True)
    (folder / NOTE).unlink()
    with suppress(OSError):  # there may be more in them
        (folder / CHECKPOINTS).rmdir()
        folder.rmdir()


def _read_note(folder: Path) -> dict[str, Any] | None:
    path = folder / NOTE
    if not path.is_file():
        return None
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        return {name: note[name] for name in ("load", "step")}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged. Delete it to go on with the run as it is.") from error
