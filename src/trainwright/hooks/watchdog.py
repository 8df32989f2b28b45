"""Watches for a rank that makes no progress: reports which and where, keeps every rank's stacks, and ends the run."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import torch.distributed

import trainwright.parallel
from trainwright.config import WatchdogSection
from trainwright.errors import HANG_EXIT_CODE
from trainwright.loop.heartbeat import PHASES, Heartbeat
from trainwright.loop.hook import Hook
from trainwright.parallel.collectives import (
    ANSWER_SECONDS,
    Notes,
    NotesUnreachable,
    Ranks,
    collective_log,
    first_rank_keeps_notes,
    num_collectives_begun,
)

logger = logging.getLogger(__name__)

_COLLECTIVE_CODE = (
    str(Path(torch.distributed.__file__).parent) + os.sep,
    str(Path(trainwright.parallel.__file__).parent) + os.sep,
)
_DEBUGGERS = frozenset({"pdb", "bdb", "pydevd", "_pydevd_bundle"})


def is_in_collective(thread: int) -> bool:
    """Is the code that a thread runs right now that of torch's collectives, or of ours?"""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVE_CODE)


def is_debugged(thread: int) -> bool:
    """Is somebody looking at this thread with a debugger? Then it may stand still for as long as it likes."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def write_rank_report(
    folder: Path, rank: int, standing: Standing, heartbeat: Heartbeat, *, thread: int, places: str
) -> None:
    """Writes rank-R.txt, and what torch recorded of the collectives to rank-R-collectives.json."""
    folder.mkdir(parents=True, exist_ok=True)
    usual = "not known yet" if standing.usual is None else f"{standing.usual:.3g} s"
    lines = [
        f"Rank {rank}, process {os.getpid()} on {platform.node()}, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        f"In {standing.phase} of step {standing.step} for {standing.seconds:.1f} s; usual: {usual}; "
        f"limit: {standing.limit:.3g} s.",
        f"Inside a collective: {'yes' if standing.is_waiting else 'no'}; begun so far: {standing.num_collectives}.",
        places,
        "Seconds in each phase since the start: "
        + ", ".join(f"{phase} {heartbeat.seconds_in(phase):.1f}" for phase in PHASES if heartbeat.num_finished(phase)),
        *(f"Child process {child.name}: {child.pid}" for child in multiprocessing.active_children()),
        "",
        _stacks(thread),
    ]
    (folder / f"rank-{rank}.txt").write_text("\n".join(lines), encoding="utf-8")
    # After the stacks, which must not be lost if this blocks.
    collectives = collective_log() if torch.distributed.is_initialized() else None
    if collectives is not None:
        (folder / f"rank-{rank}-collectives.json").write_text(collectives, encoding="utf-8")


def _stacks(first: int) -> str:
    """The stacks of all threads but this one, that of the training first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    order = sorted(frames, key=lambda thread: thread != first)
    return "\n".join(
        f"{names.get(thread, 'a thread not of Python')}{' (training)' if thread == first else ''}, innermost last:\n"
        + "".join(traceback.format_stack(frames[thread]))
        for thread in order
    )


def identify_process(pid: int) -> str:
    """Returns what tells a process apart from every other one, on any machine; empty where the system cannot say."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        # The numbers of processes in another container mean other processes.
        container = Path("/proc/self/ns/pid").readlink()
        started = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{pid} {started} {container} {machine}"


def end_process(identity: str) -> bool:
    """Kills a process that `identify_process` named, if it runs on this machine and is still the same one."""
    if not identity or identify_process(pid := int(identity.split(maxsplit=1)[0])) != identity:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def end_children() -> None:
    """Kills the processes that this one has started: a loader's worker that is stuck would stay behind."""
    for child in multiprocessing.active_children():
        child.kill()


REGULAR = frozenset({"data", "step", "reduce", "update", "vote"})
"""Heartbeat that every step has, and that take about as long each time."""
ENOUGH_FINISHED = 5
PATIENCE = 3.0


@dataclass(frozen=True)
class Standing:
    """What a rank is doing, in its own words."""

    phase: str
    step: int
    seconds: float
    """How long it has been doing it."""
    usual: float | None
    """How long that usually takes; None if nobody knows yet."""
    limit: float
    """After so many seconds it is stuck."""
    num_collectives: int | None
    """How many collectives it has begun, where torch counts them."""
    is_waiting: bool
    """Is it inside a collective, as far as its stack tells?"""
    has_left: bool = False
    """Has it ended training, well or with an error?"""

    @property
    def is_overdue(self) -> bool:
        """Has its phase lasted too long?"""
        return self.seconds > self.limit

    def to_json(self) -> str:
        """Returns the standing as a note for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Standing:
        """Reads what `to_json` returned."""
        return cls(**json.loads(text))


LEFT = Standing("leave", 0, 0.0, None, 0.0, None, is_waiting=False, has_left=True)


def limit_seconds(heartbeat: Heartbeat, phase: str, *, factor: float, min_seconds: float) -> float:
    """Returns after how many seconds a phase is stuck: factor × its median, at least min_seconds.

    A phase that was not finished five times yet has three times min_seconds, for the first steps compile and
    warm up. So have, always, those that do different things each time: hooks, evaluations, writing, saving.
    """
    is_settled = heartbeat.num_finished(phase) >= ENOUGH_FINISHED
    least = min_seconds if is_settled and phase in REGULAR else PATIENCE * min_seconds
    usual = heartbeat.median_seconds(phase) if is_settled else None
    return max(least, factor * (usual or 0.0))


def find_missing(standings: Mapping[int, Standing | None]) -> list[int]:
    """Returns the ranks that the others wait for; none where all stand at the same place.

    `None` is a rank that did not answer: stopped, dead, or blocked in a call that holds the interpreter. Else it is
    who has begun the fewest collectives, who is in none, who is at the lowest step, in the earliest phase.
    """
    silent = [rank for rank, standing in standings.items() if standing is None]
    if silent:
        return silent
    known = {rank: standing for rank, standing in standings.items() if standing is not None}
    left = [rank for rank, standing in known.items() if standing.has_left]
    if left:
        return [rank for rank, standing in known.items() if not (standing.has_left or standing.is_waiting)] or left
    behind = _lowest(known, list(known), lambda each: each.num_collectives)
    behind = _lowest(known, behind, lambda each: each.is_waiting)
    if len(behind) == len(known):
        behind = _lowest(known, behind, lambda each: each.step)
    if len(behind) == len(known):
        behind = _lowest(known, behind, lambda each: PHASES.index(each.phase))
    if len(behind) == len(known):
        return []
    return [rank for rank in behind if known[rank].is_overdue] or behind


def is_hang(standings: Mapping[int, Standing | None], missing: Iterable[int]) -> bool:
    """Is it a hang, and not a rank that is busy within its limits while the others wait?"""
    named = [standings[rank] for rank in missing]
    return not named or any(each is None or each.has_left or each.is_overdue for each in named)


def describe(standings: Mapping[int, Standing | None], missing: list[int]) -> str:
    """Says in one line who is stuck where, and who waits."""
    if len(standings) == 1:
        rank, standing = next(iter(standings.items()))
        return f"{f'Rank {rank}' if rank else 'The run'} is {_where(standing)}."
    waiting = [rank for rank in standings if rank not in missing]
    if not missing:
        first = next(iter(standings.values()))
        return f"All {len(standings)} ranks are {_where(first)}; none is behind the others."
    first = standings[missing[0]]
    subject, verb = f"{_ranks(missing).capitalize()}", "is" if len(missing) == 1 else "are"
    if first is None:
        does = "does" if len(missing) == 1 else "do"
        said = f"{subject} {does} not answer: stopped, dead or blocked"
        seen = next((standings[rank] for rank in waiting if standings[rank] is not None), None)
        said += f", at about step {seen.step}" if seen is not None else ""
    elif first.has_left:
        said = f"{subject} {'has' if len(missing) == 1 else 'have'} left the training"
    else:
        said = f"{subject} {verb} {_where(first)}"
    return f"{said}; {_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {_pronoun(missing)}."


def _where(standing: Standing | None) -> str:
    assert standing is not None
    usually = "" if standing.usual is None else f" (usually {_seconds(standing.usual)})"
    return f"stuck in {standing.phase} for {_seconds(standing.seconds)} at step {standing.step}{usually}"


def _pronoun(ranks: list[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _seconds(seconds: float) -> str:
    if seconds < 0.01:
        return "less than 0.01 s"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _ranks(ranks: list[int]) -> str:
    """`rank 1`, `ranks 0, 2, 3`, `ranks 0-510, 512`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    pieces = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(pieces)}"


def _lowest(known: Mapping[int, Standing], ranks: list[int], measure: Callable[[Standing], Any]) -> list[int]:
    values = {rank: measure(known[rank]) for rank in ranks}
    if any(value is None for value in values.values()):
        return ranks
    lowest = min(values.values())
    return [rank for rank in ranks if values[rank] == lowest]


WATCHDOG_FOLDER = "watchdog"
_STOPPED_SECONDS = 5.0  # a look that comes so much too late: the whole process was stopped, not stuck


class Watchdog(Hook):
    """Ends a run that is stuck, after writing RUN/watchdog/step-N.

    Stuck is a phase that takes `factor` times its median and at least `min_seconds`; see `limit_seconds` for phases
    without a median worth the name. A rank that is stopped as a whole (SIGSTOP, a suspended job) is missed by the
    others only, and one that stands in a debugger is never stuck.
    """

    def __init__(self, section: WatchdogSection) -> None:
        self._section = section
        self._watcher: _Watcher | None = None

    def before_train(self) -> None:
        """Starts the thread, on every rank."""
        trainer, ranks = self.trainer, self.trainer.ranks
        if self._section.watch:
            own = (os.urandom(8).hex(), identify_process(os.getpid()))
            topics, processes = zip(*ranks.gather(own), strict=True)
            # A topic of its own, for the store outlives this run where a process trains several.
            notes = Notes(f"watchdog/{topics[0]}", answer_seconds=ANSWER_SECONDS) if ranks.size > 1 else None
            self._watcher = _Watcher(
                trainer.heartbeat,
                ranks,
                self._section,
                notes=notes,
                processes=processes,
                folder=trainer.folder / WATCHDOG_FOLDER,
                training_thread=threading.get_ident(),
                describe_places=self._describe_places,
            )
            self._watcher.start()

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
    reporter: int = 0
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
        heartbeat: Heartbeat,
        ranks: Ranks,
        section: WatchdogSection,
        *,
        notes: Notes | None,
        processes: Sequence[str],
        folder: Path,
        training_thread: int,
        describe_places: Callable[[], str],
    ) -> None:
        super().__init__(name="trainwright-watchdog", daemon=True)
        self._heartbeat = heartbeat
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
                logger.exception("The watchdog failed; the run goes on without it.")
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
        began = self._heartbeat.current[2]
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
        phase, step, since = self._heartbeat.current
        limit = limit_seconds(
            self._heartbeat, phase, factor=self._section.factor, min_seconds=self._section.min_seconds
        )
        return Standing(
            phase=phase,
            step=step,
            seconds=monotonic() - max(since, self._awake_since),
            usual=self._heartbeat.median_seconds(phase),
            limit=float("inf") if is_debugged(self._thread) else limit,
            num_collectives=num_collectives_begun() if self._size > 1 else None,
            is_waiting=is_in_collective(self._thread),
        )

    # asking

    def _judge(self, began: float) -> _Verdict:
        """Reads every rank's answer and says whether it is a hang, and whose."""
        standings = self._collect_answers()
        missing = find_missing(standings)
        if self._heartbeat.current[2] != began or not is_hang(standings, missing):
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
            reporter=0 if 0 in answered else self._rank,
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
        """Writes what this rank knows; the reporter waits for the others and writes the report; then all leave."""
        assert self._notes is not None
        self._is_leaving = True
        _within(ANSWER_SECONDS, lambda: self._write_own(Path(verdict.folder)))
        self._note(f"written/{self._rank}", "yes")
        if self._rank == verdict.reporter:
            others = [f"written/{rank}" for rank in verdict.answered]
            self._notes.wait_for(*others, seconds=self._answer_seconds + ANSWER_SECONDS)
            _within(ANSWER_SECONDS, lambda: self._tell_user(verdict))
            self._note("told", "yes")
        else:
            # A launcher ends all ranks when the first one leaves, and nobody may leave before it is told.
            self._notes.wait_for("told", seconds=2 * (self._answer_seconds + ANSWER_SECONDS))
        self._exit(verdict)

    def _write_own(self, folder: Path) -> None:
        write_rank_report(
            folder, self._rank, self._stands(), self._heartbeat, thread=self._thread, places=self._describe_places()
        )

    def _tell_user(self, verdict: _Verdict) -> None:
        folder = Path(verdict.folder)
        logger.error("%s Stacks: %s", verdict.line, folder)
        folder.mkdir(parents=True, exist_ok=True)
        advice = (
            "Each rank's stacks, place in the data and begun collectives are beside this file. Every rank has left "
            f"with exit code {HANG_EXIT_CODE}; running the same command again goes on from the newest checkpoint.\n"
            f"If nothing was wrong, raise watchdog.min_seconds (now {self._section.min_seconds:g}) or watchdog.factor "
            f"(now {self._section.factor:g}), or set watchdog.watch=false.\n"
        )
        text = "\n".join([verdict.line, "", *verdict.table, "", advice])
        (folder / "report.txt").write_text(text, encoding="utf-8")
        for handler in logging.getLogger("trainwright").handlers:
            handler.flush()
        sys.stderr.flush()

    def _exit(self, verdict: _Verdict) -> None:
        """Ends this process and those that would stay behind: its children, and silent ranks on this machine."""
        _within(1.0, end_children)
        for identity in verdict.silent:
            end_process(identity)
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

    thread = threading.Thread(target=guarded, name="trainwright-watchdog-report", daemon=True)
    thread.start()
    thread.join(seconds)
