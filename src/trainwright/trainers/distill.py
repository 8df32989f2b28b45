"""Trains a causal language model to match the predictions of a frozen teacher, at the labels' positions.

The teacher is another model section, `trainer.teacher`. config/trainer_options.py has the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.config.trainer_options import DistillOptions
from trainwright.errors import ConfigError, DataError
from trainwright.events import Mean
from trainwright.events.mean import IGNORED_LABEL
from trainwright.loop.outputs import ForwardResult, logits_of
from trainwright.loop.trainer import Builder, Trainer
from trainwright.models.layers.losses import at_least_float32, label_log_probs


class DistillTrainer(Trainer):
    """Minimizes the divergence of the student's and the teacher's next token, a mean over the tokens with a label.

    With `alpha` below 1 the loss on the labels is added. Logs kl, without the factor of the temperature, and label_loss
    if it counts. Both models receive the whole batch except `labels`, and must have the same vocabulary.
    """

    known_eval_names: ClassVar[tuple[str, ...]] = ("loss", "kl", "label_loss")
    options_section = DistillOptions
    options: DistillOptions

    @classmethod
    def build_frozen_models(cls, build: Builder, model: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
        """Returns the teacher."""
        options: DistillOptions = build.options()
        if options.teacher is None:
            raise ConfigError(
                "trainer.teacher is required, for example {pretrained: folder}, a model section.",
                where=build.config.origin("trainer"),
            )
        return {"teacher": build.model_of("trainer.teacher", options.teacher)}

    def run_forward(self, batch: Any) -> ForwardResult:
        """Adds the teacher's logits, and runs `forward`."""
        if not isinstance(batch, Mapping) or "labels" not in batch:
            raise DataError(
                f"trainer.type distill needs `labels` in the batch, which define the tokens that count, but it has "
                f"{', '.join(batch) if isinstance(batch, Mapping) else type(batch).__name__}. Use a collator that "
                'makes them, such as "padded".'
            )
        with torch.no_grad(), self.autocast():
            logits = self._logits_of(self.context.frozen_models["teacher"], batch)
        return super().run_forward({**batch, "teacher_logits": logits})

    def forward(self, **batch: Any) -> tuple[Mean, dict[str, Any]]:
        """Returns the loss of a batch with the teacher's logits, and its terms as metrics."""
        teacher, labels, options = batch.pop("teacher_logits"), batch["labels"], self.options
        student = self._logits_of(self.model, batch)
        if student.shape != teacher.shape:
            raise ConfigError(
                f"trainer.teacher: the teacher's logits have the shape {list(teacher.shape)} and the student's "
                f"{list(student.shape)}. Use models with the same tokenizer and vocab_size.",
                where=self.config.origin("trainer.teacher"),
            )
        is_counted = labels[:, 1:] != IGNORED_LABEL
        count = is_counted.sum()
        divergences = divergence(student[:, :-1], teacher[:, :-1], kl=options.kl, temperature=options.temperature)
        kl = torch.where(is_counted, divergences, 0.0).sum()
        metrics = {"kl": Mean(kl.detach(), count)}
        total = options.alpha * options.temperature**2 * kl
        if options.alpha < 1:
            nll = -label_log_probs(student, labels).sum()
            metrics["label_loss"] = Mean(nll.detach(), count)
            total = total + (1 - options.alpha) * nll
        return Mean(total, count), metrics

    def _logits_of(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return logits_of(self.task.forward(model, inputs), model)


def divergence(student: Tensor, teacher: Tensor, *, kl: str, temperature: float) -> Tensor:
    """Returns KL(teacher ‖ student) (forward) or KL(student ‖ teacher) (reverse) of logits [..., V]: [...]."""
    ours = F.log_softmax(at_least_float32(student) / temperature, dim=-1)
    theirs = F.log_softmax(at_least_float32(teacher) / temperature, dim=-1)
    first, second = (theirs, ours) if kl == "forward" else (ours, theirs)
    return (first.exp() * (first - second)).sum(-1)
