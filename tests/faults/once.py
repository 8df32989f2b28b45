"""Hooks that bring a fault to a run which a command has started: named in the config, struck once, at a marker file."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

from trainwright import Hook


class DieOnce(Hook):
    """Kills the second rank after a step, the first time that the run comes there."""

    def __init__(self, marker, step):
        self.marker, self.step = Path(marker), step

    def after_step(self):
        if self.trainer.step == self.step and self.trainer.ranks.rank == 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class KillWorkerOnce(Hook):
    """Kills a worker of the loader after a step, the first time that the run comes there."""

    def __init__(self, marker, step):
        self.marker, self.step = Path(marker), step

    def after_step(self):
        if self.trainer.step == self.step and self.trainer.ranks.is_first and not self.marker.exists():
            self.marker.touch()
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


class StickOnce(Hook):
    """The second rank never gets beyond a step, the first time; the first rank's process id is in the marker."""

    def __init__(self, marker, step):
        self.marker, self.step = Path(marker), step

    def before_step(self):
        if self.trainer.step != self.step or self.marker.exists():
            return
        self.trainer.ranks.barrier()
        if self.trainer.ranks.is_first:
            self.marker.write_text(str(os.getpid()))
        else:
            while True:
                time.sleep(60)


class Slowly(Hook):
    """Every step takes a while."""

    def after_step(self):
        time.sleep(0.2)
