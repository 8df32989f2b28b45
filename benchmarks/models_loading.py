"""Loading and exporting a checkpoint: ours beside transformers', time and peak memory, in one run.

    python benchmarks/models_loading.py [--preset llama3-8b] [--rounds 3] [--work FOLDER] [--output FOLDER]

Random bf16 weights are written once, in shards of 5 GB. Then every contender, in turn and each time in a fresh
process, reads the folder into memory, reads one number of every page of the weights, and writes the model as a folder
again, in shards of 5 GB, until the disk has it. Imports are not timed. The files are in the system's cache, as far as
its memory goes, for all contenders alike. Memory is the process's resident peak, less what it held before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from data_rounds import Measured, median, ratio, show_ratio, table, take_turns

OURS, THEIRS = "trainwright", "transformers"
PAGE_ELEMENTS = 2048  # of two bytes: 4 KiB
SHARD_BYTES = 5_000_000_000


def resident(field: str) -> float:
    """Gigabytes that the process holds (VmRSS), or held at most since the last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e9


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def make(preset: str, folder: Path) -> None:
    """Writes the checkpoint that all contenders read."""
    from trainwright.models.llama import Llama

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Llama.from_preset(preset)
    model.save_pretrained(folder, max_shard_bytes=SHARD_BYTES)


def measure(name: str, folder: Path, target: Path) -> Measured:
    """Loads, touches and exports in this process, which did nothing before."""
    if name == OURS:
        from trainwright.models.llama import Llama

        load = lambda: Llama.from_pretrained(folder)  # noqa: E731
        save = lambda model: model.save_pretrained(target, max_shard_bytes=SHARD_BYTES)  # noqa: E731
    else:
        from transformers import LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        load = lambda: LlamaForCausalLM.from_pretrained(folder, dtype="auto")  # noqa: E731
        save = lambda model: model.save_pretrained(target, max_shard_size=SHARD_BYTES)  # noqa: E731
    reset_peak()
    before, start = resident("VmRSS"), time.perf_counter()
    model = load()
    with torch.no_grad():
        touched = sum(float(each.flatten()[::PAGE_ELEMENTS].float().sum()) for each in model.parameters())
    found = {"load_s": time.perf_counter() - start, "load_gb": resident("VmHWM") - before, "touched": touched}
    assert next(model.parameters()).dtype == torch.bfloat16
    gc.collect()
    os.sync()
    reset_peak()
    before, start = resident("VmRSS"), time.perf_counter()
    save(model)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {**found, "save_s": time.perf_counter() - start, "save_gb": resident("VmHWM") - before}


def in_a_process(*words: str) -> str:
    done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def contend(name: str, folder: Path, target: Path) -> Measured:
    found: Measured = json.loads(in_a_process("--measure", name, "--work", str(folder)).splitlines()[-1])
    shutil.rmtree(target)
    print(name, json.dumps(found), flush=True)
    return found


def compare(preset: str, work: Path, rounds: int) -> dict[str, object]:
    folder, target = work / "model", work / "export"
    in_a_process("--make", preset, "--work", str(folder))
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    contenders = {name: lambda name=name: contend(name, folder, target) for name in (OURS, THEIRS)}
    found = take_turns(contenders, rounds)
    sums = {name: found[name]["touched"][0] for name in contenders}
    assert abs(sums[OURS] - sums[THEIRS]) <= 1e-6 * abs(sums[OURS]), f"not the same weights: {sums}"
    quantities = ("load_s", "load_gb", "save_s", "save_gb")
    return {
        "checkpoint_gb": size,
        "medians": {name: {each: median(found, name, each) for each in quantities} for name in contenders},
        "speedup": {each: ratio(found, each, THEIRS, OURS) for each in ("load_s", "save_s")},
    }


def page(report: dict[str, object]) -> str:
    found = report["results"]
    rows = []
    for name in (OURS, THEIRS):
        own = found["medians"][name]
        row = [name]
        for what in ("load", "save"):
            speed = show_ratio(found["speedup"][f"{what}_s"]) if name == OURS else "1"
            row += [f"{own[f'{what}_s']:.1f}", speed, f"{own[f'{what}_gb']:.1f}"]
        rows.append(row)
    head = ["", "s to load", "times as fast", "GB at the peak", "s to export", "times as fast", "GB beside the model"]
    return (
        f"# Loading and exporting\n\n{report['what']}\n\n```\n{report['command']}\n```\n\n{report['machine']}\n\n"
        f"{table(head, rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None, help="where the checkpoints go; needs twice their size")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        return make(arguments.make, arguments.work)
    if arguments.measure:
        return print(json.dumps(measure(arguments.measure, arguments.work, arguments.work.parent / "export")))
    import transformers

    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        results = compare(arguments.preset, Path(work), arguments.rounds)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    report = {
        "what": f"A checkpoint of {arguments.preset} in bf16, {results['checkpoint_gb']:.1f} GB, read into memory with "
        "every page touched, and written again until the disk has it; shards of 5 GB; fresh processes in turn, medians "
        f"of {arguments.rounds} rounds after one for practice.",
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}; {versions}.",
        "results": results,
    }
    print(page(report))
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "loading.json").write_text(json.dumps(report, indent=1) + "\n")
        (arguments.output / "loading.md").write_text(page(report))


if __name__ == "__main__":
    main()
