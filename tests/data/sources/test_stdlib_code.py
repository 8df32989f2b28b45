"""StdlibCode: disjoint parts with one tokenizer, cached once and atomically, read only when asked for."""

from __future__ import annotations

import math
import pickle
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.messages import raises

from trainwright.data.cache import rename_unless_taken
from trainwright.data.sources import stdlib_code
from trainwright.data.sources.stdlib_code import END_OF_FILE, StdlibCode, choose_files, list_source_files, unigram_loss
from trainwright.errors import ConfigError, DataError

SMALL = {"sequence_length": 16, "vocab_size": 400, "valid_fraction": 0.2, "max_megabytes": 0.4}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def train(cache):
    return StdlibCode(part="train", cache_dir=cache, **SMALL)


@pytest.fixture(scope="module")
def valid(cache):
    return StdlibCode(part="valid", cache_dir=cache, **SMALL)


@pytest.fixture
def tiny_library(tmp_path, monkeypatch):
    """A library of our own in place of Python's, to choose its files."""
    library = tmp_path / "library"
    library.mkdir()
    for number in range(20):
        (library / f"module_{number:02}.py").write_text(f"def function_{number}():\n    return {number}\n" * 20)
    monkeypatch.setattr(stdlib_code, "_library_folder", lambda: library)
    return library


def test_the_constructor_touches_no_disk(tmp_path):
    StdlibCode(cache_dir=tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_a_sample_is_a_block_of_tokens_and_equal_labels_in_memory_of_their_own(train):
    sample = train[0]
    assert sample["input_ids"].shape == (train.tokens_per_sample,) == (16,)
    assert sample["input_ids"].dtype == torch.int64
    assert torch.equal(sample["input_ids"], sample["labels"])
    sample["labels"].fill_(-100)
    assert (sample["input_ids"] >= 0).all()


def test_blocks_are_the_tokens_in_order_without_overlap(train):
    first, second = train[0]["input_ids"], train[1]["input_ids"]
    assert torch.cat((first, second)).tolist() == train.tokens[:32].tolist()
    assert len(train) == len(train.tokens) // 16
    assert torch.equal(train[-1]["input_ids"], train[len(train) - 1]["input_ids"])


def test_a_batch_holds_the_same_samples_as_single_calls(train):
    for index, sample in zip([5, 0, 5], train.__getitems__([5, 0, 5]), strict=True):
        assert torch.equal(sample["input_ids"], train[index]["input_ids"])


def test_an_index_beyond_the_end_is_an_index_error(train):
    with pytest.raises(IndexError, match="out of range"):
        train[len(train)]


def test_both_parts_share_the_tokenizer_and_one_folder(train, valid):
    assert train.prepare() == valid.prepare()
    assert train.tokenizer.to_str() == valid.tokenizer.to_str()
    assert sorted(path.name for path in train.prepare().iterdir()) == ["tokenizer.json", "train.npy", "valid.npy"]


def test_tokens_decode_to_the_files_of_their_part(train, valid):
    library = Path(sysconfig.get_paths()["stdlib"])
    chosen = choose_files(library, valid_fraction=0.2, max_megabytes=0.4)
    for dataset in (train, valid):
        contents = [(library / path).read_bytes().decode("utf-8", errors="replace") for path in chosen[dataset.part]]
        text = "".join(content + END_OF_FILE for content in contents)
        assert dataset.tokenizer.decode(dataset.tokens.tolist(), skip_special_tokens=False) == text


def test_no_token_lies_outside_the_vocabulary(train):
    assert train.tokens.max() < train.vocab_size == train.tokenizer.get_vocab_size()


def test_preparing_again_gives_the_same_tokens(train, tmp_path):
    again = StdlibCode(part="train", cache_dir=tmp_path, **SMALL)
    assert np.array_equal(train.tokens, again.tokens)


def test_a_second_run_reads_the_cache_and_writes_nothing(train, cache):
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert len(StdlibCode(part="train", cache_dir=cache, **SMALL)) == len(train)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_other_arguments_have_another_cache_but_the_block_length_has_not(train, cache):
    longer = StdlibCode(cache_dir=cache, **{**SMALL, "sequence_length": 32})
    assert longer.prepare() == train.prepare()
    assert stdlib_code._cache_name(longer.recipe) != stdlib_code._cache_name(StdlibCode().recipe)


def test_the_cache_lies_where_the_user_keeps_caches(tmp_path, monkeypatch, tiny_library):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = StdlibCode(sequence_length=4, vocab_size=300, valid_fraction=0.5).prepare()
    assert folder.parent == tmp_path / "xdg" / "trainwright"


def test_a_failure_leaves_no_cache_behind(tmp_path, tiny_library, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(RuntimeError, match="the disk is full"):
        StdlibCode(cache_dir=tmp_path / "cache", vocab_size=300, valid_fraction=0.5).prepare()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_another_process_finished_first_stands(tmp_path):
    (staging := tmp_path / "staging").mkdir()
    (folder := tmp_path / "folder").mkdir()
    (staging / "train.npy").write_text("ours")
    (folder / "train.npy").write_text("theirs")
    rename_unless_taken(staging, folder)
    assert (folder / "train.npy").read_text() == "theirs"


def test_files_that_are_not_utf_8_are_read(tmp_path, tiny_library):
    for path in tiny_library.iterdir():
        path.write_bytes(b"# caf\xe9\n" + path.read_bytes())
    dataset = StdlibCode(sequence_length=4, vocab_size=300, valid_fraction=0.5, cache_dir=tmp_path / "cache")
    assert "# caf\ufffd" in dataset.tokenizer.decode(dataset.tokens.tolist())


def test_tests_and_installed_packages_are_skipped(tiny_library):
    for folder in ("site-packages/torch", "test", "email/tests", "idlelib", "lib2to3", "email"):
        (tiny_library / folder).mkdir(parents=True, exist_ok=True)
        (tiny_library / folder / "inside.py").write_text("pass\n")
    paths = list_source_files(tiny_library)
    assert [path for path in paths if path.endswith("inside.py")] == ["email/inside.py"]
    assert paths == sorted(paths)


def test_the_parts_are_disjoint_and_together_every_file(tiny_library):
    parts = choose_files(tiny_library, valid_fraction=0.3, max_megabytes=None)
    assert sorted(parts["train"] + parts["valid"]) == list_source_files(tiny_library)
    assert parts["train"]
    assert parts["valid"]


def test_the_bound_on_megabytes_gives_each_part_its_first_files_in_order(tiny_library):
    everything = choose_files(tiny_library, valid_fraction=0.5, max_megabytes=None)
    size = max(path.stat().st_size for path in tiny_library.iterdir())
    bounded = choose_files(tiny_library, valid_fraction=0.5, max_megabytes=2 * 3 * size / 1e6)
    assert {part: paths[:3] for part, paths in everything.items()} == bounded


@pytest.mark.parametrize("max_megabytes", [0.1, 0.3, 1.0])
def test_small_bounds_leave_files_in_both_parts_of_the_real_library(max_megabytes):
    library = Path(sysconfig.get_paths()["stdlib"])
    parts = choose_files(library, valid_fraction=0.05, max_megabytes=max_megabytes)
    assert all(parts.values())
    assert sum((library / path).stat().st_size for paths in parts.values() for path in paths) <= max_megabytes * 1e6


def test_a_spawned_worker_gets_no_copy_of_the_tokens(train):
    len(train)
    pickled = pickle.dumps(train)
    assert len(pickled) < 2000
    assert torch.equal(pickle.loads(pickled)[3]["input_ids"], train[3]["input_ids"])


def test_torchs_loader_batches_it(train):
    batch = next(iter(torch.utils.data.DataLoader(train, batch_size=4)))
    assert batch["input_ids"].shape == (4, 16)


def test_the_unigram_loss_is_the_cross_entropy_of_smoothed_counts(train, valid):
    counts = np.ones(400)
    for token in train.tokens.tolist():
        counts[token] += 1
    by_hand = -np.mean([math.log(counts[token] / counts.sum()) for token in valid.tokens.tolist()])
    assert unigram_loss(train, valid) == pytest.approx(by_hand)
    assert unigram_loss(train, valid) < math.log(400)


def test_a_unigram_loss_over_different_tokenizers_is_rejected(train, cache):
    with raises(DataError):
        unigram_loss(train, StdlibCode(part="valid", cache_dir=cache, **{**SMALL, "vocab_size": 500}))


def test_a_part_without_files_is_rejected_with_advice(tmp_path, tiny_library):
    with raises(DataError, "max_megabytes", "8.0"):
        StdlibCode(cache_dir=tmp_path / "cache", valid_fraction=0.0001).prepare()


def test_a_part_shorter_than_one_block_is_rejected_with_advice(tmp_path, tiny_library):
    dataset = StdlibCode(cache_dir=tmp_path / "cache", vocab_size=300, valid_fraction=0.5, sequence_length=100_000)
    with raises(DataError, "100000", "sequence_length"):
        len(dataset)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part": "test"}, ("test",)),
        ({"vocab_size": 256}, ("vocab_size", "256", "257")),
        ({"sequence_length": 1}, ("sequence_length", "1")),
        ({"valid_fraction": 1.0}, ("valid_fraction", "1.0")),
        ({"max_megabytes": 0}, ("max_megabytes", "0")),
    ],
)
def test_impossible_arguments_are_rejected_at_construction(changes, message):
    with raises(ConfigError, *message):
        StdlibCode(**changes)
