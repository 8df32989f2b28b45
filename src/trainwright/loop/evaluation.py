"""Evaluates named sets: each sample counts once for any number of ranks.

Sums stay on the device until a pass is over, so memory does not grow with the set.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainwright.checkpoint.contents import generator_state, restore_generators
from trainwright.checkpoint.folder import read_config
from trainwright.checkpoint.manifest import read_manifest
from trainwright.checkpoint.remote_store import AnyStore
from trainwright.checkpoint.store import CheckpointStore
from trainwright.data.order import mix_seed
from trainwright.data.stream_loader import EvaluationData
from trainwright.errors import CheckpointError, TrainwrightError
from trainwright.events import EventStorage, Mean
from trainwright.events.mean import merge, summarise
from trainwright.loop.checkpointing import restore_weights
from trainwright.loop.metrics import ConfiguredMetric
from trainwright.loop.outputs import ForwardResult
from trainwright.loop.task import Task, overrides
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.replicate import copy_from_first
from trainwright.user_code.locations import location_of

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_EVAL_STREAM = 0xE7A1  # keeps an evaluation's randomness apart from that of steps

TOGETHER_SECONDS = 10.0
"""How long a rank that failed in a forward of a split model waits to hear that all others have failed too."""
_POLL_SECONDS = 0.05


class EvaluationAbandoned(Exception):  # noqa: N818 # not an error: the run that goes on evaluates anew
    """The run was told to leave in the midst of an evaluation."""


class _FailedElsewhere(Exception):  # noqa: N818 # another rank has the error
    """Another rank has failed; which one and why is told where all ranks meet next."""


class EvalLogs(dict[str, Any]):
    """What `eval_step` returns by default: the loss and metrics, with the forward's outputs beside them."""

    outputs: Mapping[str, Any] | None = None


def read_eval(result: ForwardResult) -> EvalLogs:
    """Turns a forward's result into the logs of an evaluation step."""
    logs = EvalLogs(loss=result.loss, **result.metrics)
    logs.outputs = result.outputs
    return logs


class Averages:
    """Sums of one set's values over its batches: name → total and count, on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Mean] = {}

    def add(self, name: str, value: Any, num_samples: int) -> None:
        """Adds a batch's value: a Mean, a scalar that weighs its samples, or one number a sample.

        Anything else (a matrix of outputs, a text) has no mean and is left out.
        """
        mean = _as_mean(value, num_samples)
        if mean is not None:
            self._sums[name] = self._sums[name] + mean if name in self._sums else mean

    def over_ranks(self, ranks: Ranks) -> dict[str, float]:
        """Returns the means over all ranks as numbers; ranks may hold different names."""
        own = {name: (float(mean.total), float(mean.count)) for name, mean in self._sums.items()}
        totals: dict[str, tuple[float, float]] = {}
        for sums in ranks.gather_samples(own):
            for name, (total, count) in sums.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + total, before[1] + count)
        return {name: total / count if count else float("nan") for name, (total, count) in totals.items()}


def _as_mean(value: Any, num_samples: int) -> Mean | None:
    if isinstance(value, Mean):
        return Mean(_double(value.total), _double(value.count))
    if isinstance(value, Real):  # numpy's scalars too
        return Mean(float(value) * num_samples, float(num_samples))
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return Mean(_double(value).reshape(()) * num_samples, float(num_samples))
        if value.shape[0] == num_samples == value.numel():  # [n] and [n, 1] alike
            return Mean(_double(value).sum(), float(num_samples))
    return None


def _is_per_sample(value: Any, num_samples: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == num_samples


def _double(value: Any) -> Any:
    return value.detach().double() if isinstance(value, torch.Tensor) else float(value)


def evaluate_sets(trainer: Trainer, sets: Mapping[str, EvaluationData]) -> dict[str, float]:
    """Evaluates several sets and returns their logs, each prefixed with its set's name, the same on every rank.

    Training goes on as if it had not happened: modes of modules and generators are put back.
    """
    logs: dict[str, float] = {}
    training = [module for module in trainer.model.modules() if module.training]
    generators = generator_state()
    try:
        _together(trainer.ranks, lambda: trainer.callbacks.call("before_eval"))
        copy_from_first(trainer.model.buffers(), trainer.ranks)  # running means are each rank's own until now
        trainer.model.eval()
        for name, data in sets.items():
            trainer.backend.seed(mix_seed(trainer.config.seed, _EVAL_STREAM, *trainer.ranks.mesh.draws))
            values = _evaluate_set(trainer, data)
            logs.update({f"{name}/{key}": value for key, value in values.items()})
        # A user's own metric may differ between ranks; what is decided by it (best, stop) must not.
        logs = trainer.ranks.broadcast(logs)
    except Exception:
        # Hooks undo what they did for the evaluation (averaged weights are swapped back) before anything is saved.
        trainer.callbacks.call_all("after_eval", {})
        raise
    finally:
        trainer.eval_name = None
        restore_generators(generators)
        trainer.seed_step()
        for module in training:
            module.training = True
    # All of them even if one raises: the step is saved then, and must not be saved with averaged weights.
    errors = trainer.callbacks.call_all("after_eval", logs)
    failure = errors[0] if errors else None
    _reject_failure(failure, trainer.ranks.gather(_describe(failure)))
    return logs


@torch.no_grad()
def _evaluate_set(trainer: Trainer, data: EvaluationData) -> dict[str, float]:
    """Evaluates one set and returns its logs, unprefixed.

    What a model puts meanwhile goes into a storage of the set's own, and joins its logs: in the run's
    storage it would mix with the values of training steps.
    """
    trainer.eval_name = data.name
    one_pass = _Pass(trainer)
    failure: Exception | None = None
    with EventStorage() as puts, closing(data.batches(trainer.backend.to_device)) as iterator:
        puts.step = trainer.step
        _together(trainer.ranks, one_pass.begin)
        try:
            one_pass.run(iterator, data)
        except Exception as error:
            if one_pass.is_torn and not one_pass.have_all_failed():
                trainer.ranks.go_alone()  # the others wait in a forward for this rank's part of the model
                raise
            failure = error
        # Ranks agree on each batch of a stream: one that leaves early says so there, before all of them meet here.
        iterator.close()
        # Before anything else that ranks do together: if one failed, all must leave here.
        updates = one_pass.num_updates if trainer.ranks.mesh.is_loss_rank else None
        shares = trainer.ranks.gather((puts.take_window(), updates, _describe(failure)))
    _reject_failure(failure, [text for _, _, text in shares])
    put = summarise(merge([window for window, _, _ in shares]))
    averages = one_pass.averages.over_ranks(trainer.ranks)
    fewest = min(updates for _, updates, _ in shares if updates is not None)
    computed = _compute(trainer.context.metrics, trainer.ranks, fewest, data)
    trainer.eval_averages = {**put, **averages, **computed}
    return _together(trainer.ranks, lambda: _numbers(trainer.eval_end(one_pass.state), trainer))


class _Turns(Iterator[Any]):
    """Iterates over batches and counts how often one was asked for."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.taken = 0

    def __next__(self) -> Any:
        self.taken += 1
        return next(self._batches)


class _Pass:
    """One rank's pass over a set: the sums, and what the task aggregates."""

    def __init__(self, trainer: Trainer) -> None:
        self.averages = Averages()
        self.state: Any = None
        self.num_updates = 0
        """Batches of this rank that held samples."""
        self.is_torn = False
        """Has this rank failed in a forward that needs every rank's part of the model?"""
        self._trainer = trainer
        self._aggregates = overrides(trainer.task, "aggregate_logs", Task)
        self._is_split = trainer.ranks.mesh.is_split
        self._flag = f"torn/{trainer.ranks.broadcast(secrets.token_hex(8))}" if self._is_split else ""
        self._late: Exception | None = None
        """What failed after a forward of a split model; the others hear of it before the next one."""

    def begin(self) -> None:
        """Begins the pass: metrics forget, the trainer is told."""
        for metric in self._trainer.context.metrics:
            metric.metric.reset()
        self._trainer.eval_begin()

    def run(self, iterator: Iterator[Any], data: EvaluationData) -> None:
        """Runs every batch. Where a task aggregates, ranks meet at each and once at the end, also one that failed."""
        late: Exception | None = None
        turns = _Turns(iterator)
        values: dict[str, Any] | None = {}
        while values is not None:
            values, failure = None, late
            try:
                values = self._run_batch(turns, data)
            except Exception as error:
                if not self._aggregates or self.is_torn:
                    raise
                failure = late or error
            if self._aggregates:
                gathered = _gather_outputs(values or {}, data.samples_in_hand, failure, self._trainer.ranks)
                try:
                    if values is not None:
                        self.state = self._trainer.task.aggregate_logs(self.state, gathered)
                except Exception as error:
                    late = error  # the other ranks hear of it where all meet next

    def _run_batch(self, turns: _Turns, data: EvaluationData) -> dict[str, Any] | None:
        """Returns a batch's values; None where the set has ended."""
        trainer = self._trainer
        taken = turns.taken
        has_ended = False
        failure = self._late
        try:
            batch, passthrough = trainer.next_eval_inputs(turns)
        except StopIteration:
            has_ended = True
        except Exception as error:
            failure = failure or error
            if turns.taken == taken:
                next(turns, None)  # ranks agree on each batch of a stream: also one that failed before takes part
        self._meet(failure, has_ended=has_ended)
        if has_ended:
            return None
        trainer.samples_in_hand = data.samples_in_hand
        trainer.phases.enter("evaluate", trainer.step)
        trainer.step_end.garbage.tidy(is_due=False)  # batches of an evaluation may leave cycles as steps do
        return self._step(batch, passthrough, data.samples_in_hand)

    def _meet(self, failure: Exception | None, *, has_ended: bool) -> None:
        """Raises what stands against another forward: a failure, or the wish to leave.

        Ranks that share a model run every forward together or not at all, so each hears here what any has to say.
        """
        trainer = self._trainer
        is_requested = int(not has_ended and trainer.step_end.is_evaluating and trainer.agreement.is_stop_requested())
        num_failed = int(failure is not None)
        if self._is_split:
            is_requested, num_failed = trainer.ranks.sum_counts(is_requested, num_failed)
        if failure is not None:
            raise failure
        if num_failed:
            raise _FailedElsewhere
        if is_requested:
            raise EvaluationAbandoned

    def _step(self, batch: Any, passthrough: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
        try:
            logs = self._trainer.eval_step(batch)
        except Exception:
            self.is_torn = self._is_split
            raise
        try:
            return self._add(logs, batch, passthrough, num_samples)
        except Exception as error:
            if self._aggregates or not self._is_split:
                raise
            self._late = error
            return {}

    def _add(self, logs: Any, batch: Any, passthrough: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
        """Adds a batch's values to the sums and metrics, and returns them."""
        if not isinstance(logs, Mapping):
            raise TrainwrightError(f"eval_step must return a mapping of metrics; it returned a {type(logs).__name__}.")
        values = {**logs, **passthrough}
        if num_samples:
            self.num_updates += 1
            for name, value in values.items():
                # What a task aggregates itself has no mean that anybody asked for: a class id, a score for a ranking.
                if not (self._aggregates and _is_per_sample(value, num_samples)):
                    self.averages.add(name, value, num_samples)
            if self._trainer.ranks.mesh.is_loss_rank:
                for metric in self._trainer.context.metrics:
                    metric.update(getattr(logs, "outputs", None) or logs, batch)
        return values

    def have_all_failed(self) -> bool:
        """Says that this rank has failed in a forward, and answers whether all have: then they can still meet.

        Else the others wait in a collective of that forward, until this rank is gone.
        """
        ranks = self._trainer.ranks
        is_over, everybody = f"{self._flag}/over", [f"{self._flag}/{rank}" for rank in range(ranks.size)]
        until = time.monotonic() + TOGETHER_SECONDS
        try:
            ranks.raise_flag(f"{self._flag}/{ranks.rank}")
            while not ranks.is_raised(is_over):
                if ranks.is_raised(*everybody):
                    return True
                if time.monotonic() > until:
                    ranks.raise_flag(is_over)
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # torch's errors of the network: whoever keeps the store is gone
            return False
        return False


def _together(ranks: Ranks, act: Callable[[], T]) -> T:
    """Calls what may fail on some rank only; then all of them raise, instead of waiting for each other."""
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:
        failure = error
    _reject_failure(failure, ranks.gather(_describe(failure)))
    return result


def _describe(failure: Exception | None) -> str | None:
    return None if failure is None or isinstance(failure, _FailedElsewhere) else repr(failure)


def _reject_failure(own: Exception | None, failures: list[str | None]) -> None:
    """Raises on every rank if any failed: the failure itself there, and what it was elsewhere.

    Ranks that were told to leave do so at a batch of their own; the others join them here.
    """
    abandoned = repr(EvaluationAbandoned())
    if own is not None and not isinstance(own, EvaluationAbandoned | _FailedElsewhere):
        raise own
    for rank, failure in enumerate(failures):
        if failure not in (None, abandoned):
            raise TrainwrightError(f"The evaluation failed on rank {rank}: {failure}")
    if abandoned in failures:
        raise EvaluationAbandoned


def _gather_outputs(
    values: Mapping[str, Any], num_samples: int, failure: Exception | None, ranks: Ranks
) -> dict[str, Any]:
    """Brings one batch's values of all ranks to every host: per-sample ones in sample order, scalars averaged."""
    own = {name: _to_host(value) for name, value in values.items()} if num_samples else {}
    everybodys = ranks.gather((num_samples * ranks.mesh.is_loss_rank, own, _describe(failure)))
    _reject_failure(failure, [text for _, _, text in everybodys])
    shares = [(count, share) for count, share, _ in everybodys if count]
    gathered: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, share in shares for name in share):
        parts = [(count, share[name]) for count, share in shares if name in share]
        if all(_is_per_sample(part, count) for count, part in parts):
            gathered[name] = torch.cat([part for _, part in parts])
        elif all(isinstance(part, list) and len(part) == count for count, part in parts):
            gathered[name] = [item for _, part in parts for item in part]
        elif all(_as_mean(part, count) is not None for count, part in parts):
            means = [mean for count, part in parts if (mean := _as_mean(part, count)) is not None]
            gathered[name] = float(sum(means[1:], means[0]).value)
        else:
            gathered[name] = parts[0][1]
    return gathered


def _to_host(value: Any) -> Any:
    if isinstance(value, Mean):
        return Mean(float(value.total), float(value.count))
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _compute(
    metrics: Sequence[ConfiguredMetric], ranks: Ranks, fewest_updates: int, data: EvaluationData
) -> dict[str, float]:
    if fewest_updates == 0 and any(isinstance(metric.metric, torch.nn.Module) for metric in metrics):
        num_ranks, batch_size = ranks.mesh.num_data_ranks, data.global_batch_size
        why, remedy = "has fewer samples", "Evaluate on fewer processes, or use a larger set."
        if batch_size < num_ranks:
            why = f"is read in batches of {batch_size}, less"
            remedy = f"Set evaluation.batch_size to {num_ranks} or more."
        raise TrainwrightError(
            f"The set {data.name} {why} than there are ranks with samples of their own ({num_ranks}), and torchmetrics "
            f"cannot join ranks of which one saw none. {remedy}"
        )
    if not metrics:
        return {}
    # Of ranks that share samples one has counted them.
    results, means = _together(ranks, lambda: _read_metrics(metrics) if ranks.mesh.is_loss_rank else ({}, Averages()))
    return ranks.gather_samples(results)[0] | means.over_ranks(ranks)


def _read_metrics(metrics: Sequence[ConfiguredMetric]) -> tuple[dict[str, float], Averages]:
    """Returns what metrics say of all ranks, and the means of this rank that are still to be added up."""
    results: dict[str, float] = {}
    means = Averages()
    for metric in metrics:
        computed = metric.metric.compute()
        parts = {metric.name: computed}
        if isinstance(computed, Mapping):
            parts = {f"{metric.name}/{name}": part for name, part in computed.items()}
        for name, value in parts.items():
            if isinstance(value, Mean):
                means.add(name, value, 1)
            else:
                results[name] = float(value)
    return results, means


def _numbers(logs: Any, trainer: Trainer) -> dict[str, float]:
    """Reads what `eval_end` returned: one number a name."""
    owner = trainer.eval_end.__qualname__
    if not isinstance(logs, Mapping):
        problem = f"{owner} returned {'None' if logs is None else f'a {type(logs).__name__}'}. Return the logs by name."
        raise TrainwrightError(problem, where=location_of(trainer.eval_end))
    numbers = {}
    for name, value in logs.items():
        try:
            numbers[name] = float(value.value if isinstance(value, Mean) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise TrainwrightError(
                f"{owner}: {name} is a {type(value).__name__}{shape}, not one number: {error}. Return a number for it, "
                "or leave it out.",
                where=location_of(trainer.eval_end),
            ) from error
    return numbers


EVALUATIONS_FILE = "evaluations.json"
"""In the run folder: a line of JSON for each checkpoint. metrics.json is the training's."""

Weights = tuple[int, str]
"""A step and the hashes of its weights: a run that was started over has other weights at the same steps."""

POLL_SECONDS = 10.0
"""How often a new checkpoint is looked for."""
_POLLS_PER_LOOK = 6  # whether an idle training was stopped stands in its newest checkpoint, which costs a read


def evaluate_as_they_come(
    trainer: Trainer, sets: Mapping[str, EvaluationData], poll_seconds: float, timeout_seconds: float | None
) -> dict[str, float]:
    """Evaluates each checkpoint once, in order, until the training has ended; returns the logs of the last one."""
    store, ranks = trainer.context.store, trainer.ranks
    results = trainer.folder / EVALUATIONS_FILE
    seen: set[Weights] = set()
    last_step = 0
    logs: dict[str, float] = {}
    last_news, num_polls = time.monotonic(), 0
    logger.info("Waiting for checkpoints in %s", store.folder)
    while True:
        found: Weights | str | None = None
        if ranks.is_first:  # it looks for all: a checkpoint may come or go meanwhile
            found = _find_next(trainer, seen, look=num_polls % _POLLS_PER_LOOK == 0)
            if found is None and timeout_seconds is not None and time.monotonic() - last_news >= timeout_seconds:
                found = "late"
        found = ranks.broadcast(found)
        if isinstance(found, tuple):
            seen.add(found)
            last_step, _ = found
            if _restore_unless_gone(trainer, last_step):
                trainer.step = last_step
                logger.info("Evaluating %s", store.path(last_step))
                with trainer.storage:
                    logs = evaluate_sets(trainer, sets)
                if ranks.is_first:
                    _write_down(results, last_step, logs, is_first=len(seen) == 1)
            last_news, num_polls = time.monotonic(), 0
        elif found == "ended":
            logger.info("The training has ended at step %d: every checkpoint is evaluated.", last_step)
            return logs
        elif found == "late":
            problem = f"{store.folder}: no new checkpoint within {timeout_seconds:g} seconds"
            if not logs:
                raise CheckpointError(f"{problem}. Train first, give another folder, or wait longer.")
            logger.warning("%s; the last one evaluated is step %d.", problem, last_step)
            return logs
        else:
            num_polls += 1
            time.sleep(poll_seconds)


def _find_next(trainer: Trainer, seen: set[Weights], *, look: bool) -> Weights | str | None:
    """Returns the next checkpoint to evaluate, or "ended", or None while the training goes on."""
    steps = trainer.context.store.steps()
    unseen = (weights for step in steps if (weights := _weights_of(trainer.context.store, step)) not in seen)
    if (first := next(unseen, None)) is not None:
        return first
    saved = read_config(trainer.folder)
    max_steps = None if saved is None else saved.trainer.max_steps
    if not steps or max_steps is None:
        return None
    if steps[-1] >= max_steps:
        return "ended"
    if look:  # one that stopped early says so in its last checkpoint, which it may have written twice
        try:
            if trainer.context.store.read_split(steps[-1], "training")["max_steps_at_end"] >= max_steps:
                return "ended"
        except CheckpointError as error:
            logger.debug("Not readable yet: %s", error)
    return None


def _weights_of(store: AnyStore, step: int) -> Weights:
    """Returns what tells a checkpoint's weights from others of its step; one that is saved again has the same."""
    if not isinstance(store, CheckpointStore):
        return step, ""  # a run is not started over behind an address that holds checkpoints
    try:
        files = read_manifest(store.path(step))["files"]
    except CheckpointError:
        return step, ""  # gone, or being replaced: what restores it says so
    return step, " ".join(sorted(fact["sha256"] for name, fact in files.items() if name.startswith("model")))


def _restore_unless_gone(trainer: Trainer, step: int) -> bool:
    """Loads a checkpoint's weights; returns False if the training has deleted it meanwhile."""
    failure: Exception | None = None
    try:
        restore_weights(trainer, step)
    except (CheckpointError, OSError) as error:
        failure = error
    failure = next((each for each in trainer.ranks.gather(failure) if each is not None), None)
    if failure is None:
        return True
    if trainer.ranks.broadcast(step in trainer.context.store.steps()):
        raise failure
    logger.warning("Step %d was deleted before it could be evaluated. Keep more with checkpoint.keep_last.", step)
    return False


def _write_down(path: Path, step: int, logs: Mapping[str, float], *, is_first: bool) -> None:
    """Writes a line of the results; those of an earlier `continuous_eval` are replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if is_first else "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **logs}) + "\n")
    logger.info("Step %d: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in logs.items()))
