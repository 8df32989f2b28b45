"""What is trained, independent of how: model, data, forward and metrics as one object.

The default task calls the model with the batch. trainer.py defines how updates are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainwright.backends.private_torch import constant_in_compiled_code
from trainwright.errors import DataError
from trainwright.user_code.signatures import accepts_argument, first_argument, reject_mismatch


class Task:
    """What is learned. Override the methods that differ; by default, the config's sections apply.

    `build_model` and `build_dataset` are called only if they are overridden; they then take precedence over the `model`
    and `data` sections. `aggregate_logs` and `reduce_aggregated_logs` are for metrics that are not means.
    """

    def build_model(self) -> torch.nn.Module:
        """Builds the model, on the CPU, without loading weights."""
        raise AssertionError("called only if overridden")

    def build_dataset(self, split: str) -> Any:
        """Builds the dataset of a split, "train" or the name of an evaluation set; returns None if it does not
        exist."""
        raise AssertionError("called only if overridden")

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """Runs the model on a micro-batch; see `Trainer.forward` for what may be returned.

        A model whose forward does not accept `labels` is called without them; its `criterion` receives them.
        """
        if not isinstance(batch, Mapping):
            raise DataError(
                f"The batch is a {type(batch).__name__}, but model(**batch) needs a mapping. "
                f"{advise_fields(batch, type(model).forward)} a dict from the collator, or override "
                "Task.forward(model, batch) or Trainer.train_step."
            )
        forward = type(model).forward
        if "labels" in batch and not _accepts_labels(forward):
            batch = {name: value for name, value in batch.items() if name != "labels"}
        if torch.compiler.is_compiling():
            return model(**batch)
        try:
            return model(**batch)
        except TypeError:
            reject_mismatch(forward, tuple(batch))
            raise

    def build_metrics(self) -> dict[str, Any]:
        """Builds further metrics: name → object with update(outputs, labels), compute(), reset()."""
        return {}

    def aggregate_logs(self, state: Any, outputs: Mapping[str, Any]) -> Any:
        """Adds one batch of an evaluation to the state (None at first) and returns it.

        `outputs` has per-sample tensors of all ranks in sample order on the host, scalars, and passthrough objects.
        """
        raise AssertionError("called only if overridden")

    def reduce_aggregated_logs(self, state: Any, step: int) -> dict[str, Any]:
        """Returns the final logs of an evaluation from the aggregated state."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this object that a resumed run needs; see `Trainer.state_dict`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; see `Trainer.load_state_dict`."""


def advise_fields(batch: Any, forward: Callable[..., Any]) -> str:
    """Returns the beginning of advice that ends with `return a dict`: how to name the elements of tuple samples."""
    if not isinstance(batch, (tuple, list)) or not batch:
        return "Return"
    names = getattr(batch, "_fields", None)
    if names is None and len(batch) <= 2:
        names = (first_argument(forward) or "inputs", "labels")[: len(batch)]
    example = "a name for each" if names is None else f"[{', '.join(names)}]"
    return f"If the samples are tuples, name their {len(batch)} elements with data.fields: {example}. Otherwise return"


@constant_in_compiled_code
def _accepts_labels(forward: Callable[..., Any]) -> bool:
    return accepts_argument(forward, "labels")


def overrides(task: object, method: str, contract: type) -> bool:
    """Returns True if the class of an object replaces a method of its contract."""
    return getattr(type(task), method, None) is not getattr(contract, method)
