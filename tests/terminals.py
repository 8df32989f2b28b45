"""A forked `trainwright` in a pseudo-terminal, and what its screen shows (pyte emulates the terminal)."""

import fcntl
import gc
import logging
import os
import pty
import select
import struct
import sys
import termios
import time

import pyte
import torch
import torch._dynamo  # torch imports it with the first optimizer: here once, not in each child

from trainwright import cli

PATIENCE_SECONDS = 60


class Terminal:
    """Runs a function in a child whose standard streams are a terminal of this size."""

    def __init__(self, act, *, columns=140, rows=40, cwd=None, env=None):
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        sys.stdout.flush()
        sys.stderr.flush()
        size = struct.pack("HHHH", rows, columns, 0, 0)
        self.process, self._descriptor = pty.fork()
        if not self.process:
            code = 1
            try:
                gc.freeze()
                fcntl.ioctl(0, termios.TIOCSWINSZ, size)
                sys.stdout, sys.stderr = (os.fdopen(each, "w", buffering=1, encoding="utf-8") for each in (1, 2))
                for name in (None, "trainwright"):
                    logging.getLogger(name).handlers.clear()
                for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
                    os.environ.pop(name, None)
                os.environ.update({"TERM": "xterm-256color", **(env or {})})
                os.chdir(cwd or ".")
                torch.set_num_threads(1)
                act()
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def resize(self, columns, rows):
        """Resizes the terminal as a window does: the child receives SIGWINCH."""
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def type(self, text):
        """Types text, such as Ctrl-C."""
        os.write(self._descriptor, text.encode())

    def wait_for(self, *texts):
        """Reads until the screen shows all the texts."""
        self.wait_until(lambda shown: all(text in shown for text in texts), what=texts)

    def wait_until(self, is_reached, *, what="the end"):
        """Reads until `is_reached`, which receives the lines of the screen, returns True."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not is_reached(self.shown()):
            assert self._read(), f"the program has ended:\n{self.all_text()}"
            assert time.monotonic() < end, f"{what} did not appear:\n{self.shown()}"

    def wait(self):
        """Reads until the program ends; returns its exit code."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def _read(self):
        if not select.select([self._descriptor], [], [], PATIENCE_SECONDS)[0]:
            raise TimeoutError(self.shown())
        try:
            content = os.read(self._descriptor, 65536)
        except OSError:  # EIO: the child has ended
            return False
        self.raw += content
        self._stream.feed(content)
        return bool(content)

    def shown(self):
        """The lines of the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def all_text(self):
        """What has scrolled off the screen, and the screen."""
        columns = self.screen.columns
        scrolled = ["".join(row[column].data for column in range(columns)).rstrip() for row in self.screen.history.top]
        return "\n".join([*scrolled, self.shown()])


def command(*arguments, **options):
    """A terminal in which `trainwright arguments` runs."""

    def act():
        sys.argv = ["trainwright", *map(str, arguments)]
        cli.main()

    return Terminal(act, **options)
