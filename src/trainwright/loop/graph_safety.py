"""Looks for what cannot be compiled or recorded before the first step, so that nobody waits minutes to be told.

One forward runs eagerly on the first micro-batch, without gradients, under the watch of host_uses.py, and leaves no
trace: buffers, generators, the event storage and plain attributes are put back. `trainwright check` looks further.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.backends import reads_at_once
from trainwright.checkpoint.contents import generator_state, restore_generators
from trainwright.errors import TrainwrightError
from trainwright.events import EventStorage
from trainwright.loop.compiled_forward import users_of
from trainwright.loop.host_uses import Sighting, Watch, watching
from trainwright.loop.task import overrides

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

_NUMBERS = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set)
# Weights come and go in a forward where they are gathered for it; what belongs to torch stays torch's.
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"_buffers"}


def look_before_first_step(trainer: Trainer, batch: Any) -> None:
    """Runs one forward under watch. What breaks a compiled graph is a warning, and what no graph may hold an error.

    An error, which lists all places, where the mode is graph or `runtime.expect_graph_breaks` is 0. A user's own
    `train_step` may call other forwards than this one, so it is left alone.
    """
    from trainwright.loop.trainer import Trainer as Contract

    if overrides(trainer, "train_step", Contract):
        return
    watch = Watch(users_of(trainer))
    try:
        _watch_forward(trainer, batch, watch, with_gradients=False)
    except RuntimeError as error:
        if "require grad" not in str(error):
            raise
        # A forward that differentiates by itself; it needs as much memory as a step.
        _watch_forward(trainer, batch, watch, with_gradients=True)
    found = sorted(watch.sightings.values(), key=lambda each: (each.place.file, each.place.line))
    direct = [each for each in found if each.is_direct]
    runtime = trainer.config.runtime
    if direct and (runtime.mode == "graph" or runtime.expect_graph_breaks == 0):
        _refuse(trainer, direct)
    for each in direct:
        logger.warning("%s: runtime.mode %s breaks here: %s. %s", each.place, runtime.mode, each.use.what, each.use.fix)
    for each in found:
        if not each.is_direct:
            # Library code may do otherwise when it is compiled.
            logger.info("%s: library code called here may break the graph: %s.", each.place, each.use.what)


def _refuse(trainer: Trainer, sightings: list[Sighting]) -> None:
    mode = trainer.config.runtime.mode
    name = "mode" if mode == "graph" else "expect_graph_breaks"
    listed = "".join(f"\n  {each.place}: {each.use.what}. {each.use.fix}" for each in sightings)
    number = f"{len(sightings)} places" if len(sightings) > 1 else "1 place"
    raise TrainwrightError(
        f"runtime.{name}: the forward cannot be one graph, because of {number}:{listed}\n"
        f"Change {'it' if len(sightings) == 1 else 'them'}, or use runtime.mode: "
        f"{'compile' if mode == 'graph' else 'eager'}.",
        where=trainer.config.origin(f"runtime.{name}"),
    )


def _watch_forward(trainer: Trainer, batch: Any, watch: Watch, *, with_gradients: bool) -> None:
    with _leaving_no_trace(trainer), torch.set_grad_enabled(with_gradients), watching(watch):
        pieces = iter(trainer.micro_batches(batch))
        trainer.run_forward(next(pieces))
    trainer.backend.release_memory()


@contextmanager
def _leaving_no_trace(trainer: Trainer) -> Iterator[None]:
    """Puts back what a forward may change: buffers, generators, the storage, numbers and lists of its objects."""
    owners: list[Any] = [trainer, trainer.task, *trainer.model.modules()]
    kept = [(owner, _plain_attributes(owner)) for owner in owners if hasattr(owner, "__dict__")]
    buffers = list(trainer.model.buffers())
    copies = [buffer.detach().clone() for buffer in buffers]
    generators, storage = generator_state(), trainer.storage
    device = trainer.device
    with torch.random.fork_rng(
        [] if reads_at_once(device) else [device.index or 0], device_type=_with_generator(device)
    ):
        try:
            with EventStorage(max_steps=storage.max_steps) as trainer.storage:
                trainer.storage.step = storage.step
                yield
        finally:
            trainer.storage = storage
            for owner, attributes in kept:
                _put_back(owner, attributes)
            with torch.no_grad():
                for buffer, copy in zip(buffers, copies, strict=True):
                    buffer.copy_(copy)
            restore_generators(generators)


def _with_generator(device: torch.device) -> str:
    # fork_rng always keeps the CPU's generator, and knows no device type that has no other.
    return "cuda" if reads_at_once(device) else device.type


def _plain_attributes(owner: Any) -> dict[str, tuple[Any, Any]]:
    """Returns an object's numbers, texts and containers, each with a shallow copy."""
    own = _TORCHS_OWN if isinstance(owner, nn.Module) else frozenset()
    return {
        name: (value, value.copy() if isinstance(value, _CONTAINERS) else value)
        for name, value in vars(owner).items()
        if name not in own and not name.startswith("__") and isinstance(value, _NUMBERS + _CONTAINERS)
    }


def _put_back(owner: Any, attributes: dict[str, tuple[Any, Any]]) -> None:
    for name, (value, copy) in attributes.items():
        vars(owner)[name] = value
        if isinstance(value, list):
            value[:] = copy
        elif isinstance(value, dict | set):
            value.clear()
            value.update(copy)
