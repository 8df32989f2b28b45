"""Batches that are left out: what comes is the undisturbed run without them, after a rollback and a resume too."""

from contextlib import closing
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.streams import Noisy, Plain, Seeking
from tests.data.test_loader import Noise
from tests.data.test_stream_loader import MADE_OF_OTHERS, on_ranks
from tests.messages import raises

from trainwright.data.collators import Stack
from trainwright.data.fetch import View
from trainwright.data.loader import SkippedPositions, TrainData
from trainwright.data.mix import mix
from trainwright.data.stream_loader import StreamData
from trainwright.data.workers import LoaderOptions
from trainwright.errors import DataError

BATCH = 4
KINDS = {
    "with an index": lambda: Noise(22),
    "a stream without state": lambda: Noisy(42),
    "a stream of shards with state": lambda: Seeking.of(42, 4),
    **MADE_OF_OTHERS,
}


def make(kind, *, workers=0, state=None, batch_size=BATCH, collator=list, **arguments):
    dataset = KINDS[kind]() if isinstance(kind, str) else kind
    arguments |= {"collator": collator, "global_batch_size": batch_size, "seed": 3, "options": LoaderOptions(workers)}
    if hasattr(dataset, "__len__"):
        data = TrainData(dataset, num_samples=42, **arguments)
    else:
        data = StreamData(dataset, block_size=5, **arguments)
    if state is not None:
        data.load_state_dict(state)
    return data


def take(data, count=None):
    """The next batches as text, each with the place where it begins."""
    with closing(data.batches(iter)) as iterator:
        return [
            (data.batch_positions[0], [str(sample) for sample in batch[: data.batch_num_samples]])
            for batch in islice(iterator, count)
        ]


def without(batches, *windows):
    return [batch for batch in batches if not any(start <= batch[0] < stop for start, stop in windows)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_rollback_the_batches_are_those_of_the_undisturbed_run_without_the_window(kind, workers):
    whole = take(make(kind, workers=workers))
    data = make(kind, workers=workers)
    take(data, 2)
    state = data.state_dict()
    offending = take(data, 3)[-1][0]
    data.load_state_dict(state)
    data.skip_positions(offending, offending + 2 * BATCH)
    assert take(data) == without(whole[2:], (offending, offending + 2 * BATCH))
    undisturbed = make(kind, workers=workers)
    take(undisturbed)
    assert (data.samples_seen, data.order_position) == (undisturbed.samples_seen, undisturbed.order_position)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_is_saved_and_stays_so_with_other_workers(kind):
    whole = take(make(kind))
    for before in range(6):
        data = make(kind)
        data.skip_positions(8, 16)
        begun = take(data, before)
        later = make(kind, state=data.state_dict(), workers=before % 2)
        assert begun + take(later) == without(whole, (8, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_rollback_to_the_same_state_still_leaves_out_the_first_window(kind):
    whole = take(make(kind))
    data = make(kind)
    state = data.state_dict()
    for start in (4, 12):
        take(data, 4)
        data.load_state_dict(state)
        data.skip_positions(start, start + BATCH)
    assert take(data) == without(whole, (4, 8), (12, 16))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 8))
def test_ranks_leave_out_the_same_batches_of_a_stream(first, length, num_shards, ranks, before):
    window = (first * 5, (first + length) * 5)

    def begin(state=None):
        def on(view, agree):
            data = make(Seeking.of(60, num_shards), batch_size=5, collator=Stack(), view=view, sum_counts=agree)
            if state is not None:
                data.load_state_dict(state)
            else:
                data.skip_positions(*window)
            return data

        return on

    begun, state = on_ranks(ranks, begin(), before)
    rest, _ = on_ranks(1, begin(state))
    rows = [row for batch in begun + rest for row in batch]
    assert len(rows) == len(set(rows)) >= 60 - 5 * length
    if ranks == 1 or num_shards == 1:  # else lanes are dealt otherwise, and the order is another one
        undisturbed = take(make(Seeking.of(60, num_shards), batch_size=5))
        expected = [batch for _, batch in without(undisturbed, window)]
        assert [[f"tensor({row})" for row in batch] for batch in begun + rest] == expected


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 30), st.integers(1, 20), st.integers(1, 4))
def test_ranks_leave_out_the_same_batches_of_data_with_an_index(start, length, ranks):
    whole = take(make("with an index"))
    shares = []
    for rank in range(ranks):
        data = make("with an index", view=View(rank, ranks))
        data.skip_positions(start, start + length)
        shares.append(take(data))
    for together in zip(*shares, strict=True):
        assert len({place for place, _ in together}) == 1
    joined = [(same[0][0], [sample for _, part in same for sample in part]) for same in zip(*shares, strict=True)]
    assert joined == without(whole, (start, start + length))


def test_data_with_an_index_does_not_even_fetch_what_is_left_out():
    class Recording(Noise):
        fetched = ()

        def __getitem__(self, index):
            self.fetched = (*self.fetched, index)
            return super().__getitem__(index)

    data = make(Recording(30))
    bad = data.samples_at(8, 12)
    data.skip_positions(8, 12)
    take(data, 6)
    assert set(data.dataset.fetched).isdisjoint(bad)
    assert len(set(data.dataset.fetched)) == 24


@pytest.mark.parametrize("weights", [None, {"small": 1.0, "large": 3.0}])
def test_the_counts_of_a_mixture_do_not_hold_what_was_left_out(weights):
    sources = {"small": list(range(10)), "large": list(range(10, 40))}

    def begin(state=None):
        return make(mix(sources, weights=weights, run_seed=1), state=state)

    data = begin()
    data.skip_positions(4, 12)
    rows = [int(row) for _, batch in take(data, 4) for row in batch]
    expected = {"small": sum(row < 10 for row in rows), "large": sum(row >= 10 for row in rows)}
    assert data.counts == expected
    assert begin(data.state_dict()).counts == expected


def test_the_counts_of_a_mixed_stream_do_not_hold_what_was_left_out():
    data = make(mix({"small": Seeking([list(range(10))]), "large": Seeking([list(range(10, 40))])}, run_seed=1))
    data.skip_positions(4, 12)
    rows = [int(row.split("(")[1][:-1]) for _, batch in take(data) for row in batch]
    assert len(rows) == 32
    assert data.counts == {"small": sum(row < 10 for row in rows), "large": sum(row >= 10 for row in rows)}


def test_a_window_at_the_end_is_consumed_as_well():
    data = make("with an index")
    data.skip_positions(36, 80)
    assert take(data)[-1][0] == 32
    assert data.samples_seen == data.order_position == 42
    data.num_samples = 90
    assert [place for place, _ in take(data)] == [80, 84, 88]


def test_the_epoch_is_that_of_the_next_batch_that_is_returned():
    data = make(Noise(8))
    data.skip_positions(4, 16)
    take(data, 1)
    assert (data.samples_seen, data.epoch) == (4, 2)
    take(data, 1)
    assert (data.batch_positions, data.epoch) == ((16, 20), 2)


def test_a_batch_of_another_size_is_left_out_by_where_it_begins():
    data = make("with an index", batch_size=6)
    data.skip_positions(5, 13)
    assert [place for place, _ in take(data)] == [0, 18, 24, 30, 36]


def test_a_stream_that_can_be_read_only_once_rejects_to_go_back():
    data = make(iter([torch.tensor(row) for row in range(20)]))
    state = data.state_dict()
    take(data, 2)
    with raises(DataError, "list_iterator", "__iter__"):
        data.load_state_dict(state)
    fresh = make(Plain(20))
    state = fresh.state_dict()
    begun = take(fresh, 2)
    fresh.load_state_dict(state)
    assert take(fresh)[:2] == begun


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=6))
def test_windows_hold_exactly_their_places_however_they_overlap(windows):
    left_out = SkippedPositions()
    left_out.add_all([(start, start + length) for start, length in windows])
    inside = {place for start, length in windows for place in range(start, start + length)}
    assert {place for place in range(70) if place in left_out} == inside
    assert bool(left_out.ranges) == bool(windows)
    copied = SkippedPositions()
    copied.add_all(left_out.ranges)
    assert copied.ranges == left_out.ranges


def test_an_empty_window_is_rejected():
    with raises(DataError, "8"):
        make("with an index").skip_positions(8, 8)
