"""The results of benchmarks: files in the run folder, and a table.

runs/NAME/benchmarks/step-00000100/results.json    all values, with their standard errors
                                  /arc.jsonl       the first samples of the benchmark arc, one per line
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainwright.errors import TrainwrightError
from trainwright.log import align_columns
from trainwright.safe_text import json_text, safe

FOLDER = "benchmarks"
RESULTS_FILE = "results.json"


class MetricValue(NamedTuple):
    """A mean over samples, and its standard error: the sample standard deviation divided by √n, nan for one sample."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class BenchmarkResult:
    """The values of a benchmark, and the results of its first samples."""

    name: str
    values: Mapping[str, MetricValue]
    num_samples: int
    samples: Sequence[Mapping[str, Any]]


def results_folder(run_folder: Path, step: int, weights: str | None = None) -> Path:
    """Returns the folder of the results of a step; `weights` are those selected for an evaluation."""
    return run_folder / FOLDER / (f"step-{step:08d}" + (f"-{weights}" if weights else ""))


def write_results(folder: Path, results: Sequence[BenchmarkResult], details: Any = None) -> None:
    """Writes all files; those of an earlier evaluation of the step are replaced. `details` replace results.json."""
    listed = details or {
        each.name: {
            "num_samples": each.num_samples,
            **{name: {"value": one.value, "standard_error": one.standard_error} for name, one in each.values.items()},
        }
        for each in results
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each in results:
            if each.samples:
                lines = [json_text(sample, default=str) + "\n" for sample in each.samples]
                (folder / f"{each.name}.jsonl").write_text("".join(lines), encoding="utf-8")
        (folder / RESULTS_FILE).write_text(json_text(listed, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise TrainwrightError(
            f"{folder}: the results of the benchmarks cannot be written ({error.strerror}). Free some space, and run "
            "the same command again."
        ) from error


def table_lines(results: Sequence[BenchmarkResult]) -> list[str]:
    """Returns a table with a row for each metric of each benchmark."""
    rows: list[tuple[str, ...]] = [("benchmark", "metric", "value", "±", "samples")]
    for each in results:
        for number, (metric, one) in enumerate(each.values.items()):
            name, size = (each.name, f"{each.num_samples:,}") if number == 0 else ("", "")
            rows.append((safe(name), safe(metric), f"{one.value:.4f}", f"{one.standard_error:.4f}", size))
    return align_columns(rows)
