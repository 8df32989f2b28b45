"""Text from a model: encodes prompts, and decodes tokens to text of complete characters.

`stream_text` yields the continuation of one prompt while it is generated; `complete_texts` returns those of many. The
prompt of a chat comes from chat.py.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint.run_folder import find_run, read_config
from trainwright.data.order import mix_seed
from trainwright.data.tokenizer import USUAL_NAMES, TextTokenizer, load_tokenizer
from trainwright.errors import CheckpointError, ConfigError, DataError
from trainwright.export.huggingface import TOKENIZER_FILES, find_tokenizer
from trainwright.export.load import load_checkpoint
from trainwright.models.generation import (
    generate,
    reject_non_decoder,
    room_after,
    sample_completions,
    vocabulary_size,
)
from trainwright.models.model import AutoModel
from trainwright.models.pretrained import CONFIG_FILE

DEFAULT_MAX_NEW_TOKENS = 200

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoders return it for bytes that are not a complete character."""


def load_text_model(
    run_or_folder: str | Path,
    *,
    step: int | str = "latest",
    weights: str | None = None,
    device: torch.device | str = "cpu",
    tokenizer: str | None = None,
    trust: bool = False,
) -> tuple[nn.Module, Any]:
    """Returns the model of a run or of a folder in Hugging Face's layout, and its tokenizer.

    The default tokenizer is that of the run's data or collator, or the one in the folder; `tokenizer` names another (a
    tokenizer.json, a folder with one, or "bytes"). `step`, `weights` and `trust` are those of `load_checkpoint`.
    """
    path = Path(run_or_folder)
    is_folder = (path / CONFIG_FILE).is_file()
    if is_folder and step != "latest":
        raise ConfigError(f"{path} is a model folder, which has no steps. Remove --step, or pass the run folder.")
    if is_folder and weights is not None:
        problem = f"{path} is a model folder, which has one set of weights"
        raise ConfigError(f"{problem}. Remove --weights, or pass the run folder.")
    model: nn.Module
    if is_folder:
        model = AutoModel.from_pretrained(path, device=device).eval()
    else:
        model = load_checkpoint(path, step, weights=weights, device=device, trust=trust)
    reject_non_decoder(model)  # before the tokenizer, which a model for images does not have
    if tokenizer is not None:
        return model, load_tokenizer(tokenizer)
    return model, _default_tokenizer(path, is_folder=is_folder, trust=trust)


def stream_text(
    model: nn.Module, tokenizer: Any, prompt: str, *, max_new_tokens: int | None = None, **sampling: Any
) -> Iterator[str]:
    """Yields the continuation of a prompt in chunks of complete characters, while it is generated.

    The arguments are those of `Continuation`.
    """
    yield from Continuation(model, tokenizer, prompt, max_new_tokens=max_new_tokens, **sampling)


class Continuation:
    """The continuation of a prompt: an iterator of chunks of complete characters, generated while it is read.

    `prompt` is text or tokens. The default of `max_new_tokens` is 200, or the number of positions that the model has
    left. `sampling` has the further arguments of generation.py's `generate`: temperature, top_k, top_p, generator. The
    text ends at the tokenizer's end token, one of `stop_ids`, or before one of `stop_texts`. A token that the tokenizer
    does not have, which a model with a larger vocabulary may sample, is shown by its number: <50300>.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop_ids: Collection[int] = (),
        stop_texts: Sequence[str] = (),
        **sampling: Any,
    ) -> None:
        [self.prompt], max_new_tokens = _prepare(model, tokenizer, [prompt], max_new_tokens)
        self.num_tokens = 0
        """The generated tokens so far, without the one that ends the text."""
        self.is_stopped = False
        """True once the text has ended at a token or text that stops it, False if at `max_new_tokens`."""
        self._text = TextStream(tokenizer, self.prompt)
        self._stop_ids = {*end_tokens(tokenizer), *stop_ids}
        self._stop_texts = [text for text in stop_texts if text]
        self._steps = generate(
            model,
            torch.tensor([self.prompt], device=_device_of(model)),
            max_new_tokens=max_new_tokens,
            stop_ids=self._stop_ids,
            **sampling,
        )
        self._chunks = self._generate()

    def __iter__(self) -> Iterator[str]:
        return self._chunks

    def close(self) -> None:
        """Ends the generation, and returns the model to its previous mode."""
        self._chunks.close()
        self._steps.close()

    def _generate(self) -> Generator[str, None, None]:
        held = ""  # may be the beginning of a text that stops
        for chunk in self._chunks_until_stop_id():
            held += chunk
            start = min((at for stop in self._stop_texts if (at := held.find(stop)) >= 0), default=None)
            if start is not None:
                self.is_stopped = True
                self._steps.close()
                if held[:start]:
                    yield held[:start]
                return
            ready = len(held) - _length_of_beginning(held, self._stop_texts)
            if ready:
                yield held[:ready]
            held = held[ready:]
        if held:
            yield held

    def _chunks_until_stop_id(self) -> Iterator[str]:
        for [token] in self._steps:
            if int(token) in self._stop_ids:
                self.is_stopped = True
                break
            self.num_tokens += 1
            chunk = self._text.push(int(token))
            if chunk:
                yield chunk
        self._steps.close()
        rest = self._text.finish()
        if rest:
            yield rest


def _length_of_beginning(text: str, stops: Sequence[str]) -> int:
    """Returns the length of the longest end of a text with which one of `stops` begins."""
    longest = min(len(text), max(map(len, stops), default=0))
    return next((size for size in range(longest, 0, -1) if any(stop.startswith(text[-size:]) for stop in stops)), 0)


@dataclass(frozen=True)
class CompletedText:
    """The continuation of one prompt of `complete_texts`."""

    text: str
    num_tokens: int
    """The generated tokens, without the one that ends the text."""
    is_stopped: bool
    """True if the text ended at the tokenizer's end token, False if at `max_new_tokens`."""


def complete_texts(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    seed: int = 0,
    max_new_tokens: int | None = None,
    batch_size: int = 16,
    **sampling: Any,
) -> Iterator[CompletedText]:
    """Yields the continuation of each prompt, in their order; `batch_size` prompts are generated at a time.

    The text for a prompt depends on the prompt, `seed` and the number of the prompt, not on `batch_size`. The default
    of `max_new_tokens` is 200, or the number of positions that the model has left after the longest prompt. `sampling`
    has the further arguments of generation.py's `sample_completions`: temperature, top_k, top_p, repetition_penalty.
    """
    rows, max_new_tokens = _prepare(model, tokenizer, prompts, max_new_tokens)
    stops = end_tokens(tokenizer)
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        made = sample_completions(
            model,
            batch,
            seeds=[mix_seed(seed, start + number) for number in range(len(batch))],
            max_new_tokens=max_new_tokens,
            stop_ids=stops,
            **sampling,
        )
        for prompt, tokens, is_stopped in zip(batch, made.rows(), made.is_stopped.tolist(), strict=True):
            kept = tokens[:-1] if is_stopped else tokens
            stream = TextStream(tokenizer, prompt)
            text = "".join(map(stream.push, kept)) + stream.finish()
            yield CompletedText(text, len(kept), is_stopped)


def seeded_generator(device: torch.device, seed: int | None) -> torch.Generator:
    """Returns a generator with a seed from 0 to 2⁶⁴ − 1; with None, a different one each time."""
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def _prepare(
    model: nn.Module, tokenizer: Any, prompts: Sequence[str | Sequence[int]], max_new_tokens: int | None
) -> tuple[list[list[int]], int]:
    """Returns the tokens of each prompt, and the maximum number of new tokens."""
    reject_non_decoder(model)
    rows = []
    for number, prompt in enumerate(prompts):
        tokens = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            which = f"prompt {number} (counted from 0)" if len(prompts) > 1 else "prompt"
            raise DataError(f"The {which} has no tokens. Pass at least one character.")
        _reject_foreign_tokens(model, tokens)
        rows.append(tokens)
    if max_new_tokens is None:
        room = room_after(model, max(map(len, rows)))
        # generate raises for 0
        max_new_tokens = DEFAULT_MAX_NEW_TOKENS if not room else min(DEFAULT_MAX_NEW_TOKENS, room)
    return rows, max_new_tokens


def _device_of(model: nn.Module) -> torch.device:
    return next((one.device for one in model.parameters()), torch.device("cpu"))


class TextStream:
    """Decodes tokens one by one; text that does not end at a complete character is buffered.

    A token may contain only some bytes of a character, and may decode differently after another token (with a leading
    space), so each chunk is the difference of two decodings. Both start at the previous chunk, so the cost per token
    does not depend on the length of the text.
    """

    def __init__(self, tokenizer: Any, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._size = num_tokens_of(tokenizer)
        self._tokens = list(before)
        self._start = 0  # where both decodings start
        self._shown = len(self._tokens)  # up to where the text has been returned

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is complete now, which may be empty."""
        if self._size is not None and token >= self._size:
            return self.finish() + f"<{token}>"
        self._tokens.append(token)
        text = self._pending()
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def finish(self) -> str:
        """Returns the buffered text."""
        text = self._pending()
        # Decode later tokens after this chunk, unless it ends inside a character.
        self._start = len(self._tokens) if text.endswith(INCOMPLETE) else self._shown
        self._shown = len(self._tokens)
        return text

    def _pending(self) -> str:
        shown = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(shown) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Returns the tokens of a prompt, with the start tokens and without the end tokens of the tokenizer."""
    if isinstance(tokenizer, TextTokenizer):
        [tokens] = tokenizer.encode_batch([prompt], add_special_tokens=False)
        return [*tokenizer.affixes[0], *tokens]
    encoded = tokenizer.encode(prompt)
    return list(getattr(encoded, "ids", encoded))


def end_tokens(tokenizer: Any) -> Collection[int]:
    """Returns the tokens that end a text."""
    if hasattr(tokenizer, "token_to_id"):  # of the tokenizers library
        ids = [tokenizer.token_to_id(name) for name in USUAL_NAMES["eos"]]
    else:
        ids = [getattr(tokenizer, "eos_id", None), getattr(tokenizer, "eos_token_id", None)]
    return {number for number in ids if isinstance(number, int)}


def num_tokens_of(tokenizer: Any) -> int | None:
    """Returns one more than the largest token of a tokenizer; None if it is unknown."""
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer.vocab_size
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}  # of tokenizers and transformers
    return max(vocabulary.values(), default=-1) + 1 or None


def _reject_foreign_tokens(model: nn.Module, tokens: list[int]) -> None:
    """Rejects a prompt with tokens that the model has no embedding for."""
    size = vocabulary_size(model)
    if size is not None and max(tokens) >= size:
        raise DataError(
            f"The prompt has the token {max(tokens)}, but the model has {size} tokens (0 … {size - 1}). Set the "
            "tokenizer that it was trained with: --tokenizer."
        )


def _default_tokenizer(path: Path, *, is_folder: bool, trust: bool) -> Any:
    if is_folder:
        if any((path / name).is_file() for name in TOKENIZER_FILES):
            return load_tokenizer(path)
    else:
        config = read_config(find_run(path)[0], trust=trust)
        found = None if config is None else find_tokenizer(config)
        if found is not None:
            return found
    raise CheckpointError(f"{path} has no known tokenizer. Set one: --tokenizer tokenizer.json, or bytes.")
