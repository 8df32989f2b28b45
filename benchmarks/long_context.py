"""The longest rows on which an 8B Llama trains with QLoRA within a limit of memory, on one GPU.

    python benchmarks/long_context.py [--limits 24 48 80] [--minutes 9] --output benchmarks/results

The settings are those of examples/llama_8b/long_context.yaml: rank 32 on all linear layers, one row per step. Stages:

    small     2,048 tokens within 10 GiB, one step of all layers
    published one step of all layers with the length that Unsloth publishes for the limit
    longest   the longest row, by steps with two of the layers

`longest` runs two layers because the attention of all 32 takes minutes: weights, adapters and optimizer state of all
layers are on the device, as are the gradients of the others, and the inputs of layers are on the host, so the peak of a
step does not depend on their number. GB are 10^9 bytes. The limit holds for torch's allocator
(`torch.cuda.set_per_process_memory_fraction`); the driver's context needs some 0.5 GB more, less than the difference of
GB and GiB.

Each limit has its own process, which ends with the time; if one fails, the others are measured all the same. The files
are written after each stage and each try. A stage that would not end in time, or has failed, is left for the next
command with the same --output, which begins with the stages that were not tried yet. Weights are random.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

GIB = 2**30
SETTINGS = Path(__file__).parents[1] / "examples" / "llama_8b" / "long_context.yaml"
PUBLISHED = {24: 78_475, 48: 191_728, 80: 342_733}
"""Tokens by GB of memory, from Unsloth's documentation."""
SMALL_TOKENS, SMALL_LIMIT = 2048, 10 * GIB
STAGES = ("published", "longest")
GRID = 1024
PROBES = (16 * GRID, 48 * GRID)
"""Rows whose peaks give the first guess."""
MAX_TRIES = 5
SEARCHED_LAYERS = 2
FLOPS = 4e14
"""A second's operations, to predict how long a step takes; too few rather than too many."""
START_SECONDS = 45
GRACE_SECONDS = 15
"""After the end of the time, a process is killed."""
DRY_MODEL = (
    "model={type: llama, vocab_size: 64, hidden_size: 64, num_layers: 3, num_heads: 2, intermediate_size: 256, "
    "max_positions: 65536, lora: {match: '*_proj', rank: 4}, quantize: nf4, activation_checkpointing: [DecoderLayer], "
    "offload: [decoder_input], tile: {layers: [SwiGLU], tokens: 256}}"
)
DRY_PUBLISHED, DRY_SMALL_TOKENS, DRY_GRID, DRY_PROBES = {3: 384}, 64, 64, (256, 512)
"""In a dry run limits are MB, counted on the CPU."""


def seconds_of(tokens: int, layers: int) -> float:
    """Returns about how long a step takes: six products with the weights, and attention with 4.5 times its forward."""
    weights, width = 218e6 * layers + 525e6, 4096
    return (6 * 2 * weights * tokens / 2 + 4.5 * 2 * tokens * tokens * width * layers) / FLOPS


class Device:
    """A GPU with a limit of memory, or in a dry run a CPU whose tensors are counted."""

    def __init__(self, *, is_dry: bool) -> None:
        import torch

        self.torch, self.is_dry = torch, is_dry
        self.kind = "cpu" if is_dry else "cuda"
        self._limit = 0

    def set_limit(self, num_bytes: int) -> None:
        """Limits the memory of this process."""
        self._limit = num_bytes
        if not self.is_dry:
            total = self.torch.cuda.get_device_properties(0).total_memory
            if num_bytes > total:
                raise SystemExit(
                    f"The device has {total / 1e9:.1f} GB, less than the limit of {num_bytes / 1e9:.1f} GB."
                )
            self.torch.cuda.set_per_process_memory_fraction(num_bytes / total)

    def run(self, step: Callable[[], None]) -> dict[str, Any]:
        """Runs a step; returns whether it fitted, its peak in bytes and its seconds."""
        from trainwright.memory.out_of_memory import is_out_of_memory

        self.release()
        start = time.perf_counter()
        try:
            peaks = self._count(step) if self.is_dry else self._measure(step)
        except RuntimeError as error:
            if not is_out_of_memory(error):  # it knows the errors of libraries too
                raise
            found: dict[str, Any] = {"fits": False}
        else:
            found = {"fits": True, **peaks}
        seconds = round(time.perf_counter() - start, 2)
        self.release()
        return {**found, "seconds": seconds}

    def release(self) -> None:
        """Frees what the last step left."""
        gc.collect()
        if not self.is_dry:
            self.torch.cuda.empty_cache()

    def _measure(self, step: Callable[[], None]) -> dict[str, int]:
        self.torch.cuda.reset_peak_memory_stats()
        step()
        self.torch.cuda.synchronize()
        memory = self.torch.cuda
        return {"reserved": memory.max_memory_reserved(), "allocated": memory.max_memory_allocated()}

    def _count(self, step: Callable[[], None]) -> dict[str, int]:
        from trainwright.analysis.estimate import HeldBytes

        with HeldBytes() as held:
            held.begin_peak()
            step()
        peak = sum(held.peak.values())
        if peak > self._limit:
            raise self.torch.OutOfMemoryError(f"{peak} bytes")
        return {"reserved": peak, "allocated": peak}


class Run:
    """The run of the example with random weights, made on the device."""

    def __init__(self, device: Device, folder: str) -> None:
        import torch

        from trainwright import RunConfig, build_trainer
        from trainwright.trainers.language_model import LanguageModelTrainer

        class LongContext(LanguageModelTrainer):
            """Builds the model on the device, in seconds."""

            @classmethod
            def build_model(cls, build: Any) -> Any:
                with torch.device("meta"):
                    model = build.model()
                return fill(model, device.kind)

            @classmethod
            def build_train_data(cls, build: Any) -> Any:
                return [{"input_ids": torch.zeros(8, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}]

        changes = [f"output_dir={folder}", f"runtime.device={device.kind}", "writers=[]", "data={}"]
        config = RunConfig.load(SETTINGS, overrides=[*changes, *([DRY_MODEL] * device.is_dry)])
        self._device = device
        self.trainer = build_trainer(config, LongContext)
        self.trainer.model.train()
        self.num_layers = len(self.trainer.model.model.layers)
        self._ballast: Any = None

    def use_layers(self, number: int) -> None:
        """Runs the first layers alone; the others keep their weights and states, and a tensor of their gradients."""
        torch, decoder = self._device.torch, self.trainer.model.model
        others = list(decoder.layers)[number:]
        weights = [each for layer in others for each in layer.parameters() if each.requires_grad]
        self._others = others
        decoder.layers = torch.nn.ModuleList(list(decoder.layers)[:number])
        self._ballast = torch.zeros(sum(each.nbytes for each in weights), dtype=torch.uint8, device=self._device.kind)

    def step(self, tokens: int) -> dict[str, Any]:
        """Trains on one row; returns what Device.run returns."""
        torch, trainer = self._device.torch, self.trainer
        for weight in trainer.model.parameters():
            weight.grad = None

        def update() -> None:
            ids = torch.randint(trainer.model.vocab_size, (1, tokens), device=self._device.kind)
            batch = {"input_ids": ids, "labels": ids}
            trainer.set_batch(batch, 1)
            trainer.context.updater.begin_step(trainer.step)
            with trainer.storage, trainer.gather_mixed:
                loss = trainer.train_step(batch).loss
            if not bool(torch.isfinite(loss)):
                raise RuntimeError(f"The loss is {loss}.")

        return self._device.run(update)


def fill(model: Any, kind: str) -> Any:
    """Gives a model on the meta device random weights; quantized layers of one shape share their codes' values."""
    import torch

    from trainwright.models.layers.quantized_linear import NF4, encode, quantized_layers, stored_names
    from trainwright.models.lora import lora_layers

    model.to_empty(device=kind)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        for _, layer in lora_layers(model):
            layer.reset_adapter()
        codes: dict[tuple[int, int], Any] = {}
        for _, quantized in quantized_layers(model):
            layer: Any = quantized
            shape = (layer.out_features, layer.in_features)
            if shape not in codes:
                codes[shape] = encode(torch.randn(shape, device=kind, dtype=torch.bfloat16) * 0.02, "nf4")
            for name, values in zip(stored_names("nf4"), codes[shape], strict=True):
                getattr(layer, name).copy_(values)
            layer.weight_table.copy_(torch.tensor(NF4, device=kind).view(torch.int32))
    return model


def find_longest(
    fits: Callable[[int], dict[str, Any]],
    limit: int,
    *,
    probes: tuple[int, int],
    grid: int,
    until: float,
    report: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Returns the longest row that fits, a multiple of `grid`, and the tries; `report` gets them after each try.

    The peak grows linearly, so two short rows give the first guess. Tries around it end with a row that fits and one,
    longer by about 2 %, that does not, after MAX_TRIES, or with the time.
    """
    tries: list[dict[str, Any]] = []

    def attempt(tokens: int) -> bool:
        found = fits(tokens)
        tries.append({"tokens": tokens, **found})
        print(json.dumps(tries[-1]), file=sys.stderr, flush=True)
        report(state())
        return bool(found["fits"])

    def state() -> dict[str, Any]:
        fitting = [each["tokens"] for each in tries if each["fits"]]
        too_long = [each["tokens"] for each in tries if not each["fits"]]
        return {"tokens": max(fitting, default=0), "too_long": min(too_long, default=None), "tries": tries}

    low, high = 0, 0
    for tokens in probes:
        if not attempt(tokens):
            high = tokens
            break
        low = tokens
    guess = (low + high) // 2
    if not high:
        first, second = (each["reserved"] for each in tries)
        slope = max((second - first) / (probes[1] - probes[0]), 1.0)
        guess = int(probes[1] + (limit - second) / slope)
    step = 1.0 if high else 0.02  # without a prediction, by halves
    for _ in range(MAX_TRIES):
        guess = max(guess // grid * grid, low + grid)
        if (high and (guess >= high or high - low <= 0.02 * high)) or time.monotonic() > until:
            break
        if attempt(guess):
            low = guess
            guess = (low + high) // 2 if high else int(low * (1 + step))
        else:
            high = guess
            guess = max(int(high * (1 - step)), (low + high) // 2)
        step *= 2
    return state()


def work(limit: int, stages: list[str], *, is_dry: bool, seconds: float) -> None:
    """Runs the stages of a limit (0: `small`) in this process, and prints a line of JSON for each."""
    until = time.monotonic() + seconds
    device = Device(is_dry=is_dry)

    def emit(stage: str, found: dict[str, Any]) -> None:
        print(json.dumps({"stage": stage, "limit": num_bytes, **found}), flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the key that signs run folders
        unit, published = (1e6, DRY_PUBLISHED) if is_dry else (1e9, PUBLISHED)
        num_bytes = int(limit * unit) if limit else 6_000_000 if is_dry else SMALL_LIMIT
        device.set_limit(num_bytes)
        run = Run(device, folder)
        small = run.step(DRY_SMALL_TOKENS if is_dry else SMALL_TOKENS)  # creates the states of the optimizer
        if not limit:
            again = run.step(DRY_SMALL_TOKENS if is_dry else SMALL_TOKENS)
            emit("small", again)
            return
        if not small["fits"]:
            raise SystemExit(f"Not even the shortest row fits {limit}.")
        for stage in stages:
            if stage == "published":
                tokens = published[limit]
                if not is_dry and time.monotonic() + seconds_of(tokens, run.num_layers) > until:
                    continue
                emit("begun", {"begun": stage})
                found = {"tokens": tokens, "layers": run.num_layers, **run.step(tokens)}
            else:
                run.use_layers(SEARCHED_LAYERS)
                if not is_dry and time.monotonic() + 4 * seconds_of(2 * published[limit], SEARCHED_LAYERS) > until:
                    continue
                emit("begun", {"begun": stage})
                grid, probes = (DRY_GRID, DRY_PROBES) if is_dry else (GRID, PROBES)
                report = partial(emit, "tries")
                found = find_longest(run.step, num_bytes, probes=probes, grid=grid, until=until, report=report)
                if not found["too_long"] and time.monotonic() > until:
                    continue
            emit(stage, found)


def write(results: dict[str, Any], folder: Path) -> None:
    """Writes the results as JSON and as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "long_context.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "long_context.md").write_text(table(results), encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    """Returns the report."""
    unit = "MB" if results["is_dry"] else "GB"
    size = 1e6 if results["is_dry"] else 1e9
    lines = [
        "# Longest rows of QLoRA on an 8B Llama",
        "",
        f"```\n{results['command']}\n```",
        "",
        f"{results['device']}; torch {results['torch']}. {unit} are powers of 10.",
        "",
        "| limit | Unsloth | one step of all layers with that | peak, reserved | longest with two layers | too long |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for limit, stages in results["limits"].items():
        step, longest = stages.get("published"), stages.get("longest") or stages.get("tries")
        shown = "not measured" if step is None else f"{step['seconds']:.0f} s" if step["fits"] else "does not fit"
        peak = f"{step['reserved'] / size:.1f} {unit}" if step and step["fits"] else ""
        reached = f"{longest['tokens']:,}" if longest else "not measured"
        too_long = f"{longest['too_long']:,}" if longest and longest["too_long"] else ""
        too_long += " (not finished)" * ("longest" not in stages and bool(longest))
        published = (DRY_PUBLISHED if results["is_dry"] else PUBLISHED).get(int(limit), 0)
        lines.append(f"| {limit} {unit} | {published:,} | {shown} | {peak} | {reached} | {too_long} |")
    small = results.get("small")
    if small:
        fitting = f"{small['reserved'] / GIB:.2f} GiB reserved" if small["fits"] else "does not fit"
        lines += ["", f"A step with {SMALL_TOKENS:,} tokens within {small['limit'] / GIB:.2f} GiB: {fitting}."]
    return "\n".join(lines) + "\n"


def plan(names: Sequence[str], done: dict[str, Any]) -> list[list[str]]:
    """Returns the missing stages, one list for each process: the one that was begun last comes alone, at the end."""
    missing = [name for name in names if name not in done]
    groups = [[name for name in missing if (name == done.get("begun")) == is_last] for is_last in (False, True)]
    return [group for group in groups if group]


def run_process(arguments: list[str], seconds: float) -> Iterator[tuple[str, Any]]:
    """Yields the stages that a process of this program reports, and `error` if it fails or has to be killed."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        timer = threading.Timer(seconds + GRACE_SECONDS, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"stage"'):
                found = json.loads(line)
                yield found.pop("stage"), found.get("begun", found)
        code = process.wait()
        timer.cancel()
    if code:
        print(f"The process ended with {code}: {arguments[-1]}", file=sys.stderr, flush=True)
        yield "error", code


def measure(results: dict[str, Any], limits: Sequence[int], output: Path, *, until: float) -> bool:
    """Adds the missing stages to the results and writes them; returns True if a process failed."""
    has_failed = False
    for limit in (0, *limits):
        done = results["limits"].setdefault(str(limit), {}) if limit else results
        for stages in plan(STAGES if limit else ("small",), done):
            left = until - time.monotonic()
            if left < (0 if results["is_dry"] else START_SECONDS):
                break
            done.pop("error", None)
            job = {"limit": limit, "stages": stages, "is_dry": results["is_dry"], "seconds": left}
            for stage, found in run_process(["--output", str(output), "--work", json.dumps(job)], left):
                done[stage] = found
                write(results, output)  # after each stage: the time may end
                has_failed |= stage == "error"
    return has_failed


def main() -> None:
    """Runs what is missing in the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=int, nargs="+", help="GB; a dry run: MB")
    parser.add_argument("--minutes", type=float, default=9.0, help="the time of this command")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true", help="a small model on the CPU, whose tensors are counted")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(**options.work)
        return
    until = time.monotonic() + 60 * options.minutes
    published = DRY_PUBLISHED if options.dry_run else PUBLISHED
    unknown = set(options.limits or ()) - published.keys()
    if unknown:
        parser.error(f"--limits: {sorted(unknown)[0]} is not one of {', '.join(map(str, published))}.")
    path = options.output / "long_context.json"
    results = json.loads(path.read_text("utf-8")) if path.is_file() else {"limits": {}}
    import torch

    device = "cpu" if options.dry_run else torch.cuda.get_device_name()
    results |= {"command": " ".join(["python", "benchmarks/long_context.py", *sys.argv[1:]]), "device": device}
    results |= {"torch": torch.__version__, "is_dry": options.dry_run}
    has_failed = measure(results, options.limits or list(published), options.output, until=until)
    write(results, options.output)
    print(table(results))
    if "small" not in results or any(set(STAGES) - set(stages) for stages in results["limits"].values()):
        print("Stages are missing. Run the same command again to continue.")
    sys.exit(int(has_failed))


if __name__ == "__main__":
    main()
