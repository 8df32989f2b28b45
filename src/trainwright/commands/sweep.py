"""`trainwright sweep sweep.yaml`: tries settings of a run, and shows the best ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainwright.commands.terminal import MISSING, show_rows
from trainwright.config import yaml_text
from trainwright.config.frozen import thaw
from trainwright.config.sweep import SweepConfig
from trainwright.errors import TrainwrightError
from trainwright.launch.sweep import (
    COMPLETE,
    FAILED,
    PRUNED,
    RESULTS,
    RUNNING,
    SweepResult,
    TrialResult,
    preview,
    run_sweep,
    trial_name,
)
from trainwright.safe_text import safe

_MAX_SHOWN = 10
_MAX_PREVIEW = 50


def sweep(
    file: Annotated[Path, typer.Argument(help="The YAML file of the sweep.", show_default=False, metavar="SWEEP")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings of the sweep to replace, such as trials=30.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the known trials without starting any.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; an earlier sweep is renamed.")] = False,
) -> None:
    """Try settings of a run with grid, random or TPE search. Running the same command again continues the sweep.

    Each trial is a run in the folder of the sweep, in its own process.
    """
    settings = SweepConfig.load(file, overrides or ())
    if dry_run:
        _show_plan(settings)
        return
    result = _run(settings, fresh=fresh)
    _show_result(settings, result)
    if result.signal is not None:
        print(f"Interrupted: every trial has saved its step. Run the same command to continue {settings.folder}.")
        raise typer.Exit(128 + result.signal)
    if result.num_failures:
        raise TrainwrightError(
            f"{result.num_failures} trials in a row have failed, so the sweep has ended. Fix the reason above and run "
            f"the same command: it continues with the next trial. Output of the trials: {settings.folder / 'logs'}."
        )


def _show_plan(settings: SweepConfig) -> None:
    number = min(settings.num_trials, _MAX_PREVIEW)
    if settings.sampler.type == "tpe":
        number = min(number, settings.sampler.startup_trials or 10)
    found = preview(settings, number)
    show_rows(("trial", *settings.parameters), [(trial_name(index), *_cells(each)) for index, each in enumerate(found)])
    if number < settings.num_trials:
        is_random = settings.sampler.type == "tpe" and number < _MAX_PREVIEW
        reason = "depend on the results of these" if is_random else "follow"
        print(f"{settings.num_trials - number} further trials {reason}.")
    print(f"{settings.num_trials} trials of {settings.run_file} in {settings.folder}. Nothing was started.")


def _run(settings: SweepConfig, *, fresh: bool) -> SweepResult:
    console = Console(highlight=False)
    if not sys.stdout.isatty():
        return run_sweep(settings, fresh=fresh, report=lambda each: print(safe(_line(settings, each)), flush=True))
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        return run_sweep(
            settings,
            fresh=fresh,
            report=lambda each: live.console.print(Text(safe(_line(settings, each)))),
            show=lambda running: live.update(_table(settings, running)),
        )


def _table(settings: SweepConfig, running: Sequence[TrialResult]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("running", "step", settings.metric, "time", *settings.parameters):
        table.add_column(name)
    for each in running:
        cells = (each.name, _number(each.step), _number(each.value), _time(each.seconds), *_cells(each.values))
        table.add_row(*map(Text, cells))
    return table


def _line(settings: SweepConfig, each: TrialResult) -> str:
    """Returns the line for a trial that starts or ends."""
    values = ", ".join(f"{name}={cell}" for name, cell in zip(each.values, _cells(each.values), strict=True))
    found = f"{settings.metric} {_number(each.value)} at step {_number(each.step)}"
    match each.state:
        case state if state == RUNNING:
            return f"{each.name} starts: {values}"
        case state if state == FAILED:
            return f"{each.name} failed: {each.reason}"
        case state if state == PRUNED:
            return f"{each.name} pruned: {found}"
    return f"{each.name} complete: {found}"


def _show_result(settings: SweepConfig, result: SweepResult) -> None:
    sign = 1 if settings.mode == "min" else -1
    complete = [each for each in result.trials if each.state == COMPLETE]
    complete.sort(key=lambda each: sign * (each.value or 0.0))
    counts = {
        state: sum(each.state == state for each in result.trials) for state in (COMPLETE, PRUNED, FAILED, RUNNING)
    }
    if complete:
        rows = [
            (each.name, _number(each.value), _number(each.step), *_cells(each.values)) for each in complete[:_MAX_SHOWN]
        ]
        show_rows(("trial", settings.metric, "step", *settings.parameters), rows)
    shown = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    print(f"{shown or 'no trials'} of {settings.num_trials} trials; all of them: {settings.folder / RESULTS}.csv")
    if result.importances:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in result.importances.items())
        print(f"Importance of the parameters (PED-ANOVA): {shares}")
    elif len(settings.parameters) > 1 and complete:
        print(f"Importance of the parameters: needs four complete trials with different values of {settings.metric}.")
    if result.best is not None:
        best = result.best
        print(f"Best: {best.name}, {settings.metric} {_number(best.value)}: {settings.folder / best.name}")
        print(f"Train it again: {safe(result.command or '')}")


def _cells(values: Any) -> list[str]:
    return [MISSING if each is None else _cell(each) for each in values.values()]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else yaml_text.write_inline(thaw(value))


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _time(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{seconds:.0f} s"
