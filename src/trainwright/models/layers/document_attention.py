"""Attention in rows of several documents or with padding: blocks that no query sees are skipped instead of masked."""

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
"""Queries, and keys, that are skipped or not as one: torch's own choice for flex attention."""


class DocumentBorders(NamedTuple):
    """Which blocks of keys each block of queries meets, and the other way round for the backward pass.

    A block pair is left out (nothing in it may be seen), full (all of it may be) or looked at pair by pair. Of each
    row of `…_indices` only the first `…_num_blocks` count. N is the number of blocks in a row. All are contiguous: the
    kernel reads the indices of a row side by side, whatever their strides are.
    """

    document_ids: Tensor
    """[B, S]: a query sees the keys with an id equal to its own that are not later."""
    key_ids: Tensor
    """[B, S]: the ids of the keys. They differ from `document_ids` in padded rows, where no query sees padding."""
    kv_num_blocks: Tensor
    """[B, 1, N] and, for the indices, [B, 1, N, N], int32; so are all that follow."""
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor

    def visible(self) -> Tensor:
        """Returns the mask [B, 1, S, S] of the same borders."""
        return visible_pairs(self.document_ids, self.key_ids)


def has_blocks(rows: Tensor, kind: Kind = "packed", *, width: int | None = None) -> bool:
    """Returns True if borders in blocks are fastest for rows [B, S] and heads of this width: on GPUs with Triton.

    A `width` of None is not known yet.
    """
    device, length = rows.device, rows.shape[1]
    is_there = waits_for_memory(device) and device.index is not None  # a run that is only planned has no GPU
    return is_there and not length % BLOCK and fastest(kind, length, width) == "flex" and has_triton()


def document_borders(document_ids: Tensor, key_ids: Tensor | None = None) -> DocumentBorders:
    """Returns the borders of rows [B, S], S a multiple of BLOCK, in which no token sees a later one.

    Any ids are valid; if they rise along the row, as those of data/pack.py do, no block is computed unnecessarily.
    `key_ids` are the ids of the keys if they differ from those of the queries. Does not wait for the device.
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
    # Padding (-1) stands at the end of a row: as the largest id it does not stretch the range of the last block.
    rising = torch.where(ids < 0, torch.iinfo(ids.dtype).max, ids)
    # Four dims from here on: compiled code gives a dim of one that is put in later the stride 0, and the kernel goes
    # from row to row of the batch by just that stride.
    blocks = rising.view(len(rising), 1, -1, BLOCK)
    return blocks.amin(dim=3), blocks.amax(dim=3)


def padded_borders(attention_mask: Tensor) -> DocumentBorders:
    """Returns the borders of rows [B, S] with padding (0): every query sees the keys before it that are not padding."""
    key_ids = torch.where(attention_mask.bool(), 0, -1)
    return document_borders(torch.zeros_like(key_ids), key_ids)


def visible_pairs(document_ids: Tensor, key_ids: Tensor | None = None) -> Tensor:
    """Returns the mask [B, 1, S, S] of the same borders: True where a query may see a key."""
    # Padding (-1) is a document of its own: it sees itself, so no query is left without a key.
    key_ids = document_ids if key_ids is None else key_ids
    return (document_ids[:, None, :, None] == key_ids[:, None, None, :]).tril()


def attend_within_documents(
    queries: Tensor, keys: Tensor, values: Tensor, borders: DocumentBorders, *, scale: float | None, enable_gqa: bool
) -> Tensor | None:
    """Mixes values within documents by flex attention; None where its kernel cannot run, and nothing has happened."""
    if not _is_taken(queries):
        return None
    if torch.compiler.is_compiling():
        return flex(queries, keys, values, borders, scale, enable_gqa)
    kernel = _compiled_flex()
    # Modes that listen to every operation (checks, counters, selective activation checkpointing) would be compiled into
    # the kernel.
    if kernel.failed or has_modes():
        return None
    return kernel.attend(queries, keys, values, borders, scale, enable_gqa)


def flex(
    queries: Tensor, keys: Tensor, values: Tensor, borders: DocumentBorders, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Calls flex attention [B, heads, S, W] with borders; for compiled code, since otherwise it holds all scores."""
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
    """Flex attention as one compiled kernel for code that is not compiled; given up for good where it fails."""

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
                "Attention within documents goes on with masks over all pairs of tokens, which is slower: torch's flex "
                "attention cannot be compiled here (%s: %s).",
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
    """Returns how many columns of each row of a mask [B, 1, N, N] are True and their numbers, those first."""
    counts = mask.sum(dim=-1, dtype=torch.int32)
    columns = mask.to(torch.int32).argsort(dim=-1, descending=True, stable=True)  # laid out as the mask is
    return counts.contiguous(), columns.to(torch.int32, memory_format=torch.contiguous_format)
