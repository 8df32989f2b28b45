"""What each parameter is: told apart by the module that owns it, else by name and shape."""

import pytest
import torch
from torch import nn

from trainwright.optim.param_groups import classify_parameters, kind_by_name, uses_muon


class Net(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.pos_embed = nn.Parameter(torch.zeros(9, 4))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.patches = nn.Conv2d(3, 4, 2)
        self.experts = nn.Parameter(torch.zeros(2, 4, 4))
        self.block = nn.TransformerEncoderLayer(4, 2, 8)
        self.head = nn.Linear(4, 7, bias=False)
        self.extra = nn.Linear(4, 4)
        if tied:
            self.head.weight = self.tokens.weight


def test_kinds_follow_the_owning_module():
    kinds = classify_parameters(Net())
    assert kinds["tokens.weight"] == kinds["pos_embed"] == "embedding"
    assert kinds["patches.weight"] == "convolution"
    assert kinds["experts"] == "tensor"
    assert kinds["head.weight"] == "head"
    inner = [
        "block.self_attn.in_proj_weight",
        "block.self_attn.out_proj.weight",
        "block.linear1.weight",
        "extra.weight",
    ]
    assert {kinds[name] for name in inner} == {"matrix"}
    assert {kinds[name] for name in ("cls_token", "patches.bias", "block.norm1.weight")} == {"vector"}


def test_a_tied_head_is_an_embedding():
    kinds = classify_parameters(Net(tied=True))
    assert kinds["tokens.weight"] == "embedding"
    assert "head.weight" not in kinds


def test_the_last_linear_is_the_head_where_none_is_named_so():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    kinds = classify_parameters(model)
    assert [kinds[f"{n}.weight"] for n in (0, 2, 3)] == ["matrix", "matrix", "head"]


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("layers.0.q_proj.weight", (4, 4), "matrix"),
        ("transformer.wte.weight", (9, 4), "embedding"),
        ("model.embed_tokens.weight", (9, 4), "embedding"),
        ("lm_head.weight", (9, 4), "head"),
        ("layers.0.heads.weight", (4, 4), "matrix"),
        ("conv.weight", (4, 3, 2, 2), "convolution"),
        ("layers.0.norm.weight", (4,), "vector"),
        ("scale", (1, 4), "vector"),
        ("experts", (2, 4, 4), "tensor"),
        (None, (4, 4), "matrix"),
    ],
)
def test_names_and_shapes_tell_what_they_can(name, shape, kind):
    assert kind_by_name(name, torch.zeros(shape)) == kind


def test_a_vector_is_never_muons_whatever_its_mark():
    bias = nn.Parameter(torch.zeros(3))
    bias.no_muon = False
    assert not uses_muon("bias", bias, None)
