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
from trainwright.data.fetch import StreamBrokenError, count_samples, draws_nothing, fetch, make_in_project
from trainwright.data.order import mix_seed
from trainwright.data.randomness import preserve_generators, seed_generators
from trainwright.data.sources.locations import remote_version
from trainwright.data.streams import SourcePass
from trainwright.data.workers import LoaderOptions, prepare_worker, serve_in_workers
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.registry import resolve as registry

logger = logging.getLogger(__name__)

# Names no input: where something is cached does not change what it is, and the folder changes with every use.
_NOT_INPUT = frozenset({"cache_dir", "type"})
_FILE_URL, _HUB_URL = "file://", "hf://"

Version: TypeAlias = str | int | float | None
"""What a user changes when something has changed that the key does not see."""


def fingerprint_function(function: Callable[..., Any], *, version: Version = None, where: object | None = None) -> str:
    """Returns a digest of a function's name, its source and the values bound to it.

    Raises ConfigError, located at `where`, if the source cannot be read or a bound value has no text, unless a
    `version` stands for them.
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
    """Returns arguments as one text, with the size and time of each file that they name.

    Rejects what JSON has no words for, unless a `version` stands for it: two such values could not be told apart.
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
    """Returns one text that changes when a component of the config gives other samples.

    It holds the arguments, with size and time of change of the files, folders and globs among them, and the source of
    the user's own class or function: `target`, which the component names, and the class of the dataset that came of it.
    Relative paths start at `project_dir` for a target that takes it; others may also mean the working directory, so
    that both count. `run_seed` counts for a target that takes it, and for an unknown one.
    """
    names = _parameter_names(target)
    project = registry.project_folder() if project_dir is None else Path(project_dir)
    folders = _folders(project) if project_dir is not None and "project_dir" in names else _folders(project, Path.cwd())
    tells_itself = hasattr(type(dataset), "fingerprint") or "fingerprint" in getattr(dataset, "__dict__", ())
    reading = _Reading(folders, asks_servers=not tells_itself, accepts_objects=tells_itself or version is not None)
    facts: dict[str, Any] = {
        "component": {name: reading.describe(value, name=name, label=name) for name, value in component.items()}
    }
    for role, code in (("target", target), ("class", type(dataset))):
        if code is not None and not _is_library(inspect.unwrap(code)):
            facts[role] = _describe_code(inspect.unwrap(code))
    if run_seed is not None and "run_seed" not in component and (target is None or "run_seed" in names):
        facts["run_seed"] = run_seed
    return json.dumps(facts, sort_keys=True, ensure_ascii=False)


def fingerprint_source(source: Any) -> str | None:
    """Returns what the dataset says itself of its content: `fingerprint`, an attribute or a method, if it has one."""
    found = getattr(source, "fingerprint", None)
    found = found() if callable(found) else found
    return None if found is None else str(found)


def name_of(function: Callable[..., Any]) -> str:
    """Returns a function's name for people: of a partial that of the function inside."""
    inner = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "lambda" if name == "<lambda>" else str(name)


def _unbind(function: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """Returns the function or class whose source says what a callable does, and the values that it holds."""
    bound: list[tuple[str, Any]] = []
    while True:
        bound += _held_by(function)
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):  # functools.wraps and functools.lru_cache
            function = function.__wrapped__
        else:
            break
    is_instance = not inspect.isclass(function) and not inspect.isroutine(function)
    return type(function) if is_instance else function, bound


def _held_by(function: Any) -> list[tuple[str, Any]]:
    """Returns what a callable holds itself: arguments of a partial, a closure and defaults, or attributes."""
    if isinstance(function, functools.partial):
        keywords = [(f"its argument {name}", value) for name, value in function.keywords.items()]
        return [("its positional arguments", function.args), *keywords]
    if isinstance(function, types.FunctionType):
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
        defaults = [(f"the default of {each.name}", each.default) for each in parameters]
        variables = inspect.getclosurevars(function).nonlocals
        return [
            *(pair for pair in defaults if pair[1] is not inspect.Parameter.empty),
            *((f"the variable {name}", value) for name, value in variables.items()),
        ]
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    if inspect.isclass(owner):
        return [("its class", owner)]
    if inspect.isroutine(owner) or hasattr(owner, "__wrapped__"):
        return []
    attributes = getattr(owner, "__dict__", {"itself": owner})  # of an object that does not tell, itself
    return [("its class", type(owner)), *((f"its attribute {name}", value) for name, value in attributes.items())]


def _full_name(code: Any) -> str:
    return f"{code.__module__}:{code.__qualname__}"


def _is_code(value: Any) -> bool:
    """Is this a class or a plain function? A method or a partial holds values, too."""
    if inspect.isbuiltin(value):
        return value.__self__ is None or inspect.ismodule(value.__self__)
    return inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value) if callable(value) else value)


def _describe_code(code: Any) -> dict[str, Any]:
    """Returns the name of a function or class, and its source if it is the user's own."""
    return {"code": _full_name(code), "source": None if _is_library(code) else _source_of(code)}


def _source_of(code: Any) -> str | None:
    """Returns the source text of a function or class; None where Python cannot read it."""
    try:
        return _lambda_source(code) if code.__name__ == "<lambda>" else inspect.getsource(code)
    except (OSError, TypeError):
        return None


def _lambda_source(function: Any) -> str:
    """Returns all lines of a lambda, of which `inspect.getsource` may cut off the last ones.

    With them it returns where the body stands, since one line may hold several lambdas.
    """
    lines, first = inspect.findsource(function)
    places = [place for place in function.__code__.co_positions() if None not in place]
    last = max((end for _, end, _, _ in places if end is not None), default=first + 1)
    columns = sorted({(start, end) for _, _, start, end in places})
    return f"{''.join(lines[first:last])}{columns}"


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[2])}
    return tuple(str(Path(path).resolve()) + os.sep for path in paths)


def _is_library(code: Any) -> bool:
    """Is this a library's function or class, or ours, or one without a file? Its name alone tells it then."""
    try:
        file = inspect.getsourcefile(code)
    except TypeError:
        return True
    return file is None or str(Path(file).resolve()).startswith(_library_folders())


@dataclass(frozen=True)
class _Reading:
    """From the arguments of a component or a function to plain values, files with what is known of them."""

    folders: Sequence[Path]
    """Where a relative path may start; the files in all of them count."""
    asks_servers: bool = True
    accepts_objects: bool = False
    """Whether an object without a text is known by its class alone, since something else tells of its content."""
    where: object | None = None
    """Where the value is set, for errors."""

    def describe(self, value: Any, *, name: str, label: str) -> Any:
        """Returns a value as JSON has it; `name` is the argument's, `label` says where it stands, for errors."""
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
            # The hub's datasets are known by the fingerprint of the library that reads them.
            version = remote_version(text) if self.asks_servers and not text.startswith(_HUB_URL) else None
            return None if version is None else {"files": len(version), "digest": _digest(version)}
        relative = Path.home() / text[2:] if text.startswith("~/") else Path(text)
        paths = dict.fromkeys(folder / relative for folder in self.folders)  # an absolute one is the same for each
        files = [facts for path in paths for root in _roots_of(path) for facts in _files_below(root)]
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
    except (TypeError, ValueError):  # a class that is written in C tells nothing
        return ()


def _roots_of(path: Path) -> list[Path]:
    """Returns the file or folder, or what a glob finds."""
    if os.path.lexists(path):  # also says no to what is too long for a name
        return [path]
    if not glob.has_magic(str(path)):
        return []
    return [Path(found) for found in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207  # it is absolute


def _files_below(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, size and time of change of a file, or of all files in a folder, but for caches inside it."""
    if root.is_dir():
        for folder, folders, names in os.walk(root):
            if CACHE_TAG in names:
                folders.clear()
                continue
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                yield from _facts_of(path, path.relative_to(root).as_posix())
    else:
        yield from _facts_of(root, root.name)


def _facts_of(path: Path, name: str) -> Iterator[tuple[str, int, int]]:
    try:
        facts = path.stat()
    except OSError:
        return  # a dangling link, or removed since
    yield name, facts.st_size, facts.st_mtime_ns


# Asking a source for its state may cost as much as a row, so it is asked once for this many of them.
_ROWS_PER_ANCHOR = 64

Function = Callable[..., Any]


def outputs_of(returned: Any) -> list[Any]:
    """Returns the samples that a row became: one, several of a list, or none for None."""
    if returned is None:
        return []
    return list(returned) if isinstance(returned, list) else [returned]


class ProcessedStream:
    """A stream of what `function(row, **arguments)` returns: a sample, a list of samples, or None to drop the row.

    It is cut and resumed as its source is: where that can go on from a state, so can this, for at most 64 rows again.
    """

    def __init__(self, source: Any, function: Function, arguments: Mapping[str, Any]) -> None:
        self.source = source
        self.function = function
        self.arguments = dict(arguments)
        self.epoch: int | None = None
        self.seed: int | None = None
        self.draws_nothing = draws_nothing(source) and bool(getattr(function, "draws_nothing", False))
        self._start: Mapping[str, Any] | None = None
        self._rows: _Rows | None = None

    def __getattr__(self, name: str) -> Any:
        # Only what the source can do: a method that is always there would promise too much.
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        own = {"state_dict": self._state, "load_state_dict": self._load_state, "shard": self._shard}
        offered = getattr(self.source, name)
        return own.get(name, offered)

    def set_epoch(self, epoch: int) -> None:
        """Tells the source which pass begins next."""
        self.epoch = epoch

    def seed_rows(self, seed: int) -> None:
        """Says with which randomness rows are read: each with its own, so that one can be read again."""
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, None
        self._rows = _Rows(self, start)
        return self._rows

    def _shard(self, num_shards: int, index: int) -> ProcessedStream:
        part = self.source.shard(num_shards=num_shards, index=index)
        return ProcessedStream(part, self.function, self.arguments)

    def _state(self) -> dict[str, Any] | None:
        return None if self._rows is None else self._rows.state()

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._start = state


class _Rows:
    """One iteration; after a row that raised it goes on with the next, if its source does."""

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
                self._read_again()
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
        try:
            row = self._source.take()
        except StopIteration:
            raise  # the last row stays the last
        except Exception:
            self._pass_over()
            raise
        self._pass_over()
        self._outputs = outputs_of(self._stream.function(row, **self._stream.arguments))

    def _read_again(self) -> None:
        """Reads a row that was read before; what was wrong with it has been said."""
        try:
            self._next_row()
        except StreamBrokenError:
            raise
        except Exception as error:
            logger.debug("Passed over again: %s", error)

    def _pass_over(self) -> None:
        self._rows_since += 1
        self._outputs, self._num_given = [], 0

    def state(self) -> dict[str, Any]:
        """Returns where the source was last asked, the rows since, and how many samples of the last were given."""
        return {"source": self._anchor, "rows": self._rows_since, "given": self._num_given}


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
