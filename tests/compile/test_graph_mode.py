"""Graph mode on the CPU: the same run as in eager mode, bit for bit; one clear error for what cannot be recorded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright import Hook, Mean, RunConfig, StepResult, Trainer, build_trainer, get_event_storage
from trainwright.compile.graph import MAX_GRAPHS, GraphStep, number_of
from trainwright.errors import AnomalyError, ConfigError, TrainwrightError

TIMED = ("per_second", "seconds_per_step")


class Points(torch.utils.data.Dataset):
    """Points on a line of labels; `bad` samples have a value that is not finite."""

    def __init__(self, size=200, bad=(), lengths=(6,)):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, max(lengths), generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)
        self.x[list(bad)] = float("nan")
        self.lengths = lengths

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        get_event_storage().put_scalar("spread", logits.std())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Base(Trainer):
    data: ClassVar[dict[str, object]] = {}

    @classmethod
    def build_model(cls, build):
        return Net()

    @classmethod
    def build_train_data(cls, build):
        return Points(**cls.data)

    @classmethod
    def build_eval_data(cls, build):
        return {"valid": Points(size=20)}


def config_of(folder, mode, **sections):
    trainer = {
        "max_steps": 14,
        "global_batch_size": 16,
        "micro_batch_size": 8,
        "max_grad_norm": 1.0,
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "schedule": {"type": "cosine"},
        **sections.pop("trainer", {}),
    }
    trainer = {name: value for name, value in trainer.items() if value is not None}
    return RunConfig.from_dict(
        {
            "name": "run",
            "output_dir": str(folder),
            "runtime": {"mode": mode, "device": "cpu"},
            "trainer": trainer,
            "log": {"every_steps": 3},
            "evaluation": {"every_steps": 5},
            "checkpoint": {"every_steps": None},
            **sections,
        }
    )


def outcome(trainer):
    """Everything that two equal runs share: the log without its clock, weights, buffers, moments."""
    lines = [json.loads(line) for line in (trainer.folder / "metrics.json").read_text("utf-8").splitlines()]
    log = [
        {name: value for name, value in line.items() if not name.endswith(TIMED) and not name.startswith("compile/")}
        for line in lines
    ]
    tensors = [each.clone() for each in trainer.model.state_dict().values()]
    for optimizer in trainer.optimizers.values():
        for state in optimizer.state.values():
            tensors += [each.clone() for each in state.values() if isinstance(each, torch.Tensor)]
    return log, tensors


def train(folder, mode, kind=Base, **sections):
    trainer = build_trainer(config_of(folder / mode, mode, **sections), kind)
    trainer.train()
    return trainer


def assert_equal_runs(folder, kind=Base, **sections):
    eager, graph = (outcome(train(folder, mode, kind, **dict(sections))) for mode in ("eager", "graph"))
    assert graph[0] == eager[0]
    assert len(graph[1]) == len(eager[1])
    for one, other in zip(graph[1], eager[1], strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def replays(monkeypatch):
    """Counts the updates that were replayed, rather than run."""
    count = []
    finish = GraphStep._finish

    def counted(self, *arguments, **rest):
        count.append(1)
        return finish(self, *arguments, **rest)

    monkeypatch.setattr(GraphStep, "_finish", counted)
    return count


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "adamw", "lr": 1e-2, "report": True},
        {"type": "lion", "lr": 1e-3},
        {"type": "muon", "lr": 1e-2},
        {"type": "sgd", "lr": 0.1, "momentum": 0.9},
        {"type": "torch.optim:RMSprop", "lr": 1e-3},
    ],
    ids=lambda each: each["type"],
)
def test_a_run_in_graph_mode_equals_the_eager_run_bit_for_bit(tmp_path, replays, optimizer):
    assert_equal_runs(tmp_path, trainer={"optimizer": optimizer})
    assert len(replays) == 12  # two warm up


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class OnTokens(Trainer):
    @classmethod
    def build_train_data(cls, build):
        return Tokens()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_recomputed_llama_with_averaged_weights_is_equal(tmp_path, precision):
    model = {"type": "llama", "vocab_size": 64, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "dropout": 0.1}
    model["activation_checkpointing"] = ["DecoderLayer"]
    runs = []
    for mode in ("eager", "graph"):
        runtime = {"mode": mode, "device": "cpu", "precision": precision}
        hooks = [{"type": "ema", "decay": 0.9}]
        config = config_of(tmp_path / mode, mode, model=model, hooks=hooks, runtime=runtime, trainer={"max_steps": 6})
        trainer = build_trainer(config, OnTokens)
        trainer.train()
        runs.append(outcome(trainer))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize(("name", "stack"), [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_blocks_that_are_compiled_by_themselves_are_equal(tmp_path, replays, name, stack):
    model = {"type": name, "vocab_size": 64, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "dropout": 0.1}
    runs = []
    for mode, added in (("eager", {}), ("graph", {"compile_repeated_blocks": stack})):
        trainer = train(tmp_path, mode, OnTokens, model=model | added, trainer={"max_steps": 5}, evaluation={})
        runs.append(outcome(trainer))
    assert len(replays) == 3
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_anomalies_are_held_back_alike(tmp_path, policy, monkeypatch):
    monkeypatch.setattr(Base, "data", {"bad": (3, 77)})
    anomalies = {"non_finite": policy, "spike": "skip", "spike_window": 8}
    assert_equal_runs(tmp_path, anomalies=anomalies, checkpoint={"every_steps": 2}, evaluation={})


def test_an_anomaly_ends_the_run_at_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(Base, "data", {"bad": (77,)})
    steps = []
    for mode in ("eager", "graph"):
        trainer = build_trainer(config_of(tmp_path / mode, mode), Base)
        with pytest.raises(AnomalyError):
            trainer.train()
        steps.append(trainer.step)
    assert steps[0] == steps[1] > 3


class TwoOptimizers(Base):
    """Two updates in one step, as an adversarial pair makes them."""

    @classmethod
    def build_optimizers(cls, build, model):
        first, last = list(model.layers[:2].parameters()), list(model.layers[4].parameters())
        return {"first": torch.optim.AdamW(first, lr=1e-2, fused=True), "last": cls.last(last)}

    @staticmethod
    def last(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def train_step(self, batch):
        update = self.begin_update()
        update.backward(self.run_forward(batch))
        update.apply(["first"])
        update = self.begin_update()
        loss = self.model(**batch)["loss"]
        update.backward((loss * 0.5, {"halved": loss * 0.5, "parts": Mean(loss * 8, 8)}))
        return update.apply(["last"])


def test_a_step_of_ones_own_with_two_updates_is_equal(tmp_path, replays):
    assert_equal_runs(tmp_path, TwoOptimizers, trainer={"micro_batch_size": 16, "optimizer": None})
    assert len(replays) == 12


class LateOptimizer(TwoOptimizers):
    @staticmethod
    def last(parameters):
        return torch.optim.RMSprop(parameters, lr=1e-3)


def test_an_optimizer_that_cannot_be_recorded_may_be_the_last_act(tmp_path):
    assert_equal_runs(tmp_path, LateOptimizer, trainer={"micro_batch_size": 16, "optimizer": None})


class EarlyOptimizer(LateOptimizer):
    def train_step(self, batch):
        update = self.begin_update()
        update.backward(self.run_forward(batch))
        update.apply(["last"])
        update = self.begin_update()
        update.backward(self.run_forward(batch))
        return update.apply(["first"])


def test_an_optimizer_that_cannot_be_recorded_in_the_midst_of_a_step_is_rejected(tmp_path):
    with raises(ConfigError):
        train(tmp_path, "graph", EarlyOptimizer, trainer={"micro_batch_size": 16, "optimizer": None})


class ByStepTensor(Base):
    def forward(self, **batch):
        return self.model(**batch)["loss"] * (1 + self.step_tensor)


def test_the_step_tensor_counts_in_replays(tmp_path):
    assert_equal_runs(tmp_path, ByStepTensor)


def test_a_run_may_change_its_mode_and_go_on_bit_for_bit(tmp_path):
    def checkpointed(mode, max_steps):
        config = config_of(tmp_path / "changing", mode, checkpoint={"every_steps": 5}, trainer={"max_steps": max_steps})
        trainer = build_trainer(config.derive({"trainer.schedule": {"type": "constant"}}), Base)
        trainer.train()
        return trainer

    for mode, max_steps in (("graph", 5), ("eager", 9), ("graph", 14)):
        changing = checkpointed(mode, max_steps)
    config = config_of(tmp_path / "straight", "eager").derive({"trainer.schedule": {"type": "constant"}})
    straight = build_trainer(config, Base)
    straight.train()
    for one, other in zip(outcome(changing)[1], outcome(straight)[1], strict=True):
        assert torch.equal(one, other)


class ManyShapes(Base):
    """Batches of many widths, of which each comes several times."""

    def next_train_inputs(self, iterator):
        batch = next(iterator)
        width = 1 + self.step % (MAX_GRAPHS + 2)
        return {**batch, "x": batch["x"].repeat(1, width)}

    def forward(self, **batch):
        return self.model(x=batch["x"][:, :6], labels=batch["labels"])


def test_each_shape_of_batches_has_a_recording_up_to_a_limit(tmp_path, caplog):
    limits = {"max_steps": 44, "micro_batch_size": 16}
    assert_equal_runs(tmp_path, ManyShapes, trainer=limits)
    assert "more than 8 shapes" in caplog.text


class HooksSeeGradients(Base):
    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), NoteGradients()]


class NoteGradients(Hook):
    def after_step(self):
        gradient = self.trainer.model.layers[0].weight.grad
        get_event_storage().put_scalar("gradient", gradient.abs().sum())


def test_hooks_see_the_gradients_of_their_step(tmp_path):
    assert_equal_runs(tmp_path, HooksSeeGradients)


def _line(text):
    """The number of this file's line that has a text."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


class ReadsStep(Base):
    def train_step(self, batch):
        weight = 1.0 / (1 + self.step)  # reads the step
        update = self.begin_update()
        update.backward(self.run_forward(batch).loss * weight)
        return update.apply()


class ReadsLoss(Base):
    def train_step(self, batch):
        result = super().train_step(batch)
        self.last = result.loss.item()  # reads the loss
        return StepResult(*result)


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [(ReadsStep, "# reads the step", ("step_tensor",)), (ReadsLoss, "# reads the loss", ())],
)
def test_what_the_host_reads_in_a_step_is_rejected_with_its_line(tmp_path, kind, line, words):
    with raises(TrainwrightError, *words) as rejected:
        train(tmp_path, "graph", kind)
    assert str(rejected.value).startswith(f"{__file__}:{_line('  ' + line)}: ")


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, labels=None):
        self.calls += 1
        return super().forward(x, labels)


class Keeping(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x, labels=None):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().forward(x, labels)


class Drawing(Net):
    def forward(self, x, labels=None):
        return super().forward(x * random.random(), labels)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Counting, ("Counting.calls",)),
        (Keeping, ("Keeping.mean", "tensor")),
        (Drawing, ()),
    ],
)
def test_what_a_replay_would_not_repeat_is_rejected_by_name(tmp_path, model, words):
    class Own(Base):
        @classmethod
        def build_model(cls, build):
            return model()

    with raises(TrainwrightError, *words):
        train(tmp_path, "graph", Own)


@pytest.mark.parametrize("schedule", [{"type": "constant"}, None], ids=["constant", "none"])
def test_a_step_that_writes_a_rate_in_place_is_rejected(tmp_path, schedule):
    """A replay would repeat the write, but neither the schedule nor the log would see it."""

    class Own(Base):
        def train_step(self, batch):
            result = super().train_step(batch)
            for group in self.optimizers["main"].param_groups:
                group["lr"] *= 0.5
            return result

    with raises(TrainwrightError, "param_groups[0]['lr']"):
        train(tmp_path, "graph", Own, trainer={"schedule": schedule})


def test_metrics_that_are_no_tensors_are_warned_of(tmp_path, caplog):
    class Plain(Base):
        def forward(self, **batch):
            return self.model(**batch)["loss"], {"host": 1.5}

    train(tmp_path, "graph", Plain)
    assert "the metrics host are not tensors" in caplog.text


def test_fp16_is_rejected(tmp_path):
    config = config_of(tmp_path, "graph", runtime={"mode": "graph", "precision": "fp16", "device": "cpu"})
    with raises(ConfigError, "runtime.mode", "graph", "fp16"):
        build_trainer(config, Base)


def test_a_script_may_hold_the_trainer_in_a_global(tmp_path, monkeypatch):
    trainer = build_trainer(config_of(tmp_path / "graph", "graph"), Base)
    monkeypatch.setitem(globals(), "held", trainer)
    trainer.train()
    assert trainer.is_finished


def test_ranks_that_exchange_their_shapes_are_another_combination():
    """A third rank, whose own shape stays, must not replay while those two capture."""
    short, long = ("input_ids", (4, 128)), ("input_ids", (4, 256))
    for salt in range(200):
        before = number_of(short, salt=salt) + number_of(long, salt=salt + 1)
        assert before != number_of(long, salt=salt) + number_of(short, salt=salt + 1)
    assert number_of(short, salt=1) == number_of(short, salt=1) < 2**48
