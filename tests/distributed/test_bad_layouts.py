"""Layouts that cannot be: one error on the console that names the setting and its place, code 2, no process left.

Ranks are forked children that run the command as a launcher's workers do, with its variables and its store, so that
each case costs a second; the last one goes through the launcher itself.
"""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from trainwright import cli
from trainwright.parallel import context, fully_shard, pipeline, tensor  # noqa: F401  # before the fork

PATIENCE_SECONDS = 30
PARTS = """
from torch.utils.data import Dataset
from trainwright.trainers.language_model import LanguageModelTrainer


class Rows(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"input_ids": [1, 2, 3 + index % 20]}


class OwnForward(LanguageModelTrainer):
    def forward(self, **batch):
        return super().forward(**batch)
"""
RUN = """\
name: bad
model: {type: llama, vocab_size: 23, hidden_size: 16, num_heads: 2, num_layers: 2, max_positions: 16}
data:
  train: {type: parts.py:Rows, size: 16}
  collator: {type: padded, pad_token_id: 0}
trainer:
  type: language_model
  max_steps: 2
  global_batch_size: 8
  micro_batch_size: 2
  optimizer: {type: adamw, lr: 1e-2}
runtime:
  device: cpu
  mesh: {fsdp: 2}
"""
VIT = "model: {type: vit, num_labels: 3, image_size: 8, patch_size: 4, hidden_size: 16, num_heads: 2, num_layers: 2}"
LLAMA = RUN.splitlines()[1]
# What is written instead of what, the line that is named (None: none is), and words of the error.
CASES = {
    "world size": (
        [("mesh: {fsdp: 2}", "mesh: {fsdp: 1, tensor: 3}")],
        "mesh:",
        "runtime.mesh: fsdp 1 × tensor 3 is 3 ranks, but the run has 2.",
    ),
    "heads": (
        [("num_heads: 2", "num_heads: 1"), ("{fsdp: 2}", "{tensor: 2}")],
        "mesh:",
        "model.num_heads is 1, which 2 tensor ranks cannot share",
    ),
    "batch": (
        [("global_batch_size: 8", "global_batch_size: 1"), ("micro_batch_size: 2", "micro_batch_size: 1")],
        "global_batch_size:",
        "trainer.global_batch_size: 1 is not micro_batch_size 1 × 2 data ranks × a whole number.",
    ),
    "rule": (
        [(LLAMA, LLAMA[:-1] + ', sharding: {parameters: {"*.weight": [expert, null]}}}')],
        "model:",
        "model.sharding: *.weight: no axis 'expert' here. Known: fsdp, tensor.",
    ),
    "own forward": (
        [("language_model", "parts.py:OwnForward"), ("{fsdp: 2}", "{pipeline: 2}")],
        "mesh:",
        "runtime.mesh.pipeline is 2, but OwnForward.forward would not be called",
    ),
    "stages": (
        [("num_layers: 2", "num_layers: 1"), ("{fsdp: 2}", "{pipeline: 2}")],
        "mesh:",
        "runtime.mesh.pipeline",
    ),
    "micro-batch": (
        [("micro_batch_size: 2", "micro_batch_size: auto")],
        "micro_batch_size:",
        "trainer.micro_batch_size: auto needs the whole model on each rank, but the mesh (fsdp 2) splits it.",
    ),
    "no seam": (
        [(LLAMA, VIT), ("language_model", "trainer"), ("{fsdp: 2}", "{context: 2}")],
        "mesh:",
        "runtime.mesh.context is 2, but ViT cannot split its sequence",
    ),
}


def write_run(folder, changes):
    text = RUN
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "parts.py").write_text(PARTS)
    (folder / "run.yaml").write_text(text)
    return text.splitlines()


def assert_said_once(said, lines, key, words):
    """The error stands on the console once, with its place, and nothing beside it is a traceback."""
    assert said.count(words) == 1, said
    (error,) = [line for line in said.splitlines() if words in line]
    assert re.match(r"(rank 1: )?error: ", error), error
    if key is not None:
        number = 1 + next(place for place, line in enumerate(lines) if line.strip().startswith(key))
        assert f"run.yaml:{number}: " in error
    assert said.count("error: ") == 1, said
    assert "Traceback" not in said


@pytest.fixture
def store():
    """What torchrun keeps for its workers."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


@pytest.mark.parametrize("name", CASES)
def test_a_layout_that_cannot_be_is_rejected_once_by_its_setting(name, tmp_path, store):
    changes, key, words = CASES[name]
    lines = write_run(tmp_path, changes)
    children = [_fork(tmp_path, rank, store.port) for rank in range(2)]
    assert wait_for(children) == [2, 2]
    assert_said_once((tmp_path / "console").read_text(), lines, key, words)
    assert not (tmp_path / "runs").exists(), "a run that cannot be leaves nothing behind"


@pytest.mark.slow  # of another error tests/launch/test_local.py says the same
def test_the_launcher_answers_with_the_code_of_the_error_and_leaves_nobody(tmp_path):
    changes, key, words = CASES["micro-batch"]
    lines = write_run(tmp_path, changes)
    command = [sys.executable, "-m", "trainwright", "train", "run.yaml", "--nproc", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert_said_once(done.stderr, lines, key, words)
    here = [each for each in Path("/proc").glob("[0-9]*") if _folder_of(each) == str(tmp_path)]
    assert not here, "an orphan is left"


def wait_for(children):
    """Returns how they ended; one that is still there when patience ends is killed, and shows."""
    until = time.monotonic() + PATIENCE_SECONDS
    codes = []
    for child in children:
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        codes.append(os.waitstatus_to_exitcode(ended[1]))
    return codes


def _fork(folder, rank, port):
    """Runs the command as a worker in a child; both write to one console."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.freeze()  # else the collector would touch, and so copy, all that the parent has
        torch.set_num_threads(1)
        console = os.open(folder / "console", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(console, 1)
        os.dup2(console, 2)
        sys.stdout, sys.stderr = (open(each, "w", encoding="utf-8", closefd=False) for each in (1, 2))  # noqa: SIM115
        os.chdir(folder)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        sys.argv = ["trainwright", "train", "run.yaml"]
        cli.main()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _folder_of(process):
    try:
        return str((process / "cwd").readlink())
    except OSError:  # it has ended meanwhile, or is another's
        return ""
