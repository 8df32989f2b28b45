"""Runs of two ranks in forked children, and faults that strike a chosen rank in a chosen phase.

A fault is struck from inside the phase, by the child itself, so that no test has to guess when a phase is under way.
What a child does and how it ends is runs.py's.
"""

import os
import signal
import socket
import time

from tests.faults.runs import config_of, fork, run_as_own

from trainwright import Hook
from trainwright.build.components import Build
from trainwright.checkpoint.store import CheckpointStore
from trainwright.loop import checkpointing

PATIENCE_SECONDS = 90
"""Nothing here takes so long: a rank that is still there then is stuck."""

PHASES = (
    *("start-up", "before_train", "before_step", "data", "forward", "after_step"),
    *("before_eval", "evaluation", "after_eval", "commit", "after_save"),
)


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


class Fault:
    """Calls `act(trainer or None)` on some ranks in one phase: from `step` on, `times` times."""

    def __init__(self, phase, act, *, ranks=(0, 1), step=6, times=1):
        assert phase in PHASES
        self.phase, self.act, self.ranks, self.step, self.left = phase, act, ranks, step, times

    def strike(self, phase, trainer=None, *, step=None):
        """Acts if this is the place; `step` is the number of the update under way."""
        rank = int(os.environ.get("RANK", "0"))
        if phase == self.phase and rank in self.ranks and self.left and (step is None or step >= self.step):
            self.left -= 1
            self.act(trainer)


def send(number):
    """An act: this very process gets a signal."""
    return lambda trainer: os.kill(os.getpid(), number)


def send_to_parent(number):
    return lambda trainer: os.kill(os.getppid(), number)


def sleep_for_ever(trainer):
    """An act: the phase never ends, whatever signals are noted meanwhile."""
    while True:
        time.sleep(60)


class _Striking(Hook):
    def __init__(self, fault):
        self.fault = fault

    def before_train(self):
        self.fault.strike("before_train", self.trainer)

    def before_step(self):
        self.fault.strike("before_step", self.trainer, step=self.trainer.step + 1)

    def after_step(self):
        self.fault.strike("after_step", self.trainer, step=self.trainer.step)

    def before_eval(self):
        self.fault.strike("before_eval", self.trainer, step=self.trainer.step)

    def after_eval(self, logs):
        self.fault.strike("after_eval", self.trainer, step=self.trainer.step)

    def after_save(self, path):
        self.fault.strike("after_save", self.trainer, step=self.trainer.step)


def struck_by(trainer_class, *faults):
    """A trainer class that meets the faults where they say."""

    class Struck(trainer_class):
        @classmethod
        def build_model(cls, build):
            for fault in faults:
                fault.strike("start-up")
            return super().build_model(build)

        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), *map(_Striking, faults)]

        def next_train_inputs(self, iterator):
            for fault in faults:
                fault.strike("data", self, step=self.step + 1)
            return super().next_train_inputs(iterator)

        def forward(self, **batch):
            if self.model.training:
                for fault in faults:
                    fault.strike("forward", self, step=self.step + 1)
            return super().forward(**batch)

        def eval_step(self, batch):
            for fault in faults:
                fault.strike("evaluation", self, step=self.step)
            return super().eval_step(batch)

    return Struck


def strike_commits(fault):
    """Lets a fault of the phase `commit` act before a checkpoint is committed, in the thread that writes it."""
    commit = CheckpointStore._commit

    def struck(self, staging, step):
        fault.strike("commit", step=step)
        commit(self, staging, step)

    CheckpointStore._commit = struck


def share_writing():
    """Lets the ranks of a small replicated model write a checkpoint together, as those of a large one do."""
    checkpointing.SHARED_BYTES = 0


class Run:
    """A run under way, one child a rank."""

    def __init__(self, folder, *overrides, num_ranks=2, faults=(), trainer=None, hooks=(), prepare=None):
        self.folder = folder
        config = config_of(folder, *overrides)
        port = free_port()

        class WithHooks(trainer or Build(config).trainer_class()):
            @classmethod
            def build_hooks(cls, build):
                return [*super().build_hooks(build), *(make() for make in hooks)]

        def act():
            run_as_own(config, struck_by(WithHooks, *faults))

        def prepare_rank(rank):
            if num_ranks > 1:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
                os.environ.update({name: str(value) for name, value in place.items()})
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            for fault in faults:
                if fault.phase == "commit":
                    strike_commits(fault)
            if prepare is not None:
                prepare()

        self.children = [
            fork(act, self.place_of_stderr(rank), lambda rank=rank: prepare_rank(rank)) for rank in range(num_ranks)
        ]
        self.codes = {}

    def place_of_stderr(self, rank):
        """What runs.py's `stderr_of` takes to find what a rank said."""
        return self.folder.with_name(f"{self.folder.name}-{rank}")

    def send(self, rank, number):
        os.kill(self.children[rank], number)

    def wait(self, *, seconds=PATIENCE_SECONDS, as_launcher=False):
        """Returns how each rank ended: its exit code, or minus the signal. One that is stuck is killed, and fails.

        With `as_launcher` the others get SIGTERM when one has ended otherwise than well, as torchrun does it.
        """
        until = time.monotonic() + seconds
        stuck = []
        has_told = not as_launcher
        while len(self.codes) < len(self.children):
            for rank, child in enumerate(self.children):
                if rank not in self.codes and time.monotonic() > until:
                    stuck.append(rank)
                    os.kill(child, signal.SIGKILL)
                if rank not in self.codes and (ended := os.waitpid(child, 0 if rank in stuck else os.WNOHANG))[0]:
                    self.codes[rank] = os.waitstatus_to_exitcode(ended[1])
            if not has_told and any(self.codes.values()):
                has_told = True
                for rank in set(range(len(self.children))) - set(self.codes):
                    self.send(rank, signal.SIGTERM)
            time.sleep(0.005)
        said = {rank: self.said(rank)[-1500:] for rank in range(len(self.children))} if stuck else {}
        assert not stuck, f"ranks {stuck} were still there after {seconds} s; they said {said}"
        return [self.codes[rank] for rank in range(len(self.children))]

    def said(self, rank):
        """What a rank wrote to its stderr, in all runs of this folder so far."""
        path = self.folder.with_name(f"{self.folder.name}-{rank}.stderr")
        return path.read_text("utf-8", errors="replace") if path.exists() else ""


def train_two(folder, *overrides, num_ranks=2, **rest):
    """Trains on two ranks, or goes on; returns how each ended."""
    return Run(folder, *overrides, num_ranks=num_ranks, **rest).wait()
