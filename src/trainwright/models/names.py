"""Globs over dotted names, with which a config refers to modules and parameters of a model.

Used by freeze.py, lora.py and replace.py. A glob over parameters is compared with whole names, as for optimizers; a
glob over modules also with the ends of names, so it need not contain the path of a model's stack, such as
`model.layers` or `transformer.h`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainwright.config.problems import describe, nearest
from trainwright.errors import ConfigError

MOST_SHOWN = 12


def names_module(glob: str, name: str) -> bool:
    """Returns True if the glob matches this module. It is compared with the whole name, and with its end after any dot.

    `*` matches any text, including dots.

    >>> name = "model.layers.0.mlp"
    >>> names_module("layers.*.mlp", name), names_module("mlp", name), names_module("lp", name)
    (True, True, False)
    """
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def matched_parameters(label: str, globs: Any, model: nn.Module) -> list[str]:
    """Returns the names of the parameters that the globs match; a glob that matches none is rejected."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    wanted = as_globs(label, globs)
    for glob in wanted:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ConfigError(f"{label}: {unmatched(glob, names, 'parameter')}")
    return [name for name in names if any(fnmatchcase(name, glob) for glob in wanted)]


def as_globs(label: str, given: Any) -> tuple[str, ...]:
    """Reads one glob or a list of globs."""
    globs = (given,) if isinstance(given, str) else given
    if not isinstance(globs, (list, tuple)) or not all(isinstance(glob, str) and glob for glob in globs):
        shown = describe(given) if isinstance(given, Mapping) else repr(given)
        raise ConfigError(f"{label}: must be a glob such as *.q_proj, or a list of globs; got {shown}.")
    return tuple(globs)


def unmatched(glob: str, names: Iterable[str], what: str) -> str:
    """Describes that a glob matches nothing, with the closest name and the existing names (layers of a stack as
    one)."""
    stacked = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    ends = dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in stacked if "." in name)
    found = nearest(glob, [*stacked, *ends], cutoff=0.5)
    guess = f' Did you mean "{found}"?' if found else ""
    more = f" and {len(stacked) - MOST_SHOWN} more" if len(stacked) > MOST_SHOWN else ""
    listed = f" There are: {', '.join(stacked[:MOST_SHOWN])}{more}." if stacked else f" The model has no {what}."
    return f"no {what} matches {glob!r}.{guess}{listed}"


def last_parts(names: Sequence[str], *, at_most: int = 4) -> str:
    """Returns globs of the last parts of names, each once, for a log line.

    >>> last_parts(["layers.0.q_proj", "layers.1.q_proj", "layers.1.v_proj"])
    '*.q_proj, *.v_proj'
    """
    globs = list(dict.fromkeys(re.sub(r"^.*\.", "*.", name) for name in names))
    more = f" and {len(globs) - at_most} more" if len(globs) > at_most else ""
    return ", ".join(globs[:at_most]) + more
