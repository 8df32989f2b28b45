"""Rows of a stream that go through a function as they are read."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.streams import Fragile, Plain, Seeking

from trainwright.data.fetch import StreamBrokenError
from trainwright.data.process import ProcessedStream


def repeat(row, by=1):
    """Row n becomes n % 4 samples: none, one as it is, or several."""
    number = int(row) % 4
    return None if number == 0 else int(row) * by if number == 1 else [int(row) * by] * number


def expected(size, by=1):
    return [row * by for row in range(size) for _ in range(row % 4)]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 200), st.integers(1, 4), st.integers(0, 300))
def test_it_goes_on_after_any_sample(size, num_shards, before):
    def stream():
        return ProcessedStream(Seeking.of(size, num_shards), repeat, {"by": 2})

    first = stream()
    begun = list(islice(first, before))
    later = stream()
    state = first.state_dict()
    if state is not None:
        later.load_state_dict(state)
    assert begun + list(later) == expected(size, by=2)
    assert list(later) == expected(size, by=2)  # the next pass begins at the start


def test_going_on_reads_at_most_64_rows_again():
    first = ProcessedStream(Seeking([list(range(1000))]), repeat, {})
    list(islice(first, 1200))
    source = Seeking([list(range(1000))])
    later = ProcessedStream(source, repeat, {})
    later.load_state_dict(first.state_dict())
    next(iter(later))
    assert len(source.rows_read) <= 65


def test_its_shards_are_those_of_its_source():
    stream = ProcessedStream(Seeking.of(50, 4), repeat, {})
    assert stream.num_shards == 4
    parts = [list(stream.shard(num_shards=2, index=index)) for index in (0, 1)]
    assert sorted(parts[0] + parts[1]) == expected(50)


def test_it_can_do_no_more_than_its_source():
    stream = ProcessedStream(Plain(4), repeat, {})
    assert not hasattr(stream, "state_dict")
    assert not hasattr(stream, "shard")
    assert not hasattr(stream, "num_shards")
    assert list(stream) == expected(4)


def test_behind_a_row_that_cannot_be_read_it_goes_on():
    rows = iter(ProcessedStream(Fragile(6, {2}), repeat, {}))
    assert next(rows) == 1
    with pytest.raises(ValueError, match="row 2 is torn"):
        next(rows)
    assert list(rows) == [3, 3, 3, 5]


def test_a_row_that_could_not_be_read_is_not_read_when_going_on():
    class FragileSeeking(Seeking):
        def __iter__(self):
            return _Rows(self)

    class _Rows:
        def __init__(self, stream):
            self.stream, (_, self.row) = stream, stream.start

        def __next__(self):
            if self.row >= 8:
                raise StopIteration
            self.row += 1
            self.stream.place = (0, self.row)
            if self.row - 1 == 2:
                raise ValueError("row 2 is torn")
            return self.row - 1

    first = ProcessedStream(FragileSeeking([list(range(8))]), repeat, {})
    rows = iter(first)
    next(rows)
    with pytest.raises(ValueError, match="torn"):
        next(rows)
    begun = [next(rows) for _ in range(2)]
    later = ProcessedStream(FragileSeeking([list(range(8))]), repeat, {})
    later.load_state_dict(first.state_dict())
    assert begun + list(later) == [3, 3, 3, 5, 6, 6, 7, 7, 7]


def test_a_generator_that_raised_is_no_end_of_the_data():
    class Broken(Plain):
        def __iter__(self):
            yield 1
            raise ValueError("torn")

    rows = iter(ProcessedStream(Broken(3), repeat, {}))
    next(rows)
    with pytest.raises(StreamBrokenError, match="Broken raised ValueError: torn"):
        next(rows)
