"""benchmarks/gpu.py: its plan of waves, its report, and a dry run of one case."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_cases

    return gpu_cases


@pytest.fixture
def make_report(cases):
    from gpu_report import Report

    def make(**contenders):
        """A report of TinyLlama: per contender the milliseconds by wave and the peak memory."""
        report = Report({"device": "a GPU"}, "the command")
        for name, (ms, gib) in contenders.items():
            name = {"peer": cases.HF_COMPILED, "liger": cases.HF_LIGER}.get(name, name)
            name = {"ours": cases.SHIPPED, "lean": cases.SHIPPED_LEAN, "fp8": cases.SHIPPED_FP8}.get(name, name)
            report.note("tinyllama", name, {"ok": True, "ms": ms, "peak_gib": gib, "steps": 20})
        return report

    return make


def verdicts(report):
    rows = [line.split(" | ") for line in report.targets().splitlines()]
    return {row[0].removeprefix("| "): (row[2], row[3].removesuffix(" |")) for row in rows}


def test_every_target_names_contenders_of_its_case(cases):
    for target in cases.TARGETS:
        names = {each.name for each in cases.CASES[target.case].contenders}
        assert names & set(target.contenders), target.title
    for case in cases.CASES.values():
        names = [each.name for each in case.contenders]
        assert len(names) == len(set(names))
        assert any(each.is_peer for each in case.contenders), case.name


def test_a_plan_has_every_contender_once_within_the_memory(cases):
    waves = cases.plan_waves(cases.CASES.values(), 134.0)
    planned = [(stage.case, each.name) for wave in waves for stage in wave for each in stage.contenders]
    assert sorted(planned) == sorted(
        (case.name, each.name) for case in cases.CASES.values() for each in case.contenders
    )
    for wave in waves:
        members = [each for stage in wave for each in stage.contenders]
        assert sum(each.idle_gib for each in members) + max(each.gib - each.idle_gib for each in members) <= 134.0


def test_peers_come_first_and_the_fastest_stays_for_the_rest(cases):
    contenders = (
        cases.peer("a", 60, 20, 10),
        cases.peer("b", 50, 20, 10),
        cases.ours("c", "shipped", {}, 30, 10),
        cases.ours("d", "shipped", {}, 10, 10),
    )
    case = cases.replace(cases.CASES["tinyllama"], contenders=contenders)
    first, second = cases.plan_waves([case], 100.0)
    assert [each.name for each in first[0].contenders] == ["a", "b", "d"]
    assert not first[0].keeps_baseline
    assert second == [cases.Stage("tinyllama", (contenders[2],), keeps_baseline=True)]


def test_one_that_does_not_fit_next_to_the_fastest_peer_runs_without_it(cases):
    contenders = (cases.peer("a", 60, 30, 10), cases.ours("c", "shipped", {}, 90, 10))
    case = cases.replace(cases.CASES["tinyllama"], contenders=contenders)
    _, second = cases.plan_waves([case], 100.0)
    assert second == [cases.Stage("tinyllama", (contenders[1],), keeps_baseline=False)]


def test_a_case_joins_another_only_if_that_saves_time(cases):
    def make(name, gib):
        contenders = (cases.peer("a", gib, 1, 60), cases.ours("b", "shipped", {}, gib, 60, idle_gib=1))
        return cases.replace(cases.CASES[name], contenders=contenders)

    together = cases.plan_waves([make("toy", 20), make("gpt2", 20)], 100.0)
    assert [[stage.case for stage in wave] for wave in together] == [["toy", "gpt2"]]
    assert cases.starts([each for stage in together[0] for each in stage.contenders], 100.0) == 60
    apart = cases.plan_waves([make("toy", 45), make("gpt2", 60)], 100.0)
    assert [[stage.case for stage in wave] for wave in apart] == [["toy"], ["gpt2"]]


def test_a_contender_without_memory_starts_once_more(cases, make_report, tmp_path):
    import gpu

    bench = gpu.Bench(argparse.Namespace(memory=100.0, minutes=1.0), tmp_path, make_report())
    contender = cases.ours("a", "shipped", {}, 40, 10)
    for _ in range(2):
        process = subprocess.Popen(["true"], process_group=0)
        error = {"ok": False, "error": "OutOfMemoryError: CUDA out of memory."}
        bench._end(gpu.Worker("toy", contender, process), error)
    (again,) = bench._waiting["toy"]
    assert (again.name, again.gib, again.idle_gib) == ("a", 60, 58.5)


def test_flops_count_weights_and_causal_attention(cases):
    case = cases.CASES["tinyllama"]
    weights = 22 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632) + 2048 * 32000
    assert case.flops_per_token() == 6 * weights + 6 * 22 * 2048 * 2048
    adapters = cases.replace(case, is_adapter_only=True)
    assert adapters.flops_per_token() == 4 * weights + 6 * 22 * 2048 * 2048


def test_the_baseline_is_the_fastest_peer_and_its_turns_of_the_same_wave_count(cases, make_report):
    report = make_report(
        peer=({"1": [284, 286, 285]}, 43.0),
        liger=({"1": [280, 282, 281], "2": [300, 302, 301]}, 40.0),
        ours=({"1": [200, 202, 201]}, 36.0),
        fp8=({"2": [150, 152, 151]}, 25.0),
    )
    assert report.baseline("tinyllama") == cases.HF_LIGER
    assert report.speed("tinyllama", cases.SHIPPED) == pytest.approx(281 / 201)
    assert report.speed("tinyllama", cases.SHIPPED_FP8) == pytest.approx(301 / 151)
    assert report.memory("tinyllama", cases.SHIPPED) == pytest.approx(0.9)
    found = verdicts(report)
    assert found["TinyLlama, shipped, bf16"] == ("1.40×, 0.90 of the memory (shipped, bf16)", "missed")
    assert found["TinyLlama, shipped, fp8"][1] == "met"
    assert found["GPT-2 small, bf16"] == ("", "not measured")


def test_a_target_of_speed_and_memory_is_met_by_one_contender_alone(cases, make_report):
    fast, small = ({"1": [200]}, 36.0), ({"1": [240]}, 30.0)
    both = make_report(peer=({"1": [300]}, 40.0), ours=fast, lean=small)
    assert verdicts(both)["TinyLlama, shipped, bf16"][1] == "missed"
    enough = make_report(peer=({"1": [300]}, 40.0), ours=fast, lean=({"1": [220]}, 30.0))
    assert verdicts(enough)["TinyLlama, shipped, bf16"] == (
        "1.36×, 0.75 of the memory (shipped, bf16, memory budget 0.8)",
        "met",
    )


def test_a_target_may_name_the_peer_that_it_is_compared_with(cases):
    from gpu_report import Report

    report = Report({"device": "GPU"}, "command")
    times = {cases.HF_COMPILED: (600, 60.0), cases.HF: (800, 80.0), cases.LORA_FP8: (400, 32.0)}
    for name, (ms, gib) in times.items():
        report.note("lora8b", name, {"ok": True, "ms": {"1": [ms]}, "peak_gib": gib, "steps": 3})
    found = verdicts(report)
    assert found["LoRA on the 8B"] == ("1.50×, 0.53 of the memory (LoRA, fp8)", "missed")
    plain = next(target.title for target in cases.TARGETS if target.baseline == cases.HF)
    assert found[plain] == ("2.00×, 0.40 of the memory (LoRA, fp8)", "met")


def test_reports_of_several_commands_are_merged(cases, make_report, tmp_path):
    from gpu_report import Report

    make_report(peer=({"1": [300]}, 40.0), ours=({"1": [200]}, 36.0)).write(tmp_path)
    losses = tmp_path / "losses.json"
    losses.write_text(json.dumps({"relative_difference": 0.004, "text": "by step"}), encoding="utf-8")
    merged = Report.merged([tmp_path / "gpu.json", losses])
    assert verdicts(merged)["TinyLlama, shipped, bf16"][0].startswith("1.50×")
    assert "+0.40 %" in merged.targets()
    assert "by step" in merged.text()

    other = tmp_path / "other"
    other.mkdir()
    make_report(fp8=({"1": [150]}, 25.0)).write(other)
    with pytest.raises(SystemExit, match="take turns in one command"):
        Report.merged([tmp_path / "gpu.json", other / "gpu.json"])


OURS = [
    *(("tinyllama", name) for name in ("shipped, bf16, memory budget 0.8", "shipped, fp8", "transformers, fp8")),
    *(("tinyllama", f"shipped, {precision}, 8-bit moments") for precision in ("bf16", "fp8")),
    *(("llama8b", name) for name in ("shipped, bf16", "shipped, fp8")),
    *(("lora8b", name) for name in ("LoRA, bf16", "LoRA, fp8", "LoRA, fp8, activation checkpointing")),
    *(("gpt2", name) for name in ("shipped, fp8", "shipped, fp8, rowwise")),
    ("toy", "graph, bf16 weights with fp32 masters"),
]


def test_contenders_of_the_slow_tests_and_of_the_targets_exist(cases):
    named = {(name, each.name) for name, case in cases.CASES.items() for each in case.contenders}
    targets = {(target.case, name) for target in cases.TARGETS for name in target.contenders}
    assert {*OURS} | targets <= named


@pytest.mark.slow
@pytest.mark.parametrize("is_by_block", [False, True], ids=["whole", "by block"])
@pytest.mark.parametrize(("name", "contender"), OURS)
def test_settings_of_ours_train_in_a_dry_run(cases, monkeypatch, name, contender, is_by_block):
    import gpu_contenders

    monkeypatch.setenv("XDG_CONFIG_HOME", "")  # train_ours sets it
    monkeypatch.setattr(sys, "stdin", io.StringIO("end\n"))
    case = cases.CASES[name].with_repeated_blocks() if is_by_block else cases.CASES[name]
    [chosen] = (each for each in case.contenders if each.name == contender)
    job = {"case": name, "framework": chosen.framework, "options": chosen.options, "dry_run": True, "nanochat": None}
    messages = io.StringIO()
    losses = gpu_contenders.train(job, messages)
    assert json.loads(messages.getvalue())["event"] == "ready"
    assert losses["loss_after"] < losses["loss_before"] - 0.005


@pytest.mark.slow
def test_a_dry_run_measures_peers_and_ours(cases, tmp_path):
    pytest.importorskip("accelerate")
    command = [sys.executable, str(FOLDER / "gpu.py"), "--dry-run", "--rounds", "2", "--output", str(tmp_path)]
    command += ["--cases", "toy", "gpt2", "--only", "compile", "graph", "shipped, bf16"]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["cases"]
    for case, ours in (("toy", cases.GRAPH), ("gpt2", cases.SHIPPED)):
        peer, own = (found[case]["contenders"][name] for name in (cases.HF_COMPILED, ours))
        assert len(peer["ms"]["1"]) == len(own["ms"]["1"]) == 2
        assert peer["loss_before"] == pytest.approx(own["loss_before"], abs=2e-3)  # the same weights and rows
        assert peer["loss_after"] == pytest.approx(own["loss_after"], abs=5e-3)
        assert own["loss_after"] < own["loss_before"] - 0.01
    assert "| toy model, graph mode | ≥ 18× |" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "loss"])
def test_a_dry_run_writes_its_table(tmp_path, name):
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--dry-run", "--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    assert json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))["device"] == "cpu"
    assert "| ms |" in (tmp_path / f"{name}.md").read_text(encoding="utf-8")


@pytest.fixture
def long_context(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import long_context

    return long_context


@pytest.mark.parametrize("longest", [3000, 20_000, 151_553, 700_000])
@pytest.mark.parametrize("usable", [0.93, 0.97, 1.0])
def test_the_longest_row_is_found_within_a_few_tries(long_context, longest, usable):
    limit = int((7_000 + longest) / usable)  # the rest is fragmented

    def run(tokens):
        return {"fits": tokens <= longest, "reserved": 7_000 + tokens}

    until = time.monotonic() + 60
    found = long_context.find_longest(run, limit, probes=(16_384, 49_152), grid=1024, until=until)
    assert found["tokens"] <= longest < found["too_long"]
    assert found["too_long"] - found["tokens"] <= max(0.05 * longest, 2048)
    assert len(found["tries"]) <= 7
    reported = []
    late = long_context.find_longest(run, limit, probes=(1024, 2048), grid=1024, until=0, report=reported.append)
    assert late == late | {"tokens": 2048, "too_long": None}
    assert [each["tokens"] for each in reported] == [1024, 2048]


def test_a_stage_is_skipped_if_it_would_not_end_in_time(long_context):
    seconds = [long_context.seconds_of(tokens, 32) for tokens in long_context.PUBLISHED.values()]
    assert seconds == sorted(seconds)
    assert 300 < seconds[-1] < 600  # of one step with the length that is published for 80 GB


def test_the_stage_that_ended_a_process_is_tried_again_after_the_others(long_context):
    stages = long_context.STAGES
    assert long_context.plan(stages, {}) == [["published", "longest"]]
    assert long_context.plan(stages, {"begun": "published"}) == [["longest"], ["published"]]
    assert long_context.plan(stages, {"begun": "longest", "published": {}}) == [["longest"]]
    assert long_context.plan(stages, {"begun": "longest", "published": {}, "longest": {}}) == []


PROCESS = """
import json, os, sys, time

job = json.loads(sys.argv[-1])
for stage in job["stages"] if job["limit"] else []:
    print(json.dumps({"stage": "begun", "begun": stage}), flush=True)
    if job["limit"] == 24:
        os._exit(3)
    if job["limit"] == 80 and stage == "longest":
        time.sleep(60)
    found = {"stage": stage, "tokens": 8, "fits": True, "reserved": 10**9, "seconds": 1.0, "too_long": 9}
    print(json.dumps(found), flush=True)
"""


def test_a_limit_that_fails_leaves_the_others_and_what_was_measured(long_context, tmp_path, monkeypatch):
    (tmp_path / "process.py").write_text(PROCESS)
    monkeypatch.setattr(long_context, "__file__", str(tmp_path / "process.py"))
    monkeypatch.setattr(long_context, "START_SECONDS", 0)
    monkeypatch.setattr(long_context, "GRACE_SECONDS", -8)  # of the 10 seconds
    results = {"limits": {}, "is_dry": False, "command": "", "device": "a GPU", "torch": ""}
    assert long_context.measure(results, [24, 48, 80], tmp_path, until=time.monotonic() + 10)
    found = json.loads((tmp_path / "long_context.json").read_text("utf-8"))["limits"]
    assert found["24"] == {"begun": "published", "error": 3}
    assert found["48"].keys() == {"begun", "published", "longest"}
    assert found["80"] == found["80"] | {"begun": "longest", "error": -9}  # killed at the end of the time
    assert found["80"]["published"]["tokens"] == 8


@pytest.mark.slow
def test_a_dry_run_finds_the_longest_row_and_continues_where_it_ended(long_context, tmp_path):
    command = [sys.executable, str(FOLDER / "long_context.py"), "--dry-run", "--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    path = tmp_path / "long_context.json"
    first = json.loads(path.read_text("utf-8"))
    assert first["small"]["fits"]
    found = first["limits"]["3"]
    assert found["published"] == found["published"] | {"tokens": 384, "layers": 3, "fits": True}
    assert found["longest"]["tokens"] >= 384
    del first["limits"]["3"]["longest"]
    path.write_text(json.dumps(first), encoding="utf-8")
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    again = json.loads(path.read_text("utf-8"))["limits"]["3"]
    assert again["published"] == found["published"]  # not measured again
    assert again["longest"]["tokens"] == found["longest"]["tokens"]
    assert "| 3 MB | 384 |" in (tmp_path / "long_context.md").read_text("utf-8")
