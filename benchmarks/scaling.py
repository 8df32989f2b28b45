"""What a step sends, and how much of its time that costs, from 8 to 4,096 ranks: by imaginary ranks and arithmetic.

    python benchmarks/scaling.py [--models 1b 8b 70b] [--output benchmarks/results]

Each case is the real run, built and stepped on imaginary ranks (src/trainwright/analysis): collectives, bytes and
memory are counted, not modelled. Time is modelled, from the assumptions below, which the tables repeat.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainwright import RunConfig
from trainwright.analysis.estimate import measure_step
from trainwright.analysis.fake_ranks import imagine
from trainwright.analysis.shard import Collective, CollectiveRecorder

RANKS_PER_HOST = 8
NVLINK = 360e9  # bytes a second between the ranks of a host, one way: 80 % of 450 GB/s
NETWORK = 40e9  # bytes a second from a rank to another host: 80 % of 400 Gbit/s
HOP_WITHIN, HOP_BETWEEN = 1.5e-6, 5e-6  # seconds that one hop of a ring takes, however little it carries
ARITHMETIC = 365e12  # operations per second of a rank without waits: torchtitan's 8b, compiled, on 8 H100
HIDDEN_AXES = {"fsdp", "replicate", "context", "fsdp × context"}  # FSDP overlaps with arithmetic; tensor does not

LENGTH = 8192
MODELS = {
    "1b": {"preset": "llama3-1b", "micro": 4, "tensor": 1, "activation_checkpointing": None},
    "8b": {"preset": "llama3-8b", "micro": 2, "tensor": 1, "activation_checkpointing": None},
    "70b": {"preset": "llama3-70b", "micro": 16, "tensor": 8, "activation_checkpointing": ["DecoderLayer"]},
}
WORLDS = {"1b": (8, 64, 512, 4096), "8b": (8, 64, 128, 512, 4096), "70b": (8, 64, 256, 512, 4096)}
LARGEST_SHARD = 64
"""From this many ranks along fsdp on, full replicas are used, because a ring over thousands of ranks waits for its
hops."""
PUBLISHED = {  # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: tokens a second and GPU, H100, end of 2024
    ("8b", 8): "5,762 (6,667 compiled)",
    ("8b", 128): "5,605 (6,514 compiled)",
    ("70b", 256): "829 (compiled, float8)",
}


@dataclass(frozen=True)
class Case:
    """One model on one number of ranks."""

    model: str
    ranks: int
    mesh: dict[str, int]
    collectives: list[Collective]
    num_parameters: int
    num_layers: int
    hidden_size: int
    tokens: int
    """Of one rank's batch; ranks along tensor share it."""
    recomputes: bool
    peak_bytes: int

    @property
    def tensor(self) -> int:
        return self.mesh.get("tensor", 1)

    @property
    def arithmetic_seconds(self) -> float:
        """Of a step on one rank: forward, backward and, where it is, the forward once more."""
        passes = 4 / 3 if self.recomputes else 1.0
        a_token = 6 * self.num_parameters + 6 * self.num_layers * self.hidden_size * LENGTH  # causal attention
        return passes * a_token * self.tokens / self.tensor / ARITHMETIC

    def seconds(self, collective: Collective) -> float:
        """Of all calls of a collective, by a ring."""
        own = self._members_per_host(collective)
        speed = NVLINK if own == collective.num_ranks else min(NVLINK, own * NETWORK)
        hops_between = 0 if own == collective.num_ranks else collective.num_ranks // own
        hops = (collective.num_ranks - 1) * HOP_WITHIN + hops_between * HOP_BETWEEN
        return collective.sent_bytes / speed + collective.count * hops

    def _members_per_host(self, collective: Collective) -> int:
        """How many ranks of a group share a host: the faster axes fill it first."""
        inner = self.tensor if "tensor" not in collective.axis else 1
        if collective.axis == "replicate":
            inner *= self.mesh.get("fsdp", 1)
        return max(1, min(RANKS_PER_HOST // min(inner, RANKS_PER_HOST), collective.num_ranks))

    @property
    def hidden_seconds(self) -> float:
        return sum(self.seconds(each) for each in self.collectives if each.axis in HIDDEN_AXES)

    @property
    def waiting_seconds(self) -> float:
        """What no arithmetic hides: the tensor axis, and the first gather and the last reduction of a step."""
        along_tensor = sum(self.seconds(each) for each in self.collectives if each.axis not in HIDDEN_AXES)
        return along_tensor + self.hidden_seconds / self.num_layers

    @property
    def step_seconds(self) -> float:
        return max(self.arithmetic_seconds, self.hidden_seconds) + self.waiting_seconds

    @property
    def efficiency(self) -> float:
        return self.arithmetic_seconds / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.tokens / self.tensor / self.step_seconds


def mesh_of(model: str, ranks: int) -> dict[str, int]:
    tensor = int(MODELS[model]["tensor"])  # type: ignore[call-overload]
    data = min(ranks // tensor, LARGEST_SHARD if ranks > 256 else ranks)
    mesh = {"replicate": ranks // tensor // data, "fsdp": data, "tensor": tensor}
    return {axis: size for axis, size in mesh.items() if size > 1}


def config_of(model: str, mesh: dict[str, int]) -> RunConfig:
    facts = MODELS[model]
    section = {"type": "llama", "preset": facts["preset"]} | (
        {"activation_checkpointing": facts["activation_checkpointing"]} if facts["activation_checkpointing"] else {}
    )
    return RunConfig.from_dict(
        {
            "name": f"scaling-{model}",
            "model": section,
            "trainer": {
                "type": "language_model",
                "max_steps": 1,
                "micro_batch_size": facts["micro"],
                "max_grad_norm": 1.0,
                "optimizer": {"type": "adamw"},
            },
            "runtime": {"device": "cuda", "precision": "bf16", "mesh": mesh},
        }
    )


def plan(model: str, ranks: int) -> Case:
    """Counts one case."""
    mesh = mesh_of(model, ranks)
    with imagine(config_of(model, mesh), world_size=ranks, sequence_length=LENGTH) as run:
        recorder = CollectiveRecorder(run.mesh)
        with recorder:
            watch = measure_step(run)
        steps = 2  # a first one, and the one that is watched; both say the same
        collectives = [
            replace(each, count=each.count // steps, num_bytes=each.num_bytes // steps) for each in recorder.found
        ]
        settings = run.trainer.model.settings
        return Case(
            model=model,
            ranks=ranks,
            mesh=mesh,
            collectives=collectives,
            num_parameters=run.whole.num_parameters,
            num_layers=settings["num_layers"],
            hidden_size=settings["hidden_size"],
            tokens=run.plan.micro_batch_size * LENGTH,
            recomputes=MODELS[model]["activation_checkpointing"] is not None,
            peak_bytes=sum(watch.peak.values()),
        )


def table(cases: list[Case]) -> str:
    """The table of docs/scaling.md."""
    lines = [
        "| model | ranks | mesh | all-gather | reduce-scatter | all-reduce | tensor | memory | arithmetic | "
        "overlapped communication | exposed communication | efficiency | tokens/s per rank | torchtitan, published |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for case in cases:
        kinds = [_shown(case, kind) for kind in ("all-gather", "reduce-scatter", "all-reduce")]
        along_tensor = sum(each.sent_bytes for each in case.collectives if each.axis == "tensor")
        seconds = [case.arithmetic_seconds, case.hidden_seconds, case.waiting_seconds]
        cells = [
            case.model,
            f"{case.ranks:,}",
            " × ".join(f"{axis} {size}" for axis, size in case.mesh.items()),
            *kinds,
            f"{along_tensor / 1e9:.1f} GB" if along_tensor else "–",
            f"{case.peak_bytes / 1e9:.0f} GB",
            *(f"{each:.2f} s" for each in seconds),
            f"{case.efficiency:.0%}",
            f"{case.tokens_per_second:,.0f}",
            PUBLISHED.get((case.model, case.ranks), ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(case: Case, kind: str) -> str:
    """Times and bytes of a kind along fsdp and replicate; what is smaller than a megabyte is left out."""
    chosen = [each for each in case.collectives if each.kind == kind and each.axis in HIDDEN_AXES]
    count, size = sum(each.count for each in chosen), sum(each.sent_bytes for each in chosen)
    return f"{count} × , {size / 1e9:.1f} GB".replace(" × ,", " ×,") if size > 1e6 else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    cases = []
    for model in chosen.models:
        for ranks in WORLDS[model]:
            start = time.perf_counter()
            cases.append(plan(model, ranks))
            seconds = time.perf_counter() - start
            print(f"{model} on {ranks} ranks: {math.ceil(seconds)} s", flush=True)
    print(table(cases))
    if chosen.output is not None:
        (chosen.output / "scaling.md").write_text(table(cases), encoding="utf-8")
        content = [asdict(each) | {"efficiency": each.efficiency} for each in cases]
        (chosen.output / "scaling.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
