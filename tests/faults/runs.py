"""Runs in forked children, what becomes of them, and whether two runs have ended alike.

Children are forked from the test process, which has torch imported, so that a run costs tenths of a second. A child
does what `trainwright train` does, exit codes included.
"""

import faulthandler
import gc
import json
import os
import shutil
import sys
from multiprocessing import popen_fork, queues, synchronize  # noqa: F401  # for loaders: here once, not in each child
from pathlib import Path

import numpy.ma  # noqa: F401  # numpy imports it with the first `unique`
import torch
import torch._dynamo  # torch imports it with the first optimizer
from tests.project import parts  # noqa: F401

from trainwright import RunConfig
from trainwright.api.run import Interrupted, run_experiment
from trainwright.build.components import Build
from trainwright.checkpoint.background import BackgroundSaver
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import TrainwrightError, exit_code_of
from trainwright.optim import schedules  # noqa: F401
from trainwright.registry import resolve as registry

RUN_FILE = Path(__file__).parent / "run.yaml"
"""Six steps: checkpoints at 2, 4 and 6, of which the last two stay; log windows and evaluations across them."""
SMALL = ("trainer.max_steps=6", "checkpoint.every_steps=2", "log.every_steps=3", "evaluation.every_steps=4")
"""What that file says anyway, for tests that want it to be seen."""
STUCK_SECONDS = 80
"""After so long a child writes the stacks of its threads: nothing here takes that long."""
TIMED = ("_per_second", "_per_step", "slowest_rank_share")


def config_of(folder, *overrides):
    """The config of the run in `folder`."""
    place = (f"name={folder.name}", f"output_dir={folder.parent}")
    return RunConfig.load(RUN_FILE, (*place, *overrides))


def train(folder, *overrides, hooks=(), trainer=None, prepare=None):
    """Trains in a child, or goes on; returns how it ended: an exit code, or minus the signal.

    `prepare` is called in the child before anything else. The test may look at `folder/log.txt` and `stderr_of`.
    """
    config = config_of(folder, *overrides)
    return in_child(lambda: _run(config, hooks, trainer), folder, prepare)


def start(folder, *overrides, hooks=(), trainer=None, prepare=None):
    """Begins to train in a child, and returns its process id at once."""
    config = config_of(folder, *overrides)
    return fork(lambda: _run(config, hooks, trainer), folder, prepare)


def _run(config, hooks, trainer):
    class WithHooks(trainer or Build(config).trainer_class()):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), *hooks]

    run_as_own(config, WithHooks)


def run_as_own(config, trainer_class):
    """Runs in this child with a class in the place of the config's own: one given in code would be another run's."""
    registry._registered["trainer"][config.trainer.type] = trainer_class
    run_experiment(config)


def in_child(act, folder, prepare=None):
    _, status = os.waitpid(fork(act, folder, prepare), 0)
    return os.waitstatus_to_exitcode(status)


def fork(act, folder, prepare=None):
    """Runs `act` in a child, which ends with the exit codes of the command line."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.freeze()  # else the collector would touch, and so copy, all that the parent has
        # Retries of a failed save wait for seconds; here nobody has the time.
        BackgroundSaver.__init__.__kwdefaults__["backoff"] = lambda attempt: 0.01
        # What was written survives a process that is killed, synced or not; only a machine that goes down loses it.
        os.fsync = lambda descriptor: None
        _redirect(stderr_path(folder))
        faulthandler.dump_traceback_later(STUCK_SECONDS)  # a child that is stuck shows where
        if prepare is not None:
            prepare()
        act()
        code = 0
    except Interrupted as interruption:
        code = exit_code_of(str(interruption))
    except TrainwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except BaseException as error:
        print(f"child: {error!r}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def stderr_path(folder):
    """Beside the run folder: it must survive whatever is done to that one."""
    return folder.with_name(f"{folder.name}.stderr")


def stderr_of(folder):
    return stderr_path(folder).read_text("utf-8", errors="replace")


def _redirect(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 2)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # pytest has replaced it


def log_of(folder):
    return (folder / "log.txt").read_text("utf-8")


def store_of(folder):
    return CheckpointStore(folder / "checkpoints")


def copy_run(source, target):
    """Copies a run folder as it lies there, links as links."""
    return shutil.copytree(source, target, symlinks=True)


def lines_of(folder):
    """The log without its clock."""
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text("utf-8").splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(TIMED)} for line in lines]


def what_is_left(folder):
    """Everything of a run that must be equal: the log without its clock, and every bit of the last checkpoint."""
    store = store_of(folder)
    last = store.steps()[-1]
    store.verify(last)
    training = store.read(last, "training")
    for kind in ("histories", "window"):
        values = training["events"][kind]
        training["events"][kind] = {name: value for name, value in values.items() if not name.endswith(TIMED)}
    # Hooks that do harm keep nothing, but are named.
    training["hooks"] = {name: state for name, state in training["hooks"].items() if state}
    return {
        "lines": lines_of(folder),
        "step": last,
        "model": store.read(last, "model"),
        "optimizers": store.read(last, "optimizers"),
        "training": training,
    }


def differences(left, right, path=""):
    """Where two nests differ, bit for bit (nan equals nan): a list of paths."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and torch.equal(left, right)
        return [] if same or (left.shape == right.shape and torch.equal(_bits(left), _bits(right))) else [path]
    if isinstance(left, dict) and isinstance(right, dict):
        found = [f"{path}.{key}" for key in left.keys() ^ right.keys()]
        return found + [
            each for key in left.keys() & right.keys() for each in differences(left[key], right[key], f"{path}.{key}")
        ]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return [f"{path}: {len(left)} and {len(right)} entries"]
        pairs = enumerate(zip(left, right, strict=True))
        return [each for number, (a, b) in pairs for each in differences(a, b, f"{path}[{number}]")]
    if hasattr(left, "tolist") and hasattr(right, "tolist"):
        return differences(left.tolist(), right.tolist(), path)
    is_nan = left != left and right != right
    return [] if left == right or is_nan else [f"{path}: {left!r} and {right!r}"]


def _bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_end(left, right):
    """Two runs, given by their folders, have ended alike."""
    found = differences(what_is_left(left), what_is_left(right))
    assert not found, f"{right.name} differs from {left.name}: {'; '.join(found[:8])}"
