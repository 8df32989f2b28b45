"""Casts gradients to fp8 in both layouts that their two products read: one kernel for a GPU, in Triton.

A gradient [M, N] is read once and written twice, as rows and transposed, 4 bytes per element instead of the 6 of two
casts. Several gradients that are one factor are written side by side. Only fp8_linear.py imports this, where there is
Triton. The tensors must be on the current device, because Triton launches there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

TILE = 64
"""Rows and columns per program."""
NUM_WARPS = 4


@triton_op("trainwright::cast_gradients", mutates_args={})
def cast_gradients(gradients: list[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gradients [M, N₁], [M, N₂], … divided by their scale in e5m2: joined [M, N], and transposed [N, M]."""
    num_rows = gradients[0].shape[0]
    num_columns = sum(each.shape[1] for each in gradients)
    options: dict[str, Any] = {"dtype": torch.float8_e5m2, "device": scale.device}
    rows = torch.empty((num_rows, num_columns), **options)
    transposed = torch.empty((num_columns, num_rows), **options)
    start = 0
    for gradient in gradients:
        width = gradient.shape[1]
        wrap_triton(_cast)[(triton.cdiv(num_rows, TILE), triton.cdiv(width, TILE))](
            gradient,
            scale,
            rows,
            transposed,
            num_rows,
            width,
            *gradient.stride(),
            num_columns,
            start,
            tile=TILE,
            num_warps=NUM_WARPS,
        )
        start += width
    return rows, transposed


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _cast(  # type: ignore[no-untyped-def]  # noqa: ANN202  # Triton gives annotations a meaning of its own
    gradient,  # noqa: ANN001
    scale,  # noqa: ANN001
    rows,  # noqa: ANN001
    transposed,  # noqa: ANN001
    num_rows,  # noqa: ANN001
    width,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    column_stride,  # noqa: ANN001
    num_columns,  # noqa: ANN001
    start,  # noqa: ANN001
    tile: tl.constexpr,
):
    row = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)[None, :]
    inside = (row < num_rows) & (column < width)
    values = tl.load(gradient + row * row_stride + column * column_stride, mask=inside, other=0.0).to(tl.float32)
    cast = (values * (1.0 / tl.load(scale))).to(rows.dtype.element_ty)
    tl.store(rows + row * num_columns + start + column, cast, mask=inside)
    tl.store(transposed + tl.trans(start + column) * num_rows + tl.trans(row), tl.trans(cast), mask=tl.trans(inside))
