"""Several ranks write one checkpoint: the first leads, the others follow, and no rank waits in a collective."""

from __future__ import annotations

import errno
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainwright.checkpoint.disk import FileFact
from trainwright.checkpoint.encoding import Encoded, encode_split
from trainwright.checkpoint.remote_files import RemoteFolder, RemotePath
from trainwright.checkpoint.remote_store import AnyStore
from trainwright.checkpoint.snapshot import HostSnapshot
from trainwright.checkpoint.store import is_disk_full
from trainwright.errors import CheckpointError
from trainwright.parallel.collectives import Notes, NotesUnreachable, Ranks

PATIENCE_SECONDS = 10.0
"""A network disk may show a new file to other machines late."""


def reject_unshared(store: AnyStore, ranks: Ranks, *, patience: float = PATIENCE_SECONDS) -> None:
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


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others before a save."""

    first_of_stage: int
    failure: CheckpointError | None = None
    digest: str = ""
    """Of the names and shapes of all that lies in shards: equal on the ranks of a stage, or shards would be missing."""
    trees: Mapping[str, Any] | None = None
    keys: Mapping[str, frozenset[str]] | None = None
    """With a pipeline, of the first rank of each stage: its parts' trees, and the keys of their tensors."""


def share_of(parts: Mapping[str, Any], ranks: Ranks) -> HostSnapshot:
    """Returns what this rank writes of a checkpoint, sharing memory with the state; the first rank's has the trees.

    Every rank calls it. What any rank cannot save is rejected on all of them.
    """
    mesh = ranks.mesh
    encoded: dict[str, Encoded] = {}
    failure: CheckpointError | None = None
    try:
        encoded = {part: encode_split(state, name=part) for part, state in parts.items()}
    except CheckpointError as error:
        failure = error
    report = _Report(mesh.first_of_stage, failure, _digest(encoded))
    if mesh.size("pipeline") > 1 and ranks.rank == mesh.first_of_stage:
        trees = {part: each.tree for part, each in encoded.items()}
        keys = {part: frozenset(each.tensors) for part, each in encoded.items()}
        report = _Report(mesh.first_of_stage, failure, report.digest, trees, keys)
    reports = ranks.gather(report)
    _reject_differences(reports)
    stages = [each for each in reports if each.trees is not None and each.keys is not None]
    taken = {part: _taken(stages, part, before=mesh.first_of_stage) for part in encoded}
    mine = {part: _mine(each, taken[part], ranks) for part, each in encoded.items()}
    if ranks.is_first:
        trees = merge_trees([each.trees for each in stages if each.trees is not None]) if stages else {}
        all_trees = {part: trees.get(part, each.tree) for part, each in encoded.items()}
    else:
        all_trees = dict.fromkeys(encoded)
    return HostSnapshot(
        {part: (all_trees[part], {key: encoded[part].tensors[key] for key in mine[part]}) for part in encoded},
        {
            part: {key: each.shard_locations[key] for key in mine[part] if key in each.shard_locations}
            for part, each in encoded.items()
            if any(key in each.shard_locations for key in mine[part])
        },
    )


def _digest(encoded: Mapping[str, Encoded]) -> str:
    names = [[part, each.split_paths] for part, each in encoded.items()]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def _reject_differences(reports: Sequence[_Report]) -> None:
    for report in reports:
        if report.failure is not None:
            raise report.failure
    for rank, report in enumerate(reports):
        first = report.first_of_stage
        if report.digest != reports[first].digest:
            raise CheckpointError(
                f"Ranks {first} and {rank} hold shards of different tensors, so that no whole can be saved. Do the "
                "optimizers and hooks of all ranks have state for the same parameters?"
            )


def _taken(stages: Iterable[_Report], part: str, *, before: int) -> set[str]:
    """Returns the keys that earlier stages write: a tied weight on two stages is saved once."""
    keys: set[str] = set()
    for report in stages:
        if report.first_of_stage < before and report.keys is not None:
            keys |= report.keys[part]
    return keys


def _mine(encoded: Encoded, taken: set[str], ranks: Ranks) -> list[str]:
    first = ranks.mesh.first_of_stage
    mine = []
    for key, tensor in encoded.tensors.items():
        place = encoded.shard_locations.get(key)
        layout = None if place is None else place.layout
        if layout is None:
            writes = ranks.rank == first
        else:
            # A tensor without a value has no shard; that it was there, the first rank's file says.
            is_somewhere = tensor.numel() > 0 or (ranks.rank == first and 0 in (place.shape if place else ()))
            writes = layout.is_written_here(first) and is_somewhere
        if writes and key not in taken:
            mine.append(key)
    return mine


def merge_trees(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the trees of all parts from those of the stages, in their order; of equal keys the first counts.

    An optimizer's groups have the parameters of all stages. A stage may lack a group that has none of its parameters:
    then groups are the same whose settings are.
    """
    merged: dict[str, Any] = _union(stages)
    for name, optimizer in merged.get("optimizers", {}).items():
        saved = [stage["optimizers"][name]["groups"] for stage in stages]
        optimizer["groups"] = _merge_groups(saved)
    return merged


def _union(values: Sequence[Any]) -> Any:
    """Joins mappings key by key; of anything else the first counts."""
    first = values[0]
    if not isinstance(first, Mapping) or next(iter(first), "").startswith("$"):
        return first
    keys = dict.fromkeys(key for value in values if isinstance(value, Mapping) for key in value)
    if any(key.startswith("$") for key in keys):
        return first
    return {
        key: _union([value[key] for value in values if isinstance(value, Mapping) and key in value]) for key in keys
    }


def _merge_groups(stages: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    by_number = len({len(groups) for groups in stages}) == 1
    for groups in stages:
        for number, group in enumerate(groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            same = [
                known
                for place, known in enumerate(merged)
                if (place == number if by_number else {**known, "params": None} == {**settings, "params": None})
            ]
            if same:
                same[0]["params"] = [
                    *same[0]["params"],
                    *(name for name in group["params"] if name not in same[0]["params"]),
                ]
            else:
                merged.append({**settings, "params": list(group["params"])})
    return merged


BEAT_SECONDS = 2.0
"""How often a rank that saves says that it is there."""
LOST_SECONDS = 30.0
"""A rank that has said nothing for so long is not waited for."""
LEAVING_SECONDS = 6.0
"""The same for one whose run has ended already."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
"""How often notes are looked for: at first, and when they are slow to come."""

CALL, COMMITTED, GIVEN_UP = "call", "committed", "given up"


class SharedStore(Protocol):
    """What those that follow ask of a store."""

    def write_share(self, place: str, snapshot: HostSnapshot, /, *, rank: int) -> dict[str, FileFact]:
        """Writes what a rank holds, and returns the manifest's facts."""


class Together:
    """One rank's view of the ranks that save together; all make it with the same topic, and save in the same order."""

    def __init__(
        self,
        rank: int,
        size: int,
        notes: Notes,
        *,
        lost_seconds: float = LOST_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self.rank = rank
        self._size = size
        self._notes = notes
        self._lost_seconds = lost_seconds
        self._beat_seconds = beat_seconds
        self._save = 0
        self._attempt = 0
        self._place = ""
        self._fate: dict[str, str] = {}
        self._beats: dict[int, tuple[str | None, float]] = {}
        """Of each rank that is waited for: its last beat, and when it was heard first."""
        self.is_leaving = False
        """Has the run ended? Then whoever is silent is waited for but shortly."""

    @property
    def leads(self) -> bool:
        """Is this the rank that commits?"""
        return self.rank == 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Counts a save, which all ranks do alike, and says that this rank is there as long as it lasts."""
        self._save += 1
        self._attempt = 0
        self._beats = {}
        is_done = threading.Event()
        beating = threading.Thread(target=self._beat, args=(is_done, self._save), name="beat", daemon=True)
        beating.start()
        try:
            yield
        finally:
            is_done.set()
            beating.join()

    # what the first rank does

    def call(self, place: str) -> None:
        """Tells the others where to write; each call is another attempt."""
        self._attempt += 1
        self._place = place
        self._beats = {}
        # With the fate of the save before, for whoever was too slow to hear of it.
        self._tell("first", {"says": CALL, "place": place, "before": self._fate})

    def facts(self) -> dict[str, FileFact]:
        """Waits until all others have written; raises what hindered one, or who was lost."""
        files: dict[str, FileFact] = {}
        missing = list(range(1, self._size))
        pause = _Pause()
        while missing:
            # All in one pass: a note at a time, asked for in turn, would take the square of the number of ranks.
            for rank in list(missing):
                said = self._hear(f"rank-{rank}")
                if said is None or said["attempt"] != self._attempt or said["place"] != self._place:
                    self._reject_if_lost(rank)
                    continue
                missing.remove(rank)
                if "error" in said:
                    cause = OSError(errno.ENOSPC, "No space left on device") if said["is_disk_full"] else None
                    raise CheckpointError(f"Rank {rank}: {said['error']}") from cause
                files |= {name: FileFact(**fact) for name, fact in said["files"].items()}
            if missing:
                pause.sleep()
        return files

    def tell_committed(self) -> None:
        """Tells the others that the checkpoint is there; whoever does not hear it learns it at the next step."""
        self._fate = {"says": COMMITTED}
        with suppress(CheckpointError):
            self._tell("first", self._fate)

    def tell_given_up(self, reason: str) -> None:
        """Tells the others that this save has failed."""
        self._fate = {"says": GIVEN_UP, "reason": reason}
        with suppress(CheckpointError):
            self._tell("first", self._fate)

    # what the others do

    def follow(self, store: SharedStore, snapshot: HostSnapshot) -> None:
        """Writes whenever the first rank calls, until it says what became of the save; raises if that failed."""
        while True:
            said = self._wait(0, "first", lambda said: said["says"] != CALL or said["attempt"] > self._attempt)
            if said["says"] == COMMITTED:
                return
            if said["says"] == GIVEN_UP:
                raise CheckpointError(said["reason"])
            self._attempt = said["attempt"]
            try:
                files = store.write_share(said["place"], snapshot, rank=self.rank)
            except BaseException as error:
                problem = str(error) if isinstance(error, CheckpointError | OSError) else f"unexpectedly {error!r}"
                problems = {"error": problem, "is_disk_full": is_disk_full(error)}
                self._tell(f"rank-{self.rank}", {"place": said["place"], **problems})
                if not isinstance(error, CheckpointError | OSError):
                    raise
            else:
                facts = {name: {"size": fact.size, "sha256": fact.sha256} for name, fact in files.items()}
                self._tell(f"rank-{self.rank}", {"place": said["place"], "files": facts})

    # how they hear each other

    def _tell(self, name: str, said: Mapping[str, Any]) -> None:
        # One note a rank, written over: a run of many ranks saves for months, and nobody empties the store.
        text = json.dumps({**said, "save": self._save, "attempt": self._attempt})
        try:
            self._notes.write(name, text)
        except NotesUnreachable as error:
            raise CheckpointError(f"The other ranks cannot be told of a save: {error}.") from error

    def _hear(self, name: str) -> dict[str, Any] | None:
        """Returns what was said under a name about this save; None: nothing yet."""
        try:
            text = self._notes.read(name)
        except NotesUnreachable as error:
            raise CheckpointError(f"The other ranks cannot be heard of during a save: {error}.") from error
        said: dict[str, Any] | None = None if text is None else json.loads(text)
        if said is not None and said["save"] == self._save + 1 and "before" in said:
            return dict(said["before"])
        return said if said is not None and said["save"] == self._save else None

    def _wait(self, rank: int, name: str, is_news: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Waits for news of this save under a name."""
        self._beats = {}
        pause = _Pause()
        while True:
            said = self._hear(name)
            if said is not None and is_news(said):
                return said
            self._reject_if_lost(rank)
            pause.sleep()

    def _beat(self, is_done: threading.Event, save: int) -> None:
        number = 0
        while not is_done.is_set():
            with suppress(NotesUnreachable):  # whoever needs the store finds out
                self._notes.write(f"beat-{self.rank}", f"{save}.{number}")
            number += 1
            is_done.wait(self._beat_seconds)

    def _reject_if_lost(self, rank: int) -> None:
        """Raises if a rank has not been heard of for too long."""
        last, since = self._beats.get(rank, (None, time.monotonic()))
        now = time.monotonic()
        if rank not in self._beats or now - since > self._beat_seconds / 2:
            try:
                beat = self._notes.read(f"beat-{rank}")
            except NotesUnreachable as error:
                raise CheckpointError(f"Rank {rank} cannot be heard of during a save: {error}.") from error
            if rank not in self._beats or beat != last:
                self._beats[rank] = (beat, now)
                return
        patience = min(self._lost_seconds, LEAVING_SECONDS) if self.is_leaving else self._lost_seconds
        if now - since > patience:
            raise CheckpointError(
                f"Rank {rank} has not been heard of for {patience:g} s, so that its part is missing. Has it died?"
            )


class _Pause:
    """Waits a little, and each time longer."""

    def __init__(self) -> None:
        self._seconds = _FIRST_PAUSE

    def sleep(self) -> None:
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _LONGEST_PAUSE)
