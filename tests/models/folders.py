"""Tiny model folders in Hugging Face's layout, as transformers itself writes them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from trainwright.models.llama import Llama

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def reference(kind="Llama", **changes):
    """A transformers model with random weights, biases included."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def our_llama(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 64}
    return Llama(**{**sizes, **changes})


def tokens(*shape):
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(1))


def tensors_in(folder):
    """All tensors of a folder's safetensors files."""
    return {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def assert_same_tensors(first, second):
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype, key
        assert torch.equal(tensor, second[key]), key
