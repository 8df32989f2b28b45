"""Putting values during a step and reading them after it."""

import json
import math
from contextlib import suppress

import numpy as np
import pytest
import torch
from tests.messages import raises
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from trainwright import EventStorage, Mean, get_event_storage
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import TrainwrightError
from trainwright.events.mean import summarise
from trainwright.events.storage import HISTORY_LENGTH


@pytest.fixture
def storage():
    with EventStorage() as storage:
        storage.step = 1
        yield storage


class Putting(nn.Module):
    """Puts the mean of what it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        get_event_storage().put_scalar("mean", y.mean())
        return y.relu()


def test_there_is_no_storage_outside_a_run():
    with raises(TrainwrightError):
        get_event_storage()


def test_the_innermost_storage_is_returned_and_an_error_leaves_it():
    with EventStorage() as outer:
        with suppress(ZeroDivisionError), EventStorage() as inner:
            assert get_event_storage() is inner
            _ = 1 / 0
        assert get_event_storage() is outer


def test_a_name_put_several_times_in_a_step_is_averaged(storage):
    for value in (1.0, 2.0, 6.0):
        storage.put_scalar("a", value)
    storage.step = 2
    storage.put_scalar("a", 5.0)
    assert storage.history("a") == [(1, 3.0), (2, 5.0)]
    assert summarise(storage.take_window()) == {"a": 4.0}


def test_without_smoothing_the_last_value_stays(storage):
    storage.put_scalars({"a": 1, "b": 2}, smoothing_hint=False)
    storage.put_scalars(a=3, smoothing_hint=False)
    assert summarise(storage.take_window()) == {"a": 3, "b": 2}


def test_reading_in_the_middle_of_a_step_loses_nothing(storage):
    storage.put_scalar("a", 1.0)
    assert storage.latest() == {"a": (1.0, 1)}
    storage.put_scalar("a", 2.0)
    assert storage.latest() == {"a": (1.5, 1)}
    assert summarise(storage.take_window()) == {"a": 1.5}
    assert storage.take_window() == {}


def test_a_change_in_place_after_a_put_does_not_change_the_value(storage):
    value = torch.ones(())
    storage.put_scalar("a", value)
    value += 5
    assert storage.latest()["a"] == (1.0, 1)


def test_a_put_keeps_no_graph_alive(storage):
    weight = torch.ones((), requires_grad=True)
    storage.put_scalar("a", weight * 2)
    assert not any(torch.is_tensor(value) and value.requires_grad for *_, value, _, _ in storage._pending)
    assert storage.latest()["a"] == (2.0, 1)


def test_scopes_nest_and_end_even_after_an_error(storage):
    with suppress(ZeroDivisionError), storage.name_scope("encoder"), storage.name_scope("layer"):
        storage.put_scalar("norm", 1.0)
        _ = 1 / 0
    storage.put_scalar("norm", 2.0)
    assert storage.latest() == {"encoder/layer/norm": (1.0, 1), "norm": (2.0, 1)}


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(0), "text", None, [1.0]])
def test_a_value_that_is_not_a_scalar_is_rejected(storage, value):
    with raises(TrainwrightError, "put_scalar", "tensor"):
        storage.put_scalar("a", value)


@pytest.mark.parametrize(
    ("value", "number"),
    [(np.float32(0.5), 0.5), (np.int64(3), 3), (True, 1), (torch.tensor([[2.5]]), 2.5), (torch.tensor(7), 7)],
)
def test_every_kind_of_number_becomes_a_python_number(storage, value, number):
    storage.put_scalar("put", value)
    storage.put_scalar("last", value, smoothing_hint=False)
    storage.put_metric("metric", value, 1.0)
    line = summarise(storage.take_window())
    assert line == {"put": number, "last": number, "metric": number}
    json.dumps(line)


def test_numbers_of_numpy_are_averaged_like_others(storage):
    storage.put_metric("a", np.float32(1.0), 1.0)
    storage.put_metric("a", np.float32(4.0), 2.0)
    assert summarise(storage.take_window()) == {"a": 3.0}


def test_metrics_are_weighted_means_are_exact_and_other_objects_are_kept(storage):
    for step, (loss, samples) in enumerate([(1.0, 8), (4.0, 2)], start=1):
        storage.step = step
        storage.put_metric("loss", torch.tensor(loss), samples)
        storage.put_metric("accuracy", Mean(torch.tensor(step), torch.tensor(2)), 0.0)
        storage.put_metric("words", ["a"] * step, samples)
        storage.put_metric("matrix", torch.full((2,), step), samples)
    line = summarise(storage.take_window())
    assert line == {"loss": 1.6, "accuracy": 0.75, "words": ["a", "a"], "matrix": [2, 2]}


def test_an_unknown_history_names_the_known_ones(storage):
    storage.put_scalar("score", 1.0)
    with pytest.raises(KeyError, match=r"no value named 'scored'.*known: score"):
        storage.history("scored")


@pytest.mark.parametrize("name", ["step", "loss", "grad_norm", "lr"])
def test_the_loops_own_names_are_rejected(storage, name):
    with raises(TrainwrightError, name):
        storage.put_scalar(name, 1.0)
    with raises(TrainwrightError, name):
        storage.put_result((1.0, {name: 1.0}, 1.0, 0.1), weight=1, num_samples=1)


def test_a_history_keeps_the_newest_values_only(storage):
    for step in range(HISTORY_LENGTH + 20):
        storage.step = step
        storage.put_scalar("a", step)
    assert [step for step, _ in storage.history("a")] == list(range(20, HISTORY_LENGTH + 20))


def test_published_and_remembered_values_carry_the_step(storage):
    storage.publish({"loss": torch.tensor(1.0)}, evaluated={"valid/loss": 2.0})
    assert storage.line == {"step": 1, "loss": 1.0, "valid/loss": 2.0}
    assert storage.evaluated == {"valid/loss": 2.0}
    assert storage.latest() == {"valid/loss": (2.0, 1)}


def test_a_restored_storage_continues_with_its_open_window_and_history(storage):
    resumed = EventStorage()
    storage.put_scalar("a", 1.0)
    storage.put_metric("loss", 3.0, 2.0)
    resumed.load_state_dict(json.loads(json.dumps(storage.state_dict())))
    for each in (storage, resumed):
        each.step = 2
        each.put_scalar("a", 4.0)
        each.put_metric("loss", 9.0, 4.0)
    assert resumed.history("a") == storage.history("a") == [(1, 1.0), (2, 4.0)]
    assert summarise(resumed.take_window()) == summarise(storage.take_window()) == {"a": 2.5, "loss": 7.0}


def test_a_storage_with_any_kind_of_objects_can_be_saved(storage, tmp_path):
    values = {"set": {1}, "array": np.arange(2), "nest": {"path": [tmp_path, (1, None)]}, "nan": float("nan")}
    for name, value in values.items():
        storage.put_metric(name, value, 1)
    assert storage.latest()["set"] == ({1}, 1)  # as it is, for the writers
    store = CheckpointStore(tmp_path)
    store.write(1, {"events": storage.state_dict()}, metrics={})
    resumed = EventStorage()
    resumed.load_state_dict(store.read(1, "events"))
    line = summarise(resumed.take_window())
    assert math.isnan(line.pop("nan"))
    assert line == {"set": "{1}", "array": [0, 1], "nest": {"path": [str(tmp_path), [1, None]]}}


def test_only_one_rank_restores_a_saved_window(storage):
    other = EventStorage()
    storage.put_scalar("a", 1.0)
    other.load_state_dict(storage.state_dict(), with_window=False)
    assert other.take_window() == {}
    assert other.history("a") == [(1, 1.0)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_put_inside_a_recomputed_block_counts_once(storage, use_reentrant):
    block = Putting()
    y = checkpoint(block, torch.ones(2, 4, requires_grad=True), use_reentrant=use_reentrant)
    y.sum().backward()
    assert len(storage._pending) == 1


def test_a_put_in_a_gradient_hook_counts(storage):
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    y.register_hook(lambda gradient: storage.put_scalar("gradient", gradient.norm()))
    y.sum().backward()
    assert storage.latest()["gradient"][0] == pytest.approx(2**0.5)


def test_compiled_puts_break_no_graph_and_compile_at_most_twice(storage):
    def forward(x):
        here = get_event_storage()
        y = x * 2
        here.put_scalar("sum", y.sum())
        with here.name_scope("inner"):
            here.put_scalar("first", y[0], smoothing_hint=False)
        here.put_scalar("constant", 3.0)
        y += 100  # in place, after the put
        return y

    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(forward, backend=counter, fullgraph=True)
    for step in range(1, 6):
        storage.step = step
        for number in range(3):
            compiled(torch.full((2,), float(step + number)))
        storage.put_scalar("eager", step)
    assert storage.history("sum") == [(step, 4.0 * (step + 1)) for step in range(1, 6)]
    assert storage.history("inner/first") == [(step, 2.0 * (step + 2)) for step in range(1, 6)]
    assert storage.latest()["constant"] == (3.0, 5)
    assert summarise(storage.take_window())["sum"] == 16.0
    # Once for the first put of a name in a step and once for those after it; never again as steps pass.
    assert counter.frame_count == 2


def test_an_imbalance_is_in_the_window_but_not_in_the_history_of_a_rank(storage):
    storage.put_imbalance("slowest_rank_share", 0.5)
    assert "slowest_rank_share" not in storage.latest()
    assert summarise(storage.take_window()) == {"slowest_rank_share": 0.0}


def test_loading_a_state_drops_the_values_put_before(storage):
    state = storage.state_dict()
    storage.step = 5
    storage.put_metric("text", "of a step that is undone", 1)
    storage.put_metric("tensor", torch.ones(3), 1)
    storage.put_scalar("number", 1.0)
    storage.load_state_dict(state)
    assert storage.take_window() == {}
