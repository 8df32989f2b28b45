"""Lengths: what is counted, and bars that hold every sample once."""

from hypothesis import given
from hypothesis import strategies as st

from trainwright.analysis.data import MAX_BARS, length_of, summarize_lengths, unit_of


def test_tokens_are_counted_before_characters_and_text_before_other_texts():
    assert unit_of({"text": "ab", "input_ids": [1]}) == "tokens of input_ids"
    assert unit_of({"url": "x", "text": "ab"}) == "characters of text"
    assert unit_of({"ask": "x", "say": "ab"}) == "characters of ask, say"
    assert unit_of({"x": 1.0}) is None
    assert length_of({"ask": "x", "say": "ab"}, "characters of ask, say") == 3
    assert length_of({"say": 1}, "characters of ask") is None


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60))
def test_bars_are_few_lie_side_by_side_and_hold_every_sample_once(counted):
    found = summarize_lengths(counted, "tokens", is_whole=True)
    assert (found.minimum, found.maximum) == (min(counted), max(counted))
    assert found.minimum <= found.median <= found.p95 <= found.maximum
    if len(set(counted)) == 1:
        assert found.bars == ()
        return
    assert len(found.bars) <= MAX_BARS
    assert sum(bar.samples for bar in found.bars) == len(counted)
    assert all(one.last + 1 == other.first for one, other in zip(found.bars, found.bars[1:], strict=False))
