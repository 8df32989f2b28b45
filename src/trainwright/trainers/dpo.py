"""Trains a causal language model on preferences: DPO and related losses of pairs, KTO on answers with labels.

The samples come from data.train.type preferences and its collator. The reference is a frozen copy of the first model,
the model without its adapters, or a table that was computed before the first step (reference_table.py); the losses orpo
and simpo need none. config/trainer_options.py has the options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.config.trainer_options import DPOOptions
from trainwright.data.loader import EvalData, TrainData
from trainwright.data.randomness import preserve_generators
from trainwright.errors import CheckpointError, ConfigError, DataError, TrainwrightError
from trainwright.events import Mean
from trainwright.events.mean import IGNORED_LABEL
from trainwright.loop.outputs import ForwardResult, logits_of
from trainwright.loop.trainer import Builder, Trainer
from trainwright.loop.update import StepResult
from trainwright.models import lora, peft_adapters
from trainwright.models.layers.losses import label_log_probs
from trainwright.progress import progress
from trainwright.trainers.reference_table import TABLE_FILE, ReferenceTable

logger = logging.getLogger(__name__)

WITHOUT_REFERENCE = ("orpo", "simpo")
"""The losses that compare with no reference model."""
PER_TOKEN = ("orpo", "simpo")
"""The losses whose log-probabilities, also those in the log, are means per token instead of sums."""


class DPOTrainer(Trainer):
    """Raises the likelihood of the chosen answer relative to the rejected one, compared with a reference model.

    Logs rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies, logps/chosen and logps/rejected, like
    TRL. All losses are means over samples, exact for any micro-batches and ranks; orpo adds a mean over tokens and kto
    uses one KL estimate, both over the whole batch of the update; the answers of that estimate are exchanged within a
    rank.
    """

    known_eval_names: ClassVar[tuple[str, ...]] = (
        *("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected", "nll_loss", "log_odds_ratio", "kl"),
    )
    options_section = DPOOptions
    options: DPOOptions
    _table: ReferenceTable | None = None

    @classmethod
    def build_frozen_models(cls, build: Builder, model: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
        """Returns a copy of the initial model as the reference, unless the loss needs none or the model's base is the
        reference."""
        options: DPOOptions = build.options()
        if options.loss_type in WITHOUT_REFERENCE or options.precompute_reference or is_base_with_adapters(model):
            return {}
        return {"reference": build.first_model()}

    def train(self) -> dict[str, float]:
        """Trains, after computing the reference log-probabilities if this is requested."""
        num_ranks, size = self.ranks.mesh.num_data_ranks, self.context.batch_plan.global_batch_size
        if self.options.loss_type == "kto" and size // num_ranks < 2:
            raise ConfigError(
                "trainer.loss_type: kto pairs each prompt with the answer of another sample of its rank, but "
                f"global_batch_size {size} over {num_ranks} data ranks is one sample. Use a larger batch.",
                where=self.config.origin("trainer.loss_type"),
            )
        self._prepare_table()
        return super().train()

    def evaluate_sets(self, sets: Mapping[str, Any], *, with_hooks: bool = True) -> dict[str, float]:
        """Evaluates some sets, after computing the reference log-probabilities if this is requested."""
        self._prepare_table()
        return super().evaluate_sets(sets, with_hooks=with_hooks)

    def evaluate_test(self) -> dict[str, float]:
        """Evaluates the test set, after computing the reference log-probabilities if this is requested."""
        self._prepare_table()
        return super().evaluate_test()

    def batches_to_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches on the device, with precomputed log-probabilities if there are any."""
        table = self._table
        return super().batches_to_device(batches if table is None else map(table.add_to, batches))

    def train_step(self, batch: Any) -> StepResult:
        """Makes one update from one batch."""
        self._check(batch)
        return super().train_step({**batch, **self._sums_of_batch(batch, self.micro_batches)})

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Returns the metrics of a batch; the KL estimate of kto is that of the batch."""
        self._check(batch)
        return super().eval_step({**batch, **self._sums_of_batch(batch, lambda whole: iter([whole]))})

    def run_forward(self, batch: Any) -> ForwardResult:
        """Adds the reference log-probabilities, and runs `forward`."""
        if self.options.loss_type not in WITHOUT_REFERENCE and "reference_log_probs" not in batch:
            batch = {**batch, "reference_log_probs": self.reference_log_probs(batch)}
        return super().run_forward(batch)

    def forward(self, **batch: Any) -> tuple[Mean, dict[str, Any]]:
        """Returns the loss of pairs [samples, 2, width], or with kto of answers [samples, width], and the metrics."""
        reference = batch.get("reference_log_probs")
        if self.options.loss_type == "kto":
            log_probs = sequence_log_probs(self._logits_of(self.model, batch), batch["labels"])
            return _kto(self.options, log_probs, reference, label=batch["label"], kl=batch["kl"])
        logits = self._logits_of(self.model, batch)
        log_probs = sequence_log_probs(logits, batch["labels"])  # [samples, 2]
        if self.options.loss_type in PER_TOKEN:
            log_probs = log_probs / _num_answer_tokens(batch["labels"])
        losses = _pair_losses(self.options, log_probs, reference, batch["labels"])
        scores = log_probs.detach() if reference is None else log_probs.detach() - reference
        chosen, rejected = (self.options.beta * scores).unbind(-1)
        num_samples = len(losses)
        metrics = {
            "rewards/chosen": Mean(chosen.sum(), num_samples),
            "rewards/rejected": Mean(rejected.sum(), num_samples),
            "rewards/margins": Mean((chosen - rejected).sum(), num_samples),
            "rewards/accuracies": Mean((chosen > rejected).sum(), num_samples),
            "logps/chosen": Mean(log_probs[:, 0].detach().sum(), num_samples),
            "logps/rejected": Mean(log_probs[:, 1].detach().sum(), num_samples),
        }
        total = losses.sum()
        if self.options.loss_type == "orpo":
            # Of the whole chosen sequence, with its prompt.
            tokens = batch["input_ids"][:, 0].masked_fill(batch["attention_mask"][:, 0] == 0, IGNORED_LABEL)
            nll, count = -label_log_probs(logits[:, 0], tokens).sum(), (tokens[:, 1:] != IGNORED_LABEL).sum()
            metrics["nll_loss"] = Mean(nll.detach(), count)
            metrics["log_odds_ratio"] = Mean(-losses.detach().sum() / self.options.beta, num_samples)
            total = total + nll * batch.get("samples_per_token", num_samples / count)
        return Mean(total, num_samples), metrics

    @torch.no_grad()
    def reference_log_probs(self, batch: Mapping[str, Any], prefix: str = "") -> Tensor:
        """Returns the log-probability of each answer under the reference: [samples, 2], or with kto [samples]."""
        with self._reference() as model, self.autocast():
            return sequence_log_probs(self._logits_of(model, batch, prefix), batch[f"{prefix}labels"])

    def eval_end(self, aggregated: Any) -> dict[str, Any]:
        """Adds the values that are not means over batches: the loss of orpo, the margin of kto."""
        logs = super().eval_end(aggregated)
        if self.options.loss_type == "orpo" and "nll_loss" in logs:
            logs["loss"] = logs["nll_loss"] - self.options.beta * logs["log_odds_ratio"]
        return _with_margin(logs)

    def train_loop_end(self) -> dict[str, Any]:
        """Adds the margin of kto."""
        return _with_margin(super().train_loop_end())

    def _prepare_table(self) -> None:
        """Reads the precomputed log-probabilities, or computes and saves them before the first step; collective."""
        if not self.options.precompute_reference or self._table is not None:
            return
        where = self.config.origin("trainer.precompute_reference")
        with self.ranks.failing_together():
            table = ReferenceTable.load(self.folder) if self.ranks.is_first else None
        table = self.ranks.broadcast(table)
        if table is None:
            if self.step > 0 or self.train_data is None:
                raise CheckpointError(
                    f"{self.folder / TABLE_FILE} is missing, which has the log-probabilities of the model before the "
                    "first step. Restore the file, or start over with --fresh.",
                    where=where,
                )
            table = self._compute_table()
            with self.ranks.failing_together():
                if self.ranks.is_first:
                    table.save(self.folder)
        self._table = table

    def _compute_table(self) -> ReferenceTable:
        """Returns the log-probabilities of all samples of all sets with the current model; collective."""
        sets: list[Any] = [*self.eval_data.values(), *([] if self.test_data is None else [self.test_data])]
        train = self.train_data
        if not isinstance(train, TrainData) or not all(isinstance(each, EvalData) for each in sets):
            raise ConfigError(
                "trainer.precompute_reference: a stream has no fixed samples. Read the data by index, without "
                "streaming, or set it to false.",
                where=self.config.origin("trainer.precompute_reference"),
            )
        whole = EvalData(
            train.dataset,
            name="train",
            collator=train.collator,
            global_batch_size=self.context.batch_plan.micro_batch_size * self.ranks.mesh.num_data_ranks,
            seed=train.seed,
            view=train.view,
            options=train.options,
            on_error=train.on_error,
        )
        found = []
        for data in (whole, *sets):
            with (
                preserve_generators(),
                closing(data.batches(super().batches_to_device)) as batches,
                progress(f"Computing the reference log-probabilities of {data.name}", unit="batches") as advance,
            ):
                for batch in batches:
                    found.append((batch["row_id"].cpu(), self.reference_log_probs(batch).cpu()))
                    advance()
        return ReferenceTable.collect(part for parts in self.ranks.gather(found) for part in parts)

    def _check(self, batch: Any) -> None:
        advice = "The loss kto learns from rows with prompt, completion and label; all others from pairs."
        check_preferences(batch, is_paired=self.options.loss_type != "kto", advice=advice)

    @contextmanager
    def _reference(self) -> Iterator[torch.nn.Module]:
        """Yields the reference model, without dropout."""
        if self.options.precompute_reference and self.state.step > 0:
            raise TrainwrightError(
                "trainer.precompute_reference: the batch has no precomputed log-probabilities, and the model has been "
                "trained. Pass forward the batches of train() or evaluate()."
            )
        with reference_of(self.model, self.context.frozen_models.get("reference")) as reference:
            yield reference

    def _logits_of(self, model: torch.nn.Module, batch: Mapping[str, Any], prefix: str = "") -> Tensor:
        """Returns the logits of all sequences, with the dims of the batch before the last one."""
        names = ("input_ids", "attention_mask")
        inputs = {name: batch[f"{prefix}{name}"].flatten(0, -2) for name in names}
        logits = logits_of(self.task.forward(model, inputs), model)
        return logits.view(*batch[f"{prefix}labels"].shape, -1)

    @torch.no_grad()
    def _sums_of_batch(
        self, batch: Mapping[str, Any], micro_batches: Callable[[Any], Iterator[Any]]
    ) -> dict[str, Tensor]:
        """Returns the sums over the whole batch and all ranks that the loss needs; collective for orpo and kto."""
        if self.options.loss_type not in ("orpo", "kto"):
            return {}
        device = batch["labels"].device
        if self.options.loss_type == "orpo":
            num_tokens = batch["attention_mask"][:, 0, 1:].sum()
            sums = torch.stack([torch.full_like(num_tokens, len(batch["labels"])), num_tokens])
            samples, tokens = self.ranks.sum_over_samples(sums * (self.batch.num_samples > 0)).unbind()
            return {"samples_per_token": samples / tokens.clamp(min=1)}
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for each in micro_batches(batch):
            with evaluating(self.model), self.autocast():
                policy = sequence_log_probs(self._logits_of(self.model, each, "kl_"), each["kl_labels"])
            difference = (policy - self.reference_log_probs(each, "kl_")).double()
            if self.batch.num_samples:
                sums += torch.stack([difference.sum(), torch.full_like(difference.sum(), len(difference))])
        total, count = self.ranks.sum_over_samples(sums).unbind()
        return {"kl": (total / count.clamp(min=1)).clamp(min=0).float()}


def is_base_with_adapters(model: torch.nn.Module) -> bool:
    """Returns True if the model without its adapters has the same outputs as before the first step."""
    if peft_adapters.peft_config_of(model) is not None:
        return peft_adapters.keeps_base(model)
    return any(True for _ in lora.lora_layers(model)) and lora.keeps_base(model)


@contextmanager
def reference_of(model: torch.nn.Module, copy: torch.nn.Module | None) -> Iterator[torch.nn.Module]:
    """Yields the reference in evaluation mode: the frozen copy of the initial model, or the model without adapters."""
    if copy is not None:
        yield copy
        return
    has_peft = peft_adapters.peft_config_of(model) is not None
    without_adapters = peft_adapters.without_peft if has_peft else lora.without_lora
    with without_adapters(model), evaluating(model) as reference:
        yield reference


def sequence_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the summed log-probability [...] of the labels [..., S] for logits [..., S, V]."""
    per_token = label_log_probs(logits.flatten(0, -3), labels.flatten(0, -2))
    return per_token.sum(-1).view(labels.shape[:-1])


def _num_answer_tokens(labels: Tensor) -> Tensor:
    return (labels[..., 1:] != IGNORED_LABEL).sum(-1)


def _pair_losses(options: DPOOptions, log_probs: Tensor, reference: Tensor | None, labels: Tensor) -> Tensor:
    """Returns the loss of each pair from the log-probabilities [samples, 2] of its answers."""
    scores = log_probs if reference is None else log_probs - reference
    beta, smoothing = options.beta, options.label_smoothing
    if options.loss_type == "ipo":  # per token, so that it does not grow with the length
        chosen, rejected = (scores / _num_answer_tokens(labels).clamp(min=1)).unbind(-1)
        return (chosen - rejected - 1 / (2 * beta)) ** 2
    chosen, rejected = scores.unbind(-1)
    if options.loss_type == "hinge":
        return torch.relu(1 - beta * (chosen - rejected))
    if options.loss_type == "orpo":
        odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
        return -beta * F.logsigmoid(odds)
    logits = beta * (chosen - rejected) - (options.simpo_gamma if options.loss_type == "simpo" else 0.0)
    return -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """Returns log(1 − p) from log p, with the form that is precise for it."""
    is_small = log_prob < -0.6931  # p below a half
    near_one = torch.where(is_small, -1.0, log_prob)  # no inf in the gradient of the other form
    near_zero = torch.where(is_small, log_prob, -1.0)
    return torch.where(is_small, torch.log1p(-near_zero.exp()), torch.log(-torch.expm1(near_one)))


def _kto(
    options: DPOOptions, log_probs: Tensor, reference: Tensor | None, *, label: Tensor, kl: Tensor
) -> tuple[Mean, dict[str, Any]]:
    """Returns the loss of answers with labels, and the metrics, separately for good and bad answers."""
    assert reference is not None
    rewards = options.beta * (log_probs - reference)
    margin = torch.where(label, rewards - options.beta * kl, options.beta * kl - rewards)
    weight = torch.where(label, options.desirable_weight, options.undesirable_weight)
    metrics: dict[str, Any] = {"kl": Mean(kl * len(label), len(label))}
    for name, chosen in (("chosen", label), ("rejected", ~label)):
        metrics[f"rewards/{name}"] = Mean((rewards.detach() * chosen).sum(), chosen.sum())
        metrics[f"logps/{name}"] = Mean((log_probs.detach() * chosen).sum(), chosen.sum())
    return Mean((weight * (1 - torch.sigmoid(margin))).sum(), len(label)), metrics


def _with_margin(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns the logs with the difference of the rewards, which kto has of unequally many answers."""
    if "rewards/margins" not in logs and "rewards/chosen" in logs and "rewards/rejected" in logs:
        logs["rewards/margins"] = logs["rewards/chosen"] - logs["rewards/rejected"]
    return logs


def check_preferences(batch: Any, *, is_paired: bool, advice: str) -> None:
    """Raises for the batch of another collator or of the other kind of rows; `advice` says what the trainer needs."""
    needed = ("input_ids", "attention_mask", "labels", *(() if is_paired else ("label", "kl_input_ids")))
    found = batch if isinstance(batch, Mapping) else {}
    if any(name not in found for name in needed) or found["input_ids"].ndim != 2 + is_paired:
        got = ", ".join(f"{name} {list(value.shape)}" for name, value in found.items() if isinstance(value, Tensor))
        raise DataError(
            f"The batch has {got or type(batch).__name__}, but it should have input_ids "
            f"{'[samples, 2, width]' if is_paired else '[samples, width] and a label per sample'}. Use data.train and "
            f"data.collator of type preferences. {advice}"
        )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the model in evaluation mode; restores the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield model
    finally:
        for module in training:
            module.training = True
