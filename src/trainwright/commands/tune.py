"""`trainwright tune lr|batch|workers run.yaml`: measures a setting of a run on a copy, and suggests a value."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trainwright.commands.terminal import (
    AsJson,
    Overrides,
    RunPath,
    Trust,
    load_run,
    show_rows,
    size_text,
    temporary_folder,
)
from trainwright.config import RunConfig
from trainwright.cpu import num_cores
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.launch.local import is_launched, launch, leave_if_explained, note_explained_error
from trainwright.log import outlive_console, show_log
from trainwright.safe_text import json_text

if TYPE_CHECKING:
    from trainwright.autotune.learning_rate import RangeTestResult

_WIDTH, _HEIGHT = 72, 16
_MIN_STEPS = 20

app = typer.Typer(
    name="tune", help="Measure a setting of a run on a copy of it, and suggest a value.", no_args_is_help=True
)


def _load(run: Path, overrides: list[str] | None, *, trust: bool) -> RunConfig:
    """Loads the run, and hides the log of the copy: its folder, its number of steps."""
    show_log(logging.WARNING)
    return load_run(run, overrides, trust=trust)


@app.command()
def lr(
    run: RunPath,
    overrides: Overrides = None,
    lowest: Annotated[float, typer.Option("--min", help="The first learning rate.")] = 1e-8,
    highest: Annotated[float, typer.Option("--max", help="The last learning rate.")] = 10.0,
    steps: Annotated[int, typer.Option(min=_MIN_STEPS, help="Updates from the first rate to the last.")] = 200,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which of several optimizers; the others keep their rates.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The image of the curve.", show_default="NAME-lr.png, with matplotlib"),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="How many processes to start on this machine.")] = 1,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Suggest a learning rate: train a copy of the run while the rate rises, until the loss diverges.

    The copy starts from the run's first weights, without its schedule, hooks, writers and evaluations.
    """
    if not 0 < lowest < highest < math.inf:
        raise ConfigError(f"--min {lowest:g} must be more than 0 and less than --max {highest:g}.")
    config = _load(run, overrides, trust=trust)
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"--output: there is no folder {output.parent}.")
    if nproc > 1 and not is_launched():
        with outlive_console():
            code = launch(nproc, sys.argv[1:])
        sys.exit(code)
    leave_if_explained()
    from trainwright.api.tune import tune_learning_rate

    is_first = os.environ.get("RANK", "0") == "0"
    options: dict[str, Any] = {"lowest": lowest, "highest": highest, "num_steps": steps, "optimizer": optimizer}
    try:
        with temporary_folder() as folder, _progress("learning rate", steps, is_shown=is_first) as advance:

            def report(step: int, rate: float, loss: float) -> None:
                advance(step, f"{rate:.1e}, loss {loss:.4g}")

            result, setting = tune_learning_rate(config, folder, progress=report, **options)
    except TrainwrightError:
        note_explained_error()
        raise
    if not is_first:
        return
    image = _save_image(result, output, config)
    if as_json:
        found = {"suggestion": result.suggestion.rate, "reason": result.suggestion.reason, "setting": setting}
        curve = {"rates": result.rates, "losses": result.losses, "diverged": result.diverged}
        print(json_text({**found, **curve}))
        return
    _show_curve(result)
    _show_suggestion(result, setting)
    print(image)


def _save_image(result: RangeTestResult, output: Path | None, config: RunConfig) -> str:
    """Writes the image of the curve, and returns a line with its path, or with advice."""
    path = output or Path(f"{Path(config.name).name}-lr.png")
    if output is None and find_spec("matplotlib") is None:
        return "No image, because matplotlib is not installed. Run: pip install 'trainwright[plot]'"
    if not result.smoothed:
        return "No image, because no loss is finite."
    from trainwright.writers.curves import save_rate_plot

    curves = {"loss": [each if math.isfinite(each) else math.nan for each in result.losses]}
    try:
        save_rate_plot(path, result.rates, {**curves, "smoothed": result.smoothed}, marked=result.suggestion.rate)
    except (OSError, ValueError) as error:  # a folder without permission, an unknown format
        raise TrainwrightError(f"--output: the image {path} cannot be written: {error}") from error
    return f"Image: {path}"


def _show_curve(result: RangeTestResult) -> None:
    finite = [(rate, loss) for rate, loss in zip(result.rates, result.losses, strict=True) if math.isfinite(loss)]
    if len(finite) < 2:
        return
    rates = [rate for rate, _ in finite]
    print("\n".join(draw_curve(rates, [loss for _, loss in finite], result.smoothed, marked=result.suggestion.rate)))


def draw_curve(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], *, marked: float | None
) -> list[str]:
    """Returns the lines of a plot in plain characters: losses (.), the smoothed curve (*) and the marked rate (|)."""
    start, span = math.log10(rates[0]), math.log10(rates[-1] / rates[0])
    lowest = min(smoothed)
    margin = max(smoothed[0] - lowest, 0.1 * abs(smoothed[0]), 1e-12)
    top, bottom = max(smoothed[0], lowest) + 0.6 * margin, lowest - 0.2 * margin
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]

    def column(rate: float) -> int:
        return round((math.log10(rate) - start) / span * (_WIDTH - 1))

    if marked is not None:
        for row in grid:
            row[column(marked)] = "|"
    for character, values in ((".", losses), ("*", smoothed)):
        for rate, value in zip(rates, values, strict=True):
            line = round((top - value) / (top - bottom) * (_HEIGHT - 1))
            if 0 <= line < _HEIGHT:
                grid[line][column(rate)] = character
    labels = {0: f"{top:.3g}", _HEIGHT - 1: f"{bottom:.3g}"}
    lines = [f"{labels.get(number, ''):>9} |{''.join(row)}".rstrip() for number, row in enumerate(grid)]
    axis = [" "] * (_WIDTH + 8)
    for power in range(math.ceil(start), math.floor(start + span) + 1):
        left = column(10.0**power)
        for offset, letter in enumerate(f"1e{power}"):
            axis[left + offset] = letter
    return ["     loss", *lines, f"{'':9} +{'-' * _WIDTH}", f"{'':11}{''.join(axis)}".rstrip(), f"{'':11}learning rate"]


def _show_suggestion(result: RangeTestResult, setting: str | None) -> None:
    rate, reason = result.suggestion.rate, result.suggestion.reason
    if rate is None:
        print(f"No suggestion: {reason}")
        return
    print(f"Suggested learning rate: {rate:g}, because {reason}.")
    if setting is None:
        print("The program creates the optimizer: set the rate there.")
    else:
        print(f"Use it with: {setting}={rate:g}")


@app.command()
def batch(
    run: RunPath,
    overrides: Overrides = None,
    largest: Annotated[
        int | None, typer.Option(min=1, help="The last size to try.", show_default="one rank's samples per update")
    ] = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Measure micro-batches of doubling size, until memory runs out: time per sample, memory, and the fastest.

    The global batch size stays the same, and so do the results of the run.
    """
    config = _load(run, overrides, trust=trust)
    from trainwright.api.tune import best_micro_batch, tune_micro_batch

    with temporary_folder() as folder, _progress("micro-batch", None) as advance:
        found = tune_micro_batch(
            config, folder, largest=largest, progress=lambda each: advance(0, f"{each.size} samples")
        )
    best = best_micro_batch(found)
    if as_json:
        sizes = [{"size": each.size, "seconds_per_sample": each.seconds_per_sample} for each in found]
        print(json.dumps({"suggestion": None if best is None else best.size, "sizes": sizes}))
        return
    rows = []
    for each in found:
        seconds = each.seconds_per_sample
        memory = "" if each.peak_bytes is None else size_text(each.peak_bytes)
        if seconds is None:
            rows.append((str(each.size), "does not fit into 90 % of the memory", "", ""))
        else:
            rows.append((str(each.size), f"{1000 * seconds:.3g} ms", f"{1 / seconds:.0f}", memory))
    show_rows(("micro-batch", "time per sample", "samples per second", "peak memory"), rows)
    if best is None:
        print("No size fits. trainwright estimate says what uses the memory, and what could be changed.")
        return
    fitting = [each.size for each in found if each.seconds_per_sample is not None]
    if best.size == fitting[-1]:
        reason = "it is the largest one, and the fastest" if len(fitting) > 1 else "no other size was measured"
    else:
        reason = f"larger ones up to {fitting[-1]} fit as well, but save less than 3 % of the time"
    print(f"Suggested micro-batch size: {best.size}, because {reason}.")
    extra = " trainer.gradient_accumulation_steps=null" if config.trainer.gradient_accumulation_steps else ""
    if (
        largest is not None
        and config.trainer.global_batch_size is not None
        and best.size > config.trainer.global_batch_size
    ):
        extra += f" trainer.global_batch_size={best.size}"
    print(f"Use it with: trainer.micro_batch_size={best.size}{extra}")


@app.command()
def workers(
    run: RunPath,
    overrides: Overrides = None,
    counts: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Numbers of processes to try.", show_default="0,1,2,4,… cores")
    ] = None,
    steps: Annotated[int, typer.Option(min=5, help="Measured steps for each number.")] = 30,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Measure how long steps wait for data with 0, 1, 2, 4 … loader processes, and suggest a number."""
    numbers = _read_counts(counts)
    config = _load(run, overrides, trust=trust)
    from trainwright.api.tune import tune_workers
    from trainwright.autotune.workers import ENOUGH, enough_workers

    with temporary_folder() as folder, _progress("workers", len(numbers)) as advance:
        found = tune_workers(
            config,
            folder,
            counts=numbers,
            num_steps=steps,
            progress=lambda each: advance(numbers.index(each.num_workers) + 1, f"{each.num_workers} processes"),
        )
    best = enough_workers(found)
    if as_json:
        times = [
            {"num_workers": each.num_workers, "wait_seconds": each.wait_seconds, "step_seconds": each.step_seconds}
            for each in found
        ]
        print(json.dumps({"suggestion": best.num_workers, "times": times}))
        return
    rows = [
        (str(each.num_workers), _milliseconds(each.wait_seconds), _milliseconds(each.step_seconds), f"{each.share:.0%}")
        for each in found
    ]
    show_rows(("num_workers", "wait per step", "step", "share"), rows)
    if best.share > ENOUGH:
        reason = f"steps are shortest with it; they still wait {best.share:.0%} of the time"
    elif best.num_workers == 0:
        reason = f"the data is not the bottleneck: without other processes a step waits {best.share:.1%} of the time"
    else:
        reason = f"it is the smallest number with which a step waits at most {ENOUGH:.0%} of the time"
    print(f"Suggested number of workers: {best.num_workers}, because {reason}.")
    print(f"Use it with: data.num_workers={best.num_workers}")


def _read_counts(text: str | None) -> list[int]:
    if text is None:
        return [0, *(2**power for power in range(num_cores().bit_length()))]
    words = [each.strip() for each in text.split(",")]
    if not all(each.isdecimal() for each in words):
        raise ConfigError(f"--counts: {text!r} is not a list of whole numbers such as 0,1,2,4.")
    return list(dict.fromkeys(map(int, words)))


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


@contextmanager
def _progress(label: str, total: int | None, *, is_shown: bool = True) -> Iterator[Callable[[int, str], None]]:
    """Yields a function that shows the number of finished parts and a text on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)) as bar:
        task = bar.add_task(label, total=total, text="")
        yield lambda completed, text: bar.update(task, completed=completed, text=text)
