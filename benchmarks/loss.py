"""Head and loss: torch's two operations apart beside ours in one, by time and memory of a forward and backward pass.

    python benchmarks/loss.py [--output FOLDER] [--rounds 10] [--dry-run]

bf16 states of 16,384 tokens through TinyLlama's head (32,000 × 2,048) and of 32,768 tokens through GPT-2's
(50,257 × 768), eager and compiled, ours with chunks of several sizes. Medians after warm-up. Then one chunk's shares
and their gradient alone: what the compiler makes of the formulas beside our kernel.
`--dry-run`: tiny, on a CPU, where there is no kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attention import milliseconds
from data_rounds import table
from torch import Tensor

from trainwright.models.layers.losses import CHUNK_ELEMENTS, linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def apart(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def in_one(rows: int | None = None) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, ignore_index=-100, chunk_rows=rows)

    return loss


def contenders(num_rows: int, backend: str) -> dict[str, Loss]:
    plain: dict[str, Loss] = {"apart": apart, "in one": in_one()}
    plain |= {f"in one, {count} chunks": in_one(num_rows // count) for count in (1, 2, 8)}
    compiled: dict[str, Loss] = {}
    for name, loss in plain.items():
        compiled[f"{name}, compiled"] = torch.compile(loss, backend=backend, dynamic=False)
    return plain | compiled


def measure(shape: tuple[int, int, int], device: torch.device, rounds: int, backend: str) -> dict[str, Any]:
    num_rows, classes, width = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, width, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = (torch.randn(classes, width, generator=generator) * 0.02).to(device, torch.bfloat16).requires_grad_()
    targets = torch.randint(0, classes, (num_rows,), generator=generator).to(device)

    def once(loss: Loss) -> None:
        torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))

    results: dict[str, Any] = {}
    losses = contenders(num_rows, backend)
    for name, loss in losses.items():
        torch._dynamo.reset()
        for _ in range(3):
            once(loss)
        results[name] = {"loss": float(loss(hidden, weight, targets).detach()), "peak_mib": 0.0}
        if device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            once(loss)
            results[name]["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
        # Each by itself: a compiled form would have to be compiled again in every round.
        results[name]["ms"] = round(
            statistics.median(milliseconds(lambda loss=loss: once(loss), device) for _ in range(rounds)), 3
        )
        results[name]["tflops"] = round(6 * num_rows * classes * width / results[name]["ms"] / 1e9, 1)
        print(shape, name, json.dumps(results[name]), flush=True)
    return {"rows": num_rows, "classes": classes, "width": width, "results": results}


def compiled_softmax(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The formulas of linear_cross_entropy.py without its kernel."""
    log_shares = torch.log_softmax(logits.float(), dim=-1)
    classes = torch.arange(logits.shape[1], device=logits.device)
    shares = log_shares.exp()
    return log_shares.gather(1, targets), torch.where(classes == targets, shares - 1, shares).to(logits.dtype)


def measure_softmax(rows: int, classes: int, rounds: int) -> list[str]:
    """Returns a row of the table: shape, the compiler's milliseconds, the kernel's, their ratio."""
    from trainwright.models.layers.softmax_kernel import softmax_gradient

    logits = torch.randn(rows, classes, device="cuda").bfloat16()
    targets = torch.randint(0, classes, (rows, 1), device="cuda")
    compiled, times = torch.compile(compiled_softmax, dynamic=False), []
    for run in (compiled, softmax_gradient):
        run(logits, targets)
        once = partial(run, logits, targets)
        times.append(statistics.median(milliseconds(once, logits.device) for _ in range(rounds)))
    return [f"{rows} × {classes}", *(f"{time:.3f}" for time in times), f"{times[0] / times[1]:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda")
    shapes = [(256, 100, 16)] if options.dry_run else [(16384, 32000, 2048), (32768, 50257, 768)]
    backend = "aot_eager" if options.dry_run else "inductor"
    name = "cpu" if options.dry_run else torch.cuda.get_device_name()
    found = {"device": name, "torch": torch.__version__, "chunk_elements": CHUNK_ELEMENTS, "cases": []}
    text = [
        f"# Head and loss on one {name}, torch {torch.__version__}",
        "`python benchmarks/loss.py --output benchmarks/results`",
        f"Ours without a number takes chunks of up to {CHUNK_ELEMENTS:,} logits.",
    ]
    for shape in shapes:
        case = measure(shape, device, options.rounds, backend)
        found["cases"].append(case)
        rows = [
            [name, f"{one['ms']:.2f}", f"{one['tflops']:.0f}", f"{one['peak_mib']:.0f}", f"{one['loss']:.5f}"]
            for name, one in case["results"].items()
        ]
        head = ["{} rows, {} × {}".format(*shape), "ms", "TFLOP/s", "peak MiB", "loss"]
        text.append(table(head, rows))
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / "loss.json").write_text(json.dumps(found, indent=1) + "\n")
            (options.output / "loss.md").write_text("\n\n".join(text) + "\n")
    if not options.dry_run:
        chunks = ((2560, 50304), (4096, 32000), (2048, 128256))
        rows = [measure_softmax(*chunk, options.rounds) for chunk in chunks]
        text.append(table(["logits of a chunk", "compiled, ms", "kernel, ms", "times"], rows))
        if options.output is not None:
            (options.output / "loss.md").write_text("\n\n".join(text) + "\n")
    print("\n\n".join(text))


if __name__ == "__main__":
    main()
