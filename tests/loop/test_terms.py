"""Several `update.backward(term)` in one update: what adds up, what is averaged, and what is rejected."""

import json
from pathlib import Path

import pytest
import torch
from tests.loop.test_update import make_updater, weight
from tests.messages import raises
from torch import nn

from trainwright import Mean, RunConfig, Trainer, build_trainer
from trainwright.errors import TrainwrightError
from trainwright.loop.update import LossScale

CONFIG = {
    "data": {"train": {"type": "parts.py:Points"}, "shuffle": False},
    "model": {"type": "parts.py:Net", "dropout": 0.0},
    "trainer": {"max_steps": 3, "global_batch_size": 8, "optimizer": {"type": "sgd", "lr": 0.1}},
    "log": {"every_steps": 1},
    "writers": ["json"],
}


def train(project, folder, trainer, micro_batch_size, *overrides):
    """Returns the losses of a run and its last weights."""
    name = f"{trainer.__name__}-{micro_batch_size}"
    given = [f"name={name}", f"output_dir={folder}", f"trainer.micro_batch_size={micro_batch_size}", *overrides]
    config = RunConfig.from_dict(CONFIG, project_dir=project, overrides=given)
    built = build_trainer(config, trainer)
    built.train()
    lines = [json.loads(line) for line in (folder / name / "metrics.json").read_text().splitlines()]
    return [line["loss"] for line in lines], [each.detach().clone() for each in built.model.parameters()]


def penalty(model):
    return 0.1 * sum(each.square().sum() for each in model.parameters())


class Summed(Trainer):
    """The reference: one backward of the sum."""

    def train_step(self, batch):
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            update.backward(self.model(**micro_batch)["loss"] + penalty(self.model))
        return update.apply()


class TwoTerms(Trainer):
    def train_step(self, batch):
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            update.backward(self.run_forward(micro_batch))
            update.backward(penalty(self.model))
        return update.apply()


class TwoPasses(Trainer):
    def train_step(self, batch):
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            update.backward(self.run_forward(micro_batch))
        for _ in self.micro_batches(batch):
            update.backward(penalty(self.model))
        return update.apply()


class TwoIterators(Trainer):
    def train_step(self, batch):
        update = self.begin_update()
        other = {name: value.clone() for name, value in batch.items()}
        for first, second in zip(self.micro_batches(batch), self.micro_batches(other), strict=True):
            assert len(first["x"]) == len(second["x"])
            update.backward(self.run_forward(first))
            update.backward(penalty(self.model))
        return update.apply()


class PenaltyAfter(Trainer):
    def train_step(self, batch):
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            update.backward(self.run_forward(micro_batch))
        update.backward(penalty(self.model))
        return update.apply()


class PenaltyBefore(Trainer):
    def train_step(self, batch):
        update = self.begin_update()
        update.backward(penalty(self.model), None)
        for micro_batch in self.micro_batches(batch):
            update.backward((self.model(**micro_batch)["loss"], {"seen": 1.0}))
        return update.apply()


class WholeBatch(Trainer):
    def train_step(self, batch):
        update = self.begin_update()
        update.backward(self.model(**batch)["loss"])
        update.backward(penalty(self.model))
        return update.apply()


class OwnSplit(Trainer):
    def train_step(self, batch):
        update = self.begin_update()
        for rows in (slice(0, 2), slice(2, 8)):
            part = {name: value[rows] for name, value in batch.items()}
            update.backward(self.model(**part)["loss"] + penalty(self.model), len(part["x"]))
        return update.apply()


class OwnMicroBatches(Trainer):
    def forward(self, **batch):
        return self.model(**batch)["loss"] + penalty(self.model)

    def micro_batches(self, batch):
        for rows in (slice(0, 4), slice(4, 8)):
            yield {name: value[rows] for name, value in batch.items()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, project):
    return train(project, tmp_path_factory.mktemp("reference"), Summed, 8)


@pytest.fixture(scope="module")
def project():
    return Path(__file__).parents[1] / "project"


@pytest.mark.parametrize("micro_batch_size", [8, 4, 2])
@pytest.mark.parametrize(
    "trainer",
    [
        Summed,
        TwoTerms,
        TwoPasses,
        TwoIterators,
        PenaltyAfter,
        PenaltyBefore,
        WholeBatch,
        OwnSplit,
        OwnMicroBatches,
    ],
)
def test_terms_add_up_for_any_accumulation(trainer, micro_batch_size, reference, project, tmp_path):
    losses, weights = train(project, tmp_path, trainer, micro_batch_size)
    assert losses == pytest.approx(reference[0], rel=1e-5)
    for own, expected in zip(weights, reference[1], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_two_terms_in_graph_mode(reference, project, tmp_path):
    losses, _ = train(project, tmp_path, TwoTerms, 4, "runtime.mode=graph")
    assert losses == pytest.approx(reference[0], rel=1e-5)


def loss_of(w, x):
    return (x @ w).square()


@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_the_gradient_is_that_of_two_calls_of_torch(scale):
    w, x = weight(), torch.randn(8, 3)
    loss_scale = None if scale is None else LossScale(torch.device("cpu"), initial=scale)
    update = make_updater([w], lr=0.0, loss_scale=loss_scale).begin(8)
    update.backward(loss_of(w, x).mean())
    update.backward(w.abs().sum())
    result = update.apply()
    (expected,) = torch.autograd.grad(loss_of(w, x).mean() + w.abs().sum(), w)
    torch.testing.assert_close(w.grad, expected)
    torch.testing.assert_close(result.loss, (loss_of(w, x).mean() + w.abs().sum()).detach())
    torch.testing.assert_close(result.grad_norm, expected.norm())


@pytest.mark.parametrize("second", ["plain", "mean", "tensor count"])
def test_a_term_that_follows_a_mean_has_its_count(second):
    w, parts = weight(), [torch.randn(3, 3), torch.randn(5, 3)]
    update = make_updater([w], lr=0.0).begin(8)
    for update.micro_batch, x in enumerate(parts):
        update.backward(Mean(loss_of(w, x).sum(), len(x)))
        extra = w.abs().sum() * x.mean()
        counts = {"mean": len(x), "tensor count": torch.tensor(len(x))}
        update.backward(extra if second == "plain" else Mean(extra * len(x), counts[second]))
    result = update.apply()
    x = torch.cat(parts)
    expected = loss_of(w, x).mean() + sum(len(each) * each.mean() for each in parts) / 8 * w.abs().sum()
    torch.testing.assert_close(result.loss, expected.detach())
    torch.testing.assert_close(w.grad, torch.autograd.grad(expected, w)[0])
    assert float(update.weight) == 8


@pytest.mark.parametrize("counts", [(3, 4), (3, torch.tensor(4)), (torch.tensor(3.0), 4)])
def test_means_with_different_counts_in_one_micro_batch_are_rejected(counts):
    w = weight()
    update = make_updater([w]).begin(8)
    update.backward(Mean(w.sum(), counts[0]))
    with raises(TrainwrightError):
        update.backward(Mean(w.sum(), counts[1]))


def test_a_mean_after_a_plain_loss_is_rejected_unless_it_counts_samples():
    w = weight()
    update = make_updater([w]).begin(8)
    update.backward(w.sum())
    update.backward(Mean(w.sum(), 8))
    with raises(TrainwrightError):
        update.backward(Mean(w.sum(), 20))


def test_a_term_of_the_whole_batch_before_counted_micro_batches_is_rejected():
    w = weight()
    update = make_updater([w]).begin(8)
    update.backward(w.sum())
    for update.micro_batch in range(2):
        update.backward(Mean(w.sum(), 5))
    with raises(TrainwrightError):
        update.apply()


def test_a_rank_without_samples_adds_no_term():
    w = nn.Parameter(torch.ones(3))
    update = make_updater([w]).begin(0)
    update.backward(w.sum())
    update.backward(w.sum())
    assert w.grad is None
