"""Trains a causal language model on rewards of its own completions: group relative policy optimization (GRPO).

    train_step(prompts) → _make_rollouts: sample_completions → rewards → advantages → _add_log_probs
                        → the update of Trainer.train_step on the completions

The prompts come from the collator of that name. rewards.py calls the rewards, models/generation.py generates, and
config/trainer_options.py has the options.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainwright.config.trainer_options import REWARD_ARGUMENTS, GRPOOptions, reward_component, reward_name
from trainwright.data.order import mix_seed
from trainwright.errors import ConfigError, DataError
from trainwright.events import Mean
from trainwright.events.mean import IGNORED_LABEL
from trainwright.events.storage import get_event_storage
from trainwright.loop.metrics import MetricNames
from trainwright.loop.outputs import logits_of
from trainwright.loop.trainer import Builder, Trainer
from trainwright.loop.update import StepResult
from trainwright.models.generation import Completions, room_after, sample_completions
from trainwright.models.layers.losses import at_least_float32, label_log_probs
from trainwright.parallel.collectives import Ranks
from trainwright.trainers.dpo import evaluating, is_base_with_adapters, reference_of
from trainwright.trainers.rewards import Reward, Samples, text_of
from trainwright.user_code.locations import UserFiles

logger = logging.getLogger(__name__)

_ROLLOUT_STREAM, _EVAL_STREAM = 0x6090, 0x6091  # separate the random numbers of completions from others of the run

SMALLEST_DEVIATION = 1e-4
"""Added to the standard deviation that divides advantages, as in TRL."""

_SHOWN_CHARACTERS = 200


class GRPOTrainer(Trainer):
    """Raises the likelihood of completions that have a higher reward than others of the same prompt.

    A sample is a prompt; its `num_generations` completions are a group, on one rank and in one micro-batch. Losses and
    metrics have the values and names of TRL, over all completions of the update, so they do not depend on micro-batches
    or ranks. A completion is a function of the weights, of its prompt, and of the seed, the position of the prompt in
    the data and its number in the group.
    """

    known_eval_names: ClassVar[tuple[str, ...]] = ("reward", "completions/mean_length", "completions/clipped_ratio")
    varying_memory: ClassVar[str] = "with trainer.type grpo later completions may be longer than those of that step."
    options_section = GRPOOptions
    options: GRPOOptions
    _rollouts: dict[str, Tensor] | None = None
    """The completions of the last prompts on this rank, which `num_iterations` updates use."""
    _num_prompts = 0
    """The number of prompts that count in `_rollouts`; 0 on a rank that repeats a prompt only to participate in
    collectives."""
    _source: Any = None
    """The batch of prompts of `_rollouts`; None after a resume."""
    _own_metrics: Mapping[str, float] = MappingProxyType({})
    """The metrics of `_rollouts`, which are logged by the update that generated them."""
    _saved: dict[str, Tensor] | None = None
    """The completions of all ranks on the host, for checkpoints between the updates that use them."""
    _has_warned = False

    @classmethod
    def build_parts(cls, build: Builder) -> Mapping[str, Any]:
        """Returns the rewards, after settings that do not work with generated completions are rejected."""
        options: GRPOOptions = build.options()
        _reject_settings(build, options)
        if not options.rewards:
            raise ConfigError(
                "trainer.rewards is required, for example [{type: exact_match}], or [{type: file.Name}] for a class or "
                "function of rewards/file.py.",
                where=build.config.origin("trainer"),
            )
        rewards = []
        for number, section in enumerate(options.rewards):
            label = f"trainer.rewards.{number}"
            function = build.part("reward", label, reward_component(section), called_with=REWARD_ARGUMENTS)
            if not callable(function):
                raise ConfigError(
                    f"{label}: {type(function).__name__} cannot be called. Define __call__(self, completions, "
                    "**columns), which returns a list of numbers.",
                    where=build.config.origin(label),
                )
            rewards.append(Reward(reward_name(section), float(section.get("weight", 1.0)), function))
        return {"rewards": rewards}

    @classmethod
    def build_frozen_models(cls, build: Builder, model: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
        """Returns a copy of the first model as the reference, unless it is the model without its adapters."""
        options: GRPOOptions = build.options()
        return {"reference": build.first_model()} if options.beta and not is_base_with_adapters(model) else {}

    @classmethod
    def build_train_data(cls, build: Builder) -> Any:
        """Returns the dataset of prompts."""
        dataset = build.train_data()
        if dataset is None and cls.next_train_inputs is GRPOTrainer.next_train_inputs:
            raise ConfigError(
                "data.train is required, for example {type: json_lines, path: prompts.jsonl}.",
                where=build.config.origin("data"),
            )
        return dataset

    @property
    def rewards(self) -> Sequence[Reward]:
        """The rewards, in the order of the config."""
        found: Sequence[Reward] = self.context.parts["rewards"]
        return found

    @property
    def metric_names(self) -> MetricNames:
        """The names that evaluations return, with those of the rewards; a higher reward is better."""
        names = super().metric_names
        own = tuple(f"rewards/{each.name}/mean" for each in self.rewards)
        modes = {**names.modes, **dict.fromkeys(("reward", *own), "max")}
        return replace(names, metrics=(*names.metrics, *own), modes=modes)

    def state_dict(self) -> dict[str, Any]:
        """Returns the completions of all ranks if further updates use them."""
        return {} if self._saved is None or not self._is_reused else {"rollouts": self._saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the completions of this rank, for any number of ranks."""
        self._saved = state.get("rollouts")
        self._source, self._rollouts, self._own_metrics = None, None, {}
        if self._saved is not None:
            assert self.train_data is not None
            start, stop = self.train_data.view.share(0, len(self._saved["labels"]))
            self._num_prompts = stop - start
            rows = slice(start, stop) if stop > start else slice(0, 1)
            self._rollouts = {
                name: value.to(self.device)
                for name, value in _trim({name: value[rows] for name, value in self._saved.items()}).items()
            }

    @property
    def _is_reused(self) -> bool:
        """True if the next update uses the completions of the last one."""
        return self.state.step % self.options.num_iterations > 0

    def next_train_inputs(self, iterator: Iterator[Any]) -> Any:
        """Returns the next prompts, or the completions that another update uses."""
        if self._is_reused and self._rollouts is not None:
            return self._rollouts
        return super().next_train_inputs(iterator)

    def train_step(self, batch: Any) -> StepResult:
        """Makes one update from the completions of a batch of prompts."""
        metrics: Mapping[str, float] = {}
        if isinstance(batch, Mapping) and "advantages" in batch:
            self.set_batch(batch, self._num_prompts)
        else:
            # An optimizer with a closure repeats the step with the same batch.
            if self._rollouts is None or batch is not self._source:
                self._source, self._num_prompts = batch, self.batch.num_samples
                self._rollouts, self._own_metrics = self._make_rollouts(batch)
            batch, metrics = self._rollouts, self._own_metrics
        result = super().train_step(batch)
        result.metrics.update(metrics)
        return result

    def forward(self, **batch: Any) -> tuple[Mean, dict[str, Any]]:
        """Returns the loss of completions [prompts, generations, width], and the metrics."""
        options = self.options
        log_probs, entropy = self._log_probs(self.model, batch, with_entropy=True)
        mask = batch["labels"].flatten(0, 1)[:, 1:] != IGNORED_LABEL
        old = batch["old_log_probs"].flatten(0, 1) if "old_log_probs" in batch else log_probs.detach()
        advantages = batch["advantages"].flatten()[:, None]
        log_ratio = log_probs - old
        if options.importance_sampling_level == "sequence":
            log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
        ratio = log_ratio.exp()
        lowest, highest = 1 - options.epsilon, 1 + (options.epsilon_high or options.epsilon)
        losses = -torch.minimum(ratio * advantages, ratio.clamp(lowest, highest) * advantages)
        num_tokens = mask.sum()
        metrics = {"entropy": Mean((entropy * mask).sum(), num_tokens)}
        if "reference_log_probs" in batch:
            difference = batch["reference_log_probs"].flatten(0, 1) - log_probs
            kl = difference.exp() - difference - 1
            if options.use_bias_correction_kl:
                kl = kl * ratio
            losses = losses + options.beta * kl
            metrics["kl"] = Mean((kl.detach() * mask).sum(), num_tokens)
        is_low = (ratio.detach() < lowest) & (advantages < 0)
        is_high = (ratio.detach() > highest) & (advantages > 0)
        if options.importance_sampling_level == "sequence":
            counted, num_ratios = torch.ones_like(is_low), torch.tensor(len(is_low), device=mask.device)
        else:
            counted, num_ratios = mask, num_tokens
        for name, is_clipped in (("low", is_low), ("high", is_high), ("region", is_low | is_high)):
            metrics[f"clip_ratio/{name}_mean"] = Mean((is_clipped & counted).sum(), num_ratios)
        return _mean_loss(losses, mask, options), metrics

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Returns the rewards of one completion of each prompt."""
        rows = _rows_of(batch)
        temperature = self.options.eval_temperature
        seeds = None
        if temperature:
            ids = [row[:length] for row, length in zip(*_prompts_of(batch), strict=True)]
            seeds = [mix_seed(self.config.seed, _EVAL_STREAM, *prompt) for prompt in ids]
        completions = self._generate(batch, copies=1, temperature=temperature, seeds=seeds)
        samples = self._samples(rows, completions.rows())
        scores = self._score(samples)
        if self.options.log_completions and self.batch.num_samples:
            get_event_storage().put_text("completion", self._describe(samples, scores))
        rewards = torch.tensor(scores, dtype=torch.float64)  # [rows, rewards]
        reward, num_rows = self._weigh(rewards), len(rows)
        logs = {
            "reward": Mean(reward.nansum(), (~reward.isnan()).sum()),
            "completions/mean_length": Mean(completions.mask.sum(), num_rows),
            "completions/clipped_ratio": Mean((~completions.is_stopped).sum(), num_rows),
        }
        for each, column in zip(self.rewards, rewards.unbind(1), strict=True):
            logs[f"rewards/{each.name}/mean"] = Mean(column.nansum(), (~column.isnan()).sum())
        return logs

    def _make_rollouts(self, batch: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Returns completions of the prompts with their advantages, and the metrics of all ranks; collective."""
        rows, options = _rows_of(batch), self.options
        if type(batch["prompt_ids"]) is not Tensor:  # those of an estimate have no values
            return self._add_log_probs(_longest(batch["prompt_ids"], options)), {}
        data = self.train_data
        assert data is not None
        first, _ = data.view.share(*data.batch_positions)
        seeds = [mix_seed(self.config.seed, _ROLLOUT_STREAM, first + number) for number in range(len(rows))]
        made = self._generate(batch, copies=options.num_generations, temperature=options.temperature, seeds=seeds)
        completions = made.rows()
        samples = self._samples([row for row in rows for _ in range(options.num_generations)], completions)
        with self.ranks.failing_together():  # a reward is user code
            scores = self._score(samples)
        is_truncated = (~made.is_stopped).tolist()
        counts = self.batch.num_samples > 0
        own = (scores, list(map(len, completions)), is_truncated, self._describe(samples, scores))
        gathered = self.ranks.gather_samples(own if counts else ([], [], [], ""))
        rewards = torch.tensor([row for each, *_ in gathered for row in each], dtype=torch.float64)
        advantages, metrics = self._compare(rewards)
        num_before = sum(len(each) for each, *_ in gathered[: self.ranks.mesh.data_rank])
        lengths = [length for _, each, *_ in gathered for length in each]
        metrics["completions/mean_length"] = sum(lengths) / len(lengths)
        metrics["completions/clipped_ratio"] = sum(sum(each) for _, _, each, _ in gathered) / len(lengths)
        if self.options.log_completions:
            self.storage.put_text("completion", next(text for *_, text in gathered if text))
        own_advantages = advantages[num_before : num_before + len(completions)] if counts else torch.zeros(len(scores))
        rollouts = _pad(*_prompts_of(batch), completions, is_masked=is_truncated, options=options)
        rollouts["advantages"] = own_advantages.float().view(len(rows), -1)
        rollouts = self._add_log_probs({name: each.to(self.device) for name, each in rollouts.items()})
        if options.num_iterations > 1:
            self._saved = _merge(self.ranks, rollouts, counts=counts)
        return rollouts, metrics

    def _generate(self, batch: Any, *, copies: int, temperature: float, seeds: Sequence[int] | None) -> Completions:
        """Samples completions of the prompts, `copies` for each; collective if the model is sharded."""
        options, ranks = self.options, self.ranks
        prompts = [row[:length] for row, length in zip(*_prompts_of(batch), strict=True)]
        longest = max(map(len, prompts))
        room = room_after(self.model, longest)
        if room is not None and room < options.max_completion_length:
            raise DataError(
                f"trainer.max_completion_length is {options.max_completion_length}, but after a prompt of {longest} "
                f"tokens the model has positions for {room}. Lower it, or data.collator.max_length, or use a model "
                "with more positions.",
                where=self.config.origin("trainer.max_completion_length"),
            )

        def have_all_stopped(is_stopped: bool) -> bool:
            return ranks.sum_counts(int(not is_stopped))[0] == 0

        with self.autocast():
            return sample_completions(
                self.model,
                prompts,
                max_new_tokens=options.max_completion_length,
                seeds=seeds,
                num_return_sequences=copies,
                temperature=temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                repetition_penalty=options.repetition_penalty,
                stop_ids=self._stop_ids(batch),
                all_stopped=have_all_stopped if ranks.mesh.is_split else bool,
            )

    def _stop_ids(self, batch: Any) -> frozenset[int]:
        """Returns the tokens that end a completion of this batch."""
        find = self._collator.stop_ids
        return frozenset(token for row in batch["rows"] for token in find(row["prompt"]))

    @property
    def _collator(self) -> Any:
        """The collator of the prompts, which has the tokenizer."""
        data = [self.train_data, *self.eval_data.values(), self.test_data]
        collator: Any = next(each for each in data if each is not None).collator
        while not hasattr(collator, "stop_ids") and hasattr(collator, "collator"):
            collator = collator.collator
        if not hasattr(collator, "stop_ids") or not hasattr(collator, "tokenizer"):
            raise ConfigError(
                f"data.collator: trainer.type grpo needs the tokenizer and stop_ids(prompt) of the collator, which "
                f"{type(collator).__name__} does not have. Use {{type: prompts, tokenizer: …}}.",
                where=self.config.origin("data.collator"),
            )
        return collator

    def _samples(self, rows: Sequence[Mapping[str, Any]], completions: Sequence[Sequence[int]]) -> Samples:
        """Returns the completions in the form that rewards receive."""
        tokenizer = self._collator.tokenizer
        # Many models have embeddings for more tokens than their tokenizer has; those represent no text.
        texts = [tokenizer.decode([one for one in ids if one < tokenizer.vocab_size]) for ids in completions]
        shown = [
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for row, text in zip(rows, texts, strict=True)
        ]
        return Samples([row["prompt"] for row in rows], shown, completions, rows)

    def _score(self, samples: Samples) -> list[list[float]]:
        """Returns the rewards of each completion; NaN if a reward does not apply."""
        users = UserFiles(self.config.project_dir)
        columns = [each.score(samples, users) for each in self.rewards]
        return [list(row) for row in zip(*columns, strict=True)]

    def _weigh(self, rewards: Tensor) -> Tensor:
        """Returns the weighted sum [N] of rewards [N, rewards]; NaN if none applies."""
        weights = torch.tensor([each.weight for each in self.rewards], dtype=torch.float64)
        return torch.where(rewards.isnan().all(dim=1), math.nan, (rewards * weights).nansum(dim=1))

    def _compare(self, rewards: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Returns the advantages [N] of the completions of all ranks from their rewards [N, rewards], and the metrics.

        A completion to which no reward applies has the advantage 0, and the others of its group are compared without
        it.
        """
        reward, options = self._weigh(rewards), self.options
        is_unscored = reward.isnan()
        if is_unscored.any() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "All rewards are None for %d of %d completions, which are ignored. Further ones may follow.",
                int(is_unscored.sum()),
                len(reward),
            )
        advantages, deviation = compare(reward.view(-1, options.num_generations), scale=options.scale_rewards)
        metrics = {}
        for each, column in zip(self.rewards, rewards.unbind(1), strict=True):
            metrics[f"rewards/{each.name}/mean"] = column.nanmean().item()
            metrics[f"rewards/{each.name}/std"] = nan_std(column, dim=0).item()
        metrics["reward"], metrics["reward_std"] = reward.nanmean().item(), nan_std(reward, dim=0).item()
        metrics["frac_reward_zero_std"] = deviation.isclose(torch.zeros_like(deviation)).double().mean().item()
        return advantages.flatten(), {name: value for name, value in metrics.items() if not math.isnan(value)}

    @torch.no_grad()
    def _add_log_probs(self, rollouts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds the log-probabilities of the reference and, if completions are reused, of the current model; collective.

        Without dropout, so that they belong to the distribution from which the completions were sampled.
        """
        wanted: dict[str, Callable[[], AbstractContextManager[torch.nn.Module]]] = {}
        if self.options.num_iterations > 1:
            wanted["old_log_probs"] = partial(evaluating, self.model)
        if self.options.beta:
            copy = self.context.frozen_models.get("reference")
            wanted["reference_log_probs"] = partial(reference_of, self.model, copy)
        if not wanted:
            return rollouts
        found: dict[str, list[Tensor]] = {name: [] for name in wanted}
        for each in self.micro_batches(rollouts):
            for name, enter in wanted.items():
                with enter() as model, self.autocast():
                    log_probs = self._log_probs(model, each)[0].view(*each["labels"].shape[:2], -1)
                # A micro-batch without samples repeats a row, for the collectives.
                if self.batch.num_samples or not self._num_prompts:
                    found[name].append(log_probs)
        return {**rollouts, **{name: torch.cat(parts)[: len(rollouts["labels"])] for name, parts in found.items()}}

    def _log_probs(
        self, model: torch.nn.Module, batch: Mapping[str, Any], *, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of each token of the completions [rows, width - 1], and the entropies there."""
        inputs = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
        logits = logits_of(self.task.forward(model, inputs), model)
        if self.options.temperature != 1:
            logits = at_least_float32(logits) / self.options.temperature
        log_probs = label_log_probs(logits, batch["labels"].flatten(0, 1))
        if not with_entropy:
            return log_probs, log_probs
        with torch.no_grad():
            every = at_least_float32(logits[:, :-1]).log_softmax(dim=-1)
            return log_probs, -(every.exp() * every).sum(dim=-1)

    def _describe(self, samples: Samples, scores: Sequence[Sequence[float]]) -> str:
        """Returns the first prompt with a completion and its reward, to be logged."""
        reward = self._weigh(torch.tensor(scores[:1], dtype=torch.float64)).item()
        pair = (samples.prompts[0], samples.completions[0])
        prompt, completion = (repr(text_of(each))[:_SHOWN_CHARACTERS] for each in pair)
        return f"{prompt} → {completion} (reward {reward:.4g})"


def compare(rewards: Tensor, *, scale: str) -> tuple[Tensor, Tensor]:
    """Returns the advantages of rewards [groups, generations], and the deviations that divide them with `scale`.

    NaN stands for a completion without a reward: its advantage is 0, and means and deviations exclude it.
    """
    advantages = rewards - rewards.nanmean(dim=1, keepdim=True)
    deviation = nan_std(rewards.flatten(), dim=0) if scale == "batch" else nan_std(rewards, dim=1)[:, None]
    deviation = deviation.expand_as(rewards)
    if scale != "none":
        advantages = advantages / (deviation + SMALLEST_DEVIATION)
    return advantages.nan_to_num(nan=0.0), deviation


def nan_std(values: Tensor, *, dim: int) -> Tensor:
    """Returns the standard deviation with Bessel's correction without NaN; NaN of fewer than two values."""
    count = (~values.isnan()).sum(dim=dim)
    squares = ((values - values.nanmean(dim=dim, keepdim=True)) ** 2).nansum(dim=dim)
    return torch.where(count > 1, squares / (count - 1), math.nan).sqrt()


def _mean_loss(losses: Tensor, mask: Tensor, options: GRPOOptions) -> Mean:
    """Returns the loss of the tokens [rows, width], or of whole completions [rows, 1], where the mask is set."""
    totals, lengths = (losses * mask).sum(dim=-1), mask.sum(dim=-1)
    if options.loss_type == "grpo":
        return Mean((totals / lengths.clamp(min=1)).sum(), len(totals))
    if options.loss_type == "dr_grpo":
        return Mean(totals.sum(), len(totals) * options.max_completion_length)
    return Mean(totals.sum(), lengths.sum())


def _rows_of(batch: Any) -> list[Mapping[str, Any]]:
    """Returns the rows of a batch of prompts; raises for the batch of another collator."""
    needed = ("prompt_ids", "prompt_lengths", "rows")
    if not isinstance(batch, Mapping) or any(name not in batch for name in needed):
        got = ", ".join(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(
            f"trainer.type grpo needs {', '.join(needed)} in the batch, but it has {got}. Use data.collator: {{type: "
            "prompts, tokenizer: …}."
        )
    rows: list[Mapping[str, Any]] = batch["rows"]
    return rows


def _prompts_of(batch: Mapping[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Returns the padded tokens of each prompt, and its length."""
    return batch["prompt_ids"].tolist(), batch["prompt_lengths"].tolist()


def _pad(
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    completions: Sequence[Sequence[int]],
    *,
    is_masked: Sequence[bool],
    options: GRPOOptions,
) -> dict[str, Tensor]:
    """Returns each prompt with its completions as `input_ids`, `attention_mask` and `labels` [prompts, generations, S].

    The padding is on the right. Labels are -100 at prompts and padding, and for completions that the loss excludes.
    """
    copies = options.num_generations
    starts = [prompt[:length] for prompt, length in zip(prompts, lengths, strict=True) for _ in range(copies)]
    width = max(len(start) + len(end) for start, end in zip(starts, completions, strict=True))
    ids, masks, labels = [], [], []
    for start, end, is_left_out in zip(starts, completions, is_masked, strict=True):
        padding = width - len(start) - len(end)
        ids.append([*start, *end, *[0] * padding])
        masks.append([1] * (width - padding) + [0] * padding)
        counted = [IGNORED_LABEL] * len(end) if is_left_out and options.mask_truncated_completions else end
        labels.append([IGNORED_LABEL] * len(start) + [*counted] + [IGNORED_LABEL] * padding)
    columns = {"input_ids": ids, "attention_mask": masks, "labels": labels}
    return {name: torch.tensor(each).view(len(prompts), copies, width) for name, each in columns.items()}


def _longest(prompt_ids: Tensor, options: GRPOOptions) -> dict[str, Tensor]:
    """Returns completions of the greatest length, of tokens without values."""
    num_prompts, width = prompt_ids.shape
    shape = (num_prompts, options.num_generations, width + options.max_completion_length)
    ids = prompt_ids.new_zeros(shape)
    advantages = torch.zeros(shape[:2], device=prompt_ids.device)
    return {"input_ids": ids, "attention_mask": ids + 1, "labels": ids.clone(), "advantages": advantages}


_PER_TOKEN = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED_LABEL}


def _merge(ranks: Ranks, rollouts: Mapping[str, Tensor], *, counts: bool) -> dict[str, Tensor]:
    """Returns the completions of all ranks on the host, in the order of their prompts; collective."""
    own = {name: each.cpu() if counts else each[:0].cpu() for name, each in rollouts.items()}
    parts = ranks.gather_samples(own)
    width = max(part["labels"].shape[-1] for part in parts)
    merged = {}
    for name in own:
        padding = _PER_TOKEN.get(name, 0)
        widened = [
            torch.nn.functional.pad(part[name], (0, width - part["labels"].shape[-1]), value=padding)
            if part[name].ndim == 3
            else part[name]
            for part in parts
        ]
        merged[name] = torch.cat(widened)
    return merged


def _trim(rollouts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns completions without the padding that only those of other ranks need: rounding depends on the width."""
    width = int(rollouts["attention_mask"].sum(dim=-1).max())
    total = rollouts["labels"].shape[-1]
    return {
        name: each[..., : each.shape[-1] - (total - width)].contiguous() if each.ndim == 3 else each
        for name, each in rollouts.items()
    }


def _reject_settings(build: Builder, options: GRPOOptions) -> None:
    """Rejects settings that GRPO does not support."""
    config = build.config
    if config.runtime.mode == "graph":
        raise ConfigError(
            "runtime.mode: graph replays one recorded step, but trainer.type grpo generates completions of other "
            "lengths in each step and calls the rewards on the host. Use mode eager or compile.",
            where=config.origin("runtime.mode"),
        )
    for axis in ("pipeline", "context"):
        if getattr(config.runtime.mesh, axis) not in (None, 1):
            raise ConfigError(
                f"runtime.mesh.{axis}: trainer.type grpo cannot generate with a model that is sharded along it. Use "
                "fsdp or replicate.",
                where=config.origin(f"runtime.mesh.{axis}"),
            )
    if options.num_iterations == 1:
        return
    for name in ("max_epochs", "max_samples", "max_tokens"):
        if getattr(config.trainer, name) is not None:
            raise ConfigError(
                f"trainer.{name} counts the prompts of an update once, but with num_iterations "
                f"{options.num_iterations} so many updates use the same prompts. Use max_steps.",
                where=config.origin(f"trainer.{name}"),
            )
    for name, policy in config.anomalies:
        if policy == "rollback":
            raise ConfigError(
                f"anomalies.{name}: rollback leaves out the prompts of an update, but with num_iterations "
                f"{options.num_iterations} several updates use the same ones. Use skip or raise.",
                where=config.origin(f"anomalies.{name}"),
            )
