"""Image: images of any common format as one float tensor, resized and normalized, with their classes.

Class names become numbers as in classification.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.data.collators.classification import Labels
from trainwright.data.collators.samples import columns_of, names_of, sample_error, stack_column
from trainwright.errors import ConfigError, DataError

FIELDS = ("pixel_values", "image")

# The luminance of red, green and blue (ITU-R 601), as in PIL.
LUMINANCE = (0.299, 0.587, 0.114)

_PLAIN_MODES = {"L": "L", "1": "L", "LA": "L", "RGB": "RGB", "RGBA": "RGB", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}


class Image:
    """Returns `pixel_values`, float32 [samples, channels, height, width] from 0 to 1, and `labels` if there are any.

    An image is a PIL image, a numpy array [height, width, channels] or [height, width], or a tensor [channels,
    height, width]; uint8 values are divided by 255, floats are unchanged. It is in the field `image`, by default
    `pixel_values` or `image`. `channels` 1 converts to gray, 3 to color. `size`, one number or [height, width],
    resizes with antialiasing. `mean` and `std`, one number or one per channel, normalize. `flip` mirrors half of the
    images at random. Labels are as in `classification`.

    >>> batch = Image(mean=0.5, std=0.5)([{"image": np.full((2, 2, 3), 255, np.uint8), "label": 3}])
    >>> tuple(batch["pixel_values"].shape), batch["pixel_values"].max().item(), batch["labels"].tolist()
    ((1, 3, 2, 2), 1.0, [3])
    """

    def __init__(
        self,
        *,
        size: int | Sequence[int] | None = None,
        channels: int | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        flip: bool = False,
        image: str | None = None,
        label: str | None = None,
        classes: Sequence[str | int] | None = None,
        drop: Sequence[str] = (),
    ) -> None:
        if channels not in (None, 1, 3):
            raise ConfigError(f"channels is {channels!r}. Use 1 for gray or 3 for color.")
        self.size = _read_size(size)
        self.channels = channels
        self.mean = _read_per_channel("mean", mean, 0.0, channels)
        self.std = _read_per_channel("std", std, 1.0, channels)
        if any(value <= 0 for value in self.std):
            raise ConfigError(f"std is {std!r}. Use numbers above 0.")
        self.flip = flip
        self.draws_nothing = not flip
        self.image = image
        self.labels = Labels(classes=classes, field=label)
        self.drop = names_of("drop", drop)

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Returns the batch, on the host."""
        columns = columns_of(samples, drop=self.drop)
        wanted = [name for name in ((self.image,) if self.image else FIELDS) if name in columns]
        if len(wanted) != 1:
            found = " and ".join(wanted) if wanted else f"no {self.image or ' or '.join(FIELDS)}"
            fields = ", ".join(columns) or "none"
            raise DataError(f"The samples have {found}; their fields are {fields}. Set image to the image's field.")
        field = wanted[0]
        images = [self._read(value, field, number) for number, value in enumerate(columns.pop(field))]
        for number, image in enumerate(images):
            if image.shape != images[0].shape:
                shapes = f"{tuple(image.shape)}, but that of sample 0 {tuple(images[0].shape)}"
                raise sample_error(
                    number, field, f"has the shape {shapes} (channels, height, width). Set size and channels."
                )
        if len({image.dtype for image in images}) > 1:
            images = [_to_float(image) for image in images]  # otherwise, stacking would not scale the bytes
        batch = {"pixel_values": self._finish(torch.stack(images), field)}
        labels = self.labels.take(columns)
        batch |= {name: stack_column(column, name) for name, column in columns.items()}
        return batch if labels is None else {**batch, "labels": labels}

    def _read(self, value: Any, field: str, number: int) -> Tensor:
        """Returns an image as bytes or floats [channels, height, width], resized because sizes may differ."""
        image = _to_tensor(value, self.channels, field, number)
        if self.channels is not None and image.shape[0] != self.channels:
            image = _change_channels(_to_float(image), self.channels, field, number)
        if self.size is not None and tuple(image.shape[1:]) != self.size:
            # One at a time, so the result does not depend on the other images of the batch.
            batch_of_one = _to_float(image).unsqueeze(0)
            image = F.interpolate(batch_of_one, self.size, mode="bilinear", antialias=True, align_corners=False)[0]
        return image

    def _finish(self, images: Tensor, field: str) -> Tensor:
        pixels = _to_float(images)  # a new tensor, which is modified below
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, pixels.shape[1]):
                problem = f"has {pixels.shape[1]} channels, but {name} has {len(values)} values. Set channels."
                raise sample_error(0, field, problem)
        if self.mean != (0.0,) or self.std != (1.0,):
            pixels.sub_(torch.tensor(self.mean).view(-1, 1, 1)).div_(torch.tensor(self.std).view(-1, 1, 1))
        if self.flip:
            mirrored = torch.rand(len(pixels)) < 0.5
            pixels[mirrored] = pixels[mirrored].flip(-1)
        return pixels


def _to_tensor(value: Any, channels: int | None, field: str, number: int) -> Tensor:
    """Returns an image of any type as a tensor [channels, height, width] of bytes or floats."""
    if hasattr(value, "convert") and hasattr(value, "mode"):  # a PIL image, without importing PIL
        mode = {1: "L", 3: "RGB"}[channels] if channels is not None else _PLAIN_MODES.get(value.mode)
        if mode is None or value.mode not in _PLAIN_MODES:
            raise sample_error(number, field, f'is a PIL image with mode "{value.mode}". Convert it to L or RGB.')
        value = np.array(value if value.mode == mode else value.convert(mode))
    if not isinstance(value, (np.ndarray, Tensor)):
        problem = f"is a {type(value).__name__}. Use a PIL image, a numpy array or a tensor."
        raise sample_error(number, field, problem)
    if value.ndim not in (2, 3):
        raise sample_error(number, field, f"has {value.ndim} dims. Use 3: height, width and channels, or 2 for gray.")
    if isinstance(value, np.ndarray) and value.dtype != np.uint8 and value.dtype.kind != "f":
        raise sample_error(number, field, f"has {value.dtype} values. Use bytes (uint8), or floats from 0 to 1.")
    form = "[channels, height, width]" if isinstance(value, Tensor) else "[height, width, channels]"
    if isinstance(value, np.ndarray):
        # torch cannot share memory that is read-only or has negative strides.
        shared = value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy()
        image = torch.from_numpy(shared)
        image = image if image.ndim == 2 else image.movedim(-1, 0)
    else:
        image = value
    image = image.unsqueeze(0) if image.ndim == 2 else image
    if image.shape[0] not in (1, 2, 3, 4) or not image.numel():
        raise sample_error(number, field, f"has the shape {tuple(value.shape)}. Use {form}, with 1 to 4 channels.")
    if image.dtype is not torch.uint8 and not image.is_floating_point():
        raise sample_error(number, field, f"has {image.dtype} values. Use bytes (uint8), or floats from 0 to 1.")
    return image


def _to_float(image: Tensor) -> Tensor:
    return image.float().div_(255) if image.dtype is torch.uint8 else image.float()


def _change_channels(image: Tensor, channels: int, field: str, number: int) -> Tensor:
    """Returns an image with 1 or 3 channels; an alpha channel is dropped."""
    if image.shape[0] == 2:
        raise sample_error(number, field, f"has 2 channels, neither gray nor color. Use 1 or {channels}.")
    if image.shape[0] == 1:
        return image.expand(channels, -1, -1)
    color = image[:3]
    return color if channels == 3 else (color * torch.tensor(LUMINANCE).view(3, 1, 1)).sum(0, keepdim=True)


def _read_size(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or any(type(one) is not int or one < 1 for one in pair):
        raise ConfigError(f"size is {size!r}. Use one integer, or [height, width].")
    return pair


def _read_per_channel(
    name: str, value: float | Sequence[float] | None, default: float, channels: int | None
) -> tuple[float, ...]:
    if value is None:
        return (default,)
    values = tuple(float(one) for one in value) if isinstance(value, Sequence) else (float(value),)
    if not values or (channels is not None and len(values) not in (1, channels)):
        raise ConfigError(f"{name} is {value!r}. Use one number, or one per channel.")
    return values
