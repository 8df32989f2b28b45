"""system.json: when processes started, and what they used."""

import json
import time

from trainwright.backends.backend import pick_backend
from trainwright.writers import system_log
from trainwright.writers.system_log import SystemLog


def lines_of(folder):
    return [json.loads(line) for line in (folder / "system.json").read_text().splitlines()]


def test_the_first_line_is_the_start_of_the_process(tmp_path):
    before = time.time()
    log = SystemLog(tmp_path, pick_backend("cpu"), step=40)
    assert not (tmp_path / "system.json").exists()
    log.sample(50)
    start, line = lines_of(tmp_path)
    assert (start["step"], start["start"]) == (40, True)
    assert before - 0.01 <= start["time"] <= line["time"] <= time.time() + 0.01
    assert line["step"] == 50
    assert line["memory"] > 10**7
    assert line["memory_available"] > 0
    assert line["cpu_cores"] >= 0
    assert "device_memory" not in line  # the CPU's memory is main memory


def test_lines_are_rare_and_the_last_step_has_one(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(system_log.time, "monotonic", lambda: now[0])
    log = SystemLog(tmp_path, pick_backend("cpu"), step=0)
    for step in range(1, 100_001):
        now[0] += 0.1
        log.sample(step)
    log.close()
    lines = lines_of(tmp_path)[1:]
    assert lines[-1]["step"] == 100_000
    assert 500 < len(lines) < 5000
    log.close()
    assert len(lines_of(tmp_path)) == len(lines) + 1


def test_a_full_disk_does_not_end_a_run(tmp_path):
    (tmp_path / "system.json").symlink_to("/dev/full")
    log = SystemLog(tmp_path, pick_backend("cpu"), step=0)
    log.sample(1)
    log.close()
