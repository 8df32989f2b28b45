"""Draws docs/images/watch.png and watch-dark.png: six short runs on the live page, in Chromium (Playwright).

python -m tools.watch_picture
"""

import json
import os
import tempfile
from pathlib import Path
from urllib.parse import quote

import torch
from playwright.sync_api import Page, sync_playwright
from tests.watch.test_server import serving

from trainwright import Hook, RunConfig, Trainer, build_trainer
from trainwright.build.components import Build

CHROMIUM = "/usr/bin/chromium"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
RUN = """
model: {type: net.Net}
data: {train: {type: digits, part: train}, eval: {valid: {type: digits, part: valid}}}
trainer: {max_steps: 1200, global_batch_size: 32, optimizer: {type: adamw, lr: 3e-3}}
evaluation: {every_steps: 60, metrics: {accuracy: {type: accuracy, outputs: logits, labels: labels}}}
checkpoint: {every_steps: 200, keep_best: {metric: valid/accuracy, mode: max}}
anomalies: {non_finite: skip}
writers: [json]
log: {every_steps: 5}
runtime: {device: cpu}
"""
NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, width=64, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(width, 10)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, pixel_values, labels=None):
        return {"logits": self.head(self.body(pixel_values))}
"""


class Break(Hook):
    """Makes the loss of one step NaN."""

    def before_step(self) -> None:
        """Replaces a weight."""
        if self.trainer.step == 500:
            self.weight = self.trainer.model.head.weight
            self.saved = self.weight.detach().clone()
            with torch.no_grad():
                self.weight.fill_(torch.nan)

    def on_anomaly(self, anomaly: object) -> None:
        """Restores it."""
        with torch.no_grad():
            self.weight.copy_(self.saved)


class Interrupt(Hook):
    """Interrupts a run as SIGTERM does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self) -> None:
        """Interrupts the run at its step."""
        if self.trainer.step == self.step:
            self.trainer.interrupt("the picture")


def train(folder: Path, name: str, *overrides: str, hooks: tuple[Hook, ...] = ()) -> None:
    """Trains a run, or continues it."""

    class Shown(Trainer):
        @classmethod
        def build_hooks(cls, build: Build) -> list[Hook]:
            return [*super().build_hooks(build), *hooks]

    settings = [f"name={name}", "output_dir=runs", *overrides]
    build_trainer(RunConfig.load(folder / "run.yaml", settings), Shown).train()


def write_runs(folder: Path) -> None:
    """Trains the six runs, the newest of which seems to run."""
    (folder / "models").mkdir()
    (folder / "models" / "net.py").write_text(NET)
    (folder / "run.yaml").write_text(RUN)
    train(folder, "baseline")
    train(folder, "wide/width-256", "model.width=256")
    train(folder, "wide/width-128-low-lr", "model.width=128", "trainer.optimizer.lr=3e-4")
    train(folder, "broken-batch", "model.width=128", hooks=(Break(),))
    train(folder, "restarted", "seed=1", hooks=(Interrupt(622),))
    train(folder, "restarted", "seed=1")
    train(folder, "dropout-30", "model.dropout=0.3", hooks=(Interrupt(910),))


def shoot(page: Page, path: Path, *, hover_x: int | None = None) -> None:
    """Writes a picture when all visible curves are drawn."""
    page.wait_for_function("() => [...plots.values()].some((each) => each.isVisible && each.curves)")
    page.wait_for_function("() => [...plots.values()].every((each) => !each.isVisible || !each.isWaiting)")
    if hover_x is not None:
        page.locator("section.plot canvas").first.hover(position={"x": hover_x, "y": 90})
    page.screenshot(path=path)


def main() -> None:
    """Trains the runs and writes both pictures."""
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as started:
        os.chdir(temporary)  # the page shows the path of its folder
        write_runs(Path())
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with serving(Path("runs")) as send:
            url = f"http://127.0.0.1:{send.port}/#runs="
            names = ["baseline", "wide/width-256", "broken-batch", "restarted", "dropout-30"]
            size = {"width": 1360, "height": 860}
            page = browser.new_page(viewport=size)
            page.goto(f"{url}{quote(json.dumps(names))}&smoothing=2&log=1")
            shoot(page, IMAGES / "watch.png", hover_x=545)
            page = browser.new_page(viewport=size, color_scheme="dark")
            page.goto(f"{url}{quote(json.dumps(['broken-batch']))}&run=broken-batch&smoothing=3")
            shoot(page, IMAGES / "watch-dark.png")
        browser.close()


if __name__ == "__main__":
    main()
