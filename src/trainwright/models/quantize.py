"""Chooses the linear layers whose frozen weight is quantized under adapters (`model.quantize`), and quantizes them.

By default these are the layers with an adapter, except for the head. The layers themselves are in
layers/quantized_linear.py, the adapters in lora.py and peft_adapters.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from trainwright.config.problems import describe, suggest
from trainwright.errors import ConfigError
from trainwright.models.layers.quantized_linear import (
    QuantizedType,
    can_quantize,
    dequantize,
    num_weights,
    quantize,
    quantized_layers,
    stored_names,
)
from trainwright.models.lora import LoRALinear, is_conv1d
from trainwright.models.names import as_globs, last_parts, names_module, unmatched

KEYS = ("type", "match")
BASE_LAYER = "base_layer"
"""The name in peft of the layer that an adapter is added to."""


@dataclass(frozen=True)
class QuantizeSettings:
    """The setting `model.quantize`: the type of the codes, and globs of module paths; None: layers with an adapter."""

    type: QuantizedType
    match: tuple[str, ...] | None = None


def read_quantize(given: Any) -> QuantizeSettings:
    """Reads `nf4`, `int8` or `{type: nf4, match: …}`."""
    settings: Mapping[str, Any] = {"type": given} if isinstance(given, str) else given
    if not isinstance(settings, Mapping) or "type" not in settings:
        raise ConfigError(f"quantize: must be nf4, int8, or a mapping such as {{type: nf4}}; got {describe(given)}.")
    for key in settings:
        if key not in KEYS:
            raise ConfigError(f"quantize.{key}: is unknown. {suggest(str(key), KEYS)}")
    known = get_args(QuantizedType)
    kind = settings["type"]
    if kind not in known:
        shown = kind if isinstance(kind, str) else describe(kind)
        raise ConfigError(f"quantize.type: there is no {shown}. {suggest(str(kind), known)}")
    match = settings.get("match")
    globs = None if match is None else as_globs("quantize.match", match)
    if globs == ():
        raise ConfigError("quantize.match: names no layer. Remove it, or use a glob such as *.q_proj.")
    return QuantizeSettings(kind, globs)


def quantize_model(model: nn.Module, given: Any) -> dict[str, tuple[str, ...]]:
    """Quantizes frozen weights of linear layers in place, one after the other; returns the names of their parameters.

    `given` is the setting. The result maps the name of each former weight to those of its codes and scales. Raises if a
    glob matches no layer, and for a matched layer that cannot be quantized.
    """
    settings = read_quantize(given)
    chosen = choose_quantized(model, settings)
    renamed: dict[str, tuple[str, ...]] = {}
    for name in chosen:
        try:
            quantize(model.get_submodule(name), settings.type)
        except ValueError as error:
            raise ConfigError(f"quantize: the weight of {name} {error}. Exclude the layer with match.") from error
        renamed[f"{name}.weight"] = tuple(f"{name}.{each}" for each in stored_names(settings.type))
    return renamed


def dequantize_model(model: nn.Module) -> list[str]:
    """Converts every quantized weight back to a plain frozen parameter with its dequantized values; returns the
    layers."""
    layers = dict(quantized_layers(model))
    for layer in layers.values():
        dequantize(layer)
    return list(layers)


def choose_quantized(model: nn.Module, settings: QuantizeSettings) -> list[str]:
    """Returns the names of the layers that a setting quantizes, in the model's order."""
    linear = dict(_linear_layers(model))
    adapted = [name for name, module in linear.items() if isinstance(module, LoRALinear) or _is_base(name)]
    if not adapted:
        raise ConfigError(
            "quantize: no layer has an adapter, and quantized weights are not trained. Add model.lora, for example "
            'lora: {match: "*_proj", rank: 8}, or remove quantize.'
        )
    modules = dict(model.named_modules())
    if settings.match is None:
        head = _head(model)
        chosen = [name for name in adapted if linear[name] is not head and not _why_not(name, modules)]
        if not chosen:
            raise ConfigError(
                f"quantize: no layer with an adapter can be quantized: {adapted[0]} is "
                f"{_why_not(adapted[0], modules) or 'the head'}. Name layers with quantize.match, or remove quantize."
            )
        return chosen
    shown = {_shown(name): name for name in linear}
    for glob in settings.match:
        if not any(names_module(glob, name) for name in shown):
            raise ConfigError(f"quantize.match: {unmatched(glob, shown, 'linear layer')}")
    chosen = [name for own, name in shown.items() if any(names_module(glob, own) for glob in settings.match)]
    for name in chosen:
        reason = _why_not(name, modules)
        if reason:
            raise ConfigError(f"quantize.match: matches {_shown(name)}, which cannot be quantized: it is {reason}.")
    return chosen


def describe_quantized(model: nn.Module) -> str | None:
    """Returns a line for the log about the quantized layers of a model; None without any."""
    layers = dict(quantized_layers(model))
    if not layers:
        return None
    left: dict[str, list[str]] = defaultdict(list)
    modules = dict(model.named_modules())
    head = _head(model)
    for name, module in _linear_layers(model):
        if name not in layers:
            is_other = module is not head and (isinstance(module, LoRALinear) or _is_base(name))
            default = "the head" if module is head else "not in match" if is_other else "without an adapter"
            left[_why_not(name, modules) or default].append(_shown(name))
    number = len(layers) + sum(map(len, left.values()))
    num_bytes = sum(tensor.nbytes for layer in layers.values() for tensor in _stored(layer))
    bits = 8 * num_bytes / sum(map(num_weights, layers.values()))
    kinds = " and ".join(dict.fromkeys(layer.quantized_type for layer in layers.values()))
    names = last_parts([_shown(name) for name in layers])
    text = f"{kinds}: {len(layers)} of {number} linear layers ({bits:.1f} bits per weight): {names}."
    rest = "; ".join(f"{len(names)} {reason}: {last_parts(names)}" for reason, names in left.items())
    return f"{text} Not quantized: {rest}." if rest else text


def count_weights(model: nn.Module) -> int:
    """Returns the number of parameters of a model; quantized layers count with the number of their weights."""
    layers = [layer for _, layer in quantized_layers(model)]
    codes = sum(tensor.numel() for layer in layers for tensor in _stored(layer))
    return sum(each.numel() for each in model.parameters()) - codes + sum(map(num_weights, layers))


def reject_unfrozen(model: nn.Module, names: Collection[str]) -> None:
    """Raises if codes would become trainable: `names` are parameters that are frozen for a part of the run."""
    own = dict(model.named_parameters(remove_duplicate=False))
    codes = [name for name in names if not own[name].is_floating_point()]
    if codes:
        layer = codes[0].rpartition(".")[0]
        raise ConfigError(
            f"freeze: {codes[0]} would become trainable, but {layer} is quantized. Use narrower globs, or exclude the "
            "layer with quantize.match."
        )


def _stored(layer: Any) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(layer, name) for name in stored_names(layer.quantized_type))


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the linear layers by name, without the matrices of peft's adapters."""
    modules = dict(model.named_modules())
    adapters = tuple(
        f"{name}.{child}."
        for name, module in modules.items()
        if BASE_LAYER in module._modules
        for child in module._modules
        if child != BASE_LAYER
    )
    for name, module in modules.items():
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and not name.startswith(adapters):
            yield name, module


def _is_base(name: str) -> bool:
    return name.rpartition(".")[2] == BASE_LAYER


def _shown(name: str) -> str:
    """Returns the name of a layer without peft."""
    return name.removesuffix(f".{BASE_LAYER}")


def _head(model: nn.Module) -> nn.Module | None:
    """Returns the layer that predicts the tokens, whose errors affect the loss most."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else getattr(model, "lm_head", None)
    head = getattr(head, BASE_LAYER, head)
    return head if isinstance(head, nn.Module) else None


def _why_not(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Returns the reason why a layer cannot be quantized; an empty string if it can be."""
    module, parent = modules[name], modules[name.rpartition(".")[0]]
    if is_conv1d(module):
        return "a Conv1D of transformers, which stores its weight transposed (the type gpt2 has plain linear layers)"
    if not can_quantize(module):
        return f"a {type(module).__name__}, whose forward a quantized layer would replace"
    weight: Any = module.weight
    if weight.requires_grad:
        return "trained, and codes have no gradient"
    if isinstance(parent, nn.MultiheadAttention | nn.TransformerEncoderLayer):
        return f"inside of torch's {type(parent).__name__}, which uses its weight without calling it"
    if any(one is not module and any(each is weight for each in _own(one)) for one in modules.values()):
        return "tied to another layer"
    if not weight.is_floating_point() or not weight.numel():
        return f"of the shape {list(weight.shape)} and {str(weight.dtype).removeprefix('torch.')}"
    return ""


def _own(module: nn.Module) -> Sequence[nn.Parameter]:
    return list(module.parameters(recurse=False))
