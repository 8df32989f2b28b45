"""Lets contenders take turns, because the machine's speed drifts, and compares them round by round.

Used by data.py and its sections; a contender is a function that measures itself once.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable

Measured = dict[str, float]
Rounds = dict[str, dict[str, list[float]]]


def take_turns(contenders: dict[str, Callable[[], Measured]], rounds: int, warmups: int = 1) -> Rounds:
    """Runs every contender once a round, every second round in reverse; returns each quantity's values."""
    values: Rounds = {name: {} for name in contenders}
    for number in range(-warmups, rounds):
        names = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
        for name in names:
            gc.collect()  # one contender's garbage is not to be collected on another's time
            for quantity, value in contenders[name]().items():
                if number >= 0:
                    values[name].setdefault(quantity, []).append(value)
    return values


def median(rounds: Rounds, name: str, quantity: str) -> float:
    return statistics.median(rounds[name][quantity])


def ratio(rounds: Rounds, quantity: str, name: str, baseline: str) -> dict[str, float]:
    """The median over rounds of (contender / baseline of the same round), with the quartiles of the rounds."""
    pairs = zip(rounds[name][quantity], rounds[baseline][quantity], strict=True)
    ratios = sorted(own / other for own, other in pairs)
    if len(ratios) == 1:
        return {"median": ratios[0], "low": ratios[0], "high": ratios[0]}
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def show_ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown, the first column to the left and the numbers to the right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
