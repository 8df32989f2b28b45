"""Which kernel of torch computes masked attention with fewer key and value heads than query heads, on a GPU.

    python benchmarks/grouped_attention.py

For each head width, dtype and mask: the kernels that accept `enable_gqa=True`, and the milliseconds of forward and
backward as torch chooses, with grouped heads and with repeated ones.
"""

from __future__ import annotations

import itertools
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, BATCH, LENGTH = 16, 4, 4, 1024
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


def tensors(width, dtype):
    def draw(heads):
        return torch.randn(BATCH, heads, LENGTH, width, device="cuda", dtype=dtype, requires_grad=True)

    return draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)


def left_padded():
    """Causal rows whose first tokens are padding; a padded query sees itself, so that no row is empty."""
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril()
    padded = torch.arange(LENGTH, device="cuda") < torch.tensor([[0], [100], [300], [17]], device="cuda")
    return (visible & ~padded[:, None, :])[:, None] | torch.eye(LENGTH, dtype=torch.bool, device="cuda")


def attend(query, key, value, mask, *, repeats):
    if repeats:
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=not repeats)


def runs(kernel, drawn, mask):
    try:
        with sdpa_kernel([kernel]):
            attend(*drawn, mask, repeats=False).sum().backward()
    except RuntimeError:
        return False
    return True


def milliseconds(drawn, mask, *, repeats):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(13):
        if number == 3:
            start.record()
        attend(*drawn, mask, repeats=repeats).sum().backward()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 10


def main():
    warnings.filterwarnings("ignore")
    mask = left_padded()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; {HEADS} heads, {KV_HEADS} key and value heads")
    print(f"{'width':>6} {'dtype':>9}  {'accepting kernels':<18} {'grouped ms':>11} {'repeated ms':>12}")
    widths, dtypes = (32, 40, 64, 72, 80, 96, 100, 128, 160, 192, 256), (torch.bfloat16, torch.float16, torch.float32)
    for width, dtype in itertools.product(widths, dtypes):
        drawn = tensors(width, dtype)
        accepting = [name for name, kernel in KERNELS.items() if runs(kernel, drawn, mask)]
        times = [milliseconds(drawn, mask, repeats=repeats) for repeats in (False, True)]
        name = str(dtype).removeprefix("torch.")
        print(
            f"{width:>6} {name:>9}  {', '.join(accepting) or 'none':<18} {times[0]:>11.2f} {times[1]:>12.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
