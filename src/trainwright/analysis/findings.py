"""Findings of a check: severity, source location, what to write instead, and how a report of them looks."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from trainwright.config import Origin, RunConfig
from trainwright.errors import ComponentError, TrainwrightError
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import PACKAGE, SourceLocation, UserFiles, characters, of_instruction, source_line

Severity = Literal["error", "remark"]


class AlreadyReported(Exception):  # noqa: N818 # nobody meets it: it ends a stage whose finding is noted
    """Raised where going on makes no sense, because what would fail next has been noted in better words."""


@dataclass(frozen=True)
class Finding:
    """One problem. `problem` and `advice` are whole sentences; `advice` says what to write instead."""

    severity: Severity
    problem: str
    advice: str = ""
    location: SourceLocation | None = None


class Findings:
    """All that was found, in the order of the stages; the same thing twice counts once."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Finding] = {}

    def add(self, finding: Finding) -> None:
        """Adds a finding, unless the same problem was found at the same line; an error replaces a remark."""
        key = (str(finding.location) if finding.location is not None else None, finding.problem)
        if key not in self._found or (finding.severity, self._found[key].severity) == ("error", "remark"):
            self._found[key] = finding

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def count(self, severity: Severity) -> int:
        """Returns how many findings have this severity."""
        return sum(finding.severity == severity for finding in self)


def of_setting(origin: Origin | None, words: Iterable[str] = ()) -> SourceLocation | None:
    """Returns the line of a setting; the first of `words` that stands in it is the culprit."""
    if origin is None:
        return None
    if not origin.line:  # an override: the text is its own source
        text = origin.file.removeprefix("override ")
        return SourceLocation(origin.file, 0, text, _find_word(text, words))
    text = source_line(origin.file, origin.line)
    columns = _find_word(text, words)
    if columns is None and origin.line == 1:
        text = ""  # the file as a whole: a section that it lacks has no line
    return SourceLocation(origin.file, origin.line, text, columns)


def of_traceback(error: BaseException, users: UserFiles) -> SourceLocation | None:
    """Returns the innermost line in the user's files that an exception passed; None where it passed none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        text = error.text or ""
        start = max((error.offset or 1) - 1, 0)
        columns = (start, max(start + 1, (error.end_offset or 0) - 1)) if error.offset else None
        return SourceLocation(shown_path(error.filename), error.lineno, text.rstrip("\n"), columns)
    found: TracebackType | None = None
    link = error.__traceback__
    while link is not None:
        if link.tb_frame.f_code.co_filename in users:
            found = link
        link = link.tb_next
    if found is None:
        return None
    return of_instruction(found.tb_frame.f_code, found.tb_lasti, found.tb_lineno)


def of_function(function: Callable[..., Any], users: UserFiles, words: Sequence[str] = ()) -> SourceLocation | None:
    """Returns the `def` line of a user's function, with one of its parameters or its name as the culprit."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename not in users:
        return None
    names = [*words, code.co_name]
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        return SourceLocation(shown_path(code.co_filename), code.co_firstlineno)
    start = next((number for number, line in enumerate(lines) if re.match(r"\s*(async\s+)?def\b", line)), 0)
    # A parameter may stand on a line of its own; the signature ends where the body begins.
    for word in names:
        for number in range(start, len(lines)):
            columns = _find_word(lines[number], [word])
            if columns is not None:
                return SourceLocation(shown_path(code.co_filename), first + number, lines[number].rstrip("\n"), columns)
            if re.search(r":\s*(#.*)?$", lines[number]):
                break
    return SourceLocation(shown_path(code.co_filename), first + start, lines[start].rstrip("\n"))


def of_return(function: Callable[..., Any], users: UserFiles) -> SourceLocation | None:
    """Returns the only `return` of a user's function, or its `def` line where it has none or several."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename not in users:
        return None
    try:
        tree = ast.parse(Path(code.co_filename).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return of_function(function, users)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        if code.co_firstlineno in (node.lineno, *(each.lineno for each in node.decorator_list)):
            returns = [each for each in ast.walk(node) if isinstance(each, ast.Return) and each.value is not None]
            if len(returns) == 1 and returns[0].value is not None:
                return _of_expression(code.co_filename, returns[0].value)
    return of_function(function, users)


def of_attribute(owner: type, name: str, users: UserFiles) -> SourceLocation | None:
    """Returns the line of a user's class where `self.NAME` is made, or the class's own."""
    for each in owner.__mro__:
        try:
            file = inspect.getfile(each)
            if file not in users:
                continue
            lines, first = inspect.getsourcelines(each)
        except (OSError, TypeError):
            continue
        for number, line in enumerate(lines):
            found = re.search(rf"\bself\.{re.escape(name)}(?=\s*[:=])", line)
            if found:
                return SourceLocation(shown_path(file), first + number, line.rstrip("\n"), found.span())
        if each is owner:
            return SourceLocation(
                shown_path(file), first, lines[0].rstrip("\n"), _find_word(lines[0], [owner.__name__])
            )
    return None


def _of_expression(file: str, node: ast.expr) -> SourceLocation:
    text = source_line(file, node.lineno)
    last = node.end_col_offset if node.end_lineno == node.lineno and node.end_col_offset else len(text.encode())
    return SourceLocation(
        shown_path(file), node.lineno, text, (characters(text, node.col_offset), characters(text, last))
    )


def _find_word(text: str, words: Iterable[str]) -> tuple[int, int] | None:
    body = text.partition(" #")[0]
    for word in words:
        found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", body) if word else None
        if found:
            return found.span()
    return None


_CODES = {"error": "1;31", "remark": "1;33", "ok": "1;32", "location": "1", "mark": "1;36", "faint": "2"}
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
    where = f"{paint(str(finding.location), 'location')}: " if finding.location is not None else ""
    lines = [f"{where}{paint(finding.severity, finding.severity)}: {finding.problem}"]
    if finding.location is not None and finding.location.text.strip():
        lines += _render_source(finding.location, paint)
    if finding.advice:
        lines += [f"  {line}" for line in finding.advice.split("\n")]
    return "\n".join(lines)


def _render_source(location: SourceLocation, paint: Painter) -> Iterable[str]:
    """The source line and carets under the culprit; what is far from it in a long line is left out."""
    text = location.text.rstrip().replace("\t", " ")
    indent = len(text) - len(text.lstrip())
    start, stop = location.columns or (indent, len(text))
    start = min(max(start, indent), len(text))
    stop = max(min(stop, len(text)), start + 1)
    cut = indent if stop <= indent + _LONGEST_LINE else max(indent, start - _LONGEST_LINE // 2)
    shown = ("…" if cut > indent else "") + text[cut : cut + _LONGEST_LINE]
    shown += "…" if len(text) > cut + _LONGEST_LINE else ""
    offset = start - cut + (1 if cut > indent else 0)
    gutter = str(location.line) if location.line else ""
    carets = "^" * min(stop - start, len(shown) - offset)
    return [f"  {gutter} | {shown}", f"  {' ' * len(gutter)} | {' ' * offset}{paint(carets, 'mark')}"]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


_LABEL = re.compile(r"([a-z_]+(?:\.[\w-]+)*): ")
_QUOTED = re.compile(r"""["'`]([^"'`\n]+)["'`]""")
_NEXT_SENTENCE = re.compile(r"(?<=[.?!…]) (?=[A-Z])")
_HINTS = re.compile(r"Did you mean|Known:|Its parameters:")


@dataclass(frozen=True)
class Case:
    """What every stage works with: the config, which files are the user's, and where findings go."""

    config: RunConfig
    users: UserFiles
    findings: Findings

    def note(self, error: BaseException, *, label: str, location: SourceLocation | None = None) -> None:
        """Notes an exception (see `explain`), unless what led to it is noted already."""
        if not isinstance(error, AlreadyReported):
            self.findings.add(explain(error, self.config, self.users, label=label, location=location))

    def add(self, severity: Severity, problem: str, advice: str, location: SourceLocation | None) -> None:
        """Notes a finding of its own words."""
        self.findings.add(Finding(severity, problem, advice, location))

    def setting(self, label: str, words: Sequence[str] = ()) -> SourceLocation | None:
        """Returns the line of a setting; its last key is the culprit where none of `words` stands there."""
        return of_setting(self.config.origin(label), [*words, *reversed(label.split("."))])


def explain(
    error: BaseException, config: RunConfig, users: UserFiles, *, label: str, location: SourceLocation | None = None
) -> Finding:
    """Returns what an exception says, at the user's line.

    `label` is the setting of the part that raised (`model`, `data.train`), and `place` a line that says more
    than that setting's; both are for exceptions that name no place themselves.
    """
    cause = error.__cause__
    if isinstance(error, ComponentError) and cause is not None and not isinstance(cause, TrainwrightError):
        found = of_traceback(cause, users)
        if found is not None:
            named = f"It was reached from {label}{_at(config.origin(label))}."
            return Finding("error", _describe(cause), named, found)
    if isinstance(error, TrainwrightError):
        return _explain_ours(error, config, users, label=label, location=location)
    found = of_traceback(error, users)
    if found is not None:
        return Finding("error", _describe(error), "", found)
    frames = traceback.extract_tb(error.__traceback__)
    raised = f"It was raised in {shown_path(frames[-1].filename)}:{frames[-1].lineno}." if frames else ""
    is_ours = bool(frames) and frames[-1].filename.startswith(PACKAGE)
    if location is not None and not is_ours:  # a mistake of our own says nothing of the user's line
        return Finding("error", _describe(error), raised, location)
    found = of_setting(config.origin(label), [label.rpartition(".")[2]])
    return Finding("error", f"{label}: {_describe(error)}", raised, found)


def from_words(severity: Severity, words: str, location: SourceLocation | None) -> Finding:
    """Returns a finding of one message: its first sentence is the problem, the rest the advice."""
    problem, *advice = _NEXT_SENTENCE.split(words, maxsplit=1)
    return Finding(severity, problem, "".join(advice), location)


def culprits(problem: str) -> list[str]:
    """Returns the words of a message that may stand in the user's line, likeliest first."""
    said = _HINTS.split(problem)[0]
    label = _LABEL.match(said)
    path = label[1].split(".") if label else []
    rest = said[label.end() :] if label else said
    return [*_QUOTED.findall(rest), *reversed(path)]


def _explain_ours(
    error: TrainwrightError, config: RunConfig, users: UserFiles, *, label: str, location: SourceLocation | None
) -> Finding:
    words = culprits(error.problem)
    origin = _origin_of(error.where)
    named = _setting_named(error.problem, config)
    if origin is None and named is None:
        found = of_traceback(error, users) or location
        if found is None:
            found = of_setting(config.origin(label), [*words, *reversed(label.split("."))])
        return from_words("error", error.problem, found)
    chosen = origin if origin is not None else config.origin(named or label)
    return from_words("error", error.problem, of_setting(chosen, words))


def _origin_of(where: object) -> Origin | None:
    """Reads where an error says that it comes from: a setting's origin, or the text `file:line`."""
    if isinstance(where, Origin):
        return where
    found = Origin.parse(str(where))
    return None if found is None else found._replace(file=shown_path(found.file))


def _setting_named(problem: str, config: RunConfig) -> str | None:
    """Returns the setting that a message begins with: `data.train: …`, or `early_stopping.metric: …` of a hook."""
    found = _LABEL.match(problem)
    if found is None:
        return None
    head, _, rest = found[1].partition(".")
    if found[1].startswith("data.eval.test") and "test" not in config.data.eval:
        return "data.test"
    if head in type(config).model_fields:
        return found[1]
    return next((f"hooks.{number}.{rest}" for number, hook in enumerate(config.hooks) if hook.type == head), None)


def _describe(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}."
    text = str(error).strip()
    described = f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}."
    return described if described[-1] in ".!?" else f"{described}."


def _at(origin: Origin | None) -> str:
    return f" ({origin})" if origin is not None else ""
