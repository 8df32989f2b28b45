"""`trainwright chat RUN`: a conversation with the model of a run in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
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

HELP = "/reset begins another conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer."


def chat(
    run: ModelPath,
    system: Annotated[
        str | None, typer.Option(help="The system prompt, before the conversation.", show_default="none")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="The longest answer in tokens, within the positions of the model.")
    ] = 512,
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
    """Talk to the model of a run: each line is a message, and the answer is shown while it is generated.

    Conversations have the format of the tokenizer's chat template, or ChatML if it has none. /reset starts another
    conversation, /exit or Ctrl-D exits, Ctrl-C ends an answer.
    """
    from trainwright.backends.backend import pick_backend
    from trainwright.export.chat import chat_format, find_chat_template
    from trainwright.export.text import load_text_model, seeded_generator
    from trainwright.models.generation import Sampling, room_after

    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    options["repetition_penalty"] = repetition_penalty
    Sampling(max_new_tokens=max_new_tokens, **options)  # rejects impossible values before the first message
    backend_device = pick_backend(device).device
    model, found = load_text_model(
        run, step=step, weights=weights, device=backend_device, tokenizer=tokenizer, trust=trust
    )
    layout = chat_format(found, find_chat_template(run, trust=trust))
    generator = seeded_generator(backend_device, seed)

    def answer(messages: list[dict[str, Any]]) -> Any:
        num_tokens = len(layout.prompt(messages))
        room = room_after(model, num_tokens)
        if room == 0:
            raise DataError(
                f"The conversation has {num_tokens} tokens, and the model has no position left. "
                "Begin another one: /reset."
            )
        longest = max_new_tokens if room is None else min(max_new_tokens, room)
        return layout.answer(model, messages, max_new_tokens=longest, generator=generator, **options)

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() editing and a history
    print(HELP, file=sys.stderr)
    _converse(answer, system)


def _converse(answer: Callable[[list[dict[str, Any]]], Any], system: str | None) -> None:
    """Reads messages until the end of the input; `answer` returns the chunks of the reply to a conversation."""
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}", file=sys.stderr)
            continue
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(beginning)
            print("The conversation begins again.", file=sys.stderr)
        elif text.startswith("/"):
            print(f"{escape_controls(text.split()[0])} is not a command. {HELP}", file=sys.stderr)
        elif text:
            asked = [*messages, {"role": "user", "content": text}]
            try:
                reply = _show(answer(asked))
            except (ConfigError, DataError) as error:
                print(f"error: {escape_controls(str(error))}", file=sys.stderr)
                continue
            messages = [*asked, {"role": "assistant", "content": reply}]


def _show(chunks: Any) -> str:
    """Prints an answer while it is generated and returns it; Ctrl-C ends it."""
    shown = escape_controls if sys.stdout.isatty() else str
    reply = ""
    try:
        for chunk in chunks:
            reply += chunk
            print(shown(chunk), end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="", file=sys.stderr)
    finally:
        chunks.close()
    print(flush=True)
    return reply
