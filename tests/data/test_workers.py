"""Workers that die, hang and answer in order."""

import os
import signal
import time
from itertools import islice

import pytest
import torch
from tests.data.streams import Plain
from tests.messages import raises
from torch.utils.data import Dataset, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainwright.data.collators import Stack
from trainwright.data.loader import TrainData
from trainwright.data.stream_loader import StreamData
from trainwright.data.workers import LoaderOptions
from trainwright.errors import DataError


@pytest.fixture(autouse=True)
def _asked_often(monkeypatch):
    """Torch asks its workers every five seconds whether they live, and waits as long for one that does not leave."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


class Deadly(Dataset):
    """Ends the process that reads sample 13."""

    def __init__(self, end):
        self.end = end

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 13:
            self.end()
        return torch.tensor(index)


class DeadlyStream(Plain):
    def __iter__(self):
        for row in range(self.size):
            if row == 13:
                kill()
            yield torch.tensor(row)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(3)


def read_all(dataset):
    data = TrainData(
        dataset, collator=Stack(), global_batch_size=4, seed=1, shuffle=False, options=LoaderOptions(2), num_samples=20
    )
    return [batch.tolist() for batch in data.batches(iter)]


def test_a_worker_that_is_killed_ends_the_run_with_the_samples_it_was_reading():
    with pytest.raises(DataError) as caught:
        read_all(Deadly(kill))
    assert str(caught.value).startswith(
        "data.train: worker 1 was killed by SIGKILL, which is what the kernel does when memory runs out, while "
        "reading positions 12 to 15, which are samples 12, 13, 14, 15."
    )


def test_a_worker_that_leaves_is_named_with_its_exit_code():
    with raises(DataError, "1", "3", "12", "15"):
        read_all(Deadly(leave))


def test_a_worker_that_dies_over_a_stream_names_batch_and_places():
    data = StreamData(DeadlyStream(20), collator=Stack(), global_batch_size=4, seed=1, options=LoaderOptions(1))
    with raises(DataError, "0", "3"):
        list(data.batches(iter))


def test_an_error_in_a_worker_keeps_its_type_and_names_the_sample():
    def fail():
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file") as caught:
        read_all(Deadly(fail))
    assert "while reading sample 13 of Deadly" in caught.value.__notes__
    assert any(note.startswith("in worker 1, at ") and "in fail" in note for note in caught.value.__notes__)


class NeedsTwoError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_travel_is_told_all_the_same():
    def fail():
        raise NeedsTwoError(1, 2)

    with pytest.raises(RuntimeError, match="1 and 2"):
        read_all(Deadly(fail))


class Slow(Deadly):
    def __getitem__(self, index):
        if index == 13:
            time.sleep(60)
        return torch.tensor(index)


def test_a_worker_that_hangs_is_named_with_its_samples():
    data = TrainData(
        Slow(None),
        collator=Stack(),
        global_batch_size=4,
        seed=1,
        shuffle=False,
        options=LoaderOptions(2, {"timeout": 1}),
    )
    with raises(DataError, "data.loader.timeout", "12", "15"):
        list(islice(data.batches(iter), 5))


def test_a_worker_s_death_does_not_interrupt_the_step_in_hand():
    data = TrainData(
        Deadly(kill), collator=Stack(), global_batch_size=4, seed=1, shuffle=False, options=LoaderOptions(1)
    )
    batches = data.batches(iter)
    assert next(batches).tolist() == [0, 1, 2, 3]
    time.sleep(0.5)  # a long step, in which the worker dies over sample 13
    assert next(batches).tolist() == [4, 5, 6, 7]
    with raises(DataError):
        list(batches)


def test_an_error_of_a_worker_is_not_its_own_cause():
    def fail():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken") as caught:
        read_all(Deadly(fail))
    assert caught.value.__cause__ is None
