"""`trainwright generate RUN --prompt "…"`: continues a text with the model of a run, token by token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.commands.terminal import CheckpointStep, Trust, Weights
from trainwright.safe_text import escape_controls


def generate(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder of an export.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="The text to continue.", show_default=False)],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many tokens to generate at most.", show_default="200, or the positions of the model"
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 selects the most likely token.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from this many of the most likely tokens.", show_default="all")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens of this total probability.", show_default="all"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**64 - 1, help="The random seed.", show_default="another each time"),
    ] = None,
    step: CheckpointStep = "latest",
    weights: Weights = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer.json, a folder with one, or bytes.", show_default="that of the run's data"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    trust: Trust = False,
) -> None:
    """Continue a text with the model of a run, streaming to the terminal."""
    import torch

    from trainwright.backends.backend import pick_backend
    from trainwright.export.text import load_text_model, stream_text

    backend_device = pick_backend(device).device
    model, found = load_text_model(
        run, step=step, weights=weights, device=backend_device, tokenizer=tokenizer, trust=trust
    )
    generator = torch.Generator(backend_device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator}
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    texts = stream_text(model, found, prompt, **options)
    # With the first text: the prompt alone, followed by an error, would look like an answer.
    shown = escape_controls if sys.stdout.isatty() else str  # a file gets the text as it is
    print(shown(prompt + next(texts, "")), end="", flush=True)
    for text in texts:
        print(shown(text), end="", flush=True)
    print()
