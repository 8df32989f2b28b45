"""`python -m tests.fuzz --inputs 100000`: reads changed files; says how many were read, rejected, or did harm.

Every input runs under a limit of memory and time, in a forked process that is replaced if it dies. An input is a
function of the seed, its target and its number: `--target config --first 1234 --inputs 1` repeats one.
"""

from __future__ import annotations

import argparse
import collections
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

SHARES = {"config": 0.38, "run_folder": 0.03, "checkpoint": 0.03, "model_folder": 0.06, "tokenizer": 0.5}
"""Of the inputs, by how fast a target reads one."""
SECONDS = 12.0
BYTES = 3 * 2**30


def limit_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def stop_slow(*_):
    raise TimeoutError("more than 6 s")


def work(shop, target, seed, numbers, pipe):
    from tests.fuzz.targets import fuzz_one

    limit_memory()
    signal.signal(signal.SIGALRM, stop_slow)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for number in numbers:
        os.write(pipe, f"{number} start\n".encode())
        signal.alarm(6)
        try:
            outcome = fuzz_one(shop, target, seed, number)
        except BaseException as error:  # whatever it is, it is what is looked for
            frames = traceback.extract_tb(error.__traceback__)
            place = next(
                (f"{each.filename}:{each.lineno}" for each in reversed(frames) if "trainwright" in each.filename), "?"
            )
            text = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
            outcome = f"FAILED {text} ({place})"
        os.write(pipe, f"{number} {outcome}\n".encode("utf-8", "replace"))


def run_chunk(shop, target, seed, numbers):
    """Yields the number and outcome of each input; a process that dies or hangs is replaced."""
    numbers = list(numbers)
    while numbers:
        shop.restore()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                work(shop, target, seed, numbers, writer)
            finally:
                os._exit(0)
        os.close(writer)
        buffer, current = b"", None
        while True:
            ready, _, _ = select.select([reader], [], [], SECONDS)
            chunk = os.read(reader, 65536) if ready else b""
            if not chunk:
                os.kill(child, signal.SIGKILL)
                break
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                number, _, outcome = line.decode("utf-8", "replace").partition(" ")
                current = int(number) if outcome == "start" else None
                if outcome != "start":
                    numbers.remove(int(number))
                    yield int(number), outcome
        os.close(reader)
        os.waitpid(child, 0)
        if current is not None:
            numbers.remove(current)
            yield current, "FAILED the process died" if ready else f"FAILED no answer within {SECONDS:g} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many, over all targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=SHARES, help="only this one")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input, to go on after a stop")
    parser.add_argument("--chunk", type=int, default=1000, help="inputs per process")
    options = parser.parse_args()
    from tests.fuzz.targets import make_workshop

    with tempfile.TemporaryDirectory(prefix="trainwright-fuzz-") as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"
        shop = make_workshop(Path(folder) / "shop")
        os.chdir(folder)
        failures, started = 0, time.monotonic()
        for target in [options.target] if options.target else SHARES:
            total = options.inputs if options.target else round(options.inputs * SHARES[target])
            counts, known = collections.Counter(), collections.Counter()
            for first in range(options.first, options.first + total, options.chunk):
                numbers = range(first, min(first + options.chunk, options.first + total))
                for number, outcome in run_chunk(shop, target, options.seed, numbers):
                    kind = outcome.partition(" ")[0]
                    counts[kind] += 1
                    if kind == "FAILED":
                        known[outcome[-90:]] += 1
                        if known[outcome[-90:]] <= 2:
                            print(f"  {target} {number}: {outcome}", flush=True)
            failures += counts["FAILED"]
            seconds = time.monotonic() - started
            print(f"{target}: {total} inputs, {dict(counts)}, seed {options.seed}, {seconds:.0f} s", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
