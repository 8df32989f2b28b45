"""Names in a profiler's trace what a run is doing: data, forward, backward, optimizer, communication, all else.

The names are put in while a profile runs and taken out again, so that they cost nothing otherwise. They follow each
other without a gap and are never nested: each moment of the host has exactly one. profile_trace.py reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from trainwright.backends.private_torch import tree_map_only
from trainwright.hooks.count_flops import TensorLike

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

PREFIX = "trainwright: "

LEFT_OUT = ("evaluate", "save")
"""What belongs to no step: a profile does not count it."""

_OF_PHASE = {
    "data": "data",
    "reduce": "communication",
    "update": "optimizer",
    "evaluate": "evaluate",
    "save": "save",
}
"""The name of a phase of the loop (loop/phases.py); of the others it is `host`."""


class Ranges:
    """Names in the trace from `put_in` until `take_out`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # A replayed update has no parts that the host could tell apart.
        self._of_step = "replay" if trainer.config.runtime.mode == "graph" else "host"
        self._of_vote = "communication" if trainer.ranks.size > 1 else "host"
        self._open: record_function | None = None
        self._name = self._outer = "host"
        self._put: list[tuple[Any, str, Any]] = []
        self.num_tokens = 0
        """Those of this rank's batches so far, where batches have `input_ids`."""
        self.batch: Any = None
        """The first batch, with a `TensorLike` in each tensor's place."""

    def put_in(self) -> None:
        """Begins, between two steps."""
        trainer = self._trainer
        self._wrap(trainer.phases, "enter", self._enter_phase)
        self._wrap(trainer, "next_train_inputs", self._next_inputs)
        self._wrap(trainer, "run_forward", self._named("forward"))
        self._wrap(trainer.surroundings.updater, "begin", self._begin_update)
        self._switch("host")

    def take_out(self) -> None:
        """Ends; the trainer is as it was."""
        for owner, name, before in reversed(self._put):
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        self._put = []
        self._switch(None)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Puts `around` before a method of one object, not of its class; it gets the method and its arguments."""
        act = getattr(owner, name)
        self._put.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = lambda *arguments, **options: around(act, *arguments, **options)

    def _switch(self, name: str | None) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if name is not None:
            self._name = name
            self._open = record_function(PREFIX + name)
            self._open.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        """Names what is inside; afterwards comes the name of the phase that the loop is in by then."""
        if self._name in LEFT_OUT:  # the forward of an evaluation
            yield
            return
        self._switch(name)
        try:
            yield
        finally:
            if self._put:
                self._switch(self._outer)

    def _named(self, name: str) -> Callable[..., Any]:
        def call(act: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            with self._within(name):
                return act(*arguments, **options)

        return call

    def _enter_phase(self, enter: Callable[[str, int], None], phase: str, step: int) -> None:
        if phase == "step":
            self._outer = self._of_step
        elif phase == "vote":
            self._outer = self._of_vote
        else:
            self._outer = _OF_PHASE.get(phase, "host")
        self._switch(self._outer)
        enter(phase, step)

    def _next_inputs(self, act: Callable[..., Any], iterator: Iterator[Any]) -> Any:
        batch = act(iterator)
        if self.batch is None:
            self.batch = tree_map_only(torch.Tensor, lambda tensor: TensorLike(tensor.shape, tensor.dtype), batch)
        if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            self.num_tokens += batch["input_ids"].numel()
        return batch

    def _begin_update(self, begin: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        update = begin(*arguments, **options)
        # The update lives for one step: nobody need take these out.
        for name, row in (("backward", "backward"), ("apply", "optimizer")):
            act, named = getattr(update, name), self._named(row)
            vars(update)[name] = lambda *given, act=act, named=named, **more: named(act, *given, **more)
        return update
