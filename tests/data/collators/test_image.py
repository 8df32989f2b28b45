"""Pictures."""

import numpy as np
import pytest
import torch
from tests.messages import raises

from trainwright.data.collators.image import Image
from trainwright.errors import ConfigError, DataError

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
AS_FLOATS = torch.from_numpy(PIXELS).permute(2, 0, 1) / 255


def only(collator, picture):
    return collator([{"image": picture}])["pixel_values"][0]


def pil():
    return pytest.importorskip("PIL.Image")


def test_pil_images_arrays_and_tensors_give_the_same_pixels():
    forms = [pil().fromarray(PIXELS), PIXELS, AS_FLOATS, torch.from_numpy(PIXELS).permute(2, 0, 1), AS_FLOATS.double()]
    for form in forms:
        pixels = only(Image(), form)
        assert pixels.dtype is torch.float32
        assert torch.equal(pixels, AS_FLOATS)


def test_read_only_and_mirrored_arrays_are_taken():
    frozen = PIXELS.copy()
    frozen.setflags(write=False)
    assert torch.equal(only(Image(), frozen), AS_FLOATS)
    assert torch.equal(only(Image(), PIXELS[:, ::-1]), AS_FLOATS.flip(-1))


def test_gray_becomes_colour_and_colour_gray():
    gray = only(Image(channels=1), PIXELS)
    assert gray.shape == (1, 4, 6)
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    assert torch.allclose(gray[0], (AS_FLOATS * weights).sum(0))
    assert torch.allclose(gray, only(Image(channels=1), pil().fromarray(PIXELS)), atol=1 / 255)
    colour = only(Image(channels=3), PIXELS[:, :, 0])
    assert torch.equal(colour, AS_FLOATS[:1].expand(3, -1, -1))
    with_alpha = np.concatenate([PIXELS, PIXELS[:, :, :1]], axis=2)
    assert torch.equal(only(Image(channels=3), with_alpha), AS_FLOATS)
    assert torch.equal(only(Image(), pil().fromarray(with_alpha, "RGBA")), AS_FLOATS)


def test_pictures_of_unequal_size_are_resized():
    batch = Image(size=[5, 7])([{"image": PIXELS}, {"image": PIXELS[:3, :3]}])
    assert batch["pixel_values"].shape == (2, 3, 5, 7)
    flat = only(Image(size=8), np.full((3, 5, 3), 51, np.uint8))
    assert torch.allclose(flat, torch.full((3, 8, 8), 0.2))


def test_a_picture_is_resized_the_same_whatever_the_others_are():
    alone = Image(size=3)([{"image": PIXELS}])["pixel_values"][0]
    among = Image(size=3)([{"image": PIXELS[:3]}, {"image": PIXELS}])["pixel_values"][1]
    assert torch.equal(alone, among)


def test_mean_and_std_normalise_each_channel():
    pixels = only(Image(mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7]), PIXELS)
    for channel in range(3):
        expected = (AS_FLOATS[channel] - 0.1 * (channel + 1)) / (0.5 + 0.1 * channel)
        assert torch.allclose(pixels[channel], expected)


def test_flipping_mirrors_some_pictures_and_depends_on_the_seed_alone():
    collator = Image(flip=True)
    assert not collator.draws_nothing
    assert Image().draws_nothing
    samples = [{"image": PIXELS}] * 32
    torch.manual_seed(1)
    first = collator(samples)["pixel_values"]
    torch.manual_seed(1)
    assert torch.equal(collator(samples)["pixel_values"], first)
    mirrored = [torch.equal(one, AS_FLOATS.flip(-1)) for one in first]
    assert all(torch.equal(one, AS_FLOATS) for one, other in zip(first, mirrored, strict=True) if not other)
    assert 4 < sum(mirrored) < 28


def test_the_sample_s_own_tensor_is_left_as_it_is():
    tensor = AS_FLOATS.clone()
    torch.manual_seed(0)
    Image(flip=True, mean=0.5)([{"pixel_values": tensor}] * 8)
    assert torch.equal(tensor, AS_FLOATS)


def test_labels_and_other_fields_come_along():
    batch = Image(classes=["cat", "dog"])([{"pixel_values": PIXELS, "label": "dog", "weight": 0.5}])
    assert batch["labels"].tolist() == [1]
    assert batch["weight"].tolist() == [0.5]
    assert Image()([{"image": PIXELS}]).keys() == {"pixel_values"}
    assert Image(image="photo", label="kind")([{"photo": PIXELS, "kind": 3}])["labels"].tolist() == [3]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("cat.png", ()),
        (PIXELS.astype(np.int32), ()),
        (torch.from_numpy(PIXELS.astype(np.int32)).movedim(-1, 0), ("torch.int32",)),
        (np.array([["a", "b"]]), ()),
        (np.array(5), ("0",)),
        (np.zeros((4, 6, 7), np.uint8), ("4", "6", "7")),
        (torch.zeros(4, 6, 3, 3), ("4",)),
        (torch.zeros(5, 4, 6), ("5", "4", "6")),
        (PIXELS[:3], ("3", "6", "0", "4")),
        (PIXELS[:, :, :1], ("1", "4", "6")),
    ],
)
def test_what_is_no_picture_is_rejected_by_field_and_sample(value, problem):
    with raises(DataError, *problem, "image", "1", "0"):
        Image()([{"image": PIXELS}, {"image": value}])


def test_a_pil_image_of_an_unusual_mode_is_rejected():
    with raises(DataError, "0", "F"):
        only(Image(channels=1), pil().fromarray(np.ones((2, 2), np.float32)))


def test_fields_that_are_missing_or_double_are_rejected():
    with raises(DataError, "pixel_values"):
        Image()([{"x": 1}])
    with raises(DataError, "pixel_values"):
        Image()([{"image": PIXELS, "pixel_values": PIXELS}])
    with raises(DataError, "1", "3"):
        Image(mean=[0, 0, 0])([{"image": PIXELS[:, :, 0]}])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"channels": 2}, ("2",)),
        ({"size": [1, 2, 3]}, ()),
        ({"size": 0}, ("0",)),
        ({"std": 0.0}, ("0.0",)),
        ({"mean": [1, 2], "channels": 3}, ()),
    ],
)
def test_arguments_that_cannot_work_are_rejected(arguments, problem):
    with raises(ConfigError, *problem):
        Image(**arguments)


def test_bytes_beside_floats_are_scaled_too():
    white = [{"image": np.full(shape, 255, np.uint8)} for shape in ((8, 8, 3), (10, 7, 3))]
    assert Image(size=8)(white)["pixel_values"].amax((1, 2, 3)).tolist() == pytest.approx([1.0, 1.0])
    mixed = [{"image": np.full((4, 4), 255, np.uint8)}, {"image": np.ones((4, 4), np.float32)}]
    assert Image()(mixed)["pixel_values"].unique().tolist() == [1.0]
