"""Buffers that an update held back leaves as they were."""

import pytest
import torch
from torch import nn

from trainwright.loop.update import BufferSnapshot, persistent_buffers


def make():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model.register_buffer("table", torch.arange(3), persistent=False)
    model.register_buffer("absent", None)
    model.register_buffer("shared", model[1].running_mean)
    return model


def test_only_buffers_of_the_state_are_kept_and_each_once():
    model = make()
    names = [name for name, _ in model[1].named_buffers()] * 2
    assert len(persistent_buffers(model)) == len(names) == 6
    assert (model, "table") not in persistent_buffers(model)


@pytest.mark.parametrize("hold", [True, False, torch.tensor(True), torch.tensor(False)])
def test_buffers_are_put_back_where_the_update_is_held(hold):
    model = make()
    model(torch.randn(5, 3))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    held = BufferSnapshot(persistent_buffers(model))
    held.take()
    model(torch.full((5, 3), float("nan")))
    held.restore(hold)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]) == (bool(hold) or name == "table"), name
    assert model.shared is model[1].running_mean


@pytest.mark.parametrize("hold", [True, torch.tensor(True)])
def test_a_tensor_that_took_the_place_of_a_buffer_is_put_back_too(hold):
    model = make()
    held = BufferSnapshot(persistent_buffers(model))
    held.take()
    before = model[1].running_mean.clone()
    model[1].running_mean = model[1].running_mean * float("nan")
    held.restore(hold)
    assert torch.equal(model[1].running_mean, before)
