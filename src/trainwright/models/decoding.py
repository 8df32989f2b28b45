"""Reads tokens with a decoder and returns the logits of the next one: with a cache of keys and values, or without.

With a cache, each token takes a forward over one token; without, a forward over all previous tokens. Rows of a batch
may have prompts of different lengths. generation.py selects tokens from the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.backends import pick_backend
from trainwright.backends.backend import Recording
from trainwright.errors import ConfigError, DataError


class LayerCache:
    """The keys and values [B, K, S, W] of one layer, in memory that is allocated once."""

    def __init__(self, owner: KeyValueCache) -> None:
        self._owner = owner
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of tokens of each row before the current ones."""
        return self._owner.length

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of the next tokens, and returns views of all keys and values that attention
        reads."""
        owner = self._owner
        if self.keys is None or self.values is None:
            shape = (*keys.shape[:2], owner.max_length, keys.shape[3])
            # Zeros, because attention multiplies masked values by 0, and 0 × nan is nan.
            self.keys, self.values = keys.new_zeros(shape), values.new_zeros(shape)
        if owner.lengths is not None:
            rows = torch.arange(len(keys), device=keys.device)
            self.keys[rows, :, owner.lengths] = keys[:, :, 0].to(self.keys.dtype)
            self.values[rows, :, owner.lengths] = values[:, :, 0].to(self.values.dtype)
            return self.keys[:, :, : owner.num_visible], self.values[:, :, : owner.num_visible]
        end = owner.length + keys.shape[2]
        if end > owner.max_length:
            raise DataError(f"The cache has space for {owner.max_length} tokens, but got {end}. Make it larger.")
        self.keys[:, :, owner.length : end] = keys
        self.values[:, :, owner.length : end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]

    def load(self, source: LayerCache, *, copies: int) -> None:
        """Copies the tokens of another cache, each of whose rows becomes `copies` rows."""
        assert source.keys is not None
        assert source.values is not None
        if self.keys is None or self.values is None:
            num_rows, num_heads, _, width = source.keys.shape
            shape = (num_rows * copies, num_heads, self._owner.max_length, width)
            self.keys, self.values = source.keys.new_zeros(shape), source.values.new_zeros(shape)
        length = source.length
        for own, theirs in ((self.keys, source.keys), (self.values, source.values)):
            own[:, :, :length] = theirs[:, :, :length].repeat_interleave(copies, dim=0)


class KeyValueCache:
    """The keys and values of every layer of a decoder for the tokens so far.

    In a model's `forward(..., cache=cache)`, the tokens follow the first `length` tokens; it passes each layer its
    `layer(number)`, and calls `advance` at the end.

    Rows have the same length unless `lengths` [B] is set. Each call then has one token per row, which follows the first
    `lengths[row]` tokens; the caller sets `lengths` and `num_visible`, so code with static shapes reads no changing
    number.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self.lengths: Tensor | None = None
        self.num_visible = max_length
        """The number of positions that attention reads, if rows have their own lengths."""
        self._layers: list[LayerCache] = []

    def layer(self, number: int) -> LayerCache:
        """Returns the cache of a layer; the first calls must be in order."""
        if number == len(self._layers):
            self._layers.append(LayerCache(self))
        return self._layers[number]

    def advance(self, num_tokens: int) -> None:
        """Counts tokens that all layers have added."""
        if self.lengths is None:
            self.length += num_tokens

    def load(self, source: KeyValueCache, *, copies: int = 1) -> None:
        """Replaces the contents with those of another cache, each of whose rows becomes `copies` rows."""
        self.length = source.length
        for number, layer in enumerate(source._layers):
            self.layer(number).load(layer, copies=copies)

    def visible_keys(self, input_ids: Tensor) -> Tensor | None:
        """Returns the mask for the next tokens [B, S], True where a query attends to a key; it broadcasts to all heads.

        None if no mask is needed: with an empty cache attention is causal, and a single token attends to all.
        """
        if self.lengths is not None:
            positions = torch.arange(self.num_visible, device=input_ids.device)
            return (positions <= self.lengths[:, None])[:, None, None]
        num_tokens = input_ids.shape[1]
        if not self.length or num_tokens == 1:
            return None
        ones = torch.ones(num_tokens, self.length + num_tokens, dtype=torch.bool, device=input_ids.device)
        return ones.tril(diagonal=self.length)


class TokenReader(Protocol):
    """Reads prompts, then one token of each row at a time, and returns the logits [B, vocabulary] of the next token."""

    def start(self, ids: Tensor, lengths: Sequence[int], *, copies: int, max_new_tokens: int) -> Tensor:
        """Reads prompts [P, S], padded on the right, of these lengths; each becomes `copies` rows."""

    def read(self, tokens: Tensor) -> Tensor:
        """Reads the next token [B] of each row."""


def token_reader(model: nn.Module, *, use_cache: bool = True) -> TokenReader:
    """Returns the fastest reader for a model: with this package's cache, with that of transformers, or without a
    cache."""
    parameters = inspect.signature(model.forward).parameters
    is_split = not getattr(getattr(model, "sequence", None), "is_whole", True)  # over ranks, each with some keys
    if not use_cache or is_split:
        return UncachedReader(model)
    if "cache" in parameters:
        return CachedReader(model)
    if {"past_key_values", "use_cache", "attention_mask"} <= parameters.keys():
        return TransformersReader(model)
    return UncachedReader(model)


class UncachedReader:
    """Reads all tokens again for each new one. Padding is on the right, which a causal model does not attend to."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def start(self, ids: Tensor, lengths: Sequence[int], *, copies: int, max_new_tokens: int) -> Tensor:
        """Reads prompts [P, S], padded on the right, of these lengths; each becomes `copies` rows."""
        self._ids = ids.repeat_interleave(copies, dim=0)
        self._rows = torch.arange(len(self._ids), device=ids.device)
        self._lengths = _row_lengths(lengths, copies=copies, device=ids.device)
        return self._forward()

    def read(self, tokens: Tensor) -> Tensor:
        """Reads the next token [B] of each row."""
        self._ids = F.pad(self._ids, (0, 1))
        self._ids[self._rows, self._lengths] = tokens
        self._lengths = self._lengths + 1
        return self._forward()

    def _forward(self) -> Tensor:
        return _logits_at(self._model, self._ids, self._lengths - 1)


class CachedReader:
    """Reads with a KeyValueCache, for models whose forward accepts one. Attention reads only the used part of it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def start(self, ids: Tensor, lengths: Sequence[int], *, copies: int, max_new_tokens: int) -> Tensor:
        """Reads prompts [P, S], padded on the right, of these lengths; each becomes `copies` rows."""
        num_positions = ids.shape[1] + max_new_tokens
        self._cache = KeyValueCache(ids.shape[1] if copies > 1 else num_positions)
        logits = _read_prompts(self._model, ids, lengths, self._cache)
        if copies > 1:
            prompts, self._cache = self._cache, KeyValueCache(num_positions)
            self._cache.load(prompts, copies=copies)
        if min(lengths) != max(lengths):
            self._cache.lengths = _row_lengths(lengths, copies=copies, device=ids.device)
            self._cache.num_visible = max(lengths)
        return logits.repeat_interleave(copies, dim=0)

    def read(self, tokens: Tensor) -> Tensor:
        """Reads the next token [B] of each row."""
        cache = self._cache
        if cache.lengths is None:
            return _one_token(self._model, tokens, cache)
        cache.num_visible += 1
        logits = _one_token(self._model, tokens, cache)
        cache.lengths = cache.lengths + 1
        return logits


class StaticReader:
    """Reads one token with static shapes: compiled, and on a GPU captured as a CUDA graph.

    The memory of keys and values and the compiled code are kept between calls: reuse one object for many batches. The
    number of positions is rounded up to a multiple of `length_multiple`, so prompts of other lengths use the same code.
    `compiler` is a backend of torch.compile; None does not compile, for a GPU without a compiler.
    """

    def __init__(
        self, model: nn.Module, *, compiler: str | Callable[..., Any] | None = "inductor", length_multiple: int = 128
    ) -> None:
        if "cache" not in inspect.signature(model.forward).parameters:
            raise ConfigError(
                f"{type(model).__name__} cannot be read with static shapes: its forward does not accept a cache. Use a "
                "shipped decoder, such as llama or gpt2, or remove the reader."
            )
        self._model = model
        self._length_multiple = length_multiple
        self._forward: Callable[..., Tensor] = _one_token
        if compiler is not None:
            self._forward = torch.compile(_one_token, backend=compiler, dynamic=False)
        self._cache: KeyValueCache | None = None
        self._recording: Recording | None = None
        self._recorded_for: tuple[Any, ...] = ()

    def start(self, ids: Tensor, lengths: Sequence[int], *, copies: int, max_new_tokens: int) -> Tensor:
        """Reads prompts [P, S], padded on the right, of these lengths; each becomes `copies` rows."""
        if any(hasattr(one, "device_mesh") for one in self._model.parameters()):  # DTensors
            raise ConfigError(
                f"The parameters of {type(self._model).__name__} are sharded, and gathered for each use into other "
                "memory, which a captured step cannot follow. Remove the reader."
            )
        prompts = KeyValueCache(ids.shape[1])
        logits = _read_prompts(self._model, ids, lengths, prompts)
        num_positions = -(-(ids.shape[1] + max_new_tokens) // self._length_multiple) * self._length_multiple
        # A captured step reads parameters and cache at their addresses, in the precision of its capture.
        is_autocast = torch.is_autocast_enabled(ids.device.type)
        dtype = torch.get_autocast_dtype(ids.device.type) if is_autocast else None
        addresses = tuple(one.data_ptr() for one in self._model.parameters())
        recorded_for = (len(ids) * copies, num_positions, ids.device, logits.dtype, dtype, addresses)
        row_lengths = _row_lengths(lengths, copies=copies, device=ids.device)
        if self._cache is None or self._cache.lengths is None or recorded_for != self._recorded_for:
            self._cache, self._recording, self._recorded_for = KeyValueCache(num_positions), None, recorded_for
            self._cache.lengths = row_lengths
        else:
            self._cache.lengths.copy_(row_lengths)
        self._cache.load(prompts, copies=copies)
        self._cache.length = 0  # not read here; a constant, so that compiled code does not depend on it
        return logits.repeat_interleave(copies, dim=0)

    def read(self, tokens: Tensor) -> Tensor:
        """Reads the next token [B] of each row."""
        assert self._cache is not None
        assert self._cache.lengths is not None
        if self._recording is None:
            backend = pick_backend(str(tokens.device))
            # Repeating it writes the same keys and values to the same positions.
            with backend.warming_up():
                for _ in range(backend.num_warm_ups):
                    self._run([tokens])
            self._recording, [logits] = backend.record(self._run, [tokens])
        else:
            [logits] = self._recording.replay([tokens])
        self._cache.lengths.add_(1)
        return logits

    def _run(self, inputs: list[Tensor]) -> list[Tensor]:
        [tokens] = inputs
        keeps_casts = torch.is_autocast_cache_enabled()
        # Autocast would keep rounded copies of the weights, and a captured step would read those of its first run.
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.no_grad():
                return [self._forward(self._model, tokens, self._cache)]
        finally:
            torch.set_autocast_cache_enabled(keeps_casts)


class TransformersReader:
    """Reads with the cache of a model of transformers, which needs padding on the left."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._accepted = inspect.signature(model.forward).parameters

    def start(self, ids: Tensor, lengths: Sequence[int], *, copies: int, max_new_tokens: int) -> Tensor:
        """Reads prompts [P, S], padded on the right, of these lengths; each becomes `copies` rows."""
        ids = ids.repeat_interleave(copies, dim=0)
        self._past = self._mask = None
        self._lengths = _row_lengths(lengths, copies=copies, device=ids.device)
        if min(lengths) != max(lengths):
            positions = torch.arange(ids.shape[1], device=ids.device) - (ids.shape[1] - self._lengths)[:, None]
            ids = ids.gather(1, positions.clamp(min=0))
            self._mask = (positions >= 0).long()
            return self._forward(ids, position_ids=positions.clamp(min=0))
        return self._forward(ids)

    def read(self, tokens: Tensor) -> Tensor:
        """Reads the next token [B] of each row."""
        positions = self._lengths[:, None]
        self._lengths = self._lengths + 1
        if self._mask is None:
            return self._forward(tokens[:, None])
        self._mask = torch.cat((self._mask, torch.ones_like(positions)), dim=1)
        return self._forward(tokens[:, None], position_ids=positions)

    def _forward(self, ids: Tensor, **options: Tensor) -> Tensor:
        wanted: dict[str, Any] = {**options, "logits_to_keep": 1}
        given = {name: value for name, value in wanted.items() if name in self._accepted}
        outputs: Any = self._model(
            input_ids=ids, attention_mask=self._mask, past_key_values=self._past, use_cache=True, **given
        )
        self._past = outputs.get("past_key_values")
        if self._past is None:
            raise ConfigError(
                f"{type(self._model).__name__} returned no cache of keys and values. Pass use_cache=False."
            )
        logits: Tensor = outputs["logits"][:, -1]
        return logits


def _read_prompts(model: nn.Module, ids: Tensor, lengths: Sequence[int], cache: KeyValueCache) -> Tensor:
    """Reads prompts [P, S] into an empty cache. The head is applied to the last token of each row only."""
    last = torch.tensor([length - 1 for length in lengths], device=ids.device)
    return _logits_at(model, ids, last, cache=cache)


def _one_token(model: nn.Module, tokens: Tensor, cache: KeyValueCache) -> Tensor:
    """Reads one token [B] of each row: returns the logits [B, vocabulary]."""
    logits: Tensor = model(input_ids=tokens[:, None], cache=cache)["logits"]
    return logits[:, -1]


def _logits_at(model: nn.Module, ids: Tensor, positions: Tensor, **options: Any) -> Tensor:
    """Returns the logits [B, vocabulary] after the token at one position [B] of each row."""
    if "logits_at" in inspect.signature(model.forward).parameters:
        only: Tensor = model(input_ids=ids, logits_at=positions, **options)["logits"]
        return only[:, 0]
    outputs = model(input_ids=ids, **options)
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs["logits"]
    # Virtual tokens of peft come before those of the row.
    return logits[torch.arange(len(ids), device=ids.device), positions + logits.shape[1] - ids.shape[1]]


def _row_lengths(lengths: Sequence[int], *, copies: int, device: torch.device) -> Tensor:
    return torch.tensor(lengths, device=device).repeat_interleave(copies)
