"""Compile mode: the forward and its loss as one compiled region, inspected before the first step."""

from __future__ import annotations

import inspect
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from trainwright.backends import reads_at_once, waits_for_memory
from trainwright.backends.private_torch import side_effects_once, version_of
from trainwright.checkpoint.contents import generator_state, restore_generators
from trainwright.compile.host_sync import HostSyncMode, Sighting, watching
from trainwright.compile.reports import Compilations, GraphBreak, listening
from trainwright.config import RunConfig
from trainwright.errors import ConfigError, TrainwrightError, exit_code_of
from trainwright.events import EventStorage, Mean
from trainwright.loop.outputs import ForwardResult, read_forward
from trainwright.loop.task import overrides
from trainwright.memory.activation_checkpointing import Recomputed
from trainwright.memory.module_paths import has_around
from trainwright.memory.repeated_blocks import compile_gathered, keep_apart, known_backend
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import UserFiles

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

Region = Callable[..., tuple[Any, dict[str, Any], Mapping[str, Any] | None]]
"""Maps a trainer and a micro-batch to the loss, the metrics and the outputs."""
_BACKEND = "inductor"
_WITHOUT_EFFECT = ("compile_backend", "compile_memory_budget", "max_graph_breaks")


def reject_modes(config: RunConfig, axes: Mapping[str, int]) -> None:
    """Rejects a mode with settings that it cannot be joined with, and settings of other modes; imports nothing."""
    runtime = config.runtime
    if runtime.mode == "eager":
        for name in _WITHOUT_EFFECT:
            if getattr(runtime, name) is not None:
                raise ConfigError(
                    f"runtime.{name}: has no effect with runtime.mode: eager. Set mode: compile, or leave it out.",
                    where=config.origin(f"runtime.{name}"),
                )
    elif axes.get("pipeline", 1) > 1:
        raise ConfigError(
            f"runtime.mode: {runtime.mode} compiles or records a forward, which in a pipeline is run by its schedule. "
            "Use mode: eager, and model.compile_repeated_blocks to compile the blocks.",
            where=config.origin("runtime.mode"),
        )


def compile_forward(trainer: Trainer) -> CompiledForward | None:
    """Returns what runs the trainer's forward compiled; None where the mode runs it as it is."""
    mode = trainer.config.runtime.mode
    # On a CPU graph mode runs eagerly, which keeps every bit.
    if mode == "compile" or (mode == "graph" and waits_for_memory(trainer.device)):
        return CompiledForward(trainer)
    runtime = trainer.config.runtime
    # Without a compiler too: the same file may go to a GPU next.
    known_backend(
        "runtime.compile_backend", runtime.compile_backend, where=trainer.config.origin("runtime.compile_backend")
    )
    return None


def run_as_is(trainer: Trainer, batch: Any) -> ForwardResult:
    """Runs the forward on a micro-batch as it is written, and reads what it returned."""
    return read_forward(trainer.call_forward(batch), batch, trainer.model, trainer.samples_in_hand)


class CompiledForward:
    """Runs a trainer's forward and reads what it returned, compiled where that is possible.

    Training and evaluation are two regions: one may meet other shapes than the other without compiling it anew.
    """

    def __init__(self, trainer: Trainer) -> None:
        runtime = trainer.config.runtime
        where = trainer.config.origin("runtime.compile_backend")
        backend = known_backend("runtime.compile_backend", runtime.compile_backend, where=where) or _BACKEND
        users = users_of(trainer)
        self.compilations = Compilations(users, forward=_location_of_forward(trainer, users))
        self._trainer = trainer
        self._num_breaks_expected = runtime.max_graph_breaks
        is_gathered = compile_gathered(trainer.model, backend)
        is_repeated_block = not is_gathered and keep_apart(trainer.model)
        # Blocks that stay apart are breaks on purpose, and are told from others by who listens.
        self._rejects_breaks = runtime.max_graph_breaks == 0 and not is_repeated_block
        self._contexts = self._choose_contexts()
        self._train: Region = _training_region(trainer)
        self._evaluate: Region = _run_forward
        if not is_gathered:
            self._train = _compile(self._train, "forward_to_train", backend)
            self._evaluate = _compile(self._evaluate, "forward_to_evaluate", backend)

    def run(self, batch: Any) -> ForwardResult:
        """Runs the forward on a micro-batch, as `Trainer.run_forward` does, in the precision that it has set."""
        trainer = self._trainer
        region = self._train if torch.is_grad_enabled() else self._evaluate
        try:
            with self._compiling():
                loss, metrics, outputs = region(trainer, batch)
        except TypeError:
            # Which keys of a batch a forward does not take is said only outside of a graph.
            with torch.compiler.set_stance("force_eager"):
                _run_forward(trainer, batch)
            raise
        except Exception as error:
            self.explain(error)
            raise
        # What the graph has put is filed: were the names still there, a second micro-batch would be another graph.
        trainer.storage.file_traced()
        if self._num_breaks_expected is not None and len(self.compilations.breaks) > self._num_breaks_expected:
            self._reject_breaks(list(self.compilations.breaks.values()))
        return ForwardResult(loss, trainer.samples_in_hand, metrics, outputs)

    def _choose_contexts(self) -> list[Callable[[], AbstractContextManager[Any]]]:
        """Returns what a call of a region runs in. Torch's settings are the process's: they hold for the call alone."""
        runtime = self._trainer.config.runtime
        chosen: list[Callable[[], AbstractContextManager[Any]]] = []
        if self._rejects_breaks:
            chosen.append(lambda: torch._dynamo.error_on_graph_break(True))
        elif runtime.max_graph_breaks is not None:
            # The hook that tells of breaks may not be there, and the limit holds all the same.
            chosen.append(lambda: listening(self.compilations))
        if has_around(self._trainer.model, Recomputed):
            # What a block puts into the event storage is put in its first pass only.
            chosen.append(side_effects_once)
        if runtime.compile_memory_budget is not None:
            budget = {"activation_memory_budget": runtime.compile_memory_budget}
            chosen.append(lambda: torch._functorch.config.patch(budget))
        return chosen

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        if not self._contexts:
            yield
            return
        with ExitStack() as stack:
            for each in self._contexts:
                stack.enter_context(each())
            yield

    def explain(self, error: Exception) -> None:
        """Says which line broke the graph, or that a compiler failed; other errors are left.

        A backward is compiled when it first runs, so whoever runs it asks too. Where the run was told to leave, which
        ends a compiler's processes as well, this leaves as a run does that is told to.
        """
        from torch._dynamo import exc

        if self._rejects_breaks and isinstance(error, exc.Unsupported | exc.UserError):
            self._reject_breaks([self.compilations.break_of(error)], cause=error)
        if isinstance(error, exc.BackendCompilerFailed):
            self._leave_if_requested()
            cause = getattr(error, "inner_exception", error)
            reason = next((line.strip().rstrip(".") for line in str(cause).splitlines() if line.strip()), "no reason")
            raise TrainwrightError(
                f"runtime.mode: torch.compile failed: {type(cause).__name__}: {reason}. Use "
                "runtime.compile_backend: aot_eager, which needs no compiler, or mode: eager.",
                where=self._trainer.config.origin("runtime.mode"),
            ) from error

    def _leave_if_requested(self) -> None:
        trainer = self._trainer
        if trainer.agreement.is_stop_requested():
            reason = trainer.agreement.reason or "interrupted"
            saved = trainer.context.store.steps()
            goes_on = f"goes on from step {saved[-1]}" if saved else "begins anew, for nothing was saved yet"
            logger.info("%s ended the compilation in step %d. The same command %s.", reason, trainer.step + 1, goes_on)
            raise SystemExit(exit_code_of(reason))

    def _reject_breaks(self, breaks: list[GraphBreak], *, cause: Exception | None = None) -> None:
        number = self._num_breaks_expected
        listed = "".join(f"\n  {each}" for each in breaks)
        raise TrainwrightError(
            f"runtime.max_graph_breaks: {number}, but the compiled forward breaks into pieces:{listed}\n"
            "Change these lines, or raise the number (null: any).",
            where=self._trainer.config.origin("runtime.max_graph_breaks"),
        ) from cause


def users_of(trainer: Trainer) -> UserFiles:
    """Returns which files are the user's own, those of the trainer, task and model included wherever they are."""
    users = UserFiles(trainer.config.project_dir)
    for part in (trainer, trainer.task, trainer.model):
        users.include(type(part))
    return users


def _location_of_forward(trainer: Trainer, users: UserFiles) -> str:
    """Returns where the user's forward is written: the trainer's, the task's or the model's."""
    for owner in (trainer, trainer.task, trainer.model):
        code = getattr(inspect.unwrap(type(owner).forward), "__code__", None)
        if code is not None and code.co_filename in users:
            return f"{shown_path(code.co_filename)}:{code.co_firstlineno}"
    return f"{type(trainer.model).__name__}.forward"


def _training_region(trainer: Trainer) -> Any:
    """Returns what to compile for training: as little leaves the graph as the trainer's step may use."""
    owners = {
        next(each for each in type(trainer).__mro__ if name in vars(each)) for name in ("train_step", "run_forward")
    }
    if any(not owner.__module__.startswith("trainwright.") for owner in owners):
        return _run_forward  # a user's own step may differentiate more than the loss
    return _run_to_loss if len(owners) == 1 else _run_detached


def _compile(region: Any, name: str, backend: str) -> Region:
    # Torch counts graphs by code object, and gives up at eight: each region of each trainer counts its own.
    code = region.__code__.replace(co_name=name)
    return torch.compile(FunctionType(code, globals()), backend=backend)


def _run_forward(trainer: Trainer, batch: Any) -> tuple[Any, dict[str, Any], Mapping[str, Any] | None]:
    """What is compiled. A plain loss gets its weight outside: a number that changes would be another graph."""
    result = read_forward(trainer.call_forward(batch), batch, trainer.model, 0)
    return result.loss, result.metrics, result.outputs


def _run_detached(trainer: Trainer, batch: Any) -> tuple[Any, dict[str, Any], Mapping[str, Any] | None]:
    """The same where nothing but the loss is differentiated: a backward would add gradients of outputs, which are 0."""
    loss, metrics, outputs = _run_forward(trainer, batch)
    metrics = {name: _detached(value) for name, value in metrics.items()}
    return loss, metrics, None if outputs is None else {name: _detached(value) for name, value in outputs.items()}


def _run_to_loss(trainer: Trainer, batch: Any) -> tuple[Any, dict[str, Any], Mapping[str, Any] | None]:
    """The same where of the outputs only their names are asked for: logits that leave a graph must be kept."""
    loss, metrics, outputs = _run_detached(trainer, batch)
    return loss, metrics, None if outputs is None else dict.fromkeys(outputs)


def _detached(value: Any) -> Any:
    if isinstance(value, Mean):
        return Mean(_detached(value.total), _detached(value.count))
    return value.detach() if isinstance(value, torch.Tensor) else value


_ATOMS = (bool, int, float, str, bytes, type(None))
# Weights come and go in a forward where they are gathered for it; what belongs to torch stays torch's.
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"_buffers"}


def look_before_first_step(trainer: Trainer, batch: Any) -> None:
    """Runs one forward under watch. What breaks a compiled graph is a warning, and what no graph may hold an error.

    An error, which lists all places, where the mode is graph or `runtime.max_graph_breaks` is 0. A user's own
    `train_step` may call other forwards than this one, so it is left alone.
    """
    from trainwright.loop.trainer import Trainer as Contract

    if overrides(trainer, "train_step", Contract):
        return
    watch = HostSyncMode(users_of(trainer))
    try:
        _watch_forward(trainer, batch, watch, with_gradients=False)
    except RuntimeError as error:
        if "require grad" not in str(error):
            raise
        # A forward that differentiates by itself; it needs as much memory as a step.
        _watch_forward(trainer, batch, watch, with_gradients=True)
    found = sorted(watch.sightings.values(), key=lambda each: (each.location.file, each.location.line))
    direct = [each for each in found if each.is_direct]
    runtime = trainer.config.runtime
    breaks = direct if runtime.mode == "graph" else [each for each in direct if each.use.breaks]
    if breaks and (runtime.mode == "graph" or runtime.max_graph_breaks == 0):
        _reject(trainer, breaks)
    for each in direct:
        words = "breaks" if each.use.breaks else "makes the host wait"
        logger.warning(
            "%s: runtime.mode %s %s here: %s. %s", each.location, runtime.mode, words, each.use.what, each.use.fix
        )
    for each in found:
        if not each.is_direct:
            # Library code may do otherwise when it is compiled.
            logger.info("%s: library code called here may break the graph: %s.", each.location, each.use.what)


def _reject(trainer: Trainer, sightings: list[Sighting]) -> None:
    mode = trainer.config.runtime.mode
    name = "mode" if mode == "graph" else "max_graph_breaks"
    listed = "".join(f"\n  {each.location}: {each.use.what}. {each.use.fix}" for each in sightings)
    number = f"{len(sightings)} places" if len(sightings) > 1 else "1 place"
    raise TrainwrightError(
        f"runtime.{name}: the forward cannot be one graph, because of {number}:{listed}\n"
        f"Change {'it' if len(sightings) == 1 else 'them'}, or use runtime.mode: "
        f"{'compile' if mode == 'graph' else 'eager'}.",
        where=trainer.config.origin(f"runtime.{name}"),
    )


def _watch_forward(trainer: Trainer, batch: Any, watch: HostSyncMode, *, with_gradients: bool) -> None:
    with _leaving_no_trace(trainer), torch.set_grad_enabled(with_gradients), watching(watch):
        micro_batches = iter(trainer.micro_batches(batch))
        trainer.run_forward(next(micro_batches))
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
        version, copy = version_of(tensor), tensor.detach().clone()

        def put_back() -> None:
            if version_of(tensor) != version or not torch.equal(tensor, copy):  # .data is written without a version
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
