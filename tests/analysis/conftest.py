"""A small correct project, which each test breaks in one way, and a fixture that checks it."""

from pathlib import Path

import pytest

from trainwright.analysis.check import check_run

PARTS = """
import torch
from torch import nn
from torch.utils.data import Dataset

from trainwright import Hook, Task, Trainer


class Points(Dataset):
    def __init__(self, size=24, classes=2):
        self.size, self.classes = size, classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.arange(4.0) + index, "labels": index % self.classes}


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x, labels=None):
        logits = self.head(self.inner(x).relu())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
"""

RUN = """\
model: {type: parts.py:Net, width: 8}
data:
  train: {type: parts.py:Points}
  eval: {valid: {type: parts.py:Points, size: 12}}
trainer:
  max_steps: 12
  global_batch_size: 8
  micro_batch_size: 4
  optimizer: {type: adamw, lr: 1e-2}
"""


@pytest.fixture
def project(in_tmp):
    """project(more=…, parts=…, run=…) writes the project into the current folder, `more` at the end of its code."""

    def write(more="", parts=PARTS, run=RUN):
        Path("parts.py").write_text(parts + more)
        Path("run.yaml").write_text(run)
        return in_tmp

    return write


@pytest.fixture
def check(project):
    """check(*overrides, more=…, parts=…, run=…) → the report of that project."""

    def check_project(*overrides, **texts):
        project(**texts)
        return check_run("run.yaml", overrides)

    return check_project


@pytest.fixture
def spoilt(check):
    """spoilt(right, wrong, *overrides) → the report of the project with one text of its code replaced."""

    def check_spoilt(right, wrong, *overrides, more=""):
        assert PARTS.count(right) == 1
        return check(*overrides, parts=PARTS.replace(right, wrong), more=more)

    return check_spoilt


@pytest.fixture
def at():
    """at(text) → `parts.py:N`, the only line with that text."""

    def find(text, file="parts.py"):
        lines = Path(file).read_text().splitlines()
        found = [number for number, line in enumerate(lines, start=1) if text in line]
        assert len(found) == 1, (text, found)
        return f"{file}:{found[0]}"

    return find
