"""Says what of a model is not as its published class computes it: such a model must not be written under that name.

transformers builds a folder's model from config.json alone. A forward of the user's own, a replaced part or an adapter
is in no config.json, so that it would compute something else with the same weights, in silence.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.models.pretrained import on_meta

if TYPE_CHECKING:
    from trainwright.models.model import Model

# What of a class does not decide what it computes: how it is made, drawn, shown, named in files, and continued.
NOT_COMPUTING = (
    "__init__", "__init_subclass__", "__new__",
    "_init_weights", "init_weights", "post_init", "reset_parameters", "disable_untrainable_params",
    "extra_repr", "__repr__", "_get_name", "train", "gradient_checkpointing_enable", "generate",
    "key_map", "hugging_face_type", "settings_from_hugging_face", "to_hugging_face", "unwritten",
    "from_config", "from_preset", "from_pretrained", "load_pretrained", "save_pretrained", "state_dict",
)  # fmt: skip

# Plain attributes that say how a model is trained, or what it has just seen, and nothing of its outputs.
NOT_DECIDING = re.compile(r"_.*|training|.*dropout.*|.*gradient_checkpointing.*|loss_type|name_or_path|.*_cached")

OWN_HOOKS = ("trainwright", "transformers", "accelerate")
"""Packages whose hooks leave the outputs as they are."""


def changes_of(model: Model) -> list[str]:
    """Returns what transformers would not compute as this model does; nothing for a model as its class was shipped.

    The class that counts is the one that names `hugging_face_architectures`: a subclass that names them itself answers
    for what it computes. What is compared with a fresh model of that class: methods, sub-modules, their hooks and plain
    attributes, names and shapes of weights. The criterion may be any.
    """
    published = next(one for one in type(model).__mro__ if "hugging_face_architectures" in vars(one))
    known = inspect.signature(published).parameters
    with on_meta():
        twin = published(**{key: value for key, value in model.settings.items() if key in known})
    return _differences(model, twin)


def changes_of_theirs(model: nn.Module) -> list[str]:
    """Does the same for a model of transformers, by a fresh one that its config describes.

    A class with a config of its own has a name of its own in config.json, and answers for itself.
    """
    kind: Any = type(model)
    published = next((one for one in kind.__mro__ if _is_theirs(one)), kind)
    if not _is_theirs(kind) and not _is_theirs(kind.config_class):
        return []
    config: Any = model.config
    try:
        with on_meta():
            twin: nn.Module = published._from_config(copy.deepcopy(config))
    except (RuntimeError, NotImplementedError):  # a constructor that computes with its weights
        with torch.random.fork_rng(devices=[]):
            twin = published._from_config(copy.deepcopy(config))
    return _differences(model, twin)


def _differences(model: nn.Module, twin: nn.Module) -> list[str]:
    found = list(_other_parts(model, twin))
    ours, theirs = (
        {name: tuple(one.shape) for name, one in each.state_dict(keep_vars=True).items() if not _is_criterion(name)}
        for each in (model, twin)
    )
    explained = tuple(f"{one.partition(' ')[0]}." for one in found)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name) and not name.startswith(explained):
            found.append(f"{name} is {_shape(ours.get(name))}, not {_shape(theirs.get(name))}")
    return found


def _other_parts(model: nn.Module, twin: nn.Module) -> Iterator[str]:
    """Names the outermost modules that compute otherwise than those of the twin."""
    parts, expected = (dict(each.named_modules(remove_duplicate=False)) for each in (model, twin))
    changed: list[str] = []
    for name in expected:
        if _is_criterion(name) or any(name.startswith(f"{outer}.") for outer in changed):
            continue
        problem = f"{name} is not there" if name not in parts else _difference(name, parts[name], expected[name])
        if problem is not None:
            yield problem
            if name:
                changed.append(name)


def _difference(name: str, part: nn.Module, expected: nn.Module) -> str | None:
    """Says in what a module would compute otherwise than the one that is expected at its place."""
    kind, other = type(part), type(expected)
    shown = name or kind.__name__
    if _has_own_forward(part):
        return f"{shown} has another forward"
    replaced = _replaced(kind, other)
    if replaced is not None and not name:
        return f"{kind.__name__}.{replaced} replaces that of {other.__name__}"
    if replaced is not None:
        what = "" if replaced == "forward" else f", whose {replaced} it replaces"
        return f"{name} is a {kind.__name__}, not a {other.__name__}{what}"
    if _hooks(part) != _hooks(expected):
        return f"{shown} has hooks that change what it gets or gives: {', '.join(_hooks(part)) or 'none'}"
    if isinstance(part, nn.Dropout):
        return None
    if part.extra_repr() != expected.extra_repr():
        return f"{shown} is {kind.__name__}({part.extra_repr()}), not ({expected.extra_repr()})"
    for attribute, value in vars(expected).items():
        if _is_plain(value) and not NOT_DECIDING.fullmatch(attribute):
            got = getattr(part, attribute, None)
            if not (got == value or got is value):
                return f"{shown} has {attribute} {got!r}, not {value!r}"
    return None


def _replaced(kind: type[Any], published: type[Any]) -> str | None:
    """Returns the name of what decides in a class, of its own or inherited, and is another in the class given."""
    if kind is published:
        return None
    names = dict.fromkeys(name for one in published.__mro__ if one is not object for name in vars(one))
    for name in ("forward", *names):
        if name in NOT_COMPUTING:
            continue
        ours, theirs = (inspect.getattr_static(each, name, None) for each in (kind, published))
        is_value = _is_plain(theirs) and not NOT_DECIDING.fullmatch(name)
        decides = hasattr(theirs, "__get__") or is_value  # functions, properties and their like have it
        if decides and ours is not theirs and not (is_value and ours == theirs):
            return name
    return None


def _hooks(module: nn.Module) -> list[str]:
    """Names the hooks before and after a module's forward that are neither ours nor transformers'."""
    every = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    named = [one if hasattr(one, "__qualname__") else type(one) for one in every]
    return [one.__qualname__ for one in named if str(one.__module__).partition(".")[0] not in OWN_HOOKS]


def _is_plain(value: Any) -> bool:
    """Can two of these be compared: a number, text, or a function that stands in a file by its name?"""
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return "<" not in value.__qualname__
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


def _has_own_forward(module: nn.Module) -> bool:
    """Was the forward of this one object replaced? accelerate does so, to cast inputs, and keeps the other beside."""
    return "forward" in vars(module) and not hasattr(module, "_original_forward")


def _is_criterion(name: str) -> bool:
    return name.partition(".")[0] == "criterion"


def _is_theirs(kind: Any) -> bool:
    return str(kind.__module__).partition(".")[0] == "transformers"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
