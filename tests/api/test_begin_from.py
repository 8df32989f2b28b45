"""--load in --mode pretrain: a copy is the run's own only when the run has begun from it."""

import shutil
from pathlib import Path

import pytest
from tests.api.function_runs import lines, run, same, weights
from tests.messages import raises

from trainwright.api.training_main import copied_start
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config import RunConfig
from trainwright.errors import CheckpointError

STEADY = ("--lr-decay-style", "constant", "--warmup", "0")


@pytest.fixture(autouse=True)
def _in_tmp(in_tmp):
    """Runs land in an empty folder."""


def make(name, seed="1"):
    return weights(run("--train-iters", "2", *STEADY, "--seed", seed, "--experiment-name", name))


def go_on(load, *words):
    return run("--train-iters", "3", *STEADY, "--experiment-name", "rest", "--load", load, *words)


def test_a_rejected_load_leaves_nothing_behind():
    make("one")
    with raises(CheckpointError):
        go_on("runs/one", "--seed", "1", "--lr", "0.5")
    assert not Path("runs/rest").exists()
    run("--train-iters", "1", "--experiment-name", "rest")  # begins at step 0, not with the copy
    assert [line["step"] for line in lines("rest")] == [1]


def test_another_load_after_a_rejected_one_is_accepted():
    make("one"), make("two", seed="2")
    with raises(CheckpointError):
        go_on("runs/one", "--seed", "2")
    two = weights(go_on("runs/two", "--seed", "2"))
    shutil.rmtree("runs/rest")
    assert same(two, weights(go_on("runs/two", "--seed", "2")))


def test_the_copy_of_a_killed_process_is_not_used_as_a_checkpoint_of_the_run():
    make("one"), make("two", seed="2")
    config = RunConfig.from_dict({"name": "rest", "output_dir": "runs"})
    with copied_start(Path("runs/one"), config):
        assert CheckpointStore(Path("runs/rest/checkpoints")).steps() == [2]
    # It ended there: nothing has been built, and nobody took the copy away.
    go_on("runs/two", "--seed", "2")
    assert [line["step"] for line in lines("rest")] == [3]


def test_the_same_load_resumes_and_another_one_is_rejected_by_name():
    make("one"), make("two", seed="1")
    go_on("runs/one", "--seed", "1")
    shutil.rmtree("runs/one")  # what was copied is needed no more
    go_on("runs/one", "--seed", "1", "--train-iters", "4")
    assert [line["step"] for line in lines("rest")] == [3, 4]
    with raises(CheckpointError, "--load", "runs/two", "4"):
        go_on("runs/two", "--seed", "1", "--train-iters", "5")
    with raises(CheckpointError, "0", "2"):
        run("--train-iters", "3", *STEADY, "--seed", "1", "--experiment-name", "two", "--load", "runs/rest")
