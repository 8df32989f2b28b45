"""Writes what analysis/data.py found as plain lines, at most as wide as the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from trainwright.analysis.data import Batch, DataReport, DataSet, DataUse, Lengths, Mixture, Sample, TokenCounts, Values

NARROWEST = 40
WIDEST = 120
"""Longer lines are hard to read; texts are wrapped here."""

_TEXT_LINES = 3
_NAME_WIDTH = 20
_BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MARGIN, _INDENT = "  ", "    "
_SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def render(look: DataReport, *, width: int) -> list[Text]:
    """Returns the lines."""
    page = _Page(max(NARROWEST, min(width, WIDEST)))
    first, *others = look.sets
    page.add_set(first)
    if others:
        page.add_others(others)
    page.add_remarks(first.remarks)
    return page.lines


def number(value: float) -> str:
    """Returns a number as a person writes it: 12,345; 0.3063; 1.2e-07."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """Returns a share in percent; what is not quite nothing or all does not look like it."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 < share < 1:
        return "> 99.9 %"
    return f"{100 * share:.0f} %" if share in (0, 1) else f"{100 * share:.1f} %"


def visible(text: str) -> str:
    """Returns a text on one line, with signs for breaks and tabs and a dot for what cannot be shown."""
    return "".join(_SIGNS.get(one, one if one.isprintable() else "·") for one in text)


def cut(text: str, width: int) -> str:
    """Returns a text that takes at most so many columns."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, max(width - 1, 0)).rstrip()}…"


def fold(text: str, width: int, *, most: int) -> list[str]:
    """Returns a text in lines of so many columns, cut after `most` of them."""
    lines: list[str] = []
    rest = text
    while rest and len(lines) < most:
        if len(lines) == most - 1:
            lines.append(cut(rest, width))
            break
        end = min(len(rest), width)
        while cell_len(rest[:end]) > width:
            end -= 1
        lines.append(rest[: max(end, 1)])
        rest = rest[max(end, 1) :]
    return lines


class _Page:
    """The lines so far."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[Text] = []

    def add_set(self, one: DataSet) -> None:
        """Writes all that was seen of a set."""
        self._head(one.name, one.label, is_first=True)
        self._facts(_facts_of(one))
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
        """Writes the other sets, a line each."""
        self._head("other sets", "--set NAME shows one of them in full")
        rows = []
        for one in sets:
            if one.error is not None:
                rows.append((one.name, "–", "–", f"cannot be read: {one.error}"))
                continue
            tokens = "–" if one.tokens is None else _short_tokens(one.tokens)
            rows.append((one.name, _size(one), tokens, one.nest.describe()))
        self._table(("set", "samples", "tokens", "what"), rows, right=(1, 2))

    def add_remarks(self, remarks: Sequence[str]) -> None:
        """Writes the remarks, each wrapped."""
        if not remarks:
            return
        self._head("remarks")
        for remark in remarks:
            for count, line in enumerate(_wrap(remark, self.width - 4)):
                self._line(f"{_MARGIN}{'! ' if count == 0 else '  '}", line, style="yellow")

    def _add_mixture(self, mixture: Mixture) -> None:
        counted = mixture.positions
        self._head("mixture", f"shares of the first {counted:,} positions" if counted else "shares by weight or size")
        rows = [
            (
                each.name,
                "a stream" if each.samples is None else number(each.samples),
                "–" if each.weight is None else number(each.weight),
                "–" if each.share is None else percent(each.share),
                "–" if each.epochs is None else f"{each.epochs:.2f}",
            )
            for each in mixture.sources
        ]
        self._table(("source", "samples", "weight", "share", "epochs in the run"), rows, right=(1, 2, 3, 4))

    def _add_samples(self, one: DataSet) -> None:
        order = "in the order of training" if one.plan is not None or one.name == "train" else "in their order"
        self._head("samples", order)
        names = [field.name for sample in one.samples for field in sample.fields]
        column = min(max(map(cell_len, names)), _NAME_WIDTH)
        for sample in one.samples:
            self._line(_MARGIN, f"position {number(sample.position)}", rest=_place(sample))
            for field in sample.fields:
                self._add_field(field, column)
        self._add_drawings(one.samples)

    def _add_field(self, field: Values, column: int) -> None:
        what, text = _words(field)
        room = self.width - len(_INDENT) - column - 2
        folded = fold(visible(text), room, most=_TEXT_LINES) if text else []
        parts = [*([(what, "")] if what else []), *((line, "green") for line in folded)]
        for count, (line, style) in enumerate(parts or [("–", "")]):
            name = cut(field.name, column) if count == 0 else ""
            self._field_line(name, column, cut(line, room), style)

    def _field_line(self, name: str, column: int, words: str, style: str) -> None:
        line = Text(_INDENT)
        line.append(set_cell_size(name, column), style="cyan")
        line.append("  ")
        line.append(words, style=style)
        self._push(line)

    def _add_drawings(self, samples: Sequence[Sample]) -> None:
        """Draws small images beside each other, as many as there is room for."""
        names = dict.fromkeys(field.name for sample in samples for field in sample.fields if field.drawing)
        for name in names:
            drawn = [
                (sample.position, field.drawing)
                for sample in samples
                for field in sample.fields
                if field.name == name and field.drawing
            ]
            columns = max(len(lines[0]) for _, lines in drawn)
            drawn = drawn[: max(1, (self.width - len(_INDENT)) // (columns + 3))]
            self._push(Text())
            titles = "   ".join(f"{f'position {position:,}':<{columns}.{columns}}" for position, _ in drawn)
            self._line(_INDENT, titles, style="dim")
            for row in range(max(len(lines) for _, lines in drawn)):
                cells = [lines[row] if row < len(lines) else "" for _, lines in drawn]
                self._line(_INDENT, "   ".join(f"{cell:<{columns}}" for cell in cells))

    def _add_batch(self, batch: Batch) -> None:
        of_rank = f" of rank {batch.rank} of {batch.num_ranks}" if batch.num_ranks > 1 else ""
        micro = batch.micro_batch_size
        micro_batches = f", in micro-batches of {micro}" if micro is not None and micro < batch.samples else ""
        self._head("first batch", f"{batch.samples:,} samples{of_rank}{micro_batches}")
        rows = [
            (
                field.name,
                "–" if field.shape is None else _shape(field.shape),
                field.type,
                field.device or "–",
                *("–" if each is None else number(each) for each in (field.minimum, field.mean, field.maximum)),
            )
            for field in batch.fields
        ]
        self._table(("field", "shape", "dtype", "device", "min", "mean", "max"), rows, right=(4, 5, 6))
        facts = []
        if batch.padding is not None:
            by = {"labels": "labels: -100 up to the end of a row"}.get(batch.padding_by or "", batch.padding_by)
            facts.append(("padding", f"{percent(batch.padding)} of its places (by {by})"))
        if batch.in_loss is not None:
            facts.append(("in the loss", f"{percent(batch.in_loss)} of its places (labels other than -100)"))
        if facts:
            self._push(Text())
            self._facts(facts)
        if batch.first_row:
            self._push(Text())
            self._line(_MARGIN, "its first row, without padding")
            for field in batch.first_row:
                self._add_field(field, max(len(each.name) for each in batch.first_row))

    def _add_lengths(self, lengths: Lengths) -> None:
        counted = "all samples" if lengths.is_whole else f"the first {lengths.samples:,} samples"
        self._head("lengths", f"{lengths.unit}, {counted}")
        if not lengths.bars:
            self._line(_MARGIN, f"All are {lengths.minimum:,}.")
            return
        middle = (
            f"min {lengths.minimum:,}   median {lengths.median:,}   95 % ≤ {lengths.p95:,}   max {lengths.maximum:,}"
        )
        self._line(_MARGIN, middle)
        digits = max(len(f"{bar.last:,}") for bar in lengths.bars)
        is_narrow = all(bar.first == bar.last for bar in lengths.bars)
        most = max(bar.samples for bar in lengths.bars)
        counts = len(f"{most:,}")
        room = max(4, min(_BAR_WIDTH, self.width - 2 * digits - counts - 11))
        for bar in lengths.bars:
            reach = f" – {bar.last:>{digits},}" if bar.last > bar.first else "" if is_narrow else " " * (digits + 3)
            line = Text(f"{_MARGIN}{bar.first:>{digits},}{reach}  ", style="dim")
            line.append(f"{_bar(bar.samples / most, room):<{room}}", style="cyan not dim")
            line.append(f"  {bar.samples:>{counts},}", style="not dim")
            self._push(line)

    # how lines are made

    def _head(self, title: str, remark: str = "", *, is_first: bool = False) -> None:
        if not is_first:
            self._push(Text())
        line = Text(title, style="bold")
        if remark:
            line.append(f"  {remark}", style="dim not bold")
        self._push(line)

    def _facts(self, facts: Sequence[tuple[str, str]]) -> None:
        column = max(len(name) for name, _ in facts)
        for name, words in facts:
            for count, line in enumerate(_wrap(words, self.width - column - 4)):
                text = Text(_MARGIN)
                text.append(f"{name if count == 0 else '':<{column}}", style="cyan")
                text.append(f"  {line}")
                self._push(text)

    def _table(self, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> None:
        widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
        widths[0] = min(widths[0], max(self.width // 3, 8))
        for count, row in enumerate([header, *rows]):
            line = Text(_MARGIN)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
                shown = cut(visible(cell), width)
                padding = " " * (width - cell_len(shown))
                style = "dim" if count == 0 else "cyan" if place == 0 else ""
                line.append(padding + shown if place in right else shown + padding, style=style)
                line.append("  ")
            self._push(line)

    def _line(self, lead: str, words: str, *, style: str = "", rest: str = "") -> None:
        line = Text(lead)
        line.append(words, style=style)
        line.append(rest, style="dim")
        self._push(line)

    def _push(self, line: Text) -> None:
        line.rstrip()
        line.truncate(self.width, overflow="ellipsis")
        self.lines.append(line)


def _facts_of(one: DataSet) -> list[tuple[str, str]]:
    facts = [("what", one.nest.describe()), ("samples", _size(one))]
    if one.fill is not None:
        facts.append(("filled", f"{percent(one.fill)} of all places hold a token"))
    if one.tokens is not None:
        facts.append(("tokens", _tokens(one.tokens)))
    if one.plan is not None:
        facts.append(("this run", _plan(one.plan, one.tokens)))
    return facts


def _size(one: DataSet) -> str:
    if one.num_samples is None:
        return "a stream"
    if one.split is None:
        return number(one.num_samples)
    return f"{number(one.num_samples)} ({percent(one.split.samples / one.split.whole)} of {number(one.split.whole)})"


def _tokens(tokens: TokenCounts) -> str:
    sign = "≈ " if tokens.is_estimate else ""
    why = ", estimated from the samples looked at" if tokens.is_estimate else ""
    each = f"{number(round(tokens.per_sample, 1))} a sample"
    if tokens.per_epoch is None:
        return f"{sign}{each}{why}"
    return f"{sign}{tokens.per_epoch:,} an epoch, {each}{why}"


def _short_tokens(tokens: TokenCounts) -> str:
    if tokens.per_epoch is None:
        return "–"
    return f"{'≈ ' if tokens.is_estimate else ''}{tokens.per_epoch:,}"


def _plan(plan: DataUse, tokens: TokenCounts | None) -> str:
    words = f"{plan.steps:,} steps, {plan.samples:,} samples"
    if plan.epochs is not None:
        words += f", {plan.epochs:.2f} epochs"
    if tokens is not None:
        sign = "≈ " if tokens.is_estimate else ""
        words += f", {sign}{round(tokens.per_sample * plan.samples):,} tokens"
    return words


def _place(sample: Sample) -> str:
    if sample.row is None:
        return ""
    return f", row {sample.row:,}" if sample.source is None else f", row {sample.row:,} of {sample.source}"


def _words(field: Values) -> tuple[str, str]:
    """Returns what a field is, and the text in it."""
    if field.is_tokens:
        return f"{_shape(field.shape or ())} tokens, {_range(field)}", field.text or field.ids or ""
    if field.num_ignored is not None:
        return _label_words(field), field.text or ""
    if field.shape:
        return f"{field.type}  {_shape(field.shape)}  {_range(field)}", ""
    if field.shape == ():
        return f"{field.text}  ({field.type})", ""
    return "" if field.type == "str" else f"a {field.type}", field.text or ""


def _label_words(field: Values) -> str:
    total = math.prod(field.shape or ())
    what = "as input_ids" if field.is_as_input_ids else f"{field.type}  {_shape(field.shape or ())}  {_range(field)}"
    if not field.num_ignored:
        return f"{what}, none is -100"
    verb = "is" if field.num_ignored == 1 else "are"
    return f"{what}, {field.num_ignored:,} of {total:,} {verb} -100{'; learnt is:' if field.text else ''}"


def _range(field: Values) -> str:
    if field.minimum is None or field.maximum is None or field.mean is None:
        return ""
    words = f"{number(field.minimum)} … {number(field.maximum)}"
    return words if field.is_tokens or field.num_ignored is not None else f"{words}, mean {number(field.mean)}"


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "one"


def _bar(share: float, room: int) -> str:
    """Returns a bar to an eighth of a character; what is there at all can be seen."""
    eighths = max(round(share * room * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _wrap(text: str, width: int) -> Iterator[str]:
    """Yields a text in lines broken at spaces."""
    line = ""
    for word in visible(text).split(" "):
        grown = f"{line} {word}" if line else word
        if line and cell_len(grown) > width:
            yield line
            grown = word
        line = grown
    yield line
