"""`trainwright generate RUN --prompt "…"`: continues a text with the model of a run, as it is made."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from trainwright.commands.terminal import CheckpointStep


def generate(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder of an export.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="The text to continue.", show_default=False)],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many tokens to make at most.", show_default="200, or what the model has positions for"
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token every time.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Choose among this many of the likeliest tokens.", show_default="all")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Choose among the likeliest that hold this share.", show_default="all")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**64 - 1, help="Makes the text repeatable.", show_default="another each time"),
    ] = None,
    step: CheckpointStep = "latest",
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer.json, a folder with one, or bytes.", show_default="that of the run's data"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Continue a text with the model of a run, streaming to the terminal."""
    import torch

    from trainwright.backends.backend import pick_backend
    from trainwright.export.text import load_text_model, stream_text

    place = pick_backend(device).device
    model, found = load_text_model(run, step=step, device=place, tokenizer=tokenizer)
    generator = torch.Generator(place)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    asked = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    pieces = stream_text(
        model,
        found,
        prompt,
        **asked,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
    )
    # The prompt comes with the first piece: before an error it would look like an answer.
    for piece in chain([prompt + next(pieces, "")], pieces):
        sys.stdout.write(piece)
        sys.stdout.flush()  # a text that is watched, not a file that is waited for
    sys.stdout.write("\n")
