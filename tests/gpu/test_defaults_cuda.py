"""The defaults of a GPU: bf16, TF32 for what stays in fp32, and the compiler's settings."""

import warnings
from pathlib import Path

import pytest
import torch

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.backends import pick_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides):
    settings = (f"output_dir={tmp_path}", "trainer.max_steps=4", "data.eval={}", "evaluation={}", *overrides)
    return RunConfig.load(PROJECT / "run.yaml", [*settings])


class Noting(Trainer):
    """Notes the dtype of a product, and how far an fp32 product is from the exact one."""

    def forward(self, **batch):
        self.dtype = torch.mm(torch.ones(16, 16, device=self.device), torch.ones(16, 16, device=self.device)).dtype
        with torch.autocast("cuda", enabled=False):
            factor = torch.full((512, 512), 1 + 2**-12, device=self.device)  # TF32 rounds it to 1
            exact = factor.double() @ factor.double()
            self.error = ((factor @ factor).double() / exact - 1).abs().max().item()
        return super().forward(**batch)


def test_a_run_on_a_gpu_computes_in_bf16_and_resumes_on_a_cpu_in_bf16(tmp_path):
    trainer = build_trainer(load(tmp_path, "runtime={}"), Noting)
    trainer.train()
    assert trainer.config.runtime.precision == "bf16"
    assert trainer.dtype == torch.bfloat16
    resumed = build_trainer(load(tmp_path, "runtime={device: cpu}", "trainer.max_steps=6"))
    assert (resumed.step, resumed.config.runtime.precision) == (4, "bf16")


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_holds_for_the_run_and_what_was_set_before_comes_back_without_a_warning(tmp_path, tf32):
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    setting = f"runtime={{device: cuda, precision: fp32, tf32: {str(tf32).lower()}}}"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Please use the new API")
        trainer = build_trainer(load(tmp_path, setting), Noting)
        trainer.train()
    print("largest relative error", trainer.error)
    assert (trainer.error > 1e-5) == tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize("mode", ["compile", "graph"])
@pytest.mark.parametrize(
    "setting", ["compile_mode: max-autotune-no-cudagraphs", "compile_options: {max_autotune_pointwise: true}"]
)
def test_the_compiler_s_settings_give_the_losses_of_eager_mode(tmp_path, mode, setting):
    torch._dynamo.reset()
    exact, same = (
        "device: cuda, precision: fp32, tf32: false",
        "model.dropout=0",
    )  # compiled dropout draws other numbers
    eager = build_trainer(load(tmp_path, same, "name=eager", f"runtime={{{exact}}}"))
    eager.train()
    compiled = build_trainer(load(tmp_path, same, f"name={mode}", f"runtime={{{exact}, mode: {mode}, {setting}}}"))
    compiled.train()
    for one, other in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_this_gpu_chooses_by_its_capability():
    backend = pick_backend("cuda")
    assert (backend.choose_precision() == "bf16") == (torch.cuda.get_device_capability() >= (8, 0))
