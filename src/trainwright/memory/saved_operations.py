"""Which operations of a recomputed layer keep their results: `save: [mm, scaled_dot_product_attention]`.

Names are those of torch's operations below autograd (aten, or `namespace::name`). Matrix products and attention are
what costs time to compute again; everything between them is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from trainwright.backends.private_torch import arguments_of
from trainwright.config.problems import nearest
from trainwright.errors import ConfigError

ATTENTION = "scaled_dot_product_attention"
_FORMS = MappingProxyType(
    {
        ATTENTION: tuple(
            f"aten::_scaled_dot_product_{kernel}"
            for kernel in (
                "flash_attention",
                "flash_attention_for_cpu",
                "efficient_attention",
                "cudnn_attention",
                "fused_attention_overrideable",
            )
        ),
    }
)
"""The operations that one call becomes, by device and shape."""
_CHANCES = ("dropout_p", "p")


def read_operations(label: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the operations with their namespaces; refuses unknown ones and those that cannot be kept."""
    if not names:
        return ()
    found: list[str] = []
    for name in names:
        full = name if "::" in name else f"aten::{name}"
        if name in _FORMS:
            found += _FORMS[name]
            continue
        overloads = _overloads(full)
        if not overloads:
            near = nearest(name, [*_FORMS, *dir(torch)])
            guess = f' Did you mean "{near}"?' if near else ""
            raise ConfigError(f'{label}: torch has no operation "{name}".{guess} Such as mm, addmm, {ATTENTION}.')
        if any(_is_composite(each) for each in overloads):
            raise ConfigError(
                f'{label}: "{name}" becomes other operations before its result could be kept. Name those, such as mm, '
                f"addmm (a linear layer with bias), bmm, {ATTENTION}."
            )
        if _is_random(overloads):
            raise ConfigError(
                f'{label}: "{name}" draws random numbers. Those behind it would be others in the recomputation. '
                "Leave it out."
            )
        found.append(full)
    return tuple(found)


class Policy:
    """Decides for each operation of a layer whether its result is kept; torch asks it in both passes alike."""

    def __init__(self, operations: Sequence[str]) -> None:
        self._operations = frozenset(operations)

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Keeps what is named, unless it draws random numbers: whatever draws after it must draw the same again."""
        name = operation.name().partition(".")[0]
        if name in self._operations and not _draws(operation, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Does this call use random numbers? Attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    for place, argument in enumerate(arguments_of(operation)):
        if argument.name in _CHANCES:
            chance = kwargs.get(argument.name, args[place] if place < len(args) else argument.default_value)
            return bool(chance)
    return True


def _is_random(overloads: Sequence[Any]) -> bool:
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads) and not any(
        argument.name == "dropout_p" for each in overloads for argument in arguments_of(each)
    )


def _is_composite(operation: Any) -> bool:
    """Does autograd see other operations in its place? No public function tells."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")


def _overloads(name: str) -> list[Any]:
    """Returns the forms of an operation by its full name; none where torch has no such operation."""
    namespace, _, base = name.partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace), base, None)
    return [getattr(packet, each) for each in packet.overloads()] if hasattr(packet, "overloads") else []
