"""Memory and disk, predicted without a device beside measured on a GPU, for three models.

    python benchmarks/estimate.py [--cases tinyllama gpt2 …] [--only-predict] [--output benchmarks/results]

Each case is predicted first (`trainwright estimate`), then trained for a few steps: what torch's allocator gave at
most (max_memory_allocated) and the size of the checkpoint stand beside the prediction.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from trainwright import RunConfig, build_trainer
from trainwright.analysis.estimate import Estimate, estimate

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": {
        "model": {"type": "llama", "preset": "tinyllama-1.1b"},
        "micro": 8,
        "length": 2048,
    },
    "tinyllama-1.1b, recomputed": {
        "model": {"type": "llama", "preset": "tinyllama-1.1b", "activation_checkpointing": ["DecoderLayer"]},
        "micro": 8,
        "length": 2048,
    },
    "gpt2 774m": {"model": {"type": "gpt2", "preset": "774m"}, "micro": 8, "length": 1024},
    "bert large": {
        "model": {"type": "bert", "preset": "large"},
        "micro": 32,
        "length": 512,
        "trainer": "trainer",
    },
}


class Rows:
    """Rows of made-up tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(self.length) % 1000
        return {"input_ids": tokens, "labels": tokens}


def config_of(name: str, folder: Path) -> RunConfig:
    case = CASES[name]
    return RunConfig.from_dict(
        {
            "name": "estimate",
            "output_dir": str(folder),
            "model": case["model"],
            "data": {"train": {"type": f"{Path(__file__).name}:Rows", "length": case["length"]}},
            "trainer": {
                "type": case.get("trainer", "language_model"),
                "max_steps": STEPS,
                "micro_batch_size": case["micro"],
                "max_grad_norm": 1.0,
                "optimizer": {"type": "adamw"},
            },
            "runtime": {"device": "cuda", "precision": "bf16"},
            "writers": [],
        },
        project_dir=Path(__file__).parent,
    )


def measure(config: RunConfig) -> tuple[int, int]:
    """Trains for a few steps; returns the most bytes that were held, and those of the checkpoint."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer = build_trainer(config)
    trainer.train()
    peak = torch.cuda.max_memory_allocated() - before
    [checkpoint] = (trainer.folder / "checkpoints").glob("step-*")
    return peak, sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/estimate.md."""
    lines = [
        "| model | micro-batch | predicted | measured | ratio | checkpoint, predicted | on disk |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        lines.append(
            f"| {row['name']} | {row['micro']} × {row['length']} | {predicted['peak_bytes'] / 1e9:.2f} GB | "
            + (f"{measured / 1e9:.2f} GB | {predicted['peak_bytes'] / measured:.3f}" if measured else "– | –")
            + f" | {predicted['checkpoint_bytes'] / 1e9:.2f} GB | "
            + (f"{row['checkpoint'] / 1e9:.2f} GB |" if measured else "– |")
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--only-predict", action="store_true")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    rows = []
    for name in [each for each in CASES if any(each.startswith(start) for start in chosen.cases)]:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the key that signs run folders
            config = config_of(name, Path(folder))
            predicted: Estimate = estimate(config, world_size=1)
            measured, checkpoint = (0, 0) if chosen.only_predict else measure(config)
        sizes = {"micro": CASES[name]["micro"], "length": CASES[name]["length"]}
        results = {"predicted": predicted.to_dict(), "measured": measured, "checkpoint": checkpoint}
        rows.append({"name": name, **sizes, **results})
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    if chosen.output is not None:
        (chosen.output / "estimate.md").write_text(table(rows), encoding="utf-8")
        device = "none" if chosen.only_predict else torch.cuda.get_device_name()
        content = {"torch": torch.__version__, "device": device, "rows": rows}
        (chosen.output / "estimate.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
