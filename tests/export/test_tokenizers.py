"""The tokenizer of a run: found without reading data, saved in files that transformers reads."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models

from trainwright import RunConfig
from trainwright.data.tokenizer import TextTokenizer, load_tokenizer
from trainwright.export.huggingface import find_tokenizer, save_tokenizer


def config_with(tmp_path, data):
    (tmp_path / "run.yaml").write_text(f"model: {{type: llama, vocab_size: 9}}\ndata: {data}\n")
    return RunConfig.load(tmp_path / "run.yaml")


@pytest.fixture
def words():
    return Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))


@pytest.mark.parametrize(
    "data",
    [
        "{train: {type: pack, length: 8, tokenizer: bytes, source: {type: text, path: no.txt}}}",
        "{train: {type: text, path: no.txt}, collator: {type: tokenize, tokenizer: bytes}}",
    ],
)
def test_it_is_found_in_the_data_or_the_collator_though_no_data_is_there(tmp_path, data):
    found = find_tokenizer(config_with(tmp_path, data))
    assert isinstance(found, TextTokenizer)
    assert found.name == "bytes"


def test_a_run_without_one_has_none(tmp_path):
    assert find_tokenizer(config_with(tmp_path, "{train: {type: digits}}")) is None
    assert find_tokenizer(config_with(tmp_path, "{}")) is None


def test_each_kind_is_saved_as_files(tmp_path, words):
    first, second, third = (tmp_path / name for name in "abc")
    for folder in (first, second, third):
        folder.mkdir()
    assert save_tokenizer(words, first) == [first / "tokenizer.json"]
    (first / "tokenizer_config.json").write_text('{"unk_token": "[UNK]"}')
    assert len(save_tokenizer(load_tokenizer(first), second)) == 2
    assert load_tokenizer(second).encode("a") == [0]
    save_tokenizer(load_tokenizer(second / "tokenizer.json"), third)
    assert load_tokenizer(third).encode("a") == [0]
    assert save_tokenizer(load_tokenizer("bytes"), tmp_path) == []
    assert save_tokenizer(object(), tmp_path) == []


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_the_template_of_conversations_and_added_tokens_go_along(tmp_path, words, name):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    words.save(str(tmp_path / "from" / "tokenizer.json"))
    (tmp_path / "from" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "from" / "added_tokens.json").write_text("{}")
    (tmp_path / "from" / "notes.txt").write_text("mine")
    save_tokenizer(load_tokenizer(tmp_path / "from" / name), tmp_path / "to")
    written = {path.name for path in (tmp_path / "to").iterdir()}
    assert written == {"tokenizer.json", "chat_template.jinja", "added_tokens.json"}
