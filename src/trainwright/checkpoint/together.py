"""Several ranks write one checkpoint: the first one leads, the others follow its call, nobody waits in a collective.

```
first:   makes a place, calls → writes its own files → waits for everybody's facts → manifest → commit → says so
others:  wait for the call → write and sync their files there → tell their size and hash → wait for what became of it
```
What they say to each other are notes in the store by which they found each other (parallel/notes.py), so that saving
beside training never meets training's own collectives. A rank that is silent is lost, and with it that attempt.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from trainwright.checkpoint.disk import FileFact
from trainwright.checkpoint.staging import StagedParts
from trainwright.checkpoint.store import is_disk_full
from trainwright.errors import CheckpointError
from trainwright.parallel.notes import Notes, NotesUnreachable

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

    def write_share(self, place: str, staged: StagedParts, /, *, rank: int) -> dict[str, FileFact]:
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
                    self._refuse_if_lost(rank)
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

    def follow(self, store: SharedStore, staged: StagedParts) -> None:
        """Writes whenever the first rank calls, until it says what became of the save; raises if that failed."""
        while True:
            said = self._wait(0, "first", lambda said: said["says"] != CALL or said["attempt"] > self._attempt)
            if said["says"] == COMMITTED:
                return
            if said["says"] == GIVEN_UP:
                raise CheckpointError(said["reason"])
            self._attempt = said["attempt"]
            try:
                files = store.write_share(said["place"], staged, rank=self.rank)
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
            self._refuse_if_lost(rank)
            pause.sleep()

    def _beat(self, is_done: threading.Event, save: int) -> None:
        number = 0
        while not is_done.is_set():
            with suppress(NotesUnreachable):  # whoever needs the store finds out
                self._notes.write(f"beat-{self.rank}", f"{save}.{number}")
            number += 1
            is_done.wait(self._beat_seconds)

    def _refuse_if_lost(self, rank: int) -> None:
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
