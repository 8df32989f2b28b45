"""Splits a rank's batch into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from trainwright.backends.private_torch import tree_leaves, tree_map, tree_map_only
from trainwright.errors import DataError

PLAIN = (str, bytes, bool, int, float, type(None))


def cut(
    batch: Any, num_samples: int, num_micro_batches: int, collator: Callable[..., Any]
) -> Iterator[tuple[Any, int]]:
    """Yields (micro-batch, how many samples it has).

    Tensors whose dim 0 is the number of samples are cut, and lists within the batch that have an entry a sample; the
    rest is passed whole. A collator whose batches have other shapes defines `split(batch, n)`.
    """
    bounds = [num_samples * number // num_micro_batches for number in range(num_micro_batches + 1)]
    if hasattr(collator, "split"):
        micro_batches = collator.split(batch, num_micro_batches)
        yield from zip(micro_batches, (stop - start for start, stop in pairwise(bounds)), strict=True)
        return
    length = max(num_samples, 1)  # a batch that only stands in holds one sample
    _reject_uncut(batch, length, num_micro_batches)
    for start, stop in pairwise(bounds):
        # A micro-batch without samples repeats the first one, with weight 0.
        rows = slice(start, stop) if stop > start else slice(0, 1)
        yield _select(batch, length, rows), stop - start


def _select(batch: Any, length: int, rows: slice) -> Any:
    if _is_plain(batch):
        return {name: value[rows] if _has_rows(value, length) else value for name, value in batch.items()}

    def is_column(node: Any) -> bool:
        """One entry a sample: plain values, or anything else in a list, such as tensors of different lengths.

        A pair of tensors is no column, also in a batch of two; nor is the batch itself.
        """
        is_list = isinstance(node, (list, tuple)) and not hasattr(node, "_fields")
        if not is_list or len(node) != length:
            return False
        if all(isinstance(each, PLAIN) for each in node):
            return True
        leaves = tree_leaves(node)
        return isinstance(node, list) and node is not batch and not any(_has_rows(each, length) for each in leaves)

    def choose(node: Any) -> Any:
        return node[rows] if is_column(node) or _has_rows(node, length) else node

    return tree_map(choose, batch, is_leaf=is_column)


def _is_plain(batch: Any) -> bool:
    """Is a batch a dict of tensors, as most are? Then torch's walk over any nest, which takes 100 µs, is spared."""
    return type(batch) is dict and all(type(value) is torch.Tensor for value in batch.values())


def _has_rows(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == length


def _reject_uncut(batch: Any, length: int, num_micro_batches: int) -> None:
    if _is_plain(batch) and any(_has_rows(value, length) for value in batch.values()):
        return
    shapes: list[tuple[int, ...]] = []
    tree_map_only(torch.Tensor, lambda tensor: shapes.append(tuple(tensor.shape)), batch)
    if not any(shape and shape[0] == length for shape in shapes):
        raise DataError(
            f"A batch of {length} samples cannot be cut into {num_micro_batches} micro-batches: no tensor has {length} "
            f"rows "
            f"(shapes: {', '.join(map(str, shapes)) or 'no tensors'}). Give the collator a `split(batch, n)`, "
            "or set trainer.micro_batch_size so that gradient_accumulation_steps is 1."
        )
