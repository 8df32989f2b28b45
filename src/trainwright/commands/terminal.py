"""Shared functions of commands: arguments that name a run, and tables, sizes and ages as text. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainwright.config import RunConfig
from trainwright.errors import ConfigError
from trainwright.launch.local import shared_folder
from trainwright.log import align_columns
from trainwright.progress import progress, stderr_terminal
from trainwright.safe_text import escape_controls

MISSING = "–"
CONFIG_FILE = "config.yaml"
"""As in checkpoint/run_folder.py, which imports torch. A test compares them."""


Given = TypeVar("Given", str, Path, Path | None)


def named_run(given: Given) -> Given:
    """Returns the folder in `runs/` for the name of a run; any other path unchanged."""
    if given is None or Path(given).exists():
        return given
    folder = Path("runs") / given
    return type(given)(folder) if (folder / CONFIG_FILE).is_file() else given


RunPath = Annotated[
    Path, typer.Argument(help="The run's YAML file, its folder, or its name.", show_default=False, callback=named_run)
]
ModelPath = Annotated[
    Path,
    typer.Argument(help="A run's folder or name, or a folder of an export.", show_default=False, callback=named_run),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to replace, such as trainer.max_steps=500; ~key removes one.", show_default=False),
]
CheckpointStep = Annotated[str, typer.Option(help="The checkpoint: latest, best, or a number.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import the code that a run folder of another person or machine names.")
]
WeightsChoice = StrEnum("WeightsChoice", ["ema", "raw"])
Weights = Annotated[
    WeightsChoice | None,
    typer.Option(help="Averaged or trained weights.", show_default="those that the run evaluates with"),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 selects the most likely token.")]
TopK = Annotated[
    int | None, typer.Option(min=1, help="The number of most likely tokens to sample from.", show_default="all")
]
TopP = Annotated[
    float | None, typer.Option(help="Sample from the most likely tokens up to this probability.", show_default="all")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1, tokens that the text already contains become less likely.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, max=2**64 - 1, help="The random seed.", show_default="another each time")
]
TokenizerChoice = Annotated[
    str | None,
    typer.Option(help="A tokenizer.json, a folder with one, or bytes.", show_default="that of the run's data"),
]
DeviceChoice = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def load_run(run: Path, overrides: Sequence[str] | None = None, *, trust: bool = False) -> RunConfig:
    """Returns the config of a run, given by its file or its folder.

    A folder is untrusted unless a run of this user wrote it, or `trust` is set.
    """
    file = run / CONFIG_FILE if run.is_dir() else run
    if not run.exists() and run.suffix not in (".yaml", ".yml", ".py"):
        raise ConfigError(
            f"there is no run {run}: no such file or folder, and no folder {Path('runs') / run}. `trainwright runs` "
            "lists the runs of a folder."
        )
    if run.is_dir() and not file.is_file():
        raise ConfigError(f"{run} is not a run folder: it has no {CONFIG_FILE}. Pass a YAML file or runs/NAME.")
    return RunConfig.load(file, overrides or (), trust=trust or (False if run.is_dir() else None))


@contextmanager
def shown_in_terminal(what: str) -> Iterator[None]:
    """Shows slow work of a command, such as the import of torch, in the last row of a terminal, and not in a pipe."""
    with nullcontext() if stderr_terminal() is None else progress(what):
        yield


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a temporary folder, the same on all ranks of one launcher, and deletes it."""
    folder = shared_folder()
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="trainwright-"))
    try:
        yield folder
    finally:
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(folder, ignore_errors=True)


def show_rows(header: Sequence[str], rows: Iterable[Sequence[str]], *, wrapped: Sequence[str] = ()) -> None:
    """Prints rows below their header: a table in a terminal, where only the columns in `wrapped` are wrapped.

    Otherwise each row is one line of any length, for grep and cut.
    """
    listed = [[escape_controls(cell) for cell in row] for row in rows]
    lines = align_columns([header, *listed])
    console = Console(highlight=False)
    # A table that is too wide would be cut, and `file:line` with it.
    is_too_wide = not wrapped and max(map(len, lines)) > console.width
    if not sys.stdout.isatty() or is_too_wide:
        print("\n".join(lines))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(header):
        style = "cyan" if number == 0 else None
        table.add_column(name, style=style, no_wrap=name not in wrapped, overflow="fold")
    for row in listed:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def size_text(num_bytes: float) -> str:
    """Returns a number of bytes in the largest unit of which there is at least one: 1.2 GB."""
    for unit, length in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= length:
            return f"{num_bytes / length:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def age_text(seconds: float) -> str:
    """Returns an age in the largest unit of which there is at least one: 2 hours ago."""
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        number = int(seconds // length)
        if number >= 1:
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"
