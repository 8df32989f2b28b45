"""Validation loss of a 124M model trained in fp8 and in bf16 on the standard library's sources.

    python benchmarks/convergence.py --output FOLDER [--noise] [--optimizers]
    python benchmarks/convergence.py --dry-run          # tiny, on the CPU

The text is every .py file of this interpreter's standard library; every twentieth file is for validation. A byte-level
BPE is trained on the rest. GPT-2 small is then trained from the same seed on the same rows, once per precision; the
runs share the GPU, because only their losses count. --noise adds a run in bf16 from another seed, --optimizers adds
runs with weights in bf16: with fp32 masters, and with 8-bit moments and stochastic rounding. The results are
convergence.json, which `gpu.py --merge` includes in its report, and convergence.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from data_rounds import table
from gpu_cases import FP8_OF_GPT2, Settings, merge, shrink_fp8
from torch.utils.data import Dataset

BATCH, LENGTH, VOCABULARY, STEPS, EVAL_ROWS = 8, 1024, 50257, 1000, 256
RUNS: dict[str, tuple[int, Settings]] = {
    "bf16": (0, {"runtime": {"precision": "bf16"}}),
    "fp8": (0, {"runtime": {"precision": "fp8", "fp8": FP8_OF_GPT2}}),
}
NOISE: dict[str, tuple[int, Settings]] = {"bf16, another seed": (1, {"runtime": {"precision": "bf16"}})}
OPTIMIZERS: dict[str, tuple[int, Settings]] = {
    f"{precision}, {name}": (seed, {**settings, "model": {"dtype": "bf16"}, "trainer": {"optimizer": optimizer}})
    for precision, (seed, settings) in RUNS.items()
    for name, optimizer in {
        "weights in bf16 with fp32 masters": {"master_weights": True},
        "weights in bf16, stochastic rounding, 8-bit moments": {"state": "8bit", "master_weights": "stochastic"},
    }.items()
}
"""A seed and settings for each run."""
TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 2}
SMALL = {"hidden_size": 768, "num_layers": 12, "num_heads": 12}


class Rows(Dataset):
    """Rows of tokens one after the other; the model shifts the labels itself."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self._rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index].long()
        return {"input_ids": row, "labels": row}


def read_sources(*, num_files: int | None) -> tuple[list[str], list[str]]:
    """Returns the texts for training and for validation; at most `num_files`, None: all of them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)[:num_files]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return [text for number, text in enumerate(texts) if number % 20], texts[::20]


def prepare_tokens(file: Path, *, is_dry: bool) -> dict[str, int]:
    """Trains the tokenizer and saves the tokens of both parts; returns their numbers."""
    from tokenizers import ByteLevelBPETokenizer

    train, valid = read_sources(num_files=60 if is_dry else None)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(train, vocab_size=300 if is_dry else VOCABULARY, show_progress=False)
    tokens = {}
    for name, texts in (("train", train), ("valid", valid)):
        ids = [token for encoded in tokenizer.encode_batch(texts) for token in encoded.ids]
        tokens[name] = torch.tensor(ids, dtype=torch.int32)
    torch.save(tokens, file)
    return {name: len(ids) for name, ids in tokens.items()}


def train(name: str, tokens_file: Path, result: Path, *, is_dry: bool) -> None:
    """Trains one model and writes its losses."""
    from trainwright import RunConfig, build_trainer
    from trainwright.trainers.language_model import LanguageModelTrainer

    seed, more = {**RUNS, **NOISE, **OPTIMIZERS}[name]
    if is_dry:
        more = shrink_fp8(more)
    batch, length, steps = (4, 64, 30) if is_dry else (BATCH, LENGTH, STEPS)
    tokens = torch.load(tokens_file, weights_only=True)

    class Ours(LanguageModelTrainer):
        @classmethod
        def build_train_data(cls, build: Any) -> Any:
            return Rows(tokens["train"], length)

        @classmethod
        def build_eval_data(cls, build: Any) -> Any:
            return {"valid": Rows(tokens["valid"][: EVAL_ROWS * length], length)}

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the key that signs run folders
        settings: dict[str, Any] = {
            "name": "convergence",
            "output_dir": folder,
            "seed": seed,
            "trainer": {
                "max_steps": steps,
                "global_batch_size": batch,
                "micro_batch_size": batch,
                "max_grad_norm": 1.0,
                "optimizer": {"type": "adamw", "lr": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
                "schedule": {"type": "cosine", "warmup_steps": steps // 10},
            },
            "model": {
                "type": "gpt2",
                **(TINY if is_dry else SMALL),
                "vocab_size": 300 if is_dry else VOCABULARY,
                "max_positions": length,
                "dropout": 0.0,
                "attention_dropout": 0.0,
            },
            "evaluation": {"every_steps": steps // 5},
            "checkpoint": {"every_steps": None},
            "runtime": {"device": "cpu" if is_dry else "cuda", "mode": "graph"},
            "writers": ["json"],
            "log": {"every_steps": 10},
        }
        build_trainer(RunConfig.from_dict(merge(settings, more)), Ours).train()
        lines = (Path(folder) / "convergence" / "metrics.json").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    losses = {
        "train": [[each["step"], each["loss"]] for each in records if "loss" in each],
        "valid": [[each["step"], each["valid/loss"]] for each in records if "valid/loss" in each],
    }
    result.write_text(json.dumps(losses), encoding="utf-8")


def compare(found: dict[str, Any], counts: dict[str, int], command: str) -> dict[str, Any]:
    """Returns what convergence.json holds: the losses, the relative difference and the report's text."""
    last = {name: losses["valid"][-1][1] for name, losses in found.items()}
    steps = [step for step, _ in found["bf16"]["valid"]]
    rows = [[name, *(f"{loss:.4f}" for _, loss in losses["valid"])] for name, losses in found.items()]
    text = "\n\n".join(
        [
            f"```\n{command}\n```",
            f"GPT-2 small on {counts['train']:,} tokens of the standard library, {BATCH} × {LENGTH} tokens per step; "
            f"validation loss over {counts['valid']:,} tokens or the first {EVAL_ROWS} rows of them, by step:",
            table(["", *(str(step) for step in steps)], rows),
        ]
    )
    for name, loss in last.items():
        if name != "bf16":
            change = 100 * (loss / last["bf16"] - 1)
            text += f"\n\n{name} ends {abs(change):.2f} % {'above' if change > 0 else 'below'} bf16."
    difference = last["fp8"] / last["bf16"] - 1 if "fp8" in last else None
    return {"losses": found, "relative_difference": difference, "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a folder for convergence.json and convergence.md")
    parser.add_argument("--noise", action="store_true", help="also train in bf16 from another seed")
    parser.add_argument("--optimizers", action="store_true", help="also train with weights in bf16")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--train", nargs=3, metavar=("NAME", "TOKENS", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        name, tokens, result = options.train
        train(name, Path(tokens), Path(result), is_dry=options.dry_run)
        return
    output = options.output or Path(tempfile.mkdtemp(prefix="trainwright-convergence-"))
    output.mkdir(parents=True, exist_ok=True)
    runs = RUNS | (NOISE if options.noise else {}) | (OPTIMIZERS if options.optimizers else {})
    with tempfile.TemporaryDirectory() as scratch, (output / "convergence.log").open("w", encoding="utf-8") as log:
        tokens_file = Path(scratch) / "tokens.pt"
        counts = prepare_tokens(tokens_file, is_dry=options.dry_run)
        print(f"{counts['train']:,} tokens to train on, {counts['valid']:,} for validation", flush=True)
        processes, results = {}, {}
        for number, name in enumerate(runs):
            results[name] = Path(scratch) / f"{number}.json"
            arguments = ["--train", name, str(tokens_file), str(results[name])]
            command = [sys.executable, __file__, *arguments, *(["--dry-run"] if options.dry_run else [])]
            processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        for name, process in processes.items():
            if process.wait():
                print(f"{name} FAILED with exit code {process.returncode}; see {log.name}")
        found = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in results.items() if file.exists()}
    if "bf16" not in found:
        sys.exit(1)
    words = ["DIR" if word == str(options.output) else word for word in sys.argv[1:]]  # not the folder of one machine
    compared = compare(found, counts, " ".join(["python benchmarks/convergence.py", *words]))
    (output / "convergence.json").write_text(json.dumps(compared, indent=2) + "\n", encoding="utf-8")
    (output / "convergence.md").write_text(f"# Convergence of fp8\n\n{compared['text']}\n", encoding="utf-8")
    print(compared["text"])


if __name__ == "__main__":
    main()
