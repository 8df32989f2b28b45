"""The loop: fetch, update, record; evaluate, write and save where due. Every run is this one.

Override the small methods to change the mathematics; add hooks for side acts. What one update does is
update.py's, one pass over a set evaluation.py's, what a checkpoint holds saving.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainwright.checkpoint.contents import refuse_unsavable, restore_generators
from trainwright.checkpoint.folder import FolderLock
from trainwright.checkpoint.remote_files import RemotePath
from trainwright.config import RunConfig
from trainwright.data.order import chain_seed
from trainwright.data.stream_loader import EvaluationData, TrainingData
from trainwright.errors import ConfigError, DataError
from trainwright.loop.agreement import Agreement, Intent
from trainwright.loop.builder import Builder
from trainwright.loop.calls import refuse_mismatch
from trainwright.loop.compiled_forward import compile_forward, run_as_is
from trainwright.loop.evaluation import EvalLogs, evaluate_sets, read_eval
from trainwright.loop.feed import Feed
from trainwright.loop.half_made import refuse_half_made, take_surroundings
from trainwright.loop.hook import Hook, Hooks, call_each
from trainwright.loop.host_number import HostNumber
from trainwright.loop.incident_response import IncidentResponse
from trainwright.loop.memory_error import explain_memory
from trainwright.loop.outputs import ForwardResult, explain_failure
from trainwright.loop.phases import Phases
from trainwright.loop.pieces import cut
from trainwright.loop.pipelined import evaluate_pipeline, run_pipeline
from trainwright.loop.saving import BestSoFar, Checkpoints
from trainwright.loop.step import Step
from trainwright.loop.step_end import StepEnd
from trainwright.loop.task import Task, overrides
from trainwright.loop.update import StepResult, Update
from trainwright.memory.out_of_memory import is_out_of_memory
from trainwright.writers.writer import Writer

logger = logging.getLogger(__name__)
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
        surroundings = take_surroundings(self, {**rest, "checkpoint_exporter": checkpoint_exporter})
        self.config = config
        self.task = task
        self.model = model
        self.optimizers: dict[str, torch.optim.Optimizer] = (
            dict(optimizer) if isinstance(optimizer, Mapping) else {"main": optimizer}
        )
        self.train_data = train_dataset
        self.eval_data: dict[str, EvaluationData] = dict(validation_dataset or {})
        self.surroundings = surroundings
        self.loss_scale = surroundings.updater.loss_scale
        self.backend, self.ranks = surroundings.backend, surroundings.ranks
        self.storage = surroundings.storage
        self.device = self.backend.device
        self.max_steps = surroundings.max_steps
        self.moments = Hooks(surroundings.hooks)
        self._updater, self._writers = surroundings.updater, surroundings.writers
        self._step_tensor = torch.zeros((), dtype=torch.int64, device=self.device)
        # Checked against the first training forward, so that a wrong name does not wait for the first evaluation.
        self._unchecked_metrics = [] if overrides(self, "eval_step", Trainer) else list(surroundings.metrics)
        for hook in surroundings.hooks:
            hook.trainer = self
        self._seed_chain, self._draws = chain_seed(config.seed, _STEP_STREAM), self.ranks.mesh.draws
        self._begin_at_zero()
        self.post_init()

    def _begin_at_zero(self) -> None:
        """Sets what says where the run stands; a checkpoint restores some of it (loop/saving.py)."""
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
        self.incident_response = IncidentResponse(self)
        self.checkpoints = Checkpoints(self)
        self.step_end = StepEnd(self)
        self.phases = Phases()
        self.compiled_forward = compile_forward(self)
        self._updater.enter_phase = lambda phase: self.phases.enter(phase, self.step + 1)

    if not TYPE_CHECKING:  # for mypy a class with this method has every attribute

        def __getattr__(self, name: str) -> Any:
            refuse_half_made(self, name)
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
        return self.moments.all

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.surroundings.folder

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
        for piece in self.micro_batches(batch):
            update.backward(self.run_forward(piece))
        return update.apply()

    def begin_update(self) -> Update:
        """Begins an update with cleared gradients; end it with `apply()`."""
        own = [name for name in ("train_step", "micro_batches", "begin_update") if overrides(self, name, Trainer)]
        is_known = self._updater.pipeline is None and not own
        num_backwards = self.surroundings.batch.accumulation if is_known else None
        self._update = self._updater.begin(lambda: self.samples_in_hand, num_backwards=num_backwards)
        return self._update

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Yields the micro-batches of this rank's batch, as many on every rank."""
        num_pieces = self.surroundings.batch.accumulation
        if num_pieces == 1:
            yield batch
            return
        assert self.train_data is not None
        whole = self.samples_in_hand
        for piece, num_samples in cut(batch, whole, num_pieces, self.train_data.collator):
            self.samples_in_hand = num_samples
            yield piece
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
                refuse_mismatch(type(self).forward, tuple(batch))
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
            step = Step(self)
            speaks, share = self.ranks.mesh.speaks, 1.0 / self.ranks.size  # of ranks that share samples one counts
            self.train_loop_begin()
            if self.has_unfinished_step or self.agreement.decided == Intent.STOP:
                self.step_end.run()
            while self.step < self.max_steps and not self.agreement.decided:
                self.epoch = self.train_data.epoch
                self.storage.step = self.step + 1
                self._updater.set_rates(self.step)
                self.seed_step()
                self.is_mid_step = True
                for act in self.moments.before_step:
                    act()
                self.phases.enter("data", self.step + 1)
                places = self.train_data.places
                try:
                    batch = self.next_train_inputs(feed)
                except StopIteration:
                    if self.incident_response.went_back():  # an incident that nobody had looked at yet
                        self._go_on_from_earlier(feed, step)
                        continue
                    self._run_out_of_data()
                    break
                self.phases.enter("step", self.step + 1)
                self.samples_in_hand = self.train_data.samples_in_hand
                self.incident_response.note_places(places, self.train_data.places)
                self.checkpoints.places_before = places
                result = step.run(batch)
                self._updater.share_buffers()
                self.step += 1
                self.has_unfinished_step, self.ended_under = True, 0
                self.storage.put_result(
                    result,
                    weight=self.loss_weight,
                    num_samples=self.samples_in_hand * speaks,
                    share=share,
                )
                self.phases.enter("hooks", self.step)
                for act in self.moments.after_step:
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
            return self.surroundings.store.path(self.step)
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
        self.agreement.wish(Intent.STOP, reason)

    def interrupt(self, reason: str) -> None:
        """Saves after this step and leaves; running the same command again goes on as if nothing had happened."""
        self.agreement.wish(Intent.INTERRUPT, reason)

    # the loop's own steps

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Runs before_train and after_train around the loop, and closes hooks and writers whatever happens."""
        with FolderLock(self.folder, enabled=self.ranks.is_first), self.storage, self.step_end.garbage:
            try:
                self.moments.call("before_train")
                refuse_unsavable(self.moments.keyed())
                if self.saved_generators is not None:  # only now, for a hook may have drawn in before_train
                    restore_generators(self.saved_generators)
                if self.incident_response.may_go_back:
                    self.incident_response.take_snapshot()  # there may be no checkpoint yet
                self.agreement.begin()
                self.checkpoints.prepare()
                self.checkpoints.is_training = True
                yield
                self.checkpoints.is_training = False
                self.agreement.share_reason()
                self.checkpoints.settle(must_succeed=True)
                self.interrupted = self.agreement.decided == Intent.INTERRUPT and not self.is_finished
                if not self.interrupted:
                    self.moments.call("after_train")
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
                for problem in [*self.moments.call_all("close"), *call_each([each.close for each in self._writers])]:
                    logger.error("A hook or writer failed to close: %s", problem)

    def _go_on_from_earlier(self, feed: Feed, step: Step) -> None:
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
