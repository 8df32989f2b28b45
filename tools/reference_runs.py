"""Trains small reference runs and compares their losses and final weights, bit for bit, with tools/reference_runs.json.

    python tools/reference_runs.py            # compare
    python tools/reference_runs.py --write    # record, before a change that must not alter results

Bits depend on torch and on the CPU's vector instructions; the file names both, and other machines are told so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tools" / "reference_runs.json"
PROJECT = ROOT / "tests" / "project" / "run.yaml"

_LLAMA = (
    "model={type: llama, vocab_size: 50, hidden_size: 16, num_layers: 2, num_heads: 2, dropout: 0.1}",
    "trainer.type=language_model",
    "data.eval={}",
    "evaluation.metrics={}",
)
_PACKED = "data.train={type: pack, length: 32, source: {type: parts.py:Documents}}"
RUNS: dict[str, tuple[str, ...]] = {
    "eager": ("trainer.micro_batch_size=8",),
    "accumulation": ("hooks=[{type: ema, decay: 0.8}]",),
    "bf16": ("runtime.precision=bf16",),
    "graph": ("runtime.mode=graph",),
    "replicate": ("--nproc", "2", "runtime.mesh={replicate: 2}"),
    "sharded": ("--nproc", "2", "runtime.mesh={fsdp: 2}"),
    "resumed": ("trainer.max_steps=7", "then", "trainer.max_steps=12"),
    "streamed": (
        "data.train={type: parts.py:ShardedPoints, size: 200, noise: 0.1}",
        "data.num_workers=1",
        "data.shuffle_buffer=20",
    ),
    "mixed": (
        "data.train={type: mix, sources: {one: {type: parts.py:Points, size: 50, weight: 3}, "
        "two: {type: parts.py:Points, size: 9, weight: 1}}}",
    ),
    "packed": (*_LLAMA, _PACKED),
    "packed stream": (
        *_LLAMA,
        "data.train={type: pack, length: 32, source: {type: parts.py:DocumentStream, size: 600}}",
        "trainer.optimizer={type: muon, lr: 1e-2}",
    ),
    "tensor": ("--nproc", "2", *_LLAMA, _PACKED, "runtime.mesh={tensor: 2}"),
    "sharded packed": ("--nproc", "2", *_LLAMA, _PACKED, "runtime.mesh={fsdp: 2}"),
}


def main() -> int:
    """Runs all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="*", help=f"any of: {', '.join(RUNS)}")
    parser.add_argument("--write", action="store_true", help="record the results instead of comparing them")
    arguments = parser.parse_args()
    known = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {"runs": {}}
    machine = describe_machine()
    differing = []
    for name in arguments.runs or RUNS:
        result = run(RUNS[name])
        is_same = known["runs"].get(name) == result
        if arguments.write:
            known["runs"][name] = result
        elif not is_same:
            differing.append(name)
        print(
            f"{name:16} {result['weights'][:16]}  {'recorded' if arguments.write else 'same' if is_same else 'DIFFERS'}"
        )
    if arguments.write:
        known["machine"] = machine
        RECORD.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    elif differing and known["machine"] != machine:
        print(f"The record is of {known['machine']}; this is {machine}, whose bits may differ.")
    return 1 if differing else 0


def describe_machine() -> dict[str, str]:
    """Returns what the bits of a result depend on."""
    import torch

    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def run(settings: tuple[str, ...]) -> dict[str, Any]:
    """Trains in a process of its own; returns the logged losses and a hash of the final weights."""
    with tempfile.TemporaryDirectory() as folder:
        parts: list[list[str]] = [[]]
        for word in settings:
            if word == "then":
                parts.append([])
            else:
                parts[-1].append(word)
        for words in parts:
            flags = words[:2] if words[:1] == ["--nproc"] else []
            overrides = words[len(flags) :]
            command = [sys.executable, "-m", "trainwright", "train", str(PROJECT), *flags, "-q"]
            command += [f"output_dir={folder}", "name=run", *overrides]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
            environment["XDG_CONFIG_HOME"] = f"{folder}/config"  # the key that signs run folders
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return read_run(Path(folder) / "run")


def read_run(folder: Path) -> dict[str, Any]:
    """Reads the losses of a run's log, and hashes the weights of its newest checkpoint."""
    from trainwright.checkpoint.store import CheckpointStore

    lines = [json.loads(line) for line in (folder / "metrics.json").read_text("utf-8").splitlines()]
    losses = [{key: value for key, value in line.items() if "loss" in key or key == "step"} for line in lines]
    store, content = CheckpointStore(folder / "checkpoints"), hashlib.sha256()
    # The full tensors: which rank writes what is not a result.
    for name, tensor in sorted(store.read(store.steps()[-1], "model").items()):
        content.update(name.encode())
        content.update(tensor.numpy().tobytes())
    return {"losses": losses, "weights": content.hexdigest()}


if __name__ == "__main__":
    sys.exit(main())
