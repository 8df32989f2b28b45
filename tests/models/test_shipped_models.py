"""What every shipped model promises: the loss, fresh weights, settings, presets, one graph, and foreign trainers."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
from contextlib import contextmanager

import pytest
import torch
import yaml
from tests.models.parity import assert_close
from torch import nn
from torch.utils.data import Dataset

from trainwright.config import builtin as built_ins
from trainwright.errors import ConfigError
from trainwright.models.model import Model
from trainwright.models.pretrained import shared_names

IDS = torch.randint(1, 61, (8, 6), generator=torch.Generator().manual_seed(1))
IMAGES = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(8) % 3
TOKEN_SIZES = {"vocab_size": 61, "hidden_size": 16, "num_layers": 1, "num_heads": 2}

MODELS = {
    "llama": ({**TOKEN_SIZES}, {"input_ids": IDS, "labels": IDS}),
    "gpt2": ({**TOKEN_SIZES}, {"input_ids": IDS, "labels": IDS}),
    "bert": ({**TOKEN_SIZES}, {"input_ids": IDS, "labels": IDS}),
    "bert_classifier": ({**TOKEN_SIZES, "num_labels": 3}, {"input_ids": IDS, "labels": CLASSES}),
    "vit": (
        {"num_labels": 3, "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16}
        | {"num_layers": 1, "num_heads": 2},
        {"pixel_values": IMAGES, "labels": CLASSES},
    ),
    "t5": ({**TOKEN_SIZES}, {"input_ids": IDS, "labels": IDS[:, :4]}),
    "cnn": ({"num_labels": 3, "num_channels": 1, "stage_channels": [8]}, {"pixel_values": IMAGES, "labels": CLASSES}),
}

FUSED = ("llama", "gpt2", "bert", "t5")
"""Models that can take their head and the loss in one."""

each_model = pytest.mark.parametrize("name", MODELS)


def model_class(name):
    module, _, attribute = built_ins.BUILT_INS["model"][name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def build(name, **changes):
    torch.manual_seed(0)
    return model_class(name)(**{**MODELS[name][0], **changes})


def without_labels(name):
    inputs = {key: value for key, value in MODELS[name][1].items() if key != "labels"}
    return inputs | ({"decoder_input_ids": IDS[:, :4]} if name == "t5" else {})


@contextmanager
def suppress_rejection_of(keyword):
    try:
        yield
    except ConfigError as error:
        if keyword not in str(error):
            raise


def test_every_built_in_model_is_tested_here():
    assert set(MODELS) == set(built_ins.BUILT_INS["model"])


@each_model
def test_every_weight_gets_a_gradient(name):
    model = build(name)
    outputs = model(**MODELS[name][1])
    assert outputs["loss"].dim() == 0
    outputs["loss"].backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


@each_model
def test_without_labels_there_is_no_loss(name):
    outputs = build(name)(**without_labels(name))
    assert set(outputs) == {"loss", "logits"}
    assert outputs["loss"] is None


@each_model
def test_the_loss_comes_from_the_criterion_attribute(name):
    model = build(name)
    mean = model(**MODELS[name][1])["loss"]
    model.criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=-100)
    labels = MODELS[name][1]["labels"]
    count = labels[:, 1:].numel() if name in ("llama", "gpt2") else labels.numel()
    torch.testing.assert_close(model(**MODELS[name][1])["loss"], mean * count)


@each_model
def test_labels_of_minus_100_do_not_count(name):
    model = build(name).eval()
    inputs = dict(MODELS[name][1])
    first = {key: value[:5] for key, value in inputs.items()}
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][5:] = -100
    if name == "t5":
        inputs["decoder_input_ids"] = model.shift_right(MODELS[name][1]["labels"])
    assert_close(model(**inputs)["loss"], model(**first)["loss"])


@each_model
def test_settings_build_the_model_again(name):
    model = build(name)
    assert isinstance(model, Model)
    torch.manual_seed(0)
    twin = type(model)(**model.settings)
    assert twin.settings == model.settings
    assert all(torch.equal(twin.state_dict()[key], value) for key, value in model.state_dict().items())


@each_model
def test_a_model_from_the_meta_device_is_whole_after_a_reset(name):
    expected = build(name)
    with torch.device("meta"):
        model = build(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(0)
    model.reset_parameters()
    assert {key for key, _ in model.named_parameters()} == {key for key, _ in expected.named_parameters()}
    assert model(**MODELS[name][1])["loss"].isfinite()
    assert not [key for key, _ in model.named_buffers()]


@each_model
def test_a_constructor_reads_no_file_and_moves_nothing(name, monkeypatch):
    made = model_class(name)  # imported, with whatever it reads for that

    def reject(*arguments, **options):
        raise AssertionError(f"a constructor opens {arguments}")

    for opener in ("builtins.open", "io.open", "os.open", "safetensors.safe_open", "torch.load"):
        monkeypatch.setattr(opener, reject)
    for method in ("to", "cpu", "cuda"):
        monkeypatch.setattr(nn.Module, method, reject)
        monkeypatch.setattr(torch.Tensor, method, reject)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = made(**MODELS[name][0])
        assert {one.device.type for one in [*model.parameters(), *model.buffers()]} == {device}


@each_model
def test_the_graph_has_no_breaks(name):
    model = build(name).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(**MODELS[name][1])["loss"], model(**MODELS[name][1])["loss"])


@each_model
def test_a_training_pass_is_one_graph_with_the_gradients_of_the_model(name):
    # With head and loss in one, as on a GPU.
    model, inputs = build(name, **({"fused_loss": True} if name in FUSED else {})), MODELS[name][1]
    expected = model(**inputs)["loss"]
    grads = torch.autograd.grad(expected, list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(**inputs)["loss"]
    assert_close(loss, expected)
    for found, reference in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
        assert_close(found, reference)


@pytest.mark.parametrize("name", FUSED)
def test_head_and_loss_in_one_give_the_loss_and_the_gradients_of_both(name):
    plain, fused, inputs = build(name), build(name, fused_loss=True), dict(MODELS[name][1])
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][2:4] = -100
    if name == "t5":
        inputs["decoder_input_ids"] = plain.shift_right(MODELS[name][1]["labels"])
    expected = plain(**inputs)["loss"]
    outputs = fused(**inputs)
    assert outputs["logits"] is None
    assert_close(outputs["loss"], expected)
    for found, reference in zip(
        torch.autograd.grad(outputs["loss"], list(fused.parameters())),
        torch.autograd.grad(expected, list(plain.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(found, reference, atol=1e-6, rtol=1e-4)
    assert fused.eval()(**inputs)["logits"] is not None


@each_model
def test_a_saved_model_is_read_back(name, tmp_path):
    model = build(name).eval()
    again = type(model).from_pretrained(model.save_pretrained(tmp_path / name)).eval()
    assert again.settings == model.settings
    assert torch.equal(again(**MODELS[name][1])["logits"], model(**MODELS[name][1])["logits"])


@each_model
def test_16_bits_give_a_loss_in_32(name):
    inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in MODELS[name][1].items()}
    outputs = build(name).bfloat16()(**inputs)
    assert outputs["logits"].dtype == torch.bfloat16
    assert outputs["loss"].dtype == torch.float32
    assert outputs["loss"].isfinite()


def presets():
    table = yaml.safe_load((importlib.resources.files("trainwright.models") / "presets.yaml").read_text())
    return [(family, preset) for family, sizes in table.items() for preset in sizes]


@pytest.mark.parametrize(("family", "preset"), presets())
def test_every_preset_builds_on_the_meta_device(family, preset):
    with torch.device("meta"):
        model = model_class(family).from_preset(preset)
    assert all(parameter.is_meta for parameter in model.parameters())


@each_model
def test_the_tiny_preset_runs(name):
    changes = {"num_labels": 3} if name == "bert_classifier" else {}
    model = model_class(name).from_preset("tiny", **changes)
    assert model(**MODELS[name][1])["loss"].isfinite()


@each_model
@pytest.mark.parametrize("value", [0, -1, 2.5, "4", None, True, [-1], {"a": 1}, float("nan")])
def test_a_keyword_makes_a_model_or_is_rejected_by_name(name, value):
    for keyword in inspect.signature(model_class(name)).parameters:
        # Any other error, or one that speaks of something else, is a failure.
        with suppress_rejection_of(keyword), torch.device("meta"):
            assert isinstance(build(name, **{keyword: value}), torch.nn.Module)


class Rows(Dataset):
    """The rows of a batch, as foreign trainers want them."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["labels"])

    def __getitem__(self, index):
        return {key: value[index] for key, value in self.batch.items()}


@each_model
def test_the_trainer_of_transformers_trains_saves_and_resumes_it_unchanged(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    safetensors_torch = pytest.importorskip("safetensors.torch")
    rows = Rows(MODELS[name][1])

    def trainer_of(model, max_steps):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=max_steps,
            lr_scheduler_type="constant",
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            save_strategy="steps",
            save_steps=3,
            disable_tqdm=True,
            logging_strategy="no",
        )
        return transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)

    model = build(name)
    trainer = trainer_of(model, 6)
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < start
    # What it saved is the whole model, tied weights included, and training goes on from it.
    safetensors_torch.load_model(again := build(name), tmp_path / "checkpoint-6" / "model.safetensors")
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    resumed = build(name)
    trainer_of(resumed, 6).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for one, other in zip(resumed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert len(shared_names(resumed)) == len(shared_names(build(name)))
