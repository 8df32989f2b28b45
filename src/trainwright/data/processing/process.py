"""Processed data: a user's function run over every sample of a dataset once, and the results kept on the disk.

    processed(source, function) = key → build_once(read, call, write) → ArrowRows

The key is what the function does (fingerprint.py), its arguments and what the input is. Whoever asks for the same
again, another rank or tomorrow's run, reads what was written. Who builds and who waits is in build_once.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trainwright.data.cache import cache_root
from trainwright.data.fetch import count_samples, fetch
from trainwright.data.order import mix_seed
from trainwright.data.processing.arrow_rows import ArrowRows, ArrowRowWriter
from trainwright.data.processing.build_once import Report, build_once
from trainwright.data.processing.fingerprint import (
    canonical_arguments,
    describe_input,
    fingerprint_function,
    fingerprint_source,
    name_of,
)
from trainwright.data.randomness import preserve_generators, seed_generators
from trainwright.errors import DataError, TrainwrightError

__all__ = ["ProcessFunction", "describe_input", "processed"]

logger = logging.getLogger(__name__)

CACHE_FORMAT = 2
"""Raised when the same key would be written otherwise, so that no old cache is taken for a current one."""

_FOLDER = "processed"
_READ_ROWS = 64  # read from the source in one call
_SAY_EVERY_SECONDS = 5.0
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
    source_name: str | None = None,
) -> ArrowRows:
    """Returns what `function(sample, **arguments)` makes of each sample of a map-style dataset, in its order.

    The function returns a sample (a dict), a list of samples, or None. It is called once for each row, by one
    process, and its generators (torch's, Python's, numpy's) are seeded from the row, so what it draws does not
    depend on who calls it. The result is kept below `cache_dir` (by default `trainwright` in $XDG_CACHE_HOME or
    ~/.cache) and found again by the same function, arguments and input. `input_key` says what the input is, as
    `describe_input` does; the source's own `fingerprint` and its length count too. `function_key` stands for the
    function where its code shall not count. `rebuild` runs the function again, for what no key can see.
    `source_name` is what messages call the source, by default its class.
    """
    key = _Key(
        function=function_key if function_key is not None else fingerprint_function(function),
        arguments=canonical_arguments(arguments or {}, name_of(function)),
        input=input_key,
        input_fingerprint=fingerprint_source(source),
        input_rows=count_samples(source, "data.process"),
    )
    entry = cache_root(cache_dir) / _FOLDER / f"{_file_name(name_of(function))}-{key.digest()[:24]}"
    work = _Work(source, source_name or type(source).__name__, function, dict(arguments or {}), key)
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

    source: Any
    source_name: str
    function: ProcessFunction
    arguments: dict[str, Any]
    key: _Key

    def write(self, folder: Path, report: Report) -> None:
        """Processes every row into `folder`, leaving this process's generators as they were."""
        writer = ArrowRowWriter(folder)
        started = time.monotonic()
        with preserve_generators(), contextlib.closing(writer):
            for row, sample in self._rows(report, started):
                for result in self._call(row, sample):
                    self._add(writer, result, row)
            if writer.num_rows == 0:
                raise DataError(
                    f"{self._name} leaves nothing of the {self.key.input_rows} rows of {self.source_name}: it "
                    "returned None or an empty list for each. Return the samples that shall be kept."
                )
            writer.finish(made_by=self._name, key=vars(self.key))
        seconds = time.monotonic() - started
        logger.info(
            "%s: %d rows → %d samples in %.1f s, kept in %s",
            self._name, self.key.input_rows, writer.num_rows, seconds, folder.parent,
        )  # fmt: skip

    @property
    def _name(self) -> str:
        return name_of(self.function)

    def _rows(self, report: Report, started: float) -> Iterator[tuple[int, Any]]:
        """Yields every row in order, and says now and then how far it is."""
        total, said_at = self.key.input_rows, started
        for start in range(0, total, _READ_ROWS):
            stop = min(start + _READ_ROWS, total)
            # A source may draw too; what it draws depends on the rows then, not on what this process drew before.
            seed_generators(mix_seed(0, _SOURCE_STREAM, start))
            try:
                samples = fetch(self.source, list(range(start, stop)))
            except Exception as error:
                self._raise_unreadable(error, start, stop)
            for row, sample in enumerate(samples, start):
                now = time.monotonic()
                if now - said_at >= _SAY_EVERY_SECONDS:
                    said_at = now
                    progress = f"{row} of {total} rows, {row / (now - started):.0f} rows/s"
                    report(progress)
                    logger.info("%s: %s", self._name, progress)
                yield row, sample

    def _raise_unreadable(self, error: Exception, start: int, stop: int) -> NoReturn:
        """Raises the error of a failed read with the row that it comes from, found by reading them one by one."""
        rows, found = f"Rows {start} to {stop - 1}", error
        for row in range(start, stop):
            try:
                fetch(self.source, [row])
            except Exception as own:
                rows, found = f"Row {row}", own
                break
        raise DataError(
            f"{rows} of {self.source_name} cannot be read: {_words(found)}. Nothing is cached: mend the data, or leave "
            "the row out of it; data.on_error does not apply to rows that are read for data.process."
        ) from found

    def _call(self, row: int, sample: Any) -> list[Mapping[str, Any]]:
        """Returns the samples that one row becomes."""
        seed_generators(mix_seed(0, _PROCESS_STREAM, row))
        try:
            result = self.function(sample, **self.arguments)
        except Exception as error:
            raise DataError(
                f"{self._name} failed on row {row} of {self.source_name}: {_words(error)}. Nothing is cached; "
                "mend the function, or let it return None for rows to leave out."
            ) from error
        results = [] if result is None else result if isinstance(result, list) else [result]
        for each in results:
            if not isinstance(each, Mapping) or not each:
                raise DataError(
                    f"{self._name} made {_kind(each)} of row {row} of {self.source_name}. "
                    "Return a dict with at least one key, a list of them, or None to leave the row out."
                )
        return results

    def _add(self, writer: ArrowRowWriter, sample: Mapping[str, Any], row: int) -> None:
        try:
            writer.add(sample)
        except TypeError as error:
            raise DataError(
                f"What {self._name} made of row {row} of {self.source_name} cannot be cached: {error}."
            ) from error


def _kind(value: Any) -> str:
    return "an empty dict" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _words(error: BaseException) -> str:
    # Ours already say in words what is wrong.
    words = str(error) if isinstance(error, TrainwrightError) else f"{type(error).__name__}: {error}"
    return words.rstrip(".: ")


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:60]
