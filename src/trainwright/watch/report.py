"""Writes report.html of a run, a self-contained file, and a text in Markdown for a pull request.

The curves are drawn by the live page's plot.js, and by curves.py for browsers without JavaScript. A run writes its
report when it ends; `trainwright report` writes it at any time.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainwright.config import RunConfig
from trainwright.progress import clock_text, sparkline
from trainwright.safe_text import flat_settings, json_text, safe
from trainwright.watch.listing import EMPTY, FINISHED, METRICS_FILE, RUNNING
from trainwright.watch.run_reader import SYSTEM_PREFIX, RunReader
from trainwright.watch.series import curve_json
from trainwright.writers.curves import curve_svg

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"

_CURVE_BYTES = 400_000
"""The size of all curves; a point takes about 16 bytes, and the smooth curve half as much again."""
_MAX_CURVES = 150
_FIRST = ("loss", "grad_norm", "lr", "samples_per_second", "tokens_per_second", "mfu", "system/device_memory")
_SMOOTHING = 0.02
_IMAGE_BYTES = 200_000  # of all images, before base64
_MAX_SAMPLES = 12  # images, histograms and texts each
_MAX_TEXT = 2000  # characters
_MAX_ROWS = 60  # of a table
_CURVE_COLUMNS = 24  # of the report in Markdown
_HIDDEN = ("name", "project_dir", "output_dir")  # the location of a run


def write_report(folder: Path, to: Path | None = None) -> Path:
    """Writes the report of the run folder `folder`, by default into it, and returns its path."""
    path = to or folder / REPORT_FILE
    replacement = path.with_name(f".{path.name}.writing")
    replacement.write_text(render_html(_read(folder)), encoding="utf-8")
    replacement.replace(path)
    return path


def write_final_report(folder: Path) -> None:
    """Writes the report at the end of a run that has a log; a failure is a warning, because the run has succeeded."""
    if not (folder / METRICS_FILE).exists():
        return
    try:
        write_report(folder)
    except Exception as error:
        logger.warning("%s cannot be written: %s. Run: trainwright report %s", folder / REPORT_FILE, error, folder)


def markdown(folder: Path) -> str:
    """Returns a summary of the run folder `folder` in Markdown: metrics, settings, environment."""
    return render_markdown(_read(folder))


def _read(folder: Path) -> RunReader:
    run = RunReader(folder, folder.resolve().name)
    run.load()
    name = run.raw_settings().get("name")
    if isinstance(name, str):
        run.name = name
    return run


class _Facts:
    """The facts of a run that both forms of the report show."""

    def __init__(self, run: RunReader) -> None:
        self.run = run
        self.summary = run.summary()
        self.described = run.describe()
        self.model, self.environment = run.model(), run.environment()
        self.best_step = run.best_checkpoint()
        seconds = run.system().seconds.last()
        self.seconds = None if seconds is None else seconds[1]
        self.num_restarts = sum(mark["kind"] == "restart" for mark in self.described["marks"])

    @property
    def headline(self) -> str:
        """The state of the run in words."""
        run = self.summary
        step = "no step" if run.step is None else f"step {run.step:,}"
        of = f" of {run.max_steps:,}" if run.max_steps else ""
        has_ended = run.step is not None and run.max_steps is not None and run.step >= run.max_steps
        # A run without checkpoints counts as running for a while after its end.
        state = FINISHED if has_ended and run.state == RUNNING else run.state.rstrip("?")
        state = "no checkpoint" if state == EMPTY else state
        return f"{state}, {step}{of}"

    def metrics(self) -> list[tuple[str, str, str]]:
        """Returns name, last value and best value of each metric; evaluation metrics come first."""
        rows = []
        for each in sorted(self.described["names"], key=lambda each: each["mode"] is None):
            if not each["name"].startswith(SYSTEM_PREFIX) and each["last"]:
                best = "" if not each["best"] else f"{_number_text(each['best'][1])} at {each['best'][0]:,.0f}"
                rows.append((each["name"], _number_text(each["last"][1]), best))
        return rows

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the settings that differ from the defaults, and the others."""
        defaults = flat_settings(RunConfig().to_dict())
        own = {name: value for name, value in self.run.settings().items() if name not in _HIDDEN}
        differs = {name: value for name, value in own.items() if str(defaults.get(name)) != str(value)}
        return differs, {name: value for name, value in own.items() if name not in differs}


def render_markdown(run: RunReader) -> str:
    """Returns the summary in Markdown."""
    facts = _Facts(run)
    lines = [f"### {_code(run.name)}: {facts.headline}", ""]
    notes = []
    if facts.best_step is not None:
        notes.append(f"best checkpoint: step {facts.best_step:,}")
    if facts.seconds is not None:
        notes.append(f"{clock_text(facts.seconds)} of training")
    if facts.model:
        notes.append(f"{_code(facts.model['class'])}, {facts.model['num_parameters']:,} parameters")
    if facts.num_restarts:
        notes.append(f"{facts.num_restarts} restart{'s' * (facts.num_restarts > 1)}")
    if run.anomalies():
        notes.append(f"{len(run.anomalies())} anomal{'ies' if len(run.anomalies()) > 1 else 'y'}")
    lines += [", ".join(notes), ""] if notes else []
    lines += ["| metric | last | best | curve |", "|---|---|---|---|"]
    for name, last, best in facts.metrics()[:_MAX_ROWS]:
        curve = sparkline(run.curve(name).values.tolist(), _CURVE_COLUMNS)
        lines.append(f"| {_code(name)} | {last} | {best} | {curve} |")
    differs, _ = facts.settings()
    lines += ["", "<details><summary>Settings that differ from the defaults</summary>", "", "| setting | value |"]
    lines += ["|---|---|", *(f"| {_code(name)} | {_code(str(value))} |" for name, value in differs.items())]
    lines += ["", "</details>", ""]
    versions = [
        f"{name} {_code(facts.environment[name])}"
        for name in ("device", "torch", "python", "platform")
        if name in facts.environment
    ]
    return "\n".join([*lines, ", ".join(versions)]).rstrip() + "\n"


def render_html(run: RunReader) -> str:
    """Returns the report as one page without external resources."""
    facts = _Facts(run)
    page = files("trainwright.watch") / "page"
    style = (page / "watch.css").read_text("utf-8")
    script = "".join((page / name).read_text("utf-8") for name in ("plot.js", "report.js"))
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:"
    data = _curves_json(facts).replace("<", "\\u003c")  # `</script>` in a name would end the element
    title = _text(run.name)
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="color-scheme" content="light dark"><title>{title}</title><style>{style}</style></head>',
            f'<body><main class="report"><header><h1>{title}</h1>',
            f'<span class="faint">{_text(facts.headline)}</span></header>',
            _tiles(facts),
            _section("Anomalies", "".join(f'<p class="alert">{_text(_anomaly(each))}</p>' for each in run.anomalies())),
            '<div id="tools" class="tools above"></div>',
            _left_out(facts),
            '<div id="plots"></div>',
            f"<noscript>{_static_curves(run, facts)}</noscript>",
            _samples(run),
            '<div class="columns">',
            _card("Metrics", _table(("metric", "last", "best"), facts.metrics()[: 2 * _MAX_ROWS])),
            _settings(facts),
            _card("Checkpoints", _checkpoints(run, facts)),
            _card("Environment", _table((), facts.environment.items())),
            _model(facts),
            "</div>",
            f'</main><script type="application/json" id="data">{data}</script><script>{script}</script></body></html>',
        ]
    )


def _shown_curves(facts: _Facts) -> list[dict[str, Any]]:
    """Returns the curves that the report has room for: losses and evaluation metrics, then the first others."""
    names: list[dict[str, Any]] = facts.described["names"]
    first = sorted(names, key=lambda each: each["mode"] is None and each["name"] not in _FIRST)[:_MAX_CURVES]
    kept = {each["name"] for each in first}
    return [each for each in names if each["name"] in kept]


def _curves_json(facts: _Facts) -> str:
    shown = _shown_curves(facts)
    names = [each["name"] for each in shown]
    known = {safe(name): name for name in facts.run.names()}
    # Short curves leave space for long ones.
    counts = sorted(len(facts.run.curve(known[name]).steps) for name in names)
    room, points = _CURVE_BYTES // 24, 1200
    for number_left, count in zip(range(len(counts), 0, -1), counts, strict=True):
        points = min(points, max(room // number_left, 20))
        room -= min(count, points)
    curves = ",".join(
        f"{json_text(name)}:{curve_json(facts.run.curve(known[name]), points, smoothing=_SMOOTHING)}" for name in names
    )
    described = {**facts.described, "names": shown}
    return f'{{"name":{json_text(facts.run.name)},"described":{json_text(described)},"curves":{{{curves}}}}}'


def _left_out(facts: _Facts) -> str:
    number = len(facts.described["names"])
    if number <= _MAX_CURVES:
        return ""
    return f'<p class="faint">{_MAX_CURVES} of {number:,} curves; <code>trainwright watch</code> shows all.</p>'


def _static_curves(run: RunReader, facts: _Facts) -> str:
    """Returns the losses as SVG for browsers without JavaScript."""
    losses = [each["name"] for each in facts.described["names"] if each["name"].rpartition("/")[2] == "loss"][:6]
    curves = {name: run.curve(name).decimate(800) for name in losses}
    points = {name: list(zip(each.steps.tolist(), each.values.tolist(), strict=True)) for name, each in curves.items()}
    return f'<div class="card">{curve_svg(points, width=1000, height=300)}</div>' if points else ""


def _tiles(facts: _Facts) -> str:
    run, summary = facts.run, facts.summary
    tiles = []
    if summary.loss is not None:
        tiles.append((_number_text(summary.loss), "last loss"))
    best = next((each for each in facts.described["names"] if each["name"] == run.plan().best_metric), None)
    best = best or next((each for each in facts.described["names"] if each["best"]), None)
    if best is not None and best["best"]:
        tiles.append((_number_text(best["best"][1]), f"best {best['name']}, step {best['best'][0]:,.0f}"))
    if facts.seconds is not None:
        tiles.append((clock_text(facts.seconds), "of training"))
    if facts.model:
        tiles.append((f"{facts.model['num_parameters']:,}", "parameters"))
    tiles.append((str(len(run.anomalies())), "anomalies" if len(run.anomalies()) != 1 else "anomaly"))
    tiles.append((str(facts.num_restarts), "restarts" if facts.num_restarts != 1 else "restart"))
    if "device" in facts.environment:
        tiles.append((facts.environment["device"], f"torch {facts.environment.get('torch', '')}"))
    shown = "".join(f'<div class="tile"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for value, name in tiles)
    return f'<div class="tiles">{shown}</div>'


def _samples(run: RunReader) -> str:
    """Returns the last image, histogram and text of each name, within the limits."""
    media, room, cards = run.media(), _IMAGE_BYTES, []
    for name, items in list(media["images"].items())[:_MAX_SAMPLES]:
        item = items[-1]
        content = run.image(item["file"])
        if content is None or len(content) > room:
            continue
        room -= len(content)
        small = ' class="small"' if item["width"] < 160 else ""
        source = base64.b64encode(content).decode()
        picture = f'<img{small} alt="{_text(name)}" src="data:image/png;base64,{source}">'
        cards.append(_card(f"{name}, step {item['step']:,}", picture))
    for name, items in list(media["texts"].items())[:_MAX_SAMPLES]:
        item = items[-1]
        cards.append(_card(f"{name}, step {item['step']:,}", f"<pre>{_text(item['text'][:_MAX_TEXT])}</pre>"))
    for name, items in list(media["histograms"].items())[:_MAX_SAMPLES]:
        cards.append(_card(f"{name}, step {items[-1]['step']:,}", _histogram(items[-1])))
    return _section("Samples", f'<div class="grid media">{"".join(cards)}</div>' if cards else "")


def _histogram(item: Mapping[str, Any]) -> str:
    counts, width = item["counts"], 100 / max(len(item["counts"]), 1)
    highest = max([*counts, 1])
    bars = "".join(
        f'<rect x="{index * width:.2f}" y="{100 - 100 * count / highest:.1f}" width="{width * 0.9:.2f}" '
        f'height="{100 * count / highest:.1f}"/>'
        for index, count in enumerate(counts)
    )
    low, high, mean, deviation = (_number_text(item[name]) for name in ("low", "high", "mean", "deviation"))
    return (
        f'<svg class="bars" viewBox="0 0 100 100" preserveAspectRatio="none" role="img">{bars}</svg>'
        f'<div class="steps apart"><span>{low}</span><span>mean {mean} ± {deviation}</span><span>{high}</span></div>'
    )


def _settings(facts: _Facts) -> str:
    differs, others = facts.settings()
    rest = f"<details><summary>All other settings</summary>{_table((), others.items())}</details>" if others else ""
    return _card("Settings that differ from the defaults", _table((), differs.items()) + rest)


def _checkpoints(run: RunReader, facts: _Facts) -> str:
    rows = []
    for each in run.checkpoints().intact[-_MAX_ROWS:]:
        values = ", ".join(f"{name} {_number_text(value)}" for name, value in list(each.metrics.items())[:4])
        mark = " ★ best" if each.step == facts.best_step else ""
        size = f"{each.size / 1e3:,.1f} kB" if each.size < 1e6 else f"{each.size / 1e6:,.1f} MB"
        rows.append((f"{each.step:,}{mark}", values, size))
    return _table(("step", "metrics", "size"), rows)


def _model(facts: _Facts) -> str:
    model = facts.model
    if not model:
        return ""
    frozen = f", {model['num_frozen']:,} of them frozen" if model["num_frozen"] else ""
    rows = [(name, kind, f"{size:,}") for name, kind, size, _ in model["modules"][:_MAX_ROWS]]
    title = f"<p><b>{_text(model['class'])}</b>: {model['num_parameters']:,} parameters{frozen}</p>"
    return _card("Model", title + _table(("module", "class", "parameters"), rows))


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f'<th scope="col">{_text(each)}</th>' for each in header)
    body = "".join(f"<tr>{''.join(f'<td>{_text(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return '<p class="faint">none</p>'
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _card(title: str, content: str) -> str:
    return f'<section class="card"><h3>{_text(title)}</h3>{content}</section>'


def _section(title: str, content: str) -> str:
    return f'<h2 class="part">{_text(title)}</h2>{content}' if content else ""


def _anomaly(each: Mapping[str, Any]) -> str:
    return each["message"] or f"{each['kind']} at step {each['step']:,}"


def _number_text(value: float | None) -> str:
    """Returns a number with four digits; counts in full.

    >>> _number_text(0.123456), _number_text(38400.0), _number_text(float("nan"))
    ('0.1235', '38,400', 'nan')
    """
    if value is None or not math.isfinite(value):
        return "nan" if value is None else str(value)
    return f"{int(value):,}" if abs(value) < 1e15 and value == int(value) else f"{value:.4g}"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _text(value: str) -> str:
    return escape(safe(value))


def _code(text: str) -> str:
    """Returns text as a code span in a Markdown table, which disables all other markup."""
    return "`" + safe(text).replace("`", "'").replace("|", "\\|").replace("\n", " ")[:300] + "`"
