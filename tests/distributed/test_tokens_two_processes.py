"""Two ranks with different numbers of labels make the update of one process."""

import json

import pytest
from tests.distributed import token_cases
from tests.distributed.forked_launch import launch_well

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launch_well(folder, 2, token_cases.main)
    return folder


def test_the_first_step_is_that_of_one_process(folder, tmp_path):
    for number, (kind, settings) in enumerate(token_cases.MODELS.items()):
        ((one,), (two,)) = (
            token_cases.train(tmp_path, f"model-{number}", {"type": kind, **settings}, micro_batch_size=8),
            token_cases.read_log(folder, f"model-{number}"),
        )
        assert (two["loss"], two["grad_norm"]) == pytest.approx((one["loss"], one["grad_norm"]), rel=1e-5), kind


def test_sharded_ranks_make_the_same_step(folder):
    ((sharded,), (replicated,)) = (token_cases.read_log(folder, name) for name in ("sharded", "model-0"))
    for name in ("loss", "grad_norm"):
        assert sharded[name] == pytest.approx(replicated[name], rel=1e-5)


def test_a_configured_loss_with_class_weights_is_that_of_one_process(folder, tmp_path):
    scores = {"type": "tests.distributed.token_cases:Scores"}
    (one,) = token_cases.train(tmp_path, "weighted", scores, loss=token_cases.WEIGHTED, micro_batch_size=8)
    for axis in token_cases.AXES:
        (two,) = token_cases.read_log(folder, f"weighted-{axis}")
        assert (two["loss"], two["grad_norm"]) == pytest.approx((one["loss"], one["grad_norm"]), rel=1e-5), axis


def test_an_update_without_labels_changes_nothing_on_either_rank(folder):
    assert [json.loads((folder / f"unchanged-{rank}.json").read_text()) for rank in range(2)] == [[True, True]] * 2
    for axis in token_cases.AXES:
        last = token_cases.read_log(folder, f"empty-{axis}")[-1]
        assert last["empty_updates"] == 1
        assert "loss" not in last


def test_a_plain_loss_next_to_ignored_labels_is_rejected(folder):
    kinds = [json.loads(path.read_text())[0] for path in folder.glob("plain-*.json")]
    assert "TrainwrightError" in kinds
