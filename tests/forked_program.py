"""A program as a forked child of the test, which has torch imported: tenths of a second, and not the four of a start.

For what a program does and how it ends; what a fresh interpreter imports, and when, needs a real one.
"""

import gc
import logging
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # torch imports it with the first optimizer: here once, not in each child

from trainwright import cli

PATIENCE_SECONDS = 240


class Done(NamedTuple):
    """How a program ended, and all that it has said."""

    returncode: int
    stdout: str
    stderr: str


def run_script(path, *arguments, cwd=None, env=None):
    """What `python path arguments` does."""

    def act():
        sys.argv = [str(path), *map(str, arguments)]
        sys.path.insert(0, str(Path(path).absolute().parent))
        runpy.run_path(str(path), run_name="__main__")

    return run_forked(act, cwd=cwd, env=env)


def run_command(*arguments, cwd=None, env=None):
    """What `trainwright arguments` does."""

    def act():
        sys.argv = ["trainwright", *map(str, arguments)]
        cli.main()

    return run_forked(act, cwd=cwd, env=env)


def run_forked(act, *, cwd=None, env=None):
    """Calls `act()` in a child that ends as an interpreter does: by the code of its exit, or a traceback and 1."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            _live(act, out, err, cwd, env)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Done(code, out.read_text("utf-8"), err.read_text("utf-8"))


def _live(act, out, err, cwd, env):
    code = 1
    try:
        gc.freeze()  # else the collector would touch, and so copy, all that the parent has
        signal.alarm(PATIENCE_SECONDS)  # a program that waits for ever is ended, and the test fails
        torch.set_num_threads(1)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        # What the test listens with is not there.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))
        logging.getLogger().handlers.clear()
        logging.getLogger("trainwright").handlers.clear()
        os.environ.update(env or {})
        os.chdir(cwd or ".")
        code = _code_of(act)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _code_of(act):
    try:
        act()
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
            return 1
        return left.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
