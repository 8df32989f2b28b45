"""What a rank tells of itself when it is stuck, and which processes it may end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.messages import mentions

from trainwright.hooks.watchdog import (
    Standing,
    end_process,
    identify_process,
    is_debugged,
    is_in_collective,
    write_rank_report,
)
from trainwright.loop.heartbeat import Heartbeat

STANDING = Standing("data", 7, 612.0, 0.2, 600.0, None, is_waiting=False)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells processes apart")
def test_a_process_is_ended_only_if_it_is_the_very_one(sleeper):
    identity = identify_process(sleeper.pid)
    pid, started, *rest = identity.split()
    for other in ("", " ".join([pid, str(int(started) + 1), *rest]), " ".join([pid, started, rest[0], "elsewhere"])):
        assert not end_process(other)
    assert sleeper.poll() is None
    assert end_process(identity)
    assert sleeper.wait(timeout=30) == -signal.SIGKILL
    assert not end_process(identity)


def test_a_process_that_is_gone_has_no_identity():
    assert identify_process(2**30) == ""


def test_the_report_holds_the_stacks_of_all_threads_but_the_one_that_writes(tmp_path):
    begun, done = threading.Event(), threading.Event()

    def wait_for_rows():
        begun.set()
        done.wait()

    stuck = threading.Thread(target=wait_for_rows, name="stuck")
    stuck.start()
    begun.wait()
    try:
        write_rank_report(tmp_path / "watchdog", 3, STANDING, Heartbeat(), thread=stuck.ident, places="At sample 12.")
        assert not is_in_collective(stuck.ident)
        assert not is_debugged(stuck.ident)
    finally:
        done.set()
        stuck.join()
    text = (tmp_path / "watchdog" / "rank-3.txt").read_text()
    assert f"Rank 3, process {os.getpid()}" in text
    assert mentions(text, "7", "612.0", "0.2", "600")
    assert "At sample 12." in text
    assert "stuck (training), innermost last:" in text
    assert "in wait_for_rows" in text
    assert "test_the_report_holds" not in text
    assert not (tmp_path / "watchdog" / "rank-3-collectives.json").exists()


def test_a_thread_inside_of_torch_s_collectives_is_told_apart():
    begun, lock = threading.Event(), threading.Lock()
    # As if torch's own file waited there: it is the innermost Python code that counts.
    waiting = compile("begun.set(); lock.acquire()", dist.distributed_c10d.__file__, "exec")
    lock.acquire()
    thread = threading.Thread(target=exec, args=(waiting, {"begun": begun, "lock": lock}))
    thread.start()
    begun.wait()
    try:
        for _ in range(1000):  # until it has come from `set` to `acquire`
            if is_in_collective(thread.ident):
                break
            time.sleep(0.01)
        assert is_in_collective(thread.ident)
    finally:
        lock.release()
        thread.join()
    assert not is_in_collective(thread.ident)
