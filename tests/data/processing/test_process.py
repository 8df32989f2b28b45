"""A function run over every sample once, and the results kept."""

import logging
import os
import random
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
from tests.messages import raises
from torch.utils.data import IterableDataset

from trainwright.data.collators import Stack
from trainwright.data.loader import TrainData
from trainwright.data.processing import arrow_rows, process
from trainwright.data.processing.process import describe_input, processed
from trainwright.errors import ConfigError, DataError


class Texts:
    """A few texts, which counts how often each is read."""

    def __init__(self, size=10):
        self.size = size
        self.reads = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads.append(index)
        return {"text": "ab" * index}


def encode(sample, *, max_length=100):
    return {"input_ids": [ord(letter) for letter in sample["text"]][:max_length], "text": sample["text"]}


@pytest.fixture
def run(tmp_path):
    def run(function, source=None, **arguments):
        return processed(
            Texts() if source is None else source,
            function,
            **{"input_key": "texts", "cache_dir": tmp_path, **arguments},
        )

    return run


def fork(act):
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def builds(folder):
    return sorted(path.name for path in folder.glob("processed/*/build-*"))


def test_each_sample_is_read_once_in_order_and_comes_back_processed(run):
    source = Texts()
    rows = run(encode, source, arguments={"max_length": 4})
    assert source.reads == list(range(10))
    assert len(rows) == 10
    assert rows[3]["text"] == "ababab"
    assert rows[3]["input_ids"].tolist() == [97, 98, 97, 98]
    assert rows.lengths.tolist() == [0, 2, 4, 4, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("batch_rows", [1, 3, 5, 10, 11])
def test_batches_of_any_size_hold_every_sample(run, monkeypatch, batch_rows):
    monkeypatch.setattr(arrow_rows, "_BATCH_ROWS", batch_rows)
    assert [sample["text"] for sample in run(encode)] == ["ab" * n for n in range(10)]


def test_a_row_may_become_several_or_none(run):
    rows = run(lambda sample: [{"n": part} for part in range(len(sample["text"]) // 2)] if sample["text"] else None)
    assert len(rows) == sum(range(10))
    assert [sample["n"] for sample in rows.__getitems__(range(4))] == [0, 0, 1, 0]


def test_the_second_time_nothing_is_read(run):
    source = Texts()
    run(encode)
    run(encode, source)
    assert source.reads == []


@pytest.mark.parametrize(
    "change",
    [{"arguments": {"max_length": 3}}, {"input_key": "others"}, {"source": Texts(11)}, {"function": lambda s: s}],
)
def test_another_function_argument_or_input_is_processed_anew(run, change):
    first = run(encode)
    other = run(**{"function": encode, **change})
    assert other.folder.parent != first.folder.parent
    assert other.fingerprint != first.fingerprint


def test_a_sources_own_fingerprint_counts(run):
    class Named(Texts):
        fingerprint = "one"

    class Called(Texts):
        def fingerprint(self):
            return "two"

    folders = {run(encode, source).folder for source in (Texts(), Named(), Called())}
    assert len(folders) == 3


def test_a_partial_is_processed_under_its_functions_name(run):
    rows = run(partial(encode, max_length=1))
    assert rows[5]["input_ids"].tolist() == [97]
    assert rows.folder.parent.name.startswith("encode-")


def test_an_error_names_the_row_and_the_source_and_nothing_is_kept(run, tmp_path):
    def fail(sample):
        return {"n": 1 // (len(sample["text"]) - 6)}

    with raises(DataError, "3", "ZeroDivisionError") as found:
        run(fail)
    assert isinstance(found.value.__cause__, ZeroDivisionError)
    assert builds(tmp_path) == []
    assert not list(tmp_path.glob("processed/*/.staging-*"))


def test_a_row_that_cannot_be_read_is_named(run):
    class Broken(Texts):
        def __getitem__(self, index):
            return {"text": str(1 // (index - 7))}

    with raises(DataError, "7", "ZeroDivisionError", "data.on_error") as found:
        run(encode, Broken())
    assert isinstance(found.value.__cause__, ZeroDivisionError)


def test_a_row_with_words_of_its_own_is_named_too(run):
    class Broken(Texts):
        def __getitem__(self, index):
            if index == 4:
                raise DataError("line 5 is torn.")
            return super().__getitem__(index)

    with raises(DataError, "4", "5"):
        run(encode, Broken())


def test_rows_that_cannot_be_read_together_are_named_as_such(run):
    class Broken(Texts):
        def __getitems__(self, indices):
            if len(indices) > 1:
                raise MemoryError("too many")
            return [self[index] for index in indices]

    with raises(DataError, "0", "9", "MemoryError"):
        run(encode, Broken())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("text", ("0",)),
        ([1], ("0",)),
        ({}, ("0",)),
        ({"x": object()}, ("0",)),
        (None, ("10",)),
    ],
)
def test_what_is_no_sample_is_refused(run, result, message):
    with raises(DataError, *message):
        run(lambda sample: result)


def test_a_stream_and_an_empty_dataset_are_refused(run):
    class Stream(IterableDataset):
        def __iter__(self):
            yield {}

    with raises(DataError, "data.process"):
        run(encode, Stream())
    with raises(DataError):
        run(encode, Texts(0))


def test_an_argument_that_no_key_can_know_is_refused(run):
    with raises(ConfigError, "max_length"):
        run(encode, arguments={"max_length": object()})


def test_what_the_function_draws_depends_on_the_row_alone_and_disturbs_nobody(run):
    def draw(sample):
        return {"x": [torch.rand(()).item(), random.random(), np.random.rand()]}

    torch.manual_seed(1)
    states = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())
    first = [sample["x"].tolist() for sample in run(draw)]
    assert (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())) == states
    torch.manual_seed(2)
    random.seed(2)
    assert [sample["x"].tolist() for sample in run(draw, rebuild=True)] == first
    assert len({tuple(x) for x in first}) == 10


def test_of_three_processes_one_calls_the_function(run, tmp_path):
    calls = tmp_path / "calls"

    def slow(sample):
        with calls.open("a") as file:
            file.write("x")
        time.sleep(0.02)
        return sample

    def act():
        assert [row["text"] for row in run(slow)] == ["ab" * n for n in range(10)]

    children = [fork(act) for _ in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert calls.read_text() == "x" * 10


def test_a_kill_in_the_middle_leaves_nothing_that_counts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_rows, "_BATCH_ROWS", 2)
    reached = tmp_path / "reached"

    def slow(sample):
        if len(sample["text"]) == 14 and not reached.exists():
            reached.touch()
            time.sleep(60)
        return sample

    child = fork(lambda: run(slow))
    while not reached.exists():
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert builds(tmp_path) == []
    (left,) = tmp_path.glob("processed/*/.staging-*")
    assert list(left.glob("rows-*.arrow")), "some of it had been written"
    assert len(run(slow)) == 10
    assert builds(tmp_path) == ["build-000001"]
    assert not left.exists()


def test_who_reads_the_earlier_samples_survives_a_rebuild(run, tmp_path, monkeypatch):
    def look(sample):
        return {"word": os.environ["TRAINWRIGHT_TEST_WORD"]}  # from elsewhere, which no key can see

    monkeypatch.setenv("TRAINWRIGHT_TEST_WORD", "old")
    old = run(look)
    monkeypatch.setenv("TRAINWRIGHT_TEST_WORD", "new")
    assert run(look)[0]["word"] == "old"
    assert run(look, rebuild=True)[0]["word"] == "new"
    assert run(look)[0]["word"] == "new"
    assert old[9]["word"] == "old"
    assert builds(tmp_path) == ["build-000001", "build-000002"]


def test_progress_and_the_result_are_told(run, caplog, monkeypatch):
    monkeypatch.setattr(process, "_SAY_EVERY_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "trainwright"):
        run(lambda sample: [sample, sample])
    assert any("lambda: 5 of 10 rows, " in message and message.endswith("rows/s") for message in caplog.messages)
    assert "lambda: 10 rows → 20 samples in 0.0 s, kept in " in caplog.messages[-1]


def test_processed_samples_can_be_processed_again(run):
    first = run(encode)
    second = run(lambda sample: {"n": len(sample["input_ids"])}, first, input_key="")
    assert [sample["n"] for sample in second] == [2 * n for n in range(10)]


def test_training_reads_it(run):
    rows = run(lambda sample: {"x": [len(sample["text"])]}, input_key=describe_input({"type": "texts"}, Texts()))
    data = TrainData(rows, collator=Stack(), global_batch_size=10, seed=1)
    assert sorted(next(data.batches(iter))["x"].flatten().tolist()) == list(range(0, 20, 2))
