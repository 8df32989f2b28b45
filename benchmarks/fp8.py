"""fp8 linear layers against bf16: forward and backward of single layers and of whole blocks, compiled.

    python benchmarks/fp8.py [--output FOLDER] [--only layers|blocks] [--seconds 300] [--rounds 5] [--dry-run]

16,384 tokens through the layers of TinyLlama, Llama 8B and GPT-2 small, with bf16 weights. A layer reads the output of
a norm; `separate` computes layers that share an input (queries, keys and values; gate and up) one by one. From a
trace: the milliseconds of matrix products, of attention, and of all other kernels, which include the casts.

Each measurement compiles a graph of its own. Blocks come first, and the results are written after each one; after
`--seconds` none is begun. `--dry-run`: tiny, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attention import milliseconds
from data_rounds import table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from trainwright.models.gpt2 import Block
from trainwright.models.layers.fp8_linear import Fp8Linear
from trainwright.models.layers.rotary import rotary_angles
from trainwright.models.llama import DecoderLayer

LAYERS = {
    "TinyLlama q, k and v": (2048, 2560),
    "TinyLlama gate and up": (2048, 11264),
    "TinyLlama down": (5632, 2048),
    "8B gate and up": (4096, 28672),
    "8B o": (4096, 4096),
    "GPT-2 c_attn": (768, 2304),
    "GPT-2 c_proj": (768, 768),
    "GPT-2 c_fc": (768, 3072),
}
"""The widths of input and output."""
LLAMA = {"norm_eps": 1e-5, "attention_bias": "none", "dropout": 0.0, "head_size": 64}
BLOCKS = {
    "TinyLlama": LLAMA | {"hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "intermediate_size": 5632},
    "8B": LLAMA
    | {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "intermediate_size": 14336, "head_size": 128},
}
GPT2 = {
    **{"hidden_size": 768, "num_heads": 12, "intermediate_size": 3072, "activation": "gelu_new", "norm_eps": 1e-5},
    **{"dropout": 0.0, "attention_dropout": 0.0},
}
TINY = LLAMA | {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 192}


class Separate(Fp8Linear):
    """A class of its own: layers that share an input are then not joined."""


VARIANTS = {
    "bf16": (nn.Linear, None),
    "tensorwise": (Fp8Linear, "tensorwise"),
    "rowwise": (Fp8Linear, "rowwise"),
    "tensorwise, separate": (Separate, "tensorwise"),
}
COLUMNS = ["case", "times", "ms", "products", "attention", "other", "peak MiB"]


class NormAndLayer(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width_in, width_out, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(F.rms_norm(hidden, hidden.shape[-1:]))


class LlamaBlock(DecoderLayer):
    def __init__(self, settings: dict[str, Any], length: int) -> None:
        super().__init__(settings)
        positions = torch.arange(length, dtype=torch.float)
        self.rotations = rotary_angles(positions, head_size=settings["head_size"], theta=1e4, scaling=None)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden, self.rotations, None)


class Gpt2Block(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden, None)


def cases(options: argparse.Namespace) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Returns how each module is made, with the shape of its input; the most useful ones first."""
    found: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {}
    batch, length = (2, 64) if options.dry_run else (8, 2048)
    if options.only != "layers":
        for name, settings in ({"tiny": TINY} if options.dry_run else BLOCKS).items():
            shape = (batch, length, settings["hidden_size"])
            found[f"block of {name}"] = (partial(LlamaBlock, settings, length), shape)
        if not options.dry_run:
            found["block of GPT-2 small"] = (partial(Gpt2Block, GPT2), (16, 1024, 768))
    if options.only != "blocks":
        for name, widths in ({"tiny": (64, 128)} if options.dry_run else LAYERS).items():
            found[name] = (partial(NormAndLayer, *widths), (batch * length, widths[0]))
    return found


def measurements(names: Iterable[str]) -> list[tuple[str, str]]:
    """Returns the pairs of a case and a variant in their order: `separate`, which only blocks have, at the end."""
    pairs = [(case, variant) for case in names for variant in VARIANTS]
    pairs = [(case, variant) for case, variant in pairs if "separate" not in variant or case.startswith("block")]
    return sorted(pairs, key=lambda pair: "separate" in pair[1])


def kernels(run: Any, device: torch.device) -> dict[str, float]:
    """Returns the milliseconds of each kind of kernel in one pass."""
    kinds = {"products": 0.0, "attention": 0.0, "other": 0.0}
    if device.type != "cuda":
        return kinds
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    for event in found.key_averages():
        name = event.key.lower()
        kind = "other"
        if any(word in name for word in ("sdpa", "flash", "fmha", "attention")):
            kind = "attention"
        elif any(word in name for word in ("nvjet", "gemm", "cutlass", "cublas")) and "triton" not in name:
            kind = "products"
        kinds[kind] += event.self_device_time_total / 1e3
    return kinds


def measure(
    module: nn.Module, shape: tuple[int, ...], variant: str, options: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    kind, recipe = VARIANTS[variant]
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.__class__, layer.fp8_recipe = kind, recipe
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager" if options.dry_run else "inductor", dynamic=False)
    hidden = torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()
    with torch.no_grad():
        gradient = torch.randn_like(module(hidden))

    def once() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
            output = compiled(hidden)
        torch.autograd.grad(output, (hidden, *module.parameters()), gradient)

    for _ in range(3):
        once()
    found = {"ms": statistics.median(milliseconds(once, device) for _ in range(options.rounds))}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once()
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {key: round(value, 3) for key, value in (found | kernels(once, device)).items()}


def report(found: dict[str, Any]) -> str:
    rows = []
    for case, entry in found["cases"].items():
        for variant in (each for each in VARIANTS if each in entry["results"]):
            one = entry["results"][variant]
            cells = [f"{entry['results']['bf16']['ms'] / one['ms']:.2f}"]
            cells += [f"{one.get(key, 0):.2f}" for key in ("ms", "products", "attention", "other")]
            rows.append([f"{case}, {variant}", *cells, f"{one.get('peak_mib', 0):.0f}"])
    text = [
        f"# fp8 layers on one {found['device']}, torch {found['torch']}",
        "`python benchmarks/fp8.py --output benchmarks/results`",
        "Forward and backward, compiled, 16,384 tokens, bf16 weights. `times` is the speed relative to bf16.",
        table(COLUMNS, rows),
    ]
    if found["left_out"]:
        text.append(f"Not measured, because no time was left: {'; '.join(found['left_out'])}.")
    return "\n\n".join(text)


def write(found: dict[str, Any], folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fp8.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "fp8.md").write_text(report(found) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", choices=("layers", "blocks"))
    parser.add_argument("--seconds", type=float, default=300.0, help="after this time no measurement is begun")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    begun = time.monotonic()
    device = torch.device("cpu" if options.dry_run else "cuda")
    name = "cpu" if options.dry_run else torch.cuda.get_device_name()
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "cases": {}, "left_out": []}
    known = cases(options)
    for case, variant in measurements(known):
        if time.monotonic() - begun > options.seconds:
            found["left_out"].append(f"{case}, {variant}")
            continue
        make, shape = known[case]
        torch.manual_seed(0)
        with device:
            module = make().to(torch.bfloat16).train()
        one = measure(module, shape, variant, options, device)
        print(f"{time.monotonic() - begun:5.0f} s ", case, variant, json.dumps(one), flush=True)
        found["cases"].setdefault(case, {"shape": shape, "results": {}})["results"][variant] = one
        write(found, options.output)
    write(found, options.output)
    print(report(found))


if __name__ == "__main__":
    main()
