"""Draws docs/images/panel.svg: the terminal in which examples/digits_vit is trained, after two thirds of its steps.

python -m tools.panel_picture
"""

import io
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text
from tests.terminals import Terminal, command

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "panel.svg"
COLUMNS, ROWS = 112, 20
COLORS = {"brown": "yellow", "default": ""}
"""The names of colors in rich that differ from those in pyte."""


def main() -> None:
    """Trains in a terminal until two thirds of the steps are shown, and writes its rows as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["output_dir=runs", "log.every_steps=10", "evaluation.every_steps=50", "checkpoint.every_steps=100"]
        run = ROOT / "examples" / "digits_vit" / "run.yaml"
        terminal = command("train", run, *settings, cwd=folder, columns=COLUMNS, rows=ROWS)
        terminal.wait_until(lambda shown: any(int(share) >= 66 for share in re.findall(r"(\d+)%", shown)))
        rows = styled_rows(terminal)
        terminal.type("\x03")
        terminal.wait()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for row in rows:
        console.print(row, no_wrap=True, overflow="crop")
    svg = console.export_svg(title="trainwright train run.yaml", unique_id="panel")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no resource of another site
    PICTURE.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", "utf-8")


def styled_rows(terminal: Terminal) -> list[Text]:
    """Returns the rows of the screen with their colors; empty rows at the end are left out."""
    screen, rows = terminal.screen, []
    for number in range(screen.lines):
        row = Text()
        for column in range(screen.columns):
            cell = screen.buffer[number][column]
            style = f"{'bold ' if cell.bold else ''}{COLORS.get(cell.fg, cell.fg)}".strip()
            row.append(cell.data, style=style or None)
        row.rstrip()
        rows.append(row)
    while rows and not rows[-1].plain:
        rows.pop()
    return rows


if __name__ == "__main__":
    main()
