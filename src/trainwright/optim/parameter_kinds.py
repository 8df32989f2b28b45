"""What each parameter of a model is: matrix, convolution, embedding, head, vector or tensor.

Muon is for what lies between the layers of a network: matrices and convolutions. The first and last layers and
everything without two dims are AdamW's. muon.py applies the rule; here is only how kinds are told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

HEAD_NAMES = frozenset({"lm_head", "head", "classifier", "score", "qa_outputs", "output_projection"})
"""Modules that turn the last hidden state into what is predicted, as models of the field name them."""

EMBEDDING_NAMES = frozenset({"wte", "wpe", "cls_token", "mask_token", "dist_token"})

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def classify_parameters(model: nn.Module) -> dict[str, str]:
    """Returns the kind of every parameter, by name.

    - `vector`: fewer than two dims longer than 1: biases, gains, scales
    - `embedding`: the weight of an Embedding, or a bare parameter that is named like one; a head that is tied to an
      embedding is one too
    - `head`: the weight of a Linear whose name is one of HEAD_NAMES; of the model's last Linear where there is none
    - `convolution`: the weight of a Conv1d, Conv2d or Conv3d
    - `matrix`: any other parameter of two dims
    - `tensor`: any other parameter
    """
    embeddings = {id(weight) for _, weight in _weights_of(model, _EMBEDDINGS)}
    convolutions = {id(weight) for _, weight in _weights_of(model, _CONVOLUTIONS)}
    linears = dict(_weights_of(model, (nn.Linear,)))
    named = {id(weight) for name, weight in linears.items() if HEAD_NAMES.intersection(name.split("."))}
    heads = named or {id(weight) for weight in list(linears.values())[-1:]}
    inner = {id(weight) for weight in linears.values()} - heads
    kinds = {}
    for name, parameter in model.named_parameters():
        if _is_vector(parameter):
            kinds[name] = "vector"
        elif id(parameter) in embeddings:
            kinds[name] = "embedding"
        elif id(parameter) in heads:
            kinds[name] = "head"
        elif id(parameter) in convolutions:
            kinds[name] = "convolution"
        elif id(parameter) in inner:
            kinds[name] = "matrix"
        else:
            kinds[name] = "tensor" if parameter.ndim > 2 else kind_by_name(name, parameter)
    return kinds


def kind_by_name(name: str | None, parameter: torch.Tensor) -> str:
    """Returns the kind as far as a name and a shape tell: four dims are taken for a convolution. None is no name."""
    if _is_vector(parameter):
        return "vector"
    parts = () if name is None else tuple(name.split("."))
    if any("embed" in part or part in EMBEDDING_NAMES for part in parts):
        return "embedding"
    if HEAD_NAMES.intersection(parts):
        return "head"
    return {2: "matrix", 4: "convolution"}.get(parameter.ndim, "tensor")


def uses_muon(name: str | None, parameter: torch.Tensor, kinds: Mapping[str, str] | None) -> bool:
    """Is the parameter Muon's? Its attribute `no_muon` decides where it has one, else its kind."""
    known = None if kinds is None or name is None else kinds.get(name)
    kind = known if known is not None else kind_by_name(name, parameter)
    marked = getattr(parameter, "no_muon", None)
    if marked is not None:
        return not marked and parameter.ndim >= 2
    return kind in ("matrix", "convolution")


def _weights_of(model: nn.Module, types: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None) if isinstance(module, types) else None
        if isinstance(weight, nn.Parameter):
            yield name, weight


def _is_vector(parameter: torch.Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) < 2
