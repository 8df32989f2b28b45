"""Freezing by glob: parameters that no optimizer gets."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainwright.models.names import matched_parameters


def freeze(model: nn.Module, globs: Any) -> list[str]:
    """Freezes every parameter whose name one of the globs matches; returns the names.

    A glob that matches no parameter is refused. A tied parameter is frozen by either of its names, at both places.
    """
    names = matched_parameters("freeze", globs, model)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        own[name].requires_grad_(False)
    return names
