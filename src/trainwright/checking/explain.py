"""From an exception to a finding: the user's own line, the message, and what to write instead.

Our own errors say in words what is wrong and often where; of any other exception the innermost line in the
user's files is shown.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.checking import places
from trainwright.checking.findings import AlreadyReported, Finding, Findings, Severity
from trainwright.config import Origin, RunConfig
from trainwright.errors import ComponentError, TrainwrightError
from trainwright.loop.user_lines import PACKAGE, Place, UserFiles
from trainwright.tracebacks import shown_path

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

    def note(self, error: BaseException, *, label: str, place: Place | None = None) -> None:
        """Notes an exception (see `explain`), unless what led to it is noted already."""
        if not isinstance(error, AlreadyReported):
            self.findings.add(explain(error, self.config, self.users, label=label, place=place))

    def add(self, severity: Severity, problem: str, advice: str, place: Place | None) -> None:
        """Notes a finding of its own words."""
        self.findings.add(Finding(severity, problem, advice, place))

    def setting(self, label: str, words: Sequence[str] = ()) -> Place | None:
        """Returns the line of a setting; its last key is the culprit where none of `words` stands there."""
        return places.of_setting(self.config.origin(label), [*words, *reversed(label.split("."))])


def explain(
    error: BaseException, config: RunConfig, users: UserFiles, *, label: str, place: Place | None = None
) -> Finding:
    """Returns what an exception says, at the user's line.

    `label` is the setting of the part that raised (`model`, `data.train`), and `place` a line that says more
    than that setting's; both are for exceptions that name no place themselves.
    """
    cause = error.__cause__
    if isinstance(error, ComponentError) and cause is not None and not isinstance(cause, TrainwrightError):
        found = places.of_traceback(cause, users)
        if found is not None:
            named = f"It was reached from {label}{_at(config.origin(label))}."
            return Finding("error", _describe(cause), named, found)
    if isinstance(error, TrainwrightError):
        return _explain_ours(error, config, users, label=label, place=place)
    found = places.of_traceback(error, users)
    if found is not None:
        return Finding("error", _describe(error), "", found)
    frames = traceback.extract_tb(error.__traceback__)
    raised = f"It was raised in {shown_path(frames[-1].filename)}:{frames[-1].lineno}." if frames else ""
    is_ours = bool(frames) and frames[-1].filename.startswith(PACKAGE)
    if place is not None and not is_ours:  # a mistake of our own says nothing of the user's line
        return Finding("error", _describe(error), raised, place)
    found = places.of_setting(config.origin(label), [label.rpartition(".")[2]])
    return Finding("error", f"{label}: {_describe(error)}", raised, found)


def from_words(severity: Severity, words: str, place: Place | None) -> Finding:
    """Returns a finding of one message: its first sentence is the problem, the rest the advice."""
    problem, *advice = _NEXT_SENTENCE.split(words, maxsplit=1)
    return Finding(severity, problem, "".join(advice), place)


def culprits(problem: str) -> list[str]:
    """Returns the words of a message that may stand in the user's line, likeliest first."""
    said = _HINTS.split(problem)[0]
    label = _LABEL.match(said)
    path = label[1].split(".") if label else []
    rest = said[label.end() :] if label else said
    return [*_QUOTED.findall(rest), *reversed(path)]


def _explain_ours(
    error: TrainwrightError, config: RunConfig, users: UserFiles, *, label: str, place: Place | None
) -> Finding:
    words = culprits(error.problem)
    origin = _origin_of(error.where)
    named = _setting_named(error.problem, config)
    if origin is None and named is None:
        found = places.of_traceback(error, users) or place
        if found is None:
            found = places.of_setting(config.origin(label), [*words, *reversed(label.split("."))])
        return from_words("error", error.problem, found)
    chosen = origin if origin is not None else config.origin(named or label)
    return from_words("error", error.problem, places.of_setting(chosen, words))


def _origin_of(where: object) -> Origin | None:
    """Reads where an error says that it comes from: a setting's origin, or the text `file:line`."""
    if isinstance(where, Origin):
        return where
    found = Origin.parse(str(where))
    return None if found is None else found._replace(file=shown_path(found.file))


def _setting_named(problem: str, config: RunConfig) -> str | None:
    """Returns the setting that a message begins with: `data.train: …`, or `stop_early.metric: …` of a hook."""
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
