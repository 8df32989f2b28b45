"""Draws docs/images/panel.svg: the panel of a run in a terminal, with made-up values.

python tools/panel_picture.py
"""

import io
import math
import random
from pathlib import Path

from rich.console import Console
from rich.text import Text

from trainwright.config import KeepBest
from trainwright.writers.panel import Panel

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "panel.svg"
COLUMNS, MAX_STEPS, STEP = 120, 5000, 3200


def main() -> None:
    """Fills a panel with the values of a run, and writes it as SVG."""
    noise = random.Random(1)
    panel = Panel("digits-vit", keep_best=KeepBest(metric="valid/loss"), curves={}, saved_step=None)
    for step in range(10, STEP + 1, 10):
        loss = 0.35 + 2 * math.exp(-step / 700) + noise.gauss(0, 0.05)
        line = {"step": step, "loss": loss, "grad_norm": 1.3 + noise.random(), "lr": 1e-3 * (1 - step / MAX_STEPS)}
        line |= {"samples_per_second": 8412.0, "mfu": 0.432}
        evaluated = {}
        if step % 200 == 0:
            evaluated = {"valid/loss": loss + 0.12, "valid/accuracy": 1 - loss / 3}
        seconds = step * 0.11
        panel.add(
            line | evaluated,
            evaluated,
            max_steps=MAX_STEPS,
            seconds=seconds,
            seconds_left=(MAX_STEPS - step) * 0.11,
            saved_step=step // 500 * 500 or None,
        )
    lines = panel.lines(COLUMNS, memory=6.2 * 2**30, phase=None, has_colors=True)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text("step 3000  valid/loss 0.5214  valid/accuracy 0.8671", style="bold"))
    for line_text in lines[:-1]:
        console.print(Text.from_ansi(line_text), no_wrap=True)
    PICTURE.parent.mkdir(exist_ok=True)
    console.save_svg(str(PICTURE), title="trainwright train run.yaml", unique_id="panel")


if __name__ == "__main__":
    main()
