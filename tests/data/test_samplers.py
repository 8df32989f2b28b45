"""Samplers and the end of an epoch: coverage, frequencies, and the same samples for any ranks, workers and resume."""

import json
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainwright.data.fetch import View
from trainwright.data.loader import TrainData
from trainwright.data.samplers import SamplerOrder, WeightedSampler
from trainwright.data.workers import LoaderOptions
from trainwright.errors import ConfigError, DataError

SIZES = st.integers(1, 40)
LAST_BATCHES = st.sampled_from(["straddle", "short", "drop"])


class Drawing(Sampler):
    """Draws from a generator of its own or a global one, according to `kind`."""

    def __init__(self, size, kind):
        self.size = size
        self.kind = kind
        made = {"torch": torch.Generator(), "python": random.Random(3), "numpy": np.random.default_rng(3)}
        self.generator = made.get(kind, np.random.RandomState(3) if kind == "legacy" else None)

    def __iter__(self):
        if self.kind == "torch":
            yield from torch.randperm(self.size, generator=self.generator)
        elif self.kind in ("numpy", "legacy"):
            yield from self.generator.permutation(self.size)
        elif self.kind == "python":
            yield from self.generator.sample(range(self.size), self.size)
        else:
            numbers = list(range(self.size))
            {"random": random, "np.random": np.random}[self.kind].shuffle(numbers)
            yield from numbers


class Counting(Sampler):
    """Rotates by the number of passes so far, which it counts itself."""

    def __init__(self, size):
        self.size, self.passes = size, 0

    def __iter__(self):
        start, self.passes = self.passes, self.passes + 1
        return iter([(start + number) % self.size for number in range(self.size)])

    def __len__(self):
        return self.size


class Growing(Sampler):
    """Has one sample more in each of four epochs, and no length."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(5 + self.epoch % 4))


class Buckets(Sampler):
    """Yields batches of 3, 1 and 4 samples."""

    def __iter__(self):
        order = torch.randperm(8).tolist()
        yield from (order[:3], order[3:4], order[4:])


def loader(size=10, batch=4, ranks=(0, 1), workers=0, **arguments):
    return TrainData(
        list(range(size)),
        collator=tuple,
        global_batch_size=batch,
        seed=5,
        view=View(*ranks),
        options=LoaderOptions(workers),
        **arguments,
    )


def drawn(data, count):
    """The next batches over all ranks of one process, without stand-ins."""
    return [batch[: data.batch_num_samples] for batch in islice(data.batches(iter), count)]


def weighted(weights, **arguments):
    return WeightedSampler(weights, dataset=weights, **arguments)


SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(10)),
    "random": lambda: RandomSampler(range(10)),
    "replacement": lambda: RandomSampler(range(10), replacement=True, num_samples=7),
    "generator": lambda: RandomSampler(range(10), generator=torch.Generator().manual_seed(1)),
    "subset": lambda: SubsetRandomSampler([1, 3, 5, 7, 9]),
    "torch's weighted": lambda: WeightedRandomSampler([1.0] * 5 + [0.0] * 5, 9),
    "batches": lambda: BatchSampler(RandomSampler(range(10)), 4, False),
    "buckets": Buckets,
    "counting": lambda: Counting(10),
    "growing": Growing,
    **{kind: (lambda kind=kind: Drawing(10, kind)) for kind in ("torch", "python", "numpy", "legacy")},
    **{kind: (lambda kind=kind: Drawing(10, kind)) for kind in ("random", "np.random")},
    "weighted": lambda: weighted([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    "weighted once": lambda: weighted([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], replacement=False, num_samples=6),
}


# the end of an epoch


@given(SIZES, st.integers(1, 12), LAST_BATCHES, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_each_sample_once_and_ends_as_last_batch_says(size, batch, last_batch, num_epochs):
    if batch > size and last_batch != "short":
        return
    data = loader(size, batch, last_batch=last_batch)
    stop = data.position_after(num_epochs)
    num_batches = data.count_batches(stop)
    data.num_samples = stop
    epochs, batches = [], []
    for each in data.batches(iter):
        batches.append(each)
        epochs.append(data.epoch)
    assert len(batches) == num_batches
    flat = [sample for each in batches for sample in each]
    per_epoch = size // batch * batch if last_batch == "drop" else size
    assert len(flat) == per_epoch * num_epochs
    for number in range(num_epochs):
        epoch = flat[number * per_epoch : (number + 1) * per_epoch]
        assert len(set(epoch)) == per_epoch
    sizes = [len(each) for each in batches]
    if last_batch == "short":
        assert sizes == ([batch] * (size // batch) + ([size % batch] if size % batch else [])) * num_epochs
        assert epochs == [number // -(-size // batch) for number in range(1, len(sizes) + 1)]
    else:
        assert set(sizes[:-1]) <= {batch}


@pytest.mark.parametrize("last_batch", ["short", "drop"])
def test_batches_of_similar_length_begin_with_the_epoch(last_batch):
    class Rows(list):
        lengths = tuple(range(10))

    data = TrainData(
        Rows(range(10)), collator=tuple, global_batch_size=4, seed=1, group_by_length=True, last_batch=last_batch
    )
    batches = drawn(data, 6)
    assert [len(each) for each in batches] == ([4, 4, 2] * 2 if last_batch == "short" else [4] * 6)
    spread = [max(each) - min(each) for each in batches if len(each) == 4]
    assert max(spread) <= 6


def test_a_fraction_of_an_epoch_is_measured_exactly():
    data = loader(10, 4, last_batch="short")
    assert [float(data.epochs_at(position)) for position in (0, 4, 10, 15)] == [0, 0.4, 1, 1.5]
    assert data.position_after(2.5) == 25
    assert data.count_batches(25) == 3 + 3 + 2


# any sampler


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("last_batch", ["straddle", "short"])
def test_a_resumed_run_sees_the_same_samples_with_other_ranks_and_workers(name, last_batch):
    arguments = {"last_batch": "straddle" if name in ("batches", "buckets") else last_batch}
    whole = drawn(loader(sampler=SAMPLERS[name](), **arguments), 14)
    for done in (0, 1, 3, 5, 7):
        first = loader(sampler=SAMPLERS[name](), **arguments)
        iterator = first.batches(iter)
        assert [next(iterator) for _ in range(done)] == whole[:done]
        state = json.loads(json.dumps(first.state_dict()))
        parts = []
        for rank in range(3):
            data = loader(sampler=SAMPLERS[name](), ranks=(rank, 3), **arguments)
            data.load_state_dict(state)
            parts.append(drawn(data, 14 - done))
        joined = [sum(shares, ()) for shares in zip(*parts, strict=True)]
        assert joined == whole[done:]


@pytest.mark.parametrize("name", ["random", "counting", "weighted once"])
def test_workers_see_what_the_process_drew(name):
    alone, helped = loader(sampler=SAMPLERS[name]()), loader(sampler=SAMPLERS[name](), workers=2)
    assert drawn(helped, 9) == drawn(alone, 9)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "replac" not in name and "weighted" not in name])
def test_a_pass_is_an_epoch_and_random_ones_differ(name):
    sampler = SAMPLERS[name]()
    data = loader(sampler=sampler)
    spans = [data.order.epoch_span(0)]
    for _ in range(2):
        spans.append(data.order.epoch_span(spans[-1][1]))
    passes = [data.order.indices(*span).tolist() for span in spans]
    if name == "growing":
        assert [len(each) for each in passes] == [5, 6, 7]
        return
    assert len({tuple(sorted(each)) for each in passes}) == 1
    assert len({tuple(each) for each in passes}) == (1 if name == "sequential" else 3)


@pytest.mark.parametrize("name", SAMPLERS)
def test_drawing_leaves_the_global_generators_as_they_were(name):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    drawn(loader(sampler=SAMPLERS[name]()), 5)
    assert before == (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())


def test_the_seed_decides_the_order_of_a_sampler_with_a_generator_of_its_own():
    def order(seed, own):
        sampler = RandomSampler(range(10), generator=torch.Generator().manual_seed(own))
        return SamplerOrder(sampler, size=10, seed=seed, batch_size=2, last_batch="straddle").indices(0, 10).tolist()

    assert order(1, 2) == order(1, 3) != order(2, 2)


def test_a_batch_sampler_yields_the_global_batches():
    data = loader(8, 4, sampler=Buckets())
    assert [len(each) for each in drawn(data, 6)] == [3, 1, 4] * 2
    data = loader(8, 4, sampler=Buckets())
    assert data.count_batches(data.position_after(3)) == 9
    assert data.count_batches(data.position_after(1.5)) == 5  # 3 + 1 + 4, then 3 and 1 of the next


@given(st.integers(4, 30), st.integers(1, 4), st.integers(1, 6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_batches_of_torchs_batch_sampler_are_counted_without_drawing_them(size, batch, num_epochs, drop_last):
    data = loader(size, batch, sampler=BatchSampler(SequentialSampler(range(size)), batch, drop_last))
    expected = len(list(BatchSampler(SequentialSampler(range(size)), batch, drop_last)))
    assert data.count_batches(data.position_after(num_epochs)) == expected * num_epochs


def test_passes_of_several_lengths_are_counted_one_by_one():
    data = loader(20, 4, sampler=Growing(), last_batch="short")
    assert data.position_after(3) == 5 + 6 + 7
    assert data.count_batches(18) == 2 + 2 + 2
    assert [len(each) for each in drawn(data, 6)] == [4, 1, 4, 2, 4, 3]
    assert data.epoch == 3


def test_a_short_batch_of_many_ranks_has_ranks_without_samples():
    parts = [drawn(loader(5, 4, ranks=(rank, 4), last_batch="short"), 2)[1] for rank in range(4)]
    assert sorted(map(len, parts)) == [0, 0, 0, 1]


# weights


@given(st.lists(st.floats(0, 10), min_size=2, max_size=30).filter(any), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_weight_of_zero_is_never_drawn_and_without_replacement_nothing_twice(weights, replacement):
    num_drawable = sum(weight > 0 for weight in weights)
    sampler = weighted(weights, replacement=replacement, num_samples=num_drawable)
    data = loader(len(weights), 1, sampler=sampler)
    for epoch in range(3):
        indices = data.order.indices(epoch * num_drawable, (epoch + 1) * num_drawable).tolist()
        assert all(weights[index] > 0 for index in indices)
        if not replacement:
            assert len(set(indices)) == num_drawable


def test_samples_are_drawn_as_often_as_their_weights_say():
    weights = [0.0, 1.0, 2.0, 7.0]
    data = loader(4, 4, sampler=weighted(weights, num_samples=20_000))
    counts = Counter(data.order.indices(0, 20_000).tolist())
    for index, weight in enumerate(weights):
        expected = 20_000 * weight / 10
        assert abs(counts[index] - expected) <= 4 * (expected * (1 - weight / 10)) ** 0.5


def test_draws_without_replacement_have_torchs_probabilities():
    weights = torch.tensor([1.0, 2.0, 5.0])
    data = loader(3, 2, sampler=weighted(weights, replacement=False, num_samples=2))
    own = Counter(map(tuple, data.order.indices(0, 16_000).reshape(-1, 2).tolist()))
    for first in range(3):
        for second in {0, 1, 2} - {first}:
            probability = float(weights[first] / 8 * weights[second] / (8 - weights[first]))
            expected = 8000 * probability
            assert abs(own[first, second] - expected) <= 4 * (expected * (1 - probability)) ** 0.5


def test_the_sample_at_a_position_does_not_depend_on_what_was_drawn_before():
    for replacement in (True, False):
        order = loader(10, 4, sampler=weighted(range(1, 11), replacement=replacement)).order
        whole = order.indices(0, 100).tolist()
        fresh = loader(10, 4, sampler=weighted(range(1, 11), replacement=replacement)).order
        for start in (90, 37, 3):
            assert fresh.indices(start, start + 8).tolist() == whole[start : start + 8]


def balance(dataset):
    """Weights for a dataset, given by name."""
    return [1.0 if sample % 2 else 0.0 for sample in dataset]


@pytest.mark.parametrize(
    "file", ["weights.json", "weights.npy", "weights.csv", "named.csv", "weights.txt", "weights.py:balance"]
)
def test_weights_come_from_a_list_a_file_or_a_function(file, tmp_path):
    weights = [0.0, 1.0, 0.0, 2.0]
    (tmp_path / "weights.json").write_text(json.dumps(weights))
    np.save(tmp_path / "weights.npy", np.array(weights, dtype=np.float32))
    (tmp_path / "weights.csv").write_text("\n".join(map(str, weights)))
    (tmp_path / "named.csv").write_text("weight\n" + "\n".join(map(str, weights)))
    (tmp_path / "weights.txt").write_text("\n".join(map(str, weights)) + "\n")
    (tmp_path / "weights.py").write_text("def balance(dataset):\n    return [i % 2 * i for i in range(len(dataset))]\n")
    found = WeightedSampler(file, dataset=range(4), project_dir=tmp_path).weights
    assert found.tolist() == (weights if not file.endswith("balance") else [0, 1, 0, 3])


@pytest.mark.parametrize("weights", [balance, torch.tensor([0.0, 1.0, 0.0, 1.0]), np.array([0, 1, 0, 1])])
def test_weights_in_code_are_a_function_a_tensor_or_an_array(weights):
    assert WeightedSampler(weights, dataset=range(4)).weights.tolist() == [0, 1, 0, 1]


# what is rejected


@pytest.mark.parametrize(
    ("weights", "arguments", "mentions"),
    [
        ([1, 2], {}, ["data.sampler.weights", 2, 3]),
        ([[1, 2, 3]], {}, ["data.sampler.weights", "[1, 3]"]),
        ([1, -1, 2], {}, ["data.sampler.weights", "sample 1", "-1.0"]),
        ([1, float("nan"), 2], {}, ["sample 1", "nan"]),
        ([0, 0, 0], {}, ["data.sampler.weights", 3]),
        (["a", "b", "c"], {}, ["data.sampler.weights"]),
        ("weights.pt", {}, ["weights.pt", ".npy"]),
        ("absent.json", {}, ["absent.json"]),
        ("wide.csv", {}, ["wide.csv", "row 1"]),
        ("words.txt", {}, ["words.txt"]),
        ("absent.py:fn", {}, ["absent.py"]),
        ([1, 0, 1], {"replacement": False}, ["data.sampler.replacement", 2, 3]),
        ([1, 1, 1], {"replacement": False, "num_samples": 4}, [4, 3]),
        ([1, 1, 1], {"num_samples": 0}, ["data.sampler.num_samples", 0]),
        ([1, 1, 1], {"replacement": 1}, ["data.sampler.replacement"]),
    ],
)
def test_weights_that_cannot_be_drawn_from_are_rejected(weights, arguments, mentions, tmp_path):
    (tmp_path / "wide.csv").write_text("1,2\n3,4\n")
    (tmp_path / "words.txt").write_text("one\n")
    with raises(ConfigError, *mentions):
        WeightedSampler(weights, dataset=range(3), project_dir=tmp_path, **arguments)


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 0


@pytest.mark.parametrize(
    ("sampler", "mentions"),
    [
        (SubsetRandomSampler([]), ["SubsetRandomSampler", "empty"]),
        (SubsetRandomSampler([3, 10]), ["data.sampler", 10]),
        (SubsetRandomSampler([0.5]), ["data.sampler", "float"]),
        (BatchSampler(range(10), 5, False), [5, "trainer.global_batch_size", 4]),
        ([[1, 2], []], ["data.sampler", "batch 1", 0]),
        (Endless(), ["Endless", "1,000,000"]),
        (SubsetRandomSampler([1, 2]), ["trainer.global_batch_size", 4, 2]),
    ],
)
def test_passes_that_cannot_be_used_are_rejected(sampler, mentions):
    with raises(DataError, *mentions):
        loader(sampler=sampler)


def test_a_weight_per_class_instead_of_per_sample_is_rejected():
    with raises(ConfigError, "data.sampler", 3, 10):
        loader(sampler=WeightedRandomSampler([0.2, 0.3, 0.5], num_samples=10))


def test_a_sampler_of_one_rank_is_rejected():
    class Own(Sampler):
        def __init__(self):
            self.num_replicas, self.rank = 2, 0

        def __iter__(self):
            return iter(range(self.rank, 10, 2))

    for sampler in (
        DistributedSampler(range(10), 2, 0),
        BatchSampler(DistributedSampler(range(10), 2, 0), 2, True),
        Own(),
    ):
        with raises(ConfigError, "data.sampler", "rank"):
            loader(sampler=sampler)
    with raises(ConfigError, "data.sampler", "int"):
        loader(sampler=3)


@pytest.mark.parametrize("before", ["weighted", "random", None])
def test_a_checkpoint_of_another_order_is_rejected(before):
    first = loader(sampler=None if before is None else SAMPLERS[before]())
    drawn(first, 2)
    other = loader(sampler=weighted([1.0] * 10))
    with raises(DataError, "data.sampler", "--accept-changes"):
        other.load_state_dict(first.state_dict())
    other.load_state_dict(first.state_dict(), accept_changes=True)
    assert other.order_position == 8
