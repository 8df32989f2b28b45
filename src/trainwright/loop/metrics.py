"""Metrics that are not a mean of the step's values: those of torchmetrics, or any object with the same methods.

A metric has `update(outputs, labels)`, `compute()` and `reset()`. A `Mean` that `compute` returns is summed over ranks.
The state of torchmetrics' metrics is gathered and merged on the host, so that ranks may have seen different numbers of
samples, or none. Any other value describes the samples of one rank only, so with several data ranks it is rejected.
named_metrics.py has the metrics of torchmetrics that a config names.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from trainwright.config.problems import nearest, suggest
from trainwright.errors import ConfigError
from trainwright.events import Mean
from trainwright.user_code.locations import location_of

logger = logging.getLogger(__name__)


def shift_labels(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs [n, length, …] with the labels [n, length] of the next positions, which they predict."""
    return outputs[:, :-1], labels[:, 1:]


def align_classes(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs [m, classes] and labels [m], of outputs [..., classes] or [n, classes, ...] and labels [...].

    Class indices of the labels' shape become [m].
    """
    if outputs.shape == labels.shape:
        return outputs.reshape(-1), labels.reshape(-1)
    if outputs.shape[:-1] == labels.shape:
        return outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1)
    if outputs.ndim == labels.ndim + 1 and (outputs.shape[0], *outputs.shape[2:]) == labels.shape:
        return outputs.movedim(1, -1).reshape(-1, outputs.shape[1]), labels.reshape(-1)
    raise ConfigError(
        f"the outputs have the shape {tuple(outputs.shape)} and the labels {tuple(labels.shape)}. Give outputs "
        "[..., classes] or [n, classes, ...] for labels [...]."
    )


class Accuracy:
    """The fraction of samples whose largest output is their label; labels of `ignore_index` do not count.

    Takes outputs of shape [..., classes] and labels of shape [...]. `shift` is true for a causal language model, whose
    outputs predict the next label.
    """

    higher_is_better: ClassVar[bool] = True

    def __init__(self, ignore_index: int = -100, shift: bool = False) -> None:
        self.ignore_index = ignore_index
        self.shift = shift
        self.reset()

    def reset(self) -> None:
        """Forgets all samples."""
        self._right: torch.Tensor | float = 0.0
        self._count: torch.Tensor | float = 0.0

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds a batch; nothing leaves the device."""
        if self.shift:
            outputs, labels = shift_labels(outputs, labels)
        counted = labels != self.ignore_index
        self._right = self._right + (self.are_right(outputs, labels) & counted).sum()
        self._count = self._count + counted.sum()

    def are_right(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns which labels are predicted, as booleans of the labels' shape."""
        return outputs.argmax(-1) == labels

    def compute(self) -> Mean:
        """Returns the accuracy as a Mean."""
        return Mean(self._right, self._count)


class TopKAccuracy(Accuracy):
    """The fraction of samples whose label is among their `k` largest outputs; otherwise as `accuracy`."""

    def __init__(self, k: int = 5, ignore_index: int = -100, shift: bool = False) -> None:
        if k < 1:
            raise ConfigError(f"k: must be at least 1, got {k}.")
        super().__init__(ignore_index, shift)
        self.k = k

    def are_right(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns which labels are among the k largest outputs."""
        return (outputs.topk(self.k, dim=-1).indices == labels.unsqueeze(-1)).any(-1)

    def check_inputs(self, outputs: Any, labels: Any) -> None:
        """Raises if there are fewer classes than `k`."""
        if isinstance(outputs, torch.Tensor) and outputs.ndim and outputs.shape[-1] < self.k:
            raise ConfigError(f"k: is {self.k}, but the outputs have {outputs.shape[-1]} classes.")


def reject_no_metric(metric: Any, label: str, where: object | None) -> None:
    """Rejects an object that an evaluation could not use as a metric, before the training starts."""
    missing = [verb for verb in ("update", "compute", "reset") if not callable(getattr(metric, verb, None))]
    if missing:
        raise ConfigError(
            f"{label}: {type(metric).__name__} is no metric: it has no {' and no '.join(missing)}. A metric has "
            "update(outputs, labels), compute() and reset().",
            where=where,
        )


def reject_rank_value(metric: ConfiguredMetric, value: Any, num_data_ranks: int) -> None:
    """Raises if `value`, the result of a metric, covers only one rank's samples and cannot be merged."""
    if num_data_ranks == 1 or isinstance(value, Mean) or has_mergeable_state(metric.metric):
        return
    raise ConfigError(
        f"evaluation.metrics.{metric.name}: {type(metric.metric).__name__}.compute returned a {type(value).__name__} "
        f"computed from the samples of one of {num_data_ranks} ranks, and such values cannot be merged. Return "
        "Mean(total, count), use torchmetrics, or compute it in Task.aggregate_logs, which receives all samples.",
        where=metric.where or location_of(type(metric.metric).compute),
    )


def reject_rank_metric(metric: ConfiguredMetric, num_data_ranks: int) -> None:
    """Raises before training if a metric's value before any sample shows that ranks cannot be merged."""
    if num_data_ranks == 1 or has_mergeable_state(metric.metric):
        return
    try:
        metric.metric.reset()
        computed = metric.metric.compute()
    except Exception:  # many metrics need a sample, so the first evaluation checks them
        return
    for value in computed.values() if isinstance(computed, Mapping) else [computed]:
        reject_rank_value(metric, value, num_data_ranks)


# The state of torchmetrics' metrics. Their own synchronization waits forever if ranks have lists of different lengths
# (ROUGE) or if one has seen no sample; `_reductions` is private, and tests/loop/test_named_metrics.py covers it.


def _objects_of(metric: Any) -> Iterator[tuple[str, Any]]:
    """Yields each Metric of torchmetrics in an object, with its module path: wrappers and collections have several."""
    found = sys.modules.get("torchmetrics")
    inner = getattr(metric, "metric", None) if not isinstance(metric, torch.nn.Module) else metric
    if found is not None and isinstance(inner, torch.nn.Module):
        for name, module in inner.named_modules():
            if isinstance(module, found.Metric):
                yield name, module


def has_mergeable_state(metric: Any) -> bool:
    """Returns True for metrics of torchmetrics, also for a named one that has not seen a batch."""
    return callable(getattr(metric, "create", None)) or any(True for _ in _objects_of(metric))


def never_distributed(metric: Any) -> Any:
    """Turns off the communication of torchmetrics' objects: `merge_states` replaces it."""
    for _, each in _objects_of(metric):
        each.distributed_available_fn = _is_not_distributed
    return metric


def _is_not_distributed() -> bool:
    return False


def states_of(metric: Any) -> dict[str, dict[str, Any]]:
    """Returns the state of a metric that has seen a batch, in host memory."""
    return {
        name: {attribute: _moved(value, torch.device("cpu")) for attribute, value in each.metric_state.items()}
        for name, each in _objects_of(metric)
    }


def merge_states(metric: Any, states: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Gives a metric the state of several ranks, as if it had seen the samples of all of them."""
    for name, each in _objects_of(metric):
        for attribute, reduction in each._reductions.items():
            values = [state[name][attribute] for state in states]
            setattr(each, attribute, _moved(_merged(values, reduction), each.device))


def _merged(values: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    if len(values) == 1 or not isinstance(values[0], torch.Tensor | list):
        return values[0]
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    if getattr(reduction, "__name__", "") == "dim_zero_cat":
        return torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts])
    stacked = torch.stack(parts)
    return stacked if reduction is None else reduction(stacked)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class MetricNames:
    """The names that evaluations return, as far as they are known before the first one."""

    sets: tuple[str, ...]
    metrics: tuple[str, ...]
    """The names of a set's values, without the set."""
    are_all: bool
    """False if user code (eval_step, eval_end, a forward, …) may add further names."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """max or min, for metrics for which it is known whether higher or lower values are better."""
    benchmarks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The values of each benchmark, with max or min."""

    def check(self, metric: str, *, label: str, mode: str | None = None, where: object | None = None) -> None:
        """Raises for a name such as valid/loss that no evaluation returns; `label` is the setting that refers to it.

        If user code may add names, a name that resembles a known one is only a warning. Also raises if `mode` (min or
        max) is known to be wrong for the metric.
        """
        name, slash, value = metric.partition("/")
        if name in self.benchmarks and slash:
            self._check_benchmark(metric, label=label, mode=mode, where=where)
            return
        example = f"{self.sets[0] if self.sets else 'valid'}/loss"
        if not slash or not value:
            advice = suggest(metric, self.sets) if self.sets else ""
            raise ConfigError(
                f"{label}: {metric!r} must be a set and its metric, such as {example}. {advice}".rstrip(), where=where
            )
        if name not in self.sets:
            problem = f"there is no evaluation set {name!r}. {suggest(name, (*self.sets, *self.benchmarks))}"
            raise ConfigError(f"{label}: {problem} Use a set and its metric, such as {example}.", where=where)
        found = next((each for each in self.metrics if value == each or value.startswith(f"{each}/")), None)
        if found is not None and mode is not None and self.modes.get(found, mode) != mode:
            raise _wrong_mode(metric, label=label, mode=mode, where=where)
        if found is not None:
            return
        if self.are_all:
            known = [f"{name}/{each}" for each in self.metrics]
            problem = f"no evaluation returns {metric!r}. {suggest(metric, known, cutoff=_MISSPELLING)}"
            raise ConfigError(f"{label}: {problem}", where=where)
        near = nearest(value, self.metrics, cutoff=_MISSPELLING)
        if near is not None:
            logger.warning(
                '%s%s: %r is not a configured metric. Did you mean "%s/%s"? The first evaluation tells.',
                f"{where}: " if where is not None else "",
                label,
                metric,
                name,
                near,
            )

    def _check_benchmark(self, metric: str, *, label: str, mode: str | None, where: object | None) -> None:
        """Raises for a value that a benchmark does not return, or for a wrong mode."""
        name, _, value = metric.partition("/")
        modes = self.benchmarks[name]
        if value not in modes:
            advice = suggest(metric, [f"{name}/{each}" for each in modes], cutoff=_MISSPELLING)
            raise ConfigError(f"{label}: the benchmark {name} returns no {value!r}. {advice}", where=where)
        if mode is not None and modes[value] != mode:
            raise _wrong_mode(metric, label=label, mode=mode, where=where)


def _wrong_mode(metric: str, *, label: str, mode: str, where: object | None) -> ConfigError:
    better, right = ("higher", "max") if mode == "min" else ("lower", "min")
    setting = label.rpartition(".")[0]
    return ConfigError(
        f"{setting}.mode: is {mode}, but {better} values of {metric} are better. Set {setting}.mode: {right}.",
        where=where,
    )


_MISSPELLING = 0.8


@dataclass(frozen=True)
class ConfiguredMetric:
    """A metric with the names of its inputs: `update(outputs[outputs_name], batch[labels_name])`."""

    name: str
    metric: Any
    outputs_name: str
    labels_name: str
    where: object | None = None

    def update(self, outputs: Mapping[str, Any] | None, batch: Any, logs: Mapping[str, Any] | None = None) -> None:
        """Updates the metric with one batch, or raises with the missing name and the known ones.

        Outputs may be in `logs`, the results of `eval_step` and `next_eval_inputs`; labels may be in the outputs or in
        `logs`.
        """
        inputs = self._inputs(outputs, batch, logs)
        try:
            self.metric.update(*inputs)
        except ConfigError as error:
            raise self._located(error) from error

    def require(self, outputs: Mapping[str, Any] | None, batch: Any) -> None:
        """Rejects a forward or a batch that gives this metric nothing to measure.

        An output that only evaluation computes, such as the logits with a fused loss, is None in a training step.
        """
        inputs = self._inputs(outputs, batch, None)
        check = getattr(self.metric, "check_inputs", None)
        if check is not None and inputs[0] is not None:
            try:
                check(*inputs)
            except ConfigError as error:
                raise self._located(error) from error

    def check_values(self) -> None:
        """Raises if the metric cannot be computed from the values of this rank."""
        check = getattr(self.metric, "check_values", None)
        if check is not None:
            try:
                check()
            except ConfigError as error:
                raise self._located(error) from error

    def _located(self, error: ConfigError) -> ConfigError:
        problem = f"evaluation.metrics.{self.name}: {error.problem}"
        return ConfigError(problem, where=error.where or self.where)

    def _inputs(self, outputs: Mapping[str, Any] | None, batch: Any, logs: Mapping[str, Any] | None) -> tuple[Any, Any]:
        """Returns the outputs and their labels."""
        values = {**(logs or {}), **(outputs or {})}
        if outputs is None or self._name_in(outputs) not in outputs:
            self.require_outputs(values or None)
            found = values[self._name_in(values)]
        else:
            found = outputs[self._name_in(outputs)]
        for source in (batch, values):
            if isinstance(source, Mapping) and self.labels_name in source:
                return found, source[self.labels_name]
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
                f"evaluation.metrics.{self.name}.outputs: forward returns no {self.outputs_name!r}; it returns {have}. "
                f"{advice} forward return a mapping with `loss` and the outputs, or override eval_step.",
                where=self.where,
            )

    def _name_in(self, outputs: Mapping[str, Any]) -> str:
        """Returns the name of the measured output; `logits` also stands for the only output, from which a criterion
        computes the loss.

        A plain tensor of scores has the name `output`.
        """
        if self.outputs_name == "logits" and len(outputs) == 1:
            [(name, value)] = outputs.items()
            if isinstance(value, torch.Tensor) and value.ndim:
                return name
        return self.outputs_name
