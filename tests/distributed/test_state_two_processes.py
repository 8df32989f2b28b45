"""Two ranks with state of their own, and without a dataset: as one process, and exactly resumed."""

import json
import logging

import pytest
import torch
from tests.distributed import state_cases
from tests.distributed.forked_launch import launch_well
from tests.messages import mentions, raises

from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders that one process and two processes leave, of one launch each."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    state_cases.main(one)
    launch_well(two, 2, state_cases.main)
    return one, two


@pytest.fixture(scope="module")
def results(folders):
    return [json.loads((folder / "results.json").read_text()) for folder in folders]


@pytest.mark.parametrize("name", ["made", "split", "parts", "graph", "fsdp", "fsdp-graph"])
def test_batches_of_unequal_size_weigh_as_in_one_process(results, name):
    (expected, samples, _), (found, counted, _) = results[0]["made"], results[1][name]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert samples == counted == 4 * 8


def test_all_ranks_run_as_many_micro_batches_as_the_largest_batch_needs(results):
    assert [results[number]["split"][2] for number in (0, 1)] == [4, 3]  # of 8, and of 3 and 5


def test_a_rank_that_ends_ends_all(results):
    assert results[1]["ends"] == [[2, True], [2, True]]


def test_a_wrong_number_of_samples_raises_on_every_rank(results):
    for text in results[1]["fixed"]:
        assert mentions(
            text, "DataError", "trainer.global_batch_size", "4 for each of 2 data ranks", "3 on data rank 0"
        )


def test_the_first_rank_is_the_main_process(results):
    assert results[1]["is_main_process"] == [True, False]


def test_a_barrier_waits_for_every_rank(results):
    assert results[1]["barrier"] == [True, True]


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_each_rank_resumes_exactly_with_its_own_state(results, layout):
    is_same, (first, second) = results[1][layout]
    assert is_same
    assert first != second


def saved_state(folder, name):
    store = CheckpointStore(folder / name / "checkpoints")
    return store.read(store.steps()[-1], "training")["trainer"]


def test_what_is_equal_on_all_ranks_is_stored_once(folders):
    saved = saved_state(folders[1], "replicated-whole")
    assert saved["num_ranks"] == 2
    assert saved["shared"].keys() == {"nested", "copy", "step"}
    assert saved["shared"]["nested"] == {"name": "all"}
    assert saved["shared"]["copy"].keys() == {"layers.0.bias"}
    assert [list(each) for each in saved["by_rank"]] == [["nested"], ["nested"]]
    assert not torch.equal(*(each["nested"]["hidden"] for each in saved["by_rank"]))
    assert saved_state(folders[1], "shared") == {"num_ranks": 2, "shared": {"step": 2}, "by_rank": []}


def test_state_that_differs_between_ranks_needs_as_many_ranks(folders, caplog):
    with raises(CheckpointError, "Carried.state_dict()", "nested", 2, "this run has 1", "--accept-changes"):
        state_cases.resume(folders[1], "alone", state_cases.Carried)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer = state_cases.resume(folders[1], "alone", state_cases.Carried, accept_changes=True)
    assert mentions(caplog.text, "Carried.state_dict()", "modulo 2")
    saved = saved_state(folders[1], "alone")
    assert torch.equal(trainer.hidden, saved["by_rank"][0]["nested"]["hidden"])
    assert trainer.loaded == 2


def test_state_that_is_equal_on_all_ranks_is_loaded_by_any_number(folders, caplog):
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        assert state_cases.resume(folders[1], "shared", state_cases.Shared).loaded == 2
    assert "state_dict" not in caplog.text


def test_the_state_of_one_rank_is_loaded_by_each_of_two(folders, tmp_path):
    def act(folder):
        log = logging.getLogger("trainwright")
        log.addHandler(logging.FileHandler(folder / "log.txt"))
        trainer = state_cases.resume(folders[0], "alone", state_cases.Carried)
        states = trainer.ranks.gather(trainer.hidden.tolist())
        if trainer.is_main_process:
            (folder / "states.json").write_text(json.dumps(states))

    launch_well(tmp_path, 2, act)
    first, second = json.loads((tmp_path / "states.json").read_text())
    assert first == second == saved_state(folders[0], "alone")["shared"]["nested"]["hidden"].tolist()
    assert mentions((tmp_path / "log.txt").read_text(), "Carried.state_dict()", "one data rank", "2 ranks")
