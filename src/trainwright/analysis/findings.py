"""Findings of a check: severity, source location, advice, and the text of the report."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainwright.config import Origin, RunConfig
from trainwright.errors import ComponentError, TrainwrightError
from trainwright.safe_text import safe
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import (
    PACKAGE,
    SourceLocation,
    UserFiles,
    find_word,
    line_of_traceback,
    source_line,
)

Severity = Literal["error", "remark"]

_LABEL = re.compile(r"([a-z_]+(?:\.[\w-]+)*): ")
_QUOTED = re.compile(r"""["'`]([^"'`\n]+)["'`]""")
_NEXT_SENTENCE = re.compile(r"(?<=[.?!…]) (?=[A-Z])")
_HINTS = re.compile(r"Did you mean|Known:|Its parameters:")
_COLOURS = {"error": "1;31", "remark": "1;33", "ok": "1;32", "location": "1", "mark": "1;36", "faint": "2"}
_MAX_LINE = 140


class AlreadyReported(Exception):  # noqa: N818 # only ends a stage: the finding has been added before
    """Raised to end a stage whose problem has been added as a finding."""


@dataclass(frozen=True)
class Finding:
    """One problem. `problem` and `advice` are complete sentences; `advice` says what to change."""

    severity: Severity
    problem: str
    advice: str = ""
    location: SourceLocation | None = None


class Findings:
    """All findings in the order of the stages, without duplicates."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Finding] = {}

    def add(self, finding: Finding) -> None:
        """Adds a finding, unless the same problem was found at the same line; an error replaces a remark."""
        key = (str(finding.location), finding.problem)
        if key not in self._found or finding.severity == "error":
            self._found[key] = finding

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def count(self, severity: Severity) -> int:
        """Returns the number of findings of this severity."""
        return sum(finding.severity == severity for finding in self)


@dataclass
class Report:
    """The outcome of a check."""

    findings: Findings
    facts: list[str] = field(default_factory=list)
    """The size of the model, samples, steps, batch arithmetic."""
    checked: list[str] = field(default_factory=list)
    """The stages that were completed."""
    skipped: list[str] = field(default_factory=list)
    """The stages that were not run, because an earlier one failed."""

    @property
    def is_ok(self) -> bool:
        """True if there is no error; remarks do not count."""
        return not self.findings.count("error")

    def render(self, *, colour: bool = False) -> str:
        """Returns the whole report as text, with ANSI colours if requested."""
        text = "\n\n".join([*map(_render_finding, self.findings), self._summary()])
        return text if colour else re.sub(r"\033\[[\d;]*m", "", text)

    def _summary(self) -> str:
        counts = [
            f"{count} {severity}{'' if count == 1 else 's'}"
            for severity in ("error", "remark")
            if (count := self.findings.count(severity))
        ]
        head = ", ".join([_paint("ok", "ok"), *counts]) if self.is_ok else _paint(", ".join(counts), "error")
        separator = ": " if self.is_ok else ". Built: "
        lines = [f"{head}{separator}{'; '.join(self.facts)}." if self.facts else f"{head}."]
        if self.checked:
            lines.append(_paint(f"Checked: {', '.join(self.checked)}.", "faint"))
        if self.skipped:
            reason = "Not checked, because an earlier stage failed"
            lines.append(_paint(f"{reason}: {', '.join(self.skipped)}.", "faint"))
        return "\n".join(lines)


def _paint(text: str, role: str) -> str:
    return f"\033[{_COLOURS[role]}m{text}\033[0m"


def _render_finding(finding: Finding) -> str:
    location = finding.location
    where = "" if location is None else f"{_paint(safe(str(location)), 'location')}: "
    lines = [f"{where}{_paint(finding.severity, finding.severity)}: {safe(finding.problem)}"]
    if location is not None and location.text.strip():
        lines += _render_source(location)
    lines += [f"  {line}" for line in safe(finding.advice).splitlines()]
    return "\n".join(lines)


def _render_source(location: SourceLocation) -> Iterable[str]:
    """Returns the source line and carets below the marked columns; a long line is truncated around them."""
    text = location.text.rstrip().replace("\t", " ")
    indent = len(text) - len(text.lstrip())
    start, stop = location.columns or (indent, len(text))
    start = min(max(start, indent), len(text))
    stop = max(min(stop, len(text)), start + 1)
    cut = indent if stop <= indent + _MAX_LINE else max(indent, start - _MAX_LINE // 2)
    shown = ("…" if cut > indent else "") + text[cut : cut + _MAX_LINE]
    shown += "…" if len(text) > cut + _MAX_LINE else ""
    offset = start - cut + (1 if cut > indent else 0)
    gutter = str(location.line) if location.line else ""
    carets = "^" * min(stop - start, len(shown) - offset)
    return [f"  {gutter} | {shown}", f"  {' ' * len(gutter)} | {' ' * offset}{_paint(carets, 'mark')}"]


@dataclass(frozen=True)
class Case:
    """The shared state of all stages: the config, the files of user code, and the findings."""

    config: RunConfig
    users: UserFiles
    findings: Findings

    def note(self, error: BaseException, *, label: str, location: SourceLocation | None = None) -> None:
        """Adds the finding for an exception.

        `label` is the setting of the component that raised (`model`, `data.train`), and `location` a line that is more
        precise; both are used for exceptions that have no location.
        """
        if not isinstance(error, AlreadyReported):
            self.findings.add(self._explain(error, label, location))

    def add(self, severity: Severity, problem: str, advice: str, location: SourceLocation | None) -> None:
        """Adds a finding."""
        self.findings.add(Finding(severity, problem, advice, location))

    def setting(self, label: str, words: Sequence[str] = ()) -> SourceLocation | None:
        """Returns the line of a setting, with the first of `words` marked, or otherwise its last key."""
        return line_of_setting(self.config.origin(label), [*words, *reversed(label.split("."))])

    def _explain(self, error: BaseException, label: str, location: SourceLocation | None) -> Finding:
        cause = error.__cause__
        if isinstance(error, ComponentError) and cause is not None and not isinstance(cause, TrainwrightError):
            found = line_of_traceback(cause, self.users)
            if found is not None:
                origin = self.config.origin(label)
                at = f" ({origin})" if origin is not None else ""
                return Finding("error", _describe(cause), f"It was reached from {label}{at}.", found)
        if isinstance(error, TrainwrightError):
            return message_finding(error.problem, self._location_of(error, label, location))
        found = line_of_traceback(error, self.users)
        if found is not None:
            return Finding("error", _describe(error), "", found)
        frames = traceback.extract_tb(error.__traceback__)
        raised = f"It was raised in {shown_path(frames[-1].filename)}:{frames[-1].lineno}." if frames else ""
        is_ours = bool(frames) and frames[-1].filename.startswith(PACKAGE)
        if location is not None and not is_ours:  # an internal error does not concern the user's line
            return Finding("error", _describe(error), raised, location)
        found = line_of_setting(self.config.origin(label), [label.rpartition(".")[2]])
        return Finding("error", f"{label}: {_describe(error)}", raised, found)

    def _location_of(
        self, error: TrainwrightError, label: str, fallback: SourceLocation | None
    ) -> SourceLocation | None:
        """Returns the line of the error's own location, of the setting that it names, or of the user code in it."""
        words, where = marked_words(error.problem), error.where
        if not isinstance(where, Origin):
            where = Origin.parse(str(where))
            where = None if where is None else where._replace(file=shown_path(where.file))
        named = self._setting_named(error.problem)
        if where is not None or named is not None:
            return line_of_setting(where or self.config.origin(named or label), words)
        return line_of_traceback(error, self.users) or fallback or self.setting(label, words)

    def _setting_named(self, problem: str) -> str | None:
        """Returns the setting that a message begins with: `data.train: …`, or `early_stopping.metric: …` of a hook."""
        found = _LABEL.match(problem)
        if found is None:
            return None
        head, _, rest = found[1].partition(".")
        if found[1].startswith("data.eval.test") and "test" not in self.config.data.eval:
            return "data.test"
        if head in type(self.config).model_fields:
            return found[1]
        hooks = enumerate(self.config.hooks)
        return next((f"hooks.{number}.{rest}" for number, hook in hooks if hook.type == head), None)


def line_of_setting(origin: Origin | None, words: Iterable[str] = ()) -> SourceLocation | None:
    """Returns the line of a setting, with the first of `words` that it has marked."""
    if origin is None:
        return None
    is_override = not origin.line  # the text of an override is its own source
    text = origin.file.removeprefix("override ") if is_override else source_line(origin.file, origin.line)
    columns = find_word(text, words)
    if columns is None and origin.line == 1:
        text = ""  # the file as a whole: a section that it lacks has no line
    return SourceLocation(origin.file, origin.line, text, columns)


def message_finding(message: str, location: SourceLocation | None) -> Finding:
    """Returns the error of one message: its first sentence is the problem, the others are the advice."""
    problem, *advice = _NEXT_SENTENCE.split(message, maxsplit=1)
    return Finding("error", problem, "".join(advice), location)


def marked_words(message: str) -> list[str]:
    """Returns the words of a message that the user's line may have, most likely first."""
    said = _HINTS.split(message)[0]
    label = _LABEL.match(said)
    path = label[1].split(".") if label else []
    rest = said[label.end() :] if label else said
    return [*_QUOTED.findall(rest), *reversed(path)]


def _describe(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}."
    text = str(error).strip()
    described = f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}."
    return described if described[-1] in ".!?" else f"{described}."
