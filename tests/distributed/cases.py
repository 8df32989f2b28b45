"""The cases that run on one and on two processes; test_two_processes.py compares what they leave.

Several cases share one launch.
"""

import json
import os
import signal
from pathlib import Path

import torch
from tests.distributed.forked_launch import forget_groups

from trainwright import Hook, Mean, RunConfig, Task, Trainer, build_trainer, get_event_storage
from trainwright.data.collators import Stack
from trainwright.errors import ConfigError
from trainwright.parallel import processes

PROJECT = Path(__file__).parents[1] / "project"


class Tokens(Trainer):
    """A loss over a number of tokens that differs from sample to sample."""

    def forward(self, **batch):
        logits = self.model(batch["x"])["logits"]
        losses = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        counts = 1 + (batch["x"][:, 0] > 0).float() * 4 + batch["labels"] * 2
        right = (logits.argmax(-1) == batch["labels"]).sum()
        return Mean((losses * counts).sum(), counts.sum()), {"accuracy": Mean(right, len(counts))}

    def eval_step(self, batch):
        logs = dict(super().eval_step(batch))
        logs["per_sample"] = batch["x"][:, 0]
        return logs


class Talk(Trainer):
    """Ranks put different names, and a different number of times."""

    def forward(self, **batch):
        storage = get_event_storage()
        storage.put_scalar("everywhere", float(self.ranks.rank))
        if self.ranks.rank == self.ranks.size - 1:
            storage.put_scalar("last_rank_only", 5.0)
        if self.step % 2:
            storage.put_scalar("odd_steps", 1.0)
        return self.model(**batch)


class Noting(Stack):
    """Notes which samples a rank was given."""

    def __init__(self):
        self.seen = []

    def __call__(self, samples):
        self.seen.append([round(float(sample["x"][0]), 5) for sample in samples])
        return super().__call__(samples)


class OrderTrainer(Trainer):
    @classmethod
    def build_collator(cls, build):
        return Noting()


class Ordered(Task):
    """Collects every sample of an evaluation, in order."""

    def aggregate_logs(self, state, outputs):
        return [*(state or []), *outputs["per_sample"].tolist()]

    def reduce_aggregated_logs(self, state, step):
        return {"num_samples": len(state), "weighed": sum(value * (place + 1) for place, value in enumerate(state))}


class OrderedTokens(Tokens):
    @classmethod
    def build_task(cls, build):
        return Ordered()


class Unused(torch.nn.Module):
    """Rank 0 uses one head, rank 1 the other; a third is used by nobody."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(3))

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.heads[processes.rank_and_size().rank](x), labels)}


class UnusedTrainer(Trainer):
    @classmethod
    def build_model(cls, build):
        return Unused()


class StopAtThree(Hook):
    def after_step(self):
        # One rank alone is asked; all must leave together.
        if self.trainer.step == 3 and self.trainer.ranks.rank == self.trainer.ranks.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Interrupted(Trainer):
    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), StopAtThree()]


class FailsOnOneRank(Trainer):
    def eval_step(self, batch):
        if self.ranks.rank == self.ranks.size - 1:
            raise ValueError("no evaluation on the last rank")
        return super().eval_step(batch)


class LocalMetric:
    """A metric of this rank's samples alone; `needs_sample` also has no value before the first one."""

    def __init__(self, needs_sample):
        self.needs_sample = needs_sample

    def reset(self):
        self.sums = []

    def update(self, outputs, labels):
        self.sums.append(float(outputs.sum()))

    def compute(self):
        return max(self.sums) if self.needs_sample else sum(self.sums)


class LocalTrainer(Trainer):
    """An evaluation with another value on each rank."""

    num_evaluations = 0

    def eval_end(self, aggregated):
        self.num_evaluations += 1
        sign = 1 if self.ranks.rank == 0 else -1
        return {**super().eval_end(aggregated), "local": float(sign * self.num_evaluations)}


class WithBatchNorm(Trainer):
    @classmethod
    def build_model(cls, build):
        model = build.model()
        model.layers.insert(1, torch.nn.BatchNorm1d(8))
        return model


class Unfreezing(Trainer):
    def post_init(self):
        self.model.layers[0].weight.requires_grad_(False)

    def train_step(self, batch):
        if self.step == 2:
            self.model.layers[0].weight.requires_grad_(True)
        return super().train_step(batch)


def load(folder, name, *overrides):
    return RunConfig.load(
        PROJECT / "run.yaml",
        [
            *(f"output_dir={folder}", f"name={name}", "model.dropout=0.0", "trainer.global_batch_size=8"),
            *(
                "trainer.micro_batch_size=2",
                f"runtime.mesh={{replicate: {processes.world_size()}}}",
                "checkpoint.keep_last=null",
            ),
            *overrides,
        ],
    )


def build(config, trainer_class=Trainer):
    """Builds a trainer when the groups of the runs before it are closed."""
    forget_groups()
    return build_trainer(config, trainer_class)


def second_half(folder, no_metrics):
    """What only several ranks can get wrong."""
    results = {}
    try:
        build(load(folder, "fails", no_metrics), FailsOnOneRank).train()
    except Exception as error:
        own = f"{type(error).__name__}: {error}"
    failed = build(load(folder, "fails", no_metrics))
    results["fails"] = [failed.ranks.gather(own), failed.step]
    best = "checkpoint={every_steps: null, keep_best: {metric: valid/local, mode: max}}"
    local = build(load(folder, "local", no_metrics, best, "evaluation.every_steps=4"), LocalTrainer)
    local.train()
    results["local"] = local.ranks.gather((local.step, local.best.step))
    results["rank_metrics"] = []
    for needs_sample in ("false", "true"):
        metric = f"evaluation.metrics={{odd: {{type: {Path(__file__)}:LocalMetric, needs_sample: {needs_sample}}}}}"
        try:
            build(load(folder, f"metric-{needs_sample}", metric)).train()
        except ConfigError as error:
            results["rank_metrics"].append([str(error), (folder / f"metric-{needs_sample}").exists()])
    norm = "trainer.schedule={type: constant}"
    build(load(folder, "norm", no_metrics, norm), WithBatchNorm).train()
    build(load(folder, "norm-parts", no_metrics, norm, "trainer.max_steps=5"), WithBatchNorm).train()
    build(load(folder, "norm-parts", no_metrics, norm), WithBatchNorm).train()
    unfreezing = build(load(folder, "unfreezing", no_metrics), Unfreezing)
    unfreezing.train()
    weights = torch.cat([parameter.detach().flatten() for parameter in unfreezing.model.parameters()])
    results["unfrozen_equal"] = all(torch.equal(weights, other) for other in unfreezing.ranks.gather(weights))
    return results


def main(folder):
    results = {}
    no_metrics = "evaluation.metrics={}"
    tokens = build(load(folder, "tokens", no_metrics), Tokens)
    tokens.train()
    ragged = ("trainer.max_steps=null", "trainer.max_samples=33", "trainer.micro_batch_size=4", no_metrics)
    build(load(folder, "ragged", *ragged), Tokens).train()
    build(load(folder, "talk", "log.every_steps=4"), Talk).train()
    ordered = build(load(folder, "ordered", no_metrics, "evaluation.batch_size=5"), OrderedTokens)
    results["ordered"] = ordered.train()
    order = build(load(folder, "order", "data.train.noise=0.0", "data.eval={}", no_metrics), OrderTrainer)
    order.train()
    results["seen"] = order.ranks.gather(order.train_data.collator.seen)
    clipped = build(load(folder, "averaged", "hooks=[{type: ema, decay: 0.5}]"))
    clipped.train()
    if processes.world_size() > 1:
        unused = build(load(folder, "unused", "model=null", "data.eval={}", no_metrics), UnusedTrainer)
        before = [parameter.clone() for parameter in unused.model.parameters()]
        unused.train()
        results["moved"] = [not torch.equal(a, b) for a, b in zip(before, unused.model.parameters(), strict=True)]
        own = torch.cat([parameter.detach().flatten() for parameter in unused.model.parameters()])
        results["replicas_equal"] = all(torch.equal(own, other) for other in unused.ranks.gather(own))
        interrupted = build(load(folder, "interrupted", no_metrics), Interrupted)
        interrupted.train()
        steps = interrupted.ranks.gather((interrupted.step, interrupted.interrupted))
        again = build(load(folder, "interrupted", no_metrics))
        again.train()
        results["interrupted"] = [steps, again.step]
        results.update(second_half(folder, no_metrics))
    if processes.rank_and_size().rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))
