"""Batches from streams: any number of ranks and workers, any end, any interruption."""

import random
import threading
from contextlib import closing
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.streams import Fragile, Noisy, Plain, Seeking
from tests.messages import mentions, raises

from trainwright.data.collators import Stack
from trainwright.data.fetch import OnError, View
from trainwright.data.mix import mix
from trainwright.data.pack import pack
from trainwright.data.process import ProcessedStream
from trainwright.data.stream_loader import EvalStream, StreamData
from trainwright.data.workers import LoaderOptions
from trainwright.errors import DataError

WORKERS = LoaderOptions(2, {"prefetch_factor": 2})
num_ranks = st.integers(1, 4)


def stream_data(stream, *, batch_size=4, block_size=5, passes=1, state=None, **arguments):
    data = StreamData(
        stream, collator=Stack(), global_batch_size=batch_size, block_size=block_size, seed=3, **arguments
    )
    data.num_passes = passes
    if state is not None:
        data.load_state_dict(state)
    return data


def take(data, count=None):
    """The samples that count of the next batches."""
    batches = islice(data.batches(iter), count)
    return [batch[: data.batch_num_samples].tolist() for batch in batches]


class Together:
    """Sums counts over threads that stand for ranks."""

    def __init__(self, size):
        self.given = {}
        self.barrier = threading.Barrier(size)

    def for_rank(self, rank):
        def agree(*counts):
            self.given[rank] = counts
            self.barrier.wait(20)
            total = tuple(map(sum, zip(*self.given.values(), strict=True)))
            self.barrier.wait(20)
            return total

        return agree


def on_ranks(size, make, count=None):
    """What each rank gets, batch by batch, and the ranks' joined state."""
    together, shares, states, errors = Together(size), {}, {}, []

    def run(rank):
        try:
            data = make(View(rank, size), together.for_rank(rank))
            shares[rank] = take(data, count)
            states[rank] = data.state_dict() if isinstance(data, StreamData) else {}
        except Exception as error:
            errors.append(error)
            together.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    batches = [flat(each) for each in zip(*(shares[rank] for rank in range(size)), strict=True)]
    joined = [states[rank] for rank in range(size)]
    return batches, StreamData.merge_states(joined) if states[0] else None


def flat(batches):
    return [sample for batch in batches for sample in batch]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 12), num_ranks, st.booleans())
def test_a_plain_iterable_gives_each_row_once_and_the_same_order_on_any_number_of_ranks(
    size, batch_size, block_size, ranks, shuffle
):
    arguments = {"batch_size": batch_size, "block_size": block_size, "shuffle": shuffle}
    alone = take(stream_data(Plain(size), **arguments))
    assert sorted(flat(alone)) == list(range(size))
    together, _ = on_ranks(
        ranks, lambda view, agree: stream_data(Plain(size), view=view, sum_counts=agree, **arguments)
    )
    assert together == alone


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9), num_ranks)
def test_shards_of_any_lengths_give_each_row_once(size, num_shards, batch_size, ranks):
    batches, _ = on_ranks(
        ranks,
        lambda view, agree: stream_data(
            Seeking.of(size, num_shards), view=view, sum_counts=agree, batch_size=max(batch_size, ranks)
        ),
    )
    assert sorted(flat(batches)) == list(range(size))


def test_where_shards_divide_evenly_a_rank_reads_only_its_own():
    streams = {}

    def make(view, agree):
        streams[view.rank] = Seeking([list(range(10)), list(range(10, 20))])
        return stream_data(streams[view.rank], view=view, sum_counts=agree)

    on_ranks(2, make)
    assert sorted(streams[0].rows_read) == list(range(10))
    assert sorted(streams[1].rows_read) == list(range(10, 20))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(0, 12), num_ranks, num_ranks)
def test_a_resumed_run_goes_on_exactly_even_with_another_number_of_ranks(size, num_shards, before, ranks, later):
    def make(state=None):
        return lambda view, agree: stream_data(
            Seeking.of(size, num_shards), view=view, sum_counts=agree, batch_size=5, state=state
        )

    whole, _ = on_ranks(ranks, make())
    first, state = on_ranks(ranks, make(), before)
    rest, _ = on_ranks(later, make(state))
    assert first + rest == whole


@pytest.mark.parametrize("make", [Plain, Noisy, lambda size: Seeking.of(size, 4), lambda size: Seeking.of(size, 1)])
def test_workers_and_resume_change_nothing(make):
    own = take(stream_data(make(40), options=LoaderOptions()))
    if not hasattr(make(40), "shard"):  # shards are dealt to workers too, which gives another, equally fixed order
        assert take(stream_data(make(40), options=WORKERS)) == own
    whole = take(stream_data(make(40), options=WORKERS))
    first = stream_data(make(40), options=WORKERS)
    begun = take(first, 4)
    assert begun + take(stream_data(make(40), options=WORKERS, state=first.state_dict())) == whole
    assert begun + take(stream_data(make(40), options=LoaderOptions(), state=first.state_dict())) == whole


def test_resuming_reads_no_more_than_a_block_again():
    stream = Seeking([list(range(1000))])
    first = stream_data(stream, block_size=10)
    take(first, 200)
    again = Seeking([list(range(1000))])
    take(stream_data(again, block_size=10, state=first.state_dict()), 1)
    assert again.rows_read[0] == 790
    assert len(again.rows_read) <= 20


def test_a_stream_without_state_is_read_again_from_its_start_and_says_so(caplog):
    first = stream_data(Plain(30))
    begun = take(first, 4)
    with caplog.at_level("INFO"):
        rest = take(stream_data(Plain(30), state=first.state_dict()))
    assert begun + rest == take(stream_data(Plain(30)))
    assert mentions(caplog.text, "state_dict", "15")


def test_passes_have_orders_of_their_own_and_end_with_a_smaller_batch():
    data = stream_data(Plain(10), passes=2)
    batches = take(data)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = flat(batches[:3]), flat(batches[3:])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert (data.samples_seen, data.epoch) == (20, 2)


def test_a_run_stopped_in_its_second_pass_goes_on_there():
    whole = take(stream_data(Noisy(10), passes=3))
    first = stream_data(Noisy(10), passes=3)
    begun = take(first, 4)
    assert first.epoch == 1
    assert begun + take(stream_data(Noisy(10), passes=3, state=first.state_dict())) == whole


def test_a_limit_of_samples_ends_in_the_middle_of_a_batch():
    data = stream_data(Plain(40), shuffle=False)
    data.num_samples = 6
    assert take(data) == [[0, 1, 2, 3], [4, 5]]
    data.num_samples = 14
    assert take(data) == [[6, 7], [8, 9, 10, 11], [12, 13]]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 30), num_ranks)
def test_a_run_that_goes_on_after_a_ragged_limit_loses_nothing(size, num_shards, limit, ranks):
    def make(number, state=None):
        def on(view, agree):
            stream = Seeking.of(size, num_shards)
            data = stream_data(stream, view=view, sum_counts=agree, batch_size=5, state=state)
            data.num_samples = number
            return data

        return on

    first, state = on_ranks(ranks, make(limit))
    rest, _ = on_ranks(ranks, make(None, state))
    assert sorted(flat(first + rest)) == list(range(size))


def test_another_number_of_workers_changes_no_later_pass():
    whole = take(stream_data(Seeking.of(40, 4), passes=2))
    first = stream_data(Seeking.of(40, 4), passes=2)
    begun = take(first, 3)
    assert begun + take(stream_data(Seeking.of(40, 4), passes=2, options=WORKERS, state=first.state_dict())) == whole


def test_another_size_of_blocks_holds_from_the_next_pass_on():
    first = stream_data(Seeking.of(40, 1), passes=2, block_size=5)
    begun = take(first, 3)
    later = stream_data(Seeking.of(40, 1), passes=2, block_size=7, state=first.state_dict())
    rest = flat(take(later))
    assert sorted(flat(begun) + rest[:28]) == sorted(rest[28:]) == list(range(40))


def test_a_batch_smaller_than_the_lanes_is_rejected():
    _, state = on_ranks(4, lambda view, agree: stream_data(Seeking.of(40, 4), view=view, sum_counts=agree), 2)
    with raises(DataError, "3", "4"):
        stream_data(Seeking.of(40, 4), batch_size=3, state=state)


class Jittering(Seeking):
    """Draws in each row."""

    draws_nothing = False

    def shard(self, num_shards, index):
        return Jittering(self.shards[index::num_shards])

    def __iter__(self):
        for row in super().__iter__():
            yield row + 1000 * torch.randint(1000, ()).item()


def three(row):
    return [int(row) * 1000 + random.randrange(1000) for _ in range(3)]


def documents(row):
    return {"input_ids": [int(row) % 1000, int(row) // 1000, torch.randint(1000, ()).item()]}


MADE_OF_OTHERS = {
    "a mixture": lambda: mix({"a": Jittering.of(20, 4), "b": Jittering.of(9, 4)}),
    "several of a row": lambda: ProcessedStream(Jittering.of(30, 4), three, {}),
    "packed": lambda: pack(ProcessedStream(Jittering.of(40, 4), documents, {}), length=8),
}


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", MADE_OF_OTHERS)
def test_what_rows_of_a_stream_in_a_stream_draw_is_the_same_after_a_resume(kind, workers, block_size):
    def data(state=None):
        options = LoaderOptions(workers)
        made = StreamData(
            MADE_OF_OTHERS[kind](), collator=list, global_batch_size=3, seed=3, block_size=block_size, options=options
        )
        if state is not None:
            made.load_state_dict(state)
        return made

    def rows(stream, count=None):
        batches = islice(stream.batches(iter), count)
        return [[str(sample) for sample in batch[: stream.batch_num_samples]] for batch in batches]

    whole = rows(data())
    assert len({row for batch in whole for row in batch}) > 0.9 * len(flat(whole))  # each draws its own
    # Workers are started for each place at which it is stopped: a few of these are enough.
    for before in range(1, len(whole), 7 if workers else 2):
        first = data()
        assert rows(first, before) + rows(data(first.state_dict())) == whole


def test_an_iterator_that_ends_for_good_is_named_in_its_second_pass():
    once = iter([torch.tensor(row) for row in range(8)])
    data = stream_data(once, passes=2)
    with raises(DataError, "2"):
        take(data)


@pytest.mark.parametrize("options", [LoaderOptions(), WORKERS])
def test_the_samples_of_each_source_of_a_mixture_are_counted_over_ranks_and_resumes(options):
    def make():
        return mix({"small": Seeking([list(range(10))]), "large": Seeking([list(range(10, 40))])}, run_seed=1)

    first = stream_data(make(), options=options)
    begun = flat(take(first, 4))
    assert first.counts == {"small": sum(row < 10 for row in begun), "large": sum(row >= 10 for row in begun)}
    later = stream_data(make(), options=options, state=first.state_dict())
    take(later)
    assert later.counts == {"small": 10, "large": 30}
    _, state = on_ranks(2, lambda view, agree: stream_data(make(), view=view, sum_counts=agree))
    assert state["counts"] == {"small": 10, "large": 30}


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_hugging_face_itself_is_read_once_and_resumed_exactly(workers, num_shards):
    datasets = pytest.importorskip("datasets")

    def make():
        rows = datasets.Dataset.from_dict({"x": list(range(50))})
        return rows.to_iterable_dataset(num_shards=num_shards).with_format("torch")

    def data(state=None):
        return stream_data(make(), options=LoaderOptions(workers), passes=2, state=state, batch_size=6)

    def rows(stream, count=None):
        batches = islice(stream.batches(iter), count)
        return [batch["x"][: stream.batch_num_samples].tolist() for batch in batches]

    whole = rows(data())
    assert sorted(flat(whole)) == sorted([*range(50), *range(50)])
    for before in (4, 12) if workers else (1, 4, 9, 12):
        first = data()
        assert rows(first, before) + rows(data(first.state_dict())) == whole


def test_an_empty_stream_is_rejected():
    with raises(DataError, "1"):
        take(stream_data(Plain(0)))


def test_a_row_that_cannot_be_read_is_named():
    with pytest.raises(ValueError, match="row 7 is torn") as caught:
        take(stream_data(Fragile(20, {7})))
    assert caught.value.__notes__ == ["while reading sample 7 of Fragile"]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_stream_whose_first_rows_cannot_be_read_goes_on_behind_them(batch_size):
    def make():
        return stream_data(Fragile(6, {0, 1}), on_error=OnError(skips=True), batch_size=batch_size, shuffle=False)

    assert flat(take(make())) == [2, 3, 4, 5]
    first = make()
    begun = take(first, 4)
    later = make()
    later.load_state_dict(first.state_dict())
    assert flat(begun + take(later)) == [2, 3, 4, 5]


def test_a_rank_that_fails_in_an_evaluation_lets_the_others_go():
    class FailsLater(Plain):
        def __iter__(self):
            yield from super().__iter__()
            raise ValueError("torn")

    together, outcome = Together(2), {}

    def run(rank, stream, steps):
        data = EvalStream(
            stream,
            name="valid",
            collator=Stack(),
            global_batch_size=4,
            seed=1,
            view=View(rank, 2),
            sum_counts=together.for_rank(rank),
            max_batches=3,
        )
        try:
            with closing(data.batches(iter)) as batches:
                outcome[rank] = len(list(islice(batches, steps)))
        except ValueError as error:
            outcome[rank] = str(error)

    for streams, steps in (
        ((FailsLater(6), Plain(40)), (None, None)),  # its data
        ((Plain(40), Plain(40)), (1, None)),  # its first step
        ((Plain(40), Plain(40)), (3, None)),  # its last step
    ):
        threads = [threading.Thread(target=run, args=(rank, streams[rank], steps[rank])) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("options", [LoaderOptions(), WORKERS])
def test_rows_that_cannot_be_read_are_skipped_and_listed(tmp_path, options):
    broken = {0, 7, 8, 9, 10, 11, 12, 13, 19}
    on_error = OnError(skips=True, folder=tmp_path)
    data = stream_data(Fragile(20, broken), options=options, on_error=on_error, shuffle=False)
    assert flat(take(data)) == [row for row in range(20) if row not in broken]
    listed = (tmp_path / "skipped_rows.json").read_text().splitlines()
    assert len(listed) == len(broken)
    assert mentions(listed[1], "source", "Fragile", "error", "ValueError: row 7 is torn", "7")


def test_an_error_on_the_way_back_to_the_place_is_no_end_of_the_data():
    first = stream_data(Plain(30))
    take(first, 5)
    with pytest.raises(ValueError, match="row 2 is torn"):
        take(stream_data(Fragile(30, {2}), state=first.state_dict()))


def test_a_generator_that_raised_cannot_be_skipped_for_it_would_look_like_the_end():
    class Broken(Plain):
        def __iter__(self):
            yield torch.tensor(0)
            raise ValueError("torn")

    with raises(DataError, "ValueError"):
        take(stream_data(Broken(5), on_error=OnError(skips=True)))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), num_ranks)
def test_evaluation_gives_each_row_once_in_order_on_any_number_of_ranks(size, batch_size, ranks):
    def make(view, agree):
        return EvalStream(
            Plain(size),
            name="valid",
            collator=Stack(),
            global_batch_size=batch_size,
            seed=1,
            view=view,
            sum_counts=agree,
        )

    batches, _ = on_ranks(ranks, make)
    assert flat(batches) == list(range(size))
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_evaluation_may_be_limited_to_a_number_of_batches():
    data = EvalStream(Plain(40), name="valid", collator=Stack(), global_batch_size=4, seed=1, max_batches=2)
    assert take(data) == take(data) == [[0, 1, 2, 3], [4, 5, 6, 7]]
