"""From samples to documents of tokens, and from pieces of documents to rows: what both ways of packing share.

Which pieces make a row is decided in pack_plan.py (documents with an index) and pack_stream.py (streams).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainwright import registry
from trainwright.errors import ConfigError, DataError
from trainwright.labels import IGNORED_LABEL

BORDERS = ("documents", "mask", "none")


Tokens = npt.NDArray[Any]


class Document(NamedTuple):
    """The tokens of a document and, where it brought its own, their labels."""

    tokens: Tokens
    labels: Tokens | None = None


class DocumentReader:
    """Makes documents of samples that hold `input_ids` (and `labels`), or a text to encode."""

    def __init__(self, *, tokenizer: Any = None, text: str = "text", end_of_document: int | None = None) -> None:
        if tokenizer is None and text != "text":
            raise ConfigError(
                f"text: {text} has no effect without a tokenizer, which would encode that field. Give a tokenizer, or "
                "leave text out for samples with input_ids.",
                where="pack",
            )
        self.tokenizer = _load(tokenizer)
        self.text = text
        self._given_end = end_of_document

    @cached_property
    def end_of_document(self) -> int | None:
        """The token that closes every document: the one given, else the tokenizer's, else none."""
        if self._given_end is None and self.tokenizer is not None:
            end: int | None = self.tokenizer.eos_id
            return end
        return self._given_end

    def count(self, samples: Sequence[Any], first: int) -> list[int]:
        """Returns the number of tokens of each document; `first` is the number of the first, for errors."""
        found = self._find(samples, range(first, first + len(samples)))
        return [len(tokens) + (end is not None) for tokens, end in found]

    def read(self, samples: Sequence[Any], numbers: Sequence[int] | None = None) -> list[Document]:
        """Returns the documents, their texts encoded in one call; `numbers` are those that errors name."""
        documents = []
        for place, (tokens, end) in enumerate(self._find(samples, numbers)):
            name = _name(numbers, place)
            labels = _labels(samples[place], tokens, end, name)
            documents.append(Document(_to_array(tokens, end, "input_ids", name), labels))
        return documents

    def _find(self, samples: Sequence[Any], numbers: Sequence[int] | None) -> list[tuple[Any, int | None]]:
        """Returns each document's tokens, as they come, and the token that is still to be appended to them."""
        end = self.end_of_document
        found: list[tuple[Any, int | None]] = []
        texts: list[int] = []
        for place, sample in enumerate(samples):
            if self.tokenizer is not None and isinstance(sample, Mapping) and self.text in sample:
                texts.append(place)
                found.append(([], None))
            elif isinstance(sample, Mapping) and "input_ids" in sample:
                found.append((_one_row(sample["input_ids"], "input_ids", _name(numbers, place)), end))
            else:
                raise self._no_tokens(sample, _name(numbers, place))
        if texts:
            for place, tokens in zip(texts, self._encode([samples[place][self.text] for place in texts]), strict=True):
                # Some tokenizers close a text themselves.
                has_end = bool(tokens) and tokens[-1] == end
                found[place] = (tokens, None if has_end else end)
        return found

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if hasattr(self.tokenizer, "encode_batch"):
            encoded: list[list[int]] = self.tokenizer.encode_batch(texts)
            return encoded
        return [self.tokenizer.encode(text) for text in texts]

    def _no_tokens(self, sample: Any, name: str) -> DataError:
        held = f"the fields {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
        wanted = "input_ids" if self.tokenizer is None else f"{self.text} nor input_ids"
        advice = "Name a tokenizer and the field of the text" if self.tokenizer is None else "Name the field (text)"
        return DataError(f"pack: {name} has no {wanted}, but {held}. {advice}, or give samples with input_ids.")


@dataclass(frozen=True)
class RowFormat:
    """What a row looks like."""

    length: int
    borders: str
    pad_token_id: int

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ConfigError(
                f"length is {self.length}. Use at least 2: a single token predicts nothing.", where="pack"
            )
        if self.borders not in BORDERS:
            raise ConfigError(f"borders is {self.borders!r}. Use one of {', '.join(BORDERS)}.", where="pack")

    @cached_property
    def counting(self) -> Tokens:
        """0, 1, 2 … of which each piece's positions are the beginning."""
        return np.arange(self.length, dtype=np.int64)


class Row:
    """A row that is being filled with pieces of documents."""

    def __init__(self, row_format: RowFormat) -> None:
        length = row_format.length
        self.room = length
        self._format = row_format
        self._num_pieces = 0
        self._input_ids = np.full(length, row_format.pad_token_id, dtype=np.int64)
        self._labels = np.full(length, IGNORED_LABEL, dtype=np.int64)
        self._position_ids = np.zeros(length, dtype=np.int64)
        self._document_ids = np.full(length, -1, dtype=np.int64)

    def add(self, document: Document, offset: int, size: int) -> None:
        """Appends `size` tokens of a document from `offset` on; the caller looks after the room."""
        start = len(self._input_ids) - self.room
        stop = start + size
        self._input_ids[start:stop] = document.tokens[offset : offset + size]
        # Labels are shifted by the model: the first token would be predicted from the document before.
        labels = document.tokens if document.labels is None else document.labels
        self._labels[start + 1 : stop] = labels[offset + 1 : offset + size]
        self._position_ids[start:stop] = self._format.counting[:size]
        self._document_ids[start:stop] = self._num_pieces
        self._num_pieces += 1
        self.room -= size

    def finish(self) -> dict[str, Tensor]:
        """Returns the sample; what is not filled is padding."""
        sample = {
            "input_ids": torch.from_numpy(self._input_ids),
            "labels": torch.from_numpy(self._labels),
            "position_ids": torch.from_numpy(self._position_ids),
        }
        if self._format.borders == "documents":
            sample["document_ids"] = torch.from_numpy(self._document_ids)
        elif self._format.borders == "mask":
            # Padding sees the padding before it and itself, for a query without any key has no softmax.
            same = self._document_ids[:, None] == self._document_ids[None, :]
            sample["attention_mask"] = torch.from_numpy(np.tril(same)[None])
        return sample


def _load(tokenizer: Any) -> Any:
    # A str has an `encode` too, which makes bytes of it.
    if tokenizer is None or (hasattr(tokenizer, "encode") and not isinstance(tokenizer, str)):
        return tokenizer
    from trainwright.data.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer, project_dir=registry.project_folder())


def _one_row(values: Any, field: str, name: str) -> Any:
    dims = getattr(values, "ndim", 1)
    if dims != 1 or not hasattr(values, "__len__"):
        shape = f"has {dims} dims" if hasattr(values, "ndim") else f"is a {type(values).__name__}"
        raise DataError(f"pack: {field} of {name} {shape}. Give one list of token ids per document.")
    return values


def _to_array(values: Any, end: int | None, field: str, name: str) -> Tokens:
    """Returns tokens or labels as an array, with the token that closes them."""
    if isinstance(values, list | tuple):
        try:
            found: Tokens = np.asarray(array("q", values))  # faster than numpy's own reading, which guesses a type
        except (TypeError, OverflowError) as error:
            raise DataError(f"pack: {field} of {name}: {error}. Give whole numbers, the ids of tokens.") from error
    else:
        found = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
        if found.dtype.kind not in "iu":
            raise DataError(f"pack: {field} of {name} are {found.dtype}. Give whole numbers, the ids of tokens.")
    return found if end is None else _append(found, end)


def _append(tokens: Tokens, end: int) -> Tokens:
    closed = np.empty(len(tokens) + 1, dtype=np.int64)
    closed[:-1] = tokens
    closed[-1] = end
    return closed


def _labels(sample: Any, tokens: Any, end: int | None, name: str) -> Tokens | None:
    """Returns a document's own labels, with the appended end to be learned like any token."""
    if not isinstance(sample, Mapping) or sample.get("labels") is None or "input_ids" not in sample:
        return None
    labels = sample["labels"]
    if not hasattr(labels, "__len__") or len(labels) != len(tokens):
        given = f"{len(labels)} labels" if hasattr(labels, "__len__") else f"a label of type {type(labels).__name__}"
        raise DataError(f"pack: {name} has {len(tokens)} input_ids but {given}. Give one label per token, or none.")
    return _to_array(labels, end, "labels", name)


def _name(numbers: Sequence[int] | None, place: int) -> str:
    return "a document" if numbers is None else f"document {numbers[place]}"
