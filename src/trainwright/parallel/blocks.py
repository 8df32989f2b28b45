"""Which modules of a model are its blocks: what is gathered together, used, and let go again.

Blocks are the members of a ModuleList or Sequential, the outermost there are. All else belongs to the model as a
whole. fully_shard.py splits their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

SMALLEST_LAYER = 2**20
"""How many elements a layer without layers of its own must have to be a block: one collective each costs more."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks in the order of the model's modules, each once; none where the model has no such lists."""
    found: dict[int, nn.Module] = {}
    for module in _outermost(model):
        found.setdefault(id(module), module)
    return list(found.values())


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    members = [child for child in module.children() if _has_parameters(child)]
    is_list = isinstance(module, nn.ModuleList) or (type(module) is nn.Sequential and len(members) > 1)
    for member in members:
        if is_list and _can_be_block(member):
            yield member
        else:
            yield from _outermost(member)


def _can_be_block(member: nn.Module) -> bool:
    if not _has_forward(member) or type(member) is nn.Sequential:
        return False  # a list in a list: its members are called, not it; the blocks are further down
    is_layer = next(member.children(), None) is None
    return not is_layer or sum(parameter.numel() for parameter in member.parameters()) >= SMALLEST_LAYER


def _has_forward(module: nn.Module) -> bool:
    # nn.Module's own forward only raises; lists and dictionaries of modules have that one.
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
