"""Noticing draws: none is missed, and the states come back as they were."""

import pickle
import random
import re

import numpy as np
import pytest
import torch

from trainwright.data.randomness import Watch, seed_generators

DRAWS = {
    "torch": lambda: torch.rand(1),
    "torch normal": lambda: torch.randn(1),
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
    "numpy integer": lambda: np.random.randint(10),
    "numpy, a whole turn of its generator": lambda: [np.random.rand() for _ in range(312)],
}


def states():
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state(legacy=False))


@pytest.fixture(autouse=True)
def _seeded():
    seed_generators(1)


@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_is_seen_and_undone(draw):
    watch = Watch()
    watch.begin()
    before = states()
    assert not watch.drawn()
    DRAWS[draw]()
    assert watch.drawn() == {re.split("[ ,]", draw)[0]}
    assert not watch.drawn(but=frozenset({re.split("[ ,]", draw)[0]}))
    watch.restore()
    assert states() == before
    assert not watch.drawn()


def test_a_normal_number_that_numpy_held_back_is_seen():
    watch = Watch()
    watch.begin()
    np.random.randn()  # draws a pair and holds the second back
    watch.begin()
    before = states()
    np.random.randn()  # changes no word of the generator
    assert watch.drawn() == {"numpy"}
    watch.restore()
    assert states() == before


def test_another_kind_of_numpy_generator_is_watched_too():
    original = np.random.mtrand.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        watch = Watch()
        watch.begin()
        before = states()
        assert not watch.drawn()
        np.random.rand()
        assert watch.drawn() == {"numpy"}
        watch.restore()
        assert states() == before
    finally:
        np.random.set_bit_generator(original)


def test_a_watch_that_travels_to_another_process_looks_anew():
    watch = Watch()
    watch.begin()
    travelled = pickle.loads(pickle.dumps(watch))
    assert travelled._generators is not watch._generators
    assert travelled._generators["python"]._memory is None


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 5])
def test_seeding_is_that_of_the_libraries_themselves(seed):
    random.gauss(0, 1)  # holds a number back
    np.random.randn()
    seed_generators(seed)
    own = states()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    assert states() == own
