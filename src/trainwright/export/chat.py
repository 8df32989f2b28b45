"""Answers in a chat: the prompt of a conversation, and the end of the assistant's turn. text.py generates the
answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.checkpoint.run_folder import find_run, read_config
from trainwright.data.chat import CHATML, PROBE, Message, find_turn_end, render_chat, render_prompt
from trainwright.data.tokenizer import TextTokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.export.huggingface import chat_template_of
from trainwright.export.text import Continuation
from trainwright.models.pretrained import CONFIG_FILE


@dataclass(frozen=True)
class ChatFormat:
    """The format of conversations as tokens, and the end of the assistant's turn in it."""

    tokenizer: Any
    renderer: Any
    """The tokenizer, or a copy of it as a transformers tokenizer, which applies templates."""
    template: str | None
    """Replaces the tokenizer's template; None keeps it, or ChatML if there is none."""
    stop_ids: frozenset[int]
    stop_texts: tuple[str, ...]
    """For templates whose end of a turn is not a token of the tokenizer."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Returns the tokens of a conversation with the beginning of the assistant's next turn."""
        return _prompt(self.renderer, messages, self.template)

    def answer(self, model: nn.Module, messages: Sequence[Message], **options: Any) -> Continuation:
        """Returns the assistant's next turn; `options` are those of `Continuation`."""
        stop_texts = (*self.stop_texts, *options.pop("stop_texts", ()))
        return Continuation(
            model,
            self.tokenizer,
            self.prompt(messages),
            stop_ids=self.stop_ids,
            stop_texts=stop_texts,
            **options,
        )


def chat_format(tokenizer: Any, template: str | None = None) -> ChatFormat:
    """Returns the format of a tokenizer's chats; `template` is a Jinja template that replaces the tokenizer's.

    The end of a turn is the template's output after the assistant's text: its first special token or, without one, the
    text.
    """
    renderer = _renderer(tokenizer)
    question = {"role": "user", "content": PROBE}
    asked = _prompt(renderer, [question], template)
    try:
        whole = _conversation(renderer, [question, {"role": "assistant", "content": PROBE}], template)
    except DataError:  # such as a template that only renders prompts; the tokenizer's EOS token remains
        return ChatFormat(tokenizer, renderer, template, frozenset(), ())
    stop_ids, stop_texts = find_turn_end(asked, whole, special_ids=_special_ids(renderer), decode=tokenizer.decode)
    return ChatFormat(tokenizer, renderer, template, stop_ids, stop_texts)


def find_chat_template(run_or_folder: Path, *, trust: bool = False) -> str | None:
    """Returns the template that the data of a run sets (`chat_template`); None for an exported folder."""
    if (run_or_folder / CONFIG_FILE).is_file():
        return None  # part of its tokenizer
    config = read_config(find_run(run_or_folder)[0], trust=trust)
    return None if config is None else chat_template_of(config)


def _renderer(tokenizer: Any) -> Any:
    """Returns an object that applies chat templates for a tokenizer, because the tokenizers library has no
    templates."""
    if isinstance(tokenizer, TextTokenizer) or hasattr(tokenizer, "apply_chat_template"):
        return tokenizer
    if not hasattr(tokenizer, "token_to_id"):
        raise ConfigError(
            f"A chat needs a tokenizer of a file or a folder, of transformers or of tokenizers, not a "
            f"{type(tokenizer).__name__}. Set one: --tokenizer."
        )
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(
            "Chat templates need transformers, which is not installed. Install it: pip install "
            "'trainwright[transformers]'."
        ) from error
    make: Any = PreTrainedTokenizerFast  # has no types
    return make(tokenizer_object=tokenizer)


def _prompt(tokenizer: Any, messages: Sequence[Message], template: str | None) -> list[int]:
    if isinstance(tokenizer, TextTokenizer):
        return render_prompt(messages, tokenizer, chat_template=template)
    return _apply(tokenizer, messages, template, add_generation_prompt=True)


def _conversation(tokenizer: Any, messages: Sequence[Message], template: str | None) -> list[int]:
    if isinstance(tokenizer, TextTokenizer):
        return render_chat(messages, tokenizer, train_on="all", chat_template=template).ids
    return _apply(tokenizer, messages, template, add_generation_prompt=False)


def _apply(tokenizer: Any, messages: Sequence[Message], template: str | None, **options: Any) -> list[int]:
    """Applies the template of a tokenizer of transformers."""
    own = getattr(tokenizer, "chat_template", None)
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            list(messages), chat_template=template or own or CHATML, tokenize=True, return_dict=False, **options
        )
    except Exception as error:  # of Jinja, and of the template itself
        raise DataError(f"The chat template cannot render the messages: {type(error).__name__}: {error}") from error
    return ids


def _special_ids(tokenizer: Any) -> frozenset[int]:
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer.special_ids
    added = tokenizer.added_tokens_decoder  # all_special_ids has only those with a role, such as eos
    return frozenset({*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)})
