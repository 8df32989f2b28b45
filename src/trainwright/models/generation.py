"""Generates tokens with a decoder: `generate` yields them one by one, `sample_completions` returns those of a batch.

decoding.py reads the tokens and returns the logits of the next one, which is selected here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.backends import reads_at_once
from trainwright.errors import ConfigError, DataError
from trainwright.models.decoding import TokenReader, token_reader
from trainwright.models.layers.settings import check_ids
from trainwright.user_code.locations import is_user_code

CHECK_EVERY = 8
"""On devices where reading a value synchronizes, the number of tokens between two checks whether all rows have
ended."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings that select the next token."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 selects the most likely token."""
    top_k: int | None = None
    """The number of most likely tokens to sample from; None: all tokens."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this total probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that the row already contains, and multiplies negative ones (CTRL's rule)."""
    min_new_tokens: int = 0
    """The number of tokens before a stop token can be generated."""
    stop_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}. Use 0 for the most likely token, or more.")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ConfigError(f"top_k is {self.top_k}. Use a whole number of at least 1, or None for all tokens.")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0):
            raise ConfigError(f"top_p is {self.top_p}. Use a number above 0 and up to 1.")
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}. Use a whole number of at least 0.")
        if not _is_number(self.repetition_penalty) or self.repetition_penalty <= 0:
            raise ConfigError(
                f"repetition_penalty is {self.repetition_penalty}. Use 1 for none, or more to repeat less, such as 1.2."
            )
        if not isinstance(self.min_new_tokens, int) or not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {self.min_new_tokens}. Use a whole number from 0 to max_new_tokens, "
                f"{self.max_new_tokens}."
            )


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    min_new_tokens: int = 0,
    stop_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    reader: TokenReader | None = None,
) -> Generator[Tensor, None, None]:
    """Yields the next token of each row, [B], `max_new_tokens` times, or until each row has stopped.

    `input_ids` are [B, S], without padding. A token is sampled from the `top_k` most likely ones (all if None) and, of
    these, from the smallest set with probability `top_p`; temperature 0 selects the most likely. `repetition_penalty`
    and
    `min_new_tokens` are those of `Sampling`. After one of `stop_ids`, a row repeats it. The model is in evaluation mode
    during generation.

    A model whose `forward` accepts a `cache` receives one, and a transformers model uses its own; others process all
    tokens every time. `reader` is a `StaticReader` for this model. A number of tokens that exceeds the model's
    positions is rejected before the first token.
    """
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens,
        stop_ids=stop_ids,
    )
    reject_non_decoder(model)
    check_ids(input_ids)
    lengths = [input_ids.shape[1]] * len(input_ids)
    _check_room(model, lengths, max_new_tokens)
    uniforms = None
    if temperature > 0:

        def uniforms(step: int) -> Tensor:
            return torch.rand(len(input_ids), generator=generator, device=input_ids.device)

    reader = reader or token_reader(model, use_cache=use_cache)
    steps = _steps(reader, input_ids, lengths, sampling=sampling, uniforms=uniforms)
    was_training = model.training
    model.eval()
    try:
        for step in steps:
            yield step.tokens
            if len(stop_ids) and bool(step.is_stopped.all()):
                return
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class Completions:
    """The result of `sample_completions`; N rows are `num_return_sequences` for each prompt, in the prompts' order."""

    tokens: Tensor
    """[N, T]: the generated tokens, including the stop token, then `pad_id`."""
    mask: Tensor
    """[N, T], True for generated tokens, False for padding."""
    is_stopped: Tensor
    """[N], True for a row that ended at a stop token, False for one that ended at `max_new_tokens`."""
    log_probabilities: Tensor | None
    """[N, T], float32, 0 at padding; None unless requested."""

    def rows(self) -> list[list[int]]:
        """Returns the tokens of each row without padding."""
        lengths = self.mask.sum(dim=1).tolist()
        return [row[:length] for row, length in zip(self.tokens.tolist(), lengths, strict=True)]


@torch.no_grad()
def sample_completions(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seeds: Sequence[int] | None = None,
    num_return_sequences: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    min_new_tokens: int = 0,
    stop_ids: Collection[int] = (),
    pad_id: int = 0,
    log_probabilities: bool = False,
    use_cache: bool = True,
    reader: TokenReader | None = None,
    ended_rows: Callable[[Tensor], Tensor] | None = None,
    all_stopped: Callable[[bool], bool] = bool,
) -> Completions:
    """Samples continuations of prompts of any lengths, `num_return_sequences` for each, as one batch.

    `seeds` has one number per prompt, and is required unless `temperature` is 0. A row depends on its prompt, its seed
    and its number among the sequences of its prompt, but not on the other rows of the batch (except for rounding, which
    may differ in a larger batch). torch's generators are neither read nor changed.

    `log_probabilities` are those of the model at this temperature (at 1 if it is 0), before the penalty, `top_k` and
    `top_p`. The remaining arguments are those of `generate`. The model is in evaluation mode during generation; its
    previous mode is restored afterwards.

    `ended_rows` receives the tokens [N, T] so far and returns a mask [N] of finished rows, such as those that contain a
    stop text. It ends the generation of all rows, and marks no row as stopped.

    If forwards are collective, as with sharded parameters, all ranks must call the model the same number of times:
    `all_stopped` receives whether all rows of this rank have stopped, and returns whether those of all ranks have.
    Every rank must pass the same `max_new_tokens`.
    """
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens,
        stop_ids=stop_ids,
    )
    reject_non_decoder(model)
    _check_prompts(prompts, seeds, num_return_sequences, temperature)
    lengths = [len(prompt) for prompt in prompts]
    _check_room(model, lengths, max_new_tokens)
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
    input_ids = torch.tensor(padded, dtype=torch.long, device=device)
    uniforms = None
    if seeds is not None and temperature > 0:
        numbers = uniform_numbers(seeds, num_return_sequences, max_new_tokens).to(device)  # [N, T]

        def uniforms(step: int) -> Tensor:
            return numbers[:, step]

    check_every = 1 if reads_at_once(device) else CHECK_EVERY
    tokens: list[Tensor] = []
    masks: list[Tensor] = []
    scores: list[Tensor] = []
    is_stopped = torch.zeros(len(prompts) * num_return_sequences, dtype=torch.bool, device=device)
    reader = reader or token_reader(model, use_cache=use_cache)
    was_training = model.training
    model.eval()
    try:
        for step in _steps(
            reader, input_ids, lengths, sampling=sampling, uniforms=uniforms, copies=num_return_sequences
        ):
            tokens.append(step.tokens)
            masks.append(step.is_new)
            is_stopped = step.is_stopped
            if log_probabilities:
                every = (step.logits / (temperature or 1.0)).log_softmax(dim=-1)
                scores.append(every.gather(1, step.tokens[:, None])[:, 0])
            if (len(stop_ids) or ended_rows is not None) and len(tokens) % check_every == 0:
                has_ended = is_stopped
                if ended_rows is not None:
                    has_ended = has_ended | ended_rows(torch.stack(tokens, dim=1)).to(device)
                if all_stopped(bool(has_ended.all())):
                    break
    finally:
        model.train(was_training)
    mask = torch.stack(masks, dim=1) if masks else is_stopped.new_zeros(len(is_stopped), 0)
    mask = mask[:, : int(mask.any(dim=0).sum())]  # without columns in which all rows had stopped
    length = mask.shape[1]
    return Completions(
        tokens=_masked(tokens[:length], mask).long().masked_fill(~mask, pad_id),
        mask=mask,
        is_stopped=is_stopped,
        log_probabilities=_masked(scores[:length], mask) if log_probabilities else None,
    )


def _masked(columns: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Joins columns [B] to [B, T], with 0 where the mask is False."""
    return torch.stack(list(columns), dim=1).masked_fill(~mask, 0) if columns else mask.float()


class _Step(NamedTuple):
    """One token of each row."""

    tokens: Tensor
    """[B]"""
    is_new: Tensor
    """[B], False for rows that had stopped before."""
    is_stopped: Tensor
    """[B], True for rows that have stopped."""
    logits: Tensor
    """[B, vocabulary], float32, as the model returned them."""


def _steps(
    reader: TokenReader,
    input_ids: Tensor,
    lengths: Sequence[int],
    *,
    sampling: Sampling,
    uniforms: Callable[[int], Tensor] | None,
    copies: int = 1,
) -> Iterator[_Step]:
    """Yields `max_new_tokens` tokens of each row; `uniforms` returns the random numbers [B] of a step, or None to
    select the most likely token.

    A row that has stopped repeats its stop token.
    """
    if not sampling.max_new_tokens:
        return
    stops = torch.tensor(sorted(sampling.stop_ids), dtype=torch.long, device=input_ids.device)
    logits = reader.start(input_ids, lengths, copies=copies, max_new_tokens=sampling.max_new_tokens).float()
    seen = None
    if sampling.repetition_penalty != 1.0:
        seen = _seen(input_ids, lengths, logits.shape[-1]).repeat_interleave(copies, dim=0)
    is_stopped = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    tokens = is_stopped.long()
    for number in range(sampling.max_new_tokens):
        scores = logits
        if seen is not None:
            penalty = sampling.repetition_penalty
            scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
        if number < sampling.min_new_tokens and len(stops):
            scores = scores.index_fill(-1, stops, -math.inf)
        chosen = select(
            scores,
            None if uniforms is None else uniforms(number),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        was_stopped = is_stopped
        if len(stops):
            tokens = torch.where(was_stopped, tokens, chosen)
            is_stopped = was_stopped | torch.isin(tokens, stops)
        else:
            tokens = chosen
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        yield _Step(tokens, ~was_stopped, is_stopped, logits)
        if number + 1 < sampling.max_new_tokens:
            logits = reader.read(tokens).float()


def sample(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Samples one token per row of the logits [B, vocabulary]: returns [B]."""
    uniforms = None if temperature <= 0 else torch.rand(len(logits), generator=generator, device=logits.device)
    return select(logits, uniforms, temperature=temperature, top_k=top_k, top_p=top_p)


_LARGEST_UNIFORM = 1 - 2**-23
"""A float32 sum multiplied by it is smaller than the sum, so that a token of probability 0 is never selected."""


def select(
    logits: Tensor, uniforms: Tensor | None, *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Returns one token per row of the logits [B, vocabulary], selected by the number in [0, 1) in `uniforms` [B].

    The probabilities of the tokens are adjacent intervals in the order of the vocabulary, so differently rounded logits
    select the same token, except near a boundary. Temperature 0, or no uniforms: the most likely token.
    """
    if temperature <= 0 or uniforms is None:
        return logits.argmax(dim=-1)
    tokens = None
    if top_k is not None or top_p is not None:
        num_candidates = logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])
        values, tokens = logits.topk(num_candidates, dim=-1)  # the most likely first
        probabilities = (values / temperature).softmax(dim=-1)
        if top_p is not None:
            # Drops a token if those before it have enough probability; the most likely is always kept.
            before = probabilities.cumsum(dim=-1) - probabilities
            probabilities = probabilities.masked_fill(before >= top_p, 0.0)
        tokens, order = tokens.sort(dim=-1)
        probabilities = probabilities.gather(-1, order)
    else:
        probabilities = (logits / temperature).softmax(dim=-1)
    ends = probabilities.cumsum(dim=-1)
    thresholds = uniforms.clamp(max=_LARGEST_UNIFORM)[:, None] * ends[:, -1:]
    # Without the limit, logits of nan would select a column that does not exist, which ends a process on a GPU.
    column = torch.searchsorted(ends, thresholds, right=True).clamp(max=ends.shape[-1] - 1)
    return (column if tokens is None else tokens.gather(-1, column)).squeeze(-1)


def uniform_numbers(seeds: Sequence[int], copies: int, length: int) -> Tensor:
    """Returns numbers in [0, 1), float32 [seeds × copies, length], each a function of its seed, copy and column.

    SplitMix64 (Steele, Lea and Flood, 2014) in torch's int64, which wraps around.
    """
    keys = torch.tensor([_as_int64(seed) for seed in seeds], dtype=torch.long)
    keys = _mixed(_mixed(keys)[:, None] + _STRIDE * torch.arange(1, copies + 1)).flatten()
    mixed = _mixed(keys[:, None] + _STRIDE * torch.arange(1, length + 1))
    return _shifted(mixed, 41).float() / 2**23  # the 23 highest bits


def _as_int64(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


_STRIDE = _as_int64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _as_int64(0xBF58476D1CE4E5B9), _as_int64(0x94D049BB133111EB)


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, num_bits: int) -> Tensor:
    """Shifts to the right and fills with zeros; torch fills with the sign."""
    shifted: Tensor = (numbers >> num_bits) & (2 ** (64 - num_bits) - 1)
    return shifted


def _seen(input_ids: Tensor, lengths: Sequence[int], vocab_size: int) -> Tensor:
    """Returns a mask [P, vocabulary] of the tokens of each prompt."""
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    is_padding = positions >= torch.tensor(lengths, device=input_ids.device)[:, None]
    own = torch.where(is_padding, input_ids[:, :1], input_ids)
    seen = torch.zeros(len(input_ids), vocab_size, dtype=torch.bool, device=input_ids.device)
    return seen.scatter_(1, own, value=True)


def _check_prompts(
    prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, num_return_sequences: int, temperature: float
) -> None:
    if not len(prompts):
        raise DataError("There are no prompts. Pass at least one list of tokens.")
    if not isinstance(num_return_sequences, int) or num_return_sequences < 1:
        raise ConfigError(f"num_return_sequences is {num_return_sequences}. Use a whole number of at least 1.")
    if seeds is None and temperature > 0:
        raise ConfigError("seeds are missing. Pass one number per prompt, or temperature=0 for the most likely tokens.")
    if seeds is not None and len(seeds) != len(prompts):
        raise ConfigError(f"There are {len(seeds)} seeds for {len(prompts)} prompts. Pass one number per prompt.")


def _check_room(model: nn.Module, lengths: Sequence[int], max_new_tokens: int) -> None:
    """Rejects empty prompts, and more tokens than the model has positions for."""
    if min(lengths, default=0) < 1:
        number = f"{list(lengths).index(0)} (counted from 0) " if len(lengths) > 1 else ""
        raise DataError(f"The prompt {number}has no tokens. Pass at least one.")
    room = room_after(model, max(lengths))
    if room is not None and room < 1:
        raise DataError(
            f"The prompt has {max(lengths)} tokens, but the model has {_max_positions(model)} positions. Shorten the "
            "prompt."
        )
    if room is not None and max_new_tokens > room:
        raise DataError(
            f"max_new_tokens is {max_new_tokens}, but the model has {_max_positions(model)} positions, and the prompt "
            f"has {max(lengths)} tokens: at most {room} can follow. Use fewer, or shorten the prompt."
        )


def room_after(model: nn.Module, num_tokens: int) -> int | None:
    """Returns the number of tokens that a model can generate after these; None without a limit."""
    positions = _max_positions(model)
    # The last generated token is not read and needs no position.
    return None if positions is None else max(0, positions - num_tokens + 1)


def _max_positions(model: nn.Module) -> int | None:
    """Returns the number of positions of a model: the attribute of a shipped model, or that of transformers' config."""
    config = getattr(model, "config", None)
    found = getattr(model, "max_positions", None) or getattr(config, "max_position_embeddings", None)
    return int(found) if found else None


def vocabulary_size(model: nn.Module) -> int | None:
    """Returns the number of embeddings of a model: the setting of a shipped model, or that of transformers' config."""
    settings = getattr(model, "settings", None)
    found = settings.get("vocab_size") if isinstance(settings, Mapping) else None
    found = found or getattr(getattr(model, "config", None), "vocab_size", None)
    return found if isinstance(found, int) else None


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
