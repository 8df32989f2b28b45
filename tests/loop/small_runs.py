"""Small runs in this process, some of whose batches have a loss that is nan, by the place where the batch begins.

Batches have eight samples, so that the one of step n begins at place 8 (n − 1) until one is left out.
"""

import json
import os

import torch
from tests.faults.runs import TIMED, config_of
from tests.project.parts import Net

from trainwright import Hook, Mean, Trainer, build_trainer
from trainwright.anomaly import detection as anomalies
from trainwright.checkpoint.store import CheckpointStore
from trainwright.loop import trainer as step_end

PLAIN = ("data.eval={}", "evaluation={}", "model.dropout=0.0", "data.train.size=400")
"""Nothing is evaluated, and no epoch ends."""


class Replacing(Net):
    """A net that puts another tensor in its buffer's place at each forward."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__(width, dropout)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x, labels=None):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().forward(x, labels)


class FeedingBack(Replacing):
    """A net whose training both moves its buffer and computes with it."""

    def forward(self, x, labels=None):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return Net.forward(self, x - self.mean, labels)


class FailingMetric:
    """A metric that one rank cannot compute."""

    def __init__(self, rank):
        self.rank = rank

    def reset(self):
        pass

    def update(self, outputs, labels):
        pass

    def compute(self):
        if own_rank() == self.rank:
            raise OSError("no metric")
        return Mean(1.0, 1.0)


def own_rank():
    return int(os.environ.get("RANK", "0"))


def make(folder, *overrides, bad=(), hooks=(), trainer=Trainer, times=None, **rest):
    """Builds the run of `folder`, or goes on: `bad` places give `times`, else nan, times the loss."""

    class Small(trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), *hooks]

        def forward(self, **batch):
            outputs = super().forward(**batch)
            place = self.train_data.order_position - self.train_data.global_batch_size
            if not self.model.training or place not in bad:
                return outputs
            return {**outputs, "loss": outputs["loss"] * (times or {}).get(place, float("nan"))}

    return build_trainer(config_of(folder, *overrides), Small, **rest)


def run(folder, *overrides, **rest):
    """Trains it to its end and returns the trainer."""
    trainer = make(folder, *overrides, **rest)
    trainer.train()
    return trainer


def at(step, act):
    """A hook that calls `act(trainer)` after the update of a step, the first time that it is made."""

    class At(Hook):
        has_acted = False

        def after_step(self):
            if self.trainer.step == step and not self.has_acted:
                self.has_acted = True
                act(self.trainer)

    return At()


class CountEvaluations(Hook):
    """Counts the evaluations, and keeps the count in checkpoints, as a hook that loses patience does."""

    count = 0

    def after_eval(self, logs):
        self.count += bool(logs)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class AnomalyRecorder(Hook):
    """Notes the anomalies that it is told of."""

    def __init__(self):
        self.anomalies = []

    def on_anomaly(self, anomaly):
        self.anomalies.append((anomaly.step, anomaly.kind))


def be_lazy(monkeypatch):
    """Makes the CPU a device that runs ahead: anomalies are looked at only before something leaves a step."""
    for module in (step_end, anomalies):
        monkeypatch.setattr(module, "reads_at_once", lambda device: False)


def store_of(folder):
    return CheckpointStore(folder / "checkpoints")


def lines_of(folder):
    """The log without its clock."""
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text("utf-8").splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(TIMED)} for line in lines]
