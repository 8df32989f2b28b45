"""Compile mode: the forward and its loss as one compiled region, inspected before the first step.

The trainer passes the function to compile; this module knows no trainer. reports.py reports what torch.compile does
during the run.
"""

from __future__ import annotations

import inspect
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trainwright.backends import Backend, reads_at_once
from trainwright.backends.private_torch import side_effects_once, version_of
from trainwright.checkpoint.contents import generator_state, restore_generators
from trainwright.compile.host_sync import HostSyncMode, Sighting, watching
from trainwright.compile.reports import Compilations, GraphBreak, listening
from trainwright.config import RunConfig
from trainwright.config.frozen import thaw
from trainwright.config.problems import nearest
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.events import EventStorage, Mean
from trainwright.memory.activation_checkpointing import Recomputed
from trainwright.memory.module_paths import has_around
from trainwright.memory.repeated_blocks import compile_blocks, compile_gathered, keep_apart, known_backend
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import UserFiles

logger = logging.getLogger(__name__)


class RegionOutputs(NamedTuple):
    """The result of a compiled region."""

    loss: Any
    metrics: dict[str, Any]
    outputs: Mapping[str, Any] | None
    num_targets: torch.Tensor | None
    """The number of labels that a plain loss is the mean of, if it is known."""


Compute = Callable[[Any], RegionOutputs]
"""Runs the forward on a micro-batch."""
EAGER: Mapping[str, Any] = {
    "runtime.mode": "eager",
    "runtime.compile_backend": None,
    "runtime.compile_mode": None,
    "runtime.compile_options": {},
    "runtime.compile_memory_budget": None,
    "runtime.max_graph_breaks": None,
}
"""The settings of a trial that runs eagerly in every mode."""
_BACKEND = "inductor"
_OF_BLOCKS = ("compile_mode", "compile_options")
"""Settings that `model.compile_repeated_blocks` also uses in eager mode."""
_CUDA_GRAPHS = "triton.cudagraphs"


def check_mode(config: RunConfig, axes: Mapping[str, int]) -> None:
    """Raises for a mode that is incompatible with other settings, for settings of other modes, and for unknown options.

    Imports torch's compiler only if its options are set.
    """
    runtime = config.runtime
    _check_compiler_settings(config)
    if runtime.mode == "eager":
        has_blocks = config.model is not None and "compile_repeated_blocks" in config.model.reserved
        for dotted, unset in EAGER.items():
            name = dotted.partition(".")[2]
            if name == "mode" or getattr(runtime, name) == unset or (has_blocks and name in _OF_BLOCKS):
                continue
            raise ConfigError(
                f"runtime.{name} has no effect with runtime.mode eager. Set mode: compile, or remove it.",
                where=config.origin(dotted),
            )
    elif axes.get("pipeline", 1) > 1:
        raise ConfigError(
            f"runtime.mode {runtime.mode} does not support runtime.mesh.pipeline, whose schedule calls the layers "
            "itself. Use mode: eager, and model.compile_repeated_blocks to compile the blocks.",
            where=config.origin("runtime.mode"),
        )


def _check_compiler_settings(config: RunConfig) -> None:
    """Raises for a `compile_mode` or `compile_options` that torch.compile or a run does not support."""
    runtime = config.runtime
    mode, options = runtime.compile_mode, runtime.compile_options
    if mode is None and not options:
        return
    label = "runtime.compile_options" if mode is None else "runtime.compile_mode"
    where = config.origin(label)
    if mode is not None and options:
        raise ConfigError(
            f"{label} is {mode}, and runtime.compile_options are set too; torch.compile accepts one of the two. "
            "`torch._inductor.list_mode_options()` has the options of a mode.",
            where=where,
        )
    if runtime.compile_backend not in (None, _BACKEND):
        raise ConfigError(
            f"{label} is for inductor, but runtime.compile_backend is {runtime.compile_backend}. Remove one of them.",
            where=where,
        )
    if mode in ("reduce-overhead", "max-autotune") or options.get(_CUDA_GRAPHS):
        advice = "Remove it" if runtime.mode == "graph" else "Use runtime.mode: graph instead"
        if mode == "max-autotune":
            advice = f"Use max-autotune-no-cudagraphs{'' if runtime.mode == 'graph' else ', with runtime.mode: graph'}"
        raise ConfigError(
            f"{label}: {mode or _CUDA_GRAPHS} makes torch.compile capture its own CUDA graphs, whose outputs the next "
            "forward overwrites: accumulated gradients and metrics that are logged later would be lost. "
            f"runtime.mode graph captures the whole update. {advice}.",
            where=where,
        )
    if options:
        _check_options(config)


def _check_options(config: RunConfig) -> None:
    """Raises for an option that inductor does not have, or with a value of another type."""
    import torch._inductor

    known, options = torch._inductor.list_options(), config.runtime.compile_options
    for name in options:
        where = config.written_at(("runtime", "compile_options", name)) or config.origin("runtime.compile_options")
        if name not in known:
            found = nearest(name, known)
            guess = f' Did you mean "{found}"?' if found else ""
            raise ConfigError(
                f"runtime.compile_options.{name}: inductor has no such option.{guess} "
                "`torch._inductor.list_options()` lists them.",
                where=where,
            )
        try:
            torch.compile(_run_forward, options={name: thaw(options[name])})  # compiles nothing yet
        except RuntimeError as error:
            raise ConfigError(f"runtime.compile_options.{name}: torch rejects it: {error}.", where=where) from error


def compile_arguments(config: RunConfig) -> dict[str, Any]:
    """Returns the arguments of torch.compile in addition to its backend, for inductor."""
    runtime = config.runtime
    if runtime.compile_mode is not None:
        return {"mode": runtime.compile_mode}
    return {"options": runtime.compile_options.to_dict()} if runtime.compile_options else {}


def check_compile_backend(config: RunConfig) -> str | None:
    """Returns `runtime.compile_backend`; raises if torch does not know it."""
    where = config.origin("runtime.compile_backend")
    return known_backend("runtime.compile_backend", config.runtime.compile_backend, where=where)


class CompiledForward:
    """Runs the forward of a run and its loss, compiled where possible.

    Training and evaluation are two regions, so new shapes in one do not recompile the other.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        config: RunConfig,
        model: nn.Module,
        storage: EventStorage,
        owners: Iterable[Any],
        users: UserFiles,
        keeps_training_outputs: bool = True,
        sums_gradients: bool = False,
    ) -> None:
        """`owners` (trainer, task, model) are searched for the user's forward.

        Without `keeps_training_outputs` only the names of the outputs leave the training region: logits that leave a
        graph are kept in memory. With `sums_gradients`, each block is a separate graph, so the reduction of gradients
        over replicas overlaps with the backward.
        """
        runtime = config.runtime
        backend = check_compile_backend(config) or _BACKEND
        arguments = compile_arguments(config)
        self.compilations = Compilations(users, forward=_location_of_forward(owners, users))
        self._compute = compute
        self._config = config
        self._storage = storage
        self._max_breaks = runtime.max_graph_breaks
        self.has_eager_code = is_gathered = compile_gathered(model, backend, arguments)
        """True if only blocks of the model are compiled, and the code around them is not."""
        if sums_gradients and not is_gathered:
            compile_blocks(model, backend, arguments)
        has_separate_blocks = not is_gathered and keep_apart(model)
        # Separately compiled blocks are intended breaks; the listener ignores those.
        self._rejects_breaks = runtime.max_graph_breaks == 0 and not has_separate_blocks
        self._contexts = self._choose_contexts(model)
        self._train: Callable[..., RegionOutputs] = _run_forward if keeps_training_outputs else _run_to_loss
        self._evaluate: Callable[..., RegionOutputs] = _run_forward
        if not is_gathered:
            self._train = _compile(self._train, "forward_to_train", backend, arguments)
            self._evaluate = _compile(self._evaluate, "forward_to_evaluate", backend, arguments)

    def run(self, batch: Any) -> RegionOutputs:
        """Runs the forward on a micro-batch."""
        region = self._train if torch.is_grad_enabled() else self._evaluate
        try:
            with self._compiling():
                outputs = region(self._compute, batch)
        except TypeError:
            # The keys of a batch are checked against the forward only outside of a graph.
            with torch.compiler.set_stance("force_eager"):
                self._compute(batch)
            raise
        # Stores the values that the graph has put; with pending names, the next micro-batch would be another graph.
        self._storage.file_traced()
        if self._max_breaks is not None and len(self.compilations.breaks) > self._max_breaks:
            self._reject_breaks(list(self.compilations.breaks.values()))
        return outputs

    def _choose_contexts(self, model: nn.Module) -> list[Callable[[], AbstractContextManager[Any]]]:
        """Returns the contexts of a call. torch's settings are global, so they are set only during the call."""
        runtime = self._config.runtime
        chosen: list[Callable[[], AbstractContextManager[Any]]] = []
        if self._rejects_breaks:
            chosen.append(lambda: torch._dynamo.error_on_graph_break(True))
        elif runtime.max_graph_breaks is not None:
            # The limit also applies without the hook that reports breaks.
            chosen.append(lambda: listening(self.compilations))
        if has_around(model, Recomputed):
            # Values that a block puts into the event storage are counted only in its first pass.
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

    @staticmethod
    def is_compiler_failure(error: Exception) -> bool:
        """Returns True for an error of the compiler itself; a signal also ends the compiler's processes."""
        from torch._dynamo.exc import BackendCompilerFailed

        return isinstance(error, BackendCompilerFailed)

    def explain(self, error: Exception) -> None:
        """Raises an error that names the line that broke the graph, or the compiler that failed; ignores other errors.

        A backward is compiled when it first runs, so the errors of a whole step are passed here.
        """
        from torch._dynamo import exc

        if self._rejects_breaks and isinstance(error, exc.Unsupported | exc.UserError):
            self._reject_breaks([self.compilations.break_of(error)], cause=error)
        if self.is_compiler_failure(error):
            cause = getattr(error, "inner_exception", error)
            reason = next((line.strip().rstrip(".") for line in str(cause).splitlines() if line.strip()), "no reason")
            raise TrainwrightError(
                f"runtime.mode: torch.compile failed: {type(cause).__name__}: {reason}. Use "
                "runtime.compile_backend: aot_eager, which needs no compiler, or mode: eager.",
                where=self._config.origin("runtime.mode"),
            ) from error

    def _reject_breaks(self, breaks: list[GraphBreak], *, cause: Exception | None = None) -> None:
        listed = "".join(f"\n  {each}" for each in breaks)
        raise TrainwrightError(
            f"runtime.max_graph_breaks is {self._max_breaks}, but the compiled forward has graph breaks:{listed}\n"
            "Change these lines, or raise the number (null: any).",
            where=self._config.origin("runtime.max_graph_breaks"),
        ) from cause


def user_files_of(project_dir: Any, owners: Iterable[Any]) -> UserFiles:
    """Returns which files belong to the user; those of `owners` (trainer, task, model) count wherever they are."""
    users = UserFiles(project_dir)
    for each in owners:
        users.include(type(each))
    return users


def _location_of_forward(owners: Iterable[Any], users: UserFiles) -> str:
    """Returns the source location of the user's forward."""
    name = ""
    for owner in owners:
        code = getattr(inspect.unwrap(type(owner).forward), "__code__", None)
        if code is not None and code.co_filename in users:
            return f"{shown_path(code.co_filename)}:{code.co_firstlineno}"
        name = f"{type(owner).__name__}.forward"
    return name


def _compile(region: Any, name: str, backend: str, arguments: Mapping[str, Any]) -> Callable[..., RegionOutputs]:
    # torch counts graphs by code object, and gives up after eight: each region of each trainer has its own.
    code = region.__code__.replace(co_name=name)
    compiled: Any = torch.compile(FunctionType(code, globals()), backend=backend, **arguments)
    return compiled  # type: ignore[no-any-return]  # the same function for torch


def _run_forward(compute: Compute, batch: Any) -> RegionOutputs:
    """The region. The weight of a plain loss is applied outside, because a changing number would be another graph."""
    return compute(batch)


def _run_to_loss(compute: Compute, batch: Any) -> RegionOutputs:
    """The same with detached metrics, and only the names of the outputs."""
    loss, metrics, outputs, num_targets = compute(batch)
    metrics = {name: _detach(value) for name, value in metrics.items()}
    return RegionOutputs(loss, metrics, None if outputs is None else dict.fromkeys(outputs), num_targets)


def _detach(value: Any) -> Any:
    if isinstance(value, Mean):
        return Mean(_detach(value.total), _detach(value.count))
    return value.detach() if isinstance(value, torch.Tensor) else value


def inspect_forward(
    run: Callable[[], object],
    *,
    owners: Iterable[Any],
    users: UserFiles,
    config: RunConfig,
    storage: EventStorage,
    backend: Backend,
) -> None:
    """Runs one forward and reports code that cannot be compiled, before the compilation, which takes minutes.

    Uses of the host that break a compiled graph are warnings; they are errors, listed together, in mode graph and with
    `runtime.max_graph_breaks: 0`. Restores everything that the forward changed.
    """
    owners = list(owners)
    sightings = HostSyncMode(users)
    try:
        _watch_forward(run, sightings, owners, users, storage, backend, with_gradients=False)
    except RuntimeError as error:
        if "require grad" not in str(error):
            raise
        # The forward itself computes gradients; it needs as much memory as a step.
        _watch_forward(run, sightings, owners, users, storage, backend, with_gradients=True)
    found = sorted(sightings.sightings.values(), key=lambda each: (each.location.file, each.location.line))
    direct = [each for each in found if each.is_direct]
    runtime = config.runtime
    breaks = direct if runtime.mode == "graph" else [each for each in direct if each.use.breaks]
    if breaks and (runtime.mode == "graph" or runtime.max_graph_breaks == 0):
        _reject_host_uses(breaks, config)
    for each in direct:
        effect = "breaks the graph" if each.use.breaks else "makes the host wait"
        logger.warning(
            "%s: in runtime.mode %s this %s: %s. %s", each.location, runtime.mode, effect, each.use.what, each.use.fix
        )
    for each in found:
        if not each.is_direct:
            # Library code may behave differently when it is compiled.
            logger.info("%s: library code called here may break the graph: %s.", each.location, each.use.what)


def _reject_host_uses(sightings: list[Sighting], config: RunConfig) -> None:
    mode = config.runtime.mode
    name = "mode" if mode == "graph" else "max_graph_breaks"
    listed = "".join(f"\n  {each.location}: {each.use.what}. {each.use.fix}" for each in sightings)
    number = f"{len(sightings)} lines" if len(sightings) > 1 else "1 line"
    raise TrainwrightError(
        f"runtime.{name}: the forward cannot be one graph because of {number}:{listed}\n"
        f"Change {'it' if len(sightings) == 1 else 'them'}, or use runtime.mode: "
        f"{'compile' if mode == 'graph' else 'eager'}.",
        where=config.origin(f"runtime.{name}"),
    )


def _watch_forward(
    run: Callable[[], object],
    sightings: HostSyncMode,
    owners: list[Any],
    users: UserFiles,
    storage: EventStorage,
    backend: Backend,
    *,
    with_gradients: bool,
) -> None:
    """Runs the forward under the mode, and restores objects, generators and the event storage."""
    before = ObjectSnapshot(owners, users)
    generators, device = generator_state(), backend.device
    # fork_rng always keeps the CPU's generator, and only knows device types that have another one.
    has_generator = not reads_at_once(device)
    devices, device_type = ([device.index or 0], device.type) if has_generator else ([], "cuda")
    with torch.random.fork_rng(devices, device_type=device_type), storage.isolated():
        try:
            with torch.set_grad_enabled(with_gradients), watching(sightings):
                run()
        finally:
            before.restore()
            restore_generators(generators)
    backend.release_memory()


_IMMUTABLE = (bool, int, float, str, bytes, type(None))
# Parameters of a sharded model are replaced when they are gathered in a forward.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"_buffers"}


class ObjectSnapshot:
    """The state of some objects, to restore later.

    Keeps the attributes and their values; the contents of lists, dicts, sets and deques; the values of tensors that are
    not parameters; the states of generators; and, recursively, the same for containers, modules and objects of user
    classes. Other objects are not changed, because some belong to other threads.
    """

    def __init__(self, owners: Iterable[Any], users: UserFiles) -> None:
        self._users = users
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so no id is reused
        self._actions: list[Callable[[], object]] = []
        self._pending: list[Any] = []
        for owner in owners:
            self._keep_attributes(owner)
        while self._pending:
            self._keep(self._pending.pop())

    def restore(self) -> None:
        """Restores everything, in the same objects."""
        with torch.no_grad():
            for action in self._actions:
                action()

    def _keep(self, value: Any) -> None:
        if isinstance(value, _IMMUTABLE) or id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            self._seen[id(value)] = value
            self._keep_tensor(value)
        elif isinstance(value, list | deque | dict | set):
            self._seen[id(value)] = value
            self._keep_contents(value)
        elif (restore := _generator_restorer(value)) is not None:
            self._seen[id(value)] = value
            self._actions.append(restore)
        elif isinstance(value, nn.Module) or self._is_user_object(value):
            self._keep_attributes(value)

    def _is_user_object(self, value: Any) -> bool:
        if isinstance(value, type | torch.utils.data.Dataset):  # the next batch is being fetched from it
            return False
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
        return file is not None and file in self._users

    def _keep_attributes(self, owner: Any) -> None:
        if id(owner) in self._seen or not hasattr(owner, "__dict__"):
            return
        self._seen[id(owner)] = owner
        left_out = _MODULE_ATTRIBUTES if isinstance(owner, nn.Module) else frozenset()
        attributes = {name: value for name, value in vars(owner).items() if name not in left_out}
        self._pending += attributes.values()
        if isinstance(owner, nn.Module):
            self._pending += owner.children()

        def restore() -> None:
            now = vars(owner)
            for name in [name for name in now if name not in attributes and name not in left_out]:
                del now[name]
            now.update(attributes)

        self._actions.append(restore)

    def _keep_contents(self, container: Any) -> None:
        if isinstance(container, dict):
            items = dict(container)
            self._pending += items.values()

            def restore() -> None:
                if not _are_same([*container, *container.values()], [*items, *items.values()]):
                    container.clear()
                    container.update(items)

        else:
            members = list(container)
            self._pending += members

            def restore() -> None:
                if not _are_same(list(container), members):
                    container.clear()
                    (container.update if isinstance(container, set) else container.extend)(members)

        self._actions.append(restore)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, nn.Parameter) or tensor.is_inference() or tensor.is_meta:
            return
        version, copy = version_of(tensor), tensor.detach().clone()

        def restore() -> None:
            if version_of(tensor) != version or not torch.equal(tensor, copy):  # .data is written without a version
                tensor.copy_(copy)

        self._actions.append(restore)


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _generator_restorer(value: Any) -> Callable[[], object] | None:
    """Returns a function that restores the current state of a generator; None for other objects."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, random.Random):
        internal = value.getstate()
        return lambda: value.setstate(internal)
    return None
