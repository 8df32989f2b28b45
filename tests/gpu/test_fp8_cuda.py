"""fp8 on a GPU: the errors of layers, the modes, exact resuming, and no waits."""

import pytest
import torch
from tests.build.test_fp8_runs import EVERYWHERE, load, losses, train
from tests.checkpoint.test_resume import same, weights
from tests.gpu.test_no_waits_cuda import load as load_watched
from tests.gpu.test_no_waits_cuda import watched, write_rows
from tests.models.layers.test_fp8_linear import RECIPES, error_of
from torch import nn

from trainwright.backends import pick_backend
from trainwright.hooks.flops import FP8, measure_matrix_rate
from trainwright.models.fp8 import use_fp8
from trainwright.models.layers.fp8_linear import linears

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or pick_backend("cuda").missing_fp8("cuda") is not None, reason="needs a GPU with fp8"
)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode(0)
    torch._dynamo.reset()


class Projections(nn.Module):
    """Three layers that read the output of a norm, and one that reads theirs."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(512)
        self.layers = nn.ModuleList([nn.Linear(512, 512), nn.Linear(512, 256, bias=False), nn.Linear(512, 256)])
        self.last = nn.Linear(1024, 512)
        self.to("cuda", dtype)

    def forward(self, value):
        return self.last(torch.cat(linears(self.norm(value), *self.layers), dim=-1))


def outcome(model, num_rows, *, autocast=True, compiled=False):
    value = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    gradient = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(2)).cuda()
    value = (value if autocast else value.float()).requires_grad_()
    run = torch.compile(model, dynamic=False, fullgraph=True) if compiled else model
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast, cache_enabled=False):
        output = run(value)
    return [output, *torch.autograd.grad(output, (value, *model.parameters()), gradient.to(output.dtype))]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("dtype", "num_rows"), [(torch.float32, 256), (torch.bfloat16, 256), (torch.bfloat16, 251)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_and_gradients_are_near_those_of_fp32(recipe, dtype, num_rows, compiled):
    model = Projections(dtype)
    plain = Projections(torch.float32)
    plain.load_state_dict(model.state_dict())
    expected = outcome(plain, num_rows, autocast=False)
    use_fp8(model, recipe=recipe, match=["*"])
    found = outcome(model, num_rows, compiled=compiled)
    errors = {name: error_of(*pair) for name, *pair in zip(names_of(model), found, expected, strict=True)}
    assert all(0 <= each < 0.12 for each in errors.values()), errors
    assert errors["output"] > 0.01, errors


def names_of(model):
    return ["output", "input", *(name for name, _ in model.named_parameters())]


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_that_are_not_finite_are_not_hidden(recipe):
    for compiled in (False, True):
        model = Projections(torch.bfloat16)
        use_fp8(model, recipe=recipe, match=["*"])
        with torch.no_grad():
            model.layers[0].weight[3, 3] = float("inf")
        assert not outcome(model, 256, compiled=compiled)[0].isfinite().all()
        with torch.no_grad():
            model.layers[0].weight.zero_()
            model.last.weight.zero_()
        assert all(each.isfinite().all() for each in outcome(model, 256, compiled=compiled))


MODES = {
    "eager": [],
    "compile": ["runtime.mode=compile"],
    "graph": ["runtime.mode=graph"],
    "masters": [
        *("runtime.mode=graph", "model.dtype=bf16"),
        "trainer.optimizer={type: adamw, lr: 1e-2, master_weights: true}",
    ],
    "lora": ["runtime.mode=graph", "model.lora={match: '*_proj', rank: 4}"],
    "repeated": ["model.compile_repeated_blocks=model.layers"],
    "recomputed": ["runtime.mode=compile", "model.activation_checkpointing={layers: [DecoderLayer]}"],
}
SHORT = ("runtime.device=cuda", "trainer.max_steps=12", "evaluation={}", "data.eval={}", "checkpoint.every_steps=6")


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_learns_as_bf16(tmp_path, mode):
    train(load(tmp_path / "bf16", *SHORT, *MODES[mode], fp8=False))
    train(load(tmp_path / "fp8", *SHORT, *MODES[mode]))
    expected, found = losses(tmp_path / "bf16"), losses(tmp_path / "fp8")
    assert found != expected
    assert found[0] == pytest.approx(expected[0], rel=1e-2)
    assert found[-1] == pytest.approx(expected[-1], rel=0.1)


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_a_resumed_run_has_the_same_bits(tmp_path, mode):
    settings = (*SHORT, *MODES[mode], "runtime.deterministic=true")
    whole = train(load(tmp_path / "whole", *settings))
    train(load(tmp_path / "parts", *settings, "trainer.max_steps=6"))
    resumed = train(load(tmp_path / "parts", *settings))
    assert same(weights(whole), weights(resumed))


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_step_waits_for_the_device(tmp_path, mode, recipe):
    write_rows(tmp_path)
    llama = "{type: llama, vocab_size: 128, hidden_size: 64, num_layers: 3, num_heads: 4, num_kv_heads: 2}"
    config = load_watched(
        tmp_path,
        *(f"runtime.mode={mode}", "runtime.precision=fp8", f"data.train={{type: {tmp_path}/tokens.py:Rows}}"),
        *(f"model={llama}", "trainer.type=language_model", EVERYWHERE, f"runtime.fp8.recipe={recipe}"),
    )
    trainer, hook = watched(config)
    assert (trainer.step, hook.num_watched) == (124, 100)


def test_the_rate_of_fp8_products_is_measured():
    half, eighth = (measure_matrix_rate(torch.device("cuda", 0), dtype) for dtype in (torch.bfloat16, FP8))
    assert eighth.flops_per_second > 1.3 * half.flops_per_second
