"""What a look at the data of a run found, as plain frozen values; page.py shows them, `--json` prints them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


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
class Tokens:
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
class Plan:
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
    tokens: Tokens | None = None
    plan: Plan | None = None
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
