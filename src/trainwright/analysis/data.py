"""`trainwright data`: samples in training order, the first batch, lengths, a mixture, and remarks.

The data classes contain the result, which data_page.py renders for a terminal and `to_dict` for JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count, groupby, takewhile
from numbers import Number
from operator import itemgetter
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from trainwright.analysis.explain import overridden
from trainwright.build.components import Build
from trainwright.build.data import limits, may_make_batches
from trainwright.config import BatchPlan, Component, RunConfig, known_data_ranks, micro_batch_alone, resolve_batch
from trainwright.data.collators import plain_mappings, reject_lists
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
from trainwright.user_code.locations import parameters_of


@dataclass(frozen=True)
class SourceTree:
    """A dataset and the datasets that it reads from."""

    type: str
    """As in the run file; the class if a trainer or a task built it."""
    class_name: str
    sources: Mapping[str, SourceTree] = field(default_factory=dict)
    """By name; a single one is called `source`."""

    def describe(self) -> str:
        """Returns it as one line, outermost first."""
        own = self.type if self.type.endswith(self.class_name) else f"{self.type} ({self.class_name})"
        if list(self.sources) == ["source"]:
            return f"{own} ← {self.sources['source'].describe()}"
        if self.sources:
            return f"{own} ← {', '.join(f'{name}: {each.type}' for name, each in self.sources.items())}"
        return own


@dataclass(frozen=True)
class Split:
    """The number of samples that `data.split` takes from a whole."""

    samples: int
    whole: int


@dataclass(frozen=True)
class TokenCounts:
    """The tokens of a set."""

    per_epoch: int | None
    """None for a stream."""
    per_sample: float
    is_estimate: bool
    """True if they are computed from the samples that were read."""


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
    """A text, decoded tokens, or a short form of the value."""
    is_tokens: bool = False
    ids: str | None = None
    """The first token ids, if there is no decoder."""
    num_ignored: int | None = None
    """Labels that are -100."""
    is_as_input_ids: bool = False
    """True for labels that equal the tokens, except where they are -100."""
    drawing: tuple[str, ...] = ()
    """A small gray image, line by line."""
    runs: tuple[tuple[str, bool], ...] = ()
    """The text of tokens of which only some are labels: runs in order, and whether each consists of labels."""


@dataclass(frozen=True)
class Sample:
    """A sample at its position in training."""

    position: int
    row: int | None
    """The row in the dataset, or in the source of a mixture; None in a stream."""
    source: str | None
    fields: tuple[Values, ...]


@dataclass(frozen=True)
class Batch:
    """The first batch of a rank."""

    samples: int
    rank: int
    num_ranks: int
    micro_batch_size: int | None
    """None for an evaluation set, whose batches are not split."""
    fields: tuple[Values, ...]
    padding: float | None
    """The fraction of padding; None if no field shows it."""
    padding_by: str | None
    """The field that shows it."""
    in_loss: float | None
    """The fraction of labels that are not -100; None without labels for each token."""
    first_row: tuple[Values, ...] = ()
    """The tokens and labels of its first sample, if the collator creates them."""


@dataclass(frozen=True)
class Bar:
    """Samples whose length is from `first` to `last`."""

    first: int
    last: int
    samples: int


@dataclass(frozen=True)
class Lengths:
    """The lengths of samples."""

    unit: str
    """The counted unit: `tokens of input_ids`, `characters of text`."""
    samples: int | None
    """The number of counted samples; None for a stream of equal lengths."""
    is_whole: bool
    """True if every sample of the set is counted."""
    minimum: int
    median: int
    p95: int
    maximum: int
    bars: tuple[Bar, ...]
    """Empty if all are equal."""


@dataclass(frozen=True)
class MixedSource:
    """One source of a mixture."""

    name: str
    samples: int | None
    weight: float | None
    share: float | None
    """Of the first `Mixture.positions` positions."""
    epochs: float | None
    """How often the run reads it."""


@dataclass(frozen=True)
class Mixture:
    """The sources of a set."""

    sources: tuple[MixedSource, ...]
    positions: int | None
    """The number of positions over which shares are counted; None if they are those of the weights or sizes."""


@dataclass(frozen=True)
class DataUse:
    """The part of the training data that the run uses."""

    steps: int
    samples: int
    epochs: float | None


@dataclass(frozen=True)
class DataSet:
    """One set, in short or in full."""

    name: str
    label: str
    """Its setting."""
    nest: SourceTree
    num_samples: int | None
    """None for a stream."""
    split: Split | None = None
    fill: float | None = None
    """The fraction of tokens in packed rows."""
    tokens: TokenCounts | None = None
    plan: DataUse | None = None
    samples: tuple[Sample, ...] = ()
    batch: Batch | None = None
    lengths: Lengths | None = None
    mixture: Mixture | None = None
    remarks: tuple[str, ...] = ()
    error: str | None = None
    """The reason why it cannot be used."""


@dataclass(frozen=True)
class DataReport:
    """The first set in full, the others in short; empty for a run whose trainer makes its batches."""

    run: str
    sets: tuple[DataSet, ...]
    failure: Exception | None = None
    """The first error, which the command raises after it has shown the report."""
    makes_batches: bool = False
    """True if there is no training set, because `next_train_inputs` makes the batches."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON: numbers that are not finite become texts."""
        plain: dict[str, Any] = _plain({"run": self.run, "sets": [asdict(each) for each in self.sets]})
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items() if name != "drawing"}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


Decode = Callable[[list[int]], str | None]
"""Maps token ids to their text; None for ids without text."""

TRAIN, TEST = "train", "test"
MAX_BARS = 12
MAX_PADDING = 0.3
"""The fraction of padding above which there is a remark."""
NUM_POSITIONS = 10_000
"""The number of positions over which the shares of a mixture are counted, over which data/mix.py keeps them exactly."""

_MAX_TEXT = 2000
_MAX_IDS = 64
_MAX_ROWS = 5
_FEW = 0.05  # up to this fraction of ignored labels, the text of the labels is that of the tokens
_MAX_DRAWING = 40  # pixels per side
_FINE_DRAWING = 16  # up to this size a pixel is two characters of one line; above, half a line of one character
_SHADES = " ░▒▓█"


# lengths


def unit_of(sample: Any) -> str | None:
    """Returns the unit of a sample's length, tokens before characters; None if it has no length."""
    fields = fields_of(sample)
    for name, value in fields:
        if is_token_field(name) and hasattr(value, "__len__"):
            return f"tokens of {name}"
    texts = [name for name, value in fields if isinstance(value, str)]
    return f"characters of {'text' if 'text' in texts else ', '.join(texts)}" if texts else None


def length_of(sample: Any, unit: str) -> int | None:
    """Returns the length of a sample over all fields of the unit; None if it has none of them."""
    names = unit.split(" of ", 1)[1].split(", ")
    lengths = [len(value) for name, value in fields_of(sample) if name in names and hasattr(value, "__len__")]
    return sum(lengths) if lengths else None


def summarize_lengths(lengths: Sequence[int], unit: str, *, is_whole: bool) -> Lengths:
    """Returns the quantiles and the histogram of lengths; no histogram if all are equal."""
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    low, high = int(ordered[0]), int(ordered[-1])
    median, p95 = (int(np.percentile(ordered, percentage, method="inverted_cdf")) for percentage in (50, 95))
    bars = () if low == high else _bars(ordered, low, high, p95)
    return Lengths(unit, len(ordered), is_whole, low, median, p95, high, bars)


def _bars(lengths: Any, low: int, high: int, p95: int) -> tuple[Bar, ...]:
    """Returns at most MAX_BARS bars of one round width; one more bar contains a long tail."""
    has_tail = high > 3 * max(p95, 1)
    top, most = (p95, MAX_BARS - 1) if has_tail else (high, MAX_BARS)
    widths = (step * 10**power for power in count() for step in (1, 2, 5))
    width = next(width for width in widths if top // width - low // width + 1 <= most)
    edges = [*range(low // width * width, top + 1, width)]
    edges.append(edges[-1] + width)
    edges += [high + 1] if has_tail else []
    counts = np.diff(np.searchsorted(lengths, edges)).tolist()
    return tuple(Bar(first, end - 1, samples) for first, end, samples in zip(edges, edges[1:], counts, strict=False))


# fields of samples and batches


def fields_of(sample: Any) -> list[tuple[str, Any]]:
    """Returns the fields of a sample or a batch by name; those of a tuple are named by their index."""
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
    except (ValueError, TypeError, OverflowError):  # ragged, or without a torch dtype
        return None


def is_token_field(name: str) -> bool:
    """Returns True for the name of a field with token ids."""
    return name.rsplit(".", 1)[-1].endswith("input_ids")


def is_label_field(name: str) -> bool:
    """Returns True for the name of a field with labels."""
    return name.rsplit(".", 1)[-1].endswith("labels")


def describe_sample(sample: Any, decode: Decode) -> tuple[Values, ...]:
    """Describes each field of a sample."""
    fields = fields_of(sample)
    tokens, labels = (
        next((tensor_of(value) for name, value in fields if name == wanted), None) for wanted in ("input_ids", "labels")
    )
    described = [_describe(name, value, decode, tokens) for name, value in fields]
    runs = () if tokens is None or labels is None else _runs(tokens, labels, decode)
    return tuple(replace(each, runs=runs) if each.name == "input_ids" else each for each in described)


def describe_fields(batch: Any) -> tuple[Values, ...]:
    """Describes each field of a batch by its shape and range."""
    found = []
    for name, value in fields_of(batch):
        tensor = tensor_of(value)
        if tensor is not None:
            found.append(_statistics(name, value, tensor, device=str(tensor.device)))
        else:
            text = f"{len(value)} values" if hasattr(value, "__len__") else None
            found.append(Values(name, _type_name(value), text=text))
    return tuple(found)


def _describe(name: str, value: Any, decode: Decode, tokens: Tensor | None) -> Values:
    tensor = tensor_of(value)
    if tensor is None:
        return Values(name, _type_name(value), text=_shorten(value))
    is_integer = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != torch.bool
    if tensor.ndim == 0:
        return _statistics(name, value, tensor, text=_shorten(tensor.item()))
    if is_integer and tensor.ndim == 1 and is_token_field(name):
        text = _decoded(tensor, decode)
        ids = " ".join(map(str, tensor[:_MAX_IDS].tolist())) + (" …" if len(tensor) > _MAX_IDS else "")
        return _statistics(name, value, tensor, is_tokens=True, text=text, ids=None if text else ids)
    if not is_integer or not is_label_field(name):
        return _statistics(name, value, tensor, drawing=draw(tensor))
    is_used = tensor != IGNORED_LABEL
    num_ignored = int((~is_used).sum())
    has_tokens = tokens is not None and tokens.shape == tensor.shape
    is_masked = has_tokens and num_ignored > _FEW * tensor.numel() and bool(is_used.any())
    return _statistics(
        name,
        value,
        tensor,
        num_ignored=num_ignored,
        is_as_input_ids=tokens is not None and has_tokens and bool(torch.eq(tensor, tokens)[is_used].all()),
        text=_decoded(tensor[is_used], decode) if is_masked else None,
    )


def _runs(tokens: Tensor, labels: Tensor, decode: Decode) -> tuple[tuple[str, bool], ...]:
    """Returns the text of the runs of tokens that are labels or not; empty if (nearly) all are, or none is."""
    is_used = labels != IGNORED_LABEL
    if tokens.shape != labels.shape or tokens.ndim != 1 or not bool(is_used.any()):
        return ()
    if int((~is_used).sum()) <= _FEW * tokens.numel():
        return ()
    pairs = zip(tokens[:_MAX_TEXT].tolist(), is_used.tolist(), strict=False)
    runs = [(decode([token for token, _ in run]), is_label) for is_label, run in groupby(pairs, itemgetter(1))]
    return tuple((text, is_label) for text, is_label in runs if text is not None)


def _decoded(tokens: Tensor, decode: Decode) -> str | None:
    text = decode(tokens[:_MAX_TEXT].tolist())
    return None if text is None else text[:_MAX_TEXT]


def _statistics(name: str, value: Any, tensor: Tensor, **facts: Any) -> Values:
    """Returns the shape and range of a tensor, with further facts."""
    described = Values(name, _type_name(value), tuple(tensor.shape), **facts)
    if not tensor.numel() or tensor.is_complex():
        return described
    tensor = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    number = float if tensor.is_floating_point() else int
    low, high = (number(each.item()) for each in torch.aminmax(tensor))
    return replace(described, minimum=low, mean=float(tensor.to(torch.float64).mean()), maximum=high)


def _type_name(value: Any) -> str:
    kind = value.dtype if isinstance(value, (Tensor, np.ndarray, np.generic)) else type(value).__name__
    return str(kind).removeprefix("torch.")


def _shorten(value: Any) -> str:
    """Returns a value that is not a tensor as text."""
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes"
    if hasattr(value, "mode") and hasattr(value, "size"):  # a PIL image
        width, height = value.size
        return f"an image of {width} × {height}, {value.mode}"
    if isinstance(value, (list, tuple, Mapping)):
        try:
            return json.dumps(value, ensure_ascii=False)[:_MAX_TEXT]
        except (TypeError, ValueError):
            return f"{len(value)} values, {repr(value)[:_MAX_TEXT]}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)[:_MAX_TEXT]


def draw(tensor: Tensor) -> tuple[str, ...]:
    """Returns a small gray image [height, width] or [1, height, width] as lines of shades; () for anything else."""
    if tensor.ndim == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 2 or not 4 <= min(tensor.shape) <= max(tensor.shape) <= _MAX_DRAWING:
        return ()
    if max(tensor.shape) > 4 * min(tensor.shape) or tensor.is_complex():
        return ()
    pixels = tensor.to(torch.float64)
    low, high = float(pixels.min()), float(pixels.max())
    if not high > low:  # constant, or nan
        return ()
    pixels = (pixels - low) / (high - low)
    times = 2 if max(tensor.shape) <= _FINE_DRAWING else 1
    if times == 1:
        pixels = torch.stack([rows.mean(0) for rows in torch.split(pixels, 2)])
    levels = (pixels * len(_SHADES)).to(torch.int64).clamp(max=len(_SHADES) - 1)
    return tuple("".join(_SHADES[level] * times for level in row) for row in levels.tolist())


# the sets of a run


@dataclass(frozen=True)
class RunSet:
    """One set as it was built: a dataset, a stream, or a loader that a trainer built."""

    name: str
    label: str
    data: Any
    component: Component | None
    """Its section; None if a trainer or a task built it."""
    sampler: Any = None
    """What `data.sampler` describes, for the training set."""

    @property
    def dataset(self) -> Any:
        """The dataset itself, without its loader."""
        is_loader = isinstance(self.data, (TrainData, StreamData, EvalData, EvalStream))
        return self.data.dataset if is_loader else self.data

    @property
    def num_samples(self) -> int | None:
        """The number of samples; None for a stream."""
        return None if is_stream(self.dataset) else count_samples(self.dataset, self.label)


def build_sets(config: RunConfig) -> tuple[dict[str, RunSet], Collator]:
    """Returns the sets by name, train first and test last, and the collator; no train if the trainer makes batches."""
    seed_generators(config.seed)  # for datasets with random numbers in their constructor
    build = Build(config)
    trainer_class = build.trainer_class()
    build.take_trainer(trainer_class)
    task = trainer_class.build_task(build)
    build.take_task(task)
    task_builds = overrides(task, "build_dataset", Task)
    collator = build.name_fields(trainer_class.build_collator(build), trainer_class, None)
    train, evaluation = trainer_class.build_train_data(build), trainer_class.build_eval_data(build)
    test, data = build.test_data(), config.data
    uses_section = not (task_builds or overridden(trainer_class, "build_train_data", Trainer))
    sets = []
    if train is not None or not may_make_batches(trainer_class, config):
        sampler = trainer_class.build_sampler(build, train)
        sets = [RunSet(TRAIN, "data.train", train, data.train if uses_section else None, sampler)]
    uses_section = not (task_builds or overridden(trainer_class, "build_eval_data", Trainer))
    for name, each in evaluation.items():
        is_split = uses_section and name not in data.eval
        component = (data.train if is_split else data.eval[name]) if uses_section else None
        sets.append(RunSet(name, "data.split" if is_split else f"data.eval.{name}", each, component))
    if test is not None:
        is_split = data.test is None and not task_builds
        component = None if task_builds else data.train if is_split else data.test
        sets.append(RunSet(TEST, "data.split" if is_split else "data.test", test, component))
    return {each.name: each for each in sets}, collator


def tree_of(dataset: Any, component: Mapping[str, Any] | None) -> SourceTree:
    """Returns a dataset and its sources, with the types of its section if there is one."""
    while hasattr(type(dataset), "indices_in_whole"):
        dataset = dataset.dataset
    class_name, sources = type(dataset).__name__, inner_datasets(dataset)
    if component is None:
        inner = getattr(dataset, "dataset", None)
        sources = sources if inner is None else {"source": inner}
        return SourceTree(class_name, class_name, {name: tree_of(each, None) for name, each in sources.items()})
    section = component.get("sources")
    sections = dict(section) if isinstance(section, Mapping) else {"source": component.get("source")}
    named = {name: each for name, each in sections.items() if isinstance(each, Mapping) and "type" in each}
    inner_trees = {name: tree_of(sources[name], each) for name, each in named.items() if name in sources}
    return SourceTree(str(component["type"]), class_name, inner_trees)


def inner_datasets(dataset: Any) -> dict[str, Any]:
    """Returns the datasets that a dataset reads from, by name; a single one is called `source`."""
    several = getattr(dataset, "sources", None)
    if isinstance(several, Mapping):
        return dict(several)
    one = getattr(dataset, "source", None)
    return {} if one is None or isinstance(one, str) else {"source": one}


def decoder_of(dataset: Any, collator: Any) -> Decode:
    """Returns the decoder of tokens: the tokenizer or `decode` method of the dataset, or else of the collator."""
    found = _find_decode(dataset) or _find_decode(collator)

    def decode(ids: list[int]) -> str | None:
        try:
            return None if found is None else found(ids)
        except Exception:  # tokens of another vocabulary: there is a remark, and the ids are shown instead
            return None

    return decode


def _find_decode(owner: Any) -> Callable[[list[int]], str] | None:
    tokenizer = tokenizer_of(owner)
    decode: Any = getattr(owner if tokenizer is None else tokenizer, "decode", None)
    if not callable(decode):
        return None
    parameters = parameters_of(decode)
    if tokenizer is not None and (parameters is None or "skip_special_tokens" in parameters):
        return partial(decode, skip_special_tokens=False)
    return cast(Callable[[list[int]], str], decode)


# reading samples in training order

Loader: TypeAlias = "TrainData | StreamData | EvalData | EvalStream"


@dataclass
class RecordedBatch:
    """A batch and its samples."""

    samples: list[Any]
    batch: Any = None
    error: Exception | None = None
    """The error of the collator, in which case there is no batch."""


class RecordingCollator:
    """A collator that keeps the samples with the batch, and stores an error of the collator instead of raising it."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator
        self.is_active = True
        self.draws_nothing = bool(getattr(collator, "draws_nothing", False))

    def __call__(self, samples: list[Any]) -> RecordedBatch:
        """Collates a copy of the list, while it is active."""
        if not self.is_active:
            return RecordedBatch(samples)
        try:
            batch = plain_mappings(self.collator(list(samples)))
            reject_lists(batch)
        except Exception as error:
            return RecordedBatch(samples, error=error)
        return RecordedBatch(samples, batch)


class FailureList(OnError):  # noqa: N818  # not an exception: the policy for failures
    """Records rows that cannot be read, in memory and without a limit."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__(skips=skips)
        self.failures: list[RowFailure] = []

    def note(self, failures: Sequence[RowFailure], *, of: str = "data.train") -> None:
        """Adds failures, each once."""
        self.failures += [each for each in dict.fromkeys(failures) if each not in self.failures]


class SetReader:
    """Reads one set: its loader with a recording collator, and without workers."""

    def __init__(self, config: RunConfig, one: RunSet, collator: Collator, plan: BatchPlan, view: View) -> None:
        section, data = config.data, one.data
        self.first = RecordedBatch([])
        """The first batch, once `samples` has begun."""
        self.failures = FailureList(skips=section.on_error == "skip")
        self.loader: Loader
        if isinstance(data, (TrainData, StreamData, EvalData, EvalStream)):  # a trainer built it
            self.loader, self.collator = data, RecordingCollator(data.collator)
            data.collator, data.options, data.on_error = self.collator, LoaderOptions(), self.failures
            self.view, self.batch_size = data.view, data.global_batch_size
            return
        self.view, self.collator, self.batch_size = view, RecordingCollator(collator), plan.global_batch_size
        if one.name != TRAIN:
            self.batch_size = config.evaluation.batch_size or plan.micro_batch_size * view.size
        common: dict[str, Any] = {"collator": self.collator, "seed": config.seed, "view": view}
        common |= {"on_error": self.failures, "global_batch_size": self.batch_size}
        if one.name != TRAIN:
            self.loader = (EvalStream if is_stream(data) else EvalData)(data, name=one.name, **common)
        elif is_stream(data):
            # The layout of a stream depends on the number of workers, but none is started here.
            options = LoaderOptions(section.num_workers)
            block_size, shuffle, drops = section.shuffle_buffer, section.shuffles, section.last_batch == "drop"
            self.loader = StreamData(
                data, block_size=block_size, options=options, shuffle=shuffle, drops_short=drops, **common
            )
            self.loader.options = LoaderOptions()
        else:
            self.loader = TrainData(
                data,
                group_by_length=section.group_by_length,
                shuffle=section.shuffles,
                sampler=one.sampler,
                last_batch=section.last_batch or "straddle",
                **common,
            )

    def samples(self, wanted: Callable[[], int]) -> Iterator[tuple[int, int | None, Any]]:
        """Yields position, index in the dataset (None in a stream) and sample, at most one epoch.

        `wanted` returns the number of samples; it is called for each sample, because it depends on the first one.
        """
        num_yielded = 0
        for number, recorded in enumerate(self.loader.batches(iter)):
            if number == 0:
                self.first, self.collator.is_active = recorded, False
            for location, sample in zip(self._positions(number, recorded), recorded.samples, strict=False):
                if num_yielded >= wanted() or (location is not None and location[0] >= len(self.loader.dataset)):
                    return
                position, index = (num_yielded, None) if location is None else location
                yield position, index, sample
                num_yielded += 1
            if num_yielded >= wanted():
                return

    def _positions(self, number: int, recorded: RecordedBatch) -> Sequence[tuple[int, int] | None]:
        """Returns position and index of each sample of a batch, without rows that were skipped."""
        order = order_of(self.loader)
        if order is None:
            return [None] * len(recorded.samples)
        if isinstance(self.loader, TrainData):
            start, stop = self.loader.batch_positions
        else:
            start = number * self.batch_size
            stop = min(start + self.batch_size, order.size)
        begin, end = self.view.share(start, stop)
        indices = order.indices(begin, end).tolist()
        skipped = {each.row for each in self.failures.failures}
        rows = whole_rows(self.loader.dataset, indices)
        located = zip(range(begin, end), indices, rows, strict=True)
        return [(position, index) for position, index, row in located if row not in skipped]


def order_of(loader: Loader) -> Any:
    """Returns the order of the samples; None for a stream, which has no index."""
    return loader.order if isinstance(loader, (TrainData, EvalData)) else None


def whole_rows(dataset: Any, indices: list[int]) -> list[int]:
    """Returns the rows of the whole dataset for indices into a part of `data.split`."""
    while hasattr(type(dataset), "indices_in_whole"):
        dataset, indices = dataset.dataset, dataset.indices_in_whole(indices)
    return indices


# the first batch


def padding_of(batch: Any) -> tuple[float | None, str | None]:
    """Returns the fraction of padding, and the field that shows it; (None, None) if none does.

    Labels are used last, because ignored labels may be tokens; only those at the end of a row count.
    """
    tensors = _tensors(batch)
    mask, documents, labels = tensors.get("attention_mask"), tensors.get("document_ids"), _token_labels(tensors)
    if mask is not None and mask.ndim == 2:
        return _mean(mask == 0), "attention_mask"
    if documents is not None and documents.ndim == 2:
        return _mean(documents < 0), "document_ids"
    if labels is None:
        return None, None
    num_used_after = (labels != IGNORED_LABEL).to(torch.int64).flip(-1).cumsum(-1).flip(-1)
    return _mean(num_used_after == 0), "labels"


def num_tokens(batch: Any) -> int | None:
    """Returns the number of tokens without padding; None for a batch without tokens."""
    tokens = next((each for name, each in _tensors(batch).items() if is_token_field(name)), None)
    return None if tokens is None else round(tokens.numel() * (1 - (padding_of(batch)[0] or 0.0)))


def fraction_in_loss(batch: Any) -> float | None:
    """Returns the fraction of labels that are not ignored; None without labels for each token."""
    labels = _token_labels(_tensors(batch))
    return None if labels is None else _mean(labels != IGNORED_LABEL)


def first_row(batch: Any, sample: Any, decode: Decode) -> tuple[Values, ...]:
    """Describes the tokens of the first row of a collator's batch; empty if the sample has tokens itself."""
    tensors = _tensors(batch)
    rows = {name: tensors[name][0] for name in ("input_ids", "labels") if name in tensors and tensors[name].ndim == 2}
    if "input_ids" not in rows or "input_ids" in dict(fields_of(sample)):
        return ()
    mask = tensors.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        rows = {name: row[mask[0] != 0] for name, row in rows.items() if row.shape == mask[0].shape}
    return describe_sample(rows, decode)


def _token_labels(tensors: dict[str, Tensor]) -> Tensor | None:
    """Returns labels of tokens, not of samples."""
    labels = [each for name, each in tensors.items() if is_label_field(name)]
    return next((each for each in labels if each.ndim == 2 and not each.is_floating_point()), None)


def _tensors(batch: Any) -> dict[str, Tensor]:
    found = {name: tensor_of(value) for name, value in fields_of(batch)}
    return {name: tensor for name, tensor in found.items() if tensor is not None and tensor.numel()}


def _mean(mask: Tensor) -> float:
    return float(mask.to(torch.float64).mean())


# mixtures


def describe_mixture(dataset: Any, order: Any, num_samples: int | None) -> Mixture | None:
    """Describes the mixture that a set is or reads from; None if there is none.

    `order` is that of the set, which counts the sources only if the mixture is outermost; `num_samples` is the number
    that the run uses.
    """
    mix, is_outermost = dataset, True
    while mix is not None and not isinstance(getattr(mix, "sources", None), Mapping):
        inner = getattr(mix, "dataset", None)
        mix, is_outermost = inner if inner is not None else inner_datasets(mix).get("source"), False
    if mix is None:
        return None
    weights = getattr(mix, "weights", None) or {}
    sizes = {name: _source_size(each) for name, each in mix.sources.items()}
    counted = order.counts(NUM_POSITIONS) if is_outermost and hasattr(order, "counts") else None
    used = order.counts(num_samples) if counted is not None and num_samples else {}
    expected = dict(weights) or {name: float(size) for name, size in sizes.items() if size is not None}
    total = sum(expected.values()) if len(expected) == len(sizes) else 0.0
    rows = []
    for name, size in sizes.items():
        share = expected[name] / total if total else None
        share = share if counted is None else counted[name] / NUM_POSITIONS
        epochs = used[name] / size if used and size else None
        rows.append(MixedSource(name, size, weights.get(name), share, epochs))
    return Mixture(tuple(rows), None if counted is None else NUM_POSITIONS)


def _source_size(source: Any) -> int | None:
    rows = getattr(source, "dataset", source)  # a mixture with a stream in it reads all sources as streams
    return None if is_stream(rows) else len(rows)


def source_row(dataset: Any, index: int) -> tuple[str | None, int]:
    """Returns the source of a sample of a mixture and its row there; (None, index) for other datasets."""
    if not (hasattr(dataset, "source_of") and hasattr(dataset, "sizes")):
        return None, index
    [name] = dataset.source_of([index])
    before = takewhile(lambda each: each != name, dataset.sizes)
    return name, index - sum(dataset.sizes[each] for each in before)


# remarks


class TokenRange:
    """The smallest and the largest token id, and their locations."""

    def __init__(self) -> None:
        self.lowest: tuple[int, str] | None = None
        self.highest: tuple[int, str] | None = None

    def add(self, sample: Any, where: str) -> None:
        """Adds the tokens of a sample or a batch."""
        for name, value in fields_of(sample):
            tensor = tensor_of(value) if is_token_field(name) else None
            if tensor is None or not tensor.numel() or tensor.is_floating_point():
                continue
            low, high = int(tensor.min()), int(tensor.max())
            if self.lowest is None or low < self.lowest[0]:
                self.lowest = (low, where)
            if self.highest is None or high > self.highest[0]:
                self.highest = (high, where)


def remarks_on_tokens(config: RunConfig, tokens: TokenRange, tokenizer: Any) -> Iterable[str]:
    """Yields the mismatches with the vocabulary of the model."""
    vocab_size = None if config.model is None else config.model.arguments.get("vocab_size")
    if not isinstance(vocab_size, int):
        return
    if tokens.lowest is not None and tokens.lowest[0] < 0:
        yield f"{tokens.lowest[1]} has the token {tokens.lowest[0]}: tokens count from 0. Check the tokenizer."
    if tokens.highest is not None and tokens.highest[0] >= vocab_size:
        yield (
            f"{tokens.highest[1]} has the token {tokens.highest[0]:,}, but model.vocab_size is {vocab_size:,}. "
            f"Set it to more than {tokens.highest[0]:,}, or use the tokenizer of the model."
        )
        return
    size = getattr(tokenizer, "vocab_size", None)
    if size is None and hasattr(tokenizer, "get_vocab_size"):
        size = tokenizer.get_vocab_size()
    if isinstance(size, int) and size > vocab_size:
        yield (
            f"The tokenizer has {size:,} tokens, but model.vocab_size is {vocab_size:,}; the tokens read so far fit. "
            f"Set it to {size:,}."
        )


def remarks_on_batch(batch: Batch, sample: Any, collated: Any) -> Iterable[str]:
    """Yields fields that are lost, padding, and values that are not finite."""
    if isinstance(sample, Mapping) and isinstance(collated, Mapping):
        is_tokenized = "input_ids" in collated and "input_ids" not in sample  # then texts are not lost
        columns = (each for each in collated.values() if isinstance(each, list))
        whole = {name for each in columns if each and isinstance(each[0], Mapping) for name in each[0]}
        missing = [str(name) for name in sample if name not in collated and name not in whole]
        missing = [name for name in missing if not (is_tokenized and isinstance(sample[name], str))]
        if missing:
            names = " and ".join([*([", ".join(missing[:-1])] if missing[1:] else []), missing[-1]])
            yield f"The collator drops or renames {names}: the batch has no such field."
    if batch.padding is not None and batch.padding > MAX_PADDING:
        yield (
            f"{100 * batch.padding:.0f} % of the batch is padding (by {batch.padding_by}), which is computed and "
            "thrown away. Pack the samples into rows (type: pack), or set data.group_by_length, so that the samples of "
            "a batch have similar lengths."
        )
    for each in batch.fields:
        if not all(value is None or math.isfinite(value) for value in (each.minimum, each.maximum)):
            yield f"{each.name} has values that are not finite (from {each.minimum} to {each.maximum})."


def remarks_on_samples(samples: Sequence[Sample]) -> Iterable[str]:
    """Yields samples whose labels are all ignored."""
    for sample in samples:
        for each in sample.fields:
            if is_label_field(each.name) and each.shape and each.num_ignored == math.prod(each.shape):
                yield f"Position {sample.position}: every label is -100, so the sample does not count in the loss."


def remarks_on_failures(failures: Sequence[RowFailure]) -> Iterable[str]:
    """Yields the rows that could not be read."""
    yield from (f"Left out: {failure.describe()}." for failure in failures[:_MAX_ROWS])
    if len(failures) > _MAX_ROWS:
        yield f"Left out: {len(failures) - _MAX_ROWS} further rows that cannot be read."


# the report


def describe_data(
    config: RunConfig, *, run: str = "", show: int = 3, samples: int = 1000, name: str | None = None
) -> DataReport:
    """Describes the training set, or the first set, in full and the others in short; with `name` only that set.

    `show` samples are described, and at most `samples` are read for their lengths.
    """
    sets, collator = build_sets(config)
    if name is not None and name not in sets:
        raise ConfigError(f'--set: there is no set "{name}" in this run. It has {", ".join(sets)}.')
    if not sets:
        return DataReport(run, (), makes_batches=True)
    chosen = sets[name] if name is not None else next(iter(sets.values()))
    found, failure = _SetInspection(config, chosen, collator, show=show, samples=samples).describe()
    reports = [found]
    for each in sets.values() if name is None else ():
        if each is not chosen:
            report, error = _describe_shortly(each)
            reports.append(report)
            failure = failure or error
    return DataReport(run, tuple(reports), failure, makes_batches=TRAIN not in sets)


def _describe_shortly(one: RunSet) -> tuple[DataSet, Exception | None]:
    tree = tree_of(one.dataset, one.component)
    try:
        size = one.num_samples
        tokens = _declared_tokens(one.dataset, size)
        return DataSet(one.name, one.label, tree, size, _split_of(one.dataset), _fill_of(one.dataset), tokens), None
    except Exception as error:
        return DataSet(one.name, one.label, tree, None, error=f"{type(error).__name__}: {error}"), error


class _SetInspection:
    """Reads one set and describes it in full."""

    def __init__(self, config: RunConfig, one: RunSet, collator: Collator, *, show: int, samples: int) -> None:
        self._config, self._set, self._collator = config, one, collator
        self._dataset, self._size = one.dataset, one.num_samples
        self._show, self._limit = (each if self._size is None else min(each, self._size) for each in (show, samples))
        self._view = View(0, known_data_ranks(config))
        self._is_train = one.name == TRAIN
        if self._is_train:
            self._plan = resolve_batch(config, self._view.size)
        else:  # an evaluation needs no batch arithmetic
            micro = micro_batch_alone(config)
            self._plan = BatchPlan(micro, micro, 1)
        self._decode = decoder_of(one.dataset, collator)
        self._shown: list[Sample] = []
        self._lengths: list[int] = []
        self._unit: str | None = None
        self._example: Any = None
        self._tokens = TokenRange()

    def describe(self) -> tuple[DataSet, Exception | None]:
        """Reads the required samples, and returns the description and the error of the collator."""
        one, dataset, size = self._set, self._dataset, self._size
        reader = SetReader(self._config, one, self._collator, self._plan, self._view)
        plan = self._data_use(reader.loader)
        declared = _declared_tokens(dataset, size)
        self._read(reader, counts_lengths=declared is None)
        recorded, error = reader.first, reader.first.error
        batch = self._describe_batch(recorded) if recorded.samples and error is None else None
        lengths = self._describe_lengths()
        described = DataSet(
            name=one.name,
            label=one.label,
            nest=tree_of(dataset, one.component),
            num_samples=size,
            split=_split_of(dataset),
            fill=_fill_of(dataset),
            tokens=declared or self._estimate_tokens(lengths, recorded),
            plan=plan,
            samples=tuple(self._shown),
            batch=batch,
            lengths=lengths,
            mixture=describe_mixture(dataset, order_of(reader.loader), None if plan is None else plan.samples),
            remarks=tuple(self._remarks(reader, batch)),
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        return described, error

    def _data_use(self, loader: Loader) -> DataUse | None:
        if not isinstance(loader, (TrainData, StreamData)):
            return None
        try:
            steps, most = limits(self._config, loader)
        except ConfigError:  # a run without a limit, which training rejects
            return None
        finally:
            if isinstance(loader, StreamData):
                loader.num_passes = 1
        samples = steps * loader.global_batch_size
        if not isinstance(loader, TrainData):
            return DataUse(steps, samples if most is None else min(samples, most), None)
        if most is not None and (samples > most or loader.count_batches(most) <= steps):
            samples = most  # batches may be short
        return DataUse(steps, samples, float(loader.epochs_at(samples)))

    def _read(self, reader: SetReader, *, counts_lengths: bool) -> None:
        """Reads the samples that are shown and those whose lengths are counted."""

        def wanted() -> int:
            return max(self._show, self._limit if counts_lengths and self._unit is not None else 1)

        for number, (position, index, sample) in enumerate(reader.samples(wanted)):
            if number == 0:
                self._example, self._unit = sample, unit_of(sample)
            if number < self._show:
                row = None if index is None else whole_rows(self._dataset, [index])[0]
                source, row = (None, None) if row is None else source_row(self._dataset, row)
                self._shown.append(Sample(position, row, source, describe_sample(sample, self._decode)))
            if number < self._limit:
                length = None if self._unit is None else length_of(sample, self._unit)
                self._lengths += [] if length is None else [length]
                self._tokens.add(sample, f"The sample at position {position:,}")

    def _describe_batch(self, recorded: RecordedBatch) -> Batch:
        batch, samples = recorded.batch, recorded.samples
        self._tokens.add(batch, "The first batch")
        padding, padding_by = padding_of(batch)
        return Batch(
            samples=len(samples),
            rank=self._view.rank,
            num_ranks=self._view.size,
            micro_batch_size=self._plan.micro_batch_size if self._is_train else None,
            fields=describe_fields(batch),
            padding=padding,
            padding_by=padding_by,
            in_loss=fraction_in_loss(batch),
            first_row=first_row(batch, samples[0], self._decode),
        )

    def _describe_lengths(self) -> Lengths | None:
        known = _known_lengths(self._dataset, self._size)
        if known is not None:
            return summarize_lengths(known, "tokens", is_whole=True)
        equal = _equal_length(self._dataset)
        if equal is not None:
            return Lengths("tokens", self._size, True, equal, equal, equal, equal, ())
        if self._unit is None or not self._lengths:
            return None
        return summarize_lengths(self._lengths, self._unit, is_whole=len(self._lengths) == self._size)

    def _estimate_tokens(self, lengths: Lengths | None, recorded: RecordedBatch) -> TokenCounts | None:
        is_whole = False
        if lengths is not None and lengths.unit.startswith("tokens"):
            mean, is_whole = float(np.mean(self._lengths)), lengths.is_whole
        else:
            in_batch = num_tokens(recorded.batch)
            if in_batch is None:
                return None
            mean = in_batch / len(recorded.samples)
        return TokenCounts(None if self._size is None else round(mean * self._size), mean, is_estimate=not is_whole)

    def _remarks(self, reader: SetReader, batch: Batch | None) -> Iterator[str]:
        tokenizer = tokenizer_of(self._dataset) or tokenizer_of(self._collator)
        yield from remarks_on_tokens(self._config, self._tokens, tokenizer)
        if batch is not None:
            yield from remarks_on_batch(batch, self._example, reader.first.batch)
        yield from remarks_on_samples(self._shown)
        yield from remarks_on_failures(reader.failures.failures)


def _split_of(dataset: Any) -> Split | None:
    return Split(len(dataset), len(dataset.dataset)) if hasattr(type(dataset), "indices_in_whole") else None


def _fill_of(dataset: Any) -> float | None:
    fill = getattr(dataset, "fill", None)
    return float(fill) if isinstance(fill, (int, float)) else None


def _declared_tokens(dataset: Any, size: int | None) -> TokenCounts | None:
    """Returns the number of tokens that a dataset declares."""
    per_sample = _equal_length(dataset)
    if per_sample is not None:
        return TokenCounts(None if size is None else per_sample * size, float(per_sample), is_estimate=False)
    known = _known_lengths(dataset, size)
    total = 0 if known is None else int(np.sum(known))
    return None if known is None else TokenCounts(total, total / len(known), is_estimate=False)


def _equal_length(dataset: Any) -> int | None:
    """Returns the number of tokens of each sample if a dataset declares it."""
    per_sample = getattr(dataset, "tokens_per_sample", None)
    return per_sample if isinstance(per_sample, int) else None


def _known_lengths(dataset: Any, size: int | None) -> Any:
    """Returns the number of tokens of every sample if a dataset has them; for a split, not those of the whole
    dataset."""
    known = getattr(dataset, "lengths", None)
    if known is None or callable(known) or not size or len(known) != size:
        return None
    lengths = np.asarray(known)
    return lengths if lengths.dtype.kind in "iu" and lengths.ndim == 1 else None
