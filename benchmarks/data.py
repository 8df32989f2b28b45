"""How fast data is loaded, ordered, resumed and packed, against torch's DataLoader and Hugging Face's datasets.

    python benchmarks/data.py [--sections loading order resume packing] [--rounds 7] [--quick] [--output FOLDER]

The contenders of a section take turns, round after round, every second one in reverse order, in one process (order:
each in a fresh one), because the machine's speed drifts. Reported is the median over rounds, and for ratios the median
of (contender / baseline of the same round) with the quartiles of the rounds. What a section measures is told in its
own file, data_SECTION.py. With `--output` the results go into data.json (every round) and data.md (the tables); other
sections' results, of runs before, stay there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import data_loading
import data_order
import data_packing
import data_resume
import torch

SECTIONS = {
    "loading": (data_loading, "Loading"),
    "order": (data_order, "Knowing the order"),
    "resume": (data_resume, "Going on in a large file"),
    "packing": (data_packing, "Packing"),
}
PACKAGES = ("trainwright", "torch", "numpy", "datasets", "pyarrow", "tokenizers")


def run_section(name: str, folder: Path, *, rounds: int, quick: bool) -> Any:
    if name == "loading":
        return data_loading.measure(folder, rounds=rounds, seconds=0.02 if quick else 0.25)
    if name == "order":
        size, others = (10**5, [10**6]) if quick else (10**8, [10**9])
        # Three are enough where one takes a quarter of a minute.
        return data_order.measure(rounds=min(rounds, 3), size=size, sizes_of_ours=others)
    if name == "resume":
        return data_resume.measure(folder, rounds=rounds, late=20_010 if quick else 1_000_010)
    num_tokens, row_lengths = (100_000, (1024,)) if quick else (3_000_000, (1024, 2048))
    return data_packing.measure(rounds=rounds, num_tokens=num_tokens, row_lengths=row_lengths)


def describe_run() -> dict[str, Any]:
    """The command, the versions and the machine."""
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "command": f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} python {' '.join(sys.argv)}",
        "versions": {"python": platform.python_version(), **packages},
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), shared; {platform.system()}",
        "load": os.getloadavg()[1],
    }


def write(found: dict[str, Any], run: dict[str, Any], folder: Path) -> None:
    """Writes all rounds as JSON, and the tables with what their sections say of them as Markdown.

    Sections that were not measured now stay as they were, each with a note of its own run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "data.json"
    sections = json.loads(file.read_text()) if file.exists() else {}
    sections |= {name: {**run, "results": results} for name, results in found.items()}
    sections = {name: sections[name] for name in SECTIONS if name in sections}
    file.write_text(json.dumps(sections, indent=1, ensure_ascii=False) + "\n")
    parts = [
        "# Data",
        "Medians over rounds; ratios are medians of the rounds' own ratios, with the rounds' quartiles in brackets. "
        "All rounds are in data.json.",
    ]
    for name, section in sections.items():
        module, title = SECTIONS[name]
        versions = ", ".join(f"{package} {version}" for package, version in section["versions"].items())
        machine = f"{section['machine']}, one thread a process, load {section['load']:.1f}; {versions}."
        tables = module.report(section["results"])
        parts += [f"## {title}", (module.__doc__ or "").strip(), f"```\n{section['command']}\n```", machine, tables]
    (folder / "data.md").write_text("\n\n".join(parts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round: does it run at all?")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in options.sections:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            rounds = 1 if options.quick else options.rounds
            found = run_section(name, Path(folder), rounds=rounds, quick=options.quick)
        print(f"\n{SECTIONS[name][0].report(found)}\n({time.perf_counter() - began:.0f} s)\n", flush=True)
        if options.output:
            write({name: found}, describe_run(), options.output)


if __name__ == "__main__":
    main()
