"""Looks for what cannot be compiled or recorded before the first step, so that nobody waits minutes to be told.

One forward runs eagerly on the first micro-batch, without gradients, under the watch of host_uses.py. What it changes
of the trainer, the task and the model's modules is put back (see `_Before`), as are the global generators and the event
storage; what it does to files, to global variables and to objects of other libraries is not. `trainwright check` looks
further.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from trainwright.backends import reads_at_once
from trainwright.checkpoint.contents import generator_state, restore_generators
from trainwright.errors import TrainwrightError
from trainwright.events import EventStorage
from trainwright.loop.compiled_forward import users_of
from trainwright.loop.host_uses import Sighting, Watch, watching
from trainwright.loop.task import overrides
from trainwright.loop.user_lines import UserFiles

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

_ATOMS = (bool, int, float, str, bytes, type(None))
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
    breaks = direct if runtime.mode == "graph" else [each for each in direct if each.use.breaks]
    if breaks and (runtime.mode == "graph" or runtime.expect_graph_breaks == 0):
        _refuse(trainer, breaks)
    for each in direct:
        words = "breaks" if each.use.breaks else "makes the host wait"
        logger.warning(
            "%s: runtime.mode %s %s here: %s. %s", each.place, runtime.mode, words, each.use.what, each.use.fix
        )
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
    """Puts back what a forward may change: what `_Before` keeps, the global generators and the event storage."""
    before = _Before([trainer, trainer.task, *trainer.model.modules()], users_of(trainer))
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
            before.put_back()
            restore_generators(generators)


def _with_generator(device: torch.device) -> str:
    # fork_rng always keeps the CPU's generator, and knows no device type that has no other.
    return "cuda" if reads_at_once(device) else device.type


class _Before:
    """What hangs on some objects as it is now; `put_back` makes it so again.

    Kept are which attributes there are and what each is bound to; what lists, dicts, sets and deques hold; the values
    of tensors that are no parameters; the states of generators; and all this of what hangs on those, if it is a
    container, a module or an object of the user's classes. Other objects are left: some belong to other threads.
    """

    def __init__(self, owners: Iterable[Any], users: UserFiles) -> None:
        self._users = users
        self._seen: dict[int, Any] = {}  # holds them, so that no id is given twice
        self._acts: list[Callable[[], object]] = []
        self._left: list[Any] = []
        for owner in owners:
            self._keep_attributes(owner)
        while self._left:
            self._keep(self._left.pop())

    def put_back(self) -> None:
        """Puts everything back, into the same objects."""
        with torch.no_grad():
            for act in self._acts:
                act()

    def _keep(self, value: Any) -> None:
        if isinstance(value, _ATOMS) or id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            self._seen[id(value)] = value
            self._keep_tensor(value)
        elif isinstance(value, list | deque | dict | set):
            self._seen[id(value)] = value
            self._keep_contents(value)
        elif (state := _generator_state(value)) is not None:
            self._seen[id(value)] = value
            self._acts.append(state)
        elif isinstance(value, nn.Module) or self._is_users(value):
            self._keep_attributes(value)

    def _is_users(self, value: Any) -> bool:
        if isinstance(value, type | torch.utils.data.Dataset):  # the next batch is fetched from it meanwhile
            return False
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
        return file is not None and file in self._users

    def _keep_attributes(self, owner: Any) -> None:
        if id(owner) in self._seen or not hasattr(owner, "__dict__"):
            return
        self._seen[id(owner)] = owner
        left_out = _TORCHS_OWN if isinstance(owner, nn.Module) else frozenset()
        attributes = {name: value for name, value in vars(owner).items() if name not in left_out}
        self._left += attributes.values()
        if isinstance(owner, nn.Module):
            self._left += owner.children()

        def put_back() -> None:
            now = vars(owner)
            for name in [name for name in now if name not in attributes and name not in left_out]:
                del now[name]
            now.update(attributes)

        self._acts.append(put_back)

    def _keep_contents(self, container: Any) -> None:
        if isinstance(container, dict):
            items = dict(container)
            self._left += items.values()

            def put_back() -> None:
                if not _are_same([*container, *container.values()], [*items, *items.values()]):
                    container.clear()
                    container.update(items)

        else:
            members = list(container)
            self._left += members

            def put_back() -> None:
                if not _are_same(list(container), members):
                    container.clear()
                    (container.update if isinstance(container, set) else container.extend)(members)

        self._acts.append(put_back)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, nn.Parameter) or tensor.is_inference() or tensor.is_meta:
            return
        version, copy = tensor._version, tensor.detach().clone()

        def put_back() -> None:
            if tensor._version != version or not torch.equal(tensor, copy):  # .data is written without a version
                tensor.copy_(copy)

        self._acts.append(put_back)


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _generator_state(value: Any) -> Callable[[], object] | None:
    """Returns what sets a generator back to where it is now; None if it is none."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, np.random.Generator):
        numbers = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", numbers)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, random.Random):
        words = value.getstate()
        return lambda: value.setstate(words)
    return None
