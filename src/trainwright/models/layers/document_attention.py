"""Attention in rows of several documents or with padding: invisible blocks are skipped instead of masked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.backends import waits_for_memory
from trainwright.backends.private_torch import compile_error, has_modes, has_triton
from trainwright.models.layers.kernel_table import FLEX_WIDTHS, Kind, fastest

logger = logging.getLogger(__name__)

BLOCK = 128
"""The block size of queries and keys: torch's default for flex attention."""


class DocumentBorders(NamedTuple):
    """The blocks of keys that each block of queries attends to, and the reverse for the backward pass.

    A block pair is skipped (nothing is visible), full (everything is visible) or partial (evaluated per element). In
    each row of `…_indices`, only the first `…_num_blocks` count. N is the number of blocks in a row. All tensors are
    contiguous, because the kernel ignores the strides of the indices of a row.
    """

    document_ids: Tensor
    """[B, S]: a query attends to the keys with its id that are not later."""
    key_ids: Tensor
    """[B, S]: the ids of the keys. They differ from `document_ids` in padded rows, in which no query attends to
    padding."""
    kv_num_blocks: Tensor
    """[B, 1, N] and, for the indices, [B, 1, N, N], int32; as for all following fields."""
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor

    def visible(self) -> Tensor:
        """Returns the equivalent mask [B, 1, S, S]."""
        return visible_pairs(self.document_ids, self.key_ids)


def has_blocks(rows: Tensor, kind: Kind = "packed", *, width: int | None = None) -> bool:
    """Returns True if block boundaries are fastest for rows [B, S] and heads of this width: on GPUs with Triton.

    A `width` of None is not known yet.
    """
    device, length = rows.device, rows.shape[1]
    is_there = waits_for_memory(device) and device.index is not None  # a fake run has no GPU
    return is_there and not length % BLOCK and fastest(kind, length, width) == "flex" and has_triton()


def document_borders(document_ids: Tensor, key_ids: Tensor | None = None) -> DocumentBorders:
    """Returns the block boundaries of rows [B, S], with S a multiple of BLOCK, for causal attention.

    Any ids are valid; if they increase along the row, like those of data/pack.py, no block is computed unnecessarily.
    `key_ids` are the ids of the keys if they differ from those of the queries. Does not synchronize with the device.
    """
    key_ids = document_ids if key_ids is None else key_ids
    query_lowest, query_highest = _ranges(document_ids)  # [B, 1, N]
    key_lowest, key_highest = (query_lowest, query_highest) if key_ids is document_ids else _ranges(key_ids)
    number = torch.arange(query_lowest.shape[2], device=document_ids.device)
    meet = query_lowest[..., :, None] <= key_highest[..., None, :]
    meet = meet & (key_lowest[..., None, :] <= query_highest[..., :, None])
    meet = meet & (number[:, None] >= number)  # [B, 1, N queries, N keys]
    is_single = (query_lowest == query_highest)[..., :, None] & (key_lowest == key_highest)[..., None, :]
    full = meet & is_single & (number[:, None] > number)
    partial = meet & ~full
    return DocumentBorders(
        document_ids,
        key_ids,
        *_ordered(partial),
        *_ordered(full),
        *_ordered(partial.transpose(2, 3)),
        *_ordered(full.transpose(2, 3)),
    )


def _ranges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the lowest and the highest id of each block, [B, 1, N]."""
    # Padding (-1) is at the end of a row; with the largest id, it does not extend the range of the last block.
    rising = torch.where(ids < 0, torch.iinfo(ids.dtype).max, ids)
    # Four dims from here on, because compiled code gives a dim of size 1 that is inserted later the stride 0, which the
    # kernel uses to move from row to row.
    blocks = rising.view(len(rising), 1, -1, BLOCK)
    return blocks.amin(dim=3), blocks.amax(dim=3)


def padded_borders(attention_mask: Tensor) -> DocumentBorders:
    """Returns the block boundaries of rows [B, S] with padding (0): every query attends to earlier keys that are not
    padding."""
    key_ids = torch.where(attention_mask.bool(), 0, -1)
    return document_borders(torch.zeros_like(key_ids), key_ids)


def visible_pairs(document_ids: Tensor, key_ids: Tensor | None = None) -> Tensor:
    """Returns the equivalent mask [B, 1, S, S]: True where a query attends to a key."""
    # Padding (-1) is a separate document that attends to itself, so every query has a key.
    key_ids = document_ids if key_ids is None else key_ids
    return (document_ids[:, None, :, None] == key_ids[:, None, None, :]).tril()


def attend_within_documents(
    queries: Tensor, keys: Tensor, values: Tensor, borders: DocumentBorders, *, scale: float | None, enable_gqa: bool
) -> Tensor | None:
    """Attention within documents with flex attention; None if its kernel cannot run."""
    if not _is_taken(queries):
        return None
    if torch.compiler.is_compiling():
        return flex(queries, keys, values, borders, scale, enable_gqa)
    kernel = _compiled_flex()
    # Modes that intercept every operation (checks, counters, selective activation checkpointing) would be compiled into
    # the kernel.
    if kernel.failed or has_modes():
        return None
    return kernel.attend(queries, keys, values, borders, scale, enable_gqa)


def flex(
    queries: Tensor, keys: Tensor, values: Tensor, borders: DocumentBorders, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Calls flex attention [B, heads, S, W] with block boundaries; for compiled code, because in eager mode it
    materializes all scores."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    of_queries, of_keys = borders.document_ids, borders.key_ids

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (of_queries[batch, query] == of_keys[batch, key])

    length = queries.shape[2]
    mask = BlockMask((length, length), *borders[2:], BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=is_visible)
    mixed: Any = flex_attention(queries, keys, values, block_mask=mask, scale=scale, enable_gqa=enable_gqa)
    result: Tensor = mixed
    return result


class _CompiledFlex:
    """Flex attention as a compiled kernel for eager code; disabled permanently after a failure."""

    def __init__(self) -> None:
        self.failed = False
        self._run: Callable[..., Tensor] = torch.compile(flex, fullgraph=True)

    def attend(self, *args: Any) -> Tensor | None:
        try:
            return self._run(*args)
        except compile_error() as error:
            self.failed = True
            first = str(error).strip().splitlines()[0]
            logger.warning(
                "Attention within documents continues with masks over all pairs of tokens, which is slower: torch's "
                "flex attention cannot be compiled here (%s: %s).",
                type(error).__name__,
                first,
            )
            return None


@cache
def _compiled_flex() -> _CompiledFlex:
    return _CompiledFlex()


def _is_taken(queries: Tensor) -> bool:
    is_narrow = queries.dtype in (torch.bfloat16, torch.float16)  # in float32 its blocks do not fit into a GPU's cache
    return is_narrow and queries.shape[-1] in FLEX_WIDTHS and not hasattr(queries, "device_mesh")


def _ordered(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of True columns in each row of a mask [B, 1, N, N], and the columns' indices with these
    first."""
    counts = mask.sum(dim=-1, dtype=torch.int32)
    columns = mask.to(torch.int32).argsort(dim=-1, descending=True, stable=True)  # with the layout of the mask
    return counts.contiguous(), columns.to(torch.int32, memory_format=torch.contiguous_format)
