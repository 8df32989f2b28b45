"""A copy of the state that training cannot disturb, in memory that is used again."""

from __future__ import annotations

import numpy as np
import torch
from tests.messages import raises
from torch import nn

from trainwright.checkpoint import contents
from trainwright.checkpoint.snapshot import HostBuffers, encode_parts
from trainwright.errors import CheckpointError


def state(value, *, width=4):
    weight = torch.full((width, 3), float(value))
    return {
        "model": {"weight": weight, "tied": weight, "half": torch.full((2,), value, dtype=torch.bfloat16)},
        "optimizers": {"main": {"state": {"weight": {"step": torch.tensor(float(value)), "turned": weight.t()}}}},
        "training": {"step": value, "position": (value, None), "numpy": np.full(3, value), "empty": torch.empty(0)},
    }


def every_tensor(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value)]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for each in inner for tensor in every_tensor(each)]


def addresses(snapshot):
    return {
        (part, key): tensor.data_ptr()
        for part, (_, tensors, *_) in snapshot.parts.items()
        for key, tensor in tensors.items()
    }


def assert_is_state(found, value):
    assert list(found) == ["model", "optimizers", "training"]
    assert torch.equal(found["model"]["weight"], torch.full((4, 3), float(value)))
    assert found["model"]["tied"] is found["model"]["weight"]
    assert found["model"]["half"].dtype == torch.bfloat16
    inner = found["optimizers"]["main"]["state"]["weight"]
    assert inner["step"].item() == value
    assert inner["turned"].shape == (3, 4)
    assert found["training"]["step"] == value
    assert found["training"]["position"] == (value, None)
    assert found["training"]["numpy"].tolist() == [value] * 3


def test_changing_the_state_afterwards_changes_nothing_staged():
    before = state(5)
    snapshot = HostBuffers().copy_to_host(before)
    for tensor in every_tensor(before):
        tensor.fill_(77)
    before["training"]["step"] = 77
    assert_is_state(snapshot.to_state(), 5)


def test_going_back_twice_gives_the_same_state_whatever_was_done_to_the_first():
    snapshot = HostBuffers().copy_to_host(state(5))
    for tensor in every_tensor(snapshot.to_state()):
        tensor.fill_(77)
    assert_is_state(snapshot.to_state(), 5)


def test_the_memory_is_used_again_where_shape_and_dtype_are_the_same():
    buffers = HostBuffers()
    first = addresses(buffers.copy_to_host(state(1)))
    snapshot = buffers.copy_to_host(state(2))
    assert addresses(snapshot) == first
    assert_is_state(snapshot.to_state(), 2)


def test_another_shape_gets_other_memory_and_the_rest_keeps_its_own():
    buffers = HostBuffers()
    first = buffers.copy_to_host(state(1))
    snapshot = buffers.copy_to_host(state(2, width=6))
    assert snapshot.parts["model"][1]["weight"].shape == (6, 3)
    assert first.parts["model"][1]["weight"].shape == (4, 3)
    assert snapshot.parts["model"][1]["half"].data_ptr() == first.parts["model"][1]["half"].data_ptr()


def test_memory_of_what_is_no_longer_saved_is_freed():
    buffers = HostBuffers()
    buffers.copy_to_host(state(1))
    snapshot = buffers.copy_to_host({"model": {"half": torch.ones(2)}})
    assert len(buffers._buffers) == 1
    assert snapshot.num_bytes == 8


def test_parts_without_tensors_and_no_parts_at_all_are_staged():
    assert HostBuffers().copy_to_host({}).to_state() == {}
    assert HostBuffers().copy_to_host({"training": {"step": 1}}).to_state() == {"training": {"step": 1}}


def test_what_cannot_be_saved_is_rejected_with_its_path():
    with raises(CheckpointError, "training.seen"):
        HostBuffers().copy_to_host({"training": {"seen": {1}}})


def test_encoding_alone_copies_nothing():
    weight = torch.ones(3)
    assert encode_parts({"model": {"weight": weight}}).parts["model"][1]["weight"].data_ptr() == weight.data_ptr()


def test_an_optimizer_restored_from_memory_repeats_the_same_updates():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def update(value):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    update(0.5)
    names = contents._names_by_parameter(model)
    parts = {"model": model.state_dict(), "optimizers": {"main": contents._state_by_name(optimizer, names)}}
    snapshot = HostBuffers().copy_to_host(parts)
    results = []
    for _ in range(3):
        found = snapshot.to_state()
        model.load_state_dict(found["model"])
        contents.restore_optimizers(found["optimizers"], model, {"main": optimizer})
        results.append([update(0.1), update(-0.3)][-1])
    for again in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], again, strict=True))
