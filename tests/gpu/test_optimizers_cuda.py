"""Moments in 8 bits, 16-bit weights and steps in backward on a GPU: the kernels, CUDA graphs, resume, memory."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import yaml
from tests.gpu.test_master_weights_cuda import step_by_replay, step_with_numbers
from tests.optim.references import all_equal, drive, make_gradients, make_weights, values
from tests.optim.replayed_gradients import PROBLEMS, SETTINGS, replayed_error
from tests.optim.test_eight_bit import ROUNDINGS, TORCHAO_ERRORS
from tests.optim.test_low_memory_runs import FILE

from trainwright import RunConfig, build_trainer
from trainwright.optim import adamw, eight_bit
from trainwright.optim.adamw import AdamW
from trainwright.optim.device_step import prepare_for_capture
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda", 0)
SHAPES = ((24, 300), (64, 512), (7,), (20, 3, 100), (5, 5000))
RATES = (3e-3, 1.7e-3, 1e-3 / 3, 0.0, 2e-3, 1e-3)
every_rounding = pytest.mark.parametrize(("dtype", "master_weights"), ROUNDINGS.values(), ids=ROUNDINGS)


def on_device(dtype=torch.float32, shapes=SHAPES):
    return [torch.nn.Parameter(each.detach().to(DEVICE, dtype)) for each in make_weights(*shapes)]


def gradients_for(weights, steps):
    given = make_gradients([each.detach().float().cpu() for each in weights], steps)
    return [[each.to(DEVICE, weight.dtype) for each, weight in zip(step, weights, strict=True)] for step in given]


def make(weights, **more):
    return AdamW(weights, lr=0.01, weight_decay=0.1, state="8bit", **more)


@every_rounding
def test_the_kernel_computes_what_plain_torch_does(monkeypatch, dtype, master_weights):
    weights, others = on_device(dtype), on_device(dtype)
    gradients = gradients_for(weights, 4)
    by_kernel, in_torch = (make(each, master_weights=master_weights) for each in (weights, others))
    for number, step in enumerate(gradients):
        # Both begin with the same weights and state, so that the differences of one step are seen.
        with torch.no_grad():
            for weight, other in zip(weights, others, strict=True):
                other.copy_(weight)
        if number:
            in_torch.load_state_dict(copy.deepcopy(by_kernel.state_dict()))
        drive(by_kernel, weights, [step])
        with monkeypatch.context() as patch:
            patch.setattr(eight_bit, "has_triton", lambda: False)
            drive(in_torch, others, [step])
        for weight, other in zip(weights, others, strict=True):
            if dtype == torch.bfloat16:  # a stochastic rounding may go the other way
                assert (weight.float() - other.float()).abs().max() <= 2**-7 * other.float().abs().max()
                assert (weight != other).float().mean() < (0.02 if master_weights != "stochastic" else 0.6)
                assert (weight.float() - other.float()).mean().abs() < 3e-4
            else:
                torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)
            ours, theirs = by_kernel.state[weight], in_torch.state[other]
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                if value.dtype in (torch.int8, torch.uint8):
                    distance = (value.int() - theirs[key].int()).abs()
                    assert distance.max() <= 1, key
                    assert distance.float().mean() < (0.01 if value.dtype == torch.int8 else 0.6), key
                else:
                    torch.testing.assert_close(value, theirs[key], rtol=1e-5, atol=1e-6)


LARGE = ((1024, 1100), (2**20 + 5,), (40, 256))
"""Two parameters that are stepped by a kernel of their own, and a small one."""
WIDE = {
    "masters": (torch.bfloat16, {"master_weights": True}),
    "fp16 masters": (torch.float16, {"master_weights": True}),
    "stochastic": (torch.bfloat16, {"master_weights": "stochastic"}),
    "bf16 moments": (torch.float32, {"state_dtype": "bf16"}),
    "bf16 moments, masters": (torch.bfloat16, {"state_dtype": "bf16", "master_weights": True}),
    "bf16 moments, stochastic": (torch.bfloat16, {"state_dtype": "bf16", "master_weights": "stochastic"}),
}


@pytest.fixture
def kernel_steps(monkeypatch):
    """Counts the parameters that a kernel of their own has stepped."""
    from trainwright.optim import adamw_kernels  # needs Triton

    steps, step = [], adamw_kernels.step_by_kernel

    def counted(parameter, *arguments, **options):
        steps.append(parameter.shape)
        step(parameter, *arguments, **options)

    monkeypatch.setattr(adamw_kernels, "step_by_kernel", counted)
    return steps


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("name", WIDE)
def test_one_kernel_computes_what_passes_of_torch_do(monkeypatch, kernel_steps, name, maximize):
    dtype, settings = WIDE[name]
    weights, others = on_device(dtype, LARGE), on_device(dtype, LARGE)
    by_kernel, in_torch = (
        AdamW(each, lr=0.01, weight_decay=0.1, maximize=maximize, **settings) for each in (weights, others)
    )
    for number, step in enumerate(gradients_for(weights, 3)):
        # Both begin with the same weights and state, so that the differences of one step are seen.
        with torch.no_grad():
            for weight, other in zip(weights, others, strict=True):
                other.copy_(weight)
        if number:
            in_torch.load_state_dict(copy.deepcopy(by_kernel.state_dict()))
        drive(by_kernel, weights, [step])
        with monkeypatch.context() as patch:
            patch.setattr(adamw, "has_triton", lambda: False)
            drive(in_torch, others, [step])
        assert len(kernel_steps) == 2 * (number + 1)
        for weight, other in zip(weights, others, strict=True):
            ours, theirs = by_kernel.state[weight], in_torch.state[other]
            assert ours.keys() == theirs.keys()
            for key, value in {"weight": weight.detach(), **ours}.items():
                expected = other.detach() if key == "weight" else theirs[key]
                assert value.dtype == expected.dtype
                if value.dtype == torch.float32:
                    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
                    continue
                torch.testing.assert_close(value, expected, rtol=2**-7, atol=1e-6)
                # The noise of a stochastic rounding is a hash of the value: another last bit of fp32 is other noise.
                # The next test compares the roundings of equal values.
                is_stochastic = key != "weight" or settings.get("master_weights") == "stochastic"
                assert (value != expected).float().mean() < (0.6 if is_stochastic else 0.02), key


def exact_step(optimizer, weights):
    """Runs a step without a gradient from given moments; its products are exact in fp32."""
    for weight in weights:
        state = optimizer.state[weight]
        state["step"] = torch.zeros((), device=DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(weight.numel())
        for key in ("exp_avg", "exp_avg_sq"):
            moment = torch.randn(weight.shape, generator=generator, device=DEVICE).abs().to(torch.bfloat16)
            state[key] = torch.where(moment < 0.5, 0.0, moment).to(torch.bfloat16)
    drive(optimizer, weights, [[torch.zeros_like(weight) for weight in weights]])


@pytest.mark.parametrize("name", ["weights", "moments"])
def test_one_kernel_rounds_with_the_noise_of_plain_torch(monkeypatch, kernel_steps, name):
    shapes = ((1024, 1100), (3, 2**19 + 7))  # the rows begin anywhere in the range of a program
    found = []
    for has_triton in (True, False):
        weights = on_device(torch.bfloat16, shapes)
        if name == "weights":  # no gradient and no moments: only the decay changes the weights, by a quarter
            optimizer = AdamW(weights, lr=0.25, weight_decay=1.0, master_weights="stochastic")
        else:  # 1 - beta is exact, and so are the products with 0.4375
            optimizer = AdamW(weights, lr=0.0, betas=(0.4375, 0.4375), state_dtype="bf16", master_weights=True)
        monkeypatch.setattr(adamw, "has_triton", lambda has_triton=has_triton: has_triton)
        start = [weight.detach().float() for weight in weights]
        if name == "weights":
            drive(optimizer, weights, [[torch.zeros_like(weight) for weight in weights]])
            found.append([weight.detach() for weight in weights])
            exact = [0.75 * each for each in start]
        else:
            exact_step(optimizer, weights)
            found.append([optimizer.state[weight]["exp_avg"] for weight in weights])
            exact = None
    assert len(kernel_steps) == 2
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    if exact is not None:
        for one, value in zip(found[0], exact, strict=True):
            rounded = value.bfloat16().float()
            assert ((one.float() != rounded).float().mean() - 0.25).abs() < 0.1, "some are rounded the other way"
            assert ((one.float() - value) * value.sign()).mean().abs() < 1e-4 * value.abs().mean(), "truncated"


@pytest.mark.parametrize("name", WIDE)
def test_one_kernel_divides_gradients_and_reads_any_layout(kernel_steps, name):
    dtype, settings = WIDE[name]
    weights, others = on_device(dtype, LARGE), on_device(dtype, LARGE)
    scaled, plain = (AdamW(each, lr=0.01, **settings) for each in (weights, others))
    gradients = gradients_for(weights, 1)
    gradients[0][0] = gradients[0][0].t().contiguous().t()
    scaled.grad_scale = torch.full((), 4.0, device=DEVICE)
    drive(scaled, weights, [[4.0 * each for each in gradients[0]]])
    drive(plain, others, [[each.contiguous() for each in gradients[0]]])
    assert len(kernel_steps) == 4
    assert all_equal(weights, others)


def test_moments_in_another_layout_are_stepped_in_their_places():
    weights, others = (on_device(torch.bfloat16, ((128, 64, 16, 16),)) for _ in range(2))
    optimizers = [AdamW(each, lr=0.01, master_weights=True) for each in (weights, others)]
    first, second = gradients_for(weights, 2)
    for optimizer, each in zip(optimizers, (weights, others), strict=True):
        drive(optimizer, each, [first])
    for key in ("exp_avg", "exp_avg_sq"):
        state = optimizers[1].state[others[0]]
        state[key] = state[key].to(memory_format=torch.channels_last)
    for optimizer, each in zip(optimizers, (weights, others), strict=True):
        drive(optimizer, each, [second])
    torch.testing.assert_close(weights[0], others[0], rtol=2**-7, atol=1e-6)


def test_a_skipped_step_by_one_kernel_changes_no_bit():
    for dtype, settings in WIDE.values():
        weights = on_device(dtype, LARGE)
        optimizer = AdamW(weights, lr=0.01, **settings)
        drive(optimizer, weights, gradients_for(weights, 1))
        before, state = values(weights), copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.found_inf = torch.ones((), device=DEVICE)
        drive(optimizer, weights, [[torch.full_like(weight, torch.nan) for weight in weights]])
        assert all_equal(before, weights)
        for number, kept in optimizer.state_dict()["state"].items():
            assert all(torch.equal(kept[key], state[number][key]) for key in kept)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_error_is_not_larger_than_that_of_torchao(problem):
    class OnDevice(AdamW):
        """Steps copies of the weights on the GPU, and writes them back."""

        def __init__(self, weights):
            self.given = weights
            super().__init__(
                [torch.nn.Parameter(each.detach().to(DEVICE)) for each in weights], state="8bit", **SETTINGS
            )

        @torch.no_grad()
        def step(self, closure=None):
            for given, own in zip(self.given, self.param_groups[0]["params"], strict=True):
                own.grad = given.grad.to(DEVICE)
            super().step()
            for given, own in zip(self.given, self.param_groups[0]["params"], strict=True):
                given.copy_(own)

    assert replayed_error(problem, OnDevice) < TORCHAO_ERRORS[problem]


@every_rounding
def test_a_skipped_step_changes_no_bit_and_the_scale_divides_gradients(dtype, master_weights):
    weights = on_device(dtype)
    optimizer = make(weights, master_weights=master_weights)
    drive(optimizer, weights, gradients_for(weights, 2))
    before, state = values(weights), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.found_inf = torch.ones((), device=DEVICE)
    drive(optimizer, weights, [[torch.full_like(weight, torch.nan) for weight in weights]])
    assert all_equal(before, weights)
    for number, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(kept[key], state[number][key]) for key in kept)
    optimizer.found_inf = torch.zeros((), device=DEVICE)
    others = [torch.nn.Parameter(each.detach().clone()) for each in weights]
    plain = make(others, master_weights=master_weights)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step = gradients_for(weights, 1)[0]
    optimizer.grad_scale = torch.full((), 4.0, device=DEVICE)
    drive(optimizer, weights, [[4.0 * each for each in step]])
    drive(plain, others, [step])
    assert all_equal(weights, others)


def test_nan_is_seen_in_the_weight():
    for dtype, master_weights in ROUNDINGS.values():
        weights = on_device(dtype, ((16, 512),))
        gradients = gradients_for(weights, 1)
        gradients[0][0][3, 5] = torch.nan
        drive(make(weights, master_weights=master_weights), weights, gradients)
        assert weights[0].isnan().sum() == 1


STOCHASTIC = {
    "adamw": lambda weights: AdamW(weights, lr=0.01, master_weights="stochastic"),
    "adamw, bf16 moments": lambda weights: AdamW(weights, lr=0.01, state_dtype="bf16", master_weights="stochastic"),
    "lion": lambda weights: Lion(weights, lr=0.01, master_weights="stochastic"),
    "muon": lambda weights: Muon(weights, lr=0.01, ns_dtype="fp32", master_weights="stochastic"),
}
RECORDED = {
    **{
        f"8bit, {name}": (dtype, lambda weights, masters=masters: make(weights, master_weights=masters))
        for name, (dtype, masters) in ROUNDINGS.items()
    },
    **{f"stochastic {name}": (torch.bfloat16, make_one) for name, make_one in STOCHASTIC.items()},
    "masters": (torch.bfloat16, lambda weights: AdamW(weights, lr=0.01, master_weights=True)),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_step_has_the_bits_of_one_that_is_not(name):
    dtype, make_one = RECORDED[name]
    found = []
    for drive_with in (step_with_numbers, step_by_replay):
        weights = on_device(dtype, (*SHAPES, LARGE[0]))
        optimizer = make_one(weights)
        assert prepare_for_capture(optimizer, DEVICE)
        start = values(weights)
        found.append(drive_with(weights, optimizer, gradients_for(weights, len(RATES)), RATES))
    if "muon" not in name:
        assert all_equal(*found)
    # A matrix product may be rounded otherwise in a graph, and then a stochastic rounding goes the other way.
    for one, other, begun in zip(*found, start, strict=True):
        assert (one.float() - other.float()).norm() < 0.5 * (other.float() - begun.float()).norm()


@pytest.mark.parametrize("name", RECORDED)
def test_no_step_waits_for_the_device(name):
    dtype, make_one = RECORDED[name]
    weights = on_device(dtype, (*SHAPES, LARGE[0]))
    optimizer = make_one(weights)
    drive(optimizer, weights, gradients_for(weights, 1))
    optimizer.found_inf = torch.zeros((), device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(0)


@pytest.mark.parametrize(
    ("settings", "bytes_per_weight"),
    [
        ({"state": "8bit", "master_weights": "stochastic"}, 2.05),
        ({"master_weights": "stochastic"}, 8.01),
        ({"master_weights": True}, 12.01),
    ],
    ids=str,
)
def test_a_step_needs_no_memory_in_addition_to_its_state(settings, bytes_per_weight):
    weight = torch.nn.Parameter(torch.zeros(2**15, 2**13, dtype=torch.bfloat16, device=DEVICE))
    optimizer = AdamW([weight], **settings)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = sum(each.numel() * each.element_size() for each in optimizer.state[weight].values())
    assert state < bytes_per_weight * weight.numel()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    optimizer.step()
    assert torch.cuda.max_memory_allocated(DEVICE) - before < 2**20


def config_of(folder, *overrides):
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text(FILE)
    settings = {
        "name": "run",
        "output_dir": str(folder),
        "model": {"type": "llama", "preset": "tiny", "dtype": "bf16"},
        "data": {"train": {"type": "parts.py:Text"}},
        "trainer": {
            "max_steps": 8,
            "global_batch_size": 8,
            "optimizer": {"type": "adamw", "lr": 0.01, "state": "8bit", "master_weights": "stochastic"},
        },
        "runtime": {"device": "cuda"},
        "writers": [],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return RunConfig.load(folder / "run.yaml", overrides)


def run(folder, *overrides):
    trainer = build_trainer(config_of(folder, *overrides))
    trainer.train()
    weights = dict(trainer.model.state_dict())
    states = trainer.optimizers["main"].state_dict()["state"]
    return weights | {f"{n}.{key}": value for n, state in states.items() for key, value in state.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


BLOCKS = "model.compile_repeated_blocks=model.layers"
IN_BACKWARD = "trainer.optimizer_in_backward=true"
RUNS = [
    [],
    ["runtime.mode=graph"],
    [IN_BACKWARD],
    [IN_BACKWARD, BLOCKS],
    [IN_BACKWARD, BLOCKS, "runtime.mode=graph"],
    [BLOCKS, "runtime.mode=graph", "trainer.max_grad_norm=0.5"],
]


@pytest.mark.parametrize("overrides", RUNS, ids=str)
def test_a_resumed_run_has_the_same_bits(tmp_path, overrides):
    whole = run(tmp_path / "whole", "runtime.deterministic=true", *overrides)
    run(tmp_path / "halves", "runtime.deterministic=true", *overrides, "trainer.max_steps=5")
    assert_same(whole, run(tmp_path / "halves", "runtime.deterministic=true", *overrides))


@pytest.mark.parametrize("blocks", [[], [BLOCKS]], ids=["eager", "blocks"])
def test_steps_in_backward_have_the_bits_of_steps_after_it(tmp_path, blocks):
    settings = ["runtime.deterministic=true", *blocks]
    assert_same(run(tmp_path / "plain", *settings), run(tmp_path / "early", *settings, IN_BACKWARD))


def test_steps_in_backward_hold_a_few_gradients_at_a_time(tmp_path):
    peaks = {}
    heads = "num_heads: 16, num_kv_heads: 16"
    sizes = f"model={{type: llama, preset: tiny, hidden_size: 2048, num_layers: 12, {heads}, dtype: bf16}}"
    for name, extra in {"plain": [], "early": [IN_BACKWARD]}.items():
        gc.collect()  # trainers of earlier tests
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(DEVICE)
        trainer = build_trainer(config_of(tmp_path / name, sizes, "trainer.max_steps=4", *extra))
        torch.cuda.reset_peak_memory_stats(DEVICE)
        trainer.train()
        peaks[name] = torch.cuda.max_memory_allocated(DEVICE) - before
        num_parameters = sum(each.numel() for each in trainer.model.parameters())
        del trainer
    # Gradients of 2 bytes per parameter, of which 256 MiB and those of one layer remain.
    assert peaks["plain"] - peaks["early"] > 2 * num_parameters - 2**28 - 2**28
