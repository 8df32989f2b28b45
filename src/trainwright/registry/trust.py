"""Decides whether the code that a config names may be imported.

A run file is a program of its user, like a Python script. A run folder is data that others may have written, so its
config.yaml can name code only if this user has signed it (config/signature.py) or has set `trust`. Built-in components
always load. Arguments of components are not checked here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from trainwright.config import RunConfig
from trainwright.config.builtin import BUILT_INS, IN_CODE
from trainwright.errors import TrustError

_BUILT_IN_TYPES = {word for names in BUILT_INS.values() for item in names.items() for word in item}
_CALLING_HOOKS = {word for name in ("every", "callback") for word in (name, BUILT_INS["hook"][name])}
"""Built-in hooks whose arguments name functions."""

_FUNCTIONS = ("lr_lambda", "scale_fn")
"""Arguments of schedules that name functions."""

_WEIGHTED = ("weighted", BUILT_INS["sampler"]["weighted"])
_WEIGHT_FILES = (".json", ".npy", ".csv", ".txt")
"""The files that the sampler reads weights from, without running code; any other text names a function."""

_GENERATE = ("generate", BUILT_INS["benchmark"]["generate"])
"""The benchmark whose metric may be a function."""

_PEFT_KEYS = {
    *("type", "peft_type", "r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora", "init_lora_weights"),
    *("target_modules", "exclude_modules", "target_parameters", "modules_to_save", "feedforward_modules"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "task_type"),
    *("alpha", "module_dropout", "num_virtual_tokens", "token_dim", "num_layers", "num_attention_heads"),
}
"""Fields of peft's configs whose texts import no code; others, such as megatron_core and the tokenizer, may."""

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
        is_known |= path in (("model", "peft", "type"), ("model", "quantize", "type"))
        if path[0] == "imports" or (is_type and not is_known) or (not is_type and _names_function(settings, path)):
            yield path, text


def _names_function(settings: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Returns True if peft or a built-in component, possibly nested, imports the object that a text names."""
    if path[:2] == ("model", "peft") and len(path) > 2:
        return path[2] not in _PEFT_KEYS
    owner: Any = settings
    outer: Any = settings
    for key in path[:-1]:
        outer, owner = owner, owner[int(key)] if isinstance(owner, list) else owner[key]
    if isinstance(owner, list):
        is_metric = path[-2] == "metric" and isinstance(outer, dict) and outer.get("type") in _GENERATE
        return (is_metric and ":" in owner[int(path[-1])]) or path[-2] in _FUNCTIONS
    is_weights = owner.get("type") in _WEIGHTED and path[-1] == "weights"
    if is_weights and owner["weights"].endswith(_WEIGHT_FILES):
        return False
    is_metric = path[-1] == "metric" and owner.get("type") in _GENERATE and ":" in owner["metric"]
    return is_weights or is_metric or path[-1] in _FUNCTIONS or owner.get("type") in _CALLING_HOOKS


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
