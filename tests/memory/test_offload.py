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
from trainwright.memory.activation_checkpointing import recompute_layers
from trainwright.memory.offload import HostCopies, OffloadedTensor, choose_parts, offload_tensors, offloading
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
