"""metrics.json: one object a line, also after a kill."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright import EventStorage
from trainwright.writers.json_lines import JsonLinesWriter, cut_back


def write(folder, *lines):
    writer, storage = JsonLinesWriter(folder), EventStorage()
    for step, values in lines:
        storage.step = step
        storage.publish(values)
        writer.write(storage)
    return writer


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def test_each_line_is_there_as_soon_as_it_is_written(tmp_path):
    writer = write(tmp_path, (1, {"loss": 0.5}), (2, {"loss": 0.25, "note": "ü"}))
    assert read(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "note": "ü"}]
    writer.close()
    writer.close()


def test_a_writer_appends_and_makes_no_file_before_its_first_line(tmp_path):
    JsonLinesWriter(tmp_path).close()
    assert not (tmp_path / "metrics.json").exists()
    write(tmp_path, (1, {})).close()
    write(tmp_path, (2, {})).close()
    assert [line["step"] for line in read(tmp_path)] == [1, 2]


def test_nan_and_infinities_are_written_as_null(tmp_path):
    values = {
        "loss": math.nan,
        "norm": math.inf,
        "inner": {"low": [-math.inf, 1.0]},
        "array": np.array([math.nan, 2.0]),
    }
    write(tmp_path, (1, values)).close()
    (line,) = read(tmp_path)
    assert (line["loss"], line["norm"], line["inner"], line["array"]) == (None, None, {"low": [None, 1.0]}, [None, 2.0])
    assert "NaN" not in (tmp_path / "metrics.json").read_text()


def test_a_text_that_was_put_is_in_the_line(tmp_path):
    writer, storage = JsonLinesWriter(tmp_path), EventStorage()
    storage.put_text("sample", "ü\n2")
    storage.publish({"loss": 1.0}, media=storage.take_media())
    writer.write(storage)
    writer.close()
    assert read(tmp_path) == [{"step": 0, "loss": 1.0, "sample": "ü\n2"}]


def test_what_json_lacks_is_written_as_lists_or_text(tmp_path):
    values = {
        "array": np.arange(2),
        "tensor": torch.ones(2),
        "single": np.float32(0.5),
        "shape": torch.Size([2]),
        "x": {3},
    }
    write(tmp_path, (1, values)).close()
    expected = {"step": 1, "array": [0, 1], "tensor": [1.0, 1.0], "single": 0.5, "shape": [2], "x": "{3}"}
    assert read(tmp_path) == [expected]


@pytest.mark.parametrize("half", ["", "{", '{"step": 3, "lo', '{"step": 3, "loss": 0.1}', "\0\0\0\0", '{"step"'])
def test_lines_after_the_step_and_a_half_written_one_are_dropped(tmp_path, half):
    write(tmp_path, *((step, {"loss": step / 10}) for step in (1, 2, 2, 4, 6))).close()
    with (tmp_path / "metrics.json").open("a") as file:
        file.write(half)
    cut_back(tmp_path, 3)
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 2]
    write(tmp_path, (4, {})).close()
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 2, 4]


def test_a_broken_line_in_the_middle_is_dropped_too(tmp_path):
    (tmp_path / "metrics.json").write_bytes(b'{"step": 1}\n{"st\n[1]\n12\n{"loss": 1}\n\xff\xfe\n{"step": 2}\n')
    cut_back(tmp_path, 5)
    assert read(tmp_path) == [{"step": 1}, {"step": 2}]


def test_a_file_with_nothing_to_drop_is_left_alone(tmp_path):
    cut_back(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path, (1, {}), (2, {})).close()
    before = (tmp_path / "metrics.json").stat()
    cut_back(tmp_path, 2)
    after = (tmp_path / "metrics.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@settings(deadline=None)
@given(
    values=st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "step"), st.floats(allow_nan=False, allow_infinity=False)
    )
)
def test_any_names_and_numbers_come_back(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("run")
    write(folder, (1, values), (2, {})).close()
    cut_back(folder, 1)
    assert read(folder) == [{"step": 1, **values}]
