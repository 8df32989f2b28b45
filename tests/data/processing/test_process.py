"""A function run over every sample once, and the results kept."""

import logging
import os
import pickle
import random
import re
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
from tests.messages import raises
from torch.utils.data import IterableDataset, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainwright.data import arrow as arrow_rows
from trainwright.data import process
from trainwright.data.collators import Stack
from trainwright.data.loader import TrainData
from trainwright.data.process import describe_input, processed
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
    [
        {"arguments": {"max_length": 3}},
        {"input_key": "others"},
        {"source": Texts(11)},
        {"function": lambda s: s},
        {"version": 2},
        {"version": "2"},
    ],
)
def test_another_function_argument_version_or_input_is_processed_anew(run, change):
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


def test_a_version_stands_for_what_the_key_does_not_see(run, load):
    def through(value, **options):
        load(f"def value():\n    return {value}\n", "helper")
        function = load("import helper\ndef clean(row):\n    return {'n': helper.value()}\n").clean
        return run(function, **options)[0]["n"]

    assert through(1) == 1
    assert through(2) == 1, "what the function calls is not followed"
    assert through(2, version=1) == 2
    assert through(3, version=1) == 2
    assert through(3, version=2) == 3


def test_a_function_without_a_source_is_processed_with_a_version(run):
    space = {}
    exec("def typed(row):\n    return {'n': len(row['text'])}", space)
    with raises(ConfigError, "typed", "version"):
        run(space["typed"])
    assert run(space["typed"], version=1)[3]["n"] == 6


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_names_the_row_and_the_source_and_nothing_is_kept(run, tmp_path, num_workers):
    def fail(sample):
        return {"n": 1 // (len(sample["text"]) - 6)}

    with raises(DataError, "3", "ZeroDivisionError") as found:
        run(fail, num_workers=num_workers)
    if num_workers == 0:
        assert isinstance(found.value.__cause__, ZeroDivisionError)
    else:
        (note,) = found.value.__notes__
        assert note.startswith("in worker 0, at ")
        assert note.endswith("in fail")
    assert builds(tmp_path) == []
    assert not list(tmp_path.glob("processed/*/.staging-*"))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_row_that_cannot_be_read_is_named(run, num_workers):
    class Broken(Texts):
        def __getitem__(self, index):
            return {"text": str(1 // (index - 7))}

    with raises(DataError, "7", "ZeroDivisionError", "data.on_error") as found:
        run(encode, Broken(), num_workers=num_workers)
    if num_workers == 0:
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
def test_what_is_no_sample_is_rejected(run, result, message):
    with raises(DataError, *message):
        run(lambda sample: result, version=1)  # one of the results is an object, of which the key knows nothing


def test_a_stream_and_an_empty_dataset_are_rejected(run):
    class Stream(IterableDataset):
        def __iter__(self):
            yield {}

    with raises(DataError, "data.process"):
        run(encode, Stream())
    with raises(DataError):
        run(encode, Texts(0))


def test_an_argument_that_no_key_can_know_is_rejected(run):
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


def test_the_result_is_told(run, caplog):
    with caplog.at_level(logging.INFO, "trainwright"):
        run(lambda sample: [sample, sample])
    assert re.match(r"lambda: 10 rows → 20 samples in [\d.]+ s, cached in ", caplog.messages[-1])


def test_processed_samples_can_be_processed_again(run):
    first = run(encode)
    second = run(lambda sample: {"n": len(sample["input_ids"])}, first, input_key="")
    assert [sample["n"] for sample in second] == [2 * n for n in range(10)]


def test_training_reads_it(run):
    rows = run(lambda sample: {"x": [len(sample["text"])]}, input_key=describe_input({"type": "texts"}, Texts()))
    data = TrainData(rows, collator=Stack(), global_batch_size=10, seed=1)
    assert sorted(next(data.batches(iter))["x"].flatten().tolist()) == list(range(0, 20, 2))


class NoisyTexts(Texts):
    """Many rows of unequal lengths, each with a number that is drawn when it is read."""

    def __init__(self):
        super().__init__(300)

    def __getitem__(self, index):
        return {"text": "ab" * (index % 7), "index": index, "noise": random.random()}


def cut_noisily(sample):
    """Makes none, one or several samples of a row, with tensors, arrays, empty lists and draws."""
    draws = [torch.rand(()).item(), random.random(), np.random.rand()]
    one = {
        "input_ids": [ord(letter) for letter in sample["text"]],
        "picture": torch.full((2, sample["index"] % 3), sample["index"]),
        "noise": np.array([sample["noise"], *draws]),
        "index": sample["index"],
    }
    return [None, one, [one, {**one, "index": -1}]][sample["index"] % 3]


def files_of(rows):
    return {path.name: path.read_bytes() for path in rows.folder.iterdir() if path.name != "made_by.json"}


def test_workers_make_the_same_samples_in_the_same_order(run, tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_rows, "_BATCH_ROWS", 50)
    alone = run(cut_noisily, NoisyTexts(), cache_dir=tmp_path / "alone")
    states = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())
    for num_workers in (1, 2):
        helped = run(cut_noisily, NoisyTexts(), cache_dir=tmp_path / str(num_workers), num_workers=num_workers)
        assert files_of(helped) == files_of(alone)
    assert (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())) == states
    assert [row["index"] for row in alone][:4] == [1, 2, -1, 4]


def test_the_number_of_workers_is_not_part_of_the_key(run):
    run(encode, num_workers=2)
    source = Texts()
    run(encode, source)
    assert source.reads == []


def test_the_rows_of_a_worker_that_dies_are_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))  # torch waits 5 s

    def die(sample):
        if sample["index"] == 70:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    with raises(DataError, "die", "SIGKILL", "64", "127", "num_workers"):
        run(die, NoisyTexts(), num_workers=2)
    assert builds(tmp_path) == []
    assert not list(tmp_path.glob("processed/*/.staging-*"))


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_process_that_they_work_for(run, tmp_path, monkeypatch, number):
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # torch waits so long for workers to leave
    monkeypatch.setattr(process, "_PARENT_CHECK_SECONDS", 0.05)
    begun = tmp_path / "begun"
    begun.mkdir()

    def slow(sample):
        (begun / str(os.getpid())).touch()
        time.sleep(60)
        return sample

    def act():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run(slow, NoisyTexts(), num_workers=2)

    child = fork(act)
    while len(workers := [int(path.name) for path in begun.iterdir()]) < 2:
        time.sleep(0.005)
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    until = time.monotonic() + 20
    while any(map(is_alive, workers)):
        assert time.monotonic() < until, "a worker outlives its parent"
        time.sleep(0.02)
    assert builds(tmp_path) == []
    if number == signal.SIGINT:
        assert not list(tmp_path.glob("processed/*/.staging-*"))


def test_what_works_on_rows_can_travel_to_a_spawned_worker():
    there = pickle.loads(pickle.dumps(process._RowProcessor(Texts(), "Texts", encode, {"max_length": 1})))
    assert [sample.values["input_ids"].tolist() for (sample,) in there.process(range(1, 3))] == [[97], [97]]
    assert there.describe(range(1, 3)) == "rows 1 to 2 of Texts"


def test_progress_is_told_with_workers_too(run, caplog, monkeypatch):
    monkeypatch.setattr("trainwright.progress.is_progress_shown", lambda: True)
    monkeypatch.setattr("trainwright.progress.stderr_terminal", lambda: None)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("trainwright.progress.LOGGED_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("trainwright.progress.LOGGED_EVERY_SECONDS", 0.01)  # other tests have logged the same work
    with caplog.at_level(logging.INFO, "trainwright"):
        run(encode, num_workers=2)
    assert any(
        message.startswith("Processing rows with encode: done") and message.endswith("(10 rows).")
        for message in caplog.messages
    )
