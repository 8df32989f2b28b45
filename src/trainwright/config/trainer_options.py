"""The options of built-in trainers: additional keys of the `trainer` section, with types and defaults.

schema.py checks them when a file is read; a trainer reads them as `self.options`. A custom subclass of such a trainer
has the same options and may add others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainwright.config.component import Component
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
    """The fraction of pairs whose order is assumed to be wrong."""
    simpo_gamma: NotNegative = 0.5
    """The margin of the rewards of simpo."""
    desirable_weight: NotNegative = 1.0
    """The weight of answers with the label true."""
    undesirable_weight: NotNegative = 1.0
    """The weight of answers with the label false."""
    precompute_reference: bool = False
    """Whether the reference log-probabilities of all samples are computed once, before the first step, and stored in
    the run folder."""

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


REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""The arguments of a reward in addition to the fields of the rows. A function with one of these parameters is itself
the reward."""
REWARD_KEYS = ("weight", "name")
"""The keys of a reward that are not arguments of its constructor."""


def _rewards(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not value:
        text = "must be a list of components, such as [{type: file.Name, weight: 1.0}] for rewards/file.py"
        raise reject((), f"{text}; got {describe(value)}.", value)
    problems, names = list[Problem](), dict[str, int]()
    for number, each in enumerate(value):
        each = {"type": each} if isinstance(each, str) else each
        if not isinstance(each, Mapping) or not isinstance(each.get("type"), str):
            problems.append(Problem((number,), f"must be a component with a type; got {describe(each)}."))
            continue
        weight, name = each.get("weight", 1.0), reward_name(each)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            problems.append(Problem((number, "weight"), f"must be a number; got {describe(weight)}."))
        if not isinstance(name, str) or not name or "/" in name:
            problems.append(Problem((number, "name"), f"must be text without a slash; got {describe(name)}."))
        elif names.setdefault(name, number) != number:
            text = f'is the second reward with the name "{name}" in the log. Set another name: here.'
            problems.append(Problem((number,), text))
    if problems:
        raise reject_all(problems)
    return freeze([{"type": each} if isinstance(each, str) else each for each in value])


def reward_name(section: Mapping[str, Any]) -> Any:
    """Return the name of a reward in the log: its `name`, or that of its class or function."""
    return section.get("name", re.split(r"[.:/]", section["type"])[-1])


def reward_component(section: Mapping[str, Any] | str) -> Component:
    """Return a reward without the keys that its constructor does not receive."""
    if isinstance(section, str):
        return Component(section)
    return Component.from_mapping({key: value for key, value in section.items() if key not in REWARD_KEYS})


class GRPOOptions(Section):
    """The options of `trainer.type: grpo`, named as in TRL."""

    rewards: Annotated[tuple[Any, ...], BeforeValidator(_rewards)] = ()
    """The rewards (required): components with two additional keys, weight (1) and name, the name in the log."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """The number of completions per prompt, which are compared with each other. A sample is a prompt, so an update has
    global_batch_size × num_generations completions."""
    max_completion_length: Annotated[int, Field(ge=1)] = 256
    """The maximum number of tokens of a completion, including its end token."""
    temperature: Positive = 1.0
    """Divides the logits, in sampling and in the loss."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """The number of most likely tokens to sample from; None: all tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the smallest set of tokens with this total probability; None: from all tokens."""
    repetition_penalty: Positive = 1.0
    """Above 1, tokens that the row already contains are less likely."""
    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """dapo: the mean over all tokens of the update; grpo: the mean over completions of the mean over their tokens;
    dr_grpo: the sum over all tokens, divided by completions × max_completion_length."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Whether the ratio of probabilities is computed for each token, or for the whole completion (GSPO)."""
    beta: NotNegative = 0.0
    """The weight of the KL divergence from the reference; 0: no reference."""
    use_bias_correction_kl: bool = True
    """Whether the divergence is multiplied by the ratio, so that its gradient has no bias."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - epsilon."""
    epsilon_high: Positive | None = None
    """The ratio is clipped above 1 + epsilon_high; None: epsilon."""
    num_iterations: Annotated[int, Field(ge=1)] = 1
    """The number of updates with the same completions."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """The standard deviation that divides the advantages: of the group, of the whole batch, or none."""
    mask_truncated_completions: bool = False
    """Whether completions that reach max_completion_length without an end token are excluded from the loss."""
    eval_temperature: NotNegative = 0.0
    """The temperature of evaluations, which sample one completion for each prompt; 0: the most likely tokens."""
    log_completions: bool = True
    """Whether each log line has a prompt with a completion and its reward."""

    @model_validator(mode="after")
    def _reject_unused(self) -> GRPOOptions:
        reasons = {}
        if self.num_iterations == 1:
            reason = "has no effect with num_iterations 1: the ratio is 1 in an update with new completions."
            reasons = {"epsilon": reason, "epsilon_high": reason}
        if not self.beta:
            reasons["use_bias_correction_kl"] = "has no effect with beta 0, which has no KL term."
        fields = type(self).model_fields
        problems = [
            Problem((name,), reason) for name, reason in reasons.items() if getattr(self, name) != fields[name].default
        ]
        if problems:
            raise reject_all(problems)
        return self


TRAINER_OPTIONS: Mapping[str, type[Section]] = {
    "dpo": DPOOptions,
    "reward": RewardOptions,
    "distill": DistillOptions,
    "grpo": GRPOOptions,
}
"""The options of each built-in trainer that has options."""
