"""Images, histograms and text that a step puts in addition to numbers.

Putting a value validates and copies it on the device, without synchronizing. `to_host` copies to the host, once per log
line. storage.py keeps the last value of each name; the writers receive `Media`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from trainwright.errors import TrainwrightError
from trainwright.events.mean import detached_copy, is_dtensor, is_sharded

MediaKind = Literal["image", "histogram", "text"]

MAX_BYTES = 256 * 2**20
"""The size of all images, histograms and texts that wait for a log line; more are dropped with a warning."""

_OCTAVES = 48  # magnitudes from 2 ** -48 to 2 ** 48; smaller ones count as 0
_BINS_PER_OCTAVE = 8
_NUM_SIDE = 2 * _OCTAVES * _BINS_PER_OCTAVE  # bins of positive values
_NUM_BINS = 2 * _NUM_SIDE + 1
_CHUNK = 2**22  # elements that are counted at once: indices take 8 bytes each
_CHANNELS = (1, 3, 4)

_SIDE = 2.0 ** (np.arange(_NUM_SIDE + 1) / _BINS_PER_OCTAVE - _OCTAVES)
_EDGES = np.concatenate([-_SIDE[::-1], _SIDE])
"""Bin `i` is from edge `i` to edge `i + 1`; the bin in the middle contains 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """The distribution of a tensor's values, in bins whose width grows with the magnitude: each is 9 % wider.

    The bins are the same for all histograms, so that those of several shards add up.
    """

    bins: np.ndarray
    """The numbers of the bins that have values, ascending."""
    counts: np.ndarray
    """The number of values in each of them."""
    minimum: float
    maximum: float
    total: float
    """The sum of the finite values."""
    total_squares: float
    num_not_finite: int
    """NaNs and infinities, which are in no bin."""
    members: tuple[int, ...] = ()
    """The ranks whose shards make up the tensor; empty for a tensor that is not sharded."""

    @property
    def num_values(self) -> int:
        """The number of finite values."""
        return int(self.counts.sum())

    def buckets(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (counts, right edges) of the bins from the first to the last that have values."""
        if not len(self.bins):
            return np.zeros(0, np.int64), np.zeros(0)
        first, last = int(self.bins[0]), int(self.bins[-1])
        counts = np.zeros(last - first + 1, np.int64)
        counts[self.bins - first] = self.counts
        edges = _EDGES[first + 1 : last + 2].copy()
        edges[-1] = max(edges[-1], self.maximum)
        return counts, edges

    def linear(self, num_bins: int = 64) -> tuple[np.ndarray, np.ndarray]:
        """Returns (counts, edges) of equally wide bins from the minimum to the maximum, as `numpy.histogram` does.

        Values are assumed to be uniformly distributed within each of the original bins.
        """
        if not len(self.bins):
            return np.zeros(1, np.int64), np.array([0.0, 1.0])
        if self.minimum == self.maximum:
            edges = np.linspace(self.minimum - 0.5, self.minimum + 0.5, num_bins + 1)
            return np.bincount([num_bins // 2], [self.num_values], num_bins).astype(np.int64), edges
        counts, right = self.buckets()
        borders = np.concatenate([[self.minimum], np.clip(right, self.minimum, self.maximum)])
        borders[-1] = self.maximum
        edges = np.linspace(self.minimum, self.maximum, num_bins + 1)
        below = np.interp(edges, borders, np.concatenate([[0], np.cumsum(counts)]))
        below[0] = 0  # where the minimum is the edge of its bin, interp returns the count after it
        return np.diff(np.round(below)).astype(np.int64), edges

    def __add__(self, other: Histogram) -> Histogram:
        dense = np.zeros(_NUM_BINS, np.int64)
        for each in (self, other):
            dense[each.bins] += each.counts
        bins = np.flatnonzero(dense)
        return Histogram(
            bins,
            dense[bins],
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.total + other.total,
            self.total_squares + other.total_squares,
            self.num_not_finite + other.num_not_finite,
            self.members,
        )


@dataclass(frozen=True, slots=True)
class Media:
    """The values of a log line that are not numbers, by name. Images are uint8 arrays of shape [height, width,
    channels]."""

    images: dict[str, np.ndarray] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.images or self.histograms or self.texts)


class Put(NamedTuple):
    """One value on its device. `extra`: `normalize` of an image; statistics and member ranks of a histogram."""

    value: Any
    extra: Any = None

    @property
    def num_bytes(self) -> int:
        """The size of the value."""
        return len(self.value) if isinstance(self.value, str) else int(self.value.nbytes)


def validate_image(name: str, image: Any, *, normalize: bool) -> Put:
    """Validates an image and copies it on its device; a tensor or array of shape CHW, HWC or HW, or a PIL image.

    A sharded image stays a DTensor until `EventStorage.gather_shards`.
    """
    if hasattr(image, "mode") and hasattr(image, "convert"):  # PIL's, without importing it
        image = np.asarray(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB"))
    if not isinstance(image, torch.Tensor | np.ndarray):
        raise TrainwrightError(
            f"put_image({name!r}): the image is a {type(image).__name__}. Put a tensor or array of shape CHW, HWC or "
            "HW, or a PIL image."
        )
    if is_sharded(image) and torch.compiler.is_compiling():
        raise TrainwrightError(f"put_image({name!r}): the image is sharded. Put image.full_tensor().")
    shape = tuple(image.shape)
    is_image = len(shape) == 2 or (len(shape) == 3 and (shape[0] in _CHANNELS or shape[2] in _CHANNELS))
    if not is_image or 0 in shape:
        hint = " Put one image per name, or a grid (torchvision.utils.make_grid)." if len(shape) == 4 else ""
        raise TrainwrightError(
            f"put_image({name!r}): the shape is {shape}. An image has the shape [height, width], [channels, height, "
            f"width] or [height, width, channels], with 1, 3 or 4 channels.{hint}"
        )
    if isinstance(image, np.ndarray):
        return Put(image.copy(), normalize)
    value: Any = image
    is_replicated = is_dtensor(image) and not is_sharded(image)
    return Put(detached_copy(value.to_local() if is_replicated else image), normalize)


def validate_histogram(name: str, values: Any) -> Put | None:
    """Counts the values of a tensor on its device. None on a rank whose shard is a replica of another rank's."""
    if not isinstance(values, torch.Tensor):
        values = torch.as_tensor(np.asarray(values))
    if values.is_complex():
        raise TrainwrightError(f"put_histogram({name!r}): the values are complex. Put values.abs() or values.real.")
    members: tuple[int, ...] = ()
    if is_sharded(values):
        if any(each.is_partial() for each in values.placements):
            raise TrainwrightError(
                f"put_histogram({name!r}): each rank has only terms of a sum. Put values.full_tensor()."
            )
        mesh = values.device_mesh
        along = zip(mesh.get_coordinate(), values.placements, strict=True)
        if any(coordinate and each.is_replicate() for coordinate, each in along):
            return None
        members = tuple(mesh.mesh.flatten().tolist())
    if is_dtensor(values):
        values = values.to_local()
    counts, statistics = _count(values.detach())
    return Put(counts, (statistics, members))


def validate_traced_histogram(values: torch.Tensor) -> Put:
    """Counts the values of a tensor in compiled code."""
    counts, statistics = _count(values.detach())
    return Put(counts, (statistics, ()))


def add_histograms(one: Put, other: Put) -> Put:
    """Adds the histograms of two puts of one name in one step, such as those of its micro-batches."""
    (low, high, *sums), (other_low, other_high, *other_sums) = one.extra[0], other.extra[0]
    added = [each + another for each, another in zip(sums, other_sums, strict=True)]
    statistics = torch.stack([torch.minimum(low, other_low), torch.maximum(high, other_high), *added])
    return Put(one.value + other.value, (statistics, one.extra[1]))


def _count(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the counts of all bins and of values that are not finite, and (minimum, maximum, sum, sum of squares)."""
    device = values.device
    counts = torch.zeros(_NUM_BINS + 1, dtype=torch.int64, device=device)
    low, high = torch.full((), torch.inf, device=device), torch.full((), -torch.inf, device=device)
    total, squares = torch.zeros((), device=device), torch.zeros((), device=device)
    for part in torch.split(values.reshape(-1), _CHUNK) if values.numel() else ():
        part = part.float()
        is_finite = torch.isfinite(part)
        # 0 for magnitudes that are too small for a bin of their own, such as 0, whose logarithm is -inf.
        number = torch.floor(torch.log2(part.abs()) * _BINS_PER_OCTAVE) + (_NUM_SIDE // 2 + 1)
        index = torch.sign(part) * number.clamp(0, _NUM_SIDE) + _NUM_SIDE
        index = torch.where(is_finite, index, _NUM_BINS).long()
        counts.scatter_add_(0, index, torch.ones_like(index))
        low = torch.minimum(low, torch.where(is_finite, part, torch.inf).amin())
        high = torch.maximum(high, torch.where(is_finite, part, -torch.inf).amax())
        finite = torch.where(is_finite, part, 0.0)
        total, squares = total + finite.sum(), squares + finite.square().sum()
    return counts, torch.stack([low, high, total, squares])


def to_host(puts: Mapping[tuple[MediaKind, str], Put], *, warn: Callable[[str, str], None]) -> Media:
    """Copies values to the host, all histograms of a device at once. `warn` receives a name and a problem with it."""
    media = Media()
    by_device: dict[torch.device, list[str]] = {}
    for (kind, name), (value, extra) in puts.items():
        if kind == "text":
            media.texts[name] = value
        elif kind == "image":
            media.images[name] = _to_pixels(name, value, normalize=extra, warn=warn)
        else:
            by_device.setdefault(value.device, []).append(name)
    for names in by_device.values():
        entries = [puts["histogram", name] for name in names]
        counts = torch.stack([entry.value for entry in entries]).cpu().numpy()
        statistics = torch.stack([entry.extra[0] for entry in entries]).tolist()
        for name, entry, dense, numbers in zip(names, entries, counts, statistics, strict=True):
            bins = np.flatnonzero(dense[:-1])
            low, high, total, squares = numbers
            histogram = Histogram(bins, dense[bins], low, high, total, squares, int(dense[-1]), entry.extra[1])
            media.histograms[name] = histogram
    return media


def merge_media(media: Iterable[Media]) -> Media:
    """Merges the values of all ranks: the histograms of shards are added; for anything else, the lowest rank's value is
    used."""
    merged = Media()
    for each in media:
        for name, image in each.images.items():
            merged.images.setdefault(name, image)
        for name, text in each.texts.items():
            merged.texts.setdefault(name, text)
        for name, histogram in each.histograms.items():
            known = merged.histograms.get(name)
            if known is None:
                merged.histograms[name] = histogram
            elif known.members and known.members == histogram.members:
                merged.histograms[name] = known + histogram
    return merged


def _to_pixels(
    name: str, image: torch.Tensor | np.ndarray, *, normalize: bool, warn: Callable[[str, str], None]
) -> np.ndarray:
    """Returns an image as uint8 [height, width, channels]."""
    is_tensor = isinstance(image, torch.Tensor)
    if isinstance(image, torch.Tensor):
        image = image.cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
    if image.ndim == 2:
        image = image[:, :, None]
    elif image.shape[0] in _CHANNELS and (is_tensor or image.shape[2] not in _CHANNELS):
        image = image.transpose(1, 2, 0)
    if image.dtype == np.uint8 and not normalize:
        return np.ascontiguousarray(image)
    highest = 255.0 if image.dtype.kind in "iu" else 1.0
    values = np.nan_to_num(image.astype(np.float32), nan=0.0, posinf=highest, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if normalize:
        values = (values - low) / (high - low if high > low else 1.0)
    else:
        if low < 0 or high > highest:
            warn(
                name,
                f"put_image({name!r}): the values are between {low:.3g} and {high:.3g}. They are clamped to the range "
                f"from 0 to {highest:g}. Scale the image, or use normalize=True.",
            )
        values = values / highest
    return np.ascontiguousarray((values.clip(0, 1) * 255).round().astype(np.uint8))
