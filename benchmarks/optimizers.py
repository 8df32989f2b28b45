"""Milliseconds of one optimizer step on the shapes of a Llama, ours against torch's.

    python benchmarks/optimizers.py [--device cuda] [--size tiny|tinyllama-1.1b|llama3-8b] [--rounds 12] [--steps 5]
                                    [--contenders 8bit] [--output benchmarks/results/optimizers]

Every contender steps the same shapes with the same gradients, which stand still. The contenders take turns, round
after round, in one process; a round is the mean of some steps, after the device is idle. torch.optim.Muon takes
matrices alone, so that it is measured with torch's fused AdamW for the rest, as a user would run it; our Muon does
both. Contenders with "bf16 weights" have weights and gradients in bf16, all others in fp32. On a GPU the memory that
one step needs beside weights, gradients and state is noted too, and for steps of one pass the share of the bandwidth
of a copy of 4 GiB. `--contenders` keeps those whose name contains the text: the state of all does not fit with the
8 billion weights of llama3-8b.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
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
    "llama3-8b": (32, 4096, 14336, 1024, 128256),
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
    "AdamW, 8bit": lambda named: AdamW(named.values(), lr=1e-4, state="8bit"),
    "AdamW, bf16 weights, masters": lambda named: AdamW(named.values(), lr=1e-4, master_weights=True),
    "AdamW, bf16 weights, stochastic": lambda named: AdamW(named.values(), lr=1e-4, master_weights="stochastic"),
    "AdamW, bf16 weights, 8bit, masters": lambda named: AdamW(
        named.values(), lr=1e-4, state="8bit", master_weights=True
    ),
    "AdamW, bf16 weights, 8bit, stochastic": lambda named: AdamW(
        named.values(), lr=1e-4, state="8bit", master_weights="stochastic"
    ),
    "Lion": lambda named: Lion(named.values(), lr=1e-5),
    "torch Muon + AdamW": TorchMuon,
    "Muon": lambda named: Muon(list(named.items()), lr=1e-4),
}
if importlib.util.find_spec("torchao") is not None:

    def torchao_adamw(named: Named) -> object:
        from torchao.optim import AdamW8bit

        return AdamW8bit(named.values(), lr=1e-4, bf16_stochastic_round=True)

    CONTENDERS["torchao AdamW8bit, bf16 weights, stochastic"] = torchao_adamw

BYTES = {
    "torch AdamW, fused": 28,
    "AdamW": 28,
    "AdamW, bf16 moments": 20,
    "AdamW, 8bit": 16,
    "AdamW, bf16 weights, masters": 28,
    "AdamW, bf16 weights, stochastic": 22,
    "AdamW, bf16 weights, 8bit, masters": 16,
    "AdamW, bf16 weights, 8bit, stochastic": 10,
}
"""Bytes that a step of one pass reads and writes per parameter."""
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
    parser.add_argument("--contenders", default="", help="keep those whose name contains this text")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    size = arguments.size or ("tiny" if device.type == "cpu" else "tinyllama-1.1b")
    names = [name for name in CONTENDERS if arguments.contenders in name]
    torch.manual_seed(0)
    shapes = llama_shapes(size)
    kinds = {
        is_narrow: make_parameters(shapes, is_narrow, device) for is_narrow in {"bf16 weights" in n for n in names}
    }
    contenders = {name: Contender(name, kinds["bf16 weights" in name], arguments.steps, device) for name in names}
    rounds = take_turns(contenders, arguments.rounds)
    gc.collect()
    show(rounds, names, shapes, device, size, arguments)


def make_parameters(shapes: dict[str, tuple[int, ...]], is_narrow: bool, device: torch.device) -> Named:
    dtype = torch.bfloat16 if is_narrow else torch.float32
    named = {}
    for name, shape in shapes.items():
        named[name] = torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02)
        named[name].grad = torch.randn_like(named[name]) * 1e-3
    return named


def bandwidth(device: torch.device) -> float:
    """Returns the bytes per second that a copy of 4 GiB reads and writes."""
    source = torch.ones(2**32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        wait(device)
        start = time.perf_counter()
        target.copy_(source)
        wait(device)
        times.append(time.perf_counter() - start)
    return 2 * 2**32 / min(times)


def show(rounds, names: list[str], shapes, device: torch.device, size: str, arguments) -> None:
    results, rows = {}, []
    elements = sum(math.prod(shape) for shape in shapes.values())
    peak = bandwidth(device) if device.type == "cuda" else None
    for name in names:
        bases = [base for base in (FIRST, BASELINES.get(name)) if base in names]
        against = {base: ratio(rounds, "ms", name, base) for base in bases}
        results[name] = {"ms": median(rounds, name, "ms"), "ratios": against}
        row = [name, f"{results[name]['ms']:.2f}", show_ratio(against[FIRST]) if FIRST in against else ""]
        row.append(show_ratio(against[BASELINES[name]]) if BASELINES.get(name) in against else "")
        if peak is not None:
            share = BYTES[name] * elements / (results[name]["ms"] / 1e3) / peak if name in BYTES else None
            results[name]["bandwidth_share"] = share
            row.append("" if share is None else f"{share:.0%}")
            results[name]["beside_mib"] = median(rounds, name, "beside_mib")
            row.append(f"{results[name]['beside_mib']:.0f}")
        rows.append(row)
    head = ["", "ms a step", "ratio to torch's fused AdamW (quartiles)", "ratio to torch's Muon"]
    head += ["share of bandwidth", "MiB beside"] if device.type == "cuda" else []
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    conditions = (
        f"{where}, Python {platform.python_version()}, torch {torch.__version__}. {size}: {len(shapes)} tensors, "
        f"{elements:,} parameters. Medians of {arguments.rounds} rounds of {arguments.steps} steps."
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
    only = f'--contenders "{arguments.contenders}" ' if arguments.contenders else ""
    return (
        f"{before}python benchmarks/optimizers.py --device {arguments.device} --size {size} "
        f"--rounds {arguments.rounds} --steps {arguments.steps} {only}--output {arguments.output}"
    )


if __name__ == "__main__":
    main()
