"""Recorded operations give what the function gave, bit for bit, for new inputs and for weights that have moved on."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from tests.messages import mentions, raises
from torch import nn

from trainwright.backends.cuda_graphs import _Results
from trainwright.backends.recording import record_operations
from trainwright.errors import HostReadError, TrainwrightError


def test_a_replay_takes_new_inputs():
    recording, [first] = record_operations(lambda given: [given[0] * 2 + given[1]], [torch.ones(3), torch.ones(3)])
    [second] = recording.replay([torch.arange(3.0), torch.zeros(3)])
    assert first.tolist() == [3.0, 3.0, 3.0]
    assert second.tolist() == [0.0, 2.0, 4.0]


def test_each_replay_returns_tensors_of_its_own():
    recording, _ = record_operations(lambda given: [given[0] + 1], [torch.zeros(2)])
    [one] = recording.replay([torch.zeros(2)])
    [other] = recording.replay([torch.ones(2)])
    assert one.tolist() == [1.0, 1.0]
    assert other.tolist() == [2.0, 2.0]


def test_what_was_found_is_used_where_it_lies():
    weight = torch.ones(2)
    recording, _ = record_operations(lambda given: [weight.add_(given[0]).clone()], [torch.ones(2)])
    weight.fill_(10.0)
    assert recording.replay([torch.ones(2)])[0].tolist() == [11.0, 11.0]
    assert weight.tolist() == [11.0, 11.0]


def test_views_of_weights_see_the_weights_as_they_are_now():
    weight = nn.Parameter(torch.eye(2))
    recording, _ = record_operations(lambda given: [given[0] @ weight.t()[:1].reshape(-1)], [torch.ones(2)])
    with torch.no_grad():
        weight.mul_(3.0)
    assert recording.replay([torch.ones(2)])[0].item() == 3.0


def test_training_steps_with_dropout_and_several_backwards_are_equal_bit_for_bit():
    batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    recorded, plain = (_train(batches, is_recorded=is_recorded) for is_recorded in (True, False))
    assert recorded[0] == plain[0]
    for one, other in zip(recorded[1], plain[1], strict=True):
        assert torch.equal(one, other)


def test_parameters_have_their_gradients_after_a_replay():
    weight = nn.Parameter(torch.ones(3))

    def run(given):
        weight.grad = None
        (weight * given[0]).sum().backward()
        return []

    recording, _ = record_operations(run, [torch.ones(3)])
    recording.replay([torch.full((3,), 5.0)])
    assert weight.grad.tolist() == [5.0, 5.0, 5.0]


def test_constants_of_the_code_are_fresh_in_every_replay():
    recording, _ = record_operations(lambda given: [torch.tensor([1.0, 2.0]).add_(given[0])], [torch.ones(2)])
    recording.replay([torch.ones(2)])
    assert recording.replay([torch.ones(2)])[0].tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: torch.equal(x, x),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x.tolist(),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: np.asarray(x),
        lambda x: torch.from_dlpack(x),
    ],
    ids=["item", "bool", "equal", "mask", "nonzero", "unique", "tolist", "numpy", "array", "dlpack"],
)
def test_what_depends_on_values_is_refused(read):
    with pytest.raises(HostReadError):
        record_operations(lambda given: [torch.as_tensor(read(given[0]))], [torch.ones(3)])


def test_a_tensor_that_no_operation_made_is_refused():
    batch = torch.ones(3)
    memory = batch.numpy()
    with raises(TrainwrightError):
        record_operations(lambda given: [torch.from_numpy(memory) * given[0]], [batch])


def test_indexing_by_numbers_is_recorded():
    rows = torch.arange(3)
    recording, _ = record_operations(lambda given: [given[0][rows, given[1]]], [torch.eye(3), torch.zeros(3).long()])
    values = torch.arange(9.0).reshape(3, 3)
    assert recording.replay([values, torch.tensor([2, 0, 1])])[0].tolist() == [2.0, 3.0, 7.0]


def test_empty_tensors_are_no_tensors_without_an_operation():
    empty = torch.empty(0)
    recording, _ = record_operations(lambda given: [torch.empty(0).sum() + empty.sum() + given[0]], [torch.ones(())])
    assert recording.replay([torch.tensor(4.0)])[0].item() == 4.0


@pytest.mark.parametrize(
    "reshape", [lambda x: x.detach().t_(), lambda x: x.t().unsqueeze_(0)], ids=["detached", "view"]
)
def test_the_shape_of_a_view_is_not_changed_in_place(reshape):
    buffer = torch.arange(6.0).reshape(2, 3)
    with raises(HostReadError):
        record_operations(lambda given: [reshape(buffer) + given[0]], [torch.ones(())])


def _own_generator():
    generator = torch.Generator().manual_seed(1)
    torch.rand(1, generator=generator)
    return generator


@pytest.mark.parametrize(
    "seed",
    [
        lambda own: torch.manual_seed(3),
        lambda own: torch.default_generator.manual_seed(4),
        lambda own: torch.default_generator.set_state(torch.Generator().manual_seed(5).get_state()),
        lambda own: own.manual_seed(1),
    ],
    ids=["torch", "default", "state", "own"],
)
def test_seeding_within_a_recording_is_refused(seed):
    generator = _own_generator()

    def run(given):
        seed(generator)
        return [given[0] + torch.rand(2) + torch.rand(2, generator=generator)]

    with raises(HostReadError):
        record_operations(run, [torch.ones(2)])


def test_a_generator_of_ones_own_draws_on_in_replays():
    generator, plain = _own_generator(), _own_generator()
    recording, _ = record_operations(lambda given: [given[0] * torch.rand(2, generator=generator)], [torch.ones(2)])
    torch.rand(2, generator=plain)
    assert torch.equal(recording.replay([torch.ones(2)])[0], torch.rand(2, generator=plain))


def test_another_threads_reads_of_the_generator_are_not_recorded():
    def run(given):
        reader = threading.Thread(target=lambda: torch.set_rng_state(torch.get_rng_state()))
        reader.start()
        reader.join()
        return [given[0] + 1]

    recording, _ = record_operations(run, [torch.ones(2)])
    assert recording.num_operations == 1


def test_what_was_found_is_returned_as_a_copy():
    weight = torch.ones(2)
    recording, [first] = record_operations(lambda given: [weight.add_(given[0])], [torch.ones(2)])
    [second] = recording.replay([torch.ones(2)])
    weight.zero_()
    assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [3.0, 3.0])


def test_parameters_without_a_gradient_have_none_after_a_replay():
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def run(given):
        weight.grad = other.grad = None
        (weight * given[0]).sum().backward()
        return []

    recording, _ = record_operations(run, [torch.ones(3)], parameters=[weight, other])
    other.grad = torch.ones(3)
    recording.replay([torch.ones(3)])
    assert other.grad is None
    assert weight.grad is not None


def test_results_of_a_graph_on_another_device_are_kept_apart_and_warned_of(caplog):
    here = torch.device("cpu")
    assert [each.item() for each in _Results([torch.ones(1), torch.tensor(2)], here).copies()] == [1.0, 2]
    assert caplog.text == ""
    [copy] = _Results([torch.ones(1)], torch.device("cuda", 0)).copies()
    assert copy.tolist() == [1.0]
    assert mentions(caplog.text, "0", "graph")


def test_what_a_replay_makes_in_between_is_freed():
    recording, _ = record_operations(lambda given: [(given[0] * 2).exp().sum()], [torch.ones(4)])
    value = torch.ones(4)
    seen = weakref.ref(value)
    recording.replay([value])
    del value
    gc.collect()
    assert seen() is None


def _train(batches, *, is_recorded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 3))
    rate = torch.tensor(0.0, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def update(given):
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for piece in given[0].chunk(2):
            loss = nn.functional.mse_loss(model(piece), piece[:, :3])
            loss.backward()
            total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
        optimizer.step()
        return [total, norm]

    recording, seen = None, []
    for number, batch in enumerate(batches):
        rate.fill_(0.1 / (number + 1))
        torch.manual_seed(number)
        if recording is not None:
            values = recording.replay([batch])
        elif is_recorded and number == 1:
            recording, values = record_operations(update, [batch])
        else:
            values = update([batch])
        seen.append([value.item() for value in values])
    return seen, list(model.state_dict().values())
