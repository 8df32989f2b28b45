"""`trainwright explain run.yaml`: prints the loop as it will run, and who acts in each phase, from which file."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import typer

from trainwright.commands.terminal import Overrides, RunPath, load_run

if TYPE_CHECKING:
    from trainwright.analysis.explain import Line

WIDEST = 60  # a longer name pushes its own line, not those of all others
SHORTEST = 20  # of a remark that has less room nothing is shown
COLOURS = {"heading": None, "phase": None, "call": "green", "problem": "red"}  # None: readable on any background


def explain(run: RunPath, overrides: Overrides = None) -> None:
    """Print the loop as it will run: each phase, and which of your methods and hooks act there. Builds nothing."""
    config = load_run(run, overrides)
    from trainwright.analysis.explain import explain as explain_run

    lines = explain_run(config)
    is_terminal = sys.stdout.isatty()
    print(f"{run}: how this run goes. * is yours; the rest is trainwright's own or a library's.")
    columns = shutil.get_terminal_size().columns if is_terminal else None
    print("\n".join(render(lines, in_colour=is_terminal and "NO_COLOR" not in os.environ, columns=columns)))
    num_problems = sum(line.kind == "problem" for line in lines)
    if num_problems:
        parts = f"{num_problems} part{'s' if num_problems > 1 else ''}"
        print(f"\n{parts} of this run cannot be found or used: see the lines with !.")
        raise typer.Exit(1)


def render(lines: list[Line], *, in_colour: bool = False, columns: int | None = None) -> list[str]:
    """Return the lines as text: what acts, from where, and a remark, one below the other.

    With `columns` an act's remark is cut to what is left of the line; names and places never are.
    """
    left = [f"{'  ' * line.depth}{_mark(line)}{line.text}" for line in lines]
    with_columns = [number for number, line in enumerate(lines) if line.kind in ("call", "phase") and _has_more(line)]
    text_width = max((len(left[number]) for number in with_columns if len(left[number]) <= WIDEST), default=0)
    location_width = max((len(line.location) for line in lines if len(line.location) <= WIDEST), default=0)
    texts = []
    for words, line in zip(left, lines, strict=True):
        if line.kind == "heading":
            texts.append("")
        location = f"  {line.location:<{location_width}}" if line.kind == "call" else ""
        text = f"{words:<{text_width}}{location}" if _has_more(line) else words
        remark = line.remark
        if columns is not None and line.kind == "call" and len(text) + 2 + len(remark) > columns:
            remark = f"{remark[: max(columns - len(text) - 3, 0)]}…" if columns - len(text) > SHORTEST else ""
        text = _paint(text, line) if in_colour else text
        texts.append(f"{text}  {remark}".rstrip() if remark else text.rstrip())
    return texts


def _has_more(line: Line) -> bool:
    return bool(line.location or line.remark)


def _mark(line: Line) -> str:
    if line.kind == "call":
        return "* " if line.is_user_code else "- "
    return "! " if line.kind == "problem" else ""


def _paint(text: str, line: Line) -> str:
    if line.kind == "call" and not line.is_user_code:
        return typer.style(text, dim=True)
    return typer.style(text, fg=COLOURS[line.kind], bold=line.kind != "call")
