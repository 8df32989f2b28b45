"""pack: documents of any length as rows of one length, for language models.

Documents with an index are placed whole where they fit best (`PackedDocuments`); those of a stream are concatenated
and cut (`PackedStream`). Both yield the same rows.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.data.fetch import draws_nothing, fetch, has_index, is_stream
from trainwright.data.mix import reject_a_mixture_in_order
from trainwright.data.order import Indices, mix_seed, permute
from trainwright.data.streams import SourcePass
from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.registry import resolve as registry

logger = logging.getLogger(__name__)

_PLAN_STREAM = 0x9ACC  # keeps the plan's permutation apart from the epochs' ones of the same seed


@dataclass(frozen=True)
class PackingPlan:
    """The pieces of all rows, row after row: piece p is `sizes[p]` tokens of `documents[p]` from `offsets[p]` on."""

    length: int
    """The tokens that fit into a row."""
    lengths: Indices
    """The tokens of every document."""
    documents: Indices
    offsets: Indices
    sizes: Indices
    row_starts: Indices
    """Row r holds the pieces row_starts[r] … row_starts[r + 1] − 1."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.row_starts) - 1

    @property
    def fill(self) -> float:
        """The share of all places in rows that hold a token instead of padding."""
        return float(self.lengths.sum()) / max(1, self.num_rows * self.length)

    def row(self, number: int) -> list[tuple[int, int, int]]:
        """Returns (document, offset, size) of each piece of a row."""
        pieces = slice(int(self.row_starts[number]), int(self.row_starts[number + 1]))
        columns = (self.documents[pieces], self.offsets[pieces], self.sizes[pieces])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def make_plan(lengths: Indices, *, length: int, seed: int) -> PackingPlan:
    """Packs documents of these lengths into rows of `length` tokens.

    A document longer than a row is cut: whole rows of it come first, and its rest is packed like a document. The
    longest piece is placed first, each into the row that it fills best; the seed decides among equal ones.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    whole, rest = np.divmod(lengths, length)
    cut = np.flatnonzero(whole)
    num_whole = int(whole.sum())
    whole_documents = np.repeat(cut, whole[cut])
    # The n-th whole row counts from its document's first one.
    firsts = np.repeat(np.cumsum(whole[cut]) - whole[cut], whole[cut])
    whole_offsets = (np.arange(num_whole) - firsts) * length

    pieces = _longest_first(rest, seed)
    rows = _fit(rest[pieces], length)
    by_row = np.argsort(rows, kind="stable")
    pieces = pieces[by_row]
    per_row = np.concatenate([np.ones(num_whole, dtype=np.int64), np.bincount(rows)])
    return PackingPlan(
        length=length,
        lengths=lengths,
        documents=np.concatenate([whole_documents, pieces]),
        offsets=np.concatenate([whole_offsets, whole[pieces] * length]),
        sizes=np.concatenate([np.full(num_whole, length, dtype=np.int64), rest[pieces]]),
        row_starts=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(per_row)]),
    )


def _longest_first(sizes: Indices, seed: int) -> Indices:
    """Returns which sizes are not 0, in falling order, equal ones in an order by the seed."""
    if not len(sizes):
        return np.empty(0, dtype=np.int64)
    shuffled = permute(np.arange(len(sizes), dtype=np.int64), len(sizes), key=mix_seed(seed, _PLAN_STREAM))
    shuffled = shuffled[sizes[shuffled] > 0]
    return shuffled[np.argsort(-sizes[shuffled], kind="stable")]


def _fit(sizes: Indices, length: int) -> Indices:
    """Returns the row of each piece; pieces come in falling order of size.

    Pieces of one size are placed together: a row that is the best for one of them stays the best for the next until
    it cannot hold another, so each takes as many as fit. A bitmap tells in which amounts of room there is a row.
    """
    rows_with_room: list[list[int]] = [[] for _ in range(length)]
    bitmap = 0  # bit n: there is a row with room for exactly n more tokens
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
            taken = min(room // size, left)
            placed += [row] * taken
            left -= taken
            room -= taken * size
            if room:
                rows_with_room[room].append(row)
                bitmap |= 1 << room
    return np.array(placed, dtype=np.int64)


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


State = dict[str, Any]

_START: State = {"source": None, "offset": 0, "ended": False, "replay": 0}


class PackedStream:
    """Rows of `length` tokens from a stream of documents, in the stream's order.

    It has `num_shards`, `shard`, `state_dict` and `load_state_dict` where the source has them.
    """

    def __init__(self, source: Any, *, row_format: RowFormat, reader: DocumentReader) -> None:
        self.source = source
        self.row_format = row_format
        self.reader = reader
        self.tokens_per_sample = row_format.length
        self.draws_nothing = draws_nothing(source)
        self._epoch: int | None = None
        self._seed: int | None = None
        self._start: State | None = None
        self._pass: PackedPass | None = None

    @property
    def tokenizer(self) -> Any:
        """What shows the tokens as text: the tokenizer given, else the source's."""
        return self.source.tokenizer if self.reader.tokenizer is None else self.reader.tokenizer

    @property
    def num_shards(self) -> int:
        """The most parts that the source can be read in."""
        return int(self.source.num_shards)

    @property
    def shard(self) -> Callable[..., PackedStream]:
        """`shard(num_shards=, index=)` packs one of disjoint parts of the source."""
        self._require("shard")
        return self._shard

    @property
    def state_dict(self) -> Callable[[], State]:
        """`state_dict()` returns where the pass begun last stands."""
        self._require("state_dict")
        return self._state_dict

    @property
    def load_state_dict(self) -> Callable[[Mapping[str, Any]], None]:
        """`load_state_dict(state)` lets the next pass go on from there."""
        self._require("load_state_dict")
        return self._load_state_dict

    def set_epoch(self, epoch: int) -> None:
        """Tells the source which pass begins next, where it wants to know."""
        self._epoch = epoch

    def seed_rows(self, seed: int) -> None:
        """Says with which randomness documents are read: each with its own, so that one can be read again."""
        self._seed = seed

    def __iter__(self) -> PackedPass:
        start, self._start = self._start, None
        self._pass = PackedPass(self, start or _START, epoch=self._epoch, seed=self._seed)
        return self._pass

    def _shard(self, num_shards: int, index: int) -> PackedStream:
        part = self.source.shard(num_shards=num_shards, index=index)
        packed = PackedStream(part, row_format=self.row_format, reader=self.reader)
        packed._epoch = self._epoch
        return packed

    def _state_dict(self) -> State:
        if self._start is not None:
            return dict(self._start)
        return dict(_START) if self._pass is None else self._pass.state()

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = dict(state)

    def _require(self, name: str) -> None:
        if not hasattr(self.source, name):
            raise AttributeError(f"{type(self.source).__name__} has no {name}")


class PackedPass:
    """One pass over the rows, from a state of the stream.

    A document that cannot be read raises and is left out; the next row goes on with the one behind it. In between
    the state is that of the row's beginning and the number of documents to read again, so that the error is not
    reported twice.
    """

    def __init__(self, packed: PackedStream, state: Mapping[str, Any], *, epoch: int | None, seed: int | None) -> None:
        self._format = packed.row_format
        self._reader = packed.reader
        self._source = SourcePass(packed.source, state=state["source"], epoch=epoch, seed=seed)
        self._has_state = hasattr(packed.source, "state_dict")
        self._row = Row(self._format)
        self._row_start: State = {name: state[name] for name in ("source", "offset", "ended")}
        self._num_read = 0  # documents read since the row's start, those that failed included
        self._has_failed = False
        self._to_replay = int(state["replay"])
        self._to_skip = int(state["offset"])
        self._has_ended = bool(state["ended"])
        self._document: Document | None = None
        self._offset = 0
        self._before: Any = None  # the source's state before the document in hand

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
        """Returns where the next row begins."""
        replay = self._to_replay or (self._num_read if self._has_failed else 0)
        return {**self._row_start, "replay": replay}

    def _here(self) -> State:
        if self._document is not None:
            return {"source": self._before, "offset": self._offset, "ended": False}
        state = self._source.state() if self._has_state and not self._has_ended else None
        return {"source": state, "offset": 0, "ended": self._has_ended}

    def _read_document(self) -> None:
        """Takes the next document in hand, unless it is empty or the source has ended."""
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
        """Reads the document that was in hand again and goes to the place in it."""
        skip, self._to_skip = self._to_skip, 0
        self._read_document()
        self._num_read = 0  # it belongs to the row's start
        length = 0 if self._document is None else len(self._document.tokens)
        if length <= skip:
            raise DataError(
                f"pack: the run goes on at token {skip} of a document, which now has only {length}. The data or the "
                "tokenizer has changed: put the former back, or start afresh."
            )
        self._offset = skip
        self._use_document()

    def _use_document(self) -> None:
        """Moves as much of the document in hand into the row as there is room for."""
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
    encodes. `end_of_document`, with a tokenizer its own end of text unless given, closes each of them.

    A row has `input_ids`, `labels`, `position_ids`, each [length]. Positions restart at 0 with every piece, also
    where one continues a document that was cut. Labels are -100 at padding and at the first token of every piece,
    since the model shifts them and would predict that token from another document. `borders` says how attention
    learns of them: "documents" adds `document_ids` [length] (0, 1, 2 … per piece, -1 at padding), as models/llama.py
    takes them; "mask" adds a bool `attention_mask` [1, length, length] for other models, which costs length² bytes a
    row; "none" adds nothing, so that attention crosses borders unless the model reads them off the positions.
    """
    row_format = RowFormat(length=length, borders=borders, pad_token_id=pad_token_id)
    reader = DocumentReader(tokenizer=tokenizer, text=text, end_of_document=end_of_document)
    if is_stream(source):
        return PackedStream(source, row_format=row_format, reader=reader)
    if not (has_index(source) and hasattr(source, "__len__")):
        raise ConfigError(
            f"source is a {type(source).__name__}, which has neither `__len__` and `__getitem__` nor `__iter__`. "
            "Give a dataset.",
            where="pack",
        )
    reject_a_mixture_in_order(source, name="source", reader="pack")
    return PackedDocuments(source, row_format=row_format, reader=reader, run_seed=run_seed)


class PackedDocuments(Dataset[dict[str, Tensor]]):
    """Rows of whole documents; only one that is longer than a row is cut, into rows and a rest.

    The plan is made at first use, from the source's `lengths` where it has them; otherwise every document is read
    once for its length. It depends on the lengths and `run_seed` alone. Documents must be the same at every reading.
    """

    _READ_AT_ONCE = 256
    _EVERY_SECONDS = 5.0

    def __init__(self, source: Any, *, row_format: RowFormat, reader: DocumentReader, run_seed: int = 0) -> None:
        self.source = source
        self.row_format = row_format
        self.reader = reader
        self.run_seed = run_seed
        self.tokens_per_sample = row_format.length
        self.draws_nothing = draws_nothing(source)

    def repack(self, source: Any) -> PackedDocuments:
        """Packs other documents in the same way: those of a part of the source."""
        return PackedDocuments(source, row_format=self.row_format, reader=self.reader, run_seed=self.run_seed)

    @cached_property
    def plan(self) -> PackingPlan:
        """Which piece of which document stands where in which row."""
        plan = make_plan(self._count_tokens(), length=self.row_format.length, seed=self.run_seed)
        logger.info(
            "Packed %d documents into %d rows of %d tokens, filled to %.1f %%.",
            len(plan.lengths), plan.num_rows, plan.length, 100 * plan.fill,
        )  # fmt: skip
        return plan

    @property
    def fill(self) -> float:
        """The share of real tokens in all rows; the rest is padding."""
        return self.plan.fill

    @property
    def tokenizer(self) -> Any:
        """What shows the tokens as text: the tokenizer given, else the source's."""
        return self.source.tokenizer if self.reader.tokenizer is None else self.reader.tokenizer

    def __len__(self) -> int:
        return self.plan.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Makes rows of documents that are fetched with one call."""
        size = len(self)
        for index in indices:
            if not -size <= index < size:
                raise IndexError(f"index {index} is outside of {size} packed rows")
        pieces = [self.plan.row(index % size) for index in indices]
        documents = self._read_documents([document for row in pieces for document, _, _ in row])
        samples = []
        for row in pieces:
            sample = Row(self.row_format)
            for document, offset, length in row:
                sample.add(documents[document], offset, length)
            samples.append(sample.finish())
        return samples

    def _read_documents(self, numbers: list[int]) -> dict[int, Document]:
        numbers = list(dict.fromkeys(numbers))  # two rows may hold pieces of one document
        documents = dict(zip(numbers, self.reader.read(fetch(self.source, numbers), numbers), strict=True))
        for number, document in documents.items():
            planned = int(self.plan.lengths[number])
            if len(document.tokens) != planned:
                raise DataError(
                    f"pack: document {number} of {type(self.source).__name__} had {planned} tokens when the rows were "
                    f"planned and has {len(document.tokens)} now. Documents must not change from one reading to the "
                    "next: move random changes of their length behind the packing."
                )
        return documents

    def _count_tokens(self) -> Indices:
        size = len(self.source)
        if self.reader.tokenizer is None and hasattr(self.source, "lengths"):
            lengths = np.asarray(self.source.lengths, dtype=np.int64)
            if len(lengths) == size:
                return lengths + (self.reader.end_of_document is not None)
        counted: list[int] = []
        due = time.monotonic() + self._EVERY_SECONDS
        for start in range(0, size, self._READ_AT_ONCE):
            samples = fetch(self.source, list(range(start, min(start + self._READ_AT_ONCE, size))))
            counted += self.reader.count(samples, start)
            if time.monotonic() > due:
                logger.info("Packing: %d of %d documents are read for their lengths.", len(counted), size)
                due = time.monotonic() + self._EVERY_SECONDS
        return np.array(counted, dtype=np.int64)
