"""Runs the same seed and data over many layouts and prints, step by step, how far each is from one process.

    python -m tests.parity                                     every shipped model under every layout it supports
    python -m tests.parity --models llama --layouts "fsdp 2" --dtypes float64

In float64 losses, gradient norms and weights must agree to 1e-10, in float32 to 1e-5; the exit code says whether.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from safetensors.torch import load_file
from tests.parity.cases import DTYPES, LAYOUTS, MODELS, case_name, supports, world_of

LIMITS = {"float64": 1e-10, "float32": 1e-5}
LAUNCH_SECONDS = 1800
CASES_PER_LAUNCH = 12
"""Each case opens process groups of its own, with threads that stay until the processes end."""


def run(folder, cases):
    """Runs (model, dtype, layout) cases, several of one world size in one launch; those after a failure start anew."""
    by_world = defaultdict(list)
    for case in cases:
        by_world[world_of(case[2])].append(case)
    for world, waiting in sorted(by_world.items()):
        while waiting:
            now, waiting = waiting[:CASES_PER_LAUNCH], waiting[CASES_PER_LAUNCH:]
            _launch(folder, world, now)
            left = [case for case in now if not _is_done(folder, case)]
            failed = [case for case in left if list(folder.glob(f"{case_name(*case)}-rank-*.error"))]
            if left and not failed:
                (folder / f"{case_name(*left[0])}-rank-0.error").write_text("The processes ended without a word.")
                failed = left[:1]
            waiting = [*(case for case in left if case not in failed), *waiting]


def _launch(folder, world, cases):
    words = [":".join(case) for case in cases]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [*command, "-m"] if world > 1 else [sys.executable, "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "tests.parity.cases", folder, *words],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        timeout=LAUNCH_SECONDS,
        check=False,
    )


def _is_done(folder, case):
    return (folder / f"{case_name(*case)}.json").exists()


def compare(folder, model, dtype, layout):
    """Returns per step (loss, norm, how far both are from one process), and how far the weights are at the end."""
    one, own = (case_name(model, dtype, each) for each in ("one", layout))
    reference, steps = (json.loads((folder / f"{name}.json").read_text()) for name in (one, own))
    table = [
        (loss, norm, _relative(loss, there[0]), _relative(norm, there[1]))
        for (loss, norm), there in zip(steps, reference, strict=True)
    ]
    left, right = (load_file(folder / f"{name}.safetensors") for name in (one, own))
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    # Of all weights together: where a gradient is 0 but for rounding (a key's bias), Adam steps by the rounding alone.
    apart = sum(float((left[key] - right[key]).double().square().sum()) for key in left)
    size = sum(float(left[key].double().square().sum()) for key in left)
    distance = (apart / size) ** 0.5
    return table, distance


def _relative(value, reference):
    return abs(value - reference) / max(abs(reference), 1e-12)


def main():
    """Prints the table; returns how many layouts disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--layouts", nargs="+", default=[each for each in LAYOUTS if each != "one"], choices=list(LAYOUTS)
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    chosen = parser.parse_args()
    wrong = total = 0
    print(f"{'model':16} {'dtype':8} {'layout':24} step  {'loss':>12} {'Δ':>8}  {'norm':>12} {'Δ':>8}  weights Δ")
    with tempfile.TemporaryDirectory(prefix="parity-") as name:
        folder = Path(name)
        for model in chosen.models:
            dtypes = [dtype for dtype in chosen.dtypes if dtype in MODELS[model].dtypes]
            cases = [(model, dtype, each) for dtype in dtypes for each in chosen.layouts if supports(model, each)]
            run(folder, [*((model, dtype, "one") for dtype in dtypes), *cases])
            for case in cases:
                wrong += not _print_case(folder, *case)
            total += len(cases)
            sys.stdout.flush()
    print(f"{total - wrong} of {total} layouts agree with one process.")
    return wrong


def _print_case(folder, model, dtype, layout):
    names = (case_name(model, dtype, each) for each in ("one", layout))
    errors = sorted(path for name in names for path in folder.glob(f"{name}-rank-*.error"))
    if errors:
        last = errors[0].read_text().strip().splitlines()[-1]
        print(f"{model:16} {dtype:8} {layout:24} FAILED: {last}")
        return False
    table, distance = compare(folder, model, dtype, layout)
    limit = LIMITS[dtype]
    agrees = distance <= limit and all(max(loss, norm) <= limit for _, _, loss, norm in table)
    for number, (loss, norm, off_loss, off_norm) in enumerate(table, start=1):
        end = f"  {distance:8.1e} {'agrees' if agrees else 'DISAGREES'}" if number == len(table) else ""
        words = (model, dtype, layout) if number == 1 else ("", "", "")
        print(
            f"{words[0]:16} {words[1]:8} {words[2]:24} {number:4}  "
            f"{loss:12.8f} {off_loss:8.1e}  {norm:12.8f} {off_norm:8.1e}{end}"
        )
    return agrees


if __name__ == "__main__":
    sys.exit(min(main(), 1))
