"""Whether all ranks see one checkpoints folder: each writes its share of a split model there.

Asked once, before training, rather than found out at the first save.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from trainwright.checkpoint.open_store import AnyStore
from trainwright.checkpoint.remote_files import RemoteFolder, RemotePath
from trainwright.errors import CheckpointError
from trainwright.parallel.collectives import Ranks

PATIENCE_SECONDS = 10.0
"""A network disk may show a new file to other machines late."""


def refuse_unshared(store: AnyStore, ranks: Ranks, *, patience: float = PATIENCE_SECONDS) -> None:
    """Raises on every rank if one of them does not see what the first one writes; every rank calls it."""
    if ranks.size == 1:
        return
    failure: CheckpointError | None = None
    token = f".shared-{secrets.token_hex(4)}"
    if ranks.is_first:
        try:
            _write(store, token)
        except (CheckpointError, OSError) as error:
            failure = CheckpointError(f"The checkpoints folder cannot be written: {error}", where=store.folder)
    token, failure = ranks.broadcast((token, failure))
    sees = failure is None and _sees(store, token, patience)
    blind = [rank for rank, each in enumerate(ranks.gather(sees)) if not each]
    if ranks.is_first and failure is None:
        _remove(store, token)
    if failure is not None:
        raise failure
    if blind:
        listed = ", ".join(map(str, blind[:8])) + (", …" if len(blind) > 8 else "")
        raise CheckpointError(
            f"The model is split over {ranks.size} ranks, each of which writes its part of a checkpoint, but rank "
            f"{listed} does not see what the first rank writes there. Set output_dir or checkpoint.folder to a folder "
            "that all machines share, or to an address such as s3://bucket/run.",
            where=store.folder,
        )


def _write(store: AnyStore, token: str) -> None:
    if isinstance(store.folder, RemotePath):
        RemoteFolder(store.folder.address).put(token, token.encode())
    else:
        store.folder.mkdir(parents=True, exist_ok=True)
        (store.folder / token).write_text(token)


def _sees(store: AnyStore, token: str, patience: float) -> bool:
    until = time.monotonic() + patience
    while not _is_there(store, token):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _is_there(store: AnyStore, token: str) -> bool:
    try:
        if isinstance(store.folder, Path):
            return (store.folder / token).read_text() == token
        return RemoteFolder(store.folder.address).read(token) == token.encode()
    except (OSError, CheckpointError):
        return False


def _remove(store: AnyStore, token: str) -> None:
    if isinstance(store.folder, Path):
        (store.folder / token).unlink(missing_ok=True)
    else:
        RemoteFolder(store.folder.address).delete(token)
