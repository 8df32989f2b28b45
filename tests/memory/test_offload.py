"""Named tensors on the host: the same bits, and never another tensor's."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from tests.memory.models import POINTS, SHIPPED, Stack, assert_same_bits, make, update_of
from tests.messages import raises
from torch import nn

from trainwright.errors import ConfigError, TrainwrightError
from trainwright.memory import offload
from trainwright.memory.activation_checkpointing import recompute_layers
from trainwright.memory.offload import HostCopies, HostCopy, OffloadedTensor, choose_parts, offload_tensors, offloading
from trainwright.models.layers.annotations import name_tensor


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_shipped_model_has_the_same_bits(name, is_recomputed):
    build, batch, block, _, tensor = SHIPPED[name]
    model = make(build)
    before = update_of(model, batch)
    offload_tensors(model, [tensor])
    if is_recomputed:
        recompute_layers(model, [block])
    assert_same_bits(update_of(model, batch), before)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_inputs_of_a_shipped_models_blocks_are_named_and_saved(name):
    build, batch, block, _, tensor = SHIPPED[name]
    model = make(build)
    recompute_layers(model, [block])
    with offloading([tensor]) as watch:
        model(**batch)
    assert watch.moved == {tensor}


def squares(names, act):
    """The gradient of what `act` makes of a tensor, with and without offloading."""
    answers = []
    for offloaded in (False, True):
        x = torch.linspace(-1, 2, 12).reshape(3, 4).requires_grad_()
        if offloaded:
            with offloading(names) as watch:
                loss = act(x).sum()
        else:
            loss = act(x).sum()
        loss.backward()
        answers.append(x.grad)
    assert torch.equal(*answers)
    return watch


def test_a_name_holds_for_what_was_saved_before_and_after_it():
    def act(x):
        hidden = x * 3
        before = hidden.square()
        name_tensor(hidden, "hidden")
        return before * hidden

    assert squares(["hidden"], act).moved == {"hidden"}


def test_views_of_a_named_tensor_come_back_as_they_were():
    def act(x):
        hidden = name_tensor(x * 3, "hidden")
        return hidden[1:, ::2].square().sum() + hidden.t().exp().sum() + hidden.flatten()[2:5].pow(3).sum()

    assert squares(["hidden"], act).moved == {"hidden"}


def test_other_names_are_recorded_but_not_offloaded():
    watch = squares(["hidden"], lambda x: name_tensor(x * 2, "other").square())
    assert (watch.received, watch.moved) == ({"other"}, set())


def test_nothing_of_a_pass_outlives_its_graph():
    x = torch.ones(4, requires_grad=True)
    with offloading(["hidden"]) as watch:
        hidden = name_tensor(x * 2, "hidden")
        loss = hidden.square().sum()
    dead = weakref.ref(hidden)
    del hidden
    loss.backward()
    del loss
    gc.collect()
    assert dead() is None
    assert watch.moved == {"hidden"}


@pytest.mark.parametrize("name", ["hidden", "unused"])
def test_a_change_in_place_before_backward_is_still_rejected(name):
    x = torch.ones(4, requires_grad=True)
    with offloading([name]):
        hidden = name_tensor(x * 2, "hidden")
        loss = hidden.square().sum()
    hidden.data.add_(0)  # as torch: what goes by .data is not seen
    hidden.detach().add_(1)
    with raises(TrainwrightError):
        loss.backward()


def test_a_tensor_that_changed_after_it_was_named_is_saved_as_it_is_then():
    def act(x):
        hidden = x * 2
        name_tensor(hidden, "hidden")
        hidden.add_(1)
        return hidden.square()

    squares(["hidden"], act)


def test_a_copy_has_the_whole_storage_and_returns_each_view_of_it():
    whole = torch.arange(12.0).reshape(3, 4)
    copies = HostCopies()
    copy_of_it = copies.of(whole)
    for piece in (whole, whole[1:, 1::2], whole.t(), whole.view(torch.int32)):
        returned = OffloadedTensor(copy_of_it, piece).tensor()
        assert (returned.shape, returned.stride(), returned.dtype) == (piece.shape, piece.stride(), piece.dtype)
        assert torch.equal(returned, piece)


def test_without_gradients_nothing_is_watched():
    model = make(Stack).eval()
    plain = model(**POINTS)["loss"]
    offload_tensors(model, ["no_such_tensor"])
    with torch.no_grad():
        assert torch.equal(model(**POINTS)["loss"], plain)


def test_a_name_that_the_model_does_not_use_is_rejected_with_the_nearest():
    model = make(Stack)
    offload_tensors(model, ["layer_inptu"], where="run.yaml:4")
    with raises(ConfigError, "model.offload", "layer_inptu", "layer_input", at="run.yaml:4"):
        update_of(model, POINTS)


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return {"loss": name_tensor(self.linear(x), "inside").square().mean()}


def test_a_name_inside_of_a_recomputed_layer_is_warned_of(caplog):
    model = nn.Sequential(Inside())
    offload_tensors(model, ["inside"])
    recompute_layers(model, ["Inside"])
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        model(POINTS["x"])["loss"].backward()
        model(POINTS["x"])["loss"].backward()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text[:57] for text in warnings] == ['model.offload: no tensor named "inside" is saved for the ']


def test_a_submodule_may_have_its_own_setting():
    model = make(lambda: nn.ModuleDict({"a": Stack(2), "b": Stack(2)}))
    assert {name: names for name, (_, names) in choose_parts(model, {"a": "layer_input", "b": ["x", "y"]}).items()} == {
        "a": {"layer_input"},
        "b": {"x", "y"},
    }
    before = update_of(model["a"], POINTS)
    offload_tensors(model, {"a": ["layer_input"]})
    assert_same_bits(update_of(copy.deepcopy(model)["a"], POINTS), before)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (True, ()),
        ([], ()),
        ({"layers.0": 3}, ("layers.0",)),
        ({"layer": ["x"]}, ("layers",)),
        ({"layers": ["x"]}, ("layers.*",)),
        ({"layers.0": ["x"], "*.0": ["x"]}, ("layers.0",)),
    ],
)
def test_a_setting_that_cannot_be_is_rejected(setting, said):
    with raises(ConfigError, *said):
        choose_parts(Stack(), setting)


class LateStream:
    """A stream whose copies are made when another stream waits for it, as late as on a device."""

    def __init__(self, device=None):
        self.queue, self.num_waits = [], 0

    def __enter__(self):
        torch._foreach_copy_ = self.copy  # restored by the fixture

    def __exit__(self, *_):
        pass

    def wait_stream(self, other):
        self.num_waits += 1
        while other.queue:
            targets, sources = other.queue.pop(0)
            for target, source in zip(targets, sources, strict=True):
                assert target.nbytes <= 100
                target.copy_(source)

    def copy(self, targets, sources, non_blocking):
        assert non_blocking
        assert self.num_waits, "a copy starts before what it reads is computed"
        self.queue.append((targets, sources))


@pytest.fixture
def streams(monkeypatch):
    """Makes copies as on a device; returns the streams: the one that computes, and those of the copies."""
    made = [LateStream()]

    def make_stream(device):
        made.append(LateStream())
        return made[-1]

    monkeypatch.setattr(offload, "reads_at_once", lambda device: False)
    monkeypatch.setattr(offload, "BLOCK_BYTES", 100)
    monkeypatch.setattr(torch, "Stream", make_stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: made[0])
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    return made


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_copies_by_way_of_a_stream_have_the_same_bits_and_at_most_two_are_back(streams, monkeypatch, is_recomputed):
    build, batch, block, _, tensor = SHIPPED["llama"]
    model = make(build)
    before = update_of(model, batch)
    back, most = [], 0

    class Counted(HostCopy):
        def begin_return(self):
            nonlocal most
            super().begin_return()
            if not any(each() is self._returning for each in back):
                back.append(weakref.ref(self._returning))
            most = max(most, sum(each() is not None for each in back))

    monkeypatch.setattr(offload, "HostCopy", Counted)
    offload_tensors(model, [tensor])
    if is_recomputed:
        recompute_layers(model, [block])
    assert_same_bits(update_of(model, batch), before)
    assert len(streams) == 2
    assert not streams[1].queue
    assert len(back) >= 3
    assert most == 2
    assert not any(each() is not None for each in back)


def test_a_copy_that_is_dropped_is_waited_for(streams):
    copy_of_it = HostCopies().of(torch.arange(4.0))
    assert streams[1].queue
    del copy_of_it
    gc.collect()
    assert not streams[1].queue
