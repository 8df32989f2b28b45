"""Training without a dataset: `next_train_inputs` makes the batches."""

import json
import logging

import numpy as np
import pytest
import torch
from tests.checkpoint.test_resume import same, weights
from tests.messages import mentions, raises
from tests.project.parts import Points
from torch import nn

from trainwright import Hook, Mean, RunConfig, Task, Trainer, build_trainer
from trainwright.build.data import Loaders
from trainwright.config import resolve_batch
from trainwright.data.collators import Stack
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import ALONE, Mesh


class Policy(nn.Module):
    """Scores two actions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x).log_softmax(-1)


class Reinforce(Trainer):
    """Plays an episode of 3, 4 or 5 moves for each update; the state of the game goes on from episode to episode."""

    @classmethod
    def build_model(cls, build):
        return Policy()

    def post_init(self):
        self.place = torch.zeros(4)

    def play(self):
        places = []
        for _ in range(3 + self.step % 3):
            self.place = 0.9 * self.place + torch.randn(4)
            places.append(self.place)
        return torch.stack(places)

    def next_train_inputs(self, iterator):
        places = self.play()
        return {"places": places, "rewards": places.sum(1)}

    def forward(self, places, rewards):
        return -(self.model(places)[:, 0] * rewards).mean()

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class WithGraph(Reinforce):
    """Computes the scores while it plays, as a policy does, and keeps their graph."""

    def next_train_inputs(self, iterator):
        places = self.play()
        return {"scores": self.model(places)[:, 0], "rewards": places.sum(1)}

    def forward(self, scores, rewards):
        return -(scores * rewards).mean()


def config_of(folder, *overrides, data=None):
    settings = {
        "name": folder.name,
        "output_dir": str(folder.parent),
        "trainer": {"max_steps": 6, "optimizer": {"type": "adamw", "lr": 0.01}},
        "log": {"every_steps": 1},
        "checkpoint": {"every_steps": None},
        "writers": ["json"],
        "runtime": {"device": "cpu"},
    }
    return RunConfig.from_dict({**settings, **({} if data is None else {"data": data})}, overrides)


def train(folder, kind, *overrides, **rest):
    trainer = build_trainer(config_of(folder, *overrides, **rest), kind)
    trainer.train()
    return trainer


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("data", [None, {"train": None}])
def test_it_trains_as_the_loop_that_one_would_write(tmp_path, data):
    trainer = train(tmp_path / "run", Reinforce, "trainer.optimizer={type: sgd, lr: 0.01}", data=data)

    class Written(Reinforce):
        def train_step(self, batch):
            loss = self.forward(**batch)
            gradients = torch.autograd.grad(loss, list(self.model.parameters()))
            with torch.no_grad():
                for each, gradient in zip(self.model.parameters(), gradients, strict=True):
                    each -= 0.01 * gradient
            return loss.detach(), {}, torch.tensor(0.0), 0.01

    written = train(tmp_path / "written", Written, "trainer.optimizer={type: sgd, lr: 0.01}")
    for name, value in weights(written).items():
        torch.testing.assert_close(weights(trainer)[name], value, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", [Reinforce, WithGraph])
def test_it_resumes_exactly(tmp_path, kind):
    whole = train(tmp_path / "whole", kind)
    train(tmp_path / "halves", kind, "trainer.max_steps=2")
    assert same(weights(train(tmp_path / "halves", kind)), weights(whole))
    assert [line["loss"] for line in lines(tmp_path / "halves")] == [line["loss"] for line in lines(tmp_path / "whole")]


def test_a_graph_is_kept(tmp_path):
    assert same(weights(train(tmp_path / "graph", WithGraph)), weights(train(tmp_path / "plain", Reinforce)))


def test_samples_are_counted_and_there_are_no_epochs(tmp_path):
    hooks = "hooks=[{type: count_progress}]"
    trainer = train(tmp_path / "run", Reinforce, hooks, "trainer.max_steps=4")
    assert trainer.train_data.samples_seen == 3 + 4 + 5 + 3
    assert trainer.epoch == 0
    assert [line["samples_seen"] for line in lines(tmp_path / "run")] == [3, 7, 12, 15]
    for line in lines(tmp_path / "run"):
        assert line["samples_per_second"] > 0
    resumed = build_trainer(config_of(tmp_path / "run", hooks, "trainer.max_steps=5"), Reinforce)
    assert resumed.train_data.samples_seen == 15


def test_checkpoints_may_be_due_by_samples(tmp_path):
    trainer = train(tmp_path / "run", Reinforce, "checkpoint={every_samples: 7, every_steps: null, keep_last: 9}")
    assert trainer.context.store.steps() == [2, 4, 6]  # 3, 7, 12, 15, 19, 24 samples


@pytest.mark.parametrize("setting", ["micro_batch_size=2", "gradient_accumulation_steps=2"])
def test_accumulation_splits_the_batches(tmp_path, setting):
    forwards = []

    class Noting(Reinforce):
        def forward(self, places, rewards):
            forwards.append(len(places))
            return super().forward(places, rewards)

    trainer = train(tmp_path / "split", Noting, f"trainer.{setting}")
    whole = train(tmp_path / "whole", Reinforce)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(trainer)[name], value)
    expected = [[1, 2], [2, 2], [1, 2, 2]] if "micro" in setting else [[1, 2], [2, 2], [2, 3]]
    assert forwards == [number for sizes in expected * 2 for number in sizes]


def test_a_graph_that_would_be_split_is_rejected_by_name(tmp_path):
    with raises(DataError, "scores", "trainer.micro_batch_size", "2 micro-batches"):
        train(tmp_path / "run", WithGraph, "trainer.micro_batch_size=2")


def test_a_batch_without_rows_is_one_sample(tmp_path):
    class Listed(Reinforce):
        """As in many scripts: lists of single scores, of the episode that has just ended."""

        def next_train_inputs(self, iterator):
            places = self.play()
            return {
                "scores": [self.model(place)[0] for place in places],
                "rewards": [float(each.sum()) for each in places],
            }

        def forward(self, scores, rewards):
            return -(torch.stack(scores) * torch.tensor(rewards)).mean()

    listed = train(tmp_path / "listed", Listed)
    assert listed.train_data.samples_seen == 6
    for name, value in weights(train(tmp_path / "plain", Reinforce)).items():
        torch.testing.assert_close(weights(listed)[name], value, rtol=1e-4, atol=1e-5)


def test_arrays_are_counted_by_their_rows(tmp_path):
    class Arrays(Reinforce):
        def next_train_inputs(self, iterator):
            return {"places": self.play().numpy()}

        def forward(self, places):
            return self.model(torch.from_numpy(places)).mean()

    assert train(tmp_path / "run", Arrays, "trainer.max_steps=3").train_data.samples_seen == 12


def test_a_fixed_global_batch_size_is_checked(tmp_path):
    with raises(DataError, "trainer.global_batch_size", 4, 3, "null"):
        train(tmp_path / "run", Reinforce, "trainer.global_batch_size=4")

    class Fixed(Reinforce):
        def play(self):
            return torch.randn(self.config.trainer.global_batch_size, 4)

    trainer = train(tmp_path / "fixed", Fixed, "trainer.global_batch_size=4", "trainer.micro_batch_size=2")
    assert trainer.num_micro_batches == 2
    assert trainer.train_data.samples_seen == 24


def test_an_empty_batch_is_rejected(tmp_path):
    class Empty(Reinforce):
        def play(self):
            return torch.zeros(0, 4)

    with raises(DataError, "without samples"):
        train(tmp_path / "run", Empty)


def test_the_iterator_has_nothing(tmp_path):
    class Fetching(Reinforce):
        def next_train_inputs(self, iterator):
            return next(iterator)

    with raises(DataError, "data.train", "next_train_inputs", "next(iterator)"):
        train(tmp_path / "run", Fetching)


def test_the_run_ends_where_next_train_inputs_does(tmp_path):
    class Ends(Reinforce):
        def next_train_inputs(self, iterator):
            if self.step == 3:
                raise StopIteration
            return super().next_train_inputs(iterator)

    for _ in range(2):
        trainer = train(tmp_path / "run", Ends)
        assert trainer.step == 3
        assert trainer.is_finished


def test_an_evaluation_set_is_evaluated(tmp_path):
    class Evaluated(Reinforce):
        @classmethod
        def build_eval_data(cls, build):
            return {"valid": Points(10)}

        def eval_step(self, batch):
            return {"score": self.model(batch["x"])[:, 0]}

    trainer = train(tmp_path / "run", Evaluated)
    assert trainer.eval_logs.keys() == {"valid/score"}


def test_graph_mode_works(tmp_path):
    graph = train(tmp_path / "graph", Reinforce, "runtime.mode=graph")
    assert same(weights(graph), weights(train(tmp_path / "eager", Reinforce)))


def test_compiled_code_gets_a_graph_and_a_captured_step_rejects_it(tmp_path):
    compiled = train(tmp_path / "compile", WithGraph, "runtime.mode=compile", "runtime.compile_backend=aot_eager")
    for name, value in weights(train(tmp_path / "eager", WithGraph)).items():
        torch.testing.assert_close(weights(compiled)[name], value)
    with raises(TrainwrightError, "runtime.mode graph", "scores"):
        train(tmp_path / "graph", WithGraph, "runtime.mode=graph")


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["trainer.max_epochs=2"], "trainer.max_epochs"),
        (["trainer.max_samples=20"], "trainer.max_samples"),
        (["trainer.max_tokens=20"], "trainer.max_tokens"),
        (["trainer.max_steps=null"], "trainer.max_steps"),
        (["data.split=[9, 1]"], "data.split"),
        (["data.group_by_length=true"], "data.group_by_length"),
        (["trainer.micro_batch_size=auto"], "trainer.micro_batch_size"),
        (["anomalies.non_finite=rollback"], "anomalies.non_finite"),
        (["anomalies.spike=rollback"], "anomalies.spike"),
    ],
)
def test_settings_that_need_a_dataset_are_rejected_by_name(tmp_path, overrides, setting):
    with raises(ConfigError, setting):
        build_trainer(config_of(tmp_path / "run", *overrides), Reinforce)


def test_a_pipeline_needs_a_number_of_micro_batches(tmp_path):
    config = config_of(tmp_path / "run", "trainer.micro_batch_size=2")
    ranks = Ranks(0, 2, mesh=Mesh({**ALONE, "pipeline": 2}))
    loaders = Loaders(config, resolve_batch(config, 1, makes_batches=True), Stack(), ranks, tmp_path)
    with raises(ConfigError, "trainer.micro_batch_size", "gradient_accumulation_steps"):
        loaders.for_training(None, makes_batches=True)


def test_a_trainer_that_does_not_make_batches_needs_a_dataset(tmp_path):
    class Plain(Trainer):
        @classmethod
        def build_model(cls, build):
            return Policy()

    with raises(ConfigError, "data.train is required", "next_train_inputs"):
        build_trainer(config_of(tmp_path / "run"), Plain)


def test_a_dataset_of_a_task_or_trainer_is_still_used(tmp_path):
    class Built(Reinforce):
        @classmethod
        def build_train_data(cls, build):
            return Points(40)

        def next_train_inputs(self, iterator):
            batch = next(iterator)
            return {"places": batch["x"], "rewards": batch["labels"].float()}

    trainer = train(tmp_path / "run", Built)
    assert trainer.config.trainer.global_batch_size == 32
    assert trainer.train_data.samples_seen == 6 * 32

    class WithTask(Reinforce):
        @classmethod
        def build_task(cls, build):
            class Nothing(Task):
                def build_dataset(self, split):
                    return None

            return Nothing()

    assert train(tmp_path / "task", WithTask).train_data.samples_seen == 24


def test_a_run_does_not_change_between_a_dataset_and_none(tmp_path):
    train(tmp_path / "made", Reinforce, "trainer.max_steps=1")

    class Built(Reinforce):
        @classmethod
        def build_train_data(cls, build):
            return Points(40)

    with raises(DataError, "data.train", "without one"):
        build_trainer(config_of(tmp_path / "made"), Built, accept_changes=True)


def test_the_log_says_where_batches_come_from(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="trainwright"):
        build_trainer(config_of(tmp_path / "run"), Reinforce)
    assert mentions(caplog.text, "batches made by next_train_inputs")
    assert mentions(caplog.text, "6 steps", "as many samples as next_train_inputs returns")


# with a dataset


def test_a_batch_made_of_several_counts_by_its_rows(tmp_path):
    seen = []

    class Joined(Trainer):
        @classmethod
        def build_model(cls, build):
            return Policy()

        @classmethod
        def build_train_data(cls, build):
            return Points(40)

        def next_train_inputs(self, iterator):
            one, two = next(iterator), next(iterator)
            if self.step == 0:
                return {name: torch.cat([one[name], two[name]]) for name in one}
            return {"x": one["x"][:3], "labels": two["labels"][:3]}  # fewer

        def forward(self, x, labels):
            seen.append((len(x), self.batch.num_samples))
            return Mean(nn.functional.nll_loss(self.model(x), labels, reduction="sum"), len(x))

    trainer = train(tmp_path / "run", Joined, "trainer.global_batch_size=4", "trainer.max_steps=2")
    assert seen == [(8, 8), (3, 3)]
    assert trainer.train_data.samples_seen == 16


def test_a_step_that_fetches_nothing_counts_the_batch_that_it_makes(tmp_path):
    rates = []

    class Rates(Hook):
        def after_step(self):
            rates.append(self.trainer.batch.num_samples)

    class Rare(Reinforce):
        @classmethod
        def build_train_data(cls, build):
            return Points(40)

        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Rates()]

        def next_train_inputs(self, iterator):
            if self.step == 0:
                self.fetched = next(iterator)
            return super().next_train_inputs(iterator)

    trainer = train(tmp_path / "run", Rare, "trainer.global_batch_size=4")
    assert rates == [3, 4, 5, 3, 4, 5]
    assert trainer.train_data.samples_seen == 4
    assert all(line["samples_per_second"] > 0 for line in lines(tmp_path / "run"))
    assert np.isfinite([line["loss"] for line in lines(tmp_path / "run")]).all()
