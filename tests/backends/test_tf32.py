"""`runtime.tf32`: torch's settings of fp32 products during a run, and what they are afterwards."""

import warnings
from pathlib import Path

import pytest
import torch

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.backends import Backend
from trainwright.backends.cuda import CudaBackend
from trainwright.hooks.flops import known_peak

PROJECT = Path(__file__).parents[1] / "project"
MATMUL, CONV, RNN = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
GPU = CudaBackend(torch.device("cuda", 0))


def settings():
    return [each.fp32_precision for each in (MATMUL, CONV, RNN, torch.backends.mkldnn.matmul)]


@pytest.fixture(autouse=True)
def _restored():
    before = settings()
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for each, value in zip((MATMUL, CONV, RNN, torch.backends.mkldnn.matmul), before, strict=True):
        each.fp32_precision = value


@pytest.mark.parametrize(("tf32", "word", "older"), [(True, "tf32", "high"), (False, "ieee", "highest")])
def test_the_settings_hold_inside_and_are_restored(tf32, word, older):
    before = settings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with GPU.float32_products(tf32=tf32):
            assert MATMUL.fp32_precision == word
            assert {each.fp32_precision == "tf32" for each in (MATMUL, CONV, RNN)} == {tf32}
            # Both kinds of torch's settings agree: reading the older ones does not raise.
            assert torch.get_float32_matmul_precision() == older
            assert torch.backends.cudnn.allow_tf32 is MATMUL.allow_tf32 is tf32
    assert settings() == before
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_a_notebook_has_set_comes_back_in_both_ways():
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = False
    with GPU.float32_products(tf32=True):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cudnn.allow_tf32 is False
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision, CONV.fp32_precision = "tf32", "ieee"
    with pytest.raises(RuntimeError):  # torch rejects older reads after newer writes
        torch.get_float32_matmul_precision()
    before = settings()
    with GPU.float32_products(tf32=False):
        assert "tf32" not in settings()[:3]
    assert settings() == before


def test_the_known_peak_follows_the_newer_setting():
    MATMUL.fp32_precision = "tf32"
    assert known_peak("NVIDIA H200", torch.float32)[1] == pytest.approx(494.7e12)


@pytest.mark.parametrize("tf32", [True, False])
def test_a_run_and_its_evaluations_have_the_setting_and_an_error_restores_it_too(tmp_path, monkeypatch, tf32):
    monkeypatch.setattr(Backend, "float32_products", lambda self, tf32: GPU.float32_products(tf32=tf32))
    word, seen = "tf32" if tf32 else "ieee", []

    class Noting(Trainer):
        def forward(self, **batch):
            seen.append(MATMUL.fp32_precision)
            if self.step == 1:
                raise RuntimeError("ends")
            return super().forward(**batch)

    before = settings()
    overrides = [f"output_dir={tmp_path}", f"runtime.tf32={str(tf32).lower()}"]
    trainer = build_trainer(RunConfig.load(PROJECT / "run.yaml", overrides), Noting)
    with trainer.storage:
        trainer.evaluate()
    with pytest.raises(RuntimeError, match="ends"):
        trainer.train()
    assert len(seen) > 2
    assert set(seen) == {word}
    assert settings() == before
