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


def import_datasets(who: str) -> Any:
    """Returns the library, or says how to get it; `who` needs it."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{who} needs the library `datasets`, which is not installed. "
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

    The libraries read their environment only when imported, but these settings at each request.
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
    """Returns what a `datasets.Dataset` knows its rows by, and the types that it reads them as."""
    return f"{dataset._fingerprint} {list(dataset.features.items())}"


FILE_KINDS = ("json", "csv", "parquet", "text", "arrow", "xml", "webdataset", "imagefolder", "audiofolder")
"""The names that are no datasets but ways to read `data_files`."""

# What `save_to_disk` leaves in a folder: of a dataset with several splits, and of one.
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
    data files start at the project folder. `split` may be left out where there is only one. `offline` reads the
    library's cache alone (true) or asks the hub (false); left out, HF_HUB_OFFLINE decides.
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
            # Where somebody set a transform or a format of their own, it stands.
            self._dataset = dataset if dataset.format["type"] is not None else dataset.with_format("torch")
        return self._dataset

    @property
    def fingerprint(self) -> str:
        """What the library knows the rows by."""
        return fingerprint_rows(self.dataset)

    @property
    def draws_nothing(self) -> bool:
        """Is there no transform, which might use randomness? Then the loader need not seed each sample."""
        return bool(self.dataset.format["type"] != "custom")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the samples of a batch, fetched in one go."""
        samples: list[dict[str, Any]] = self.dataset.__getitems__(list(indices))
        return samples


class HuggingFaceStream(IterableDataset[dict[str, Any]]):
    """A `datasets.IterableDataset` as a stream: its shards and its state are that library's.

    Going on reads again from the start of the shard (or of the row group) that the state lies in, for that is how the
    library resumes. Nothing is shuffled here, not even the shards.
    """

    draws_nothing = True  # nobody can set a transform on a dataset that is loaded here

    def __init__(self, source: _Source, dataset: Any = None) -> None:
        self.source = source
        self._dataset = dataset
        self._start: dict[str, Any] | None = None
        self._iteration: _Iteration | None = None

    @property
    def dataset(self) -> Any:
        """The `datasets.IterableDataset` itself, with numbers as tensors."""
        if self._dataset is None:
            self._dataset = self.source.load(streaming=True).with_format("torch")
        return self._dataset

    @property
    def num_shards(self) -> int:
        """How many shards there can be at most, usually one for each file."""
        return int(self.dataset.num_shards)

    def shard(self, num_shards: int, index: int) -> HuggingFaceStream:
        """Returns one of `num_shards` disjoint parts, which one after the other are the whole."""
        return HuggingFaceStream(self.source, self.dataset.shard(num_shards=num_shards, index=index))

    def state_dict(self) -> dict[str, Any]:
        """Returns where the iteration begun last stands."""
        if self._iteration is None:
            return {"source": copy.deepcopy(self._start)}
        return self._iteration.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iteration begin there."""
        self._start = state["source"]
        self._iteration = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._iteration = _Iteration(self.dataset, self._start)
        self._start = None
        return self._iteration.rows()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iteration": None}  # an iteration cannot be pickled


class _Iteration:
    """One iteration over the library's dataset."""

    def __init__(self, dataset: Any, start: dict[str, Any] | None) -> None:
        # The library's dataset keeps the state to start from and would begin every later pass there too, and its
        # copies share that state. Its one shard of one is the whole again, with a state of its own all the way down.
        self._dataset = dataset.shard(num_shards=1, index=0)
        self._start = start
        self._has_begun = False
        if start is not None:
            self._dataset.load_state_dict(start)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Returns the rows. A generator, as the library's own: neither can go on after an error, nor pretends to."""
        # Batches of one: in a worker, plain iteration would leave out the shards that it takes for other workers'.
        for batch in self._dataset.iter(batch_size=1):
            self._has_begun = True
            yield {name: values[0] for name, values in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the place of the next row in the library's words."""
        # Before the first row the library has not yet looked at what it was told to start from.
        return {"source": copy.deepcopy(self._dataset.state_dict() if self._has_begun else self._start)}


class _Source:
    """Which dataset to load; touches nothing until it is told to."""

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
        if "data_files" not in arguments and "data_dir" not in arguments and path in FILE_KINDS:
            raise ConfigError(f"path: {path} reads files. Name them with data_files.", where="huggingface")
        self.path = path
        self.split = split
        self.columns = check_columns(columns, "huggingface")
        self.offline = offline
        self.project_dir = Path(project_dir or ".").absolute()
        self.arguments = dict(arguments)

    def load(self, *, streaming: bool) -> Any:
        """Returns the library's dataset: one split with the columns asked for."""
        library = import_datasets('The dataset "huggingface"')
        folder = self.project_dir / Path(self.path).expanduser()
        with network_use(offline=self.offline):
            try:
                if (folder / _SAVED_SPLITS).is_file() or (folder / _SAVED_ONE).is_file():
                    dataset = self._load_saved(library, folder, streaming)
                else:
                    name = str(folder) if self.path not in FILE_KINDS and folder.is_dir() else self.path
                    dataset = library.load_dataset(
                        name, split=self.split, streaming=streaming, **self._arguments_in_project()
                    )
            except (OSError, ValueError, library.exceptions.DatasetsError) as error:
                raise self._cannot_load(error) from error
        return self._pick_columns(self._pick_split(dataset))

    def _load_saved(self, library: Any, folder: Path, streaming: bool) -> Any:
        if self.arguments:
            raise ConfigError(
                f"{', '.join(self.arguments)}: no effect on {folder}, which was made by save_to_disk. Remove it.",
                where="huggingface",
            )
        dataset = library.load_from_disk(str(folder))
        if isinstance(dataset, library.DatasetDict):
            dataset = self._pick_split(dataset if self.split is None else _part(dataset, self.split, folder))
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
        known = dataset.column_names  # None for a stream that has not been looked into
        missing = [name for name in self.columns if known is not None and name not in known]
        if missing:
            raise DataError(f"{self.path}: no column {', '.join(missing)}. There are: {', '.join(known)}.")
        return dataset.select_columns(list(self.columns))

    def _arguments_in_project(self) -> dict[str, Any]:
        """Returns the arguments; files and folders that are read as such start at the project folder."""
        arguments = dict(self.arguments)
        if self.path in FILE_KINDS:
            for name in ("data_files", "data_dir"):
                if arguments.get(name) is not None:
                    arguments[name] = self._in_project(arguments[name])
        return arguments

    def _in_project(self, files: Any) -> Any:
        if isinstance(files, Mapping):
            return {name: self._in_project(each) for name, each in files.items()}
        if isinstance(files, str | Path):
            return str(files) if "://" in str(files) else str(self.project_dir / Path(files).expanduser())
        return [self._in_project(each) for each in files]

    def _cannot_load(self, error: Exception) -> DataError:
        advice = "Check the name, the files and the arguments."
        if isinstance(error, ConnectionError) or "OfflineModeIsEnabled" in str(error):
            advice = (
                "The hub cannot be reached (or HF_HUB_OFFLINE forbids it) and the cache does not hold it: check the "
                "network and the name, or give a local folder."
            )
        return DataError(f"huggingface: {self.path} cannot be loaded: {type(error).__name__}: {error}. {advice}")


def _part(dataset: Any, split: str, folder: Path) -> Any:
    if split not in dataset:
        raise ConfigError(
            f'split: {folder} has no "{split}". There are: {", ".join(map(str, dataset))}.', where="huggingface"
        )
    return dataset[split]
