"""The notebooks in docs/tutorials/: a kernel executes them and shows what is saved in them."""

import re
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="it executes notebooks")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn", reason="it holds the digits")
pytest.importorskip("transformers", reason="it renders chat templates")
nbformat = pytest.importorskip("nbformat")

from tools.tutorials import TUTORIALS, executed  # noqa: E402 # it needs nbclient

SHOWN = {
    "change_the_loss_and_the_step": [
        r"'valid/accuracy': 0\.9\d+, 'valid/attacked': 0\.[01]",
        r"'valid/attacked': 0\.[456]",
    ],
    "chat_model": [r"It is nine\.<\|im_end\|>", "Name 3: It is three.\nName 7: It is seven."],
    "slow_or_wrong": [r"1\. data wait \d\d", r"64 samples: \[1234\]", "finished at step 40"],
    "your_own_model": ["Resumed from .* step 90 of 226", r"accuracy 0\.9"],
}
"""Patterns of what the notebooks print."""


def outputs_of(notebook):
    """For each cell with code, the kinds of its outputs; of errors with their names."""
    return [
        [output.get("name") or output.get("ename") or sorted(output.data) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def printed_by(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_every_tutorial_is_executed_and_shows_what_is_saved(tmp_path):
    paths = sorted(TUTORIALS.glob("*.ipynb"))
    assert [path.stem for path in paths] == list(SHOWN)
    for path, notebook in zip(paths, executed(paths, tmp_path), strict=True):
        saved = nbformat.read(path, as_version=4)
        assert outputs_of(notebook) == outputs_of(saved), f"{path.name}: run `make tutorials`"
        for pattern in SHOWN[path.stem]:
            assert re.search(pattern, printed_by(notebook)), f"{path.name}: {pattern}\n{printed_by(notebook)}"
            assert re.search(pattern, printed_by(saved)), f"{path.name}: run `make tutorials`"


def test_the_saved_outputs_have_no_paths_of_a_machine():
    for path in TUTORIALS.glob("*.ipynb"):
        text = path.read_text("utf-8")
        assert str(Path.home()) not in text
        assert "/tmp/" not in text
        assert "site-packages" not in text
