"""Runs a benchmark: its batches over the ranks, and the means over all samples.

The batches and the results do not depend on the number of ranks. benchmarks/ has the benchmarks themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainwright.benchmarks.benchmark import ConfiguredBenchmark
from trainwright.errors import ConfigError
from trainwright.loop.agreement import Agreement
from trainwright.parallel.collectives import Ranks
from trainwright.progress import progress
from trainwright.user_code.locations import location_of
from trainwright.writers.benchmark_results import BenchmarkResult, MetricValue

Results = dict[int, Mapping[str, Any]]
"""The result of each sample, by its number."""


class BenchmarkPass:
    """One rank's pass over a benchmark."""

    def __init__(self, configured: ConfiguredBenchmark, ranks: Ranks, agreement: Agreement) -> None:
        self.agreement = agreement
        self.failed_in_batch = False
        """True if this rank failed in a batch; the model may need every rank's shard for it."""
        self._configured = configured
        self._ranks = ranks
        self._results: Results = {}

    @torch.no_grad()
    def run(
        self,
        model: nn.Module,
        *,
        max_batches: int | None,
        around_batch: Callable[[], AbstractContextManager[Any]],
        before_batch: Callable[[], None],
    ) -> None:
        """Runs this rank's batches; with a sharded model, every rank runs the same number."""
        mesh, configured = self._ranks.mesh, self._configured
        batches = configured.batches(max_batches)
        with progress(f"Evaluating {configured.name}", total=sum(map(len, batches)), unit="samples") as advance:
            for first in range(0, len(batches), mesh.num_data_ranks):
                self.agreement.to_continue(None)
                number = first + mesh.data_rank
                is_own = number < len(batches)
                if is_own or mesh.is_split:
                    before_batch()
                    # A rank without a batch repeats the last one, because the others call the model collectively.
                    batch = batches[min(number, len(batches) - 1)]
                    with around_batch():
                        results = self._run_batch(model, batch)
                    if is_own:
                        self._results.update(zip(batch, results, strict=True))
                advance(sum(map(len, batches[first : first + mesh.num_data_ranks])))

    def _run_batch(self, model: nn.Module, batch: Sequence[int]) -> Sequence[Mapping[str, Any]]:
        configured, is_split = self._configured, self._ranks.mesh.is_split

        def all_agree(own: bool) -> bool:
            return self._ranks.sum_counts(int(not own)) == (0,) if is_split else own

        try:
            results = configured.benchmark.run_batch(model, [configured.samples[each] for each in batch], all_agree)
            self._check(results, len(batch))
        except Exception:
            self.failed_in_batch = is_split
            raise
        return results

    def _check(self, results: Any, count: int) -> None:
        """Rejects results of a user's benchmark that are not a list of mappings with its metrics."""
        benchmark = self._configured.benchmark
        problem = None
        if not isinstance(results, Sequence) or not all(isinstance(each, Mapping) for each in results):
            problem = f"returned a {type(results).__name__}. Return a list with a mapping for each sample."
        elif len(results) != count:
            problem = f"returned {len(results)} results for {count} samples. Return one for each."
        else:
            for name in benchmark.metrics:
                missing = [each for each in results if name not in each]
                wrong = [each[name] for each in results if not _is_value(each.get(name))]
                if missing:
                    problem = f'returned a result without "{name}", one of metrics. Add it, or use None to omit it.'
                elif wrong:
                    problem = f"returned {wrong[0]!r:.60} as {name}. Return a number, or None to omit it."
        if problem is not None:
            kind = type(benchmark)
            raise ConfigError(f"{kind.__name__}.run_batch {problem}", where=location_of(kind.run_batch))

    def gather(self) -> BenchmarkResult:
        """Returns the means over the samples of all ranks, the same on every rank; collective."""
        configured = self._configured
        names = tuple(configured.benchmark.metrics)
        # Prompts are long, so samples that are not in the results file are sent without them.
        own = {
            number: result if number < configured.log_samples else {name: result[name] for name in names}
            for number, result in self._results.items()
        }
        merged: Results = {}
        for results in self._ranks.gather_samples(own):
            merged |= results
        values = {
            name: _mean([float(merged[number][name]) for number in sorted(merged) if merged[number][name] is not None])
            for name in names
        }
        shown = [merged[number] for number in sorted(merged) if number < configured.log_samples]
        return BenchmarkResult(configured.name, values, len(merged), shown)


def _is_value(value: Any) -> bool:
    if value is None:
        return True
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, str)


def _mean(values: Sequence[float]) -> MetricValue:
    """Returns the mean and its standard error, both independent of the order of the values."""
    count = len(values)
    if not count:
        return MetricValue(float("nan"), float("nan"))
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else float("nan")
    return MetricValue(mean, math.sqrt(variance / count))
