"""Which values the settings of optimizers can have, for a run file's `trainer.optimizer` and its groups alike.

Ranges go by the names that all optimizers share; what form a value has is read off its default. The constructors of
lion.py and muon.py refuse the same values in Python. Which settings there are is registry.py's to check.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from trainwright.errors import ConfigError

Origin = Callable[[str], object | None]
"""Where a setting such as `trainer.optimizer.lr` was written, or None."""


class _Range(NamedTuple):
    """The numbers that a setting can be: in words that follow "a number", and as a test, which nan fails."""

    words: str
    holds: Callable[[float], bool]


_AT_LEAST_0 = _Range("of at least 0", lambda value: 0.0 <= value < math.inf)
_ABOVE_0 = _Range("above 0", lambda value: 0.0 < value < math.inf)
_BELOW_1 = _Range("from 0 to below 1", lambda value: 0.0 <= value < 1.0)
_COUNT = _Range("that is whole and at least 1", lambda value: 1 <= value < math.inf and value == int(value))

RANGES: Mapping[str, _Range] = {
    "lr": _AT_LEAST_0,
    "adamw_lr": _AT_LEAST_0,
    "weight_decay": _AT_LEAST_0,
    "adamw_weight_decay": _AT_LEAST_0,
    "eps": _ABOVE_0,
    "adamw_eps": _ABOVE_0,
    "betas": _BELOW_1,
    "adamw_betas": _BELOW_1,
    "momentum": _BELOW_1,
    "ns_steps": _COUNT,
}
"""What a setting can be, whosever optimizer it is; of a list each number."""

_RATES = ("lr", "adamw_lr")


def refuse_impossible(**settings: Any) -> None:
    """Refuses what cannot be, by name, of the settings that RANGES has. A rate of 0 passes, as it does in torch."""
    for name, value in settings.items():
        problem = None if value is None or name not in RANGES else _problem(value, RANGES[name])
        if problem is not None:
            raise ConfigError(f"{name}: {problem}")


def check_settings(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], *, label: str, origin: Origin, has_strict_forms: bool
) -> None:
    """Refuses what cannot be in a run file, by its place there: `label` is what the settings stand below.

    `defaults` are the optimizer's. Where one is None, None is a value like any other. `has_strict_forms` is for
    optimizers whose values have their defaults' form, as torch's have and a user's need not.
    """
    for name, value in settings.items():
        default = defaults.get(name)
        if value is None and default is None:
            continue
        problem = _form_problem(value, default) if has_strict_forms else None
        if problem is None and name in RANGES and not isinstance(default, str):
            problem = _problem(value, _ABOVE_0 if name in _RATES else RANGES[name])
            if problem is not None and name in _RATES and value == 0:
                problem += " Parameters that are to stay as they are go into model.freeze."
        if problem is not None:
            raise ConfigError(f"{label}.{name}: {problem}", where=origin(f"{label}.{name}"))


def refuse_provided(settings: Mapping[str, Any], provided: Iterable[str], *, label: str, origin: Origin) -> None:
    """Refuses what the builder itself gives to an optimizer: in a run file it would take the place of that."""
    for name in provided:
        if name in settings:
            problem = "is worked out from the model, and cannot be set in a run file. Remove it."
            raise ConfigError(f"{label}.{name}: {problem}", where=origin(f"{label}.{name}"))


def defaults_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the defaults of an optimizer's constructor, as far as it shows them. A `()` says nothing of a form."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def has_strict_forms(target: Callable[..., Any]) -> bool:
    """Is this one of torch's optimizers or ours, whose defaults say what form a value has?"""
    return getattr(target, "__module__", "").split(".")[0] in ("torch", "trainwright")


def is_number(value: object) -> bool:
    """Is this a number, which true and false are not?"""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _problem(value: Any, known: _Range) -> str | None:
    if isinstance(value, list | tuple):
        # None in a list is a number that the optimizer works out by itself (Adafactor's eps).
        if value and all(one is None or (is_number(one) and known.holds(one)) for one in value):
            return None
        return f"must be a list of numbers {known.words}, got {_shown(value)}."
    number = float(value) if isinstance(value, Tensor) else value
    return (
        None if is_number(number) and known.holds(number) else f"must be a number {known.words}, got {_shown(value)}."
    )


def _form_problem(value: Any, default: Any) -> str | None:
    if isinstance(default, tuple) and default:
        if not (isinstance(value, list | tuple) and len(value) == len(default)):
            return f"must be a list of {len(default)}, got {_shown(value)}."
        if all(map(is_number, default)) and not all(map(is_number, value)):
            return f"must be a list of {len(default)} numbers, got {_shown(value)}."
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            return f"must be true or false, got {_shown(value)}."
    elif is_number(default) and not is_number(value):
        return f"must be a number, got {_shown(value)}."
    elif isinstance(default, str) and not isinstance(value, str):
        return f"must be text, got {_shown(value)}."
    return None


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value!r}"
    return repr(list(value) if isinstance(value, tuple) else value)
