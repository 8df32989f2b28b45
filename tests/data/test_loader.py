"""Batches by global position: any rank, any number of workers, from any position."""

import multiprocessing
import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from trainwright.data.collators import Stack
from trainwright.data.fetch import View
from trainwright.data.loader import EvalData, TrainData
from trainwright.data.workers import LoaderOptions
from trainwright.registry import resolve as registry

WORKERS = LoaderOptions(2, {"prefetch_factor": 3})
num_ranks = st.integers(1, 4)


class Noise(Dataset):
    """Draws from all three generators."""

    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def shake(samples):
    return Stack()(samples) + torch.rand(())


def train_data(dataset, *, collator=None, batch_size=8, **arguments):
    return TrainData(dataset, collator=collator or Stack(), global_batch_size=batch_size, seed=11, **arguments)


def eval_data(dataset, *, batch_size=4, **arguments):
    return EvalData(dataset, name="valid", collator=Stack(), global_batch_size=batch_size, seed=11, **arguments)


def take(data, count=None):
    """The samples that count of the next batches, and how many of them each batch holds."""
    batches = list(islice(((batch, data.batch_num_samples) for batch in data.batches(iter)), count))
    return [batch[:samples] for batch, samples in batches]


def generator_states():
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


@given(st.integers(0, 1000), st.integers(0, 100), num_ranks)
def test_the_ranks_shares_cover_all_positions_in_order(start, length, size):
    parts = [View(rank, size).share(start, start + length) for rank in range(size)]
    positions = [position for part in parts for position in range(*part)]
    assert positions == list(range(start, start + length))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1


@settings(max_examples=30, deadline=None)
@given(st.integers(9, 40), st.integers(1, 9), num_ranks, st.integers(0, 50))
def test_training_gives_the_same_samples_on_any_number_of_ranks(size, batch_size, ranks, position):
    def samples(rank, of):
        data = train_data(list(range(size)), batch_size=batch_size, view=View(rank, of))
        data.load_state_dict({"position": position})
        return take(data, 5)

    whole = samples(0, 1)
    shares = [samples(rank, ranks) for rank in range(ranks)]
    for number in range(5):
        assert torch.cat([share[number] for share in shares]).tolist() == whole[number].tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), num_ranks)
def test_evaluation_gives_each_sample_once_in_order_on_any_number_of_ranks(size, batch_size, ranks):
    shares = [
        take(eval_data(list(range(size)), batch_size=batch_size, view=View(rank, ranks))) for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    samples = [torch.cat(batch).tolist() for batch in zip(*shares, strict=True)]
    assert [sample for batch in samples for sample in batch] == list(range(size))


def test_a_rank_without_samples_gets_a_stand_in_that_counts_nothing():
    data = eval_data([10, 11, 12, 13, 14], batch_size=4, view=View(0, 4))
    batches = [(batch.tolist(), data.batch_num_samples) for batch in data.batches(iter)]
    assert batches == [([10], 1), ([13], 0)]
    assert len(list(data.batches(iter))) == 2
    first_of_nothing = eval_data([10], batch_size=4, view=View(0, 4))
    assert [(batch.tolist(), first_of_nothing.batch_num_samples) for batch in first_of_nothing.batches(iter)] == [
        ([10], 0)
    ]


@pytest.mark.parametrize("collator", [Stack(), shake])
@pytest.mark.parametrize("view", [View(), View(1, 3)])
def test_workers_fetch_the_same_as_the_process_itself(collator, view):
    own = take(train_data(Noise(), collator=collator, view=view), 6)
    fetched = take(train_data(Noise(), collator=collator, view=view, options=WORKERS), 6)
    assert all(torch.equal(*pair) for pair in zip(own, fetched, strict=True))


def test_workers_give_a_collator_that_draws_the_same_numbers_over_any_dataset():
    dataset = torch.utils.data.TensorDataset(torch.arange(20.0))

    def jitter(samples):
        return Stack()([sample[0] for sample in samples]) + torch.rand(())

    own = take(train_data(dataset, collator=jitter), 4)
    fetched = take(train_data(dataset, collator=jitter, options=WORKERS), 4)
    assert all(torch.equal(*pair) for pair in zip(own, fetched, strict=True))


def test_workers_evaluate_the_same_with_a_ragged_end():
    own = take(eval_data(Noise(), view=View(2, 3)))
    fetched = take(eval_data(Noise(), view=View(2, 3), options=WORKERS))
    assert [len(batch) for batch in own] == [2, 2, 2, 2, 2, 1]
    assert all(torch.equal(*pair) for pair in zip(own, fetched, strict=True))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 12), num_ranks)
def test_a_resumed_stream_goes_on_where_it_was(batches, ranks):
    view = View(ranks - 1, ranks)
    whole = take(train_data(Noise(), view=view), batches + 3)
    first = train_data(Noise(), view=view)
    take(first, batches)
    resumed = train_data(Noise(), view=view)
    resumed.load_state_dict(first.state_dict())
    assert all(torch.equal(*pair) for pair in zip(take(resumed, 3), whole[batches:], strict=True))


@pytest.mark.parametrize("options", [LoaderOptions(), WORKERS])
def test_the_position_counts_what_was_returned_not_what_was_fetched(options):
    data = train_data(Noise(), options=options)

    def one_ahead(batches):
        held = next(batches)
        for batch in batches:
            yield held
            held = batch

    iterator = data.batches(one_ahead)
    assert data.state_dict()["position"] == 0
    for number in (1, 2, 3):
        next(iterator)
        assert data.state_dict()["position"] == 8 * number
        assert data.batch_num_samples == 8


@pytest.mark.parametrize("options", [LoaderOptions(), WORKERS])
def test_iterating_leaves_the_processes_own_generators_alone(options):
    data = train_data(Noise(), options=options)
    before = generator_states()
    take(data, 3)
    assert generator_states() == before


def test_the_epoch_is_that_of_the_next_sample_and_batches_straddle_epochs():
    data = train_data(list(range(10)), batch_size=4)
    epochs, samples = [], []
    for batch in islice(data.batches(iter), 5):
        samples += batch.tolist()
        epochs.append(data.epoch)
    assert epochs == [0, 0, 1, 1, 2]
    assert sorted(samples[:10]) == sorted(samples[10:]) == list(range(10))
    assert samples[:10] != samples[10:]


def test_a_limit_in_samples_ends_the_stream_exactly_there():
    data = train_data(list(range(10)), batch_size=4, num_samples=10, shuffle=False)
    assert [batch.tolist() for batch in take(data)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert data.samples_seen == 10
    assert take(data) == []


def test_an_evaluation_may_end_after_so_many_batches():
    data = eval_data(list(range(10)), batch_size=4, max_batches=2)
    assert torch.cat(take(data)).tolist() == list(range(8))
    assert len(data) == 10
    assert torch.cat(take(eval_data(list(range(10)), batch_size=4, max_batches=9))).tolist() == list(range(10))


def test_a_worker_that_raises_leaves_no_process_behind():
    class Broken(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            raise OSError("no such file")

    data = TrainData(Broken(), collator=Stack(), global_batch_size=2, seed=0, options=LoaderOptions(num_workers=2))
    with pytest.raises(OSError, match="no such file") as caught:
        next(data.batches(lambda batches: batches))
    assert caught.traceback  # still alive, and with it every frame that fetched
    assert multiprocessing.active_children() == []


def test_spawned_workers_find_the_projects_classes(tmp_path):
    folder = tmp_path / "datasets"
    folder.mkdir()
    (folder / "mine.py").write_text("class Mine(list):\n    pass\n")
    mine = registry.find("dataset", "mine.Mine", project_dir=tmp_path)
    options = LoaderOptions(1, {"multiprocessing_context": "spawn"})
    data = TrainData(mine(range(8)), collator=Stack(), global_batch_size=4, seed=0, shuffle=False, options=options)
    assert next(data.batches(lambda batches: batches)).tolist() == [0, 1, 2, 3]
