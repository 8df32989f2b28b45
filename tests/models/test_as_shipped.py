"""A model that was changed is not written under the name of what it was; one that only trains otherwise is."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from tests.messages import raises
from tests.models.folders import config_of, our_llama, reference, tensors_in
from torch import nn

from trainwright.errors import CheckpointError
from trainwright.models.llama import Llama
from trainwright.models.lora import add_lora, merge_lora
from trainwright.models.model import Model
from trainwright.models.saving import changes_of, changes_of_theirs


def double(module, inputs, output):
    return 2 * output


class Doubled(Llama):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        return {**outputs, "logits": 2 * outputs["logits"]}


class OtherScore(Llama):
    def _score(self, hidden, labels):
        return super()._score(2 * hidden, labels)


class OtherHead(Llama):
    def __getattr__(self, name):
        return super().__getattr__(name)


class Hooked(Llama):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.model.norm.register_forward_hook(double)


class OtherTheta(Llama):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.model.rope_theta = 77.0


class OtherPart(Llama):
    def __init__(self, *, slope=0.1, **settings):
        super().__init__(**settings)
        self.model.norm = nn.LayerNorm(self.settings["hidden_size"], bias=False)


class Answering(Doubled):
    hugging_face_architectures = Llama.hugging_face_architectures


class Renamed(Llama):
    """Draws other weights, and is otherwise what it was."""

    def __init__(self, *, scale=1.0, **settings):
        super().__init__(**settings)
        self.scale = scale

    def reset_parameters(self):
        super().reset_parameters()

    def more(self):
        return 3


def subclass(kind, **changes):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 64}
    return kind(**sizes, **changes)


@pytest.mark.parametrize("kind", [Llama, Renamed, Answering])
def test_what_computes_as_published_is_written(kind, tmp_path):
    folder = subclass(kind).save_pretrained(tmp_path / "model")
    assert config_of(folder)["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Doubled, ("Doubled.forward", "--format")),
        (OtherScore, ("OtherScore._score",)),
        (OtherHead, ("OtherHead.__getattr__",)),
        (Hooked, ("model.norm",)),
        (OtherTheta, ("rope_theta", "77.0", "10000.0")),
        (OtherPart, ("model.norm", "LayerNorm")),
    ],
)
def test_a_subclass_that_computes_something_else_is_rejected(kind, message, tmp_path):
    with raises(CheckpointError, *message):
        subclass(kind).save_pretrained(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def change_part(model):
    model.model.layers[0].mlp = nn.Linear(4, 4)


def change_epsilon(model):
    model.model.norm = nn.RMSNorm(32, eps=0.5)


def change_forward(model):
    model.model.layers[1].forward = lambda hidden, *_, **__: hidden


def change_hooks(model):
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def change_attribute(model):
    model.model.layers[1].self_attn.head_size = 16


def change_helper(model):
    class Other(type(model.model.norm)):
        def _load_from_state_dict(self, *args):
            super()._load_from_state_dict(*args)

    model.model.norm.__class__ = Other


def change_size(model):
    model.lm_head.weight = nn.Parameter(torch.zeros(9, 32))


def change_weights(model):
    model.model.extra = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_part, "model.layers.0.mlp is a Linear, not a SwiGLU"),
        (change_epsilon, "model.norm is RMSNorm((32,), eps=0.5, elementwise_affine=True), not ((32,), eps=1e-05, "),
        (change_forward, "model.layers.1 has another forward"),
        (change_hooks, "model.layers.0.mlp.up_proj has hooks that may change its inputs or outputs: change_hooks"),
        (change_attribute, "model.layers.1.self_attn has head_size 16, not 8"),
        (change_helper, "model.norm is a Other, not a RMSNorm, whose _load_from_state_dict it replaces"),
        (change_size, "lm_head.weight is [9, 32], not [61, 32]"),
        (change_weights, "model.extra is [2], not absent"),
    ],
)
def test_a_model_that_was_changed_says_where(change, said):
    model = our_llama(tie_embeddings=False)
    assert changes_of(model) == []
    change(model)
    [found] = changes_of(model)
    assert found.startswith(said)


def test_a_model_without_adapters_is_not_advised_to_merge_them(tmp_path):
    model = our_llama()
    change_part(model)
    with raises(CheckpointError, "SwiGLU", "--format"):
        model.save_pretrained(tmp_path / "model")


def test_adapters_are_named_until_they_are_merged(tmp_path):
    model = our_llama()
    add_lora(model, match="*.q_proj", rank=2)
    with raises(CheckpointError, "q_proj", "LoRALinear"):
        model.save_pretrained(tmp_path / "model")
    merge_lora(model)
    model.save_pretrained(tmp_path / "model")


def test_the_criterion_may_be_any_and_its_weights_stay_behind(tmp_path):
    model = our_llama()
    model.criterion = nn.CrossEntropyLoss(weight=torch.ones(61))
    folder = model.save_pretrained(tmp_path / "model")
    assert not any("criterion" in key for key in tensors_in(folder))
    Llama.from_pretrained(folder)


def test_a_users_own_model_is_compared_with_itself(tmp_path):
    class Own(Model):
        hugging_face_types = ("own",)
        hugging_face_architectures = MappingProxyType({"own": "Own"})

        def __init__(self, *, width=2):
            super().__init__()
            self.settings = {"width": width}
            self.layer = nn.Linear(width, width)

        def to_hugging_face(self):
            return dict(self.settings)

        def forward(self, inputs):
            return {"logits": self.layer(inputs)}

    assert config_of(Own(width=3).save_pretrained(tmp_path / "own"))["architectures"] == ["Own"]


def test_models_of_transformers_are_looked_at_too():
    theirs = reference()
    assert changes_of_theirs(theirs) == []

    class Mine(type(theirs)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class MLP(nn.Linear):
        pass

    assert changes_of_theirs(Mine(theirs.config)) == ["Mine.forward replaces that of LlamaForCausalLM"]
    theirs.model.layers[0].mlp = MLP(32, 32)
    assert changes_of_theirs(theirs) == ["model.layers.0.mlp is a MLP, not a LlamaMLP"]


def test_hooks_attributes_and_weights_of_transformers_models_count():
    theirs = reference()
    theirs(input_ids=torch.zeros(1, 4, dtype=torch.long), output_hidden_states=True)  # leaves hooks of its own
    assert changes_of_theirs(theirs) == []
    theirs.model.norm.register_forward_hook(double)
    theirs.model.layers[0].self_attn.scaling = 3.0
    theirs.extra = nn.Linear(2, 2, bias=False)
    assert changes_of_theirs(theirs) == [
        "model.layers.0.self_attn has scaling 3.0, not 0.3535533905932738",
        "model.norm has hooks that may change its inputs or outputs: double",
        "extra.weight is [2, 2], not absent",
    ]
