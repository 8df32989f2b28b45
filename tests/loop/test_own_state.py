"""The state of a trainer and a task: saved, restored, and not disturbed by evaluations."""

import logging
import random

import numpy as np
import pytest
import torch
from tests.checkpoint.test_resume import same, weights
from tests.faults.runs import config_of
from tests.loop.small_runs import PLAIN, run
from tests.messages import mentions, raises

from trainwright import Hook, Task, Trainer, build_trainer, load_checkpoint, run_experiment
from trainwright.build.run import build_evaluator
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError, ConfigError

CONSTANT = "trainer.schedule=null"


class Carried(Trainer):
    """Carries a hidden state over micro-batches, steps and, if nothing restored it, evaluations."""

    def post_init(self):
        self.hidden = torch.zeros(4)
        self.rng = np.random.default_rng(0)
        self.loads = []

    def forward(self, x, labels):
        outputs = self.model(x + self.hidden + 0.01 * float(self.rng.normal()), labels)
        self.hidden = (0.5 * self.hidden + x.mean(0)).detach()
        return outputs

    def state_dict(self):
        return {"hidden": self.hidden, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.loads.append(self.step)
        self.hidden = state["hidden"]
        self.rng.bit_generator.state = state["rng"]


class Counting(Task):
    """Counts its forwards, and uses the count."""

    def __init__(self):
        self.count, self.seen = 0, {"arrays": [np.zeros(2)], 3: "three", "pair": (1, 2.5)}

    def forward(self, model, batch):
        self.count += 1
        return model(batch["x"] * (1 + self.count / 100), batch["labels"])

    def state_dict(self):
        return {"count": self.count, "seen": self.seen}

    def load_state_dict(self, state):
        self.count, self.seen = state["count"], state["seen"]


class WithTask(Trainer):
    @classmethod
    def build_task(cls, build):
        return Counting()


def halves(folder, kind, *overrides):
    """A run of six steps, and one that ends after three and continues in another trainer."""
    settings = (CONSTANT, "checkpoint.every_steps=null", *overrides)
    whole = build_trainer(config_of(folder / "whole", *settings), kind)
    whole.train()
    build_trainer(config_of(folder / "halves", *settings, "trainer.max_steps=3"), kind).train()
    second = build_trainer(config_of(folder / "halves", *settings), kind)
    assert second.step == 3
    second.train()
    return whole, second


@pytest.mark.parametrize("overrides", [(), ("trainer.micro_batch_size=2", "evaluation.every_steps=1")])
@pytest.mark.parametrize("kind", [Carried, WithTask])
def test_a_run_with_state_resumes_exactly(tmp_path, kind, overrides):
    whole, second = halves(tmp_path, kind, *overrides)
    assert same(weights(whole), weights(second))


def test_all_kinds_of_values_come_back_as_they_were(tmp_path):
    build_trainer(config_of(tmp_path / "run", "trainer.max_steps=1"), WithTask).train()
    task = build_trainer(config_of(tmp_path / "run", "trainer.max_steps=1"), WithTask).task
    assert task.count > 0
    assert (task.seen[3], task.seen["pair"]) == ("three", (1, 2.5))
    assert isinstance(task.seen["arrays"][0], np.ndarray)


def test_state_is_loaded_after_post_init_and_before_before_train(tmp_path):
    class Ordered(Carried):
        def post_init(self):
            super().post_init()
            self.calls = ["post_init"]

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.calls.append("load_state_dict")

        @classmethod
        def build_hooks(cls, build):
            class Noting(Hook):
                def before_train(self):
                    self.trainer.calls.append("before_train")

            return [*build.hooks(), Noting()]

    config = config_of(tmp_path / "run", "trainer.max_steps=2", "data.eval={}", "evaluation={}")
    build_trainer(config, Ordered).train()
    trainer = build_trainer(config.derive({"trainer.max_steps": 3}), Ordered)
    trainer.train()
    assert trainer.calls == ["post_init", "load_state_dict", "before_train"]


def test_a_fresh_start_has_no_state(tmp_path):
    build_trainer(config_of(tmp_path / "run"), Carried).train()
    trainer = build_trainer(config_of(tmp_path / "run"), Carried, fresh=True)
    assert not trainer.hidden.any()
    assert trainer.loads == []


def test_an_interrupted_run_continues_with_its_state(tmp_path):
    class Leaves(Carried):
        def train_step(self, batch):
            if self.step == 2 and not self.loads:
                self.interrupt("SIGTERM")
            return super().train_step(batch)

    settings = (CONSTANT, "data.eval={}", "evaluation={}", "checkpoint.every_steps=null")
    first = build_trainer(config_of(tmp_path / "run", *settings), Leaves)
    first.train()
    assert first.interrupted
    second = build_trainer(config_of(tmp_path / "run", *settings), Leaves)
    second.train()
    whole = build_trainer(config_of(tmp_path / "whole", *settings), Carried)
    whole.train()
    assert same(weights(second), weights(whole))


@pytest.mark.parametrize("snapshots", [True, False])
def test_a_rollback_restores_the_state(tmp_path, snapshots):
    every = ", snapshot_every_steps: 1" if snapshots else ""
    settings = (*PLAIN, f"anomalies={{non_finite: rollback{every}}}", "checkpoint.every_steps=1", CONSTANT)
    seen = {}

    class Noting(Carried):
        def train_step(self, batch):
            seen.setdefault(self.step, []).append(self.hidden.clone())
            return super().train_step(batch)

    trainer = run(tmp_path / "run", *settings, bad=[24], trainer=Noting)  # the batch of step 4
    first, again = seen[3]
    assert torch.equal(first, again)
    assert trainer.loads == [3]


# evaluations


def test_an_evaluation_leaves_the_state_of_training_as_it_was(tmp_path):
    settings = (CONSTANT, "model.dropout=0.0")
    often = build_trainer(config_of(tmp_path / "often", "evaluation.every_steps=1", *settings), Carried)
    often.train()
    never = build_trainer(config_of(tmp_path / "never", "data.eval={}", "evaluation={}", *settings), Carried)
    never.train()
    assert same(weights(often), weights(never))
    assert torch.equal(often.hidden, never.hidden)


def test_an_evaluation_that_fails_leaves_the_state_as_it_was(tmp_path):
    class Failing(Carried):
        def eval_step(self, batch):
            super().eval_step(batch)
            raise ValueError("no evaluation")

    trainer = build_trainer(config_of(tmp_path / "run", "evaluation.every_steps=2"), Failing)
    with pytest.raises(ValueError, match="no evaluation"):
        trainer.train()
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").read(2, "training")["trainer"]["shared"]
    assert torch.equal(saved["hidden"], trainer.hidden)
    other = build_trainer(
        config_of(tmp_path / "other", "data.eval={}", "evaluation={}", "trainer.max_steps=2"), Carried
    )
    other.train()
    assert torch.equal(trainer.hidden, other.hidden)


def test_each_set_begins_with_the_state_of_training(tmp_path):
    begun = []

    class Noting(Carried):
        def eval_begin(self):
            begun.append((self.eval_name, self.hidden.clone()))
            self.hidden.zero_()  # in place

    sets = "data.eval={a: {type: parts.py:Points, size: 5}, b: {type: parts.py:Points, size: 7}}"
    trainer = build_trainer(config_of(tmp_path / "run", sets, "trainer.max_steps=1"), Noting)
    trainer.train()
    (first, one), (second, other) = begun
    assert (first, second) == ("a", "b")
    assert one.any()
    assert torch.equal(one, other)
    assert torch.equal(trainer.hidden, one)


def test_what_eval_end_keeps_is_not_undone(tmp_path):
    class Best(Trainer):
        best = float("inf")

        def eval_end(self, aggregated):
            logs = super().eval_end(aggregated)
            self.best = min(self.best, logs["loss"])
            return logs

        def state_dict(self):
            return {"best": self.best}

        def load_state_dict(self, state):
            self.best = state["best"]

    trainer = build_trainer(config_of(tmp_path / "run"), Best)
    trainer.train()
    assert trainer.best == min(line["valid/loss"] for line in [trainer.eval_logs])
    assert trainer.best < float("inf")


def test_an_evaluation_of_a_checkpoint_has_its_state(tmp_path):
    trained = build_trainer(config_of(tmp_path / "run"), Carried)
    trained.train()
    evaluator = build_evaluator(config_of(tmp_path / "run"), Carried)
    evaluator.load_weights(trained.step)
    assert torch.equal(evaluator.hidden, trained.hidden)
    assert evaluator.evaluate() == {name: value for name, value in trained.eval_logs.items() if "test/" not in name}


def test_a_model_is_loaded_without_the_state(tmp_path):
    trainer = build_trainer(config_of(tmp_path / "run"), Carried)
    trainer.train()
    assert same(dict(load_checkpoint(tmp_path / "run").state_dict()), weights(trainer))


def test_a_checkpoint_of_weights_has_no_state(tmp_path):
    build_trainer(config_of(tmp_path / "run", "checkpoint.contents=weights"), Carried).train()
    assert "trainer" not in CheckpointStore(tmp_path / "run" / "checkpoints").read(6, "training")


# mistakes


class Saves(Trainer):
    value = None

    def state_dict(self):
        return {"kept": {"value": type(self).value}}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    "value",
    [np.random.default_rng(0), random.Random(0), torch.Generator(), torch.nn.Linear(1, 1), {1, 2}, object()],
    ids=["numpy", "random", "torch", "module", "set", "object"],
)
def test_a_value_that_cannot_be_saved_is_rejected_by_name_before_the_first_step(tmp_path, value):
    class Own(Saves):
        pass

    Own.value = value
    trainer = build_trainer(config_of(tmp_path / "run"), Own)
    with raises(CheckpointError, "Own.state_dict().kept.value", "cannot be saved"):
        trainer.train()
    assert trainer.step == 0


def test_a_state_that_is_not_a_dict_is_rejected(tmp_path):
    class Own(Saves):
        def state_dict(self):
            return [1, 2]

    with raises(CheckpointError, "Own.state_dict()", "list"):
        build_trainer(config_of(tmp_path / "run"), Own).train()


def test_half_of_the_pair_is_rejected_with_its_line(tmp_path):
    class Trains(Trainer):
        def state_dict(self):
            return {}

    class Learns(Task):
        def load_state_dict(self, state):
            pass

    class Hooks(Hook):
        def state_dict(self):
            return {}

    class OtherTask(Trainer):
        @classmethod
        def build_task(cls, build):
            return Learns()

    class OtherHook(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [Hooks()]

    for kind, name in ((Trains, "Trains"), (OtherTask, "Learns"), (OtherHook, "Hooks")):
        with raises(ConfigError, name, "state_dict", "load_state_dict") as caught:
            build_trainer(config_of(tmp_path / "run"), kind)
        assert "test_own_state.py:" in str(caught.value.where)


@pytest.mark.parametrize("name", ["on_save_checkpoint", "state_dic"])
def test_other_names_of_the_methods_are_rejected(tmp_path, name):
    kind = type("Own", (Trainer,), {name: lambda self, checkpoint: None, "__module__": __name__})
    with raises(ConfigError, name, "state_dict"):
        build_trainer(config_of(tmp_path / "run"), kind)


def test_a_state_that_was_not_saved_and_one_that_is_not_wanted_are_logged(tmp_path, caplog):
    build_trainer(config_of(tmp_path / "run", "trainer.max_steps=2")).train()
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer = build_trainer(config_of(tmp_path / "run", "trainer.max_steps=4"), Carried, accept_changes=True)
    assert mentions(caplog.text, "no state of Carried")
    assert trainer.loads == []
    trainer.train()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        build_trainer(config_of(tmp_path / "run"), accept_changes=True)
    assert mentions(caplog.text, "state of the trainer", "no state_dict")


def test_a_run_of_the_public_function_has_state_too(tmp_path):
    config = config_of(tmp_path / "run", "trainer.max_steps=2")
    run_experiment(config, trainer=Carried)
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").read(2, "training")["trainer"]
    assert saved["num_ranks"] == 1
    assert saved["shared"]["hidden"].shape == (4,)
