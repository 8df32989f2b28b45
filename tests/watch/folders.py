"""Run folders for tests of the page: real ones, trained here, and parts of them written by hand."""

import json
import os
import time
from pathlib import Path

import torch

from trainwright import Hook, RunConfig, Trainer, build_trainer

RUN = str(Path(__file__).parents[1] / "project" / "run.yaml")
HOSTILE = '</script><img src=x onerror="document.title=1">'


class Show(Hook):
    """Puts an image, a histogram and a text every two steps, and breaks one step, which is skipped."""

    def __init__(self, break_at=None):
        self.break_at = break_at

    def before_step(self):
        if self.trainer.step == self.break_at:
            self.break_at = None
            weight = next(self.trainer.model.parameters())
            self.saved = weight.detach().clone()
            with torch.no_grad():
                weight.fill_(torch.nan)

    def on_anomaly(self, anomaly):
        with torch.no_grad():
            next(self.trainer.model.parameters()).copy_(self.saved)

    def after_step(self):
        if self.trainer.step % 2 == 0:
            storage, weight = self.trainer.storage, next(self.trainer.model.parameters()).detach()
            storage.put_image("weights", torch.rand(8, 12, 3).numpy())
            storage.put_histogram("weights", weight)
            storage.put_text("sample", f"{HOSTILE} at {self.trainer.step}")


def train(folder, name, *overrides, break_at=None, stop_at=None):
    """Trains a run of 12 steps with its hook; `stop_at` interrupts it, as SIGTERM does."""

    class Interrupting(Hook):
        def after_step(self):
            if self.trainer.step == stop_at:
                self.trainer.interrupt("a test")

    class Shown(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), Show(break_at), Interrupting()]

    base = [f"name={name}", f"output_dir={folder}", "log.every_steps=1", "anomalies.non_finite=skip"]
    base += ["checkpoint={every_steps: 4, keep_last: 2, keep_best: {metric: valid/loss}}"]
    trainer = build_trainer(RunConfig.load(RUN, [*base, *overrides]), Shown)
    trainer.train()
    return trainer.folder


def write_lines(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_hostile_run(folder):
    """Writes a run whose name, settings, metrics, media, model and log come from somebody who means harm."""
    run = folder / HOSTILE.replace("/", "")
    write_lines(
        run / "metrics.json",
        *({"step": step, HOSTILE: 1.0 / step, "loss": 1.0 / step, "note": HOSTILE} for step in range(1, 9)),
    )
    (run / "config.yaml").write_text(f"trainer: {{max_steps: many}}\nname: '{HOSTILE}'\napi_key: 123\n'{HOSTILE}': 1\n")
    (run / "log.txt").write_text(f"2026-01-01 00:00:00,000 ERROR {HOSTILE} \x1b[2J\n")
    (run / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run / "model.json").write_text(json.dumps({"class": HOSTILE, "modules": [[HOSTILE, HOSTILE, 1, 1], "x", [1]]}))
    write_lines(run / "anomalies" / "step-00000002" / "anomaly.json", {"step": 2, "kind": HOSTILE, "message": HOSTILE})
    (run / "media").mkdir()
    (run / "media" / "00000001-0.png").symlink_to("/etc/passwd")
    image = {"step": 1, "kind": "image", "name": HOSTILE, "file": "00000001-0.png", "width": 1, "height": 1}
    write_lines(run / "media" / "index.json", image, {**image, "file": "../../../etc/passwd"}, {"kind": "histogram"})
    return run


def grow_old(path, seconds=7200):
    then = time.time() - seconds
    for each in (path, *path.rglob("*")):
        os.utime(each, (then, then))
