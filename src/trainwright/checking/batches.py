"""Looks at samples and at the batch that a collator makes of them, apart from any model.

A dataset's or a collator's own exceptions are shown at their lines; what is seen beside them: samples that
differ in fields or shapes, and lists where tensors should be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from numbers import Number
from typing import Any

import torch

from trainwright.checking import places
from trainwright.checking.explain import Case
from trainwright.data.fetch import count_samples, fetch
from trainwright.data.loader import EvalData, TrainData
from trainwright.data.stream import is_stream
from trainwright.data.stream_loader import EvalStream, StreamData
from trainwright.errors import DataError
from trainwright.loop.user_lines import Place


def check_batch(
    dataset: Any, collator: Callable[[list[Any]], Any], *, label: str, batch_size: int, is_cut: bool, case: Case
) -> bool:
    """Fetches and collates the first samples; returns whether that went well.

    `is_cut` says that a batch is cut into micro-batches, which a list cannot be.
    """
    if isinstance(dataset, (TrainData, EvalData, StreamData, EvalStream)):
        dataset = dataset.dataset
    source = _source_of(dataset)
    reads = "__iter__" if is_stream(source) else "__getitem__"
    at_sample = places.of_return(getattr(type(source), reads, type(source)), case.users)
    try:
        samples = _first_samples(dataset, batch_size, label)
    except Exception as error:
        case.note(error, label=label, place=at_sample)
        return False
    at_sample = at_sample or case.setting(label)
    try:
        batch = collator(samples)
    except Exception as error:
        difference = _first_difference(samples)
        if difference is None or places.of_traceback(error, case.users) is not None:
            case.note(error, label="data.collator", place=at_sample)
        if difference is not None:
            advice = "Make them equal, or write a collator that pads them (data.collator)."
            case.add("error", f"{label}: {difference}", advice, at_sample)
        return False
    return _check_lists(batch, collator, is_cut=is_cut, case=case)


def _first_samples(dataset: Any, number: int, label: str) -> list[Any]:
    if not is_stream(dataset):
        return fetch(dataset, list(range(min(number, count_samples(dataset, label)))))
    samples = list(islice(iter(dataset), number))
    if not samples:
        raise DataError(f"{label}: {type(dataset).__name__} is empty. Check the path or filter that makes it.")
    return samples


def _source_of(dataset: Any) -> Any:
    """The user's dataset below a split's part or a Subset."""
    while hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


def _first_difference(samples: list[Any]) -> str | None:
    """Says in which field two samples differ, or None where all have the same fields and shapes."""
    first = samples[0]
    for number, sample in enumerate(samples[1:], start=1):
        if isinstance(first, Mapping) and isinstance(sample, Mapping):
            if sample.keys() != first.keys():
                own, others = ", ".join(map(str, first)), ", ".join(map(str, sample))
                return f"the samples have unequal fields: sample 0 has {own}, sample {number} has {others}."
            pairs = [(f'field "{name}"', first[name], sample[name]) for name in first]
        elif isinstance(first, (tuple, list)) and isinstance(sample, (tuple, list)):
            if len(first) != len(sample):
                return f"the samples have unequal lengths: sample 0 has {len(first)}, sample {number} {len(sample)}."
            pairs = [(f"field {index}", *both) for index, both in enumerate(zip(first, sample, strict=True))]
        else:
            pairs = [("the value", first, sample)]
        for name, one, other in pairs:
            if _shape(one) != _shape(other):
                shapes = f"{_shape(one)} in sample 0 and {_shape(other)} in sample {number}"
                return f"the samples have unequal shapes: {name} is {shapes}."
    return None


def _shape(value: Any) -> str:
    if hasattr(value, "shape"):
        return str(tuple(value.shape))
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__


def _check_lists(batch: Any, collator: Callable[[list[Any]], Any], *, is_cut: bool, case: Case) -> bool:
    """Notes lists where tensors should be. Texts stay lists; a list of tensors may be meant, unless it must be cut."""
    if not isinstance(batch, Mapping):
        return True
    numbers = [name for name, value in batch.items() if isinstance(value, (list, tuple)) and _is_of_numbers(value)]
    tensors = [
        name
        for name, value in batch.items()
        if isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value)
    ]
    place = _place_of(collator, case)
    if numbers:
        problem = f"the collator returns lists of numbers instead of tensors for {_quoted(numbers)}."
        case.add("error", problem, f'Return torch.tensor(…): {{"{numbers[0]}": torch.tensor([…]), …}}.', place)
    if tensors:
        problem = (
            f"the collator returns lists of tensors for {_quoted(tensors)}, which are never cut into micro-batches."
        )
        advice = "Return one tensor, torch.stack([…]), or give the collator a `split(batch, n)`."
        is_handled = hasattr(collator, "split") or not is_cut
        case.add("remark" if is_handled else "error", problem, advice, place)
    return not numbers


def _is_of_numbers(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return bool(values) and all(_is_of_numbers(each) for each in values)
    return isinstance(values, Number)


def _place_of(collator: Callable[[list[Any]], Any], case: Case) -> Place | None:
    function: Any = collator if hasattr(collator, "__code__") else type(collator).__call__
    return places.of_return(function, case.users) or case.setting("data.collator", ["collator"])


def _quoted(names: list[Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)
