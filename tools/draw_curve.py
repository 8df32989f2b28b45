"""Draws metrics of runs as an SVG, for the pages on recipes: `python tools/draw_curve.py OUT.svg RUN PANEL …`.

RUN is a run folder. A panel is a list of metrics, such as `loss,valid/loss`. The picture is readable on light and dark
pages.
"""

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT = 380, 230  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 38, 34  # the margins of its plot
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #57606a; }
.grid { stroke: #d0d7de; stroke-width: 1; }
path { fill: none; stroke-width: 2; stroke-linejoin: round; }
.s0 { stroke: #0969da; } .s1 { stroke: #bc4c00; } .s2 { stroke: #1a7f37; }
.t0 { fill: #0969da; } .t1 { fill: #bc4c00; } .t2 { fill: #1a7f37; }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1; } .grid { stroke: #3d444d; }
  .s0 { stroke: #58a6ff; } .s1 { stroke: #f0883e; } .s2 { stroke: #3fb950; }
  .t0 { fill: #58a6ff; } .t1 { fill: #f0883e; } .t2 { fill: #3fb950; }
}"""


def read_points(run: str, metric: str) -> list[tuple[int, float]]:
    """Returns (step, value) of each line of the run that has the metric."""
    lines = map(json.loads, (Path(run) / "metrics.json").read_text("utf-8").splitlines())
    points = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]
    if not points:
        raise SystemExit(f"{run} has no metric {metric}")
    return points


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns round numbers from `low` to `high`, about `count` of them."""
    rough = (high - low or 1.0) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def draw_panel(series: dict[str, list[tuple[int, float]]], offset: int) -> list[str]:
    """Returns the elements of one panel; `series` maps names to points."""
    values = [value for points in series.values() for _, value in points]
    low, high = min(values), max(values)
    room = 0.05 * (high - low or 1.0)
    low, high = low - room, high + room
    last = max(step for points in series.values() for step, _ in points)

    def x(step: float) -> float:
        return offset + LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    left, right = x(0), x(last)
    drawn = []
    for tick in ticks(low, high):
        drawn.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        drawn.append(f'<text x="{left - 6:.1f}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(0, last):
        drawn.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    drawn.append(f'<text x="{right:.1f}" y="{HEIGHT - 3}" text-anchor="end">step</text>')
    label = left
    for number, (name, points) in enumerate(series.items()):
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        drawn.append(f'<path class="s{number}" d="M{path}"/>')
        drawn.append(f'<text class="t{number}" x="{label:.1f}" y="20">{name}</text>')
        label += 16 + 6.6 * len(name)
    return drawn


def draw(target: str, run: str, panels: list[str]) -> None:
    """Writes the picture."""
    drawn: list[str] = []
    for number, panel in enumerate(panels):
        drawn += draw_panel({name: read_points(run, name) for name in panel.split(",")}, number * WIDTH)
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}"'
    body = "\n".join(drawn)
    text = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{STYLE}\n</style>\n{body}\n</svg>\n'
    Path(target).write_text(text, "utf-8")


if __name__ == "__main__":
    draw(sys.argv[1], sys.argv[2], sys.argv[3:])
