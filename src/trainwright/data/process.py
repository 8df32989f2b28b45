"""data.process: a user's function applied to every sample, once and cached, or to the rows of a stream as it is read.

The cache key is the function's source, its arguments, an optional version, and the identity of the dataset.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import glob
import hashlib
import inspect
import json
import logging
import os
import re
import signal
import site
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from torch.utils.data import Dataset

from trainwright.data.arrow import ArrowRows, ArrowRowWriter, StoredSample
from trainwright.data.cache import CACHE_TAG, Report, build_once, cache_root
from trainwright.data.fetch import StreamBrokenError, count_samples, fetch, make_in_project
from trainwright.data.order import mix_seed
from trainwright.data.randomness import preserve_generators, seed_generators
from trainwright.data.sources.formats import RowError
from trainwright.data.sources.locations import remote_version
from trainwright.data.streams import DerivedStream, SourcePass
from trainwright.data.workers import LoaderOptions, prepare_worker, serve_in_workers
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.progress import progress
from trainwright.registry import resolve as registry

logger = logging.getLogger(__name__)

# A cache_dir does not change the samples, and its folder changes with every use.
_NOT_INPUT = frozenset({"cache_dir", "type"})
_FILE_URL, _HUB_URL = "file://", "hf://"

Version: TypeAlias = str | int | float | None
"""Changed by the user after a change that the key does not cover."""


def fingerprint_function(function: Callable[..., Any], *, version: Version = None, where: object | None = None) -> str:
    """Returns a digest of a function's name, its source and the values bound to it.

    Raises ConfigError, located at `where`, if the source cannot be read or a bound value cannot be described, unless
    there is a `version`.
    """
    code, bound = _unbind(function)
    name = name_of(function)
    source = _source_of(code)
    if source is None and version is None:
        raise ConfigError(
            f"The source of {name} cannot be read, so the cache key cannot include it. Define the function in a file, "
            "or set `version` and change it whenever the function changes.",
            where=where,
        )
    values = _Reading((), asks_servers=False, accepts_objects=version is not None, where=where)
    described = [(key, values.describe(value, name=key, label=f"{name}: {key}")) for key, value in bound]
    return _digest([_full_name(code), source, described])


def canonical_arguments(arguments: Mapping[str, Any], label: str, *, version: Version = None) -> str:
    """Returns arguments as JSON, with the size and time of the files that they name.

    Rejects values that JSON cannot represent, because two of them could not be distinguished, unless there is a
    `version`.
    """
    reading = _Reading(_folders(registry.project_folder(), Path.cwd()), accepts_objects=version is not None)
    described = {
        name: reading.describe(value, name=name, label=f"{label}: the argument {name}")
        for name, value in arguments.items()
    }
    return json.dumps(described, sort_keys=True, ensure_ascii=False)


def describe_input(
    component: Mapping[str, Any],
    dataset: Any,
    *,
    target: Callable[..., Any] | None = None,
    project_dir: str | os.PathLike[str] | None = None,
    run_seed: int | None = None,
    version: Version = None,
) -> str:
    """Returns a text that changes when a component of the config would return other samples.

    It contains the arguments, with size and time of the files, folders and globs among them, and the source of the
    user's class or function: `target`, which the component names, and the class of the dataset. Relative paths start at
    `project_dir` if the target accepts it, and otherwise there or at the working directory. `run_seed` counts if the
    target accepts it or is unknown.
    """
    names = _parameter_names(target)
    project = registry.project_folder() if project_dir is None else Path(project_dir)
    folders = _folders(project) if project_dir is not None and "project_dir" in names else _folders(project, Path.cwd())
    has_fingerprint = hasattr(type(dataset), "fingerprint") or "fingerprint" in getattr(dataset, "__dict__", ())
    reading = _Reading(
        folders, asks_servers=not has_fingerprint, accepts_objects=has_fingerprint or version is not None
    )
    facts: dict[str, Any] = {
        "component": {name: reading.describe(value, name=name, label=name) for name, value in component.items()}
    }
    for role, code in (("target", target), ("class", type(dataset))):
        if code is not None and not _is_library(inspect.unwrap(code)):
            facts[role] = _describe_code(inspect.unwrap(code))
    if run_seed is not None and "run_seed" not in component and (target is None or "run_seed" in names):
        facts["run_seed"] = run_seed
    return json.dumps(facts, sort_keys=True, ensure_ascii=False)


def name_of(function: Callable[..., Any]) -> str:
    """Returns a function's name for messages; for a partial, the name of its function."""
    inner = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "lambda" if name == "<lambda>" else str(name)


def _unbind(function: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """Returns the function or class whose source defines a callable, and the values bound to the callable."""
    bound: list[tuple[str, Any]] = []
    while True:
        if isinstance(function, functools.partial):
            bound.append(("its positional arguments", function.args))
            bound += [(f"its argument {name}", value) for name, value in function.keywords.items()]
            function = function.func
            continue
        if isinstance(function, types.FunctionType):
            for each in inspect.signature(function, follow_wrapped=False).parameters.values():
                if each.default is not inspect.Parameter.empty:
                    bound.append((f"the default of {each.name}", each.default))
            variables = inspect.getclosurevars(function).nonlocals
            bound += [(f"the variable {name}", value) for name, value in variables.items()]
        else:
            bound += _attributes_of(function.__self__ if isinstance(function, types.MethodType) else function)
        if isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):  # functools.wraps and functools.lru_cache
            function = function.__wrapped__
        else:
            is_code = inspect.isclass(function) or inspect.isroutine(function)
            return function if is_code else type(function), bound


def _attributes_of(owner: Any) -> list[tuple[str, Any]]:
    """Returns the class and the attributes of an object."""
    if inspect.isclass(owner):
        return [("its class", owner)]
    if inspect.isroutine(owner) or hasattr(owner, "__wrapped__"):
        return []
    attributes = getattr(owner, "__dict__", {"itself": owner})  # an object without `__dict__`
    return [("its class", type(owner)), *((f"its attribute {name}", value) for name, value in attributes.items())]


def _full_name(code: Any) -> str:
    return f"{code.__module__}:{code.__qualname__}"


def _is_code(value: Any) -> bool:
    """Returns True for a class or a plain function; a method or a partial has bound values too."""
    if inspect.isbuiltin(value):
        return value.__self__ is None or inspect.ismodule(value.__self__)
    return inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value) if callable(value) else value)


def _describe_code(code: Any) -> dict[str, Any]:
    """Returns the name of a function or class, and the source of one in user code."""
    return {"code": _full_name(code), "source": None if _is_library(code) else _source_of(code)}


def _source_of(code: Any) -> str | None:
    """Returns the source text of a function or class; None if Python cannot read it."""
    try:
        return _lambda_source(code) if code.__name__ == "<lambda>" else inspect.getsource(code)
    except (OSError, TypeError):
        return None


def _lambda_source(function: Any) -> str:
    """Returns all lines of a lambda, of which `inspect.getsource` may omit the last ones, and its columns.

    The columns are needed because one line may contain several lambdas.
    """
    lines, first = inspect.findsource(function)
    spans = [span for span in function.__code__.co_positions() if None not in span]
    last = max((end for _, end, _, _ in spans if end is not None), default=first + 1)
    columns = sorted({(start, end) for _, _, start, end in spans})
    return f"{''.join(lines[first:last])}{columns}"


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[2])}
    return tuple(str(Path(path).resolve()) + os.sep for path in paths)


def _is_library(code: Any) -> bool:
    """Returns True for code of a library, of this package, or without a file, whose name is sufficient for the key."""
    try:
        file = inspect.getsourcefile(code)
    except TypeError:
        return True
    return file is None or str(Path(file).resolve()).startswith(_library_folders())


@dataclass(frozen=True)
class _Reading:
    """Converts the arguments of a component or a function to plain values, and files to their size and time."""

    folders: Sequence[Path]
    """The folders in which a relative path may start; files in all of them are included."""
    asks_servers: bool = True
    accepts_objects: bool = False
    """True if other objects are described by their class, because something else identifies their content."""
    where: object | None = None
    """The source location of the value, for errors."""

    def describe(self, value: Any, *, name: str, label: str) -> Any:
        """Returns a value that JSON can represent; `name` is the argument's name, `label` is for errors."""
        if isinstance(value, (str, os.PathLike)):
            text = os.fspath(value)
            files = None if name in _NOT_INPUT else self._describe_path(text)
            return text if files is None else {"path": text, **files}
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, Mapping):
            return {str(key): self.describe(item, name=str(key), label=f"{label}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.describe(item, name=name, label=f"{label}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return sorted(json.dumps(self.describe(item, name=name, label=label)) for item in value)
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if _is_code(value):
            return _describe_code(inspect.unwrap(value))
        if self.accepts_objects:
            return {"object": _full_name(type(value))}
        raise ConfigError(
            f"{label} is of type {type(value).__name__}, which the cache key cannot describe. Use numbers, strings, "
            "lists and mappings, create the object inside the function, or set `version` and change it whenever the "
            "object changes.",
            where=self.where,
        )

    def _describe_path(self, text: str) -> dict[str, Any] | None:
        """Returns the number, size and a digest of the files that a text names; None if it names none."""
        text = text.removeprefix(_FILE_URL)
        if not text or "\0" in text or "\n" in text:
            return None
        if "://" in text:
            # Datasets of the hub are identified by the fingerprint of the library that reads them.
            version = remote_version(text) if self.asks_servers and not text.startswith(_HUB_URL) else None
            return None if version is None else {"files": len(version), "digest": _digest(version)}
        relative = Path.home() / text[2:] if text.startswith("~/") else Path(text)
        paths = dict.fromkeys(folder / relative for folder in self.folders)  # an absolute path is the same for each
        files = [facts for path in paths for facts in _files_at(path)]
        if not files:
            return None
        return {"files": len(files), "bytes": sum(size for _, size, _ in files), "digest": _digest(files)}


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _folders(*folders: Path | None) -> list[Path]:
    return list(dict.fromkeys(folder.absolute() for folder in folders if folder is not None))


def _parameter_names(target: Callable[..., Any] | None) -> tuple[str, ...]:
    try:
        return () if target is None else tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a class that is written in C
        return ()


def _files_at(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, size and time of the files that a path or a glob names, without caches in folders."""
    roots = [path]
    if not os.path.lexists(path):  # also False for a text that is too long for a name
        is_glob = glob.has_magic(str(path))
        roots = [Path(found) for found in sorted(glob.glob(str(path), recursive=True))] if is_glob else []  # noqa: PTH207
    for root in roots:
        files = [(root, root.name)]
        if root.is_dir():
            files = []
            for folder, folders, names in os.walk(root):
                if CACHE_TAG in names:
                    folders.clear()
                    continue
                folders.sort()
                inside = [Path(folder, name) for name in sorted(names)]
                files += [(each, each.relative_to(root).as_posix()) for each in inside]
        for file, name in files:
            try:
                facts = file.stat()
            except OSError:
                continue  # a dangling link, or removed since
            yield name, facts.st_size, facts.st_mtime_ns


# Reading a source's state may take as long as a row, so it is requested once for this many rows.
_ROWS_PER_ANCHOR = 64


class ProcessedStream(DerivedStream):
    """A stream of what `function(row, **arguments)` returns: a sample, a list of samples, or None to drop the row.

    It is sharded and resumed like its source, and then reads at most 64 rows again.
    """

    def __init__(self, source: Any, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        super().__init__([source])
        self.source = source
        self.function = function
        self.arguments = dict(arguments)
        self.draws_nothing = self.draws_nothing and bool(getattr(function, "draws_nothing", False))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("source", "_sources"):
            raise AttributeError(name)
        offered = getattr(self.source, name)
        return super().__getattr__(name) if name in ("shard", "state_dict", "load_state_dict") else offered

    def _read(self, start: Mapping[str, Any] | None) -> _ProcessedPass:
        return _ProcessedPass(self, start)

    def _shard(self, num_shards: int, index: int) -> ProcessedStream:
        shard = self.source.shard(num_shards=num_shards, index=index)
        return ProcessedStream(shard, self.function, self.arguments)


class _ProcessedPass:
    """One iteration; after a row that raised it continues with the next, if its source does."""

    def __init__(self, stream: ProcessedStream, start: Mapping[str, Any] | None) -> None:
        self._stream = stream
        self._can_resume = hasattr(stream.source, "state_dict")
        self._anchor: Any = None if start is None else start["source"]
        self._rows_since = self._num_given = 0
        self._outputs: list[Any] = []
        self._source = SourcePass(
            stream.source, state=copy.deepcopy(self._anchor), epoch=stream.epoch, seed=stream.seed
        )
        if start is not None:
            for _ in range(start["rows"]):
                try:
                    self._next_row()
                except StreamBrokenError:
                    raise
                except Exception as error:
                    logger.debug("Skipped again: %s", error)  # it was reported before
            self._num_given = int(start["given"])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._num_given >= len(self._outputs):
            self._next_row()
        self._num_given += 1
        return self._outputs[self._num_given - 1]

    def _next_row(self) -> None:
        if self._can_resume and self._rows_since >= _ROWS_PER_ANCHOR:
            self._anchor, self._rows_since = copy.deepcopy(self._source.state()), 0
        error = None
        try:
            row = self._source.take()
        except StopIteration:
            raise  # the last row remains the current one
        except Exception as caught:
            error = caught
        self._rows_since += 1
        self._outputs, self._num_given = [], 0
        if error is not None:
            raise error
        try:
            returned = self._stream.function(row, **self._stream.arguments)
        except RowError as problem:  # of a function of this package, which does not know where the row is
            raise DataError(f"{self._source.describe()}: {problem}") from problem.__cause__
        self._outputs = [] if returned is None else list(returned) if isinstance(returned, list) else [returned]

    def state(self) -> dict[str, Any]:
        """Returns the source's last known state, the number of rows since then, and of samples returned for the last
        row."""
        return {"source": self._anchor, "rows": self._rows_since, "given": self._num_given}


CACHE_FORMAT = 2
"""Increased when the content of a cache with the same key changes, so that old caches are not used."""

_FOLDER = "processed"
_READ_ROWS = 64  # read from the source in one call
_REPORT_EVERY_SECONDS = 5.0
_PARENT_CHECK_SECONDS = 1.0
_PROCESS_STREAM, _SOURCE_STREAM = 0x9C0C, 0x9C05  # separate these seeds from those of a run

ProcessFunction = Callable[..., Mapping[str, Any] | list[Mapping[str, Any]] | None]
"""Maps a sample, with arguments by keyword, to a sample, a list of samples, or None, which drops the row."""


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
    """Returns the results of `function(sample, **arguments)` for each sample of a map-style dataset, in order.

    The function returns a sample (a dict), a list of samples, or None. It is called once for each row, in this process
    or in `num_workers` worker processes. The global generators are seeded for each row, so its draws do not depend on
    the process. The result is cached below `cache_dir` (by default `trainwright` in $XDG_CACHE_HOME or ~/.cache).
    The cache key is the function's source, its arguments, `version` and the input; `num_workers` is not part of it.
    `input_key` describes the input, as `describe_input` does; the source's `fingerprint` and length count too.
    `function_key` replaces the function's source in the key. `rebuild` runs the function again. `source_name` is the
    source's name in messages, by default its class.
    """
    found = getattr(source, "fingerprint", None)
    found = found() if callable(found) else found
    key = {
        "function": function_key if function_key is not None else fingerprint_function(function, version=version),
        "arguments": canonical_arguments(arguments or {}, name_of(function), version=version),
        "version": version,
        "input": input_key,
        "input_fingerprint": None if found is None else str(found),
        "input_rows": count_samples(source, "data.process"),
    }
    facts = json.dumps({**key, "format": CACHE_FORMAT}, sort_keys=True)
    digest = hashlib.sha256(facts.encode("utf-8", "surrogatepass")).hexdigest()
    file_name = re.sub(r"[^A-Za-z0-9_.-]+", "_", name_of(function))[:60]
    entry = cache_root(cache_dir) / _FOLDER / f"{file_name}-{digest[:24]}"
    processor = _RowProcessor(source, source_name or type(source).__name__, function, dict(arguments or {}))
    write = functools.partial(_write_samples, processor=processor, key=key, num_workers=num_workers)
    while True:
        rows = ArrowRows(build_once(entry, write, rebuild=rebuild), fingerprint=digest)
        try:
            rows.open()
        except DataError as error:
            # Another process may have rebuilt and removed the folder before it was opened.
            if not isinstance(error.__cause__, FileNotFoundError) or rows.folder.exists():
                raise
            rebuild = False
        else:
            return rows


def _write_samples(
    folder: Path, report: Report, *, processor: _RowProcessor, key: Mapping[str, Any], num_workers: int
) -> None:
    """Processes every row into `folder`; preserves the global generators."""
    name, total, started = processor.name, key["input_rows"], time.monotonic()
    reported_at = started
    writer, results = ArrowRowWriter(folder), _process_rows(processor, total, num_workers)
    with (
        preserve_generators(),
        contextlib.closing(writer),
        contextlib.closing(results),
        progress(f"Processing rows with {name}", total=total, unit="rows") as advance,
    ):
        for row, samples in enumerate(results):
            for sample in samples:
                writer.add(sample)
            advance()
            now = time.monotonic()
            if now - reported_at >= _REPORT_EVERY_SECONDS:
                reported_at = now
                report(f"{row + 1} of {total} rows, {(row + 1) / (now - started):.0f} rows/s")
        if writer.num_rows == 0:
            raise DataError(
                f"{name} returned None or an empty list for each of the {total} rows of "
                f"{processor.source_name}. Return the samples to keep."
            )
        writer.finish(made_by=name, key=key)
    seconds = time.monotonic() - started
    logger.info(
        "%s: %d rows → %d samples in %.1f s, cached in %s", name, total, writer.num_rows, seconds, folder.parent
    )


def _process_rows(processor: _RowProcessor, total: int, num_workers: int) -> Generator[list[StoredSample], None, None]:
    """Yields the samples of each row, in order."""
    starts = range(0, total, _READ_ROWS)
    requests = (range(start, min(start + _READ_ROWS, total)) for start in starts)
    if num_workers == 0:
        for rows in requests:
            yield from processor.process(rows)
        return
    options = LoaderOptions(min(num_workers, len(starts)))
    advice = "Check those rows, or lower num_workers."
    results = serve_in_workers(
        processor, requests, options, label=processor.name, advice=advice, prepare=_prepare_worker
    )
    with contextlib.closing(results):
        for _, samples in results:
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
        """Yields the stored samples of each row."""
        # A source may draw random numbers too, which must depend only on the rows.
        seed_generators(mix_seed(0, _SOURCE_STREAM, rows.start))
        try:
            samples = fetch(self._source, list(rows))
        except Exception as error:
            self._raise_unreadable(error, rows)
        for row, sample in zip(rows, samples, strict=True):
            yield [self._store(result, row) for result in self._call(row, sample)]

    def __getitems__(self, rows: range) -> list[list[StoredSample]]:
        """Processes rows in a worker. Stored samples contain no tensors, each of which would need an open file."""
        return list(self.process(rows))

    def describe(self, rows: range) -> str:
        """Names the rows."""
        return f"rows {rows.start} to {rows.stop - 1} of {self.source_name}"

    def _raise_unreadable(self, error: Exception, rows: range) -> NoReturn:
        """Raises the error of a failed read with the row that caused it, which is found by reading them one by one."""
        which, found = f"Rows {rows.start} to {rows.stop - 1}", error
        for row in rows:
            try:
                fetch(self._source, [row])
            except Exception as row_error:
                which, found = f"Row {row}", row_error
                break
        raise DataError(
            f"{which} of {self.source_name} cannot be read: {_message_of(found)}. Nothing is cached: repair the data, "
            "or remove the row; data.on_error does not apply to data.process."
        ) from found

    def _call(self, row: int, sample: Any) -> list[Mapping[str, Any]]:
        """Returns the samples of one row."""
        seed_generators(mix_seed(0, _PROCESS_STREAM, row))
        try:
            result = self._function(sample, **self._arguments)
        except Exception as error:
            raise DataError(
                f"{self.name} failed on row {row} of {self.source_name}: {_message_of(error)}. Nothing is cached: "
                "correct the function, or return None to drop the row."
            ) from error
        results = [] if result is None else result if isinstance(result, list) else [result]
        for each in results:
            if not isinstance(each, Mapping) or not each:
                kind = "an empty dict" if isinstance(each, Mapping) else f"a {type(each).__name__}"
                raise DataError(
                    f"{self.name} returned {kind} for row {row} of {self.source_name}. "
                    "Return a dict with at least one key, a list of them, or None to drop the row."
                )
        return results

    def _store(self, sample: Mapping[str, Any], row: int) -> StoredSample:
        try:
            return StoredSample.of(sample)
        except TypeError as error:
            raise DataError(
                f"The result of {self.name} for row {row} of {self.source_name} cannot be cached: {error}."
            ) from error


def _prepare_worker(number: int) -> None:
    """Prepares a worker that has nothing to save: it ends at SIGTERM, and soon after its parent process."""
    prepare_worker(number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """Ends this process when its parent has ended; torch checks only between requests, then waits for its queues."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


def _message_of(error: BaseException) -> str:
    message = str(error) if isinstance(error, TrainwrightError) else f"{type(error).__name__}: {error}"
    return message.rstrip(".: ")
