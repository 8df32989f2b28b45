"""The costs of a step: how kernels and operators are classified, and which setting is named for each."""

from dataclasses import replace

import pytest
from tests.hooks.test_profiler_summary import STEP, named, ran, summary

from trainwright.hooks.costs import (
    LABELS,
    RunProperties,
    divide_by_operators,
    kernel_cost,
    largest_costs,
    operator_cost,
)
from trainwright.hooks.profiler import ROWS, Shares, share_out

KERNELS = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": "matrix",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off": "matrix",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>": "matrix",
    "ampere_sgemm_128x64_tn": "matrix",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "matrix",
    "triton_tem_fused_mm_3": "matrix",
    "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32": "matrix",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31_64x64x64_4x1x1": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>": "attention",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "triton_poi_fused__to_copy_add_mul_silu_4": "pointwise",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2": "pointwise",
    "triton_per_fused_native_layer_norm_1": "pointwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>": "pointwise",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>": "pointwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>": "pointwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::Tensor)>": "copies",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Tensor)>": "copies",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "Memset (Device)": "copies",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
    "_eight_bit_adamw_kernel": "optimizer",
    "_softmax_gradient": "loss",
    "triton_red_fused__log_softmax_nll_loss_forward_7": "loss",
    "void (anonymous namespace)::cunn_SoftMaxForward<8, float, LogSoftMaxForwardEpilogue>": "loss",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>": "embedding",
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>": "embedding",
    "convert_layout_of_something": "other",
    "my_own_kernel": "other",
}

OPERATORS = {
    "aten::mm": "matrix",
    "aten::addmm": "matrix",
    "aten::convolution_backward": "matrix",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::native_layer_norm": "pointwise",
    "aten::gelu_backward": "pointwise",
    "## Call CompiledFxGraph f3uikxsobyvzazesdmjj4efhqrfn ##": "pointwise",
    "aten::_log_softmax": "loss",
    "aten::nll_loss_forward": "loss",
    "aten::embedding_dense_backward": "embedding",
    "aten::copy_": "copies",
    "aten::_fused_adamw_": "optimizer",
    "aten::_foreach_norm": "optimizer",
    "aten::as_strided": "python",
    "aten::linear": "python",
    "autograd::engine::evaluate_function: AddmmBackward0": "python",
    "Torch-Compiled Region: 0/0": "python",
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_classified_by_its_name(name):
    assert kernel_cost(name) == KERNELS[name]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_classified_by_its_name(name):
    assert operator_cost(name) == OPERATORS[name]


def costs(events):
    return {cost: round(seconds * 1e6, 6) for cost, seconds in share_out(events).costs.items()}


GEMM, FLASH, POINTWISE, ADAM = (
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
    "void pytorch_flash::flash_fwd_kernel<traits>",
    "triton_poi_fused_add_0",
    "void multi_tensor_apply_kernel<FusedAdamMathFunctor>",
)


def test_eager_kernels_divide_forward_and_backward_and_the_optimizer_is_one_cost():
    events = [*STEP, *ran(10, 22, launched=11, name=GEMM), *ran(22, 30, launched=12, name=FLASH)]
    events += [*ran(30, 50, launched=31, name=GEMM), *ran(50, 55, launched=32, name=POINTWISE)]
    events += [*ran(60, 66, launched=61, name=POINTWISE), *ran(66, 70, launched=62, name=ADAM)]
    # The optimizer's pointwise kernels, such as those of clipping, are the optimizer's.
    assert costs(events) == {
        **{"attention": 8, "matrix": 32, "optimizer": 10, "pointwise": 5, "data": 10, "idle": 5},
    }


def test_a_replay_is_divided_by_its_kernels_alone():
    events = [named("data", 0, 10), named("replay", 10, 20), named("host", 20, 30)]
    for start, end, name in ((12, 30, GEMM), (30, 40, FLASH), (40, 45, ADAM), (45, 50, "ncclDevKernel_AllReduce")):
        events += ran(start, end, launched=11, name=name)
    assert costs(events) == {"matrix": 18, "attention": 10, "optimizer": 5, "communication": 5, "data": 10, "idle": 2}


def test_of_kernels_that_run_together_the_product_counts():
    events = [*STEP, *ran(10, 40, launched=11, name=POINTWISE), *ran(20, 30, launched=12, name=GEMM)]
    assert costs(events) == {"matrix": 10, "pointwise": 20, "data": 10, "idle": 30}


def op(name, start, end, tid=1):
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": end - start, "tid": tid}


def test_on_a_cpu_an_operator_has_its_time_without_those_inside_it():
    events = [*STEP, op("aten::linear", 10, 20), op("aten::addmm", 11, 19), op("aten::copy_", 12, 13)]
    events += [op("AddmmBackward0", 30, 60), op("aten::mm", 30, 50), op("aten::gelu_backward", 52, 58)]
    events += [op("aten::_fused_adamw_", 60, 68), op("aten::stack", 1, 5)]
    # forward: 7 mm, 1 copy, 2 + 10 of Python; backward: 20 mm, 6 pointwise, 4 of Python; the batch stays data wait
    assert costs(events) == {"matrix": 27, "copies": 1, "pointwise": 6, "python": 16, "optimizer": 10, "data": 10}


def test_costs_have_the_total_of_the_rows():
    events = [*STEP, op("aten::mm", 10, 28), op("aten::mm", 10, 29, tid=2), named("host", 70, 80)]
    shares = share_out(events)
    assert sum(shares.costs.values()) == pytest.approx(shares.total)
    assert divide_by_operators(1.0, [("aten::mm", 3.0), ("aten::add", 1.0)]) == {"matrix": 0.75, "pointwise": 0.25}


GPU = RunProperties(is_on_gpu=True, precision="bf16", fastest_precision="bf16")
COMPILED = replace(GPU, mode="compile", is_compiled=True)
ADAMW = {"type": "adamw", "lr": 1e-3}
EIGHT_BIT = {**ADAMW, "state": "8bit"}
STOCHASTIC = "trainer.optimizer.master_weights: stochastic"


@pytest.mark.parametrize(
    ("cost", "facts", "setting"),
    [
        ("matrix", replace(GPU, precision="fp32"), "runtime.precision: bf16"),
        ("matrix", replace(GPU, precision="fp32", fastest_precision="fp32", tf32=False), "runtime.tf32: true"),
        ("matrix", replace(GPU, supports_fp8=True), "runtime.precision: fp8"),
        ("matrix", replace(GPU, supports_fp8=True, precision="fp8"), None),
        ("matrix", replace(GPU, recomputes=True), "model.activation_checkpointing"),
        ("matrix", GPU, None),
        ("matrix", RunProperties(), None),
        ("matrix", RunProperties(precision="bf16", supports_fp8=True), None),
        ("attention", replace(GPU, kernels="stock"), "model.kernels: fast"),
        ("attention", replace(GPU, kernels="fast"), None),
        ("attention", replace(GPU, precision="fp32"), "runtime.precision: bf16"),
        ("attention", replace(GPU, has_mask=True), "is_causal=True"),
        ("loss", replace(COMPILED, fused_loss=False), "model.fused_loss: true"),
        ("loss", GPU, "runtime.mode: compile"),
        ("loss", COMPILED, None),
        ("pointwise", GPU, "runtime.mode: compile"),
        ("pointwise", COMPILED, None),
        ("embedding", RunProperties(), "runtime.mode: compile"),
        ("python", RunProperties(), "runtime.mode: compile"),
        ("other", COMPILED, None),
        ("optimizer", replace(GPU, optimizer={**ADAMW, "fused": False}), "trainer.optimizer.fused: true"),
        ("optimizer", replace(GPU, optimizer=ADAMW), "trainer.optimizer.state: 8bit"),
        ("optimizer", replace(GPU, optimizer={**ADAMW, "amsgrad": True}), None),
        ("optimizer", replace(GPU, optimizer={**EIGHT_BIT, "master_weights": True}), STOCHASTIC),
        ("optimizer", replace(GPU, optimizer=EIGHT_BIT, casts_weights=True), STOCHASTIC),
        ("optimizer", replace(GPU, optimizer=EIGHT_BIT), None),
        ("optimizer", replace(GPU, optimizer={**EIGHT_BIT, "master_weights": "stochastic"}), None),
        ("optimizer", replace(GPU, optimizer={"type": "lion", "master_weights": True}), None),
        ("optimizer", RunProperties(optimizer=ADAMW), None),
        ("copies", replace(COMPILED, casts_weights=True), "trainer.optimizer.master_weights: true"),
        ("copies", GPU, "runtime.mode: compile"),
        ("copies", COMPILED, None),
        ("communication", replace(GPU, gathers_fp32=True), "runtime.gather_precision: bf16"),
        ("communication", GPU, "trainer.micro_batch_size"),
        ("data", RunProperties(num_workers=2), "data.num_workers"),
        ("host", RunProperties(log_every_steps=1), "log.every_steps"),
        ("idle", COMPILED, "runtime.mode: graph"),
        ("idle", replace(GPU, can_capture=False), "runtime.mode: compile"),
        ("idle", replace(COMPILED, mode="graph"), "trainer.micro_batch_size"),
    ],
)
def test_the_setting_depends_on_what_the_run_uses(cost, facts, setting):
    [found] = largest_costs({cost: 100.0}, facts)
    assert (found.name, found.setting) == (cost, setting)
    assert found.text().startswith(f"{LABELS[cost]} 100.0 %: {setting or ''}")


def test_the_three_largest_are_named_and_small_ones_get_no_advice():
    found = largest_costs({"pointwise": 3.0, "matrix": 60.0, "idle": 0.0, "data": 2.0, "host": 35.0}, RunProperties())
    assert [each.name for each in found] == ["matrix", "host", "pointwise"]
    assert [each.setting for each in found] == [None, "log.every_steps", None]


def test_every_row_but_the_computing_ones_is_a_cost():
    assert set(ROWS) - {"forward", "backward", "replay"} <= LABELS.keys()


def test_the_summary_ends_with_the_costs_and_the_file_has_them():
    shares = Shares({"forward": 1.0, "idle": 1.0}, has_device=True, costs={"matrix": 0.9, "idle": 1.0, "loss": 0.1})
    profile = summary(shares=shares, facts=replace(COMPILED, supports_fp8=True))
    lines = profile.text().splitlines()
    assert lines[-4:] == [
        "The largest costs:",
        "  1. idle 50.0 %: runtime.mode: graph (now compile; one launch for a whole update)",
        "  2. matrix products 45.0 %: runtime.precision: fp8 (now bf16; for wide layers)",
        "  3. softmax and loss 5.0 %: already fused; no setting reduces it",
    ]
    assert max(map(len, lines)) <= 120
    assert [each["setting"] for each in profile.to_dict()["costs"]] == [
        *("runtime.mode: graph", "runtime.precision: fp8"),
        None,
    ]


def test_where_nothing_can_be_gained_the_summary_says_so():
    shares = Shares({"forward": 1.0}, has_device=True, costs={"matrix": 1.0})
    assert "no setting reduces" in summary(shares=shares, facts=COMPILED).text().splitlines()[-1]
