"""What benchmarks/gpu.py measures: the cases (a model and its batch) and, for each, who takes part.

Nothing here imports torch: gpu.py plans with it, gpu_contenders.py runs what it names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM, LOG_EVERY = 1e-4, 0.01, 1.0, 50
NUM_BATCHES = 4  # of different rows: few, so that losses fall within a run, and tell whether all did the same


@dataclass(frozen=True)
class Case:
    """A model of ours, given by the constructor's keywords, and the batches that it is trained on."""

    name: str
    title: str
    model: str
    sizes: dict[str, Any]
    blocks: str
    batch: int
    length: int
    warmup: int
    """Steps before the clock runs, at least 10: compiling, capturing, first allocations."""
    steps: int
    """Steps of one round."""

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.batch * self.length

    def flops_per_token(self) -> float:
        """Matrix arithmetic of forward and backward: 6 for each weight but the embedding's, and causal attention."""
        size = self.sizes
        width, heads = size["hidden_size"], size["num_heads"]
        kv = width * size.get("num_kv_heads", heads) // heads
        if self.model == "llama":
            block = 2 * width * width + 2 * width * kv + 3 * width * size["intermediate_size"]
        else:
            block = 12 * width * width
        weights = size["num_layers"] * block + width * size["vocab_size"]
        return 6.0 * weights + 6.0 * size["num_layers"] * width * self.length


@dataclass(frozen=True)
class Contender:
    """Who trains a case: the framework, and what it is told."""

    name: str
    framework: str
    """huggingface, lightning, raw, trainwright or matrices."""
    options: dict[str, Any] = field(default_factory=dict)
    is_extra: bool = False
    """Does no bar need it? Then it runs last, if there is time."""
    least_seconds: float = 15.0
    """With less time left it is not begun."""


CASES = {
    case.name: case
    for case in (
        Case(
            "tinyllama",
            "TinyLlama-1.1B, 8 × 2048 tokens, bf16",
            "llama",
            {
                "vocab_size": 32000,
                "hidden_size": 2048,
                "num_layers": 22,
                "num_heads": 32,
                "num_kv_heads": 4,
                "intermediate_size": 5632,
                "max_positions": 2048,
                "tie_embeddings": False,
            },
            "model.layers",
            batch=8,
            length=2048,
            warmup=12,
            steps=8,
        ),
        Case(
            "toy",
            "2 layers of width 128, 8 × 128 tokens, bf16",
            "llama",
            {
                "vocab_size": 1024,
                "hidden_size": 128,
                "num_layers": 2,
                "num_heads": 4,
                "num_kv_heads": 4,
                "intermediate_size": 384,
                "max_positions": 128,
                "tie_embeddings": False,
            },
            "model.layers",
            batch=8,
            length=128,
            warmup=50,
            steps=200,
        ),
        Case(
            "gpt2",
            "GPT-2 small, 32 × 1024 tokens, bf16, without dropout",
            "gpt2",
            {
                "vocab_size": 50257,
                "hidden_size": 768,
                "num_layers": 12,
                "num_heads": 12,
                "max_positions": 1024,
                "dropout": 0.0,
                "attention_dropout": 0.0,
            },
            "transformer.h",
            batch=32,
            length=1024,
            warmup=12,
            steps=12,
        ),
    )
}

EAGER, COMPILED = {"compiled": False}, {"compiled": True}
HF, HF_COMPILED = "Hugging Face Trainer", "Hugging Face Trainer + compile"
LIGHTNING, LIGHTNING_COMPILED = "Lightning", "Lightning + compile"
RAW, RAW_COMPILED, RAW_OURS = "raw loop", "raw loop + compile", "raw loop + compile, our model"
OURS, COMPILE, GRAPH = "trainwright (eager)", "trainwright (compile)", "trainwright (graph)"
MASTERS, MASTERS_GRAPH = (f"{ours}, bf16 weights + fp32 masters" for ours in (COMPILE, GRAPH))
BUDGET = 0.8
LEAN, LEAN_MASTERS = (f"{ours}, memory budget {BUDGET}" for ours in (GRAPH, MASTERS_GRAPH))
REPEATED_BLOCKS, MATRICES = "trainwright (compile), scan", "bf16 matrix product"

MODES = {OURS: "eager", COMPILE: "compile", GRAPH: "graph"}


def _ours(*names: str, least_seconds: float = 15.0) -> list[Contender]:
    return [Contender(name, "trainwright", {"mode": MODES[name]}, least_seconds=least_seconds) for name in names]


def _extra(*contenders: Contender) -> list[Contender]:
    return [replace(each, is_extra=True) for each in contenders]


CONTENDERS = {
    "tinyllama": [
        Contender(MATRICES, "matrices"),
        # Both start cold. The first compiles before anybody else; what it has compiled serves those that follow.
        Contender(COMPILE, "trainwright", {"mode": "compile", "is_cold": True}, least_seconds=40),
        Contender(
            REPEATED_BLOCKS,
            "trainwright",
            {"mode": "compile", "is_cold": True, "compile_repeated_blocks": True, "only_start": True},
        ),
        Contender(HF_COMPILED, "huggingface", COMPILED, least_seconds=40),
        *_ours(GRAPH, least_seconds=30),
        Contender(MASTERS_GRAPH, "trainwright", {"mode": "graph", "masters": True}, least_seconds=30),
        Contender(LEAN, "trainwright", {"mode": "graph", "budget": BUDGET}, least_seconds=30),
        Contender(LEAN_MASTERS, "trainwright", {"mode": "graph", "masters": True, "budget": BUDGET}, least_seconds=30),
        Contender(RAW_OURS, "raw", {"compiled": True, "model": "ours"}, least_seconds=30),
        *_extra(*_ours(OURS)),
        *_extra(
            Contender(MASTERS, "trainwright", {"mode": "compile", "masters": True}, least_seconds=30),
            Contender(RAW_COMPILED, "raw", COMPILED, least_seconds=30),
            Contender(HF, "huggingface", EAGER, least_seconds=30),
        ),
    ],
    "toy": [
        Contender(HF_COMPILED, "huggingface", COMPILED),
        Contender(LIGHTNING_COMPILED, "lightning", COMPILED),
        *_ours(GRAPH, COMPILE, OURS),
        *_extra(
            Contender(HF, "huggingface", EAGER),
            Contender(LIGHTNING, "lightning", EAGER),
            Contender(RAW, "raw", EAGER),
            Contender(RAW_COMPILED, "raw", COMPILED),
        ),
    ],
    "gpt2": [
        Contender(HF_COMPILED, "huggingface", COMPILED),
        *_ours(GRAPH),
        Contender(MASTERS_GRAPH, "trainwright", {"mode": "graph", "masters": True}),
        Contender(LIGHTNING_COMPILED, "lightning", COMPILED, least_seconds=60),
        *_extra(*_ours(COMPILE, OURS)),
    ],
}

TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64}


def shrink(case: Case) -> Case:
    """Returns the case for a dry run: the same parts, so small that a CPU runs all of them in a minute or two."""
    kept = {name: value for name, value in case.sizes.items() if name not in ("num_kv_heads", "intermediate_size")}
    if case.model == "llama":
        kept |= {"num_kv_heads": 1, "intermediate_size": 64}
    return replace(case, sizes={**kept, **TINY, "max_positions": 32}, batch=2, length=32, warmup=10, steps=3)
