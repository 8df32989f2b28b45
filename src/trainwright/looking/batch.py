"""What is in the first batch: its fields, how much of it is padding, and how much of it is learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.labels import IGNORED_LABEL
from trainwright.looking.facts import Batch, Values
from trainwright.looking.values import (
    Decode,
    describe_batch,
    describe_sample,
    fields_of,
    is_label_field,
    is_token_field,
    tensor_of,
)


def look_at_batch(
    batch: Any,
    samples: Sequence[Any],
    *,
    rank: int,
    num_ranks: int,
    micro_batch_size: int | None,
    decode: Decode,
) -> Batch:
    """Describes the batch that was made of samples."""
    padding, padding_by = padding_of(batch)
    return Batch(
        samples=len(samples),
        rank=rank,
        num_ranks=num_ranks,
        micro_batch_size=micro_batch_size,
        fields=describe_batch(batch),
        padding=padding,
        padding_by=padding_by,
        in_loss=_share_in_loss(batch),
        first_row=_first_row(batch, samples[0], decode),
    )


def _first_row(batch: Any, sample: Any, decode: Decode) -> tuple[Values, ...]:
    """Describes the tokens that a collator made; none where the sample has them itself."""
    if "input_ids" in dict(fields_of(sample)):
        return ()
    tensors = _tensors(batch)
    rows = {name: tensors[name][0] for name in ("input_ids", "labels") if name in tensors and tensors[name].ndim == 2}
    mask = tensors.get("attention_mask")
    if "input_ids" not in rows:
        return ()
    if mask is not None and mask.ndim == 2:
        rows = {name: row[mask[0] != 0] for name, row in rows.items() if row.shape == mask[0].shape}
    return describe_sample(rows, decode)


def padding_of(batch: Any) -> tuple[float | None, str | None]:
    """Returns the share of places without a token, and the field that tells; (None, None) where none does.

    Labels tell least: what is not learnt need not be padding, so only the -100 that rows end with count.
    """
    tensors = _tensors(batch)
    mask = tensors.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        return _share(mask == 0), "attention_mask"
    documents = tensors.get("document_ids")
    if documents is not None and documents.ndim == 2:
        return _share(documents < 0), "document_ids"
    labels = _token_labels(tensors)
    if labels is not None:
        is_learnt_later = (labels != IGNORED_LABEL).to(torch.int64).flip(-1).cumsum(-1).flip(-1)
        return _share(is_learnt_later == 0), "labels"
    return None, None


def num_tokens(batch: Any) -> int | None:
    """Returns how many places hold a token; None for a batch without tokens."""
    tokens = next((each for name, each in _tensors(batch).items() if is_token_field(name)), None)
    if tokens is None:
        return None
    padding, _ = padding_of(batch)
    return round(tokens.numel() * (1 - (padding or 0.0)))


def _share_in_loss(batch: Any) -> float | None:
    labels = _token_labels(_tensors(batch))
    return None if labels is None else _share(labels != IGNORED_LABEL)


def _token_labels(tensors: dict[str, Tensor]) -> Tensor | None:
    """Returns labels that stand for places of a row, not for samples."""
    for name, tensor in tensors.items():
        if is_label_field(name) and tensor.ndim == 2 and not tensor.is_floating_point():
            return tensor
    return None


def _tensors(batch: Any) -> dict[str, Tensor]:
    found = {name: tensor_of(value) for name, value in fields_of(batch)}
    return {name: tensor for name, tensor in found.items() if tensor is not None and tensor.numel()}


def _share(chosen: Tensor) -> float:
    return float(chosen.to(torch.float64).mean())
