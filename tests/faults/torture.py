"""Kills, disturbs and damages runs at random; says how many survived, and writes the counts to docs/reliability.md.

    make torture CASES=200 SEED=1
    make torture-page

A case draws a run of one kind (a single process, replicate: 2 with
one writer or two, fsdp: 2, a stream, a mixture, packed rows, an adapter)
and trains it once undisturbed. A second run with the same settings is killed or interrupted at random moments, with
full disks and failing syncs meanwhile, and with damage to its files in between; the same command resumes it until it
has ended. Lost is a run that ends otherwise than the undisturbed one, by a single bit, or not at all.

Every outcome is written to a state file at once: the same command continues after an interruption. The draws of a case
depend on its seed and number alone; the moments of signals depend on the machine as well.
"""

import argparse
import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from tests.faults.damage import DAMAGE
from tests.faults.runs import differences, store_of, what_is_left
from tests.faults.table import PAGE
from tests.faults.two_ranks import Run

from trainwright import Hook
from trainwright.loop import checkpointing
from trainwright.loop.checkpointing import SHARED_BYTES

PARTS = "tests.faults.parts"
COMMON = (
    *("hooks=[{type: ema, decay: 0.8}]", "trainer.max_steps=20", "data.shuffle_buffer=32"),
    *("checkpoint.every_steps=3", "log.every_steps=2", "evaluation.every_steps=5"),
)
HURT = (f"model.type={PARTS}:HurtNet", f"data.eval.valid={{type: {PARTS}:HurtPoints, num_batches: 3}}")
HURT += ("anomalies.non_finite=rollback",)
LLAMA = "type: llama, vocab_size: 64, hidden_size: 16, num_layers: 2, num_heads: 2, intermediate_size: 32"
PACK = f"type: pack, length: 16, source: {{type: {PARTS}:"
TEXT = ("trainer.type=language_model", "evaluation.metrics={}", f"data.eval.valid={{{PACK}Documents, size: 30}}}}")
MAX_LIVES = 6
DISK_FAULTS = ("none", "none", "full disk", "failing sync")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
BEGIN, END = "<!-- torture: made by `make torture-page` -->", "<!-- torture: end -->"


class LostError(Exception):
    """A run did not end as the undisturbed one."""


def points(draw, *, is_stream):
    """Batches of eight, of which some may hurt: shuffled, they would hurt many batches."""
    shuffles = draw.random() < 0.5
    hurt = "[]" if shuffles else draw.choice(("[]", "[4]", "[4, 11]"))
    kind = "HurtStream" if is_stream else "HurtPoints"
    data = f"data.train={{type: {PARTS}:{kind}, hurt: {hurt}, num_batches: 30}}"
    return (*HURT, data, f"data.shuffle={str(shuffles).lower()}")


def single(draw):
    return points(draw, is_stream=draw.random() < 0.5)


def replicate(draw):
    return (*points(draw, is_stream=draw.random() < 0.3), "runtime.mesh={replicate: 2}")


def fsdp(draw):
    return (*points(draw, is_stream=False), "runtime.mesh={fsdp: 2}")


def streamed(draw):
    return (f"data.train={{type: {PARTS}:{draw.choice(('ShardedPoints', 'PointStream'))}, size: 240, noise: 0.1}}",)


def mixed(draw):
    kinds = draw.choice((("Points", "Points"), ("PointStream", "ShardedPoints"), ("Points", "ShardedPoints")))
    sources = [
        f"{name}: {{type: {PARTS}:{kind}, size: {size}, seed: {size}, noise: 0.1, weight: {weight}}}"
        for name, kind, size, weight in zip("ab", kinds, (200, 120), (3, 1), strict=True)
    ]
    return (f"data.train={{type: mix, sources: {{{', '.join(sources)}}}}}",)


def packed(draw):
    source = draw.choice(("Documents", "DocumentStream"))
    return (*TEXT, f"model={{{LLAMA}, dropout: 0.1}}", f"data.train={{{PACK}{source}, size: 400}}}}")


def adapter(draw):
    lora = "lora: {match: ['*.q_proj', '*.v_proj'], rank: 2}"
    return (*TEXT, f"model={{{LLAMA}, {lora}}}", f"data.train={{{PACK}Documents, size: 400}}}}")


SHARED = "replicate: 2, shared writing"
KINDS = {
    "single": single,
    "replicate: 2": replicate,
    SHARED: replicate,
    "fsdp: 2": fsdp,
    "streamed": streamed,
    "mixed": mixed,
    "packed": packed,
    "adapter": adapter,
}


def num_ranks_of(kind):
    return 2 if ": 2" in kind else 1


def draw_settings(kind, draw):
    return (
        *(*COMMON, *KINDS[kind](draw), f"data.num_workers={draw.choice((0, 0, 2))}"),
        f"trainer.micro_batch_size={draw.choice((4, 2) if num_ranks_of(kind) == 2 else (8, 4))}",
        f"checkpoint.asynchronous={draw.choice(('true', 'false'))}",
        f"checkpoint.keep_last={draw.choice((1, 2, 3))}",
    )


class FullDisk(Hook):
    """Between two steps no file can grow beyond a size, as on a full disk."""

    def __init__(self, first, last):
        self.first, self.last = first, last

    def after_step(self):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.trainer.step == self.first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        elif self.trainer.step == self.last:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def fail_syncs(first, last):
    """Makes some of this process's syncs fail, counted from 0."""
    count = 0

    def fsync(descriptor):
        nonlocal count
        count += 1
        if first <= count < last:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    os.fsync = fsync


def damage_something(run, draw):
    """Damages files of some of the checkpoints, or the end of the log; returns what was done."""
    done = []
    if not (run / "checkpoints").is_dir():
        return done
    for step in store_of(run).steps()[-draw.randint(1, 2) :]:
        files = sorted(path for path in store_of(run).path(step).iterdir() if path.stat().st_size)
        if files:
            kind, file = draw.choice(tuple(DAMAGE)), draw.choice(files)
            DAMAGE[kind](file)
            done.append(f"step {step}: {file.name} {kind}")
    if draw.random() < 0.3 and (run / "metrics.json").exists():
        with (run / "metrics.json").open("ab") as file:
            file.write(draw.choice((b'{"step": 3, "lo', b"\0" * 40)))
        done.append("metrics.json: a torn line")
    return done


def live(run, settings, num_ranks, draw, seconds):
    """Starts the run, with a signal at a random moment and perhaps a fault of the disk; returns codes and a record."""
    fault = draw.choice(DISK_FAULTS)
    first = draw.randint(1, 12)
    last = first + draw.randint(2, 8)
    options = {}
    if fault == "full disk":
        options["hooks"] = [lambda: FullDisk(first, last)]
    elif fault == "failing sync":
        options["prepare"] = lambda: fail_syncs(3 * first, 3 * last)
    running = Run(run, *settings, num_ranks=num_ranks, **options)
    time.sleep(draw.uniform(0.0, 0.8 * seconds))
    number = draw.choice(SIGNALS)
    told = draw.choice(([0], [num_ranks - 1], range(num_ranks)))
    for rank in told:
        running.send(rank, number)  # one that has ended waits to be asked how
    try:
        codes = running.wait(as_launcher=True)
    except AssertionError as error:
        raise LostError(str(error)) from error
    # Killed, told to leave before it listens or after, or, with a fault of the disk, an error that says so. Python
    # leaves with 120 if stderr, which is a file here, cannot be written.
    expected = {0, -number, 128 + number} | ({1, 2, 120} if fault != "none" else set())
    if num_ranks > 1:  # a launcher ends the others by SIGTERM when one has left
        expected |= {-signal.SIGTERM, 128 + signal.SIGTERM}
    for rank in told:
        if codes[rank] not in expected:
            raise LostError(f"rank {rank} left with {codes[rank]} after {number.name}: {running.said(rank)[-700:]}")
    return codes, f"{number.name} to {list(told)}{'' if fault == 'none' else f', {fault}'} → {codes}"


def disturb(run, settings, num_ranks, draw, seconds):
    """Trains until the run has ended, with deaths, faults and damage on the way; returns what was done to it."""
    done = []
    for _ in range(MAX_LIVES):
        codes, record = live(run, settings, num_ranks, draw, seconds)
        done.append(record)
        if not any(codes):
            return done
        if draw.random() < 0.3:
            done += damage_something(run, draw)
    finish(run, settings, num_ranks)
    return done


def finish(run, settings, num_ranks):
    """Trains undisturbed until the run has ended."""
    running = Run(run, *settings, num_ranks=num_ranks)
    if any(codes := running.wait()):
        said = "; ".join(running.said(rank)[-700:] for rank in range(num_ranks))
        raise LostError(f"undisturbed it left with {codes}: {said}")


def play_case(folder, kind, draw):
    """One run undisturbed and one disturbed; returns what was done to it, or raises LostError."""
    settings, num_ranks = draw_settings(kind, draw), num_ranks_of(kind)
    checkpointing.SHARED_BYTES = 0 if kind == SHARED else SHARED_BYTES
    began = time.monotonic()
    finish(folder / "undisturbed", settings, num_ranks)
    done = disturb(folder / "disturbed", settings, num_ranks, draw, time.monotonic() - began)
    found = differences(what_is_left(folder / "undisturbed"), what_is_left(folder / "disturbed"))
    if found:
        raise LostError(f"{'; '.join(found[:5])} after {', '.join(done)}")
    return done


class State:
    """The outcomes so far, in a file: case → kind, whether it survived, and what was done to it."""

    def __init__(self, path):
        self.path = path
        self.cases = json.loads(path.read_text("utf-8"))["cases"] if path.exists() else {}

    def note(self, name, kind, *, survived, record):
        self.cases[name] = {"kind": kind, "survived": survived, "record": record}
        staging = self.path.with_name(f"{self.path.name}.part")
        staging.write_text(json.dumps({"cases": self.cases}, indent=1) + "\n", "utf-8")
        staging.replace(self.path)

    def survived(self):
        return sum(case["survived"] for case in self.cases.values())

    def page_section(self):
        """The table of kinds, and the seeds."""
        rows = ["| run | cases | survived |\n|---|---|---|\n"]
        for kind in KINDS:
            outcomes = [case["survived"] for case in self.cases.values() if case["kind"] == kind]
            rows.append(f"| {kind} | {len(outcomes)} | {sum(outcomes)} |\n")
        rows.append(f"| all | {len(self.cases)} | {self.survived()} |\n")
        seeds = {}
        for name in self.cases:
            seed = name.partition("-")[0]
            seeds[seed] = seeds.get(seed, 0) + 1
        listed = ", ".join(f"{seed} ({count} cases)" for seed, count in sorted(seeds.items()))
        return f"{BEGIN}\n{''.join(rows)}\nSeeds: {listed}.\n{END}"


def replace_section(page, section):
    before, begin, rest = page.partition(BEGIN)
    _, end, behind = rest.partition(END)
    assert begin, f"{PAGE.name} lacks the line {BEGIN}"
    assert end, f"{PAGE.name} lacks the line {END}"
    return f"{before}{section}{behind}"


def play(state, folder, *, seed, numbers, until):
    """Plays the cases that the state lacks, up to a time; returns how many were lost."""
    lost, began = 0, time.monotonic()
    kinds = tuple(KINDS)
    left = [number for number in numbers if f"{seed}-{number}" not in state.cases]
    for played, number in enumerate(left, start=1):
        if time.monotonic() > until:
            break
        name, kind = f"{seed}-{number}", kinds[number % len(kinds)]
        case_began = time.monotonic()
        try:
            record, survived = ", ".join(play_case(folder / name, kind, random.Random(name))), True
        except LostError as loss:
            record, survived = str(loss), False
        lost += not survived
        state.note(name, kind, survived=survived, record=record)
        if survived:
            shutil.rmtree(folder / name)
            for path in folder.glob(f"{name}*"):
                path.unlink()
        rest = (time.monotonic() - began) / played * (len(left) - played) / 60
        outcome = f"survived {record}" if survived else f"LOST: {record} ({folder / name} is kept)"
        print(f"case {name} ({kind}, {time.monotonic() - case_began:.0f} s): {outcome}", flush=True)
        print(f"  {state.survived()} of {len(state.cases)} survived; {rest:.0f} min left", flush=True)
    return lost


def main():
    parser = argparse.ArgumentParser(description="Kills and damages runs at random; says how many survived.")
    parser.add_argument("--cases", type=int, default=20, help="How many cases of this seed there are to be.")
    parser.add_argument("--only", type=int, help="Play this case alone, and leave the state file.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Begin no case after so many minutes.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("torture.json"), help="The outcomes so far.")
    parser.add_argument("--write", action="store_true", help="Write the outcomes to docs/reliability.md, and stop.")
    arguments = parser.parse_args()
    state = State(arguments.state)
    if arguments.write:
        PAGE.write_text(replace_section(PAGE.read_text("utf-8"), state.page_section()), "utf-8")
        return 0
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="trainwright-torture-"))
    numbers = range(1, arguments.cases + 1)
    if arguments.only is not None:
        state, numbers = State(folder / "torture.json"), [arguments.only]
    until = time.monotonic() + 60 * arguments.minutes
    try:
        lost = play(state, folder, seed=arguments.seed, numbers=numbers, until=until)
    except KeyboardInterrupt:
        print("\nThe same command continues.")
        return 130
    if not lost:
        shutil.rmtree(folder)
    print(f"{state.survived()} of {len(state.cases)} survived")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
