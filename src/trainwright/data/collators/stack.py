"""Stack: the collator for samples of equal shapes, and the check that a collator returns tensors.

Samples of different lengths are padded in padded.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import default_collate

from trainwright.backends.private_torch import tree_leaves
from trainwright.errors import DataError


class Stack:
    """Stacks equal samples: tensors, arrays and numbers become tensors, texts become a list, nesting is kept.

    >>> batch = Stack()([{"x": torch.zeros(3), "labels": 1}, {"x": torch.ones(3), "labels": 0}])
    >>> tuple(batch["x"].shape), batch["labels"].tolist()
    ((2, 3), [1, 0])
    """

    draws_nothing = True

    def __call__(self, samples: list[Any]) -> Any:
        """Returns the batch, on the host."""
        first = samples[0]
        if isinstance(first, Mapping):
            batch = {}
            for sample in samples:
                if sample.keys() != first.keys():
                    raise DataError(
                        f"The samples of a batch have different fields: {', '.join(first)}; {', '.join(sample)}. "
                        "Return the same fields for all samples, or write a collator (data.collator)."
                    )
            for name in first:
                batch[name] = _stack(list(map(itemgetter(name), samples)), repr(name))
            return batch
        if type(first) in (tuple, list):
            lengths = sorted({len(sample) for sample in samples})
            if len(lengths) > 1:
                raise DataError(
                    f"The samples of a batch have different numbers of elements: {' and '.join(map(str, lengths))}. "
                    "Return the same number for all samples, or write a collator (data.collator)."
                )
            columns = enumerate(zip(*samples, strict=True))
            return type(first)(_stack(list(column), str(number)) for number, column in columns)
        return _stack(samples, "")


def _stack(values: list[Any], field: str) -> Any:
    try:
        # default_collate walks its type tables for every field of every batch; tensors are by far the common case.
        return torch.stack(values) if isinstance(values[0], torch.Tensor) else default_collate(values)
    except (RuntimeError, TypeError) as error:
        if hasattr(values[0], "convert") and hasattr(values[0], "mode"):  # a PIL image, without importing PIL
            raise DataError(
                f"The samples of a batch cannot be stacked: field {field} is a PIL image, not a tensor. Set the "
                "dataset's transform, such as {type: torchvision.transforms:ToTensor}, or use the collator image "
                "(data.collator), which converts and resizes."
            ) from error
        shapes = {str(tuple(value.shape)) if hasattr(value, "shape") else type(value).__name__ for value in values}
        raise DataError(
            f"The samples of a batch cannot be stacked: field {field} is {' and '.join(sorted(shapes))}. "
            "Return equal shapes, or use a collator that pads (data.collator)."
        ) from error


def reject_lists(batch: Any) -> None:
    """Rejects a batch without any tensor, as a collator that stacks nothing returns it."""
    # A list of tensors counts as one leaf, because it is the mistake to detect.
    leaves = tree_leaves(batch, is_leaf=lambda value: isinstance(value, list))
    if not isinstance(batch, Mapping) or not batch or any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return
    fields = ", ".join(f"{name} ({type(value).__name__})" for name, value in batch.items())
    raise DataError(f"The batch contains no tensor: {fields}. Stack the samples' values into tensors in the collator.")
