"""A mean with its weight, and how values add up over puts, ranks and steps."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.events import Mean
from trainwright.events.mean import Series, add_record, merge, summarise, window_from_state, window_to_state


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-100, 100), max_size=5), min_size=1, max_size=6))
def test_means_of_unequal_batches_add_up_to_the_mean_of_all(batches):
    means = [Mean(float(sum(batch)), len(batch)) for batch in batches]
    everything = [number for batch in batches for number in batch]
    expected = sum(everything) / len(everything) if everything else 0.0
    assert sum(means[1:], means[0]).value == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_an_empty_mean_is_zero_in_every_dtype(dtype):
    assert Mean(torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)).value == 0.0
    assert Mean(0.0, 0).value == 0.0


def test_the_value_of_tensors_stays_a_tensor_and_keeps_its_gradient():
    total = torch.tensor(6.0, requires_grad=True)
    value = Mean(total, torch.tensor(3)).value
    value.backward()
    assert value == 2.0
    assert total.grad == pytest.approx(1 / 3)


def test_a_detached_mean_keeps_no_graph_and_does_not_follow_later_changes():
    total, count = torch.tensor(6.0, requires_grad=True), torch.tensor(3.0)
    detached = Mean(total * 1.0, count).detach()
    count += 3
    assert not detached.total.requires_grad
    assert detached.value == 2.0


names = st.sampled_from("abc")
steps = st.integers(1, 4)
numbers = st.integers(-50, 50).map(float)
counts = st.integers(0, 5).map(float)


def window_of(*records):
    window = {}
    for record in records:
        add_record(window, *record)
    return window


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(names, steps, numbers, counts), max_size=8), min_size=1, max_size=4))
def test_totals_of_all_ranks_add_up_as_in_one_big_window(ranks):
    apart = merge([window_of(*((*record, "total") for record in rank)) for rank in ranks])
    together = window_of(*((*record, "total") for rank in ranks for record in rank))
    assert summarise(apart) == pytest.approx(summarise(together))


@settings(deadline=None)
@given(st.lists(st.tuples(steps, numbers, counts), min_size=1, max_size=8))
def test_a_mean_over_a_window_is_weighted_exactly(records):
    window = window_of(*(("a", step, value, weight, "mean") for step, value, weight in records))
    weight = sum(weight for _, _, weight in records)
    if weight == 0:
        assert summarise(window) == {}
    else:
        expected = sum(value * weight for _, value, weight in records) / weight
        assert summarise(window)["a"] == pytest.approx(expected)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.tuples(names, steps), st.lists(numbers, min_size=1, max_size=3)), max_size=4))
def test_puts_are_averaged_per_rank_then_over_ranks_then_over_steps(ranks):
    windows = [
        window_of(*((name, step, value, 1.0, "put") for (name, step), values in rank.items() for value in values))
        for rank in ranks
    ]
    expected = {}
    for name in {name for rank in ranks for name, _ in rank}:
        by_step = []
        for step in {step for rank in ranks for own, step in rank if own == name}:
            means = [sum(rank[name, step]) / len(rank[name, step]) for rank in ranks if (name, step) in rank]
            by_step.append(sum(means) / len(means))
        expected[name] = sum(by_step) / len(by_step)
    assert summarise(merge(windows)) == pytest.approx(expected)


def test_ranks_without_any_value_change_nothing():
    window = window_of(("loss", 1, 2.0, 4.0, "mean"))
    assert summarise(merge([{}, window, {}])) == {"loss": 2.0}


def test_a_last_value_is_that_of_the_newest_step_and_the_lowest_rank():
    first = window_of(("lr", 1, 0.1, 1.0, "last"), ("lr", 2, 0.2, 1.0, "last"))
    second = window_of(("lr", 2, 9.0, 1.0, "last"), ("note", 1, "hello", 1.0, "last"))
    assert summarise(merge([first, second])) == {"lr": 0.2, "note": "hello"}


def test_a_nan_of_a_rank_without_samples_adds_nothing():
    own = window_of(("deviation", 1, 0.5, 4.0, "mean"), ("share", 1, 2.0, 4.0, "total"))
    empty_rank = window_of(("deviation", 1, math.nan, 0.0, "mean"), ("share", 1, math.nan, 0.0, "total"))
    assert summarise(merge([own, empty_rank])) == {"deviation": 0.5, "share": 0.5}


def test_a_nan_with_a_weight_is_shown():
    window = window_of(("loss", 1, math.nan, 4.0, "mean"), ("loss", 2, 1.0, 4.0, "mean"))
    assert math.isnan(summarise(window)["loss"])


def test_a_name_whose_kind_changes_starts_over():
    window = window_of(("a", 1, 5.0, 1.0, "put"), ("a", 2, "text", 1.0, "last"))
    assert summarise(window) == {"a": "text"}


@settings(deadline=None)
@given(st.lists(st.tuples(names, steps, numbers, counts, st.sampled_from(["mean", "total", "put", "last"]))))
def test_a_restored_window_continues_as_if_it_had_not_been_saved(records):
    half = len(records) // 2
    whole, resumed = window_of(*records), window_of(*records[:half])
    resumed = window_from_state(json.loads(json.dumps(window_to_state(resumed))))
    for record in records[half:]:
        add_record(resumed, *record)
    assert summarise(resumed) == summarise(whole)


def test_the_sum_does_not_depend_on_the_order_of_steps():
    values = {1: 0.1, 2: 1e16, 3: -1e16, 4: 0.3}
    summaries = set()
    for order in ([1, 2, 3, 4], [4, 2, 1, 3]):
        window = {}
        for step in order:
            add_record(window, "loss", step, values[step], 1.0, "mean")
        summaries.add(summarise(window)["loss"])
    assert len(summaries) == 1


def test_an_imbalance_is_the_share_of_time_that_ranks_wait_for_the_slowest():
    slow_first = window_of(("share", 1, [4.0], 1.0, "imbalance"), ("share", 2, [1.0], 1.0, "imbalance"))
    slow_then = window_of(("share", 1, [1.0], 1.0, "imbalance"), ("share", 2, [4.0], 1.0, "imbalance"))
    merged = merge([slow_first, slow_then])
    # Each step takes 4 s, of which the two ranks wait 0 and 3.
    assert summarise(merged) == {"share": 3 / 8}
    assert merged["share"].value_at(1) == [4.0, 1.0]
    assert summarise(window_of(("share", 1, [0.0], 1.0, "imbalance"))) == {"share": 0.0}


def test_an_imbalance_is_the_same_if_a_checkpoint_divides_its_window():
    ranks = [window_of(("share", 1, [seconds], 1.0, "imbalance")) for seconds in (1.0, 3.0)]
    later = [window_of(("share", 2, [seconds], 1.0, "imbalance")) for seconds in (5.0, 2.0)]
    restored = window_from_state(json.loads(json.dumps(window_to_state(merge(ranks)))))
    restored["share"].steps |= later[0]["share"].steps  # the first rank restores the window of all
    whole = merge(
        [
            {"share": Series("imbalance", {**a["share"].steps, **b["share"].steps})}
            for a, b in zip(ranks, later, strict=True)
        ]
    )
    assert summarise(merge([restored, later[1]])) == summarise(whole)
