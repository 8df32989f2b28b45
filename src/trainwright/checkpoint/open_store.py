"""Opens the store of a run's checkpoints: of a folder on this machine, or of an address such as s3://bucket/run."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from trainwright.checkpoint.remote_files import is_address, local_path
from trainwright.checkpoint.remote_store import RemoteStore
from trainwright.checkpoint.store import CheckpointStore

AnyStore: TypeAlias = CheckpointStore | RemoteStore
"""Both have the same public methods; a remote one's paths are RemotePath, which name and open nothing."""


def open_store(folder: str | Path) -> AnyStore:
    """Returns the store in `folder`, a path or an address of fsspec; touches nothing. `file://` is a plain path."""
    if is_address(folder):
        return RemoteStore(str(folder))
    return CheckpointStore(local_path(folder))
