"""What every test shares: one thread, and a small project folder to train in."""

import functools
import gc
import importlib.util
import os
import shutil
import signal
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The key that signs run folders is not the user's own; programs that tests start inherit the folder.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="trainwright-config-")
# Nothing is sent to a service, and nothing is written to the user's own folders.
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    **dict.fromkeys(("TRACKIO_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"), os.environ["XDG_CONFIG_HOME"]),
}

from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tests import messages, vision

# The machine may be busy: how long an example takes says nothing of the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

PROJECT = Path(__file__).parent / "project"


if importlib.util.find_spec("torchvision") is not None:
    vision.declare_operators()  # before anything imports transformers, which imports torchvision where it is installed


def pytest_addoption(parser):
    parser.addoption("--update-messages", action="store_true", help="record the texts of errors (tests/messages.py)")


def pytest_configure(config):
    messages.update_messages(config.getoption("--update-messages"))


def pytest_unconfigure():
    shutil.rmtree(os.environ["XDG_CONFIG_HOME"], ignore_errors=True)


# What pytest, its plugins and Python's caches write is hidden; torture.json belongs to `make torture`.
OTHERS_FILES = {"__pycache__", "torture.json"}


def _files_in_current_folder():
    names = {path.name for path in Path().iterdir()}
    return {name for name in names if not name.startswith(".")} - OTHERS_FILES


def pytest_sessionstart(session):
    session.files_at_first = _files_in_current_folder()


def pytest_sessionfinish(session):
    left = sorted(_files_in_current_folder() - session.files_at_first)
    if left and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nTests left files in the current folder, instead of tmp_path: {', '.join(left)}")
        session.exitstatus = session.exitstatus or 1
    if session.config.getoption("--update-messages"):
        output = getattr(session.config, "workeroutput", None)
        if output is None:
            messages.write_golden_files(messages.recorded)
        else:
            output["messages"] = {package: dict(tests) for package, tests in messages.recorded.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for package, tests in getattr(node, "workeroutput", {}).get("messages", {}).items():
        messages.recorded[package].update(tests)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Sets aside all that was imported: a million objects, which no test frees and each collection would walk over."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.get_freeze_count = count_many


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Sets aside what the tests of a file have left as well, such as modules and caches."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@functools.wraps(gc.get_freeze_count)
def count_many():
    """Says that much is set aside; every run asks, and the count is a walk over all of it, a tenth of a second."""
    return 1_000_000


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


# A shell ignores signals in programs that it starts in the background (`nohup make test &`), and children inherit that.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)
HANDLERS = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}


@pytest.fixture(autouse=True)
def _signals_as_at_first():
    """Takes away the handlers that a launcher, run in this process by an earlier test, has left behind."""
    for each, handler in HANDLERS.items():
        if signal.getsignal(each) is not handler:
            signal.signal(each, handler)


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """The current folder is an empty one, so that runs/ lands there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
