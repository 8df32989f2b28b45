"""Writes what is needed to repeat a step that went wrong, one folder per anomaly."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainwright.anomaly.detection import Anomaly
from trainwright.config import RunConfig
from trainwright.parallel.collectives import Ranks

logger = logging.getLogger(__name__)

ANOMALIES = "anomalies"
"""The folder in a run folder."""


@dataclass(frozen=True)
class Positions:
    """Which part of the training data a step was made from, over all ranks."""

    start: int
    """The first place of its batches."""
    stop: int
    """The place behind the last."""
    samples: Sequence[int] | None = None
    """The numbers of the samples there, in order; None for a stream, whose rows have none."""


def write_bundle(
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
    """Writes the bundle of one anomaly below the run folder and returns its folder; one rank calls it.

    A second anomaly of a step gets a folder of its own. Where the disk rejects, that is a warning: a run does not end
    for want of its report.
    """
    bundle = _free_folder(folder / ANOMALIES, f"step-{anomaly.step:08d}")
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
        bundle.mkdir(parents=True)
        config.save(bundle / "config.yaml")
        # A NaN is written as NaN, as in metrics.json: no report hides one.
        text = json.dumps(facts, indent=2, default=_as_plain)
        (bundle / "anomaly.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written (%s). %s", bundle, error.strerror, anomaly.describe())
    return bundle


def _free_folder(parent: Path, name: str) -> Path:
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


def _as_plain(value: Any) -> Any:
    """What a stream's own state may hold beside JSON's kinds."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
