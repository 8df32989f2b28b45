"""ViT: equal to transformers' model on the same weights, for images of one channel and of three."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises
from tests.models.parity import assert_close, assert_files_come_back, read_as_ours, reference_model

from trainwright.data.sources.digits import Digits
from trainwright.errors import ConfigError, DataError
from trainwright.models.vit import ViT

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}


def both(tmp_path, **changes):
    reference = reference_model("ViTForImageClassification", "ViTConfig", **{**SIZES, **changes})
    return read_as_ours(ViT, reference, tmp_path / "theirs"), reference


def small_vit(**changes):
    torch.manual_seed(0)
    sizes = {"num_labels": 10, "image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 32}
    return ViT(**{**sizes, "num_layers": 2, "num_heads": 4, "initializer_range": 0.3, **changes}).eval()


def images(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (1, 8, 8)),
        ({"num_channels": 3, "image_size": 12, "patch_size": 4, "num_labels": 3}, (3, 12, 12)),
        ({"image_size": [8, 12], "patch_size": [2, 3], "num_hidden_layers": 1}, (1, 8, 12)),
        ({"image_size": 9, "patch_size": 4, "qkv_bias": False, "hidden_act": "gelu_new"}, (1, 9, 9)),
    ],
)
def test_logits_and_loss_equal_those_of_transformers(tmp_path, changes, shape):
    model, reference = both(tmp_path, **changes)
    pixel_values, labels = images(3, *shape), torch.tensor([0, 2, 1])
    ours = model(pixel_values, labels)
    theirs = reference(pixel_values=pixel_values, labels=labels)
    assert_close(ours["logits"], theirs.logits)
    assert_close(ours["loss"], theirs.loss)


@pytest.mark.parametrize("changes", [{}, {"image_size": [8, 12], "num_channels": 3, "qkv_bias": False}])
def test_every_tensor_comes_back_as_it_was(tmp_path, changes):
    model, reference = both(tmp_path, **changes)
    again = assert_files_come_back(model, tmp_path / "theirs")
    pixel_values = images(2, *model.vit.image_shape)
    assert torch.equal(again(pixel_values=pixel_values).logits, reference(pixel_values=pixel_values).logits)


def test_a_plain_encoder_is_read_and_the_classifier_is_new(tmp_path):
    encoder = reference_model("ViTModel", "ViTConfig", **SIZES)
    encoder.save_pretrained(tmp_path / "encoder")
    model = ViT.from_pretrained(tmp_path / "encoder", strict=False, num_labels=7).eval()
    assert_close(model.vit(images(2, 1, 8, 8)), encoder(pixel_values=images(2, 1, 8, 8)).last_hidden_state)
    assert model(images(2, 1, 8, 8))["logits"].shape == (2, 7)


def test_sides_may_be_given_as_any_sequence(tmp_path):
    model = small_vit(image_size=(8, 12), patch_size=range(2, 4))
    assert model.settings["patch_size"] == [2, 3]
    assert ViT.from_pretrained(model.save_pretrained(tmp_path / "vit")).settings == model.settings


def test_digits_are_learned():
    pytest.importorskip("sklearn")
    samples = Digits().__getitems__(range(64))
    pixel_values = torch.stack([sample["pixel_values"] for sample in samples])
    labels = torch.stack([sample["labels"] for sample in samples])
    model = small_vit(initializer_range=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = model(pixel_values, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("shape", [(1, 8, 10), (3, 8, 8)])
def test_images_of_another_size_are_rejected_with_both_sizes(shape):
    with raises(DataError, str([2, *shape]), str([1, 8, 8])):
        small_vit()(images(2, *shape))


def test_patches_larger_than_the_image_are_rejected():
    with raises(ConfigError, "patch_size", "9", "image_size", "8"):
        small_vit(patch_size=9)


def test_a_size_of_three_sides_is_rejected():
    with raises(ConfigError, "image_size"):
        small_vit(image_size=[3, 8, 8])


@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_each_dropout_falls_in_training_only(name):
    model = small_vit(**{name: 0.5})
    pixel_values = images(2, 1, 8, 8)
    assert torch.equal(model(pixel_values)["logits"], model(pixel_values)["logits"])
    model.train()
    assert not torch.equal(model(pixel_values)["logits"], model(pixel_values)["logits"])


def test_the_base_preset_has_the_published_number_of_weights():
    with torch.device("meta"):
        model = ViT.from_preset("base")
    assert sum(parameter.numel() for parameter in model.parameters()) == 86_567_656
