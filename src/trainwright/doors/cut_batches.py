"""A user's collate_fn under accumulation: its batches are cut into micro-batches, which not every object can be.

How a batch is cut is loop/pieces.py's. What it passes on whole would meet the rows of other samples in each forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainwright.errors import DataError
from trainwright.loop.pieces import PLAIN
from trainwright.user_code import name_of, place_of


class CutBatches:
    """Calls a collate_fn and refuses a batch with an object in it that cannot be cut."""

    def __init__(self, collate: Callable[[list[Any]], Any], num_pieces: int) -> None:
        self._collate = collate
        self._num_pieces = num_pieces

    def __call__(self, samples: list[Any]) -> Any:
        """Returns the batch of the samples."""
        batch = self._collate(samples)
        for leaf in tree_leaves(batch):
            if not isinstance(leaf, (torch.Tensor, *PLAIN)):
                raise DataError(
                    f"{name_of(self._collate)} returned a batch with a {type(leaf).__name__}, which cannot be cut into "
                    f"the {self._num_pieces} micro-batches of --gradient-accumulation-steps: return tensors, texts and "
                    "numbers in dicts, lists or tuples, or give it a method `split(batch, n)`.",
                    where=place_of(self._collate),
                )
        return batch


def cut_batches(collate: Callable[[list[Any]], Any], num_pieces: int) -> Callable[[list[Any]], Any]:
    """Returns the collate_fn as it is where nothing is cut, or where it says itself how to."""
    return collate if num_pieces == 1 or hasattr(collate, "split") else CutBatches(collate, num_pieces)
