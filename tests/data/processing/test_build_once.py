"""A folder made once, by one of many processes, with real processes and real kills."""

import logging
import os
import signal
import time

import pytest
from tests.messages import mentions, raises

from trainwright.data import cache as module
from trainwright.data.cache import build_once, find_build, hold_for_reading
from trainwright.errors import DataError


def fork(act):
    """Runs `act` in a forked process, which ends with it; returns its id."""
    process = os.fork()
    if process == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return process


def has_ended_well(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def wait_for(path):
    for _ in range(2000):
        if path.exists():
            return
        time.sleep(0.005)
    raise AssertionError(f"{path} did not come")


def write_word(word):
    return lambda folder, report: (folder / "word").write_text(word) and None


def names(entry):
    return sorted(path.name for path in entry.iterdir() if path.name != "lock")


def test_the_second_time_nothing_is_made(tmp_path):
    entry = tmp_path / "entry"
    first = build_once(entry, write_word("one"))
    assert build_once(entry, write_word("two")) == first
    assert (first / "word").read_text() == "one"


def test_of_several_processes_one_builds_and_the_others_wait_for_it(tmp_path):
    entry, calls = tmp_path / "entry", tmp_path / "calls"

    def write(folder, report):
        with calls.open("a") as file:
            file.write("x")
        time.sleep(0.2)
        (folder / "word").write_text("whole")

    def act():
        assert (build_once(entry, write) / "word").read_text() == "whole"

    assert all(map(has_ended_well, [fork(act) for _ in range(3)]))
    assert calls.read_text() == "x"


def test_a_builder_that_is_killed_leaves_nothing_half_made_and_keeps_nobody_waiting(tmp_path):
    entry, begun = tmp_path / "entry", tmp_path / "begun"

    def write_half(folder, report):
        (folder / "word").write_text("half")
        begun.touch()
        time.sleep(60)

    process = fork(lambda: build_once(entry, write_half))
    wait_for(begun)
    os.kill(process, signal.SIGKILL)
    assert not has_ended_well(process)
    assert find_build(entry) is None
    assert [name for name in names(entry) if name.startswith(".staging-")]
    assert (build_once(entry, write_word("whole")) / "word").read_text() == "whole"
    assert names(entry) == ["build-000001"]


def test_a_waiting_process_takes_over_from_a_killed_one(tmp_path):
    entry, begun, killed = tmp_path / "entry", tmp_path / "begun", tmp_path / "killed"

    def write_slowly(folder, report):
        begun.touch()
        time.sleep(60)

    process = fork(lambda: build_once(entry, write_slowly))
    wait_for(begun)
    waiting = fork(lambda: build_once(entry, lambda folder, report: killed.exists() or 1 / 0))
    time.sleep(0.1)
    killed.touch()
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert has_ended_well(waiting)
    assert find_build(entry) is not None


def test_what_a_killed_builder_of_another_entry_left_is_removed_too(tmp_path):
    begun = tmp_path / "begun"

    def write_half(folder, report):
        begun.touch()
        time.sleep(60)

    process = fork(lambda: build_once(tmp_path / "cache" / "old", write_half))
    wait_for(begun)
    alive = tmp_path / "cache" / "other"
    build_once(alive, write_word("a"))
    assert len(names(tmp_path / "cache" / "old")) == 1, "its builder lives: not to be touched"
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    build_once(alive, write_word("b"), rebuild=True)
    assert names(tmp_path / "cache" / "old") == []


def test_an_error_leaves_nothing_and_the_earlier_build_in_its_place(tmp_path):
    entry = tmp_path / "entry"

    def fail(folder, report):
        (folder / "word").write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_once(entry, fail)
    assert names(entry) == []
    kept = build_once(entry, write_word("kept"))
    with pytest.raises(ValueError, match="no"):
        build_once(entry, fail, rebuild=True)
    assert build_once(entry, fail) == kept


def test_a_rebuild_takes_the_place_and_the_unread_build_is_removed(tmp_path):
    entry = tmp_path / "entry"
    build_once(entry, write_word("one"))
    second = build_once(entry, write_word("two"), rebuild=True)
    assert build_once(entry, write_word("three")) == second
    assert names(entry) == ["build-000002"]


def test_a_build_that_is_being_read_outlives_a_rebuild(tmp_path):
    entry = tmp_path / "entry"
    first = build_once(entry, write_word("one"))
    held = hold_for_reading(first)
    build_once(entry, write_word("two"), rebuild=True)
    assert (first / "word").read_text() == "one"
    os.close(held)
    build_once(entry, write_word("three"), rebuild=True)
    assert names(entry) == ["build-000003"]
    with pytest.raises(FileNotFoundError):
        hold_for_reading(first)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_ranks_of_one_launch_rebuild_once_between_them(tmp_path, monkeypatch, num_ranks):
    entry, calls = tmp_path / "entry", tmp_path / "calls"
    build_once(entry, write_word("old"))
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    monkeypatch.setenv("MASTER_PORT", "1234")

    def write(folder, report):
        with calls.open("a") as file:
            file.write("x")

    # One after the other: the second finds the first one's build done.
    for _ in range(2):
        assert has_ended_well(fork(lambda: build_once(entry, write, rebuild=True)))
    assert calls.read_text() == ("x" if num_ranks == 2 else "xx")


def test_an_earlier_launch_with_the_same_name_is_another_one(tmp_path, monkeypatch):
    entry = tmp_path / "entry"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert has_ended_well(fork(lambda: build_once(entry, write_word("old"))))
    started = time.time()
    monkeypatch.setattr(module, "_process_started", lambda: started)
    assert (build_once(entry, write_word("new"), rebuild=True) / "word").read_text() == "new"


def test_when_a_process_started_does_not_depend_on_when_it_asks():
    first = module._process_started()
    time.sleep(0.02)
    assert abs(module._process_started() - first) < 0.01
    assert first < time.time() - 0.02


def test_who_waits_goes_on_while_the_maker_already_makes_a_further_build(tmp_path):
    entry, begun, over = tmp_path / "entry", tmp_path / "begun", tmp_path / "over"

    def write_first(folder, report):
        begun.touch()
        time.sleep(0.1)

    def write_second(folder, report):
        wait_for(over)

    def make_two():
        build_once(entry, write_first)
        build_once(entry, write_second, rebuild=True)

    process = fork(make_two)
    wait_for(begun)
    assert build_once(entry, write_word("never")).name == "build-000001"
    over.touch()
    assert has_ended_well(process)


def test_who_waits_says_for_whom_and_how_far_that_is(tmp_path, caplog):
    entry, begun = tmp_path / "entry", tmp_path / "begun"

    def write(folder, report):
        report("7 of 9 rows")
        begun.touch()
        time.sleep(0.3)

    process = fork(lambda: build_once(entry, write))
    wait_for(begun)
    with caplog.at_level(logging.INFO, "trainwright"):
        build_once(entry, write)
    assert has_ended_well(process)
    (message,) = caplog.messages
    assert mentions(message, process)
    assert message.endswith(": 7 of 9 rows")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with raises(DataError, "file/cache", "cache_dir"):
        build_once(tmp_path / "file" / "cache" / "entry", write_word("a"))
