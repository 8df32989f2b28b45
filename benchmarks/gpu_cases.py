"""What benchmarks/gpu.py measures: the cases (a model and its batch), the contenders of each, and the targets.

Nothing here imports torch: gpu.py plans with it, gpu_contenders.py runs what it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM, LOG_EVERY = 1e-4, 0.01, 1.0, 50
NUM_BATCHES = 4  # of different rows: few, so that losses fall within a run and show that all contenders do the same
SETTLING_STEPS = 2  # of each turn, not measured: they allocate again what was released for the others
LORA_RANK = 32

Settings = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """A framework with its settings, and what it needs."""

    name: str
    framework: str
    """A key of FRAMEWORKS in gpu_contenders.py."""
    options: Settings = field(default_factory=dict)
    """Keyword arguments of the framework's function."""
    gib: float = 1.0
    """Expected GPU memory while it trains, with what the allocator reserves."""
    idle_gib: float = 1.0
    """Expected GPU memory while it waits: parameters, optimizer state and, in graph mode, the graph's pool."""
    start_seconds: float = 30.0
    """Expected time from the start of the process to the end of warm-up."""
    is_peer: bool = False
    """True if the fastest of these is the case's baseline."""


@dataclass(frozen=True)
class Case:
    """A model, the batches that it is trained on, and who trains it."""

    name: str
    title: str
    shipped: Settings
    """The `model` section with a model of this package; empty if the case has none."""
    transformers: Settings
    """The `model` section with transformers' class; peers build the same class from the same keywords."""
    batch: int
    length: int
    contenders: tuple[Contender, ...]
    ms: float
    """Expected milliseconds per step, for the time plan."""
    warmup: int = 10
    """Steps before the first turn: compilation, capture, first allocations."""
    steps: int = 6
    """Measured steps per turn."""
    is_adapter_only: bool = False
    """True if the weights are frozen: no gradients of weights are computed."""
    note: str = ""

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.batch * self.length

    def keeping(self, only: Sequence[str], skip: Sequence[str]) -> Case:
        """Returns the case with those contenders whose names contain a text of `only`, if any, and none of `skip`."""
        kept = [each for each in self.contenders if not only or any(text in each.name for text in only)]
        return replace(self, contenders=tuple(each for each in kept if not any(text in each.name for text in skip)))

    def with_repeated_blocks(self) -> Case:
        """Returns the case with `model.compile_repeated_blocks` for compiled shipped models, to start faster."""
        changed = []
        for each in self.contenders:
            if each.options.get("kind") == "shipped" and each.options["settings"]["runtime"]["mode"] != "eager":
                settings = dict(each.options["settings"])
                path = "model.layers" if self.shipped["type"] == "llama" else "transformer.h"
                settings["model"] = {**settings.get("model", {}), "compile_repeated_blocks": path}
                options = {**each.options, "settings": settings}
                each = replace(each, options=options, start_seconds=0.4 * each.start_seconds)
            changed.append(each)
        return replace(self, contenders=tuple(changed))

    def flops_per_token(self) -> float | None:
        """Matrix arithmetic of forward and backward: 6 per weight except the embedding, and causal attention.

        Frozen weights count 4. None for a model that is not described here.
        """
        size = self.transformers
        if not size:
            return None
        width = size.get("hidden_size") or size["n_embd"]
        heads = size.get("num_attention_heads") or size["n_head"]
        layers = size.get("num_hidden_layers") or size["n_layer"]
        kv_heads = size.get("num_key_value_heads", heads)
        head_size = size.get("head_dim", width // heads)
        attention = 2 * width * head_size * (heads + kv_heads)
        mlp = 3 * width * size["intermediate_size"] if "intermediate_size" in size else 8 * width * width
        weights = layers * (attention + mlp) + width * size["vocab_size"]
        visible = self.length / 2
        if window := size.get("sliding_window"):
            visible = (visible + 5 * min(window, visible)) / 6  # Gemma 3: five of six layers have a window
        return (4.0 if self.is_adapter_only else 6.0) * weights + 12.0 * layers * heads * head_size * visible


def merge(below: Settings, above: Settings) -> Settings:
    """Returns nested settings with those of `above` in place of or next to those of `below`."""
    merged = dict(below)
    for key, value in above.items():
        old = below.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def peer(name: str, gib: float, idle_gib: float, start_seconds: float, **options: Any) -> Contender:
    return Contender(name, "huggingface", options, gib, idle_gib, start_seconds, is_peer=True)


def ours(
    name: str, kind: str, settings: Settings, gib: float, start_seconds: float, *, idle_gib: float | None = None
) -> Contender:
    """A run of trainwright: `kind` is shipped or transformers, `settings` are merged into the run's config."""
    idle = gib - 1 if idle_gib is None else idle_gib  # mode graph keeps its pool
    return Contender(name, "trainwright", {"kind": kind, "settings": settings}, gib, idle, start_seconds)


HF, HF_COMPILED, HF_LIGER = (f"Hugging Face Trainer{more}" for more in ("", " + compile", " + Liger"))
HF_LIGER_COMPILED = "Hugging Face Trainer + Liger + compile"
LIGHTNING_COMPILED = "Lightning + compile"
CHECKPOINTED = ", gradient checkpointing"
SHIPPED, SHIPPED_LEAN, SHIPPED_FP8 = "shipped, bf16", "shipped, bf16, memory budget 0.8", "shipped, fp8"
SHIPPED_ROWWISE = "shipped, fp8, rowwise"
SHIPPED_FP8_LEAN = "shipped, fp8, memory budget 0.8"
SHIPPED_8BIT, SHIPPED_FP8_8BIT = (f"shipped, {precision}, 8-bit moments" for precision in ("bf16", "fp8"))
THEIRS, THEIRS_FP8 = "transformers, bf16", "transformers, fp8"
EAGER, COMPILE, GRAPH = "eager", "compile", "graph"
GRAPH_MASTERS = "graph, bf16 weights with fp32 masters"
LORA, LORA_FP8, LORA_FP8_LEAN = "LoRA, bf16", "LoRA, fp8", "LoRA, fp8, activation checkpointing"
NANOCHAT = "nanochat's own loop"


def masters(precision: str, mode: str = "graph", **runtime: Any) -> Settings:
    """Weights in bf16 with fp32 masters in the optimizer."""
    return {
        "model": {"dtype": "bf16"},
        "trainer": {"optimizer": {"master_weights": True}},
        "runtime": {"precision": precision, "mode": mode, **runtime},
    }


def state_8bit(precision: str, mode: str = "graph") -> Settings:
    """bf16 weights with stochastic rounding and AdamW's state in 8 bits."""
    return {
        "model": {"dtype": "bf16"},
        "trainer": {"optimizer": {"state": "8bit", "master_weights": "stochastic"}},
        "runtime": {"precision": precision, "mode": mode},
    }


def lora(precision: str, **model: Any) -> Settings:
    """Adapters on every linear layer of every block, as peft's `all-linear`; frozen weights in bf16."""
    adapters = {"match": ["*_proj"], "rank": LORA_RANK, "alpha": 2.0 * LORA_RANK}
    return {
        "model": {"dtype": "bf16", "lora": adapters, **model},
        "runtime": {"precision": precision, "mode": "compile"},
    }


def mode(name: str, precision: str = "bf16") -> Settings:
    return {"runtime": {"precision": precision, "mode": name}}


def peers(compiled: tuple[float, float], fused: tuple[float, float], idle_gib: float) -> tuple[Contender, ...]:
    """Hugging Face Trainer's three forms; (GiB, seconds to start) without and with Liger's kernels."""
    (gib, seconds), (liger_gib, liger_seconds) = compiled, fused
    return (
        peer(HF_COMPILED, gib, idle_gib, seconds, compiled=True),
        peer(HF_LIGER_COMPILED, liger_gib, idle_gib, liger_seconds, compiled=True, liger=True),
        peer(HF_LIGER, liger_gib, idle_gib, 25, compiled=False, liger=True),
    )


LLAMA = {"type": "transformers:LlamaForCausalLM", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
TINYLLAMA_SHIPPED: Settings = {
    "type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_layers": 22,
    "num_heads": 32,
    "num_kv_heads": 4,
    "intermediate_size": 5632,
    "max_positions": 2048,
    "tie_embeddings": False,
}
TINYLLAMA: Settings = {
    **LLAMA,
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
}
LLAMA_8B_SHIPPED: Settings = {
    "type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "intermediate_size": 14336,
    "max_positions": 8192,
    "rope_theta": 500000.0,
    "tie_embeddings": False,
}
LLAMA_8B: Settings = {
    **LLAMA,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TOY_SHIPPED: Settings = {
    "type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "intermediate_size": 384,
    "max_positions": 128,
    "tie_embeddings": False,
}
TOY: Settings = {
    **LLAMA,
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "max_position_embeddings": 128,
}
QWEN3: Settings = {
    "type": "transformers:Qwen3ForCausalLM",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
GEMMA3: Settings = {
    "type": "transformers:Gemma3ForCausalLM",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32768,
}
GPT2_SHIPPED: Settings = {
    "type": "gpt2",
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "max_positions": 1024,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
GPT2: Settings = {
    "type": "transformers:GPT2LMHeadModel",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

FP8_OF_GPT2: Settings = {"match": ["*.c_attn", "*.mlp.*"], "skip": ["transformer.h.0.*", "transformer.h.11.*"]}
"""The widest layers of GPT-2 small, except those of the first and the last block."""

CASES = {
    case.name: case
    for case in (
        Case(
            "tinyllama",
            "TinyLlama-1.1B, 8 × 2048 tokens",
            TINYLLAMA_SHIPPED,
            TINYLLAMA,
            batch=8,
            length=2048,
            ms=240,
            contenders=(
                *peers((49, 85), (44, 80), idle_gib=15),
                ours(SHIPPED, "shipped", masters("bf16"), 41, 80),
                ours(SHIPPED_LEAN, "shipped", masters("bf16", compile_memory_budget=0.8), 35, 90),
                ours(SHIPPED_FP8, "shipped", masters("fp8"), 34, 85),
                ours(THEIRS, "transformers", masters("bf16"), 41, 80),
                ours(THEIRS_FP8, "transformers", masters("fp8"), 34, 85),
                ours(SHIPPED_FP8_LEAN, "shipped", masters("fp8", compile_memory_budget=0.8), 30, 90),
                ours(SHIPPED_8BIT, "shipped", state_8bit("bf16"), 30, 80),
                ours(SHIPPED_FP8_8BIT, "shipped", state_8bit("fp8"), 24, 90),
            ),
        ),
        Case(
            "qwen3",
            "Qwen3-0.6B shape, 8 × 2048 tokens",
            {},
            QWEN3,
            batch=8,
            length=2048,
            ms=230,
            contenders=(
                *peers((54, 90), (40, 85), idle_gib=9),
                ours(THEIRS, "transformers", masters("bf16"), 36, 85),
            ),
        ),
        Case(
            "gemma3",
            "Gemma 3 1B shape, 4 × 2048 tokens",
            {},
            GEMMA3,
            batch=4,
            length=2048,
            ms=190,
            contenders=(
                *peers((52, 95), (36, 90), idle_gib=15),
                ours(THEIRS, "transformers", masters("bf16"), 34, 90),
            ),
        ),
        Case(
            "gpt2",
            "GPT-2 small, 32 × 1024 tokens, without dropout",
            GPT2_SHIPPED,
            GPT2,
            batch=32,
            length=1024,
            ms=70,
            steps=10,
            contenders=(
                peer(HF_COMPILED, 28, 3, 55, compiled=True),
                ours(SHIPPED, "shipped", masters("bf16"), 18, 50),
                ours(SHIPPED_FP8, "shipped", masters("fp8", fp8=FP8_OF_GPT2), 18, 55),
                ours(SHIPPED_ROWWISE, "shipped", masters("fp8", fp8={**FP8_OF_GPT2, "recipe": "rowwise"}), 18, 55),
            ),
            note="Liger-Kernel has no kernels for GPT-2. The model's layers are too narrow to be fp8 by default, so "
            "`runtime.fp8.match` names them.",
        ),
        Case(
            "toy",
            "2 layers of width 128, 8 × 128 tokens",
            TOY_SHIPPED,
            TOY,
            batch=8,
            length=128,
            ms=8,
            warmup=50,
            steps=100,
            contenders=(
                *peers((1.5, 35), (1.5, 35), idle_gib=1),
                Contender(LIGHTNING_COMPILED, "lightning", {}, 1.5, 1, 35, is_peer=True),
                ours(GRAPH, "shipped", mode("graph"), 1.5, 35, idle_gib=1),
                ours(GRAPH_MASTERS, "shipped", masters("bf16"), 1.5, 35, idle_gib=1),
                ours(COMPILE, "shipped", mode("compile"), 1.5, 25, idle_gib=1),
                ours(EAGER, "shipped", mode("eager"), 1.5, 15, idle_gib=1),
            ),
        ),
        Case(
            "nanochat",
            "nanochat's GPT, depth 12, 32 × 1024 tokens",
            {},
            {},
            batch=32,
            length=1024,
            ms=60,
            steps=10,
            contenders=(
                Contender(NANOCHAT, "nanochat", {}, 20, 4, 60, is_peer=True),
                Contender(COMPILE, "nanochat_ours", {"mode": "compile"}, 20, 4, 60),
                Contender(GRAPH, "nanochat_ours", {"mode": "graph"}, 20, 19, 65),
            ),
            note="Both loops use nanochat's model, optimizer and learning rates; its schedules are left out of both.",
        ),
        Case(
            "llama8b",
            "Llama 3 8B shape, full training, 2 × 4096 tokens, bf16 weights, 8-bit AdamW",
            LLAMA_8B_SHIPPED,
            LLAMA_8B,
            batch=2,
            length=4096,
            ms=1100,
            warmup=6,
            steps=2,
            contenders=(
                peer(
                    HF_COMPILED + CHECKPOINTED,
                    70,
                    34,
                    120,
                    compiled=True,
                    checkpointing=True,
                    optim="adamw_torch_8bit",
                    dtype="bf16",
                ),
                peer(
                    HF_LIGER_COMPILED + CHECKPOINTED,
                    62,
                    34,
                    120,
                    compiled=True,
                    liger=True,
                    checkpointing=True,
                    optim="adamw_torch_8bit",
                    dtype="bf16",
                ),
                # Mode compile: a graph's pool would stay allocated while another contender takes its turn.
                ours(SHIPPED, "shipped", state_8bit("bf16", "compile"), 92, 110, idle_gib=34),
                ours(SHIPPED_FP8, "shipped", state_8bit("fp8", "compile"), 88, 110, idle_gib=34),
            ),
        ),
        Case(
            "lora8b",
            f"Llama 3 8B shape, LoRA of rank {LORA_RANK} on all linear layers, 4 × 2048 tokens, bf16 weights",
            LLAMA_8B_SHIPPED,
            LLAMA_8B,
            batch=4,
            length=2048,
            ms=700,
            warmup=6,
            steps=3,
            is_adapter_only=True,
            contenders=(
                peer(HF_COMPILED, 72, 18, 140, compiled=True, adapters=True, dtype="bf16"),
                peer(
                    HF_COMPILED + CHECKPOINTED,
                    50,
                    18,
                    110,
                    compiled=True,
                    checkpointing=True,
                    adapters=True,
                    dtype="bf16",
                ),
                peer(HF_LIGER, 74, 18, 30, compiled=False, liger=True, adapters=True, dtype="bf16"),
                peer(HF, 97, 18, 25, compiled=False, adapters=True, dtype="bf16"),
                ours(LORA, "shipped", lora("bf16"), 60, 100, idle_gib=18),
                ours(LORA_FP8, "shipped", lora("fp8"), 55, 105, idle_gib=18),
                ours(
                    LORA_FP8_LEAN,
                    "shipped",
                    lora("fp8", activation_checkpointing=["DecoderLayer"]),
                    28,
                    110,
                    idle_gib=18,
                ),
            ),
        ),
    )
}

MATRICES = Contender("bf16 matrix product", "matrices", gib=2, idle_gib=1.5, start_seconds=20)
"""Takes turns with the contenders of every command: the rate that a share of the device is measured against."""


@dataclass(frozen=True)
class Target:
    """What one of these contenders has to reach, against the fastest peer of the case."""

    title: str
    case: str
    contenders: tuple[str, ...]
    speed: float
    memory: float | None = None
    share: float | None = None
    baseline: str | None = None
    """The peer that it is compared with, if that is not the fastest."""

    def describe(self) -> str:
        parts = [f"≥ {self.speed:g}×" if self.case != "nanochat" else f"≤ {1 / self.speed:.3f}× the step time"]
        if self.memory is not None:
            parts.append(f"≤ {self.memory:g} of the memory")
        if self.share is not None:
            parts.append(f"≥ {self.share:g} of the matrix rate")
        return ", ".join(parts)


TARGETS = (
    Target("TinyLlama, shipped, bf16", "tinyllama", (SHIPPED, SHIPPED_LEAN), 1.35, memory=0.80),
    Target("TinyLlama, shipped, fp8", "tinyllama", (SHIPPED_FP8, SHIPPED_FP8_LEAN), 1.70, memory=0.65),
    Target("TinyLlama, shipped, bf16, 8-bit moments", "tinyllama", (SHIPPED_8BIT,), 1.35, memory=0.80),
    Target("TinyLlama, shipped, fp8, 8-bit moments", "tinyllama", (SHIPPED_FP8_8BIT,), 1.70, memory=0.65),
    Target("TinyLlama, transformers, bf16", "tinyllama", (THEIRS,), 1.30),
    Target("TinyLlama, transformers, fp8", "tinyllama", (THEIRS_FP8,), 1.55),
    Target("Qwen3-0.6B shape, transformers, bf16", "qwen3", (THEIRS,), 1.25),
    Target("Gemma 3 1B shape, transformers, bf16", "gemma3", (THEIRS,), 1.25),
    Target("GPT-2 small, bf16", "gpt2", (SHIPPED,), 1.40),
    Target("GPT-2 small, fp8", "gpt2", (SHIPPED_FP8, SHIPPED_ROWWISE), 1.45),
    Target("Llama-8B shape, full training, bf16", "llama8b", (SHIPPED,), 1.5, share=0.60),
    Target("Llama-8B shape, full training, fp8", "llama8b", (SHIPPED_FP8,), 2.0),
    Target("LoRA on the 8B", "lora8b", (LORA, LORA_FP8, LORA_FP8_LEAN), 2.0, memory=0.40),
    Target(
        "LoRA on the 8B, against Hugging Face Trainer + peft without compile or Liger",
        "lora8b",
        (LORA, LORA_FP8, LORA_FP8_LEAN),
        2.0,
        memory=0.40,
        baseline=HF,
    ),
    Target("nanochat's GPT in our loop", "nanochat", (COMPILE, GRAPH), 1 / 1.005),
    Target("toy model, graph mode", "toy", (GRAPH,), 18.0),
    Target("toy model, graph mode, bf16 weights", "toy", (GRAPH_MASTERS,), 18.0),
)


@dataclass(frozen=True)
class Stage:
    """Contenders of one case that are on the device together and take turns."""

    case: str
    contenders: tuple[Contender, ...]
    keeps_baseline: bool = False
    """True if the fastest peer of an earlier stage stays and takes turns with them."""


Kept = Mapping[str, tuple[float, float]]
"""The fastest peers of unfinished cases, by case: GiB while they wait, and GiB while they train."""


def next_wave(waiting: Mapping[str, Sequence[Contender]], kept: Kept, budget: float) -> list[Stage]:
    """Returns the stages that start together next, within `budget` GiB.

    One contender computes at a time, so a wave needs what all hold while they wait plus the largest amount that one of
    them needs in addition. The first unfinished case gives as many contenders as fit, peers first; others join it if
    all of theirs fit and more than 20 seconds are saved. A contender that does not fit next to its case's fastest peer
    runs without it.
    """
    idle = sum(need[0] for need in kept.values())
    extra = max((need[1] - need[0] for need in kept.values()), default=0.0)
    wave: list[Stage] = []
    for case, contenders in waiting.items():
        chosen, new_idle, new_extra = [], idle, extra
        for contender in contenders:
            wider = max(new_extra, contender.gib - contender.idle_gib)
            if new_idle + contender.idle_gib + wider <= budget:
                chosen.append(contender)
                new_idle, new_extra = new_idle + contender.idle_gib, wider
            elif contender.is_peer:
                break  # the fastest peer has to be known before the others
        joined = [each for stage in wave for each in stage.contenders]
        is_whole = len(chosen) == len(contenders)
        saved = starts(joined, budget) + starts(chosen, budget) - starts(joined + chosen, budget)
        if chosen and (not wave or (is_whole and saved > 20)):
            wave.append(Stage(case, tuple(chosen), case in kept))
            idle, extra = new_idle, new_extra
    if not wave:
        case = next(iter(waiting))
        wave = [Stage(case, (waiting[case][0],))]
    return wave


def without(waiting: Mapping[str, Sequence[Contender]], wave: list[Stage]) -> dict[str, list[Contender]]:
    """Returns what is left after a wave, without finished cases."""
    done = {(stage.case, each.name) for stage in wave for each in stage.contenders}
    left = {case: [each for each in some if (case, each.name) not in done] for case, some in waiting.items()}
    return {case: some for case, some in left.items() if some}


def plan_waves(cases: Iterable[Case], budget: float) -> list[list[Stage]]:
    """Returns all waves as expected; measured memory may change the later ones."""
    waiting = {case.name: list(case.contenders) for case in cases if case.contenders}
    kept: dict[str, tuple[float, float]] = {}
    waves = []
    while waiting:
        wave = next_wave(waiting, kept, budget)
        waiting = without(waiting, wave)
        for stage in wave:
            needs = [(each.idle_gib, each.gib) for each in stage.contenders if each.is_peer]
            kept[stage.case] = max([*needs, kept.get(stage.case, (0.0, 0.0))], key=lambda need: need[1])
        kept = {case: need for case, need in kept.items() if case in waiting and need[1]}
        waves.append(wave)
    return waves


def by_start(contenders: Iterable[Contender]) -> list[Contender]:
    """Returns the contenders in the order in which they start: those that take longest first."""
    return sorted(contenders, key=lambda each: -each.start_seconds)


def starts(contenders: Iterable[Contender], budget: float) -> float:
    """The expected seconds until all contenders are ready, each starting when there is memory for it."""
    waiting = by_start(contenders)
    now, held = 0.0, 0.0
    starting: list[tuple[float, Contender]] = []
    while waiting or starting:
        for each in list(waiting):
            if not starting or held + each.gib <= budget:
                held += each.gib
                starting.append((now + each.start_seconds, each))
                waiting.remove(each)
        now, ready = min(starting, key=lambda entry: entry[0])
        starting.remove((now, ready))
        held -= ready.gib - ready.idle_gib
    return now


def expected_seconds(wave: list[Stage], budget: float, rounds: int) -> float:
    """The expected time of a wave: the starts, then the turns."""
    seconds = starts([each for stage in wave for each in stage.contenders], budget)
    for stage in wave:
        case = CASES[stage.case]
        turns = rounds * (len(stage.contenders) + stage.keeps_baseline)
        seconds += turns * (case.steps + SETTLING_STEPS) * case.ms / 1e3
    return seconds


# Of width 64, so that 8-bit state has matrices of 4,096 elements, its smallest.
TINY_SHIPPED = {"hidden_size": 64, "num_layers": 3, "num_heads": 2, "vocab_size": 64, "max_positions": 32}
TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
TINY_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 64, "n_positions": 32}


def shrink(case: Case) -> Case:
    """Returns the case for a dry run: the same parts, small enough for a CPU."""
    shipped, theirs = dict(case.shipped), dict(case.transformers)
    if shipped:
        shipped |= TINY_SHIPPED
        shipped |= {"num_kv_heads": 1, "intermediate_size": 128} if shipped["type"] == "llama" else {}
    if "n_embd" in theirs:
        theirs |= TINY_GPT2
    elif theirs:
        theirs |= TINY | {"num_key_value_heads": 1, "intermediate_size": 128, "max_position_embeddings": 32}
        theirs |= {"head_dim": 16} if "head_dim" in theirs else {}
    return replace(case, shipped=shipped, transformers=theirs, batch=2, length=32, warmup=5, steps=3, ms=20)


def shrink_fp8(settings: Settings) -> Settings:
    """Returns settings for a dry run: in fp8 the layers named by the case may not exist, and none is large enough."""
    runtime = settings["runtime"]
    if runtime.get("precision") != "fp8":
        return settings
    recipe = runtime.get("fp8", {}).get("recipe", "tensorwise")
    return {**settings, "runtime": {**runtime, "fp8": {"match": ["*_proj"], "recipe": recipe}}}
