"""Ranks find each other in a store that may hold what dead ones left. Threads stand in for ranks, the store is real."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from tests.messages import raises

from trainwright.errors import ConfigError, TrainwrightError
from trainwright.parallel.processes import meet


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def client(server):
    """A connection of its own, as every rank has."""
    timeout = timedelta(seconds=20)
    return lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timeout)


@pytest.fixture
def launched(monkeypatch):
    """The ranks are numbered by torch's launcher, whose store outlives them."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


def meet_all(client, ranks, size, **options):
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [task.result() for task in [threads.submit(meet, client(), rank, size, **options) for rank in ranks]]


def test_all_ranks_get_the_same_name_and_the_next_rendezvous_another(client, launched):
    first, second = (meet_all(client, range(4), 4) for _ in range(2))
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_keys_of_a_rank_that_died_earlier_do_not_block_others(client, launched):
    # An attempt in which ranks 0 and 1 came, twice in the case of rank 1, and all died waiting for rank 2.
    for rank in (1, 1, 0):
        with pytest.raises(TrainwrightError):
            meet(client(), rank, 3, arrive_seconds=-10.0 if rank else 0.1)
    assert len(set(meet_all(client, range(3), 3))) == 1


def test_a_rank_that_is_restarted_while_the_others_wait_is_taken_by_its_last_name(client, launched):
    died = threading.Event()

    def come_twice():
        with pytest.raises(TrainwrightError):
            meet(client(), 1, 3, arrive_seconds=-9.0)
        died.set()
        return meet(client(), 1, 3)

    with ThreadPoolExecutor(3) as threads:
        host, restarted = threads.submit(meet, client(), 0, 3), threads.submit(come_twice)
        assert died.wait(20)
        last = threads.submit(meet, client(), 2, 3)
        assert host.result(20) == restarted.result(20) == last.result(20)


def test_missing_ranks_are_named(client, launched):
    with ThreadPoolExecutor(2) as threads:
        host = threads.submit(meet, client(), 0, 4, arrive_seconds=0.3)
        other = threads.submit(meet, client(), 2, 4, arrive_seconds=-9.5)  # rank 0 gives up ten seconds sooner
        with raises(TrainwrightError, "4", "0", "1", "3"):
            host.result(20)
        with raises(TrainwrightError, "2", "0"):
            other.result(20)


def test_two_processes_with_one_number_are_two_runs_on_one_port(client, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    client().set("trainwright/process/1", "process 7 on elsewhere")
    with raises(ConfigError, "1", "127.0.0.1", "29500", "7", golden=False):
        meet(client(), 1, 2)


def test_a_failure_that_another_rank_notes_ends_the_waiting(client, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    client().set("trainwright/first-error/0", '[1, "no GPU here"]')
    with raises(TrainwrightError, "1"):
        meet(client(), 0, 2)
