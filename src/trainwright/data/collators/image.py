"""Image: pictures of any usual form, as one float tensor, resized and normalised, with their classes.

Names of classes become numbers as in classification.py.
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

# How bright the eye sees red, green and blue (ITU-R 601), as PIL does.
LUMINANCE = (0.299, 0.587, 0.114)

_PLAIN_MODES = {"L": "L", "1": "L", "LA": "L", "RGB": "RGB", "RGBA": "RGB", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}


class Image:
    """Gives `pixel_values`, float32 [samples, channels, height, width] from 0 to 1, and `labels` where there are any.

    A picture is a PIL image, a numpy array [height, width, channels] or [height, width], or a tensor [channels,
    height, width]; whole numbers are bytes and are divided by 255, floats are taken as they are. It stands in the
    field `image`, or by default in `pixel_values` or `image`. `channels` 1 makes gray of colour, 3 colour of gray.
    `size`, one number or [height, width], resizes with antialiasing. `mean` and `std`, one number or one for each
    channel, normalise. `flip` mirrors every second picture at random. Labels are as in `classification`.

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
            raise ConfigError(f"channels is {channels!r}. Use 1 for gray, 3 for colour, or leave it out.")
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
            raise DataError(
                f"The samples have {found}; their fields are {', '.join(columns) or 'none'}. "
                "Set image to the field that holds the picture."
            )
        field = wanted[0]
        pictures = [self._read(value, field, number) for number, value in enumerate(columns.pop(field))]
        for number, picture in enumerate(pictures):
            if picture.shape != pictures[0].shape:
                raise sample_error(
                    number,
                    field,
                    f"is a picture of {_shown(picture)}, that of sample 0 of {_shown(pictures[0])} "
                    "(channels × height × width). Set size and channels to make them equal.",
                )
        if len({picture.dtype for picture in pictures}) > 1:
            pictures = [_to_float(picture) for picture in pictures]  # or bytes beside floats would stay 0 … 255
        batch = {"pixel_values": self._finish(torch.stack(pictures), field)}
        labels = self.labels.take(columns)
        batch |= {name: stack_column(column, name) for name, column in columns.items()}
        return batch if labels is None else {**batch, "labels": labels}

    def _read(self, value: Any, field: str, number: int) -> Tensor:
        """Returns a picture as bytes or floats [channels, height, width]; it is resized here, for sizes may differ."""
        picture = _to_tensor(value, self.channels, field, number)
        if self.channels is not None and picture.shape[0] != self.channels:
            picture = _change_channels(_to_float(picture), self.channels, field, number)
        if self.size is not None and tuple(picture.shape[1:]) != self.size:
            # One at a time: a picture then comes out the same to the bit whatever the others of its batch are.
            batch_of_one = _to_float(picture).unsqueeze(0)
            picture = F.interpolate(batch_of_one, self.size, mode="bilinear", antialias=True, align_corners=False)[0]
        return picture

    def _finish(self, pictures: Tensor, field: str) -> Tensor:
        pixels = _to_float(pictures)  # a tensor of its own, as stacked: what follows may write into it
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, pixels.shape[1]):
                raise sample_error(
                    0, field, f"has {pixels.shape[1]} channels, and {name} has {len(values)} values. Set channels."
                )
        if self.mean != (0.0,) or self.std != (1.0,):
            pixels.sub_(torch.tensor(self.mean).view(-1, 1, 1)).div_(torch.tensor(self.std).view(-1, 1, 1))
        if self.flip:
            mirrored = torch.rand(len(pixels)) < 0.5
            pixels[mirrored] = pixels[mirrored].flip(-1)
        return pixels


def _to_tensor(value: Any, channels: int | None, field: str, number: int) -> Tensor:
    """Returns a picture of any form as a tensor [channels, height, width] of bytes or floats."""
    if hasattr(value, "convert") and hasattr(value, "mode"):  # PIL's, without importing it
        mode = {1: "L", 3: "RGB"}[channels] if channels is not None else _PLAIN_MODES.get(value.mode)
        if mode is None or value.mode not in _PLAIN_MODES:
            raise sample_error(
                number, field, f'is a PIL image of the mode "{value.mode}". Convert it to L or RGB in the dataset.'
            )
        value = np.array(value if value.mode == mode else value.convert(mode))
    if isinstance(value, (np.ndarray, Tensor)) and value.ndim not in (2, 3):
        raise sample_error(number, field, f"has {value.ndim} dims. Give 3: height, width and channels, or 2 for gray.")
    if isinstance(value, np.ndarray) and value.dtype != np.uint8 and value.dtype.kind != "f":
        raise sample_error(number, field, f"holds {value.dtype} values. Give bytes (uint8), or floats from 0 to 1.")
    if isinstance(value, np.ndarray):
        # torch shares no memory that is read-only or runs backwards.
        shared = value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy()
        picture, form = torch.from_numpy(shared), "[height, width, channels]"
        picture = picture.unsqueeze(0) if picture.ndim == 2 else picture.movedim(-1, 0)
    elif isinstance(value, Tensor):
        picture, form = value.unsqueeze(0) if value.ndim == 2 else value, "[channels, height, width]"
    else:
        raise sample_error(number, field, f"is a {type(value).__name__}. Give a PIL image, a numpy array or a tensor.")
    if picture.shape[0] not in (1, 2, 3, 4) or not picture.numel():
        raise sample_error(number, field, f"has the shape {tuple(value.shape)}. Give {form}, with 1 to 4 channels.")
    if picture.dtype is not torch.uint8 and not picture.is_floating_point():
        raise sample_error(number, field, f"holds {picture.dtype} values. Give bytes (uint8), or floats from 0 to 1.")
    return picture


def _to_float(picture: Tensor) -> Tensor:
    return picture.float().div_(255) if picture.dtype is torch.uint8 else picture.float()


def _change_channels(picture: Tensor, channels: int, field: str, number: int) -> Tensor:
    """Returns a picture with 1 or 3 channels; a fourth one, which says what is transparent, is left out."""
    if picture.shape[0] == 2:
        raise sample_error(number, field, f"has 2 channels, which are neither gray nor colour. Give 1 or {channels}.")
    if picture.shape[0] == 1:
        return picture.expand(channels, -1, -1)
    colour = picture[:3]
    return colour if channels == 3 else (colour * torch.tensor(LUMINANCE).view(3, 1, 1)).sum(0, keepdim=True)


def _shown(picture: Tensor) -> str:
    return " × ".join(map(str, picture.shape))


def _read_size(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or any(type(one) is not int or one < 1 for one in pair):
        raise ConfigError(f"size is {size!r}. Use one whole number, or [height, width].")
    return pair


def _read_per_channel(
    name: str, value: float | Sequence[float] | None, default: float, channels: int | None
) -> tuple[float, ...]:
    if value is None:
        return (default,)
    values = tuple(float(one) for one in value) if isinstance(value, Sequence) else (float(value),)
    if not values or (channels is not None and len(values) not in (1, channels)):
        raise ConfigError(f"{name} is {value!r}. Give one number, or one for each channel.")
    return values
