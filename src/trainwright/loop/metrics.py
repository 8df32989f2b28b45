"""Metrics that are more than a mean of the step's values: torchmetrics' or any object with the same verbs.

A metric has `update(outputs, labels)`, `compute()` and `reset()`. A `Mean` that `compute` returns is summed over ranks;
torchmetrics' metrics communicate between ranks themselves. Any other value describes the samples of one rank only, so
with several data ranks it is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainwright.errors import ConfigError
from trainwright.events import Mean
from trainwright.user_code.locations import location_of


class Accuracy:
    """The share of samples whose largest output is their label; labels of `ignore_index` do not count.

    Takes outputs of shape [..., classes] and labels of shape [...].
    """

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index
        self.reset()

    def reset(self) -> None:
        """Forgets all samples."""
        self._right: torch.Tensor | float = 0.0
        self._count: torch.Tensor | float = 0.0

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds a batch; nothing leaves the device."""
        counted = labels != self.ignore_index
        self._right = self._right + ((outputs.argmax(-1) == labels) & counted).sum()
        self._count = self._count + counted.sum()

    def compute(self) -> Mean:
        """Returns the accuracy as a Mean."""
        return Mean(self._right, self._count)


def reject_no_metric(metric: Any, label: str, where: object | None) -> None:
    """Rejects what an evaluation could not feed and read, before anything is trained."""
    missing = [verb for verb in ("update", "compute", "reset") if not callable(getattr(metric, verb, None))]
    if missing:
        raise ConfigError(
            f"{label}: {type(metric).__name__} is no metric: it has no {' and no '.join(missing)}. A metric has "
            "update(outputs, labels), compute() and reset().",
            where=where,
        )


def reject_rank_value(metric: ConfiguredMetric, value: Any, num_data_ranks: int) -> None:
    """Raises if `value`, which a metric computed, is that of one rank's samples and cannot be merged."""
    if num_data_ranks == 1 or isinstance(value, Mean) or isinstance(metric.metric, torch.nn.Module):
        return
    raise ConfigError(
        f"evaluation.metrics.{metric.name}: {type(metric.metric).__name__}.compute returned a {type(value).__name__} "
        f"computed from the samples of one of {num_data_ranks} ranks, and such values cannot be merged. Return "
        "Mean(total, count), use torchmetrics, or compute it in Task.aggregate_logs, which receives all samples.",
        where=metric.where or location_of(type(metric.metric).compute),
    )


def reject_rank_metric(metric: ConfiguredMetric, num_data_ranks: int) -> None:
    """Raises before training if a metric's value before any sample shows that ranks cannot be merged."""
    if num_data_ranks == 1 or isinstance(metric.metric, torch.nn.Module):
        return
    try:
        metric.metric.reset()
        computed = metric.metric.compute()
    except Exception:  # many metrics need a sample; the first evaluation checks them
        return
    for value in computed.values() if isinstance(computed, Mapping) else [computed]:
        reject_rank_value(metric, value, num_data_ranks)


@dataclass(frozen=True)
class ConfiguredMetric:
    """A metric with the names of what it is fed: `update(outputs[outputs_name], batch[labels_name])`."""

    name: str
    metric: Any
    outputs_name: str
    labels_name: str
    where: object | None = None

    def update(self, outputs: Mapping[str, Any] | None, batch: Any) -> None:
        """Feeds one batch, or says which name is missing and what there is."""
        self.require(outputs, batch)
        assert outputs is not None
        self.metric.update(outputs[self._name_in(outputs)], batch[self.labels_name])

    def require(self, outputs: Mapping[str, Any] | None, batch: Any) -> None:
        """Rejects a forward or a batch that gives this metric nothing to measure."""
        self.require_outputs(outputs)
        if not isinstance(batch, Mapping) or self.labels_name not in batch:
            have = ", ".join(batch) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise ConfigError(
                f"evaluation.metrics.{self.name}.labels: the batch has no {self.labels_name!r}; it has {have}.",
                where=self.where,
            )

    def require_outputs(self, outputs: Mapping[str, Any] | None) -> None:
        """Rejects a forward that gives this metric nothing to measure."""
        if outputs is None or self._name_in(outputs) not in outputs:
            have = ", ".join(outputs) if outputs else "no outputs, only a loss and metrics"
            named = [name for name in outputs or () if name != "loss"]
            advice = f"Name one of these (outputs: {named[0]}), or let" if named else "Let"
            raise ConfigError(
                f"evaluation.metrics.{self.name}.outputs: forward gives no {self.outputs_name!r}; it gives {have}. "
                f"{advice} forward return a mapping with `loss` and the outputs, or override eval_step.",
                where=self.where,
            )

    def _name_in(self, outputs: Mapping[str, Any]) -> str:
        """Returns the name of what is measured: for `logits` also the only output, of which a criterion makes the loss.

        A bare tensor of scores is called `output`.
        """
        if self.outputs_name == "logits" and len(outputs) == 1:
            [(name, value)] = outputs.items()
            if isinstance(value, torch.Tensor) and value.ndim:
                return name
        return self.outputs_name
