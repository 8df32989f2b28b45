"""Nothing in a checkpoint is there for nothing: a run that goes on without one item ends otherwise, or is rejected.

The items are read from a real checkpoint, so that a new one that no case here feels fails the test. An item is taken
away in two ways: it is missing, or it is what a run has that has not begun. Three runs, in which everything matters:
one that is killed, one whose evaluation fails, one that is stopped.
"""

import copy
import random
import shutil
import signal

import numpy as np
import pytest
from tests.faults.hooks import At, kill_at
from tests.faults.runs import config_of, copy_run, differences, store_of, train, what_is_left

from trainwright import Hook, build_trainer
from trainwright.build.components import Build
from trainwright.checkpoint.store import CheckpointStore

# In fp16 there is a loss scale, on the CPU too; the nan of batch 2 halves it, and is an anomaly that is skipped.
SETTINGS = (
    *("model.type=tests.faults.parts:HurtNet", "data.train={type: tests.faults.parts:HurtPoints, hurt: [2]}"),
    *("data.eval.valid={type: tests.faults.parts:HurtPoints, num_batches: 3}", "data.shuffle=false"),
    *("anomalies.non_finite=skip", "anomalies.spike=skip", "anomalies.spike_window=8", "runtime.precision=fp16"),
    *("hooks=[{type: ema, decay: 0.8}]", "trainer.max_steps=9", "checkpoint.every_steps=4"),
    *("model.freeze={match: layers.3.*, until_step: 2}", "checkpoint.keep_last=null"),
    "trainer.schedule={type: reduce_on_plateau, metric: valid/loss, patience: 0, threshold: 0.9}",
    "log.every_epochs=0.15",  # 0.15 epochs end in step 3, none in step 4
)
STEP = 4


class Restless(Hook):
    """Draws from the generators that nobody seeds at each step, and changes a setting of the optimizer."""

    def before_epoch(self):
        self.trainer.storage.put_scalar("begun", self.trainer.epoch)

    def after_step(self):
        self.trainer.storage.put_scalar("drawn", random.random() + float(np.random.rand()))
        if self.trainer.step == 3:
            self.trainer.optimizers["main"].param_groups[0]["weight_decay"] = 0.3


def failing_trainer(config):
    class EvaluationFails(Build(config).trainer_class()):
        def eval_step(self, batch):
            raise RuntimeError("no evaluation today")

    return EvaluationFails


def be_killed(run):
    assert train(run, *SETTINGS, "checkpoint.asynchronous=false", hooks=[Restless(), kill_at(6)]) == -signal.SIGKILL


def fail_to_evaluate(run):
    trainer = failing_trainer(config_of(run, *SETTINGS))
    assert train(run, *SETTINGS, hooks=[Restless()], trainer=trainer) == 1


def be_stopped(run):
    assert train(run, *SETTINGS, hooks=[Restless(), At(STEP, lambda trainer: trainer.stop("enough"))]) == 0


CASES = {"killed": be_killed, "evaluation failed": fail_to_evaluate, "stopped": be_stopped}


class Case:
    """A run that has left a checkpoint, and how it ends if it goes on with all of it."""

    def __init__(self, folder, begin):
        self.run, self.begun = folder / "run", folder / "begun"
        begin(self.run)
        assert store_of(self.run).steps()[-1] == STEP
        self.parts = {part: store_of(self.run).read(STEP, part) for part in store_of(self.run).parts(STEP)}
        copy_run(self.run, self.begun)
        assert self.go_on() == 0
        self.end = what_is_left(self.run)

    def go_on(self, prepare=None):
        """Goes on in the same folder, for a run that has ended may go on in another one."""
        shutil.rmtree(self.run)
        copy_run(self.begun, self.run)
        return train(self.run, *SETTINGS, hooks=[Restless()], prepare=prepare)

    def goes_on_alike(self, prepare):
        """Goes on with a checkpoint that `prepare` has taken something from; says whether nobody can tell."""
        return self.go_on(prepare) == 0 and not differences(self.end, what_is_left(self.run))


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return [Case(tmp_path_factory.mktemp("case"), begin) for begin in CASES.values()]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The parts of a run that has not begun."""
    generators = random.getstate(), np.random.get_state()
    trainer = build_trainer(config_of(tmp_path_factory.mktemp("fresh") / "run", *SETTINGS))
    parts = copy.deepcopy(trainer._collect_state())
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    return parts


def items_of(parts):
    """The paths of the parts, of what they hold, and of what that holds; of the ranks' lists the first entry."""
    for part, content in parts.items():
        yield (part,)
        if part != "model":
            for key, value in content.items():
                if key == "averaged":  # for load_checkpoint and export, not for a resumed run: tests/export
                    continue
                yield (part, key)
                inner = value[0] if isinstance(value, list) else value
                if isinstance(inner, dict):
                    yield from ((part, key, *([0] if isinstance(value, list) else []), name) for name in inner)


def value_at(tree, path):
    for key in path:
        tree = tree[key] if isinstance(tree, list) or key in tree else None
    return tree


def without(path):
    """In a child: every checkpoint that is read lacks an item."""

    def take_away(state):
        del value_at(state, path[1:-1])[path[-1]]

    return lambda: change_what_is_read(path[0], take_away)


def with_value(path, value):
    """In a child: every checkpoint that is read has another value for an item."""

    def put(state):
        if len(path) > 1:
            value_at(state, path[1:-1])[path[-1]] = copy.deepcopy(value)
            return state
        return copy.deepcopy(value)

    return lambda: change_what_is_read(path[0], put)


def change_what_is_read(changed_part, change):
    read = CheckpointStore.read_split

    def changed_read(self, step, part, **arguments):
        state = read(self, step, part, **arguments)
        if part != changed_part:
            return state
        replaced = change(state)
        return state if replaced is None else replaced

    CheckpointStore.read_split = changed_read


def is_nothing(value):
    return value is None or (isinstance(value, dict) and not value)


def test_a_run_that_goes_on_without_any_one_item_of_its_checkpoint_ends_otherwise(cases, fresh, tried):
    matters = {}
    items = dict.fromkeys(path for case in cases for path in items_of(case.parts))
    for path in items:
        untouched = value_at(fresh, path)
        for case in cases:
            saved = value_at(case.parts, path)
            is_same = (is_nothing(saved) and is_nothing(untouched)) or not differences(saved, untouched)
            if not is_same and not matters.get(path):
                matters[path] = not case.goes_on_alike(with_value(path, untouched))
    useless = [path for path, does_matter in matters.items() if not does_matter]
    assert not useless, f"nobody can tell whether these were saved: {useless}"
    # What never changes in a run need not be felt one level down; what contents.py lists must be.
    constant = [path for path in items if path not in matters and len(path) <= 2]
    assert not constant, f"no case here changes these: {constant}"
    assert len(matters) > 20
    tried("a checkpoint with a missing item", cases=len(matters))


def test_a_checkpoint_that_lacks_an_item_is_rejected(cases, tried):
    items = [path for path in items_of(cases[0].parts) if len(path) == 2]
    for path in items:
        assert not cases[0].goes_on_alike(without(path)), path
    tried("a checkpoint with a missing item", cases=len(items))
