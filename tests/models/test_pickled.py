"""Pickled weights: tensors come out, anything else is rejected, and no program runs."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises

from trainwright.errors import CheckpointError
from trainwright.models.pretrained import read_pickled


class Program:
    def __reduce__(self):
        return print, ("run",)


def test_tensors_come_out(tmp_path):
    torch.save({"a": torch.arange(3)}, tmp_path / "pytorch_model.bin")
    assert read_pickled(tmp_path / "pytorch_model.bin")["a"].tolist() == [0, 1, 2]


def test_a_file_of_the_format_before_zip_archives_is_read(tmp_path):
    weights = {"a": torch.arange(3), "b": torch.nn.Parameter(torch.ones(2))}
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    read = read_pickled(tmp_path / "pytorch_model.bin")
    assert read["a"].tolist() == [0, 1, 2]
    assert read["b"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("of_today", [True, False])
@pytest.mark.parametrize("content", [{"epoch": 3}, [torch.ones(2)]])
def test_anything_but_named_tensors_is_rejected(tmp_path, content, of_today):
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=of_today)
    with raises(CheckpointError):
        read_pickled(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("of_today", [True, False])
def test_a_program_is_not_run(tmp_path, capsys, of_today):
    torch.save({"a": Program()}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=of_today)
    with raises(CheckpointError, "pytorch_model.bin"):
        read_pickled(tmp_path / "pytorch_model.bin")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"words"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with raises(CheckpointError, "pytorch_model.bin"):
        read_pickled(tmp_path / "pytorch_model.bin")
