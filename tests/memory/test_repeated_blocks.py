"""Stacks of equal blocks: one graph, the same bits."""

import copy

import pytest
import torch
from tests.memory.models import POINTS, SHIPPED, TEXT, Layer, Stack, assert_same_bits, make, update_of
from tests.messages import raises
from torch import nn
from torch._dynamo.utils import counters

from trainwright.errors import ConfigError
from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.memory.activation_checkpointing import recompute_layers
from trainwright.memory.repeated_blocks import choose_stacks, compile_stacks, read_repeated_blocks
from trainwright.models.generation import append_tokens


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_a_shipped_stack_is_compiled_once_and_has_the_same_bits(name):
    build, batch, _, stack, _ = SHIPPED[name]
    model = make(build)
    before = update_of(model, batch)
    compile_stacks(model, stack)
    assert_same_bits(update_of(model, batch), before)
    assert num_graphs() == 1
    assert_same_bits(update_of(model, batch), before)
    assert num_graphs() == 1


@pytest.mark.parametrize("save", [(), ("addmm",)])
def test_recomputed_blocks_are_compiled_once_and_have_the_same_bits(save):
    model = make(Stack)
    before = update_of(model, POINTS)
    recompute_layers(model, {"layers": "Layer", "save": list(save)} if save else "Layer")
    compile_stacks(model, "layers")
    assert_same_bits(update_of(model, POINTS), before)
    assert num_graphs() == 1


def test_a_deeper_stack_takes_no_more_compilations():
    model = make(lambda: Stack(12))
    compile_stacks(model, {"path": "layers", "backend": "aot_eager"})
    update_of(model, POINTS)
    assert num_graphs() == 1


def test_other_shapes_take_one_more_graph_and_an_evaluation_another():
    model, plain = make(SHIPPED["llama"][0]), make(SHIPPED["llama"][0])
    compile_stacks(model, "model.layers")
    for length in (8, 7, 6, 5):
        batch = {name: tensor[:, :length] for name, tensor in TEXT.items()}
        assert_same_bits(update_of(model, batch), update_of(plain, batch))
    assert num_graphs() == 2
    with torch.no_grad():
        assert torch.equal(model.eval()(**TEXT)["loss"], plain.eval()(**TEXT)["loss"])
    assert num_graphs() == 3


def test_a_copy_of_the_model_runs_its_own_weights():
    model = make(Stack)
    compile_stacks(model, "layers")
    twin = copy.deepcopy(model)
    for weight in twin.parameters():
        weight.data.zero_()
    assert update_of(twin, POINTS)["loss"] == 0
    assert update_of(model, POINTS)["loss"] > 0


class Putting(Layer):
    def forward(self, hidden, scale=None):
        get_event_storage().put_scalar("mean", hidden.mean())
        return super().forward(hidden, scale)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_what_blocks_put_is_the_same_and_adds_no_graphs(is_recomputed):
    def putting():
        model = Stack(3)
        model.layers = nn.ModuleList(Putting() for _ in range(3))
        return model

    def told(model):
        with EventStorage() as storage:
            for storage.step in (1, 2, 3):
                update_of(model, POINTS)
            return storage.history("mean")

    plain = told(make(putting))
    model = make(putting)
    if is_recomputed:
        recompute_layers(model, "Putting")
    compile_stacks(model, "layers")
    assert told(model) == [(step, pytest.approx(value)) for step, value in plain]
    assert num_graphs() <= 3  # the first block finds no name in the storage, later ones do


@pytest.mark.parametrize("before", [False, True])
def test_the_compiler_s_settings_of_the_process_are_left_as_they_were(before):
    setting = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    with torch._dynamo.config.patch({setting: before}):
        model = make(Stack)
        recompute_layers(model, "Layer")
        compile_stacks(model, "layers")
        update_of(model, POINTS)
        assert getattr(torch._dynamo.config, setting) is before
        # Also where a block cannot be compiled.
        failing = Stack(2)
        failing.layers = nn.ModuleList(Breaking() for _ in range(2))
        recompute_layers(failing, "Breaking")
        compile_stacks(failing, "layers")
        with raises(ConfigError, "model.compile_repeated_blocks", golden=False):
            update_of(failing, POINTS)
        assert getattr(torch._dynamo.config, setting) is before


def test_a_cache_of_generation_goes_by_the_block_itself():
    model = make(SHIPPED["llama"][0]).eval()
    ids = torch.arange(4)[None]
    plain = append_tokens(model, ids, max_new_tokens=3, temperature=0)
    compile_stacks(model, "model.layers")
    assert torch.equal(append_tokens(model, ids, max_new_tokens=3, temperature=0), plain)
    assert num_graphs() == 0


class Breaking(Layer):
    def forward(self, hidden, scale=None):
        print("here")  # what no graph can hold
        return super().forward(hidden, scale)


def test_a_block_that_is_not_a_single_graph_is_rejected_with_its_location():
    model = Stack(2)
    model.layers = nn.ModuleList(Breaking() for _ in range(2))
    compile_stacks(model, "layers", where="run.yaml:3")
    with raises(ConfigError, "model.compile_repeated_blocks", at="run.yaml:3"):
        update_of(model, POINTS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda layers: layers.__setitem__(2, Layer(chance=0.4)), ("0.3", "layers.2")),
        (lambda layers: layers.__setitem__(1, nn.Linear(8, 8)), ("layers.0",)),
        (
            lambda layers: layers[3].up.double(),
            ("up.weight", "16", "8", "layers.0"),
        ),
        (lambda layers: layers[1].add_module("more", nn.ReLU()), ("layers.0", "ReLU")),
    ],
)
def test_blocks_that_differ_are_rejected_with_the_first_difference(change, said):
    model = Stack()
    change(model.layers)
    with raises(ConfigError, *said):
        choose_stacks(model, "layers")


def test_the_blocks_of_other_stages_of_a_pipeline_are_left_out():
    model = make(Stack)
    model.layers[0] = nn.Identity()
    [(blocks, _)] = choose_stacks(model, "layers", is_whole=False).values()
    assert blocks == list(model.layers)[1:]
    with raises(ConfigError):
        choose_stacks(model, "layers")


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("layers", [("layers", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ({"path": "layers", "backend": "inductor"}, [("layers", "inductor")]),
        (
            {"a": {"backend": "aot_eager"}, "b": "inductor", "c": None},
            [("a", "aot_eager"), ("b", "inductor"), ("c", None)],
        ),
    ],
)
def test_a_setting_names_stacks_and_backends(setting, read):
    assert [(each.path, each.backend) for each in read_repeated_blocks(setting)] == read


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("layer", ("layers",)),
        ("layers.0", ("layers.0",)),
        (3, ("3",)),
        ([], ()),
        ({"backend": "inductor"}, ()),
        ({"path": "layers", "bakend": "inductor"}, ("backend",)),
        ({"layers": {"bakend": "inductor"}}, ("layers",)),
        ({"layers": "inducter"}, ("inducter", "inductor", "torch.compile")),
        # torch's debugging backend draws other random numbers in the recomputation: wrong gradients without a word.
        ({"path": "layers", "backend": "eager"}, ("eager", "compile_repeated_blocks.backend")),
        (["layers", "layers"], ()),
    ],
)
def test_a_setting_that_cannot_be_is_rejected(setting, said):
    with raises(ConfigError, *said):
        choose_stacks(Stack(), setting)
