"""A resumed run reads the same files: one that is added, removed, renamed, moved or of another size is an error."""

import logging
from itertools import islice

import pytest
from tests.messages import raises

from trainwright.data.file_list import files_of
from trainwright.data.loader import TrainData
from trainwright.data.mix import mix
from trainwright.data.pack import pack
from trainwright.data.sources.files import text
from trainwright.data.split import split
from trainwright.data.stream_loader import StreamData
from trainwright.errors import DataError


def add_first(folder):
    (folder / "a.txt").write_text("new\n" * 30)


def add_last(folder):
    (folder / "z.txt").write_text("new\n" * 30)


def remove(folder):
    (folder / "d.txt").unlink()


def rename(folder):
    (folder / "b.txt").rename(folder / "e.txt")


def exchange(folder):
    (folder / "b.txt").rename(folder / "x")
    (folder / "c.txt").rename(folder / "b.txt")
    (folder / "x").rename(folder / "c.txt")


def grow(folder):
    with (folder / "c.txt").open("a") as file:
        file.write("one more\n")


CHANGES = [(add_first, "a.txt"), (add_last, "z.txt"), (remove, "d.txt"), (rename, "e.txt"), (grow, "c.txt")]


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "data"
    place.mkdir()
    for number, name in enumerate("bcd"):
        (place / f"{name}.txt").write_text("".join(f"{name} {row}\n" for row in range(30 + number)))
    return place


def open_text(folder, **options):
    return text(str(folder / "*.txt"), unit="line", **options)


def streamed(folder):
    return open_text(folder, streaming=True)


def mixed(folder):
    return mix({"all": streamed(folder), "b": text(str(folder / "b.txt"), unit="line", streaming=True)})


def packed(folder):
    return pack(streamed(folder), length=16, tokenizer="bytes")


def indexed(folder):
    return open_text(folder)


def halved(folder):
    whole = open_text(folder)
    return split(whole, [40, len(whole) - 40], seed=1)[0]


def loader(dataset, kind, **options):
    return kind(dataset, collator=list, global_batch_size=4, seed=1, **options)


def saved_after(data, num_batches):
    batches = data.batches(iter)
    list(islice(batches, num_batches))
    state = data.state_dict()
    batches.close()
    return state


@pytest.mark.parametrize("num_batches", [1, 12])  # within the first block, and behind it
@pytest.mark.parametrize(("change", "file"), CHANGES)
def test_a_stream_whose_files_changed_is_rejected_and_the_file_is_named(change, file, num_batches, folder):
    state = saved_after(loader(streamed(folder), StreamData, block_size=20), num_batches)
    loader(streamed(folder), StreamData, block_size=20).load_state_dict(state)  # unchanged
    change(folder)
    with raises(DataError, file, "--accept-changes"):
        loader(streamed(folder), StreamData, block_size=20).load_state_dict(state)


@pytest.mark.parametrize("make", [mixed, packed])
def test_files_inside_other_datasets_are_compared_too(make, folder):
    state = saved_after(loader(make(folder), StreamData), 1)
    add_first(folder)
    with raises(DataError, "a.txt"):
        loader(make(folder), StreamData).load_state_dict(state)


@pytest.mark.parametrize("change", [exchange, rename])
@pytest.mark.parametrize("make", [indexed, halved])
def test_files_with_an_index_are_compared_too(make, change, folder):
    state = saved_after(loader(make(folder), TrainData), 2)
    size = len(make(folder))
    change(folder)
    assert len(make(folder)) == size, "the number of samples does not show it"
    with raises(DataError, ".txt"):
        loader(make(folder), TrainData).load_state_dict(state)


def test_accepted_changes_are_a_warning(folder, caplog):
    state = saved_after(loader(streamed(folder), StreamData), 1)
    add_last(folder)
    with caplog.at_level(logging.WARNING, "trainwright"):
        data = loader(streamed(folder), StreamData)
        data.load_state_dict(state, accept_changes=True)
    assert "z.txt" in caplog.text
    assert data.samples_seen == 4


def test_another_order_of_the_same_files_is_named(folder):
    def ordered(names):
        return text([str(folder / f"{name}.txt") for name in names], unit="line", streaming=True)

    state = saved_after(loader(ordered("bcd"), StreamData), 1)
    with raises(DataError, "order"):
        loader(ordered("cbd"), StreamData).load_state_dict(state)


def test_the_folder_of_the_files_may_be_another(folder):
    state = saved_after(loader(streamed(folder), StreamData), 1)
    moved = folder.rename(folder.with_name("moved"))
    loader(streamed(moved), StreamData).load_state_dict(state)


def test_a_dataset_without_files_names_none():
    assert files_of([1, 2]) == []
    assert files_of(range(3)) == []
