"""Pickled weights: tensors come out, anything else is refused, and no program runs."""

from __future__ import annotations

import pytest
import torch

from trainwright.errors import CheckpointError
from trainwright.models.pickled import read_pickled


class Program:
    def __reduce__(self):
        return print, ("run",)


def test_tensors_come_out(tmp_path):
    torch.save({"a": torch.arange(3)}, tmp_path / "pytorch_model.bin")
    assert read_pickled(tmp_path / "pytorch_model.bin")["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("content", [{"epoch": 3}, [torch.ones(2)]])
def test_anything_but_named_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not a mapping of names to tensors"):
        read_pickled(tmp_path / "pytorch_model.bin")


def test_a_program_is_not_run(tmp_path, capsys):
    torch.save({"a": Program()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read"):
        read_pickled(tmp_path / "pytorch_model.bin")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"words"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read"):
        read_pickled(tmp_path / "pytorch_model.bin")
