"""Tokenizers by file, by folder and by name, none of which is downloaded."""

import json
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from trainwright.data.tokenizer import TextTokenizer, load_tokenizer, tokenizer_of
from trainwright.errors import DataError

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "<end>"]


def make_library_tokenizer():
    """A tiny byte-level BPE that puts [CLS] and [SEP] around each text, and asks for cutting and padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "the dog"], trainer=trainer)
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(max_length=8)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project") / "words"
    folder.mkdir()
    make_library_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "[PAD]", "mask_token": "[MASK]"}))
    config = {"eos_token": {"content": "<end>", "special": True}, "unk_token": None, "cls_token": "[CLS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@settings(max_examples=50)
@given(st.text())
def test_bytes_give_every_text_back(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_need_no_file_and_have_four_special_tokens():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id) == (260, 256, 257)
    assert (tokenizer.eos_id, tokenizer.mask_id, tokenizer.special_ids) == (258, 259, {256, 257, 258, 259})
    assert tokenizer.decode([104, 258], skip_special_tokens=False) == "h<eos>"


def test_a_folder_says_which_tokens_are_special(folder):
    tokenizer = load_tokenizer(folder)
    numbers = {name: make_library_tokenizer().token_to_id(name) for name in SPECIAL}
    assert (tokenizer.pad_id, tokenizer.mask_id, tokenizer.eos_id) == (
        numbers["[PAD]"],
        numbers["[MASK]"],
        numbers["<end>"],
    )
    assert tokenizer.bos_id is None
    assert tokenizer.special_ids == set(numbers.values())
    assert tokenizer.vocab_size == make_library_tokenizer().get_vocab_size()


def test_a_bare_file_has_the_special_tokens_of_usual_names(folder, tmp_path):
    (tmp_path / "mine.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(tmp_path / "mine.json")
    assert tokenizer.pad_id == load_tokenizer(folder).pad_id
    assert tokenizer.mask_id == load_tokenizer(folder).mask_id
    assert tokenizer.eos_id is None  # <end> is no usual name


def test_a_relative_path_begins_at_the_project_s_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer("words", project_dir=folder.parent)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_the_file_s_own_padding_and_cutting_are_left_to_the_collator(folder):
    text = "the cat sat on the mat " * 4
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_id not in tokenizer.encode("the")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_cut_text_is_still_closed(folder):
    tokenizer = load_tokenizer(folder)
    whole = tokenizer.encode("the cat sat on the mat")
    cut = tokenizer.encode("the cat sat on the mat", max_length=5)
    assert cut == [*whole[:4], whole[-1]]
    assert tokenizer.affixes == (whole[:1], whole[-1:])
    with raises(DataError, "max_length", "1"):
        tokenizer.encode("the cat sat", max_length=1)


def test_special_tokens_can_be_left_out(folder):
    with_them = load_tokenizer(folder).encode("the cat")
    assert load_tokenizer(folder, add_special_tokens=False).encode("the cat") == with_them[1:-1]
    assert load_tokenizer(folder, add_special_tokens=False).affixes == ([], [])


def test_a_batch_has_the_tokens_of_its_texts_one_by_one(folder):
    tokenizer = load_tokenizer(folder)
    texts = ["the cat", "", "ünï"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_arrays_and_tensors_are_decoded_too(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("the dog")
    assert tokenizer.decode(np.array(ids)) == tokenizer.decode(torch.tensor(ids)) == "the dog"


def test_the_constructor_reads_nothing_and_a_missing_path_says_what_was_looked_for(tmp_path):
    tokenizer = TextTokenizer("nowhere/words", project_dir=tmp_path)
    with raises(DataError, "nowhere/words"):
        tokenizer.encode("a")


def test_a_pickled_one_reads_its_files_again(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("the cat")
    copied = pickle.dumps(tokenizer)
    assert len(copied) < 2000
    assert pickle.loads(copied).encode("the cat") == ids


def test_a_tokenizer_that_is_loaded_comes_back_as_it_is(folder):
    tokenizer = load_tokenizer(folder)
    assert load_tokenizer(tokenizer) is tokenizer


@pytest.mark.parametrize("name", ["bytes", "words"])
def test_what_is_no_text_is_rejected_by_its_number(folder, name):
    tokenizer = load_tokenizer(name, project_dir=folder.parent)
    with raises(DataError, "1", "0", "5"):
        tokenizer.encode_batch(["a", 5])
    with raises(DataError, "0"):
        tokenizer.encode("\ud800")


def test_ids_that_are_no_tokens_are_rejected(folder):
    with raises(DataError, "100", "input_ids"):
        load_tokenizer(folder).decode([1, -100])


def test_damaged_files_are_named(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with raises(DataError, "tokenizer.json"):
        load_tokenizer(tmp_path).encode("a")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with raises(DataError, "tokenizer_config.json"):
        load_tokenizer(tmp_path).encode("a")


def test_a_folder_without_tokenizer_json_is_read_by_transformers(tmp_path):
    pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the cat") == [2, 5, 6, 3]
    assert tokenizer.decode([2, 5, 6, 3]) == "the cat"
    assert (tokenizer.pad_id, tokenizer.mask_id, tokenizer.vocab_size) == (0, 4, 7)
    assert tokenizer.affixes == ([2], [3])


def test_a_folder_without_any_tokenizer_says_what_it_holds(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "notes.txt").write_text("")
    with raises(DataError, "tokenizer.json", "notes.txt"):
        load_tokenizer(tmp_path).encode("a")


def test_the_tokenizer_of_a_dataset_is_its_own_or_that_of_a_source_within():
    words = load_tokenizer("bytes")
    inner = SimpleNamespace(source=SimpleNamespace(tokenizer=words))
    assert tokenizer_of(SimpleNamespace(sources={"a": SimpleNamespace(), "b": inner})) is words
    assert tokenizer_of(SimpleNamespace(dataset=inner)) is words
    assert tokenizer_of(SimpleNamespace(source="some/path")) is None
    assert tokenizer_of(None) is None


def test_a_name_needs_huggingface_hub_and_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with raises(DataError, "trainwright[huggingface_hub]"):
        load_tokenizer("gpt2", project_dir=tmp_path).encode("a")
