"""`trainwright doctor`: shows the machine, missing extras, short measurements, and possible problems."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.commands.terminal import AsJson
from trainwright.log import align_columns
from trainwright.safe_text import json_text, safe

if TYPE_CHECKING:
    from trainwright.analysis.doctor import MachineReport


def doctor(
    folder: Annotated[Path, typer.Argument(help="The output_dir of runs, whose disk is measured.")] = Path("runs"),
    no_test: Annotated[bool, typer.Option("--no-test", help="Do not measure anything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show this machine, missing extras, a self-test of about ten seconds, and possible problems."""
    from trainwright.analysis.doctor import examine

    report = examine(folder, measures=not no_test)
    if as_json:
        print(json_text(asdict(report), indent=2))
    else:
        print(safe(report_text(report)))


def report_text(report: MachineReport) -> str:
    """Returns the report as text."""
    parts = [_table(report.facts)]
    installed = [extra.name for extra in report.extras if not extra.missing]
    missing = {extra.name: extra.adds for extra in report.extras if extra.missing}
    lines = [f"Installed extras: {', '.join(installed) or 'none'}"]
    if missing:
        lines += [
            "Others, with what they add (pip install 'trainwright[NAME]'):",
            textwrap.indent(_table(missing), "  "),
        ]
    parts.append("\n".join(lines))
    if report.measurements:
        parts.append(f"Self-test\n{textwrap.indent(_table(report.measurements), '  ')}")
    advice = [f"- {each.problem} {each.advice}" for each in report.advice]
    parts.append("\n".join(["What looks slow", *advice]) if advice else "Nothing looks slow.")
    return "\n\n".join(parts)


def _table(rows: dict[str, str]) -> str:
    return "\n".join(align_columns(list(rows.items())))
