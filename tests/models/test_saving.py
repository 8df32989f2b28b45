"""Writing a model folder: whole or not at all, in shards, tied weights once, nothing foreign overwritten."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.folders import our_llama, tensors_in

from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.saving import split_into_shards


@settings(max_examples=50)
@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_shards_hold_every_weight_once_in_order_and_no_more_than_allowed(sizes, limit):
    named = {str(number): size for number, size in enumerate(sizes)}
    shards = split_into_shards(named, max_bytes=limit)
    assert [name for shard in shards for name in shard] == list(named)
    assert all(sum(named[name] for name in shard) <= limit or len(shard) == 1 for shard in shards)


def test_the_index_names_each_key_and_the_sum_of_bytes(tmp_path):
    model = our_llama()
    folder = model.save_pretrained(tmp_path / "model", max_shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_in(folder).keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in model.parameters())
    assert not (folder / "model.safetensors").exists()


def test_tied_weights_are_written_once(tmp_path):
    assert "lm_head.weight" not in tensors_in(our_llama().save_pretrained(tmp_path / "tied"))
    assert "lm_head.weight" in tensors_in(our_llama(tie_embeddings=False).save_pretrained(tmp_path / "untied"))


def test_a_model_folder_is_replaced_and_its_other_files_are_kept(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model", max_shard_bytes=20_000)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "more").mkdir()
    (folder / "more" / "notes.txt").write_text("kept")
    changed = our_llama(num_layers=1)
    changed.save_pretrained(folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "more", "tokenizer.json"]
    assert (folder / "more" / "notes.txt").read_text() == "kept"
    assert len(tensors_in(folder)) == len(list(changed.parameters()))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="has files and is no model folder"):
        our_llama().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(CheckpointError, match="is a file"):
        our_llama().save_pretrained(tmp_path / "thesis.txt")


def test_an_empty_folder_is_filled(tmp_path):
    assert our_llama().save_pretrained(tmp_path) == tmp_path
    assert (tmp_path / "config.json").exists()


def test_nothing_is_left_behind_when_writing_fails(tmp_path):
    with torch.device("meta"):
        model = our_llama()
    with pytest.raises(CheckpointError, match="meta device"):
        model.save_pretrained(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_weights_may_be_read_by_those_who_may_read_the_config(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model")
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_a_shard_of_no_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_shard_bytes is 0"):
        our_llama().save_pretrained(tmp_path / "model", max_shard_bytes=0)
