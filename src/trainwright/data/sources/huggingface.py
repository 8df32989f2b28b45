"""Datasets of Hugging Face's `datasets` library: `huggingface` in a run file, in memory or as a stream."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from trainwright.data.sources.formats import check_columns
from trainwright.errors import ConfigError, DataError
from trainwright.progress import progress


def import_datasets(user: str) -> Any:
    """Returns the library; if it is missing, the error names `user` and how to install it."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{user} needs the library `datasets`, which is not installed. "
            "Install it: pip install 'trainwright[datasets]'."
        ) from error
    if not hasattr(datasets, "load_dataset"):
        raise DataError(
            f"`import datasets` finds {getattr(datasets, '__path__', datasets)} instead of Hugging Face's library. "
            "Rename that folder, or install the library: pip install 'trainwright[datasets]'."
        )
    return datasets


@contextmanager
def network_use(*, offline: bool | None) -> Iterator[None]:
    """Forbids or allows the hub while the block runs; None leaves it to HF_HUB_OFFLINE.

    The libraries read their environment variables only when imported, but these settings at each request.
    """
    if offline is None:
        yield
        return
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def fingerprint_rows(dataset: Any) -> str:
    """Returns the fingerprint of the rows of a `datasets.Dataset`, and the types of its columns."""
    return f"{dataset._fingerprint} {list(dataset.features.items())}"


FILE_KINDS = ("json", "csv", "parquet", "text", "arrow", "xml", "webdataset", "imagefolder", "audiofolder")
"""The names of readers of `data_files`, which are not datasets."""

# The files that `save_to_disk` writes for a dataset with several splits, and with one.
_SAVED_SPLITS, _SAVED_ONE = "dataset_dict.json", "state.json"


def huggingface(
    path: str,
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    streaming: bool = False,
    offline: bool | None = None,
    project_dir: str | Path | None = None,
    **load_dataset_arguments: Any,
) -> HuggingFaceRows | HuggingFaceStream:
    """A dataset of Hugging Face: `datasets.load_dataset(path, …)`, or `load_from_disk` for a folder that was saved so.

    `path` is a name on the hub, a folder, or json, csv, parquet, text, arrow with `data_files`; relative folders and
    data files start at the project folder. `split` is optional if there is only one. `offline` reads the
    library's cache only (true) or requests the hub (false); the default is HF_HUB_OFFLINE.
    """
    source = _Source(
        path,
        split=split,
        columns=columns,
        offline=offline,
        project_dir=project_dir,
        arguments=load_dataset_arguments,
    )
    return HuggingFaceStream(source) if streaming else HuggingFaceRows(source)


class HuggingFaceRows(Dataset[dict[str, Any]]):
    """A dataset in Arrow files, by index."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self._dataset: Any = None

    @property
    def dataset(self) -> Any:
        """The `datasets.Dataset` itself, with numbers as tensors."""
        if self._dataset is None:
            dataset = self.source.load(streaming=False)
            self._dataset = dataset if dataset.format["type"] is not None else dataset.with_format("torch")
        return self._dataset

    @property
    def fingerprint(self) -> str:
        """The library's fingerprint of the rows."""
        return fingerprint_rows(self.dataset)

    @property
    def draws_nothing(self) -> bool:
        """True unless there is a transform, which might use randomness."""
        return bool(self.dataset.format["type"] != "custom")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the samples of a batch, fetched with one call."""
        samples: list[dict[str, Any]] = self.dataset.__getitems__(list(indices))
        return samples


class HuggingFaceStream(IterableDataset[dict[str, Any]]):
    """A `datasets.IterableDataset` as a stream, with that library's shards and state.

    The library resumes by reading again from the start of the current shard or row group. Nothing is shuffled here.
    """

    draws_nothing = True  # a dataset that is loaded here has no transform

    def __init__(self, source: _Source, dataset: Any = None) -> None:
        self.source = source
        self._dataset = dataset
        self._start: dict[str, Any] | None = None
        self._reading: Any = None

    @property
    def dataset(self) -> Any:
        """The `datasets.IterableDataset` itself, with numbers as tensors."""
        if self._dataset is None:
            self._dataset = self.source.load(streaming=True).with_format("torch")
        return self._dataset

    @property
    def num_shards(self) -> int:
        """The largest number of shards, usually one for each file."""
        return int(self.dataset.num_shards)

    def list_files(self) -> list[str]:
        """Returns the number of shards: the library does not name their files."""
        return [f"{self.source.path} ({self.num_shards} shards)"]

    def shard(self, num_shards: int, index: int) -> HuggingFaceStream:
        """Returns one of `num_shards` disjoint contiguous shards."""
        return HuggingFaceStream(self.source, self.dataset.shard(num_shards=num_shards, index=index))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the latest iteration, as the library represents it."""
        return {"source": copy.deepcopy(self._start if self._reading is None else self._reading.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iteration begin at a saved position."""
        self._start, self._reading = state["source"], None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A generator, like the library's, which cannot continue after an error either.
        # The library's dataset keeps the loaded state for every later pass, and its copies share it. The single shard
        # of one is the whole dataset with a separate state.
        reading = self.dataset.shard(num_shards=1, index=0)
        start, self._start = self._start, None
        if start is not None:
            reading.load_state_dict(start)
        # Batches of one: in a worker, plain iteration would omit the shards of other workers.
        for batch in reading.iter(batch_size=1):
            self._reading = reading
            yield {name: values[0] for name, values in batch.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None}  # an iteration cannot be pickled


class _Source:
    """Which dataset to load; accesses nothing before `load`."""

    def __init__(
        self,
        path: str,
        *,
        split: str | None,
        columns: Sequence[str] | None,
        offline: bool | None,
        project_dir: str | Path | None,
        arguments: Mapping[str, Any],
    ) -> None:
        if "trust_remote_code" in arguments or path == "pandas":
            what = "trust_remote_code" if path != "pandas" else "path: pandas, which reads pickles,"
            raise ConfigError(
                f"{what} is not supported, because it can run any program. Convert the data to Parquet.",
                where="huggingface",
            )
        if "data_files" not in arguments and "data_dir" not in arguments and path in FILE_KINDS:
            raise ConfigError(f"path: {path} reads files. Name them with data_files.", where="huggingface")
        self.path = path
        self.split = split
        self.columns = check_columns(columns, "huggingface")
        self.offline = offline
        self.project_dir = Path(project_dir or ".").absolute()
        self.arguments = dict(arguments)

    def load(self, *, streaming: bool) -> Any:
        """Returns the library's dataset: one split with the requested columns."""
        library = import_datasets('The dataset "huggingface"')
        folder = self.project_dir / Path(self.path).expanduser()
        with network_use(offline=self.offline), progress(f"Loading the dataset {self.path}"):
            try:
                if (folder / _SAVED_SPLITS).is_file() or (folder / _SAVED_ONE).is_file():
                    dataset = self._load_saved(library, folder, streaming)
                else:
                    name = str(folder) if self.path not in FILE_KINDS and folder.is_dir() else self.path
                    arguments = dict(self.arguments)
                    for setting in ("data_files", "data_dir"):
                        if self.path in FILE_KINDS and arguments.get(setting) is not None:
                            arguments[setting] = self._in_project(arguments[setting])
                    dataset = library.load_dataset(name, split=self.split, streaming=streaming, **arguments)
            except (OSError, ValueError, library.exceptions.DatasetsError) as error:
                advice = "Check the name, the files and the arguments."
                if isinstance(error, ConnectionError) or "OfflineModeIsEnabled" in str(error):
                    advice = "The hub cannot be reached (or HF_HUB_OFFLINE is set) and the dataset is not cached."
                raise DataError(
                    f"huggingface: {self.path} cannot be loaded: {type(error).__name__}: {error}. {advice}"
                ) from error
        return self._pick_columns(self._pick_split(dataset))

    def _load_saved(self, library: Any, folder: Path, streaming: bool) -> Any:
        if self.arguments:
            raise ConfigError(
                f"{', '.join(self.arguments)}: no effect on {folder}, which save_to_disk wrote. Remove it.",
                where="huggingface",
            )
        dataset = library.load_from_disk(str(folder))
        if isinstance(dataset, library.DatasetDict):
            if self.split is not None and self.split not in dataset:
                splits = ", ".join(map(str, dataset))
                raise ConfigError(f'split: {folder} has no "{self.split}". It has {splits}.', where="huggingface")
            dataset = self._pick_split(dataset) if self.split is None else dataset[self.split]
        elif self.split is not None:
            raise ConfigError(f"split: {self.split}, but {folder} has no splits. Remove it.", where="huggingface")
        if not streaming:
            return dataset
        num_files = len(dataset.cache_files) or 1
        return dataset.to_iterable_dataset(num_shards=min(num_files, max(len(dataset), 1)))

    def _pick_split(self, dataset: Any) -> Any:
        if not isinstance(dataset, dict):
            return dataset
        if len(dataset) != 1:
            raise ConfigError(
                f"split: {self.path} has several: {', '.join(map(str, dataset))}. Choose one with split.",
                where="huggingface",
            )
        return next(iter(dataset.values()))

    def _pick_columns(self, dataset: Any) -> Any:
        if self.columns is None:
            return dataset
        known = dataset.column_names  # None for a stream that was not inspected
        missing = [name for name in self.columns if known is not None and name not in known]
        if missing:
            raise DataError(f"{self.path}: no column {', '.join(missing)}. There are: {', '.join(known)}.")
        return dataset.select_columns(list(self.columns))

    def _in_project(self, files: Any) -> Any:
        """Returns file names that start at the project folder."""
        if isinstance(files, Mapping):
            return {name: self._in_project(each) for name, each in files.items()}
        if isinstance(files, str | Path):
            return str(files) if "://" in str(files) else str(self.project_dir / Path(files).expanduser())
        return [self._in_project(each) for each in files]
