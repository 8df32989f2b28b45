"""`trainwright generate RUN --prompt "…"`: continues a text, or those of a file, with the model of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.commands.terminal import (
    CheckpointStep,
    DeviceChoice,
    ModelPath,
    RepetitionPenalty,
    Seed,
    Temperature,
    TokenizerChoice,
    TopK,
    TopP,
    Trust,
    Weights,
)
from trainwright.errors import ConfigError, DataError
from trainwright.safe_text import escape_controls


def generate(
    run: ModelPath,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.", show_default=False)] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file with one text per line, or .jsonl with prompt in each row. Prints JSON lines.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="With --prompts: the file to write.", show_default="the terminal")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="With --prompts: the number per batch.", show_default="16")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="The maximum number of tokens to generate.", show_default="200, or the positions of the model"
        ),
    ] = None,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    step: CheckpointStep = "latest",
    weights: Weights = None,
    tokenizer: TokenizerChoice = None,
    device: DeviceChoice = "auto",
    trust: Trust = False,
) -> None:
    """Continue a text with the model of a run, streaming to the terminal, or each text of a file."""
    rows = _check(prompt, prompts, output=output, batch_size=batch_size)

    from trainwright.backends.backend import pick_backend
    from trainwright.export.text import complete_texts, load_text_model, seeded_generator, stream_text

    backend_device = pick_backend(device).device
    model, found = load_text_model(
        run, step=step, weights=weights, device=backend_device, tokenizer=tokenizer, trust=trust
    )
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    options |= {"repetition_penalty": repetition_penalty, "max_new_tokens": max_new_tokens}
    generator = seeded_generator(backend_device, seed)
    if prompt is None:
        made = complete_texts(model, found, rows, seed=generator.initial_seed(), batch_size=batch_size or 16, **options)
        lines = (
            {
                "prompt": row,
                "completion": each.text,
                "num_tokens": each.num_tokens,
                "finish_reason": "stop" if each.is_stopped else "length",
            }
            for row, each in zip(rows, made, strict=True)
        )
        _write(lines, output)
        return
    texts = stream_text(model, found, prompt, generator=generator, **options)
    # With the first text: the prompt alone, followed by an error, would look like an answer.
    shown = escape_controls if sys.stdout.isatty() else str  # a file receives the unchanged text
    print(shown(prompt + next(texts, "")), end="", flush=True)
    for text in texts:
        print(shown(text), end="", flush=True)
    print()


def _check(prompt: str | None, prompts: Path | None, *, output: Path | None, batch_size: int | None) -> list[str]:
    """Returns the prompts of the file, before the model is loaded."""
    if (prompt is None) == (prompts is None):
        raise ConfigError('Set one of --prompt "text" and --prompts FILE.')
    if prompts is None:
        for name, value in (("--output", output), ("--batch-size", batch_size)):
            if value is not None:
                raise ConfigError(f"{name} has no effect with --prompt, which prints text. Use --prompts FILE.")
        return []
    return read_prompts(prompts)


def read_prompts(file: Path) -> list[str]:
    """Returns the prompts of a file: each line, or `prompt` of each row of a .jsonl file. Empty lines are skipped."""
    try:
        lines = file.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts: the file cannot be read: {error}.", where=file) from error
    found = []
    for number, line in enumerate(lines, start=1):
        text: Any = line.removesuffix("\r")
        if not text.strip():
            continue
        if file.suffix == ".jsonl":
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"--prompts: not JSON: {error}.", where=f"{file}:{number}") from error
            text = row.get("prompt") if isinstance(row, dict) else None
            if not isinstance(text, str) or not text:
                raise DataError(
                    '--prompts: the row has no text in "prompt". Each row is an object such as {"prompt": "Once"}.',
                    where=f"{file}:{number}",
                )
        found.append(text)
    if not found:
        raise DataError("--prompts: the file has no prompts.", where=file)
    return found


def _write(rows: Iterable[dict[str, Any]], output: Path | None) -> None:
    """Prints rows as JSON lines, or writes them to a file atomically."""
    if output is None:
        for row in rows:
            print(json.dumps(row), flush=True)
        return
    draft = output.with_name(f".{output.name}.writing")
    try:
        with draft.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        draft.replace(output)
    except OSError as error:
        raise DataError(f"--output: the file cannot be written: {error}.", where=output) from error
    finally:
        draft.unlink(missing_ok=True)
