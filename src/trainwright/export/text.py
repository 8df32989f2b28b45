"""Text from a model, as it is made: a prompt to tokens, tokens to pieces of text that end at whole characters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint.folder import find_run, read_config
from trainwright.data.tokenizer import USUAL_NAMES, TextTokenizer, load_tokenizer
from trainwright.errors import CheckpointError, ConfigError, DataError
from trainwright.export.huggingface import TOKENIZER_FILES, find_tokenizer
from trainwright.export.load import load_checkpoint
from trainwright.models.generation import generate, reject_non_decoder, room_after
from trainwright.models.model import AutoModel, Model
from trainwright.models.pretrained import CONFIG_FILE

USUAL_LENGTH = 200
"""How many tokens are made at most where nobody says."""

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes that are no character, or none yet."""


def load_text_model(
    run_or_folder: str | Path,
    *,
    step: int | str = "latest",
    device: torch.device | str = "cpu",
    tokenizer: str | None = None,
) -> tuple[nn.Module, Any]:
    """Returns the model of a run or of a folder in Hugging Face's layout, and its tokenizer.

    A run's tokenizer is that of its data or collator, a folder's is the one beside its weights; `tokenizer` names
    another (a tokenizer.json, a folder with one, or "bytes").
    """
    place = Path(run_or_folder)
    is_folder = (place / CONFIG_FILE).is_file()
    if is_folder and step != "latest":
        raise ConfigError(f"{place} is a model folder, which has no steps. Leave --step out, or give the run.")
    model: nn.Module
    if is_folder:
        model = AutoModel.from_pretrained(place, device=device).eval()
    else:
        model = load_checkpoint(place, step, device=device)
    reject_non_decoder(model)  # before its tokenizer is missed: a model of images has none
    return model, load_tokenizer(tokenizer) if tokenizer is not None else _own_tokenizer(place, is_folder=is_folder)


def stream_text(
    model: nn.Module, tokenizer: Any, prompt: str, *, max_new_tokens: int | None = None, **sampling: Any
) -> Iterator[str]:
    """Yields the text that a model continues a prompt with, in pieces of whole characters, as it is made.

    Without `max_new_tokens` it makes at most 200 tokens, or as many as the model has positions for.
    `sampling` is what generation.py's `generate` takes beside: temperature, top_k, top_p, generator. The
    text ends at the tokenizer's end token. A token that the tokenizer does not have, which a model with a larger
    vocabulary may draw, is shown by its number: <50300>.
    """
    reject_non_decoder(model)
    tokens = encode_prompt(tokenizer, prompt)
    if not tokens:
        raise DataError("The prompt has no tokens. Give at least one character.")
    _reject_foreign_tokens(model, tokens)
    stops = end_tokens(tokenizer)
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    text = TextStream(tokenizer, tokens)
    if max_new_tokens is None:
        room = room_after(model, len(tokens))
        max_new_tokens = USUAL_LENGTH if not room else min(USUAL_LENGTH, room)  # none left: generate says so
    prompt_ids = torch.tensor([tokens], device=device)
    for [token] in generate(model, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stops, **sampling):
        if int(token) in stops:
            break
        piece = text.push(int(token))
        if piece:
            yield piece
    rest = text.finish()
    if rest:
        yield rest


class TextStream:
    """Turns tokens into text one by one; what does not yet end at a whole character is kept back.

    A token may hold some bytes of a character only, and may look different after another one (a space before it), so
    that each piece is the difference of two decodings. Those begin at the piece before, so a token costs the same
    however long the text is.
    """

    def __init__(self, tokenizer: Any, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._size = num_tokens_of(tokenizer)
        self._tokens = list(before)
        self._start = 0  # where both decodings begin
        self._shown = len(self._tokens)  # up to where the text is out already

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that is certain by now, which may be none."""
        if self._size is not None and token >= self._size:
            return self.finish() + f"<{token}>"
        self._tokens.append(token)
        text = self._pending()
        if not text or text.endswith(BROKEN):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def finish(self) -> str:
        """Returns what was kept back."""
        text = self._pending()
        # What follows is decoded behind this piece, unless it breaks off inside of a character.
        self._start = len(self._tokens) if text.endswith(BROKEN) else self._shown
        self._shown = len(self._tokens)
        return text

    def _pending(self) -> str:
        shown = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(shown) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Returns the tokens of a text that goes on: with those that begin a text, without those that end one."""
    if isinstance(tokenizer, TextTokenizer):
        [tokens] = tokenizer.encode_batch([prompt], add_special_tokens=False)
        return [*tokenizer.affixes[0], *tokens]
    encoded = tokenizer.encode(prompt)
    return list(getattr(encoded, "ids", encoded))


def end_tokens(tokenizer: Any) -> Collection[int]:
    """Returns the tokens that end a text."""
    if hasattr(tokenizer, "token_to_id"):  # the tokenizers library's
        ids = [tokenizer.token_to_id(name) for name in USUAL_NAMES["eos"]]
    else:
        ids = [getattr(tokenizer, "eos_id", None), getattr(tokenizer, "eos_token_id", None)]
    return {number for number in ids if isinstance(number, int)}


def num_tokens_of(tokenizer: Any) -> int | None:
    """Returns one more than the largest token of a tokenizer; None where it does not say."""
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer.vocab_size
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}  # tokenizers' and transformers'
    return max(vocabulary.values(), default=-1) + 1 or None


def _reject_foreign_tokens(model: nn.Module, tokens: list[int]) -> None:
    """Rejects a prompt with tokens that the model has no embedding for: its tokenizer is another model's."""
    if isinstance(model, Model):
        size = model.settings.get("vocab_size")
    else:
        size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int) and max(tokens) >= size:
        raise DataError(
            f"The prompt has the token {max(tokens)}, but the model knows {size} tokens (0 … {size - 1}). Name the "
            "tokenizer that it was trained with: --tokenizer."
        )


def _own_tokenizer(place: Path, *, is_folder: bool) -> Any:
    if is_folder:
        if any((place / name).is_file() for name in TOKENIZER_FILES):
            return load_tokenizer(place)
    else:
        config = read_config(find_run(place)[0])
        found = None if config is None else find_tokenizer(config)
        if found is not None:
            return found
    raise CheckpointError(f"{place} has no tokenizer that is known. Name one: --tokenizer tokenizer.json, or bytes.")
