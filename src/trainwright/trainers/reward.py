"""Trains a reward model on pairs of answers, so that the chosen one has the higher score (Bradley–Terry).

The samples come from data.train.type preferences and its collator. The model has one score per sequence, or per token.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.config.trainer_options import RewardOptions
from trainwright.errors import DataError
from trainwright.events import Mean
from trainwright.loop.outputs import logits_of
from trainwright.loop.trainer import Trainer
from trainwright.models.layers.losses import at_least_float32
from trainwright.trainers.dpo import check_preferences


class RewardTrainer(Trainer):
    """Minimizes −log sigmoid(score of the chosen answer − score of the rejected one), a mean over pairs.

    The model returns `logits` [sequences, 1], as transformers' sequence classifiers with `num_labels: 1` do, or
    [sequences, width, 1], like a decoder whose `lm_head` is replaced with a linear layer with one output; the score is
    then that of the last token. Logs accuracy, margin and mean_reward, like TRL.
    """

    known_eval_names: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin", "mean_reward")
    options_section = RewardOptions
    options: RewardOptions

    def forward(self, **batch: Any) -> tuple[Mean, dict[str, Any]]:
        """Returns the loss of pairs [samples, 2, width], and the metrics."""
        check_preferences(batch, is_paired=True, advice="A reward model is trained on pairs.")
        inputs = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
        logits = logits_of(self.task.forward(self.model, inputs), self.model)
        chosen, rejected = _scores(logits, inputs["attention_mask"], self.model).view(-1, 2).unbind(-1)
        losses, weight = -F.logsigmoid(chosen - rejected), self.options.center_rewards_coefficient
        if weight is not None:
            losses = losses + weight * (chosen + rejected) ** 2
        num_samples, margin = len(losses), (chosen - rejected).detach()
        return Mean(losses.sum(), num_samples), {
            "accuracy": Mean((margin > 0).sum(), num_samples),
            "margin": Mean(margin.sum(), num_samples),
            "mean_reward": Mean((chosen + rejected).detach().sum(), 2 * num_samples),
        }


def _scores(logits: Tensor, mask: Tensor, model: torch.nn.Module) -> Tensor:
    """Returns the score of each sequence: [sequences]."""
    if logits.shape[-1] != 1 or logits.ndim not in (2, 3):
        raise DataError(
            f"{type(model).__name__} returned logits of shape {list(logits.shape)}, but a reward model has one score "
            "per sequence. Use model.type: transformers:AutoModelForSequenceClassification with num_labels: 1, or "
            'replace the head of a decoder: model.replace: {lm_head: {type: "torch.nn:Linear", in_features: …, '
            "out_features: 1, bias: false}}."
        )
    scores = at_least_float32(logits.squeeze(-1))
    if scores.ndim == 1:
        return scores
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = (positions * (mask != 0)).argmax(-1, keepdim=True)  # whichever side has the padding
    return scores.gather(1, last).squeeze(1)
