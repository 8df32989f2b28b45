"""Whole runs of a small language model in many layouts; test_layouts.py compares what they leave with one process.

All cases of one world size share a launch. Everything is in float64, so that a layout can be told from one process by
rounding alone.
"""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
import torchmetrics
from tests.distributed.forked_launch import forget_groups

from trainwright import Hook, Mean, RunConfig, Task, build_trainer, get_event_storage
from trainwright.analysis.shard import CollectiveRecorder
from trainwright.checkpoint.store import CheckpointStore
from trainwright.loop import agreement
from trainwright.parallel import processes
from trainwright.parallel.mesh import local
from trainwright.trainers.language_model import LanguageModelTrainer

RUN_FILE = Path(__file__).with_name("pipeline_run.yaml")
"""Six steps of eight rows, in micro-batches of two; evaluated at 3 and 6."""
LAYOUTS = {
    "one": {},
    "fsdp": {"fsdp": 2},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
    "replicate": {"replicate": 2},
    "fsdp-tensor": {"fsdp": 2, "tensor": 2},
    "replicate-fsdp": {"replicate": 2, "fsdp": 2},
}


class Rows(torch.utils.data.Dataset):
    """Rows of four or seven words, drawn by their number."""

    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        length = 4 + 3 * int(torch.randint(2, (1,), generator=generator))
        return {"input_ids": torch.randint(1, 23, (length,), generator=generator).tolist()}


class RowStream(torch.utils.data.IterableDataset):
    """The same rows, that can only be iterated."""

    def __init__(self, size, first=0):
        self.rows = Rows(size, first)

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


class Words(torchmetrics.Metric):
    """Counts words by torchmetrics' own means: a sum over ranks, and values that are joined in their order."""

    def __init__(self):
        super().__init__()
        self.add_state("num_words", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("peaks", [], dist_reduce_fx="cat")

    def update(self, logits, labels):
        counted = labels != -100
        self.num_words += counted.sum()
        self.peaks.append((logits.amax(-1) * counted).sum(-1).double())

    def compute(self):
        peaks = self.peaks if isinstance(self.peaks, torch.Tensor) else torch.cat(self.peaks)
        return {"num": self.num_words, "peak": peaks.sum(), "rows": torch.tensor(len(peaks))}


class Ordered(Task):
    """Collects what names each row of an evaluation, in order."""

    def aggregate_logs(self, state, outputs):
        assert len(outputs["texts"]) == len(outputs["names"])
        return [*(state or []), *outputs["names"].tolist()]

    def reduce_aggregated_logs(self, state, step):
        return {"num_rows": len(state), "order": sum(name * (place + 1) for place, name in enumerate(state))}


class Double(LanguageModelTrainer):
    """Trains in float64. It overrides nothing of the step, so that it may run in a pipeline."""

    @classmethod
    def build_model(cls, build):
        return super().build_model(build).double()

    def next_eval_inputs(self, iterator):
        batch, logs = super().next_eval_inputs(iterator)
        names = (batch["input_ids"] * 31 % 101).sum(-1)
        return batch, {**logs, "names": names, "texts": [str(name) for name in names.tolist()]}


class LeavesInEvaluation(Double):
    """The last rank gets a signal in the midst of the evaluation of step 3."""

    def next_eval_inputs(self, iterator):
        inputs = super().next_eval_inputs(iterator)
        if self.step == 3 and self.ranks.rank == self.ranks.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return inputs


def is_last_rank():
    rank, world = processes.rank_and_size()
    return rank == world - 1


class BrokenRows(Rows):
    """One row cannot be read, on the last rank alone."""

    def __getitem__(self, index):
        if index == 5 and is_last_rank():
            raise OSError("no such row here")
        return super().__getitem__(index)


class BrokenStream(RowStream):
    def __init__(self, size):
        self.rows = BrokenRows(size)


class BrokenMetric(Words):
    """Fails where it is fed, which of ranks that share samples one does."""

    def update(self, logits, labels):
        super().update(logits, labels)
        if len(self.peaks) == 2:
            raise ArithmeticError("this metric is broken")


class FailsEverywhere(Double):
    """Every rank fails in the same forward, so that all can still meet."""

    def eval_step(self, batch):
        super().eval_step(batch)
        raise KeyError("logits")


class FailsAlone(Double):
    """One rank fails where the others wait for its part of the model."""

    def eval_step(self, batch):
        if is_last_rank():
            raise KeyError("logits")
        return super().eval_step(batch)


class Talk(Hook):
    """Ranks put different names, and a different number of times."""

    def before_step(self):
        storage, ranks = get_event_storage(), self.trainer.ranks
        storage.put_scalar("everywhere", float(ranks.rank))
        if ranks.rank == ranks.size - 1:
            storage.put_scalar("last_rank_only", 5.0)
        if self.trainer.step % 2:
            storage.put_scalar("odd_steps", 1.0)


class Talking(Double):
    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), Talk()]


class Metrics(Double):
    """Returns metrics beside the loss: a mean that knows its weight, and one by samples."""

    draws: list

    def post_init(self):
        self.draws = []

    def forward(self, **batch):
        if self.model.training:
            self.draws.append(torch.rand(()).item())
        outputs = super().forward(**batch)
        long = (batch["input_ids"] != 0).sum(-1).double()
        return outputs["loss"], {"length": Mean(long.sum(), len(long)), "mean_length": long.mean()}


class Spoiled(Double):
    """The loss of the fourth update is nan, on the last rank alone, whenever its batch comes."""

    kept: list
    decided: list
    culprit: int | None

    def post_init(self):
        self.kept, self.decided, self.culprit = [], [], None

    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), NoteAnomalies()]

    def forward(self, **batch):
        outputs = super().forward(**batch)
        if not self.model.training or self.ranks.rank != self.ranks.size - 1:
            return outputs
        place = self.train_data.order_position
        if self.step == 3 and self.culprit is None:
            self.culprit = place
        if place != self.culprit:
            return outputs
        return {**outputs, "loss": Mean(outputs["loss"].total * torch.nan, outputs["loss"].count)}


class NoteAnomalies(Hook):
    """Notes whether an update left this rank's weights alone, and what was decided."""

    def before_step(self):
        self.before = [local(each).detach().clone() for each in self.trainer.model.parameters()]

    def after_step(self):
        now = [local(each) for each in self.trainer.model.parameters()]
        self.trainer.kept.append(all(map(torch.equal, self.before, now)))

    def on_anomaly(self, anomaly):
        self.trainer.decided.append((anomaly.step, anomaly.kind, anomaly.policy, list(anomaly.ranks)))


class CountCollectives(Hook):
    """Counts what ranks say to each other in the second update."""

    def before_step(self):
        self.recorder = CollectiveRecorder(self.trainer.ranks.mesh) if self.trainer.step == 1 else None
        if self.recorder is not None:
            self.recorder.__enter__()

    def after_step(self):
        if self.recorder is not None:
            self.recorder.__exit__(None, None, None)
            self.trainer.found = [[each.kind, each.axis, each.count, each.num_bytes] for each in self.recorder.found]


class Counted(Double):
    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), CountCollectives()]


@dataclass(frozen=True)
class Case:
    """A run in some layouts; `collect(trainer)` gives what each rank is asked for after it."""

    layouts: tuple
    overrides: tuple
    trainer: type = Double
    collect: object = None


HERE = Path(__file__).name
LORA = 'model.lora={match: ["q_proj", "o_proj", "up_proj"], rank: 2, train: ["*norm*"]}'
SETS = f"data.eval={{valid: {{type: {HERE}:Rows, size: 7}}, stream: {{type: {HERE}:RowStream, size: 5, first: 90}}}}"
TINY = f"data.eval={{tiny: {{type: {HERE}:Rows, size: 1}}, few: {{type: {HERE}:RowStream, size: 1}}}}"
ACCURACY = "accuracy: {type: accuracy}"
METRICS = f"evaluation.metrics={{{ACCURACY}, words: {{type: {HERE}:Words}}}}"
ORDERED = f"task={{type: {HERE}:Ordered}}"
EVALUATED = (SETS, METRICS, ORDERED, "evaluation.batch_size=4", "trainer.max_steps=4")
PLAIN = ("data.eval={}", "evaluation={}", "trainer.max_steps=3")
TWO_STEPS = (*PLAIN[:2], "trainer.max_steps=2")
STREAMED = (*PLAIN, f"data.train={{type: {HERE}:RowStream, size: 24}}")
ANOMALIES = (*PLAIN[:2], "trainer.max_steps=5", "checkpoint.every_steps=2", "checkpoint.asynchronous=false")
SPLIT = ("fsdp", "tensor", "context", "pipeline", "fsdp-tensor", "replicate-fsdp")
PARTS = ("fsdp", "tensor")
MATRICES = (*PARTS, "fsdp-tensor")


def anomalies_of(trainer):
    return {"step": trainer.step, "kept": trainer.kept, "decided": trainer.decided}


def collectives_of(trainer):
    return trainer.found


CASES = {
    "evaluated": Case(SPLIT, EVALUATED),
    "tiny": Case(SPLIT, (TINY, f"evaluation.metrics={{{ACCURACY}}}", ORDERED, "trainer.max_steps=3")),
    "talk": Case(("tensor", "pipeline"), PLAIN, Talking),
    "metrics": Case(
        (*MATRICES, "context"), PLAIN, Metrics, lambda trainer: [trainer.draws, trainer.ranks.mesh.data_rank]
    ),
    "dropout": Case(("tensor",), (*PLAIN, "model.dropout=0.3", "trainer.micro_batch_size=2")),
    "lora": Case((*MATRICES, "pipeline"), (*PLAIN, LORA)),
    "frozen": Case((*PARTS, "pipeline"), (*PLAIN, 'model.freeze=["model.embed_tokens.*", "model.layers.*.q_proj.*"]')),
    "skip": Case(MATRICES, (*ANOMALIES, "anomalies.non_finite=skip"), Spoiled, anomalies_of),
    "rollback": Case(PARTS, (*ANOMALIES, "anomalies.non_finite=rollback"), Spoiled, anomalies_of),
    "streamed": Case(MATRICES, STREAMED),
    "compiled": Case(
        ("replicate", "fsdp", "tensor"),
        (*TWO_STEPS, "runtime.mode=compile", "runtime.compile_backend=aot_eager"),
    ),
    "graphed": Case(("replicate-fsdp",), (*PLAIN[:2], "trainer.max_steps=5", "runtime.mode=graph")),
    "bf16": Case(("fsdp",), (*PLAIN, "runtime.precision=bf16"), LanguageModelTrainer),
    "fp16": Case(("fsdp",), (*PLAIN, "runtime.precision=fp16"), LanguageModelTrainer),
}
for micro in (4, 2, 1):
    for unsharded in ("false", "true"):
        CASES[f"reduced-{micro}-{unsharded}"] = Case(
            ("fsdp", "replicate", "replicate-fsdp"),
            (*TWO_STEPS, f"trainer.micro_batch_size={micro}", f"runtime.accumulate_unsharded={unsharded}"),
            Counted,
            collectives_of,
        )


REPEATED = {
    *((name, "fsdp-tensor") for name in ("evaluated", "tiny", "lora", "skip", "streamed")),
    *((name, "tensor") for name in ("tiny", "talk", "frozen", "skip", "streamed", "rollback", "compiled", "raise")),
    *((name, "tensor") for name in ("left", "fails-data", "fails-everywhere")),
    *((name, "pipeline") for name in ("left", "fails-stream", "fails-ordered")),
    *((name, "replicate") for name in ("reduced-4-true", "reduced-2-true")),
    ("tiny", "context"),
    ("tiny", "replicate-fsdp"),
}
"""What other layouts have too, and what is the slowest here: `make test-slow` alone runs it."""


def is_run(name, layout):
    """Is this case run in this layout? Four data ranks have two rows each, two have four: one and two micro-batches."""
    if name.startswith("reduced"):
        micro = int(name.split("-")[1])
        if layout == "one":
            return name == "reduced-2-false"
        return layout in CASES[name].layouts and micro in ((2, 1) if layout == "replicate-fsdp" else (4, 2))
    return layout == "one" or layout in CASES[name].layouts


def load(folder, name, layout, *overrides):
    axes = ", ".join(f"{axis}: {size}" for axis, size in LAYOUTS[layout].items())
    place = (f"output_dir={folder / layout}", f"name={name}", "checkpoint.every_steps=null", "model.num_layers=2")
    rows = (f"data.train.type={HERE}:Rows", f"data.eval.valid.type={HERE}:Rows")
    # Split matrices are slow to begin with: fewer micro-batches are as exact.
    micro = ("trainer.micro_batch_size=4",) if "tensor" in LAYOUTS[layout] else ()
    return RunConfig.load(RUN_FILE, [*place, *rows, *micro, f"runtime.mesh={{{axes}}}", *overrides])


def build_and_forget(config, trainer_class):
    """Builds a trainer when the groups of the runs before it are closed."""
    forget_groups()
    return build_trainer(config, trainer_class)


def run(folder, name, layout):
    """Runs one case; returns what every rank was asked for."""
    case = CASES[name]
    torch.compiler.reset()  # what another layout compiled is tried first, at length, and fits nowhere
    trainer = build_and_forget(load(folder, name, layout, *case.overrides), case.trainer)
    trainer.train()
    return None if case.collect is None else trainer.ranks.gather(case.collect(trainer))


FAILURES = {
    "fails-data": (Double, ("evaluation.metrics={}", f"data.eval={{valid: {{type: {HERE}:BrokenRows, size: 7}}}}")),
    "fails-stream": (Double, ("evaluation.metrics={}", f"data.eval={{valid: {{type: {HERE}:BrokenStream, size: 7}}}}")),
    "fails-metric": (Double, (f"evaluation.metrics={{broken: {{type: {HERE}:BrokenMetric}}}}",)),
    "fails-ordered": (Double, (f"evaluation.metrics={{broken: {{type: {HERE}:BrokenMetric}}}}", ORDERED)),
    "fails-everywhere": (FailsEverywhere, ("evaluation.metrics={}",)),
    "few": (Double, (TINY, METRICS)),
    "small-batch": (Double, (METRICS, "evaluation.batch_size=1")),
}
"""What fails in an evaluation in such a way that all ranks can still come together."""


def fails_in(name, layout):
    """Is this failure tried in this layout? A pipeline takes no eval_step of a user's; split matrices are slow."""
    left_out = {"pipeline": ("fails-everywhere",), "tensor": ("fails-stream", "fails-ordered", "few")}
    return name not in left_out.get(layout, ())


def run_further(folder, layout, left_out):
    """What needs more than one run, or ends in words; returns what every rank saw."""
    results = {}
    if layout in ("fsdp", "tensor", "pipeline") and ("left", layout) not in left_out:
        left = build_and_forget(load(folder, "left", layout, *EVALUATED), LeavesInEvaluation)
        left.train()
        results["left"] = left.ranks.gather(
            (left.step, left.interrupted, left.stop_reason, left.state.has_unfinished_step)
        )
        build_trainer(load(folder, "left", layout, *EVALUATED), Double).train()
    if layout in ("fsdp", "tensor", "pipeline"):
        for name, (kind, overrides) in FAILURES.items():
            if fails_in(name, layout) and (name, layout) not in left_out:
                results[name] = run_failing(folder, name, layout, kind, *overrides)
    if layout in ("fsdp", "tensor") and ("raise", layout) not in left_out:
        raising = build_and_forget(load(folder, "raise", layout, *ANOMALIES), Spoiled)
        said = words_of(raising.train)
        results["raise"] = raising.ranks.gather((raising.step, raising.decided, said))
    return results


def run_failing(folder, name, layout, kind, *overrides):
    """Returns what each rank said, and the steps that were saved."""
    small = ("trainer.max_steps=2", "trainer.global_batch_size=4", "evaluation.every_steps=null")
    trainer = build_and_forget(load(folder, name, layout, *small, *overrides), kind)
    said = words_of(trainer.train)
    return trainer.ranks.gather(said), CheckpointStore(trainer.folder / "checkpoints").steps()


def fail_alone(folder):
    """Every rank ends with an error, though the others wait in a forward for the one that failed."""
    agreement.AGREEMENT_SECONDS = 1.0
    build_trainer(load(folder, "alone", "fsdp", "trainer.max_steps=2"), FailsAlone).train()


def words_of(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder, left_out=frozenset()):
    """Runs all cases of this world size on this rank, but for pairs of a case and a layout that are left out."""
    rank, world = processes.rank_and_size()
    for layout, axes in LAYOUTS.items():
        if world != torch.tensor(list(axes.values()) or [1]).prod().item():
            continue
        wanted = [name for name in CASES if is_run(name, layout) and (name, layout) not in left_out]
        results = {name: run(folder, name, layout) for name in wanted}
        if world > 1:
            results |= run_further(folder, layout, left_out)
        if rank == 0:
            (folder / layout / "results.json").write_text(json.dumps(results))
