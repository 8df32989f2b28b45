"""Milliseconds of one optimizer step on the shapes of a Llama, ours against torch's.

    python benchmarks/optimizers.py [--device cuda] [--size tiny|tinyllama-1.1b] [--rounds 12] [--steps 5]
                                    [--output benchmarks/results/optimizers]

Every contender steps the same shapes with the same gradients, which stand still. The contenders take turns, round
after round, in one process; a round is the mean of some steps, after the device is idle. torch.optim.Muon takes
matrices alone, so that it is measured with torch's fused AdamW for the rest, as a user would run it; our Muon does
both. On a GPU the memory that one step needs beside weights, gradients and state is noted too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from data_rounds import median, ratio, show_ratio, table, take_turns

from trainwright.optim.adamw import AdamW
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon

SIZES = {  # layers, width, inner width, key/value width, words
    "tiny": (8, 256, 688, 64, 8192),
    "tinyllama-1.1b": (22, 2048, 5632, 256, 32000),
}
Named = dict[str, torch.nn.Parameter]


def llama_shapes(size: str) -> dict[str, tuple[int, ...]]:
    layers, width, inner, kv, words = SIZES[size]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (words, width)}
    for n in range(layers):
        attention = {"q_proj": (width, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, width)}
        mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        shapes |= {f"layers.{n}.{name}.weight": shape for name, shape in {**attention, **mlp}.items()}
        shapes |= {f"layers.{n}.{name}.weight": (width,) for name in ("input_norm", "post_norm")}
    return {**shapes, "norm.weight": (width,), "lm_head.weight": (words, width)}


class TorchMuon:
    """torch.optim.Muon for hidden matrices and torch's fused AdamW for the rest."""

    def __init__(self, named: Named) -> None:
        hidden = {n: p for n, p in named.items() if p.ndim == 2 and not n.startswith(("embed", "lm_head"))}
        rest = [p for n, p in named.items() if n not in hidden]
        self.muon = torch.optim.Muon(list(hidden.values()), lr=1e-4, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(rest, lr=1e-4, fused=True)

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()


CONTENDERS: dict[str, Callable[[Named], object]] = {
    "torch AdamW, fused": lambda named: torch.optim.AdamW(named.values(), lr=1e-4, fused=True),
    "AdamW": lambda named: AdamW(named.values(), lr=1e-4),
    "AdamW, repair_nan": lambda named: AdamW(named.values(), lr=1e-4, repair_nan=True),
    "AdamW, report": lambda named: AdamW(named.values(), lr=1e-4, report=True),
    "AdamW, bf16 moments": lambda named: AdamW(named.values(), lr=1e-4, state_dtype="bf16"),
    "Lion": lambda named: Lion(named.values(), lr=1e-5),
    "torch Muon + AdamW": TorchMuon,
    "Muon": lambda named: Muon(list(named.items()), lr=1e-4),
}
BASELINES = {"Muon": "torch Muon + AdamW"}
FIRST = "torch AdamW, fused"


class Contender:
    """An optimizer over its own state; the weights and gradients are shared, for only time is measured."""

    def __init__(self, name: str, named: Named, steps: int, device: torch.device) -> None:
        self.optimizer = CONTENDERS[name](named)
        self.steps, self.device = steps, device

    def __call__(self) -> dict[str, float]:
        wait(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        start = time.perf_counter()
        for _ in range(self.steps):
            self.optimizer.step()
        wait(self.device)
        measured = {"ms": (time.perf_counter() - start) / self.steps * 1e3}
        if self.device.type == "cuda":
            measured["beside_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
        return measured


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default=None)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    size = arguments.size or ("tiny" if device.type == "cpu" else "tinyllama-1.1b")
    torch.manual_seed(0)
    named = {
        name: torch.nn.Parameter(torch.randn(shape, device=device) * 0.02) for name, shape in llama_shapes(size).items()
    }
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    contenders = {name: Contender(name, named, arguments.steps, device) for name in CONTENDERS}
    rounds = take_turns(contenders, arguments.rounds)
    gc.collect()
    show(rounds, named, device, size, arguments)


def show(rounds, named: Named, device: torch.device, size: str, arguments) -> None:
    results, rows = {}, []
    for name in CONTENDERS:
        against = {base: ratio(rounds, "ms", name, base) for base in (FIRST, BASELINES.get(name)) if base}
        results[name] = {"ms": median(rounds, name, "ms"), "ratios": against}
        row = [name, f"{results[name]['ms']:.2f}", show_ratio(against[FIRST])]
        row.append(show_ratio(against[BASELINES[name]]) if name in BASELINES else "")
        if device.type == "cuda":
            results[name]["beside_mib"] = median(rounds, name, "beside_mib")
            row.append(f"{results[name]['beside_mib']:.0f}")
        rows.append(row)
    head = ["", "ms a step", "ratio to torch's fused AdamW (quartiles)", "ratio to torch's Muon"]
    head += ["MiB beside"] if device.type == "cuda" else []
    elements = sum(parameter.numel() for parameter in named.values())
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    conditions = (
        f"{where}, Python {platform.python_version()}, torch {torch.__version__}. {size}: {len(named)} tensors, "
        f"{elements:,} parameters in fp32. Medians of {arguments.rounds} rounds of {arguments.steps} steps."
    )
    print(conditions, "", table(head, rows), sep="\n")
    if arguments.output is None:
        return
    settings = {"device": where, "size": size, "rounds": arguments.rounds, "steps": arguments.steps}
    path, key = arguments.output.with_suffix(".json"), f"{device.type} {size}"
    sections = json.loads(path.read_text()) if path.exists() else {}
    text = f"```\n{command(arguments, size)}\n```\n{conditions}\n\n{table(head, rows)}\n"
    sections[key] = {**settings, "torch": torch.__version__, "results": results, "markdown": text}
    path.write_text(json.dumps(sections, indent=2) + "\n")
    body = "\n".join(f"## {name}\n\n{section['markdown']}" for name, section in sections.items())
    path.with_suffix(".md").write_text(f"# Time of an optimizer step\n\n{body}")


def command(arguments, size: str) -> str:
    threads = os.environ.get("OMP_NUM_THREADS")
    before = f"OMP_NUM_THREADS={threads} " if threads else ""
    return (
        f"{before}python benchmarks/optimizers.py --device {arguments.device} --size {size} "
        f"--rounds {arguments.rounds} --steps {arguments.steps} --output {arguments.output}"
    )


if __name__ == "__main__":
    main()
