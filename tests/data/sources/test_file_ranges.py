"""The file ranges that a stream reads."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.sources.file_stream import FileRange, FileStream, _FilePosition
from trainwright.data.sources.formats import TextFormat
from trainwright.data.sources.locations import FileLocation
from trainwright.errors import ConfigError, DataError


def ranges_of(*labels, size=10):
    return [FileRange(FileLocation(f"/data/{label}", size, label)) for label in labels]


def stream_of(file_ranges, position=None):
    stream = FileStream("unused", TextFormat("line"))
    stream._ranges, stream._start = file_ranges, position
    return stream


@settings(max_examples=50)
@given(st.integers(1, 20).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))))
def test_the_shards_in_order_cover_all_ranges(case):
    count, num_shards = case
    file_ranges = ranges_of(*map(str, range(count)))
    whole = stream_of(file_ranges)
    shards = [whole.shard(num_shards=num_shards, index=index).file_ranges for index in range(num_shards)]
    assert [file_range for shard in shards for file_range in shard] == file_ranges
    assert all(shards)


def test_more_shards_than_ranges_are_rejected():
    with raises(ConfigError, "0", "3", "2"):
        stream_of(ranges_of("a", "b")).shard(num_shards=3, index=0)


@settings(max_examples=60)
@given(st.sets(st.sampled_from("abcdef"), min_size=1), st.sets(st.sampled_from("abcdef"), min_size=1), st.data())
def test_a_state_is_accepted_if_its_range_is_unchanged_and_rejected_otherwise(before, after, data):
    before, after = ranges_of(*sorted(before)), ranges_of(*sorted(after))
    number = data.draw(st.integers(0, len(before)))
    saved = json.loads(json.dumps(stream_of(before, _FilePosition(number, 1)).state_dict()))
    number = min(number, len(before) - 1)
    if number < len(after) and after[number] == before[number]:
        stream_of(after).load_state_dict(saved)
    else:
        with raises(DataError, before[number].location.label, golden=False):
            stream_of(after).load_state_dict(saved)


def test_both_ranges_are_named_with_their_sizes_and_limits():
    ranges = [FileRange(FileLocation("/data/b", 30, "b"), begin, begin + 10) for begin in (0, 10)]
    saved = stream_of(ranges, _FilePosition(1, 15)).state_dict()
    with raises(DataError, "b", "30", "10", "20"):
        stream_of(ranges_of("0", "a")).load_state_dict(saved)
    with raises(DataError, "b", "30", "10", "20", "1"):
        stream_of(ranges_of("a")).load_state_dict(saved)
