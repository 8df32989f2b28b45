"""What a run keeps of a pretrained folder: whole or not at all, without paths, and read back as it was."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright.errors import CheckpointError
from trainwright.models.pretrained import LoadReport
from trainwright.models.pretrained_facts import (
    FACTS_FILE,
    PretrainedFacts,
    gather_facts,
    read_facts,
    restore_facts,
    without_paths,
    write_facts,
)

REPORT = LoadReport(missing=("head.weight",), unexpected=("other",))


def test_facts_come_back_as_they_were_written(tmp_path):
    facts = PretrainedFacts(
        {"model_type": "llama", "rope": {"x": [1, None]}}, REPORT, {"norm.weight": "float32"}, {"n": 1}
    )
    write_facts(tmp_path, facts)
    assert read_facts(tmp_path) == facts
    assert [path.name for path in tmp_path.iterdir()] == [FACTS_FILE]
    plain = PretrainedFacts(None, LoadReport((), ()))
    write_facts(tmp_path, plain)
    assert read_facts(tmp_path) == plain


def test_a_folder_without_facts_has_none(tmp_path):
    assert read_facts(tmp_path) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"config": 3, "missing": [], "unexpected": [], "dtypes": {}}'])
def test_damaged_facts_are_named(tmp_path, content):
    (tmp_path / FACTS_FILE).write_text(content)
    with raises(CheckpointError, "pretrained.json"):
        read_facts(tmp_path)


def test_places_are_no_facts_of_a_model():
    config = {"_name_or_path": "/home/a", "hidden_size": 3, "text_config": {"name_or_path": "/home/b", "size": 1}}
    assert without_paths(config) == {"hidden_size": 3, "text_config": {"size": 1}}


def make():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("computed", torch.ones(2), persistent=False)
    return model


def test_dtypes_are_restored_and_computed_buffers_left_alone(tmp_path):
    model = make().to(torch.bfloat16)
    model[1].to(torch.float32)
    facts = gather_facts(tmp_path, REPORT, model, dtype=torch.bfloat16)
    assert facts.dtypes.keys() == {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
    again = make()
    restore_facts(again, facts, dtype=torch.bfloat16)
    assert {name: one.dtype for name, one in again.state_dict().items()} == {
        name: one.dtype for name, one in model.state_dict().items()
    }
    assert again.computed.dtype == torch.float32
