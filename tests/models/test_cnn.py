"""CNN: images of any size, each by itself, and files that come back."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises
from tests.models.folders import assert_same_tensors, config_of
from tests.models.parity import assert_close

from trainwright.errors import ConfigError, DataError
from trainwright.models.cnn import CNN
from trainwright.models.model import AutoModel


def small_cnn(**changes):
    torch.manual_seed(0)
    return CNN(**{"num_labels": 10, "num_channels": 1, "stage_channels": [8, 16], **changes}).eval()


def images(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [(8, 8), (1, 1), (5, 31), (32, 32)])
def test_images_may_have_any_size(size):
    assert small_cnn()(images(3, 1, *size))["logits"].shape == (3, 10)


def test_each_stage_after_the_first_halves_the_image():
    model = small_cnn(stage_channels=[8, 16, 24], convolutions_per_stage=3)
    hidden = images(2, 1, 16, 12)
    shapes = []
    for stage in model.stages:
        assert len(stage) == 3
        hidden = stage(hidden)
        shapes.append(tuple(hidden.shape[1:]))
    assert shapes == [(8, 16, 12), (16, 8, 6), (24, 4, 3)]


def test_an_image_s_logits_do_not_depend_on_the_batch():
    model = small_cnn().train()
    batch = images(4, 1, 8, 8)
    assert_close(model(batch)["logits"][1:2], model(batch[1:2])["logits"])


def test_a_class_is_learned():
    model = small_cnn(num_labels=2).train()
    pixel_values = images(16, 1, 8, 8)
    labels = (pixel_values.mean(dim=(1, 2, 3)) > 0.5).long()
    pixel_values[labels == 1, :, :4] += 1.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(pixel_values, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_a_single_output_is_a_number_to_predict():
    model = small_cnn(num_labels=1)
    pixel_values, labels = images(3, 1, 8, 8), torch.tensor([0.5, 1.0, -2.0])
    outputs = model(pixel_values, labels)
    assert_close(outputs["loss"], (outputs["logits"][:, 0] - labels).square().mean())


@pytest.mark.parametrize("changes", [{}, {"num_labels": 1}, {"num_groups": 4, "convolutions_per_stage": 1}])
def test_a_saved_model_is_read_back(tmp_path, changes):
    model = small_cnn(**changes)
    folder = model.save_pretrained(tmp_path / "cnn")
    assert config_of(folder)["model_type"] == "trainwright_cnn"
    again = AutoModel.from_pretrained(folder).eval()
    assert type(again) is CNN
    assert again.settings == model.settings
    assert_same_tensors(model.state_dict(), again.state_dict())
    assert torch.equal(again(images(2, 1, 8, 8))["logits"], model(images(2, 1, 8, 8))["logits"])


def test_images_with_other_channels_are_rejected():
    with raises(DataError, "2", "3", "8", "1"):
        small_cnn()(images(2, 3, 8, 8))


def test_channels_that_do_not_split_into_groups_are_rejected():
    with raises(ConfigError, "12", "8"):
        small_cnn(stage_channels=[8, 12])


def test_a_model_without_stages_is_rejected():
    with raises(ConfigError, "stage_channels"):
        small_cnn(stage_channels=[])
