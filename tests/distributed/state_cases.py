"""Runs of one and of two ranks with state of their own, and without a dataset; test_state_two_processes.py compares."""

import json
import time
from pathlib import Path

import torch
from tests.distributed.cases import build, load
from torch import nn

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.parallel import processes


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x).tanh()).log_softmax(-1)[:, 0]


def moves(step, rank):
    """The moves of a rank in a step: 3 of the first rank, 5 of the second."""
    number = torch.arange((3 + 2 * rank) * 4).reshape(-1, 4)
    return torch.sin(number * (1.0 + step) + 7.0 * rank)


class Made(Trainer):
    """Makes a batch of another size on each rank; one process makes those of both."""

    @classmethod
    def build_model(cls, build):
        return Score()

    def next_train_inputs(self, iterator):
        if self.ranks.size == 1:
            return {"x": torch.cat([moves(self.step, 0), moves(self.step, 1)])}
        return {"x": moves(self.step, self.ranks.mesh.data_rank)}

    def forward(self, x):
        return -(self.model(x) * x.sum(1)).mean()


class Graph(Made):
    """The scores are computed with the batch."""

    def next_train_inputs(self, iterator):
        x = super().next_train_inputs(iterator)["x"]
        return {"scores": self.model(x), "x": x}

    def forward(self, scores, x):
        return -(scores * x.sum(1)).mean()


class Ends(Made):
    """Ends on one rank alone."""

    def next_train_inputs(self, iterator):
        if self.step == 2 and self.ranks.rank == self.ranks.size - 1:
            raise StopIteration
        return super().next_train_inputs(iterator)


class Carried(Trainer):
    """Carries a hidden state, which differs between ranks, and a copy of the weights, which does not."""

    def post_init(self):
        self.hidden, self.copy = torch.zeros(4), {}

    def forward(self, x, labels):
        outputs = self.model(x + self.hidden, labels)
        if self.model.training:
            self.copy = {"layers.0.bias": self.model.layers[0].bias.detach().clone()}
        self.hidden = 0.5 * self.hidden + x.mean(0)
        return outputs

    def state_dict(self):
        return {"nested": {"hidden": self.hidden, "name": "all"}, "copy": self.copy, "step": self.step}

    def load_state_dict(self, state):
        self.hidden, self.copy = state["nested"]["hidden"], dict(state["copy"])
        self.loaded = state["step"]


class Shared(Carried):
    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.loaded = state["step"]


def made_config(folder, name, *overrides):
    size = processes.world_size()
    settings = {
        "name": name,
        "output_dir": str(folder),
        "trainer": {"max_steps": 4, "optimizer": {"type": "sgd", "lr": 0.1}},
        "log": {"every_steps": 1},
        "writers": ["json"],
        "runtime": {"device": "cpu", "mesh": {"replicate": size}},
    }
    return RunConfig.from_dict(settings, overrides)


def carried_config(folder, name, *overrides):
    settings = ("evaluation.metrics={}", "trainer.schedule=null", "checkpoint.every_steps=null")
    return load(folder, name, *settings, *overrides)


def whole_weights(trainer):
    full = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in trainer.model.parameters()]
    return torch.cat([each.detach().flatten() for each in full]).tolist()


def halves(folder, name, kind, *overrides):
    """Whether a run that ends and continues has the weights of one that does not."""
    whole = build(carried_config(folder, f"{name}-whole", *overrides), kind)
    whole.train()
    build(carried_config(folder, f"{name}-halves", "trainer.max_steps=5", *overrides), kind).train()
    second = build(carried_config(folder, f"{name}-halves", *overrides), kind)
    hidden = second.ranks.gather(second.hidden.tolist())
    second.train()
    return whole_weights(second) == whole_weights(whole), hidden


def barrier(folder, trainer):
    """Whether the first rank sees, after the barrier, what the last one wrote before it."""
    path = folder / "written"
    if not trainer.is_main_process:
        time.sleep(0.2)
        path.write_text("here")
    trainer.barrier()
    return path.exists()


def main(folder):
    results = {}
    for name, kind, overrides in (
        ("made", Made, ()),
        ("split", Made, ("trainer.micro_batch_size=2",)),
        ("parts", Made, ("trainer.gradient_accumulation_steps=2",)),
        ("graph", Graph, ()),
        *(
            (("fsdp", Made, ("runtime.mesh={fsdp: 2}",)), ("fsdp-graph", Graph, ("runtime.mesh={fsdp: 2}",)))
            * several()
        ),
    ):
        trainer = build(made_config(folder, name, *overrides), kind)
        trainer.train()
        results[name] = [whole_weights(trainer), trainer.train_data.samples_seen, trainer.num_micro_batches]
    if several():
        ends = build(made_config(folder, "ends"), Ends)
        ends.train()
        results["ends"] = ends.ranks.gather([ends.step, ends.is_finished])
        try:
            build(made_config(folder, "fixed", "trainer.global_batch_size=8"), Made).train()
        except Exception as error:
            results["fixed"] = ends.ranks.gather(f"{type(error).__name__}: {error}")
        results["is_main_process"] = ends.ranks.gather(ends.is_main_process)
        results["barrier"] = ends.ranks.gather(barrier(folder, ends))
        results["replicated"] = halves(folder, "replicated", Carried)
        results["sharded"] = halves(folder, "sharded", Carried, "runtime.mesh={fsdp: 2}")
        build(carried_config(folder, "shared", "trainer.max_steps=2"), Shared).train()
    build(carried_config(folder, "alone", "trainer.max_steps=2"), Carried).train()
    if processes.rank_and_size().rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))


def several():
    return int(processes.world_size() > 1)


def resume(folder, name, kind, **rest):
    """Resumes a run of main(), and returns its trainer."""
    return build_trainer(carried_config(folder, name, "trainer.max_steps=12"), kind, **rest)
