"""A step and an evaluation where each rank has some of the layers: torch's schedule runs the micro-batches.

It owns forward and backward, so a user's own forward or step cannot take part (build.py refuses them). The update is
the same as ever: the last stage notes each micro-batch's loss, and every stage applies its gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from trainwright.errors import DataError
from trainwright.loop.outputs import ForwardResult
from trainwright.loop.update import Update

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer


def run_pipeline(trainer: Trainer, update: Update, batch: Any) -> None:
    """Runs all micro-batches of a batch, forward and backward, over the stages."""
    pipeline = trainer.surroundings.updater.pipeline
    assert pipeline is not None
    pieces: list[Mapping[str, Any]] = []
    samples: list[int] = []
    for piece in trainer.micro_batches(batch):
        pieces.append(_mapping(piece))
        samples.append(trainer.samples_in_hand)

    def scale(outputs: Any, number: int) -> torch.Tensor:
        result = _read(trainer, outputs, pieces[number], samples[number])
        scaled = update.scale(result)
        assert scaled is not None  # stages meet in every backward
        return scaled

    update.begin_backward()
    with _autocast(trainer):
        pipeline.run(pieces, scale)
    update.note_elsewhere()


def evaluate_pipeline(trainer: Trainer, batch: Any) -> ForwardResult | None:
    """Returns a batch's result on the last stage; None on the others."""
    pipeline = trainer.surroundings.updater.pipeline
    assert pipeline is not None
    with _autocast(trainer):
        outputs = pipeline.evaluate(_mapping(batch))
    return None if outputs is None else _read(trainer, outputs, batch, trainer.samples_in_hand)


def _autocast(trainer: Trainer) -> AbstractContextManager[Any]:
    keeps_casts = trainer.surroundings.updater.sync is None
    return trainer.backend.autocast(trainer.config.runtime.precision, keeps_casts=keeps_casts)


def _read(trainer: Trainer, outputs: Any, piece: Mapping[str, Any], num_samples: int) -> ForwardResult:
    """Lets the trainer's forward see the outputs that the last stage has made."""
    whole = trainer.samples_in_hand
    trainer.outputs_in_hand, trainer.samples_in_hand = outputs, num_samples
    try:
        return trainer.run_forward(piece)
    finally:
        trainer.outputs_in_hand, trainer.samples_in_hand = None, whole


def _mapping(batch: Any) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise DataError(f"runtime.mesh.pipeline needs batches that are mappings, but this is a {type(batch).__name__}.")
    return batch
