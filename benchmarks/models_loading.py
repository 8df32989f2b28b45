"""Loading and exporting a checkpoint: ours beside transformers', time and peak memory, in one run.

    python benchmarks/models_loading.py [--preset llama3-8b] [--devices cpu cuda] [--rounds 2] [--work FOLDER]
                                        [--output FOLDER]

Random bf16 weights are written once, in shards of 5 GB. Then every contender, in turn and each time in a fresh
process, reads the folder onto the device, reads one number of every page of the weights, and writes the model as a
folder again, in shards of 5 GB, until the disk has it. Imports are not timed. The files are in the system's cache, as
far as its memory goes, for all contenders alike. Memory is the process's resident peak on the host, less what it held
before; it counts mapped pages of the files too, which the memory "of its own" leaves out.
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
from importlib.util import find_spec
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


def own_memory() -> float:
    """Gigabytes that the process holds without the pages of mapped files, which the system may drop and read again."""
    return resident("RssAnon")


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


def measure(name: str, device: str, folder: Path, target: Path) -> Measured:
    """Loads, touches and exports in this process, which did nothing before."""
    torch.zeros(1, device=device)  # starts the device
    if name == OURS:
        from trainwright.models.llama import Llama

        load = lambda: Llama.from_pretrained(folder, device=device)  # noqa: E731
        save = lambda model: model.save_pretrained(target, max_shard_bytes=SHARD_BYTES)  # noqa: E731
    else:
        from transformers import LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        # With accelerate transformers reads onto the device; else it reads first and moves then.
        placed = {"device_map": device} if device != "cpu" and find_spec("accelerate") else {}
        load = lambda: LlamaForCausalLM.from_pretrained(folder, dtype="auto", **placed).to(device)  # noqa: E731
        save = lambda model: model.save_pretrained(target, max_shard_size=SHARD_BYTES)  # noqa: E731
    reset_peak()
    own, before, start = own_memory(), resident("VmRSS"), time.perf_counter()
    model = load()
    with torch.no_grad():
        touched = sum(float(each.flatten()[::PAGE_ELEMENTS].float().sum()) for each in model.parameters())
    found = {"load_s": time.perf_counter() - start, "load_gb": resident("VmHWM") - before, "touched": touched}
    found["loaded_own_gb"] = own_memory() - own
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


def contend(name: str, device: str, folder: Path, target: Path) -> Measured:
    lines = in_a_process("--measure", name, "--devices", device, "--work", str(folder)).splitlines()
    found: Measured = json.loads(lines[-1])
    shutil.rmtree(target)
    print(name, device, json.dumps(found), flush=True)
    return found


def compare(device: str, work: Path, *, rounds: int, warmups: int) -> dict[str, object]:
    folder, target = work / "model", work / "export"
    contenders = {name: lambda name=name: contend(name, device, folder, target) for name in (OURS, THEIRS)}
    found = take_turns(contenders, rounds, warmups)
    sums = {name: found[name]["touched"][0] for name in contenders}
    assert abs(sums[OURS] - sums[THEIRS]) <= 1e-6 * abs(sums[OURS]), f"not the same weights: {sums}"
    quantities = ("load_s", "load_gb", "loaded_own_gb", "save_s", "save_gb")
    return {
        "medians": {name: {each: median(found, name, each) for each in quantities} for name in contenders},
        "speedup": {each: ratio(found, each, THEIRS, OURS) for each in ("load_s", "save_s")},
    }


def page(report: dict[str, object]) -> str:
    rows = []
    for device, found in report["results"].items():
        for name in (OURS, THEIRS):
            own = found["medians"][name]
            speed = {what: show_ratio(found["speedup"][what]) if name == OURS else "1" for what in ("load_s", "save_s")}
            row = [f"{name}, {device}", f"{own['load_s']:.1f}", speed["load_s"], f"{own['load_gb']:.1f}"]
            row += [f"{own['loaded_own_gb']:.1f}", f"{own['save_s']:.1f}", speed["save_s"], f"{own['save_gb']:.1f}"]
            rows.append(row)
    head = ["", "s to load", "times as fast", "GB at the peak", "GB of its own, loaded"]
    head += ["s to export", "times as fast", "GB beside the model"]
    return (
        f"# Loading and exporting\n\n{report['what']}\n\n```\n{report['command']}\n```\n\n{report['machine']}\n\n"
        f"{table(head, rows)}\n"
    )


def write(report: dict[str, object], output: Path | None) -> None:
    print(page(report), flush=True)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "loading.json").write_text(json.dumps(report, indent=1) + "\n")
        (output / "loading.md").write_text(page(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument("--work", type=Path, default=None, help="where the checkpoints go; needs twice their size")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.make, arguments.work)
    elif arguments.measure:
        target = arguments.work.parent / "export"
        print(json.dumps(measure(arguments.measure, arguments.devices[0], arguments.work, target)))
    else:
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    gpu = f"{torch.cuda.get_device_name()}, " if "cuda" in arguments.devices else ""
    report: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{gpu}{os.cpu_count()} cores, {platform.machine()}; {versions}.",
        "results": {},
    }
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        folder = Path(work) / "model"
        in_a_process("--make", arguments.preset, "--work", str(folder))
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
        report["what"] = (
            f"A checkpoint of {arguments.preset} in bf16, {size:.1f} GB, read onto the device with every page touched, "
            f"and written again until the disk has it; shards of {SHARD_BYTES / 1e9:.0f} GB; fresh processes in turn, "
            f"medians of {arguments.rounds} rounds."
        )
        for number, device in enumerate(arguments.devices):
            # One round for practice, on the first device: it brings the files into the system's cache.
            found = compare(device, Path(work), rounds=arguments.rounds, warmups=int(number == 0))
            report["results"] |= {device: found}
            write(report, arguments.output)


if __name__ == "__main__":
    main()
