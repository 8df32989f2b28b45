"""Checkpoints at an fsspec URL (`s3://bucket/run`): files first, MANIFEST.json last, whose presence commits.

`open_store` chooses between this store and the local one (store.py).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from trainwright.checkpoint.disk import ABANDONED_SECONDS
from trainwright.checkpoint.encoding import as_whole, map_tensors
from trainwright.checkpoint.manifest import (
    MANIFEST,
    FileFact,
    UnreachableError,
    check_manifest_step,
    make_manifest,
)
from trainwright.checkpoint.remote_files import (
    DAMAGED_MANIFEST,
    RemoteFolder,
    RemotePath,
    StepFolder,
    is_address,
    local_path,
)
from trainwright.checkpoint.snapshot import HostSnapshot, encode_parts
from trainwright.checkpoint.store import (
    CheckpointStore,
    OtherWriters,
    check_part_names,
    check_step,
    find_intact,
    read_state,
)
from trainwright.checkpoint.tensor_files import ReadRange, Write, write_part, write_share, writing
from trainwright.errors import CheckpointError
from trainwright.progress import progress

logger = logging.getLogger(__name__)


class RemoteStore:
    """The checkpoints of one run in an object store, by step.

    ```
    write:   step-N/… ← files, each compared by size afterwards          not visible yet
             step-N/MANIFEST.json                                        the commit
    replace: step-N-2/… ← files; step-N-2/MANIFEST.json                  the commit; it hides the old one
             step-N/MANIFEST.json → deleted, then its files
    delete:  step-N/MANIFEST.json → deleted, then its files
    ```
    A crash between any two operations leaves the old or the new checkpoint of step N, both complete; `clean` removes
    leftovers. A network failure is not damage: it raises UnreachableError, and no checkpoint is renamed.
    """

    def __init__(self, address: str) -> None:
        self._remote = RemoteFolder(address)
        self._names: dict[int, str] = {}
        self._attempts: dict[int, int] = {}
        """By step, the number of the last folder that this store has written to."""

    @property
    def folder(self) -> RemotePath:
        """The address, for messages."""
        return self._remote.path

    def path(self, step: int) -> RemotePath:
        """Returns the folder of `step`, whether or not it exists: the last known one, or `step-N`. No request."""
        check_step(step, where=self.folder)
        return self.folder / self._names.get(step, StepFolder(step, 1).name)

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending. Only looks for manifests; `verify` compares contents."""
        return sorted({folder.step for folder in self._remote.step_folders() if folder.is_committed})

    def write(self, step: int, parts: Mapping[str, Any], *, metrics: Mapping[str, float]) -> RemotePath:
        """Saves `parts` as the checkpoint of `step`, replacing an existing one, and returns its folder.

        When it raises, earlier checkpoints are unchanged, and that of `step` is the old one, or the new one if only the
        response to the last request was lost.
        """
        return self.write_snapshot(step, encode_parts(parts, accepts_shards=False), metrics=metrics)

    def write_snapshot(
        self, step: int, snapshot: HostSnapshot, *, metrics: Mapping[str, float], others: OtherWriters | None = None
    ) -> RemotePath:
        """Saves encoded parts, together with the files that the other ranks upload; otherwise like `write`."""
        check_part_names(snapshot.parts, where=self.path(step))
        earlier = self._remote.step_folders(step)
        # Higher than every existing number, including those of leftovers and failed attempts whose uploads may still
        # end: all files of a folder must come from one write.
        number = 1 + max((folder.number for folder in earlier), default=0)
        target = StepFolder(step, max(number, 1 + self._attempts.get(step, 0)))
        self._attempts[step] = target.number
        files: dict[str, FileFact] = {}
        try:
            if others is not None:
                others.request_files(target.name)
            with writing(snapshot.parts, partial(self._created, target.name)) as create:
                for part, encoded in snapshot.parts.items():
                    files |= write_part(create, part, encoded)
            if others is not None:
                files |= others.wait_for_files()
            manifest = make_manifest(step=step, parts=list(snapshot.parts), files=files, metrics=metrics)
            self._remote.put(f"{target.name}/{MANIFEST}", manifest)
        except BaseException as error:
            # Ctrl-C included: the uploaded files can be as large as the model.
            self._delete_folders(step, lambda folder: folder.number == target.number)
            if isinstance(error, (CheckpointError, OSError)):
                problem = f"The checkpoint could not be written: {error}".rstrip(".")
                raise CheckpointError(f"{problem}. Earlier checkpoints are unchanged.", where=self.folder) from error
            raise
        self._names[step] = target.name
        # The checkpoint is committed: a replaced one that cannot be removed now is hidden by the higher number.
        self._delete_folders(step, lambda folder: folder.is_committed and folder.number < target.number)
        return self.path(step)

    def write_share(self, folder: str, snapshot: HostSnapshot, *, rank: int) -> dict[str, FileFact]:
        """Uploads this rank's files of a checkpoint that rank 0 commits, and returns their manifest entries.

        `folder` is the argument of `OtherWriters.request_files`.
        """
        files: dict[str, FileFact] = {}
        for part, encoded in snapshot.parts.items():
            files |= write_share(partial(self._created, folder), part, encoded, rank=rank)
        return files

    def read(self, step: int, part: str, *, device: str = "cpu") -> Any:
        """Returns the state of one part with full tensors on `device`; the download is compared with its hashes."""
        return map_tensors(self.read_split(step, part), lambda tensor, _: as_whole(tensor).to(device))

    def read_split(self, step: int, part: str) -> Any:
        """Returns the state of one part with SplitTensors: reading a region of one downloads that region.

        Downloads are compared with their hashes, and no file is kept.
        """
        folder = self._committed(step)
        manifest = self._remote.manifest(folder)

        def open_file(name: str) -> ReadRange:
            fact, listed = FileFact(**manifest["files"][name]), folder.files.get(name)
            where = self.folder / folder.name / name
            if listed is None:
                raise CheckpointError(f"The file is missing; {MANIFEST} names it.", where=where)
            fact.check(size=listed.size, where=where)
            return self._remote.range_reader(f"{folder.name}/{name}", fact.size)

        return read_state(open_file, part, manifest, where=self.path(step))

    def parts(self, step: int) -> list[str]:
        """Returns the names of the saved parts, in the order in which they were given."""
        return list(self._remote.manifest(self._committed(step))["parts"])

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics that were saved with the checkpoint, including nan."""
        return dict(self._remote.manifest(self._committed(step))["metrics"])

    def verify(self, step: int) -> None:
        """Compares every file with the manifest, which downloads all of them; raises the first difference."""
        self._verify(self._committed(step))

    def newest_intact(self, *, set_aside: bool = True) -> int | None:
        """Returns the newest step that verifies, or None; damaged newer ones are named in a warning and kept.

        The manifest is renamed to MANIFEST.damaged.json. Only the run itself renames checkpoints.
        """
        folders = [(folder, folder.name) for folder in reversed(self._remote.step_folders()) if folder.is_committed]
        intact = find_intact(folders, self._verify, self._set_aside if set_aside else None)
        if intact is None:
            return None
        self._names[intact.step] = intact.name
        return intact.step

    def delete(self, step: int) -> None:
        """Removes the checkpoint of `step`, the manifest first; it counts as a checkpoint until the manifest is
        deleted."""
        self._committed(step)
        folders = [folder for folder in self._remote.step_folders(step) if folder.is_committed]
        # All manifests before any file, those of hidden folders first, so that none becomes visible again.
        for folder in folders:
            self._remote.delete(f"{folder.name}/{MANIFEST}")
        self._names.pop(step, None)
        for folder in folders:
            self._remote.delete_folder(folder)

    def mark_best(self, step: int | None) -> None:
        """Does nothing: object stores have no links."""

    def clean(self) -> None:
        """Removes leftovers of dead writers and replaced checkpoints; damaged checkpoints that were renamed are kept.

        There are no locks that show whether a writer is alive: files without a manifest are removed after an hour
        without a change.
        """
        folders = self._remote.step_folders()
        newest = {folder.step: folder.number for folder in folders if folder.is_committed}
        for folder in folders:
            if folder.is_committed:
                is_leftover = folder.number < newest[folder.step]
            else:
                is_leftover = not folder.is_set_aside and folder.is_unchanged_for(ABANDONED_SECONDS)
            if is_leftover:
                try:
                    self._remote.delete_folder(folder)
                except CheckpointError as error:
                    logger.warning("A leftover in the checkpoints folder could not be removed: %s", error)

    def _created(self, folder: str, name: str) -> AbstractContextManager[Write]:
        return self._remote.created(f"{folder}/{name}")

    def _delete_folders(self, step: int, is_unneeded: Callable[[StepFolder], bool]) -> None:
        try:
            for folder in self._remote.step_folders(step):
                if is_unneeded(folder):
                    self._remote.delete_folder(folder)
        except CheckpointError as error:
            logger.debug("Left for `clean`: %s", error)

    def _committed(self, step: int) -> StepFolder:
        check_step(step, where=self.folder)
        folders = [folder for folder in self._remote.step_folders(step) if folder.is_committed]
        if not folders:
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"No checkpoint of step {step}. Known steps: {known}.", where=self.folder)
        self._names[step] = folders[-1].name
        return folders[-1]

    def _verify(self, folder: StepFolder) -> None:
        where = self.folder / folder.name
        manifest = self._remote.manifest(folder)
        check_manifest_step(manifest, folder.step, where=where)
        facts = {name: FileFact(**fact) for name, fact in manifest["files"].items()}
        # All sizes, which are already known, before any content.
        for name, fact in facts.items():
            if name not in folder.files:
                raise CheckpointError(f"The file is missing; {MANIFEST} names it.", where=where / name)
            fact.check(size=folder.files[name].size, where=where / name)
        size = sum(fact.size for fact in facts.values())
        with progress("Verifying a checkpoint", total=size, unit="bytes") as advance:
            for name, fact in facts.items():
                self._compare(folder, name, fact, advance)

    def _compare(self, folder: StepFolder, name: str, fact: FileFact, advance: Callable[[int], None]) -> None:
        """Downloads a file and compares it with its manifest entry."""
        where = self.folder / folder.name / name
        digest, size = hashlib.sha256(), 0
        try:
            for block in self._remote.blocks(f"{folder.name}/{name}"):
                digest.update(block)
                size += len(block)
                advance(len(block))
        except FileNotFoundError as error:
            raise CheckpointError(f"The file is missing; {MANIFEST} names it.", where=where) from error
        listed = folder.files.get(name)
        if listed is not None and size < fact.size == listed.size:
            raise UnreachableError(f"Only {size} of the {fact.size} stored bytes arrived.", where=where)
        fact.check(size=size, sha256=digest.hexdigest(), where=where)

    def _set_aside(self, folder: StepFolder) -> str:
        """Renames the manifest of a damaged checkpoint and returns a sentence for the warning; the files are kept."""
        try:
            self._remote.put(f"{folder.name}/{DAMAGED_MANIFEST}", self._remote.read(f"{folder.name}/{MANIFEST}"))
            self._remote.delete(f"{folder.name}/{MANIFEST}")
        except (FileNotFoundError, CheckpointError) as error:
            # A read-only folder: falling back to an intact checkpoint matters more than renaming.
            return f"Its manifest could not be renamed to {DAMAGED_MANIFEST} ({error})."
        return f"It is kept, with its manifest as {DAMAGED_MANIFEST}."


AnyStore: TypeAlias = CheckpointStore | RemoteStore
"""Both have the same public methods. The paths of a remote store are RemotePath, which cannot be opened."""


def open_store(folder: str | Path) -> AnyStore:
    """Returns the store in `folder`, a path or an fsspec URL, without accessing it. `file://` is a local path."""
    if is_address(folder):
        return RemoteStore(str(folder))
    return CheckpointStore(local_path(folder))
