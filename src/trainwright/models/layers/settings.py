"""Settings of the shipped models: how constructors store them, valid values and inputs, activations, initial
weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import ConfigError, DataError

MAX_LAYERS = 10_000
"""Creating a layer takes time even without memory, so a damaged file must not occupy a process for hours."""
ENCODER_KEYS: Mapping[str, tuple[str, Any]] = {
    "hidden_size": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 12),
    "num_heads": ("num_attention_heads", 12),
    "intermediate_size": ("intermediate_size", 3072),
    "activation": ("hidden_act", "gelu"),
    "norm_eps": ("layer_norm_eps", 1e-12),
    "initializer_range": ("initializer_range", 0.02),
}
"""The settings that BERT and ViT share, with their keys in config.json and defaults."""


def keywords_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a constructor's keywords from its `locals()`; call it before the constructor has other variables."""
    return {name: value for name, value in variables.items() if name not in ("self", "__class__")}


def reject_other_values(config: Mapping[str, Any], supported: Mapping[str, Any], *, model: type[Any]) -> None:
    """Rejects a config.json with another value than the one that the model supports."""
    for name, value in supported.items():
        if config.get(name, value) != value:
            raise ConfigError(
                f"config.json has {name}: {config[name]!r}, but {model.__name__} supports only {value!r}. "
                f"Use transformers' class: model.type: transformers:{model.transformers_class}."
            )


def draw_weights(model: nn.Module, std: float, **others: float) -> None:
    """Initializes linear layers and embeddings from a normal distribution, biases with 0, and norms with 1.

    `others` are the deviations of linear layers by the end of their names. The embedding of padding is 0.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=others.get(name.rpartition(".")[2], std))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()


def check_keywords(constructor: Callable[..., None], given: Mapping[str, Any]) -> None:
    """Rejects invalid keywords by name: `check_keywords(Llama.__init__, locals())`.

    The form is taken from the annotation and the range from the name: an int is at least 1, an id at least 0; a dropout
    is a probability; other numbers are at least 0. Call it first, so that later code can do arithmetic.
    """
    for parameter in list(inspect.signature(constructor).parameters.values())[1:]:  # without self
        name, value, forms = parameter.name, given[parameter.name], str(parameter.annotation).split(" | ")
        if value is None and "None" in forms:
            continue
        wanted = _wanted(name, value, forms[0])
        if wanted is not None and not ("Sequence[int]" in forms and _is_list_of_counts(value)):
            also = ", or a list of two" if forms[1:2] == ["Sequence[int]"] else ""
            raise ConfigError(f"{name} is {value!r}. Use {wanted}{also}.")


def _wanted(name: str, value: Any, form: str) -> str | None:
    """Describes the valid values of a setting; returns None if it is valid or its form is unknown."""
    known: dict[str, tuple[type[Any], str]] = {"bool": (bool, "true or false"), "str": (str, "text")}
    known["Mapping[str, Any]"] = (Mapping, "a mapping")
    if form in known:
        kind, words = known[form]
        return None if isinstance(value, kind) else words
    if form == "int":
        least = 0 if name.endswith("_id") else 1
        holds = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
        if holds and name.endswith("_layers") and int(value) > MAX_LAYERS:
            return f"a whole number up to {MAX_LAYERS}"
        return None if holds else f"a whole number of at least {least}"
    if form == "float":
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        if "dropout" in name:
            return None if 0.0 <= number < 1.0 else "a probability from 0 up to, not including, 1"
        if name == "rope_theta":
            return None if 0.0 < number < math.inf else "a number above 0"
        return None if 0.0 <= number < math.inf else "a number of at least 0"
    return "a list of whole numbers of at least 1" if form == "Sequence[int]" else None


def _is_list_of_counts(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(_wanted("", each, "int") is None for each in value)


def check_heads(hidden_size: int, num_heads: int) -> None:
    """Rejects a width that is not divisible by the number of heads."""
    if hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size {hidden_size} does not split into {num_heads} heads. "
            f"Use a multiple of {num_heads}, or another num_heads."
        )


def check_ids(input_ids: Tensor, *, name: str = "input_ids") -> None:
    """Rejects tokens of another dtype or number of dims than [batch, sequence]; does not synchronize."""
    if input_ids.dim() != 2:
        hint = " One row is input_ids[None]." if input_ids.dim() == 1 else ""
        raise DataError(
            f"{name} must be rows of tokens [batch, sequence]; got the shape {list(input_ids.shape)}.{hint}"
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise DataError(f"{name} must be whole numbers (torch.long), the ids of tokens; got {input_ids.dtype}.")


def embed(embedding: nn.Embedding, ids: Tensor, *, name: str = "input_ids") -> Tensor:
    """Returns the rows [..., D] of an embedding; invalid ids raise on devices that report them.

    They are read only then, because a check before each step would synchronize.
    """
    try:
        embedded: Tensor = embedding(ids)
    except IndexError as error:
        raise DataError(
            f"{name} holds ids from {int(ids.min())} to {int(ids.max())}, but the embedding has "
            f"{embedding.num_embeddings} rows. Give the model the vocabulary of the tokenizer, or pad with an id of it."
        ) from error
    return embedded


def check_length(length: int, max_positions: int) -> None:
    """Rejects rows of more tokens than there are positions."""
    if length > max_positions:
        raise DataError(
            f"The model has {max_positions} positions (max_positions) but the sequences hold "
            f"{length} tokens. Shorten the sequences or raise model.max_positions."
        )


Activation = Callable[[Tensor], Tensor]

_GELU_BY_TANH = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": _GELU_BY_TANH,
    "gelu_pytorch_tanh": _GELU_BY_TANH,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def activation(name: str, *, setting: str = "activation") -> Activation:
    """Returns the function of this name; `setting` is the setting that has the name, for the error."""
    if name not in ACTIVATIONS:
        raise ConfigError(f'{setting} is "{name}". Use one of: {", ".join(ACTIVATIONS)}.')
    return ACTIVATIONS[name]
