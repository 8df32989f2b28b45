"""Which rank is missing when others wait: a pure judgement of where every rank stands.

Who asks the ranks and acts on the answer is watch_for_hangs.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainwright.loop.phases import PHASES, Phases

REGULAR = frozenset({"data", "step", "reduce", "update", "vote"})
"""Phases that every step has, and that take about as long each time."""
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


def limit_seconds(phases: Phases, phase: str, *, factor: float, min_seconds: float) -> float:
    """Returns after how many seconds a phase is stuck: factor × its median, at least min_seconds.

    A phase that was not finished five times yet has three times min_seconds, for the first steps compile and
    warm up. So have, always, those that do different things each time: hooks, evaluations, writing, saving.
    """
    is_settled = phases.num_finished(phase) >= ENOUGH_FINISHED
    least = min_seconds if is_settled and phase in REGULAR else PATIENCE * min_seconds
    usual = phases.median_seconds(phase) if is_settled else None
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
