"""Passes over evaluation sets: each sample counts once, whatever the number of ranks.

Sums stay on the device until the pass is over, so memory does not grow with the set. What is summed
comes from the trainer's `eval_step`; when an evaluation is due is trainer.py's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainwright.data.loader import EvalData
from trainwright.data.order import mix_seed
from trainwright.errors import TrainwrightError
from trainwright.events import EventStorage, Mean
from trainwright.events.windows import merge, summarise
from trainwright.loop.metrics import ConfiguredMetric
from trainwright.loop.outputs import ForwardResult
from trainwright.loop.task import Task, overrides
from trainwright.parallel.collectives import Ranks

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

_EVAL_STREAM = 0xE7A1  # keeps an evaluation's randomness apart from that of steps


class EvalLogs(dict[str, Any]):
    """What `eval_step` returns by default: the loss and metrics, with the forward's outputs beside them."""

    outputs: Mapping[str, Any] | None = None


def read_eval(result: ForwardResult) -> EvalLogs:
    """Turns a forward's result into the logs of an evaluation step."""
    logs = EvalLogs(loss=result.loss, **result.metrics)
    logs.outputs = result.outputs
    return logs


class Averages:
    """Sums of one set's values over its batches: name → total and count, on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Mean] = {}

    def add(self, name: str, value: Any, num_samples: int) -> None:
        """Adds a batch's value: a Mean, a scalar that weighs its samples, or one number a sample.

        Anything else (a matrix of outputs, a text) has no mean and is left out.
        """
        mean = _as_mean(value, num_samples)
        if mean is not None:
            self._sums[name] = self._sums[name] + mean if name in self._sums else mean

    def over_ranks(self, ranks: Ranks) -> dict[str, float]:
        """Returns the means over all ranks as numbers; ranks may hold different names."""
        own = {name: (float(mean.total), float(mean.count)) for name, mean in self._sums.items()}
        totals: dict[str, tuple[float, float]] = {}
        for sums in ranks.gather(own):
            for name, (total, count) in sums.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + total, before[1] + count)
        return {name: total / count if count else float("nan") for name, (total, count) in totals.items()}


def _as_mean(value: Any, num_samples: int) -> Mean | None:
    if isinstance(value, Mean):
        return Mean(_double(value.total), _double(value.count))
    if isinstance(value, Real):  # numpy's scalars too
        return Mean(float(value) * num_samples, float(num_samples))
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return Mean(_double(value).reshape(()) * num_samples, float(num_samples))
        if value.ndim == 1 and value.shape[0] == num_samples:
            return Mean(_double(value).sum(), float(num_samples))
    return None


def _is_per_sample(value: Any, num_samples: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == num_samples


def _double(value: Any) -> Any:
    return value.detach().double() if isinstance(value, torch.Tensor) else float(value)


def evaluate_sets(trainer: Trainer, sets: Mapping[str, EvalData]) -> dict[str, float]:
    """Evaluates several sets and returns their logs, each prefixed with its set's name.

    Training goes on as if it had not happened: modes of modules and generators are put back. Torch's
    generators need no care, for every step seeds them anew.
    """
    logs: dict[str, float] = {}
    training = [module for module in trainer.model.modules() if module.training]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        trainer.moments.call("before_eval")
        trainer.model.eval()
        for name, data in sets.items():
            trainer.backend.seed(mix_seed(trainer.config.seed, _EVAL_STREAM, trainer.ranks.rank))
            values = _evaluate_set(trainer, data)
            logs.update({f"{name}/{key}": value for key, value in values.items()})
    except Exception:
        # Hooks undo what they did for the evaluation (averaged weights are swapped back) before anything is saved.
        trainer.moments.call_all("after_eval", {})
        raise
    finally:
        trainer.eval_name = None
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module in training:
            module.training = True
    # All of them even if one raises: the step is saved then, and must not be saved with averaged weights.
    for error in trainer.moments.call_all("after_eval", logs):
        raise error
    return logs


@torch.no_grad()
def _evaluate_set(trainer: Trainer, data: EvalData) -> dict[str, float]:
    """Evaluates one set and returns its logs, unprefixed.

    What a model puts meanwhile goes into a storage of the set's own, and joins its logs: in the run's
    storage it would mix with the values of training steps.
    """
    trainer.eval_name = data.name
    with EventStorage() as puts:
        puts.step = trainer.step
        averages, state = _run_batches(trainer, data)
    put = summarise(merge(trainer.ranks.gather(puts.take_window())))
    computed = _compute(trainer.surroundings.metrics, trainer.ranks)
    trainer.eval_averages = {**put, **averages.over_ranks(trainer.ranks), **computed}
    return {name: _number(value) for name, value in trainer.eval_end(state).items()}


def _run_batches(trainer: Trainer, data: EvalData) -> tuple[Averages, Any]:
    """Runs every batch of a set; returns the sums and what the task aggregated."""
    metrics = trainer.surroundings.metrics
    averages = Averages()
    state: Any = None
    aggregates = overrides(trainer.task, "aggregate_logs", Task)
    for metric in metrics:
        metric.metric.reset()
    trainer.eval_begin()
    for batch, passthrough in _inputs(trainer, data):
        num_samples = data.samples_in_hand
        trainer.samples_in_hand = num_samples
        values = trainer.eval_step(batch)
        if not isinstance(values, Mapping):
            raise TrainwrightError(
                f"eval_step must return a mapping of metrics; it returned a {type(values).__name__}."
            )
        if num_samples:
            for name, value in {**values, **passthrough}.items():
                # What a task aggregates itself has no mean that anybody asked for: a class id, a score for a ranking.
                if not (aggregates and _is_per_sample(value, num_samples)):
                    averages.add(name, value, num_samples)
            outputs = getattr(values, "outputs", None) or values
            for metric in metrics:
                metric.update(outputs, batch)
        if aggregates:
            gathered = _gather_outputs({**values, **passthrough}, num_samples, trainer.ranks)
            state = trainer.task.aggregate_logs(state, gathered)
    return averages, state


def _inputs(trainer: Trainer, data: EvalData) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    iterator = data.batches(trainer.backend.to_device)
    while True:
        try:
            inputs = trainer.next_eval_inputs(iterator)
        except StopIteration:
            return
        yield inputs


def _gather_outputs(values: Mapping[str, Any], num_samples: int, ranks: Ranks) -> dict[str, Any]:
    """Brings one batch's values of all ranks to every host: per-sample ones in sample order, scalars averaged."""
    own = {name: _to_host(value) for name, value in values.items()} if num_samples else {}
    shares = [(count, share) for count, share in ranks.gather((num_samples, own)) if count]
    gathered: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, share in shares for name in share):
        parts = [(count, share[name]) for count, share in shares if name in share]
        if all(_is_per_sample(part, count) for count, part in parts):
            gathered[name] = torch.cat([part for _, part in parts])
        elif all(isinstance(part, list) and len(part) == count for count, part in parts):
            gathered[name] = [item for _, part in parts for item in part]
        elif all(_as_mean(part, count) is not None for count, part in parts):
            means = [mean for count, part in parts if (mean := _as_mean(part, count)) is not None]
            gathered[name] = float(sum(means[1:], means[0]).value)
        else:
            gathered[name] = parts[0][1]
    return gathered


def _to_host(value: Any) -> Any:
    if isinstance(value, Mean):
        return Mean(float(value.total), float(value.count))
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _compute(metrics: Sequence[ConfiguredMetric], ranks: Ranks) -> dict[str, float]:
    results: dict[str, float] = {}
    means = Averages()
    for metric in metrics:
        computed = metric.metric.compute()
        parts = {metric.name: computed}
        if isinstance(computed, Mapping):
            parts = {f"{metric.name}/{name}": part for name, part in computed.items()}
        for name, value in parts.items():
            if isinstance(value, Mean):
                means.add(name, value, 1)
            else:
                results[name] = float(value)
    # Not called where no metric needs it, the same on every rank.
    return results | means.over_ranks(ranks) if metrics else results


def _number(value: Any) -> float:
    return float(value.value if isinstance(value, Mean) else value)
