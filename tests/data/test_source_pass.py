"""One pass over a source: opened when needed, its state never that of another pass."""

import pytest
from tests.messages import raises

from trainwright.data.streams import SourcePass
from trainwright.errors import DataError


class Numbers:
    """A stream whose state tells of the iteration begun last, and whose iterations are counted."""

    opened = 0

    def __init__(self, size):
        self.size, self.place, self.next_start, self.epoch = size, 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.next_start = state["place"]

    def __iter__(self):
        Numbers.opened += 1
        self.place, self.next_start = self.next_start, 0
        return self

    def __next__(self):
        if self.place == self.size:
            raise StopIteration
        self.place += 1
        return self.epoch * 100 + self.place


def test_the_source_is_opened_for_its_first_sample():
    before = Numbers.opened
    reading = SourcePass(Numbers(3))
    assert Numbers.opened == before
    assert reading.take() == 1
    assert Numbers.opened == before + 1


def test_the_state_before_the_first_sample_is_where_it_begins():
    source = Numbers(3)
    list(source)  # it now says that it stands at its end
    assert SourcePass(source).state() is None
    reading = SourcePass(source, state={"row": 2, "source": {"place": 2}})
    assert reading.state() == {"row": 2, "source": {"place": 2}}
    assert reading.take() == 3
    assert reading.state() == {"row": 3, "source": {"place": 3}}
    with pytest.raises(StopIteration):
        reading.take()
    assert reading.has_ended


def test_passes_over_one_source_have_states_of_their_own():
    source = Numbers(5)
    first, second = SourcePass(source), SourcePass(source)
    assert [first.take(), first.take(), second.take()] == [1, 2, 1]
    assert (first.state(), second.state()) == ({"row": 2, "source": {"place": 2}}, {"row": 1, "source": {"place": 1}})


def test_the_source_is_told_the_epoch_if_one_was_set():
    assert SourcePass(Numbers(3), epoch=7).take() == 701
    assert SourcePass([5, 6], epoch=7).take() == 5


def test_a_generator_that_raised_has_ended_and_says_so():
    class Generated:
        def __iter__(self):
            raise ValueError("row 0")
            yield

    reading = SourcePass(Generated())
    with raises(DataError, "ValueError", "0"):
        reading.take()
    assert reading.has_ended
