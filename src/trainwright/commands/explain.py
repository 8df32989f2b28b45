"""`trainwright explain run.yaml`: prints the loop as it runs, and the code that each phase calls, with its file."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from trainwright.commands.terminal import Overrides, RunPath, Trust, load_run
from trainwright.safe_text import safe

if TYPE_CHECKING:
    from trainwright.analysis.explain import Line

_MAX = 60  # a longer name or location moves only its own line
_MIN_REMARK = 20  # with less room there is no remark
_COLOURS = {"call": "green", "problem": "red"}


def explain(run: RunPath, overrides: Overrides = None, trust: Trust = False) -> None:
    """Print the loop as it runs: each phase, and which of your methods and hooks it calls. Builds nothing."""
    config = load_run(run, overrides, trust=trust)
    from trainwright.analysis.explain import explain as explain_run

    lines = explain_run(config)
    is_terminal = sys.stdout.isatty()
    print(f"{run}: the phases of this run. * marks your code; other lines are those of trainwright or a library.")
    columns = shutil.get_terminal_size().columns if is_terminal else None
    print("\n".join(render(lines, in_colour=is_terminal and "NO_COLOR" not in os.environ, columns=columns)))
    num_problems = sum(line.kind == "problem" for line in lines)
    if num_problems:
        parts = f"{num_problems} part{'s' if num_problems > 1 else ''}"
        print(f"\n{parts} of this run cannot be found or used: see the lines with !.")
        raise typer.Exit(1)


def render(lines: list[Line], *, in_colour: bool = False, columns: int | None = None) -> list[str]:
    """Returns the lines as text, with names, locations and remarks in columns.

    With `columns`, the remark of a call is truncated to that width, but never names and locations.
    """
    lines = [
        replace(each, text=safe(each.text), location=safe(each.location), remark=safe(each.remark)) for each in lines
    ]
    marks = {"call": "- ", "problem": "! "}
    names = [
        f"{'  ' * each.depth}{'* ' if each.is_user_code else marks.get(each.kind, '')}{each.text}" for each in lines
    ]
    has_more = [bool(each.location or each.remark) for each in lines]
    name_width = max(
        (len(name) for name, more in zip(names, has_more, strict=True) if more and len(name) <= _MAX), default=0
    )
    location_width = max((len(each.location) for each in lines if len(each.location) <= _MAX), default=0)
    texts = []
    for name, more, line in zip(names, has_more, lines, strict=True):
        if line.kind == "heading":
            texts.append("")
        location = f"  {line.location:<{location_width}}" if line.kind == "call" else ""
        text, remark = f"{name:<{name_width}}{location}" if more else name, line.remark
        if columns is not None and line.kind == "call" and len(text) + 2 + len(remark) > columns:
            remark = f"{remark[: max(columns - len(text) - 3, 0)]}…" if columns - len(text) > _MIN_REMARK else ""
        if in_colour and line.kind == "call" and not line.is_user_code:
            text = typer.style(text, dim=True)
        elif in_colour:
            text = typer.style(text, fg=_COLOURS.get(line.kind), bold=line.kind != "call")
        texts.append(f"{text}  {remark}".rstrip() if remark else text.rstrip())
    return texts
