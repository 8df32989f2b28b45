"""Step folders on a local disk: written whole or not at all, verified by hash, set aside when damaged.

A checkpoint is `step-00001000/` with a MANIFEST.json that fits its files. How a state becomes files is in
`encoding.py` and `part_files.py`, which checkpoints to keep in `retention.py`, what a run puts into one in
`contents.py`. One process writes, or several whose first one leads (`together.py`); any number may read.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from safetensors import SafetensorError

from trainwright.checkpoint.disk import (
    FileFact,
    hash_file,
    is_abandoned,
    locked,
    make_folder,
    names_in,
    point_link,
    rename,
    sync_folder,
    write_file,
)
from trainwright.checkpoint.encoding import SplitTensor, encode, map_tensors
from trainwright.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    STEP_NAME,
    UnknownFormatError,
    read_manifest,
    render_manifest,
)
from trainwright.checkpoint.snapshot import EncodedPart, HostSnapshot
from trainwright.checkpoint.tensor_files import HASH_BESIDE_BYTES, read_part, share_names, write_part, write_share
from trainwright.errors import CheckpointError

logger = logging.getLogger(__name__)

PART_NAME = re.compile(r"[a-z][a-z0-9_-]*")

# Names that readers never take for a checkpoint. A staging folder is not yet one; an aside is a whole one whose
# replacement is being moved in, and counts while nothing bears the final name; a trash folder is none any more.
STAGING, ASIDE, TRASH = ".staging", ".aside", ".trash"
HIDDEN_NAME = re.compile(r"(\.staging|\.aside|\.trash)-step-(\d{8,})-[0-9a-f]+")

# Links to a checkpoint, for people: they are moved after a commit, and nothing here reads them.
LATEST, BEST = "latest", "best"
LINK_ON_ITS_WAY = re.compile(r"\.(latest|best)-[0-9a-f]+")
# What a start left that died while it asked whether all ranks see this folder (shared_folder.py).
TOKEN = re.compile(r"\.shared-[0-9a-f]+")

# Hashing is what verifying costs; a file is hashed by one thread, several files by several.
HASHING_THREADS = 4


class OtherWriters(Protocol):
    """The ranks that write parts of the same checkpoint, as the one that commits it sees them."""

    def call(self, place: str, /) -> None:
        """Tells them to write, and where: what `write_share` takes."""

    def facts(self) -> dict[str, FileFact]:
        """Waits until all have written; returns what the manifest says of their files."""


class CheckpointStore:
    """The checkpoints of one run, by step.

    ```
    write:   .staging-… ← files, each synced ← MANIFEST.json     nothing to see yet
             step-N → .aside-…                                   only if step N is being replaced
             .staging-… → step-N                                 the commit
             .aside-… → .trash-… → gone
             latest → step-N                                     a link, for people
    delete:  step-N → .trash-… → gone
    ```
    A death between any two acts leaves the old or the new checkpoint of step N, both whole; `clean` tidies up.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def path(self, step: int) -> Path:
        """Return the folder of `step`, whether or not it exists."""
        if step < 0:
            raise CheckpointError(f"A checkpoint's step is 0 or more, got {step}.", where=self.folder)
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the committed steps, ascending. Looks for manifests only; `verify` compares contents."""
        return [step for step in sorted(self._step_folders()) if self._locate(step) is not None]

    def write(self, step: int, parts: Mapping[str, Any], *, metrics: Mapping[str, float]) -> Path:
        """Save `parts` as the checkpoint of `step`, replacing one that exists, and return its folder.

        When it returns, the checkpoint survives a power cut. When it raises, earlier checkpoints are untouched and
        that of `step` is the old one or, where only the last sync failed, this one.
        """
        # Part by part, so that at most one part's copies of non-contiguous tensors exist at a time.
        encoded = (EncodedPart(part, *encode(state, name=part), {}) for part, state in parts.items())
        return self._write(step, list(parts), encoded, metrics=metrics)

    def write_snapshot(
        self, step: int, snapshot: HostSnapshot, *, metrics: Mapping[str, float], others: OtherWriters | None = None
    ) -> Path:
        """Save parts that are encoded already, with what the other ranks write of them; otherwise as `write`."""
        return self._write(step, list(snapshot.parts), snapshot, metrics=metrics, others=others)

    def write_share(self, place: str, snapshot: HostSnapshot, *, rank: int) -> dict[str, FileFact]:
        """Write what this rank holds of a checkpoint that the first rank will commit, and return the manifest's facts.

        `place` is what the first rank's store told its OtherWriters. When it returns, the files survive a power cut.
        """
        staging = self.folder / place
        match = HIDDEN_NAME.fullmatch(place)
        if match is None or match[1] != STAGING:
            raise CheckpointError(f"{place!r} is no staging folder.", where=self.folder)
        files: dict[str, FileFact] = {}
        try:
            for encoded in snapshot:
                files |= write_share(staging, encoded, rank=rank)
            if files:
                sync_folder(staging)
        except (OSError, SafetensorError) as error:
            _raise_unwritten(staging, error)
        return files

    def _write(
        self,
        step: int,
        names: list[str],
        encoded: Iterable[EncodedPart],
        *,
        metrics: Mapping[str, float],
        others: OtherWriters | None = None,
    ) -> Path:
        final = self.path(step)
        for part in names:
            if not PART_NAME.fullmatch(part):
                problem = f"The part name {part!r} cannot be a file name"
                raise CheckpointError(f"{problem}: use a-z, then a-z, 0-9, _ and -.", where=final)
        try:
            make_folder(self.folder)
            staging = self._hidden(STAGING, step)
            # Not mkdtemp: its folders are closed to everybody else, and this one becomes the checkpoint.
            staging.mkdir()
        except OSError as error:
            _raise_unwritten(final, error)
        try:
            with locked(staging):
                if others is not None:
                    others.call(staging.name)
                files: dict[str, FileFact] = {}
                for each in encoded:
                    files |= write_part(staging, each)
                if others is not None:
                    files |= others.facts()
                _write_manifest(staging, step=step, names=names, files=files, metrics=metrics)
                self._commit(staging, step)
        except BaseException as error:
            # Ctrl-C included: a staging folder can be as large as the model.
            shutil.rmtree(staging, ignore_errors=True)
            if isinstance(error, (OSError, SafetensorError)):
                _raise_unwritten(final, error)
            raise
        # Committed already: an aside that cannot be removed now is hidden by the final name and left to `clean`.
        with suppress(OSError):
            self._discard_asides(step)
            self._mark(LATEST, max(self.steps(), default=None))
        return final

    def mark_best(self, step: int | None) -> None:
        """Move the link `best`, which is for people, to a committed step; None removes it."""
        self._mark(BEST, step)

    def _mark(self, link: str, step: int | None) -> None:
        point_link(self.folder / link, None if step is None else self.path(step).name)

    def read(self, step: int, part: str, *, device: str = "cpu") -> Any:
        """Return the state of one part with its tensors whole, on `device`. Does not hash: `verify` does."""
        return self._read(step, part, device=device, whole=True)

    def read_split(self, step: int, part: str) -> Any:
        """Return the state of one part as it lies: a tensor that was written in shards is a SplitTensor.

        Nothing is copied: whoever wants a region of a tensor reads that region from the disk.
        """
        return self._read(step, part, device="cpu", whole=False)

    def _read(self, step: int, part: str, *, device: str, whole: bool) -> Any:
        folder = self._committed(step)
        manifest = read_manifest(folder)
        if part not in manifest["parts"]:
            known = ", ".join(manifest["parts"]) or "none"
            raise CheckpointError(f"No part {part!r} was saved. Ask for one of: {known}.", where=folder)
        try:
            state = read_part(folder, part, manifest["files"], device=device)
            return joined(state, device=device) if whole and share_names(part, manifest["files"]) else state
        except (OSError, SafetensorError, ValueError, CheckpointError) as error:
            problem = f"The part {part!r} cannot be read: {error}".rstrip(".")
            raise CheckpointError(f"{problem}. Use another step: {self._known_steps()}.", where=folder) from error

    def parts(self, step: int) -> list[str]:
        """Return the names of the parts that were saved, in the order they were given."""
        return list(read_manifest(self._committed(step))["parts"])

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics that were saved with the checkpoint, nan included."""
        return dict(read_manifest(self._committed(step))["metrics"])

    def verify(self, step: int) -> None:
        """Compare every file with the manifest, at the price of reading all of it; raise what differs first."""
        folder = self._committed(step)
        manifest = read_manifest(folder)
        if manifest["step"] != step:
            problem = f"The manifest is of step {manifest['step']}, the folder's name says {step}"
            raise CheckpointError(f"{problem}. Rename the folder back.", where=folder)
        facts = {folder / name: FileFact(**fact) for name, fact in manifest["files"].items()}
        # Sizes first: they are known at once, and a file cut short is the commonest damage.
        for path, fact in facts.items():
            _verify_size(path, fact)
        if sum(fact.size for fact in facts.values()) < HASH_BESIDE_BYTES:
            for path, fact in facts.items():
                _verify_hash(path, fact)
            return
        with ThreadPoolExecutor(max_workers=HASHING_THREADS, thread_name_prefix="verify") as threads:
            for found in [threads.submit(_verify_hash, path, fact) for path, fact in facts.items()]:
                found.result()

    def newest_intact(self, *, set_aside: bool = True) -> int | None:
        """Return the newest step that verifies, or None; damaged newer ones are renamed and named in a warning.

        Only the run itself may set aside: a reader beside it could have met a checkpoint that was being replaced.
        """
        damaged: list[str] = []
        intact = None
        for step in sorted(self._step_folders(), reverse=True):
            try:
                self.verify(step)
            except UnknownFormatError:
                # Not damage: an older trainwright must not hide what a newer one wrote.
                raise
            except CheckpointError as error:
                damaged.append(f"{error} {self._set_aside(step)}" if set_aside else str(error))
                continue
            intact = step
            break
        # After the search, because each warning says what is used instead.
        instead = (
            "No intact one is left: a training begins anew, at step 0."
            if intact is None
            else f"Using {self.path(intact).name} instead."
        )
        for problem in damaged:
            logger.warning("Damaged checkpoint: %s %s", problem, instead)
        if damaged and set_aside:
            self._mark(LATEST, intact)
        return intact

    def delete(self, step: int) -> None:
        """Remove the checkpoint of `step`; readers see it whole until they no longer see it."""
        folder = self._committed(step)
        try:
            # Asides first: once the final name is free, `clean` would bring one back.
            self._discard_asides(step, but=folder)
            self._discard(folder, step)
        except OSError as error:
            problem = f"It cannot be deleted: {error}"
            raise CheckpointError(f"{problem}. Check the permissions of {self.folder}.", where=folder) from error

    def clean(self) -> None:
        """Remove what dead writers left and bring back a checkpoint whose replacement never arrived."""
        for name in names_in(self.folder):
            if LINK_ON_ITS_WAY.fullmatch(name) or TOKEN.fullmatch(name):
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
                    # Fails rather than replaces where a writer has just taken the final name: neither is lost.
                    rename(folder, self.path(step))
                else:
                    self._discard(folder, step)
            except OSError as error:
                logger.warning("A leftover stays in the checkpoints folder: %s", error)

    def _step_folders(self) -> set[int]:
        """Return the steps that have a folder of their name, or an aside, with a manifest or without."""
        steps = set()
        # One listing for both: between two, a replaced checkpoint could slip from its name to an aside unseen.
        for name in names_in(self.folder):
            plain, hidden = STEP_NAME.fullmatch(name), HIDDEN_NAME.fullmatch(name)
            # "step-000000005" has the wrong width: `path` would never find it again.
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
        """Return where the committed checkpoint of `step` is: at its name, or aside while none is there."""
        final = self.path(step)
        if (final / MANIFEST).is_file():
            return final
        asides = [folder for kind, other, folder in self._hidden_folders() if kind == ASIDE and other == step]
        asides = [folder for folder in asides if (folder / MANIFEST).is_file()]
        # The writer that moved it aside may have finished since the first look.
        if (final / MANIFEST).is_file():
            return final
        return max(asides, key=_created, default=None)

    def _committed(self, step: int) -> Path:
        folder = self._locate(step)
        if folder is not None:
            return folder
        if self.path(step).exists():
            raise CheckpointError(f"{MANIFEST} is missing, so it was never finished.", where=self.path(step))
        raise CheckpointError(f"No checkpoint of step {step}. There are: {self._known_steps()}.", where=self.folder)

    def _known_steps(self) -> str:
        return ", ".join(str(step) for step in self.steps()) or "none"

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
        # Were the files to go first and the power with them, a checkpoint full of holes would bear a valid name.
        sync_folder(self.folder)
        # A file that a reader holds open may resist on a network disk; `clean` tries again.
        shutil.rmtree(trash, ignore_errors=True)

    def _set_aside(self, step: int) -> str:
        """Rename the damaged checkpoint of `step`, never over another, and say so in a sentence."""
        folder = self._locate(step) or self.path(step)
        target = self.folder / f"damaged-{self.path(step).name}"
        number = 1
        while target.exists():
            number += 1
            target = self.folder / f"damaged-{self.path(step).name}-{number}"
        try:
            rename(folder, target)
        except OSError as error:
            # Somebody else's folder, read-only: falling back matters more than tidying.
            return f"It could not be renamed to {target.name} ({error})."
        return f"It is kept as {target.name}."


def joined(state: Any, *, device: str = "cpu") -> Any:
    """Return a state in which no tensor is in shards; the others are the same objects."""
    return map_tensors(
        state, lambda tensor, _: tensor.whole(device=device) if isinstance(tensor, SplitTensor) else tensor
    )


def _write_manifest(
    staging: Path, *, step: int, names: list[str], files: Mapping[str, FileFact], metrics: Mapping[str, float]
) -> None:
    """Write the manifest, last: every file is on the disk before it is named."""
    content = {
        "format": FORMAT,
        "step": step,
        "created": datetime.now(UTC).isoformat(),
        "metrics": {name: float(value) for name, value in metrics.items()},
        "parts": names,
        "files": {name: {"size": fact.size, "sha256": fact.sha256} for name, fact in files.items()},
    }
    write_file(staging / MANIFEST, render_manifest(content))
    sync_folder(staging)


def _verify_size(path: Path, fact: FileFact) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointError(f"The file is missing; {MANIFEST} names it.", where=path) from error
    except OSError as error:
        raise CheckpointError(f"The file cannot be read: {error}.", where=path) from error
    if found != fact.size:
        raise CheckpointError(f"The file is {found} bytes instead of {fact.size}.", where=path)


def _verify_hash(path: Path, fact: FileFact) -> None:
    try:
        found = hash_file(path)
    except OSError as error:
        raise CheckpointError(f"The file cannot be read: {error}.", where=path) from error
    if found != fact.sha256:
        raise CheckpointError(f"The content differs: sha256 {found[:12]}… instead of {fact.sha256[:12]}….", where=path)


def _created(folder: Path) -> str:
    """Return when a checkpoint was made, for choosing between two; an unreadable one is the oldest."""
    try:
        return str(read_manifest(folder)["created"])
    except CheckpointError:
        return ""


def is_disk_full(error: BaseException | None) -> bool:
    """Say whether an error, or what caused it, is a disk or a quota without room."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def _raise_unwritten(final: Path, error: Exception) -> NoReturn:
    advice = "Free some space" if is_disk_full(error) else "Check the disk and the folder's permissions"
    problem = f"The checkpoint could not be written: {error}"
    raise CheckpointError(f"{problem}. {advice}; earlier checkpoints are untouched.", where=final) from error
