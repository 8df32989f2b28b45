"""Stack: the collator for samples that are equal in shape already, whatever they hold.

Also here: the check that a collator made tensors at all. Samples of unequal length are padded.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import default_collate

from trainwright.backends.private_torch import tree_leaves
from trainwright.errors import DataError


class Stack:
    """Stacks equal samples: tensors, arrays and numbers become tensors, texts a list, nests are kept.

    >>> batch = Stack()([{"x": torch.zeros(3), "labels": 1}, {"x": torch.ones(3), "labels": 0}])
    >>> tuple(batch["x"].shape), batch["labels"].tolist()
    ((2, 3), [1, 0])
    """

    draws_nothing = True

    def __call__(self, samples: list[Any]) -> Any:
        """Returns the batch, on the host."""
        first = samples[0]
        if isinstance(first, Mapping):
            for sample in samples:
                if sample.keys() != first.keys():
                    raise DataError(
                        f"The samples of a batch have different fields: {', '.join(first)}; {', '.join(sample)}. "
                        "Give all samples the same ones, or write a collator (data.collator)."
                    )
            return {name: _stack([sample[name] for sample in samples], repr(name)) for name in first}
        if type(first) in (tuple, list):
            columns = enumerate(zip(*samples, strict=True))
            return type(first)(_stack(list(column), str(number)) for number, column in columns)
        return _stack(samples, "")


def _stack(values: list[Any], field: str) -> Any:
    try:
        # default_collate walks its type tables for every field of every batch; tensors are by far the common case.
        return torch.stack(values) if isinstance(values[0], torch.Tensor) else default_collate(values)
    except (RuntimeError, TypeError) as error:
        shapes = {str(tuple(value.shape)) if hasattr(value, "shape") else type(value).__name__ for value in values}
        raise DataError(
            f"The samples of a batch cannot be stacked: field {field} is {' and '.join(sorted(shapes))}. "
            "Make them equal, or write a collator that pads them (data.collator)."
        ) from error


def reject_lists(batch: Any) -> None:
    """Rejects a batch without any tensor: the work of a collator that stacks nothing."""
    # A list of tensors is not looked into: that is the mistake itself.
    leaves = tree_leaves(batch, is_leaf=lambda value: isinstance(value, list))
    if not isinstance(batch, Mapping) or not batch or any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return
    held = ", ".join(f"{name} ({_describe(value)})" for name, value in batch.items())
    raise DataError(
        f"There is no tensor in the batch: {held}. Let the collator stack the samples' values into tensors."
    )


def _describe(value: Any) -> str:
    if isinstance(value, list) and value:
        return f"a list of {len(value)} {type(value[0]).__name__}s"
    return f"a {type(value).__name__}"
