"""Trains one case with one contender and says how fast it was: a process of its own, started by gpu.py.

The imports come first and take seconds, so gpu.py starts the process ahead; it then waits for its job on the standard
input, a line of JSON, and writes what it found to the file that the job names. Whatever goes wrong is written too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gpu_cases import CASES, LEARNING_RATE, LOG_EVERY, MAX_GRAD_NORM, NUM_BATCHES, WEIGHT_DECAY, Case, shrink
from torch.utils.data import DataLoader, Dataset, SequentialSampler

WORKERS = 2  # of the peers' and the raw loop's DataLoader, so that collating and copying are off their way


class Rows(Dataset):
    """Rows of random tokens, repeated so often that no contender meets the end of an epoch."""

    draws_nothing = True  # as a careful user of trainwright says

    def __init__(self, case: Case, num_steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_BATCHES * case.batch, case.length)
        self.tokens = torch.randint(0, case.sizes["vocab_size"], shape, generator=generator)
        self._length = (num_steps + 100) * case.batch

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index % len(self.tokens)]
        return {"input_ids": row, "labels": row}


class Clock:
    """Notes when rounds of steps end, each with the device's work done; the trainer calls `step_done`."""

    def __init__(self, case: Case, device: torch.device, rounds: int, *, only_start: bool) -> None:
        self._case, self._device = case, device
        self.total = 10 if only_start else case.warmup + rounds * case.steps
        self._done = 0
        self._marks: list[float] = []
        self._begun = time.perf_counter()
        self.seconds_to_step_10 = float("nan")

    def step_done(self) -> bool:
        """Counts a step; says whether it was the last."""
        self._done += 1
        if self._done == 10:
            synchronize(self._device)
            self.seconds_to_step_10 = time.perf_counter() - self._begun
        since = self._done - self._case.warmup
        if since >= 0 and since % self._case.steps == 0:
            synchronize(self._device)
            self._marks.append(time.perf_counter())
        return self._done >= self.total

    @contextlib.contextmanager
    def stopped(self) -> Any:
        """Leaves what happens inside out of the time to step 10."""
        start = time.perf_counter()
        yield
        self._begun += time.perf_counter() - start

    def milliseconds(self) -> list[float]:
        """Returns the milliseconds a step of each round."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [(end - start) / self._case.steps * 1e3 for start, end in pairs]


class Bench:
    """What every contender gets: the case, the data, the models with equal weights, the clock."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.is_dry = bool(job["dry_run"])
        case = CASES[job["case"]]
        self.case = shrink(case) if self.is_dry else case
        self.device = torch.device("cpu" if self.is_dry else "cuda")
        self.backend = "aot_eager" if self.is_dry else "inductor"
        self.clock = Clock(self.case, self.device, job["rounds"], only_start=bool(job["options"].get("only_start")))
        self.rows = Rows(self.case, self.clock.total)
        self.losses: dict[str, float] = {}

    def our_model(self) -> torch.nn.Module:
        """Returns our model on the device; the weights are the same in every process."""
        from trainwright.models.gpt2 import GPT2
        from trainwright.models.llama import Llama

        with self.device:
            model = {"llama": Llama, "gpt2": GPT2}[self.case.model](**self.case.sizes)
        return self.draw_weights(model).train()

    def draw_weights(self, model: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(0)
        model.reset_parameters()
        return model

    def their_model(self) -> torch.nn.Module:
        """Returns transformers' model with our weights, in fp32 and with its fastest attention."""
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        ours = self.our_model()
        make, config = {"llama": (LlamaForCausalLM, LlamaConfig), "gpt2": (GPT2LMHeadModel, GPT2Config)}[
            self.case.model
        ]
        with self.device:
            theirs = make(config(**ours.to_hugging_face(), use_cache=False, attn_implementation="sdpa"))
        weights = ours.state_dict()
        if self.case.model == "gpt2":
            is_matrix = {f"{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
            weights = {
                name: value.T if name.split(".", 3)[-1] in is_matrix else value for name, value in weights.items()
            }
        missing, unexpected = theirs.load_state_dict(weights, strict=False)
        if unexpected or [name for name in missing if name != "lm_head.weight"]:
            raise RuntimeError(f"the weights do not fit: missing {missing}, unexpected {unexpected}")
        return theirs.float().train()

    def loader(self) -> DataLoader[Any]:
        """Returns torch's loader as a careful user sets it, but in order, so that losses can be compared."""
        return DataLoader(
            self.rows,
            batch_size=self.case.batch,
            shuffle=False,
            drop_last=True,
            num_workers=WORKERS,
            pin_memory=self.device.type == "cuda",
        )

    def compile(self, model: torch.nn.Module) -> torch.nn.Module:
        return torch.compile(model, backend=self.backend)

    def note_loss(self, when: str, model: torch.nn.Module) -> None:
        """Keeps the loss on the first batch: contenders that do the same work agree, before and after."""
        tokens = self.rows.tokens[: self.case.batch].to(self.device)
        with self.clock.stopped(), torch.no_grad(), torch.autocast(self.device.type, dtype=torch.bfloat16):
            try:
                self.losses[when] = float(model(input_ids=tokens, labels=tokens)["loss"])
            except Exception:  # to gpu.log: the speed is to be known all the same
                traceback.print_exc()
        if when == "before" and self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def run_raw(bench: Bench, *, compiled: bool, model: str = "theirs") -> torch.nn.Module:
    """The loop that a careful researcher writes by hand."""
    device, clock = bench.device, bench.clock
    plain = bench.our_model() if model == "ours" else bench.their_model()
    bench.note_loss("before", plain)
    forward = bench.compile(plain) if compiled else plain
    optimizer = make_optimizer(plain)
    window: list[torch.Tensor] = []
    lines: list[float] = []
    for batch in bench.loader():
        on_device = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = forward(**on_device)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_GRAD_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        window.append(loss.detach())
        if len(window) == LOG_EVERY:
            lines.append(torch.stack(window).mean().item())
            window = []
        if clock.step_done():
            break
    return plain


def run_huggingface(bench: Bench, *, compiled: bool) -> torch.nn.Module:
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    model = bench.their_model()
    bench.note_loss("before", model)

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(bench.rows)  # so that losses can be compared

    class StepDone(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            bench.clock.step_done()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=bench.clock.total,
            per_device_train_batch_size=bench.case.batch,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_grad_norm=MAX_GRAD_NORM,
            bf16=True,
            torch_compile=compiled,
            torch_compile_backend=bench.backend if compiled else None,
            logging_steps=LOG_EVERY,
            logging_nan_inf_filter=False,  # else the host waits for the loss in every step
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=bench.is_dry,
            dataloader_num_workers=WORKERS,
            dataloader_pin_memory=not bench.is_dry,
            dataloader_drop_last=True,
        )
        callbacks = [StepDone()]
        trainer = InOrder(
            model, arguments, data_collator=default_data_collator, train_dataset=bench.rows, callbacks=callbacks
        )
        trainer.train()
    return model


def run_lightning(bench: Bench, *, compiled: bool) -> torch.nn.Module:
    try:
        import pytorch_lightning as lightning
    except ImportError:
        import lightning.pytorch as lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    model = bench.their_model()
    bench.note_loss("before", model)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = bench.compile(model) if compiled else model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(model)

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            # Lightning's own rejects fused optimizers in mixed precision.
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM, foreach=True)

    class StepDone(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            bench.clock.step_done()

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu" if bench.is_dry else "gpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=bench.clock.total,
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


class _EnoughStepsError(Exception):
    """Ends our run before its last step, whose checkpoint nobody needs."""


def run_trainwright(
    bench: Bench,
    *,
    mode: str,
    compile_repeated_blocks: bool = False,
    masters: bool = False,
    budget: float | None = None,
    is_cold: bool = False,
) -> torch.nn.Module:
    """Ours with every default hook."""
    from trainwright import Hook, RunConfig, build_trainer
    from trainwright.trainers.language_model import LanguageModelTrainer

    class StepDone(Hook):
        def after_step(self) -> None:
            if bench.clock.step_done():
                raise _EnoughStepsError

    class Ours(LanguageModelTrainer):
        @classmethod
        def build_model(cls, build: Any) -> torch.nn.Module:
            with bench.device:
                model = bench.draw_weights(build.model())
            return model.bfloat16() if masters else model

        @classmethod
        def build_train_data(cls, build: Any) -> Any:
            return bench.rows

        @classmethod
        def build_hooks(cls, build: Any) -> list[Any]:
            return [*build.hooks(), StepDone()]

    runtime = {"device": bench.device.type, "precision": "bf16", "mode": mode}
    if mode != "eager":
        runtime |= {"compile_backend": bench.backend, "compile_memory_budget": budget}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the key that signs run folders
        settings = _settings(bench, folder, runtime, compile_repeated_blocks=compile_repeated_blocks, masters=masters)
        trainer = build_trainer(RunConfig.from_dict(settings), Ours)
        if not is_cold:  # a forward more could fill the compiler's caches
            bench.note_loss("before", trainer.model)
        with contextlib.suppress(_EnoughStepsError):
            trainer.train()
        return trainer.model


def _settings(
    bench: Bench, folder: str, runtime: dict[str, Any], *, compile_repeated_blocks: bool, masters: bool
) -> dict[str, Any]:
    """The settings of a run of ours."""
    case = bench.case
    optimizer = {"type": "adamw", "lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    return {
        "name": "benchmark",
        "output_dir": folder,
        "trainer": {
            "max_steps": bench.clock.total + 1,
            "global_batch_size": case.batch,
            "micro_batch_size": case.batch,
            "max_grad_norm": MAX_GRAD_NORM,
            "optimizer": {**optimizer, "master_weights": True} if masters else optimizer,
            "schedule": {"type": "constant"},
        },
        "model": {
            "type": case.model,
            **case.sizes,
            **({"compile_repeated_blocks": case.blocks} if compile_repeated_blocks else {}),
        },
        "data": {"shuffle": False},  # the order of the others
        "checkpoint": {"every_steps": None},
        "runtime": runtime,
        "writers": ["json"],
        "log": {"every_steps": LOG_EVERY},
    }


def measure_matrices(bench: Bench) -> dict[str, Any]:
    """The rate of large bf16 matrix products, which is what a share of the device is measured against."""
    size, repeats = (64, 3) if bench.is_dry else (8192, 20)
    left, right = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for number in range(12):
        synchronize(bench.device)
        start = time.perf_counter()
        for _ in range(repeats):
            left @ right
        synchronize(bench.device)
        if number >= 2:
            rates.append(2 * size**3 * repeats / (time.perf_counter() - start) / 1e12)
    return {"tflops": sorted(rates)[len(rates) // 2]}


FRAMEWORKS: dict[str, Callable[..., torch.nn.Module]] = {
    "raw": run_raw,
    "huggingface": run_huggingface,
    "lightning": run_lightning,
    "trainwright": run_trainwright,
}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Runs the job and returns what is known of it."""
    bench = Bench(job)
    if job["framework"] == "matrices":
        return measure_matrices(bench)
    options = {name: value for name, value in job["options"].items() if name != "only_start"}
    if bench.device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
    model = FRAMEWORKS[job["framework"]](bench, **options)
    found: dict[str, Any] = {"seconds_to_step_10": bench.clock.seconds_to_step_10, "steps": bench.clock.total}
    if bench.clock.milliseconds():
        found["ms"] = bench.clock.milliseconds()
    if bench.device.type == "cuda":
        # Of the whole run: what a captured graph keeps for itself counts as allocated only while it is captured.
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    if not job["options"].get("only_start"):
        bench.note_loss("after", model)
    return found | {f"loss_{when}": loss for when, loss in bench.losses.items()}


def import_frameworks() -> None:
    """Imports what contenders use; one that is not installed is told of by those that need it."""
    for name in ("transformers", "pytorch_lightning", "trainwright"):
        with contextlib.suppress(Exception):
            __import__(name)


def main() -> None:
    warnings.filterwarnings("ignore")
    import_frameworks()
    line = sys.stdin.readline()
    if not line:
        return  # gpu.py needs no further process
    job = json.loads(line)
    os.environ.update(job["environment"])
    if job["dry_run"]:
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high")
    try:
        found = {"ok": True, **measure(job)}
    except BaseException as error:
        traceback.print_exc()
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:1500]}
    Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")
    sys.stderr.flush()
    os._exit(0)  # loaders' workers, compilers' pools and captured graphs take long to say good-bye


if __name__ == "__main__":
    main()
