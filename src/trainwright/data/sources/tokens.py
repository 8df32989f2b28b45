"""Tokens: token files mapped into memory, as blocks of equal length or as documents; `write_tokens` writes such files.

A .bin file contains only the tokens, whose `dtype` must be passed to the reader; a .npy file contains its dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.data.cache import staged_file
from trainwright.data.fetch import positive_indices
from trainwright.data.sources.locations import Paths, find_files, fingerprint_files, list_locations
from trainwright.errors import ConfigError, DataError

SUFFIXES = (".bin", ".npy")
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")

_SCAN_TOKENS = 16 << 20
_NPY_HEADER_BYTES = 128


class Tokens(Dataset[dict[str, Tensor]]):
    """Blocks of `sequence_length` tokens; `labels` equal `input_ids`, and the model shifts them.

    `path` is a file, a glob, a folder (all its .bin and .npy files), a URL, or a list of those; remote files are copied
    into the cache first. A block is within one file; the incomplete last one of each file is dropped.
    With `documents`, a sample is a document including its end (`end_of_document`), and `lengths` has the lengths; a
    document that is longer than `sequence_length` is split into samples of at most that many tokens.
    """

    draws_nothing = True  # the loader need not seed each sample

    def __init__(
        self,
        path: Paths,
        sequence_length: int | None = None,
        *,
        dtype: str = "uint16",
        documents: bool = False,
        end_of_document: int | None = None,
        cache_dir: str | Path | None = None,
        project_dir: str | Path | None = None,
    ) -> None:
        checks = [
            (dtype in DTYPES, f'dtype is "{dtype}". Use one of: {", ".join(DTYPES)}.'),
            (not documents or end_of_document is not None, "documents: true needs end_of_document, the last token."),
            (documents or sequence_length is not None, "sequence_length, the tokens of a block, is required."),
            (documents or end_of_document is None, "end_of_document has no effect without documents: true. Remove it."),
            (
                sequence_length is None or sequence_length >= 2,
                f"sequence_length is {sequence_length}. Use at least 2, to predict a token.",
            ),
        ]
        for is_valid, problem in checks:
            if not is_valid:
                raise ConfigError(problem, where="tokens")
        self.path = path
        self.sequence_length = sequence_length
        self.dtype = dtype
        self.end_of_document = end_of_document
        self.cache_dir = cache_dir
        self._project_dir = Path(project_dir or ".").absolute()  # a worker may run in another folder
        self._files: list[npt.NDArray[Any]] | None = None
        self._samples: _Samples | None = None

    @property
    def tokens_per_sample(self) -> int | None:
        """The tokens in each block, all of which count; None for documents, whose lengths differ."""
        return self.sequence_length if self.end_of_document is None else None

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The tokens of every sample."""
        samples = self._load()[1]
        if samples.lengths is None:
            assert self.sequence_length is not None
            return np.broadcast_to(np.int64(self.sequence_length), (len(self),))  # one number in memory
        return samples.lengths

    @property
    def fingerprint(self) -> str:
        """A digest of the files' names, sizes and modification times."""
        return fingerprint_files(find_files(self.path, suffixes=SUFFIXES, project_dir=self._project_dir))

    def list_files(self) -> list[str]:
        """Returns the names and sizes of the files."""
        return list_locations(find_files(self.path, suffixes=SUFFIXES, project_dir=self._project_dir))

    def __len__(self) -> int:
        return int(self._load()[1].ends[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Returns the samples of a batch; torch's loader prefers this to one call a sample."""
        samples = []
        for index in positive_indices(indices, size=len(self), of=f"samples of {self.path}").tolist():
            samples.append(to_sample(self._read(index)))
        return samples

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker maps the files itself; pickling the maps would copy all tokens to it.
        return {**self.__dict__, "_files": None}

    def _read(self, index: int) -> npt.NDArray[Any]:
        files, samples = self._load()
        number = int(np.searchsorted(samples.ends, index, side="right"))
        if samples.starts is None or samples.lengths is None:
            assert self.sequence_length is not None
            first = int(samples.ends[number - 1]) if number else 0
            start, length = (index - first) * self.sequence_length, self.sequence_length
        else:
            start, length = int(samples.starts[index]), int(samples.lengths[index])
        return files[number][start : start + length]

    def _load(self) -> tuple[list[npt.NDArray[Any]], _Samples]:
        if self._files is None:
            found = find_files(self.path, suffixes=SUFFIXES, project_dir=self._project_dir)
            self._files = [_map_tokens(each.fetch(self.cache_dir), self.dtype) for each in found]
        if self._samples is None:
            samples = self._find_samples(self._files)
            if not samples.ends[-1]:
                total = sum(map(len, self._files))
                wanted = f"one block of {self.sequence_length}" if self.end_of_document is None else "one document"
                raise DataError(f"{self.path} has {total} tokens, less than {wanted}. Check the path.")
            self._samples = samples
        return self._files, self._samples

    def _find_samples(self, files: list[npt.NDArray[Any]]) -> _Samples:
        if self.end_of_document is None:
            assert self.sequence_length is not None
            return _Samples(np.cumsum([len(tokens) // self.sequence_length for tokens in files]))
        spans = [_find_documents(tokens, self.end_of_document) for tokens in files]
        if self.sequence_length is not None:
            spans = [_split_long_documents(starts, lengths, self.sequence_length) for starts, lengths in spans]
        return _Samples(
            np.cumsum([len(starts) for starts, _ in spans]),
            np.concatenate([starts for starts, _ in spans]),
            np.concatenate([lengths for _, lengths in spans]),
        )


def to_sample(tokens: npt.NDArray[Any]) -> dict[str, Tensor]:
    """Returns `input_ids` and `labels`, each with its own memory, because a collator may write -100 into labels."""
    return {name: torch.from_numpy(tokens.astype(np.int64)) for name in ("input_ids", "labels")}


@dataclass(frozen=True)
class _Samples:
    """The positions of the samples."""

    ends: npt.NDArray[np.int64]
    """The number of samples in each file, and before it."""
    starts: npt.NDArray[np.int64] | None = None
    """The offset of each in its file; None for blocks."""
    lengths: npt.NDArray[np.int64] | None = None


def write_tokens(
    path: str | Path,
    arrays: Iterable[Any],
    dtype: str = "uint16",
    *,
    end_of_document: int | None = None,
) -> int:
    """Writes documents, each a sequence of tokens, into one .bin or .npy file and returns the number of tokens.

    `arrays` may be a generator: one document is in memory at a time. `end_of_document` is written after each. The file
    is written atomically and may replace an older one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     count = write_tokens(f"{folder}/train.npy", [[5, 6, 7], [8, 9]], end_of_document=0)
    ...     dataset = Tokens(f"{folder}/train.npy", documents=True, end_of_document=0)
    ...     count, dataset.lengths.tolist(), dataset[1]["input_ids"].tolist()
    (7, [4, 3], [8, 9, 0])
    """
    path = Path(path)
    if path.suffix not in SUFFIXES or dtype not in DTYPES:
        raise ConfigError(
            f"write_tokens: {path.name} with dtype {dtype}. Use a name with the suffix {' or '.join(SUFFIXES)}, and "
            f"one of: {', '.join(DTYPES)}."
        )
    ending = np.array([] if end_of_document is None else [end_of_document], np.int64)
    bounds, stored = np.iinfo(dtype), np.dtype(dtype).newbyteorder("<")
    count = 0
    with staged_file(path) as file:
        if path.suffix == ".npy":
            file.write(bytes(_NPY_HEADER_BYTES))  # filled in when the count is known
        for number, document in enumerate(arrays):
            tokens = np.concatenate([np.asarray(document, np.int64).reshape(-1), ending])
            if len(tokens) and not bounds.min <= tokens.min() <= tokens.max() <= bounds.max:
                raise DataError(
                    f"write_tokens: document {number} has tokens from {tokens.min()} to {tokens.max()}, "
                    f"but the range of {dtype} is {bounds.min} to {bounds.max}. Use a wider dtype."
                )
            file.write(tokens.astype(stored).tobytes())
            count += len(tokens)
        if path.suffix == ".npy":
            # The header of numpy's file format 1.0, padded to a fixed length.
            facts = f"{{'descr': '{stored.str}', 'fortran_order': False, 'shape': ({count},), }}"
            file.seek(0)
            file.write(b"\x93NUMPY\x01\x00" + (_NPY_HEADER_BYTES - 10).to_bytes(2, "little"))
            file.write(facts.encode().ljust(_NPY_HEADER_BYTES - 11) + b"\n")
    return count


def _map_tokens(path: Path, dtype: str) -> npt.NDArray[Any]:
    """Returns the file's tokens, memory-mapped and read on access."""
    try:
        if path.name.endswith(".npy"):
            tokens: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        elif path.stat().st_size == 0:
            return np.empty(0, dtype)
        else:
            tokens = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a file of tokens in {dtype}: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(f"{path} contains {tokens.dtype} {tokens.shape}. Use a file with one dim of integers.")
    return tokens


def _find_documents(tokens: npt.NDArray[Any], end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the start and the length of each document; what follows the last end is one more."""
    found = [
        np.flatnonzero(tokens[start : start + _SCAN_TOKENS] == end) + (start + 1)
        for start in range(0, len(tokens), _SCAN_TOKENS)
    ]
    ends = np.concatenate([np.zeros(1, np.int64), *found])
    if ends[-1] != len(tokens):
        ends = np.append(ends, len(tokens))
    return ends[:-1], np.diff(ends)


def _split_long_documents(
    starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], longest: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    counts = -(-lengths // longest)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a sample in its document
    return (
        np.repeat(starts, counts) + number * longest,
        np.minimum(longest, np.repeat(lengths, counts) - number * longest),
    )
