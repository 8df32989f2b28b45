"""Fetching samples, each with randomness of its own."""

import random

import numpy as np
import pytest
import torch
from tests.messages import raises
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from trainwright.data.collators import Stack
from trainwright.data.fetch import SampleFetcher, Span, count_samples, draws_nothing
from trainwright.data.order import Order
from trainwright.data.randomness import seed_generators
from trainwright.errors import DataError


class Noise(Dataset):
    """Draws from all three generators."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def add_noise(samples):
    batch = Stack()(samples)
    return batch + torch.rand(batch.shape) + random.random() + np.random.rand()


def fetcher(dataset, collator=None, seed=5):
    return SampleFetcher(dataset, Order(10, seed=seed), collator or Stack(), seed)


def generator_states():
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def test_a_sample_is_a_function_of_seed_and_position():
    whole = fetcher(Noise()).fetch(Span(0, 30)).batch
    assert torch.equal(fetcher(Noise()).fetch(Span(7, 9)).batch, whole[7:9])
    assert not torch.equal(fetcher(Noise(), seed=6).fetch(Span(0, 30)).batch[:, 1:], whole[:, 1:])


def test_the_same_sample_draws_anew_in_each_epoch():
    whole = fetcher(Noise()).fetch(Span(0, 20)).batch
    first, second = (epoch[epoch[:, 0].argsort()] for epoch in (whole[:10], whole[10:]))
    assert torch.equal(first[:, 0], second[:, 0])
    assert (first[:, 1:] != second[:, 1:]).all()


@pytest.mark.parametrize("dataset", [Noise(), TensorDataset(torch.arange(10))])
@pytest.mark.parametrize("collator", [Stack(), lambda samples: add_noise([torch.as_tensor(s[0]) for s in samples])])
def test_fetching_leaves_the_processes_own_generators_alone(dataset, collator):
    before = generator_states()
    fetcher(dataset, collator).fetch(Span(0, 4))
    assert generator_states() == before


def test_the_generators_are_restored_when_a_sample_raises():
    class Broken(Noise):
        def __getitem__(self, index):
            raise OSError("no such file")

    before = generator_states()
    with pytest.raises(OSError, match="no such file"):
        fetcher(Broken()).fetch(Span(0, 4))
    assert generator_states() == before


def test_a_collator_that_draws_is_a_function_of_seed_and_position_too():
    dataset = [torch.zeros(3) for _ in range(10)]
    first = fetcher(dataset, add_noise).fetch(Span(4, 8)).batch
    torch.manual_seed(99)
    assert torch.equal(fetcher(dataset, add_noise).fetch(Span(4, 8)).batch, first)
    assert not torch.equal(fetcher(dataset, add_noise).fetch(Span(8, 12)).batch, first)


class Moody(Noise):
    """Draws from one generator or another, or from none, as the sample is."""

    def __getitem__(self, index):
        draws = [torch.rand(()).item()] if index % 2 else []
        draws += [random.random()] if index % 3 == 0 else []
        draws += [np.random.rand()] if index == 7 else []
        return torch.tensor([index, sum(draws)], dtype=torch.float64)


def shake_some(samples):
    first = int(samples[0][0])
    noise = random.random() if first % 2 else torch.rand(()).item() if first % 3 else 0.0
    return Stack()(samples) + noise


def test_what_was_fetched_before_changes_nothing_whoever_draws_from_what():
    used = fetcher(Moody(), shake_some)
    for start in range(24):
        span = Span(start, start + 2)
        before = generator_states()
        expected = fetcher(Moody(), shake_some).fetch(span).batch
        assert torch.equal(used.fetch(span).batch, expected)
        assert generator_states() == before
        seed_generators(start)  # a worker's own generators are nobody's
        assert torch.equal(fetcher(Moody(), shake_some).__getitems__(span).batch, expected)


def test_a_worker_that_saw_no_draw_sees_the_first_one():
    worker = fetcher(Moody(), Stack())
    for start in range(24):
        span = Span(start, start + 1)
        assert torch.equal(worker.__getitems__(span).batch, fetcher(Moody(), Stack()).__getitems__(span).batch)


def test_a_dataset_that_draws_nothing_is_fetched_in_one_call():
    calls = []

    class Quick(Dataset):
        draws_nothing = True

        def __getitems__(self, indices):
            calls.append(indices)
            return [torch.tensor(index) for index in indices]

    batch = fetcher(Quick()).fetch(Span(0, 10)).batch
    assert calls == [batch.tolist()]
    assert sorted(batch.tolist()) == list(range(10))


def test_what_draws_nothing_is_known_or_declared():
    tensors = TensorDataset(torch.arange(3))
    assert draws_nothing(tensors)
    assert draws_nothing(Subset(tensors, [0, 1]))
    assert not draws_nothing(Subset(Noise(), [0, 1]))
    assert draws_nothing([1, 2])
    assert draws_nothing((1, 2))
    assert not draws_nothing(type("Rows", (list,), {})([1, 2]))

    class Mine(TensorDataset):
        def __getitem__(self, index):
            return torch.rand(3)

    assert not draws_nothing(Mine(torch.arange(3)))


def test_datasets_that_cannot_be_used_say_why():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    assert count_samples([1, 2, 3], "data.train") == 3
    with raises(DataError, "__getitem__", "data.train"):
        count_samples(Stream(), "data.train")
    with raises(DataError, "data.train"):
        count_samples(Endless(), "data.train")
    with raises(DataError, "data.eval.valid"):
        count_samples([], "data.eval.valid")
