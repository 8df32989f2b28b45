"""The costs of a profiled step, and the setting that addresses each.

Kernels and operators are classified by their names in a torch trace; profiler.py reads the trace and assigns its time.
Advice depends on the settings of the run, so it never names one that is already in use.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LABELS = {
    "attention": "attention",
    "matrix": "matrix products",
    "optimizer": "optimizer",
    "loss": "softmax and loss",
    "embedding": "embeddings and indexing",
    "copies": "copies and casts",
    "pointwise": "norms and pointwise kernels",
    "python": "Python and dispatch",
    "other": "other kernels",
    "communication": "communication",
    "data": "data wait",
    "host": "host",
    "idle": "idle",
}
"""The costs of a step. The first ones divide forward, backward and a captured update; the last four are rows."""
KERNEL_COSTS = ("matrix", "attention", "loss", "optimizer", "embedding", "pointwise", "copies", "other")
"""The costs of kernels; of kernels that run at the same time, the first in this order counts."""
NUM_SHOWN = 3
_LEAST_PERCENT = 5.0
"""Smaller costs get no advice."""

_KERNELS = (
    # Inductor names a kernel after all operations that it fuses; the loss is the most specific one.
    ("attention", r"^triton_tem_.*(attention|sdpa)"),
    ("matrix", r"^triton_tem_|^triton_mm"),
    ("loss", r"^triton_.*(log_softmax|nll_loss|cross_entropy|logsumexp)"),
    ("pointwise", r"^triton_(poi|per|red|for|spl)"),
    ("attention", r"flash|fmha|sdpa|attention|attn|compute_dot_do_o|convert_dq_to"),  # the last two are cuDNN's
    ("optimizer", r"fused_?(adam|sgd|adagrad|lion)|adamw?_kernel|lion_kernel|multi_tensor_apply"),
    ("loss", r"softmax|nll_?loss|cross_?entropy|logsumexp"),
    ("copies", r"memcpy|memset|copy_kernel|copy_cuda|catarray|nchwtonhwc|nhwctonchw"),
    ("matrix", r"gemm|gemv|cutlass|nvjet|xmma|cublas|wgmma|conv(?!ert)|wgrad|dgrad|fprop|scaled_mm|splitkreduce"),
    ("embedding", r"embedding|index|gather|scatter"),
    ("pointwise", r"elementwise|norm|bn_[fb]w|reduce|pointwise|gelu|silu|rope|rotary|dropout|fill|^triton_"),
)
_OPERATORS = (
    (
        "python",
        r"^aten::(as_strided|_?(unsafe_)?view|_?reshape\w*|transpose|t|select|unbind|empty\w*|detach|unsqueeze"
        r"|squeeze|expand|slice|permute|narrow|split\w*|chunk|alias|resize_|result_type|linear|matmul)$",
    ),
    ("attention", r"^(aten|torch)?.*(scaled_dot_product|flash_attention|efficient_attention|flex_attention)"),
    (
        "matrix",
        r"^aten::(mm|addmm|bmm|baddbmm|addbmm|mv|dot|_scaled_mm|.*conv.*|.*mkldnn_linear.*|_?addmm_activation)$",
    ),
    ("optimizer", r"^aten::_(fused|foreach)_"),
    ("loss", r"^aten::.*(softmax|nll_loss|cross_entropy|logsumexp)"),
    ("embedding", r"^aten::(embedding|index|gather|scatter|take|_index)"),
    ("copies", r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_pin_memory|pin_memory)$"),
    ("pointwise", r"^aten::|CompiledFxGraph|^graph_\d+_cpp|^cpp_fused"),
)
_KERNEL_PATTERNS = [(cost, re.compile(pattern, re.IGNORECASE)) for cost, pattern in _KERNELS]
_OPERATOR_PATTERNS = [(cost, re.compile(pattern)) for cost, pattern in _OPERATORS]


def kernel_cost(name: str) -> str:
    """Returns the cost that a kernel of a GPU belongs to.

    >>> kernel_cost("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"), kernel_cost("triton_poi_fused_add_0")
    ('matrix', 'pointwise')
    """
    return next((cost for cost, pattern in _KERNEL_PATTERNS if pattern.search(name)), "other")


def operator_cost(name: str) -> str:
    """Returns the cost that an operator on the CPU belongs to, without the operators that it calls."""
    return next((cost for cost, pattern in _OPERATOR_PATTERNS if pattern.search(name)), "python")


def own_seconds(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, str, float]]:
    """Returns start, name and microseconds of each operator of a trace, without the operators that it calls."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event.get("tid")].append(event)
    found: list[tuple[float, str, float]] = []
    for operators in by_thread.values():
        operators.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
        open_ends: list[tuple[float, int]] = []
        for event in operators:
            start, duration = float(event["ts"]), float(event["dur"])
            while open_ends and open_ends[-1][0] <= start:
                open_ends.pop()
            if open_ends:
                caller = open_ends[-1][1]
                found[caller] = (*found[caller][:2], found[caller][2] - duration)
            open_ends.append((start + duration, len(found)))
            found.append((start, str(event["name"]), duration))
    return found


def divide_by_operators(seconds: float, operators: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Divides the seconds of a row over costs by the time of its operators; the rest is Python."""
    costs: dict[str, float] = defaultdict(float)
    for name, own in operators:
        costs[operator_cost(name)] += max(own, 0.0)
    total = sum(costs.values())
    if total > seconds:  # of several threads
        return {cost: own * seconds / total for cost, own in costs.items()}
    costs["python"] += seconds - total
    return dict(costs)


@dataclass(frozen=True)
class RunProperties:
    """The settings and properties of a run that advice depends on."""

    mode: str = "eager"
    is_compiled: bool = False
    """True if torch.compile fuses kernels: in mode compile, in mode graph on a GPU, or block by block."""
    is_on_gpu: bool = False
    precision: str = "fp32"
    fastest_precision: str = "fp32"
    """The precision that `runtime.precision: auto` selects on the device."""
    supports_fp8: bool = False
    """True if a bf16 run could be fp8: the device and the mesh allow it, and layers are wide enough to gain."""
    tf32: bool = True
    can_capture: bool = True
    """True if mode graph supports the precision and the mesh of the run."""
    gathers_fp32: bool = False
    """True if FSDP gathers fp32 parameters that the forward uses in bf16."""
    num_workers: int = 0
    log_every_steps: int | None = None
    recomputes: bool = False
    casts_weights: bool = False
    """True if autocast casts fp32 weights that an optimizer with masters could keep in bf16."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """The setting `trainer.optimizer`."""
    fused_loss: bool | None = None
    kernels: str | None = None
    """`model.kernels` of a transformers model; None for others."""
    has_mask: bool = False
    """True if batches of a user's own model have an attention_mask."""


class Cost(NamedTuple):
    """One of the largest costs of a step."""

    name: str
    percent: float
    setting: str | None
    """The setting that addresses it; None if there is none, or if the run already uses it."""
    remark: str
    """The effect of the setting, or the reason why there is none."""

    def text(self) -> str:
        """Returns the cost as one line."""
        advice = self.remark if self.setting is None else f"{self.setting}{self.remark and f' ({self.remark})'}"
        return f"{LABELS[self.name]} {self.percent:.1f} %: {advice}"


def largest_costs(percentages: Mapping[str, float], facts: RunProperties) -> list[Cost]:
    """Returns the three largest costs with the setting that addresses each, depending on the run's settings."""
    largest = sorted((name for name in percentages if percentages[name] > 0), key=lambda name: -percentages[name])
    found = []
    for name in largest[:NUM_SHOWN]:
        percent = percentages[name]
        setting, remark = _advice(name, facts) if percent >= _LEAST_PERCENT else (None, "too small to matter")
        found.append(Cost(name, percent, setting, remark))
    return found


def _advice(cost: str, facts: RunProperties) -> tuple[str | None, str]:
    """Returns a setting and a remark; without a setting, the remark says why."""
    if cost in _ADVICE:
        return _ADVICE[cost](facts)
    if not facts.is_compiled:
        return "runtime.mode: compile", f"now {facts.mode}; fuses kernels"
    return None, "already compiled; no setting reduces it"


def _advise_matrix(facts: RunProperties) -> tuple[str | None, str]:
    if facts.is_on_gpu and facts.precision == "fp32" and facts.fastest_precision != "fp32":
        return f"runtime.precision: {facts.fastest_precision}", "now fp32"
    if facts.is_on_gpu and facts.precision == "fp32" and not facts.tf32:
        return "runtime.tf32: true", "now false"
    if facts.is_on_gpu and facts.supports_fp8 and facts.precision == "bf16":  # a CPU only emulates fp8
        return "runtime.precision: fp8", f"now bf16; for wide layers{'' if facts.is_compiled else ', in mode compile'}"
    if facts.recomputes:
        return "model.activation_checkpointing", "recomputes products; fewer layers if they fit"
    return None, f"in {facts.precision}; no setting reduces it"


def _advise_attention(facts: RunProperties) -> tuple[str | None, str]:
    if facts.kernels == "stock":
        return "model.kernels: fast", "now stock; no mask where the batch needs none"
    if facts.is_on_gpu and facts.precision == "fp32" and facts.fastest_precision != "fp32":
        return f"runtime.precision: {facts.fastest_precision}", "now fp32, which the fast kernels do not support"
    if facts.has_mask:
        return "is_causal=True", "in the model, instead of a mask, for rows without padding"
    return None, "no setting reduces it; it grows with the square of the row length"


def _advise_loss(facts: RunProperties) -> tuple[str | None, str]:
    if facts.fused_loss is False and facts.is_on_gpu:
        return "model.fused_loss: true", "now false"
    if facts.kernels == "stock":
        return "model.kernels: fast", "now stock; fuses head and loss"
    if not facts.is_compiled:
        return "runtime.mode: compile", f"now {facts.mode}; fuses kernels"
    return None, "already fused; no setting reduces it"


def _advise_optimizer(facts: RunProperties) -> tuple[str | None, str]:
    given = facts.optimizer
    if given.get("fused") is False:
        return "trainer.optimizer.fused: true", "now false"
    masters = given.get("master_weights")
    if facts.is_on_gpu and given.get("type") == "adamw" and not given.get("amsgrad"):
        if given.get("state") is None:
            return "trainer.optimizer.state: 8bit", "fewer bytes to read and write; rounds the moments"
        if masters is True or (facts.casts_weights and not masters):
            now = "now true" if masters else "with model.dtype: bf16"
            return "trainer.optimizer.master_weights: stochastic", f"{now}; fewer bytes to read and write"
    return None, "no setting reduces it; with a larger trainer.global_batch_size there are fewer updates"


def _advise_copies(facts: RunProperties) -> tuple[str | None, str]:
    if facts.casts_weights:
        return "trainer.optimizer.master_weights: true", "with model.dtype: bf16; no weight is cast in a forward"
    if not facts.is_compiled:
        return "runtime.mode: compile", f"now {facts.mode}; fuses casts into other kernels"
    return None, "no setting reduces it"


def _advise_communication(facts: RunProperties) -> tuple[str | None, str]:
    if facts.gathers_fp32:
        return "runtime.gather_precision: bf16", "now fp32; half the bytes"
    return "trainer.micro_batch_size", "larger ones compute longer for the same bytes; or another runtime.mesh"


def _advise_data(facts: RunProperties) -> tuple[str | None, str]:
    return "data.num_workers", f"now {facts.num_workers}"


def _advise_host(facts: RunProperties) -> tuple[str | None, str]:
    now = "" if facts.log_every_steps is None else f"now {facts.log_every_steps}; "
    return "log.every_steps", f"{now}or fewer and cheaper hooks"


def _advise_idle(facts: RunProperties) -> tuple[str | None, str]:
    if facts.mode != "graph" and facts.can_capture:
        return "runtime.mode: graph", f"now {facts.mode}; one launch for a whole update"
    if not facts.is_compiled:
        return "runtime.mode: compile", f"now {facts.mode}; fewer kernels to launch"
    return "trainer.micro_batch_size", "larger ones compute longer for each launch"


_ADVICE = {
    "matrix": _advise_matrix,
    "attention": _advise_attention,
    "loss": _advise_loss,
    "optimizer": _advise_optimizer,
    "copies": _advise_copies,
    "communication": _advise_communication,
    "data": _advise_data,
    "host": _advise_host,
    "idle": _advise_idle,
}
