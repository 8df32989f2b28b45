"""Says what of a model is not as its published class computes it: such a model must not be written under that name.

transformers builds a folder's model from config.json alone. A forward of the user's own, a replaced part or an adapter
is in no config.json, so that it would compute something else with the same weights, in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from trainwright.models.pretrained import on_meta

if TYPE_CHECKING:
    from trainwright.models.model import Model

# Methods that do not decide what a model computes: how it is made, drawn, named in files, and continued.
NOT_COMPUTING = (
    "__init__",
    "_init_weights",
    "reset_parameters",
    "generate",
    "key_map",
    "hugging_face_type",
    "settings_from_hugging_face",
    "to_hugging_face",
)


def changes_of(model: Model) -> list[str]:
    """Returns what transformers would not compute as this model does; nothing for a model as its class was shipped.

    The class that counts is the one that names `hugging_face_architectures`: a subclass that names them itself answers
    for what it computes. What is compared with a fresh model of that class: methods, sub-modules, names and shapes of
    weights. The criterion may be any.
    """
    published = next(one for one in type(model).__mro__ if "hugging_face_architectures" in vars(one))
    found = list(_overridden(type(model), published))
    known = inspect.signature(published).parameters
    with on_meta():
        twin = published(**{key: value for key, value in model.settings.items() if key in known})
    found += _other_parts(model, twin)
    ours, theirs = (
        {name: tuple(one.shape) for name, one in each.state_dict(keep_vars=True).items() if not _is_criterion(name)}
        for each in (model, twin)
    )
    explained = tuple(f"{one.partition(' ')[0]}." for one in found)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name) and not name.startswith(explained):
            found.append(f"{name} is {_shape(ours.get(name))}, not {_shape(theirs.get(name))}")
    return found


def changes_of_theirs(model: nn.Module) -> list[str]:
    """Does the same for a model of transformers, whose sub-modules are all of its own or torch's classes.

    A class with a config of its own has a name of its own in config.json, and answers for itself.
    """
    kind: Any = type(model)
    published = next((one for one in kind.__mro__ if _is_theirs(one)), kind)
    if not _is_theirs(kind) and not _is_theirs(kind.config_class):
        return []
    found = list(_overridden(kind, published))
    for name, module in model.named_modules():
        if name and not (_is_theirs(type(module)) or type(module).__module__.startswith("torch.")):
            found.append(f"{name} is a {type(module).__name__}")
        elif _has_own_forward(module):
            found.append(f"{name or kind.__name__} has another forward")
    return found


def _overridden(kind: type[Any], published: type[Any]) -> Iterator[str]:
    """Names the methods of the published class that a subclass has replaced."""
    computing = set().union(*(vars(one) for one in published.__mro__ if one.__module__ == published.__module__))
    computing |= {"forward", "__call__"}
    for each in kind.__mro__[: kind.__mro__.index(published)]:
        for name, value in vars(each).items():
            acts = inspect.isfunction(value) or isinstance(value, property)
            if acts and name in computing and name not in NOT_COMPUTING:
                yield f"{each.__name__}.{name} replaces that of {published.__name__}"


def _other_parts(model: nn.Module, twin: nn.Module) -> Iterator[str]:
    """Names the outermost sub-modules that compute otherwise than those of the twin."""
    parts = dict(model.named_modules(remove_duplicate=False))
    changed: list[str] = []
    for name, expected in twin.named_modules(remove_duplicate=False):
        if _is_criterion(name) or any(name.startswith(f"{outer}.") for outer in changed):
            continue
        part = parts.get(name)
        if part is None:
            yield f"{name} is not there"
        elif _has_own_forward(part):
            yield f"{name or type(part).__name__} has another forward"
        elif not name:
            continue  # the model itself, whose methods are compared above
        elif type(part).forward is not type(expected).forward:
            yield f"{name} is a {type(part).__name__}, not a {type(expected).__name__}"
        elif part.extra_repr() != expected.extra_repr() and not isinstance(part, nn.Dropout):
            yield f"{name} is {type(part).__name__}({part.extra_repr()}), not ({expected.extra_repr()})"
        else:
            continue
        changed.append(name)


def _has_own_forward(module: nn.Module) -> bool:
    """Was the forward of this one object replaced? accelerate does so, to cast inputs, and keeps the other beside."""
    return "forward" in vars(module) and not hasattr(module, "_original_forward")


def _is_criterion(name: str) -> bool:
    return name.partition(".")[0] == "criterion"


def _is_theirs(kind: Any) -> bool:
    return str(kind.__module__).partition(".")[0] == "transformers"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
