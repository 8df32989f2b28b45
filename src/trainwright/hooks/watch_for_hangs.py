"""Watches for a rank that does not move: says which one and where, keeps every rank's stacks, and leaves.

A thread on every rank looks at what the loop says it is doing (loop/phases.py). One that is overdue asks all ranks
through notes in their store (parallel/notes.py) and judges (hang_verdict.py); each then writes what it knows
(hang_report.py), and all leave with HANG_EXIT_CODE, so that a launcher can start the run again from its newest
checkpoint. No collective runs here, and nothing here waits for the thread that trains.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from trainwright.config import HangsSection
from trainwright.errors import HANG_EXIT_CODE
from trainwright.hooks import hang_report
from trainwright.hooks.hang_verdict import LEFT, Standing, describe, find_missing, is_hang, limit_seconds
from trainwright.loop.hook import Hook
from trainwright.loop.phases import Phases
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.notes import (
    ANSWER_SECONDS,
    Notes,
    NotesUnreachable,
    first_rank_keeps_notes,
    num_collectives_begun,
)

logger = logging.getLogger(__name__)

HANGS_FOLDER = "hangs"
_STOPPED_SECONDS = 5.0  # a look that comes so much too late: the whole process was stopped, not stuck


class WatchForHangs(Hook):
    """Ends a run that is stuck, after writing RUN/hangs/step-N; also puts `slowest_rank_share` with several ranks.

    Stuck is a phase that takes `factor` times its median and at least `min_seconds`; see `limit_seconds` for phases
    without a median worth the name. A rank that is stopped as a whole (SIGSTOP, a suspended job) is missed by the
    others only, and one that stands in a debugger is never stuck.
    """

    def __init__(self, section: HangsSection) -> None:
        self._section = section
        self._watcher: _Watcher | None = None
        self._phases: Phases | None = None
        self._worked = 0.0

    def before_train(self) -> None:
        """Starts the thread, on every rank."""
        trainer, ranks = self.trainer, self.trainer.ranks
        if ranks.size > 1:
            self._phases = trainer.phases
            self._worked = trainer.phases.seconds_at_work()
        if self._section.watch:
            own = (os.urandom(8).hex(), hang_report.identify_process(os.getpid()))
            topics, processes = zip(*ranks.gather(own), strict=True)
            # A topic of its own, for the store outlives this run where a process trains several.
            notes = Notes(f"hangs/{topics[0]}", answer_seconds=ANSWER_SECONDS) if ranks.size > 1 else None
            self._watcher = _Watcher(
                trainer.phases,
                ranks,
                self._section,
                notes=notes,
                processes=processes,
                folder=trainer.folder / HANGS_FOLDER,
                training_thread=threading.get_ident(),
                describe_places=self._describe_places,
            )
            self._watcher.start()

    def after_step(self) -> None:
        """Notes how long this rank worked at the step while it waited for nobody."""
        if self._phases is not None:
            worked = self._phases.seconds_at_work()
            self.trainer.storage.put_spread("slowest_rank_share", worked - self._worked)
            self._worked = worked

    def close(self) -> None:
        """Ends the thread, unless it is about to end the process."""
        if self._watcher is not None:
            self._watcher.end()
            self._watcher = None

    def _describe_places(self) -> str:
        data = self.trainer.train_data
        position, places = getattr(data, "position", "unknown"), getattr(data, "places", "unknown")
        return f"Samples given out so far, over all ranks: {position}; places of the data's order: {places}."


@dataclass(frozen=True)
class _Verdict:
    """What the asking rank found, as a note for all."""

    is_hang: bool
    line: str = ""
    folder: str = ""
    speaker: int = 0
    """The rank that tells the user: the first, unless it is silent."""
    table: list[str] = field(default_factory=list)
    """One line a rank, for report.txt."""
    answered: list[int] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """The processes of the ranks that did not answer, as `identify_process` names them."""


class _Watcher(threading.Thread):
    """The thread of one rank.

    every look:
        somebody asks (inquiry/N)     answer/N/RANK = where this rank stands; wait for verdict/N; leave if it is a hang
        this rank is overdue          ask: inquiry/N; read all answers; verdict/N = a hang, or not (yet)
    """

    def __init__(
        self,
        phases: Phases,
        ranks: Ranks,
        section: HangsSection,
        *,
        notes: Notes | None,
        processes: Sequence[str],
        folder: Path,
        training_thread: int,
        describe_places: Callable[[], str],
    ) -> None:
        super().__init__(name="trainwright-hangs", daemon=True)
        self._phases = phases
        self._rank, self._size = ranks.rank, ranks.size
        self._section = section
        self._notes = notes
        self._processes = processes
        self._folder = folder
        self._thread = training_thread
        self._describe_places = describe_places
        # Each look is a message to the store, which must not drown in those of a large run.
        self._every = max(min(1.0, section.min_seconds / 10), self._size / 500)
        self._answer_seconds = ANSWER_SECONDS + 2 * self._every
        self._inquiry = 1
        self._awake_since = 0.0
        self._ask_again_at = 0.0
        self._ended = threading.Event()
        self._is_leaving = False

    def run(self) -> None:
        """Looks again and again until training ends."""
        before = monotonic()
        while not self._ended.wait(self._every):
            now = monotonic()
            if now - before > self._every + _STOPPED_SECONDS:
                self._awake_since = now
            try:
                self._look()
            except NotesUnreachable:
                if self._stands().is_overdue:
                    self._leave_alone(is_cut_off=True)
            except Exception:
                logger.exception("The watch for hangs failed; the run goes on without it.")
                return
            before = monotonic()  # waiting for answers is not being stopped

    def end(self) -> None:
        """Ends the thread, and waits for it; one that is leaving ends the process meanwhile."""
        self._ended.set()
        self.join(None if self._is_leaving else ANSWER_SECONDS)
        if self._is_leaving:
            self.join()
        if self._notes is not None:
            self._note(f"left/{self._rank}", "yes")
            self._notes.close()

    def _look(self) -> None:
        if self._notes is None:
            if self._stands().is_overdue:
                self._leave_alone()
            return
        inquiry = f"inquiry/{self._inquiry}"
        asker = self._notes.read(inquiry)
        if asker is None:
            if monotonic() < self._ask_again_at or not self._stands().is_overdue:
                return
            asker = self._notes.write_first(inquiry, str(self._rank))
        began = self._phases.current[2]
        self._notes.write(f"answer/{self._inquiry}/{self._rank}", self._stands().to_json())
        if asker == str(self._rank):
            verdict = self._judge(began)
            self._notes.write(f"verdict/{self._inquiry}", json.dumps(asdict(verdict)))
        else:
            told = self._notes.wait_for(f"verdict/{self._inquiry}", seconds=self._answer_seconds + ANSWER_SECONDS)
            # An asker that died or moved on while asking leaves no verdict; whoever is overdue asks anew.
            verdict = _Verdict(**json.loads(*told.values())) if told else _Verdict(is_hang=False)
        if verdict.is_hang and not self._ended.is_set():
            self._leave_together(verdict)
        self._inquiry += 1

    def _stands(self) -> Standing:
        phase, step, since = self._phases.current
        limit = limit_seconds(self._phases, phase, factor=self._section.factor, min_seconds=self._section.min_seconds)
        return Standing(
            phase=phase,
            step=step,
            seconds=monotonic() - max(since, self._awake_since),
            usual=self._phases.median_seconds(phase),
            limit=float("inf") if hang_report.is_debugged(self._thread) else limit,
            num_collectives=num_collectives_begun() if self._size > 1 else None,
            is_waiting=hang_report.is_in_collective(self._thread),
        )

    # asking

    def _judge(self, began: float) -> _Verdict:
        """Reads every rank's answer and says whether it is a hang, and whose."""
        standings = self._collect_answers()
        missing = find_missing(standings)
        if self._phases.current[2] != began or not is_hang(standings, missing):
            # Somebody is busy within its own limits: no need to ask again before it is overdue.
            left = [each.limit - each.seconds for rank in missing if (each := standings[rank]) is not None]
            self._ask_again_at = monotonic() + min([*left, self._section.min_seconds])
            return _Verdict(is_hang=False)
        behind = standings[missing[0]] if missing else None
        step = (behind or self._stands()).step
        answered = [rank for rank, standing in standings.items() if standing is not None and not standing.has_left]
        return _Verdict(
            is_hang=True,
            line=describe(standings, missing),
            folder=self._choose_folder(step),
            speaker=0 if 0 in answered else self._rank,
            table=[_tell(rank, standing) for rank, standing in standings.items()],
            answered=answered,
            silent=[self._processes[rank] for rank, standing in standings.items() if standing is None],
        )

    def _collect_answers(self) -> dict[int, Standing | None]:
        names = {rank: f"answer/{self._inquiry}/{rank}" for rank in range(self._size)}
        assert self._notes is not None
        texts = self._notes.wait_for(*names.values(), seconds=self._answer_seconds)
        standings: dict[int, Standing | None] = {}
        for rank, name in names.items():
            if name in texts:
                standings[rank] = Standing.from_json(texts[name])
            else:
                standings[rank] = LEFT if self._read(f"left/{rank}") else None
        return standings

    def _choose_folder(self, step: int) -> str:
        """A folder that does not exist yet: a run that was started again may hang at the same step."""
        chosen = [self._folder / f"step-{step:08d}"]

        def avoid_taken() -> None:
            while chosen[-1].exists():
                chosen.append(chosen[0].with_name(f"{chosen[0].name}-{len(chosen) + 1}"))

        _within(ANSWER_SECONDS, avoid_taken)
        return str(chosen[-1])

    # leaving

    def _leave_alone(self, *, is_cut_off: bool = False) -> None:
        """Leaves without a word from the others: there are none, or whoever keeps the notes is silent."""
        standing = self._stands()
        line = describe({self._rank: standing}, [])
        silent: list[str] = []
        if is_cut_off:
            keeper, silent = ("Rank 0", [self._processes[0]]) if first_rank_keeps_notes() else ("The launcher", [])
            line = f"{keeper}, which keeps the ranks' notes, does not answer. {line}"
        folder = self._choose_folder(standing.step)
        alone = _Verdict(is_hang=True, line=line, folder=folder, table=[_tell(self._rank, standing)], silent=silent)
        self._is_leaving = True
        _within(ANSWER_SECONDS, lambda: self._write_own(Path(folder)))
        _within(ANSWER_SECONDS, lambda: self._tell_user(alone))
        self._exit(alone)

    def _leave_together(self, verdict: _Verdict) -> None:
        """Writes what this rank knows; the speaker waits for the others and speaks; then all leave."""
        assert self._notes is not None
        self._is_leaving = True
        _within(ANSWER_SECONDS, lambda: self._write_own(Path(verdict.folder)))
        self._note(f"written/{self._rank}", "yes")
        if self._rank == verdict.speaker:
            others = [f"written/{rank}" for rank in verdict.answered]
            self._notes.wait_for(*others, seconds=self._answer_seconds + ANSWER_SECONDS)
            _within(ANSWER_SECONDS, lambda: self._tell_user(verdict))
            self._note("told", "yes")
        else:
            # A launcher ends all ranks when the first one leaves, and nobody may leave before it is told.
            self._notes.wait_for("told", seconds=2 * (self._answer_seconds + ANSWER_SECONDS))
        self._exit(verdict)

    def _write_own(self, folder: Path) -> None:
        hang_report.write_rank_report(
            folder, self._rank, self._stands(), self._phases, thread=self._thread, places=self._describe_places()
        )

    def _tell_user(self, verdict: _Verdict) -> None:
        folder = Path(verdict.folder)
        logger.error("%s Stacks: %s", verdict.line, folder)
        folder.mkdir(parents=True, exist_ok=True)
        advice = (
            "Each rank's stacks, place in the data and begun collectives are beside this file. Every rank has left "
            f"with exit code {HANG_EXIT_CODE}; running the same command again goes on from the newest checkpoint.\n"
            f"If nothing was wrong, raise hangs.min_seconds (now {self._section.min_seconds:g}) or hangs.factor "
            f"(now {self._section.factor:g}), or set hangs.watch=false.\n"
        )
        text = "\n".join([verdict.line, "", *verdict.table, "", advice])
        (folder / "report.txt").write_text(text, encoding="utf-8")
        for handler in logging.getLogger("trainwright").handlers:
            handler.flush()
        sys.stderr.flush()

    def _exit(self, verdict: _Verdict) -> None:
        """Ends this process and those that would stay behind: its children, and silent ranks on this machine."""
        _within(1.0, hang_report.end_children)
        for identity in verdict.silent:
            hang_report.end_process(identity)
        # Not sys.exit: the thread that trains is stuck, and would never hear of it.
        os._exit(HANG_EXIT_CODE)

    # notes that must not stop what is under way

    def _note(self, name: str, text: str) -> None:
        if self._notes is not None:
            try:
                self._notes.write(name, text)
            except NotesUnreachable:
                """Whoever needs it gives up waiting for it."""

    def _read(self, name: str) -> str | None:
        try:
            return self._notes.read(name) if self._notes is not None else None
        except NotesUnreachable:
            return None


def _tell(rank: int, standing: Standing | None) -> str:
    if standing is None:
        return f"Rank {rank}: does not answer"
    if standing.has_left:
        return f"Rank {rank}: has left the training"
    usual = "not known yet" if standing.usual is None else f"{standing.usual:.3g} s"
    return (
        f"Rank {rank}: {standing.phase} of step {standing.step} for {standing.seconds:.1f} s (usual: {usual}, limit: "
        f"{standing.limit:.3g} s), {'inside' if standing.is_waiting else 'outside'} a collective, "
        f"{standing.num_collectives} begun"
    )


def _within(seconds: float, act: Callable[[], Any]) -> None:
    """Does something that may block for ever, on a file system that is gone or a lock that a stuck thread holds."""

    def guarded() -> None:
        try:
            act()
        except Exception as error:
            logger.warning("A part of the report on a hang failed: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=guarded, name="trainwright-hangs-report", daemon=True)
    thread.start()
    thread.join(seconds)
