"""Memory and speed of a step with activation_checkpointing, offload and compile_repeated_blocks, on a GPU.

    python benchmarks/memory.py [--rows 8] [--tokens 4096] [--layers 16]

Forward and backward of a llama in bf16 autocast with fp32 weights, no optimizer; the peak is that of torch's allocator.
docs/memory.md shows the table.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch

from trainwright.memory.rewrite import apply_memory_settings
from trainwright.models.llama import Llama

BLOCK, STACK, INPUT = "DecoderLayer", "model.layers", "decoder_input"
KEPT = ["mm", "scaled_dot_product_attention"]
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "activation_checkpointing": {"activation_checkpointing": [BLOCK]},
    "activation_checkpointing, save": {"activation_checkpointing": {"layers": [BLOCK], "save": KEPT}},
    "activation_checkpointing, budget 0.5": {"activation_checkpointing": {"layers": [BLOCK], "budget": 0.5}},
    "activation_checkpointing, every 2": {"activation_checkpointing": {"layers": [BLOCK], "every": 2}},
    "activation_checkpointing, offload": {"activation_checkpointing": [BLOCK], "offload": [INPUT]},
    "compile_repeated_blocks": {"compile_repeated_blocks": STACK},
    "compile_repeated_blocks, activation_checkpointing": {
        "compile_repeated_blocks": STACK,
        "activation_checkpointing": [BLOCK],
    },
    "compile_repeated_blocks, activation_checkpointing, save": {
        "compile_repeated_blocks": STACK,
        "activation_checkpointing": {"layers": [BLOCK], "save": KEPT},
    },
    "compile_repeated_blocks, activation_checkpointing, offload": {
        "compile_repeated_blocks": STACK,
        "activation_checkpointing": [BLOCK],
        "offload": [INPUT],
    },
}
WARM_UPS, STEPS = 3, 5


def measure(settings: dict[str, Any], ids: torch.Tensor, num_layers: int) -> tuple[float, float, float]:
    """Returns the peak in GiB, the fastest step in milliseconds, and the loss."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "num_layers": num_layers, "num_heads": 16, "num_kv_heads": 8}
    with torch.device("cuda"):
        model = Llama(vocab_size=32000, intermediate_size=5632, max_positions=ids.shape[1], **sizes)
    apply_memory_settings(model, settings, origin=lambda label: None)
    times = []
    for number in range(WARM_UPS + STEPS):
        model.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        if number == WARM_UPS:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        value = loss.item()
        del loss
        times.append(time.perf_counter() - start)
    return torch.cuda.max_memory_allocated() / 2**30, 1e3 * min(times[WARM_UPS:]), value


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    ids = torch.randint(32000, (options.rows, options.tokens), device="cuda")
    print("| setting | peak | time | loss |\n|---|---|---|---|")
    for name, settings in SETTINGS.items():
        peak, milliseconds, loss = measure(settings, ids, options.layers)
        print(f"| {name} | {peak:.1f} GiB | {milliseconds:.0f} ms | {loss:.6f} |", flush=True)
        # A rewritten module holds its own forward, in a circle: nobody else frees the model before the next.
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
