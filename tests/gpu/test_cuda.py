"""What only a GPU can show: steps without hidden waits, copies ahead of the step, resume to the bit."""

import json
from pathlib import Path

import pytest
import torch

from trainwright import Hook, RunConfig, Trainer, build_trainer, load_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides):
    exact = "runtime={device: cuda, precision: fp32, tf32: false}"
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", exact, *overrides])


class NoWaits(Hook):
    """Makes torch raise on anything in a step for which the host waits, after the allocator has warmed up."""

    def before_step(self):
        torch.cuda.set_sync_debug_mode("error" if self.trainer.step >= 3 else 0)

    def after_step(self):
        torch.cuda.set_sync_debug_mode(0)

    close = after_step


class Watched(Trainer):
    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), NoWaits()]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_step_waits_for_the_device(tmp_path, precision, workers):
    config = load(
        tmp_path,
        *("trainer.max_steps=100", "log.every_steps=50", f"runtime.precision={precision}"),
        *(f"data.num_workers={workers}", "hooks=[{type: ema}]", "evaluation.every_steps=50"),
    )
    trainer = build_trainer(config, Watched)
    trainer.train()
    assert trainer.step == 100
    lines = [json.loads(line) for line in (tmp_path / "small" / "metrics.json").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] + 0.1


def test_batches_arrive_on_the_device_and_equal_the_hosts(tmp_path):
    trainer = build_trainer(load(tmp_path, "data.train.noise=0.0"))
    on_host = trainer.train_data.batches(lambda batches: batches)
    expected = [next(on_host)["x"].clone() for _ in range(5)]
    trainer.train_data.samples_seen = trainer.train_data.order_position = 0
    on_device = trainer.train_data.batches(trainer.backend.to_device)
    for number, batch in zip(range(5), expected, strict=True):
        arrived = next(on_device)["x"]
        assert arrived.is_cuda
        assert torch.equal(arrived.cpu(), batch)
        assert trainer.train_data.samples_seen == (number + 1) * 8  # what was returned, not what was copied ahead


def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path):
    dropout = ("model.dropout=0.3", "runtime.precision=bf16")
    build_trainer(load(tmp_path, "name=whole", *dropout)).train()

    class Leaving(Hook):
        def after_step(self):
            if self.trainer.step == 6:
                self.trainer.interrupt("test")

    class Interrupted(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Leaving()]

    build_trainer(load(tmp_path, "name=parts", *dropout), Interrupted).train()
    build_trainer(load(tmp_path, "name=parts", *dropout)).train()
    whole, parts = (load_checkpoint(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
