"""The forward and its loss as one compiled region, for `runtime.mode: compile` and, on a GPU, `graph`.

Compiled is the whole way from a micro-batch to its loss, the trainer's and the task's code included; everything around
it (autocast, backward, the update) is the same as in eager mode. Blocks that must stay apart (those of `model.scan`,
and those whose parameters are gathered for their use) are compiled by themselves: memory/scan.py.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from trainwright.backends import waits_for_memory
from trainwright.config import RunConfig
from trainwright.errors import ConfigError, TrainwrightError, exit_code_of
from trainwright.events import Mean
from trainwright.loop.compilations import Compilations, GraphBreak, listening
from trainwright.loop.outputs import ForwardResult, read_forward
from trainwright.loop.user_lines import UserFiles
from trainwright.memory.forwards import has_around
from trainwright.memory.remat import Recomputed
from trainwright.memory.scan import compile_gathered, keep_apart, known_backend
from trainwright.tracebacks import shown_path

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

Region = Callable[..., tuple[Any, dict[str, Any], Mapping[str, Any] | None]]
"""Maps a trainer and a micro-batch to the loss, the metrics and the outputs."""
_BACKEND = "inductor"
_WITHOUT_EFFECT = ("compile_backend", "compile_memory_budget", "expect_graph_breaks")


def refuse_modes(config: RunConfig, axes: Mapping[str, int]) -> None:
    """Refuses a mode with settings that it cannot be joined with, and settings of other modes; imports nothing."""
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
            "Use mode: eager, and model.scan to compile the blocks.",
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
        self.compilations = Compilations(users, forward=_place_of_forward(trainer, users))
        self._trainer = trainer
        self._num_breaks_expected = runtime.expect_graph_breaks
        is_gathered = compile_gathered(trainer.model, backend)
        is_scanned = not is_gathered and keep_apart(trainer.model)
        # Blocks that stay apart are breaks on purpose, and are told from others by who listens.
        self._refuses_breaks = runtime.expect_graph_breaks == 0 and not is_scanned
        self._surroundings = self._choose_surroundings()
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
            self._refuse_breaks(list(self.compilations.breaks.values()))
        return ForwardResult(loss, trainer.samples_in_hand, metrics, outputs)

    def _choose_surroundings(self) -> list[Callable[[], AbstractContextManager[Any]]]:
        """Returns what a call of a region runs in. Torch's settings are the process's: they hold for the call alone."""
        runtime = self._trainer.config.runtime
        chosen: list[Callable[[], AbstractContextManager[Any]]] = []
        if self._refuses_breaks:
            chosen.append(lambda: torch._dynamo.error_on_graph_break(True))
        elif runtime.expect_graph_breaks is not None:
            # The hook that tells of breaks may not be there, and the limit holds all the same.
            chosen.append(lambda: listening(self.compilations))
        if has_around(self._trainer.model, Recomputed):
            # What a block puts into the event storage is put in its first pass only.
            once = {"skip_fwd_side_effects_in_bwd_under_checkpoint": True}
            chosen.append(lambda: torch._dynamo.config.patch(once))
        if runtime.compile_memory_budget is not None:
            budget = {"activation_memory_budget": runtime.compile_memory_budget}
            chosen.append(lambda: torch._functorch.config.patch(budget))
        return chosen

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        if not self._surroundings:
            yield
            return
        with ExitStack() as stack:
            for each in self._surroundings:
                stack.enter_context(each())
            yield

    def explain(self, error: Exception) -> None:
        """Says which line broke the graph, or that a compiler failed; other errors are left.

        A backward is compiled when it first runs, so whoever runs it asks too. Where the run was told to leave, which
        ends a compiler's processes as well, this leaves as a run does that is told to.
        """
        from torch._dynamo import exc

        if self._refuses_breaks and isinstance(error, exc.Unsupported | exc.UserError):
            self._refuse_breaks([self.compilations.break_of(error)], cause=error)
        if isinstance(error, exc.BackendCompilerFailed):
            self._leave_if_told()
            cause = getattr(error, "inner_exception", error)
            reason = next((line.strip().rstrip(".") for line in str(cause).splitlines() if line.strip()), "no reason")
            raise TrainwrightError(
                f"runtime.mode: torch.compile failed: {type(cause).__name__}: {reason}. Use "
                "runtime.compile_backend: aot_eager, which needs no compiler, or mode: eager.",
                where=self._trainer.config.origin("runtime.mode"),
            ) from error

    def _leave_if_told(self) -> None:
        trainer = self._trainer
        if trainer.agreement.is_told_to_leave():
            reason = trainer.agreement.reason or "interrupted"
            saved = trainer.surroundings.store.steps()
            goes_on = f"goes on from step {saved[-1]}" if saved else "begins anew, for nothing was saved yet"
            logger.info("%s ended the compilation in step %d. The same command %s.", reason, trainer.step + 1, goes_on)
            raise SystemExit(exit_code_of(reason))

    def _refuse_breaks(self, breaks: list[GraphBreak], *, cause: Exception | None = None) -> None:
        number = self._num_breaks_expected
        listed = "".join(f"\n  {each}" for each in breaks)
        raise TrainwrightError(
            f"runtime.expect_graph_breaks: {number}, but the compiled forward breaks into pieces:{listed}\n"
            "Change these lines, or raise the number (null: any).",
            where=self._trainer.config.origin("runtime.expect_graph_breaks"),
        ) from cause


def users_of(trainer: Trainer) -> UserFiles:
    """Returns which files are the user's own, those of the trainer, task and model included wherever they are."""
    users = UserFiles(trainer.config.project_dir)
    for part in (trainer, trainer.task, trainer.model):
        users.include(type(part))
    return users


def _place_of_forward(trainer: Trainer, users: UserFiles) -> str:
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
