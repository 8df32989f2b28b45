"""The pieces of files that a stream reads."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.sources.file_stream import FileRange, check_range, identify_range, share_of
from trainwright.data.sources.locations import FileLocation
from trainwright.errors import ConfigError, DataError


def ranges_of(*labels, size=10):
    return [FileRange(FileLocation(f"/data/{label}", size, label)) for label in labels]


@settings(max_examples=50)
@given(st.integers(1, 20).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))))
def test_the_shares_in_order_are_all_pieces(case):
    count, num_shards = case
    file_ranges = ranges_of(*map(str, range(count)))
    shares = [share_of(file_ranges, num_shards=num_shards, index=index) for index in range(num_shards)]
    assert [file_range for share in shares for file_range in share] == file_ranges
    assert all(shares)


def test_more_shares_than_pieces_are_rejected():
    with raises(ConfigError, "0", "3", "2"):
        share_of(ranges_of("a", "b"), num_shards=3, index=0)


@settings(max_examples=60)
@given(st.sets(st.sampled_from("abcdef"), min_size=1), st.sets(st.sampled_from("abcdef"), min_size=1), st.data())
def test_a_state_is_taken_where_the_piece_is_the_same_and_rejected_elsewhere(before, after, data):
    before, after = ranges_of(*sorted(before)), ranges_of(*sorted(after))
    number = data.draw(st.integers(0, len(before)))
    saved = json.loads(json.dumps(identify_range(before, number)))
    place = min(number, len(before) - 1)
    if place < len(after) and after[place] == before[place]:
        check_range(after, saved)
    else:
        with raises(DataError, before[place].location.label, golden=False):
            check_range(after, saved)


def test_both_pieces_are_named_with_their_sizes_and_stretches():
    saved = identify_range([FileRange(FileLocation("/data/b", 30, "b"), begin, begin + 10) for begin in (0, 10)], 1)
    with raises(DataError, "b", "30", "10", "20"):
        check_range(ranges_of("0", "a"), saved)
    with raises(DataError, "b", "30", "10", "20", "1"):
        check_range(ranges_of("a"), saved)
