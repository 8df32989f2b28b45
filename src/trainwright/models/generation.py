"""Generates tokens with a decoder, with a cache of the keys and values of earlier tokens.

With the cache a token costs one pass over itself; without it, a pass over all tokens before it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import ConfigError, DataError
from trainwright.models.layers.settings import check_ids
from trainwright.user_code.locations import is_user_code


class LayerCache:
    """The keys and values [B, K, S, W] of one layer, in memory that is allocated once, at the first tokens."""

    def __init__(self, max_length: int) -> None:
        self.length = 0
        self._max_length = max_length
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of the next tokens and returns all so far, as views."""
        end = self.length + keys.shape[2]
        if end > self._max_length:
            raise DataError(f"The cache has room for {self._max_length} tokens, but got {end}. Make it larger.")
        if self._keys is None or self._values is None:
            shape = (*keys.shape[:2], self._max_length, keys.shape[3])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KeyValueCache:
    """The keys and values of every layer of a decoder for the tokens so far.

    A model's `forward(..., cache=cache)` treats its tokens as those that follow the first `length`, passes each layer
    its `layer(number)`, and calls `advance` at the end. All rows of a batch have the same length.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._layers: list[LayerCache] = []

    def layer(self, number: int) -> LayerCache:
        """Returns the cache of a layer; the first calls come in order."""
        if number == len(self._layers):
            self._layers.append(LayerCache(self.max_length))
        return self._layers[number]

    def advance(self, num_tokens: int) -> None:
        """Counts tokens that all layers have added."""
        self.length += num_tokens

    def visible_keys(self, input_ids: Tensor) -> Tensor | None:
        """Returns the mask [S, kept + S] for the next tokens [B, S], True where a query may see a key.

        None if no mask is needed: with an empty cache attention is causal, and a single token sees all.
        """
        num_tokens = input_ids.shape[1]
        if not self.length or num_tokens == 1:
            return None
        ones = torch.ones(num_tokens, self.length + num_tokens, dtype=torch.bool, device=input_ids.device)
        return ones.tril(diagonal=self.length)


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    stop_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Yields the next token of each row, [B], `max_new_tokens` times, or until each row has stopped.

    `input_ids` are [B, S], without padding. A token is sampled from the `top_k` most likely (all, if None) and of those
    from the fewest with `top_p` of the probability; temperature 0 selects the most likely. After one of `stop_ids` a
    row yields it again. The model is in evaluation mode meanwhile.

    A model whose `forward` accepts a `cache` gets one; others process all tokens every time. More tokens than the model
    has positions for are rejected before the first.
    """
    reject_non_decoder(model)
    _check_sampling(temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=max_new_tokens)
    check_ids(input_ids)
    if not input_ids.shape[-1]:
        raise DataError("The prompt has no tokens. Pass at least one.")
    room = room_after(model, input_ids.shape[1])
    if room is not None and max_new_tokens > room:
        raise DataError(
            f"max_new_tokens is {max_new_tokens}, but the model has {_max_positions(model)} positions, and the prompt "
            f"has {input_ids.shape[1]} tokens: {room} can follow. Use fewer, or shorten the prompt."
        )
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=input_ids.device)
    cache = None
    is_split = not getattr(getattr(model, "sequence", None), "is_whole", True)  # over ranks, each with some keys
    if use_cache and not is_split and "cache" in inspect.signature(model.forward).parameters:
        cache = KeyValueCache(input_ids.shape[1] + max_new_tokens)
    was_training = model.training
    model.eval()
    try:
        stopped = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        chosen = input_ids[:, -1]
        for _ in range(max_new_tokens):
            logits = _next_logits(model, input_ids, cache=cache)
            drawn = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            chosen = torch.where(stopped, chosen, drawn)
            stopped = stopped | torch.isin(chosen, stops)
            input_ids = torch.cat((input_ids, chosen[:, None]), dim=1)
            yield chosen
            if len(stops) and bool(stopped.all()):
                return
    finally:
        model.train(was_training)


def sample(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Samples one token per row of the logits [B, vocabulary]: returns [B]."""
    if temperature <= 0:
        return logits.argmax(dim=-1)
    candidates = logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])
    values, tokens = logits.topk(candidates, dim=-1)  # the most likely first
    probabilities = (values / temperature).softmax(dim=-1)
    if top_p is not None:
        # Drops a token if those before it have enough probability; the most likely is always kept.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    column = torch.multinomial(probabilities, 1, generator=generator)
    return tokens.gather(-1, column).squeeze(-1)


def _next_logits(model: nn.Module, input_ids: Tensor, *, cache: KeyValueCache | None) -> Tensor:
    """Returns the logits [B, vocabulary] of the token after all those [B, S] so far, in float32."""
    if cache is not None:
        outputs: Any = model(input_ids=input_ids[:, cache.length :], cache=cache)
    else:
        outputs = model(input_ids=input_ids)
    logits: Tensor = outputs["logits"]
    return logits[:, -1].float()


def room_after(model: nn.Module, num_tokens: int) -> int | None:
    """Returns how many tokens a model can generate after these; None without a limit."""
    positions = _max_positions(model)
    # The last generated token is not read and needs no position.
    return None if positions is None else max(0, positions - num_tokens + 1)


def _max_positions(model: nn.Module) -> int | None:
    """Returns the number of positions of a model: our models' attribute, or that of transformers' config."""
    config = getattr(model, "config", None)
    found = getattr(model, "max_positions", None) or getattr(config, "max_position_embeddings", None)
    return int(found) if found else None


def reject_non_decoder(model: nn.Module) -> None:
    """Rejects a model that does not predict the next token, such as one with an encoder or for images."""
    kind, parameters = type(model), inspect.signature(model.forward).parameters
    accepts_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    is_transformers = kind.__module__.startswith("transformers.")
    is_shipped = any(not is_user_code(one) and "forward" in vars(one) for one in kind.__mro__)
    if "decoder_input_ids" in parameters or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        reason = "it has an encoder"
    elif "input_ids" not in parameters and not accepts_any:
        reason = f"its forward has the parameters {', '.join(parameters) or 'none'}, not input_ids"
    elif (is_shipped and not hasattr(model, "generate")) or (is_transformers and not _can_generate(model)):
        reason = "it does not predict the next token"
    else:
        return
    raise ConfigError(
        f"{kind.__name__} cannot continue a text: {reason}. Use a decoder, such as llama, gpt2 or "
        "transformers:AutoModelForCausalLM."
    )


def _can_generate(model: Any) -> bool:
    return bool(getattr(model, "can_generate", lambda: True)())


def _check_sampling(*, temperature: float, top_k: int | None, top_p: float | None, max_new_tokens: int) -> None:
    if not _is_number(temperature) or temperature < 0:
        raise ConfigError(f"temperature is {temperature}. Use 0 for the most likely token, or more.")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ConfigError(f"top_k is {top_k}. Use a whole number of at least 1, or None for all tokens.")
    if top_p is not None and (not _is_number(top_p) or not 0.0 < top_p <= 1.0):
        raise ConfigError(f"top_p is {top_p}. Use a number above 0 and up to 1.")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}. Use a whole number of at least 0.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def append_tokens(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns `input_ids` [B, S] with `max_new_tokens` sampled tokens appended to each row.

    Each token is sampled from the `top_k` most likely (all, if None); temperature 0 selects the most likely. To get the
    tokens one by one, or to stop at some, use `generate`. Decoder models have it as their method `generate`.
    """
    chosen = generate(
        model, input_ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, generator=generator
    )
    return torch.cat((input_ids, *(tokens[:, None] for tokens in chosen)), dim=1)
