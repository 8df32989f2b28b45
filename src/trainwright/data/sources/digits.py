"""Digits: scikit-learn's 1,797 handwritten digits of 8 × 8 pixels, which need no download.

They come inside the scikit-learn package and are read at the first access, not by the constructor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.errors import ConfigError, DataError

# The beginning and end of each part, as fractions of the shuffled images.
PART_BOUNDS = {"train": (0.0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1.0)}


class Digits(Dataset[dict[str, Tensor]]):
    """One of three disjoint parts of the images: 80 % train, 10 % valid, 10 % test.

    A sample is `pixel_values`, float32 [1, 8, 8] from 0 to 1 (or [64] with `flat`), and `labels`, an int64 of 0 … 9.
    """

    draws_nothing = True  # the loader need not seed each sample
    num_classes = 10

    def __init__(self, *, part: str = "train", flat: bool = False) -> None:
        if part not in PART_BOUNDS:
            raise ConfigError(f'part is "{part}". Use one of: {", ".join(PART_BOUNDS)}.', where="digits")
        self.part = part
        self.flat = flat
        self._loaded: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._load()[1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pixel_values, labels = self._load()
        return {"pixel_values": pixel_values[index], "labels": labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Returns the samples of a batch; torch's loader prefers this to one call a sample."""
        pixel_values, labels = self._load()
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return [
            {"pixel_values": image, "labels": label}
            for image, label in zip(pixel_values[chosen].unbind(), labels[chosen].unbind(), strict=True)
        ]

    def _load(self) -> tuple[Tensor, Tensor]:
        """Returns this part's images and labels; they are read once, about half a megabyte."""
        if self._loaded is None:
            images, labels = _read_images()
            start, end = (round(bound * len(labels)) for bound in PART_BOUNDS[self.part])
            chosen = torch.tensor(_shuffled(len(labels))[start:end])
            pixel_values = images[chosen] / 16.0  # stored as counts of inked subpixels, 0 … 16
            self._loaded = (pixel_values.flatten(1) if self.flat else pixel_values.unsqueeze(1), labels[chosen])
        return self._loaded


def _read_images() -> tuple[Tensor, Tensor]:
    """Reads all images [1797, 8, 8] and labels [1797] from the installed package."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            'The dataset "digits" comes with scikit-learn, which is not installed. '
            "Install it: pip install 'trainwright[digits]'."
        ) from error
    stored = load_digits()
    return torch.tensor(stored.images, dtype=torch.float32), torch.tensor(stored.target, dtype=torch.int64)


def _shuffled(count: int) -> list[int]:
    """Returns 0 … count − 1 in an order that no version of any library can change.

    The images are stored by writer; without shuffling, the test part would have other writers.
    """
    return sorted(range(count), key=lambda index: hashlib.sha256(str(index).encode()).digest())
