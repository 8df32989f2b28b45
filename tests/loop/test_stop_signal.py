"""How ranks agree to leave: the strongest request counts, whenever it comes, and all obey at the same step."""

import json
import os
import signal
import threading

import pytest
import torch.distributed as dist
from tests.faults.runs import fork

from trainwright.loop.stop_signal import Agreement, Intent
from trainwright.parallel.collectives import Ranks


def alone():
    agreement = Agreement(Ranks())
    agreement.begin()
    return agreement


def test_nobody_who_requests_nothing_leaves():
    agreement = alone()
    assert agreement.vote(3, True) == (3, True)
    assert (agreement.decided, agreement.reason, agreement.is_stop_requested()) == (Intent.GO_ON, None, False)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_strongest_request_counts_in_whatever_order_they_come(order):
    requests = [(Intent.STOP, "enough"), (Intent.INTERRUPT, "SIGTERM"), (Intent.FAIL, "saving failed")]
    agreement = alone()
    for number in order:
        agreement.request(*requests[number])
    agreement.vote(0, False)
    assert (agreement.decided, agreement.reason) == (Intent.FAIL, "saving failed")


def test_of_equal_requests_the_first_is_the_reason():
    agreement = alone()
    agreement.request(Intent.INTERRUPT, "SIGUSR1")
    agreement.request(Intent.INTERRUPT, "SIGTERM")
    agreement.settle()
    assert (agreement.decided, agreement.reason) == (Intent.INTERRUPT, "SIGUSR1")


def test_what_was_decided_is_not_taken_back():
    agreement = alone()
    agreement.decided = Intent.INTERRUPT
    agreement.request(Intent.STOP, "enough")
    agreement.vote(0, False)
    agreement.settle()
    assert agreement.decided == Intent.INTERRUPT


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
    agreement = alone()
    before = signal.signal(signal.SIGUSR1, lambda *_: agreement.request(Intent.INTERRUPT, "SIGUSR1"))
    try:
        agreement.request(InTheMidst(Intent.STOP), "no improvement")
    finally:
        signal.signal(signal.SIGUSR1, before)
    agreement.vote(0, False)
    assert (agreement.decided, agreement.reason) == (Intent.INTERRUPT, "SIGUSR1")


def test_a_request_may_come_from_any_thread():
    agreement = alone()
    wishing = [
        threading.Thread(target=agreement.request, args=(intent, intent.name)) for intent in Intent for _ in range(8)
    ]
    for each in wishing:
        each.start()
    for each in wishing:
        each.join()
    assert agreement.reason == "FAIL"


def test_only_who_is_told_to_leave_at_once_leaves_a_long_act():
    agreement = alone()
    agreement.request(Intent.STOP, "enough")
    assert not agreement.is_stop_requested()
    agreement.request(Intent.INTERRUPT, "SIGTERM")
    assert agreement.is_stop_requested()


def two_ranks(folder, act):
    """Calls `act(agreement, rank)` in two children that are ranks of one run; returns what it returned on each."""

    def life(rank):
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
        ranks = Ranks(rank, 2, control=dist.new_group(backend="gloo"))
        agreement = Agreement(ranks)
        agreement.begin()
        (folder / f"{rank}.json").write_text(json.dumps(act(agreement, rank)))
        ranks.part()
        dist.destroy_process_group()

    children = [fork(lambda rank=rank: life(rank), folder / f"rank-{rank}") for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = [(folder / f"rank-{rank}.stderr").read_text("utf-8") for rank in range(2)]
    assert codes == [0, 0], said
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


@pytest.mark.parametrize("told", [0, 1])
def test_a_request_of_one_rank_is_obeyed_by_all_one_vote_later_and_its_reason_is_known_to_all(told, tmp_path):
    def act(agreement, rank):
        decided = []
        for step in range(4):
            if (step, rank) == (1, told):
                agreement.request(Intent.INTERRUPT, "SIGTERM")
            agreement.vote(0, False)
            decided.append(agreement.decided)
        agreement.share_reason()
        return [decided, agreement.reason]

    go_on, leave = Intent.GO_ON, Intent.INTERRUPT
    assert two_ranks(tmp_path, act) == [[[go_on, go_on, leave, leave], "SIGTERM"]] * 2


def test_a_vote_brings_the_highest_save_and_any_clock_one_vote_later(tmp_path):
    answers = two_ranks(tmp_path, lambda agreement, rank: [agreement.vote(5 * rank, rank == 0) for _ in range(2)])
    assert answers == [[[0, False], [5, True]]] * 2


def test_where_ranks_meet_they_decide_at_once(tmp_path):
    def act(agreement, rank):
        if rank == 1:
            agreement.request(Intent.STOP, "no improvement")
        agreement.settle()
        return agreement.decided

    assert two_ranks(tmp_path, act) == [Intent.STOP] * 2


def test_a_rank_that_is_told_to_leave_lets_the_others_know_without_their_rendezvous(tmp_path):
    def act(agreement, rank):
        if rank == 1:
            agreement.request(Intent.INTERRUPT, "SIGTERM")
            assert agreement.is_stop_requested()
        agreement._ranks.barrier()
        return agreement.is_stop_requested()

    assert two_ranks(tmp_path, act) == [True, True]
