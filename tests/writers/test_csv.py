"""metrics.csv: a table that any program reads, also after a kill."""

import csv

import numpy as np
import pytest
from tests.faults.runs import train
from tests.writers.services import KillAt

from trainwright import EventStorage, RunConfig
from trainwright.writers.csv import CsvWriter
from trainwright.writers.writer import RunInfo


def write(folder, *lines, step=0):
    writer, storage = CsvWriter(folder), EventStorage()
    writer.begin(RunInfo(RunConfig(), "run", "id", folder, step, is_resumed=step > 0))
    for number, values in lines:
        storage.step = number
        storage.publish(values)
        writer.write(storage)
    writer.close()


def read(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_line_is_a_row_and_a_new_name_is_a_column(tmp_path):
    write(tmp_path, (1, {"loss": 0.5}), (2, {"loss": np.float32(0.25), "valid/loss": 1, "note": "text"}), (3, {}))
    assert (tmp_path / "metrics.csv").read_text() == "step,loss,valid/loss\n1,0.5,\n2,0.25,1\n3,,\n"


def test_values_that_are_not_finite_and_odd_names_come_back(tmp_path):
    write(tmp_path, (1, {"a,b": float("nan"), 'say "x"': float("-inf")}))
    ((_, first, second),) = [row.values() for row in read(tmp_path)]
    assert (first, second) == ("nan", "-inf")
    assert list(read(tmp_path)[0]) == ["step", "a,b", 'say "x"']


@pytest.mark.parametrize("half", ["", "4", "4,0.5,1", "\0\0"])
def test_a_resumed_run_drops_rows_after_its_step_and_a_half_written_one(tmp_path, half):
    write(tmp_path, *((step, {"loss": step / 10}) for step in (1, 2, 3)))
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(half)
    write(tmp_path, (3, {"loss": 9.0}), (4, {"other": 1.0}), step=2)
    assert [tuple(row.values()) for row in read(tmp_path)] == [
        ("1", "0.1", ""),
        ("2", "0.2", ""),
        ("3", "9.0", ""),
        ("4", "", "1.0"),
    ]


@pytest.mark.parametrize("text", ["", "step,lo", "step,loss\n"])
def test_a_file_without_a_row_is_continued(tmp_path, text):
    (tmp_path / "metrics.csv").write_text(text)
    write(tmp_path, (1, {"loss": 0.5}))
    assert [tuple(row.values()) for row in read(tmp_path)] == [("1", "0.5")]


def test_a_killed_run_has_the_rows_of_an_undisturbed_one(tmp_path):
    def columns(folder):
        return [(row["step"], row["loss"], row.get("valid/loss")) for row in read(folder)]

    options = ("writers=[json, csv]", "log.every_steps=1")
    assert train(tmp_path / "plain", *options) == 0
    assert train(tmp_path / "killed", *options, hooks=[KillAt(5)]) == -9
    assert [row["step"] for row in read(tmp_path / "killed")] == ["1", "2", "3", "4"]
    assert train(tmp_path / "killed", *options) == 0
    assert columns(tmp_path / "killed") == columns(tmp_path / "plain")
    assert len(columns(tmp_path / "plain")) == 6
