"""A stuck rank is named with its phase; all ranks leave with one exit code and no process remains.

Real processes over gloo, forked from this one, which has torch imported. The loop is a small stand-in that enters
phases as the trainer does.
"""

import json
import logging
import os
import pdb
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.messages import mentions

from trainwright.config import WatchdogSection
from trainwright.errors import HANG_EXIT_CODE
from trainwright.hooks import watchdog
from trainwright.hooks.watchdog import Watchdog
from trainwright.log import show_log
from trainwright.loop.heartbeat import Heartbeat
from trainwright.parallel import processes
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.replicate import GradientSum

SECTION = WatchdogSection(factor=20.0, min_seconds=1.0)
NUM_STEPS = 8
STUCK_STEP = 7


class StandIn:
    """What the hook needs of a trainer, and a loop that enters phases; `act(phase, step)` may do anything."""

    def __init__(self, folder, ranks, act):
        self.folder, self.ranks, self.act = folder, ranks, act
        self.heartbeat = Heartbeat()
        self.train_data = SimpleNamespace(samples_seen=0, order_position=0)
        self.hook = Watchdog(SECTION)
        self.hook.trainer = self
        self.step = 0

    def enter(self, phase):
        self.heartbeat.enter(phase, self.step + 1)
        self.act(phase, self.step + 1)

    def train(self):
        weight = torch.nn.Parameter(torch.ones(4))
        gradients = GradientSum([weight], self.ranks, enter=self.enter)
        self.hook.before_train()
        try:
            while self.step < NUM_STEPS:
                self.enter("data")
                self.train_data.samples_seen += 8
                self.enter("step")
                weight.grad = None
                weight.sum().backward()
                gradients.reduce(torch.zeros(2))
                self.enter("hooks")
                self.step += 1
                self.enter("vote")
                self.ranks.gather(0)
        finally:
            self.hook.close()
        self.ranks.part()


class Children:
    """Forked processes, one a rank, whatever happens ended with the test."""

    def __init__(self, folder):
        self.folder, self.pids = folder, []

    def start(self, size, act, train=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                self._be(rank, size, port, act, train or StandIn.train)
            self.pids.append(pid)

    def _be(self, rank, size, port, act, train):
        code = 1
        try:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            sys.stderr = (self.folder / f"stderr-{rank}.txt").open("w", buffering=1)
            logging.getLogger().handlers = []
            show_log()
            torch.set_num_threads(1)
            ranks = processes.join({"replicate": size}, collectives="gloo", device_type="cpu") if size > 1 else Ranks()
            train(StandIn(self.folder, ranks, lambda phase, step: act(rank, phase, step)))
            processes.leave()
            code = 0
        except BaseException as error:
            print(f"rank {rank}: {error!r}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def wait(self, num=None, seconds=40.0):
        """Waits for all, or for `num` of them; returns how each ended: an exit code, or minus the signal."""
        codes, until = {}, time.monotonic() + seconds
        while len(codes) < (num or len(self.pids)) and time.monotonic() < until:
            for rank, pid in enumerate(self.pids):
                if rank not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        self.pids = [pid for rank, pid in enumerate(self.pids) if rank not in codes]
        return codes

    def said(self, rank):
        return (self.folder / f"stderr-{rank}.txt").read_text()


@pytest.fixture
def children(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 1.5)
    children = Children(tmp_path)
    yield children
    for pid in children.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def sleep_in(where, *, rank=1):
    """Acts as a rank that sleeps for ever in a phase of one step."""

    def fall_asleep(own, phase, step):
        if (own, phase, step) == (rank, where, STUCK_STEP):
            time.sleep(1000)

    return fall_asleep


def nothing(rank, phase, step):
    """A rank at work."""


@pytest.mark.parametrize("phase", ["data", "step", "reduce", "hooks"])
def test_a_stuck_rank_is_named_with_its_phase_and_all_leave(children, tmp_path, phase):
    children.start(2, sleep_in(phase))
    assert children.wait() == {0: HANG_EXIT_CODE, 1: HANG_EXIT_CODE}
    folder = tmp_path / "watchdog" / f"step-{STUCK_STEP:08d}"
    spoken = children.said(0).splitlines()
    assert len(spoken) == 1, spoken
    assert spoken[0].startswith(f"Rank 1 is stuck in {phase} for ")
    assert mentions(spoken[0], STUCK_STEP)
    assert spoken[0].endswith(f"rank 0 waits for it. Stacks: {folder}")
    assert children.said(1) == ""
    report = (folder / "report.txt").read_text()
    assert report.startswith(spoken[0].partition(" Stacks:")[0])
    assert f"exit code {HANG_EXIT_CODE}" in report
    asleep, waiting = ((folder / f"rank-{rank}.txt").read_text() for rank in (1, 0))
    assert mentions(asleep, phase, STUCK_STEP)
    assert "fall_asleep" in asleep
    assert "fall_asleep" not in waiting
    assert "inside a collective" in waiting
    assert "Samples returned so far, over all ranks: " in asleep
    recorded = json.loads((folder / "rank-0-collectives.json").read_text())["entries"]
    assert any("all_reduce" in entry["profiling_name"] for entry in recorded)


def test_the_first_rank_may_be_the_stuck_one(children):
    children.start(2, sleep_in("data", rank=0))
    assert children.wait() == {0: HANG_EXIT_CODE, 1: HANG_EXIT_CODE}
    assert "Rank 0 is stuck in data" in children.said(0)
    assert "rank 1 waits for it" in children.said(0)


def test_a_stopped_rank_is_missing_and_is_ended(children):
    def stop(rank, phase, step):
        if (rank, phase, step) == (1, "step", STUCK_STEP):
            os.kill(os.getpid(), signal.SIGSTOP)

    children.start(2, stop)
    assert children.wait() == {0: HANG_EXIT_CODE, 1: -signal.SIGKILL}
    assert "Rank 1 does not answer: stopped, dead or blocked" in children.said(0)
    assert "rank 0 waits for it" in children.said(0)


def test_a_stopped_rank_with_the_notes_is_missing_too(children):
    def stop(rank, phase, step):
        if (rank, phase, step) == (0, "step", STUCK_STEP):
            os.kill(os.getpid(), signal.SIGSTOP)

    children.start(2, stop)
    assert children.wait() == {0: -signal.SIGKILL, 1: HANG_EXIT_CODE}
    assert "Rank 0, which keeps the ranks' notes, does not answer. Rank 1 is stuck in" in children.said(1)


def test_a_rank_that_is_busy_within_its_limits_is_waited_for(children):
    def be_busy(rank, phase, step):
        # A hook has three times min_seconds; the other rank waits longer than its own limit meanwhile.
        if (rank, phase, step) == (1, "hooks", STUCK_STEP):
            time.sleep(2.0)

    children.start(2, be_busy)
    assert children.wait() == {0: 0, 1: 0}
    assert not (children.folder / "watchdog").exists()


def test_a_first_step_that_compiles_is_not_a_hang(children):
    children.start(1, lambda rank, phase, step: time.sleep(2.0 if (phase, step) == ("step", 1) else 0.0))
    assert children.wait() == {0: 0}


def test_a_single_process_reports_its_phase(children, tmp_path):
    children.start(1, sleep_in("data", rank=0))
    assert children.wait() == {0: HANG_EXIT_CODE}
    folder = tmp_path / "watchdog" / f"step-{STUCK_STEP:08d}"
    (line,) = children.said(0).splitlines()
    assert line.startswith("The run is stuck in data for ")
    assert line.endswith(f"Stacks: {folder}")
    assert "fall_asleep" in (folder / "rank-0.txt").read_text()
    assert (folder / "report.txt").exists()


def test_a_second_hang_at_the_same_step_gets_another_folder(children, tmp_path):
    for _ in range(2):
        children.start(1, sleep_in("data", rank=0))
        assert children.wait() == {0: HANG_EXIT_CODE}
    name = f"step-{STUCK_STEP:08d}"
    assert sorted(each.name for each in (tmp_path / "watchdog").iterdir()) == [name, f"{name}-2"]


def test_a_stuck_run_ends_even_if_its_folder_cannot_be_written(children, tmp_path):
    (tmp_path / "watchdog").write_text("not a folder")
    children.start(1, sleep_in("data", rank=0))
    assert children.wait() == {0: HANG_EXIT_CODE}
    assert "The run is stuck in data for " in children.said(0)


def test_a_run_that_was_suspended_as_a_whole_continues(children, monkeypatch):
    monkeypatch.setattr(watchdog, "_STOPPED_SECONDS", 1.0)

    def stop(rank, phase, step):
        if (phase, step) == ("data", STUCK_STEP):
            os.kill(os.getpid(), signal.SIGSTOP)

    children.start(1, stop)
    os.waitpid(children.pids[0], os.WUNTRACED)
    time.sleep(2.5)
    os.kill(children.pids[0], signal.SIGCONT)
    assert children.wait() == {0: 0}


class Silent(pdb.Pdb):
    """A debugger whose user thinks for a while."""

    def interaction(self, *_):
        time.sleep(2.0)
        self.set_continue()


def test_a_rank_in_a_debugger_is_not_stuck(children):
    def stop_to_look(rank, phase, step):
        if (phase, step) == ("data", STUCK_STEP):
            Silent(nosigint=True).set_trace()
            len("the line at which the debugger stops")

    children.start(1, stop_to_look)
    assert children.wait() == {0: 0}


def test_a_stuck_data_worker_is_ended(children, tmp_path):
    def fork_and_wait(rank, phase, step):
        if (phase, step) == ("data", STUCK_STEP):
            worker = torch.multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
            worker.start()
            (tmp_path / "worker").write_text(str(worker.pid))
            worker.join()

    children.start(1, fork_and_wait)
    assert children.wait() == {0: HANG_EXIT_CODE}
    worker = int((tmp_path / "worker").read_text())
    for _ in range(100):
        stat = Path(f"/proc/{worker}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        pytest.fail("the worker still runs")


def test_a_rank_that_left_with_an_error_is_missing(children):
    def train(stand_in):
        def fail(rank, phase, step):
            if (rank, phase, step) == (1, "step", STUCK_STEP):
                raise ValueError("no step today")

        stand_in.act = lambda phase, step: fail(stand_in.ranks.rank, phase, step)
        try:
            stand_in.train()
        except ValueError:
            time.sleep(1000)  # stays, as a process that cannot end: its connections remain open

    children.start(2, nothing, train)
    assert children.wait(num=1) == {0: HANG_EXIT_CODE}
    assert "Rank 1 has left the training; rank 0 waits for it" in children.said(0)


def test_a_run_without_a_hang_has_no_report(children):
    children.start(2, nothing)
    assert children.wait() == {0: 0, 1: 0}
    assert children.said(0) == children.said(1) == ""
    assert not (children.folder / "watchdog").exists()


def test_no_thread_starts_if_the_section_disables_it(tmp_path):
    hook = Watchdog(WatchdogSection(watch=False))
    hook.trainer = StandIn(tmp_path, Ranks(), nothing)
    before = threading.active_count()
    hook.before_train()
    assert threading.active_count() == before
    hook.close()


def test_the_thread_ends_with_the_training(tmp_path):
    stand_in = StandIn(tmp_path, Ranks(), lambda *_: None)
    before = threading.active_count()
    stand_in.train()
    assert threading.active_count() == before
