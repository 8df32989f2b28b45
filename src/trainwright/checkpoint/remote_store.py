"""Checkpoints at an fsspec address (`s3://bucket/run`): files first, MANIFEST.json last, and its presence commits.

`open_store` chooses between this store and the local one (store.py).
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from trainwright.checkpoint.disk import SECONDS_OF_SILENCE, FileFact
from trainwright.checkpoint.manifest import FORMAT, MANIFEST, UnknownFormatError, read_manifest, render_manifest
from trainwright.checkpoint.remote_files import (
    DAMAGED_MANIFEST,
    RemoteFolder,
    RemotePath,
    Take,
    UnreachableError,
    is_address,
    local_path,
)
from trainwright.checkpoint.snapshot import HostSnapshot
from trainwright.checkpoint.store import CheckpointStore, OtherWriters
from trainwright.checkpoint.tensor_files import file_names, write_share
from trainwright.errors import CheckpointError

logger = logging.getLogger(__name__)


class RemoteStore:
    """The checkpoints of one run in an object store, by step.

    ```
    write:   step-N/… ← files, the size of each asked for afterwards     nothing to see yet
             step-N/MANIFEST.json                                        the commit
    replace: step-N-2/… ← files; step-N-2/MANIFEST.json                  the commit; from now on the old one is hidden
             step-N/MANIFEST.json → gone, then its files
    delete:  step-N/MANIFEST.json → gone, then its files
    ```
    A death between any two acts leaves the old or the new checkpoint of step N, both whole; `clean` tidies up. No
    answer from the network is not damage: it is raised as UnreachableError, and nothing is set aside for it.
    """

    def __init__(self, address: str) -> None:
        self._remote = RemoteFolder(address)
        self._names: dict[int, str] = {}

    @property
    def folder(self) -> RemotePath:
        """The address, for messages."""
        return self._remote.path

    def path(self, step: int) -> RemotePath:
        """Return the folder of `step`, whether or not it exists: the one last met, else the plain one. Asks nobody."""
        if step < 0:
            raise CheckpointError(f"A checkpoint's step is 0 or more, got {step}.", where=self.folder)
        return self.folder / self._names.get(step, Take(step, 1).name)

    def steps(self) -> list[int]:
        """Return the committed steps, ascending. Looks for manifests only; `verify` compares contents."""
        return sorted({take.step for take in self._remote.takes() if take.is_committed})

    def write(self, step: int, parts: Mapping[str, Any], *, metrics: Mapping[str, float]) -> RemotePath:
        """Save `parts` as the checkpoint of `step`, replacing one that exists, and return its folder.

        When it raises, earlier checkpoints are untouched and that of `step` is the old one, or this one where only
        the answer to its last act was lost.
        """
        return self._write(
            step,
            list(parts),
            lambda local, part: local.write(step, {part: parts[part]}, metrics={}),
            metrics=metrics,
        )

    def write_snapshot(
        self, step: int, snapshot: HostSnapshot, *, metrics: Mapping[str, float], others: OtherWriters | None = None
    ) -> RemotePath:
        """Save what was copied to main memory, with what the other ranks put there of it, as `write` does."""

        def write_part(local: CheckpointStore, part: str) -> Path:
            shard_locations = {part: snapshot.shard_locations[part]} if part in snapshot.shard_locations else {}
            return local.write_snapshot(step, HostSnapshot({part: snapshot.parts[part]}, shard_locations), metrics={})

        return self._write(step, list(snapshot.parts), write_part, metrics=metrics, others=others)

    def write_share(self, place: str, snapshot: HostSnapshot, *, rank: int) -> dict[str, FileFact]:
        """Put what this rank holds of a checkpoint that the first rank will commit, and return the manifest's facts.

        `place` is what the first rank's store told its OtherWriters.
        """
        files: dict[str, FileFact] = {}
        for encoded in snapshot:
            with tempfile.TemporaryDirectory(prefix="trainwright-") as temporary:
                made = write_share(Path(temporary), encoded, rank=rank)
                for name in made:
                    self._remote.upload(Path(temporary) / name, f"{place}/{name}")
                files |= made
        return files

    def read(self, step: int, part: str, *, device: str = "cpu") -> Any:
        """Return the state of one part with its tensors whole, on `device`; what is downloaded is hashed on the way."""
        return self._read(step, part, lambda local: local.read(step, part, device=device))

    def read_split(self, step: int, part: str) -> Any:
        """Return the state of one part as it lies: a tensor that was written in shards is a SplitTensor.

        All files of the part are downloaded, for only a whole file can be compared with its hash.
        """
        return self._read(step, part, lambda local: local.read_split(step, part))

    def _read(self, step: int, part: str, read: Callable[[CheckpointStore], Any]) -> Any:
        take = self._committed(step)
        manifest = self._remote.manifest(take)
        if part not in manifest["parts"]:
            known = ", ".join(manifest["parts"]) or "none"
            raise CheckpointError(f"No part {part!r} was saved. Ask for one of: {known}.", where=self.path(step))
        with tempfile.TemporaryDirectory(prefix="trainwright-") as temporary:
            local = CheckpointStore(Path(temporary))
            folder = local.path(step)
            folder.mkdir()
            (folder / MANIFEST).write_bytes(render_manifest(manifest))
            for name in file_names(part, manifest["files"]):
                self._compare(take, name, manifest["files"][name], copy=folder / name)
            try:
                # Tensors that are mapped from the file keep it alive after its name is gone.
                return read(local)
            except CheckpointError as error:
                problem = f"The part {part!r} cannot be read: {error.__cause__ or error.problem}".rstrip(".")
                raise CheckpointError(f"{problem}. Use another step.", where=self.path(step)) from error

    def parts(self, step: int) -> list[str]:
        """Return the names of the parts that were saved, in the order they were given."""
        return list(self._remote.manifest(self._committed(step))["parts"])

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics that were saved with the checkpoint, nan included."""
        return dict(self._remote.manifest(self._committed(step))["metrics"])

    def verify(self, step: int) -> None:
        """Compare every file with the manifest, at the price of fetching all of it; raise what differs first."""
        self._verify(self._committed(step))

    def newest_intact(self, *, set_aside: bool = True) -> int | None:
        """Return the newest step that verifies, or None; damaged newer ones are named in a warning and kept.

        To be set aside is to have one's manifest renamed to MANIFEST.damaged.json. Only the run itself may do that.
        """
        damaged: list[str] = []
        intact = None
        for take in reversed([take for take in self._remote.takes() if take.is_committed]):
            try:
                self._verify(take)
            except (UnknownFormatError, UnreachableError):
                # Not damage: what cannot be read now must be neither hidden nor passed over.
                raise
            except CheckpointError as error:
                damaged.append(f"{error} {self._set_aside(take)}" if set_aside else str(error))
                continue
            self._names[take.step] = take.name
            intact = take.step
            break
        # After the search, because each warning says what is used instead.
        instead = (
            "No intact one is left: a training begins anew, at step 0."
            if intact is None
            else f"Using {self.path(intact).name} instead."
        )
        for problem in damaged:
            logger.warning("Damaged checkpoint: %s %s", problem, instead)
        return intact

    def delete(self, step: int) -> None:
        """Remove the checkpoint of `step`; it counts until its manifest is gone, which goes first."""
        self._committed(step)
        takes = [take for take in self._remote.takes(step) if take.is_committed]
        # All manifests before any file, the hidden ones first: none may come to light when the one above it is gone.
        for take in takes:
            self._remote.delete(f"{take.name}/{MANIFEST}")
        self._names.pop(step, None)
        for take in takes:
            self._remote.delete_take(take)

    def mark_best(self, step: int | None) -> None:
        """Do nothing: the local store has a link for people here, and object stores have no links."""

    def clean(self) -> None:
        """Remove what dead writers left and what was replaced; what was set aside stays.

        No lock tells whether a writer lives: files without a manifest go when nobody has touched them for an hour.
        """
        takes = self._remote.takes()
        newest = {take.step: take.number for take in takes if take.is_committed}
        for take in takes:
            replaced = take.is_committed and take.number < newest[take.step]
            left = not take.is_committed and not take.is_set_aside and take.is_silent(SECONDS_OF_SILENCE)
            if replaced or left:
                try:
                    self._remote.delete_take(take)
                except CheckpointError as error:
                    logger.warning("A leftover stays in the checkpoints folder: %s", error)

    def _write(
        self,
        step: int,
        parts: list[str],
        write_part: Callable[[CheckpointStore, str], Path],
        *,
        metrics: Mapping[str, float],
        others: OtherWriters | None = None,
    ) -> RemotePath:
        self.path(step)
        earlier = self._remote.takes(step)
        # Above every number that is there, leftovers included: what lies in a folder must be of one write.
        take = Take(step, 1 + max((other.number for other in earlier), default=0))
        files: dict[str, Any] = {}
        try:
            if others is not None:
                others.call(take.name)
            for part in parts:
                # Part by part: at most one of them lies in the temporary folder.
                with tempfile.TemporaryDirectory(prefix="trainwright-") as temporary:
                    made = write_part(CheckpointStore(Path(temporary)), part)
                    for name, facts in read_manifest(made)["files"].items():
                        self._remote.upload(made / name, f"{take.name}/{name}")
                        files[name] = facts
            if others is not None:
                files |= {name: {"size": fact.size, "sha256": fact.sha256} for name, fact in others.facts().items()}
            content = {
                "format": FORMAT,
                "step": step,
                "created": datetime.now(UTC).isoformat(),
                "metrics": {name: float(value) for name, value in metrics.items()},
                "parts": parts,
                "files": files,
            }
            self._remote.put(f"{take.name}/{MANIFEST}", render_manifest(content))
        except BaseException as error:
            # Ctrl-C included: what was put already can be as large as the model.
            self._take_back(take)
            if isinstance(error, (CheckpointError, OSError)):
                problem = f"The checkpoint could not be written: {error}".rstrip(".")
                raise CheckpointError(f"{problem}. Earlier checkpoints are untouched.", where=self.folder) from error
            raise
        self._names[step] = take.name
        self._discard_replaced(earlier)
        return self.path(step)

    def _take_back(self, take: Take) -> None:
        try:
            for found in self._remote.takes(take.step):
                if found.number == take.number:
                    self._remote.delete_take(found)
        except CheckpointError as error:
            logger.debug("Left for `clean`: %s", error)

    def _discard_replaced(self, others: list[Take]) -> None:
        # Committed already: one that cannot be removed now is hidden by the higher number and left to `clean`.
        try:
            for other in others:
                if other.is_committed:
                    self._remote.delete_take(other)
        except CheckpointError as error:
            logger.debug("Left for `clean`: %s", error)

    def _committed(self, step: int) -> Take:
        self.path(step)
        takes = [take for take in self._remote.takes(step) if take.is_committed]
        if not takes:
            known = ", ".join(str(one) for one in self.steps()) or "none"
            raise CheckpointError(f"No checkpoint of step {step}. There are: {known}.", where=self.folder)
        self._names[step] = takes[-1].name
        return takes[-1]

    def _verify(self, take: Take) -> None:
        where = self.folder / take.name
        manifest = self._remote.manifest(take)
        if manifest["step"] != take.step:
            problem = f"The manifest is of step {manifest['step']}, the folder's name says {take.step}"
            raise CheckpointError(f"{problem}. Move it back.", where=where)
        # The sizes of all, which cost nothing, before the content of any.
        for name, facts in manifest["files"].items():
            if name not in take.files:
                raise CheckpointError(f"The file is missing; {MANIFEST} names it.", where=where / name)
            size = take.files[name].size
            if size is not None and size != facts["size"]:
                raise CheckpointError(f"The file is {size} bytes instead of {facts['size']}.", where=where / name)
        for name, facts in manifest["files"].items():
            self._compare(take, name, facts)

    def _compare(self, take: Take, name: str, facts: Mapping[str, Any], *, copy: Path | None = None) -> None:
        """Fetch a file and compare it with its manifest; into `copy`, if given."""
        where = self.folder / take.name / name
        digest, size = hashlib.sha256(), 0
        try:
            with nullcontext() if copy is None else copy.open("wb") as target:
                for block in self._remote.blocks(f"{take.name}/{name}"):
                    digest.update(block)
                    size += len(block)
                    if target is not None:
                        target.write(block)
        except FileNotFoundError as error:
            raise CheckpointError(f"The file is missing; {MANIFEST} names it.", where=where) from error
        except OSError as error:
            problem = f"The temporary folder {tempfile.gettempdir()} cannot take it: {error}"
            raise UnreachableError(f"{problem}. Free some space, or set TMPDIR.", where=where) from error
        listed = take.files.get(name)
        if listed is not None and size < facts["size"] == listed.size:
            raise UnreachableError(f"Of {facts['size']} bytes that lie there, only {size} arrived.", where=where)
        if size != facts["size"]:
            raise CheckpointError(f"The file is {size} bytes instead of {facts['size']}.", where=where)
        found, expected = digest.hexdigest(), str(facts["sha256"])
        if found != expected:
            raise CheckpointError(
                f"The content differs: sha256 {found[:12]}… instead of {expected[:12]}….", where=where
            )

    def _set_aside(self, take: Take) -> str:
        """Rename the manifest of a damaged checkpoint and say so in a sentence; no file of it is removed."""
        try:
            self._remote.put(f"{take.name}/{DAMAGED_MANIFEST}", self._remote.read(f"{take.name}/{MANIFEST}"))
            self._remote.delete(f"{take.name}/{MANIFEST}")
        except (FileNotFoundError, CheckpointError) as error:
            # Somebody else's folder, read-only: falling back matters more than tidying.
            return f"Its manifest could not be renamed to {DAMAGED_MANIFEST} ({error})."
        return f"It is kept, with its manifest as {DAMAGED_MANIFEST}."


AnyStore: TypeAlias = CheckpointStore | RemoteStore
"""Both have the same public methods; a remote one's paths are RemotePath, which name and open nothing."""


def open_store(folder: str | Path) -> AnyStore:
    """Returns the store in `folder`, a path or an address of fsspec; touches nothing. `file://` is a plain path."""
    if is_address(folder):
        return RemoteStore(str(folder))
    return CheckpointStore(local_path(folder))
