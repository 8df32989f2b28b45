"""Rows that cannot be read: named, or left out, listed and counted."""

import json

import pytest
import torch
from tests.messages import raises
from torch.utils.data import Dataset, Subset

from trainwright.data.collators import Stack
from trainwright.data.fetch import OnError, RowFailure
from trainwright.data.loader import EvalData, TrainData
from trainwright.data.mix import mix
from trainwright.data.workers import LoaderOptions
from trainwright.errors import DataError

OPTIONS = [LoaderOptions(), LoaderOptions(2)]


class Torn(Dataset):
    """Some rows cannot be read; the others draw."""

    def __init__(self, broken, size=12):
        self.broken, self.size = broken, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.broken:
            raise ValueError(f"row {index} is torn")
        return torch.tensor([index, torch.rand(()).item()], dtype=torch.float64)


class TornInBatches(Torn):
    draws_nothing = True

    def __getitem__(self, index):
        super().__getitem__(index)
        return torch.tensor([index, 0], dtype=torch.float64)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def train_data(dataset, on_error, options=OPTIONS[0], **arguments):
    return TrainData(
        dataset, collator=Stack(), global_batch_size=4, seed=5, on_error=on_error, options=options, **arguments
    )


def rows(data):
    return [batch[: data.batch_num_samples, 0].int().tolist() for batch in data.batches(iter)]


@pytest.mark.parametrize("dataset", [Torn, TornInBatches])
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_that_cannot_be_read_are_left_out_of_their_batches(tmp_path, dataset, options):
    on_error = OnError(skips=True, folder=tmp_path)
    data = train_data(dataset({2, 5}), on_error, options, shuffle=False, num_samples=12)
    assert rows(data) == [[0, 1, 3], [4, 6, 7], [8, 9, 10, 11]]
    listed = [json.loads(line) for line in (tmp_path / "skipped_rows.json").read_text().splitlines()]
    assert listed == [
        {"of": "data.train", "source": dataset.__name__, "row": row, "error": f"ValueError: row {row} is torn"}
        for row in (2, 5)
    ]


def test_leaving_rows_out_changes_nothing_in_the_others():
    whole = list(train_data(Torn(set()), None, num_samples=12).batches(iter))
    torn = list(train_data(Torn({2, 5}), OnError(skips=True), num_samples=12).batches(iter))
    for batch, rest in zip(whole, torn, strict=True):
        assert [row for row in batch.tolist() if row[0] not in (2, 5)] == rest.tolist()


def test_a_batch_of_which_nothing_is_left_has_a_stand_in_that_counts_nothing():
    data = train_data(Torn({4, 5, 6, 7}), OnError(skips=True), shuffle=False, num_samples=12)
    batches = [(batch[:, 0].tolist(), data.batch_num_samples) for batch in data.batches(iter)]
    assert batches == [([0, 1, 2, 3], 4), ([3], 0), ([8, 9, 10, 11], 4)]
    first = train_data(Torn({0, 1, 2, 3}), OnError(skips=True), shuffle=False, num_samples=8)
    assert [(batch[:, 0].tolist(), first.batch_num_samples) for batch in first.batches(iter)] == [
        ([4], 0),
        ([4, 5, 6, 7], 4),
    ]
    with raises(DataError):
        rows(train_data(Torn(set(range(12))), OnError(skips=True), num_samples=4))


def test_the_same_row_of_two_sets_is_listed_twice_and_an_address_in_its_error_counts_once(tmp_path):
    class Addressed(Torn):
        def __getitem__(self, index):
            if index in self.broken:
                raise ValueError(f"{object()} is torn")
            return super().__getitem__(index)

    on_error = OnError(skips=True, at_most=2, folder=tmp_path)
    rows(train_data(Addressed({5}), on_error, num_samples=60))
    rows(EvalData(Addressed({5}), name="v", collator=Stack(), global_batch_size=4, seed=1, on_error=on_error))
    listed = [json.loads(line) for line in (tmp_path / "skipped_rows.json").read_text().splitlines()]
    assert [(line["of"], line["row"]) for line in listed] == [("data.train", 5), ("data.eval.v", 5)]


def test_a_row_of_a_mixture_is_named_by_its_source(tmp_path):
    on_error = OnError(skips=True, folder=tmp_path)
    mixed = mix({"good": Torn(set()), "bad": Torn({3})})
    rows(train_data(mixed, on_error, num_samples=24))
    listed = json.loads((tmp_path / "skipped_rows.json").read_text())
    assert (listed["source"], listed["row"]) == ("source bad", 3)


@pytest.mark.parametrize("dataset", [TornInBatches({5}), Subset(Torn({5}), range(12))])
def test_a_row_that_fails_among_a_batch_that_is_fetched_at_once_is_named(dataset):
    with pytest.raises(ValueError, match="row 5 is torn") as caught:
        rows(train_data(dataset, OnError(), shuffle=False, num_samples=12))
    assert f"while reading sample 5 of {type(dataset).__name__}" in caught.value.__notes__


def test_evaluation_leaves_them_out_too(tmp_path):
    on_error = OnError(skips=True, folder=tmp_path)
    data = EvalData(Torn({2}), name="valid", collator=Stack(), global_batch_size=4, seed=1, on_error=on_error)
    assert rows(data) == [[0, 1, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_too_many_end_the_run_with_the_last_of_them(tmp_path):
    on_error = OnError(skips=True, at_most=2, folder=tmp_path)
    data = train_data(Torn({1, 5, 9}), on_error, shuffle=False, num_samples=12)
    with raises(DataError, "9", "ValueError", "3", "2"):
        rows(data)


def test_a_row_is_listed_once_over_epochs_and_resumed_runs(tmp_path):
    for _ in range(2):
        on_error = OnError(skips=True, at_most=2, folder=tmp_path)
        rows(train_data(Torn({1, 5}), on_error, num_samples=36))
    assert len((tmp_path / "skipped_rows.json").read_text().splitlines()) == 2


def test_a_torn_line_of_the_list_is_no_obstacle(tmp_path):
    (tmp_path / "skipped_rows.json").write_text('{"of": "data.train", "source": "Torn", "row": 1, "error": "x"}\n{"so')
    OnError(skips=True, folder=tmp_path).note(
        [RowFailure("Torn", 1, "ValueError: row 1 is torn"), RowFailure("Torn", 2, "x")]
    )
    assert len((tmp_path / "skipped_rows.json").read_text().splitlines()) == 2


def test_without_skipping_the_row_is_named_on_the_error_itself():
    with pytest.raises(ValueError, match="row 5 is torn") as caught:
        rows(train_data(Torn({5}), OnError(), shuffle=False, num_samples=12))
    assert "while reading sample 5 of Torn" in caught.value.__notes__


class Absent(Torn):
    """Some samples are None."""

    def __getitem__(self, index):
        return None if index in self.broken else torch.tensor(index)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_sample_that_is_none_is_named(options):
    data = TrainData(Absent({6, 9}), collator=Stack(), global_batch_size=4, seed=1, shuffle=False, options=options)
    with raises(DataError, "6", "Absent"):
        list(data.batches(iter))


def test_a_collator_may_accept_none():
    def without_none(samples):
        return torch.stack([sample for sample in samples if sample is not None])

    data = TrainData(Absent({6}), collator=without_none, global_batch_size=4, seed=1, shuffle=False)
    batches = data.batches(iter)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 7]]
