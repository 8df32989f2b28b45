"""A launcher as a forked child of the test, which has torch imported; its workers are fresh interpreters as ever."""

import gc
import os
import signal
import sys
import time

import torch.distributed.elastic.multiprocessing.errors
import torch.distributed.launcher.api  # noqa: F401  # before the fork

from trainwright import cli


class Launcher:
    """`trainwright WORDS` in a folder; what it and its workers say lands in a file."""

    def __init__(self, folder, *words):
        self._said = folder / "said"
        self._code = None
        self.process = os.fork()
        if self.process == 0:
            _become(folder, self._said, [str(word) for word in words])

    @property
    def said(self):
        return self._said.read_text()

    def send(self, number):
        os.kill(self.process, number)

    def wait(self, seconds=120):
        """Returns how it ended; one that stays is killed, and shows."""
        until = time.monotonic() + seconds
        while self._code is None:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                self.send(signal.SIGKILL)
            time.sleep(0.02)
        return self._code


def _become(folder, said, words):
    code = 1
    try:
        gc.freeze()  # else the collector would touch, and so copy, all that the parent has
        written = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(written, 1)
        os.dup2(written, 2)
        sys.stdout, sys.stderr = (open(each, "w", encoding="utf-8", closefd=False) for each in (1, 2))  # noqa: SIM115
        os.chdir(folder)
        os.environ["OMP_NUM_THREADS"] = "1"
        sys.argv = ["trainwright", *words]
        cli.main()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(code)
