"""`trainwright doctor` on this machine."""

import json
import re
from importlib.metadata import metadata

import pytest
from typer.testing import CliRunner

from trainwright.analysis import doctor
from trainwright.backends import checkup
from trainwright.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_the_facts_and_extras_are_shown_without_measuring(tmp_path):
    done = run(tmp_path / "runs", "--no-test")
    assert done.exit_code == 0
    for name in ("torch ", "Python ", "device ", "memory ", "disk ", "cores "):
        assert re.search(rf"^{name}", done.stdout, re.MULTILINE), name
    assert str(tmp_path) in done.stdout
    assert "Self-test" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_each_extra_says_what_it_adds():
    names = {each.replace("-", "_") for each in metadata("trainwright").get_all("Provides-Extra")}
    assert names - set(doctor._NOT_FEATURES) == doctor.EXTRAS.keys()
    assert {extra.name for extra in doctor.find_extras()} == doctor.EXTRAS.keys()


def test_measurements_are_positive_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("trainwright.hooks.flops._MEASURED_SECONDS", 0.01)
    monkeypatch.setattr("trainwright.hooks.flops._LARGEST", 256)
    monkeypatch.setattr(doctor, "_SECONDS", 0.05)
    monkeypatch.setattr(doctor, "_DISK_BYTES", 2**20)
    monkeypatch.setattr(doctor, "MAX_SECONDS", 300.0)  # loader processes start slowly on a machine with other work
    found = json.loads(run(tmp_path, "--json").stdout)
    measured = found["measurements"]
    assert float(re.match(r"[\d.e-]+", measured["matmul float32"])[0]) > 0
    assert re.fullmatch(r"write [\d,]+ MB/s, read [\d,]+ MB/s", measured["disk"])
    rates = re.findall(r"workers? ([\d,]+)", measured["data loader"])
    assert all(int(each.replace(",", "")) > 0 for each in rates)
    assert len(rates) == 3
    assert "with one thread" in measured["tokenizer"]
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_that_fails_is_a_line(tmp_path, monkeypatch):
    report = doctor.MachineReport({}, [])
    doctor._measure_disk(report, tmp_path / "missing")
    assert report.measurements["disk"].startswith("failed: FileNotFoundError")


@pytest.mark.parametrize(
    ("setting", "value", "part"),
    [
        ("OMP_NUM_THREADS", "4096", "OMP_NUM_THREADS is 4096"),
        ("CUDA_LAUNCH_BLOCKING", "1", "CUDA_LAUNCH_BLOCKING is set"),
        ("TOKENIZERS_PARALLELISM", "false", "turns off the threads of tokenizers"),
    ],
)
def test_variables_that_slow_a_run_down_are_named(setting, value, part, tmp_path, monkeypatch):
    monkeypatch.setenv(setting, value)
    assert any(part in each.problem for each in doctor.examine(tmp_path, measures=False).advice)


def test_a_torch_for_the_cpu_next_to_a_gpu_driver_is_named(tmp_path, monkeypatch):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue\n")
    monkeypatch.setattr(checkup, "_NVIDIA_DRIVER", tmp_path / "version")
    facts = checkup.device_facts()
    assert facts.driver == "NVIDIA 570.86.15"
    if not facts.names:
        problem, advice = checkup.device_problems(facts)[0]
        assert "570.86.15" in problem
        assert advice


def test_swap_and_small_shared_memory_are_named(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 1000000 kB\nSwapTotal: 500000 kB\nSwapFree: 100000 kB\n")
    monkeypatch.setattr(doctor, "_MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(doctor, "_shared_memory", lambda: 64 * 2**20)
    problems = [each.problem for each in doctor._memory_advice()]
    assert problems[0].startswith("0.4 GB of memory is swapped out")
    assert problems[1].startswith("/dev/shm has 64 MiB")
