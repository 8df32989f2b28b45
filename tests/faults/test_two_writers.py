"""kill -9 of either of two ranks that write one checkpoint, before each of its acts: the old or the new one is whole.

An act is one on the file system, or a note to the other rank. The rank that is left gives up, or has committed; it
never stays.
"""

import json
import os
import shutil
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from tests.faults.acts import Acts, telling
from torch.distributed import TCPStore

from trainwright.checkpoint.background import BackgroundSaver
from trainwright.checkpoint.encoding import Encoded, ShardLocation
from trainwright.checkpoint.retention import Retention
from trainwright.checkpoint.snapshot import HostSnapshot
from trainwright.checkpoint.store import CheckpointStore
from trainwright.checkpoint.together import Together
from trainwright.parallel.collectives import Notes

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

AT_A_TIME = 8
"""Cases that run side by side: most of their time a rank waits for one that is dead."""
PATIENCE_SECONDS = 60


class Rendezvous:
    """The store by which ranks find each other, in a process of its own: it survives them all.

    Not in the test process: that forks, and a child of a process with threads may get a lock that nobody frees.
    """

    def __init__(self):
        reading, writing = os.pipe()
        self.process = os.fork()
        if not self.process:
            kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(writing, str(kept.port).encode())
            while True:
                time.sleep(60)
        self.port = int(os.read(reading, 16))
        self.num_cases = 0

    def next_topic(self):
        self.num_cases += 1
        return f"case-{self.num_cases}"

    def join(self):
        return TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=30))

    def close(self):
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


@pytest.fixture(scope="module")
def rendezvous():
    rendezvous = Rendezvous()
    yield rendezvous
    rendezvous.close()


def share_of(rank, version):
    """Two values of one tensor on each rank; all else on the first."""
    pieces = {"w": torch.full((2,), float(version))}
    shards = {"w": ShardLocation((2 * rank,), (4,))}
    parts = {"model": Encoded(None, pieces, shards), "training": Encoded(None, {})}
    if rank == 0:
        tree = {"w": {"$tensor": "w"}, "b": {"$tensor": "b"}}
        values = {**pieces, "b": torch.tensor([version])}
        parts = {"model": Encoded(tree, values, shards), "training": Encoded({"step": version}, {})}
    return HostSnapshot(parts)


def save(rank, store, together, version, *, waits):
    saver = BackgroundSaver(
        store, retention=Retention(keep_last=2), backoff=lambda attempt: 0.0, together=together, max_failures=99
    )
    saver.save(10 * version, share_of(rank, version), metrics={"version": float(version)})
    if waits:
        saver.wait(must_succeed=True)
    saver.close()


def fork_rank(rank, folder, rendezvous, topic, version, *, dies_before=None, is_victim=False):
    """Saves in a child; the victim dies before its act of that number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        notes = Notes(topic, store=rendezvous.join())
        acts = Acts(dies_before, thread_name="save checkpoints")
        if is_victim:
            write = notes.write

            def write_counted(name, text):
                acts.act()
                write(name, text)
                acts.act()

            notes.write = write_counted
            acts.watch()
            acts.is_counting = True
        # Without a victim nobody is to be given up for being slow.
        seconds = {} if dies_before is None else {"lost_seconds": 1.5, "beat_seconds": 0.1}
        save(rank, CheckpointStore(folder), Together(rank, 2, notes, **seconds), version, waits=dies_before is None)
        if is_victim:
            folder.with_name("acts").write_text(json.dumps(acts.kinds))
        code = 0
    finally:
        os._exit(code)


def wait(children):
    until = time.monotonic() + PATIENCE_SECONDS
    codes = {}
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    assert time.monotonic() < until, "a rank was still there"
    return [codes[child] for child in children]


def save_both(folder, rendezvous, version):
    topic = rendezvous.next_topic()
    assert wait([fork_rank(rank, folder, rendezvous, topic, version) for rank in (0, 1)]) == [0, 0]


def version_of(store, step):
    """The version of a checkpoint, every value of which must be of that version."""
    store.verify(step)
    version = store.read(step, "training")["step"]
    model = store.read(step, "model")
    assert torch.equal(model["w"], torch.full((4,), float(version)))
    assert model["b"].tolist() == [version]
    assert store.metrics(step) == {"version": version}
    return version


def check(folder):
    """Returns the newest step; whatever happened, all that bears a step's name is whole."""
    store = CheckpointStore(folder)
    for step in store.steps():
        assert version_of(store, step) == step // 10
    store.clean()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    newest = store.newest_intact()
    assert not list(folder.glob("damaged*"))
    return newest


def kinds_of_acts(victim, template, folder, rendezvous):
    """The kinds of the acts of a rank that nobody kills."""
    shutil.copytree(template, folder, symlinks=True)
    topic = rendezvous.next_topic()
    children = [fork_rank(rank, folder, rendezvous, topic, 2, is_victim=rank == victim) for rank in (0, 1)]
    assert wait(children) == [0, 0]
    assert check(folder) == 20
    return json.loads(folder.with_name("acts").read_text())


@pytest.mark.parametrize("acts", ["telling", pytest.param("other", marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_is_killed_before_any_act_leaves_the_old_or_the_new(victim, acts, tmp_path, rendezvous):
    template = tmp_path / "template"
    save_both(template, rendezvous, 1)
    kinds = kinds_of_acts(victim, template, tmp_path / "counted", rendezvous)
    numbers = telling(kinds) if acts == "telling" else sorted(set(range(len(kinds))) - set(telling(kinds)))
    newest, num_killed = [], 0
    for begin in range(0, len(numbers), AT_A_TIME):
        running = []
        for act in numbers[begin : begin + AT_A_TIME]:
            folder = tmp_path / str(act)
            shutil.copytree(template, folder, symlinks=True)
            topic = rendezvous.next_topic()
            children = [
                fork_rank(rank, folder, rendezvous, topic, 2, dies_before=act, is_victim=rank == victim)
                for rank in (0, 1)
            ]
            running.append((folder, children))
        codes = wait([child for _, children in running for child in children])
        for place, (folder, _) in enumerate(running):
            pair = codes[2 * place : 2 * place + 2]
            assert pair[1 - victim] == 0, "the rank that is left ends in good order"
            assert pair[victim] in (0, -signal.SIGKILL)
            num_killed += pair[victim] != 0
            newest.append(check(folder))
    assert num_killed >= 0.7 * len(numbers)  # on a busy machine one may be given up before its act
    assert set(newest) == {10, 20} or acts == "other"
    assert newest == sorted(newest) or victim == 1  # what the first rank has committed stays so
    save_both(tmp_path / str(numbers[0]), rendezvous, 3)
    assert check(tmp_path / str(numbers[0])) == 30


def test_ranks_that_are_both_killed_lose_nothing(tmp_path, rendezvous):
    folder = tmp_path / "run"
    save_both(folder, rendezvous, 1)
    topic = rendezvous.next_topic()
    children = [
        fork_rank(rank, folder, rendezvous, topic, 2, dies_before=acts, is_victim=True)
        for rank, acts in enumerate((20, 3))
    ]
    assert wait(children) == [-signal.SIGKILL] * 2
    assert check(folder) == 10
    save_both(folder, rendezvous, 3)
    assert check(folder) == 30


def test_a_rank_that_is_stopped_is_given_up_and_may_come_back(tmp_path, rendezvous):
    """It wakes up after the save was given up: its file is nobody's, and the next save is whole."""
    folder = tmp_path / "run"
    stopped, woken, topic = threading.Event(), threading.Event(), rendezvous.next_topic()

    def together_of(rank):
        return Together(rank, 2, Notes(topic, store=rendezvous.join()), lost_seconds=0.5, beat_seconds=0.05)

    class Stopped(CheckpointStore):
        def write_share(self, place, staged, *, rank):
            stopped.set()
            assert woken.wait(30)
            return super().write_share(place, staged, rank=rank)

    first, second = together_of(0), together_of(1)
    second._beat = lambda is_done, save: None  # a process that is stopped says nothing
    other = threading.Thread(target=save, args=(1, Stopped(folder), second, 1), kwargs={"waits": False})
    other.start()
    saver = BackgroundSaver(
        CheckpointStore(folder), retention=Retention(keep_last=2), together=first, backoff=lambda attempt: 0.0
    )
    saver.save(10, share_of(0, 1), metrics={"version": 1.0})
    saver.wait()
    assert stopped.is_set()
    with pytest.raises(Exception, match="Rank 1 has sent no heartbeat"):
        saver.wait(must_succeed=True)
    woken.set()
    other.join()
    saver.close()
    first._notes.close()
    second._notes.close()
    assert CheckpointStore(folder).steps() == []
    save_both(folder, rendezvous, 3)
    assert check(folder) == 30
