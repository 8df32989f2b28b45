"""Fine-tunes a language model on the tokens that the data marks: the answers of chats (data/sources/chat.py)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from trainwright.data.fetch import fetch, is_stream
from trainwright.data.randomness import preserve_generators
from trainwright.errors import DataError
from trainwright.events import Mean
from trainwright.events.mean import IGNORED_LABEL
from trainwright.loop.outputs import ForwardResult
from trainwright.trainers.language_model import LanguageModelTrainer

logger = logging.getLogger(__name__)


class SFTTrainer(LanguageModelTrainer):
    """Weights each micro-batch by its trained tokens, those with labels other than −100; adds `token_accuracy`.

    `token_accuracy` is the fraction of trained tokens that the model predicts. It is missing in training if the model
    fuses head and loss, or if its logits are sharded. The first sample's labels are checked before the first step.
    """

    known_eval_names: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "token_accuracy")

    def post_init(self) -> None:
        """Checks the labels of the first sample, unless the data is a stream or made by `next_train_inputs`."""
        dataset = getattr(self.train_data, "dataset", None)
        if dataset is None or is_stream(dataset):
            return
        with preserve_generators():
            [sample] = fetch(dataset, [0])
        if isinstance(sample, Mapping):
            check_labels(sample)

    def add_metrics(self, result: ForwardResult, batch: Any) -> None:
        """Adds the accuracy, without leaving the device."""
        logits: Any = (result.outputs or {}).get("logits")
        labels = batch["labels"]
        if type(logits) is torch.Tensor and logits.shape[:-1] == labels.shape:  # not a DTensor
            targets = labels[..., 1:]
            correct = (logits.detach()[..., :-1, :].argmax(-1) == targets).sum()
            result.metrics["token_accuracy"] = Mean(correct, self.count_targets(labels))


def check_labels(sample: Mapping[str, Any]) -> None:
    """Rejects labels that are not the tokens at the same positions, and logs the number of trained tokens."""
    if sample.get("input_ids") is None or sample.get("labels") is None:
        logger.warning(
            "sft: the samples of data.train have no labels for tokens, but %s, so that the collator decides which "
            "tokens are trained: usually all of them, also those of prompts. Use data.train.type: chat, or a dataset "
            "with labels.",
            ", ".join(map(str, sample)),
        )
        return
    tokens, labels = np.asarray(sample["input_ids"]), np.asarray(sample["labels"])
    is_trained = labels != IGNORED_LABEL
    if labels.shape != tokens.shape or not (labels == tokens)[is_trained].all():
        raise DataError(
            "sft: the labels of the first sample of data.train are not its input_ids. Use -100 for tokens that are "
            "not trained and the token itself, not the next one, for the others: the model shifts the labels."
        )
    logger.info("sft: %d of %d tokens of the first sample are trained.", is_trained.sum(), is_trained.size)
