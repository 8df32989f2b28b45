"""Detects a rank that makes no progress, writes the stacks of every rank, and ends the run.

On each rank a thread compares the current phase of the loop (loop/heartbeat.py) with its usual duration. A rank that is
overdue asks the others for their status through notes in the rendezvous store, because a collective may hang.
"""

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
from contextlib import suppress
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
from trainwright.log import flush_log
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
from trainwright.progress import free_terminal

logger = logging.getLogger(__name__)

WATCHDOG_FOLDER = "watchdog"
REGULAR = frozenset({"data", "step", "reduce", "update", "vote"})
"""Phases that every step has, and that take about the same time in each."""
ENOUGH_FINISHED = 5
PATIENCE = 3.0
_STOPPED_SECONDS = 5.0  # if a check is this late, the whole process was suspended and is not stuck
_COLLECTIVE_CODE = (
    str(Path(torch.distributed.__file__).parent) + os.sep,
    str(Path(trainwright.parallel.__file__).parent) + os.sep,
)
_DEBUGGERS = frozenset({"pdb", "bdb", "pydevd", "_pydevd_bundle"})


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank."""

    phase: str
    step: int
    seconds: float
    """How long it has been in this phase."""
    usual: float | None
    """How long the phase usually takes; None if unknown."""
    limit: float
    """After this many seconds the rank is stuck."""
    num_collectives: int | None
    """The number of collectives that it has begun, if torch counts them."""
    is_waiting: bool
    """True if its stack is inside a collective."""
    has_left: bool = False
    """True if it has ended training, with or without an error."""

    @property
    def is_overdue(self) -> bool:
        """True if the phase has lasted too long."""
        return self.seconds > self.limit

    def describe(self) -> str:
        """Returns the status as one line of a report."""
        usual = "unknown" if self.usual is None else f"{self.usual:.3g} s"
        return (
            f"{self.phase} of step {self.step} for {self.seconds:.1f} s (usual: {usual}, limit: {self.limit:.3g} s), "
            f"{'inside' if self.is_waiting else 'outside'} a collective, {self.num_collectives} begun"
        )


LEFT = RankStatus("leave", 0, 0.0, None, 0.0, None, is_waiting=False, has_left=True)


def limit_seconds(heartbeat: Heartbeat, phase: str, *, factor: float, min_seconds: float) -> float:
    """Returns after how many seconds a phase is stuck: factor × its median, at least min_seconds.

    A phase that has ended fewer than five times gets three times min_seconds, because the first steps compile and warm
    up. Phases whose work differs each time (hooks, evaluations, writing, saving) always have this limit.
    """
    is_settled = heartbeat.num_finished(phase) >= ENOUGH_FINISHED
    least = min_seconds if is_settled and phase in REGULAR else PATIENCE * min_seconds
    usual = heartbeat.median_seconds(phase) if is_settled else None
    return max(least, factor * (usual or 0.0))


# The ranks that the others wait for.


def find_missing(statuses: Mapping[int, RankStatus | None]) -> list[int]:
    """Returns the ranks that the others wait for; an empty list if all have the same status.

    None is a rank that does not answer: stopped, dead, or blocked in a call that holds the interpreter. Otherwise the
    missing ranks have begun the fewest collectives, are in none, at the lowest step, in the earliest phase.
    """
    silent = [rank for rank, status in statuses.items() if status is None]
    if silent:
        return silent
    known = {rank: status for rank, status in statuses.items() if status is not None}
    left = [rank for rank, status in known.items() if status.has_left]
    if left:
        return [rank for rank, status in known.items() if not (status.has_left or status.is_waiting)] or left
    behind = _lowest(known, list(known), lambda status: status.num_collectives)
    behind = _lowest(known, behind, lambda status: status.is_waiting)
    if len(behind) == len(known):
        behind = _lowest(known, behind, lambda status: status.step)
    if len(behind) == len(known):
        behind = _lowest(known, behind, lambda status: PHASES.index(status.phase))
    if len(behind) == len(known):
        return []
    return [rank for rank in behind if known[rank].is_overdue] or behind


def _lowest(known: Mapping[int, RankStatus], ranks: list[int], measure: Callable[[RankStatus], Any]) -> list[int]:
    values = {rank: measure(known[rank]) for rank in ranks}
    if any(value is None for value in values.values()):
        return ranks
    lowest = min(values.values())
    return [rank for rank in ranks if values[rank] == lowest]


def is_hang(statuses: Mapping[int, RankStatus | None], missing: Iterable[int]) -> bool:
    """Returns False if the missing ranks are busy within their limits while the others wait."""
    named = [statuses[rank] for rank in missing]
    return not named or any(status is None or status.has_left or status.is_overdue for status in named)


def describe(statuses: Mapping[int, RankStatus | None], missing: list[int]) -> str:
    """Returns one line that says which rank is stuck in which phase, and which ranks wait for it."""
    if not missing:
        rank, first = next(iter(statuses.items()))
        if len(statuses) > 1:
            return f"All {len(statuses)} ranks are {_describe_stuck(first)}; none is behind the others."
        return f"{f'Rank {rank}' if rank else 'The run'} is {_describe_stuck(first)}."
    waiting = [rank for rank in statuses if rank not in missing]
    is_one, first = len(missing) == 1, statuses[missing[0]]
    if first is None:
        steps = [status.step for rank in waiting if (status := statuses[rank]) is not None]
        about = f", at about step {steps[0]}" if steps else ""
        problem = f"{'does' if is_one else 'do'} not answer: stopped, dead or blocked{about}"
    elif first.has_left:
        problem = f"{'has' if is_one else 'have'} left the training"
    else:
        problem = f"{'is' if is_one else 'are'} {_describe_stuck(first)}"
    waits = f"{'waits' if len(waiting) == 1 else 'wait'} for {'it' if is_one else 'them'}"
    return f"{_list_ranks(missing).capitalize()} {problem}; {_list_ranks(waiting)} {waits}."


def _describe_stuck(status: RankStatus | None) -> str:
    assert status is not None
    usually = "" if status.usual is None else f" (usually {_seconds(status.usual)})"
    return f"stuck in {status.phase} for {_seconds(status.seconds)} at step {status.step}{usually}"


def _seconds(seconds: float) -> str:
    if seconds < 0.01:
        return "less than 0.01 s"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _list_ranks(ranks: list[int]) -> str:
    """Returns `rank 1`, `ranks 0, 2, 3`, `ranks 0-510, 512`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(shown)}"


# Stacks and processes.


def is_in_collective(thread: int) -> bool:
    """Returns True if a thread currently runs code of torch's collectives, or of ours."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVE_CODE)


def is_debugged(thread: int) -> bool:
    """Returns True if a debugger has stopped this thread: it is then never stuck."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def write_rank_report(
    folder: Path, rank: int, status: RankStatus, heartbeat: Heartbeat, *, thread: int, data_position: str
) -> None:
    """Writes rank-R.txt with the stacks of all other threads, and torch's log to rank-R-collectives.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"Rank {rank}, process {os.getpid()} on {platform.node()}, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        status.describe(),
        data_position,
        "Seconds in each phase since the start: "
        + ", ".join(f"{phase} {heartbeat.seconds_in(phase):.1f}" for phase in PHASES if heartbeat.num_finished(phase)),
        *(f"Child process {child.name}: {child.pid}" for child in multiprocessing.active_children()),
    ]
    names = {each.ident: each.name for each in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    for each in sorted(frames, key=lambda each: each != thread):  # the training thread first
        role = " (training)" if each == thread else ""
        lines += ["", f"{names.get(each, 'a thread without a name')}{role}, innermost last:"]
        lines += "".join(traceback.format_stack(frames[each])).splitlines()
    (folder / f"rank-{rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    # After the stacks, which must not be lost if this blocks.
    collectives = collective_log() if torch.distributed.is_initialized() else None
    if collectives is not None:
        (folder / f"rank-{rank}-collectives.json").write_text(collectives, encoding="utf-8")


def identify_process(pid: int) -> str:
    """Returns a text that identifies a process on all machines; empty if the system does not support it."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        # Process numbers of another container mean other processes.
        container = Path("/proc/self/ns/pid").readlink()
        started = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{pid} {started} {container} {machine}"


def end_process(identity: str) -> bool:
    """Kills the process that `identify_process` identified, if it still runs on this machine."""
    if not identity or identify_process(pid := int(identity.split(maxsplit=1)[0])) != identity:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


class Watchdog(Hook):
    """Ends a run that is stuck, after writing RUN/watchdog/step-N.

    A phase is stuck after `factor` times its median, and at least `min_seconds`; see `limit_seconds`. A rank that is
    suspended completely (SIGSTOP, a suspended job) is detected only by the others; a rank in a debugger is never stuck.
    """

    def __init__(self, section: WatchdogSection) -> None:
        self._section = section
        self._thread: _WatchdogThread | None = None

    def before_train(self) -> None:
        """Starts the thread, on every rank."""
        ranks = self.trainer.ranks
        if self._section.watch:
            topics, processes = zip(*ranks.gather((os.urandom(8).hex(), identify_process(os.getpid()))), strict=True)
            # A unique topic: the store outlives this run if a process trains several times.
            notes = Notes(f"watchdog/{topics[0]}", answer_seconds=ANSWER_SECONDS) if ranks.size > 1 else None
            self._thread = _WatchdogThread(
                self.trainer.heartbeat,
                ranks,
                self._section,
                notes=notes,
                processes=processes,
                folder=self.trainer.folder / WATCHDOG_FOLDER,
                training_thread=threading.get_ident(),
                describe_position=self._describe_position,
            )
            self._thread.start()

    def close(self) -> None:
        """Ends the thread, unless it is ending the process."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    def _describe_position(self) -> str:
        data = self.trainer.train_data
        position, order_position = getattr(data, "samples_seen", "unknown"), getattr(data, "order_position", "unknown")
        return f"Samples returned so far, over all ranks: {position}; position in the data order: {order_position}."


@dataclass(frozen=True)
class _Verdict:
    """The finding of the rank that asked, as a note for all."""

    is_hang: bool
    line: str = ""
    folder: str = ""
    reporter: int = 0
    """The rank that writes report.txt: the first, unless it does not answer."""
    table: list[str] = field(default_factory=list)
    """One line per rank, for report.txt."""
    answered: list[int] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """The processes of the ranks that did not answer, as `identify_process` identifies them."""


class _WatchdogThread(threading.Thread):
    """The thread of one rank.

    every check:
        another rank asks (inquiry/N)   answer/N/RANK = the status of this rank; wait for verdict/N; leave if it hangs
        this rank is overdue            ask: inquiry/N; read all answers; verdict/N = a hang, or not (yet)
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
        describe_position: Callable[[], str],
    ) -> None:
        super().__init__(name="trainwright-watchdog", daemon=True)
        self._heartbeat = heartbeat
        self._rank, self._size = ranks.rank, ranks.size
        self._section = section
        self._notes = notes
        self._processes = processes
        self._folder = folder
        self._training_thread = training_thread
        self._describe_position = describe_position
        # Each check is a message to the store, which a large run must not overload.
        self._every_seconds = max(min(1.0, section.min_seconds / 10), self._size / 500)
        self._answer_seconds = ANSWER_SECONDS + 2 * self._every_seconds
        self._inquiry = 1
        self._awake_since = 0.0
        self._ask_again_at = 0.0
        self._ended = threading.Event()
        self._is_leaving = False

    def run(self) -> None:
        """Checks periodically until training ends."""
        before = monotonic()
        while not self._ended.wait(self._every_seconds):
            now = monotonic()
            if now - before > self._every_seconds + _STOPPED_SECONDS:
                self._awake_since = now
            try:
                self._check()
            except NotesUnreachable:
                if self._status().is_overdue:
                    self._leave_alone(is_cut_off=True)
            except Exception:
                logger.exception("The watchdog failed; the run continues without it.")
                return
            before = monotonic()  # the time spent waiting for answers does not count as suspended

    def end(self) -> None:
        """Ends the thread and waits for it, unless the thread is ending the process."""
        self._ended.set()
        self.join(None if self._is_leaving else ANSWER_SECONDS)
        if self._is_leaving:
            self.join()
        if self._notes is not None:
            with suppress(NotesUnreachable):
                self._notes.write(f"left/{self._rank}", "yes")
            self._notes.close()

    def _check(self) -> None:
        if self._notes is None:
            if self._status().is_overdue:
                self._leave_alone()
            return
        inquiry = f"inquiry/{self._inquiry}"
        asking_rank = self._notes.read(inquiry)
        if asking_rank is None:
            if monotonic() < self._ask_again_at or not self._status().is_overdue:
                return
            asking_rank = self._notes.write_first(inquiry, str(self._rank))
        phase_start = self._heartbeat.current[2]
        self._notes.write(f"answer/{self._inquiry}/{self._rank}", json.dumps(asdict(self._status())))
        name = f"verdict/{self._inquiry}"
        if asking_rank == str(self._rank):
            verdict = self._judge(self._notes, phase_start)
            self._notes.write(name, json.dumps(asdict(verdict)))
        else:
            found = self._notes.wait_for(name, seconds=self._answer_seconds + ANSWER_SECONDS)
            # A rank that dies or continues while it asks writes no verdict; another overdue rank asks again.
            verdict = _Verdict(**json.loads(found[name])) if found else _Verdict(is_hang=False)
        if verdict.is_hang and not self._ended.is_set():
            self._leave_together(self._notes, verdict)
        self._inquiry += 1

    def _status(self) -> RankStatus:
        phase, step, since = self._heartbeat.current
        section = self._section
        limit = limit_seconds(self._heartbeat, phase, factor=section.factor, min_seconds=section.min_seconds)
        return RankStatus(
            phase=phase,
            step=step,
            seconds=monotonic() - max(since, self._awake_since),
            usual=self._heartbeat.median_seconds(phase),
            limit=float("inf") if is_debugged(self._training_thread) else limit,
            num_collectives=num_collectives_begun() if self._size > 1 else None,
            is_waiting=is_in_collective(self._training_thread),
        )

    def _judge(self, notes: Notes, phase_start: float) -> _Verdict:
        """Reads every rank's answer and decides whether the run hangs, and which ranks cause it."""
        names = {rank: f"answer/{self._inquiry}/{rank}" for rank in range(self._size)}
        answers = notes.wait_for(*names.values(), seconds=self._answer_seconds)
        statuses: dict[int, RankStatus | None] = {}
        for rank, name in names.items():
            statuses[rank] = RankStatus(**json.loads(answers[name])) if name in answers else None
            with suppress(NotesUnreachable):
                if name not in answers and notes.read(f"left/{rank}"):
                    statuses[rank] = LEFT
        missing = find_missing(statuses)
        if self._heartbeat.current[2] != phase_start or not is_hang(statuses, missing):
            # A rank is busy within its limits: do not ask again before it is overdue.
            left = [status.limit - status.seconds for rank in missing if (status := statuses[rank]) is not None]
            self._ask_again_at = monotonic() + min([*left, self._section.min_seconds])
            return _Verdict(is_hang=False)
        behind = statuses[missing[0]] if missing else None
        answered = [rank for rank, status in statuses.items() if status is not None and not status.has_left]
        return _Verdict(
            is_hang=True,
            line=describe(statuses, missing),
            folder=self._choose_folder((behind or self._status()).step),
            reporter=0 if 0 in answered else self._rank,
            table=[_describe_rank(rank, status) for rank, status in statuses.items()],
            answered=answered,
            silent=[self._processes[rank] for rank, status in statuses.items() if status is None],
        )

    def _choose_folder(self, step: int) -> str:
        """Returns a folder that does not exist yet, because a restarted run may hang at the same step."""
        chosen = [self._folder / f"step-{step:08d}"]

        def avoid_existing() -> None:
            while chosen[-1].exists():
                chosen.append(chosen[0].with_name(f"{chosen[0].name}-{len(chosen) + 1}"))

        _call_within(ANSWER_SECONDS, avoid_existing)
        return str(chosen[-1])

    def _leave_alone(self, *, is_cut_off: bool = False) -> None:
        """Ends this process without asking, because there is no other rank, or the process with the notes does not
        answer."""
        status = self._status()
        line = describe({self._rank: status}, [])
        silent: list[str] = []
        if is_cut_off:
            keeper, silent = ("Rank 0", [self._processes[0]]) if first_rank_keeps_notes() else ("The launcher", [])
            line = f"{keeper}, which keeps the ranks' notes, does not answer. {line}"
        folder, table = self._choose_folder(status.step), [_describe_rank(self._rank, status)]
        self._is_leaving = True
        verdict = _Verdict(is_hang=True, line=line, folder=folder, table=table, silent=silent)
        self._write_rank_report(verdict)
        _call_within(ANSWER_SECONDS, lambda: self._report(verdict))
        self._exit(verdict)

    def _leave_together(self, notes: Notes, verdict: _Verdict) -> None:
        """Writes this rank's report; the reporter waits for the others and writes report.txt; then all exit."""
        self._is_leaving = True
        self._write_rank_report(verdict)
        with suppress(NotesUnreachable):
            notes.write(f"written/{self._rank}", "yes")
        if self._rank == verdict.reporter:
            others = [f"written/{rank}" for rank in verdict.answered]
            notes.wait_for(*others, seconds=self._answer_seconds + ANSWER_SECONDS)
            _call_within(ANSWER_SECONDS, lambda: self._report(verdict))
            with suppress(NotesUnreachable):
                notes.write("reported", "yes")
        else:
            # A launcher ends all ranks when the first one exits, so the report must be complete before that.
            notes.wait_for("reported", seconds=2 * (self._answer_seconds + ANSWER_SECONDS))
        self._exit(verdict)

    def _write_rank_report(self, verdict: _Verdict) -> None:
        def write() -> None:
            write_rank_report(
                Path(verdict.folder),
                self._rank,
                self._status(),
                self._heartbeat,
                thread=self._training_thread,
                data_position=self._describe_position(),
            )

        _call_within(ANSWER_SECONDS, write)

    def _report(self, verdict: _Verdict) -> None:
        folder = Path(verdict.folder)
        logger.error("%s Stacks: %s", verdict.line, folder)
        folder.mkdir(parents=True, exist_ok=True)
        advice = (
            "The files next to this one have each rank's stacks, data position and collectives. Every rank has left "
            f"with exit code {HANG_EXIT_CODE}; running the same command again resumes from the newest checkpoint.\n"
            f"If nothing was wrong, raise watchdog.min_seconds (now {self._section.min_seconds:g}) or watchdog.factor "
            f"(now {self._section.factor:g}), or set watchdog.watch=false.\n"
        )
        text = "\n".join([verdict.line, "", *verdict.table, "", advice])
        (folder / "report.txt").write_text(text, encoding="utf-8")
        flush_log()

    def _exit(self, verdict: _Verdict) -> None:
        """Ends this process and those that would remain: its children, and silent ranks on this machine."""

        def end_children() -> None:
            for child in multiprocessing.active_children():
                child.kill()

        _call_within(1.0, end_children)
        for identity in verdict.silent:
            end_process(identity)
        free_terminal()
        # Not sys.exit: the training thread is stuck and would not notice.
        os._exit(HANG_EXIT_CODE)


def _describe_rank(rank: int, status: RankStatus | None) -> str:
    if status is None:
        return f"Rank {rank}: does not answer"
    return f"Rank {rank}: {'has left the training' if status.has_left else status.describe()}"


def _call_within(seconds: float, function: Callable[[], Any]) -> None:
    """Calls a function that may block forever, on a missing file system or a lock that a stuck thread holds."""

    def call() -> None:
        try:
            function()
        except Exception as error:
            logger.warning("The report on a hang is incomplete: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=call, name="trainwright-watchdog-report", daemon=True)
    thread.start()
    thread.join(seconds)
