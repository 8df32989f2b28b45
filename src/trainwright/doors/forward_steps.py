"""One call of a user's forward_step: the iterator of one batch that it is given, and the reading of what it returns.

What is wrong with either is an error that names the function's file and line.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch

from trainwright.doors.timers import Timers
from trainwright.errors import TrainwrightError
from trainwright.events import Mean
from trainwright.loop.evaluation import EvalLogs
from trainwright.user_code import caller, name_of, place_of

ForwardStep = Callable[[Iterator[Any], torch.nn.Module, argparse.Namespace, Timers], Any]


class OneBatch(Iterator[Any]):
    """The data_iterator of one call: it has one micro-batch. The next one is for the next call."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.is_taken = False

    def __next__(self) -> Any:
        if self.is_taken:
            raise TrainwrightError(
                "A forward step takes one batch, but next(data_iterator) is called again. For larger batches raise "
                "--batch-size or --gradient-accumulation-steps.",
                where=caller(),
            )
        self.is_taken = True
        return self._batch


def run_step(
    function: ForwardStep,
    batch: Any,
    model: torch.nn.Module,
    args: argparse.Namespace,
    timers: Timers,
    *,
    num_samples: int,
    is_training: bool,
) -> Any:
    """Calls a forward step and returns (loss, metrics), or an object with a loss, as the loop reads it."""
    iterator = OneBatch(batch)
    returned = function(iterator, model, args, timers)
    if not iterator.is_taken:
        raise TrainwrightError(
            f"{name_of(function)} took no batch, which would count as trained on. Call next(data_iterator) once.",
            where=place_of(function),
        )
    if isinstance(returned, Mapping) or (hasattr(returned, "loss") and not isinstance(returned, torch.Tensor)):
        _refuse_without_loss(function, returned, batch, model)
        return returned
    loss, metrics = _read(function, returned)
    if is_training:
        loss = _spoiled(loss, metrics)
        metrics = _averaged(function, metrics, num_samples)
    return loss, metrics


def _read(function: ForwardStep, returned: Any) -> tuple[torch.Tensor | Mean, dict[str, Any]]:
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not _is_loss(loss) or not isinstance(metrics, Mapping):
        raise _no_loss(function, _describe(returned))
    return loss, {name: value for name, value in metrics.items() if name != "loss"}


def _refuse_without_loss(function: ForwardStep, returned: Any, batch: Any, model: torch.nn.Module) -> None:
    """Refuses outputs of which the loop can take no loss: neither theirs nor one that the model's criterion makes."""
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned.loss
    if _is_loss(loss):
        return
    has_labels = isinstance(batch, Mapping) and batch.get("labels") is not None
    if loss is None and has_labels and getattr(model, "criterion", None) is not None:
        return
    shown = ", ".join(map(str, returned)) if isinstance(returned, Mapping) else ""
    what = f"{_describe(returned)}{f' with {shown}' * bool(shown)}"
    raise _no_loss(function, f"{what}, but no loss" if loss is None else f"{what}, whose loss is {_describe(loss)}")


def _is_loss(loss: Any) -> bool:
    return isinstance(loss, Mean) or (isinstance(loss, torch.Tensor) and loss.numel() == 1)


def _no_loss(function: ForwardStep, what: str) -> TrainwrightError:
    return TrainwrightError(
        f"{name_of(function)} returned {what}. Return a loss, which is one number in a tensor, or "
        "(loss, {name: metric}).",
        where=place_of(function),
    )


def _averaged(function: ForwardStep, metrics: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    """Returns the metrics of a training step: of one a sample the mean, as in an evaluation.

    Several values a sample are for handle_metrics_function alone; what has another length is refused here already,
    and not first in an evaluation, hours later.
    """
    averaged: dict[str, Any] = {}
    for name, value in metrics.items():
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            averaged[name] = value
        elif not value.ndim or (num_samples and value.shape[0] != num_samples):
            raise _wrong_length(function, name, value, num_samples)
        elif value.numel() == num_samples:
            averaged[name] = Mean(value.detach().float().sum(), float(num_samples))
    return averaged


def _wrong_length(function: ForwardStep, name: str, value: Any, num_samples: int) -> TrainwrightError:
    return TrainwrightError(
        f"{name_of(function)}: the metric {name} is {_describe(value)}, and the batch has {num_samples} samples. "
        "Return one number, or a tensor with one row for each sample.",
        where=place_of(function),
    )


def _spoiled(loss: torch.Tensor | Mean, metrics: Mapping[str, Any]) -> torch.Tensor | Mean:
    """Returns the loss, as nan where a metric is not finite: the update is then skipped, on all ranks together.

    Computed on the device, so that nothing waits for it.
    """
    finite: torch.Tensor | bool = True
    for value in metrics.values():
        number = value.total if isinstance(value, Mean) else value
        if isinstance(number, torch.Tensor) and number.is_floating_point():
            finite = torch.isfinite(number.detach()).all() & finite
        elif isinstance(number, Real) and not math.isfinite(number):
            finite = False
    if finite is True:
        return loss
    total = loss.total if isinstance(loss, Mean) else loss
    if not isinstance(total, torch.Tensor):
        return loss
    spoiled = torch.where(torch.as_tensor(finite, device=total.device), total, math.nan)
    return Mean(spoiled, loss.count) if isinstance(loss, Mean) else spoiled


def per_sample(logs: Mapping[str, Any], num_samples: int, function: ForwardStep) -> EvalLogs:
    """Gives each metric one entry a sample: a number is repeated, and what has another length is refused.

    A Mean knows its own weight and is averaged beside them.
    """
    spread = EvalLogs()
    spread.outputs = getattr(logs, "outputs", None)
    for name, value in logs.items():
        if name == "loss" or isinstance(value, Mean):
            spread[name] = value
        elif isinstance(value, Real):
            spread[name] = torch.full((num_samples,), float(value))
        elif isinstance(value, torch.Tensor) and value.ndim == 0:
            spread[name] = value.expand(num_samples)
        elif isinstance(value, torch.Tensor | list) and len(value) == num_samples:
            spread[name] = value
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            spread[name] = value.reshape(()).expand(num_samples)
        else:
            raise _wrong_length(function, name, value, num_samples)
    return spread


def final_metrics(function: Callable[..., Any], final: Any) -> dict[str, Any]:
    """Reads what handle_metrics_function returned: one number a name."""
    if not isinstance(final, Mapping):
        problem = f"{name_of(function)} returned {_describe(final)}. Return the final metrics by name."
        raise TrainwrightError(problem, where=place_of(function))
    for name, value in final.items():
        is_number = isinstance(value, Real | Mean) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not isinstance(name, str) or not is_number:
            raise TrainwrightError(
                f"{name_of(function)}: the final metric {name!r} is {_describe(value)}. Return one number for each.",
                where=place_of(function),
            )
    return dict(final)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} values ({', '.join(type(item).__name__ for item in value)})"
    return "None" if value is None else f"a {type(value).__name__}"
