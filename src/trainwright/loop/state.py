"""The progress of a run (`RunState`), and a batch with its number of samples (`Batch`).

The trainer owns one RunState, and only the trainer assigns its fields. Overridable methods of a trainer receive the
collator's own batch; inside the loop it is wrapped in a `Batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from trainwright.backends.private_torch import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_map_only
from trainwright.errors import DataError

SCALARS = (str, bytes, bool, int, float, type(None))


@dataclass(slots=True)
class RunState:
    """The progress of a run. A checkpoint stores the fields up to `max_steps_at_end`, except `epoch_ended`."""

    step: int = 0
    """The number of completed updates."""
    epoch: int = 0
    """The epoch of the first sample of the current step."""
    begun_epoch: int = -1
    """The last epoch that has begun: that of the last step. The next step begins another one if its epoch differs."""
    epoch_ended: bool = False
    """True from an update that uses the last sample of an epoch, `epoch`, until the next step begins."""
    data_start: int = 0
    """The position in the data at which the current step began."""
    has_unfinished_step: bool = False
    """True from an update until it is evaluated and written. A run that was resumed in between completes that first."""
    max_steps_at_end: int = 0
    """The `max_steps` of a run that has ended, by that limit, by `stop` or because the data ended; 0 before."""
    phase: Literal["between_steps", "in_step"] = "between_steps"
    """A step includes its evaluation and logging. `save()` called inside a step saves at its end."""
    stop_reason: str | None = None
    """The reason why the run ended before its limit; set when the loop has ended."""
    interrupted: bool = False
    """True if the run ended because of a signal; the same command continues it."""
    eval_logs: dict[str, float] = field(default_factory=dict)
    """The logs of the last evaluation, including the test set."""
    evaluated_step: int = -1
    """The step of `eval_logs`."""
    reported: set[str] = field(default_factory=set)
    """The names in `eval_logs` that the writers have received."""
    window_start: int = 0
    """The step after which the current log window began; 0 after a resume."""
    written_step: int = 0
    """The last step that the writers received. After a rollback, steps up to it are not written twice."""
    saved_step: int = -1
    save_requested: bool = False
    """True if all ranks save at the end of this step."""
    save_requested_here: bool = False
    """True if this rank has requested a checkpoint and the other ranks are not yet notified."""

    @property
    def step_eval_logs(self) -> dict[str, float]:
        """The logs of an evaluation of the current step; empty if the step was not evaluated."""
        return self.eval_logs if self.evaluated_step == self.step else {}

    def restore_evaluation(self, logs: Mapping[str, float]) -> None:
        """Keeps the evaluation of the restored step, if there is one."""
        self.eval_logs, self.evaluated_step = dict(logs), self.step if logs else -1
        self.reported = set() if self.has_unfinished_step else set(logs)

    def discard_step(self) -> None:
        """Discards the state of steps after the restored one."""
        self.restore_evaluation({})
        self.save_requested = self.save_requested_here = False
        self.saved_step = -1
        self.phase = "between_steps"


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch, or a micro-batch, of this rank with its number of samples."""

    value: Any
    num_samples: int
    """The weight of a plain loss or metric. 0 on a rank that repeats a sample only to take part in collectives."""
    key: object = None
    """A key that distinguishes a micro-batch from the others of its step, such as its number; None for the whole
    batch."""


def count_samples(value: Any, fetched: Batch | None) -> int:
    """Returns the number of samples of a batch that `next_train_inputs` returned.

    `fetched` is the last batch that the iterator returned in this step. Its count applies to a batch with the same dim
    0; for other batches, dim 0 of the tensors is the number of samples. A batch without a dim 0 is one sample if
    nothing was fetched.
    """
    rows = num_rows(value)
    if fetched is None:
        return 1 if rows is None else rows
    if value is fetched.value or rows is None or rows == num_rows(fetched.value):
        return fetched.num_samples
    return rows


def num_rows(value: Any) -> int | None:
    """Returns dim 0 of the first tensor or array of a batch that has at least one dim; None if there is none."""
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0)
    first = next(leaves, None)
    return None if first is None else first.shape[0]


def split_batch(batch: Batch, num_micro_batches: int, collator: Callable[..., Any]) -> Iterator[Batch]:
    """Yields the micro-batches of a batch.

    Splits tensors whose dim 0 is the number of samples, and lists inside the batch with one entry per sample; passes
    the rest whole. A collator whose batches have other shapes defines `split(batch, n)`.
    """
    num_samples = batch.num_samples
    bounds = [num_samples * number // num_micro_batches for number in range(num_micro_batches + 1)]
    if hasattr(collator, "split"):
        parts = collator.split(batch.value, num_micro_batches)
        for part, (start, stop) in zip(parts, pairwise(bounds), strict=True):
            yield Batch(part, stop - start)
        return
    length = max(num_samples, 1)  # a batch without samples contains one row
    _reject_unsplittable(batch.value, length, num_micro_batches)
    for start, stop in pairwise(bounds):
        # A micro-batch without samples repeats the first one with weight 0.
        rows = slice(start, stop) if stop > start else slice(0, 1)
        yield Batch(_select(batch.value, length, rows), stop - start)


def reject_graph(batch: Any, num_micro_batches: int) -> None:
    """Rejects a batch to be split that was computed with gradients: the first backward would free its graph."""
    leaves, _ = tree_flatten_with_path(batch)
    names = [keystr(path).strip("[]'") for path, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn]
    if names:
        raise DataError(
            f"The batch of next_train_inputs has a graph ({', '.join(names)}), so it cannot be split into "
            f"{num_micro_batches} micro-batches: the backward of the first would free it. Compute it in forward, or "
            "set trainer.micro_batch_size and gradient_accumulation_steps to null."
        )


def _select(batch: Any, length: int, rows: slice) -> Any:
    if _is_dict_of_tensors(batch):
        return {name: value[rows] if _has_rows(value, length) else value for name, value in batch.items()}

    def is_column(node: Any) -> bool:
        """True for a list with one entry per sample: scalars, or anything else, such as tensors of several lengths.

        A pair of tensors is not a column, even in a batch of two, and neither is the batch itself.
        """
        is_list = isinstance(node, (list, tuple)) and not hasattr(node, "_fields")
        if not is_list or len(node) != length:
            return False
        if all(isinstance(each, SCALARS) for each in node):
            return True
        leaves = tree_leaves(node)
        return isinstance(node, list) and node is not batch and not any(_has_rows(each, length) for each in leaves)

    def choose(node: Any) -> Any:
        return node[rows] if is_column(node) or _has_rows(node, length) else node

    return tree_map(choose, batch, is_leaf=is_column)


def _is_dict_of_tensors(batch: Any) -> bool:
    """True for most batches, which then need no walk over nested containers (100 µs)."""
    return type(batch) is dict and all(type(value) is torch.Tensor for value in batch.values())


def _has_rows(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == length


def _reject_unsplittable(batch: Any, length: int, num_micro_batches: int) -> None:
    if _is_dict_of_tensors(batch) and any(_has_rows(value, length) for value in batch.values()):
        return
    shapes: list[tuple[int, ...]] = []
    tree_map_only(torch.Tensor, lambda tensor: shapes.append(tuple(tensor.shape)), batch)
    if not any(shape and shape[0] == length for shape in shapes):
        raise DataError(
            f"A batch of {length} samples cannot be split into {num_micro_batches} micro-batches: no tensor has "
            f"{length} rows (shapes: {', '.join(map(str, shapes)) or 'no tensors'}). Define `split(batch, n)` in the "
            "collator, or set trainer.micro_batch_size so that gradient_accumulation_steps is 1."
        )
