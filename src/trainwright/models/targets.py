"""How many labels the mean loss of a model is over: the weight that makes an update exact for every split of a batch.

A model says so with `count_targets(labels)`, as the shipped ones do. For the classes of transformers it is read from
their source: a loss that is not certainly a mean over the labels other than -100 has no count.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn

from trainwright.backends.private_torch import constant_in_compiled_code
from trainwright.events.mean import IGNORED_LABEL

Counted = Literal["all", "next", "classes"]
"""The labels that a mean is over: all of them, all but the first of each row, or all if they are classes."""

_LOSS_FUNCTIONS: Mapping[str, Counted] = {
    "ForCausalLMLoss": "next",
    "ForMaskedLMLoss": "all",
    "ForTokenClassification": "all",
    "ForSequenceClassificationLoss": "classes",
}
"""The functions in transformers' loss_utils.py that are means over labels other than -100."""


def count_targets(model: nn.Module, batch: Any) -> Tensor | None:
    """Returns the number of labels of a batch that the model's loss is the mean of; None if that is not known."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    kind = type(model)
    count: Callable[..., Tensor | None] | None = getattr(kind, "count_targets", None)
    if count is not None:
        return count(model, labels)
    if not _is_from_transformers(kind) or "shift_labels" in batch or "num_items_in_batch" in batch:
        return None
    counted = _counted_labels(model)
    if counted == "next":
        labels = labels[..., 1:]
    return None if counted is None else (labels != IGNORED_LABEL).sum()


@constant_in_compiled_code
def _is_from_transformers(kind: type[nn.Module]) -> bool:
    """Returns True for a class of transformers, and for a subclass with the same forward."""
    return kind.forward.__module__.startswith("transformers.")


@constant_in_compiled_code
def _counted_labels(model: Any) -> Counted | None:
    counted = _LOSS_FUNCTIONS.get(getattr(model.loss_function, "__name__", ""))
    inline = _loss_in_source(type(model).forward)
    if inline != "loss_function":
        counted = inline
    if counted == "classes":
        # One output is a number to predict, and several classes at a time are floats: other losses.
        settings = model.config
        is_class = settings.num_labels > 1 and settings.problem_type in (None, "single_label_classification")
        return "all" if is_class else None
    return counted


@cache
def _loss_in_source(forward: Callable[..., Any]) -> Literal["loss_function", "all", "classes"] | None:
    """Returns how a forward of transformers computes its loss from `labels`; None if that is not certain."""
    source = inspect.getsource(inspect.unwrap(forward))
    # The labels are those of the batch, except for their device.
    if re.search(r"^\s*labels = (?!labels\.to\()", source, re.MULTILINE):
        return None
    calls = re.findall(r"self\.loss_function\(\s*([^)]*)\)", source)
    if len(calls) == 1 and "loss_fct" not in source:
        arguments = re.split(r",\s*", calls[0])
        passes_labels = "labels" in arguments[:2] or "labels=labels" in arguments
        return "loss_function" if passes_labels and "shift_labels" not in calls[0] else None
    if calls:
        return None
    kinds = set(re.findall(r"loss_fct = (?:nn\.)?(\w+Loss\(.*\))", source))
    scores = re.findall(r"loss_fct\(\w+\.view\(-1, (?:[\w.]+|\w+\.size\(-1\))\), labels\.view\(-1\)\)", source)
    if len(scores) != 1 or not kinds & {"CrossEntropyLoss()", "CrossEntropyLoss(ignore_index=-100)"}:
        return None
    if len(kinds) == 1 and source.count("loss_fct(") == 1:
        return "all"
    return "classes" if kinds == {"CrossEntropyLoss()", "MSELoss()", "BCEWithLogitsLoss()"} else None
