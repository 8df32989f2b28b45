"""kill -9 before every act of a save, and of a start, of a real run: the same command goes on as if nothing had been.

A child counts its acts on the file system and kills itself before the n-th; the parent tries every n.
"""

import json
import signal

import pytest
from tests.faults.acts import Acts, telling
from tests.faults.hooks import AfterSave, die, kill_at
from tests.faults.runs import assert_same_end, copy_run, store_of, train

from trainwright import Hook

NUM_SHARES = 4  # as many tests, which the workers of xdist share
SHARES = [
    # Each share has every fourth act, so that two of them have each kind.
    *(("asynchronous", "telling", share) for share in (0, 2)),
    ("synchronous", "telling", 1),
    *(pytest.param("asynchronous", "telling", share, marks=pytest.mark.slow) for share in (1, 3)),
    *(pytest.param("synchronous", "telling", share, marks=pytest.mark.slow) for share in (0, 2, 3)),
    *(pytest.param(saving, "other", 0, marks=pytest.mark.slow) for saving in ("asynchronous", "synchronous")),
]


def numbers_of(acts, kinds):
    """The numbers of those acts that tell, or of the others; both lists are a part of the whole."""
    told = telling(kinds)
    assert 0 < len(told) < len(kinds)
    return told if acts == "telling" else sorted(set(range(len(kinds))) - set(told))


class CountSave(Hook):
    """Counts the acts from the end of step 4 to that of step 5, in the thread that saves."""

    def __init__(self, acts):
        self.acts = acts

    def before_train(self):
        self.acts.watch()

    def after_step(self):
        if self.trainer.step in (4, 5):
            self.trainer._finish_save()  # the save before is not counted, and step 4's is counted to its end
            self.acts.is_counting = self.trainer.step == 4

    def after_train(self):
        (self.trainer.folder / "acts").write_text(json.dumps(self.acts.kinds))


@pytest.mark.parametrize(("saving", "acts", "share"), SHARES)
def test_a_run_killed_before_any_act_of_a_save_ends_as_if_nothing_had_happened(saving, acts, share, tmp_path, tried):
    # One is kept, so that the one before is deleted in this save too.
    settings = ("checkpoint.keep_last=1", f"checkpoint.asynchronous={str(saving == 'asynchronous').lower()}")
    thread = "save checkpoints" if saving == "asynchronous" else "MainThread"
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    assert train(whole, *settings, hooks=[CountSave(Acts(None, thread_name=thread))]) == 0
    kinds = json.loads((whole / "acts").read_text())
    assert len(kinds) > 70
    assert train(begun, *settings, "checkpoint.asynchronous=false", hooks=[kill_at(3)]) == -signal.SIGKILL
    numbers = numbers_of(acts, kinds)[share :: NUM_SHARES if acts == "telling" else 1]
    found = []
    for number in numbers:
        run = copy_run(begun, tmp_path / f"act-{number}")
        assert train(run, *settings, hooks=[CountSave(Acts(number, thread_name=thread))]) == -signal.SIGKILL
        found.append(4 in store_of(run).steps())
        assert train(run, *settings) == 0
        assert_same_end(whole, run)
        assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith((".", "damaged"))]
    assert found == sorted(found)  # none before the commit, and from there on one
    assert set(found) == {False, True}
    tried("kill -9 before each file operation of a save (open, write, sync, rename, link, removal)", cases=len(numbers))


class EndOfStart(Hook):
    """Ends the counting when the run begins to train."""

    def __init__(self, acts):
        self.acts = acts

    def before_train(self):
        self.acts.is_counting = False

    def after_train(self):
        (self.trainer.folder / "acts").write_text(json.dumps(self.acts.kinds))


def start_counted(run, number, *settings):
    acts = Acts(number)

    def watch():
        acts.watch()
        acts.is_counting = True

    return train(run, *settings, hooks=[EndOfStart(acts)], prepare=watch)


@pytest.mark.parametrize("acts", ["telling", pytest.param("other", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_begun", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_killed_before_any_act_of_its_start_ends_as_if_nothing_had_happened(is_begun, acts, tmp_path, tried):
    whole, begun, longer = tmp_path / "whole", tmp_path / "begun", "trainer.max_steps=7"
    settings = (longer,)
    assert start_counted(whole, None, *settings) == 0
    kinds = json.loads((whole / "acts").read_text())
    if is_begun:
        # A start with much to do: another limit, a damaged checkpoint, half a save, lines of the log that go.
        def damage(path):
            (path / "model.safetensors").write_bytes(b"")
            (path.parent / ".staging-step-00000006-0a0b0c0d").mkdir()
            (path.parent / ".staging-step-00000006-0a0b0c0d" / "model.json").touch()
            die()

        constant = "trainer.schedule={type: constant}"  # the cosine's rates depend on where the run ends
        settings = (longer, constant)
        assert train(tmp_path / "constant", *settings) == 0
        whole = tmp_path / "constant"
        assert train(begun, constant, "checkpoint.asynchronous=false", hooks=[AfterSave(4, damage)]) == -signal.SIGKILL
        counted = copy_run(begun, tmp_path / "counted")
        assert start_counted(counted, None, *settings) == 0
        kinds = json.loads((counted / "acts").read_text())
    assert len(kinds) > (15 if is_begun else 8)
    numbers = numbers_of(acts, kinds)
    for number in numbers:
        run = tmp_path / f"act-{number}"
        if is_begun:
            copy_run(begun, run)
        assert start_counted(run, number, *settings) == -signal.SIGKILL
        assert train(run, *settings) == 0
        assert_same_end(whole, run)
        assert not list((run / "checkpoints").glob(".*"))
    tried("kill -9 before each file operation of a start, fresh or resumed", cases=len(numbers))
