"""Two real processes that share every parameter (FSDP) do what one process does, through the whole loop."""

import json

import pytest
import torch
from tests.distributed import shard_cases
from tests.distributed.forked_launch import launch_well

from trainwright import load_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders that this process and two processes leave."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    shard_cases.main(one)
    launch_well(two, 2, shard_cases.main)
    return one, two


def lines(folder, name):
    untimed = ("_per_second", "_per_step", "slowest_rank_share")
    read = [json.loads(line) for line in (folder / name / "metrics.json").read_text().splitlines()]
    return [
        # A value that is not finite is null.
        {key: value for key, value in line.items() if not key.endswith(untimed) and value is not None}
        for line in read
    ]


@pytest.mark.parametrize("name", shard_cases.CASES)
def test_losses_norms_and_evaluations_are_those_of_one_process(folders, name):
    one, two = (lines(folder, name) for folder in folders)
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("name", shard_cases.CASES)
def test_final_weights_are_those_of_one_process(folders, name):
    one, two = (load_checkpoint(folder / name).state_dict() for folder in folders)
    assert list(one) == list(two)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-5)


def test_what_one_rank_alone_uses_is_trained_and_what_nobody_uses_stays(folders):
    assert json.loads((folders[1] / "moved.json").read_text()) == [True, True, True, True, False, False]
