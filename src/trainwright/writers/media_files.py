"""Writes images and histograms into `media/` in the run folder, within limits, for `trainwright watch` and the report.

`media/index.json` has one JSON object per line: an image names its PNG file, a histogram has its counts. The `json`
writer owns a `MediaFiles`. Texts are in metrics.json.
"""

from __future__ import annotations

import json
import logging
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.events.media import Histogram
from trainwright.safe_text import json_text

logger = logging.getLogger(__name__)

MEDIA_FOLDER = "media"
INDEX_FILE = "index.json"

MAX_SIDE = 512
"""Larger images are reduced by a whole factor."""
MAX_STEPS_PER_NAME = 60
"""If a name has more, every second of its steps is dropped, so the remaining ones cover the whole run."""
MAX_NAMES = 64
"""Further names are dropped with a warning."""
MAX_BYTES = 64 * 2**20
"""The size of all files; when it is exceeded, every second step of each name is dropped."""
_NUM_BINS = 48
_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # of PNG, by the number of channels


class MediaFiles:
    """The files of one run. A full disk loses images, but does not end the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / MEDIA_FOLDER
        self._entries: list[dict[str, Any]] | None = None
        self._has_warned = False

    def add(self, step: int, images: Mapping[str, np.ndarray], histograms: Mapping[str, Histogram]) -> None:
        """Writes the media of a log line, then drops what exceeds the limits."""
        if not (images or histograms):
            return
        try:
            self._add(step, images, histograms)
        except OSError as error:
            self._warn(f"{self._folder} cannot be written ({error.strerror}): images and histograms are dropped.")

    def _add(self, step: int, images: Mapping[str, np.ndarray], histograms: Mapping[str, Histogram]) -> None:
        if self._entries is None:
            self._folder.mkdir(exist_ok=True)
            self._entries = read_index(self._folder / INDEX_FILE)
        known = {(each["kind"], each["name"]) for each in self._entries}
        added, entries = [], list[tuple[str, str, Any]]()
        entries += [("image", name, image) for name, image in images.items()]
        entries += [("histogram", name, histogram) for name, histogram in histograms.items()]
        for number, (kind, name, value) in enumerate(entries):
            if (kind, name) not in known and len(known) >= MAX_NAMES:
                self._warn(f"There are more than {MAX_NAMES} images and histograms: {name} and others are dropped.")
                continue
            known.add((kind, name))
            is_histogram = isinstance(value, Histogram)
            facts = _histogram_facts(value) if is_histogram else self._write_image(f"{step:08d}-{number}.png", value)
            added.append({"step": step, "kind": kind, "name": name, **facts})
        with (self._folder / INDEX_FILE).open("a", encoding="utf-8") as file:
            file.writelines(json_text(entry) + "\n" for entry in added)
        self._entries += added
        kept = thin(self._entries)
        if len(kept) < len(self._entries):
            _replace_index(self._folder, kept)
            self._entries = kept

    def _write_image(self, file: str, pixels: np.ndarray) -> dict[str, Any]:
        pixels = shrink(pixels)
        content = png_bytes(pixels)
        (self._folder / file).write_bytes(content)
        return {"file": file, "bytes": len(content), "width": pixels.shape[1], "height": pixels.shape[0]}

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s", text)


def thin(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the entries that the limits permit, in order. The first and the last step of each name are kept."""
    kept = list(entries)
    while True:
        by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for entry in kept:
            by_name.setdefault((entry["kind"], entry["name"]), []).append(entry)
        is_too_large = sum(entry.get("bytes", 0) for entry in kept) > MAX_BYTES
        dropped = {
            id(entry)
            for own in by_name.values()
            if len(own) > MAX_STEPS_PER_NAME or is_too_large
            for entry in own[1:-1:2]
        }
        if not dropped:
            return kept
        kept = [entry for entry in kept if id(entry) not in dropped]


def cut_back_media(folder: Path, last_step: int) -> None:
    """Removes media after `last_step`, because a resumed run writes them again."""
    media = folder / MEDIA_FOLDER
    if not (media / INDEX_FILE).exists():
        return
    entries = read_index(media / INDEX_FILE)
    kept = [entry for entry in entries if entry["step"] <= last_step]
    text = (media / INDEX_FILE).read_bytes()
    if len(kept) < len(entries) or (text and not text.endswith(b"\n")):
        _replace_index(media, kept)


def read_index(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of an index, without lines that are damaged or incomplete."""
    entries = []
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            entry = json.loads(line)
            if isinstance(entry["step"], int) and isinstance(entry["name"], str) and isinstance(entry["kind"], str):
                entries.append(entry)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return entries


def shrink(pixels: np.ndarray) -> np.ndarray:
    """Returns an image [height, width, channels] with at most MAX_SIDE pixels per side: means of square blocks."""
    factor = -(-max(pixels.shape[:2]) // MAX_SIDE)
    if factor == 1:
        return pixels
    height, width, channels = pixels.shape
    # A side that is shorter than a block is one block.
    rows, columns = min(factor, height), min(factor, width)
    whole = pixels[: height // rows * rows, : width // columns * columns]
    blocks = whole.reshape(height // rows, rows, width // columns, columns, channels)
    means: np.ndarray = np.round(blocks.mean(axis=(1, 3)))
    return means.astype(np.uint8)


def png_bytes(pixels: np.ndarray) -> bytes:
    """Returns an image of shape [height, width, 1, 3 or 4 channels], uint8, as a PNG file."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    # Each row begins with its filter: 0, none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)], axis=1)
    body = zlib.compress(rows.tobytes(), 3)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _histogram_facts(histogram: Histogram) -> dict[str, Any]:
    counts, edges = histogram.linear(_NUM_BINS)
    number = max(histogram.num_values, 1)
    mean = histogram.total / number
    return {
        "low": float(edges[0]),
        "high": float(edges[-1]),
        "counts": counts.tolist(),
        "num_values": histogram.num_values,
        "num_not_finite": histogram.num_not_finite,
        "mean": mean,
        "deviation": max(histogram.total_squares / number - mean * mean, 0.0) ** 0.5,
    }


def _replace_index(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Replaces the index, then deletes the files that it no longer names."""
    replacement = folder / f"{INDEX_FILE}.part"
    replacement.write_text("".join(json_text(entry) + "\n" for entry in entries), "utf-8")
    replacement.replace(folder / INDEX_FILE)
    named = {entry.get("file") for entry in entries}
    for path in folder.glob("*.png"):
        if path.name not in named:
            path.unlink(missing_ok=True)
