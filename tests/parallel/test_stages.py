"""What each stage of a pipeline keeps of a model, and which models are rejected; one process plays all ranks."""

import copy

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright.errors import ConfigError
from trainwright.models.bert import Bert
from trainwright.models.cnn import CNN
from trainwright.models.gpt2 import GPT2
from trainwright.models.llama import Llama
from trainwright.models.t5 import T5
from trainwright.models.vit import ViT
from trainwright.parallel.mesh import ALONE, Mesh
from trainwright.parallel.pipeline import reject_pipeline, split_layers

SMALL = {"vocab_size": 31, "hidden_size": 16, "num_heads": 2, "num_layers": 3}
BATCH = {"input_ids": torch.arange(20).reshape(2, 10), "labels": torch.arange(20).reshape(2, 10)}
IMAGES = {"pixel_values": torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8), "labels": torch.tensor([1, 2])}
MODELS = {
    "tied": (lambda: Llama(**SMALL), BATCH),
    "untied": (lambda: Llama(**SMALL, tie_embeddings=False), BATCH),
    "gpt2": (lambda: GPT2(**SMALL), BATCH),
    "bert": (lambda: Bert(**SMALL), BATCH),
    "vit": (lambda: ViT(num_labels=3, image_size=8, patch_size=4, hidden_size=16, num_heads=2, num_layers=3), IMAGES),
}


def stages_of(model, num_stages):
    """A copy of the model for each stage, cut to it."""
    copies = [copy.deepcopy(model) for _ in range(num_stages)]
    for place, each in enumerate(copies):
        split_layers(each, Mesh({**ALONE, "pipeline": num_stages}, place))
    return copies


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_stages_one_after_the_other_compute_what_the_model_does(name, num_stages):
    make, batch = MODELS[name]
    model = make()
    hidden = None
    for stage in stages_of(model, num_stages):
        hidden = stage(hidden, batch)
    expected = model(**batch)
    assert torch.equal(hidden["logits"], expected["logits"])
    assert torch.equal(hidden["loss"], expected["loss"])


@pytest.mark.parametrize("name", MODELS)
def test_the_shape_of_hidden_states_is_known_beforehand(name):
    make, batch = MODELS[name]
    model = make()
    assert model.hidden_shape(**batch) == model.begin(**batch).shape


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_stays_on_one_stage_and_shared_ones_on_both_ends(name):
    model = MODELS[name][0]()
    stages = stages_of(model, 3)
    held = [name for stage in stages for name, _ in stage.named_parameters()]
    shared = list(stages[0].stage.tied)
    assert sorted(held) == sorted([name for name, _ in model.named_parameters()] + shared)
    assert [stage.stage.tied for stage in stages] == [stages[0].stage.tied] * 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tied", ("model.embed_tokens.weight",)),
        ("untied", ()),
        ("gpt2", ("transformer.wte.weight",)),
        ("bert", ("bert.embeddings.word_embeddings.weight",)),
        ("vit", ()),
    ],
)
def test_what_both_ends_share_is_one_weight_there_too(name, expected):
    first, last = stages_of(MODELS[name][0](), 2)
    assert first.stage.tied == last.stage.tied == expected
    for each in expected:
        weight = dict(last.named_parameters(remove_duplicate=False))[each]
        names = [other for other, value in last.named_parameters(remove_duplicate=False) if value is weight]
        assert len(names) == 2  # the table and the head


def test_a_last_stage_keeps_of_the_embeddings_only_what_it_shares():
    _, last = stages_of(Bert(**SMALL), 2)
    assert [name for name, _ in last.bert.embeddings.named_parameters()] == ["word_embeddings.weight"]


def test_blocks_are_dealt_out_in_order_and_the_first_stages_have_one_more():
    shares = [stage.stage.blocks for stage in stages_of(Llama(**{**SMALL, "num_layers": 8}), 3)]
    assert shares == [range(3), range(3, 6), range(6, 8)]


def test_a_copy_of_a_stage_runs_itself():
    first, _ = stages_of(Llama(**SMALL), 2)
    twin = copy.deepcopy(first)
    with torch.no_grad():
        first.model.embed_tokens.weight.zero_()
    assert twin(None, BATCH).any()
    assert not first(None, BATCH).any()


@pytest.mark.parametrize(
    "make", [lambda: CNN(num_labels=3), lambda: T5(vocab_size=31), lambda: nn.Linear(2, 2)], ids=["cnn", "t5", "plain"]
)
def test_a_model_without_a_stack_of_blocks_is_rejected_by_name(make):
    model = make()
    with raises(ConfigError, type(model).__name__, "2", "pipeline"):
        reject_pipeline(model, 2)


def test_more_stages_than_blocks_are_rejected():
    with raises(ConfigError, "4", "3", "model.layers", "pipeline"):
        split_layers(Llama(**SMALL), Mesh({**ALONE, "pipeline": 4}, 0))


class Doubled(Llama):
    def forward(self, **batch):
        return {name: 2 * value for name, value in super().forward(**batch).items()}


class OtherBeginning(Llama):
    def begin(self, input_ids, **batch):
        return 2 * super().begin(input_ids, **batch)


@pytest.mark.parametrize("kind", [Doubled, OtherBeginning])
def test_a_subclass_whose_stages_would_compute_something_else_is_rejected(kind):
    with raises(ConfigError, kind.__name__):
        reject_pipeline(kind(**SMALL), 2)


class Renamed(Llama):
    """Changes nothing that a stage runs."""


def test_a_subclass_that_computes_the_same_is_taken():
    assert reject_pipeline(Renamed(**SMALL), 2) is None  # as Llama itself


def test_own_methods_that_the_schedule_would_not_call_are_rejected_by_name_and_location():
    with raises(ConfigError, "MyTrainer.train_step", "MyTask.forward", at="run.yaml:3"):
        reject_pipeline(Llama(**SMALL), 2, own_parts=("MyTrainer.train_step", "MyTask.forward"), where="run.yaml:3")


def test_hooks_that_no_stage_would_call_are_rejected():
    model = Llama(**SMALL)
    model.model.register_forward_hook(lambda *_: None)
    with raises(ConfigError):
        reject_pipeline(model, 2)


def test_hooks_on_a_block_are_called_by_its_stage():
    model, calls = Llama(**SMALL), []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(0))
    split_layers(model, Mesh({**ALONE, "pipeline": 2}, 0))
    model(None, BATCH)
    assert calls == [0]


def test_a_weight_that_blocks_of_two_stages_share_is_rejected():
    model = Llama(**SMALL)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    with raises(ConfigError, "layers.0.mlp"):
        split_layers(model, Mesh({**ALONE, "pipeline": 2}, 0))
