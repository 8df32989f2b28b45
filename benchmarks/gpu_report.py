"""What benchmarks/gpu.py found, as JSON and as tables: one for each case, and one of the bars."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from data_rounds import table
from gpu_cases import (
    CASES,
    COMPILE,
    GRAPH,
    HF,
    HF_COMPILED,
    LEAN,
    LEAN_MASTERS,
    LIGHTNING,
    LIGHTNING_COMPILED,
    MASTERS,
    MASTERS_GRAPH,
    MATRICES,
    OURS,
    RAW_OURS,
    REPEATED_BLOCKS,
)

PEERS = (HF, HF_COMPILED, LIGHTNING, LIGHTNING_COMPILED)
SAME_WORK = (OURS, COMPILE, GRAPH)
WITH_MASTERS = (MASTERS, MASTERS_GRAPH)

Found = dict[str, Any]


def tell(job: Any, found: Found) -> str:
    """One line for the terminal."""
    name = f"{job.contender.name:52}"
    if not found["ok"]:
        return f"{name} FAILED: {found['error'].splitlines()[0][:160]}"
    if "tflops" in found:
        return f"{name} {found['tflops']:.0f} TFLOP/s"
    speed = f"{statistics.median(found['ms']):9.3f} ms a step" if "ms" in found else " " * 20
    memory = f", {found['peak_gib']:.1f} GiB" if "peak_gib" in found else ""
    losses = ", ".join(f"{found[key]:.4f}" for key in ("loss_before", "loss_after") if key in found)
    return f"{name} {speed}{memory}, {found['seconds_to_step_10']:.1f} s to step 10, loss {losses}"


class Report:
    """The results so far, by case and contender."""

    def __init__(self, machine: dict[str, str], command: str) -> None:
        self._machine = machine
        self._command = command
        self.results: dict[str, dict[str, Found]] = {}

    def note(self, case: str, contender: str, found: Found) -> None:
        self.results.setdefault(case, {})[contender] = found

    def write(self, folder: Path) -> None:
        """Replaces gpu.json and gpu.md."""
        content = {"machine": self._machine, "command": self._command, "results": self.results}
        (folder / "gpu.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (folder / "gpu.md").write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """The whole report in Markdown."""
        facts = ", ".join(f"{name} {value}" for name, value in self._machine.items() if name != "device")
        parts = ["# Training speed on one GPU", f"```\n{self._command}\n```", f"{self._machine['device']}; {facts}."]
        if self._machine["device"] == "cpu":
            parts += ["A dry run on a CPU: the figures mean nothing."]
        parts += ["## Bars", self.bars()]
        for case in [name for name in CASES if name in self.results]:
            parts += [f"## {CASES[case].title}", self._case_table(case)]
        failures = [
            f"- {case}, {name}: {found['error'].strip()}"
            for case, by_name in self.results.items()
            for name, found in by_name.items()
            if not found["ok"]
        ]
        if failures:
            parts += ["## What failed or was left out", "\n".join(failures)]
        return "\n\n".join(parts) + "\n"

    # single figures; None where a run that they need failed

    def ms(self, case: str, name: str) -> float | None:
        """The median of the rounds, in milliseconds a step."""
        rounds = self._get(case, name, "ms")
        return statistics.median(rounds) if rounds else None

    def best(self, case: str, names: Iterable[str]) -> str | None:
        """The fastest of these contenders."""
        times = {name: time for name in names if (time := self.ms(case, name)) is not None}
        return min(times, key=times.__getitem__) if times else None

    def share(self, case: str, name: str) -> float | None:
        """The share of the measured matrix rate that a contender reaches."""
        ms, rate = self.ms(case, name), self._get("tinyllama", MATRICES, "tflops")
        if ms is None or rate is None:
            return None
        flops = CASES[case].flops_per_token() * CASES[case].tokens
        return float(flops / ms / 1e9 / rate)

    def _get(self, case: str, name: str | None, key: str) -> Any:
        return self.results.get(case, {}).get(name or "", {}).get(key)

    def _case_table(self, case: str) -> str:
        baseline = self.ms(case, HF_COMPILED)
        rows = []
        for name, found in self.results[case].items():
            ms = self.ms(case, name)
            if ms is None:
                if "seconds_to_step_10" in found:  # it was only started
                    rows.append([name, *[""] * 6, f"{found['seconds_to_step_10']:.1f}", ""])
                continue
            low, high = min(found["ms"]), max(found["ms"])
            share = self.share(case, name)
            rows.append(
                [
                    name,
                    f"{ms:,.3f} ({low:,.3f}–{high:,.3f})",
                    f"{CASES[case].tokens / ms * 1e3:,.0f}",
                    f"{baseline / ms:.2f}" if baseline else "",
                    f"{share:.3f}" if share else "",
                    f"{found['peak_gib']:.1f}" if "peak_gib" in found else "",
                    f"{found['reserved_gib']:.1f}" if "reserved_gib" in found else "",
                    f"{found['seconds_to_step_10']:.1f}",
                    f"{found['loss_after']:.4f}" if "loss_after" in found else "",
                ]
            )
        head = ["", "ms a step (range of rounds)", "tokens/s", f"times {HF_COMPILED}", "share of matrix rate"]
        head += ["GiB at the peak", "GiB reserved", "s to step 10", "loss after"]
        rate = self._get(case, MATRICES, "tflops")
        note = f"\n\nLarge bf16 matrix products: {rate:.0f} TFLOP/s." if rate else ""
        return table(head, rows) + note

    def bars(self) -> str:
        """The table of the bars: what was reached, and whether that is enough."""
        rows = []
        for title, bar, is_met, find in self._bars():
            value = find()
            verdict = "not measured" if value is None else "met" if is_met(value) else "missed"
            rows.append([title, bar, "" if value is None else f"{value:.4g}", verdict])
        return table(["case", "bar", "measured", ""], rows)

    def _bars(self) -> list[tuple[str, str, Callable[[float], bool], Callable[[], float | None]]]:
        def at_least(limit: float) -> tuple[str, Callable[[float], bool]]:
            return f"≥ {limit:g}", lambda value: value >= limit

        def at_most(limit: float) -> tuple[str, Callable[[float], bool]]:
            return f"≤ {limit:g}", lambda value: value <= limit

        def speed(case: str, ours: Iterable[str], peers: Iterable[str]) -> float | None:
            peer = self.best(case, peers)
            return quotient(self.ms(case, peer or ""), self.ms(case, self.best(case, ours) or ""))

        def memory(ours: Iterable[str]) -> float | None:
            own = self._get("tinyllama", self.best("tinyllama", ours), "peak_gib")
            return quotient(own, self._get("tinyllama", HF_COMPILED, "peak_gib"))

        def start(name: str) -> float | None:
            seconds: float | None = self._get("tinyllama", name, "seconds_to_step_10")
            return seconds

        def overhead() -> float | None:
            times = quotient(self.ms("tinyllama", COMPILE), self.ms("tinyllama", RAW_OURS))
            return None if times is None else 100 * (times - 1)

        masters = "with bf16 weights and fp32 masters"
        llama = "TinyLlama"
        return [
            (
                f"{llama}: speed over {HF_COMPILED}",
                *at_least(1.25),
                lambda: speed("tinyllama", SAME_WORK, [HF_COMPILED]),
            ),
            (f"the same {masters}", *at_least(1.25), lambda: speed("tinyllama", WITH_MASTERS, [HF_COMPILED])),
            (
                f"{llama}: share of the measured bf16 matrix rate",
                *at_least(0.60),
                lambda: self.share("tinyllama", self.best("tinyllama", SAME_WORK) or ""),
            ),
            (
                f"the same {masters}",
                *at_least(0.60),
                lambda: self.share("tinyllama", self.best("tinyllama", WITH_MASTERS) or ""),
            ),
            (f"{llama}: peak memory over {HF_COMPILED}", *at_most(0.80), lambda: memory(SAME_WORK)),
            (f"the same {masters}", *at_most(0.80), lambda: memory(WITH_MASTERS)),
            ("the same with a memory budget", *at_most(0.80), lambda: memory([LEAN])),
            (f"its speed over {HF_COMPILED}", *at_least(1.25), lambda: speed("tinyllama", [LEAN], [HF_COMPILED])),
            ("the same with masters and a memory budget", *at_most(0.80), lambda: memory([LEAN_MASTERS])),
            (
                f"its speed over {HF_COMPILED}",
                *at_least(1.25),
                lambda: speed("tinyllama", [LEAN_MASTERS], [HF_COMPILED]),
            ),
            ("toy model: graph mode over the best peer", *at_least(15), lambda: speed("toy", [GRAPH], PEERS)),
            ("GPT-2 small: over the best peer", *at_least(1.25), lambda: speed("gpt2", SAME_WORK, PEERS)),
            (f"the same {masters}", *at_least(1.25), lambda: speed("gpt2", WITH_MASTERS, PEERS)),
            (
                "cold start to step 10, scan over none",
                *at_most(0.5),
                lambda: quotient(start(REPEATED_BLOCKS), start(COMPILE)),
            ),
            ("loop over a raw one with the same compiled model, %", *at_most(1), overhead),
            ("CPU: µs over a raw loop, default hooks", *at_most(40), lambda: self._overhead("trainwright")),
            ("CPU: graph mode's µs over the raw loop", *at_most(0), lambda: self._overhead("trainwright (graph)")),
        ]

    def _overhead(self, name: str) -> float | None:
        found = (self._get("cpu", "overhead", "results") or {}).get(name)
        return None if found is None or "over_raw" not in found else float(found["over_raw"])


def quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
