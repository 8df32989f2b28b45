"""Shows rows: a table where a person looks at a terminal, plain aligned lines where nobody does."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_rows(header: Sequence[str], rows: Iterable[Sequence[str]], *, wrapped: Sequence[str] = ()) -> None:
    """Print the rows under their header. In a terminal only the columns in `wrapped` are broken over lines.

    Plain lines keep one row a line, whatever its length, so that they can be searched and cut.
    """
    listed = [list(row) for row in rows]
    lines = aligned([header, *listed])
    console = Console(highlight=False)
    # A table that is too wide would be cut; whole lines are not, and `file:line` must stay whole.
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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row as a line whose columns stand below each other; the last one is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
