"""The loop: the steps, and the work at the end of each step, in the order of execution.

    train() → next_train_inputs → train_step → run_forward → forward → Task.forward → model
                                             → Update.backward, Update.apply (update.py)
            → hooks → _vote → _end_step: anomalies, evaluation, writing, saving

What a forward may return is in outputs.py. `Builder` is the contract of construction; build/ implements it.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from trainwright.anomaly.detection import Anomaly
from trainwright.anomaly.response import AnomalyResponse
from trainwright.backends import Backend, Capture, reads_at_once, waits_for_memory
from trainwright.backends.host_memory import GarbageCollection
from trainwright.benchmarks.benchmark import ConfiguredBenchmark
from trainwright.checkpoint import contents
from trainwright.checkpoint.base_weights import BaseWeights, check_references
from trainwright.checkpoint.encoding import map_tensors
from trainwright.checkpoint.folder_lock import FolderLock
from trainwright.checkpoint.remote_files import RemotePath
from trainwright.checkpoint.remote_store import AnyStore
from trainwright.checkpoint.retention import metrics_by_step
from trainwright.checkpoint.run_folder import LOG_FILE, run_id
from trainwright.compile.graph import GraphStep, StepTensor
from trainwright.compile.guards import GuardedObjects, has_user_code_between_steps
from trainwright.compile.regions import (
    CompiledForward,
    RegionOutputs,
    check_compile_backend,
    inspect_forward,
    user_files_of,
)
from trainwright.config import BatchPlan, CheckpointSection, EvaluationSection, LogSection, RunConfig, Section
from trainwright.data.collators import plain_mappings
from trainwright.data.loader import MadeBatches, ToDevice
from trainwright.data.order import chain_seed
from trainwright.data.stream_loader import EvaluationData, StreamData, TrainingData
from trainwright.errors import (
    AnomalyError,
    CheckpointError,
    ConfigError,
    DataError,
    HostReadError,
    OutOfMemory,
    exit_code_of,
)
from trainwright.events import EventStorage, Mean
from trainwright.events.mean import IGNORED_LABEL, Window, merge, summarise
from trainwright.events.media import merge_media
from trainwright.events.storage import full_logs
from trainwright.log import outlive_console, rank_log, run_log
from trainwright.loop.agreement import EvaluationAbandoned
from trainwright.loop.checkpointing import BestCheckpoint, Checkpointing
from trainwright.loop.evaluation import EvalLogs, EvaluatedSet, Evaluator, logs_of
from trainwright.loop.heartbeat import Heartbeat
from trainwright.loop.hook import HOOK_EVENTS, Hook, HookCalls, call_each
from trainwright.loop.metrics import ConfiguredMetric, MetricNames
from trainwright.loop.outputs import (
    ConfiguredLoss,
    ForwardResult,
    explain_failure,
    full_loss,
    read_forward,
    reject_ignored_labels,
)
from trainwright.loop.outside_model import reject_outside, user_attributes
from trainwright.loop.state import Batch, RunState, count_samples, num_rows, reject_graph, split_batch
from trainwright.loop.stop_signal import StopRequest, StopSignal
from trainwright.loop.task import Task, advise_fields, overrides
from trainwright.loop.update import StepResult, Update, Updater
from trainwright.memory.out_of_memory import is_out_of_memory, out_of_memory
from trainwright.models.from_config import FreezeRule
from trainwright.models.layers.attention import mark_full_rows
from trainwright.models.transformers_models import recognizes_full_rows
from trainwright.optim.device_step import eval_weights, has_eval_weights
from trainwright.optim.trainable import (
    OptimizerRecipe,
    add_trainable,
    restore_members,
    unfreeze_due,
    unowned_parameters,
)
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import is_split
from trainwright.parallel.replicate import copy_from_first
from trainwright.progress import progress
from trainwright.user_code.constructors import (
    check_constructed,
    explain_attribute,
    reject_missing_context,
    reject_unknown_arguments,
)
from trainwright.user_code.locations import is_user_code, location_of
from trainwright.user_code.methods import ATTRIBUTES_ELSEWHERE, is_used
from trainwright.user_code.signatures import reject_mismatch
from trainwright.watch.report import write_final_report
from trainwright.writers.benchmark_results import BenchmarkResult
from trainwright.writers.curves import plot_curves
from trainwright.writers.json_lines import read_history
from trainwright.writers.notebook import run_html
from trainwright.writers.writer import RunInfo, Writer, unstored_media

if TYPE_CHECKING:
    from trainwright.parallel.mixed_tensors import GatherMixed

logger = logging.getLogger(__name__)

_STEP_STREAM = 0x57E9  # separates the randomness of steps from that of samples and evaluations


class Builder(Protocol):
    """What a Trainer's `build_*` methods receive: each object as the config describes it."""

    config: RunConfig

    def task(self) -> Task:
        """The `task` section, or the default task."""

    def options(self) -> Any:
        """The values of the trainer's `options_section`; None if it has none."""

    def model(self) -> torch.nn.Module:
        """The `model` section, or the task's model; on the CPU, initialized with the run's seed."""

    def first_model(self) -> torch.nn.Module:
        """Another copy of the model, with its weights before the first step."""

    def model_of(self, label: str, section: Mapping[str, Any]) -> torch.nn.Module:
        """The model of another model section; `label` is the setting."""

    def part(self, kind: str, label: str, section: Mapping[str, Any], *, called_with: Sequence[str] = ()) -> Any:
        """The object of another component; `label` is the setting.

        A function that has one of the parameters `called_with` is itself the object and is not called.
        """

    def optimizers(self, model: torch.nn.Module) -> Mapping[str, torch.optim.Optimizer]:
        """The `trainer.optimizer` or `trainer.optimizers` section, each over its own parameters."""

    def train_data(self) -> Any:
        """The training dataset."""

    def sampler(self, dataset: Any) -> Any:
        """The `data.sampler` section for the training dataset; None without one."""

    def eval_data(self) -> Mapping[str, Any]:
        """The evaluation datasets by name."""

    def collator(self) -> Callable[[list[Any]], Any]:
        """The `data.collator` section."""

    def hooks(self) -> list[Hook]:
        """The default hooks, then those of the `hooks` section."""

    def writers(self) -> list[Writer]:
        """The `writers` section; empty on all ranks except the first."""


@dataclass(frozen=True)
class TrainerContext:
    """What a Trainer needs in addition to its named arguments. A custom trainer passes it on in `**rest`."""

    backend: Backend
    ranks: Ranks
    batch_plan: BatchPlan
    max_steps: int
    updater: Updater
    storage: EventStorage
    hooks: list[Hook]
    writers: list[Writer]
    folder: Path
    store: AnyStore
    heartbeat: Heartbeat
    capture: Capture
    metrics: list[ConfiguredMetric] = field(default_factory=list)
    loss: ConfiguredLoss | None = None
    test_data: EvaluationData | None = None
    benchmarks: Mapping[str, ConfiguredBenchmark] = field(default_factory=dict)
    base: BaseWeights | None = None
    recipes: Mapping[str, OptimizerRecipe] = field(default_factory=dict)
    freeze_rules: Sequence[FreezeRule] = ()
    options: Any = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    frozen_models: Mapping[str, torch.nn.Module] = field(default_factory=dict)


_UNLABELLED = "unlabelled_rows"


class TrainIterator(Iterator[Any]):
    """Iterates over training batches on the device, from the position that the data has at the start.

    Closing it ends the loader's workers.
    """

    def __init__(self, data: TrainingData, to_device: ToDevice) -> None:
        self._data = data
        self._to_device = to_device
        self._batches: Generator[Any, None, None] = data.batches(to_device)
        self.fetched = Batch(None, 0)
        """The last batch."""
        self.num_ignored = self.num_unlabelled = 0
        """The numbers of ignored labels of this step on this rank, and of rows in which all labels are ignored."""

    def __next__(self) -> Any:
        value = next(self._batches)
        self.fetched = Batch(value, self._data.batch_num_samples)
        num_ignored, num_unlabelled = self._data.batch_ignored
        self.num_ignored += num_ignored
        self.num_unlabelled += num_unlabelled
        return value

    def restart(self) -> None:
        """Discards prefetched batches, because the data was set to another position."""
        self._batches.close()
        self._batches = self._data.batches(self._to_device)

    def __enter__(self) -> TrainIterator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._batches.close()


class Trainer:
    """Trains a model; `build_trainer(config, MyTrainer)` constructs one.

    Override the methods that differ: `forward` for the loss, `train_step` for the update, `next_train_inputs` for the
    batch, `eval_step` for the evaluation, the `build_*` methods for the construction. This is the loop:

        before_train
        while step < max_steps:
            before_epoch           if a new epoch begins
            before_step
            batch  = next_train_inputs(iterator)
            result = train_step(batch)
            step  += 1
            after_step
            evaluate if due        (eval_begin, next_eval_inputs, eval_step, eval_end; after_eval)
            after_epoch            if an epoch ended
            write if due           (train_loop_end; train_loop_begin)
            save if due            (after_save)
        after_train; close

    A subclass with its own constructor passes `**rest` on unchanged: it contains what a trainer needs besides its
    named arguments.
    """

    known_eval_names: ClassVar[tuple[str, ...]] = ("loss",)
    """The values of an evaluation set without configured metrics, as far as the class determines them."""
    varying_memory: ClassVar[str] = ""
    """The reason why steps need different amounts of memory, for which `auto` settings are rejected; "" if they do
    not."""
    options_section: ClassVar[type[Section] | None] = None
    """The additional keys of the `trainer` section of a built-in trainer, with types and defaults."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        model: torch.nn.Module,
        optimizer: Any,
        train_dataset: TrainingData | None = None,
        validation_dataset: Mapping[str, EvaluationData] | None = None,
        **rest: Any,
    ) -> None:
        set_before = set(vars(self))  # by a user's constructor
        context: TrainerContext | None = rest.pop("context", None)
        if context is None:
            reject_missing_context(type(self))
        if rest:
            reject_unknown_arguments(type(self), rest)
        self.config = config
        self.task = task
        self.model = model
        self.optimizers: dict[str, torch.optim.Optimizer] = (
            dict(optimizer) if isinstance(optimizer, Mapping) else {"main": optimizer}
        )
        self.train_data = train_dataset
        self.eval_data: dict[str, EvaluationData] = dict(validation_dataset or {})
        self.test_data = context.test_data
        self.benchmarks: dict[str, ConfiguredBenchmark] = dict(context.benchmarks)
        self.context = context
        self.options: Any = context.options
        """The values of `options_section`; None without one."""
        self.backend, self.ranks = context.backend, context.ranks
        self.device = self.backend.device
        self.storage = context.storage
        self.heartbeat = context.heartbeat
        self.max_steps = context.max_steps
        self.num_micro_batches = context.batch_plan.gradient_accumulation_steps
        """The micro-batches of a step on this rank."""
        self._max_micro_batches: int | None = None
        self._loss = context.loss
        self._state = RunState()
        self._batch = Batch(None, 0)
        self._window_logs: dict[str, Any] = {}
        self._best = BestCheckpoint(config.checkpoint.keep_best, where=config.origin("checkpoint.keep_best.metric"))
        self._updater, self._writers = context.updater, context.writers
        self._hook_calls = HookCalls(context.hooks)
        if any(entry.schedule is not None for entry in self._updater.optimizers.values()):
            self._hook_calls.check_after_each(self._updater.note_writer)
        owners: dict[str, tuple[contents.Stateful, type]] = {"trainer": (self, Trainer), "task": (task, Task)}
        self._stateful = {name: each for name, (each, kind) in owners.items() if overrides(each, "state_dict", kind)}
        """The trainer and the task, if they have state."""
        unowned = unowned_parameters(model, self.optimizers)
        self._frozen = {name: parameter for name, parameter in unowned.items() if not parameter.requires_grad}
        """The frozen parameters, which may become trainable."""
        self._frozen_at_start = list(self._frozen)
        self._has_closures = any(each.requires_closure for each in self._updater.optimizers.values())
        self._follows_trainable = bool(self._frozen) or self._updater.sync is not None
        self._stop_signal = StopSignal(self.ranks)
        self._checkpointing = Checkpointing(config.checkpoint, context.store, self.ranks)
        self._anomalies = AnomalyResponse(
            config.anomalies, self._updater.detector, ranks=self.ranks, folder=context.folder, store=context.store
        )
        self._garbage = GarbageCollection(num_steps=self.max_steps)
        self._evaluator = Evaluator(self, metrics=context.metrics, stop_signal=self._stop_signal, garbage=self._garbage)
        self._step_tensor = StepTensor(self.device, context.capture)
        self._updates: list[Update] = []
        """The updates that this step has begun."""
        self._is_training = False
        self._has_warned_of_loss = self._has_warned_of_optimizers = self._has_warned_of_mode = False
        self._unstored_media: set[str] = set()
        """The warnings that were logged; no writer stores them."""
        self._next_due = 0
        """Before this step, nothing is due by the config's periods unless an epoch ends."""
        periods = [config.evaluation.every_epochs, config.checkpoint.every_epochs, config.log.every_epochs]
        self._has_parts_of_epochs = any(every is not None and every % 1 != 0 for every in periods)
        """True if a period is a fraction of an epoch."""
        by_epoch = [
            *(each.is_by_epoch for each in self._updater.torch_schedules.values()),
            *(rule.until_epoch is not None for rule in context.freeze_rules),
        ]
        self._find_epoch_ends(has_period=any(periods) or any(by_epoch))
        self._keeps_optimizer_settings = False
        self._last_changed_step = -1
        """The last checkpoint with settings that differ from this run's and were accepted; -1 if there is none."""
        self._has_only_weights = False
        self._has_loaded_weights = False
        """True while the model has weights of a checkpoint, averaged or not, for an evaluation."""
        self._loaded_weights: str | None = None
        self._saved_generators: Mapping[str, Any] | None = None
        self._unclaimed_hook_state: dict[str, Any] = {}
        self._seed_chain, self._draws = chain_seed(config.seed, _STEP_STREAM), self.ranks.mesh.draws
        # Checked against the first training forward, so that a wrong name raises before the first evaluation.
        has_own_inputs = overrides(self, "eval_step", Trainer) or overrides(self, "next_eval_inputs", Trainer)
        self._unchecked_metrics = [] if has_own_inputs else list(context.metrics)
        own_steps = ("train_step", "micro_batches", "begin_update")
        self._has_own_step = any(overrides(self, name, Trainer) for name in own_steps)
        if overrides(self, "micro_batches", Trainer):
            self.micro_batches = self._count_micro_batches  # type: ignore[method-assign]
        self._keeps_outputs = False
        self._compiled = self._compile_forward()
        self._is_inspected, self._is_inspecting = config.runtime.mode == "eager", False
        self._has_shards = any(is_split(each) for each in model.parameters())
        """True if parameters are DTensors."""
        self.gather_mixed = self._make_gather_mixed()
        """A context for user code that computes with the parameters of a sharded model."""
        self._around_step = self.gather_mixed if is_user_code(type(self).train_step) else nullcontext()
        self._hook_calls.within = self.gather_mixed
        for hook in context.hooks:
            hook.trainer = self
        self._own_attributes = frozenset({*vars(self), "_own_attributes"} - set_before)
        self.post_init()

    if not TYPE_CHECKING:  # with this method, mypy would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if not torch.compiler.is_compiling():  # Python's own error would not be part of a graph
                check_constructed(self, name)
                explain_attribute(self, name)
            return object.__getattribute__(self, name)  # raises Python's own error

    @property
    def should_stop(self) -> Any:
        """Lightning's way to stop, which has no effect here. A subclass may use the name itself."""
        if "should_stop" in vars(self):
            return vars(self)["should_stop"]
        raise AttributeError(f"{type(self).__name__}.should_stop: {ATTRIBUTES_ELSEWHERE['should_stop']}.")

    @should_stop.setter
    def should_stop(self, value: object) -> None:
        if not is_used(type(self), "should_stop", Trainer):
            raise AttributeError(
                f"{type(self).__name__}.should_stop has no effect. Call stop(reason), which ends the run."
            )
        vars(self)["should_stop"] = value

    # Construction: `build` provides the defaults; return another object to change them.

    @classmethod
    def build_task(cls, build: Builder) -> Task:
        """Returns the task."""
        return build.task()

    @classmethod
    def build_model(cls, build: Builder) -> torch.nn.Module:
        """Returns the model, on the CPU."""
        return build.model()

    @classmethod
    def build_parts(cls, build: Builder) -> Mapping[str, Any]:
        """Returns further objects that the trainer uses, by name, such as rewards. `context.parts` has them.

        Called first, so that settings can be rejected before a model is built.
        """
        return {}

    @classmethod
    def build_frozen_models(cls, build: Builder, model: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
        """Returns models that the trainer evaluates and never trains, by name, on the CPU: a reference, a teacher.

        They are frozen, in evaluation mode, sharded like the model, and not saved: each start builds them again and
        compares their weights with those of the run's first start. `context.frozen_models` has them.
        """
        return {}

    @classmethod
    def build_optimizers(cls, build: Builder, model: torch.nn.Module) -> Any:
        """Returns an optimizer, or several by name."""
        return build.optimizers(model)

    @classmethod
    def build_train_data(cls, build: Builder) -> Any:
        """Returns the training dataset."""
        return build.train_data()

    @classmethod
    def build_sampler(cls, build: Builder, dataset: Any) -> Any:
        """Returns a sampler or a batch sampler that defines the order of the training dataset, or None."""
        return build.sampler(dataset)

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

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this object that a resumed run needs: nested dicts and lists of numbers, strings and
        tensors.

        It is saved in each checkpoint, for each data rank, and loaded after each evaluation set, so an evaluation does
        not change it. No `super()` is needed.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`: after `post_init` and before `before_train`, and again after a rollback.

        Tensors of a checkpoint are in host memory: move them to `self.device`.
        """

    # Attributes for user code.

    @property
    def step(self) -> int:
        """The number of completed updates."""
        if self.context.capture.is_active:
            raise HostReadError(
                "step is read, but Python runs only once in graph mode, so it would be the same in every update. Use "
                "self.step_tensor, the same number on the device."
            )
        return self._state.step

    @property
    def epoch(self) -> int:
        """The epoch of the first sample of the current step."""
        if self.context.capture.is_active:
            raise HostReadError(
                "epoch is read, but Python runs only once in graph mode, so it would be the same in every update."
            )
        return self._state.epoch

    @property
    def iter(self) -> int:
        """The number of completed updates: an alias of `step`."""
        return self.step

    @property
    def global_step(self) -> int:
        """The number of completed updates: an alias of `step`."""
        return self.step

    @property
    def step_tensor(self) -> torch.Tensor:
        """The number of completed updates, on the device."""
        return self._step_tensor.read(self._state.step)

    @property
    def state(self) -> RunState:
        """The progress of the run; only this file assigns its fields."""
        return self._state

    @property
    def batch(self) -> Batch:
        """The batch, or the micro-batch, that is being processed, with its number of samples."""
        return self._batch

    @property
    def best(self) -> BestCheckpoint:
        """The best value so far of the metric in `checkpoint.keep_best`."""
        return self._best

    @property
    def window_logs(self) -> dict[str, Any]:
        """The merged values of the window that just ended, for `train_loop_end`."""
        return self._window_logs

    @property
    def is_finished(self) -> bool:
        """True if the run has ended and its last step is evaluated and written. A higher limit continues it."""
        state = self._state
        return max(state.step, state.max_steps_at_end) >= self.max_steps and not state.has_unfinished_step

    @property
    def has_only_weights(self) -> bool:
        """True if the trainer was restored from a checkpoint of `checkpoint.contents: weights` and therefore cannot
        train."""
        return self._has_only_weights

    @property
    def is_last_step(self) -> bool:
        """True if this step is the last, by its number or because the ranks agreed to stop."""
        return self._state.step >= self.max_steps or self._stop_signal.decided == StopRequest.STOP

    @property
    def stop_reason(self) -> str | None:
        """The reason why the run ends before its limit, if it does."""
        return self._state.stop_reason or self._stop_signal.reason

    @property
    def interrupted(self) -> bool:
        """True if the run ended because of a signal or `interrupt`."""
        return self._state.interrupted

    @property
    def eval_logs(self) -> dict[str, float]:
        """The logs of the last evaluation, including the test set."""
        return self._state.eval_logs

    @property
    def eval_name(self) -> str | None:
        """The evaluation set that is being evaluated; None outside evaluations."""
        return self._evaluator.set_name

    @property
    def metric_names(self) -> MetricNames:
        """The names that evaluations return, for settings such as `checkpoint.keep_best.metric` that refer to one."""
        own = ("eval_step", "eval_end", "next_eval_inputs", "forward", "read_outputs", "add_metrics")
        section, forward = self.config.model, type(self.model).forward
        adds_names = (
            any(is_user_code(getattr(type(self), name)) for name in own)
            or type(self.task) is not Task
            or (section is not None and "replace" in section.reserved)
            or not forward.__module__.startswith(("trainwright.", "transformers."))
        )
        metrics = (*self.known_eval_names, *(each.name for each in self.context.metrics))
        is_higher: dict[str, Any] = {name: True for name in self.known_eval_names if name == "accuracy"}
        is_higher |= {each.name: getattr(each.metric, "higher_is_better", None) for each in self.context.metrics}
        modes = {name: "max" if higher else "min" for name, higher in is_higher.items() if higher is not None}
        return MetricNames(
            tuple(self.eval_data),
            tuple(dict.fromkeys(metrics)),
            are_all=not adds_names,
            modes=modes,
            benchmarks={name: each.benchmark.metrics for name, each in self.benchmarks.items()},
        )

    @property
    def evaluated_sets(self) -> dict[str, EvaluatedSet]:
        """The evaluation sets and the benchmarks by name."""
        return {**self.eval_data, **self.benchmarks}

    @property
    def benchmark_results(self) -> Sequence[BenchmarkResult]:
        """The results of the benchmarks of the last evaluation, with the samples that are written to the run folder."""
        return tuple(self._evaluator.benchmark_results)

    @property
    def loaded_weights(self) -> str | None:
        """The weights of a checkpoint that an evaluation selected, "ema" or "raw"; None for the default ones."""
        return self._loaded_weights

    @property
    def eval_averages(self) -> dict[str, float]:
        """The means of the evaluation set, for `eval_end`."""
        return self._evaluator.averages

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The hooks, in the order in which they are called; `build_hooks` adds others."""
        return tuple(self._hook_calls.hooks)

    def hook_states(self) -> dict[str, Hook]:
        """Returns the hooks by the keys of their states in a checkpoint."""
        return self._hook_calls.keyed()

    @property
    def own_attributes(self) -> frozenset[str]:
        """The names of the attributes that every trainer has; all others are the user's."""
        return self._own_attributes

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.context.folder

    @property
    def log_files(self) -> list[Path]:
        """The files in the run folder to which this rank writes the package's log."""
        rank = [rank_log(self.folder, self.ranks.rank)] if self.ranks.size > 1 else []
        return [self.folder / LOG_FILE, *rank] if self.ranks.is_first else rank

    @property
    def is_main_process(self) -> bool:
        """True on the rank that writes files and logs."""
        return self.ranks.is_first

    @property
    def compiled_forward(self) -> CompiledForward | None:
        """The compiled regions; None in eager mode."""
        return self._compiled

    # Inputs.

    def next_train_inputs(self, iterator: Iterator[Any]) -> Any:
        """Returns the batch of the next update; each `next` returns one global batch, already on the device.

        Without a dataset (`data.train: null`) an override makes the batch; dim 0 of its tensors is the number of
        samples.
        """
        return next(iterator)

    def next_eval_inputs(self, iterator: Iterator[Any]) -> tuple[Any, dict[str, Any]]:
        """Returns (batch, passthrough logs); the latter stay on the host and are added to the step's logs."""
        return next(iterator), {}

    def set_batch(self, value: Any, num_samples: int) -> None:
        """Makes a batch, or a micro-batch, the current one: a plain loss is weighted by its number of samples."""
        self._make_current(Batch(value, num_samples, object()))

    # One update.

    def forward(self, **batch: Any) -> Any:
        """Returns the loss of a micro-batch; its arguments are the keys of the batch.

        It may return the loss (a tensor or a `Mean`), `(loss, metrics)`, a mapping with `loss`, or an object with
        `.loss`. Metrics are numbers, one-element tensors or Means by name, and are averaged over the log window. If the
        loss is None, `trainer.loss` or the model's `criterion` computes it from the outputs and the labels. Evaluations
        call it too, without gradients.
        """
        return self.read_outputs(self.task.forward(self.model, batch), batch)

    def read_outputs(self, outputs: Any, batch: Any) -> Any:
        """Returns the result of `forward` for these outputs of the task, by default the outputs themselves.

        In a pipeline it is called with the outputs of the last stage, instead of `forward`.
        """
        return outputs

    def add_metrics(self, result: ForwardResult, batch: Any) -> None:
        """Adds metrics to the result of a forward; overridden by trainers that measure the outputs."""

    def train_step(self, batch: Any) -> StepResult:
        """Makes one update from one batch.

        An override begins an update, propagates losses and applies it:

            update = self.begin_update()
            for micro_batch in self.micro_batches(batch):
                update.backward(self.run_forward(micro_batch))
            return update.apply()
        """
        update = self.begin_update()
        pipeline = self._updater.pipeline
        if pipeline is not None:
            _require_mapping(batch)
            micro_batches = [Batch(each, self._batch.num_samples) for each in self.micro_batches(batch)]
            with self.autocast():
                update.backward_pipelined(micro_batches, self._read_stage_outputs, pipeline)
            return update.apply()
        for micro_batch in self.micro_batches(batch):
            update.backward(self.run_forward(micro_batch))
        return update.apply()

    def begin_update(self) -> Update:
        """Begins an update with cleared gradients; end it with `apply()`."""
        is_known = self._updater.pipeline is None and not self._has_own_step
        num_backwards = self.num_micro_batches if is_known else None
        update = self._updater.begin(
            self._batch.num_samples,
            num_backwards=num_backwards,
            accumulates=self.num_micro_batches > 1,
            micro_batch=self._batch.key,
        )
        self._updates.append(update)
        return update

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Yields the micro-batches of this rank's batch, the same number on every rank."""
        if self.num_micro_batches == 1:
            yield batch
            return
        assert self.train_data is not None
        whole = Batch(batch, self._batch.num_samples)
        if isinstance(self._batch.key, int):  # within the micro-batches of another batch
            whole = Batch(batch, num_rows(batch) or whole.num_samples)
        if overrides(self, "next_train_inputs", Trainer):
            reject_graph(batch, self.num_micro_batches)
        micro_batches = split_batch(whole, self.num_micro_batches, self.train_data.collator)
        for number, micro_batch in enumerate(islice(micro_batches, self._max_micro_batches)):
            self._make_current(replace(micro_batch, key=number))
            yield micro_batch.value
        self._make_current(whole)

    def _count_micro_batches(self, batch: Any) -> Iterator[Any]:
        """Yields the micro-batches of a custom `micro_batches`, which need not call `set_batch`: losses are averaged
        over them."""
        whole = before = self._batch
        for number, value in enumerate(type(self).micro_batches(self, batch)):
            if self._batch is before:
                self._make_current(Batch(value, before.num_samples, ("own", number)))
            before = self._batch
            yield value
        self._make_current(whole)

    def _follow_trainable(self) -> bool:
        """Adds parameters that have become trainable to their optimizers; returns True if there are any."""
        state, updater = self._state, self._updater
        if updater.sync is not None:
            updater.sync.follow_trainable()
        if self.context.freeze_rules:
            unfreeze_due(self._frozen, self.model, self.context.freeze_rules, step=state.step, epoch=state.epoch)
        added = {name: each for name, each in self._frozen.items() if each.requires_grad}
        if not added:
            return False
        unowned = unowned_parameters(self.model, self.optimizers)
        self._frozen = {name: each for name, each in self._frozen.items() if name in unowned}
        added = {name: each for name, each in added.items() if name in unowned}  # a hook may have added some already
        if updater.pipeline is not None:
            raise ConfigError(
                f"{next(iter(added))} has become trainable, but a pipeline cannot train further parameters during a "
                "run. Train it from the start, or use another mesh axis."
            )
        owners = add_trainable(added, self.optimizers, self.context.recipes)
        for name, parameter in added.items():
            parameter.grad = None
            del self._frozen[name]
        updater.follow_added()
        if updater.sync is not None:
            updater.sync.follow_trainable()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # torch 2.11 would use the graphs in which they have no gradient
        if self.ranks.is_first:
            shown = ", ".join([*added][:4]) + (f" and {len(added) - 4} more" if len(added) > 4 else "")
            names = ", ".join(dict.fromkeys(owners.values()))
            logger.info("Step %d: %s become trainable, with the optimizer %s.", state.step + 1, shown, names)
        return True

    def _read_batch(self, value: Any, fetched: Batch | None) -> Batch:
        """Returns a batch of an overridden `next_train_inputs`, with its number of samples.

        `fetched` is the last batch that it fetched in this step; None if it made the batch without fetching. Such a
        batch may have any number of samples; the ranks then agree on the size of the update and on the number of
        micro-batches. Raises StopIteration if another rank has no batch.
        """
        value = plain_mappings(value)
        num_samples = count_samples(value, fetched)
        if fetched is None:
            value = next(iter(self.batches_to_device(iter([value]))))
        if isinstance(self.train_data, MadeBatches):
            counts = self.train_data.add_batch(num_samples)
            if counts is None:
                raise StopIteration
            self._updater.global_batch_size = sum(counts)
            self.num_micro_batches = self.context.batch_plan.num_micro_batches(max(counts))
        return Batch(value, num_samples)

    def batches_to_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches on the device; marks masks without padding for models that recognize them."""
        marks_rows = self.model is not None and recognizes_full_rows(self.model)
        return self.backend.to_device(map(mark_full_rows, batches) if marks_rows else batches)

    def _make_current(self, batch: Batch) -> None:
        self._batch = batch
        for update in self._updates:
            update.num_samples, update.micro_batch = batch.num_samples, batch.key

    def run_forward(self, batch: Any) -> ForwardResult:
        """Runs `forward` in the run's precision and reads its result."""
        trace = self.heartbeat.trace
        if trace is not None:
            trace.enter_part("forward")
        num_samples = self._batch.num_samples
        # Low-precision copies of weights must not outlive the gathering of one layer (FSDP).
        with self.autocast():
            try:
                if self._compiled is not None:
                    result = self._run_compiled(self._compiled, batch, num_samples)
                else:
                    with self.gather_mixed:
                        returned = self.forward(**batch) if isinstance(batch, Mapping) else self.forward_batch(batch)
                    result = read_forward(returned, batch, self.model, num_samples, self._loss)
                    if self._has_shards:
                        result.loss = full_loss(result.loss)
                    self.add_metrics(result, batch)
            except TypeError as error:
                if isinstance(batch, Mapping):
                    reject_mismatch(type(self).forward, tuple(batch))
                explain_failure(error, batch, self.model)
                raise
            except (AttributeError, LookupError, RuntimeError) as error:
                explain_failure(error, batch, self.model)
                raise
        while self._unchecked_metrics:
            self._unchecked_metrics.pop().require(result.outputs, batch)
        if trace is not None:
            trace.leave_part()
        return result

    def forward_batch(self, batch: Any) -> Any:
        """Called instead of `forward` with a batch that is not a mapping."""
        if overrides(self, "forward", Trainer):
            raise DataError(
                f"forward(**batch) needs a mapping, but the batch is a {type(batch).__name__}. "
                f"{advise_fields(batch, type(self).forward)} a dict from the collator."
            )
        return self.read_outputs(self.task.forward(self.model, batch), batch)

    def _read_stage_outputs(self, outputs: Any, micro_batch: Batch) -> ForwardResult:
        """Reads the result of the last stage of a pipeline."""
        batch = micro_batch.value
        try:
            returned = self.read_outputs(outputs, batch)
            result = read_forward(returned, batch, self.model, micro_batch.num_samples, self._loss)
            self.add_metrics(result, batch)
        except (LookupError, RuntimeError) as error:
            explain_failure(error, batch, self.model)
            raise
        while self._unchecked_metrics:
            self._unchecked_metrics.pop().require(result.outputs, batch)
        return result

    # Evaluation.

    def eval_begin(self) -> None:
        """Called before the first batch of each set; `self.eval_name` is its name."""

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Returns the metrics of a batch: scalars, Means, or one value per sample. Gradients are disabled."""
        pipeline = self._updater.pipeline
        if pipeline is None:
            return logs_of(self.run_forward(batch))
        with self.autocast():
            outputs = pipeline.evaluate(_require_mapping(batch))
        return (
            EvalLogs()
            if outputs is None
            else logs_of(self._read_stage_outputs(outputs, Batch(batch, self._batch.num_samples)))
        )

    def eval_end(self, aggregated: Any) -> dict[str, Any]:
        """Returns the logs of one set; `aggregated` is the final state of the task's `aggregate_logs`, or None."""
        logs: dict[str, Any] = dict(self.eval_averages)
        if aggregated is not None:
            logs.update(self.task.reduce_aggregated_logs(aggregated, self.step))
        return logs

    # Window boundaries.

    def train_loop_begin(self) -> None:
        """Called when a log window begins."""

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the logs of the window that ends, which become its line."""
        return self._window_logs

    # Public methods.

    def train(self) -> dict[str, float]:
        """Trains until a limit is reached or a stop is requested; returns the logs of the last evaluation."""
        state, data = self._state, self.train_data
        if data is None:
            raise ConfigError("data.train: there is no training data. Name a dataset, or call evaluate().")
        if self.is_finished:
            if state.step >= self.max_steps:
                ended, remedy = "ended", "Raise its limit (max_steps, max_epochs or max_samples)"
            else:
                ended, remedy = "was stopped, by a hook or the end of its data,", "Change what stopped it"
            start_again = "To start over, choose another name, or use --fresh (in Python: fresh=True)."
            done = "The run %s at step %d: nothing is left to do. %s to continue. %s"
            logger.info(done, ended, state.step, remedy, start_again)
            return state.eval_logs
        graph = self._make_graph_step() if self.config.runtime.mode == "graph" else None
        # Of ranks that share samples, one counts them; each rank stores its share of the loss of all ranks.
        is_loss_rank, share = self.ranks.mesh.is_loss_rank, 1.0 / self.ranks.size
        without_graphs = nullcontext() if graph is None else closing(graph)
        iterating = TrainIterator(data, self.batches_to_device)
        with self._running(), without_graphs, iterating as iterator, self._starting() as count_first_step:
            trained_modules = self._enter_train_mode()
            self.train_loop_begin()
            if state.has_unfinished_step or self._stop_signal.decided == StopRequest.STOP:
                self._end_step()
            while state.step < self.max_steps and not self._stop_signal.decided:
                state.epoch, state.epoch_ended, state.phase = data.epoch, False, "in_step"
                self.storage.step = state.step + 1
                if state.epoch != state.begun_epoch and not data.is_at_end:
                    self._hook_calls.call("before_epoch")
                    state.begun_epoch = state.epoch
                self._updater.begin_step(state.step, state.epoch)
                self.seed_step()
                with self.gather_mixed:
                    for call in self._hook_calls.before_step:
                        call()
                if trained_modules and not self.model.training:
                    self._restore_train_mode(trained_modules)
                if self._follows_trainable and self._follow_trainable() and graph is not None:
                    graph.reset()
                self.heartbeat.enter("data", state.step + 1)
                state.data_start, before = data.order_position, iterator.fetched
                try:
                    batch = self.next_train_inputs(iterator)
                    fetched = iterator.fetched
                    if batch is not fetched.value:
                        fetched = self._read_batch(batch, None if fetched is before else fetched)
                        batch = fetched.value
                except StopIteration:
                    if isinstance(data, MadeBatches) and not data.has_ended:
                        data.add_batch(None)  # the other ranks are notified there
                    if self._respond_to_anomalies():  # not checked yet
                        self._continue_after_rollback(iterator, graph)
                        continue
                    self._end_with_data()
                    break
                self.heartbeat.enter("step")
                self._batch = fetched
                if self._updater.detector is not None:
                    self._updater.detector.positions = (state.data_start, data.order_position)
                num_samples = self._batch.num_samples
                if not self._is_inspected:
                    self._inspect_forward(batch)
                self._updates.clear()
                if self._has_closures:
                    self._updater.repeat = partial(self._repeat_step, batch)
                result: Any
                if graph is None:
                    with self._around_step:
                        result = self.train_step(batch)
                    weight = self._loss_weight()
                else:
                    result, weight = graph.run(batch, num_samples)
                if iterator.num_ignored:
                    self._note_ignored(iterator)
                if self.ranks.size > 1:
                    self._updater.share_buffers()
                state.step += 1
                state.has_unfinished_step, state.max_steps_at_end = True, 0
                state.epoch_ended = data.epoch > state.epoch
                self.storage.put_result(result, weight=weight, num_samples=num_samples * is_loss_rank, share=share)
                self.heartbeat.enter("hooks", state.step)
                with self.gather_mixed:
                    for call in self._hook_calls.after_step:
                        call()
                self._vote()
                count_first_step()
                if not self._end_step():
                    self._continue_after_rollback(iterator, graph)
        return state.eval_logs

    def evaluate(self) -> dict[str, float]:
        """Evaluates every set and returns the logs, such as {"valid/loss": 0.3}."""
        return self.evaluate_sets(self.evaluated_sets)

    def evaluate_sets(self, sets: Mapping[str, EvaluatedSet], *, with_hooks: bool = True) -> dict[str, float]:
        """Evaluates some sets and returns their logs."""
        hooks = self._hook_calls if with_hooks else HookCalls([])
        return self._evaluator.evaluate(sets, hooks, averaged=self._weights_to_evaluate(hooks))

    def save(self) -> Path | RemotePath:
        """Saves a checkpoint of this step, on every rank, and returns its folder.

        It is written in the background; `after_save` is called when it is committed. If it is called during a step, the
        checkpoint is saved at the end of the step, after every hook; with several processes, of which one may request
        it for all, at the end of the next step. Outside `train`, it is committed when this method returns.
        """
        state = self._state
        path = self.context.store.path(state.step)
        if state.phase != "between_steps":
            if self.ranks.size == 1:
                state.save_requested = True
            else:
                state.save_requested_here = True
            return path
        self.heartbeat.enter("save", state.step)
        state.save_requested = state.save_requested_here = False
        self._finish_save()
        self._checkpointing.prepare(self.model)
        self._checkpointing.start_save(state.step, self._collect_state(), metrics=state.step_eval_logs)
        if not self._is_training:
            self._finish_save(must_succeed=True)
            self._checkpointing.close()  # ends its thread
        elif not self.config.checkpoint.asynchronous:
            self._finish_save()
        state.saved_step = -1 if state.has_unfinished_step else state.step
        return path

    def join(self) -> None:
        """Waits until the checkpoint in progress is committed; every rank calls it."""
        self._finish_save(must_succeed=True)

    def barrier(self) -> None:
        """Waits until every rank calls it."""
        self.ranks.barrier()

    def plot(self, *names: str, ax: Any = None) -> Any:
        """Plots logged values over the steps with matplotlib and returns the axes: `plot("loss", "valid/loss")`.

        Without names, it plots the losses. `ax` are the axes to plot into; by default, a figure is created.
        """
        curves = self._curves()
        losses = [name for name in curves if name.rpartition("/")[2] == "loss"]
        return plot_curves(curves, names or losses or ["loss"], ax=ax)

    def _repr_html_(self) -> str:
        """Returns the display of the run for a notebook: progress, losses and last values."""
        curves = self._curves()
        return run_html(
            self.config.name,
            step=self._state.step,
            max_steps=self.max_steps or None,
            curves=curves,
            latest={name: points[-1][1] for name, points in curves.items()},
            details=str(self.folder),
        )

    def _curves(self) -> dict[str, list[tuple[int, float]]]:
        """Returns the logged numbers by name, with their steps; numbers that are in no file come from the storage."""
        found = read_history(self.folder)
        for name in self.storage.latest():
            points = [(step, value) for step, value in self.storage.history(name) if isinstance(value, int | float)]
            if points:
                found.setdefault(name, points)
        return found

    def seed_step(self) -> None:
        """Seeds torch's generators for this step.

        Randomness is a function of the step, so a resumed or rolled-back run draws the same numbers.
        """
        self.backend.seed(chain_seed(self._state.step, *self._draws, state=self._seed_chain) >> 1)

    def stop(self, reason: str) -> None:
        """Ends the run after this step, which is evaluated, written and saved like the last one.

        Any rank may call it; after an evaluation all ranks stop at once, otherwise one step later.
        """
        self._stop_signal.request(StopRequest.STOP, reason)

    def interrupt(self, reason: str) -> None:
        """Saves after this step and exits; running the same command again resumes the run."""
        self._stop_signal.request(StopRequest.INTERRUPT, reason)

    # Methods for build/ and api/.

    def set_max_steps(self, max_steps: int) -> None:
        """Changes the limit; schedules follow."""
        self.max_steps = self.storage.max_steps = self._updater.max_steps = max_steps
        self.config = self.config.derive({"trainer.max_steps": max_steps})

    def set_num_micro_batches(self, number: int, *, limit: int | None = None) -> None:
        """Splits batches into another number of micro-batches; a trial step may run only the first."""
        self.num_micro_batches, self._max_micro_batches = number, limit

    def reopen(self) -> None:
        """Lets a run that was stopped continue."""
        self._state.max_steps_at_end = 0
        self._stop_signal.reset()

    def skip_evaluation(self) -> None:
        """Disables evaluations during `train`."""
        self.eval_data, self.benchmarks, self.test_data = {}, {}, None

    def evaluate_only_at_end(self) -> None:
        """Evaluates once, after the last step."""
        self.config = self.config.derive({"evaluation.every_steps": None, "evaluation.every_epochs": None})

    def restore_checkpoint(self, step: int, *, keep_settings: bool = False) -> None:
        """Restores the state of a checkpoint; every rank reads it. A checkpoint that has only weights cannot be used to
        resume training.

        Each rank verifies what it reads, and raises if another one cannot read its part.

        With `keep_settings` the optimizers keep the settings (weight decay, betas) that they were built with.
        """
        store = self.context.store
        self._keeps_optimizer_settings = keep_settings
        if keep_settings:
            self._last_changed_step = max(self._last_changed_step, step)
        other_stages = self._names_of_all_stages()
        with self.ranks.failing_together():
            self._has_only_weights = contents.has_only_weights(store, step)
        with progress("Loading the checkpoint"):
            if self._has_only_weights:
                self._load_weights(step, None)
            with self.ranks.failing_together():
                if self._has_only_weights:
                    self._restore_progress(store.read_split(step, "training"))
                else:
                    self._load_model(step, other_stages)
                    self._restore_state(partial(store.read_split, step), other_stages)
        metrics = self.ranks.broadcast(metrics_by_step(store) if self.ranks.is_first else {})
        self._best.restore(metrics)
        self._state.restore_evaluation(metrics.get(step, {}))

    def load_weights(self, step: int, weights: str | None = None) -> None:
        """Loads the weights of a checkpoint, and the state of hooks, trainer and task, for an evaluation.

        `weights` is "ema", "raw", or None for those that the run's evaluations use.
        """
        self._load_weights(step, weights)
        self._loaded_weights = weights
        with self.ranks.failing_together():
            training = self.context.store.read_split(step, "training")
            contents.restore_hooks(training["hooks"], self._hook_calls.keyed(), model=self.model)
            if not contents.has_only_weights(self.context.store, step):
                self._restore_own_states(training, accept_changes=True)
        self._state.step = step

    def _load_weights(self, step: int, weights: str | None) -> None:
        store, source = self.context.store, self.context.store.path(step)
        other_stages = self._names_of_all_stages()
        with self.ranks.failing_together():
            averaged = contents.read_averaged(store, step, weights)
            self._load_model(step, other_stages)
            contents.load_averaged(averaged, self.model, source=source, other_stages=other_stages)
        self._has_loaded_weights = True

    # Around the loop.

    @contextmanager
    def _starting(self) -> Iterator[Callable[[], None]]:
        """Shows the progress until the first log line, which may take long; yields a function to call after each
        step."""
        step, every = self._state.step, self.config.log.every_steps
        left = min(self.max_steps - step, 1 if every is None else every - step % every)
        what = "Starting" if self.config.runtime.mode == "eager" else "Compiling and starting"
        with ExitStack() as first_steps:
            advance = first_steps.enter_context(progress(what, total=left, unit="steps"))

            def count() -> None:
                advance()
                if advance.done == left:
                    first_steps.close()

            yield count

    def _enter_train_mode(self) -> list[torch.nn.Module]:
        """Sets a model in eval mode to train mode, and returns the modules that are in train mode.

        `from_pretrained` of transformers returns models in eval mode, without dropout. Modules in eval mode within a
        model in train mode stay in eval mode, such as frozen normalization layers.
        """
        if not self.model.training:
            self.model.train()
            if self.model.training and self.ranks.is_first:
                logger.info("The model was in eval mode; it is trained in train mode.")
        return [module for module in self.model.modules() if module.training] if self.model.training else []

    def _restore_train_mode(self, modules: Sequence[torch.nn.Module]) -> None:
        """Reverts a `model.eval()` of a hook or a step that was not reverted, and warns once."""
        for module in modules:
            module.training = True
        if not self._has_warned_of_mode and self.ranks.is_first:
            logger.warning(
                "Step %d begins with the model in eval mode, because a hook or a step has called model.eval(). It is "
                "set to train mode; call model.train() afterwards.",
                self._state.step + 1,
            )
        self._has_warned_of_mode = True

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Runs before_train and after_train around the loop, and closes hooks and writers in any case."""
        hooks, lock = self._hook_calls, FolderLock(self.folder, enabled=self.ranks.is_first)
        products = self.backend.float32_products(tf32=self.config.runtime.tf32)
        with run_log() as open_logs, outlive_console(), lock, self.storage, self._garbage, products:
            open_logs(*self.log_files)
            try:
                if self.evaluated_sets:
                    self._best.check(self.metric_names)
                    for schedule in self._updater.torch_schedules.values():
                        schedule.check_metric(self.metric_names.check)
                self._begin_writing()
                hooks.call("before_train")
                contents.reject_unsavable(hooks.keyed(), self._stateful.values())
                if self._saved_generators is not None:  # only here, because a hook may draw numbers in before_train
                    contents.restore_generators(self._saved_generators)
                if self._anomalies.may_roll_back:
                    self._take_snapshot()  # there may be no checkpoint yet
                self._stop_signal.begin()
                self._checkpointing.prepare(self.model)
                self._is_training = True
                yield
                self._is_training = False
                self._stop_signal.share_reason()
                self._state.stop_reason = self._stop_signal.reason
                self._finish_save(must_succeed=True)
                self._state.interrupted = self._stop_signal.decided == StopRequest.INTERRUPT and not self.is_finished
                if not self._state.interrupted:
                    hooks.call("after_train")
            except Exception as error:
                if is_out_of_memory(error):
                    raise self._explain_memory(error) from error
                self._explain_compilation(error)
                raise
            finally:
                self.heartbeat.enter("leave", self._state.step)
                self._is_training, self._state.phase = False, "between_steps"
                self._checkpointing.close()
                # A failure to close must not hide the run's own error, or prevent the others from closing.
                for problem in [*hooks.call_all("close"), *call_each([each.close for each in self._writers])]:
                    logger.error("A hook or writer failed to close: %s", problem)
            if self.ranks.is_first and not self._state.interrupted:
                write_final_report(self.folder)

    def _begin_writing(self) -> None:
        """Announces the run to the writers, which exist on the first rank."""
        if not self._writers:
            return
        state = self._state
        run = RunInfo(
            config=self.config.masked(),
            name=self.config.name,
            id=run_id(self.folder),
            folder=self.folder,
            # A step that was saved before it was written is then written.
            step=state.step - state.has_unfinished_step,
            is_resumed=state.step > 0,
            backend=self.backend,
        )
        for writer in self._writers:
            writer.begin(run)

    def _explain_memory(self, error: Exception) -> OutOfMemory:
        """Writes a report of the memory by module and of settings that could reduce it; returns the error to raise."""
        phase, step, _ = self.heartbeat.current
        return out_of_memory(
            error,
            step=step,
            folder=self.folder,
            model=self.model,
            optimizers=self.optimizers,
            config=self.config,
            backend=self.backend,
            rank=self.ranks.rank,
            in_evaluation=phase == "evaluate",
        )

    def _end_with_data(self) -> None:
        """Ends the last step again, now as the last step of the run: its evaluation is written as a separate line."""
        self.stop("the training data ended")
        self._stop_signal.decide(StopRequest.STOP)
        self.storage.step, self._state.epoch_ended = self._state.step, False  # after_epoch was called
        self._end_step()

    def _note_ignored(self, iterator: TrainIterator) -> None:
        """Counts the rows of a step without labels; raises if its loss depends on how the batch was split.

        The labels were counted on the host, before they were copied to the device, so nothing synchronizes.
        """
        mesh = self.ranks.mesh
        is_split = self.num_micro_batches > 1 or mesh.num_data_ranks > 1
        if is_split and any(update.has_plain_loss for update in self._updates):
            reject_ignored_labels([type(each).forward for each in (self, self.task, self.model)])
        if iterator.num_unlabelled and mesh.is_loss_rank:
            self.storage.put_metric(_UNLABELLED, Mean(float(iterator.num_unlabelled), 1.0), 1)
        iterator.num_ignored = iterator.num_unlabelled = 0

    def _repeat_step(self, batch: Any) -> Any:
        """Repeats the current step for an optimizer that recomputes the loss."""
        with self._around_step:
            return self.train_step(batch)

    def _loss_weight(self) -> Any:
        """The weight of the loss of the last update."""
        return self._updates[-1].weight if self._updates else self._batch.num_samples

    # The end of a step.

    def _find_epoch_ends(self, *, has_period: bool) -> None:
        """Makes a stream read ahead if a setting or a hook depends on the end of an epoch; raises if there are no
        epochs."""
        data, events = self.train_data, ("before_epoch", "after_epoch")
        owner = next((hook for event in events for hook in self._hook_calls.owners(event)), None)
        if owner is not None and isinstance(data, MadeBatches):
            event = events[not self._hook_calls.has(events[0])]
            raise ConfigError(
                f"{type(owner).__name__}.{event} is never called: without a training dataset there are no epochs. Use "
                "before_step or after_step.",
                where=location_of(getattr(owner, event)),
            )
        if isinstance(data, StreamData):
            data.looks_ahead |= has_period or owner is not None

    def _vote(self) -> None:
        """Compares the requests of all ranks, and detects checkpoints that were committed since the last call."""
        state, checkpointing = self._state, self._checkpointing
        self.heartbeat.enter("vote")
        is_alone = self.ranks.size == 1 and not self._stop_signal.reasons
        saves_by_time = self.config.checkpoint.every_minutes is not None
        if is_alone and checkpointing.pending_step is None and not (saves_by_time or state.save_requested_here):
            return
        checkpointing.poll()
        if checkpointing.failure is not None:
            self._stop_signal.request(StopRequest.FAIL, "saving failed")
        requests_save = state.save_requested_here or checkpointing.is_due_by_time()
        num_committed, any_requests = self._stop_signal.vote(checkpointing.num_committed, requests_save)
        self._announce(checkpointing.take_committed(num_committed))
        state.save_requested |= checkpointing.accepts_request(any_requests)
        if self._stop_signal.decided == StopRequest.FAIL:
            checkpointing.raise_failure()

    def _end_step(self) -> bool:
        """Evaluates, writes and saves if due; returns False if the run rolled back instead."""
        state = self._state
        if self._is_nothing_due():
            state.has_unfinished_step, state.max_steps_at_end, state.phase = False, 0, "between_steps"
            garbage = self._garbage
            garbage.steps_since += 1
            if garbage.steps_since >= garbage.max_steps:
                garbage.collect()
            return True
        state.phase = "in_step"
        self._reject_outside_model()
        # Before the host waits: the device is still busy, which hides the collection.
        self._garbage.tidy(is_due=self._is_write_due())
        if self._must_check_anomalies() and self._respond_to_anomalies():
            return False
        try:
            self._evaluate_if_due()
            if state.epoch_ended and self._hook_calls.has("after_epoch"):
                self._hook_calls.call("after_epoch")
                self._stop_signal.compare_now()  # an epoch ends on every rank, so a request to stop is decided at once
                self._evaluate_if_due()  # this step may have become the last
        except EvaluationAbandoned:
            # The update is complete; the resumed run evaluates it again.
            self._stop_signal.decide(StopRequest.INTERRUPT)
            state.phase = "between_steps"
            self.save()
            return True
        except Exception:
            # The update is complete: save it, then raise. Saving needs all ranks.
            state.phase = "between_steps"
            if not self.ranks.is_alone:
                self.save()
                self._write_after_failure()
            raise
        self.heartbeat.enter("write", state.step)
        self._write_if_due()
        state.has_unfinished_step, state.max_steps_at_end = False, self.max_steps if self.is_last_step else 0
        state.phase = "between_steps"
        # Save last: the checkpoint then includes every hook's state and the log already has this step.
        is_new = state.saved_step != state.step or bool(state.max_steps_at_end)
        if state.save_requested or (is_new and self._is_save_due()):
            self.heartbeat.enter("save", state.step)
            self.save()
        if self._anomalies.is_snapshot_due(state.step):
            self._take_snapshot()
        return True

    def _reject_outside_model(self) -> None:
        """Raises for parameters of the trainer or the task that are trained but not part of the model."""
        found = list(user_attributes([(self, self._own_attributes), (self.task, ())]))
        if not found:
            return
        project_dir, has_state = self.config.project_dir, bool(self._stateful)
        own = reject_outside(found, self.model, self.optimizers.values(), has_state=has_state, project_dir=project_dir)
        if own and self.ranks.size > 1 and not self._has_warned_of_optimizers:
            self._has_warned_of_optimizers = True
            logger.warning("%s: its gradients are not summed over the %d ranks.", own[0], self.ranks.size)

    def _is_nothing_due(self) -> bool:
        """Returns True if there is nothing to check, evaluate, write or save, as for most steps."""
        state, step, detector = self._state, self._state.step, self._updater.detector
        if step < self._next_due and step < self.max_steps and not (self._stop_signal.decided or state.epoch_ended):
            found = detector is not None and detector.has_found
            return not (state.save_requested or self._best.step == step or found)
        config = self.config
        periods = [config.log.every_steps, config.evaluation.every_steps, config.checkpoint.every_steps]
        if self._anomalies.may_roll_back:
            periods.append(config.anomalies.snapshot_every_steps)
        self._next_due = min((step - step % every + every for every in periods if every), default=self.max_steps)
        if config.checkpoint.every_samples or self._has_parts_of_epochs:
            self._next_due = 0
        return False

    def _is_evaluation_due(self) -> bool:
        return self.is_last_step or self._is_due(self.config.evaluation)

    def _is_write_due(self) -> bool:
        return self.is_last_step or self._is_due(self.config.log)

    def _is_due(self, section: EvaluationSection | CheckpointSection | LogSection) -> bool:
        """Returns True if the section's period of steps or of epochs ends with this step."""
        state, every = self._state, section.every_steps
        if every and state.step % every == 0:
            return True
        period, data = section.every_epochs, self.train_data
        if period is None or data is None:
            return False
        if period % 1 == 0:
            return state.epoch_ended and data.epoch // period > state.epoch // period
        exact = Fraction(str(period))  # 0.1 is not a binary fraction
        return data.epochs_at(data.order_position) // exact > data.epochs_at(state.data_start) // exact

    def _is_save_due(self) -> bool:
        state = self._state
        position = 0 if self.train_data is None else self.train_data.order_position
        return bool(
            state.save_requested
            or self.is_last_step
            or self._stop_signal.decided
            or self._is_due(self.config.checkpoint)
            or self._checkpointing.is_due_by_samples(state.data_start, position)
            or self._best.step == state.step
        )

    def _evaluate_if_due(self) -> None:
        if not self._is_evaluation_due():
            return
        state = self._state
        self.heartbeat.enter("evaluate", state.step)
        if state.evaluated_step != state.step:
            sets = self.evaluated_sets
            logs = self._evaluate_step(sets) if sets else {}
            state.eval_logs, state.evaluated_step, state.reported = logs, state.step, set()
            if logs:
                self.storage.remember(logs)
                self._best.update(state.step, logs)
                self._updater.observe(logs)
                # The evaluation was collective, so a hook's request to stop can be decided at once.
                self._stop_signal.compare_now()
        if self.is_last_step and not any(name.startswith("test/") for name in state.eval_logs):
            state.eval_logs = {**state.eval_logs, **self.evaluate_test()}

    def evaluate_test(self) -> dict[str, float]:
        """Evaluates the test set, if there is one, and returns its logs.

        With `checkpoint.keep_best` it uses the best checkpoint; the model has its own weights again afterwards.
        """
        test = self.test_data
        if test is None:
            return {}
        step = self._best_saved_step()
        if step is None:
            return self._evaluate_step({test.name: test})
        if self.ranks.is_first:
            logger.info("Evaluating %s with the best checkpoint, step %d.", test.name, step)
        own = map_tensors(dict(self.model.state_dict()), lambda value, _: value.detach().clone())
        try:
            self._load_weights(step, None)
            return self._evaluate_step({test.name: test})
        finally:
            self.model.load_state_dict(own)
            self._has_loaded_weights = False

    def _best_saved_step(self) -> int | None:
        """Returns the step of the best checkpoint, if it is not the current step; collective."""
        best = self._best.step
        if best is None or best == self._state.step:
            return None
        self._finish_save()  # the best one may still be in progress
        failure: CheckpointError | None = None
        if self.ranks.is_first:
            try:
                self.context.store.verify(best)
            except CheckpointError as error:
                failure = error
                logger.warning("The test set is evaluated with the last weights instead of the best: %s", error)
        return None if self.ranks.broadcast(failure) is not None else best

    def _evaluate_step(self, sets: Mapping[str, EvaluatedSet]) -> dict[str, float]:
        """Evaluates a step; an interruption may abandon the evaluation, because a resumed run repeats it."""
        averaged = self._weights_to_evaluate(self._hook_calls)
        return self._evaluator.evaluate(sets, self._hook_calls, averaged=averaged, can_be_abandoned=self._is_training)

    def _weights_to_evaluate(self, hooks: HookCalls) -> Mapping[str, torch.Tensor]:
        """Returns the weights that evaluations use instead of the model's; none if the model has a checkpoint's."""
        averaged, is_evaluated = self._averaged_weights(hooks)
        return averaged if is_evaluated and not self._has_loaded_weights else {}

    def _write_after_failure(self) -> None:
        """Writes the line of a step whose evaluation failed; a resumed run replaces it with a complete one."""
        try:
            self._write_if_due()
        except Exception as error:  # the evaluation's own error is raised
            logger.error("The line of step %d could not be written: %s", self._state.step, error)

    def _averaged_weights(self, hooks: HookCalls) -> tuple[Mapping[str, torch.Tensor], bool]:
        """Returns the weights of a hook, or of an optimizer that evaluates with other weights than it trains."""
        found = hooks.averaged_weights()
        optimizers = [each for each in self.optimizers.values() if has_eval_weights(each)]
        if not optimizers:
            return found
        if found[0]:
            kind = type(optimizers[0]).__name__
            raise ConfigError(f"hooks: {kind} also has averaged weights. Remove the hook that averages weights.")
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        pairs = [pair for optimizer in optimizers for pair in eval_weights(optimizer)]
        return {names[id(each)]: value for each, value in pairs if id(each) in names}, True

    def _write_if_due(self) -> None:
        state, storage, ranks = self._state, self.storage, self.ranks
        logs: dict[str, Any] = {}
        evaluated = {name: value for name, value in state.step_eval_logs.items() if name not in state.reported}
        is_due = self._is_write_due()
        if not (is_due or evaluated):
            return
        if is_due:
            for name, count in (self.train_data.counts if self.train_data else {}).items():
                storage.put_scalar(f"samples/{name}", count, smoothing_hint=False)
        if ranks.mesh.is_split:
            storage.gather_shards(ranks.gather)
        # Of the other ranks, only those with stages or shards have images, histograms or texts.
        has_media = storage.has_media and not ranks.is_first
        gathered = ranks.gather((storage.take_window() if is_due else {}, has_media))
        if is_due:
            window = merge([each for each, _ in gathered])
            self._window_logs = summarise(window)
            self._count_unlabelled(window)
            with self.gather_mixed:
                logs = self.train_loop_end()
            if ranks.mesh.is_split:
                logs = full_logs(logs, ranks.gather)
            self._warn_of_loss(logs.get("loss"))
            state.window_start = state.step
            if not self.is_last_step:
                self.train_loop_begin()
        if logs or evaluated:
            media = storage.take_media()
            if any(others for _, others in gathered):
                media = merge_media(ranks.gather(media))
            state.reported |= evaluated.keys()
            storage.publish(logs, evaluated=evaluated, media=media)
            if state.step > state.written_step or self.is_last_step:
                state.written_step = state.step
                self._unstored_media |= unstored_media(storage, self._writers, warned=self._unstored_media)
                for writer in self._writers:
                    writer.write(storage)

    def _count_unlabelled(self, window: Window) -> None:
        """Logs the number of rows of a window without labels, and of updates that were skipped because of them."""
        if _UNLABELLED in window:
            self._window_logs[_UNLABELLED] = int(sum(total for total, _ in window[_UNLABELLED].steps.values()))
        steps = [step for step, (_, weight) in window["loss"].steps.items() if not weight] if "loss" in window else []
        if not steps:
            return
        self._window_logs["empty_updates"] = len(steps)
        if self.ranks.is_first:
            logger.warning(
                "Step%s %s: every label of the batch is %d, so the update was skipped. Check the labels of the data, "
                "or raise trainer.global_batch_size.",
                "s" * (len(steps) > 1),
                ", ".join(map(str, sorted(steps)[:8])) + ", ..." * (len(steps) > 8),
                IGNORED_LABEL,
            )

    def _warn_of_loss(self, loss: Any) -> None:
        """Warns once about a logged loss that is not finite, for example because updates were skipped."""
        if isinstance(loss, float) and not math.isfinite(loss) and not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            if self.ranks.is_first:
                logger.warning(
                    "Step %d: the loss is %s. Lower the learning rate, or set trainer.max_grad_norm.",
                    self._state.step,
                    loss,
                )

    # Saving and restoring.

    def _collect_state(self, *, for_rollback: bool = False) -> dict[str, Any]:
        """Returns the contents of a checkpoint of this step; shares memory with the live state.

        A copy `for_rollback` has everything, independent of `checkpoint.contents`. The same on every rank, except that
        each rank has its own shards, as DTensors or by stages.
        """
        ranks, data, base = self.ranks, self.train_data, self.context.base
        assert data is not None
        # The saved state is the one that every rank continues with.
        copy_from_first([each for each in self.model.buffers() if not is_split(each)], ranks)
        if ranks.mesh.is_split:
            self.storage.gather_shards(ranks.gather)
        window = merge(ranks.gather(self.storage.peek_window()))
        weights_only = self.config.checkpoint.contents == "weights" and not for_rollback
        stateful = {} if weights_only else self._stateful
        return contents.collect(
            model=self.model,
            optimizers=self.optimizers,
            hooks=self._hook_calls.keyed(),
            own_states={name: contents.merge_states(contents.state_of(each), ranks) for name, each in stateful.items()},
            events=self.storage.state_dict(window),
            # Ranks that share samples share their random numbers too.
            generators=ranks.gather_samples(contents.generator_state()),
            data=data.merge_states(ranks.gather_samples(data.state_dict())),
            loss_scale=self._updater.loss_scale,
            schedules=self._updater.torch_schedules,
            trainable=self._trainable_state(),
            anomalies=self._anomalies,
            step=self._state.step,
            begun_epoch=self._state.begun_epoch,
            data_start=self._state.data_start,
            has_unfinished_step=self._state.has_unfinished_step,
            max_steps_at_end=self._state.max_steps_at_end,
            unclaimed_hook_state=self._unclaimed_hook_state,
            averaged=self._averaged_weights(self._hook_calls),
            references=base.references(self.model, ranks) if base is not None and not for_rollback else None,
            weights_only=weights_only,
        )

    def _load_model(self, step: int, other_stages: Sequence[str]) -> None:
        """Loads a checkpoint's trained weights; weights that it stores by reference are those of the built model."""
        store, source = self.context.store, self.context.store.path(step)
        state: Mapping[str, Any] = store.read_split(step, "model")
        recorded, present = contents.read_references(store, step), list[str]()
        if recorded and self.context.base is None:
            check_references(recorded, {}, where=source)
        elif recorded and self.context.base is not None:
            state, present = self.context.base.complete(state, recorded, self.model, where=source)
        contents.load_model_state(state, self.model, source=str(source), other_stages=other_stages, present=present)

    def _restore_state(self, read: Callable[[str], Any], other_stages: Sequence[str]) -> None:
        """Restores a state; `read` returns its parts `optimizers` and `training`.

        Their tensors may be full or sharded, independent of the trainer's.
        """
        state, data, ranks = self._state, self.train_data, self.ranks
        assert data is not None
        keep_settings = self._keeps_optimizer_settings
        training, optimizers = contents.with_full_tensors(read("training")), read("optimizers")
        if training["trainable"] is not None:
            self._restore_trainable(training["trainable"], optimizers, keep_settings=keep_settings)
        contents.restore_optimizers(
            optimizers, self.model, self.optimizers, keep_settings=keep_settings, other_stages=other_stages
        )
        self._restore_progress(training)
        data.load_state_dict(training["data"], accept_changes=keep_settings)
        state.epoch = state.begun_epoch if state.has_unfinished_step else data.epoch
        state.epoch_ended = state.has_unfinished_step and data.epoch > state.epoch
        self.storage.load_state_dict(training["events"], with_window=ranks.is_first)
        if self._updater.loss_scale is not None and training["loss_scale"] is not None:
            self._updater.loss_scale.load_state_dict(training["loss_scale"])
        self._updater.load_schedules(training["schedules"], keep_settings=keep_settings)
        self._anomalies.load_state_dict(training["anomalies"])
        state.discard_step()
        self._next_due, self._has_loaded_weights = 0, False
        hooks = self._hook_calls.keyed()
        self._unclaimed_hook_state = contents.restore_hooks(training["hooks"], hooks, model=self.model)
        self._restore_own_states(training, accept_changes=keep_settings)
        if ranks.mesh.data_rank < len(training["generators"]):  # an additional rank starts with its own seed
            self._saved_generators = training["generators"][ranks.mesh.data_rank]

    def _trainable_state(self) -> dict[str, Any] | None:
        """Returns which parameters are trainable, and the base rates of their groups; None for a pipeline."""
        if self._updater.pipeline is not None:
            return None
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return {
            "names": names,
            "frozen_at_start": self._frozen_at_start,
            "base_rates": {name: each.base_rates for name, each in self._updater.optimizers.items()},
        }

    def _restore_trainable(
        self, saved: Mapping[str, Any], optimizers: Mapping[str, Any], *, keep_settings: bool
    ) -> None:
        """Makes exactly the parameters trainable that were trainable in the checkpoint."""
        parameters, names = dict(self.model.named_parameters()), set(saved["names"])
        groups = {name: optimizers.get(name, {}).get("groups", ()) for name in self.optimizers}
        members = {name for each in groups.values() for group in each for name in group["params"]}
        # A parameter that was unfrozen and frozen again is still a member of its group.
        joining, leaving = (names | members) & self._frozen.keys(), parameters.keys() - names
        trainable = {name for name, each in parameters.items() if each.requires_grad}
        if names == trainable and members == parameters.keys() - unowned_parameters(self.model, self.optimizers).keys():
            return
        if keep_settings:
            joining &= set(saved["frozen_at_start"])  # others are frozen by a changed model.freeze that was accepted
            for name in joining:
                parameters[name].requires_grad_(True)
            self._follow_trainable()
            for name in joining - names:
                parameters[name].requires_grad_(False)
            return
        for name, optimizer in self.optimizers.items():
            restore_members(optimizer, groups[name], parameters, may_join=joining, may_leave=leaving)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in names)
        # A parameter that was unfrozen after the last step of the checkpoint joins its optimizer in the next step.
        unowned = unowned_parameters(self.model, self.optimizers)
        self._frozen = {name: each for name, each in unowned.items() if name in self._frozen or name in leaving}
        self._follows_trainable = self._follows_trainable or bool(self._frozen)
        self._updater.follow_groups(saved["base_rates"])
        if self._updater.sync is not None:
            self._updater.sync.follow_trainable()

    def _restore_own_states(self, training: Mapping[str, Any], *, accept_changes: bool) -> None:
        """Restores the states of the trainer and the task."""
        for name, owner in self._stateful.items():
            contents.restore_state(
                training.get(name), owner, self.ranks, model=self.model, accept_changes=accept_changes
            )
        lost = [name for name in ("trainer", "task") if training.get(name) and name not in self._stateful]
        if lost:
            logger.warning("The checkpoint has state of the %s, which has no state_dict now.", " and the ".join(lost))

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Restores the states of the trainer and the task at the end of the block."""
        states = [(owner, contents.copy_state(contents.state_of(owner))) for owner in self._stateful.values()]
        try:
            yield
        finally:
            for owner, state in states:
                owner.load_state_dict(state)

    def _restore_progress(self, training: Mapping[str, Any]) -> None:
        state = self._state
        state.step = self.storage.step = int(training["step"])
        state.begun_epoch, state.data_start = int(training["begun_epoch"]), int(training["data_start"])
        state.has_unfinished_step = bool(training["has_unfinished_step"])
        state.max_steps_at_end = int(training["max_steps_at_end"])

    def _names_of_all_stages(self) -> list[str]:
        """Returns the names of all weights of a pipeline, over all stages; empty without a pipeline."""
        if self.ranks.mesh.size("pipeline") == 1:
            return []
        own = [*self.model.state_dict(keep_vars=True), *(name for name, _ in self.model.named_parameters())]
        return sorted({name for names in self.ranks.gather(own) for name in names})

    def _finish_save(self, *, must_succeed: bool = False) -> None:
        """Waits for the save in progress and calls `after_save`; raises on all ranks if saving failed permanently."""
        path, failure = self._checkpointing.finish(must_succeed=must_succeed)
        self._announce(path)
        if failure is not None:
            raise failure

    def _announce(self, path: Path | RemotePath | None) -> None:
        if path is not None:
            self.storage.saved_step = int(path.name.removeprefix("step-"))
            self._hook_calls.call("after_save", path)

    # Anomalies.

    def _must_check_anomalies(self) -> bool:
        """Returns True if anomalies must be known now; if the host runs ahead of the device, only before results are
        used."""
        return (
            reads_at_once(self.device)
            or self._is_evaluation_due()
            or self._is_write_due()
            or self._is_save_due()
            or self._anomalies.is_snapshot_due(self._state.step)
        )

    def _respond_to_anomalies(self) -> bool:
        """Acts on the anomalies since the last check, which waits for the device; returns True after a rollback."""
        anomalies = self._anomalies.find()
        if not anomalies:
            return False
        self.heartbeat.enter("save", self._state.step)  # reading a checkpoint may take long
        try:
            self._finish_save()  # a report names the newest checkpoint, and a rollback restores it
        except CheckpointError as error:  # the same on every rank; the anomaly is what the user needs to know
            logger.error("Saving failed too: %s", error)
        for anomaly in anomalies:
            if self._anomalies.count_if_new(anomaly):
                self._report(anomaly)
            self._hook_calls.call("on_anomaly", anomaly)
            self._anomalies.raise_if_fatal(anomaly)
            if anomaly.policy == "rollback":
                self._roll_back(anomaly)
                return True
        return False

    def _report(self, anomaly: Anomaly) -> None:
        data = self.train_data
        assert data is not None
        data_state = data.merge_states(self.ranks.gather(data.state_dict()))
        if self.ranks.is_first:
            samples = None if anomaly.positions is None else data.samples_at(*anomaly.positions)
            history: Sequence[Any] = self.storage.history("loss")
            self._anomalies.report(
                anomaly, config=self.config, data_state=data_state, samples=samples, loss_history=history
            )

    def _take_snapshot(self) -> None:
        self._anomalies.take_snapshot(
            self._state.step, self._collect_state(for_rollback=True), self._state.step_eval_logs
        )

    def _roll_back(self, anomaly: Anomaly) -> None:
        """Restores the newest state before the anomaly, and skips its batches."""
        data, anomalies, ranks = self.train_data, self._anomalies, self.ranks
        assert data is not None
        num_anomalies, snapshot = anomalies.num_anomalies, anomalies.snapshot
        step = ranks.broadcast(anomalies.newest_intact_before(anomaly.step) if ranks.is_first else None)
        if snapshot is not None and (step is None or snapshot.step >= step):
            parts, other_stages = snapshot.parts.to_state(), self._names_of_all_stages()
            self._keeps_optimizer_settings = False  # the copy has the settings of this run
            contents.load_model_state(
                parts["model"], self.model, source="the copy in memory", other_stages=other_stages
            )
            self._restore_state(parts.__getitem__, other_stages)
            self._state.restore_evaluation(snapshot.eval_logs)
        elif step is not None:
            self.restore_checkpoint(step, keep_settings=step <= self._last_changed_step)
        else:
            raise AnomalyError(f"{anomaly.describe()} There is no earlier state to roll back to.")
        if self._saved_generators is not None:
            contents.restore_generators(self._saved_generators)
        # Not the count of the restored state: otherwise a run could roll back forever.
        anomalies.num_anomalies = num_anomalies
        start, stop = anomalies.positions_to_skip(anomaly, data.stop_of_batch)
        data.skip_positions(start, stop)
        if ranks.is_first:
            logger.warning(
                "Rolled back to step %d. Data positions %d to %d are skipped.", self._state.step, start, stop - 1
            )
        self.train_loop_begin()

    def _continue_after_rollback(self, iterator: TrainIterator, graph: GraphStep | None) -> None:
        """Continues from the restored step; if a stop was requested in the meantime, that step is the last."""
        iterator.restart()
        if graph is not None:
            graph.reset()
        if self._state.has_unfinished_step or self._stop_signal.decided == StopRequest.STOP:
            self._end_step()
        elif self._stop_signal.decided:
            self.save()  # nothing else, because that step was already evaluated and written

    # Compile and graph mode.

    def _compile_forward(self) -> CompiledForward | None:
        """Returns the compiled regions of the forward; None if it runs eagerly."""
        mode = self.config.runtime.mode
        # On a CPU graph mode runs eagerly, under the same guards.
        if mode != "compile" and not (mode == "graph" and waits_for_memory(self.device)):
            check_compile_backend(self.config)  # the same file may be used on a GPU next
            return None
        owners = (self, self.task, self.model)
        # A custom step may differentiate more than the loss.
        self._keeps_outputs = is_user_code(type(self).train_step) or is_user_code(type(self).run_forward)
        return CompiledForward(
            self._compute,
            config=self.config,
            model=self.model,
            storage=self.storage,
            owners=owners,
            users=user_files_of(self.config.project_dir, owners),
            keeps_training_outputs=self._keeps_outputs,
            sums_gradients=self.ranks.mesh.size("replicate") > 1 and not self.ranks.mesh.is_split,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns a context with the precision of the run, for your own forward outside of `run_forward`.

        `run_forward` and `eval_step` enter it themselves. Casts of parameters that FSDP gathers are not kept.
        """
        return self.backend.autocast(self.config.runtime.precision, keeps_casts=self._updater.sync is None)

    def _make_gather_mixed(self) -> GatherMixed | nullcontext[None]:
        """Returns a context for user code that computes with sharded parameters; it has no effect without them."""
        has_user_code = type(self.task) is not Task or any(is_user_code(type(each)) for each in (self, *self.hooks))
        if not self._has_shards or not has_user_code:
            return nullcontext()
        from trainwright.parallel.mixed_tensors import GatherMixed  # imports much of torch

        sync = self._updater.sync
        gather_mixed = GatherMixed(self.model, add_gradient=None if sync is None else sync.add_gradient)
        self._updater.suspend = gather_mixed.suspended
        return gather_mixed

    def _compute(self, batch: Any) -> RegionOutputs:
        """The region to compile: the forward, its loss and metrics. A plain loss gets its weight outside."""
        returned = self.forward(**batch) if isinstance(batch, Mapping) else self.forward_batch(batch)
        result = read_forward(returned, batch, self.model, 0, self._loss)
        self.add_metrics(result, batch)
        outputs = result.outputs
        if self._has_shards:
            result.loss = full_loss(result.loss)
            if self._keeps_outputs and outputs is not None and torch.is_grad_enabled():
                # The backward of a graph does not support a DTensor output without a gradient.
                outputs = {name: full_loss(each) if is_split(each) else each for name, each in outputs.items()}
        return RegionOutputs(result.loss, result.metrics, outputs, result.count)

    def _run_compiled(self, compiled: CompiledForward, batch: Any, num_samples: int) -> ForwardResult:
        try:
            with self._around_compiled(compiled):
                loss, metrics, outputs, count = compiled.run(batch)
        except Exception as error:
            self._explain_compilation(error)
            raise
        return ForwardResult(loss, num_samples, metrics, outputs, count)

    def _around_compiled(self, compiled: CompiledForward) -> AbstractContextManager[Any]:
        """Returns a context for a compiled forward, because a graph cannot gather sharded parameters for user code."""
        if compiled.has_eager_code or isinstance(self.gather_mixed, nullcontext):
            return self.gather_mixed
        return self.gather_mixed.rejecting() if self._is_inspecting else self.gather_mixed.suspended()

    def _explain_compilation(self, error: Exception) -> None:
        """Raises an error that explains why compiling failed; ignores other errors."""
        if self._compiled is None:
            return
        if self._compiled.is_compiler_failure(error) and self._stop_signal.must_leave_now():
            # The signal that interrupts a run ends the compiler's processes as well.
            reason = self._stop_signal.reason or "interrupted"
            saved = self.context.store.steps()
            next_start = f"continues from step {saved[-1]}" if saved else "starts over: nothing was saved yet"
            logger.info(
                "%s ended the compilation in step %d. The same command %s.", reason, self._state.step + 1, next_start
            )
            raise SystemExit(exit_code_of(reason))
        self._compiled.explain(error)

    def _inspect_forward(self, batch: Any) -> None:
        """Reports code that cannot be compiled before the compilation, which takes minutes."""
        self._is_inspected = True
        if overrides(self, "train_step", Trainer):
            return  # it may call other forwards
        owners = (self, self.task, *self.model.modules())
        self._is_inspecting = True
        inspect_forward(
            lambda: self.run_forward(next(iter(self.micro_batches(batch)))),
            owners=owners,
            users=user_files_of(self.config.project_dir, (self, self.task, self.model)),
            config=self.config,
            storage=self.storage,
            backend=self.backend,
        )
        self._is_inspecting = False

    def _make_graph_step(self) -> GraphStep:
        state, updater = self._state, self._updater
        settings = ("max_grad_norm", "max_grad_value", "global_batch_size")
        return GraphStep(
            self.train_step,
            backend=self.backend,
            capture=self.context.capture,
            storage=self.storage,
            updater=updater,
            guarded=GuardedObjects(
                trainer=self,
                own_attributes=self._own_attributes,
                settings=lambda: {name: getattr(updater, name) for name in settings},
            ),
            step_tensor=self._step_tensor,
            read_weight=self._loss_weight,
            read_progress=lambda: (state.step, state.evaluated_step, state.written_step, state.saved_step),
            has_user_code_between_steps=has_user_code_between_steps(
                type(self), self.hooks, contract=Trainer, hook_events=HOOK_EVENTS
            ),
            sum_over_ranks=self.ranks.sum_counts if self.ranks.size > 1 else None,
        )


def _require_mapping(batch: Any) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise DataError(
            f"runtime.mesh.pipeline needs batches that are mappings, but this one is a {type(batch).__name__}."
        )
    return batch
