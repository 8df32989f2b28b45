"""How ranks agree to leave: the strongest request counts, whenever it comes, and all obey at the same step."""

import json
import os
import signal
import threading

import pytest
import torch.distributed as dist
from tests.faults.runs import fork

from trainwright.loop.stop_signal import StopRequest, StopSignal
from trainwright.parallel.collectives import Ranks


def alone():
    stop_signal = StopSignal(Ranks())
    stop_signal.begin()
    return stop_signal


def test_nobody_who_requests_nothing_leaves():
    stop_signal = alone()
    assert stop_signal.vote(3, True) == (3, True)
    assert (stop_signal.decided, stop_signal.reason, stop_signal.must_leave_now()) == (StopRequest.NONE, None, False)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_strongest_request_counts_in_whatever_order_they_come(order):
    requests = [(StopRequest.STOP, "enough"), (StopRequest.INTERRUPT, "SIGTERM"), (StopRequest.FAIL, "saving failed")]
    stop_signal = alone()
    for number in order:
        stop_signal.request(*requests[number])
    stop_signal.vote(0, False)
    assert (stop_signal.decided, stop_signal.reason) == (StopRequest.FAIL, "saving failed")


def test_of_equal_requests_the_first_is_the_reason():
    stop_signal = alone()
    stop_signal.request(StopRequest.INTERRUPT, "SIGUSR1")
    stop_signal.request(StopRequest.INTERRUPT, "SIGTERM")
    stop_signal.compare_now()
    assert (stop_signal.decided, stop_signal.reason) == (StopRequest.INTERRUPT, "SIGUSR1")


def test_what_was_decided_is_not_taken_back():
    stop_signal = alone()
    stop_signal.decide(StopRequest.INTERRUPT)
    stop_signal.request(StopRequest.STOP, "enough")
    stop_signal.vote(0, False)
    stop_signal.compare_now()
    assert stop_signal.decided == StopRequest.INTERRUPT


class InTheMidst(int):
    """A request in the midst of whose noting a signal comes: where it is first compared, or its hash asked for."""

    has_come = False

    def _let_come(self):
        if not self.has_come:
            self.has_come = True
            signal.raise_signal(signal.SIGUSR1)

    def __hash__(self):
        self._let_come()
        return int.__hash__(self)

    def __gt__(self, other):
        is_stronger = int(self) > other
        self._let_come()
        return is_stronger


def test_a_signal_in_the_midst_of_a_request_loses_neither():
    stop_signal = alone()
    before = signal.signal(signal.SIGUSR1, lambda *_: stop_signal.request(StopRequest.INTERRUPT, "SIGUSR1"))
    try:
        stop_signal.request(InTheMidst(StopRequest.STOP), "no improvement")
    finally:
        signal.signal(signal.SIGUSR1, before)
    stop_signal.vote(0, False)
    assert (stop_signal.decided, stop_signal.reason) == (StopRequest.INTERRUPT, "SIGUSR1")


def test_a_request_may_come_from_any_thread():
    stop_signal = alone()
    requesting = [
        threading.Thread(target=stop_signal.request, args=(request, request.name))
        for request in StopRequest
        for _ in range(8)
    ]
    for each in requesting:
        each.start()
    for each in requesting:
        each.join()
    assert stop_signal.reason == "FAIL"


def test_only_who_is_told_to_leave_at_once_leaves_a_long_act():
    stop_signal = alone()
    stop_signal.request(StopRequest.STOP, "enough")
    assert not stop_signal.must_leave_now()
    stop_signal.request(StopRequest.INTERRUPT, "SIGTERM")
    assert stop_signal.must_leave_now()


def two_ranks(folder, act):
    """Calls `act(stop_signal, rank)` in two children that are ranks of one run; returns what it returned on each."""

    def life(rank):
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
        ranks = Ranks(rank, 2, control=dist.new_group(backend="gloo"))
        stop_signal = StopSignal(ranks)
        stop_signal.begin()
        (folder / f"{rank}.json").write_text(json.dumps(act(stop_signal, rank)))
        ranks.part()
        dist.destroy_process_group()

    children = [fork(lambda rank=rank: life(rank), folder / f"rank-{rank}") for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = [(folder / f"rank-{rank}.stderr").read_text("utf-8") for rank in range(2)]
    assert codes == [0, 0], said
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


@pytest.mark.parametrize("told", [0, 1])
def test_a_request_of_one_rank_is_obeyed_by_all_one_vote_later_and_its_reason_is_known_to_all(told, tmp_path):
    def act(stop_signal, rank):
        decided = []
        for step in range(4):
            if (step, rank) == (1, told):
                stop_signal.request(StopRequest.INTERRUPT, "SIGTERM")
            stop_signal.vote(0, False)
            decided.append(stop_signal.decided)
        stop_signal.share_reason()
        return [decided, stop_signal.reason]

    go_on, leave = StopRequest.NONE, StopRequest.INTERRUPT
    assert two_ranks(tmp_path, act) == [[[go_on, go_on, leave, leave], "SIGTERM"]] * 2


def test_a_vote_brings_the_highest_save_and_any_clock_one_vote_later(tmp_path):
    answers = two_ranks(tmp_path, lambda stop_signal, rank: [stop_signal.vote(5 * rank, rank == 0) for _ in range(2)])
    assert answers == [[[0, False], [5, True]]] * 2


def test_where_ranks_meet_they_decide_at_once(tmp_path):
    def act(stop_signal, rank):
        if rank == 1:
            stop_signal.request(StopRequest.STOP, "no improvement")
        stop_signal.compare_now()
        return stop_signal.decided

    assert two_ranks(tmp_path, act) == [StopRequest.STOP] * 2


def test_a_rank_that_is_told_to_leave_lets_the_others_know_without_their_rendezvous(tmp_path):
    def act(stop_signal, rank):
        if rank == 1:
            stop_signal.request(StopRequest.INTERRUPT, "SIGTERM")
            assert stop_signal.must_leave_now()
        stop_signal._ranks.barrier()
        return stop_signal.must_leave_now()

    assert two_ranks(tmp_path, act) == [True, True]
