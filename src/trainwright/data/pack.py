"""pack: documents of any length as rows of one length, for language models.

Documents with an index are placed whole, each where it fits best (`PackedDocuments`, pack_plan.py); those of a stream
are strung together and cut (`PackedStream`, pack_stream.py). Both give the same kind of row (pack_rows.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.data.fetch import draws_nothing, fetch
from trainwright.data.mix import refuse_a_mixture_in_order
from trainwright.data.order import Indices
from trainwright.data.pack_plan import Plan, make_plan
from trainwright.data.pack_rows import Document, DocumentReader, Row, RowFormat
from trainwright.data.pack_stream import PackedStream
from trainwright.data.stream import has_index, is_stream
from trainwright.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


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
    refuse_a_mixture_in_order(source, name="source", reader="pack")
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
    def plan(self) -> Plan:
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
