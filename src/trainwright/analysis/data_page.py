"""Renders the report of analysis/data.py as lines, at most as wide as the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from trainwright.analysis.data import Batch, DataReport, DataSet, DataUse, Lengths, Mixture, Sample, TokenCounts, Values
from trainwright.safe_text import safe

MIN_WIDTH, MAX_WIDTH = 40, 120

_TEXT_LINES = 3
_CHAT_LINES = 12
_STYLES = {True: "bold green", False: "dim"}  # of tokens that are labels, and of others
_NAME_WIDTH = 20
_BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MARGIN, _INDENT = "  ", "    "
_SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_MISSING = "–"


def render(report: DataReport, *, width: int) -> list[Text]:
    """Returns the lines of a report."""
    page = _Page(max(MIN_WIDTH, min(width, MAX_WIDTH)))
    if report.makes_batches:
        page.add_remarks(["There is no training dataset: next_train_inputs makes the batches."])
    if not report.sets:
        return page.lines
    first, *others = report.sets
    page.add_set(first)
    if others:
        page.add_others(others)
    page.add_remarks(first.remarks)
    return page.lines


def number(value: float | None) -> str:
    """Returns a number for a reader: 12,345; 0.3063; 1.2e-07; a dash for None."""
    if value is None:
        return _MISSING
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


def percent(fraction: float | None) -> str:
    """Returns a fraction in percent; only 0 and 1 are shown as 0 % and 100 %."""
    if fraction is None:
        return _MISSING
    if 0 < fraction < 0.0005:
        return "< 0.1 %"
    if 0.9995 < fraction < 1:
        return "> 99.9 %"
    return f"{100 * fraction:.0f} %" if fraction in (0, 1) else f"{100 * fraction:.1f} %"


def visible(text: str) -> str:
    """Returns a text on one line, with symbols for newlines and tabs and a dot for other control characters."""
    return "".join(_SIGNS.get(one, one if one.isprintable() else "·") for one in text)


def cut(text: str, width: int) -> str:
    """Returns a text of at most this many columns."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, max(width - 1, 0)).rstrip()}…"


def fold(text: str, width: int, *, most: int) -> list[str]:
    """Returns a text in lines of this many columns; the last of `most` lines is truncated."""
    lines: list[str] = []
    while text and len(lines) < most - 1:
        end = min(len(text), width)
        while cell_len(text[:end]) > width:
            end -= 1
        end = max(end, 1)
        lines.append(text[:end])
        text = text[end:]
    return [*lines, cut(text, width)] if text else lines


def style_runs(runs: Sequence[tuple[str, bool]], width: int) -> list[list[tuple[str, str]]]:
    """Returns the text of tokens in lines of this many columns, with labels highlighted."""
    shown = [(visible(text), is_label) for text, is_label in runs]
    labels = iter([is_label for text, is_label in shown for _ in text])
    lines = []
    for line in fold("".join(text for text, _ in shown), width, most=_CHAT_LINES):
        styled = groupby(zip(line, labels, strict=False), itemgetter(1))
        lines.append([("".join(one for one, _ in run), _STYLES[is_label]) for is_label, run in styled])
    return lines


class _Page:
    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[Text] = []

    def add_set(self, one: DataSet) -> None:
        """Adds a set in full."""
        self._push((one.name, "bold"), (f"  {one.label}", "dim"))
        facts = [("what", one.nest.describe()), ("samples", _size(one))]
        if one.fill is not None:
            facts.append(("filled", f"{percent(one.fill)} of all positions hold a token"))
        if one.tokens is not None:
            facts.append(("tokens", _tokens(one.tokens)))
        if one.plan is not None:
            facts.append(("this run", _plan(one.plan, one.tokens)))
        self._facts(facts)
        if one.mixture is not None:
            self._add_mixture(one.mixture)
        if one.samples:
            self._add_samples(one)
        if one.batch is not None:
            self._add_batch(one.batch)
        elif one.error is not None:
            self._head("first batch", "the collator fails; the error is below")
        if one.lengths is not None:
            self._add_lengths(one.lengths)

    def add_others(self, sets: Sequence[DataSet]) -> None:
        """Adds the other sets, one per line."""
        self._head("other sets", "--set NAME shows one of them in full")
        rows = []
        for one in sets:
            if one.error is not None:
                rows.append((one.name, _MISSING, _MISSING, f"cannot be read: {one.error}"))
                continue
            has_tokens = one.tokens is not None and one.tokens.per_epoch is not None
            tokens = f"{_sign(one.tokens)}{one.tokens.per_epoch:,}" if one.tokens and has_tokens else _MISSING
            rows.append((one.name, _size(one), tokens, one.nest.describe()))
        self._table(("set", "samples", "tokens", "what"), rows, right=(1, 2))

    def add_remarks(self, remarks: Sequence[str]) -> None:
        """Adds the remarks, wrapped."""
        if remarks:
            self._head("remarks")
        for remark in remarks:
            for count, line in enumerate(_wrap(remark, self.width - 4)):
                self._push(f"{_MARGIN}{'  ' if count else '! '}", (line, "yellow"))

    def _add_mixture(self, mixture: Mixture) -> None:
        counted = mixture.positions
        self._head("mixture", f"shares of the first {counted:,} positions" if counted else "shares by weight or size")
        rows = []
        for each in mixture.sources:
            samples = "a stream" if each.samples is None else number(each.samples)
            epochs = _MISSING if each.epochs is None else f"{each.epochs:.2f}"
            rows.append((each.name, samples, number(each.weight), percent(each.share), epochs))
        self._table(("source", "samples", "weight", "share", "epochs in the run"), rows, right=(1, 2, 3, 4))

    def _add_samples(self, one: DataSet) -> None:
        is_train = one.plan is not None or one.name == "train"
        self._head("samples", "in training order" if is_train else "in their order")
        names = [field.name for sample in one.samples for field in sample.fields]
        column = min(max(map(cell_len, names)), _NAME_WIDTH)
        for sample in one.samples:
            source = "" if sample.source is None else f" of {sample.source}"
            row = "" if sample.row is None else f", row {sample.row:,}{source}"
            self._push(f"{_MARGIN}position {number(sample.position)}", (row, "dim"))
            for field in sample.fields:
                self._add_field(field, column)
        self._add_drawings(one.samples)

    def _add_field(self, field: Values, column: int) -> None:
        description, text = _describe(field)
        room = self.width - len(_INDENT) - column - 2
        shown = style_runs(field.runs, room) if field.runs else None
        if shown is None:
            folded = fold(visible(text), room, most=_TEXT_LINES) if text else []
            shown = [[(line, "green")] for line in folded]
        lines = [*([[(cut(description, room), "")]] if description else []), *shown]
        for count, line in enumerate(lines or [[(_MISSING, "")]]):
            name = "" if count else cut(field.name, column)
            self._push(_INDENT, (set_cell_size(name, column), "cyan"), "  ", *line)

    def _add_drawings(self, samples: Sequence[Sample]) -> None:
        """Draws small images next to each other, as many as fit."""
        drawings: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
        for sample in samples:
            for field in sample.fields:
                if field.drawing:
                    drawings.setdefault(field.name, []).append((sample.position, field.drawing))
        for drawn in drawings.values():
            columns = max(len(lines[0]) for _, lines in drawn)
            drawn = drawn[: max(1, (self.width - len(_INDENT)) // (columns + 3))]
            titles = "   ".join(f"{f'position {position:,}':<{columns}.{columns}}" for position, _ in drawn)
            self._push()
            self._push(_INDENT, (titles, "dim"))
            for row in range(max(len(lines) for _, lines in drawn)):
                cells = [lines[row] if row < len(lines) else "" for _, lines in drawn]
                self._push(_INDENT, "   ".join(f"{cell:<{columns}}" for cell in cells))

    def _add_batch(self, batch: Batch) -> None:
        of_rank = f" of rank {batch.rank} of {batch.num_ranks}" if batch.num_ranks > 1 else ""
        micro = batch.micro_batch_size
        micro_batches = f", in micro-batches of {micro}" if micro is not None and micro < batch.samples else ""
        self._head("first batch", f"{batch.samples:,} samples{of_rank}{micro_batches}")
        rows = []
        for field in batch.fields:
            shape = _MISSING if field.shape is None else _shape(field.shape)
            values = [number(each) for each in (field.minimum, field.mean, field.maximum)]
            rows.append((field.name, shape, field.type, field.device or _MISSING, *values))
        self._table(("field", "shape", "dtype", "device", "min", "mean", "max"), rows, right=(4, 5, 6))
        facts = []
        if batch.padding is not None:
            by = {"labels": "labels: -100 up to the end of a row"}.get(batch.padding_by or "", batch.padding_by)
            facts.append(("padding", f"{percent(batch.padding)} of its positions (by {by})"))
        if batch.in_loss is not None:
            facts.append(("in the loss", f"{percent(batch.in_loss)} of its positions (labels other than -100)"))
        if facts:
            self._push()
            self._facts(facts)
        if batch.first_row:
            self._push()
            self._push(f"{_MARGIN}its first row, without padding")
        for field in batch.first_row:
            self._add_field(field, max(len(each.name) for each in batch.first_row))

    def _add_lengths(self, lengths: Lengths) -> None:
        counted = "all samples" if lengths.is_whole else f"the first {lengths.samples:,} samples"
        self._head("lengths", f"{lengths.unit}, {counted}")
        if not lengths.bars:
            self._push(f"{_MARGIN}All are {lengths.minimum:,}.")
            return
        quantiles = f"median {lengths.median:,}   95 % ≤ {lengths.p95:,}"
        self._push(f"{_MARGIN}min {lengths.minimum:,}   {quantiles}   max {lengths.maximum:,}")
        digits = max(len(f"{bar.last:,}") for bar in lengths.bars)
        is_narrow = all(bar.first == bar.last for bar in lengths.bars)
        most = max(bar.samples for bar in lengths.bars)
        counts = len(f"{most:,}")
        room = max(4, min(_BAR_WIDTH, self.width - 2 * digits - counts - 11))
        for bar in lengths.bars:
            reach = f" – {bar.last:>{digits},}" if bar.last > bar.first else "" if is_narrow else " " * (digits + 3)
            # To an eighth of a character; a bar of one sample is visible.
            eighths = max(round(bar.samples / most * room * 8), 1 if bar.samples else 0)
            drawn = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
            label = (f"{_MARGIN}{bar.first:>{digits},}{reach}  ", "dim")
            self._push(label, (f"{drawn:<{room}}", "cyan"), f"  {bar.samples:>{counts},}")

    def _head(self, title: str, remark: str = "") -> None:
        self._push()
        self._push((title, "bold"), (f"  {remark}", "dim"))

    def _facts(self, facts: Sequence[tuple[str, str]]) -> None:
        column = max(len(name) for name, _ in facts)
        for name, text in facts:
            for count, line in enumerate(_wrap(text, self.width - column - 4)):
                self._push(_MARGIN, (f"{'' if count else name:<{column}}", "cyan"), f"  {line}")

    def _table(self, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> None:
        widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
        widths[0] = min(widths[0], max(self.width // 3, 8))
        for count, row in enumerate([header, *rows]):
            cells: list[str | tuple[str, str]] = []
            for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
                shown = cut(visible(cell), width)
                padding = " " * (width - cell_len(shown))
                style = "dim" if count == 0 else "cyan" if column == 0 else ""
                cells += [(padding + shown if column in right else shown + padding, style), "  "]
            self._push(_MARGIN, *cells)

    def _push(self, *parts: str | tuple[str, str]) -> None:
        line = Text.assemble(*(safe(each) if isinstance(each, str) else (safe(each[0]), each[1]) for each in parts))
        line.rstrip()
        line.truncate(self.width, overflow="ellipsis")
        self.lines.append(line)


def _size(one: DataSet) -> str:
    if one.num_samples is None:
        return "a stream"
    split = one.split
    part = "" if split is None else f" ({percent(split.samples / split.whole)} of {number(split.whole)})"
    return f"{number(one.num_samples)}{part}"


def _sign(tokens: TokenCounts) -> str:
    return "≈ " if tokens.is_estimate else ""


def _tokens(tokens: TokenCounts) -> str:
    per_epoch = "" if tokens.per_epoch is None else f"{tokens.per_epoch:,} an epoch, "
    why = ", estimated from the samples read" if tokens.is_estimate else ""
    return f"{_sign(tokens)}{per_epoch}{number(round(tokens.per_sample, 1))} a sample{why}"


def _plan(plan: DataUse, tokens: TokenCounts | None) -> str:
    epochs = "" if plan.epochs is None else f", {plan.epochs:.2f} epochs"
    total = "" if tokens is None else f", {_sign(tokens)}{round(tokens.per_sample * plan.samples):,} tokens"
    return f"{plan.steps:,} steps, {plan.samples:,} samples{epochs}{total}"


def _describe(field: Values) -> tuple[str, str]:
    """Returns a description of a field, and its text."""
    if field.is_tokens:
        return f"{_shape(field.shape or ())} tokens, {_range(field)}", field.text or field.ids or ""
    typed = f"{field.type}  {_shape(field.shape or ())}  {_range(field)}"
    if field.num_ignored is not None:
        what = "as input_ids" if field.is_as_input_ids else typed
        if not field.num_ignored:
            return f"{what}, none is -100", field.text or ""
        verb = "is" if field.num_ignored == 1 else "are"
        total = math.prod(field.shape or ())
        used = "; the others are:" if field.text else ""
        return f"{what}, {field.num_ignored:,} of {total:,} {verb} -100{used}", field.text or ""
    if field.shape:
        return typed, ""
    if field.shape == ():
        return f"{field.text}  ({field.type})", ""
    return "" if field.type == "str" else f"a {field.type}", field.text or ""


def _range(field: Values) -> str:
    if field.minimum is None or field.maximum is None:
        return ""
    limits = f"{number(field.minimum)} … {number(field.maximum)}"
    is_discrete = field.is_tokens or field.num_ignored is not None
    return limits if is_discrete else f"{limits}, mean {number(field.mean)}"


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "one"


def _wrap(text: str, width: int) -> Iterator[str]:
    """Yields a text in lines that end at spaces."""
    line = ""
    for word in visible(text).split(" "):
        grown = f"{line} {word}" if line else word
        if line and cell_len(grown) > width:
            yield line
            grown = word
        line = grown
    yield line
