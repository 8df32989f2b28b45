"""The training batches as an iterator that can begin anew."""

import pytest
import torch
from tests.loop.small_runs import PLAIN, make

from trainwright.loop.trainer import TrainIterator

STREAM = "data.train={type: tests.project.parts:PointStream, size: 40}"
KINDS = {"with an index": "data.train.size=400", "a stream": STREAM}


@pytest.fixture(params=KINDS)
def trainer(request, tmp_path):
    return make(tmp_path / "run", *PLAIN[:3], KINDS[request.param], "data.train.noise=0.0")


def take(feed, count):
    return [next(feed)["x"].clone() for _ in range(count)]


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_batches_come_in_the_datas_order_and_are_counted(trainer):
    data = trainer.train_data
    with TrainIterator(data, trainer.batches_to_device) as feed:
        assert iter(feed) is feed
        first = take(feed, 3)
        assert data.order_position == 24
    assert not torch.equal(first[0], first[1])


def test_after_going_back_the_same_batches_come_again(trainer):
    data = trainer.train_data
    with TrainIterator(data, trainer.batches_to_device) as feed:
        take(feed, 1)
        state = data.state_dict()
        first = take(feed, 3)
        data.load_state_dict(state)
        feed.restart()
        assert data.order_position == 8
        assert equal(take(feed, 3), first)


def test_after_going_back_what_is_left_out_does_not_come(trainer):
    data = trainer.train_data
    with TrainIterator(data, trainer.batches_to_device) as feed:
        take(feed, 1)
        state = data.state_dict()
        first = take(feed, 3)
        data.load_state_dict(state)
        data.skip_positions(16, 24)
        feed.restart()
        assert equal(take(feed, 2), [first[0], first[2]])
        assert data.order_position == 32


def test_a_feed_that_has_ended_begins_anew_where_the_data_stands(tmp_path):
    trainer = make(tmp_path / "run", *PLAIN[:3], STREAM)
    data = trainer.train_data
    with TrainIterator(data, trainer.batches_to_device) as feed:
        take(feed, 3)
        state = data.state_dict()
        last = take(feed, 2)
        with pytest.raises(StopIteration):
            next(feed)
        data.load_state_dict(state)
        feed.restart()
        assert equal(take(feed, 2), last)


def test_a_feed_that_was_left_gives_nothing_more(trainer):
    with TrainIterator(trainer.train_data, trainer.batches_to_device) as feed:
        take(feed, 1)
    with pytest.raises(StopIteration):
        next(feed)
    assert trainer.train_data.order_position == 8


def test_a_feed_is_closed_when_training_fails(trainer):
    feed = TrainIterator(trainer.train_data, trainer.batches_to_device)

    def fail():
        with feed:
            take(feed, 1)
            raise ValueError("the step failed")

    with pytest.raises(ValueError, match="the step failed"):
        fail()
    with pytest.raises(StopIteration):
        next(feed)
