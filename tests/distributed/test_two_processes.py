"""Two real processes do what one does: losses, metrics, evaluation, order, checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from tests.distributed import cases
from tests.distributed.forked_launch import launch_well
from tests.messages import mentions

from trainwright import RunConfig, build_trainer, load_checkpoint

PROJECT = Path(__file__).parents[1] / "project"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders that one process and two processes leave, of one launch each."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    cases.main(one)
    launch_well(two, 2, cases.main)
    return one, two


def lines(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.json").read_text().splitlines()]


def results(folder):
    return json.loads((folder / "results.json").read_text())


def assert_close(left, right):
    left = {
        key: value
        for key, value in left.items()
        if not key.endswith(("_per_second", "_per_step", "slowest_rank_share"))
    }
    right = {
        key: value
        for key, value in right.items()
        if not key.endswith(("_per_second", "_per_step", "slowest_rank_share"))
    }
    assert left == pytest.approx(right, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["tokens", "ragged", "ordered", "averaged"])
def test_losses_metrics_and_evaluations_are_those_of_one_process(folders, name):
    one, two = folders
    assert [line["step"] for line in lines(one, name)] == [line["step"] for line in lines(two, name)]
    for left, right in zip(lines(one, name), lines(two, name), strict=True):
        assert_close(left, right)


def test_the_last_step_of_a_ragged_run_has_one_sample(folders):
    assert [line["step"] for line in lines(folders[1], "ragged")][-1] == 5  # 33 samples: 8 + 8 + 8 + 8 + 1


def test_final_weights_agree(folders):
    one, two = (load_checkpoint(folder / "tokens").state_dict() for folder in folders)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-5, atol=1e-6)


def test_names_that_one_rank_alone_puts_are_averaged_over_that_rank(folders):
    line = lines(folders[1], "talk")[0]
    assert line["everywhere"] == 0.5  # ranks 0 and 1
    assert line["last_rank_only"] == 5.0
    assert line["odd_steps"] == 1.0


def test_an_evaluation_sees_each_sample_once_and_in_order(folders):
    one, two = (results(folder)["ordered"] for folder in folders)
    assert one["valid/num_samples"] == two["valid/num_samples"] == 33
    assert two["valid/weighed"] == pytest.approx(one["valid/weighed"])
    assert "valid/per_sample" not in two  # the task aggregates it itself


def test_the_ranks_together_get_the_samples_of_one_process_in_order(folders):
    (whole,) = results(folders[0])["seen"]
    shares = results(folders[1])["seen"]
    joined = [[*first, *second] for first, second in zip(*shares, strict=True)]
    assert joined == whole


def test_parameters_that_some_ranks_do_not_use_stay_equal(folders):
    assert results(folders[1])["moved"] == [True, True, True, True, False, False]
    assert results(folders[1])["replicas_equal"]


def test_a_signal_to_one_rank_ends_all_at_the_same_step(folders):
    steps, after = results(folders[1])["interrupted"]
    assert steps[0] == steps[1] == [4, True]  # asked in step 3, agreed on one step later
    assert after == 12


def test_an_evaluation_that_fails_on_one_rank_fails_on_all_and_keeps_the_step(folders):
    (first, second), step = results(folders[1])["fails"]
    assert first == "TrainwrightError: The evaluation failed on rank 1: ValueError('no evaluation on the last rank')"
    assert second == "ValueError: no evaluation on the last rank"
    assert step == 5


def test_a_metric_that_differs_between_ranks_decides_alike_on_all(folders):
    assert results(folders[1])["local"] == [[12, 12], [12, 12]]


def test_a_metric_of_one_rank_s_samples_is_rejected_before_training_or_at_the_first_evaluation(folders):
    (early, has_trained), (late, _) = results(folders[1])["rank_metrics"]
    assert not has_trained
    for text in (early, late):
        assert mentions(text, "evaluation.metrics.odd", "LocalMetric", "2 ranks")


def test_running_means_are_resumed_exactly(folders):
    whole, parts = (
        {line["step"]: line["valid/loss"] for line in lines(folders[1], name) if "valid/loss" in line}
        for name in ("norm", "norm-parts")
    )
    assert {step: parts[step] for step in whole} == whole


def test_a_parameter_that_is_unfrozen_later_stays_equal_on_all_ranks(folders):
    assert results(folders[1])["unfrozen_equal"]


def test_a_run_of_two_processes_goes_on_in_one_and_back(tmp_path):
    def train(name, steps, *more):
        overrides = [f"output_dir={tmp_path}", f"name={name}", "model.dropout=0.0", f"trainer.max_steps={steps}"]
        overrides += ["trainer.schedule={type: constant}", "trainer.micro_batch_size=2", "evaluation.metrics={}"]
        build_trainer(RunConfig.load(PROJECT / "run.yaml", [*overrides, *more])).train()

    launch_well(tmp_path, 2, lambda folder: train("mixed", 4, "runtime.mesh={replicate: 2}"))
    train("mixed", 8)
    launch_well(tmp_path, 2, lambda folder: train("mixed", 12))
    train("single", 12)
    mixed, single = (load_checkpoint(tmp_path / name).state_dict() for name in ("mixed", "single"))
    for key, value in single.items():
        torch.testing.assert_close(mixed[key], value, rtol=1e-5, atol=1e-6)
