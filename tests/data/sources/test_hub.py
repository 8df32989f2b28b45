"""The library of Hugging Face: its import and its use of the network."""

import sys
import types

import pytest
from huggingface_hub import constants
from tests.messages import raises

from trainwright.data.sources.huggingface import import_datasets, network_use
from trainwright.errors import DataError

datasets = pytest.importorskip("datasets")


def settings():
    return datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE


def fail_while(offline, seen):
    with network_use(offline=offline):
        seen.append(settings())
        raise ValueError("out")


@pytest.mark.parametrize("offline", [True, False, None])
def test_the_setting_holds_inside_of_the_block_and_after_an_error_no_more(offline):
    before, seen = settings(), []
    with pytest.raises(ValueError, match="out"):
        fail_while(offline, seen)
    assert seen == [before if offline is None else (offline, offline)]
    assert settings() == before


def test_a_folder_of_the_same_name_is_told_from_the_library(monkeypatch):
    assert import_datasets("x") is datasets
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    with raises(DataError):
        import_datasets("x")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises(DataError, "datasets"):
        import_datasets("x")
