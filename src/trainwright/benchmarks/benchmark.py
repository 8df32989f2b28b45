"""The contract of a benchmark: samples, a model's results for some of them, and the names of their values.

    load() → samples → run_batch(model, some of them) → a result per sample → means over all samples

loop/benchmarking.py distributes the batches over the ranks and takes the means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

AllAgree = Callable[[bool], bool]
"""Returns True if every rank passes True. Without sharded parameters it returns its argument."""


class Benchmark:
    """Samples, a model's results for them, and the metrics of a result. An evaluation runs it like a dataset.

    Derive from this class, and name it in the run file: `evaluation.benchmarks: [{type: file.py:MyBenchmark}]`.

    The settings are the constructor's parameters. A constructor does not read files.
    """

    metrics: Mapping[str, str] = {}
    """The values of a result that are averaged, each with `max` or `min`: whether higher or lower ones are better."""

    def load(self) -> Sequence[Any]:
        """Reads the samples, once, before the first step; raises DataError for invalid ones."""
        raise NotImplementedError(f"{type(self).__name__} must define load().")

    def check(self, model: nn.Module, samples: Sequence[Any]) -> None:
        """Raises for a sample that the model cannot process, before the first step."""

    def length_of(self, sample: Any) -> int:
        """Returns the length of a sample. Samples of similar lengths share a batch, the longest come first."""
        return 0

    def run_batch(self, model: nn.Module, samples: Sequence[Any], all_agree: AllAgree) -> Sequence[Mapping[str, Any]]:
        """Returns a mapping for each sample: the values of `metrics`, and further facts for the file of results.

        A value of None is not counted. The model is in evaluation mode, and gradients are disabled. With sharded
        parameters, every rank must call the model the same number of times: a loop that may end early calls `all_agree`
        first.
        """
        raise NotImplementedError(f"{type(self).__name__} must define run_batch().")


@dataclass(frozen=True)
class ConfiguredBenchmark:
    """A benchmark with its samples and the settings that all benchmarks have."""

    name: str
    benchmark: Benchmark
    samples: Sequence[Any]
    batch_size: int = 8
    """Samples per call of `run_batch`, on one rank."""
    log_samples: int = 100
    """The number of samples in the results file, beginning with the first."""
    where: object | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def batches(self, max_batches: int | None = None) -> list[list[int]]:
        """Returns the indices of the samples of each batch; the batches do not depend on the number of ranks."""
        count = len(self.samples) if max_batches is None else min(len(self.samples), max_batches * self.batch_size)
        lengths = [self.benchmark.length_of(sample) for sample in self.samples[:count]]
        order = sorted(range(count), key=lambda number: -lengths[number])
        return [order[start : start + self.batch_size] for start in range(0, count, self.batch_size)]
