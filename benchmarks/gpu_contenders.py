"""Trains one case with one contender: a process started by gpu.py, which tells it when to compute.

The imports take seconds, so gpu.py starts the process ahead. It reads its job from standard input, a line of JSON,
builds the model, trains until it is warm and reports that on standard output. Then it blocks at the end of a step until
it reads `turn`, trains the steps of one turn, reports their time, and blocks again; at `end` it leaves. While it waits
the device has finished its work, and unused memory has been released. What frameworks print goes to standard error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from typing import Any, TextIO

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gpu_cases import (
    CASES,
    LEARNING_RATE,
    LOG_EVERY,
    LORA_RANK,
    MATRICES,
    MAX_GRAD_NORM,
    NUM_BATCHES,
    SETTLING_STEPS,
    WEIGHT_DECAY,
    Case,
    merge,
    shrink,
    shrink_fp8,
)
from torch.utils.data import DataLoader, Dataset, SequentialSampler

WORKERS = 2  # of the peers' DataLoader
MANY_STEPS = 1_000_000  # no contender comes to its last step: gpu.py ends it


class Rows(Dataset):
    """Rows of random tokens, repeated so often that no contender meets the end of an epoch."""

    def __init__(self, case: Case, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, vocab_size, (NUM_BATCHES * case.batch, case.length), generator=generator)
        self._length = 2 * MANY_STEPS * case.batch

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index % len(self.tokens)]
        return {"input_ids": row, "labels": row}


class EnoughStepsError(Exception):
    """Ends a run from within a step's callback, before its last step and its final checkpoint."""


class Turns:
    """Counts the steps and blocks between turns; every contender calls `step_done` at the end of a step."""

    def __init__(self, case: Case, device: torch.device, report: TextIO) -> None:
        self._case, self._device, self._report = case, device, report
        self._done = 0
        self._left = 0
        self._start = 0.0
        self._begun = time.perf_counter()

    def step_done(self) -> None:
        """Counts a step. Raises EnoughStepsError at the end."""
        self._done += 1
        if self._done < self._case.warmup:
            return
        if self._done == self._case.warmup:
            synchronize(self._device)
            self._wait(event="ready", start_seconds=time.perf_counter() - self._begun)
            return
        self._left -= 1
        if self._left == self._case.steps:  # the turn's first steps are not measured
            synchronize(self._device)
            self._start = time.perf_counter()
        elif self._left == 0:
            synchronize(self._device)
            self._wait(event="turn", ms=(time.perf_counter() - self._start) / self._case.steps * 1e3)

    def _wait(self, **message: Any) -> None:
        """Reports, releases unused memory and blocks until gpu.py says what to do."""
        if self._device.type == "cuda":
            message["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            message["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            torch.cuda.empty_cache()
            message["idle_gib"] = torch.cuda.memory_reserved() / 2**30
        send(self._report, steps=self._done, **message)
        if sys.stdin.readline().strip() != "turn":
            raise EnoughStepsError
        self._left = self._case.steps + SETTLING_STEPS

    @contextlib.contextmanager
    def paused(self) -> Any:
        """Leaves what happens inside out of the time to start."""
        start = time.perf_counter()
        yield
        self._begun += time.perf_counter() - start


def send(report: TextIO, **message: Any) -> None:
    print(json.dumps(message), file=report, flush=True)


class Bench:
    """What every contender gets: the case, the data, models with equal weights, the turns."""

    def __init__(self, job: dict[str, Any], report: TextIO) -> None:
        self.is_dry = bool(job["dry_run"])
        case = CASES[job["case"]]
        self.case = shrink(case) if self.is_dry else case
        self.device = torch.device("cpu" if self.is_dry else "cuda")
        self.backend = "aot_eager" if self.is_dry else "inductor"
        self.turns = Turns(self.case, self.device, report)
        self.nanochat = job["nanochat"]
        self.rows = Rows(self.case, self.case.transformers.get("vocab_size", 64))
        self.losses: dict[str, float] = {}

    def their_model(self, dtype: str) -> torch.nn.Module:
        """Returns transformers' model with the case's weights, built on the device."""
        import transformers

        settings = dict(self.case.transformers)
        model_class = getattr(transformers, settings.pop("type").partition(":")[2])
        config = model_class.config_class(**settings, use_cache=False)
        with self.device:
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
            )
        return draw_weights(model).train()

    def loader(self) -> DataLoader[Any]:
        """Returns torch's loader in order, so that losses can be compared."""
        return DataLoader(
            self.rows,
            batch_size=self.case.batch,
            shuffle=False,
            drop_last=True,
            num_workers=WORKERS,
            pin_memory=self.device.type == "cuda",
        )

    def note_loss(self, when: str, model: torch.nn.Module, call: Callable[..., Any] | None = None) -> None:
        """Keeps the loss on the first batch: contenders that do the same work agree, before and after."""
        tokens = self.rows.tokens[: self.case.batch].to(self.device)
        with self.turns.paused(), torch.no_grad(), torch.autocast(self.device.type, dtype=torch.bfloat16):
            try:
                outputs = model(input_ids=tokens, labels=tokens) if call is None else call(tokens, tokens)
                self.losses[when] = float(outputs["loss"] if call is None else outputs)
            except Exception:  # to the log: the speed is worth knowing all the same
                traceback.print_exc()
        if when == "before" and self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Draws every matrix from a generator seeded with its name, so that equal names have equal weights anywhere.

    Vectors (norms, biases) and adapters keep what the model gave them. GPT-2's matrices are transposed in transformers.
    """
    from transformers.pytorch_utils import Conv1D

    for name, parameter in model.named_parameters():  # a tied head is listed once, as the embedding
        if parameter.dim() != 2 or "lora_" in name:
            continue
        is_transposed = isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D)
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        shape = parameter.shape[::-1] if is_transposed else parameter.shape
        values = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        values.normal_(0.0, 0.02, generator=generator)
        parameter.copy_(values.T if is_transposed else values)
    return model


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_huggingface(
    bench: Bench,
    *,
    compiled: bool,
    liger: bool = False,
    checkpointing: bool = False,
    adapters: bool = False,
    optim: str = "adamw_torch_fused",
    dtype: str = "fp32",
) -> torch.nn.Module:
    """Hugging Face Trainer with settings from its documentation."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    model = bench.their_model(dtype)
    if adapters:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    bench.note_loss("before", model)

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(bench.rows)  # so that losses can be compared

    class StepDone(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            bench.turns.step_done()

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EnoughStepsError):
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=MANY_STEPS,
            per_device_train_batch_size=bench.case.batch,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            lr_scheduler_type="constant",
            optim=optim,
            max_grad_norm=MAX_GRAD_NORM,
            bf16=True,
            torch_compile=compiled,
            torch_compile_backend=bench.backend if compiled else None,
            use_liger_kernel=liger,
            gradient_checkpointing=checkpointing,
            logging_steps=LOG_EVERY,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=bench.is_dry,
            dataloader_num_workers=WORKERS,
            dataloader_pin_memory=not bench.is_dry,
            dataloader_drop_last=True,
        )
        InOrder(
            model, arguments, data_collator=default_data_collator, train_dataset=bench.rows, callbacks=[StepDone()]
        ).train()
    return model


def run_lightning(bench: Bench) -> torch.nn.Module:
    try:
        import pytorch_lightning as lightning
    except ImportError:
        import lightning.pytorch as lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    model = bench.their_model("fp32")
    bench.note_loss("before", model)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(model, backend=bench.backend)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            # Lightning's own rejects fused optimizers in mixed precision.
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM, foreach=True)

    class StepDone(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            bench.turns.step_done()

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EnoughStepsError):
        trainer = lightning.Trainer(
            accelerator="cpu" if bench.is_dry else "gpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=MANY_STEPS,
            logger=lightning.loggers.CSVLogger(folder),
            log_every_n_steps=LOG_EVERY,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[StepDone()],
        )
        trainer.fit(Module(), bench.loader())
    return model.to(bench.device)  # Lightning takes it off the device at the end


def run_trainwright(bench: Bench, *, kind: str, settings: dict[str, Any]) -> torch.nn.Module:
    """Ours, from a config, with every default hook."""
    from trainwright import Hook
    from trainwright.trainers.language_model import LanguageModelTrainer

    class StepDone(Hook):
        def after_step(self) -> None:
            bench.turns.step_done()

    class Ours(LanguageModelTrainer):
        @classmethod
        def build_model(cls, build: Any) -> torch.nn.Module:
            with bench.device:
                return draw_weights(build.model())

        @classmethod
        def build_train_data(cls, build: Any) -> Any:
            return bench.rows

        @classmethod
        def build_hooks(cls, build: Any) -> list[Any]:
            return [*build.hooks(), StepDone()]

    model = bench.case.shipped if kind == "shipped" else bench.case.transformers
    optimizer = {"type": "adamw", "lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    return train_ours(bench, Ours, merge({"model": model, "trainer": {"optimizer": optimizer}}, settings))


def train_ours(bench: Bench, trainer_class: Any, settings: dict[str, Any]) -> torch.nn.Module:
    from trainwright import RunConfig, build_trainer

    common = {
        "name": "benchmark",
        "trainer": {
            "max_steps": MANY_STEPS,
            "global_batch_size": bench.case.batch,
            "micro_batch_size": bench.case.batch,
            "schedule": {"type": "constant"},
            "max_grad_norm": MAX_GRAD_NORM,
        },
        "data": {"shuffle": False},  # so that losses can be compared
        "checkpoint": {"every_steps": None},
        "runtime": {"device": bench.device.type},
        "writers": ["json"],
        "log": {"every_steps": LOG_EVERY},
    }
    settings = merge(common, settings)
    if bench.is_dry and settings["runtime"]["mode"] != "eager":
        settings = merge(settings, {"runtime": {"compile_backend": bench.backend}})
    if bench.is_dry:
        settings = shrink_fp8(settings)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the key that signs run folders
        trainer = build_trainer(RunConfig.from_dict({**settings, "output_dir": folder}), trainer_class)
        if bench.case.transformers:
            bench.note_loss("before", trainer.model)
        with contextlib.suppress(EnoughStepsError):
            trainer.train()
        return trainer.model


def nanochat_model(bench: Bench) -> Any:
    """Returns nanochat's GPT of depth 12, initialized, on the device."""
    if bench.nanochat is None:
        raise RuntimeError("nanochat is not installed as a package: give the folder of its repository with --nanochat.")
    sys.path.insert(0, bench.nanochat)
    from nanochat.gpt import GPT, GPTConfig

    depth = 2 if bench.is_dry else 12
    config = GPTConfig(sequence_len=bench.case.length, n_layer=depth, window_pattern="L")
    if bench.is_dry:
        config = GPTConfig(
            sequence_len=bench.case.length,
            vocab_size=64,
            n_layer=2,
            n_head=2,
            n_kv_head=2,
            n_embd=32,
            window_pattern="L",
        )
    bench.rows = NextTokens(bench.case, config.vocab_size)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=bench.device)
    torch.manual_seed(0)
    model.init_weights()
    return model


class NextTokens(Rows):
    """Rows with the fields of nanochat's model; the targets are the next tokens."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index % len(self.tokens)]
        return {"idx": row, "targets": row.roll(-1)}


def run_nanochat(bench: Bench) -> torch.nn.Module:
    """The loop of nanochat's pre-training script: a compiled model, MuonAdamW, no clipping, a loss read per step."""
    model = nanochat_model(bench)
    optimizer = model.setup_optimizer()
    bench.note_loss("before", model, model)
    forward = torch.compile(model, dynamic=False, backend=bench.backend)
    batches = (
        {name: value.to(bench.device, non_blocking=True) for name, value in batch.items()} for batch in bench.loader()
    )
    batch = next(batches)
    with contextlib.suppress(EnoughStepsError):
        while True:
            loss = forward(**batch)
            loss.backward()
            batch = next(batches)  # while the device computes
            optimizer.step()
            model.zero_grad(set_to_none=True)
            loss.item()
            bench.turns.step_done()
    bench.note_loss("after", model, model)
    return model


def run_nanochat_ours(bench: Bench, *, mode: str) -> torch.nn.Module:
    """nanochat's model and optimizer in our loop."""
    from trainwright import Hook, Trainer

    class StepDone(Hook):
        def after_step(self) -> None:
            bench.turns.step_done()

    class Ours(Trainer):
        @classmethod
        def build_model(cls, build: Any) -> torch.nn.Module:
            model = nanochat_model(bench)
            bench.note_loss("before", model, model)
            return model

        @classmethod
        def build_optimizers(cls, build: Any, model: Any) -> Any:
            return model.setup_optimizer()

        @classmethod
        def build_train_data(cls, build: Any) -> Any:
            return bench.rows

        @classmethod
        def build_hooks(cls, build: Any) -> list[Any]:
            return [*build.hooks(), StepDone()]

        def forward(self, **batch: torch.Tensor) -> Any:
            return self.model(**batch)

    # nanochat's layers cast to bf16 themselves, and its loop does not clip.
    runtime = {"mode": mode, "precision": "fp32"}
    model = train_ours(bench, Ours, {"trainer": {"max_grad_norm": None, "schedule": None}, "runtime": runtime})
    bench.note_loss("after", model, model)
    return model


def measure_matrices(is_dry: bool, report: TextIO) -> None:
    """Reports, at each turn, the rate of large bf16 matrix products."""
    device = torch.device("cpu" if is_dry else "cuda")
    size, repeats = (64, 3) if is_dry else (8192, 20)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    send(report, event="ready")
    while sys.stdin.readline().strip() == "turn":
        for number in range(3):  # two of them to warm up
            synchronize(device)
            start = time.perf_counter()
            for _ in range(repeats):
                left @ right
            synchronize(device)
            seconds = time.perf_counter() - start
            if number == 2:
                send(report, event="turn", tflops=2 * size**3 * repeats / seconds / 1e12)


FRAMEWORKS: dict[str, Callable[..., torch.nn.Module]] = {
    "huggingface": run_huggingface,
    "lightning": run_lightning,
    "trainwright": run_trainwright,
    "nanochat": run_nanochat,
    "nanochat_ours": run_nanochat_ours,
}


def train(job: dict[str, Any], report: TextIO) -> dict[str, Any]:
    """Runs the job until gpu.py ends it; returns the losses."""
    if job["framework"] == MATRICES.framework:
        measure_matrices(job["dry_run"], report)
        return {}
    bench = Bench(job, report)
    if bench.device.type == "cuda":
        torch.cuda.init()
    model = FRAMEWORKS[job["framework"]](bench, **job["options"])
    if "after" not in bench.losses:
        bench.note_loss("after", model)
    return {f"loss_{when}": loss for when, loss in bench.losses.items()}


def import_frameworks() -> None:
    """Imports what contenders use; one that is not installed is reported by those that need it."""
    for name in ("transformers.trainer", "trainwright.build.run", "trainwright.trainers.language_model"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def main() -> None:
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what frameworks print goes to the log
    warnings.filterwarnings("ignore")
    import_frameworks()
    line = sys.stdin.readline()
    if not line:
        return  # gpu.py needs no further process
    job = json.loads(line)
    if job["dry_run"]:
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high")
    try:
        send(report, event="end", ok=True, **train(job, report))
    except BaseException as error:
        traceback.print_exc()
        send(report, event="end", ok=False, error=f"{type(error).__name__}: {error}"[:2000])
    sys.stderr.flush()
    os._exit(0)  # data loaders, compiler pools and captured graphs take long to shut down


if __name__ == "__main__":
    main()
