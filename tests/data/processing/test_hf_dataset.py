"""load_hf_dataset on local data; nothing here touches the network."""

import json
import socket

import datasets
import huggingface_hub.constants
import pytest
import torch
from tests.messages import raises
from torch.utils.data import DataLoader

import trainwright
from trainwright.data.hf_dataset import _Origin, load_hf_dataset
from trainwright.errors import ConfigError, DataError

ROWS = [{"text": "ab" * n, "label": n % 2} for n in range(6)]


def encode(row):
    return {"input_ids": [ord(letter) for letter in row["text"]], "length": len(row["text"])}


@pytest.fixture
def rows_file(tmp_path):
    path = tmp_path / "data" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def load(tmp_path):
    def load(path, *arguments, **options):
        return load_hf_dataset(path, *arguments, **{"cache_dir": tmp_path / "cache", **options})

    return load


@pytest.mark.parametrize(
    ("path", "name", "config", "split"),
    [
        ("hf://imdb", "imdb", None, "train"),
        ("hf://imdb:test", "imdb", None, "test"),
        ("hf://stanfordnlp/imdb", "stanfordnlp/imdb", None, "train"),
        ("hf://stanfordnlp/imdb:test[:10%]", "stanfordnlp/imdb", None, "test[:10%]"),
        ("hf://super_glue/boolq/validation", "super_glue", "boolq", "validation"),
        ("hf://imdb/*/test", "imdb", None, "test"),
        ("hf://aps!super_glue/boolq/train", "aps/super_glue", "boolq", "train"),
        ("hf://aps/super_glue/boolq/train", "aps/super_glue", "boolq", "train"),
        ("hf://aps/super_glue/boolq:test", "aps/super_glue", "boolq", "test"),
    ],
)
def test_a_name_on_the_hub_is_read_with_its_config_and_split(path, name, config, split):
    assert _Origin.read(path) == _Origin(name=name, config=config, split=split)


@pytest.mark.parametrize("path", ["hf://", "hf://a b", "hf://imdb:", "hf://a/b/c/d/e", "no/such/file.json"])
def test_a_path_that_names_nothing_is_rejected(path):
    with raises(DataError, "load_hf_dataset", "owner/name"):
        load_hf_dataset(path)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet", "txt", "arrow"])
def test_local_files_are_read_by_the_end_of_their_name(tmp_path, load, ending):
    path = tmp_path / f"rows.{ending}"
    table = datasets.Dataset.from_list(ROWS[1:])
    match ending:
        case "jsonl" | "json":
            table.to_json(path)
        case "csv":
            table.to_csv(path)
        case "parquet":
            table.to_parquet(path)
        case "txt":
            path.write_text("".join(f"{row['text']}\n" for row in ROWS[1:]))
        case "arrow":
            table.save_to_disk(tmp_path / "saved")
            next((tmp_path / "saved").glob("*.arrow")).rename(path)
    samples = load(path, encode)
    assert [sample["length"] for sample in samples] == [2, 4, 6, 8, 10]
    assert samples[0]["input_ids"].tolist() == [97, 98]


def test_a_folder_of_files_is_read_in_order_of_their_names(rows_file, load):
    (rows_file.parent / "more.jsonl").write_text('{"text": "z", "label": 1}\n')
    assert [sample["text"] for sample in load(rows_file.parent)][:2] == ["z", ""]


def test_files_of_two_kinds_or_of_none_are_rejected(rows_file, load):
    (rows_file.parent / "more.csv").write_text("text\nz\n")
    with raises(DataError, "more.csv", "rows.jsonl"):
        load(rows_file.parent)
    odd = rows_file.rename(rows_file.with_suffix(".odd"))
    with raises(DataError, "rows.odd"):
        load(odd)


def test_a_folder_that_was_saved_to_disk_is_read_with_its_splits(tmp_path, load):
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(tmp_path / "several")
    assert len(load(tmp_path / "one")) == 6
    assert len(load(tmp_path / "several")) == 6
    assert [sample["text"] for sample in load(f"{tmp_path / 'several'}:test")] == ["ab"]
    with raises(DataError, "valid"):
        load(f"{tmp_path / 'several'}:valid")


def test_columns_are_taken_from_the_sample_or_else_from_the_row(rows_file, load):
    samples = load(rows_file, encode, columns=["label", "input_ids"])
    assert samples.columns == ["label", "input_ids"]
    assert samples[1]["label"] == 1
    with raises(DataError):
        load(rows_file, columns=["lable"])


def test_the_function_is_called_once_for_each_row_and_then_no_more(rows_file, load):
    calls = []

    def counted(row):
        calls.append(row["text"])
        return [{"n": 1}, {"n": 2}] if row["label"] else None

    assert [sample["n"] for sample in load(rows_file, counted, transformer_name="counted")] == [1, 2] * 3
    load(rows_file, counted, transformer_name="counted")
    assert len(calls) == 6


def test_a_name_stands_for_the_function(rows_file, load):
    first = load(rows_file, lambda row: {"n": 1}, transformer_name="ones")
    assert load(rows_file, lambda row: {"n": 2})[0]["n"] == 2
    assert load(rows_file, lambda row: {"n": 2}, transformer_name="ones")[0]["n"] == 1
    assert load(rows_file, lambda row: {"n": 2}, transformer_name="twos")[0]["n"] == 2
    assert load(rows_file, lambda row: {"n": 3}, transformer_name="ones", rebuild=True)[0]["n"] == 3
    assert first[5]["n"] == 1, "a reader of the earlier samples goes on"


def test_a_version_stands_for_what_the_function_holds(rows_file, load):
    class Tokenizer:
        def __init__(self, word):
            self.word = word

    def through(word, **options):
        tokenizer = Tokenizer(word)
        return load(rows_file, lambda row: {"word": tokenizer.word}, **options)[0]["word"]

    with raises(ConfigError, "tokenizer", "Tokenizer", "version"):
        through("a")
    assert through("a", version=1) == "a"
    assert through("b", version=1) == "a"
    assert through("b", version=2) == "b"
    assert through("c", transformer_name="c") == "c"


def test_workers_give_the_same_rows(rows_file, load, tmp_path):
    alone = load(rows_file, encode)
    helped = load(rows_file, encode, num_workers=2, cache_dir=tmp_path / "other")
    assert [sample["input_ids"].tolist() for sample in helped] == [sample["input_ids"].tolist() for sample in alone]
    assert helped.fingerprint == alone.fingerprint


def test_changed_data_is_processed_anew(rows_file, load):
    assert len(load(rows_file, encode)) == 6
    rows_file.write_text(json.dumps(ROWS[1]) + "\n")
    assert len(load(rows_file, encode)) == 1


def test_an_error_names_the_path_and_the_row(rows_file, load):
    with raises(DataError, "0", "missing", "rows.jsonl", "KeyError"):
        load(rows_file, lambda row: {"x": row["missing"]})


def test_offline_opens_no_connection_and_leaves_the_settings_alone(load, monkeypatch):
    for place in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", False)

    def reject(*arguments, **options):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", reject)
    monkeypatch.setattr(socket, "getaddrinfo", reject)
    with raises(DataError, "nobody/nothing") as found:
        load("hf://nobody/nothing", offline=True)
    assert not isinstance(found.value.__cause__, AssertionError)
    assert not datasets.config.HF_HUB_OFFLINE
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_offline_reads_local_files(rows_file, load):
    assert len(load(rows_file, encode, offline=True)) == 6


def test_torchs_loader_reads_it(rows_file, load):
    samples = load(rows_file, lambda row: {"x": [row["label"], 1]})
    (batch,) = DataLoader(samples, batch_size=6)
    assert torch.equal(batch["x"], torch.tensor([[0, 1], [1, 1]] * 3))


def test_it_is_a_public_name():
    assert trainwright.load_hf_dataset is load_hf_dataset
