"""How a check looks: each finding with its line, the culprit marked, and what to write instead; then a summary.

A place is never wrapped, so that editors and terminals can jump to it; lines are as long as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trainwright.checking.findings import Finding, Findings
from trainwright.loop.user_lines import Place

_CODES = {"error": "1;31", "remark": "1;33", "ok": "1;32", "place": "1", "mark": "1;36", "faint": "2"}
_LONGEST_LINE = 140


@dataclass
class Report:
    """The outcome of a check."""

    findings: Findings
    facts: list[str] = field(default_factory=list)
    """What was seen: the model's size, samples, steps, batch arithmetic."""
    checked: list[str] = field(default_factory=list)
    """What was tried, and went well."""
    skipped: list[str] = field(default_factory=list)
    """What was not tried, for it needs what failed."""

    @property
    def is_ok(self) -> bool:
        """Was no error found? Remarks do not count."""
        return not self.findings.count("error")

    def render(self, *, colour: bool = False) -> str:
        """Returns the whole report as text, with the terminal's colours where asked."""
        paint = COLOURED if colour else PLAIN
        blocks = [_render_finding(each, paint) for each in self.findings]
        return "\n\n".join([*blocks, self._summary(paint)])

    def _summary(self, paint: Painter) -> str:
        errors, remarks = self.findings.count("error"), self.findings.count("remark")
        counts = [_counted(errors, "error")] if errors else []
        counts += [_counted(remarks, "remark")] if remarks else []
        head = paint(", ".join(counts), "error") if errors else ", ".join([paint("ok", "ok"), *counts])
        facts = f": {'; '.join(self.facts)}." if self.facts else "."
        lines = [head + facts]
        if self.checked:
            lines.append(paint(f"Checked: {', '.join(self.checked)}.", "faint"))
        if self.skipped:
            lines.append(paint(f"Not checked, for it needs what failed: {', '.join(self.skipped)}.", "faint"))
        return "\n".join(lines)


class Painter:
    """Gives text the colour of a role, or leaves it plain."""

    def __call__(self, text: str, role: str) -> str:
        """Returns the text as it is."""
        return text


class _Colours(Painter):
    def __call__(self, text: str, role: str) -> str:
        return f"\033[{_CODES[role]}m{text}\033[0m"


PLAIN, COLOURED = Painter(), _Colours()


def _render_finding(finding: Finding, paint: Painter) -> str:
    where = f"{paint(str(finding.place), 'place')}: " if finding.place is not None else ""
    lines = [f"{where}{paint(finding.severity, finding.severity)}: {finding.problem}"]
    if finding.place is not None and finding.place.text.strip():
        lines += _render_source(finding.place, paint)
    if finding.advice:
        lines += [f"  {line}" for line in finding.advice.split("\n")]
    return "\n".join(lines)


def _render_source(place: Place, paint: Painter) -> Iterable[str]:
    """The source line and carets under the culprit; what is far from it in a long line is left out."""
    text = place.text.rstrip().replace("\t", " ")
    indent = len(text) - len(text.lstrip())
    start, stop = place.columns or (indent, len(text))
    start = min(max(start, indent), len(text))
    stop = max(min(stop, len(text)), start + 1)
    cut = indent if stop <= indent + _LONGEST_LINE else max(indent, start - _LONGEST_LINE // 2)
    shown = ("…" if cut > indent else "") + text[cut : cut + _LONGEST_LINE]
    shown += "…" if len(text) > cut + _LONGEST_LINE else ""
    offset = start - cut + (1 if cut > indent else 0)
    gutter = str(place.line) if place.line else ""
    carets = "^" * min(stop - start, len(shown) - offset)
    return [f"  {gutter} | {shown}", f"  {' ' * len(gutter)} | {' ' * offset}{paint(carets, 'mark')}"]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
