"""When garbage is collected."""

import gc
import weakref

import pytest
from tests.loop.small_runs import PLAIN, make

from trainwright import Trainer
from trainwright.backends.host_memory import FIRST_STEPS, FULL_EVERY, MAX_STEPS, GarbageCollection


class Cycle:
    """An object that only the collector can free."""

    def __init__(self):
        self.me = self


@pytest.fixture(autouse=True)
def _collector_as_before(monkeypatch):
    assert gc.isenabled()
    monkeypatch.setattr(gc, "get_freeze_count", gc.get_freeze_count.__wrapped__)
    gc.unfreeze()  # what the session has set aside
    yield
    gc.enable()
    gc.freeze()


def num_alive(references):
    return sum(reference() is not None for reference in references)


def make_cycles(number):
    return [weakref.ref(Cycle()) for _ in range(number)]


def test_garbage_is_collected_between_steps_when_due():
    with GarbageCollection() as garbage:
        cycles = make_cycles(3 * gc.get_threshold()[0])
        garbage.tidy(is_due=False)
        assert num_alive(cycles) == len(cycles)
        garbage.tidy(is_due=True)
        assert num_alive(cycles) == 0


def test_memory_does_not_grow_if_nothing_is_ever_due():
    alive = []
    with GarbageCollection() as garbage:
        cycles = []
        for _ in range(FIRST_STEPS + 5 * MAX_STEPS):
            cycles += make_cycles(1)
            garbage.tidy(is_due=False)
            alive.append(num_alive(cycles))
    assert max(alive) == MAX_STEPS - 1
    assert alive[FIRST_STEPS - 1] == alive[-1] == 0


def test_older_cycles_are_freed_too():
    with GarbageCollection() as garbage:
        garbage.tidy(is_due=True)
        kept = Cycle()
        garbage.tidy(is_due=True)
        old = [weakref.ref(kept)]
        del kept
        garbage.tidy(is_due=True)
        assert num_alive(old) == 1
        for _ in range(FULL_EVERY - 3):
            garbage.tidy(is_due=True)
        assert num_alive(old) == 0


def test_existing_objects_are_frozen_and_unfrozen():
    with GarbageCollection() as garbage:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        garbage.tidy(is_due=True)
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_objects_frozen_by_python_do_not_count(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # as Python 3.12 begins
    before = [[]]
    with GarbageCollection():
        assert not any(each is before for each in gc.get_objects())


def test_objects_after_the_first_collection_are_frozen_too():
    with GarbageCollection() as garbage:
        compiled = [[] for _ in range(1000)]
        garbage.tidy(is_due=True)
        assert not any(each is compiled for each in gc.get_objects())
        later = [[]]
        garbage.tidy(is_due=True)
        assert any(each is later for each in gc.get_objects())


def test_a_long_run_starts_with_a_full_collection():
    kept = Cycle()
    gc.collect(1)  # it is among the oldest objects now
    old = [weakref.ref(kept)]
    del kept
    with GarbageCollection(num_steps=10):
        assert num_alive(old) == 1
    with GarbageCollection(num_steps=1000):
        assert num_alive(old) == 0


def test_a_disabled_collector_stays_disabled():
    gc.disable()
    with GarbageCollection() as garbage:
        cycles = make_cycles(1)
        garbage.tidy(is_due=True)
        assert num_alive(cycles) == 1
        assert gc.get_freeze_count() == 0
    assert not gc.isenabled()


def test_objects_frozen_by_the_program_stay_frozen():
    gc.freeze()
    before = gc.get_freeze_count()
    with GarbageCollection() as garbage:
        garbage.tidy(is_due=True)
    assert gc.get_freeze_count() == pytest.approx(before, abs=50)


def test_an_error_in_a_run_restores_the_collector():
    with pytest.raises(OSError, match="lost"), GarbageCollection():
        raise OSError("lost")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_training_run_collects_only_at_its_log_steps(tmp_path):
    class Leaking(Trainer):
        cycles, seen = [], []

        def train_step(self, batch):
            self.seen.append((gc.isenabled(), num_alive(self.cycles)))
            self.cycles += make_cycles(2000)
            return super().train_step(batch)

    make(tmp_path / "run", *PLAIN, "trainer.max_steps=8", "log.every_steps=4", trainer=Leaking).train()
    assert Leaking.seen == [(False, 2000 * (step % 4)) for step in range(8)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_run_that_seldom_logs_collects_early_and_then_every_twenty_steps(tmp_path):
    class Leaking(Trainer):
        cycles, alive = [], []

        def train_step(self, batch):
            self.alive.append(num_alive(self.cycles))
            self.cycles += make_cycles(1)
            return super().train_step(batch)

    make(tmp_path / "run", *PLAIN, "trainer.max_steps=50", "log.every_steps=50", trainer=Leaking).train()
    later = [step % MAX_STEPS for step in range(50 - FIRST_STEPS)]
    assert Leaking.alive == [*range(FIRST_STEPS), *later]


def test_an_evaluation_collects_every_twenty_batches(tmp_path):
    class Leaking(Trainer):
        cycles, alive = [], []

        def eval_step(self, batch):
            self.alive.append(num_alive(self.cycles))
            self.cycles += make_cycles(1)
            return super().eval_step(batch)

    settings = ("data.eval.valid.size=400", "evaluation.batch_size=8", "trainer.max_steps=1", "log.every_steps=1")
    make(tmp_path / "run", *settings, trainer=Leaking).train()
    assert len(Leaking.alive) == 50
    assert max(Leaking.alive) == MAX_STEPS - 1


def test_workers_collect_their_own_garbage(tmp_path):
    (tmp_path / "own.py").write_text(
        "import gc, torch\n"
        "class Own(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, i): return {'x': torch.full((4,), float(gc.isenabled())), 'labels': 0}\n"
    )
    seen = []

    class Looking(Trainer):
        def train_step(self, batch):
            seen.append(batch["x"].min().item())
            return super().train_step(batch)

    workers = ("data.num_workers=1", f"data.train={{type: {tmp_path}/own.py:Own}}", "trainer.max_steps=2")
    make(tmp_path / "run", "data.eval={}", "evaluation={}", *workers, trainer=Looking).train()
    assert seen == [1.0, 1.0]
