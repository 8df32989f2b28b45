"""Writing a model folder: whole or not at all, in shards, tied weights once, nothing foreign overwritten."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.messages import raises
from tests.models.folders import our_llama, tensors_in
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.gpt2 import GPT2
from trainwright.models.saving import split_into_shards, staged


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
    (folder / "more").mkdir()
    others = ("tokenizer.json", "more/notes.txt", "adapter_model.safetensors", "adapter_config.json", "other.bin")
    for name in others:
        (folder / name).write_text(name)
    numbers = {name: (folder / name).stat().st_ino for name in others}
    changed = our_llama(num_layers=1)
    changed.save_pretrained(folder)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "config.json",
        "model.safetensors",
        *others,
    }
    assert {name: (folder / name).stat().st_ino for name in others} == numbers  # not even copied
    assert load_file(folder / "model.safetensors").keys() == dict(changed.named_parameters()).keys()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_settings_leave_first_and_come_last(tmp_path, monkeypatch):
    folder = our_llama().save_pretrained(tmp_path / "model", max_shard_bytes=20_000)
    seen = []

    def watched(act):
        def watching(path, *arguments, **options):
            done = act(path, *arguments, **options)
            seen.append((folder / "config.json").exists())
            return done

        return watching

    for act in ("unlink", "rename"):
        monkeypatch.setattr(Path, act, watched(getattr(Path, act)))
    our_llama(num_layers=1).save_pretrained(folder)
    assert len(seen) > 4
    assert seen == [False] * (len(seen) - 1) + [True]


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    our_llama().save_pretrained(tmp_path / "link")
    our_llama().save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["config.json", "model.safetensors"]


def test_a_folder_with_the_name_of_a_file_is_rejected_before_anything_is_lost(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model")
    before = tensors_in(folder)
    (folder / "model-00001-of-00002.safetensors").mkdir()
    (folder / "model.safetensors.index.json").mkdir()
    with raises(CheckpointError):
        our_llama(num_layers=1).save_pretrained(folder, max_shard_bytes=20_000)
    assert load_file(folder / "model.safetensors").keys() == before.keys()


def test_a_folder_with_other_files_is_rejected(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with raises(CheckpointError):
        our_llama().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with raises(CheckpointError):
        our_llama().save_pretrained(tmp_path / "thesis.txt")


def test_what_a_killed_writer_left_goes_and_what_a_living_one_makes_stays(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model")
    (folder / "config.json").unlink()  # as between two moves
    with raises(CheckpointError):
        our_llama().save_pretrained(folder)
    for place in (folder, tmp_path):
        (place / ".model.writing-0000").mkdir()
    with staged(folder) as living:
        (living / "notes.txt").write_text("soon")
        our_llama().save_pretrained(folder)
        assert living.is_dir()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_empty_folder_is_filled(tmp_path):
    assert our_llama().save_pretrained(tmp_path) == tmp_path
    assert (tmp_path / "config.json").exists()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of memory that operations take, as long as it is held, and keeps the most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(result, torch.Tensor) and not result.is_meta:
            storage = result.untyped_storage()
            if storage.data_ptr() not in known:
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return result

    def free(self, num_bytes):
        self.now -= num_bytes


def test_writing_takes_the_memory_of_one_shard(tmp_path):
    # GPT-2's files hold most matrices transposed, which must be copied.
    model = GPT2(vocab_size=61, hidden_size=64, num_layers=6, num_heads=4)
    whole = sum(each.nbytes for each in model.parameters())
    with LiveBytes() as memory:
        model.save_pretrained(tmp_path / "model", max_shard_bytes=whole // 6)
    assert whole // 20 < memory.most <= whole // 6


def test_nothing_is_left_behind_when_writing_fails(tmp_path):
    with torch.device("meta"):
        model = our_llama()
    with raises(CheckpointError):
        model.save_pretrained(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_weights_may_be_read_by_those_who_may_read_the_config(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model")
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_a_shard_of_no_bytes_is_rejected(tmp_path):
    with raises(ConfigError, "max_shard_bytes", "0"):
        our_llama().save_pretrained(tmp_path / "model", max_shard_bytes=0)
