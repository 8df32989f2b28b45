"""A training step of our Llama beside that of transformers', with the same weights and tokens, in one run.

    python benchmarks/models.py [--preset tinyllama-1.1b] [--batch 8] [--length 2048] [--rounds 7] [--output FOLDER]

A step is forward, backward and a fused AdamW update in bf16 on a GPU (fp32 on a CPU), eager and compiled. Contenders
take turns; reported is the median over rounds of the ratio within a round. Peak memory is that of one contender alone
(everything else moved off the device), and the losses of the first step are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from data_rounds import median, ratio, show_ratio, table, take_turns

from trainwright.models.llama import Llama

OURS, THEIRS = "trainwright", "transformers"


def build(preset: str, device: torch.device, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with device:
        ours = Llama.from_preset(preset).to(dtype)
        theirs = LlamaForCausalLM(LlamaConfig(**ours.to_hugging_face(), use_cache=False)).to(dtype)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    for model in (ours, theirs):
        model.train()
    return {OURS: ours, THEIRS: theirs}


class Contender:
    """One model with its optimizer, eager or compiled."""

    def __init__(self, model: torch.nn.Module, tokens: torch.Tensor, *, compiled: bool) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        self.forward = torch.compile(model) if compiled else model
        self.tokens = tokens

    def step(self) -> torch.Tensor:
        loss = self.forward(input_ids=self.tokens, labels=self.tokens)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def time(self, steps: int) -> dict[str, float]:
        synchronize(self.tokens.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self.tokens.device)
        return {"ms": (time.perf_counter() - start) / steps * 1e3}

    def peak(self) -> float:
        """Gigabytes at the peak of a step; 0 where the device does not count."""
        if self.tokens.device.type != "cuda":
            return 0.0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        return (torch.cuda.max_memory_allocated() - before) / 1e9


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    results: dict[str, object] = {}
    generator = torch.Generator().manual_seed(1)
    for compiled in (False, True):
        torch.compiler.reset()
        models = build(arguments.preset, device, dtype)
        vocabulary = models[OURS].settings["vocab_size"]
        tokens = torch.randint(0, vocabulary, (arguments.batch, arguments.length), generator=generator).to(device)
        contenders = {name: Contender(model, tokens, compiled=compiled) for name, model in models.items()}
        losses = {name: float(each.step()) for name, each in contenders.items()}
        rounds = take_turns(
            {name: lambda each=each: each.time(arguments.steps) for name, each in contenders.items()}, arguments.rounds
        )
        speed = ratio(rounds, "ms", THEIRS, OURS)
        mode = "compiled" if compiled else "eager"
        results[mode] = {
            "ms": {name: median(rounds, name, "ms") for name in contenders},
            "tokens_per_second": {name: tokens.numel() / median(rounds, name, "ms") * 1e3 for name in contenders},
            "speedup": speed,
            "first_losses": losses,
            "peak_gb_of_a_step": {name: each.peak() for name, each in contenders.items()},
        }
        print(mode, json.dumps(results[mode]), flush=True)
        del contenders, models
        gc.collect()
    return results


def page(report: dict[str, object]) -> str:
    rows = []
    for mode, found in report["results"].items():
        for name in (OURS, THEIRS):
            speed = show_ratio(found["speedup"]) if name == OURS else "1"
            rows.append(
                [
                    f"{name}, {mode}",
                    f"{found['ms'][name]:.1f}",
                    f"{found['tokens_per_second'][name]:,.0f}",
                    speed,
                    f"{found['peak_gb_of_a_step'][name]:.1f}",
                    f"{found['first_losses'][name]:.4f}",
                ]
            )
    head = ["", "ms a step", "tokens/s", "times as fast", "GB at the peak of a step", "loss of the first step"]
    return (
        f"# Models\n\n{report['what']}\n\n```\n{report['command']}\n```\n\n{report['machine']}\n\n{table(head, rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tinyllama-1.1b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    import transformers

    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    report = {
        "what": f"A step (forward, backward, fused AdamW) of {arguments.preset}, "
        f"{arguments.batch} × {arguments.length} tokens, {dtype}; medians of {arguments.rounds} rounds of "
        f"{arguments.steps} steps, contenders in turn.",
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{name}; {versions}.",
        "results": compare(arguments, device, dtype),
    }
    print(page(report))
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "models.json").write_text(json.dumps(report, indent=1) + "\n")
        (arguments.output / "models.md").write_text(page(report))


if __name__ == "__main__":
    main()
