"""Two stages train, evaluate, save and go on as one process does."""

import json
from pathlib import Path

import pytest
import torch
from tests.distributed.forked_launch import launch_well
from tests.distributed.pipeline_cases import CASES, main

from trainwright import RunConfig, build_trainer, load_checkpoint

HERE = Path(__file__).parent
TIMED = ("_per_second", "_per_step", "slowest_rank_share")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders that one process and two stages leave, of one start each."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    main(one)
    launch_well(two, 2, main)
    return one, two


def lines(folder, name):
    read = [json.loads(line) for line in (folder / name / "metrics.json").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(TIMED)} for line in read]


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_evaluations_are_those_of_one_process(folders, name):
    one, two = (lines(folder, name) for folder in folders)
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        assert left == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("name", ["tied", "ragged"])
def test_each_stage_knows_the_parameters_and_the_flops_of_the_whole_model(folders, name):
    one, two = folders
    expected = json.loads((one / f"{name}-0.json").read_text())
    assert [json.loads((two / f"{name}-{rank}.json").read_text()) for rank in (0, 1)] == [expected] * 2


@pytest.mark.parametrize("name", ["tied", "ragged"])
def test_checkpoints_of_stages_are_read_as_one_model(folders, name):
    one, two = (load_checkpoint(folder / name).state_dict() for folder in folders)
    assert list(one) == list(two)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-5, atol=1e-6)


def test_a_run_that_goes_on_from_a_checkpoint_ends_bit_for_bit_as_one_that_never_stopped(folders):
    assert lines(folders[1], "parts") == lines(folders[1], "tied")
    whole, parts = (load_checkpoint(folders[1] / name).state_dict() for name in ("tied", "parts"))
    for key, value in whole.items():
        assert torch.equal(value, parts[key])


def test_one_process_goes_on_from_the_checkpoint_of_two_stages(folders):
    overrides = [f"output_dir={folders[1]}", "name=parts", "trainer.max_steps=7"]
    trainer = build_trainer(RunConfig.load(HERE / "pipeline_run.yaml", overrides))
    assert trainer.step == 6
    trainer.train()
    assert trainer.step == 7
