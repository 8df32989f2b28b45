"""Notes between ranks: read without waiting, given up when nobody keeps them."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from trainwright.parallel.collectives import Notes, NotesUnreachable, collective_log, num_collectives_begun


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)


def notes_of(store, topic="topic", **options):
    return Notes(topic, store=store, **options)


def test_a_note_is_read_by_every_rank(store):
    writer, reader = notes_of(store), notes_of(store)
    assert reader.read("a") is None
    writer.write("a", "Schöne Grüße")
    assert reader.read("a") == "Schöne Grüße"
    writer.write("a", "again")
    assert reader.read("a") == "again"


def test_of_two_concurrent_notes_the_first_is_kept(store):
    one, two = notes_of(store), notes_of(store)
    assert one.write_first("a", "1") == "1"
    assert two.write_first("a", "2") == "1"
    assert two.read("a") == "1"


def test_topics_are_apart(store):
    one, other = notes_of(store, "one"), notes_of(store, "other")
    one.write("a", "1")
    assert other.read("a") is None


def test_waiting_ends_with_those_that_are_there(store):
    notes = notes_of(store)
    notes.write("a", "1")
    assert notes.wait_for("a", "b", seconds=0.2) == {"a": "1"}
    notes.write("b", "2")
    assert notes.wait_for("a", "b", seconds=60) == {"a": "1", "b": "2"}


def keep_store(pipe):
    """The child's life: keeps a store until it is killed."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    os.write(pipe, str(kept.port).encode())
    os.close(pipe)
    time.sleep(1000)
    return kept


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_keeper_that_is_stopped_or_dead_is_given_up(number):
    reading, writing = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        try:
            keep_store(writing)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        port = int(os.read(reading, 100))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
        notes = notes_of(store, answer_seconds=0.3)
        notes.write("a", "1")
        os.kill(keeper, number)
        if number == signal.SIGSTOP:
            os.waitpid(keeper, os.WUNTRACED)  # the signal is sent, but not yet obeyed
        with pytest.raises(NotesUnreachable):
            notes.read("a")
        with pytest.raises(NotesUnreachable):
            notes.write("b", "2")
        assert notes.wait_for("a", seconds=60) == {}
        if number == signal.SIGSTOP:
            os.kill(keeper, signal.SIGCONT)
            assert notes.wait_for("a", seconds=10) == {"a": "1"}
    finally:
        os.close(reading)
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def test_without_a_process_group_there_are_no_collectives():
    assert num_collectives_begun() is None
    assert collective_log() is None
