"""Runs in eager, compile and graph mode on one process and on two; test_modes.py compares what they leave.

All cases of one world size share a launch. Unless a case is about precision, everything is in float64.
"""

import json
import os
import signal

import torch
from tests.distributed.forked_launch import forget_groups
from tests.distributed.layout_cases import RUN_FILE, Double, Rows, words_of

from trainwright import Hook, Mean, RunConfig, build_trainer
from trainwright.analysis.shard import CollectiveRecorder
from trainwright.parallel import processes

AXES = ("replicate", "fsdp")
MODES = ("eager", "compile", "graph")
NUM_STEPS = 9
COUNTED_STEP = 7
"""Graph mode replays this one: two updates of its shape have warmed up."""


class MarkedRows(Rows):
    """One row begins with a word that no other has."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {"input_ids": [0, *row["input_ids"][1:]]} if index == 13 else row


class Graphed(Double):
    """Tells which steps were replayed, and which collectives step 8 used."""

    graph = None

    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), CountCollectives()]

    def _make_graph_step(self):
        self.graph = super()._make_graph_step()
        self.storage.replayed = []
        return self.graph


class CountCollectives(Hook):
    num_replays = 0

    def before_step(self):
        self.recorder = CollectiveRecorder(self.trainer.ranks.mesh) if self.trainer.step == COUNTED_STEP else None
        if self.recorder is not None:
            self.recorder.__enter__()

    def after_step(self):
        graph = self.trainer.graph
        if graph is not None:
            if graph._num_replays > self.num_replays:
                self.trainer.storage.replayed.append(self.trainer.step)
            self.num_replays = graph._num_replays  # 0 when graphs were dropped
        if self.recorder is not None:
            self.recorder.__exit__(None, None, None)
            found = [[each.kind, each.axis, each.count, each.num_bytes] for each in self.recorder.found]
            self.trainer.storage.collectives = found


class Single(Graphed):
    """The same in fp32."""

    @classmethod
    def build_model(cls, build):
        return super(Double, cls).build_model(build)


class Even(Graphed):
    """All batches have the same width."""

    def width(self):
        return 8

    def next_train_inputs(self, iterator):
        batch = next(iterator)
        extra = self.width() - batch["input_ids"].shape[1]
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {key: torch.nn.functional.pad(value, (0, extra), value=fill[key]) for key, value in batch.items()}


class Widened(Even):
    """The last rank's batches have other widths than the first rank's, and change with the step."""

    def width(self):
        return 8 + self.step % 2 if self.ranks.rank else 8


class Changing(Even):
    """One rank changes a value that its graph depends on, after step 5."""

    @classmethod
    def build_hooks(cls, build):
        return [*super().build_hooks(build), ChangeAtFive()]


class ChangeAtFive(Hook):
    def after_step(self):
        if self.trainer.step == 5 and self.trainer.ranks.rank == self.trainer.ranks.size - 1:
            self.trainer.model.note = "changed"


class Spoiled(Graphed):
    """A marked row has a loss that is not finite, which only the device knows."""

    decided = ()

    @classmethod
    def build_hooks(cls, build):
        return [*super().build_hooks(build), NoteAnomalies()]

    def forward(self, **batch):
        outputs = super().forward(**batch)
        if not self.model.training:
            return outputs
        spoils = torch.where((batch["input_ids"][:, 0] == 0).any(), torch.nan, 1.0)
        return {**outputs, "loss": Mean(outputs["loss"].total * spoils, outputs["loss"].count)}


class NoteAnomalies(Hook):
    def on_anomaly(self, anomaly):
        self.trainer.storage.decided = [anomaly.step, anomaly.kind, anomaly.policy, list(anomaly.ranks)]


class StopAtSix(Hook):
    def after_step(self):
        if self.trainer.step == 6 and self.trainer.ranks.rank == self.trainer.ranks.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Interrupted(Graphed):
    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), StopAtSix()]


class Unused(Graphed):
    """The model has two more parameters, of which a replica uses one, and shards none."""

    @classmethod
    def build_model(cls, build):
        model = super().build_model(build)
        model.spare = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
        return model

    def forward(self, **batch):
        outputs = super().forward(**batch)
        if self.ranks.mesh.is_split or not self.model.training:
            return outputs
        penalty = self.model.spare[self.ranks.rank].sum() * outputs["loss"].count
        return {**outputs, "loss": Mean(outputs["loss"].total + penalty, outputs["loss"].count)}


class ReturnsShard(Graphed):
    """Returns a parameter's norm, which is a DTensor if the parameter is sharded."""

    def forward(self, **batch):
        weight = self.model.model.layers[0].mlp.down_proj.weight
        return super().forward(**batch)["loss"], {"norm": weight.square().sum()}


PLAIN = ("data.eval={}", "evaluation={}")
EVALUATED = ("evaluation={every_steps: 4, batch_size: 4}", "checkpoint.every_steps=5")
MARKED = (*PLAIN, "data.train.type=mode_cases.py:MarkedRows", "checkpoint.every_steps=3")
COMPILED = {"compile": ("runtime.compile_backend=aot_eager", "runtime.max_graph_breaks=0")}
FUSED = "model.fused_loss=true"
BF16 = (*PLAIN, "runtime.precision=bf16", "trainer.micro_batch_size=4")


def load(folder, name, axes, mode, *overrides):
    here = (f"output_dir={folder}", f"name={name}", f"runtime.mesh={{{axes}}}", f"runtime.mode={mode}")
    rows = ("data.train.type=mode_cases.py:Rows", "data.eval.valid.type=mode_cases.py:Rows", "model.vocab_size=24")
    steps = (f"trainer.max_steps={NUM_STEPS}", "checkpoint.every_steps=null", "trainer.micro_batch_size=2")
    return RunConfig.load(RUN_FILE, [*here, *rows, *steps, *COMPILED.get(mode, ()), *overrides])


def run(kind, *arguments):
    """Trains; returns the step, replays and collectives of each rank."""
    forget_groups()
    torch.compiler.reset()
    trainer = build_trainer(load(*arguments), kind)
    trainer.train()
    noted = {name: getattr(trainer.storage, name, None) for name in ("collectives", "decided", "replayed")}
    return trainer.ranks.gather({"step": trainer.step, **noted})


def run_alone(folder):
    """What the runs of two processes are compared with."""
    found = {"eager": run(Graphed, folder, "eager", "", "eager", *EVALUATED)}
    found["untied"] = run(Graphed, folder, "untied", "", "eager", *PLAIN, "model.tie_embeddings=false")
    for policy in ("skip", "rollback"):
        found[policy] = run(Spoiled, folder, policy, "", "graph", *MARKED, f"anomalies.non_finite={policy}")
    found["bf16"] = run(Single, folder, "bf16", "", "eager", *BF16)
    return found


def run_together(folder, axis):
    """Returns what each rank saw of every case."""
    axes = f"{axis}: 2"
    found = {mode: run(Graphed, folder, mode, axes, mode, *EVALUATED) for mode in MODES}
    for mode in ("compile", "graph"):
        found[f"fused-{mode}"] = run(Graphed, folder, f"fused-{mode}", axes, mode, *EVALUATED, FUSED)
    found["fused-untied"] = run(
        Graphed, folder, "fused-untied", axes, "graph", *PLAIN, FUSED, "model.tie_embeddings=false"
    )
    found["changing"] = run(Changing, folder, "changing", axes, "graph", *PLAIN)
    found["widened"] = run(Widened, folder, "widened", axes, "graph", *EVALUATED, "trainer.micro_batch_size=4")
    for policy in ("skip", "rollback"):
        found[policy] = run(Spoiled, folder, policy, axes, "graph", *MARKED, f"anomalies.non_finite={policy}")
    for mode in ("eager", "graph"):
        found[f"bf16-{mode}"] = run(Single, folder, f"bf16-{mode}", axes, mode, *BF16)
    first = run(Interrupted, folder, "interrupted", axes, "graph", *EVALUATED)
    found["interrupted"] = [first, run(Graphed, folder, "interrupted", axes, "graph", *EVALUATED)]
    found["unused"] = run_failing(folder, "unused", axes, Unused)
    if axis == "fsdp":
        wide = (*BF16, "runtime.gather_precision=fp32")
        found["bf16-wide"] = run(Single, folder, "bf16-wide", axes, "eager", *wide)
        found["shard"] = run_failing(folder, "shard", axes, ReturnsShard)
    return found


def run_failing(folder, name, axes, kind):
    """Returns the error of each rank."""
    forget_groups()
    trainer = build_trainer(load(folder, name, axes, "graph", *PLAIN), kind)
    return trainer.ranks.gather(words_of(trainer.train))


def main(folder):
    """Runs all cases of this world size on this rank."""
    rank, world = processes.rank_and_size()
    if world == 1:
        (folder / "one").mkdir()
        (folder / "one/results.json").write_text(json.dumps(run_alone(folder / "one")))
        return
    for axis in AXES:
        results = run_together(folder / axis, axis)
        if rank == 0:
            (folder / axis / "results.json").write_text(json.dumps(results))
