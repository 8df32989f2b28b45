"""What a process knows of main memory."""

from pathlib import Path

import pytest
import torch

from trainwright.backends import Backend
from trainwright.backends import host_memory as main_memory

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
CPU = Backend(torch.device("cpu"))


@needs_proc
def test_the_peak_remains_after_memory_is_freed():
    CPU.begin_peak()
    before = CPU.memory()
    torch.ones(16 * 2**20)
    after = CPU.memory()
    assert after.peak - before.in_use > 60 * 2**20
    assert after.in_use - before.in_use < 30 * 2**20
    assert after.total > after.peak


@needs_proc
def test_there_is_room_left():
    assert 0 < CPU.memory_room() < CPU.memory().total


def test_memory_is_unknown_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(main_memory, "_PROC", tmp_path)
    monkeypatch.setattr(main_memory, "_CONTROL_GROUPS", ())
    CPU.begin_peak()
    assert CPU.memory() == main_memory.MemoryFacts(None, None)
    assert CPU.memory_room() is None


def test_the_limit_of_a_container_excludes_cached_files(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable:     800 kB\n")
    files = tuple(tmp_path / name for name in ("memory.max", "memory.current", "memory.stat"))
    monkeypatch.setattr(main_memory, "_PROC", tmp_path)
    monkeypatch.setattr(main_memory, "_CONTROL_GROUPS", (files,))
    assert CPU.memory_room() == 800 * 1024
    files[0].write_text("500000\n")
    files[1].write_text("300000\n")
    assert CPU.memory_room() == 200_000
    files[2].write_text("anon 5\ninactive_file 1000\n")
    assert CPU.memory_room() == 201_000
    files[0].write_text("max\n")
    assert CPU.memory_room() == 800 * 1024
