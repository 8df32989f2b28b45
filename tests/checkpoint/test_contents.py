"""What a checkpoint holds, and that it goes back bit for bit."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright.checkpoint import contents
from trainwright.checkpoint.disk import write_file
from trainwright.checkpoint.manifest import make_manifest
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError
from trainwright.loop.hook import Hook, HookCalls


class State:
    """Anything with state."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class InfoHook(Hook):
    def __init__(self, seen=None):
        self.seen = seen

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)


def stepped(model, make, steps=3):
    """An optimizer with state, over the model's parameters as `make` takes them."""
    optimizer = make(model)
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def adamw_reversed(model):
    return torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-2)


class Nothing:
    """Anomalies of which there were none."""

    def state_dict(self):
        return {"num_anomalies": 0, "watch": None}


def write(store, model, optimizers, *, step=5, hooks=(), unclaimed=None, generators=None):
    parts = contents.collect(
        model=model,
        optimizers=optimizers,
        hooks=HookCalls(hooks).keyed(),
        events={"window": {}, "histories": {}},
        data={"position": 40},
        anomalies=Nothing(),
        loss_scale=None,
        generators=generators or [contents.generator_state()],
        step=step,
        has_unfinished_step=False,
        max_steps_at_end=0,
        begun_epoch=0,
        data_start=0,
        unclaimed_hook_state=unclaimed or {},
    )
    store.write(step, parts, metrics={})
    return store.read(step, "training")


def state_by_name(model, optimizer):
    return {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}


def assert_same_state(first, second):
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.keys() == second[name].keys()
        for key, value in values.items():
            assert value.dtype == second[name][key].dtype, (name, key)
            assert torch.equal(value, second[name][key]), (name, key)


def test_optimizer_state_survives_another_order_of_parameters(store):
    model = net()
    before = stepped(model, adamw)
    write(store, model, {"main": before})
    other = net()
    after = adamw_reversed(other)
    contents.restore_optimizers(store.read(5, "optimizers"), other, {"main": after})
    assert_same_state(state_by_name(model, before), state_by_name(other, after))


def test_a_restored_optimizer_makes_the_same_next_update(store):
    model, other = net(), net()
    optimizer, restored = stepped(model, adamw), adamw_reversed(other)
    write(store, model, {"main": optimizer})
    contents.restore_model(store, 5, other)
    contents.restore_optimizers(store.read(5, "optimizers"), other, {"main": restored})
    for each, its_optimizer in ((model, optimizer), (other, restored)):
        for number, parameter in enumerate(each.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
        its_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Fp32State(torch.optim.Optimizer):
    """Keeps its sums in fp32 whatever the parameters are, as optimizers of bf16 models do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                total = state.setdefault("total", torch.zeros(parameter.shape, dtype=torch.float32))
                total += parameter.grad.float() * 1.001
                parameter -= (group["lr"] * total).to(parameter.dtype)


def test_fp32_state_of_bf16_parameters_keeps_its_bits(store):
    model = net(torch.bfloat16)
    before = stepped(model, lambda each: Fp32State(each.parameters()))
    totals = state_by_name(model, before)
    assert any(not torch.equal(state["total"], state["total"].bfloat16().float()) for state in totals.values())
    write(store, model, {"main": before})
    other = net(torch.bfloat16)
    after = Fp32State(other.parameters())
    contents.restore_optimizers(store.read(5, "optimizers"), other, {"main": after})
    assert_same_state(totals, state_by_name(other, after))


def test_bf16_weights_keep_their_bits(store):
    model = net(torch.bfloat16)
    write(store, model, {})
    other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).bfloat16()
    contents.restore_model(store, 5, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_renamed_optimizers_are_rejected_by_name(store):
    model = net()
    write(store, model, {"main": stepped(model, adamw)})
    with raises(CheckpointError, "--fresh"):
        contents.restore_optimizers(store.read(5, "optimizers"), model, {"body": adamw(model), "head": adamw(model)})


def test_state_for_a_parameter_that_the_optimizer_no_longer_owns_is_rejected_by_name(store):
    model = net()
    write(store, model, {"main": stepped(model, adamw)})
    smaller = torch.optim.AdamW(model[0].parameters())
    with raises(CheckpointError, "main", "2.weight", "2.bias"):
        contents.restore_optimizers(store.read(5, "optimizers"), model, {"main": smaller})


def test_another_number_of_parameter_groups_is_rejected(store):
    model = net()
    write(store, model, {"main": stepped(model, adamw)})
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    with raises(CheckpointError, "main", "1", "2"):
        contents.restore_optimizers(store.read(5, "optimizers"), model, {"main": torch.optim.AdamW(groups)})


def test_hook_states_are_keyed_by_class_and_ordinal(store):
    training = write(store, net(), {}, hooks=[InfoHook(1), InfoHook(2)])
    assert training["hooks"] == {"InfoHook": {"seen": 1}, "InfoHook#2": {"seen": 2}}
    first, second = InfoHook(), InfoHook()
    assert contents.restore_hooks(training["hooks"], HookCalls([first, second]).keyed()) == {}
    assert (first.seen, second.seen) == (1, 2)


def test_hook_state_may_hold_tensors_and_nests(store):
    state = {"list": [1, 2.5, None, "text"], "tensor": torch.arange(3)}
    training = write(store, net(), {}, hooks=[InfoHook(state)])
    restored = training["hooks"]["InfoHook"]["seen"]
    assert restored["list"] == state["list"]
    assert torch.equal(restored["tensor"], state["tensor"])


def test_unclaimed_hook_state_is_kept_and_warned_of(store, caplog):
    training = write(store, net(), {}, hooks=[InfoHook(1), InfoHook(2)])
    only = InfoHook()
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        unclaimed = contents.restore_hooks(training["hooks"], HookCalls([only]).keyed())
    assert unclaimed == {"InfoHook#2": {"seen": 2}}
    assert "InfoHook#2" in caplog.text
    again = write(store, net(), {}, step=6, hooks=[only], unclaimed=unclaimed)
    assert again["hooks"] == {"InfoHook": {"seen": 1}, "InfoHook#2": {"seen": 2}}


def test_an_empty_state_without_its_hook_does_not_warn(store, caplog):
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        assert contents.restore_hooks({"TimeSteps": {}}, {}) == {}
    assert caplog.text == ""


def test_the_generators_of_python_and_numpy_are_restored(store):
    random.gauss(0, 1)  # leaves a second value in Python's generator, which is state too
    np.random.standard_normal()
    training = write(store, net(), {})
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]
    random.seed(999)
    np.random.seed(999)
    contents.restore_generators(training["generators"][0])
    assert drawn == [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]


def test_each_rank_s_generators_are_kept(store):
    states = []
    for seed in (1, 2):
        random.seed(seed)
        states.append(contents.generator_state())
    training = write(store, net(), {}, generators=states)
    contents.restore_generators(training["generators"][1])
    assert random.random() == random.Random(2).random()


def test_mismatching_shapes_are_named_with_both(store):
    write(store, net(), {})
    wider = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    for strict in (True, False):
        with raises(CheckpointError, "0.bias", "4", "8", "0.weight"):
            contents.restore_model(store, 5, wider, strict=strict)


def test_missing_and_unexpected_weights_are_named(store):
    write(store, net(), {})
    other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 2))
    with raises(CheckpointError, "3.bias", "2.weight"):
        contents.restore_model(store, 5, other)


def test_without_strict_the_rest_is_loaded_and_differences_are_logged(store, caplog):
    model = net()
    write(store, model, {})
    other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 2))
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        contents.restore_model(store, 5, other, strict=False)
    assert torch.equal(other[0].weight, model[0].weight)
    assert "3.weight" in caplog.text
    assert "2.weight" in caplog.text


def test_a_rejected_model_is_left_as_it_was(store):
    write(store, net(), {})
    other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError):
        contents.restore_model(store, 5, other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_buffers_and_tied_weights_go_back(store):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.norm = nn.BatchNorm1d(3)

    model = Tied()
    model.norm(torch.randn(8, 3))
    optimizer = stepped(model, adamw)
    write(store, model, {"main": optimizer})
    other = Tied()
    restored = adamw(other)
    contents.restore_model(store, 5, other)
    contents.restore_optimizers(store.read(5, "optimizers"), other, {"main": restored})
    assert other.head.weight is other.embedding.weight
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert_same_state(state_by_name(model, optimizer), state_by_name(other, restored))


@pytest.mark.parametrize("text", ["[]", '"x"', "[" * 100_000, "{", '{"weight": 1, "bias": 2}'])
def test_a_malformed_description_of_the_weights_is_one_error(tmp_path, text):
    store = CheckpointStore(tmp_path)
    files = {"model.json": write_file(tmp_path / "model.json", text.encode())}
    store.path(1).mkdir()
    (tmp_path / "model.json").rename(store.path(1) / "model.json")
    manifest = make_manifest(step=1, parts=["model"], files=files, metrics={})
    (store.path(1) / "MANIFEST.json").write_bytes(manifest)
    store.verify(1)
    with pytest.raises(CheckpointError) as caught:
        contents.restore_model(store, 1, torch.nn.Linear(2, 2))
    assert "step-00000001" in str(caught.value)
    assert "\n" not in str(caught.value)
