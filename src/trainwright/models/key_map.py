"""Maps the names of a model's weights between the module and Hugging Face's files.

Models name their parameters like transformers where possible, so most keys need no rule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KeyRule:
    """One rule of a key map: our name of some weights, and the name that Hugging Face's files use.

    Both are patterns: `*` stands for one part between dots (a layer's number), `**` for one or more parts. Both sides
    have the same wildcards in the same order. The first rule that matches a key decides; a key without a rule is
    the same on both sides. `transpose` swaps the two dims of a matrix (GPT-2's files keep [in, out]).
    """

    ours: str
    theirs: str
    transpose: bool = False

    def __post_init__(self) -> None:
        if re.findall(r"\*+", self.ours) != re.findall(r"\*+", self.theirs):
            raise ValueError(f"KeyRule: {self.ours!r} and {self.theirs!r} have different wildcards.")


class KeyMap:
    """Translates keys in both directions: each result is the key on the other side, and whether to transpose."""

    def __init__(self, rules: Sequence[KeyRule] = (), *, ignored: Sequence[str] = (), prefix: str = "") -> None:
        self._from_ours = [(pattern(rule.ours), rule.theirs, rule.transpose) for rule in rules]
        self._from_theirs = [(pattern(rule.theirs), rule.ours, rule.transpose) for rule in rules]
        self._ignored = [pattern(text) for text in ignored]
        self._prefix = prefix

    def to_theirs(self, name: str) -> tuple[str, bool]:
        """Returns the key in Hugging Face's files for one of our names."""
        return _translate(name, self._from_ours)

    def to_ours(self, key: str) -> tuple[str, bool]:
        """Returns our name for a key of Hugging Face's files."""
        return _translate(key, self._from_theirs)

    def ours_in(self, keys: Sequence[str]) -> dict[str, tuple[str, bool]]:
        """Maps our names to (key in the file, transpose) for all keys of a file that are not ignored.

        A file that was written by a model without a head lacks the prefix of the body (`bert.`); it is put before.
        """
        lacks_prefix = self._prefix and not any(key.startswith(f"{self._prefix}.") for key in keys)
        found = {}
        for key in keys:
            whole = f"{self._prefix}.{key}" if lacks_prefix else key
            if not any(one.fullmatch(whole) for one in self._ignored):
                name, transpose = self.to_ours(whole)
                found[name] = (key, transpose)
        return found


def pattern(text: str) -> re.Pattern[str]:
    """Compiles a pattern of keys: `*` is one part between dots, `**` is one or more parts."""
    wild = {"*": r"([^.]+)", "**": r"(.+)"}
    return re.compile("".join(wild.get(piece) or re.escape(piece) for piece in re.split(r"(\*+)", text)))


def _translate(key: str, rules: list[tuple[re.Pattern[str], str, bool]]) -> tuple[str, bool]:
    for source, target, transpose in rules:
        match = source.fullmatch(key)
        if match is not None:
            parts = iter(match.groups())
            return re.sub(r"\*+", lambda _: next(parts), target), transpose  # noqa: B023 # used at once
    return key, False
