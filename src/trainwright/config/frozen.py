"""Read-only settings: `Frozen`, and the conversion to and from plain dicts and lists.

Values of any YAML type become deeply read-only. component.py and sections.py define the settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Rational, Real
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Value_co = TypeVar("Value_co", covariant=True)


class Frozen(Mapping[str, Value_co]):
    """A read-only mapping whose values are also attributes: `settings.a.b`.

    Nested mappings become Frozen and lists become tuples. A key with the name of a method (`items`, `get`) is only
    available as `settings["items"]`.
    """

    __slots__ = ("_values",)
    _values: dict[str, Any]

    def __init__(self, values: Mapping[str, Any] | None = None, /) -> None:
        frozen: dict[str, Any] = {}
        for key, value in (values or {}).items():
            if not isinstance(key, str):
                raise TypeError(f"A setting's key is text, got {key!r} ({type(key).__name__}). Use {str(key)!r}.")
            frozen[key] = freeze(value)
        object.__setattr__(self, "_values", frozen)

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the settings as plain, mutable dicts and lists."""
        return {key: thaw(value) for key, value in self._values.items()}

    def __getitem__(self, key: str) -> Value_co:
        return self._values[key]  # type: ignore[no-any-return]  # one dict for every value type

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        # Private names are not settings; reading _values for them would recurse during unpickling.
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        known = ", ".join(self._values) or "none"
        raise AttributeError(f"There is no setting {name!r} here. Known: {known}.")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: {_READ_ONLY}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: {_READ_ONLY}")

    def __setitem__(self, key: str, value: object) -> NoReturn:
        raise TypeError(f"{key}: {_READ_ONLY}")

    def __delitem__(self, key: str) -> NoReturn:
        raise TypeError(f"{key}: {_READ_ONLY}")

    def __eq__(self, other: object) -> bool:
        return same(self, other) if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to plain dicts, which have no hash

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (type(self), (dict(self._values),))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        return f"Frozen({self._values!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Support fields such as `Frozen[Component]`: values are validated one by one, then frozen."""
        arguments = get_args(source)
        values = handler.generate_schema(arguments[0]) if arguments else core_schema.any_schema()
        mapping = core_schema.dict_schema(core_schema.str_schema(strict=True), values)
        return core_schema.no_info_before_validator_function(
            _one_level_dict, core_schema.no_info_after_validator_function(cls, mapping)
        )


_READ_ONLY = "settings are read-only. Create a changed copy with config.derive({'trainer.max_steps': 100})."


def freeze(value: Any) -> Any:
    """Return `value` with mappings as Frozen and lists as tuples, recursively."""
    if isinstance(value, Frozen):
        return value
    if isinstance(value, Mapping):
        return Frozen(value)
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    return value


def thaw(value: Any) -> Any:
    """Return `value` as plain dicts and lists, recursively."""
    if isinstance(value, Frozen) or hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [thaw(item) for item in value]
    return value


def plain_scalar(value: Any) -> bool | int | float | str | None:
    """Return a number or text as the built-in type of YAML; None for anything else.

    Accepts subclasses (a str enum) and numpy's scalars.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    # A Fraction is Real as well, but a float cannot represent it.
    return float(value) if isinstance(value, Real) and not isinstance(value, Rational) else None


def same(first: Any, second: Any) -> bool:
    """Return True if two settings are equal: lists equal tuples, nan equals nan, true does not equal 1."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, bool) != isinstance(second, bool):
        return False
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return bool(first == second)


def _one_level_dict(value: Any) -> Any:
    # An empty key in YAML (`eval:` with everything below it commented out) is null and means an empty mapping.
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else value
