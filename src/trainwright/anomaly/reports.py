"""Writes the data that is needed to reproduce the step of an anomaly, one folder per anomaly."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainwright.anomaly.detection import Anomaly
from trainwright.config import RunConfig
from trainwright.parallel.collectives import Ranks
from trainwright.safe_text import json_text

logger = logging.getLogger(__name__)

ANOMALIES_FOLDER = "anomalies"
"""Below the run folder."""


@dataclass(frozen=True)
class Positions:
    """The training data that a step used, over all ranks."""

    start: int
    """The first position of its batches in the order of the data."""
    stop: int
    """The position after the last."""
    samples: Sequence[int] | None = None
    """The indices of these samples, in order; None for a stream, whose rows have no index."""


def write_report(
    folder: Path,
    anomaly: Anomaly,
    *,
    config: RunConfig,
    data_state: Mapping[str, Any],
    positions: Positions | None,
    loss_history: Sequence[tuple[int, float]],
    ranks: Ranks,
    checkpoint_step: int | None,
) -> Path:
    """Writes the report of one anomaly below the run folder and returns its folder; one rank calls it.

    A second anomaly of a step gets another folder. A full disk is a warning and does not end the run.
    """
    report = _free_folder(folder / ANOMALIES_FOLDER, f"step-{anomaly.step:08d}")
    facts = {
        **asdict(anomaly),
        "message": anomaly.describe(),
        "seed": config.seed,
        "num_ranks": ranks.size,
        "torch": torch.__version__,
        "newest_checkpoint": None if checkpoint_step is None else f"step-{checkpoint_step:08d}",
        "positions": None if positions is None else asdict(positions),
        "data": dict(data_state),
        "loss_history": [list(pair) for pair in loss_history],
    }
    try:
        report.mkdir(parents=True)
        config.masked().save(report / "config.yaml")
        # JSON has no NaN: the message names a value that is null here.
        text = json_text(facts, indent=2, default=_as_plain)
        (report / "anomaly.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written (%s). %s", report, error.strerror, anomaly.describe())
    return report


def _free_folder(parent: Path, name: str) -> Path:
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


def _as_plain(value: Any) -> Any:
    """Converts what the state of a stream may hold in addition to JSON's types."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
