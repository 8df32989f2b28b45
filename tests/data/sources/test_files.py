"""Rows of text files: by index, as a stream and by plain Python they are the same, from any place and in any shards."""

from __future__ import annotations

import bz2
import csv as python_csv
import gzip
import io
import itertools
import json
import lzma
import os
import pickle
import tempfile
import uuid
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises
from torch.utils.data import DataLoader

from trainwright.data.fetch import is_stream
from trainwright.data.sources import file_stream, files
from trainwright.data.sources import formats as records
from trainwright.data.sources.files import csv, json_lines, text
from trainwright.errors import ConfigError, DataError

MEGABYTE = 2**20
BLANKS = " \t\x0b\x0c"
letters = st.text(st.sampled_from('ab \t\r\x0b\x0c\x1c\x85\u2028\u00a0é€😀"'), max_size=6)
contents = st.lists(st.tuples(letters, st.sampled_from(["\n", "\r\n", "\n\n", ""])), max_size=12).map(
    lambda lines: "".join(line + end for line, end in lines)
)
file_sets = st.lists(contents, min_size=1, max_size=4)


def lines_of(content):
    """The lines of a text that are not blank, by plain Python."""
    ended = [line.removesuffix("\r") for line in content.split("\n")[:-1]]
    lines = [*ended, content.split("\n")[-1]]
    return [line for line in lines if line.strip(BLANKS + "\r")]


def paragraphs_of(content):
    paragraphs, current = [], []
    *ended, last = content.split("\n")
    for line in [*(line.removesuffix("\r") for line in ended), last, ""]:
        if line.strip(BLANKS + "\r"):
            current.append(line)
        elif current:
            paragraphs.append("\n".join(current))
            current = []
    return paragraphs


def write_files(folder, contents, suffix=".txt"):
    for number, content in enumerate(contents):
        (Path(folder) / f"{number}{suffix}").write_bytes(content.encode())


def texts(rows):
    return [row["text"] for row in rows]


def rests_of(stream):
    """What comes after each prefix, read by a fresh iteration that was given the state there."""
    iterator, rests = iter(stream), []
    for _ in range(10_000):
        state = json.loads(json.dumps(stream.state_dict()))
        other = pickle.loads(pickle.dumps(stream))
        other.load_state_dict(state)
        rests.append(list(other))
        assert list(other) != [] or not list(stream.shard(1, 0))  # the pass after that begins at the start
        try:
            next(iterator)
        except StopIteration:
            return rests
    raise AssertionError("the stream does not end")


def assert_all_ways_agree(make, expected, num_shards_tried=(1, 2, 3, 5)):
    rows = make(streaming=False)
    assert len(rows) == len(expected)
    assert [rows[index] for index in range(len(rows))] == expected
    assert rows.__getitems__(list(range(len(rows)))[::-1]) == expected[::-1]
    stream = make(streaming=True)
    assert list(stream) == expected
    assert list(stream) == expected
    for num_shards in num_shards_tried:
        if num_shards <= stream.num_shards:
            shards = [stream.shard(num_shards, index) for index in range(num_shards)]
            assert [row for shard in shards for row in shard] == expected
    everywhere = [stream.shard(stream.num_shards, index) for index in range(stream.num_shards)]
    assert [row for shard in everywhere for row in shard] == expected


@pytest.mark.parametrize("unit", ["line", "paragraph"])
@settings(max_examples=60)
@given(contents=file_sets, shard_bytes=st.integers(1, 20))
def test_lines_and_paragraphs_are_the_same_by_index_as_a_stream_and_by_plain_python(unit, contents, shard_bytes):
    plain = lines_of if unit == "line" else paragraphs_of
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, contents)

        def make(streaming):
            options = {"shard_megabytes": shard_bytes / MEGABYTE} if streaming else {}
            return text("*.txt", unit=unit, streaming=streaming, project_dir=folder, **options)

        assert_all_ways_agree(make, [{"text": each} for content in contents for each in plain(content)])


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
@settings(max_examples=20)
@given(contents=file_sets, shard_bytes=st.integers(1, 20))
def test_a_stream_goes_on_after_any_prefix(unit, contents, shard_bytes):
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, contents)
        stream = text(folder, unit=unit, streaming=True, shard_megabytes=shard_bytes / MEGABYTE)
        rows = list(stream)
        assert rests_of(stream) == [rows[start:] for start in range(len(rows) + 1)]


@given(contents=file_sets)
@settings(max_examples=20)
def test_whole_files_are_samples_empty_ones_too(contents):
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, contents)
        expected = [{"text": content.replace("\r\n", "\n")} for content in contents]
        assert_all_ways_agree(lambda streaming: text(folder, streaming=streaming), expected)


fields = st.text(st.sampled_from('ab,"\n\r \té😀'), max_size=5).map(lambda field: field.replace("\r", "\r\n"))
tables = st.lists(st.lists(st.tuples(fields, fields, st.integers()), max_size=6), min_size=1, max_size=3)


@pytest.mark.parametrize("delimiter", [",", "\t"])
@settings(max_examples=50)
@given(tables=tables, quoting=st.sampled_from([python_csv.QUOTE_MINIMAL, python_csv.QUOTE_ALL]))
def test_csv_is_what_python_reads_with_line_breaks_in_quotes(delimiter, tables, quoting):
    written = []
    for table in tables:
        buffer = io.StringIO(newline="")
        python_csv.writer(buffer, delimiter=delimiter, quoting=quoting).writerows([("x", "y", "n"), *table])
        written.append(buffer.getvalue())
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, written, ".csv")
        expected = [{"x": x, "y": y, "n": n} for table in tables for x, y, n in table]

        def make(streaming):
            return csv("*.csv", types={"n": "int"}, delimiter=delimiter, streaming=streaming, project_dir=folder)

        assert_all_ways_agree(make, expected)
        assert rests_of(make(True)) == [expected[start:] for start in range(len(expected) + 1)]


@settings(max_examples=50)
@given(content=st.text(st.sampled_from('ab,"\n '), max_size=30))
def test_rows_of_odd_csv_are_cut_where_python_cuts_them(content):
    """Stray quotes included: what opens a quoted field is not decided by counting quotes."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, ["x\n" + content], ".csv")
        expected = [row for row in python_csv.reader(io.StringIO(content, newline="")) if row]
        rows = csv(f"{folder}/0.csv")
        assert len(rows) == len(expected)
        for index, row in enumerate(expected):
            if len(row) != 1 or (index == len(expected) - 1 and is_open(content)):
                with raises(DataError, "0.csv", golden=False):
                    rows[index]
            else:
                assert rows[index] == {"x": row[0]}


def is_open(content):
    """Would a further line belong to the last quoted field?"""
    return list(python_csv.reader(io.StringIO(content + "\nnext line", newline="")))[-1] != ["next line"]


def test_json_lines_are_objects_with_the_columns_asked_for(tmp_path):
    objects = [{"a": number, "b": [number, "é\u2028"], "c": None} for number in range(50)]
    content = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in objects)
    (tmp_path / "x.jsonl").write_text("\ufeff" + content, encoding="utf-8")

    def make(streaming):
        options = {"shard_megabytes": 100 / MEGABYTE} if streaming else {}
        return json_lines("x.jsonl", columns=["b", "a"], streaming=streaming, project_dir=tmp_path, **options)

    assert make(True).num_shards > 5
    assert_all_ways_agree(make, [{"b": each["b"], "a": each["a"]} for each in objects])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_corrupt_row_names_its_file_and_line_and_the_next_row_follows(tmp_path, streaming):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n{"a": \n[1]\n{"b": 2}\n{"a": 3}\n')
    rows = json_lines("x.jsonl", columns=["a"], streaming=streaming, project_dir=tmp_path)
    iterator = iter(rows if streaming else ())
    read = (lambda index: next(iterator)) if streaming else rows.__getitem__
    assert read(0) == {"a": 1}
    with raises(DataError, "x.jsonl", "3"):
        read(1)
    with raises(DataError, "x.jsonl", "4"):
        read(2)
    with raises(DataError, "a", "x.jsonl", "5"):
        read(3)
    assert read(4) == {"a": 3}


def test_the_state_after_a_corrupt_row_is_behind_it(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{\n{"a": 3}\n')
    stream = json_lines("x.jsonl", streaming=True, project_dir=tmp_path)
    iterator = iter(stream)
    next(iterator)
    with pytest.raises(DataError):
        next(iterator)
    stream.load_state_dict(stream.state_dict())
    assert list(stream) == [{"a": 3}]


def test_a_corrupt_row_of_a_later_piece_names_its_byte(tmp_path):
    good = '{"a": 1}\n'
    (tmp_path / "x.jsonl").write_text(good * 10 + "oh\n")
    stream = json_lines("x.jsonl", streaming=True, shard_megabytes=40 / MEGABYTE, project_dir=tmp_path)
    assert stream.num_shards == 3
    with raises(DataError, "x.jsonl", "90"):
        list(stream)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('a,b\n1,2\n"x\ny",2\n1,2,3\n', ("x.csv", "5", "3", "2")),
        ('a,b\n1,2\n\n1,"2\n3,4\n', ("x.csv", "4")),
        ("a,b\n1,zwei\n", ("b", "zwei", "x.csv", "2")),
        ("a,a\n1,2\n", ("a",)),
        ("a,c\n1,2\n", ("b",)),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_wrong_row_of_csv_names_its_file_and_line(tmp_path, content, problem, streaming):
    (tmp_path / "x.csv").write_text(content)
    rows = csv("x.csv", types={"b": "text" if "x\n" in content else int}, streaming=streaming, project_dir=tmp_path)
    with raises(DataError, *problem):
        list(rows) if streaming else rows.__getitems__(range(len(rows)))


def test_a_field_of_csv_may_be_long(tmp_path):
    (tmp_path / "x.csv").write_text('a\n"' + "long " * 100_000 + '"\n')
    assert len(csv("x.csv", project_dir=tmp_path)[0]["a"]) == 500_000


def test_a_text_that_is_not_utf_8_names_its_line(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"one\ncaf\xe9\n")
    with raises(DataError, "x.txt", "2", "8"):
        text("x.txt", unit="line", project_dir=tmp_path)[1]
    with raises(DataError, "x.txt", "8"):
        text("x.txt", project_dir=tmp_path)[0]


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_files_are_read_both_ways(tmp_path, suffix, compress):
    rows = [{"a": number} for number in range(20)]
    (data := tmp_path / "data").mkdir()
    for half in (0, 1):
        content = "".join(json.dumps(each) + "\n" for each in rows[10 * half : 10 * half + 10])
        (data / f"{half}.jsonl.{suffix}").write_bytes(compress(content.encode()))

    def make(streaming):
        cache = {} if streaming else {"cache_dir": tmp_path / "cache"}
        return json_lines(data, streaming=streaming, **cache)

    assert make(True).num_shards == 2
    assert_all_ways_agree(make, rows)
    assert rests_of(make(True)) == [rows[start:] for start in range(21)]


def test_a_broken_archive_raises_once_and_the_next_file_follows(tmp_path):
    (tmp_path / "0.txt.gz").write_bytes(b"no archive")
    (tmp_path / "1.txt").write_text("good")
    iterator = iter(text(tmp_path, streaming=True))
    with raises(DataError, "0.txt.gz", "BadGzipFile"):
        next(iterator)
    assert list(iterator) == [{"text": "good"}]


def test_remote_files_are_read_both_ways(tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    for number in range(3):
        fsspec.filesystem("memory").pipe(f"{url}/{number}.txt", b"".join(b"%d %d\n" % (number, n) for n in range(9)))

    def make(streaming):
        options = {"shard_megabytes": 10 / MEGABYTE} if streaming else {"cache_dir": tmp_path}
        return text(f"{url}/*.txt", unit="line", streaming=streaming, **options)

    expected = [{"text": f"{number} {n}"} for number in range(3) for n in range(9)]
    assert_all_ways_agree(make, expected)
    assert rests_of(make(True)) == [expected[start:] for start in range(len(expected) + 1)]


def test_resuming_reads_from_the_place_and_not_from_the_start(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_text("".join(f"{n:07}\n" for n in range(100_000)))
    stream = text("x.txt", unit="line", streaming=True, project_dir=tmp_path)
    lines = []
    original = file_stream._OpenRange._next_line
    monkeypatch.setattr(
        file_stream._OpenRange, "_next_line", lambda opened: lines.append(original(opened)) or lines[-1]
    )
    stream.load_state_dict({**stream.state_dict(), "offset": 8 * 99_999, "line": 99_999})
    assert texts(stream) == ["0099999"]
    assert len(lines) == 2


def lines_in(folder, taken=0, state=None):
    """Reads so many lines of a folder, or the rest, and returns them with the state."""
    stream = text(folder, unit="line", streaming=True, shard_megabytes=6 / 2**20)
    if state is not None:
        stream.load_state_dict(json.loads(json.dumps(state)))
    found = [row["text"] for row in (itertools.islice(stream, taken) if taken else stream)]
    return found, stream.state_dict()


def write_lines(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.txt").write_text("".join(f"{name}{number}\n" for number in range(4)))


@pytest.mark.parametrize("taken", [1, 3, 6, 8, 12])
def test_a_stream_whose_files_before_its_place_have_changed_does_not_go_on(tmp_path, taken):
    write_lines(tmp_path, "b", "c", "d")
    head, state = lines_in(tmp_path, taken)
    write_lines(tmp_path, "a")
    with raises(DataError, "12"):
        lines_in(tmp_path, state=state)
    (tmp_path / "a.txt").unlink()
    assert head + lines_in(tmp_path, state=state)[0] == [f"{name}{number}" for name in "bcd" for number in range(4)]


def test_a_file_that_grew_is_another_one(tmp_path):
    write_lines(tmp_path, "b")
    state = lines_in(tmp_path, 1)[1]
    (tmp_path / "b.txt").write_text("b0\nb1\nb2\nb3\nb4\n")
    with raises(DataError, "b.txt", "12", "0", "6", "15"):
        lines_in(tmp_path, state=state)


def test_a_stream_goes_on_with_files_behind_its_place_and_in_a_folder_that_moved(tmp_path):
    write_lines(tmp_path / "here", "b", "c")
    head, state = lines_in(tmp_path / "here", 5)
    (tmp_path / "here").rename(tmp_path / "there")
    write_lines(tmp_path / "there", "d")
    assert head + lines_in(tmp_path / "there", state=state)[0] == [
        f"{name}{number}" for name in "bcd" for number in range(4)
    ]
    start = text(tmp_path / "there", streaming=True).state_dict()
    write_lines(tmp_path / "there", "a")
    assert len(lines_in(tmp_path / "there", state=start)[0]) == 16


@pytest.mark.parametrize("make", [text, json_lines, csv])
def test_rows_by_index_have_a_fingerprint_that_changes_with_the_files(tmp_path, make):
    end = {text: "txt", json_lines: "jsonl", csv: "csv"}[make]
    (tmp_path / f"x.{end}").write_text('{"a": 1}\n')
    before = make(tmp_path).fingerprint
    assert make(tmp_path).fingerprint == before
    os.utime(tmp_path / f"x.{end}", ns=(1, 1))
    touched = make(tmp_path).fingerprint
    (tmp_path / f"x.{end}").rename(tmp_path / f"y.{end}")
    assert len({before, touched, make(tmp_path).fingerprint}) == 3


def test_the_constructor_touches_no_disk(tmp_path):
    for make in (text, json_lines, csv):
        for streaming in (False, True):
            make("nothing/here", streaming=streaming, project_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_index_travels_to_a_worker_and_the_maps_do_not(tmp_path):
    (tmp_path / "x.txt").write_text("a\nb\nc\n")
    rows = text("x.txt", unit="line", project_dir=tmp_path)
    assert rows[1] == {"text": "b"}
    other = pickle.loads(pickle.dumps(rows))
    assert other._files is not None
    assert not other._maps
    assert texts(other) == ["a", "b", "c"]
    loader = DataLoader(rows, batch_size=2, num_workers=1)
    assert [batch["text"] for batch in loader] == [["a", "b"], ["c"]]


def test_a_file_that_changes_under_a_run_is_an_error(tmp_path):
    (tmp_path / "x.txt").write_text("a\nb\n")
    rows = text("x.txt", unit="line", project_dir=tmp_path)
    assert len(rows) == 2
    (tmp_path / "x.txt").write_text("longer\nthan\nbefore\n")
    with raises(DataError, "19", "4"):
        rows[0]


def test_few_maps_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MAPS_KEPT", 2)
    write_files(tmp_path, [f"{n}\n" for n in range(9)])
    rows = text(tmp_path, unit="line")
    assert texts(rows.__getitems__([*range(9), 0])) == [*map(str, range(9)), "0"]
    assert len(rows._maps) == 2


def test_scanning_in_small_steps_finds_the_same_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_SCAN_BYTES", 3)
    monkeypatch.setattr(records, "_ROWS_AT_A_TIME", 1)
    (tmp_path / "x.csv").write_text('a\n1\n"2\n2"\n3\n\n"4"\n5')
    assert [row["a"] for row in csv("x.csv", project_dir=tmp_path)] == ["1", "2\n2", "3", "4", "5"]


def test_streams_and_rows_are_told_apart(tmp_path):
    assert is_stream(text("x.txt", streaming=True))
    assert not is_stream(text("x.txt"))
    assert text("x.txt").draws_nothing
    assert text("x.txt", streaming=True).draws_nothing


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: text("x", unit="word"), ("word",)),
        (lambda: text("x", streaming=True, cache_dir="y"), ("cache_dir",)),
        (lambda: text("x", shard_megabytes=1), ("shard_megabytes",)),
        (lambda: text("x", streaming=True, shard_megabytes=0), ()),
        (lambda: json_lines("x", columns="text"), ()),
        (lambda: csv("x", delimiter="ab"), ()),
        (lambda: csv("x", types={"a": "date"}), ("date", "types.a")),
    ],
)
def test_settings_that_cannot_work_are_rejected(make, problem):
    with raises(ConfigError, *problem):
        make()


def test_more_shards_than_there_are_is_an_error(tmp_path):
    (tmp_path / "x.txt").write_text("a")
    with raises(ConfigError, "1"):
        text("x.txt", streaming=True, project_dir=tmp_path).shard(2, 0)
