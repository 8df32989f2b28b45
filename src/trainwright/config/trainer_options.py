"""The options of the built-in trainers that have some: further keys of the `trainer` section, with types and defaults.

schema.py checks them when a file is read; a trainer reads them as `self.options`. A user's subclass of such a trainer
has the same options, and may have others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainwright.config.frozen import Frozen, freeze
from trainwright.config.problems import Problem, describe, reject, reject_all
from trainwright.config.sections import Positive, Section

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DPOOptions(Section):
    """The options of `trainer.type: dpo`, named as in TRL."""

    of_losses: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "label_smoothing": ("sigmoid", "simpo"),
        "simpo_gamma": ("simpo",),
        "desirable_weight": ("kto",),
        "undesirable_weight": ("kto",),
        "precompute_reference": ("sigmoid", "ipo", "hinge"),
    }
    """The losses that use an option; all use the others."""

    loss_type: Literal["sigmoid", "ipo", "hinge", "kto", "orpo", "simpo"] = "sigmoid"
    """The loss of a pair, or with kto that of an answer with a label."""
    beta: Positive = 0.1
    """The scale of the log-ratios; for ipo the regularization, for orpo the weight of the odds ratio."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs whose order is assumed to be wrong."""
    simpo_gamma: NotNegative = 0.5
    """The margin of the rewards of simpo."""
    desirable_weight: NotNegative = 1.0
    """The weight of answers with the label true."""
    undesirable_weight: NotNegative = 1.0
    """The weight of answers with the label false."""
    precompute_reference: bool = False
    """Whether the reference log-probabilities of all samples are computed once, before the first step, and kept in the
    run folder."""

    @model_validator(mode="after")
    def _reject_unused(self) -> DPOOptions:
        problems = [
            Problem((name,), f"has no effect with loss_type {self.loss_type}, only with: {', '.join(losses)}.")
            for name, losses in self.of_losses.items()
            if self.loss_type not in losses and getattr(self, name) != type(self).model_fields[name].default
        ]
        if problems:
            raise reject_all(problems)
        return self


class RewardOptions(Section):
    """The options of `trainer.type: reward`, named as in TRL."""

    center_rewards_coefficient: NotNegative | None = None
    """The weight of the squared sum of the two rewards, which keeps their mean at 0; None: without."""


def _model(value: Any) -> Any:
    if value is None:
        return value
    if not isinstance(value, Mapping) or not ("type" in value or "pretrained" in value):
        text = "must be a model section, such as {pretrained: folder} or {type: llama, preset: tiny, pretrained: …}"
        raise reject((), f"{text}; got {describe(value)}.", value)
    return freeze(value)


class DistillOptions(Section):
    """The options of `trainer.type: distill`."""

    teacher: Annotated[Frozen[Any] | None, BeforeValidator(_model)] = None
    """The model section of the teacher, which is required; without a type it has the type of the model."""
    kl: Literal["forward", "reverse"] = "forward"
    """forward: KL(teacher ‖ student), which covers all of the teacher's modes; reverse: KL(student ‖ teacher)."""
    temperature: Positive = 1.0
    """Divides the logits of both. The loss is multiplied by its square, so that gradients keep their size."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The weight of the distillation loss; that of the loss on the labels is 1 - alpha."""


TRAINER_OPTIONS: Mapping[str, type[Section]] = {
    "dpo": DPOOptions,
    "reward": RewardOptions,
    "distill": DistillOptions,
}
"""The options of each built-in trainer that has some."""
