"""A component in a config: `type` and the constructor's keyword arguments.

This file parses components. The registry finds the class and checks the arguments against its signature.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from trainwright.config.frozen import Frozen
from trainwright.config.problems import describe, reject
from trainwright.config.yaml_text import Origin, absolute
from trainwright.errors import ConfigError


class Component(Frozen[Any]):
    """A read-only mapping of `type` and the arguments, which are also attributes.

    `Component("adamw", lr=1e-3)`, or with a real class: `Component(AdamW, lr=1e-3)`. In YAML it is a mapping
    with `type`, or the bare type (`console` is `{type: console}`).

    >>> optimizer = Component("adamw", lr=1e-3)
    >>> optimizer.type, optimizer.lr, optimizer["lr"]
    ('adamw', 0.001, 0.001)
    """

    __slots__ = ("_origin",)
    _origin: Origin | None

    reserved_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that are not passed to the constructor."""

    def __init__(self, type_: str | Callable[..., Any], /, **arguments: Any) -> None:
        if "type" in arguments:
            raise TypeError(
                f"A component has one type, the first argument: {type_!r}; got type={arguments['type']!r} as well."
            )
        name = type_ if isinstance(type_, str) else type_of(type_)
        # null removes a reserved key of an extended file.
        given = {key: value for key, value in arguments.items() if value is not None or key not in self.reserved_keys}
        super().__init__({"type": name, **given})
        object.__setattr__(self, "_origin", None)

    @property
    def type(self) -> str:
        """The registered name, `package.module:Name`, `file.py:Name` or `file.Name`."""
        return self._values["type"]  # type: ignore[no-any-return]  # the constructor converts it

    @property
    def arguments(self) -> Frozen[Any]:
        """The arguments of the constructor: all keys except `type` and the reserved ones."""
        left_out = {"type", *self.reserved_keys}
        return Frozen({key: value for key, value in self._values.items() if key not in left_out})

    @property
    def verbatim(self) -> frozenset[str]:
        """The names of arguments whose nested components are not built."""
        return frozenset()

    @property
    def reserved(self) -> Frozen[Any]:
        """The reserved keys that are set."""
        return Frozen({key: self._values[key] for key in self.reserved_keys if key in self._values})

    @property
    def origin(self) -> Origin | None:
        """The source location of the component; None if it was created in Python. Not compared by `==`."""
        return self._origin

    def located_at(self, origin: Origin | None) -> Component:
        """Return the same component with this origin."""
        copy = type(self).from_mapping(self._values)
        object.__setattr__(copy, "_origin", origin)
        return copy

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Component:
        """Create a component from a mapping with `type`."""
        return cls(values["type"], **{key: value for key, value in values.items() if key != "type"})

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (_rebuild, (type(self), dict(self._values), self._origin))

    def __repr__(self) -> str:
        arguments = {key: value for key, value in self._values.items() if key != "type"}
        shown = [repr(self.type)]
        shown += [f"{key}={value!r}" for key, value in arguments.items() if key.isidentifier()]
        odd = {key: value for key, value in arguments.items() if not key.isidentifier()}
        shown += [f"**{odd!r}"] if odd else []
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._read)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add a marker that json_schema.py replaces with the kind of the component."""
        return {"component": cls.__name__}

    @classmethod
    def _read(cls, value: Any) -> Component:
        if isinstance(value, str) and value:
            return cls(value)
        if not isinstance(value, Mapping) or not value:
            raise reject(
                (), f"must be a component: a mapping with type, or the type alone; got {describe(value)}.", value
            )
        if "type" not in value:
            known = ", ".join(map(str, value))
            raise reject((), f"a component needs a type, got only {known}. Add one, such as type: my_file.py:Name.")
        name = value["type"]
        if not isinstance(name, str) or not name:
            raise reject(("type",), f"must be text, such as adamw or my_file.py:Name; got {describe(name)}.", name)
        located = cls.from_mapping(value)
        return located.located_at(value.origin) if isinstance(value, Component) else located


class ModelSection(Component):
    """The model: a component with reserved keys in addition to its arguments, such as `freeze` and `sharding`."""

    __slots__ = ()

    reserved_keys: ClassVar[tuple[str, ...]] = (
        "dtype",
        "pretrained",
        "peft",
        "lora",
        "quantize",
        "replace",
        "freeze",
        "sharding",
        "activation_checkpointing",
        "compile_repeated_blocks",
        "offload",
        "tile",
        "kernels",
        "args",
    )

    @property
    def arguments(self) -> Frozen[Any]:
        """The arguments of the constructor: all keys except `type` and the reserved ones, and those in `args`."""
        return Frozen({**super().arguments, **self._values.get("args", {})})

    @property
    def verbatim(self) -> frozenset[str]:
        """The names in `args`, whose values are passed unchanged."""
        return frozenset(self._values.get("args", ()))

    @classmethod
    def _read(cls, value: Any) -> Component:
        section = super()._read(value)
        args = section.get("args", {})
        if not isinstance(args, Mapping):
            raise reject(("args",), f"must be a mapping of arguments by name; got {describe(args)}.", args)
        twice = [name for name in args if name in section and name not in cls.reserved_keys]
        if twice:
            raise reject(("args", twice[0]), f"model.{twice[0]} is set as well. Remove one of the two.", args)
        return section


def _rebuild(cls: type[Component], values: dict[str, Any], origin: Origin | None) -> Component:
    return cls.from_mapping(values).located_at(origin)


def type_of(target: Callable[..., Any]) -> str:
    """Return the `type` with which the registry finds `target`, in this and in a later process."""
    name = getattr(target, "__qualname__", None)
    if name is None or not (inspect.isclass(target) or inspect.isroutine(target)):
        raise ConfigError(f"A component's type is text, a class or a function; got {target!r}.")
    if "<" in name:
        raise ConfigError(
            f"{name} is defined inside a function, where a saved run cannot find it. "
            "Move it to the top level of its file."
        )
    module = target.__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is not None and (module.startswith(("__main__", "trainwright_project")) or _is_script_module(module, file)):
        return f"{absolute(file)}:{name}"
    return f"{module}:{name}"


def _is_script_module(module: str, file: str) -> bool:
    """Return True for a top-level module that only this program can import by name, from the script's folder."""
    if "." in module or file.endswith("__init__.py"):
        return False
    libraries = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return not any(Path(file).is_relative_to(folder) for folder in libraries)
