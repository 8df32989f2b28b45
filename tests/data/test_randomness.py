"""Seeding, preserving and observing the global generators: no draw is missed, and the states come back as they were."""

import pickle
import random
import re

import numpy as np
import pytest
import torch

from trainwright.data.randomness import DrawDetector, preserve_generators, seed_generators

DRAWS = {
    "torch": lambda: torch.rand(1),
    "torch normal": lambda: torch.randn(1),
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "python bits": lambda: random.getrandbits(1),
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
def test_every_draw_is_seen(draw):
    detector = DrawDetector()
    detector.start()
    assert not detector.drawn()
    detector.start()
    DRAWS[draw]()
    assert detector.drawn() == {re.split("[ ,]", draw)[0]}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("before", ["numpy", "python gauss"])  # the latter holds a number back
def test_every_draw_is_undone(before, draw):
    DRAWS[before]()
    given = states()
    with preserve_generators():
        DrawDetector().start()
        DRAWS[draw]()
    assert states() == given


def test_the_bit_generator_of_numpy_survives_and_a_held_back_number_is_dropped():
    np.random.randn()
    np.random.set_bit_generator(np.random.get_bit_generator())  # what numpy itself does with the second number
    given = states()
    with preserve_generators(), preserve_generators():
        np.random.seed(3)
        np.random.randn()
    assert states() == given


def test_a_bit_generator_that_is_not_numpys_default_survives():
    own = np.random.PCG64(5)
    previous = np.random.get_bit_generator()
    np.random.set_bit_generator(own)
    try:
        with preserve_generators():
            seed_generators(1)  # numpy's seed needs an MT19937
        assert np.random.get_bit_generator() is own
        assert own.random_raw() == np.random.PCG64(5).random_raw()
    finally:
        np.random.set_bit_generator(previous)


def test_an_error_leaves_the_generators_as_they_were():
    given = states()

    def fail():
        with preserve_generators():
            seed_generators(7)
            raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        fail()
    assert states() == given


def test_a_number_that_was_held_back_before_hides_no_draw():
    np.random.randn()  # draws a pair and holds the second back
    random.gauss(0, 1)
    detector = DrawDetector()
    detector.start()
    np.random.randn()
    random.gauss(0, 1)
    assert detector.drawn() == {"numpy", "python"}


def test_another_kind_of_numpy_generator_is_preserved_too():
    original = np.random.mtrand.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        given = states()
        with preserve_generators():
            np.random.rand()
        assert states() == given
    finally:
        np.random.set_bit_generator(original)


def test_a_detector_can_travel_to_another_process():
    detector = DrawDetector()
    detector.start()
    travelled = pickle.loads(pickle.dumps(detector))
    torch.rand(1)
    assert travelled.drawn() == {"torch"}


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
