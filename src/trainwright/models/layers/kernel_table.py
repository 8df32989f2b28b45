"""Selects the kernel of attention on a GPU by the kind of rows, their length and the width of heads.

FASTEST follows the measurements of benchmarks/attention.py (benchmarks/results/attention.md). "torch" is
`scaled_dot_product_attention` with the kernel that torch selects, and a mask if rows need one. It also replaces a
kernel that cannot run (dtype, dropout, an older torch).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Literal, NamedTuple

from trainwright.backends.private_torch import constant_in_compiled_code

Kind = Literal["packed", "padded", "window", "packed window"]
Kernel = Literal["torch", "flex", "varlen"]


class Row(NamedTuple):
    """A line of the table: a kernel for rows of at least `shortest` tokens and heads of these widths."""

    kernel: Kernel
    shortest: int
    widths: Container[int]


FLEX_WIDTHS = (16, 32, 64, 128)
"""Widths of heads that flex attention supports without padding and with a backward pass that fits on a GPU."""
FLASH_WIDTHS = range(8, 257, 8)
"""Widths of heads that FlashAttention accepts."""

FASTEST: Mapping[Kind, tuple[Row, ...]] = {
    # Rows of 512 tokens took as long with a mask.
    "packed": (Row("flex", 1024, FLEX_WIDTHS),),
    # Not measured; assumed to be like packed rows, whose blocks are skipped in the same way.
    "padded": (Row("flex", 1024, FLEX_WIDTHS),),
    "window": (Row("varlen", 0, FLASH_WIDTHS),),
    "packed window": (),
}
"""The first matching line is used, or "torch" if none matches. FLASH_FIRST decides for causal rows without a mask."""

FLASH_FIRST = ("FA3", "FA4")
"""Versions of FlashAttention that are preferred to cuDNN's kernel if torch has activated them; version 2 is slower."""


def fastest(kind: Kind, length: int, width: int | None = None) -> Kernel:
    """Returns the kernel for rows of `length` tokens; a `width` of None (not yet known) matches every line."""
    for kernel, shortest, widths in FASTEST[kind]:
        if length >= shortest and (width is None or width in widths):
            return kernel
    return "torch"


@constant_in_compiled_code
def prefers_flash() -> bool:
    """Returns True if torch's flash kernel is one of FLASH_FIRST; `CudaBackend.claim` activates those."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)  # not in every torch
    return current is not None and current() in FLASH_FIRST
