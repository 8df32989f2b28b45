"""Evaluates named sets and benchmarks: each sample counts once for any number of ranks.

Sums stay on the device until a pass is over, so memory does not grow with the set. `evaluate_checkpoints` evaluates the
checkpoints of a run that another process trains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from trainwright.backends.host_memory import GarbageCollection
from trainwright.benchmarks.benchmark import ConfiguredBenchmark
from trainwright.checkpoint.base_weights import bit_checksums
from trainwright.checkpoint.contents import generator_state, load_averaged, restore_generators
from trainwright.checkpoint.manifest import read_manifest
from trainwright.checkpoint.remote_store import AnyStore
from trainwright.checkpoint.run_folder import read_config
from trainwright.checkpoint.store import CheckpointStore
from trainwright.data.order import mix_seed
from trainwright.data.stream_loader import EvaluationData
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError
from trainwright.events import EventStorage, Mean
from trainwright.events.mean import detached_copy, is_sharded, merge, summarise
from trainwright.events.storage import full_logs, full_values
from trainwright.loop.agreement import Agreement, describe_failure, raise_failure, together
from trainwright.loop.benchmarking import BenchmarkPass
from trainwright.loop.hook import HookCalls
from trainwright.loop.metrics import (
    ConfiguredMetric,
    has_mergeable_state,
    merge_states,
    reject_rank_value,
    states_of,
)
from trainwright.loop.outputs import ForwardResult
from trainwright.loop.stop_signal import StopSignal
from trainwright.loop.task import Task, overrides
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import local
from trainwright.parallel.replicate import copy_from_first
from trainwright.progress import progress
from trainwright.safe_text import json_text
from trainwright.user_code.locations import location_of
from trainwright.writers.benchmark_results import BenchmarkResult, results_folder, write_results

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

_EVAL_STREAM = 0xE7A1  # separates the randomness of evaluations from that of steps

EvaluatedSet: TypeAlias = "EvaluationData | ConfiguredBenchmark"
"""An evaluation set or a benchmark."""


class EvalLogs(dict[str, Any]):
    """The default result of `eval_step`: the loss and metrics, with the outputs of the forward as an attribute."""

    outputs: Mapping[str, Any] | None = None


def logs_of(result: ForwardResult) -> EvalLogs:
    """Turns the result of a forward into the logs of an evaluation step."""
    logs = EvalLogs(loss=result.mean, **result.metrics)
    logs.outputs = result.outputs
    return logs


class Averages:
    """Sums the values of one set over its batches, on the device: name → total and count."""

    def __init__(self) -> None:
        self._sums: dict[str, Mean] = {}
        self._sharded: list[tuple[str, Any, int]] = []
        """Values that are DTensors, with their numbers of samples, before they are gathered."""

    def add(self, name: str, value: Any, num_samples: int) -> None:
        """Adds a batch's value: a Mean, a scalar weighted by the number of samples, or one number per sample.

        Anything else (a matrix of outputs, a text) has no mean and is ignored. Ranks that share a model must add the
        same DTensors, also with 0 samples.
        """
        if is_sharded(value) or (isinstance(value, Mean) and (is_sharded(value.total) or is_sharded(value.count))):
            self._sharded.append(
                (name, value.detach() if isinstance(value, Mean) else detached_copy(value), num_samples)
            )
            return
        if num_samples == 0:
            return
        mean = _as_mean(value, num_samples)
        if mean is not None:
            self._sums[name] = self._sums[name] + mean if name in self._sums else mean

    def over_ranks(self, ranks: Ranks) -> dict[str, float]:
        """Returns the means over all ranks as numbers; ranks may have different names."""
        if ranks.mesh.is_split:
            sharded, self._sharded = self._sharded, []
            parts = [[value.total, value.count] if isinstance(value, Mean) else [value] for _, value, _ in sharded]
            labels = [(name, number) for number, (name, _, _) in enumerate(sharded)]
            full = full_values(list(zip(labels, parts, strict=True)), ranks.gather)
            for (name, _, num_samples), values in zip(sharded, full, strict=True):
                self.add(name, Mean(*values) if len(values) == 2 else values[0], num_samples)
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
        if value.shape[0] == num_samples == value.numel():  # both [n] and [n, 1]
            return Mean(_double(value).sum(), float(num_samples))
    return None


def _is_per_sample(value: Any, num_samples: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == num_samples


def _double(value: Any) -> Any:
    return value.detach().double() if isinstance(value, torch.Tensor) else float(value)


class Evaluator:
    """Evaluates sets with a trainer's `eval_begin`, `next_eval_inputs`, `eval_step` and `eval_end`."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        metrics: Sequence[ConfiguredMetric],
        stop_signal: StopSignal,
        garbage: GarbageCollection,
    ) -> None:
        self._trainer = trainer
        self._ranks = trainer.ranks
        self._metrics = metrics
        self._stop_signal = stop_signal
        self._garbage = garbage
        self.set_name: str | None = None
        """The set that is being evaluated."""
        self.averages: dict[str, float] = {}
        """The means of the current set over all ranks, for `eval_end`."""
        self.benchmark_results: list[BenchmarkResult] = []
        """The results of the benchmarks of the last evaluation."""

    def evaluate(
        self,
        sets: Mapping[str, EvaluatedSet],
        hooks: HookCalls,
        *,
        averaged: Mapping[str, torch.Tensor],
        can_be_abandoned: bool = False,
    ) -> dict[str, float]:
        """Evaluates several sets and benchmarks and returns their logs, each prefixed with its name, on every rank.

        `averaged` are weights to use instead of the model's. Training is not affected: the weights, the modes of
        modules and the generators are restored. With `can_be_abandoned`, an interruption raises EvaluationAbandoned at
        the next batch.
        """
        trainer = self._trainer
        products = trainer.backend.float32_products(tf32=trainer.config.runtime.tf32)
        with replaced_weights(trainer.model, averaged), products:
            return self._evaluate(sets, hooks, can_be_abandoned=can_be_abandoned)

    def _evaluate(
        self, sets: Mapping[str, EvaluatedSet], hooks: HookCalls, *, can_be_abandoned: bool
    ) -> dict[str, float]:
        trainer, ranks = self._trainer, self._ranks
        logs: dict[str, float] = {}
        if any(isinstance(each, ConfiguredBenchmark) for each in sets.values()):
            self.benchmark_results = []
        training = [module for module in trainer.model.modules() if module.training]
        generators = generator_state()
        try:
            together(ranks, lambda: _call_before_eval(hooks, trainer.model))
            copy_from_first(trainer.model.buffers(), ranks)  # running means differ between ranks before this
            trainer.model.eval()
            for name, data in sets.items():
                trainer.backend.seed(mix_seed(trainer.config.seed, _EVAL_STREAM, *ranks.mesh.draws))
                if isinstance(data, ConfiguredBenchmark):
                    values = self._run_benchmark(data, can_be_abandoned=can_be_abandoned)
                else:
                    values = self._evaluate_set(data, can_be_abandoned=can_be_abandoned)
                logs.update({f"{name}/{key}": value for key, value in values.items()})
            if any(isinstance(each, ConfiguredBenchmark) for each in sets.values()):
                folder = results_folder(trainer.folder, trainer.state.step, trainer.loaded_weights)
                results = self.benchmark_results if ranks.is_first else []
                together(ranks, lambda: write_results(folder, results) if results else None)
            # A custom metric may differ between ranks; decisions based on it (best, stop) must not.
            logs = ranks.broadcast(logs)
        except Exception:
            # Hooks undo what they did for the evaluation before anything is saved.
            hooks.call_all("after_eval", {})
            raise
        finally:
            self.set_name = None
            restore_generators(generators)
            trainer.seed_step()
            for module in training:
                module.training = True
        # All of them even if one raises, because the step is then saved.
        errors = hooks.call_all("after_eval", logs)
        failure = errors[0] if errors else None
        raise_failure(failure, ranks.gather(describe_failure(failure)))
        return logs

    @torch.no_grad()
    def _evaluate_set(self, data: EvaluationData, *, can_be_abandoned: bool) -> dict[str, float]:
        """Evaluates one set and returns its logs, unprefixed.

        Values that the model puts go into a separate storage and become part of the set's logs. In the run's storage
        they would be mixed with the values of training steps.
        """
        trainer, ranks = self._trainer, self._ranks
        self.set_name = data.name
        stop_signal = self._stop_signal if can_be_abandoned else None
        one_pass = _Pass(trainer, self._metrics, stop_signal=stop_signal, garbage=self._garbage)
        failure: Exception | None = None
        with (
            EventStorage(keeps_media=ranks.mesh.is_first_of_stage) as puts,
            closing(data.batches(trainer.batches_to_device)) as iterator,
            progress(f"Evaluating {data.name}", unit="batches") as advance,
        ):
            puts.step = trainer.state.step
            try:
                # eval_end is outside: its changes, such as the best value so far, are kept.
                with ExitStack() as preserved:
                    together(ranks, lambda: one_pass.begin(preserved))
                    one_pass.run(iterator, data, advance)
            except Exception as error:
                if one_pass.failed_in_forward and not one_pass.agreement.have_all_failed():
                    ranks.go_alone()  # the others wait in a forward for this rank's shard of the model
                    raise
                failure = error
            # Ranks agree on each batch of a stream: one that stops early reports it there, before the next collective.
            iterator.close()
            # Before any other collective, because all ranks must exit here if one failed.
            raise_failure(failure, ranks.gather(describe_failure(failure)))
            if ranks.mesh.is_split:
                puts.gather_shards(ranks.gather)
            put = summarise(merge(ranks.gather(puts.take_window())))
            trainer.storage.adopt_media(puts, prefix=f"{data.name}/")
        averages = one_pass.averages.over_ranks(ranks)
        computed = _compute(self._metrics, ranks, has_samples=one_pass.num_updates > 0)
        self.averages = {**put, **averages, **computed}
        logs = together(ranks, lambda: _logs_of_set(trainer, one_pass.state))
        if ranks.mesh.is_split:
            logs = full_logs(logs, ranks.gather)
        return together(ranks, lambda: _numbers(logs, trainer))

    def _run_benchmark(self, configured: ConfiguredBenchmark, *, can_be_abandoned: bool) -> dict[str, float]:
        """Runs one benchmark and returns its values, unprefixed."""
        trainer, ranks = self._trainer, self._ranks
        self.set_name = configured.name
        agreement = Agreement(ranks, self._stop_signal if can_be_abandoned else None)
        one_pass = BenchmarkPass(configured, ranks, agreement)

        @contextmanager
        def around_batch() -> Iterator[None]:
            keeps_casts = trainer.context.updater.sync is None
            precision = trainer.config.runtime.precision
            # Batches have many shapes, and a compiled region would be recompiled for each.
            with (
                trainer.gather_mixed,
                trainer.backend.autocast(precision, keeps_casts=keeps_casts),
                torch.compiler.set_stance("force_eager"),
            ):
                yield

        def before_batch() -> None:
            trainer.heartbeat.enter("evaluate", trainer.state.step)
            self._garbage.tidy(is_due=False)

        failure: Exception | None = None
        try:
            with EventStorage(keeps_media=False):  # values that the model puts do not belong to a training step
                one_pass.run(
                    trainer.model,
                    max_batches=trainer.config.evaluation.max_batches,
                    around_batch=around_batch,
                    before_batch=before_batch,
                )
        except Exception as error:
            if one_pass.failed_in_batch and not agreement.have_all_failed():
                ranks.go_alone()  # the others wait in a forward for this rank's shard of the model
                raise
            failure = error
        raise_failure(failure, ranks.gather(describe_failure(failure)))
        result = one_pass.gather()
        self.benchmark_results.append(result)
        return {name: each.value for name, each in result.values.items()}


class _CountedBatches(Iterator[Any]):
    """Iterates over batches and counts the requests."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.num_requested = 0

    def __next__(self) -> Any:
        self.num_requested += 1
        return next(self._batches)


class _Pass:
    """One rank's pass over a set: the sums, and the state that the task aggregates."""

    def __init__(
        self,
        trainer: Trainer,
        metrics: Sequence[ConfiguredMetric],
        *,
        stop_signal: StopSignal | None,
        garbage: GarbageCollection,
    ) -> None:
        """`stop_signal` is passed if an interruption may abandon the pass."""
        self.averages = Averages()
        self.state: Any = None
        self.num_updates = 0
        """Batches of this rank that have samples."""
        self.failed_in_forward = False
        """True if this rank failed in a forward that needs every rank's shard of the model."""
        self._trainer = trainer
        self._metrics = metrics
        self.agreement = Agreement(trainer.ranks, stop_signal)
        self._garbage = garbage
        self._aggregates = overrides(trainer.task, "aggregate_logs", Task)
        self._is_split = trainer.ranks.mesh.is_split
        self._late: Exception | None = None
        """The failure after a forward of a sharded model; the other ranks are notified before the next forward."""

    def begin(self, preserved: ExitStack) -> None:
        """Resets the metrics and calls `eval_begin`; `preserved` restores the trainer's state at the end."""
        preserved.enter_context(self._trainer.preserve_state())
        for metric in self._metrics:
            metric.metric.reset()
        self._trainer.eval_begin()

    def run(self, iterator: Iterator[Any], data: EvaluationData, advance: Callable[[], None]) -> None:
        """Runs every batch and calls `advance` after each.

        If the task aggregates, each batch ends with a collective, also on a rank that failed.
        """
        late: Exception | None = None
        batches = _CountedBatches(iterator)
        values: dict[str, Any] | None = {}
        while values is not None:
            values, failure = None, late
            try:
                values = self._run_batch(batches, data)
                advance()
            except Exception as error:
                if not self._aggregates or self.failed_in_forward:
                    raise
                failure = late or error
            if self._aggregates:
                gathered = _gather_outputs(values or {}, data.batch_num_samples, failure, self._trainer.ranks)
                try:
                    if values is not None:
                        self.state = self._trainer.task.aggregate_logs(self.state, gathered)
                except Exception as error:
                    late = error  # raised on all ranks at the next collective

    def _run_batch(self, batches: _CountedBatches, data: EvaluationData) -> dict[str, Any] | None:
        """Returns the values of a batch; None at the end of the set."""
        trainer = self._trainer
        requested = batches.num_requested
        has_ended = False
        failure = self._late
        try:
            batch, passthrough = trainer.next_eval_inputs(batches)
        except StopIteration:
            has_ended = True
        except Exception as error:
            failure = failure or error
            if batches.num_requested == requested:
                next(batches, None)  # ranks agree on each batch of a stream, so a rank that failed takes part
        self.agreement.to_continue(failure, has_ended=has_ended)
        if has_ended:
            return None
        trainer.set_batch(batch, data.batch_num_samples)
        trainer.heartbeat.enter("evaluate", trainer.state.step)
        self._garbage.tidy(is_due=False)  # like steps, batches of an evaluation may create reference cycles
        return self._step(batch, passthrough, data.batch_num_samples)

    def _step(self, batch: Any, passthrough: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
        try:
            with self._trainer.gather_mixed:
                logs = self._trainer.eval_step(batch)
        except Exception:
            self.failed_in_forward = self._is_split
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
        for name, value in values.items():
            # Values that a task aggregates itself (class ids, scores of a ranking) need no mean.
            if not (self._aggregates and _is_per_sample(value, num_samples)):
                self.averages.add(name, value, num_samples)
        if num_samples:
            self.num_updates += 1
            if self._trainer.ranks.mesh.is_loss_rank:
                for metric in self._metrics:
                    metric.update(getattr(logs, "outputs", None) or logs, batch, values)
        return values


def _gather_outputs(
    values: Mapping[str, Any], num_samples: int, failure: Exception | None, ranks: Ranks
) -> dict[str, Any]:
    """Gathers the values of a batch on every host: per-sample values in sample order, scalars averaged."""
    if ranks.mesh.is_split:
        raise_failure(failure, ranks.gather(describe_failure(failure)))
        values = full_logs(values, ranks.gather)
    own = {name: _to_host(value) for name, value in values.items()} if num_samples else {}
    all_ranks = ranks.gather((num_samples * ranks.mesh.is_loss_rank, own, describe_failure(failure)))
    raise_failure(failure, [text for _, _, text in all_ranks])
    shares = [(count, share) for count, share, _ in all_ranks if count]
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


def _compute(metrics: Sequence[ConfiguredMetric], ranks: Ranks, *, has_samples: bool) -> dict[str, float]:
    """Returns the values of the metrics over the samples of all ranks; collective."""
    if not metrics:
        return {}
    # Among ranks that share samples, one counts them.
    is_counted = ranks.mesh.is_loss_rank
    merged = [metric for metric in metrics if has_mergeable_state(metric.metric)]
    computing, num_ranks = ranks.rank, ranks.mesh.num_data_ranks
    if merged and num_ranks > 1:
        own = together(ranks, lambda: _own_states(merged) if is_counted and has_samples else None)
        shares = ranks.gather_samples((ranks.rank, own))
        seen = [(rank, states) for rank, states in shares if states is not None]
        # Only one rank computes, because sorting the scores of a large set takes seconds. This rank has seen samples,
        # so it has created the objects of torchmetrics.
        computing = next((rank for rank, _ in seen), shares[0][0])
        if computing == ranks.rank:
            for metric in merged:
                merge_states(metric.metric, [states[metric.name] for _, states in seen])
    read = [each for each in metrics if each not in merged or computing == ranks.rank]
    results, means = together(
        ranks, lambda: _read_metrics(read, num_ranks, has_samples) if is_counted else ({}, Averages())
    )
    results = {name: value for each in reversed(ranks.gather_samples(results)) for name, value in each.items()}
    return results | means.over_ranks(ranks)


def _own_states(metrics: Sequence[ConfiguredMetric]) -> dict[str, Any]:
    """Returns the states of torchmetrics' metrics of this rank by name."""
    for metric in metrics:
        metric.check_values()  # the computing rank checks only its own samples
    return {metric.name: states_of(metric.metric) for metric in metrics}


def _read_metrics(
    metrics: Sequence[ConfiguredMetric], num_data_ranks: int, has_samples: bool
) -> tuple[dict[str, float], Averages]:
    """Returns the metrics over all ranks, and the means of this rank that have yet to be summed."""
    results: dict[str, float] = {}
    means = Averages()
    for metric in metrics:
        metric.check_values()
        is_empty = not has_samples and has_mergeable_state(metric.metric)  # torchmetrics would warn or raise
        computed = float("nan") if is_empty else metric.metric.compute()
        parts = {metric.name: computed}
        if isinstance(computed, Mapping):
            parts = {f"{metric.name}/{name}": part for name, part in computed.items()}
        for name, value in parts.items():
            reject_rank_value(metric, value, num_data_ranks)
            if isinstance(value, Mean):
                means.add(name, value, 1)
            elif isinstance(value, torch.Tensor) and value.numel() > 1:  # one value per class
                results |= {f"{name}/{number}": float(each) for number, each in enumerate(value.flatten())}
            else:
                results[name] = float(value)
    return results, means


def _logs_of_set(trainer: Trainer, state: Any) -> Mapping[str, Any]:
    with trainer.gather_mixed:
        logs = trainer.eval_end(state)
    if not isinstance(logs, Mapping):
        returned = "None" if logs is None else f"a {type(logs).__name__}"
        problem = f"{trainer.eval_end.__qualname__} returned {returned}. Return the logs by name."
        raise TrainwrightError(problem, where=location_of(trainer.eval_end))
    return logs


def _numbers(logs: Mapping[str, Any], trainer: Trainer) -> dict[str, float]:
    """Reads the result of `eval_end`: one number per name."""
    owner = trainer.eval_end.__qualname__
    numbers = {}
    for name, value in logs.items():
        try:
            numbers[name] = float(value.value if isinstance(value, Mean) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise TrainwrightError(
                f"{owner}: {name} is a {type(value).__name__}{shape}, not one number: {error}. Return a number for "
                "it, or omit it.",
                where=location_of(trainer.eval_end),
            ) from error
    return numbers


@contextmanager
def replaced_weights(model: torch.nn.Module, averaged: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Copies weights into the model and restores the model's own weights exactly afterwards; needs memory for a copy of
    these."""
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    trained = {name: local(own[name]).detach().clone() for name in averaged if name in own}
    try:
        load_averaged(averaged, model, source="averaged_weights of a hook")
        yield
    finally:
        with torch.no_grad():
            for name, values in trained.items():
                local(own[name]).copy_(values)


def _call_before_eval(hooks: HookCalls, model: torch.nn.Module) -> None:
    """Calls `before_eval`; raises if it changes weights, because load_checkpoint and export would not have them."""
    owners = hooks.owners("before_eval")
    before = bit_checksums(model.parameters()) if owners else []
    hooks.call("before_eval")
    if owners and bit_checksums(model.parameters()) != before:
        names = " or ".join(f"{type(hook).__name__}.before_eval" for hook in owners)
        raise ConfigError(
            f"{names} changes weights of the model. Return the weights to evaluate with from averaged_weights() "
            "instead: checkpoints then contain them, and load_checkpoint and export use the evaluated weights.",
            where=location_of(owners[0].before_eval),
        )


EVALUATIONS_FILE = "evaluations.json"
"""In the run folder: one JSON line per checkpoint; metrics.json belongs to the training."""

Weights = tuple[int, str]
"""A step and the hashes of its weights, because a run that was started over has other weights at the same steps."""

POLL_SECONDS = 10.0
"""How often to look for a new checkpoint."""
_POLLS_PER_READ = 6  # the newest checkpoint says whether an idle run was stopped, but takes time to read


def evaluate_checkpoints(
    trainer: Trainer,
    sets: Mapping[str, EvaluatedSet],
    poll_seconds: float,
    timeout_seconds: float | None,
    weights: str | None = None,
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
        if ranks.is_first:  # for all ranks, because a checkpoint may appear or disappear in the meantime
            found = _find_next(trainer, seen, reads=num_polls % _POLLS_PER_READ == 0)
            if found is None and timeout_seconds is not None and time.monotonic() - last_news >= timeout_seconds:
                found = "late"
        found = ranks.broadcast(found)
        if isinstance(found, tuple):
            seen.add(found)
            last_step, _ = found
            if _restore_unless_gone(trainer, last_step, weights):
                logger.info("Evaluating %s", store.path(last_step))
                with trainer.storage:
                    logs = trainer.evaluate_sets(sets)
                if ranks.is_first:
                    _append_result(results, last_step, logs, is_first=len(seen) == 1)
            last_news, num_polls = time.monotonic(), 0
        elif found == "ended":
            logger.info("The training has ended at step %d: every checkpoint is evaluated.", last_step)
            return logs
        elif found == "late":
            problem = f"{store.folder}: no new checkpoint within {timeout_seconds:g} seconds"
            if not logs:
                raise CheckpointError(f"{problem}. Train first, use another folder, or wait longer.")
            logger.warning("%s; the last one evaluated is step %d.", problem, last_step)
            return logs
        else:
            num_polls += 1
            time.sleep(poll_seconds)


def _find_next(trainer: Trainer, seen: set[Weights], *, reads: bool) -> Weights | str | None:
    """Returns the next checkpoint to evaluate, or "ended", or None while the training continues."""
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
    if reads:  # the last checkpoint of a run that stopped early says so
        try:
            if trainer.context.store.read_split(steps[-1], "training")["max_steps_at_end"] >= max_steps:
                return "ended"
        except CheckpointError as error:
            logger.debug("Not readable yet: %s", error)
    return None


def _weights_of(store: AnyStore, step: int) -> Weights:
    """Returns an identifier of the weights of a checkpoint; saving the same weights again does not change it."""
    if not isinstance(store, CheckpointStore):
        return step, ""  # a remote run is not started over
    try:
        files = read_manifest(store.path(step))["files"]
    except CheckpointError:
        return step, ""  # deleted, or being replaced: restoring it raises
    return step, " ".join(sorted(fact["sha256"] for name, fact in files.items() if name.startswith("model")))


def _restore_unless_gone(trainer: Trainer, step: int, weights: str | None) -> bool:
    """Loads a checkpoint's weights; returns False if the training has deleted it in the meantime."""
    try:
        trainer.load_weights(step, weights)
    except CheckpointError:  # on all ranks
        if trainer.ranks.broadcast(step in trainer.context.store.steps()):
            raise
    else:
        return True
    logger.warning("Step %d was deleted before it could be evaluated. Keep more with checkpoint.keep_last.", step)
    return False


def _append_result(path: Path, step: int, logs: Mapping[str, float], *, is_first: bool) -> None:
    """Writes a line of the results; those of an earlier `continuous_eval` are replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if is_first else "a", encoding="utf-8") as file:
        file.write(json_text({"step": step, **logs}) + "\n")
    logger.info("Step %d: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in logs.items()))
