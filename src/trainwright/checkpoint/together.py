"""Several ranks write one checkpoint: rank 0 coordinates, and no rank waits in a collective."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.checkpoint.encoding import Encoded, Sizes, encode
from trainwright.checkpoint.manifest import FileFact
from trainwright.checkpoint.remote_files import RemoteFolder
from trainwright.checkpoint.remote_store import AnyStore
from trainwright.checkpoint.snapshot import HostSnapshot
from trainwright.checkpoint.store import is_disk_full
from trainwright.errors import CheckpointError
from trainwright.parallel.collectives import Notes, NotesUnreachable, Ranks

PATIENCE_SECONDS = 10.0
"""On a network disk, a new file may become visible to other machines with a delay."""


REPLICATED_PARTS = ("model", "optimizers")
"""The parts that are equal on all ranks of a replicated model. Hooks may have different state on each rank."""


def reject_unshared_folder(store: AnyStore, ranks: Ranks, *, patience: float = PATIENCE_SECONDS) -> None:
    """Raises on every rank if one of them does not see a file that rank 0 writes; every rank calls it."""
    blind = ranks_without_folder(store, ranks, patience=patience)
    if blind:
        listed = ", ".join(map(str, blind[:8])) + (", …" if len(blind) > 8 else "")
        raise CheckpointError(
            f"The model is sharded over {ranks.size} ranks, each of which writes its shards of a checkpoint, but rank "
            f"{listed} does not see the files of rank 0 in this folder. Set output_dir or checkpoint.folder to a "
            "folder that all machines share, or to an address such as s3://bucket/run.",
            where=store.folder,
        )


def ranks_without_folder(store: AnyStore, ranks: Ranks, *, patience: float = PATIENCE_SECONDS) -> list[int]:
    """Returns the ranks that do not see a file that rank 0 writes; raises on every rank if rank 0 cannot write it.

    Every rank calls it.
    """
    if ranks.size == 1:
        return []
    folder = store.folder if isinstance(store.folder, Path) else RemoteFolder(store.folder.address)
    failure: CheckpointError | None = None
    token = f".shared-{secrets.token_hex(4)}"
    if ranks.is_first:
        try:
            if isinstance(folder, RemoteFolder):
                folder.put(token, token.encode())
            else:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / token).write_text(token)
        except (CheckpointError, OSError) as error:
            failure = CheckpointError(f"The checkpoints folder cannot be written: {error}", where=store.folder)
    token, failure = ranks.broadcast((token, failure))
    sees = failure is None and _sees_file(folder, token, patience)
    blind = [rank for rank, each in enumerate(ranks.gather(sees)) if not each]
    if failure is not None:
        raise failure
    if ranks.is_first:
        if isinstance(folder, RemoteFolder):
            folder.delete(token)
        else:
            (folder / token).unlink(missing_ok=True)
    return blind


def _sees_file(folder: Path | RemoteFolder, name: str, patience: float) -> bool:
    until = time.monotonic() + patience
    while True:
        with suppress(OSError, CheckpointError):
            content = folder.read(name) if isinstance(folder, RemoteFolder) else (folder / name).read_bytes()
            if content == name.encode():
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


@dataclass(frozen=True)
class _Report:
    """What a rank sends to the others before a save."""

    first_of_stage: int
    failure: CheckpointError | None
    digest: str
    """The hash of the names and shapes of the tensors that the ranks share; equal on the ranks of a stage."""
    parts: Mapping[str, tuple[Any, frozenset[str]]] | None
    """With a pipeline, on the first rank of each stage: the tree of each part and the keys of its tensors."""


def encode_share(parts: Mapping[str, Any], ranks: Ranks) -> HostSnapshot:
    """Returns the parts of a checkpoint that this rank writes, sharing memory with the state; rank 0's contain the
    trees.

    Every rank calls it. A state that one rank cannot save raises on all of them. A sharded tensor is written by the
    ranks that have its shards. The ranks of a replicated model have the same tensors, and take turns.
    """
    first = ranks.mesh.first_of_stage
    encoded: dict[str, Encoded] = {}
    failure: CheckpointError | None = None
    try:
        encoded = {part: encode(state, name=part, accepts_shards=True) for part, state in parts.items()}
    except CheckpointError as error:
        failure = error
    is_replicated = not ranks.mesh.is_split
    common = {part: _replicated(part, each) if is_replicated else each.split_paths for part, each in encoded.items()}
    digest = hashlib.sha256(json.dumps(common).encode()).hexdigest()
    sent = None
    if ranks.mesh.size("pipeline") > 1 and ranks.rank == first:
        sent = {part: (each.tree, frozenset(each.tensors)) for part, each in encoded.items()}
    reports = ranks.gather(_Report(first, failure, digest, sent))
    for report in reports:
        if report.failure is not None:
            raise report.failure
    # If replicas have different tensors, a checkpoint has those of rank 0.
    takes_turns = is_replicated and len({report.digest for report in reports}) == 1
    if not is_replicated:
        _reject_differences(reports)
    stages = {report.first_of_stage: report.parts for report in reports if report.parts is not None}
    trees = {part: each.tree if ranks.is_first else None for part, each in encoded.items()}
    if stages and ranks.is_first:
        trees |= merge_trees([{part: tree for part, (tree, _) in stage.items()} for stage in stages.values()])
    written = {}
    for part, each in encoded.items():
        # A tied weight on two stages is saved by the first of them.
        earlier = {key for stage, sent in stages.items() if stage < first for key in sent[part][1]}
        if takes_turns and part in REPLICATED_PARTS:
            keys = _keys_of_turn(each, ranks)
        else:
            numbers = _write_order(each)
            keys = [key for key in each.tensors if key not in earlier and _is_written_here(each, key, numbers, ranks)]
        locations = {key: each.shard_locations[key] for key in keys if key in each.shard_locations}
        written[part] = Encoded(trees[part], {key: each.tensors[key] for key in keys}, locations)
    return HostSnapshot(written)


def _replicated(part: str, encoded: Encoded) -> list[tuple[str, Sizes, str]]:
    """Returns the name, shape and dtype of the tensors that all replicas have."""
    if part not in REPLICATED_PARTS:
        return []
    return [(key, tuple(tensor.shape), str(tensor.dtype)) for key, tensor in encoded.tensors.items()]


def _keys_of_turn(encoded: Encoded, ranks: Ranks) -> list[str]:
    """Returns the tensors that this replica writes: each tensor, in order of size, goes to the rank with the fewest
    bytes."""
    num_bytes = [0] * ranks.size
    keys = []
    for key in sorted(encoded.tensors, key=lambda key: (-encoded.tensors[key].nbytes, key)):
        rank = num_bytes.index(min(num_bytes))
        num_bytes[rank] += encoded.tensors[key].nbytes
        if rank == ranks.rank:
            keys.append(key)
    return keys


def _reject_differences(reports: Sequence[_Report]) -> None:
    for rank, report in enumerate(reports):
        first = report.first_of_stage
        if report.digest != reports[first].digest:
            raise CheckpointError(
                f"Ranks {first} and {rank} have shards of different tensors, so the full tensors cannot be saved. Let "
                "the optimizers and hooks of all ranks have state for the same parameters."
            )


def _write_order(encoded: Encoded) -> dict[str, int]:
    """Numbers the sharded tensors by size, the same on all ranks that have shards of them; 0 for one without values."""
    sizes = {key: math.prod(location.shape) for key, location in encoded.shard_locations.items()}
    ordered = sorted(sizes, key=lambda key: (-sizes[key], key))
    return {key: number if sizes[key] else 0 for number, key in enumerate(ordered)}


def _is_written_here(encoded: Encoded, key: str, numbers: Mapping[str, int], ranks: Ranks) -> bool:
    first = ranks.mesh.first_of_stage
    location = encoded.shard_locations.get(key)
    if location is None or location.layout is None:
        return ranks.rank == first
    # A tensor without values has no shard; the first rank's file records it.
    has_values = encoded.tensors[key].numel() > 0 or (ranks.rank == first and 0 in location.shape)
    return has_values and location.layout.is_written_here(first, numbers[key])


def merge_trees(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the trees of all parts, merged from those of the stages in order; for equal keys, the first applies.

    An optimizer's groups contain the parameters of all stages. A stage may lack a group without its parameters; groups
    with the same settings are then merged.
    """
    merged: dict[str, Any] = _union(stages)
    for name, optimizer in merged.get("optimizers", {}).items():
        optimizer["groups"] = _merge_groups([stage["optimizers"][name]["groups"] for stage in stages])
    return merged


def _union(values: Sequence[Any]) -> Any:
    """Merges mappings key by key; for other values, and for encoded ones (`$`), the first applies."""
    mappings = [value for value in values if isinstance(value, Mapping)]
    keys = dict.fromkeys(key for value in mappings for key in value)
    if not isinstance(values[0], Mapping) or any(key.startswith("$") for key in keys):
        return values[0]
    return {key: _union([value[key] for value in mappings if key in value]) for key in keys}


def _merge_groups(stages: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    by_number = len({len(groups) for groups in stages}) == 1
    merged: dict[object, dict[str, Any]] = {}
    for groups in stages:
        for number, group in enumerate(groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            key = number if by_number else json.dumps(settings, sort_keys=True)
            names = merged[key]["params"] if key in merged else []
            merged[key] = {**merged.get(key, settings), "params": list(dict.fromkeys([*names, *group["params"]]))}
    return list(merged.values())


BEAT_SECONDS = 2.0
"""How often a rank that is saving sends a heartbeat."""
LOST_SECONDS = 30.0
"""A rank without a heartbeat for this long is considered lost."""
CLOSING_SECONDS = 6.0
"""The same when the run has ended."""
WRITE, COMMITTED, FAILED = "write", "committed", "failed"
"""The types of rank 0's messages."""


class Together:
    """One rank's view of the ranks that save together; all ranks create it with the same topic and save in the same
    order."""

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
        self._folder = ""
        self._result: dict[str, str] = {}
        self._beats: dict[int, tuple[str | None, float]] = {}
        """By rank that is waited for: its last heartbeat, and the time when it was first read."""
        self.is_closing = False
        """True when the run has ended; a lost rank is then waited for only briefly."""

    @property
    def is_leader(self) -> bool:
        """True for the rank that commits."""
        return self.rank == 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Counts a save, like all ranks, and sends heartbeats until it ends."""
        self._save += 1
        self._attempt = 0
        self._beats = {}
        is_done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(is_done, self._save), name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()

    # Rank 0.

    def request_files(self, folder: str) -> None:
        """Asks the other ranks to write into a folder; each request is another attempt."""
        self._attempt += 1
        self._folder = folder
        self._beats = {}
        # Includes the result of the previous save, for a rank that was too slow to read it.
        self._send("first", {"type": WRITE, "folder": folder, "previous": self._result})

    def wait_for_files(self) -> dict[str, FileFact]:
        """Waits until all others have written; raises if one has failed or is lost."""
        files: dict[str, FileFact] = {}
        missing = list(range(1, self._size))
        pauses = _pauses()
        while missing:
            next(pauses)
            # All ranks in one pass, because waiting for them one after another would take quadratic time.
            for rank in list(missing):
                reply = self._receive(f"rank-{rank}")
                if reply is None or reply["attempt"] != self._attempt or reply["folder"] != self._folder:
                    self._reject_if_lost(rank)
                    continue
                missing.remove(rank)
                if "error" in reply:
                    cause = OSError(errno.ENOSPC, "No space left on device") if reply["is_disk_full"] else None
                    raise CheckpointError(f"Rank {rank}: {reply['error']}") from cause
                files |= {name: FileFact(**fact) for name, fact in reply["files"].items()}
        return files

    def announce_commit(self) -> None:
        """Notifies the others that the checkpoint is committed."""
        self._announce({"type": COMMITTED})

    def announce_failure(self, reason: str) -> None:
        """Notifies the others that this save has failed."""
        self._announce({"type": FAILED, "reason": reason})

    def _announce(self, result: dict[str, str]) -> None:
        self._result = result
        with suppress(CheckpointError):  # the next request repeats it
            self._send("first", result)

    # The other ranks.

    def write_on_request(self, store: AnyStore, snapshot: HostSnapshot) -> None:
        """Writes whenever rank 0 requests it, until rank 0 announces the result of the save; raises if it failed."""
        while True:
            message = self._wait_for_leader()
            if message["type"] == COMMITTED:
                return
            if message["type"] == FAILED:
                raise CheckpointError(message["reason"])
            self._attempt, folder = message["attempt"], message["folder"]
            try:
                files = store.write_share(folder, snapshot, rank=self.rank)
            except BaseException as error:
                is_expected = isinstance(error, CheckpointError | OSError)
                problem = str(error) if is_expected else f"unexpected error {error!r}"
                problems = {"error": problem, "is_disk_full": is_disk_full(error)}
                self._send(f"rank-{self.rank}", {"folder": folder, **problems})
                if not is_expected:
                    raise
            else:
                facts = {name: asdict(fact) for name, fact in files.items()}
                self._send(f"rank-{self.rank}", {"folder": folder, "files": facts})

    def _wait_for_leader(self) -> dict[str, Any]:
        self._beats = {}
        pauses = _pauses()
        while True:
            next(pauses)
            message = self._receive("first")
            if message is not None and (message["type"] != WRITE or message["attempt"] > self._attempt):
                return message
            self._reject_if_lost(0)

    # Messages and heartbeats.

    def _send(self, name: str, message: Mapping[str, Any]) -> None:
        # One note per rank, which is overwritten, because a run may save for months and the store is never cleared.
        text = json.dumps({**message, "save": self._save, "attempt": self._attempt})
        try:
            self._notes.write(name, text)
        except NotesUnreachable as error:
            raise CheckpointError(f"The other ranks cannot be reached during a save: {error}.") from error

    def _receive(self, name: str) -> dict[str, Any] | None:
        """Returns the message of this save under a name, or None if there is none yet."""
        text = self._read(name)
        message: dict[str, Any] | None = None if text is None else json.loads(text)
        if message is not None and message["save"] == self._save + 1 and "previous" in message:
            return dict(message["previous"])
        return message if message is not None and message["save"] == self._save else None

    def _read(self, name: str) -> str | None:
        try:
            return self._notes.read(name)
        except NotesUnreachable as error:
            raise CheckpointError(f"The other ranks cannot be reached during a save: {error}.") from error

    def _beat(self, is_done: threading.Event, save: int) -> None:
        number = 0
        while not is_done.is_set():
            with suppress(NotesUnreachable):  # the next message raises it
                self._notes.write(f"beat-{self.rank}", f"{save}.{number}")
            number += 1
            is_done.wait(self._beat_seconds)

    def _reject_if_lost(self, rank: int) -> None:
        """Raises if a rank has sent no heartbeat for too long."""
        last, since = self._beats.get(rank, (None, time.monotonic()))
        now = time.monotonic()
        if rank not in self._beats or now - since > self._beat_seconds / 2:
            beat = self._read(f"beat-{rank}")
            if rank not in self._beats or beat != last:
                self._beats[rank] = (beat, now)
                return
        patience = min(self._lost_seconds, CLOSING_SECONDS) if self.is_closing else self._lost_seconds
        if now - since > patience:
            raise CheckpointError(
                f"Rank {rank} has sent no heartbeat for {patience:g} s, so its tensors are missing. It may have died."
            )


def _pauses() -> Iterator[None]:
    """Yields immediately, then after pauses that increase from 10 to 250 ms."""
    seconds = 0.01
    while True:
        yield
        time.sleep(seconds)
        seconds = min(2 * seconds, 0.25)
