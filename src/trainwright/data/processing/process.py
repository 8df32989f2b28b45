"""Processed data: a user's function run over every sample of a dataset once, and the results kept on the disk.

    processed(source, function) = key → build_once(read, call, write) → ArrowRows

The key is the function's source and arguments (fingerprint.py) and what the input is. Whoever asks for the same again,
another rank or tomorrow's run, reads what was written. Who builds and who waits is in build_once.py; the rows may be
read and processed in workers (data/workers.py), and are written by this process in their order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.utils.data import Dataset

from trainwright import registry
from trainwright.data.cache import cache_root
from trainwright.data.fetch import count_samples, fetch, make_in_project
from trainwright.data.order import mix_seed
from trainwright.data.processing.arrow_rows import ArrowRows, ArrowRowWriter, StoredSample
from trainwright.data.processing.build_once import Report, build_once
from trainwright.data.processing.fingerprint import (
    Version,
    canonical_arguments,
    fingerprint_function,
    fingerprint_source,
    name_of,
)
from trainwright.data.randomness import preserve_generators, seed_generators
from trainwright.data.workers import LoaderOptions, prepare_worker, serve_in_workers
from trainwright.errors import DataError, TrainwrightError

logger = logging.getLogger(__name__)

CACHE_FORMAT = 2
"""Raised when the same key would be written otherwise, so that no old cache is taken for a current one."""

_FOLDER = "processed"
_READ_ROWS = 64  # read from the source in one call
_SAY_EVERY_SECONDS = 5.0
_PARENT_CHECK_SECONDS = 1.0
_PROCESS_STREAM, _SOURCE_STREAM = 0x9C0C, 0x9C05  # keep these seeds apart from a run's samples', batches' and steps'

ProcessFunction = Callable[..., Mapping[str, Any] | list[Mapping[str, Any]] | None]
"""From a sample, and its arguments by keyword, to a sample, to several, or to None, which leaves the row out."""


def processed(
    source: Any,
    function: ProcessFunction,
    *,
    arguments: Mapping[str, Any] | None = None,
    input_key: str,
    cache_dir: str | Path | None = None,
    rebuild: bool = False,
    function_key: str | None = None,
    version: Version = None,
    num_workers: int = 0,
    source_name: str | None = None,
) -> ArrowRows:
    """Returns what `function(sample, **arguments)` makes of each sample of a map-style dataset, in its order.

    The function returns a sample (a dict), a list of samples, or None. It is called once for each row, in this process
    or in `num_workers` others, and its generators (torch's, Python's, numpy's) are seeded from the row, so what it
    draws does not depend on who calls it. The result is kept below `cache_dir` (by default `trainwright` in
    $XDG_CACHE_HOME or ~/.cache) and found again by the same function, arguments, `version` and input. `input_key` says
    what the input is, as `describe_input` does; the source's own `fingerprint` and its length count too. `function_key`
    stands for the function where its source shall not count. `rebuild` runs the function again, for what no key can
    see. `source_name` is what messages call the source, by default its class.
    """
    key = _Key(
        function=function_key if function_key is not None else fingerprint_function(function, version=version),
        arguments=canonical_arguments(arguments or {}, name_of(function), version=version),
        version=version,
        input=input_key,
        input_fingerprint=fingerprint_source(source),
        input_rows=count_samples(source, "data.process"),
    )
    entry = cache_root(cache_dir) / _FOLDER / f"{_file_name(name_of(function))}-{key.digest()[:24]}"
    processor = _RowProcessor(source, source_name or type(source).__name__, function, dict(arguments or {}))
    work = _Work(processor, key, num_workers)
    while True:
        # Of an earlier process's build the folder may go before it is opened, if a third one rebuilds just then.
        rows = ArrowRows(build_once(entry, work.write, rebuild=rebuild), fingerprint=key.digest())
        try:
            rows.open()
        except DataError as error:
            if not isinstance(error.__cause__, FileNotFoundError) or rows.folder.exists():
                raise
            rebuild = False
        else:
            return rows


@dataclass(frozen=True)
class _Key:
    """All that the processed samples depend on."""

    function: str
    arguments: str
    version: Version
    input: str
    input_fingerprint: str | None
    input_rows: int

    def digest(self) -> str:
        """Returns the name that the cache knows the samples by."""
        facts = json.dumps({**vars(self), "format": CACHE_FORMAT}, sort_keys=True)
        return hashlib.sha256(facts.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class _Work:
    """One pass of the function over the source."""

    processor: _RowProcessor
    key: _Key
    num_workers: int

    def write(self, folder: Path, report: Report) -> None:
        """Processes every row into `folder`, leaving this process's generators as they were."""
        name, total, started = self.processor.name, self.key.input_rows, time.monotonic()
        said_at = started
        writer = ArrowRowWriter(folder)
        with preserve_generators(), contextlib.closing(writer), contextlib.closing(self._process()) as processed_rows:
            for row, samples in enumerate(processed_rows):
                for sample in samples:
                    writer.add(sample)
                now = time.monotonic()
                if now - said_at >= _SAY_EVERY_SECONDS:
                    said_at = now
                    progress = f"{row + 1} of {total} rows, {(row + 1) / (now - started):.0f} rows/s"
                    report(progress)
                    logger.info("%s: %s", name, progress)
            if writer.num_rows == 0:
                raise DataError(
                    f"{name} leaves nothing of the {total} rows of {self.processor.source_name}: it "
                    "returned None or an empty list for each. Return the samples that shall be kept."
                )
            writer.finish(made_by=name, key=vars(self.key))
        seconds = time.monotonic() - started
        logger.info(
            "%s: %d rows → %d samples in %.1f s, kept in %s", name, total, writer.num_rows, seconds, folder.parent
        )

    def _process(self) -> Generator[list[StoredSample], None, None]:
        """Yields the samples of each row, in the order of the rows."""
        total = self.key.input_rows
        starts = range(0, total, _READ_ROWS)
        requests = (range(start, min(start + _READ_ROWS, total)) for start in starts)
        if self.num_workers == 0:
            for rows in requests:
                yield from self.processor.process(rows)
            return
        answers = serve_in_workers(
            self.processor,
            requests,
            LoaderOptions(min(self.num_workers, len(starts))),
            label=self.processor.name,
            advice="Look at those rows, or lower num_workers.",
            prepare=_prepare_worker,
        )
        with contextlib.closing(answers):
            for _, samples in answers:
                yield from samples


class _RowProcessor(Dataset[Any]):
    """Reads rows of the source and calls the function on each; runs in workers too."""

    def __init__(self, source: Any, source_name: str, function: ProcessFunction, arguments: dict[str, Any]) -> None:
        self.source_name = source_name
        self.name = name_of(function)
        self._source = source
        self._function = function
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return make_in_project, (_RowProcessor, registry.project_folder()), self.__dict__

    def process(self, rows: range) -> Iterator[list[StoredSample]]:
        """Yields what each row becomes, as it is stored."""
        # A source may draw too; what it draws depends on the rows then, not on what this process drew before.
        seed_generators(mix_seed(0, _SOURCE_STREAM, rows.start))
        try:
            samples = fetch(self._source, list(rows))
        except Exception as error:
            self._raise_unreadable(error, rows)
        for row, sample in zip(rows, samples, strict=True):
            yield [self._store(result, row) for result in self._call(row, sample)]

    def __getitems__(self, rows: range) -> list[list[StoredSample]]:
        """Processes rows in a worker. Nothing in a stored sample is a tensor, each of which would need an open file."""
        return list(self.process(rows))

    def describe(self, rows: range) -> str:
        """Names the rows."""
        return f"rows {rows.start} to {rows.stop - 1} of {self.source_name}"

    def _raise_unreadable(self, error: Exception, rows: range) -> NoReturn:
        """Raises the error of a failed read with the row that it comes from, found by reading them one by one."""
        which, found = f"Rows {rows.start} to {rows.stop - 1}", error
        for row in rows:
            try:
                fetch(self._source, [row])
            except Exception as own:
                which, found = f"Row {row}", own
                break
        raise DataError(
            f"{which} of {self.source_name} cannot be read: {_words(found)}. Nothing is cached: mend the data, or "
            "leave the row out of it; data.on_error does not apply to rows that are read for data.process."
        ) from found

    def _call(self, row: int, sample: Any) -> list[Mapping[str, Any]]:
        """Returns the samples that one row becomes."""
        seed_generators(mix_seed(0, _PROCESS_STREAM, row))
        try:
            result = self._function(sample, **self._arguments)
        except Exception as error:
            raise DataError(
                f"{self.name} failed on row {row} of {self.source_name}: {_words(error)}. Nothing is cached; "
                "mend the function, or let it return None for rows to leave out."
            ) from error
        results = [] if result is None else result if isinstance(result, list) else [result]
        for each in results:
            if not isinstance(each, Mapping) or not each:
                raise DataError(
                    f"{self.name} made {_kind(each)} of row {row} of {self.source_name}. "
                    "Return a dict with at least one key, a list of them, or None to leave the row out."
                )
        return results

    def _store(self, sample: Mapping[str, Any], row: int) -> StoredSample:
        try:
            return StoredSample.of(sample)
        except TypeError as error:
            raise DataError(
                f"What {self.name} made of row {row} of {self.source_name} cannot be cached: {error}."
            ) from error


def _prepare_worker(number: int) -> None:
    """Prepares a worker that has nothing to save: it ends with SIGTERM at once, and soon after its parent."""
    prepare_worker(number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """Ends this process when its parent is gone; torch looks only between requests, and then waits for its queues."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


def _kind(value: Any) -> str:
    return "an empty dict" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _words(error: BaseException) -> str:
    # Ours already say in words what is wrong.
    words = str(error) if isinstance(error, TrainwrightError) else f"{type(error).__name__}: {error}"
    return words.rstrip(".: ")


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:60]
