"""What a model and its optimizers hold."""

import torch
from torch import nn

from trainwright.memory.out_of_memory import (
    BUFFER,
    GRADIENT,
    PARAMETER,
    STATE,
    bytes_by_kind,
    bytes_by_module,
    held_tensors,
)

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 2)
        self.tied = self.head


def stepped(model):
    optimizer = torch.optim.Adam(model.parameters())
    model.head(model.body(torch.randn(3, 4))).sum().backward()
    optimizer.step()
    return {"main": optimizer}


def test_every_kind_is_counted_once():
    model = Model()
    optimizers = stepped(model)
    kinds = bytes_by_kind(held_tensors(model, optimizers, CPU))
    numbers = 4 * 8 + 8 + 8 + 8 * 2 + 2
    assert kinds[PARAMETER] == kinds[GRADIENT] == 4 * numbers
    assert kinds[STATE] == 2 * 4 * numbers + 4 * 5  # two moments, and a step of each of the five parameters
    assert kinds[BUFFER] == 2 * 4 * 8 + 8


def test_the_largest_comes_first_with_the_name_of_its_parameter():
    model = Model()
    tensors = held_tensors(model, stepped(model), CPU)
    assert [each.num_bytes for each in tensors] == sorted((each.num_bytes for each in tensors), reverse=True)
    assert {(each.name, each.shape, each.dtype) for each in tensors[:4]} == {("body.0.weight", (8, 4), "float32")}
    assert sorted(each.kind for each in tensors[:4]) == [GRADIENT, STATE, STATE, PARAMETER]


def test_tensors_of_another_device_are_not_counted():
    assert held_tensors(Model().to("meta"), {}, CPU) == []


def test_modules_are_grouped_below_what_all_names_share():
    model = Model()
    whole = nn.ModuleDict({"model": model})
    plain, nested = (bytes_by_module(held_tensors(each, {}, CPU)) for each in (model, whole))
    assert list(plain) == ["body", "head"]
    assert nested == {f"model.{name}": sums for name, sums in plain.items()}
    assert sum(plain["head"].values()) == 4 * (8 * 2 + 2)
