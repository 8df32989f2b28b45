"""The plan of packed rows: every token once, no row too long, the same for the same seed, and full."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.data.pack import make_plan

lengths = st.lists(st.integers(0, 70), max_size=60)


def rows_of(plan):
    return [plan.row(number) for number in range(plan.num_rows)]


def best_fit_by_hand(sizes, length):
    """The plain algorithm: the longest first, each into the fullest row that can hold it."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - size)
        else:
            rooms.append(length - size)
    return sorted(rooms)


def rows_when_packed_as_they_come(sizes, length):
    rows, room = 0, 0
    for size in sizes:
        for piece in [length] * (size // length) + [size % length] * (size % length > 0):
            if piece > room:
                rows, room = rows + 1, length
            room -= piece
    return rows


@given(lengths, st.integers(2, 32), st.integers(0, 2**63))
def test_every_token_stands_in_exactly_one_row_and_none_is_too_long(sizes, length, seed):
    plan = make_plan(np.array(sizes, dtype=np.int64), length=length, seed=seed)
    seen = [[] for _ in sizes]
    for row in rows_of(plan):
        assert 0 < sum(size for _, _, size in row) <= length
        for document, offset, size in row:
            seen[document] += range(offset, offset + size)
    assert [sorted(tokens) for tokens in seen] == [list(range(size)) for size in sizes]
    assert plan.fill == sum(sizes) / max(1, plan.num_rows * length)


@given(lengths, st.integers(2, 32), st.integers(0, 2**63))
def test_only_documents_longer_than_a_row_are_cut(sizes, length, seed):
    plan = make_plan(np.array(sizes, dtype=np.int64), length=length, seed=seed)
    pieces = np.bincount(plan.documents, minlength=len(sizes)).tolist()
    assert pieces == [-(-size // length) for size in sizes]


@given(lengths, st.integers(2, 32), st.integers(0, 2**63))
def test_groups_of_equal_sizes_are_placed_as_one_by_one(sizes, length, seed):
    plan = make_plan(np.array(sizes, dtype=np.int64), length=length, seed=seed)
    rooms = sorted(length - sum(size for _, _, size in row) for row in rows_of(plan))
    pieces = [piece for size in sizes for piece in [length] * (size // length) + [size % length] if piece]
    assert rooms == best_fit_by_hand(pieces, length)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.floats(0.5, 2.0), st.sampled_from([64, 256, 1000]))
def test_rows_are_at_least_as_full_as_when_documents_are_packed_as_they_come(seed, spread, length):
    sizes = np.random.default_rng(seed).lognormal(4, spread, 400).astype(np.int64) + 1
    plan = make_plan(sizes, length=length, seed=seed)
    assert plan.num_rows <= rows_when_packed_as_they_come(sizes.tolist(), length)


def test_equal_seeds_plan_alike_and_others_do_not():
    sizes = np.random.default_rng(0).integers(1, 50, 300)
    plans = [rows_of(make_plan(sizes, length=64, seed=seed)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_the_plan_of_a_seed_never_changes_between_versions():
    # A run that goes on after an upgrade must see the same data.
    plan = make_plan(np.array([5, 3, 3, 12, 1]), length=8, seed=42)
    assert rows_of(plan) == [[(3, 0, 8)], [(0, 0, 5), (1, 0, 3)], [(3, 8, 4), (2, 0, 3), (4, 0, 1)]]


def test_no_documents_make_no_rows():
    plan = make_plan(np.zeros(3, dtype=np.int64), length=8, seed=1)
    assert plan.num_rows == make_plan(np.empty(0, dtype=np.int64), length=8, seed=1).num_rows == 0
    assert plan.fill == 0.0


def test_many_documents_are_nearly_without_padding():
    sizes = np.random.default_rng(0).lognormal(6, 1, 20_000).astype(np.int64) + 1
    assert make_plan(sizes, length=2048, seed=1).fill > 0.999
