"""Chats as samples of tokens, with the assistant's tokens as labels: `chat` in a run file.

    rows (files.py, parquet.py, any source) → RowRenderer (data/chat.py) → ChatRows by index, or ChatStream

Samples have `input_ids` and `labels`, as documents for pack.py and for the collator `padded`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.data.chat import Chat, RenderedChat, TextPair, check_train_on, read_row, read_template, render
from trainwright.data.fetch import draws_nothing, fetch, is_stream, positive_indices
from trainwright.data.mix import check_dataset
from trainwright.data.process import ProcessedStream
from trainwright.data.sources.files import json_lines
from trainwright.data.sources.formats import RowError
from trainwright.data.sources.locations import COMPRESSIONS, FileLocation, Paths, find_files, list_locations
from trainwright.data.sources.parquet import SUFFIXES as PARQUET_SUFFIXES
from trainwright.data.sources.parquet import parquet
from trainwright.data.tokenizer import TextTokenizer, load_tokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.progress import progress

logger = logging.getLogger(__name__)

TRUNCATIONS = ("tokens", "turns")

JSON_SUFFIXES = (".json",)

_READ_AT_ONCE = 256


def chat(
    path: Paths | None = None,
    *,
    tokenizer: str | TextTokenizer,
    max_length: int | None = None,
    train_on: str = "assistant",
    truncation: str = "tokens",
    chat_template: str | None = None,
    source: Any = None,
    streaming: bool = False,
    cache_dir: str | Path | None = None,
    project_dir: str | Path | None = None,
) -> ChatRows | ChatStream:
    """Chats as tokens, with labels for the turns of the assistant.

    `path` is a file, a glob, a URL, or a list of those: .jsonl, .json (one list) or .parquet, by its suffix; a folder
    means its .jsonl files. `source`, another dataset with the same rows, replaces it. A row has `messages`,
    `conversations`, `instruction` with `output`, or `prompt` with `completion`, and may have `tools`. `train_on` is
    assistant, last (the last turn of the assistant) or all. A longer chat is truncated to `max_length` tokens: at its
    end, or with `truncation: turns` after a complete turn of the assistant. Chats without a trained token are dropped.
    `chat_template` is a .jinja file or a template, instead of the tokenizer's own.
    """
    renderer = RowRenderer(
        load_tokenizer(tokenizer, project_dir=project_dir),
        max_length=max_length,
        train_on=train_on,
        truncation=truncation,
        chat_template=chat_template,
        project_dir=project_dir,
    )
    rows = open_rows(path, source=source, streaming=streaming, cache_dir=cache_dir, project_dir=project_dir)
    return ChatStream(rows, renderer) if is_stream(rows) else ChatRows(rows, renderer)


def open_rows(
    path: Paths | None,
    *,
    source: Any = None,
    streaming: bool = False,
    cache_dir: str | Path | None = None,
    project_dir: str | Path | None = None,
) -> Any:
    """Returns the rows of JSON or Parquet files, which are opened at first use, or the given source."""
    if (path is None) == (source is None):
        raise ConfigError("Either path or source is required: the files of the rows, or a dataset that returns them.")
    if source is not None:
        for name, is_given in (("streaming", streaming), ("cache_dir", cache_dir is not None)):
            if is_given:
                raise ConfigError(f"{name} has no effect with source. Set it there.")
        check_dataset(source, name="source", reader="chat")
        return source
    assert path is not None
    options: dict[str, Any] = {"cache_dir": cache_dir, "project_dir": project_dir}
    kind = _kind_of_files(path)
    if kind == "parquet":
        return parquet(path, streaming=streaming, **options)
    if kind == "json":
        if streaming:
            raise ConfigError(
                "streaming: true reads no .json files, whose rows are one list. Convert them to .jsonl, with one row "
                "on each line, or remove streaming."
            )
        return JsonRows(path, **options)
    return json_lines(path, streaming=streaming, **options)


def _kind_of_files(path: Paths) -> str:
    """Returns the kind of the files by their suffixes, without access to them."""
    kinds: dict[str, str] = {}
    for each in [path] if isinstance(path, str | Path) else path:
        name = str(each).lower()
        for compression in COMPRESSIONS:
            name = name.removesuffix(compression)
        is_parquet = name.endswith(PARQUET_SUFFIXES)
        kinds["parquet" if is_parquet else "json" if name.endswith(JSON_SUFFIXES) else "json_lines"] = str(each)
    if len(kinds) > 1:
        raise ConfigError(
            f"path names files of several kinds: {', '.join(kinds.values())}. Use files of one kind, or a source mix."
        )
    return next(iter(kinds), "json_lines")


class RowRenderer:
    """Maps a row of a chat to a sample, or to None if no label counts; raises RowError for an invalid row."""

    draws_nothing = True

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        max_length: int | None = None,
        train_on: str = "assistant",
        truncation: str = "tokens",
        chat_template: str | None = None,
        project_dir: str | Path | None = None,
    ) -> None:
        check_train_on(train_on, where="chat")
        if truncation not in TRUNCATIONS:
            raise ConfigError(f'truncation is "{truncation}". Use one of: {", ".join(TRUNCATIONS)}.', where="chat")
        if max_length is not None and max_length < 2:
            raise ConfigError(f"max_length is {max_length}. Use at least 2, to predict a token.", where="chat")
        if truncation == "turns" and max_length is None:
            raise ConfigError(
                "truncation has no effect without max_length. Set max_length, or remove truncation.", where="chat"
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.train_on = train_on
        self.truncation = truncation
        self.counts = RowCounts()
        self._given_template = chat_template
        self._project_dir = Path(project_dir or ".").absolute()  # a worker may run in another folder
        self._template: str | None = None

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Returns the sample of a row of a stream; drops are logged as their number grows."""
        rendered = self.render(row)
        if rendered is None:
            if self.counts.dropped in (1, 10, 100) or self.counts.dropped % 1000 == 0:
                logger.warning(
                    "chat: dropped %d of %d rows of a stream so far, which have no token to train.",
                    self.counts.dropped, self.counts.rows,
                )  # fmt: skip
            return None
        ids, is_trained = np.array(rendered.ids, np.int64), np.array(rendered.is_trained, np.bool_)
        return to_sample(ids, is_trained)

    def render(self, row: Any) -> RenderedChat | None:
        """Returns the tokens of a row; None if no label would count."""
        template = self._load()
        try:
            found = read_row(row)
            rendered = render(found, self.tokenizer, train_on=self.train_on, chat_template=template)
            is_cut = self.max_length is not None and len(rendered.ids) > self.max_length
            if is_cut and self.truncation == "tokens":
                rendered = rendered.cut(self.max_length)
            elif is_cut:
                rendered = self._drop_turns(found, template)
        except DataError as error:
            raise RowError(error.problem) from error.__cause__
        # The first token of a sample is not predicted.
        is_kept = any(rendered.is_trained[1:])
        self.counts.add(is_kept=is_kept, is_cut=is_cut)
        return rendered if is_kept else None

    def _load(self) -> str | None:
        """Returns the given template; reads the files, so that their errors are not those of a row."""
        self.tokenizer.find_chat_template()
        _ = self.tokenizer.vocab_size
        if self._template is None and self._given_template is not None:
            self._template = read_template(self._given_template, self._project_dir)
        return self._template

    def _drop_turns(self, found: Chat | TextPair, template: str | None) -> RenderedChat:
        """Returns the chat up to the last turn of the assistant that ends within `max_length`; empty if none does."""
        assert self.max_length is not None
        messages = found.messages if isinstance(found, Chat) else []
        for end in range(len(messages) - 1, 0, -1):
            if messages[end - 1]["role"] != "assistant" or not isinstance(found, Chat) or end <= found.num_prompt:
                continue
            shorter = replace(found, messages=found.messages[:end])
            # With "all", turns are not searched, which would render the chat again for each.
            if len(render(shorter, self.tokenizer, train_on="all", chat_template=template).ids) <= self.max_length:
                return render(shorter, self.tokenizer, train_on=self.train_on, chat_template=template)
        return RenderedChat([], [])


@dataclass
class RowCounts:
    """The numbers of rows that were read, dropped and truncated."""

    rows: int = 0
    dropped: int = 0
    cut: int = 0

    def add(self, *, is_kept: bool, is_cut: bool) -> None:
        """Counts a row."""
        self.rows += 1
        self.dropped += not is_kept
        self.cut += is_cut and is_kept

    def describe(self, source: Any) -> str:
        """Returns the counts as text; `source` describes the source of the rows."""
        path = getattr(source, "path", type(source).__name__)
        name = str(path) if isinstance(path, str | Path) else ", ".join(map(str, path))
        shortened = f", shortened {self.cut:,} to max_length" if self.cut else ""
        return f"{self.rows:,} rows of {name:.200}, dropped {self.dropped:,} without a token to train{shortened}"


def to_sample(ids: npt.NDArray[np.int64], is_trained: npt.NDArray[np.bool_]) -> dict[str, Tensor]:
    """Returns `input_ids` and `labels`, which are -100 where a token is not trained."""
    labels = np.where(is_trained, ids, IGNORED_LABEL)
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


@dataclass(frozen=True)
class _Tokens:
    """The concatenated tokens of all chats."""

    ids: npt.NDArray[np.int32]
    is_trained: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """The number of tokens up to the end of each chat, after a first 0."""


class ChatRows(Dataset[dict[str, Tensor]]):
    """The chats by index. All chats are converted to tokens at first use, in this process, and need 5 bytes per
    token."""

    def __init__(self, source: Any, renderer: RowRenderer) -> None:
        self.source = source
        self.renderer = renderer
        self.draws_nothing = draws_nothing(source)
        self._tokens: _Tokens | None = None

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the chats."""
        return self.renderer.tokenizer

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The tokens of every sample."""
        return np.diff(self._load().ends)

    def __len__(self) -> int:
        return len(self._load().ends) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Returns the samples of a batch; torch's loader calls this instead of one call per sample."""
        tokens = self._load()
        samples = []
        for index in positive_indices(indices, size=len(self), of="chats").tolist():
            span = slice(int(tokens.ends[index]), int(tokens.ends[index + 1]))
            samples.append(to_sample(tokens.ids[span].astype(np.int64), tokens.is_trained[span]))
        return samples

    def _load(self) -> _Tokens:
        if self._tokens is not None:
            return self._tokens
        ids, is_trained = [np.empty(0, np.int32)], [np.empty(0, np.bool_)]
        for rendered in self._render_rows():
            ids.append(np.array(rendered.ids, np.int32))
            is_trained.append(np.array(rendered.is_trained, np.bool_))
        counts = self.renderer.counts
        if len(ids) == 1:
            raise DataError(
                f"chat: {counts.describe(self.source)}. Check train_on ({self.renderer.train_on}), max_length "
                f"({self.renderer.max_length}), and that the rows have turns of the assistant."
            )
        self._tokens = _Tokens(np.concatenate(ids), np.concatenate(is_trained), np.cumsum([len(each) for each in ids]))
        share = 100 * float(self._tokens.is_trained.mean())
        level = logging.WARNING if counts.dropped else logging.INFO
        logger.log(
            level, "chat: %s; %s tokens, of which %.1f %% are trained.",
            counts.describe(self.source), f"{len(self._tokens.ids):,}", share,
        )  # fmt: skip
        return self._tokens

    def _render_rows(self) -> Iterator[RenderedChat]:
        """Yields the chats that are kept."""
        size = len(self.source)
        self.renderer.counts = RowCounts()
        with progress("Converting chats to tokens", total=size, unit="rows") as advance:
            for start in range(0, size, _READ_AT_ONCE):
                numbers = list(range(start, min(start + _READ_AT_ONCE, size)))
                for number, row in zip(numbers, fetch(self.source, numbers), strict=True):
                    try:
                        rendered = self.renderer.render(row)
                    except RowError as error:
                        raise DataError(f"{self._describe_row(number)}: {error}") from error.__cause__
                    if rendered is not None:
                        yield rendered
                advance(len(numbers))

    def _describe_row(self, number: int) -> str:
        describe = getattr(self.source, "describe_row", None)
        return f"row {number} of {type(self.source).__name__}" if describe is None else str(describe(number))


class ChatStream(ProcessedStream):
    """The chats of a stream, converted to tokens while they are read; sharded and resumed like their source."""

    def __init__(self, source: Any, renderer: RowRenderer) -> None:
        super().__init__(source, renderer, {})
        self.renderer = renderer

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the chats."""
        return self.renderer.tokenizer

    def _shard(self, num_shards: int, index: int) -> ChatStream:
        return ChatStream(self.source.shard(num_shards=num_shards, index=index), self.renderer)


class JsonRows(Dataset[Any]):
    """The rows of .json files, each of which contains one list; all are read at first use."""

    draws_nothing = True  # the loader need not seed each sample

    def __init__(
        self, path: Paths, *, cache_dir: str | Path | None = None, project_dir: str | Path | None = None
    ) -> None:
        self.path = path
        self._cache_dir = cache_dir
        self._project_dir = Path(project_dir or ".").absolute()  # a worker may run in another folder
        self._rows: list[tuple[Any, str]] | None = None

    def list_files(self) -> list[str]:
        """Returns the names and sizes of the files."""
        return list_locations(find_files(self.path, suffixes=JSON_SUFFIXES, project_dir=self._project_dir))

    def describe_row(self, index: int) -> str:
        """Returns the file and the line of a row, for errors."""
        return self._load()[index][1]

    def __len__(self) -> int:
        return len(self._load())

    def __getitem__(self, index: int) -> Any:
        return self._load()[index][0]

    def _load(self) -> list[tuple[Any, str]]:
        if self._rows is None:
            found = find_files(self.path, suffixes=JSON_SUFFIXES, project_dir=self._project_dir)
            self._rows = [row for location in found for row in _read_list(location, location.fetch(self._cache_dir))]
        return self._rows


def _read_list(location: FileLocation, local: Path) -> Iterator[tuple[Any, str]]:
    """Yields each row of a list, with its file and line."""
    try:
        text = local.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{location.name} cannot be read: {error}.") from error
    decoder, blanks, line, counted = json.JSONDecoder(), " \t\r\n", 1, 0

    def skip(position: int) -> int:
        while text[position : position + 1] and text[position] in blanks:
            position += 1
        return position

    position = skip(0)
    if text[position : position + 1] != "[":
        raise DataError(f"{location.name} does not begin with a list. Name a file with one row on each line .jsonl.")
    position = skip(position + 1)
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            row, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{location.name} line {line}: not JSON: {error}") from error
        yield row, f"{location.name} line {line}"
        position = skip(end)
        if text[position : position + 1] == ",":
            position = skip(position + 1)
        elif text[position : position + 1] != "]":
            raise DataError(f"{location.name} line {line}: the list does not end after this row.")
    position = skip(position + 1)
    if position < len(text):
        line += text.count("\n", counted, position)
        raise DataError(f"{location.name} line {line}: more text follows the list. Use one list, or a .jsonl file.")
