"""What is learned, apart from how: model, data, forward and metrics as one object.

The default task calls the model with the batch. How updates are made is trainer.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainwright.backends.private_torch import constant_in_compiled_code
from trainwright.errors import DataError
from trainwright.user_code.signatures import accepts_argument, reject_mismatch


class Task:
    """What is learned. Override what differs; the defaults leave it to the config's sections.

    `build_model` and `build_dataset` count only where they are overridden, and then win over the `model`
    and `data` sections. `aggregate_logs` and `reduce_aggregated_logs` are for metrics that no mean gives.
    """

    def build_model(self) -> torch.nn.Module:
        """Builds the model, on the CPU, without loading weights."""
        raise AssertionError("called only where overridden")

    def build_dataset(self, split: str) -> Any:
        """Builds the dataset of a split: "train", or the name of an evaluation set; None where there is none."""
        raise AssertionError("called only where overridden")

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """Runs the model on a micro-batch; see loop/outputs.py for what may be returned.

        A model whose forward takes no `labels` is called without them: its `criterion` gets them.
        """
        if not isinstance(batch, Mapping):
            raise DataError(
                f"The batch is a {type(batch).__name__}, but model(**batch) needs a mapping. "
                "Let the collator return a dict, or override Task.forward(model, batch) or Trainer.train_step."
            )
        forward = type(model).forward
        if "labels" in batch and not _takes_labels(forward):
            batch = {name: value for name, value in batch.items() if name != "labels"}
        if not torch.compiler.is_compiling():  # which asks again without its graph where Python rejects the call
            reject_mismatch(forward, tuple(batch))
        return model(**batch)

    def build_metrics(self) -> dict[str, Any]:
        """Builds metrics beside the config's: name → object with update(outputs, labels), compute(), reset()."""
        return {}

    def aggregate_logs(self, state: Any, outputs: Mapping[str, Any]) -> Any:
        """Adds one batch of an evaluation to the state (None at first) and returns it.

        `outputs` holds per-sample tensors of all ranks in sample order on the host, scalars, and
        passthrough objects.
        """
        raise AssertionError("called only where overridden")

    def reduce_aggregated_logs(self, state: Any, step: int) -> dict[str, Any]:
        """Returns the final logs of an evaluation from the aggregated state."""
        return {}


@constant_in_compiled_code
def _takes_labels(forward: Callable[..., Any]) -> bool:
    return accepts_argument(forward, "labels")


def overrides(task: object, method: str, contract: type) -> bool:
    """Does this object's class replace a method of its contract?"""
    return getattr(type(task), method, None) is not getattr(contract, method)
