"""Decides whether the code that a config names may be imported.

A run file is a program of its user, as a Python script is. A run folder is data: others may have written it, so its
config.yaml names code only if this user has signed it (config/signature.py) or has said so with `trust`. Built-in
components always load. Arguments of components are not judged here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from trainwright.config import RunConfig
from trainwright.config.builtin import BUILT_INS, IN_CODE
from trainwright.errors import TrustError

_BUILT_IN_TYPES = {word for names in BUILT_INS.values() for item in names.items() for word in item}
_CALLING_HOOKS = ("every", "callback")
"""Built-in hooks whose arguments name functions."""

_WEIGHT_FILES = (".json", ".npy", ".csv", ".txt")
"""The files that data.sampler reads weights from, without running code."""

MODEL_SECTIONS = ("imports", "task", "model", "trainer.type")
"""The settings whose code is imported to build a run's model."""
DATA_SECTIONS = ("imports", "data")
"""The settings whose code is imported to build a run's datasets and collator."""


def reject_untrusted(config: RunConfig, *, sections: Collection[str] = ()) -> None:
    """Raises if an untrusted run folder names code in these sections (default: all) that would be imported."""
    if config.untrusted_file is None:
        return
    code = [(".".join(path), name) for path, name in _code_of(config.to_dict())]
    if sections:
        code = [one for one in code if any(f"{one[0]}.".startswith(f"{section}.") for section in sections)]
    if code:
        # Overrides as well: relative names are resolved in the project_dir of the untrusted file.
        listed = ", ".join(f"{label}: {name}" for label, name in code)
        raise TrustError(
            f"{config.untrusted_file} has no valid signature: no run of this user wrote it, or it was edited since. It "
            f"would import {listed}, from Python's path or {config.project_dir}. Read that code, and load it with "
            "--trust (trust=True) if you trust who wrote it.",
            where=config.origin(code[0][0]),
        )


def _code_of(settings: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the path and the text of each setting that names code other than a built-in component."""
    for path, text in _texts(settings, ()):
        is_type = path[-1] == "type" or (path[:2] == ("model", "replace") and len(path) == 3)
        is_known = text in _BUILT_IN_TYPES or text.startswith(IN_CODE)
        # The trainers of `train` and `training_main`. Any other object there is rejected before it is called.
        is_known |= path == ("trainer", "type") and text.startswith("trainwright.api.")
        if path[0] == "imports" or (is_type and not is_known):
            yield path, text
        elif path[:2] == ("data", "sampler") and path[-1] == "weights" and not text.endswith(_WEIGHT_FILES):
            yield path, text  # a function
        elif path[0] == "hooks" and len(path) == 3 and path[2] != "type":
            hook = settings["hooks"][int(path[1])]
            if hook["type"] in (*_CALLING_HOOKS, *(BUILT_INS["hook"][name] for name in _CALLING_HOOKS)):
                yield path, text


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields every text in plain settings with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, str(index)))
    elif isinstance(value, str) and path:
        yield path, value
