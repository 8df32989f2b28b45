"""What a Trainer's `build_*` methods are offered: the defaults, made from the config's sections.

`build.py` fulfils this contract. It is stated here so that the loop knows nothing of how parts are made.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainwright.backends import Backend, reads_at_once
from trainwright.backends.host_memory import Garbage
from trainwright.checkpoint.contents import reject_unsavable, restore_generators
from trainwright.checkpoint.folder import FolderLock
from trainwright.checkpoint.remote_files import RemotePath
from trainwright.checkpoint.remote_store import AnyStore
from trainwright.config import BatchPlan, RunConfig
from trainwright.data.order import chain_seed
from trainwright.data.stream_loader import EvaluationData, TrainingData
from trainwright.errors import ConfigError, DataError, OutOfMemory, TrainwrightError
from trainwright.events import EventStorage
from trainwright.events.mean import merge, summarise
from trainwright.loop.checkpointing import BestSoFar, Checkpoints
from trainwright.loop.compiled_forward import compile_forward, run_as_is
from trainwright.loop.evaluation import EvalLogs, EvaluationAbandoned, evaluate_sets, read_eval
from trainwright.loop.graph_step import HostNumber, StepRunner
from trainwright.loop.heartbeat import Phases
from trainwright.loop.hook import Hook, Hooks, call_each
from trainwright.loop.metrics import ConfiguredMetric
from trainwright.loop.outputs import ForwardResult, explain_failure
from trainwright.loop.rollback import AnomalyResponse
from trainwright.loop.state import cut
from trainwright.loop.stop_signal import Agreement, Intent
from trainwright.loop.task import Task, overrides
from trainwright.loop.update import StepResult, Update, Updater
from trainwright.memory.out_of_memory import is_out_of_memory, out_of_memory
from trainwright.parallel.collectives import Ranks
from trainwright.user_code.signatures import reject_mismatch
from trainwright.writers.writer import Writer

logger = logging.getLogger(__name__)


class Builder(Protocol):
    """Offers each part as the config describes it; `config` is the whole of it."""

    config: RunConfig

    def task(self) -> Task:
        """The `task` section, or the default task."""

    def model(self) -> torch.nn.Module:
        """The `model` section, or the task's model; on the CPU, in the run's randomness."""

    def optimizers(self, model: torch.nn.Module) -> Mapping[str, torch.optim.Optimizer]:
        """The `trainer.optimizer` or `trainer.optimizers` section, each over its own parameters."""

    def train_data(self) -> Any:
        """The training dataset."""

    def eval_data(self) -> Mapping[str, Any]:
        """The evaluation datasets by name."""

    def collator(self) -> Callable[[list[Any]], Any]:
        """The `data.collator` section."""

    def hooks(self) -> list[Hook]:
        """The default hooks, then those of the `hooks` section."""

    def writers(self) -> list[Writer]:
        """The `writers` section; empty on all ranks but the first."""


@dataclass(frozen=True)
class TrainerContext:
    """What the builder hands a Trainer beside its named arguments. A user's trainer passes it on unread."""

    backend: Backend
    ranks: Ranks
    batch: BatchPlan
    max_steps: int
    updater: Updater
    storage: EventStorage
    hooks: list[Hook]
    writers: list[Writer]
    folder: Path
    store: AnyStore
    metrics: list[ConfiguredMetric] = field(default_factory=list)
    test_data: EvaluationData | None = None


_GIVEN = (
    "config",
    "task",
    "model",
    "optimizer",
    "train_dataset",
    "validation_dataset",
    "context",
    "checkpoint_exporter",
)
"""What `build_trainer` hands a constructor, by keyword; the last two reach Trainer's own through `**rest`."""

_CALL = "super().__init__(config, task, model, optimizer, train_dataset, validation_dataset, **rest)"


def reject_wrong_constructor(trainer_class: type) -> None:
    """Rejects a trainer whose own constructor does not take what it is about to be handed."""
    name, owner, where = _constructor_of(trainer_class)
    if where is None:
        return
    try:
        inspect.signature(trainer_class).bind(**dict.fromkeys(_GIVEN))
    except TypeError as error:
        raise ConfigError(
            f"{owner}.__init__ does not take what trainers are built with ({error}), so {name} cannot be made. Write "
            "def __init__(self, config, task, model, optimizer, train_dataset=None, validation_dataset=None, "
            f"**rest), and in it {_CALL}.",
            where=where,
        ) from error


def take_context(trainer: object, rest: dict[str, Any]) -> TrainerContext:
    """Takes what `build_trainer` hands a trainer out of `rest`, or says that the constructor has not passed it on."""
    context: TrainerContext | None = rest.pop("context", None)
    if context is None:
        name, _, where = _constructor_of(type(trainer))
        raise TrainwrightError(
            f"{name} was made without its context. Make it with build_trainer(config, {name}), and pass **rest on "
            "to super().__init__.",
            where=where,
        )
    if rest.get("checkpoint_exporter") is not None:
        name, _, where = _constructor_of(type(trainer))
        raise ConfigError(
            f"{name}.__init__: checkpoint_exporter has no effect, for the loop itself keeps the best checkpoint. Name "
            "the metric in the config, checkpoint: {keep_best: {metric: valid/loss, mode: min}}, and pass None on.",
            where=where,
        )
    return context


def reject_half_made(trainer: object, attribute: str) -> None:
    """Raises if a trainer's own constructor has not called that of Trainer by the time an attribute is read."""
    if torch.compiler.is_compiling():  # what Python would say is no part of a graph
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {attribute!r}")
    if "context" in vars(trainer) or attribute.startswith("__"):
        return  # complete; Python itself may ask for a dunder of an object that is being copied
    name, owner, where = _constructor_of(type(trainer))
    if where is not None:
        raise TrainwrightError(
            f"{owner}.__init__ has not called super().__init__, so {name} has no `{attribute}`. Call {_CALL} first.",
            where=where,
        )


def _constructor_of(kind: type) -> tuple[str, str, str | None]:
    """Returns the class's name, that of the class whose `__init__` it has, and where that is; None for our own."""
    owner = next(each for each in kind.__mro__ if "__init__" in vars(each))
    code = getattr(owner.__init__, "__code__", None)  # type: ignore[misc]  # a class's own function, not a call
    is_ours = owner.__module__.startswith("trainwright.")
    where = None if is_ours or code is None else f"{code.co_filename}:{code.co_firstlineno}"
    return kind.__name__, owner.__name__, where


def explain_memory(trainer: Trainer, error: Exception) -> OutOfMemory:
    """Writes what holds the memory and what the config could change, and returns an error that says so."""
    phase, step, _ = trainer.phases.current
    return out_of_memory(
        error,
        step=step,
        folder=trainer.folder,
        model=trainer.model,
        optimizers=trainer.optimizers,
        config=trainer.config,
        backend=trainer.backend,
        rank=trainer.ranks.rank,
        in_evaluation=phase == "evaluate",
    )


def run_pipeline(trainer: Trainer, update: Update, batch: Any) -> None:
    """Runs all micro-batches of a batch, forward and backward, over the stages."""
    pipeline = trainer.context.updater.pipeline
    assert pipeline is not None
    micro_batches: list[Mapping[str, Any]] = []
    samples: list[int] = []
    for micro_batch in trainer.micro_batches(batch):
        micro_batches.append(_mapping(micro_batch))
        samples.append(trainer.samples_in_hand)

    def scale(outputs: Any, number: int) -> torch.Tensor:
        result = _read(trainer, outputs, micro_batches[number], samples[number])
        scaled = update.scale(result)
        assert scaled is not None  # stages meet in every backward
        return scaled

    update.begin_backward()
    with _autocast(trainer):
        pipeline.run(micro_batches, scale)
    update.note_elsewhere()


def evaluate_pipeline(trainer: Trainer, batch: Any) -> ForwardResult | None:
    """Returns a batch's result on the last stage; None on the others."""
    pipeline = trainer.context.updater.pipeline
    assert pipeline is not None
    with _autocast(trainer):
        outputs = pipeline.evaluate(_mapping(batch))
    return None if outputs is None else _read(trainer, outputs, batch, trainer.samples_in_hand)


def _autocast(trainer: Trainer) -> AbstractContextManager[Any]:
    keeps_casts = trainer.context.updater.sync is None
    return trainer.backend.autocast(trainer.config.runtime.precision, keeps_casts=keeps_casts)


def _read(trainer: Trainer, outputs: Any, micro_batch: Mapping[str, Any], num_samples: int) -> ForwardResult:
    """Lets the trainer's forward see the outputs that the last stage has made."""
    whole = trainer.samples_in_hand
    trainer.outputs_in_hand, trainer.samples_in_hand = outputs, num_samples
    try:
        return trainer.run_forward(micro_batch)
    finally:
        trainer.outputs_in_hand, trainer.samples_in_hand = None, whole


def _mapping(batch: Any) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise DataError(f"runtime.mesh.pipeline needs batches that are mappings, but this is a {type(batch).__name__}.")
    return batch


class Feed(Iterator[Any]):
    """Iterates over training data on the device; after `start_anew` from the position that the data has then.

    Closing it ends the loader's workers.
    """

    def __init__(self, data: TrainingData, backend: Backend) -> None:
        self._data = data
        self._backend = backend
        self._batches: Generator[Any, None, None] = data.batches(backend.to_device)

    def __next__(self) -> Any:
        return next(self._batches)

    def start_anew(self) -> None:
        """Forgets what was fetched ahead: the run has gone back to an earlier position."""
        self._batches.close()
        self._batches = self._data.batches(self._backend.to_device)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._batches.close()


class StepEnd:
    """Ends the steps of one run; keeps what has been evaluated, written and saved so far."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.garbage = Garbage(num_steps=trainer.max_steps)
        self.eval_logs: dict[str, float] = {}
        """The logs of the last evaluation, the test set's included; `evaluated_step` says when that was."""
        self.evaluated_step = -1
        self.reported: set[str] = set()
        """The names of those logs that the writers have been shown."""
        self.window_logs: dict[str, Any] = {}
        self.wants_save = False
        """Is a checkpoint of this step asked for, on every rank alike?"""
        self.asks_for_save = False
        """Does this rank ask for one? With several it is agreed on by the next votes."""
        self.is_evaluating = False
        """Is a step's own evaluation under way? It may be left and done again by a resumed run."""
        self.saved_step = -1
        self.written_step = 0
        """The last step that the writers have seen. After going back, steps up to it are not written twice."""
        self._has_warned = False
        self._nothing_before = 0
        """The next step of which the config's periods ask something."""

    @property
    def fresh_eval_logs(self) -> dict[str, float]:
        """What an evaluation of this very step gave."""
        return self.eval_logs if self.evaluated_step == self._trainer.step else {}

    def recall(self, logs: Mapping[str, float]) -> None:
        """Takes up the evaluation of the step that was restored, if it had one."""
        trainer = self._trainer
        self.eval_logs, self.evaluated_step = dict(logs), trainer.step if logs else -1
        self.reported = set() if trainer.has_unfinished_step else set(logs)

    def ask_for_save(self) -> None:
        """Asks for a checkpoint in the midst of a step."""
        if self._trainer.ranks.size == 1:
            self.wants_save = True
        else:
            self.asks_for_save = True

    def forget(self) -> None:
        """Forgets what belongs to steps that are undone: the run has gone back."""
        self.recall({})
        self.wants_save = self.asks_for_save = False
        self.saved_step = -1
        self._nothing_before = 0

    def agree(self) -> None:
        """Compares the ranks' requests, and takes notice of checkpoints that were written meanwhile."""
        trainer = self._trainer
        checkpoints = trainer.checkpoints
        trainer.phases.enter("vote", trainer.step)
        if trainer.agreement.is_plain and checkpoints.is_idle and not self.asks_for_save:
            return
        checkpoints.look()
        if checkpoints.failure is not None:
            trainer.agreement.request(Intent.FAIL, "saving failed")
        asks = self.asks_for_save or checkpoints.is_time()
        num_committed, is_time = trainer.agreement.vote(checkpoints.num_committed, asks)
        checkpoints.announce(num_committed)
        self.wants_save |= checkpoints.grants(is_time)
        if trainer.agreement.decided == Intent.FAIL:
            checkpoints.reject_failure()

    def run(self) -> bool:
        """Ends the step under way; returns False if the run went back to an earlier one instead."""
        trainer = self._trainer
        if self._is_nothing_due():
            trainer.has_unfinished_step, trainer.ended_under, trainer.is_mid_step = False, 0, False
            self.garbage.tidy(is_due=False)
            return True
        trainer.is_mid_step = True
        # Before the host waits: the device still has work, which hides it.
        self.garbage.tidy(is_due=self._is_write_due)
        if self._must_look() and trainer.anomaly_response.went_back():
            return False
        try:
            self._evaluate_if_due()
        except EvaluationAbandoned:
            # The update is done and good; the run that goes on evaluates it anew.
            trainer.agreement.decided = Intent.INTERRUPT
            trainer.is_mid_step = False
            trainer.save()
            return True
        except Exception:
            # The update is done and good: keep it, then say what went wrong. Saving takes all ranks.
            trainer.is_mid_step = False
            if not trainer.ranks.is_alone:
                trainer.save()
            raise
        trainer.phases.enter("write", trainer.step)
        self._write_if_due()
        trainer.has_unfinished_step, trainer.ended_under = False, trainer.max_steps if trainer.is_last_step else 0
        trainer.is_mid_step = False
        self._save_if_due()
        if trainer.anomaly_response.is_snapshot_due:
            trainer.anomaly_response.take_snapshot()
        return True

    def _is_nothing_due(self) -> bool:
        """Is this a step like most: nothing to look at, evaluate, write or save? Asked in every step, so cheap."""
        trainer = self._trainer
        step = trainer.step
        watch = trainer.context.updater.watch
        if step < self._nothing_before and step < trainer.max_steps and not trainer.agreement.decided:
            return not (self.wants_save or trainer.best.step == step or (watch is not None and watch.has_found))
        config = trainer.config
        periods = [config.log.every_steps, config.evaluation.every_steps, config.checkpoint.every_steps]
        if trainer.anomaly_response.may_go_back:
            periods.append(config.anomalies.snapshot_every_steps)
        self._nothing_before = min(step - step % every + every for every in periods if every)
        if config.checkpoint.every_samples:
            self._nothing_before = 0
        return False

    def _must_look(self) -> bool:
        """Must anomalies be known now? Where the device runs ahead, only before something leaves the step."""
        trainer = self._trainer
        return (
            reads_at_once(trainer.device)
            or self._is_evaluation_due
            or self._is_write_due
            or self._is_save_due
            or trainer.anomaly_response.is_snapshot_due
        )

    @property
    def _is_evaluation_due(self) -> bool:
        every = self._trainer.config.evaluation.every_steps
        return self._trainer.is_last_step or bool(every and self._trainer.step % every == 0)

    @property
    def _is_write_due(self) -> bool:
        return self._trainer.is_last_step or self._trainer.step % self._trainer.config.log.every_steps == 0

    @property
    def _is_save_due(self) -> bool:
        trainer = self._trainer
        return bool(
            self.wants_save
            or trainer.is_last_step
            or trainer.agreement.decided
            or trainer.checkpoints.is_due()
            or trainer.best.step == trainer.step
        )

    def _evaluate_if_due(self) -> None:
        if not self._is_evaluation_due:
            return
        trainer = self._trainer
        trainer.phases.enter("evaluate", trainer.step)
        if self.evaluated_step != trainer.step:
            logs: dict[str, float] = {}
            if trainer.eval_data:
                logs = self._evaluate(trainer.eval_data)
            self.eval_logs, self.evaluated_step, self.reported = logs, trainer.step, set()
            if logs:
                trainer.best.note(trainer.step, logs)
                # Evaluating has brought the ranks together, so a hook's request to stop can be agreed on at once.
                trainer.agreement.settle()
        test = trainer.context.test_data
        if trainer.is_last_step and test is not None and not any(name.startswith("test/") for name in self.eval_logs):
            self.eval_logs = {**self.eval_logs, **self._evaluate({test.name: test})}

    def _evaluate(self, sets: Mapping[str, EvaluationData]) -> dict[str, float]:
        self.is_evaluating = True
        try:
            return evaluate_sets(self._trainer, sets)
        finally:
            self.is_evaluating = False

    def _write_if_due(self) -> None:
        trainer = self._trainer
        logs: dict[str, Any] = {}
        if self._is_write_due:
            for name, count in (trainer.train_data.counts if trainer.train_data else {}).items():
                trainer.storage.put_scalar(f"samples/{name}", count, smoothing_hint=False)
            self.window_logs = summarise(merge(trainer.ranks.gather(trainer.storage.take_window())))
            logs = trainer.train_loop_end()
            self._warn_of_nan(logs)
            if not trainer.is_last_step:
                trainer.train_loop_begin()
        evaluated = {name: value for name, value in self.fresh_eval_logs.items() if name not in self.reported}
        if logs or evaluated:
            self.reported |= evaluated.keys()
            trainer.storage.publish(logs, evaluated=evaluated)
            if trainer.step > self.written_step or trainer.is_last_step:
                self.written_step = trainer.step
                for writer in trainer.context.writers:
                    writer.write(trainer.storage)

    def _warn_of_nan(self, logs: Mapping[str, Any]) -> None:
        """Warns once of a loss in the log that is not finite; updates that an anomaly held back are such a case."""
        loss, trainer = logs.get("loss"), self._trainer
        if isinstance(loss, float) and not math.isfinite(loss) and not self._has_warned and trainer.ranks.is_first:
            self._has_warned = True
            logger.warning(
                "Step %d: the loss is %s. Lower the learning rate, or set trainer.max_grad_norm.", trainer.step, loss
            )

    def _save_if_due(self) -> None:
        trainer = self._trainer
        if self.wants_save or (self._is_save_due and (self.saved_step != trainer.step or trainer.ended_under)):
            trainer.save()


_STEP_STREAM = 0x57E9  # keeps the steps' randomness apart from that of samples and evaluations


class Trainer:
    """Trains a model; `build_trainer(config, MyTrainer)` makes one.

    before_train
    while step < max_steps:
        before_step
        batch  = next_train_inputs(iterator)
        result = train_step(batch)
        step  += 1
        after_step
        evaluate if due        (eval_begin, next_eval_inputs, eval_step, eval_end; after_eval)
        write if due           (train_loop_end; train_loop_begin)
        save if due            (after_save)
    after_train; close
    """

    step = HostNumber()
    """The number of updates done."""
    epoch = HostNumber()
    """The epoch of the step's first sample."""
    is_recording = False
    """Is a step being recorded, in graph mode? Python runs once then."""
    has_read_step_tensor = False

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        model: torch.nn.Module,
        optimizer: Any,
        train_dataset: TrainingData | None = None,
        validation_dataset: Mapping[str, EvaluationData] | None = None,
        checkpoint_exporter: None = None,
        **rest: Any,
    ) -> None:
        context = take_context(self, {**rest, "checkpoint_exporter": checkpoint_exporter})
        self.config = config
        self.task = task
        self.model = model
        self.optimizers: dict[str, torch.optim.Optimizer] = (
            dict(optimizer) if isinstance(optimizer, Mapping) else {"main": optimizer}
        )
        self.train_data = train_dataset
        self.eval_data: dict[str, EvaluationData] = dict(validation_dataset or {})
        self.context = context
        self.loss_scale = context.updater.loss_scale
        self.backend, self.ranks = context.backend, context.ranks
        self.storage = context.storage
        self.device = self.backend.device
        self.max_steps = context.max_steps
        self.callbacks = Hooks(context.hooks)
        self._updater, self._writers = context.updater, context.writers
        self._step_tensor = torch.zeros((), dtype=torch.int64, device=self.device)
        # Checked against the first training forward, so that a wrong name does not wait for the first evaluation.
        self._unchecked_metrics = [] if overrides(self, "eval_step", Trainer) else list(context.metrics)
        for hook in context.hooks:
            hook.trainer = self
        self._seed_chain, self._draws = chain_seed(config.seed, _STEP_STREAM), self.ranks.mesh.draws
        self._begin_at_zero()
        self.post_init()

    def _begin_at_zero(self) -> None:
        """Sets what says where the run stands; a checkpoint restores some of it (loop/checkpointing.py)."""
        self.step = 0
        self.epoch = 0
        self.eval_name: str | None = None
        self.samples_in_hand = 0
        """How many samples the batch in hand has on this rank: what a plain loss or metric weighs."""
        self.interrupted = False
        self.eval_averages: dict[str, float] = {}
        self.unclaimed_hook_state: dict[str, Any] = {}
        self.has_unfinished_step = False
        """Is an update done but not yet evaluated and written? A run resumed there finishes that first."""
        self.ended_under = 0
        """The `max_steps` under which the run ended, by that limit, by `stop` or for lack of data; else 0."""
        self.is_mid_step = False
        self.outputs_in_hand: Any = None
        self.saved_generators: Mapping[str, Any] | None = None
        self._update: Update | None = None
        self.agreement = Agreement(self.ranks)
        self.anomaly_response = AnomalyResponse(self)
        self.checkpoints = Checkpoints(self)
        self.step_end = StepEnd(self)
        self.phases = Phases()
        self.compiled_forward = compile_forward(self)
        self._updater.enter_phase = lambda phase: self.phases.enter(phase, self.step + 1)

    if not TYPE_CHECKING:  # for mypy a class with this method has every attribute

        def __getattr__(self, name: str) -> Any:
            reject_half_made(self, name)
            return object.__getattribute__(self, name)  # raises what Python would say

    # construction: `build` offers the defaults; return something else to change them

    @classmethod
    def build_task(cls, build: Builder) -> Task:
        """Returns what is learned."""
        return build.task()

    @classmethod
    def build_model(cls, build: Builder) -> torch.nn.Module:
        """Returns the model, on the CPU."""
        return build.model()

    @classmethod
    def build_optimizers(cls, build: Builder, model: torch.nn.Module) -> Any:
        """Returns an optimizer, or several by name."""
        return build.optimizers(model)

    @classmethod
    def build_train_data(cls, build: Builder) -> Any:
        """Returns the training dataset."""
        return build.train_data()

    @classmethod
    def build_eval_data(cls, build: Builder) -> Mapping[str, Any]:
        """Returns the evaluation datasets by name."""
        return build.eval_data()

    @classmethod
    def build_collator(cls, build: Builder) -> Any:
        """Returns a callable from a list of samples to a batch."""
        return build.collator()

    @classmethod
    def build_hooks(cls, build: Builder) -> list[Hook]:
        """Returns the hooks, in the order in which they are called."""
        return build.hooks()

    @classmethod
    def build_writers(cls, build: Builder) -> list[Writer]:
        """Returns the writers."""
        return build.writers()

    def post_init(self) -> None:
        """Called at the end of construction, before any state is restored."""

    # what a user's code may read

    @property
    def iter(self) -> int:
        """The number of updates done: an alias of `step`."""
        return self.step

    @property
    def global_step(self) -> int:
        """The number of updates done: an alias of `step`."""
        return self.step

    @property
    def step_tensor(self) -> torch.Tensor:
        """The number of updates done, on the device."""
        self.has_read_step_tensor = True
        return self._step_tensor if self.is_recording else self._step_tensor.fill_(self.step)

    @property
    def is_finished(self) -> bool:
        """Has the run ended, with its last step evaluated and written? A higher limit lets it go on."""
        return max(self.step, self.ended_under) >= self.max_steps and not self.has_unfinished_step

    @property
    def is_last_step(self) -> bool:
        """Is this step the last, by its number or because the ranks agreed to stop?"""
        return self.step >= self.max_steps or self.agreement.decided == Intent.STOP

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends before its limit, if it does."""
        return self.agreement.reason

    @property
    def best(self) -> BestSoFar:
        """The best value so far of the metric that `checkpoint.keep_best` names."""
        return self.checkpoints.best

    @property
    def eval_logs(self) -> dict[str, float]:
        """The logs of the last evaluation, the test set's included."""
        return self.step_end.eval_logs

    @property
    def hooks(self) -> list[Hook]:
        """The hooks, in the order in which they are called."""
        return self.callbacks.all

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.context.folder

    # inputs

    def next_train_inputs(self, iterator: Iterator[Any]) -> Any:
        """Returns the batch of the next update; each `next` is one global batch, already on the device."""
        return next(iterator)

    def next_eval_inputs(self, iterator: Iterator[Any]) -> tuple[Any, dict[str, Any]]:
        """Returns (batch, passthrough logs); the latter stay on the host and join the step's logs."""
        return next(iterator), {}

    # one update

    def forward(self, **batch: Any) -> Any:
        """Returns the loss of a micro-batch, or (loss, metrics); see loop/outputs.py for the other forms."""
        return self.outputs_of(batch)

    def outputs_of(self, batch: Any) -> Any:
        """Returns what the task gives for a micro-batch; in a pipeline, what its last stage has made already."""
        return self.task.forward(self.model, batch) if self.outputs_in_hand is None else self.outputs_in_hand

    def train_step(self, batch: Any) -> StepResult:
        """Makes one update from one batch."""
        update = self.begin_update()
        if self._updater.pipeline is not None:
            run_pipeline(self, update, batch)
            return update.apply()
        for micro_batch in self.micro_batches(batch):
            update.backward(self.run_forward(micro_batch))
        return update.apply()

    def begin_update(self) -> Update:
        """Begins an update with cleared gradients; end it with `apply()`."""
        own = [name for name in ("train_step", "micro_batches", "begin_update") if overrides(self, name, Trainer)]
        is_known = self._updater.pipeline is None and not own
        num_backwards = self.context.batch.gradient_accumulation_steps if is_known else None
        self._update = self._updater.begin(lambda: self.samples_in_hand, num_backwards=num_backwards)
        return self._update

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Yields the micro-batches of this rank's batch, as many on every rank."""
        num_micro_batches = self.context.batch.gradient_accumulation_steps
        if num_micro_batches == 1:
            yield batch
            return
        assert self.train_data is not None
        whole = self.samples_in_hand
        for micro_batch, num_samples in cut(batch, whole, num_micro_batches, self.train_data.collator):
            self.samples_in_hand = num_samples
            yield micro_batch
        self.samples_in_hand = whole

    def run_forward(self, batch: Any) -> ForwardResult:
        """Runs `forward` in the run's precision and reads what it returned."""
        with self.backend.autocast(self.config.runtime.precision, keeps_casts=self._updater.sync is None):
            try:
                compiled = self.compiled_forward
                result = run_as_is(self, batch) if compiled is None else compiled.run(batch)
            except (IndexError, RuntimeError) as error:
                explain_failure(error, batch, self.model)
                raise
        while self._unchecked_metrics:
            self._unchecked_metrics.pop().require(result.outputs, batch)
        return result

    def call_forward(self, batch: Any) -> Any:
        """Calls `forward` with a micro-batch: what `run_forward` runs compiled, or as it is."""
        if isinstance(batch, Mapping):
            if not torch.compiler.is_compiling():
                reject_mismatch(type(self).forward, tuple(batch))
            return self.forward(**batch)
        if overrides(self, "forward", Trainer):
            raise DataError(f"forward(**batch) needs a mapping, but the batch is a {type(batch).__name__}.")
        return self.outputs_of(batch)

    # evaluation

    def eval_begin(self) -> None:
        """Called before the first batch of each set; `self.eval_name` says which."""

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Returns a batch's metrics: scalars, Means, or one value a sample. Gradients are off."""
        result = self.run_forward(batch) if self._updater.pipeline is None else evaluate_pipeline(self, batch)
        logs: EvalLogs = EvalLogs() if result is None else read_eval(result)
        return logs

    def eval_end(self, aggregated: Any) -> dict[str, Any]:
        """Returns the logs of one set; `aggregated` is what the task's `aggregate_logs` made, or None."""
        logs: dict[str, Any] = dict(self.eval_averages)
        if aggregated is not None:
            logs.update(self.task.reduce_aggregated_logs(aggregated, self.step))
        return logs

    # boundaries

    def train_loop_begin(self) -> None:
        """Called when a log window begins."""

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the logs of the window that ends: that dict is the line."""
        return self.step_end.window_logs

    # public acts

    def train(self) -> dict[str, float]:
        """Trains until a limit is reached or somebody stops it; returns the last evaluation's logs."""
        if self.train_data is None:
            raise ConfigError("data.train: there is no training data. Name a dataset, or call evaluate().")
        if self.is_finished:
            limit = "max_steps" if self.step >= self.max_steps else "max_epochs or max_steps"
            logger.info("The run has ended at step %d: nothing is left to do. Raise %s to go on.", self.step, limit)
            return self.eval_logs
        with self._running(), Feed(self.train_data, self.backend) as feed:
            step = StepRunner(self)
            is_loss_rank, share = (
                self.ranks.mesh.is_loss_rank,
                1.0 / self.ranks.size,
            )  # of ranks that share samples one counts
            self.train_loop_begin()
            if self.has_unfinished_step or self.agreement.decided == Intent.STOP:
                self.step_end.run()
            while self.step < self.max_steps and not self.agreement.decided:
                self.epoch = self.train_data.epoch
                self.storage.step = self.step + 1
                self._updater.set_rates(self.step)
                self.seed_step()
                self.is_mid_step = True
                for act in self.callbacks.before_step:
                    act()
                self.phases.enter("data", self.step + 1)
                places = self.train_data.order_position
                try:
                    batch = self.next_train_inputs(feed)
                except StopIteration:
                    if self.anomaly_response.went_back():  # an anomaly that nobody had looked at yet
                        self._go_on_from_earlier(feed, step)
                        continue
                    self._run_out_of_data()
                    break
                self.phases.enter("step", self.step + 1)
                self.samples_in_hand = self.train_data.batch_num_samples
                self.anomaly_response.note_places(places, self.train_data.order_position)
                self.checkpoints.places_before = places
                result = step.run(batch)
                self._updater.share_buffers()
                self.step += 1
                self.has_unfinished_step, self.ended_under = True, 0
                self.storage.put_result(
                    result,
                    weight=self.loss_weight,
                    num_samples=self.samples_in_hand * is_loss_rank,
                    share=share,
                )
                self.phases.enter("hooks", self.step)
                for act in self.callbacks.after_step:
                    act()
                self.step_end.agree()
                if not self.step_end.run():
                    self._go_on_from_earlier(feed, step)
        return self.eval_logs

    def evaluate(self) -> dict[str, float]:
        """Evaluates every set and returns the logs, such as {"valid/loss": 0.3}."""
        return evaluate_sets(self, self.eval_data)

    def save(self) -> Path | RemotePath:
        """Saves a checkpoint of this step, on every rank alike, and returns its folder.

        It is written beside training: `after_save` is called when it is there. In the midst of a step it is saved
        at the step's end, when every hook has had its turn; with several processes, of which one may ask for all, at
        the end of the next one. Outside of `train` it is there when this returns.
        """
        if self.is_mid_step:
            self.step_end.ask_for_save()
            return self.context.store.path(self.step)
        self.phases.enter("save", self.step)
        self.step_end.wants_save = self.step_end.asks_for_save = False
        path = self.checkpoints.save(metrics=self.step_end.fresh_eval_logs)
        self.step_end.saved_step = -1 if self.has_unfinished_step else self.step
        return path

    def join(self) -> None:
        """Waits until the checkpoint that is being written is there; every rank calls it."""
        self.checkpoints.settle(must_succeed=True)

    def seed_step(self) -> None:
        """Seeds torch's generators for this step.

        Randomness is a function of the step, so a resumed or rolled-back run draws the same numbers.
        """
        self.backend.seed(chain_seed(self.step, *self._draws, state=self._seed_chain) >> 1)

    def stop(self, reason: str) -> None:
        """Ends the run after this step, as if it were the last: evaluated, written and saved.

        On several ranks any one may ask; after an evaluation all stop at once, else one step later.
        """
        self.agreement.request(Intent.STOP, reason)

    def interrupt(self, reason: str) -> None:
        """Saves after this step and leaves; running the same command again goes on as if nothing had happened."""
        self.agreement.request(Intent.INTERRUPT, reason)

    # the loop's own steps

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Runs before_train and after_train around the loop, and closes hooks and writers whatever happens."""
        with FolderLock(self.folder, enabled=self.ranks.is_first), self.storage, self.step_end.garbage:
            try:
                self.callbacks.call("before_train")
                reject_unsavable(self.callbacks.keyed())
                if self.saved_generators is not None:  # only now, for a hook may have drawn in before_train
                    restore_generators(self.saved_generators)
                if self.anomaly_response.may_go_back:
                    self.anomaly_response.take_snapshot()  # there may be no checkpoint yet
                self.agreement.begin()
                self.checkpoints.prepare()
                self.checkpoints.is_training = True
                yield
                self.checkpoints.is_training = False
                self.agreement.share_reason()
                self.checkpoints.settle(must_succeed=True)
                self.interrupted = self.agreement.decided == Intent.INTERRUPT and not self.is_finished
                if not self.interrupted:
                    self.callbacks.call("after_train")
            except Exception as error:
                if is_out_of_memory(error):
                    raise explain_memory(self, error) from error
                if self.compiled_forward is not None:
                    self.compiled_forward.explain(error)
                raise
            finally:
                self.phases.enter("leave", self.step)
                self.checkpoints.is_training = False
                self.checkpoints.close()
                # Whatever fails to close must hide neither the run's own error nor the others' closing.
                for problem in [*self.callbacks.call_all("close"), *call_each([each.close for each in self._writers])]:
                    logger.error("A hook or writer failed to close: %s", problem)

    def _go_on_from_earlier(self, feed: Feed, step: StepRunner) -> None:
        """Goes on after the run went back to an earlier step; if it was to end meanwhile, that step is its last."""
        feed.start_anew()
        step.forget()
        if self.has_unfinished_step or self.agreement.decided == Intent.STOP:
            self.step_end.run()
        elif self.agreement.decided:
            self.save()  # nothing else: that step was evaluated and written when it was made

    def _run_out_of_data(self) -> None:
        """Ends the last step once more, now as the run's last: its evaluation gets a line of its own."""
        self.stop("the training data ended")
        self.storage.step, self.agreement.decided = self.step, Intent.STOP
        self.step_end.run()

    @property
    def loss_weight(self) -> Any:
        """What the last update's loss weighs."""
        return self.samples_in_hand if self._update is None else self._update.weight

    @loss_weight.setter
    def loss_weight(self, weight: Any) -> None:
        if self._update is not None:
            self._update.weight = weight
