"""Trains examples and draws the pictures of docs/gallery.md: `python tools/gallery.py FOLDER`.

FOLDER receives a copy of examples/ with its runs; run it again and only the drawing is repeated. Curves are drawn by
draw_curve.py. About five minutes on one CPU core.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from draw_curve import draw
from matplotlib.figure import Figure

from trainwright import RunConfig, build_component, load_checkpoint

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images" / "gallery"
CURVES = {
    "digits_vit": ("digits_vit", ["log.every_steps=20"], ["loss,valid/loss", "valid/accuracy"]),
    "mnist": ("ports/mnist", ["log.every_epochs=null", "log.every_steps=5"], ["loss,valid/loss", "valid/accuracy"]),
    "words": ("ports/word_language_model", ["log.every_steps=5"], ["loss,valid/loss", "lr"]),
    "reinforce": ("ports/reinforce", ["log.every_steps=10"], ["running_reward", "loss"]),
    "contrastive": ("ports/contrastive", ["log.every_steps=10"], ["loss,valid/loss", "found,valid/found"]),
}
"""Pictures by name: the example, settings of its log, and the metrics of each panel."""


def train(example: Path, settings: list[str]) -> Path:
    """Trains an example, or finds its finished run; returns the run folder."""
    command = [sys.executable, "-m", "trainwright", "train", "run.yaml", *settings]
    subprocess.run(command, cwd=example, check=True, stdout=subprocess.DEVNULL)
    return example / "runs" / RunConfig.load(example / "run.yaml").name


def rows_of_digits(rows: dict[str, torch.Tensor]) -> Figure:
    """Draws rows of images of 8 × 8 pixels, each with its label."""
    figure, axes = plt.subplots(len(rows), 1, figsize=(5, 0.62 * len(rows)), layout="constrained")
    for ax, (label, images) in zip(axes, rows.items(), strict=True):
        ax.imshow(torch.cat([*images.reshape(-1, 8, 8)], dim=-1), cmap="gray_r", vmin=0, vmax=1)
        ax.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
        ax.set_xticks([])
        ax.set_yticks([])
    return figure


def digits(run: Path, number: int) -> torch.Tensor:
    """Returns images that the run has not trained on, [number, 64]."""
    valid = build_component(run / "config.yaml", "data.eval.valid")
    return torch.stack([valid[index]["pixel_values"].flatten() for index in range(number)])


def draw_inpainting(run: Path) -> Figure:
    """Draws digits with hidden pixels, and what the network draws there."""
    model, pixels = load_checkpoint(run), digits(run, 10)
    is_hidden = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    seen = pixels.masked_fill(is_hidden, 0.0)
    drawn = torch.where(is_hidden, model(seen, is_hidden), pixels)
    return rows_of_digits({"seen": seen, "drawn": drawn, "true": pixels})


def draw_vae(run: Path) -> Figure:
    """Draws digits, their reconstructions, and samples."""
    model, pixels = load_checkpoint(run), digits(run, 10)
    noise = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    return rows_of_digits(
        {"digits": pixels, "reconstructed": model(pixels)[0], "sampled": model.decoder(noise).sigmoid()}
    )


def draw_dcgan(run: Path) -> Figure:
    """Draws digits from noise, in the middle of the run and at its end."""
    noise = torch.randn(10, 16, 1, 1, generator=torch.Generator().manual_seed(0))
    first, *_, last = sorted(int(each.name[5:]) for each in (run / "checkpoints").glob("step-*"))
    rows = {f"step {step}": load_checkpoint(run, step).generator(noise).add(1).div(2) for step in (first, last)}
    return rows_of_digits(rows)


def draw_ring(run: Path) -> Figure:
    """Draws points of the data, and generated ones."""
    model = load_checkpoint(run)
    data = build_component(run / "config.yaml", "data.eval.valid").points
    drawn = model.generator(torch.randn(512, 8, generator=torch.Generator().manual_seed(0)))
    figure, axes = plt.subplots(1, 2, figsize=(5, 2.5), sharex=True, sharey=True, layout="constrained")
    for ax, points, title in zip(axes, (data, drawn), ("data", "generated"), strict=True):
        ax.scatter(*points.T, s=2)
        ax.set_title(title, fontsize=9)
        ax.set_aspect("equal")
        ax.tick_params(labelsize=7)
    return figure


PICTURES_OF_MODELS: dict[str, tuple[str, list[str], Callable[[Path], Figure]]] = {
    "inpainting": ("custom_trainer", [], draw_inpainting),
    "vae": ("ports/vae", ["trainer.max_steps=3000"], draw_vae),
    "dcgan": ("ports/dcgan", ["trainer.max_epochs=200", "checkpoint.every_epochs=50"], draw_dcgan),
    "ring": ("adversarial_pair", [], draw_ring),
}
"""Pictures by name: the example, settings, and the function that draws it."""


@torch.no_grad()
def main(folder: Path) -> None:
    """Trains and draws."""
    if not folder.exists():
        shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("runs"))
    PICTURES.mkdir(exist_ok=True)
    for name, (example, settings, panels) in CURVES.items():
        draw(str(PICTURES / f"{name}.svg"), str(train(folder / example, settings)), panels)
    for name, (example, settings, picture) in PICTURES_OF_MODELS.items():
        picture(train(folder / example, settings)).savefig(PICTURES / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
