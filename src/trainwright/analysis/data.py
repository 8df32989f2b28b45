"""`trainwright data`: samples in training order, the first batch, lengths, a mixture, and remarks.

data_page.py writes the result for a terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Number
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trainwright.build.components import Build
from trainwright.build.data import limits
from trainwright.config import BatchPlan, Component, RunConfig, known_data_ranks, micro_batch_alone, resolve_batch
from trainwright.data.collators import reject_lists
from trainwright.data.fetch import Collator, OnError, RowFailure, View, count_samples, is_stream
from trainwright.data.loader import EvalData, TrainData
from trainwright.data.randomness import seed_generators
from trainwright.data.stream_loader import EvalStream, StreamData
from trainwright.data.tokenizer import tokenizer_of
from trainwright.data.workers import LoaderOptions
from trainwright.errors import ConfigError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.loop.task import Task, overrides
from trainwright.loop.trainer import Trainer


@dataclass(frozen=True)
class Nest:
    """A dataset and those that it reads from."""

    type: str
    """As the run file names it; the class where a trainer or a task built it."""
    class_name: str
    sources: Mapping[str, Nest] = field(default_factory=dict)
    """By name; a single one is called `source`."""

    def describe(self) -> str:
        """Says it in one line, outermost first."""
        own = self.type if self.type.endswith(self.class_name) else f"{self.type} ({self.class_name})"
        if list(self.sources) == ["source"]:
            return f"{own} ← {self.sources['source'].describe()}"
        if self.sources:
            return f"{own} ← {', '.join(f'{name}: {each.type}' for name, each in self.sources.items())}"
        return own


@dataclass(frozen=True)
class Split:
    """The part of a whole that `data.split` gave to a set."""

    samples: int
    whole: int


@dataclass(frozen=True)
class TokenCounts:
    """The tokens of a set."""

    per_epoch: int | None
    """None for a stream, of which nobody knows the length."""
    per_sample: float
    is_estimate: bool
    """Are they worked out from the samples that were looked at?"""


@dataclass(frozen=True)
class Values:
    """One field of a sample or a batch."""

    name: str
    type: str
    shape: tuple[int, ...] | None = None
    device: str | None = None
    minimum: float | None = None
    mean: float | None = None
    maximum: float | None = None
    text: str | None = None
    """A text, the text that tokens decode to, or the value in short."""
    is_tokens: bool = False
    ids: str | None = None
    """The first token ids, where nothing decodes them."""
    num_ignored: int | None = None
    """Labels that are -100."""
    is_as_input_ids: bool = False
    """Are these labels the sample's tokens, save for those that are -100?"""
    drawing: tuple[str, ...] = ()
    """A small grey image, line by line."""


@dataclass(frozen=True)
class Sample:
    """A sample where training meets it."""

    position: int
    row: int | None
    """The row in the dataset, or in the source of a mixture; a stream does not number its rows."""
    source: str | None
    fields: tuple[Values, ...]


@dataclass(frozen=True)
class Batch:
    """The first batch of a rank."""

    samples: int
    rank: int
    num_ranks: int
    micro_batch_size: int | None
    """Samples of one forward; None for an evaluation set, whose batches are not cut."""
    fields: tuple[Values, ...]
    padding: float | None
    """The share of places that hold no token; None where no field says so."""
    padding_by: str | None
    """The field that it is read from."""
    in_loss: float | None
    """The share of places whose label is not -100; None without labels for each token."""
    first_row: tuple[Values, ...] = ()
    """The tokens and labels of its first sample, where the collator made them."""


@dataclass(frozen=True)
class Bar:
    """Samples whose length is from `first` to `last`."""

    first: int
    last: int
    samples: int


@dataclass(frozen=True)
class Lengths:
    """How long samples are."""

    unit: str
    """What is counted: `tokens of input_ids`, `characters of text`."""
    samples: int | None
    """How many are counted; None where a stream says of all of them how long they are."""
    is_whole: bool
    """Is every sample of the set counted?"""
    minimum: int
    median: int
    p95: int
    maximum: int
    bars: tuple[Bar, ...]
    """Empty where all are equal."""


@dataclass(frozen=True)
class MixedSource:
    """One source of a mixture."""

    name: str
    samples: int | None
    weight: float | None
    share: float | None
    """Of the first `Mixture.positions` positions."""
    epochs: float | None
    """How often the run passes over it."""


@dataclass(frozen=True)
class Mixture:
    """What a set is mixed of."""

    sources: tuple[MixedSource, ...]
    positions: int | None
    """Over how many positions shares are counted; None: they follow from the weights or the sizes."""


@dataclass(frozen=True)
class DataUse:
    """How much of the training data the run uses."""

    steps: int
    samples: int
    epochs: float | None


@dataclass(frozen=True)
class DataSet:
    """One set: briefly, or with all that was seen of it."""

    name: str
    label: str
    """The setting that it comes from."""
    nest: Nest
    num_samples: int | None
    """None for a stream."""
    split: Split | None = None
    fill: float | None = None
    """The share of real tokens in packed rows."""
    tokens: TokenCounts | None = None
    plan: DataUse | None = None
    samples: tuple[Sample, ...] = ()
    batch: Batch | None = None
    lengths: Lengths | None = None
    mixture: Mixture | None = None
    remarks: tuple[str, ...] = ()
    error: str | None = None
    """Why it cannot be used, in words."""


@dataclass(frozen=True)
class Look:
    """All that was found: the first set in full, the others briefly."""

    run: str
    sets: tuple[DataSet, ...]
    failure: Exception | None = None
    """What ended the look early, for the command to raise once all else is shown."""

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON can hold it: a number that is none, such as nan, becomes a text."""
        plain: dict[str, Any] = _plain({"run": self.run, "sets": [asdict(each) for each in self.sets]})
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items() if name != "drawing"}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


MOST_BARS = 12
_STEPS = (1, 2, 5)


def unit_of(sample: Any) -> str | None:
    """Returns what a sample's length is counted in, tokens before characters; None where it has none."""
    fields = fields_of(sample)
    name = next((name for name, value in fields if is_token_field(name) and hasattr(value, "__len__")), None)
    if name is not None:
        return f"tokens of {name}"
    texts = [name for name, value in fields if isinstance(value, str)]
    if not texts:
        return None
    return f"characters of {'text' if 'text' in texts else ', '.join(texts)}"


def length_of(sample: Any, unit: str) -> int | None:
    """Returns a sample's length, of all fields that the unit names; None where it has none of them."""
    names = unit.split(" of ", 1)[1].split(", ")
    lengths = [len(value) for name, value in fields_of(sample) if name in names and hasattr(value, "__len__")]
    return sum(lengths) if lengths else None


def summarise(counted: Sequence[int], unit: str, *, is_whole: bool) -> Lengths:
    """Returns the numbers and the bars; no bars where all are equal."""
    lengths = np.sort(np.asarray(counted, dtype=np.int64))
    low, high = int(lengths[0]), int(lengths[-1])
    median, p95 = (int(np.percentile(lengths, share, method="inverted_cdf")) for share in (50, 95))
    return Lengths(unit, len(lengths), is_whole, low, median, p95, high, _bars(lengths, low, high))


def _bars(lengths: Any, low: int, high: int) -> tuple[Bar, ...]:
    """Returns at most MOST_BARS bars of equal, round width.

    A long tail would leave one bar with everything: what is beyond three times the 95th percentile shares the last.
    """
    if low == high:
        return ()
    p95 = int(np.percentile(lengths, 95, method="inverted_cdf"))
    top = high if high <= 3 * max(p95, 1) else p95
    width = _round_width(low, top, MOST_BARS if top == high else MOST_BARS - 1)
    first = low // width * width
    edges = list(range(first, top + 1, width))
    bars = [Bar(start, start + width - 1, _between(lengths, start, start + width)) for start in edges]
    if top < high:
        end = edges[-1] + width
        bars.append(Bar(end, high, _between(lengths, end, high + 1)))
    return tuple(bars)


def _round_width(low: int, high: int, most: int) -> int:
    """Returns the smallest of 1, 2, 5, 10, 20 … that needs at most so many bars."""
    power = 1
    while True:
        for step in _STEPS:
            width = step * power
            if high // width - low // width + 1 <= most:
                return width
        power *= 10


def _between(lengths: Any, start: int, stop: int) -> int:
    return int(np.searchsorted(lengths, stop) - np.searchsorted(lengths, start))


"""The label of a place that is not learnt."""

Decode = Callable[[list[int]], str | None]
"""From tokens to their text; None where they have none."""

_LONGEST_TEXT = 2000
_MOST_IDS = 64
_FEW = 0.05  # where fewer labels are left out, the text that is learnt says nothing beside that of the tokens
_LARGEST_DRAWING = 40  # pixels a side: a larger image says nothing in characters
_FINE_DRAWING = 16  # up to here a pixel is two characters of one line; above, half a line of one character
_SHADES = " ░▒▓█"


def fields_of(sample: Any) -> list[tuple[str, Any]]:
    """Returns the fields of a sample or a batch by name; places of a tuple are named by their number."""
    return list(_fields(sample, "")) or [("value", sample)]


def _fields(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        pairs = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = list(zip(value._fields, value, strict=True))
    elif isinstance(value, (tuple, list)) and (not name or isinstance(value, tuple)) and tensor_of(value) is None:
        pairs = [(str(number), each) for number, each in enumerate(value)]
    else:
        yield name or "value", value
        return
    for key, each in pairs:
        yield from _fields(each, f"{name}.{key}" if name else key)


def tensor_of(value: Any) -> Tensor | None:
    """Returns an array, a number or a list of numbers as a tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        leaf = value
        while isinstance(leaf, (list, tuple)) and leaf:
            leaf = leaf[0]
        if not isinstance(leaf, Number) or isinstance(leaf, complex):
            return None
    elif not isinstance(value, (np.ndarray, np.generic, int, float)):
        return None
    try:
        return torch.as_tensor(np.asarray(value))
    except (ValueError, TypeError, OverflowError):  # ragged, or of a kind that torch has no type for
        return None


def is_token_field(name: str) -> bool:
    """Does a field of this name hold tokens?"""
    return name.rsplit(".", 1)[-1].endswith("input_ids")


def is_label_field(name: str) -> bool:
    """Does a field of this name hold labels?"""
    return name.rsplit(".", 1)[-1].endswith("labels")


def describe_sample(sample: Any, decode: Decode) -> tuple[Values, ...]:
    """Describes each field of a sample."""
    fields = fields_of(sample)
    tokens = next((tensor_of(value) for name, value in fields if name == "input_ids"), None)
    return tuple(_describe(name, value, decode, tokens) for name, value in fields)


def describe_batch(batch: Any) -> tuple[Values, ...]:
    """Describes each field of a batch, without what is in it."""
    return tuple(
        Values(name, _type_name(value), device=str(tensor.device), **_statistics(tensor))
        if (tensor := tensor_of(value)) is not None
        else Values(name, _type_name(value), text=f"{len(value)} values" if hasattr(value, "__len__") else None)
        for name, value in fields_of(batch)
    )


def _describe(name: str, value: Any, decode: Decode, tokens: Tensor | None) -> Values:
    tensor = tensor_of(value)
    if tensor is None:
        return Values(name, _type_name(value), text=_in_short(value))
    kind = _type_name(value)
    is_whole = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != torch.bool
    if tensor.ndim == 0:
        return Values(name, kind, (), text=_in_short(tensor.item()), **_extremes(tensor))
    if is_whole and tensor.ndim == 1 and is_token_field(name):
        return _describe_tokens(Values(name, kind, is_tokens=True, **_statistics(tensor)), tensor, decode)
    if is_whole and is_label_field(name):
        return _describe_labels(Values(name, kind, **_statistics(tensor)), tensor, decode, tokens)
    return Values(name, kind, drawing=draw(tensor), **_statistics(tensor))


def _describe_tokens(values: Values, tensor: Tensor, decode: Decode) -> Values:
    text = decode(tensor[:_LONGEST_TEXT].tolist())
    return _with(values, text=None if text is None else text[:_LONGEST_TEXT], ids=None if text else _ids(tensor))


def _describe_labels(values: Values, labels: Tensor, decode: Decode, tokens: Tensor | None) -> Values:
    is_learnt = labels != IGNORED_LABEL
    values = _with(values, num_ignored=int((~is_learnt).sum()))
    if tokens is None or tokens.shape != labels.shape:
        return values
    if bool((labels == tokens)[is_learnt].all()):
        values = _with(values, is_as_input_ids=True)
    if (values.num_ignored or 0) > _FEW * labels.numel() and bool(is_learnt.any()):
        text = decode(labels[is_learnt][:_LONGEST_TEXT].tolist())
        values = _with(values, text=None if text is None else text[:_LONGEST_TEXT])
    return values


def _with(values: Values, **changes: Any) -> Values:
    return Values(**{**vars(values), **changes})


def _statistics(tensor: Tensor) -> dict[str, Any]:
    return {"shape": tuple(tensor.shape), **_extremes(tensor)}


def _extremes(tensor: Tensor) -> dict[str, Any]:
    if not tensor.numel() or tensor.is_complex():
        return {}
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    number = float if tensor.is_floating_point() else int
    low, high = (number(each.item()) for each in torch.aminmax(tensor))
    return {"minimum": low, "mean": float(tensor.to(torch.float64).mean()), "maximum": high}


def _type_name(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype)
    return type(value).__name__


def _in_short(value: Any) -> str:
    """Returns a value that is no tensor as text."""
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes"
    if hasattr(value, "mode") and hasattr(value, "size"):  # PIL's
        width, height = value.size
        return f"an image of {width} × {height}, {value.mode}"
    if isinstance(value, (list, tuple, Mapping)):
        try:
            return json.dumps(value, ensure_ascii=False)[:_LONGEST_TEXT]
        except (TypeError, ValueError):
            return f"{len(value)} values, {repr(value)[:_LONGEST_TEXT]}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value)[:_LONGEST_TEXT]


def _ids(tensor: Tensor) -> str:
    shown = " ".join(map(str, tensor[:_MOST_IDS].tolist()))
    return f"{shown} …" if len(tensor) > _MOST_IDS else shown


def draw(tensor: Tensor) -> tuple[str, ...]:
    """Returns a small grey image [height, width] or [1, height, width] as lines of shades; () for anything else."""
    if tensor.ndim == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 2 or not 4 <= min(tensor.shape) <= max(tensor.shape) <= _LARGEST_DRAWING:
        return ()
    if max(tensor.shape) > 4 * min(tensor.shape) or tensor.is_complex():
        return ()
    pixels = tensor.to(torch.float64)
    low, high = float(pixels.min()), float(pixels.max())
    if not high > low:  # one shade, or not a number
        return ()
    pixels = (pixels - low) / (high - low)
    times = 2 if max(tensor.shape) <= _FINE_DRAWING else 1
    if times == 1:
        pixels = torch.stack([rows.mean(0) for rows in torch.split(pixels, 2)])
    levels = (pixels * len(_SHADES)).to(torch.int64).clamp(max=len(_SHADES) - 1)
    return tuple("".join(_SHADES[level] * times for level in row) for row in levels.tolist())


TRAIN, TEST = "train", "test"


@dataclass(frozen=True)
class RunSet:
    """One set as it was built: a dataset, a stream, or a loader that a trainer made."""

    name: str
    label: str
    data: Any
    component: Component | None
    """Its section; None where a trainer or a task built it."""

    @property
    def dataset(self) -> Any:
        """The dataset itself, without a loader around it."""
        is_loader = isinstance(self.data, (TrainData, StreamData, EvalData, EvalStream))
        return self.data.dataset if is_loader else self.data


def build_sets(config: RunConfig) -> tuple[dict[str, RunSet], Collator]:
    """Returns the sets by name, train first and test last, and the collator."""
    # A dataset that draws in its constructor draws the same at every look.
    seed_generators(config.seed)
    build = Build(config)
    trainer_class = build.trainer_class()
    task = trainer_class.build_task(build)
    build.take_task(task)
    task_builds = overrides(task, "build_dataset", Task)
    collator = trainer_class.build_collator(build)
    train, evaluation = trainer_class.build_train_data(build), trainer_class.build_eval_data(build)
    test = build.test_data()
    own = None if task_builds or _is_replaced(trainer_class, "build_train_data") else config.data.train
    sets = [RunSet(TRAIN, "data.train", train, own)]
    uses_section = not (task_builds or _is_replaced(trainer_class, "build_eval_data"))
    for name, data in evaluation.items():
        is_part = uses_section and name not in config.data.eval
        component = (config.data.train if is_part else config.data.eval[name]) if uses_section else None
        sets.append(RunSet(name, "data.split" if is_part else f"data.eval.{name}", data, component))
    if test is not None:
        is_part = config.data.test is None
        component = None if task_builds else config.data.train if is_part else config.data.test
        label = "data.test" if task_builds or not is_part else "data.split"
        sets.append(RunSet(TEST, label, test, component))
    return {each.name: each for each in sets}, collator


def choose(sets: Mapping[str, RunSet], name: str) -> RunSet:
    """Returns the set of this name, or says which there are."""
    if name not in sets:
        raise ConfigError(f'--set: there is no set "{name}" in this run. It has {", ".join(sets)}.')
    return sets[name]


def nest_of(dataset: Any, component: Mapping[str, Any] | None) -> Nest:
    """Returns what a dataset is made of, in the words of its section where there is one."""
    while hasattr(type(dataset), "indices_in_whole"):
        dataset = dataset.dataset
    class_name = type(dataset).__name__
    if component is None:
        inner = getattr(dataset, "dataset", None)
        sources = {"source": inner} if inner is not None else inner_datasets(dataset)
        return Nest(class_name, class_name, {name: nest_of(each, None) for name, each in sources.items()})
    parts = inner_datasets(dataset)
    section = component.get("sources")
    inner_sections = dict(section) if isinstance(section, Mapping) else {"source": component.get("source")}
    named = {name: each for name, each in inner_sections.items() if isinstance(each, Mapping) and "type" in each}
    sources = {name: nest_of(parts[name], each) for name, each in named.items() if name in parts}
    return Nest(str(component["type"]), class_name, sources)


def inner_datasets(dataset: Any) -> dict[str, Any]:
    """Returns the datasets that another one reads from, by name; a single one is called `source`."""
    several = getattr(dataset, "sources", None)
    if isinstance(several, Mapping):
        return dict(several)
    one = getattr(dataset, "source", None)
    return {} if one is None or isinstance(one, str) else {"source": one}


def decoder_of(dataset: Any, collator: Any) -> Decode:
    """Returns what decodes tokens: the dataset's tokenizer, a source's, the dataset's own `decode`, the collator's."""
    found = _find_decode(dataset) or _find_decode(collator)

    def decode(ids: list[int]) -> str | None:
        if found is None:
            return None
        try:
            return found(ids)
        except Exception:  # tokens of another vocabulary: remarks.py says so, and the ids are shown instead
            return None

    return decode


def _find_decode(owner: Any) -> Callable[[list[int]], str] | None:
    tokenizer = tokenizer_of(owner)
    if tokenizer is None:
        own = getattr(owner, "decode", None)
        return own if callable(own) else None

    def decode(ids: list[int]) -> str:
        try:
            text: str = tokenizer.decode(ids, skip_special_tokens=False)
        except TypeError:  # a user's own, which takes tokens alone
            text = tokenizer.decode(ids)
        return text

    return decode if callable(getattr(tokenizer, "decode", None)) else None


def _is_replaced(trainer_class: type[Trainer], method: str) -> bool:
    own, plain = (getattr(each, method).__func__ for each in (trainer_class, Trainer))
    return own is not plain


Loader: TypeAlias = "TrainData | StreamData | EvalData | EvalStream"


@dataclass
class Kept:
    """A batch and the samples that it was made of."""

    samples: list[Any]
    batch: Any = None
    error: Exception | None = None
    """Why the collator made none."""


class Keeper:
    """A collator that keeps the samples beside the batch, and an error of the collator instead of raising it."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator
        self.wants_batch = True
        self.draws_nothing = bool(getattr(collator, "draws_nothing", False))

    def __call__(self, samples: list[Any]) -> Kept:
        """Collates, while a batch is wanted."""
        if not self.wants_batch:
            return Kept(samples)
        try:
            # A copy of the list, for a collator may empty it.
            batch = self.collator(list(samples))
            reject_lists(batch)
        except Exception as error:
            return Kept(samples, error=error)
        return Kept(samples, batch)


class FailureList(OnError):  # noqa: N818  # no exception: what is done about failures
    """Takes note of rows that cannot be read, in memory alone and without a limit."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__(skips=skips)
        self.failures: list[RowFailure] = []

    def note(self, failures: Sequence[RowFailure], *, of: str = "data.train") -> None:
        """Keeps them, each once."""
        self.failures += [each for each in dict.fromkeys(failures) if each not in self.failures]


@dataclass
class SetReading:
    """A set that is being read: its loader, and what was met on the way."""

    loader: Loader
    keeper: Keeper
    listed: FailureList
    view: View
    batch_size: int
    """Samples of a batch, over all ranks."""
    first: Kept | None = field(default=None, init=False)
    """The first batch, once `samples` has begun."""

    def samples(self, wanted: Callable[[], int]) -> Iterator[tuple[int, int | None, Any]]:
        """Yields position, index in the dataset (None in a stream) and sample, until as many as wanted were given.

        It ends after one epoch, so that no sample is given twice.
        `wanted` is asked again at each batch, as the first one tells how much more there is to know.
        """
        given = 0
        for number, kept in enumerate(self.loader.batches(_as_they_are)):
            self.keeper.wants_batch = False
            self.first = self.first or kept
            places = self._places(number, kept)
            for place, sample in zip(places, kept.samples, strict=False):
                if given >= wanted() or (place is not None and place[0] >= len(self.loader.dataset)):
                    return
                yield given if place is None else place[0], None if place is None else place[1], sample
                given += 1
            if given >= wanted():
                return

    def _places(self, number: int, kept: Kept) -> list[tuple[int, int] | None]:
        """Returns position and index of each sample of a batch; rows that were left out have none."""
        order = order_of(self.loader)
        if order is None:
            return [None] * len(kept.samples)
        start = number * self.batch_size
        stop = start + self.batch_size
        if isinstance(self.loader, EvalData):
            stop = min(stop, len(self.loader))
        begin, end = self.view.share(start, stop)
        indices = order.indices(begin, end).tolist()
        dataset = self.loader.dataset
        skipped = {each.row for each in self.listed.failures}
        rows = whole_rows(dataset, indices)
        places = zip(range(begin, end), indices, rows, strict=True)
        return [(position, index) for position, index, row in places if row not in skipped]


def order_of(loader: Loader) -> Any:
    """Returns which sample stands at which position; None for a stream, which has no index."""
    return loader.order if isinstance(loader, (TrainData, EvalData)) else None


def whole_rows(dataset: Any, indices: list[int]) -> list[int]:
    """Returns the rows of the dataset that a split's part was cut from."""
    while hasattr(type(dataset), "indices_in_whole"):
        dataset, indices = dataset.dataset, dataset.indices_in_whole(indices)
    return indices


def read_training(config: RunConfig, dataset: Any, collator: Collator, plan: BatchPlan, view: View) -> SetReading:
    """Prepares to read training data, which may be a dataset, a stream or a loader that a trainer made."""
    section = config.data
    if isinstance(dataset, (TrainData, StreamData)):
        return _take_over(dataset, config, view, dataset.global_batch_size)
    keeper, listed = Keeper(collator), FailureList(skips=section.on_error == "skip")
    common: dict[str, Any] = {
        "collator": keeper,
        "seed": config.seed,
        "view": view,
        "on_error": listed,
        "global_batch_size": plan.global_batch_size,
        "shuffle": section.shuffle,
    }
    if is_stream(dataset):
        # The number of workers decides how a stream is laid out; they are counted, and not started.
        options = LoaderOptions(section.num_workers)
        stream = StreamData(dataset, block_size=section.shuffle_buffer, options=options, **common)
        stream.options = LoaderOptions()
        return SetReading(stream, keeper, listed, view, plan.global_batch_size)
    data = TrainData(dataset, group_by_length=section.group_by_length, **common)
    return SetReading(data, keeper, listed, view, plan.global_batch_size)


def read_evaluation(
    config: RunConfig, name: str, dataset: Any, collator: Collator, plan: BatchPlan, view: View
) -> SetReading:
    """Prepares to read an evaluation set: each sample once, in its order."""
    batch_size = config.evaluation.batch_size or plan.micro_batch_size * view.size
    if isinstance(dataset, (EvalData, EvalStream)):
        return _take_over(dataset, config, view, dataset.global_batch_size)
    keeper, listed = Keeper(collator), FailureList(skips=config.data.on_error == "skip")
    kind = EvalStream if is_stream(dataset) else EvalData
    loader = kind(
        dataset,
        name=name,
        collator=keeper,
        global_batch_size=batch_size,
        seed=config.seed,
        view=view,
        on_error=listed,
    )
    return SetReading(loader, keeper, listed, view, batch_size)


def _take_over(loader: Loader, config: RunConfig, view: View, batch_size: int) -> SetReading:
    """Lets a loader that a trainer made keep its samples, without its workers."""
    keeper, listed = Keeper(loader.collator), FailureList(skips=config.data.on_error == "skip")
    loader.collator, loader.options, loader.on_error = keeper, LoaderOptions(), listed
    return SetReading(loader, keeper, listed, loader.view, batch_size)


def _as_they_are(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


def look_at_batch(
    batch: Any,
    samples: Sequence[Any],
    *,
    rank: int,
    num_ranks: int,
    micro_batch_size: int | None,
    decode: Decode,
) -> Batch:
    """Describes the batch that was made of samples."""
    padding, padding_by = padding_of(batch)
    return Batch(
        samples=len(samples),
        rank=rank,
        num_ranks=num_ranks,
        micro_batch_size=micro_batch_size,
        fields=describe_batch(batch),
        padding=padding,
        padding_by=padding_by,
        in_loss=_share_in_loss(batch),
        first_row=_first_row(batch, samples[0], decode),
    )


def _first_row(batch: Any, sample: Any, decode: Decode) -> tuple[Values, ...]:
    """Describes the tokens that a collator made; none where the sample has them itself."""
    if "input_ids" in dict(fields_of(sample)):
        return ()
    tensors = _tensors(batch)
    rows = {name: tensors[name][0] for name in ("input_ids", "labels") if name in tensors and tensors[name].ndim == 2}
    mask = tensors.get("attention_mask")
    if "input_ids" not in rows:
        return ()
    if mask is not None and mask.ndim == 2:
        rows = {name: row[mask[0] != 0] for name, row in rows.items() if row.shape == mask[0].shape}
    return describe_sample(rows, decode)


def padding_of(batch: Any) -> tuple[float | None, str | None]:
    """Returns the share of places without a token, and the field that tells; (None, None) where none does.

    Labels tell least: what is not learnt need not be padding, so only the -100 that rows end with count.
    """
    tensors = _tensors(batch)
    mask = tensors.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        return _share(mask == 0), "attention_mask"
    documents = tensors.get("document_ids")
    if documents is not None and documents.ndim == 2:
        return _share(documents < 0), "document_ids"
    labels = _token_labels(tensors)
    if labels is not None:
        is_learnt_later = (labels != IGNORED_LABEL).to(torch.int64).flip(-1).cumsum(-1).flip(-1)
        return _share(is_learnt_later == 0), "labels"
    return None, None


def num_tokens(batch: Any) -> int | None:
    """Returns how many places hold a token; None for a batch without tokens."""
    tokens = next((each for name, each in _tensors(batch).items() if is_token_field(name)), None)
    if tokens is None:
        return None
    padding, _ = padding_of(batch)
    return round(tokens.numel() * (1 - (padding or 0.0)))


def _share_in_loss(batch: Any) -> float | None:
    labels = _token_labels(_tensors(batch))
    return None if labels is None else _share(labels != IGNORED_LABEL)


def _token_labels(tensors: dict[str, Tensor]) -> Tensor | None:
    """Returns labels that stand for places of a row, not for samples."""
    for name, tensor in tensors.items():
        if is_label_field(name) and tensor.ndim == 2 and not tensor.is_floating_point():
            return tensor
    return None


def _tensors(batch: Any) -> dict[str, Tensor]:
    found = {name: tensor_of(value) for name, value in fields_of(batch)}
    return {name: tensor for name, tensor in found.items() if tensor is not None and tensor.numel()}


def _share(chosen: Tensor) -> float:
    return float(chosen.to(torch.float64).mean())


POSITIONS = 10_000
"""Over how many positions shares are counted: data/mix.py keeps them exactly over as many."""


def look_at_mixture(dataset: Any, order: Any, run_samples: int | None) -> Mixture | None:
    """Describes the mixture that a set is, or is made of; None where there is none.

    `order` is the set's own, which counts the sources only where the mixture is outermost.
    """
    mix, is_outermost = _find_mix(dataset)
    if mix is None:
        return None
    weights = getattr(mix, "weights", None) or {}
    sizes = {name: _source_size(each) for name, each in mix.sources.items()}
    positions: int | None = None
    counted: Mapping[str, int] = {}
    total: Mapping[str, int] = {}
    if is_outermost and hasattr(order, "counts"):
        positions = POSITIONS
        counted = order.counts(POSITIONS)
        total = order.counts(run_samples) if run_samples else {}
    shares = _expected_shares(weights, sizes)
    rows = []
    for name, size in sizes.items():
        share = counted[name] / POSITIONS if counted else shares.get(name)
        epochs = total[name] / size if total and size else None
        rows.append(MixedSource(name, size, weights.get(name), share, epochs))
    return Mixture(tuple(rows), positions)


def source_row(dataset: Any, index: int) -> tuple[str | None, int]:
    """Returns the source that a sample of a mixture comes from and its row there; (None, index) for other data."""
    if not (hasattr(dataset, "source_of") and hasattr(dataset, "sizes")):
        return None, index
    [name] = dataset.source_of([index])
    for each, size in dataset.sizes.items():
        if each == name:
            break
        index -= size
    return name, index


def _find_mix(dataset: Any) -> tuple[Any, bool]:
    """Returns the outermost mixture and whether nothing is around it."""
    is_outermost = True
    while dataset is not None:
        if isinstance(getattr(dataset, "sources", None), Mapping):
            return dataset, is_outermost
        is_outermost = False
        inner = getattr(dataset, "dataset", None)
        dataset = inner if inner is not None else inner_datasets(dataset).get("source")
    return None, False


def _source_size(source: Any) -> int | None:
    # A mixture with a stream in it reads those with an index as streams too (data/mix.py).
    rows = getattr(source, "dataset", source)
    return None if is_stream(rows) else len(rows)


def _expected_shares(weights: Mapping[str, float], sizes: Mapping[str, int | None]) -> dict[str, float]:
    """Returns the shares that weights give, or else sizes, where all are known."""
    parts = dict(weights) or {name: float(size) for name, size in sizes.items() if size is not None}
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()} if total and len(parts) == len(sizes) else {}


MOST_PADDING = 0.3
"""The share of padding from which on there is advice against it."""
_MOST_ROWS = 5


class TokenRange:
    """The smallest and the largest token that was met, and where."""

    def __init__(self) -> None:
        self.least: tuple[int, str] | None = None
        self.most: tuple[int, str] | None = None

    def note(self, sample: Any, where: str) -> None:
        """Looks at the tokens of a sample or a batch."""
        for name, value in fields_of(sample):
            if not is_token_field(name):
                continue
            tensor = tensor_of(value)
            if tensor is None or not tensor.numel() or tensor.is_floating_point():
                continue
            low, high = int(tensor.min()), int(tensor.max())
            self.least = min(self.least or (low, where), (low, where), key=lambda each: each[0])
            self.most = max(self.most or (high, where), (high, where), key=lambda each: each[0])


def remarks_on_tokens(config: RunConfig, tokens: TokenRange, tokenizer: Any) -> Iterable[str]:
    """Yields what does not fit the model's vocabulary."""
    vocab_size = None if config.model is None else config.model.arguments.get("vocab_size")
    if not isinstance(vocab_size, int):
        return
    if tokens.least is not None and tokens.least[0] < 0:
        yield f"{tokens.least[1]} holds the token {tokens.least[0]}: tokens count from 0. Look at the tokenizer."
    if tokens.most is not None and tokens.most[0] >= vocab_size:
        yield (
            f"{tokens.most[1]} holds the token {tokens.most[0]:,}, but model.vocab_size is {vocab_size:,}. "
            f"Raise it to more than {tokens.most[0]:,}, or use the tokenizer that the model was made for."
        )
        return
    known = tokenizer_size(tokenizer)
    if known is not None and known > vocab_size:
        yield (
            f"The tokenizer has {known:,} tokens, but model.vocab_size is {vocab_size:,}; those that were seen fit. "
            f"Set it to {known:,}."
        )


def tokenizer_size(tokenizer: Any) -> int | None:
    """Returns how many tokens a tokenizer has, where it says so."""
    size = getattr(tokenizer, "vocab_size", None)
    if size is None and hasattr(tokenizer, "get_vocab_size"):
        size = tokenizer.get_vocab_size()
    return size if isinstance(size, int) else None


def remarks_on_batch(batch: Batch, sample: Any, collated: Any) -> Iterable[str]:
    """Yields what is lost and what is wasted between the samples and the batch."""
    if isinstance(sample, Mapping) and isinstance(collated, Mapping):
        missing = [str(name) for name in sample if name not in collated]
        if "input_ids" in collated and "input_ids" not in sample:
            # Texts that became tokens are not lost.
            missing = [name for name in missing if not isinstance(sample[name], str)]
        if missing:
            yield f"The collator drops or renames {_listed(missing)}: the batch has no such field."
    if batch.padding is not None and batch.padding > MOST_PADDING:
        yield (
            f"{100 * batch.padding:.0f} % of the batch is padding (by {batch.padding_by}), which is computed and "
            "thrown away. Pack the samples into rows (type: pack), or set data.group_by_length, so that a batch holds "
            "samples of about equal length."
        )
    for each in batch.fields:
        if _is_broken(each):
            yield f"{each.name} holds values that are not finite (from {each.minimum} to {each.maximum})."


def remarks_on_samples(samples: Sequence[Sample]) -> Iterable[str]:
    """Yields samples from which nothing can be learnt."""
    for sample in samples:
        for each in sample.fields:
            total = math.prod(each.shape or ())
            if is_label_field(each.name) and each.shape and each.num_ignored == total:
                yield f"Position {sample.position}: every label is -100, so nothing is learnt from this sample."


def remarks_on_failures(failures: Sequence[RowFailure]) -> Iterable[str]:
    """Yields the rows that could not be read, as far as a person reads them."""
    for failure in failures[:_MOST_ROWS]:
        yield f"Left out: {failure.describe()}."
    if len(failures) > _MOST_ROWS:
        yield f"Left out: {len(failures) - _MOST_ROWS} further rows that cannot be read."


def _is_broken(field: Values) -> bool:
    return any(each is not None and not math.isfinite(each) for each in (field.minimum, field.maximum))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def look_at(config: RunConfig, *, run: str = "", show: int = 3, samples: int = 1000, name: str | None = None) -> Look:
    """Looks at the training set and briefly at the others; with `name` at that set alone.

    `show` samples are described, and at most `samples` are read for their lengths.
    """
    sets, collator = build_sets(config)
    chosen = choose(sets, name or TRAIN)
    full = _Full(config, chosen, collator, show=show, samples=samples)
    found = [full.look()]
    failure = full.failure
    for each in sets.values() if name is None else ():
        if each is not chosen:
            brief, error = _look_briefly(each)
            found.append(brief)
            failure = failure or error
    return Look(run, tuple(found), failure)


def _look_briefly(one: RunSet) -> tuple[DataSet, Exception | None]:
    nest = nest_of(one.dataset, one.component)
    try:
        size = _size_of(one)
        tokens = _declared_tokens(one.dataset, size)
        return DataSet(one.name, one.label, nest, size, _split_of(one.dataset), _fill_of(one.dataset), tokens), None
    except Exception as error:
        return DataSet(one.name, one.label, nest, None, error=f"{type(error).__name__}: {error}"), error


class _Full:
    """One set that is looked at in full."""

    def __init__(self, config: RunConfig, one: RunSet, collator: Collator, *, show: int, samples: int) -> None:
        self.failure: Exception | None = None
        self._config = config
        self._set = one
        self._collator = collator
        self._show, self._most = show, samples
        self._batch_plan = _batch_plan(config, one.name)
        self._view = View(0, known_data_ranks(config))
        self._decode = decoder_of(one.dataset, collator)
        self._shown: list[Sample] = []
        self._counted: list[int] = []
        self._unit: str | None = None
        self._example: Any = None
        self._token_range = TokenRange()

    def look(self) -> DataSet:
        """Reads what is needed, and describes it."""
        one, dataset = self._set, self._set.dataset
        size = _size_of(one)
        reading = self._open()
        plan = self._plan(reading.loader)
        declared = _declared_tokens(dataset, size)
        self._read(reading, size, wants_lengths=declared is None)
        kept = reading.first or Kept([])
        self.failure = kept.error
        batch = self._look_at_batch(kept)
        lengths = self._lengths(dataset, size)
        mixture = look_at_mixture(dataset, order_of(reading.loader), None if plan is None else plan.samples)
        return DataSet(
            name=one.name,
            label=one.label,
            nest=nest_of(dataset, one.component),
            num_samples=size,
            split=_split_of(dataset),
            fill=_fill_of(dataset),
            tokens=declared or self._estimated_tokens(size, lengths, kept),
            plan=plan,
            samples=tuple(self._shown),
            batch=batch,
            lengths=lengths,
            mixture=mixture,
            remarks=tuple(self._remarks(reading, kept, batch)),
            error=None if kept.error is None else f"{type(kept.error).__name__}: {kept.error}",
        )

    def _open(self) -> SetReading:
        one = self._set
        if one.name == TRAIN:
            return read_training(self._config, one.data, self._collator, self._batch_plan, self._view)
        return read_evaluation(self._config, one.name, one.data, self._collator, self._batch_plan, self._view)

    def _plan(self, loader: Loader) -> DataUse | None:
        if not isinstance(loader, (TrainData, StreamData)):
            return None
        try:
            steps, most = limits(self._config, loader)
        except ConfigError:  # a run without a limit, which training rejects; its data can be looked at all the same
            return None
        finally:
            if isinstance(loader, StreamData):
                loader.num_passes = 1
        samples = steps * loader.global_batch_size
        samples = samples if most is None else min(samples, most)
        return DataUse(steps, samples, samples / len(loader) if isinstance(loader, TrainData) else None)

    def _read(self, reading: SetReading, size: int | None, *, wants_lengths: bool) -> None:
        """Reads as many samples as there is something to learn from: those shown, and those counted."""
        limit = self._most if size is None else min(self._most, size)
        show = self._show if size is None else min(self._show, size)

        def wanted() -> int:
            return max(show, limit) if wants_lengths and self._unit is not None else max(show, 1)

        for number, (position, index, sample) in enumerate(reading.samples(wanted)):
            if number == 0:
                self._example, self._unit = sample, unit_of(sample)
            if number < show:
                self._shown.append(self._describe(position, index, sample))
            if number < limit:
                length = None if self._unit is None else length_of(sample, self._unit)
                self._counted += [] if length is None else [length]
                self._token_range.note(sample, f"The sample at position {position:,}")

    def _describe(self, position: int, index: int | None, sample: Any) -> Sample:
        fields = describe_sample(sample, self._decode)
        if index is None:
            return Sample(position, None, None, fields)
        [row] = whole_rows(self._set.dataset, [index])
        source, row = source_row(self._set.dataset, row)
        return Sample(position, row, source, fields)

    def _look_at_batch(self, kept: Kept) -> Batch | None:
        if kept.error is not None or not kept.samples:
            return None
        self._token_range.note(kept.batch, "The first batch")
        return look_at_batch(
            kept.batch,
            kept.samples,
            rank=self._view.rank,
            num_ranks=self._view.size,
            micro_batch_size=self._batch_plan.micro_batch_size if self._set.name == TRAIN else None,
            decode=self._decode,
        )

    def _lengths(self, dataset: Any, size: int | None) -> Lengths | None:
        known = _known_lengths(dataset, size)
        if known is not None:
            return summarise(known, "tokens", is_whole=True)
        equal = _equal_length(dataset)
        if equal is not None:
            return Lengths("tokens", size, True, equal, equal, equal, equal, ())
        if self._unit is None or not self._counted:
            return None
        return summarise(self._counted, self._unit, is_whole=len(self._counted) == size)

    def _estimated_tokens(self, size: int | None, lengths: Lengths | None, kept: Kept) -> TokenCounts | None:
        is_whole = False
        if lengths is not None and lengths.unit.startswith("tokens"):
            mean, is_whole = float(np.mean(self._counted)), lengths.is_whole
        else:
            in_batch = None if kept.error is not None or not kept.samples else num_tokens(kept.batch)
            if in_batch is None:
                return None
            mean = in_batch / len(kept.samples)
        return TokenCounts(None if size is None else round(mean * size), mean, is_estimate=not is_whole)

    def _remarks(self, reading: SetReading, kept: Kept, batch: Batch | None) -> Iterator[str]:
        tokenizer = tokenizer_of(self._set.dataset) or tokenizer_of(self._collator)
        yield from remarks_on_tokens(self._config, self._token_range, tokenizer)
        if batch is not None:
            yield from remarks_on_batch(batch, self._example, kept.batch)
        yield from remarks_on_samples(self._shown)
        yield from remarks_on_failures(reading.listed.failures)


def _batch_plan(config: RunConfig, name: str) -> BatchPlan:
    if name == TRAIN:
        return resolve_batch(config, known_data_ranks(config))
    # As an evaluation alone: it needs no batch arithmetic.
    micro = micro_batch_alone(config)
    return BatchPlan(micro, micro, 1)


def _size_of(one: RunSet) -> int | None:
    return None if is_stream(one.dataset) else count_samples(one.dataset, one.label)


def _split_of(dataset: Any) -> Split | None:
    return Split(len(dataset), len(dataset.dataset)) if hasattr(type(dataset), "indices_in_whole") else None


def _fill_of(dataset: Any) -> float | None:
    fill = getattr(dataset, "fill", None)
    return float(fill) if isinstance(fill, (int, float)) else None


def _declared_tokens(dataset: Any, size: int | None) -> TokenCounts | None:
    """Returns what a dataset says of its tokens itself."""
    per_sample = _equal_length(dataset)
    if per_sample is not None:
        return TokenCounts(None if size is None else per_sample * size, float(per_sample), is_estimate=False)
    known = _known_lengths(dataset, size)
    if known is None:
        return None
    total = int(np.sum(known))
    return TokenCounts(total, total / len(known), is_estimate=False)


def _equal_length(dataset: Any) -> int | None:
    """Returns the tokens of each sample where a dataset says that all have as many."""
    per_sample = getattr(dataset, "tokens_per_sample", None)
    return per_sample if isinstance(per_sample, int) else None


def _known_lengths(dataset: Any, size: int | None) -> Any:
    """Returns the tokens of every sample where a dataset knows them; a split's part offers those of the whole."""
    known = getattr(dataset, "lengths", None)
    if known is None or callable(known) or not size or len(known) != size:
        return None
    lengths = np.asarray(known)
    return lengths if lengths.dtype.kind in "iu" and lengths.ndim == 1 else None
