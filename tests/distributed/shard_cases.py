"""Whole runs whose parameters are split over the ranks; test_shard.py compares what they leave with one process."""

import json
from pathlib import Path

import torch
from tests.distributed.forked_launch import forget_groups

from trainwright import Mean, RunConfig, Trainer, build_trainer
from trainwright.parallel import processes

PROJECT = Path(__file__).parents[1] / "project"


class Tokens(Trainer):
    """A loss over a number of tokens that differs from sample to sample."""

    def forward(self, **batch):
        logits = self.model(batch["x"])["logits"]
        losses = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        counts = 1 + (batch["x"][:, 0] > 0).float() * 4 + batch["labels"] * 2
        return Mean((losses * counts).sum(), counts.sum())


class OwnStep(Tokens):
    """A step of a user's own, which does not say how many backwards there are, and looks at the model amid it."""

    def train_step(self, batch):
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            update.backward(self.run_forward(micro_batch))
            with torch.no_grad():
                self.model(micro_batch["x"])
        return update.apply()


class Spoiled(Tokens):
    """One sample of the fourth update is nan, on one rank."""

    def forward(self, **batch):
        loss = super().forward(**batch)
        is_spoiled = self.step == 3 and self.model.training and self.ranks.rank == self.ranks.size - 1
        return Mean(loss.total * torch.nan, loss.count) if is_spoiled else loss


class Heads(torch.nn.Module):
    """Rank 0 uses one head, rank 1 the other; a third is used by nobody."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(3))

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.heads[processes.rank_and_size().rank](x), labels)}


class HeadsTrainer(Trainer):
    @classmethod
    def build_model(cls, build):
        return Heads()


def load(folder, name, *overrides):
    return RunConfig.load(
        PROJECT / "run.yaml",
        [
            *(f"output_dir={folder}", f"name={name}", "model.dropout=0.0", "trainer.global_batch_size=8"),
            *(
                "trainer.micro_batch_size=2",
                f"runtime.mesh={{fsdp: {processes.world_size()}}}",
                "evaluation.metrics={}",
            ),
            "trainer.max_steps=7",
            *overrides,
        ],
    )


RAGGED = ("trainer.max_steps=null", "trainer.max_samples=33", "trainer.micro_batch_size=4")
MUON = "trainer.optimizer={type: muon, lr: 1e-2, ns_dtype: fp32, report: true}"
CASES = {
    "tokens": (Tokens, ()),
    "unsharded": (Tokens, ("runtime.accumulate_unsharded=true", "runtime.reshard_after_forward=false")),
    "ragged": (Tokens, RAGGED),
    "own_step": (OwnStep, ()),
    "averaged": (Tokens, ("hooks=[{type: ema, decay: 0.5}]",)),
    "muon": (Tokens, (MUON,)),
    "lion": (Tokens, ("trainer.optimizer={type: lion, lr: 1e-3, report: true}",)),
    "sgd": (Tokens, ("trainer.optimizer={type: sgd, lr: 0.1, momentum: 0.9}",)),
    "spoiled": (Spoiled, ("anomalies.non_finite=skip",)),
}


def main(folder):
    for name, (trainer_class, overrides) in CASES.items():
        forget_groups()
        build_trainer(load(folder, name, *overrides), trainer_class).train()
    if processes.world_size() > 1:
        heads = build_trainer(load(folder, "heads", "model=null", "data.eval={}"), HeadsTrainer)
        before = [parameter.full_tensor().clone() for parameter in heads.model.parameters()]
        heads.train()
        after = [parameter.full_tensor() for parameter in heads.model.parameters()]
        moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        if processes.rank_and_size().rank == 0:
            (Path(folder) / "moved.json").write_text(json.dumps(moved))
