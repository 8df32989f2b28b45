"""pack: documents of any length as rows of one length, for language models.

Documents with an index are not split and placed where they fit best (`PackedDocuments`); those of a stream are
concatenated and split (`PackedStream`). Rows have the same format in both cases.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.data.fetch import draws_nothing, fetch, is_stream, positive_indices
from trainwright.data.mix import check_dataset
from trainwright.data.order import Indices, mix_seed, permute
from trainwright.data.streams import DerivedStream, SourcePass
from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.progress import progress
from trainwright.registry import resolve as registry

logger = logging.getLogger(__name__)

_PLAN_STREAM = 0x9ACC  # separates the plan's permutation from those of the epochs


@dataclass(frozen=True)
class PackingPlan:
    """The chunks of all rows: chunk c is `sizes[c]` tokens of `documents[c]` from `offsets[c]` on."""

    length: int
    """The tokens in a row."""
    lengths: Indices
    """The tokens of every document."""
    documents: Indices
    offsets: Indices
    sizes: Indices
    row_starts: Indices
    """Row r has the chunks row_starts[r] … row_starts[r + 1] − 1."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.row_starts) - 1

    @property
    def fill(self) -> float:
        """The fraction of all positions in rows that are tokens, not padding."""
        return float(self.lengths.sum()) / max(1, self.num_rows * self.length)

    def row(self, number: int) -> list[tuple[int, int, int]]:
        """Returns (document, offset, size) of each chunk of a row."""
        chunks = slice(int(self.row_starts[number]), int(self.row_starts[number + 1]))
        columns = (self.documents[chunks], self.offsets[chunks], self.sizes[chunks])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def make_plan(lengths: Indices, *, length: int, seed: int) -> PackingPlan:
    """Packs documents of these lengths into rows of `length` tokens.

    A document longer than a row is split: whole rows of it come first, and the rest is packed like a document. Chunks
    are placed longest first, each in the row that it fills best; the seed decides among equal ones.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    whole, rest = np.divmod(lengths, length)
    long = np.flatnonzero(whole)
    num_whole = int(whole.sum())
    whole_documents = np.repeat(long, whole[long])
    # The n-th full row, counted from the first one of its document.
    firsts = np.repeat(np.cumsum(whole[long]) - whole[long], whole[long])
    whole_offsets = (np.arange(num_whole) - firsts) * length

    if len(rest):
        shuffled = permute(np.arange(len(rest), dtype=np.int64), len(rest), key=mix_seed(seed, _PLAN_STREAM))
        shuffled = shuffled[rest[shuffled] > 0]
        chunks = shuffled[np.argsort(-rest[shuffled], kind="stable")]  # longest first, equal ones by the seed
    else:
        chunks = np.empty(0, dtype=np.int64)
    rows = _fit(rest[chunks], length)
    chunks = chunks[np.argsort(rows, kind="stable")]
    per_row = np.concatenate([np.ones(num_whole, dtype=np.int64), np.bincount(rows)])
    return PackingPlan(
        length=length,
        lengths=lengths,
        documents=np.concatenate([whole_documents, chunks]),
        offsets=np.concatenate([whole_offsets, whole[chunks] * length]),
        sizes=np.concatenate([np.full(num_whole, length, dtype=np.int64), rest[chunks]]),
        row_starts=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(per_row)]),
    )


def _fit(sizes: Indices, length: int) -> Indices:
    """Returns the row of each chunk; the chunks are sorted by decreasing size.

    Chunks of one size are placed together: the best row for one of them is also the best for the next one until it is
    full, so each row takes as many as fit. A bitmap has the amounts of free space for which there is a row.
    """
    rows_with_room: list[list[int]] = [[] for _ in range(length)]
    bitmap = 0  # bit n: there is a row with space for exactly n more tokens
    placed: list[int] = []
    num_rows = 0
    values, counts = np.unique(-sizes, return_counts=True)
    for size, left in zip((-values).tolist(), counts.tolist(), strict=True):
        while left:
            fitting = bitmap >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                candidates = rows_with_room[room]
                row = candidates.pop()
                if not candidates:
                    bitmap ^= 1 << room
            else:
                room, row = length, num_rows
                num_rows += 1
            added = min(room // size, left)
            placed += [row] * added
            left -= added
            room -= added * size
            if room:
                rows_with_room[room].append(row)
                bitmap |= 1 << room
    return np.array(placed, dtype=np.int64)


BORDERS = ("documents", "mask", "none")

TokenArray = npt.NDArray[Any]


class Document(NamedTuple):
    """The tokens of a document and, if the sample has them, their labels."""

    tokens: TokenArray
    labels: TokenArray | None = None


class DocumentReader:
    """Reads documents from samples with `input_ids` (and `labels`), or with a text to encode."""

    def __init__(self, *, tokenizer: Any = None, text: str = "text", end_of_document: int | None = None) -> None:
        if tokenizer is None and text != "text":
            raise ConfigError(
                f"text: {text} has no effect without a tokenizer. Set a tokenizer, or remove text for samples with "
                "input_ids.",
                where="pack",
            )
        # A str has a method `encode` too.
        if isinstance(tokenizer, str) or (tokenizer is not None and not hasattr(tokenizer, "encode")):
            tokenizer = load_tokenizer(tokenizer, project_dir=registry.project_folder())
        self.tokenizer = tokenizer
        self.text = text
        self._given_end = end_of_document

    @cached_property
    def end_of_document(self) -> int | None:
        """The token at the end of every document: the argument, or the tokenizer's, or None."""
        if self._given_end is None and self.tokenizer is not None:
            end: int | None = self.tokenizer.eos_id
            return end
        return self._given_end

    def count(self, samples: Sequence[Any], first: int) -> list[int]:
        """Returns the number of tokens of each document; `first` is the index of the first, for errors."""
        found = self._find(samples, [f"document {first + number}" for number in range(len(samples))])
        return [len(tokens) + (end is not None) for tokens, end in found]

    def read(self, samples: Sequence[Any], numbers: Sequence[int] | None = None) -> list[Document]:
        """Returns the documents; texts are encoded in one call. `numbers` are the documents' indices, for errors."""
        names = ["a document"] * len(samples) if numbers is None else [f"document {number}" for number in numbers]
        documents = []
        for sample, name, (tokens, end) in zip(samples, names, self._find(samples, names), strict=True):
            labels = None
            if "input_ids" in sample and sample.get("labels") is not None:
                labels = _to_array(_check_labels(sample["labels"], len(tokens), name), end, "labels", name)
            documents.append(Document(_to_array(tokens, end, "input_ids", name), labels))
        return documents

    def _find(self, samples: Sequence[Any], names: Sequence[str]) -> list[tuple[Any, int | None]]:
        """Returns each document's tokens, and the token that has yet to be appended."""
        end = self.end_of_document
        found: list[tuple[Any, int | None]] = []
        texts: list[int] = []
        for number, (sample, name) in enumerate(zip(samples, names, strict=True)):
            if self.tokenizer is not None and isinstance(sample, Mapping) and self.text in sample:
                texts.append(number)
                found.append(([], None))
            elif isinstance(sample, Mapping) and "input_ids" in sample:
                tokens = sample["input_ids"]
                if getattr(tokens, "ndim", 1) != 1 or not hasattr(tokens, "__len__"):
                    shape = f"{tokens.ndim} dims" if hasattr(tokens, "ndim") else f"type {type(tokens).__name__}"
                    raise DataError(f"pack: input_ids of {name} has {shape}. Use one list of token ids per document.")
                found.append((tokens, end))
            else:
                fields = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
                wanted = "input_ids" if self.tokenizer is None else f"{self.text} nor input_ids"
                advice = "tokenizer and text" if self.tokenizer is None else "text to the field of the text"
                raise DataError(
                    f"pack: {name} has no {wanted}, but {fields}. Set {advice}, or use samples with input_ids."
                )
        if texts:
            for number, tokens in zip(texts, self._encode([samples[each][self.text] for each in texts]), strict=True):
                # Some tokenizers append the end themselves.
                has_end = bool(tokens) and tokens[-1] == end
                found[number] = (tokens, None if has_end else end)
        return found

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if hasattr(self.tokenizer, "encode_batch"):
            encoded: list[list[int]] = self.tokenizer.encode_batch(texts)
            return encoded
        return [self.tokenizer.encode(text) for text in texts]


def _check_labels(labels: Any, num_tokens: int, name: str) -> Any:
    if not hasattr(labels, "__len__") or len(labels) != num_tokens:
        given = f"{len(labels)} labels" if hasattr(labels, "__len__") else f"a label of type {type(labels).__name__}"
        raise DataError(f"pack: {name} has {num_tokens} input_ids but {given}. Use one label per token, or none.")
    return labels


def _to_array(values: Any, end: int | None, field: str, name: str) -> TokenArray:
    """Returns tokens or labels as an array, with the token at their end."""
    problem = None
    if isinstance(values, list | tuple):
        try:
            found: TokenArray = np.asarray(array("q", values))  # faster than numpy, which infers a type
        except (TypeError, OverflowError) as error:
            problem = str(error)
    else:
        found = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
        if found.dtype.kind not in "iu":
            problem = f"the dtype is {found.dtype}"
    if problem:
        raise DataError(f"pack: {field} of {name}: {problem}. Use integers, the ids of tokens.")
    return found if end is None else np.append(found, end)


@dataclass(frozen=True)
class RowFormat:
    """The format of a row."""

    length: int
    borders: str
    pad_token_id: int

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ConfigError(f"length is {self.length}. Use at least 2, to predict a token.", where="pack")
        if self.borders not in BORDERS:
            raise ConfigError(f"borders is {self.borders!r}. Use one of {', '.join(BORDERS)}.", where="pack")


class Row:
    """A row that is filled with chunks of documents."""

    def __init__(self, row_format: RowFormat) -> None:
        length = row_format.length
        self.room = length
        self._format = row_format
        self._num_chunks = 0
        self._input_ids = np.full(length, row_format.pad_token_id, dtype=np.int64)
        self._labels = np.full(length, IGNORED_LABEL, dtype=np.int64)
        self._position_ids = np.zeros(length, dtype=np.int64)
        self._document_ids = np.full(length, -1, dtype=np.int64)

    def add(self, document: Document, offset: int, size: int) -> None:
        """Appends `size` tokens of a document from `offset` on; the caller ensures that there is space."""
        start = len(self._input_ids) - self.room
        stop = start + size
        self._input_ids[start:stop] = document.tokens[offset : offset + size]
        # The model shifts labels, so the first token would be predicted from the previous document.
        labels = document.tokens if document.labels is None else document.labels
        self._labels[start + 1 : stop] = labels[offset + 1 : offset + size]
        self._position_ids[start:stop] = np.arange(size)
        self._document_ids[start:stop] = self._num_chunks
        self._num_chunks += 1
        self.room -= size

    def finish(self) -> dict[str, Tensor]:
        """Returns the sample, padded to the length."""
        sample = {
            "input_ids": torch.from_numpy(self._input_ids),
            "labels": torch.from_numpy(self._labels),
            "position_ids": torch.from_numpy(self._position_ids),
        }
        if self._format.borders == "documents":
            sample["document_ids"] = torch.from_numpy(self._document_ids)
        elif self._format.borders == "mask":
            # Padding attends to padding, because the softmax of a query without keys is undefined.
            same = self._document_ids[:, None] == self._document_ids[None, :]
            sample["attention_mask"] = torch.from_numpy(np.tril(same)[None])
        return sample


State = dict[str, Any]

_START: State = {"source": None, "offset": 0, "ended": False, "replay": 0}


class PackedStream(DerivedStream):
    """Rows of `length` tokens from a stream of documents, in the stream's order."""

    def __init__(self, source: Any, *, row_format: RowFormat, reader: DocumentReader) -> None:
        super().__init__([source])
        self.source = source
        self.row_format = row_format
        self.reader = reader
        self.tokens_per_sample = row_format.length

    @property
    def tokenizer(self) -> Any:
        """The tokenizer argument, or the source's tokenizer."""
        return self.source.tokenizer if self.reader.tokenizer is None else self.reader.tokenizer

    def _read(self, start: Mapping[str, Any] | None) -> PackedPass:
        return PackedPass(self, start or _START, epoch=self.epoch, seed=self.seed)

    def _shard(self, num_shards: int, index: int) -> PackedStream:
        shard = self.source.shard(num_shards=num_shards, index=index)
        packed = PackedStream(shard, row_format=self.row_format, reader=self.reader)
        packed.epoch = self.epoch
        return packed

    def _state_dict(self) -> State:
        return dict(super()._state_dict() or _START)


class PackedPass:
    """One pass over the rows, from a state of the stream.

    A document that cannot be read raises and is skipped; the next row continues with the following document. Until
    then the state is the row's start and the number of documents to read again, so the error is reported once.
    """

    def __init__(self, packed: PackedStream, state: Mapping[str, Any], *, epoch: int | None, seed: int | None) -> None:
        self._format = packed.row_format
        self._reader = packed.reader
        self._source = SourcePass(packed.source, state=state["source"], epoch=epoch, seed=seed)
        self._has_state = hasattr(packed.source, "state_dict")
        self._row = Row(self._format)
        self._row_start: State = {name: state[name] for name in ("source", "offset", "ended")}
        self._num_read = 0  # documents read since the row's start, with those that failed
        self._has_failed = False
        self._to_replay = int(state["replay"])
        self._to_skip = int(state["offset"])
        self._has_ended = bool(state["ended"])
        self._document: Document | None = None
        self._offset = 0
        self._before: Any = None  # the source's state before the current document

    def __iter__(self) -> PackedPass:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self._to_skip:
            self._reopen_document()
        while self._to_replay:
            self._to_replay -= 1
            with suppress(Exception):  # reported when it was read for the first time
                self._read_document()
            self._use_document()
        while self._row.room and not self._has_ended:
            if self._document is None:
                self._read_document()
            self._use_document()
        row, self._row = self._row, Row(self._format)
        self._row_start, self._num_read, self._has_failed = self._here(), 0, False
        if row.room == self._format.length:
            raise StopIteration
        return row.finish()

    def state(self) -> State:
        """Returns the position of the next row."""
        replay = self._to_replay or (self._num_read if self._has_failed else 0)
        return {**self._row_start, "replay": replay}

    def _here(self) -> State:
        if self._document is not None:
            return {"source": self._before, "offset": self._offset, "ended": False}
        state = self._source.state() if self._has_state and not self._has_ended else None
        return {"source": state, "offset": 0, "ended": self._has_ended}

    def _read_document(self) -> None:
        """Reads the next document, unless it is empty or the source has ended."""
        self._before = self._source.state() if self._has_state else None
        self._num_read += 1
        try:
            [document] = self._reader.read([self._source.take()])
        except StopIteration:
            self._has_ended = True
            return
        except Exception:
            self._has_failed = True
            self._has_ended = self._source.has_ended
            raise
        self._document, self._offset = (document if len(document.tokens) else None), 0

    def _reopen_document(self) -> None:
        """Reads the current document of the saved state again and continues at its offset."""
        skip, self._to_skip = self._to_skip, 0
        self._read_document()
        self._num_read = 0  # it belongs to the row's start
        length = 0 if self._document is None else len(self._document.tokens)
        if length <= skip:
            raise DataError(
                f"pack: the run resumes at token {skip} of a document, which has only {length}. The data or the "
                "tokenizer has changed: restore it, or start a new run."
            )
        self._offset = skip
        self._use_document()

    def _use_document(self) -> None:
        """Adds as much of the current document to the row as fits."""
        if self._document is None:
            return
        left = len(self._document.tokens) - self._offset
        size = min(left, self._row.room)
        self._row.add(self._document, self._offset, size)
        self._offset += size
        if size == left:
            self._document = None


def pack(
    source: Any,
    *,
    length: int,
    tokenizer: Any = None,
    text: str = "text",
    end_of_document: int | None = None,
    borders: str = "documents",
    pad_token_id: int = 0,
    run_seed: int = 0,
) -> PackedDocuments | PackedStream:
    """Packs documents into rows of `length` tokens.

    A document is a sample with `input_ids` (and `labels`, one per token), or with a field `text` that `tokenizer`
    encodes. `end_of_document` is appended to each of them; the default is the tokenizer's end of text.

    A row has `input_ids`, `labels`, `position_ids`, each [length]. Positions restart at 0 with every chunk, also if it
    continues a document. Labels are -100 at padding and at the first token of every chunk, which the model would
    predict from another document. `borders` defines how attention is restricted to documents: "documents" adds
    `document_ids` [length] (0, 1, 2 … per chunk, -1 at padding), as models/llama.py expects; "mask" adds a bool
    `attention_mask` [1, length, length] for other models, of length² bytes per row; "none" adds nothing, so attention
    crosses borders unless the model derives them from the positions.
    """
    row_format = RowFormat(length=length, borders=borders, pad_token_id=pad_token_id)
    reader = DocumentReader(tokenizer=tokenizer, text=text, end_of_document=end_of_document)
    if is_stream(source):
        return PackedStream(source, row_format=row_format, reader=reader)
    check_dataset(source, name="source", reader="pack")
    return PackedDocuments(source, row_format=row_format, reader=reader, run_seed=run_seed)


class PackedDocuments(Dataset[dict[str, Tensor]]):
    """Rows of complete documents; only a document that is longer than a row is split.

    The plan is made at first use, from the source's `lengths` if it has them; otherwise every document is read
    once for its length. It depends only on the lengths and `run_seed`. Documents must not change between reads.
    """

    _READ_AT_ONCE = 256

    def __init__(self, source: Any, *, row_format: RowFormat, reader: DocumentReader, run_seed: int = 0) -> None:
        self.source = source
        self.row_format = row_format
        self.reader = reader
        self.run_seed = run_seed
        self.tokens_per_sample = row_format.length
        self.draws_nothing = draws_nothing(source)

    def repack(self, source: Any) -> PackedDocuments:
        """Packs other documents with the same settings: those of a split of the source."""
        return PackedDocuments(source, row_format=self.row_format, reader=self.reader, run_seed=self.run_seed)

    @cached_property
    def plan(self) -> PackingPlan:
        """The plan of the chunks of documents in all rows."""
        lengths = self._count_tokens()
        with progress("Packing documents into rows"):
            plan = make_plan(lengths, length=self.row_format.length, seed=self.run_seed)
        logger.info(
            "Packed %d documents into %d rows of %d tokens, filled to %.1f %%.",
            len(plan.lengths), plan.num_rows, plan.length, 100 * plan.fill,
        )  # fmt: skip
        return plan

    @property
    def fill(self) -> float:
        """The fraction of tokens in all rows; the rest is padding."""
        return self.plan.fill

    @property
    def tokenizer(self) -> Any:
        """The tokenizer argument, or the source's tokenizer."""
        return self.source.tokenizer if self.reader.tokenizer is None else self.reader.tokenizer

    def __len__(self) -> int:
        return self.plan.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Returns rows; their documents are fetched with one call."""
        numbers = positive_indices(indices, size=len(self), of="packed rows").tolist()
        rows = [self.plan.row(number) for number in numbers]
        # Two rows may contain chunks of one document.
        wanted = list(dict.fromkeys(document for row in rows for document, _, _ in row))
        documents = dict(zip(wanted, self.reader.read(fetch(self.source, wanted), wanted), strict=True))
        for number, read in documents.items():
            planned = int(self.plan.lengths[number])
            if len(read.tokens) != planned:
                raise DataError(
                    f"pack: document {number} of {type(self.source).__name__} had {planned} tokens when the rows were "
                    f"planned and has {len(read.tokens)} now. Documents must not change between reads: apply random "
                    "changes of their length after the packing."
                )
        samples = []
        for row in rows:
            sample = Row(self.row_format)
            for document, offset, length in row:
                sample.add(documents[document], offset, length)
            samples.append(sample.finish())
        return samples

    def _count_tokens(self) -> Indices:
        size = len(self.source)
        if self.reader.tokenizer is None and hasattr(self.source, "lengths"):
            lengths = np.asarray(self.source.lengths, dtype=np.int64)
            if len(lengths) == size:
                return lengths + (self.reader.end_of_document is not None)
        counted: list[int] = []
        what = "Tokenizing to pack" if self.reader.tokenizer is not None else "Reading lengths to pack"
        with progress(what, total=size, unit="documents") as advance:
            for start in range(0, size, self._READ_AT_ONCE):
                samples = fetch(self.source, list(range(start, min(start + self._READ_AT_ONCE, size))))
                counted += self.reader.count(samples, start)
                advance(len(samples))
        return np.array(counted, dtype=np.int64)
