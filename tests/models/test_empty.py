"""Modules without memory for their parameters: which constructors allow it, and what is left as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from trainwright.models.empty import Generators, allocate, build_empty
from trainwright.models.llama import Llama


class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("angles", torch.arange(4) / 2, persistent=False)
        self.scale = torch.tensor(2.0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.zeros(3, 3))
        self.first = self.second = weight
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        weight.no_weight_decay = True  # after it was registered


class DrawsWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(3))


class DrawsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        random.random(), np.random.rand()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("noise", torch.rand(4), persistent=False)


class ReadsWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.largest = float(self.layer.weight.max())


class ComputesOfWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = self.layer.weight.detach().norm()


class BuffersWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("first", self.layer.weight.detach().clone())


class HidesTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.teacher = {"net": [nn.Linear(3, 3)]}  # not to be saved, and not to be seen


class Replaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.layer = nn.Linear(3, 4)


def test_parameters_have_no_memory_and_what_is_computed_is_there():
    model = build_empty(Computed)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.angles, Computed().angles)
    assert model.scale == 2.0


def test_ties_and_attributes_stay():
    model = build_empty(Tied)
    assert model.first is model.second
    assert model.first.no_weight_decay
    allocate(model, {"second": torch.bfloat16, "head.weight": torch.float64})
    assert model.first is model.second
    assert (model.first.dtype, model.first.no_weight_decay) == (torch.bfloat16, True)
    assert model.head.weight is model.embed.weight
    assert (model.embed.weight.dtype, model.embed.weight.device.type) == (torch.float64, "cpu")


@pytest.mark.parametrize("allowed", [DrawsWeights, Replaces, Tied, lambda: Llama.from_preset("tiny")])
def test_constructors_that_only_make_and_draw_weights_are_allowed(allowed):
    assert all(parameter.is_meta for parameter in build_empty(allowed).parameters())


@pytest.mark.parametrize("refused", [DrawsBuffer, ReadsWeights, ComputesOfWeights, BuffersWeights, HidesTeacher])
def test_constructors_that_do_more_are_not_and_leave_the_generators_alone(refused):
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = refused()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert build_empty(refused) is None
    assert_same = torch.testing.assert_close
    again = refused()
    assert_same(dict(again.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0)
    assert_same(dict(again.named_parameters()), dict(expected.named_parameters()), rtol=0, atol=0)


def test_a_draw_is_seen_also_where_the_generators_are_put_back():
    def make():
        generators = Generators()
        model = DrawsBuffer()
        generators.restore()
        return model

    assert build_empty(make) is None


def test_other_modules_are_built_as_ever_afterwards():
    build_empty(Computed)
    build_empty(ReadsWeights)
    assert not any(parameter.is_meta for parameter in nn.Linear(2, 2).parameters())


def test_models_of_transformers_are_built_without_memory():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlamaConfig(vocab_size=61, **sizes)
    model = build_empty(lambda: transformers.LlamaForCausalLM(config))
    assert all(parameter.is_meta for parameter in model.parameters())
    full = transformers.LlamaForCausalLM(config)
    assert torch.equal(model.model.rotary_emb.inv_freq, full.model.rotary_emb.inv_freq)
