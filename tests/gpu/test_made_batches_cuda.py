"""Batches without a dataset, and state of a trainer, on a GPU."""

import pytest
import torch
from tests.checkpoint.test_resume import same, weights
from tests.loop import test_made_batches as on_cpu
from tests.messages import raises

from trainwright import build_trainer
from trainwright.errors import TrainwrightError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train(folder, kind, *overrides):
    exact = "runtime={device: cuda, precision: fp32, tf32: false}"
    trainer = build_trainer(on_cpu.config_of(folder, exact, *overrides), kind)
    trainer.train()
    return trainer


class OnHost(on_cpu.Reinforce):
    """Makes its batches in main memory; the state is on the GPU, as a hidden state is."""

    def post_init(self):
        super().post_init()
        self.hidden = torch.zeros(4, device=self.device)

    def forward(self, places, rewards):
        assert places.is_cuda
        assert rewards.is_cuda
        self.hidden = 0.5 * self.hidden + places.mean(0)
        return super().forward(places + self.hidden, rewards)

    def state_dict(self):
        return {**super().state_dict(), "hidden": self.hidden}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.hidden = state["hidden"].to(self.device)


class OnDevice(on_cpu.WithGraph):
    """Computes the scores on the GPU while it plays."""

    def play(self):
        return super().play().to(self.device)


@pytest.mark.parametrize("kind", [OnHost, OnDevice])
def test_it_resumes_exactly(tmp_path, kind):
    whole = train(tmp_path / "whole", kind)
    train(tmp_path / "halves", kind, "trainer.max_steps=2")
    assert same(weights(train(tmp_path / "halves", kind)), weights(whole))


@pytest.mark.parametrize("setting", ["trainer.micro_batch_size=2", "runtime.precision=bf16", "runtime.precision=fp16"])
def test_it_trains_with_other_settings(tmp_path, setting):
    trainer = train(tmp_path / "run", OnHost, setting)
    assert all(bool(torch.isfinite(each).all()) for each in trainer.model.parameters())


class Fixed(on_cpu.Reinforce):
    def play(self):
        return torch.randn(4, 4)


@pytest.mark.parametrize("kind", [Fixed, on_cpu.Reinforce])
def test_graph_mode_follows_batches_of_one_size_and_of_several(tmp_path, kind):
    settings = ("trainer.max_steps=12", "trainer.optimizer={type: sgd, lr: 0.01}")
    eager = train(tmp_path / "eager", kind, *settings)
    graph = train(tmp_path / "graph", kind, "runtime.mode=graph", "runtime.compile_backend=aot_eager", *settings)
    for name, value in weights(eager).items():
        torch.testing.assert_close(weights(graph)[name], value, rtol=1e-4, atol=1e-5)


def test_graph_mode_rejects_a_graph_of_the_batch(tmp_path):
    settings = ("runtime.mode=graph", "runtime.compile_backend=aot_eager")
    with raises(TrainwrightError, "runtime.mode graph", "scores", golden=False):
        train(tmp_path / "run", OnDevice, *settings)
