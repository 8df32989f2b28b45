"""Draws tokens from a decoder, one after the other, with a cache of the keys and values of those before.

With the cache a token costs one pass over itself; without one, a pass over all tokens before it.
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
    """The keys and values [B, K, S, W] of one layer, in memory that is taken once, at the first tokens."""

    def __init__(self, max_length: int) -> None:
        self.length = 0
        self._max_length = max_length
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of the next tokens and returns all so far, as views."""
        end = self.length + keys.shape[2]
        if end > self._max_length:
            raise DataError(f"The cache holds {self._max_length} tokens, but {end} are to be kept. Make it larger.")
        if self._keys is None or self._values is None:
            shape = (*keys.shape[:2], self._max_length, keys.shape[3])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KeyValueCache:
    """What a decoder remembers of the tokens that it has seen: the keys and values of every layer.

    A model's `forward(..., cache=cache)` treats its tokens as those that follow the first `length`, gives each layer
    its `layer(number)` to extend, and calls `advance` at the end. All rows of a batch have the same length.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._layers: list[LayerCache] = []

    def layer(self, number: int) -> LayerCache:
        """Returns the cache of a layer; layers come in order."""
        if number == len(self._layers):
            self._layers.append(LayerCache(self.max_length))
        return self._layers[number]

    def advance(self, num_tokens: int) -> None:
        """Counts tokens that all layers have kept."""
        self.length += num_tokens

    def visible_keys(self, input_ids: Tensor) -> Tensor | None:
        """Returns the mask [S, kept + S] for the next tokens [B, S], True where a query may see a key.

        None where none is needed: an empty cache leaves it to causality, and a single token sees all.
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
    """Yields the next token of each row, [B], again and again: `max_new_tokens` times, or until each row has stopped.

    `input_ids` are [B, S], without padding. A token is drawn from the `top_k` likeliest (all, if None) and of those
    from the fewest that hold `top_p` of the probability; temperature 0 takes the likeliest. A row that has drawn one
    of `stop_ids` yields it again from then on. The model is in evaluation mode meanwhile.

    A model whose `forward` takes a `cache` gets one; others see all tokens every time. More tokens than the model has
    positions for are rejected before the first.
    """
    reject_non_decoder(model)
    _check_sampling(temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=max_new_tokens)
    check_ids(input_ids)
    if not input_ids.shape[-1]:
        raise DataError("There is nothing to go on from: the prompt has no tokens. Give at least one.")
    room = room_after(model, input_ids.shape[1])
    if room is not None and max_new_tokens > room:
        raise DataError(
            f"max_new_tokens is {max_new_tokens}, but after the prompt's {input_ids.shape[1]} tokens the model, which "
            f"has {_max_positions(model)} positions, can make {room}. Ask for at most {room}"
            + (", or shorten the prompt." if room else ": shorten the prompt.")
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
    """Draws one token per row of the logits [B, vocabulary]: returns [B]."""
    if temperature <= 0:
        return logits.argmax(dim=-1)
    candidates = logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])
    values, tokens = logits.topk(candidates, dim=-1)  # the likeliest first
    probabilities = (values / temperature).softmax(dim=-1)
    if top_p is not None:
        # A token is left out where those before it hold enough already; the likeliest is always kept.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    place = torch.multinomial(probabilities, 1, generator=generator)
    return tokens.gather(-1, place).squeeze(-1)


def _next_logits(model: nn.Module, input_ids: Tensor, *, cache: KeyValueCache | None) -> Tensor:
    """Returns the logits [B, vocabulary] of the token after all those [B, S] so far, in float32."""
    if cache is not None:
        outputs: Any = model(input_ids=input_ids[:, cache.length :], cache=cache)
    else:
        outputs = model(input_ids=input_ids)
    logits: Tensor = outputs["logits"]
    return logits[:, -1].float()


def room_after(model: nn.Module, num_tokens: int) -> int | None:
    """Returns how many tokens a model can make after these; None where it has no limit."""
    positions = _max_positions(model)
    # The last token that is made is not read any more, and needs no position.
    return None if positions is None else max(0, positions - num_tokens + 1)


def _max_positions(model: nn.Module) -> int | None:
    """Returns how many tokens a model can see: our models' attribute, or what transformers' config says."""
    config = getattr(model, "config", None)
    found = getattr(model, "max_positions", None) or getattr(config, "max_position_embeddings", None)
    return int(found) if found else None


def reject_non_decoder(model: nn.Module) -> None:
    """Rejects a model that does not predict the next token, such as one with an encoder or one for images."""
    kind, parameters = type(model), inspect.signature(model.forward).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    is_shipped = any(not is_user_code(one) and "forward" in vars(one) for one in kind.__mro__)
    if "decoder_input_ids" in parameters or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        reason = "it has an encoder"
    elif "input_ids" not in parameters and not takes_any:
        reason = f"its forward takes {', '.join(parameters) or 'nothing'}, not input_ids"
    elif (is_shipped and not hasattr(model, "generate")) or _cannot_generate(model):
        reason = "it does not predict the next token"
    else:
        return
    raise ConfigError(
        f"{kind.__name__} cannot continue a text: {reason}. Use a decoder, such as llama, gpt2 or "
        "transformers:AutoModelForCausalLM."
    )


def _cannot_generate(model: nn.Module) -> bool:
    """Does transformers say of a class of its own that it does not generate?"""
    if not type(model).__module__.startswith("transformers."):
        return False
    asked: Any = getattr(model, "can_generate", lambda: True)
    return not asked()


def _check_sampling(*, temperature: float, top_k: int | None, top_p: float | None, max_new_tokens: int) -> None:
    if not _is_number(temperature) or temperature < 0:
        raise ConfigError(f"temperature is {temperature}. Use 0 for the likeliest token, or more.")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ConfigError(f"top_k is {top_k}. Use a whole number of at least 1, or leave it out for all tokens.")
    if top_p is not None and (not _is_number(top_p) or not 0.0 < top_p <= 1.0):
        raise ConfigError(f"top_p is {top_p}. Use a share above 0 and up to 1.")
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

    Each token is drawn from the `top_k` likeliest (all, if None); temperature 0 takes the likeliest. To have the
    tokens one by one, or to stop at some, use `generate`. Decoder models have it as their method `generate`.
    """
    chosen = generate(
        model, input_ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, generator=generator
    )
    return torch.cat((input_ids, *(tokens[:, None] for tokens in chosen)), dim=1)
