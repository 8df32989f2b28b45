"""What saving costs: how long training stands still, what is written, how fast it is verified, how a run leaves.

    python benchmarks/checkpoint.py [--device cpu] [--size 200m] [--rounds 5] [--work FOLDER] [--output FOLDER]
    python benchmarks/checkpoint.py --device cuda --size 1.1b
    python benchmarks/checkpoint.py --only run          # one of: stall files verify run

A llama with the state of AdamW after one update, all in fp32, is saved by contenders that take turns, round after
round, because the machine's speed drifts; before each, the disk is done with the one before. The stall is the time
until training may go on. torch.save leaves its bytes in the system's cache; ours are on the disk and hashed when the
save is done. "Lost" is what a training beside the save loses in all: the stall, and what steps take longer until the
save is done. The run is a real `trainwright train` of examples/quickstart.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from data_rounds import Measured, Rounds, median, ratio, show_ratio, table, take_turns
from safetensors.torch import save_file

TORCH, SYNCHRONOUS, ASYNCHRONOUS = "torch.save", "synchronous", "asynchronous"
SIZES = {
    "20m": ("125m", {"num_layers": 2, "vocab_size": 8000}),
    "200m": ("350m", {"num_layers": 13}),
    "1.1b": ("tinyllama-1.1b", {}),
}
# The bars: the asynchronous stall beside torch.save's, by device; bytes written beside the tensors'.
STALL_BARS = {"cpu": 0.3, "cuda": 0.15}
BYTES_BAR = 1.02
SECTIONS = ("stall", "files", "verify", "run")


class Training:
    """A model and an optimizer with full state, and work on the same device as steps beside a save."""

    def __init__(self, size: str, device: str) -> None:
        from trainwright.models.llama import Llama

        torch.manual_seed(0)
        preset, changes = SIZES[size]
        with torch.device(device):
            self.model = Llama.from_preset(preset, **changes)
            self._factor = torch.randn(1024, 1024)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.device = torch.device(device)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def parts(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizers": {"main": self.optimizer.state_dict()}}

    def step(self) -> float:
        """Works for some hundredths of a second and returns how long it took."""
        start = time.perf_counter()
        for _ in range(500 if self.device.type == "cuda" else 4):
            self._factor = torch.tanh(self._factor @ self._factor)
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Saving:
    """The contenders: each saves once, in a folder of its own, and is measured."""

    def __init__(self, training: Training, work: Path) -> None:
        from trainwright.checkpoint.background import BackgroundSaver
        from trainwright.checkpoint.retention import Retention
        from trainwright.checkpoint.store import CheckpointStore

        self.training = training
        self.work = work
        self.store = CheckpointStore(work / "checkpoints")
        self.savers = {
            name: BackgroundSaver(self.store, retention=Retention(None), asynchronous=name == ASYNCHRONOUS)
            for name in (SYNCHRONOUS, ASYNCHRONOUS)
        }
        self.first: dict[str, float] = {}

    def contenders(self) -> dict[str, Callable[[], Measured]]:
        return {name: lambda name=name: self._save(name) for name in (TORCH, SYNCHRONOUS, ASYNCHRONOUS)}

    def _save(self, name: str) -> Measured:
        self._settle()
        plain = statistics.median(self.training.step() for _ in range(7))
        start = time.perf_counter()
        if name == TORCH:
            torch.save(self.training.parts(), self.work / "state.pt")
        else:
            self.savers[name].save(1, self.training.parts(), metrics={})
        stall = time.perf_counter() - start
        num_steps = 0
        if name == ASYNCHRONOUS:
            while not self.savers[name].take_committed():
                self.training.step()
                num_steps += 1
                self.savers[name].check()
        total = time.perf_counter() - start
        self.first.setdefault(name, stall)
        if name != TORCH:
            self.savers[name].wait(must_succeed=True)
            self.savers[name].take_committed()
        found = {"stall_s": stall, "lost_s": total - num_steps * plain, "done_s": total}
        print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
        return found

    def _settle(self) -> None:
        """Removes what was saved and lets the disk finish, so that nobody pays for the one before."""
        (self.work / "state.pt").unlink(missing_ok=True)
        shutil.rmtree(self.store.folder, ignore_errors=True)
        os.sync()
        self.training.wait()


def measure_stall(training: Training, work: Path, rounds: int) -> dict[str, object]:
    saving = Saving(training, work)
    found = take_turns(saving.contenders(), rounds)
    saving.savers[SYNCHRONOUS].save(2, training.parts(), metrics={})
    files = [path.stat().st_size for path in saving.store.path(2).iterdir()]
    for saver in saving.savers.values():
        saver.close()
    saving._settle()
    return {
        "medians": {name: {each: median(found, name, each) for each in found[name]} for name in found},
        "stall_ratio": {name: ratio(found, "stall_s", name, TORCH) for name in (SYNCHRONOUS, ASYNCHRONOUS)},
        "first_stall_s": saving.first,
        "bytes_written": sum(files),
        "tensor_bytes": tensor_bytes(training),
    }


def tensor_bytes(training: Training) -> int:
    from trainwright.checkpoint.snapshot import encode_parts

    return encode_parts(training.parts()).num_bytes


def measure_files(training: Training, work: Path, rounds: int) -> dict[str, object]:
    """One tensor file with its hash, on the disk: written with the hash on the way, or written and read back."""
    from trainwright.checkpoint.tensor_files import write_tensors

    tensors = dict(training.model.state_dict())
    tied = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    tensors = {name: tensors[name] for name in tied.values()}
    path = work / "one.safetensors"

    def timed(write: Callable[[], None]) -> Measured:
        path.unlink(missing_ok=True)
        os.sync()
        start = time.perf_counter()
        write()
        return {"seconds": time.perf_counter() - start}

    def read_back() -> None:
        save_file(tensors, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
            hashlib.file_digest(file, "sha256")

    contenders = {
        "save_file, then hash": lambda: timed(read_back),
        "write_tensors": lambda: timed(lambda: write_tensors(path, tensors, metadata={"format": "pt"})),
    }
    found = take_turns(contenders, rounds)
    path.unlink()
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "gb_per_s": {name: size / median(found, name, "seconds") / 1e9 for name in contenders},
        "ratio": ratio(found, "seconds", "write_tensors", "save_file, then hash"),
    }


def measure_verify(training: Training, work: Path, rounds: int) -> dict[str, object]:
    """Verifying a checkpoint beside reading its files once, both from the system's cache where they fit."""
    from trainwright.checkpoint.store import CheckpointStore

    store = CheckpointStore(work / "checkpoints")
    folder = store.write(3, training.parts(), metrics={})
    paths = list(folder.iterdir())
    buffer = bytearray(16 * 2**20)

    def read() -> None:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def timed(act: Callable[[], None]) -> Measured:
        start = time.perf_counter()
        act()
        return {"seconds": time.perf_counter() - start}

    found: Rounds = take_turns({"verify": lambda: timed(lambda: store.verify(3)), "read": lambda: timed(read)}, rounds)
    size = sum(path.stat().st_size for path in paths)
    shutil.rmtree(store.folder)
    return {
        "gb_per_s": {name: size / median(found, name, "seconds") / 1e9 for name in found},
        "ratio": ratio(found, "seconds", "verify", "read"),
    }


@contextlib.contextmanager
def running(work: Path, device: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A real run; the same words each time, so the second goes on where the first left. Ended if still there."""
    example = Path(__file__).parents[1] / "examples" / "quickstart" / "run.yaml"
    settings = [f"output_dir={work / 'runs'}", "trainer.max_steps=100000", "log.every_steps=1", "writers=[json]"]
    settings += ["checkpoint.every_steps=25", "evaluation.every_steps=100000", "hooks=[]", f"runtime.device={device}"]
    command = [sys.executable, "-m", "trainwright", "train", str(example), *settings]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process, work / "runs" / "quickstart" / "metrics.json"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
        return max((json.loads(line)["step"] for line in lines[-1:]), default=0)
    return 0


def wait_for_step(process: subprocess.Popen[bytes], metrics: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while last_step(metrics) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run left with {process.poll()} at step {last_step(metrics)}, before step {step}")
        time.sleep(0.005)


def run_once(work: Path, device: str) -> Measured:
    """One run from nothing: to its first step, told to leave at some step after a save, and on again."""
    shutil.rmtree(work / "runs", ignore_errors=True)
    start = time.perf_counter()
    with running(work, device) as (process, metrics):
        wait_for_step(process, metrics, 1)
        begun = time.perf_counter() - start
        wait_for_step(process, metrics, 30)
        told = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=120)
        left = time.perf_counter() - told
    reached = last_step(metrics)
    start = time.perf_counter()
    with running(work, device) as (process, metrics):
        wait_for_step(process, metrics, reached + 1)
        resumed = time.perf_counter() - start
    found = {"start_to_first_step_s": begun, "signal_to_exit_s": left, "resume_to_first_step_s": resumed}
    print("run", {key: round(value, 3) for key, value in found.items()}, f"exit code {code}", flush=True)
    return {**found, "exit_code": code}


def measure_run(work: Path, device: str, rounds: int) -> dict[str, object]:
    found = take_turns({"run": lambda: run_once(work, device)}, rounds)
    return {each: median(found, "run", each) for each in found["run"]}


def page(report: dict[str, object]) -> str:
    blocks = [f"# Checkpoints\n\n{report['what']}\n\n```\n{report['command']}\n```\n\n{report['machine']}"]
    if stall := report.get("stall"):
        bar, share = report["bars"]["stall"], stall["bytes_written"] / stall["tensor_bytes"]
        rows = []
        for name, own in stall["medians"].items():
            beside = show_ratio(stall["stall_ratio"][name]) if name in stall["stall_ratio"] else "1"
            first = f"{stall['first_stall_s'][name]:.3f}"
            rows.append([name, f"{own['stall_s']:.3f}", beside, first, f"{own['lost_s']:.2f}", f"{own['done_s']:.2f}"])
        head = ["", "s of stall", "of torch.save", "s of the first stall", "s lost in all", "s until done"]
        blocks.append(f"{table(head, rows)}\n\nThe bar for asynchronous saves is {bar} of torch.save.")
        written, tensors = stall["bytes_written"] / 1e9, stall["tensor_bytes"] / 1e9
        blocks.append(f"{written:.3f} GB written for {tensors:.3f} GB of tensors: {share:.4f} (bar {BYTES_BAR}).")
    for name, what in (("files", "write_tensors beside save_file and a hash"), ("verify", "verify beside reading")):
        if found := report.get(name):
            rates = ", ".join(f"{each} {rate:.2f} GB/s" for each, rate in found["gb_per_s"].items())
            blocks.append(f"{name}: {rates}; time of {what}: {show_ratio(found['ratio'])}.")
    if run := report.get("run"):
        times = {key.removesuffix("_s").replace("_", " "): value for key, value in run.items() if key.endswith("_s")}
        texts = [f"{name} {value:.2f} s" for name, value in times.items()]
        blocks.append(f"`trainwright train`: {', '.join(texts)}; exit code {run['exit_code']:.0f}.")
    return "\n\n".join(blocks) + "\n"


def missed_bars(report: dict[str, object]) -> list[str]:
    """What of the bars was not reached, in words."""
    missed = []
    if stall := report.get("stall"):
        found = stall["stall_ratio"][ASYNCHRONOUS]["median"]
        if found > report["bars"]["stall"]:
            missed.append(f"the asynchronous stall is {found:.2f} of torch.save, more than {report['bars']['stall']}")
        if stall["bytes_written"] > BYTES_BAR * stall["tensor_bytes"]:
            missed.append(f"{stall['bytes_written']} bytes are written for {stall['tensor_bytes']} of tensors")
    return missed


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, object]:
    report: dict[str, object] = {}
    state = None
    if set(arguments.only) & {"stall", "files", "verify"}:
        state = Training(arguments.size, arguments.device)
        report["num_parameters"] = state.num_parameters
    if "stall" in arguments.only:
        report["stall"] = measure_stall(state, work, arguments.rounds)
    if "files" in arguments.only:
        report["files"] = measure_files(state, work, arguments.rounds)
    if "verify" in arguments.only:
        report["verify"] = measure_verify(state, work, arguments.rounds)
    del state  # the run has the memory for itself
    if "run" in arguments.only:
        report["run"] = measure_run(work, arguments.device, max(1, arguments.rounds // 2))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(STALL_BARS))
    parser.add_argument("--size", default="200m", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--work", type=Path, default=None, help="where files go; needs three times the state's size")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    gpu = f"{torch.cuda.get_device_name()}, " if arguments.device == "cuda" else ""
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        os.environ["XDG_CONFIG_HOME"] = f"{work}/config"  # the key that signs run folders
        report = measure(arguments, Path(work))
    number = report.get("num_parameters", 0) / 1e6
    report |= {
        "what": f"A llama of {number:.0f} million weights with AdamW's state in fp32 on {arguments.device}; "
        f"medians of {arguments.rounds} rounds, with quartiles.",
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{gpu}{cores}, {platform.machine()}; {versions}.",
        "bars": {"stall": STALL_BARS[arguments.device], "bytes": BYTES_BAR},
    }
    print(page(report), flush=True)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        name = f"checkpoint-{arguments.device}"
        (arguments.output / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (arguments.output / f"{name}.md").write_text(page(report))
    if missed := missed_bars(report):
        sys.exit("Missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
