"""Ranks with unequal memory agree on one micro-batch."""

import json

from tests.distributed import memory_cases
from tests.distributed.forked_launch import launch_well

from trainwright import RunConfig


def test_all_ranks_take_the_smallest_micro_batch_and_none_waits_for_one_that_failed(tmp_path):
    launch_well(tmp_path, 2, memory_cases.main)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert RunConfig.load(tmp_path / "found" / "config.yaml").trainer.micro_batch_size == 3
    assert first["found"] == second["found"] == first["told"] == second["told"]
    assert first["broken"].startswith("TrainwrightError: trainer.micro_batch_size: auto: the trial failed on rank 1.")
    assert second["broken"] == "KeyError: 'labels'"
