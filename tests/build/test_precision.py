"""`runtime.precision: auto`: what it stands for, where it is recorded, and what a resumed run uses."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.messages import mentions, raises

from trainwright import RunConfig, Trainer, build_trainer, run_experiment
from trainwright.backends import Backend, expected_precision
from trainwright.backends.cuda import CudaBackend
from trainwright.backends.tpu import TpuBackend
from trainwright.build.run import build_evaluator
from trainwright.errors import CheckpointError, ConfigError

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=2", *overrides])


def saved_precision(tmp_path):
    return RunConfig.load(tmp_path / "small" / "config.yaml").runtime.precision


@pytest.fixture
def like_a_gpu(monkeypatch):
    """A CPU that chooses as a GPU does; its autocast works the same."""
    monkeypatch.setattr(Backend, "choose_precision", lambda self: "bf16")


class Noting(Trainer):
    """Notes the dtype in which the model computes."""

    def forward(self, **batch):
        self.computed_in = torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
        return super().forward(**batch)


def test_a_cpu_computes_in_fp32_and_the_run_folder_says_so(tmp_path):
    trainer = build_trainer(load(tmp_path), Noting)
    trainer.train()
    assert load(tmp_path).runtime.precision == "auto"
    assert trainer.config.runtime.precision == saved_precision(tmp_path) == "fp32"
    assert trainer.computed_in == torch.float32


def test_where_the_device_chooses_bf16_the_run_computes_in_it(tmp_path, like_a_gpu):
    trainer = build_trainer(load(tmp_path), Noting)
    trainer.train()
    assert trainer.config.runtime.precision == saved_precision(tmp_path) == "bf16"
    assert trainer.computed_in == torch.bfloat16
    assert all(each.dtype == torch.float32 for each in trainer.model.parameters())


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float64, "fp32"), (torch.float16, "fp32"), (torch.bfloat16, "bf16"), (torch.float32, "bf16")],
)
def test_weights_in_fp64_or_fp16_are_used_as_they_are(tmp_path, like_a_gpu, dtype, precision):
    class Converted(Trainer):
        @classmethod
        def build_model(cls, build):
            return super().build_model(build).to(dtype)

    assert build_trainer(load(tmp_path), Converted).config.runtime.precision == precision


def test_the_same_command_resumes_on_another_device_in_the_precision_that_the_run_began_with(tmp_path, monkeypatch):
    build_trainer(load(tmp_path)).train()
    monkeypatch.setattr(Backend, "choose_precision", lambda self: "bf16")
    resumed = build_trainer(load(tmp_path, "trainer.max_steps=3"), Noting)
    assert (resumed.step, resumed.config.runtime.precision) == (2, "fp32")
    resumed.train()
    assert resumed.computed_in == torch.float32
    assert build_evaluator(load(tmp_path)).config.runtime.precision == "fp32"
    assert build_trainer(load(tmp_path), fresh=True).config.runtime.precision == "bf16"


def test_a_run_in_bf16_resumes_on_a_cpu_in_bf16(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(Backend, "choose_precision", lambda self: "bf16")
        build_trainer(load(tmp_path)).train()
    with caplog.at_level(logging.INFO):
        resumed = build_trainer(load(tmp_path, "trainer.max_steps=3"), Noting)
    assert mentions(caplog.text, "runtime.precision: auto: bf16")
    resumed.train()
    assert resumed.computed_in == torch.bfloat16


def test_a_device_without_the_precision_of_the_run_is_rejected_with_both_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(Backend, "describe", lambda self: "cuda:0 (H200)")
    build_trainer(load(tmp_path, "runtime.precision=bf16")).train()
    monkeypatch.setattr(Backend, "describe", lambda self: "cuda:0 (T4)")
    monkeypatch.setattr(Backend, "supports_precision", lambda self, precision: precision != "bf16")
    with raises(ConfigError, "runtime.precision", "bf16", "H200", "T4", "--accept-changes"):
        build_trainer(load(tmp_path, "trainer.max_steps=3"))
    with raises(CheckpointError, "runtime.precision", "fp32"):
        build_trainer(load(tmp_path, "trainer.max_steps=3", "runtime.precision=fp32"))
    accepted = build_trainer(load(tmp_path, "trainer.max_steps=3", "runtime.precision=fp32"), accept_changes=True)
    assert accepted.config.runtime.precision == "fp32"


def test_a_run_without_a_checkpoint_chooses_again(tmp_path, monkeypatch):
    build_trainer(load(tmp_path, "checkpoint.every_steps=null"))
    monkeypatch.setattr(Backend, "choose_precision", lambda self: "bf16")
    assert build_trainer(load(tmp_path)).config.runtime.precision == "bf16"


def test_a_built_trainer_is_accepted_with_the_config_that_it_was_built_from(tmp_path):
    config = load(tmp_path)
    _, logs = run_experiment(config, trainer=build_trainer(config))
    assert "valid/loss" in logs
    with raises(ConfigError, "trainer", golden=False):
        run_experiment(load(tmp_path, "runtime.precision=bf16"), trainer=build_trainer(load(tmp_path)))


@pytest.mark.parametrize(("capability", "precision"), [((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_a_gpu_chooses_by_its_compute_capability(monkeypatch, capability, precision):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    backend = CudaBackend(torch.device("cuda", 0))
    assert backend.choose_precision() == precision
    assert backend.supports_precision("bf16") == (precision == "bf16")
    assert backend.supports_precision("fp16")


def test_a_tpu_chooses_bf16_and_has_neither_fp16_nor_fp8():
    backend = TpuBackend(torch.device("cpu"))
    assert backend.choose_precision() == "bf16"
    assert not backend.supports_precision("fp16")
    assert not backend.supports_precision("fp8")


def test_a_plan_for_an_absent_gpu_expects_bf16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (expected_precision("cpu"), expected_precision("auto"), expected_precision("cuda")) == (
        *("fp32", "fp32"),
        "bf16",
    )
