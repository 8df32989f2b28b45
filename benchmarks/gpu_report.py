"""The results of benchmarks/gpu.py as JSON and as tables: the targets, and one table per case."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from textwrap import shorten
from typing import Any

from data_rounds import table
from gpu_cases import CASES, TARGETS, Case, Target

Found = dict[str, Any]
CONVERGENCE_TITLE = "validation loss after 1,000 steps of a 124M model, fp8 against bf16"
CONVERGENCE_LIMIT = 0.005


class Report:
    """The results so far, by case and contender. A case keeps the command and the machine that it was measured with."""

    def __init__(self, machine: dict[str, str], command: str) -> None:
        self._machine, self._command = machine, command
        self.cases: dict[str, dict[str, Any]] = {}
        self.convergence: Found | None = None

    @classmethod
    def merged(cls, files: list[Path]) -> Report:
        """Returns one report of several files; a later file replaces a case of an earlier one."""
        report = cls({}, "")
        for file in files:
            content = json.loads(file.read_text(encoding="utf-8"))
            if "cases" not in content:
                report.convergence = content
                continue
            for name, case in content["cases"].items():
                old = report.cases.get(name, {"contenders": {}})["contenders"]
                if missing := [each for each in old if old[each]["ok"] and each not in case["contenders"]]:
                    raise SystemExit(
                        f"{file}: the case {name} is also in an earlier file, with the contender {missing[0]}, which "
                        "this one lacks. Contenders of one case take turns in one command: give one file per case."
                    )
                report.cases[name] = case
        return report

    def note(self, case: str, contender: str, found: Found) -> None:
        entry = self.cases.setdefault(
            case,
            {
                "machine": self._machine,
                "command": self._command,
                "note": CASES[case].note,
                "tflops": [],
                "contenders": {},
            },
        )
        entry["contenders"][contender] = found

    def add_rates(self, case: str, tflops: list[float]) -> None:
        """Keeps the rates of matrix products that were measured between the case's turns."""
        if case in self.cases:
            self.cases[case]["tflops"] += tflops

    def write(self, folder: Path) -> None:
        """Replaces gpu.json and gpu.md."""
        convergence = folder / "convergence.json"
        if self.convergence is None and convergence.exists():
            self.convergence = json.loads(convergence.read_text(encoding="utf-8"))
        (folder / "gpu.json").write_text(json.dumps({"cases": self.cases}, indent=2) + "\n", encoding="utf-8")
        (folder / "gpu.md").write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """The whole report in Markdown."""
        parts = ["# Training speed on one GPU", INTRODUCTION, "## Targets", self.targets()]
        for name in [name for name in CASES if name in self.cases]:
            case, entry = CASES[name], self.cases[name]
            facts = ", ".join(f"{key} {value}" for key, value in entry["machine"].items() if key != "device")
            parts += [f"## {case.title}", f"```\n{entry['command']}\n```", f"{entry['machine']['device']}; {facts}."]
            if entry["machine"]["device"] == "cpu":
                parts += ["A dry run on a CPU: the figures mean nothing."]
            parts += [self._case_table(case)]
            if entry["tflops"]:
                low, high = min(entry["tflops"]), max(entry["tflops"])
                rate = f"{statistics.median(entry['tflops']):.0f} TFLOP/s ({low:.0f}–{high:.0f})"
                parts += [f"Large bf16 matrix products between the turns: {rate}."]
            if note := entry.get("note", case.note):
                parts += [note]
            if settings := self._settings(case):
                parts += [f"Settings of trainwright:\n\n{settings}"]
            if failures := [
                f"- {each}: {shorten(' '.join(found['error'].split()), 300)}"
                for each, found in entry["contenders"].items()
                if not found["ok"]
            ]:
                parts += ["Failed or left out:\n\n" + "\n".join(failures)]
        if self.convergence is not None:
            parts += ["## Convergence of fp8", self.convergence["text"]]
        return "\n\n".join(parts) + "\n"

    # single figures; None where a run that they need failed

    def _found(self, case: str, name: str | None) -> Found:
        found: Found = self.cases.get(case, {}).get("contenders", {}).get(name or "", {})
        return found

    def ms(self, case: str, name: str | None, wave: str | None = None) -> float | None:
        """The median milliseconds per step, of one wave or of all of them."""
        by_wave = self._found(case, name).get("ms", {})
        rounds = [ms for key, values in by_wave.items() if wave in (None, key) for ms in values]
        return statistics.median(rounds) if rounds else None

    def baseline(self, case: str) -> str | None:
        """The fastest peer that was measured, by the turns of its first wave: further ones had other company."""
        names = [each.name for each in CASES[case].contenders if each.is_peer]
        waves = {name: next(iter(self._found(case, name).get("ms", {})), None) for name in names}
        times = {name: ms for name, wave in waves.items() if wave and (ms := self.ms(case, name, wave)) is not None}
        return min(times, key=times.__getitem__) if times else None

    def speed(self, case: str, name: str, baseline: str | None = None) -> float | None:
        """How many times as fast as the baseline, whose turns of the same wave count where there are any."""
        waves = self._found(case, name).get("ms", {})
        baseline = baseline or self.baseline(case)
        if not waves or baseline is None:
            return None
        wave = next(iter(waves)) if name != baseline else None  # only the baseline stays for several
        return quotient(self.ms(case, baseline, wave) or self.ms(case, baseline), self.ms(case, name))

    def memory(self, case: str, name: str, baseline: str | None = None) -> float | None:
        """The peak memory over the baseline's."""
        own, other = (self._found(case, each).get("peak_gib") for each in (name, baseline or self.baseline(case)))
        return quotient(own, other)

    def share(self, case: str, name: str) -> float | None:
        """The share of the measured bf16 matrix rate."""
        ms, rates, flops = self.ms(case, name), self.cases[case]["tflops"], CASES[case].flops_per_token()
        if ms is None or not rates or flops is None:
            return None
        return flops * CASES[case].tokens / ms / 1e9 / statistics.median(rates)

    def line(self, case: str, name: str) -> str:
        """One line for the terminal."""
        found, ms = self._found(case, name), self.ms(case, name)
        if ms is None:
            return f"{case}: {name}: not measured"
        speed = self.speed(case, name)
        parts = [f"{ms:.3f} ms per step", *([] if speed is None else [f"{speed:.2f}×"])]
        if "peak_gib" in found:
            parts += [f"{found['peak_gib']:.1f} GiB ({shown(self.memory(case, name))})"]
        losses = " → ".join(f"{found[key]:.4f}" for key in ("loss_before", "loss_after") if key in found)
        return f"{case}: {name}: {', '.join(parts)}, loss {losses}"

    def _case_table(self, case: Case) -> str:
        rows = []
        baseline = self.baseline(case.name)
        for name in [each.name for each in case.contenders]:
            found, ms = self._found(case.name, name), self.ms(case.name, name)
            if ms is None:
                continue
            every = [value for values in found["ms"].values() for value in values]
            speed, memory, share = (find(case.name, name) for find in (self.speed, self.memory, self.share))
            losses = [f"{found[key]:.4f}" for key in ("loss_before", "loss_after") if key in found]
            rows.append(
                [
                    f"**{name}**" if name == baseline else name,
                    f"{ms:,.3f} ({min(every):,.3f}–{max(every):,.3f})",
                    f"{case.tokens / ms * 1e3:,.0f}",
                    shown(speed),
                    shown(share, 3),
                    shown(found.get("peak_gib"), 1),
                    shown(memory),
                    shown(found.get("start_seconds"), 0),
                    " → ".join(losses) + f" ({found['steps']} steps)",
                ]
            )
        head = ["", "ms per step (range of turns)", "tokens/s", "speed", "share of the matrix rate", "GiB at the peak"]
        return table([*head, "memory", "s to start", "loss on the first batch"], rows)

    def _settings(self, case: Case) -> str:
        lines = []
        for name, found in self.cases[case.name]["contenders"].items():
            if "kind" in (options := found.get("options", {})):
                model = case.shipped if options["kind"] == "shipped" else case.transformers
                lines.append(f"- {name}: `{model['type']}`, `{json.dumps(options['settings'])}`")
        return "\n".join(lines)

    def targets(self) -> str:
        """The table of the targets: what was reached, and whether that is enough."""
        rows = [self._target(target) for target in TARGETS]
        verdict, measured = "not measured", ""
        if self.convergence is not None and self.convergence["relative_difference"] is not None:
            change = self.convergence["relative_difference"]
            measured = f"{100 * change:+.2f} %"
            verdict = "met" if abs(change) <= CONVERGENCE_LIMIT else "missed"
        rows.append([CONVERGENCE_TITLE, f"within {100 * CONVERGENCE_LIMIT:g} %", measured, verdict])
        return table(["case on one GPU", "target", "measured", ""], rows)

    def _target(self, target: Target) -> list[str]:
        """A row of the table: the fastest contender that meets the target, or the fastest of all."""
        found = []
        for name in target.contenders:
            speed = self.speed(target.case, name, target.baseline)
            if speed is not None:
                memory, share = self.memory(target.case, name, target.baseline), self.share(target.case, name)
                is_met = speed >= target.speed
                is_met &= target.memory is None or (memory is not None and memory <= target.memory)
                is_met &= target.share is None or (share is not None and share >= target.share)
                found.append((is_met, speed, memory, share, name))
        if not found:
            return [target.title, target.describe(), "", "not measured"]
        is_met, speed, memory, share, name = max(found, key=lambda each: each[:2])
        measured = f"{speed:.2f}×" if target.case != "nanochat" else f"{1 / speed:.4f}× the step time"
        measured += f", {memory:.2f} of the memory" if memory is not None else ""
        measured += f", {share:.2f} of the matrix rate" if target.share is not None and share is not None else ""
        measured += f" ({name})" if len(target.contenders) > 1 else ""
        return [target.title, target.describe(), measured, "met" if is_met else "missed"]


INTRODUCTION = """\
Contenders train the same shape from the same weights on the same rows. They compile at the same time and then take
turns; times are medians of the turns, with the range. `speed` and `memory` are relative to the baseline, in bold: the
fastest of Hugging Face Trainer with torch.compile and with Liger-Kernel (compiled or not), or what a case names. Peers
keep fp32 weights and `bf16=True`, unless the case says bf16 weights; no contender has settings beyond those that its
documentation recommends, except for fp8 in the narrow layers of GPT-2. Memory is torch's peak of allocated memory.
Contenders start at the same time and with the compiler's caches of earlier commands, so the seconds to the end of
warm-up are not those of a single run."""


def shown(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
