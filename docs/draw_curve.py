"""Draws values of metrics.json over steps: `python docs/draw_curve.py metrics.json OUT.svg NAME=LABEL …`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 300, 46, 34, 14, 20
COLORS = ("#1f6feb", "#d9730d", "#2da44e")


def draw(metrics: Path, names: dict[str, str]) -> str:
    """Return the SVG; the values are between 0 and 1."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    last = max(line["step"] for line in lines)

    def place(step: float, value: float) -> str:
        across = LEFT + step / last * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - value * (HEIGHT - BOTTOM - TOP):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for percent in (0, 25, 50, 75, 100):
        (x, y), (end, _) = (place(step, percent / 100).split(",") for step in (0, last))
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#d0d7de"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{float(y) + 4}" text-anchor="end" fill="#57606a">{percent / 100:g}</text>'
        )
    for quarter in range(5):
        x, _ = place(last * quarter / 4, 0).split(",")
        label = f"{last * quarter // 4}"
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="#57606a">{label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle" fill="#57606a">update</text>')
    for number, (name, label) in enumerate(names.items()):
        points = " ".join(place(line["step"], line[name]) for line in lines if line.get(name) is not None)
        color, y = COLORS[number % len(COLORS)], HEIGHT - BOTTOM - 14 - 18 * (len(names) - 1 - number)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(
            f'<line x1="{WIDTH - 250}" y1="{y - 4}" x2="{WIDTH - 226}" y2="{y - 4}" stroke="{color}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{WIDTH - 220}" y="{y}" fill="#24292f">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    source, target, *named = sys.argv[1:]
    pairs = dict(each.partition("=")[::2] for each in named)
    Path(target).write_text(draw(Path(source), pairs), encoding="utf-8")
