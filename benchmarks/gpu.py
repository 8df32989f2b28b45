"""Training speed on one GPU: trainwright next to Hugging Face Trainer (compiled, with Liger-Kernel) and others.

    python benchmarks/gpu.py --plan [--cases tinyllama gpt2 …]        # waves of contenders and their expected time
    python benchmarks/gpu.py --cases tinyllama --minutes 6 --output FOLDER
    python benchmarks/gpu.py --merge FIRST/gpu.json SECOND/gpu.json --output FOLDER
    python benchmarks/gpu.py --dry-run                                # everything once, tiny, on the CPU

Every contender trains the same shape from the same weights on the same rows, in a process of its own, with settings
from its documentation. The contenders of a case start at the same time and compile concurrently, as far as the GPU's
memory allows. Then they take turns: one trains some steps, with the device's work done before and after, while the
others block at the end of a step. gpu_cases.py has the shapes, settings and memory estimates. Where not all
contenders of a case fit, the fastest peer stays and takes turns with the rest.

A contender that fails is reported with its error, and the others continue. gpu.json and gpu.md are written after each
wave. Compiled code is cached in a folder of the machine, so a repeated command starts faster.

Next to torch and this package it needs transformers, accelerate, liger-kernel, peft, torchao and, for the toy model,
pytorch-lightning. The case nanochat needs a checkout of its repository: --nanochat FOLDER. convergence.py compares
losses of fp8 and bf16; its convergence.json is part of the report if it is in the output folder or merged.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_cases import CASES, MATRICES, Case, Contender, Stage, expected_seconds, next_wave, plan_waves, without
from gpu_report import Report

HERE = Path(__file__).parent
CONTEXT_GIB = 0.7  # of a process on the GPU, next to what torch counts
START_LIMIT, TURN_LIMIT = 280.0, 60.0  # seconds


@dataclass(eq=False)
class Worker:
    """A process of gpu_contenders.py."""

    case: str
    contender: Contender
    process: subprocess.Popen[str]
    state: str = "importing"
    """importing, starting (on the device), ready, or ended."""
    gib: float = 0.0
    """What it holds on the device, expected while it starts and measured once it is ready."""
    since: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            """It died: its reader reports that."""


class Bench:
    """Runs wave after wave while there is time, and keeps the report up to date."""

    def __init__(self, options: argparse.Namespace, output: Path, report: Report) -> None:
        self._options, self._output, self._report = options, output, report
        self._began = time.monotonic()
        self._log = (output / "gpu.log").open("a", encoding="utf-8")
        self._messages: queue.Queue[tuple[Worker, dict[str, Any]]] = queue.Queue()
        self._imported: dict[tuple[str, str], Worker] = {}
        self._baselines: dict[str, Worker] = {}
        self._waiting: dict[str, list[Contender]] = {}
        self._retried: set[tuple[str, str]] = set()
        caches = Path(tempfile.gettempdir()) / "trainwright-gpu-caches"
        self._environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }

    def seconds_left(self) -> float:
        return self._began + 60 * self._options.minutes - time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s  {text}", flush=True)

    def run(self, cases: list[Case]) -> None:
        """Measures the cases, as many as there is time for."""
        self._waiting = {case.name: list(case.contenders) for case in cases if case.contenders}
        budget, number = self._options.memory, 0
        self._matrices = self._start_process(cases[0].name, MATRICES)
        try:
            while self._waiting:
                kept = {case: (each.gib, each.found.get("reserved_gib", 0.0)) for case, each in self._baselines.items()}
                wave = next_wave(self._waiting, kept, budget)
                self._waiting = without(self._waiting, wave)
                expected = expected_seconds(wave, budget, self._options.rounds)
                if self.seconds_left() < 0.6 * expected and not self._options.dry_run:
                    error = f"no time was left: {self.seconds_left():.0f} s of an expected {expected:.0f} s"
                    for stage in wave:
                        for each in stage.contenders:
                            self._report.note(stage.case, each.name, {"ok": False, "error": error})
                    continue
                self._import(wave)
                if self._waiting:
                    self._import(next_wave(self._waiting, {}, budget))  # they wait for their job, without the device
                number += 1
                begun = time.monotonic()
                self._run_wave(number, wave, expected)
                self.say(f"wave {number} took {time.monotonic() - begun:.0f} s, {expected:.0f} s were expected")
        finally:
            for worker in [self._matrices, *self._imported.values(), *self._baselines.values()]:
                kill(worker)
            self._log.close()

    def _import(self, wave: list[Stage]) -> None:
        """Starts the processes of a wave that do not run yet; they import and wait."""
        for stage in wave:
            for each in stage.contenders:
                if (stage.case, each.name) not in self._imported:
                    self._imported[stage.case, each.name] = self._start_process(stage.case, each)

    def _start_process(self, case: str, contender: Contender) -> Worker:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_contenders.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,  # so that `kill` reaches the processes that it starts
            env=os.environ | self._environment,
        )
        worker = Worker(case, contender, process)
        threading.Thread(target=self._read, args=(worker,), daemon=True).start()
        return worker

    def _read(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            if line.startswith("{"):  # libraries may print while they are imported
                self._messages.put((worker, json.loads(line)))
        code = worker.process.wait()
        self._messages.put((worker, {"event": "end", "ok": False, "error": f"exit code {code}; see gpu.log"}))

    def _run_wave(self, number: int, wave: list[Stage], expected: float) -> None:
        for stage in wave:
            if stage.case in self._baselines and not stage.keeps_baseline:  # no room for it
                self._dismiss([self._baselines.pop(stage.case)])
        workers = [self._imported.pop((stage.case, each.name)) for stage in wave for each in stage.contenders]
        workers.sort(key=lambda each: -each.contender.start_seconds)
        cases = ", ".join(dict.fromkeys(stage.case for stage in wave))
        self.say(f"wave {number}: {len(workers)} contenders of {cases}, about {expected:.0f} s")
        self._warm_up([self._matrices, *workers])
        for stage in wave:
            turns = [each for each in workers if each.case == stage.case and each.state == "ready"]
            if (baseline := self._baselines.get(stage.case)) is not None and baseline.state == "ready":
                turns = [baseline, *turns]
            begun = time.monotonic()
            self._matrices.found.clear()
            self._take_turns(number, [self._matrices, *turns])
            self.say(f"the turns of {stage.case} took {time.monotonic() - begun:.0f} s")
            self._report.add_rates(stage.case, self._matrices.found.get("tflops", []))
            self._settle(stage, turns, is_last=stage.case not in self._waiting)

    def _warm_up(self, workers: list[Worker]) -> None:
        """Lets the workers start as memory allows, and returns when all of them are ready or have failed."""
        while any(each.state in ("importing", "starting") for each in workers):
            held = sum(each.gib for each in [*workers, *self._baselines.values()])
            for worker in workers:
                if worker.state == "importing":
                    is_alone = not any(each.state == "starting" for each in workers)
                    if held + worker.contender.gib > self._options.memory and not is_alone:
                        continue
                    held += worker.contender.gib
                    self._give_job(worker)
            self._receive(timeout=1.0)
            for worker in workers:
                limit = min(START_LIMIT, self.seconds_left() + time.monotonic() - worker.since)
                if worker.state == "starting" and time.monotonic() - worker.since > limit:
                    self._fail(worker, f"not ready after {limit:.0f} s")
            if self.seconds_left() < 0:
                for worker in workers:
                    if worker.state == "importing":
                        self._fail(worker, "no time was left")

    def _give_job(self, worker: Worker) -> None:
        job = {
            "case": worker.case,
            "framework": worker.contender.framework,
            "options": worker.contender.options,
            "dry_run": self._options.dry_run,
            "nanochat": None if self._options.nanochat is None else str(self._options.nanochat.resolve()),
        }
        worker.state, worker.gib, worker.since = "starting", worker.contender.gib, time.monotonic()
        worker.tell(json.dumps(job))

    def _receive(self, timeout: float) -> Worker | None:
        """Handles one message of any worker; returns the worker, or None if none came."""
        try:
            worker, message = self._messages.get(timeout=timeout)
        except queue.Empty:
            return None
        event = message.pop("event")
        if worker.state == "ended":
            return worker
        if event == "end":
            self._end(worker, message)
            return worker
        if "idle_gib" in message:
            worker.gib = message["idle_gib"] + CONTEXT_GIB
        if event == "ready":
            worker.state = "ready"
            worker.found |= {"ok": True, "options": worker.contender.options, **message}
            if worker.contender is not MATRICES:
                memory = f", {message['peak_gib']:.1f} GiB at the peak" if "peak_gib" in message else ""
                self.say(f"{worker.case}: {worker.contender.name} is ready{memory}")
        else:
            worker.found["turn"] = message
        return worker

    def _end(self, worker: Worker, message: dict[str, Any]) -> None:
        """Keeps the last message of a worker, ends its processes and reports it."""
        worker.found = {**worker.found, **message} if message["ok"] else message
        worker.found["options"] = worker.contender.options
        worker.state, worker.gib = "ended", 0.0
        kill(worker)
        if worker.contender is not MATRICES:
            self._report.note(worker.case, worker.contender.name, worker.found)
        if not message["ok"]:
            self.say(f"{worker.case}: {worker.contender.name} FAILED: {message['error'][:200]}")
            if "OutOfMemory" in message["error"]:
                self._retry(worker)

    def _retry(self, worker: Worker) -> None:
        """Has a contender start once more in a later wave, with a larger estimate of its memory."""
        contender, key = worker.contender, (worker.case, worker.contender.name)
        if key not in self._retried and contender is not MATRICES:
            self._retried.add(key)
            factor = min(1.5, self._options.memory / contender.gib)
            again = replace(contender, gib=factor * contender.gib, idle_gib=factor * contender.idle_gib)
            self._waiting.setdefault(worker.case, []).append(again)

    def _fail(self, worker: Worker, error: str) -> None:
        self._end(worker, {"ok": False, "error": error})

    def _take_turns(self, wave: int, workers: list[Worker]) -> None:
        """Lets each worker train the steps of a turn, in every round once, every second round in reverse."""
        for number in range(self._options.rounds):
            for worker in workers if number % 2 == 0 else workers[::-1]:
                if worker.state != "ready" or self.seconds_left() < 5:
                    continue
                worker.found.pop("turn", None)
                worker.tell("turn")
                limit = time.monotonic() + min(TURN_LIMIT, max(self.seconds_left(), 5.0))
                while worker.state == "ready" and "turn" not in worker.found:
                    self._receive(timeout=1.0)
                    if time.monotonic() > limit:
                        self._fail(worker, f"a turn took longer than {TURN_LIMIT:.0f} s")
                if worker.state != "ready":
                    continue
                turn = worker.found.pop("turn")
                if "tflops" in turn:
                    worker.found.setdefault("tflops", []).append(turn["tflops"])
                else:
                    worker.found.setdefault("ms", {}).setdefault(str(wave), []).append(turn.pop("ms"))
                    worker.found |= turn
        for worker in workers:
            if worker.state == "ready" and worker.contender is not MATRICES:
                self._report.note(worker.case, worker.contender.name, worker.found)

    def _settle(self, stage: Stage, workers: list[Worker], *, is_last: bool) -> None:
        """Ends the workers of a stage, except the fastest peer if other contenders of the case follow."""
        fastest = None if is_last else self._report.baseline(stage.case)
        kept = [each for each in workers if each.contender.name == fastest and each.state == "ready"]
        self._dismiss([each for each in workers if each not in kept])
        self._baselines.pop(stage.case, None)
        if kept:
            self._baselines[stage.case] = kept[0]
        for worker in workers:
            self.say(self._report.line(stage.case, worker.contender.name))
        self._report.write(self._output)

    def _dismiss(self, workers: list[Worker]) -> None:
        """Ends workers, which report their losses first."""
        for worker in workers:
            worker.tell("end")
        limit = time.monotonic() + TURN_LIMIT
        while any(each.state == "ready" for each in workers) and time.monotonic() < limit:
            self._receive(timeout=1.0)
        for worker in workers:
            worker.state = "ended"  # of one that is late the times are known, but not the loss at the end
            kill(worker)


def leave_out_kernels(case: Case, report: Report) -> Case:
    """Returns the case without the contenders whose kernels do not run on a CPU."""
    for each in case.contenders:
        if each.options.get("liger"):
            report.note(case.name, each.name, {"ok": False, "error": "Liger-Kernel needs a GPU"})
    return replace(case, contenders=tuple(each for each in case.contenders if not each.options.get("liger")))


def kill(worker: Worker) -> None:
    """Ends the process and those that it started, so that the others have the device alone."""
    try:
        os.killpg(worker.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        """None is left."""
    worker.process.wait()


def describe_machine(is_dry: bool) -> dict[str, str]:
    """Names the device and the versions; torch is asked in another process, so that the device stays free."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
    device = "cpu" if is_dry else subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    versions = {}
    for package in ("torch", "transformers", "accelerate", "liger-kernel", "peft", "torchao", "pytorch-lightning"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"device": device.strip(), "python": platform.python_version(), **versions}


def print_plan(waves: list[list[Stage]], options: argparse.Namespace) -> None:
    total = 0.0
    for number, wave in enumerate(waves):
        seconds = expected_seconds(wave, options.memory, options.rounds)
        total += seconds
        print(f"wave {number + 1}: {seconds:.0f} s")
        for stage in wave:
            names = [f"{each.name} ({each.gib:g} GiB)" for each in stage.contenders]
            print(f"  {stage.case}: {'; '.join([*['the fastest peer'] * stage.keeps_baseline, *names])}")
    print(f"in all: {total / 60:.1f} minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a folder for gpu.json, gpu.md and gpu.log")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="contenders whose names contain a text")
    parser.add_argument("--skip", nargs="+", default=[], metavar="TEXT", help="no contenders whose names contain one")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--memory", type=float, default=134.0, help="GiB of the GPU that contenders may use together")
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat's repository")
    parser.add_argument(
        "--repeated-blocks", action="store_true", help="set model.compile_repeated_blocks for shipped models"
    )
    parser.add_argument("--plan", action="store_true", help="print the waves and their expected time, and exit")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="write one report of several results")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU: does everything run?")
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="trainwright-gpu-"))
    output.mkdir(parents=True, exist_ok=True)
    named = {str(options.output): "DIR", str(options.nanochat): "NANOCHAT"}  # folders of one machine
    command = shlex.join(["python", "benchmarks/gpu.py", *(named.get(word, word) for word in sys.argv[1:])])
    if options.merge:
        report = Report.merged(options.merge)
    else:
        cases = [CASES[name].keeping(options.only, options.skip) for name in options.cases]
        if options.repeated_blocks:
            cases = [case.with_repeated_blocks() for case in cases]
        if options.plan:
            print_plan(plan_waves(cases, options.memory), options)
            return
        if options.dry_run:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        report = Report(describe_machine(options.dry_run), command)
        if options.dry_run:
            cases = [leave_out_kernels(case, report) for case in cases]
        Bench(options, output, report).run(cases)
    report.write(output)
    print(f"\n{report.targets()}\n\nWritten: {output}/gpu.md")
    if options.dry_run:
        print("A dry run: the figures mean nothing.")


if __name__ == "__main__":
    main()
