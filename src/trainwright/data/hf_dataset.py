"""load_hf_dataset: a dataset of the Hugging Face hub or of local files, processed once and cached."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.data.arrow import ArrowRows
from trainwright.data.cache import cache_root, tag_as_cache
from trainwright.data.process import Version, describe_input, fingerprint_function, name_of, processed
from trainwright.data.sources.huggingface import fingerprint_rows, import_datasets, network_use
from trainwright.errors import DataError

_HUB = "hf://"
_READERS: Mapping[str, str] = {
    "json": "json",
    "jsonl": "json",
    "csv": "csv",
    "parquet": "parquet",
    "txt": "text",
    "arrow": "arrow",
}
"""Which of the readers in `datasets` reads a local file, by the end of its name."""


def load_hf_dataset(
    path: str | Path,
    process_fn: Callable[[dict[str, Any]], Any] | None = None,
    columns: Sequence[str] | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    rebuild: bool = False,
    transformer_name: str | None = None,
    version: Version = None,
    num_workers: int = 0,
) -> ArrowRows:
    """Returns the rows of a dataset, each processed by `process_fn`, as a map-style dataset of tensors.

    `path` is one of

    - `hf://name/config/split` or `hf://owner/name/config/split` (`*` for the only config), or
      `hf://owner/name` or `hf://name`, optionally with `:split`; the default split is `train`;
    - a local .json, .jsonl, .csv, .parquet, .txt or .arrow file, or a folder of such files;
    - a folder that `save_to_disk` wrote; with several splits, `folder:split`.

    `process_fn` receives a row and returns a sample (a dict), a list of samples, or None, which drops the row;
    without it the rows are the samples. `columns` keeps only these keys; a key that `process_fn` does not return is
    copied from the row. One process, or its `num_workers` workers, computes the samples; other processes wait. They
    are cached below `cache_dir` (by default `trainwright` in $XDG_CACHE_HOME or ~/.cache). The cache key is the
    function's source and the values bound to it, `columns`, `version` and the data.

    Functions that `process_fn` calls are not part of the key; change `version` (a text or a number) when they change.
    It is required if the source cannot be read, as for a function defined in a console, or if the function is bound to
    objects such as a tokenizer.

    `transformer_name` replaces the function's source in the key, so a changed function is *not* detected. It is for
    functions bound to values that differ between runs or ranks (such as all command-line arguments).

    `rebuild` processes the data again and replaces the cached samples; processes that read the earlier ones can
    continue. `offline` never uses the network: only what was downloaded before.
    """
    source = _Origin.read(path)
    rows = _load(source, cache_dir=cache_dir, offline=offline)
    function = _Keep(process_fn, None if columns is None else tuple(columns))
    described = {"type": "load_hf_dataset", "path": source.file or str(path), "rows": fingerprint_rows(rows)}
    return processed(
        rows,
        function,
        input_key=describe_input(described, None),
        cache_dir=cache_dir,
        rebuild=rebuild,
        function_key=function.key(transformer_name, version),
        version=version,
        num_workers=num_workers,
        source_name=str(path),
    )


@dataclass(frozen=True)
class _Origin:
    """The location of the rows: a name on the hub, or a local file or folder."""

    split: str
    name: str = ""
    config: str | None = None
    file: str = ""

    @classmethod
    def read(cls, path: str | Path) -> _Origin:
        text = os.fspath(path)
        if text.startswith(_HUB):
            return cls._read_hub(text)
        if not Path(text).expanduser().exists():
            file, colon, split = text.rpartition(":")
            if colon and Path(file).expanduser().exists():
                return cls(file=file, split=split)
            raise DataError(
                f'load_hf_dataset: there is no file or folder "{text}". '
                "A dataset of the Hugging Face hub is written hf://owner/name, with :split behind it."
            )
        return cls(file=text, split="train")

    @classmethod
    def _read_hub(cls, text: str) -> _Origin:
        name, colon, split = text.removeprefix(_HUB).strip("/").partition(":")
        words = [word.replace("!", "/") for word in name.split("/")]
        if not all(re.fullmatch(r"[\w./*-]+", word) for word in words) or (colon and not split):
            raise DataError(
                f'load_hf_dataset: "{text}" names no dataset. Use hf://owner/name:split or hf://name/config/split.'
            )
        if not colon and len(words) > 2:
            *words, split = words
            *owner, config = words  # name/config or owner/name/config
        elif len(words) > 2:
            *owner, config = words
        else:
            owner, config = words, "*"
        if len(owner) > 2:
            raise DataError(
                f'load_hf_dataset: "{text}" has too many parts. Use hf://owner/name/config/split, '
                "or hf://owner/name/config:split."
            )
        return cls(name="/".join(owner), config=None if config == "*" else config, split=split or "train")


class _Keep:
    """Calls a function on a row and keeps the requested columns."""

    def __init__(self, function: Callable[[dict[str, Any]], Any] | None, columns: tuple[str, ...] | None) -> None:
        self._function = function
        self._columns = columns
        self.__name__ = "rows" if function is None else name_of(function)

    def key(self, name: str | None, version: Version) -> str:
        """Returns an identifier of the processing: its name, or the function's source."""
        if name is None:
            known_by = fingerprint_function(self._function or _as_it_is, version=version)
        else:
            known_by = f"named {name}"
        return f"{known_by} {self._columns}"

    def __call__(self, row: dict[str, Any]) -> Any:
        result = row if self._function is None else self._function(row)
        if self._columns is None or result is None:
            return result
        if isinstance(result, list):
            return [self._choose(row, each) for each in result]
        return self._choose(row, result)

    def _choose(self, row: dict[str, Any], result: Any) -> Any:
        if not isinstance(result, Mapping) or self._columns is None:
            return result
        both = {**row, **result}
        missing = [name for name in self._columns if name not in both]
        if missing:
            raise DataError(f"columns: there is no {', '.join(missing)}; the sample has {', '.join(both)}.")
        return {name: both[name] for name in self._columns}


def _as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    return row


def _load(origin: _Origin, *, cache_dir: str | Path | None, offline: bool) -> Any:
    """Returns the rows as a `datasets.Dataset`."""
    datasets = import_datasets("load_hf_dataset")
    # With a cache_dir, all files are there, including those that `datasets` downloads and converts.
    own_cache = None if cache_dir is None else cache_root(cache_dir) / "datasets"
    if own_cache is not None:
        tag_as_cache(own_cache)
    try:
        with network_use(offline=True if offline else None):
            if origin.file:
                return _load_local(datasets, Path(origin.file).expanduser(), split=origin.split, cache=own_cache)
            where = None if own_cache is None else str(own_cache)
            return datasets.load_dataset(origin.name, origin.config, split=origin.split, cache_dir=where)
    except DataError:
        raise
    except Exception as error:
        shown = f"{origin.file or _HUB + origin.name}:{origin.split}"
        advice = "Check the name, the config, the split and the network."
        if offline:
            advice = "offline=True uses only data that was downloaded before; download it once without offline."
        raise DataError(f"load_hf_dataset: {shown} cannot be read: {type(error).__name__}: {error} {advice}") from error


def _load_local(datasets: Any, path: Path, *, split: str, cache: Path | None) -> Any:
    cache_dir = None if cache is None else str(cache)
    if path.is_dir() and any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        saved = datasets.load_from_disk(str(path))
        if not isinstance(saved, dict):
            return saved
        if split not in saved:
            raise DataError(f'load_hf_dataset: {path} has no split "{split}". It has {", ".join(saved)}.')
        return saved[split]
    if path.is_dir() and not _READERS.keys() & {file.suffix.lstrip(".") for file in path.iterdir()}:
        return datasets.load_dataset(str(path), split=split, cache_dir=cache_dir)
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix.lstrip(".") in _READERS)
    kinds = {_READERS.get(file.suffix.lstrip(".")) for file in files}
    reader = kinds.pop()
    if reader is None or kinds:
        raise DataError(
            f"load_hf_dataset: {path} is read as one kind of file by the end of its name, one of "
            f"{', '.join(f'.{end}' for end in _READERS)}; got {', '.join(file.name for file in files[:5])}."
        )
    named = [str(file) for file in files]
    return datasets.load_dataset(reader, data_files={"train": named}, split="train", cache_dir=cache_dir)
