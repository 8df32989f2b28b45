"""Chats from files as samples: what is cut, what is dropped, and where an invalid row is."""

import copy
import gzip
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chats import MARKED_TEMPLATE, PREFIX_TEMPLATE, chat, make_tokenizer_folder
from tests.messages import check_message, raises

from trainwright.build.data import DatasetBuilder
from trainwright.config import Component
from trainwright.data.chat import Chat, render
from trainwright.data.collators.padded import Padded
from trainwright.data.pack import pack
from trainwright.data.sources.chat import ChatRows, ChatStream
from trainwright.data.sources.chat import chat as open_chats
from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import ConfigError, DataError

ROWS = [
    {"messages": chat("the cat", "sat on the mat")},
    {"messages": chat("a question without an answer")},
    {"messages": chat("one", "two", "three", "four", "five", "six")},
    {"instruction": "add", "input": "1 2", "output": "3"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    make_tokenizer_folder(folder / "base", MARKED_TEMPLATE)
    make_tokenizer_folder(folder / "plain", PREFIX_TEMPLATE)
    write_lines(folder / "chats.jsonl", ROWS)
    (folder / "chats.json").write_text(json.dumps(ROWS, indent=1))
    with gzip.open(folder / "chats.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = sorted({name for row in ROWS for name in row})
    table = pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in ROWS])
    pq.write_table(table, folder / "chats.parquet", row_group_size=2)
    return folder


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def samples_of(dataset):
    return [{name: values.tolist() for name, values in sample.items()} for sample in dataset]


def expected_samples(folder, rows=ROWS, **settings):
    from trainwright.data.chat import read_row

    tokenizer = load_tokenizer(folder / "base")
    rendered = [render(read_row(row), tokenizer, **settings) for row in rows]
    return [
        {
            "input_ids": each.ids,
            "labels": [
                number if is_trained else -100 for number, is_trained in zip(each.ids, each.is_trained, strict=True)
            ],
        }
        for each in rendered
        if any(each.is_trained)
    ]


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json", "chats.parquet", "chats.jsonl.gz"])
def test_every_kind_of_file_gives_the_same_samples(name, folder, tmp_path):
    dataset = open_chats(name, tokenizer="base", project_dir=folder, cache_dir=tmp_path)
    assert isinstance(dataset, ChatRows)
    assert samples_of(dataset) == expected_samples(folder)
    assert dataset.lengths.tolist() == [len(each["input_ids"]) for each in samples_of(dataset)]
    assert len(dataset) == 3  # a chat without an answer is dropped
    assert dataset[0]["labels"].dtype == dataset[0]["input_ids"].dtype == torch.int64
    if name != "chats.json":
        stream = open_chats(name, tokenizer="base", project_dir=folder, streaming=True)
        assert isinstance(stream, ChatStream)
        assert samples_of(stream) == samples_of(dataset)


def test_lists_and_globs_name_several_files(folder, tmp_path):
    write_lines(tmp_path / "a.jsonl", ROWS[:1])
    write_lines(tmp_path / "b.jsonl", ROWS[2:])
    expected = expected_samples(folder)
    for path in (f"{tmp_path}/*.jsonl", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path):
        assert samples_of(open_chats(path, tokenizer="base", project_dir=folder)) == expected
    with raises(ConfigError, "path", "several kinds"):
        open_chats(["a.jsonl", "b.parquet"], tokenizer="base")


def test_another_dataset_can_be_the_source(folder):
    build = DatasetBuilder(project_dir=folder, seed=0).build
    inner = {"type": "json_lines", "path": "chats.jsonl"}
    for source in (inner, {**inner, "streaming": True}):
        dataset = build("data.train", Component("chat", source=source, tokenizer="base"))
        assert samples_of(dataset) == expected_samples(folder)
    assert samples_of(open_chats(source=ROWS, tokenizer="base", project_dir=folder)) == expected_samples(folder)
    with raises(DataError, "row 1 of list", "messages[0].role"):
        len(open_chats(source=[ROWS[0], {"messages": [{"role": "x"}]}], tokenizer="base", project_dir=folder))


def test_the_log_counts_what_is_dropped_and_cut(folder, caplog):
    caplog.set_level("INFO")
    len(open_chats("chats.jsonl", tokenizer="base", max_length=30, project_dir=folder))
    check_message(caplog.messages[-1], 4, "dropped 1", "shortened 1", "trained")
    list(open_chats("chats.jsonl", tokenizer="base", streaming=True, project_dir=folder))
    check_message(caplog.messages[-1], "dropped 1", "stream")


def test_rows_that_are_all_dropped_raise(folder):
    with raises(DataError, 4, "train_on", "max_length"):
        len(open_chats("chats.jsonl", tokenizer="base", max_length=4, project_dir=folder))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "mentions"),
    [
        ({"messages": [{"role": "robot", "content": "a"}]}, ["bad.jsonl line 3", "messages[0].role", "robot"]),
        ({"text": "a"}, ["bad.jsonl line 3", "text"]),
        ("not a row", ["bad.jsonl line 3"]),
    ],
)
def test_an_invalid_row_is_named_by_file_and_line(streaming, row, mentions, folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text(f"{json.dumps(ROWS[0])}\n\n{json.dumps(row)}\n")
    with raises(DataError, *mentions):
        list(open_chats(tmp_path / "bad.jsonl", tokenizer="base", streaming=streaming, project_dir=folder))


def test_a_stream_continues_after_an_invalid_row(folder, tmp_path):
    write_lines(tmp_path / "bad.jsonl", [ROWS[0], {"text": "a"}, ROWS[2]])
    rows = iter(open_chats(tmp_path / "bad.jsonl", tokenizer="base", streaming=True, project_dir=folder))
    found = [next(rows)]
    with raises(DataError, "line 2"):
        next(rows)
    found += rows
    assert samples_of(found) == expected_samples(folder, [ROWS[0], ROWS[2]])


def test_an_invalid_row_of_other_files_is_named_too(folder, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    bad = [ROWS[0], ROWS[2], {"messages": [{"role": "robot", "content": "a"}]}]
    (tmp_path / "bad.json").write_text(json.dumps(bad, indent=1))
    line = json.dumps(bad, indent=1)[: json.dumps(bad, indent=1).index("robot")].count("\n") - 2
    pq.write_table(pa.Table.from_pylist(bad), tmp_path / "bad.parquet", row_group_size=2)
    with raises(DataError, f"bad.json line {line}", "robot"):
        len(open_chats(tmp_path / "bad.json", tokenizer="base", project_dir=folder))
    with raises(DataError, "bad.parquet row 3", "robot"):
        len(open_chats(tmp_path / "bad.parquet", tokenizer="base", project_dir=folder))
    with raises(DataError, "bad.parquet row 1 of row group 1", "robot"):
        list(open_chats(tmp_path / "bad.parquet", tokenizer="base", streaming=True, project_dir=folder))


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ('{"messages": []}', ["list", ".jsonl"]),
        ('[{"a": 1},\n{"a": ]', ["line 2", "JSON"]),
        ('[{"a": 1}\n{"a": 2}]', ["line 1", "list"]),
        ('[{"a": 1},', ["line 1", "JSON"]),
        ('[{"a": 1}]\n\n[{"a": 2}]\n', ["line 3", "list", ".jsonl"]),
    ],
)
def test_a_broken_list_is_named_by_its_line(text, mentions, folder, tmp_path):
    (tmp_path / "bad.json").write_text(text)
    with raises(DataError, "bad.json", *mentions):
        len(open_chats(tmp_path / "bad.json", tokenizer="base", project_dir=folder))


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ({}, ["path", "source"]),
        ({"path": "a.jsonl", "source": ROWS}, ["path", "source"]),
        ({"path": "a.jsonl", "train_on": "user"}, ["train_on", "assistant"]),
        ({"path": "a.jsonl", "truncation": "words"}, ["truncation", "turns"]),
        ({"path": "a.jsonl", "truncation": "turns"}, ["truncation", "max_length"]),
        ({"path": "a.jsonl", "max_length": 1}, ["max_length", 1]),
        ({"path": "a.json", "streaming": True}, ["streaming", ".jsonl"]),
        ({"source": ROWS, "streaming": True}, ["streaming", "source"]),
        ({"source": 3}, ["source", "int"]),
    ],
)
def test_contradicting_settings_are_rejected(arguments, mentions):
    with raises(ConfigError, *mentions):
        open_chats(**arguments, tokenizer="bytes")


def test_a_missing_tokenizer_is_not_an_error_of_a_row(folder):
    with raises(DataError, "no tokenizer") as caught:
        len(open_chats("chats.jsonl", tokenizer="bse", project_dir=folder))
    assert "line" not in str(caught.value)


def test_a_template_may_be_a_file(folder, tmp_path):
    (tmp_path / "marked.jinja").write_text(MARKED_TEMPLATE)
    (tmp_path / "chats.jsonl").write_text((folder / "chats.jsonl").read_text())
    arguments = {"tokenizer": str(folder / "plain"), "project_dir": tmp_path}
    dataset = open_chats("chats.jsonl", chat_template="marked.jinja", **arguments)
    assert samples_of(dataset) == expected_samples(folder)
    with raises(DataError, "chat_template", "none.jinja"):
        len(open_chats("chats.jsonl", chat_template="none.jinja", **arguments))


def test_long_chats_lose_tokens_or_whole_turns(folder):
    [whole] = expected_samples(folder, [ROWS[2]])
    length = len(whole["input_ids"])

    def read(**settings):
        rows = open_chats(source=[ROWS[2]], tokenizer="base", project_dir=folder, **settings)
        return samples_of(rows)[0]

    for max_length in (length, length + 1):
        assert read(max_length=max_length) == read(max_length=max_length, truncation="turns") == whole
    cut = read(max_length=length - 1)
    assert cut == {name: values[:-1] for name, values in whole.items()}
    [two_turns] = expected_samples(folder, [{"messages": ROWS[2]["messages"][:4]}])
    assert read(max_length=length - 1, truncation="turns") == two_turns
    [last] = expected_samples(folder, [{"messages": ROWS[2]["messages"][:4]}], train_on="last")
    assert read(max_length=length - 1, truncation="turns", train_on="last") == last


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(2, 200), st.sampled_from(["tokens", "turns"]))
def test_no_sample_is_longer_than_max_length_and_each_is_the_start_of_its_chat(sizes, max_length, truncation):
    rows = [{"messages": chat(*["word"] * (2 * size + 2))} for size in sizes]
    tokenizer = load_tokenizer("bytes")
    try:
        samples = samples_of(open_chats(source=rows, tokenizer=tokenizer, max_length=max_length, truncation=truncation))
    except DataError:
        samples = []  # not even the first turn fits
    whole = [render(Chat(row["messages"]), tokenizer) for row in rows]
    first = next(number for number, is_trained in enumerate(whole[0].is_trained) if is_trained)
    turn = next(n for n in range(first, len(whole[0].ids)) if not whole[0].is_trained[n]) + 1  # with its line break
    shortest = first + 1 if truncation == "tokens" else turn
    assert len(samples) == (len(rows) if max_length >= shortest else 0)
    for sample, full in zip(samples, whole, strict=False):
        length = len(sample["input_ids"])
        assert length <= max_length
        assert sample["input_ids"] == full.ids[:length]
        assert [label != -100 for label in sample["labels"]] == full.is_trained[:length]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
LAYOUTS = (
    lambda q, a: {"messages": chat(q, a)},
    lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    lambda q, a: {"instruction": q, "input": "", "output": a},
    lambda q, a: {"prompt": q, "completion": a},
)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), TEXT, TEXT), min_size=1, max_size=6),
    st.integers(20, 120),
)
def test_a_stream_has_the_samples_of_the_index_and_packing_keeps_them(tmp_path_factory, rows, max_length):
    file = tmp_path_factory.getbasetemp() / "layouts.jsonl"
    write_lines(file, [LAYOUTS[layout](question, answer) for layout, question, answer in rows])
    settings = {"tokenizer": "bytes", "max_length": max_length}
    stream = open_chats(file, streaming=True, **settings)
    samples = samples_of(stream)
    assert stream.renderer.counts.rows == len(rows)
    assert stream.renderer.counts.dropped == len(rows) - len(samples)
    if not samples:
        with pytest.raises(DataError):
            len(open_chats(file, **settings))
        return
    dataset = open_chats(file, **settings)
    assert samples_of(dataset) == samples
    packed = pack(dataset, length=max_length)
    found = []
    for row in (packed[number] for number in range(len(packed))):
        for document in range(int(row["document_ids"].max()) + 1):
            inside = row["document_ids"] == document
            found.append({name: row[name][inside].tolist() for name in ("input_ids", "labels")})
    for sample in samples:
        sample["labels"][0] = -100  # the first token of a document is predicted from nothing
    assert sorted(map(str, found)) == sorted(map(str, samples))


def test_chats_are_packed_with_borders_and_their_labels(folder):
    dataset = open_chats("chats.jsonl", tokenizer="base", project_dir=folder)
    rows = pack(dataset, length=256)
    [row] = [rows[number] for number in range(len(rows))]
    tokens, trained = set(), 0
    for document in range(int(row["document_ids"].max()) + 1):
        inside = row["document_ids"] == document
        assert row["position_ids"][inside].tolist() == list(range(int(inside.sum())))
        tokens.add(tuple(row["input_ids"][inside].tolist()))
        trained += int((row["labels"][inside] != -100).sum())
    assert tokens == {tuple(each["input_ids"]) for each in samples_of(dataset)}
    assert trained == sum(label != -100 for each in samples_of(dataset) for label in each["labels"])


def test_chats_are_padded_with_their_labels(folder):
    dataset = open_chats("chats.jsonl", tokenizer="base", project_dir=folder)
    batch = Padded(tokenizer=dataset.tokenizer)([dataset[0], dataset[1]])
    for number in range(2):
        length = int(batch["attention_mask"][number].sum())
        assert batch["labels"][number][:length].tolist() == dataset[number]["labels"].tolist()
        assert (batch["labels"][number][length:] == -100).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=90), st.data())
def test_a_stream_is_resumed_after_any_sample(has_answer, data):
    rows = [{"messages": chat(f"q{n}", *([f"a{n}"] if each else []))} for n, each in enumerate(has_answer)]
    stream = open_chats(source=Rows(rows), tokenizer="bytes")
    samples = samples_of(stream)
    assert len(samples) == sum(has_answer)
    stop = data.draw(st.integers(0, len(samples)))
    iterator = iter(stream)
    for _ in range(stop):
        next(iterator)
    resumed = open_chats(source=Rows(rows), tokenizer="bytes")
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert samples_of(resumed) == samples[stop:]


class Rows:
    """A stream of rows with a state."""

    draws_nothing = True

    def __init__(self, rows):
        self.rows, self.start, self.place = rows, 0, 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.start = state["place"]

    def __iter__(self):
        self.place, self.start = self.start, 0
        return self

    def __next__(self):
        if self.place == len(self.rows):
            raise StopIteration
        self.place += 1
        return copy.deepcopy(self.rows[self.place - 1])


def test_the_shards_of_a_stream_are_the_stream(folder, tmp_path):
    for number, rows in enumerate((ROWS[:2], ROWS[2:])):
        write_lines(tmp_path / f"{number}.jsonl", rows)
    stream = open_chats(f"{tmp_path}/*.jsonl", tokenizer="base", streaming=True, project_dir=folder)
    shards = [stream.shard(num_shards=2, index=index) for index in range(stream.num_shards)]
    assert [type(shard) for shard in shards] == [ChatStream, ChatStream]
    assert samples_of(shards[0]) + samples_of(shards[1]) == samples_of(stream)


def test_a_worker_receives_the_tokens(folder):
    dataset = open_chats("chats.jsonl", tokenizer="base", project_dir=folder)
    expected = samples_of(dataset)
    received = pickle.loads(pickle.dumps(dataset))
    received.source = None  # it need not read the rows again
    assert samples_of(received) == expected
    assert np.array_equal(received.lengths, dataset.lengths)
