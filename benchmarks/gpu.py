"""Training speed on one GPU: trainwright in its modes beside Hugging Face Trainer, Lightning and a raw loop.

    python benchmarks/gpu.py [--output FOLDER] [--cases tinyllama toy gpt2 cpu] [--rounds 5] [--minutes 20]
    python benchmarks/gpu.py --dry-run          # everything once, tiny, on the CPU

Every contender trains the same model from the same weights on the same rows, with fused AdamW, clipping to norm 1,
bf16 autocast and a log line every 50 steps, in a process of its own; each is given what a careful user would give it
(gpu_contenders.py). After warm-up come rounds of steps, each timed with the device's work done; reported are medians.
One that fails is reported with its error, and the others go on. What no bar needs runs last; when the minutes are
over, the rest is left out. gpu.json and gpu.md are written after each, so that a run that is cut keeps what it has.

Beside torch and this package it needs transformers, accelerate and pytorch-lightning; on a machine that has those but
not our own dependencies, a folder with pydantic, pydantic-core, annotated-types, typing-extensions,
typing-inspection and PyYAML on PYTHONPATH will do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_report
from gpu_cases import CASES, CONTENDERS, Contender

HERE = Path(__file__).parent
MOST_SECONDS = 170.0  # of one contender


@dataclass(frozen=True)
class Job:
    """One contender of one case."""

    case: str
    contender: Contender


class Workers:
    """Processes of gpu_contenders.py, one at work and the next one importing meanwhile."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("a", encoding="utf-8")
        self._waiting: subprocess.Popen[str] | None = None

    def take(self, *, starts_next: bool) -> subprocess.Popen[str]:
        """Returns a process that waits for its job."""
        worker = self._waiting or self._start()
        self._waiting = self._start() if starts_next else None
        return worker

    def close(self) -> None:
        """Lets go the one that is not needed."""
        if self._waiting is not None:
            end(self._waiting)
        self._log.close()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(HERE / "gpu_contenders.py")],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # so that `end` reaches the processes that it starts
        )


def plan(cases: list[str], only: str | None) -> list[Job]:
    """Returns the jobs of these cases."""
    jobs = [Job(case, each) for case in CASES if case in cases for each in CONTENDERS[case]]
    return [job for job in jobs if only is None or only in job.contender.name]


class Bench:
    """Runs jobs one after the other while there is time, and keeps the report up to date."""

    def __init__(self, options: argparse.Namespace, output: Path, scratch: Path, report: gpu_report.Report) -> None:
        self._options, self._output, self._scratch, self._report = options, output, scratch, report
        self._began = time.monotonic()

    def seconds_left(self) -> float:
        return self._began + 60 * self._options.minutes - time.monotonic()

    def run(self, jobs: list[Job]) -> None:
        workers = Workers(self._output / "gpu.log")
        for number, job in enumerate(jobs):
            left = self.seconds_left()
            if left < job.contender.least_seconds:
                self._report.note(job.case, job.contender.name, {"ok": False, "error": "no time was left"})
                continue
            worker = workers.take(starts_next=number + 1 < len(jobs))
            start = time.monotonic()
            found = run_job(worker, job, self._options, self._scratch, left)
            found["seconds"] = time.monotonic() - start
            self._report.note(job.case, job.contender.name, found)
            self._report.write(self._output)
            since = time.monotonic() - self._began
            print(f"{since:5.0f} s  {job.case:10} {gpu_report.tell(job, found)}", flush=True)
        workers.close()


def run_job(worker: subprocess.Popen[str], job: Job, options: argparse.Namespace, scratch: Path, left: float) -> Any:
    """Hands the job to the process and returns what it found, or why it found nothing."""
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    caches = scratch / "caches"
    if job.contender.options.get("is_cold") and caches.exists():
        caches = Path(tempfile.mkdtemp(dir=scratch))  # somebody has compiled before
    request = {
        "case": job.case,
        "framework": job.contender.framework,
        "options": job.contender.options,
        "rounds": options.rounds,
        "dry_run": options.dry_run,
        "result": str(result),
        "environment": {
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        },
    }
    limit = min(left, MOST_SECONDS)
    try:
        worker.communicate(json.dumps(request) + "\n", timeout=limit)
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"not done after {limit:.0f} s"}
    finally:
        end(worker)
    if not result.exists():
        return {"ok": False, "error": f"the process died with exit code {worker.returncode}; see gpu.log"}
    return json.loads(result.read_text(encoding="utf-8"))


def end(worker: subprocess.Popen[str]) -> None:
    """Ends the process and the workers that it left behind, so that the next one has the device alone."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        """None is left."""
    worker.wait()


def run_overhead(options: argparse.Namespace, scratch: Path, left: float) -> dict[str, Any]:
    """The loop's microseconds on the CPU: benchmarks/overhead.py."""
    output = scratch / "overhead.json"
    rounds, steps = (2, 60) if options.dry_run else (10, 400)
    command = [sys.executable, str(HERE / "overhead.py"), "--rounds", str(rounds), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [*command, "--output", str(output)],
            timeout=left,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"not done after {left:.0f} s"}
    if done.returncode:
        return {"ok": False, "error": done.stderr[-1500:]}
    return {"ok": True, **json.loads(output.read_text(encoding="utf-8"))}


def describe_machine(is_dry: bool) -> dict[str, str]:
    """Names the device and the versions; torch is asked in a process of its own, so that the device stays free."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
    device = "cpu" if is_dry else subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    versions = {}
    for package in ("torch", "transformers", "accelerate", "pytorch-lightning"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"device": device.strip(), "python": platform.python_version(), **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a folder for gpu.json, gpu.md and gpu.log")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "cpu"], default=[*CASES, "cpu"])
    parser.add_argument("--only", help="run only contenders whose names hold this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU: is everything in order?")
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="trainwright-gpu-"))
    output.mkdir(parents=True, exist_ok=True)
    if options.dry_run:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = gpu_report.Report(describe_machine(options.dry_run), " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bench = Bench(options, output, Path(folder), report)
        bench.run([job for job in plan(options.cases, options.only) if not job.contender.is_extra])
        if "cpu" in options.cases and options.only is None:
            report.note("cpu", "overhead", run_overhead(options, Path(folder), max(bench.seconds_left(), 20.0)))
        bench.run([job for job in plan(options.cases, options.only) if job.contender.is_extra])
    report.write(output)
    print(f"\n{report.bars()}\n\nWritten: {output}/gpu.md")
    if options.dry_run:
        print("A dry run: the figures mean nothing.")


if __name__ == "__main__":
    main()
