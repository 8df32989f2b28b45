"""Microseconds per step that a training loop adds to a raw one, on a model so small that the loop shows.

    python benchmarks/overhead.py [--rounds 12] [--steps 400] [--cpu-time] [--output FILE]

Every contender trains the same 2-layer MLP on the same samples with AdamW (fused), clipping to norm 1, a
cosine schedule and a log line every 50 steps, on one thread. The contenders take turns, round after
round, in one process, because the machine's speed drifts; each round restarts them on fresh weights, and
start-up is not counted: the clock runs from the first step to the last. Reported is the median over
rounds of (contender − raw loop of the same round). On a machine that others keep busy, `--cpu-time` counts the
processor's time of the thread that trains.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH, WIDTH, CLASSES, SAMPLES, LOG_EVERY = 32, 64, 10, 4096, 50


class Rows(Dataset):
    """Rows of a fixed table, as plain as a dataset can be."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    """Two layers and their loss, in the form that every contender accepts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": self.criterion(logits, labels), "logits": logits}


class Clock:
    """Notes when the first step began (after `warmup` steps) and when the last ended."""

    now = staticmethod(time.perf_counter)

    def __init__(self, steps, warmup=20):
        self.steps, self.warmup, self.done = steps, warmup, 0

    def step_done(self):
        self.done += 1
        if self.done == self.warmup:
            self.start = self.now()
        if self.done == self.steps:
            self.seconds = self.now() - self.start

    @property
    def microseconds(self):
        return self.seconds / (self.steps - self.warmup) * 1e6


def cosine(step, steps):
    return 0.5 * (1 + math.cos(math.pi * step / max(steps - 1, 1)))


def run_raw(steps):
    """The loop that a careful researcher writes by hand; it logs into a list every 50 steps."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, steps))
    loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True, drop_last=True)
    clock, lines, window, done = Clock(steps), [], [], 0
    while done < steps:
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = model(**batch)["loss"]
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            schedule.step()
            window.append((loss.detach(), norm))
            done += 1
            if done % LOG_EVERY == 0:
                losses, norms = zip(*window, strict=True)
                lines.append((torch.stack(losses).mean().item(), torch.stack(norms).mean().item()))
                window = []
            clock.step_done()
            if done == steps:
                break
    return clock.microseconds


def run_trainwright(steps):
    """Ours, with every default hook and writer's work but the terminal's: metrics.json is written."""
    from trainwright import Hook, RunConfig, Trainer, build_trainer

    clock = Clock(steps)

    class Ours(Trainer):
        @classmethod
        def build_model(cls, build):
            return Net()

        @classmethod
        def build_train_data(cls, build):
            return Rows()

        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), StepDone()]

    class StepDone(Hook):
        def after_step(self):
            clock.step_done()

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the key that signs run folders
        config = RunConfig.from_dict(
            {
                "output_dir": folder,
                "trainer": {
                    "max_steps": steps,
                    "global_batch_size": BATCH,
                    "max_grad_norm": 1.0,
                    "optimizer": {"type": "adamw", "lr": 1e-3},
                    "schedule": {"type": "cosine"},
                },
                "checkpoint": {"every_steps": None},
                "runtime": {"device": "cpu"},
                "writers": ["json"],
                "log": {"every_steps": LOG_EVERY},
            }
        )
        build_trainer(config, Ours).train()
    return clock.microseconds


def run_lightning(steps):
    try:
        import lightning.pytorch as lightning
    except ImportError:  # the older package of the same
        import pytorch_lightning as lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = Clock(steps)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, steps))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def on_before_optimizer_step(self, optimizer):
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")

    class StepDone(lightning.Callback):
        def on_train_batch_end(self, *_):
            clock.step_done()

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=steps,
            logger=lightning.loggers.CSVLogger(folder),
            log_every_n_steps=LOG_EVERY,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[StepDone()],
        )
        loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True, drop_last=True)
        trainer.fit(Module(), loader)
    return clock.microseconds


def run_huggingface(steps):
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    clock = Clock(steps)

    class StepDone(TrainerCallback):
        def on_step_end(self, *_, **__):
            clock.step_done()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            Net(), arguments, data_collator=default_data_collator, train_dataset=Rows(), callbacks=[StepDone()]
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return clock.microseconds


CONTENDERS = {
    "raw": run_raw,
    "trainwright": run_trainwright,
    "lightning": run_lightning,
    "huggingface": run_huggingface,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.cpu_time:
        Clock.now = staticmethod(time.thread_time)
    times = {name: [] for name in CONTENDERS if name in options.only or name == "raw"}
    failures = {}
    for number in range(options.rounds + 1):
        for name in list(times):
            try:
                measured = CONTENDERS[name](options.steps)
            except Exception as error:  # the others go on
                failures[name] = f"{type(error).__name__}: {error}"
                del times[name]
                continue
            if number:  # the first round imports and warms caches
                times[name].append(measured)
        print(f"round {number}/{options.rounds}", end="\r", flush=True)
    print(f"Median of {options.rounds} rounds of {options.steps} steps, torch {torch.__version__}, one thread")
    print(f"{'':20}{'µs/step':>10}{'over raw':>12}{'ratio':>8}")
    results = {}
    for name, values in times.items():
        over = statistics.median(value - raw for value, raw in zip(values, times["raw"], strict=True))
        ratio = statistics.median(value / raw for value, raw in zip(values, times["raw"], strict=True))
        results[name] = {"median": statistics.median(values), "over_raw": over, "ratio": ratio}
        print(f"{name:20}{results[name]['median']:10.0f}{over:+12.0f}{ratio:8.2f}")
    for name, failure in failures.items():
        print(f"{name:20} failed: {failure}")
    if options.output:
        content = {"torch": torch.__version__, "results": results, "failures": failures}
        options.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
