"""Step folders on a local disk: written atomically, verified by hash, renamed if damaged.

A checkpoint is `step-00001000/` with a MANIFEST.json that matches its files. `encoding.py` and `tensor_files.py`
convert a state to files, `retention.py` decides which checkpoints to keep, and `contents.py` what a run saves. One
process writes, or several led by rank 0 (`together.py`); any number may read.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from trainwright.checkpoint.disk import (
    hash_file,
    is_abandoned,
    locked,
    make_folder,
    names_in,
    point_link,
    range_reader,
    rename,
    sync_folder,
    synced_file,
    write_file,
)
from trainwright.checkpoint.encoding import as_whole, map_tensors
from trainwright.checkpoint.manifest import (
    MANIFEST,
    STEP_NAME,
    FileFact,
    UnknownFormatError,
    UnreachableError,
    check_manifest_step,
    make_manifest,
    read_manifest,
)
from trainwright.checkpoint.snapshot import HostSnapshot, encode_parts
from trainwright.checkpoint.tensor_files import (
    THREADED_HASH_BYTES,
    OpenFile,
    read_part,
    write_part,
    write_share,
    writing,
)
from trainwright.errors import CheckpointError
from trainwright.progress import progress

logger = logging.getLogger(__name__)

PART_NAME = re.compile(r"[a-z][a-z0-9_-]*")

# Prefixes of folders that are not listed as checkpoints: a staging folder is not yet complete; an aside is a complete
# checkpoint whose replacement is being moved in, and counts while the final name does not exist; a trash folder is
# being deleted.
STAGING, ASIDE, TRASH = ".staging", ".aside", ".trash"
HIDDEN_NAME = re.compile(r"(\.staging|\.aside|\.trash)-step-(\d{8,})-[0-9a-f]+")

# Links to a checkpoint for users: they are updated after a commit, and no code reads them.
LATEST, BEST = "latest", "best"
TEMPORARY_LINK = re.compile(r"\.(latest|best)-[0-9a-f]+")
# A leftover of a process that died while checking that all ranks see this folder (together.py).
TOKEN = re.compile(r"\.shared-[0-9a-f]+")

# Hashing dominates the cost of verifying; files are hashed in parallel, one thread per file.
HASHING_THREADS = 4

_Candidate = TypeVar("_Candidate")


class OtherWriters(Protocol):
    """The other ranks that write files of the same checkpoint, as seen by the rank that commits it."""

    def request_files(self, folder: str, /) -> None:
        """Asks them to write their files into this folder: the argument of `write_share`."""

    def wait_for_files(self) -> dict[str, FileFact]:
        """Waits until all have written; returns the manifest's entries for their files."""


class CheckpointStore:
    """The checkpoints of one run, by step.

    ```
    write:   .staging-… ← files, each synced ← MANIFEST.json     not visible yet
             step-N → .aside-…                                   only if step N is being replaced
             .staging-… → step-N                                 the commit
             .aside-… → .trash-… → deleted
             latest → step-N                                     a link, for users
    delete:  step-N → .trash-… → deleted
    ```
    A crash between any two operations leaves the old or the new checkpoint of step N, both whole; `clean` removes
    what is left over.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        # By step, the manifest's entries of the files that were verified; a replaced checkpoint has other entries.
        self._verified: dict[int, Mapping[str, Any]] = {}

    def path(self, step: int) -> Path:
        """Returns the folder of `step`, whether or not it exists."""
        check_step(step, where=self.folder)
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending. Looks for manifests only; `verify` compares contents."""
        return [step for step in sorted(self._step_folders()) if self._locate(step) is not None]

    def write(self, step: int, parts: Mapping[str, Any], *, metrics: Mapping[str, float]) -> Path:
        """Saves `parts` as the checkpoint of `step`, replacing an existing one, and returns its folder.

        When it returns, the checkpoint survives a power failure. When it raises, earlier checkpoints are unchanged, and
        that of `step` is the old one or, if only the last sync failed, the new one.
        """
        return self.write_snapshot(step, encode_parts(parts, accepts_shards=False), metrics=metrics)

    def write_snapshot(
        self, step: int, snapshot: HostSnapshot, *, metrics: Mapping[str, float], others: OtherWriters | None = None
    ) -> Path:
        """Saves encoded parts, together with the files that the other ranks write; otherwise like `write`."""
        final = self.path(step)
        check_part_names(snapshot.parts, where=final)
        try:
            make_folder(self.folder)
            staging = self._hidden(STAGING, step)
            # Not mkdtemp, whose folders only their owner may read, because this folder becomes the checkpoint.
            staging.mkdir()
        except OSError as error:
            _raise_unwritten(final, error)
        try:
            with locked(staging):
                if others is not None:
                    others.request_files(staging.name)
                files: dict[str, FileFact] = {}
                with writing(snapshot.parts, partial(synced_file, staging)) as create:
                    for part, encoded in snapshot.parts.items():
                        files |= write_part(create, part, encoded)
                if others is not None:
                    files |= others.wait_for_files()
                # The manifest is written last, when every file that it names is on the disk.
                manifest = make_manifest(step=step, parts=list(snapshot.parts), files=files, metrics=metrics)
                write_file(staging / MANIFEST, manifest)
                sync_folder(staging)
                self._commit(staging, step)
        except BaseException as error:
            # Ctrl-C included: a staging folder can be as large as the model.
            shutil.rmtree(staging, ignore_errors=True)
            if isinstance(error, OSError):
                _raise_unwritten(final, error)
            raise
        # The checkpoint is committed; it hides an aside that cannot be removed now, which `clean` removes later.
        with suppress(OSError):
            self._discard_asides(step)
            self._mark(LATEST, max(self.steps(), default=None))
        return final

    def write_share(self, folder: str, snapshot: HostSnapshot, *, rank: int) -> dict[str, FileFact]:
        """Writes this rank's files of a checkpoint that rank 0 commits, and returns their manifest entries.

        `folder` is the argument of `OtherWriters.request_files`. When it returns, the files survive a power failure.
        """
        staging = self.folder / folder
        match = HIDDEN_NAME.fullmatch(folder)
        if match is None or match[1] != STAGING:
            raise CheckpointError(f"{folder!r} is not a staging folder.", where=self.folder)
        files: dict[str, FileFact] = {}
        try:
            for part, encoded in snapshot.parts.items():
                files |= write_share(partial(synced_file, staging), part, encoded, rank=rank)
            if files:
                sync_folder(staging)
        except OSError as error:
            _raise_unwritten(staging, error)
        return files

    def mark_best(self, step: int | None) -> None:
        """Points the link `best`, which is for users, to a committed step; removes it for None."""
        self._mark(BEST, step)

    def _mark(self, link: str, step: int | None) -> None:
        point_link(self.folder / link, None if step is None else self.path(step).name)

    def read(self, step: int, part: str, *, device: str = "cpu") -> Any:
        """Returns the state of one part with full tensors on `device`; otherwise like `read_split`."""
        return map_tensors(self.read_split(step, part), lambda tensor, _: as_whole(tensor).to(device))

    def read_split(self, step: int, part: str) -> Any:
        """Returns the state of one part with SplitTensors: reading a region of one reads that region from the disk.

        The data is compared with its hashes, unless this store has already verified the checkpoint, so each process
        verifies all data that it uses.
        """
        folder = self._committed(step)
        manifest = read_manifest(folder)
        is_verified = self._verified.get(step) == manifest["files"]
        return read_state(
            lambda name: range_reader(folder / name), part, manifest, where=folder, is_verified=is_verified
        )

    def parts(self, step: int) -> list[str]:
        """Returns the names of the saved parts, in the order in which they were given."""
        return list(read_manifest(self._committed(step))["parts"])

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics that were saved with the checkpoint, including nan."""
        return dict(read_manifest(self._committed(step))["metrics"])

    def verify(self, step: int) -> None:
        """Compares every file with the manifest, which reads all of them; raises the first difference."""
        folder = self._committed(step)
        manifest = read_manifest(folder)
        check_manifest_step(manifest, step, where=folder)
        facts = {folder / name: FileFact(**fact) for name, fact in manifest["files"].items()}
        # Sizes first, because they are fast to read and a truncated file is the most common damage.
        for path, fact in facts.items():
            _verify_size(path, fact)
        size = sum(fact.size for fact in facts.values())
        with progress("Verifying a checkpoint", total=size, unit="bytes") as advance:
            if size < THREADED_HASH_BYTES:
                for path, fact in facts.items():
                    _verify_hash(path, fact)
            else:
                with ThreadPoolExecutor(max_workers=HASHING_THREADS, thread_name_prefix="verify") as threads:
                    results = [threads.submit(_verify_hash, path, fact) for path, fact in facts.items()]
                    for result, fact in zip(results, facts.values(), strict=True):
                        result.result()
                        advance(fact.size)
        self._verified[step] = manifest["files"]

    def newest_intact(self, *, set_aside: bool = True) -> int | None:
        """Returns the newest step that verifies, or None; damaged newer ones are renamed with a warning.

        Only the run itself renames checkpoints, because another reader could see one that is being replaced.
        """
        steps = [(step, self.path(step).name) for step in sorted(self._step_folders(), reverse=True)]
        intact = find_intact(steps, self.verify, self._set_aside if set_aside else None)
        if set_aside and steps and intact != steps[0][0]:
            self._mark(LATEST, intact)
        return intact

    def delete(self, step: int) -> None:
        """Removes the checkpoint of `step` atomically for readers."""
        folder = self._committed(step)
        try:
            # Asides first, because `clean` would restore one once the final name is free.
            self._discard_asides(step, but=folder)
            self._discard(folder, step)
        except OSError as error:
            problem = f"It cannot be deleted: {error}"
            raise CheckpointError(f"{problem}. Check the permissions of {self.folder}.", where=folder) from error

    def clean(self) -> None:
        """Removes leftovers of dead writers, and restores a checkpoint whose replacement was not committed."""
        for name in names_in(self.folder):
            if TEMPORARY_LINK.fullmatch(name) or TOKEN.fullmatch(name):
                with suppress(OSError):
                    (self.folder / name).unlink()
        hidden = self._hidden_folders()
        living = {folder: step for kind, step, folder in hidden if kind == STAGING and not is_abandoned(folder)}
        for kind, step, folder in hidden:
            try:
                if kind == TRASH:
                    shutil.rmtree(folder, ignore_errors=True)
                elif folder in living or (kind == ASIDE and step in living.values()):
                    continue
                elif kind == ASIDE and self._locate(step) == folder:
                    # Fails if a writer has just created the final name, so neither is lost.
                    rename(folder, self.path(step))
                else:
                    self._discard(folder, step)
            except OSError as error:
                logger.warning("A leftover in the checkpoints folder could not be removed: %s", error)

    def _step_folders(self) -> set[int]:
        """Returns the steps that have a folder or an aside, with or without a manifest."""
        steps = set()
        # One listing for both, because a replaced checkpoint could move from its name to an aside between two listings.
        for name in names_in(self.folder):
            plain, hidden = STEP_NAME.fullmatch(name), HIDDEN_NAME.fullmatch(name)
            # "step-000000005" has the wrong width: `path` would not find it.
            if plain and self.path(int(plain[1])).name == name:
                steps.add(int(plain[1]))
            elif hidden and hidden[1] == ASIDE:
                steps.add(int(hidden[2]))
        return steps

    def _hidden_folders(self) -> list[tuple[str, int, Path]]:
        matches = [HIDDEN_NAME.fullmatch(name) for name in names_in(self.folder)]
        return [(match[1], int(match[2]), self.folder / match[0]) for match in matches if match]

    def _hidden(self, kind: str, step: int) -> Path:
        return self.folder / f"{kind}-{self.path(step).name}-{secrets.token_hex(4)}"

    def _locate(self, step: int) -> Path | None:
        """Returns the folder of the committed checkpoint of `step`: its name, or an aside while that does not exist."""
        final = self.path(step)
        if (final / MANIFEST).is_file():
            return final
        asides = [folder for kind, other, folder in self._hidden_folders() if kind == ASIDE and other == step]
        asides = [folder for folder in asides if (folder / MANIFEST).is_file()]
        # The writer that moved it aside may have finished since the first check.
        if (final / MANIFEST).is_file():
            return final
        return max(asides, key=_created, default=None)

    def _committed(self, step: int) -> Path:
        folder = self._locate(step)
        if folder is not None:
            return folder
        if self.path(step).exists():
            raise CheckpointError(f"{MANIFEST} is missing, so it was not finished.", where=self.path(step))
        known = ", ".join(map(str, self.steps())) or "none"
        raise CheckpointError(f"No checkpoint of step {step}. Known steps: {known}.", where=self.folder)

    def _commit(self, staging: Path, step: int) -> None:
        final, aside = self.path(step), self._hidden(ASIDE, step)
        replaces = final.exists()
        if replaces:
            rename(final, aside)
        try:
            rename(staging, final)
        except BaseException:
            if replaces and not final.exists():
                rename(aside, final)
            raise
        sync_folder(self.folder)

    def _discard_asides(self, step: int, *, but: Path | None = None) -> None:
        for kind, other, folder in self._hidden_folders():
            if kind == ASIDE and other == step and folder != but:
                self._discard(folder, step)

    def _discard(self, folder: Path, step: int) -> None:
        trash = self._hidden(TRASH, step)
        rename(folder, trash)
        # Otherwise, a power failure during the deletion could leave an incomplete checkpoint with a valid name.
        sync_folder(self.folder)
        # On a network disk, a file that a reader has open may not be deletable; `clean` tries again.
        shutil.rmtree(trash, ignore_errors=True)

    def _set_aside(self, step: int) -> str:
        """Renames the damaged checkpoint of `step`, never over another, and returns a sentence for the warning."""
        folder = self._locate(step) or self.path(step)
        target = self.folder / f"damaged-{self.path(step).name}"
        number = 1
        while target.exists():
            number += 1
            target = self.folder / f"damaged-{self.path(step).name}-{number}"
        try:
            rename(folder, target)
        except OSError as error:
            # A read-only folder: falling back to an intact checkpoint matters more than renaming.
            return f"It could not be renamed to {target.name} ({error})."
        return f"It is kept as {target.name}."


def check_step(step: int, *, where: object) -> None:
    """Raises if `step` is negative."""
    if step < 0:
        raise CheckpointError(f"A checkpoint's step is 0 or more, got {step}.", where=where)


def check_part_names(names: Iterable[str], *, where: object) -> None:
    """Raises if the name of a part cannot be a file name."""
    for part in names:
        if not PART_NAME.fullmatch(part):
            problem = f"The part name {part!r} cannot be a file name"
            raise CheckpointError(f"{problem}: use a-z, then a-z, 0-9, _ and -.", where=where)


def read_state(
    open_file: OpenFile, part: str, manifest: Mapping[str, Any], *, where: object, is_verified: bool = False
) -> Any:
    """Returns the state of a part, with SplitTensors that are read from its files when they are copied."""
    if part not in manifest["parts"]:
        known = ", ".join(manifest["parts"]) or "none"
        raise CheckpointError(f"No part {part!r} was saved. Use one of: {known}.", where=where)
    files = {name: FileFact(**fact) for name, fact in manifest["files"].items()}
    try:
        return read_part(open_file, part, files, where=where, is_verified=is_verified)
    except UnreachableError:
        raise
    except (ValueError, RecursionError, CheckpointError) as error:
        problem = f"The part {part!r} cannot be read: {error}".rstrip(".")
        raise CheckpointError(f"{problem}. Use another step.", where=where) from error


def find_intact(
    candidates: Iterable[tuple[_Candidate, str]],
    verify: Callable[[_Candidate], None],
    set_aside: Callable[[_Candidate], str] | None,
) -> _Candidate | None:
    """Returns the first candidate that verifies, or None, and warns about the damaged ones before it.

    `candidates` are passed with their names, newest first; `set_aside` renames a damaged one and returns a description.
    """
    damaged: list[str] = []
    intact, instead = None, "There is no intact checkpoint: training starts at step 0."
    for candidate, name in candidates:
        try:
            verify(candidate)
        except (UnknownFormatError, UnreachableError):
            # Not damage: a checkpoint that is temporarily unreadable must be neither renamed nor skipped.
            raise
        except CheckpointError as error:
            damaged.append(str(error) if set_aside is None else f"{error} {set_aside(candidate)}")
            continue
        intact, instead = candidate, f"Using {name} instead."
        break
    # After the search, because each warning names the checkpoint that is used instead.
    for problem in damaged:
        logger.warning("Damaged checkpoint: %s %s", problem, instead)
    return intact


def _verify_size(path: Path, fact: FileFact) -> None:
    try:
        fact.check(size=path.stat().st_size, where=path)
    except FileNotFoundError as error:
        raise CheckpointError(f"The file is missing; {MANIFEST} names it.", where=path) from error
    except OSError as error:
        raise CheckpointError(f"The file cannot be read: {error}.", where=path) from error


def _verify_hash(path: Path, fact: FileFact) -> None:
    try:
        fact.check(sha256=hash_file(path), where=path)
    except OSError as error:
        raise CheckpointError(f"The file cannot be read: {error}.", where=path) from error


def _created(folder: Path) -> str:
    """Returns when a checkpoint was created; an unreadable one is the oldest."""
    try:
        return str(read_manifest(folder)["created"])
    except CheckpointError:
        return ""


def is_disk_full(error: BaseException | None) -> bool:
    """Returns True if an error or its cause is a full disk or an exhausted quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def _raise_unwritten(final: Path, error: Exception) -> NoReturn:
    advice = "Free some space" if is_disk_full(error) else "Check the disk and the folder's permissions"
    problem = f"The checkpoint could not be written: {error}"
    raise CheckpointError(f"{problem}. {advice}; earlier checkpoints are unchanged.", where=final) from error
