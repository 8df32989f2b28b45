"""Ranks with unequal memory agree on one micro-batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

from trainwright import RunConfig


def test_all_ranks_take_the_smallest_micro_batch_and_none_waits_for_one_that_failed(tmp_path):
    script = Path(__file__).with_name("memory_cases.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert RunConfig.load(tmp_path / "found" / "config.yaml").trainer.micro_batch_size == 3
    assert first["found"] == second["found"] == first["told"] == second["told"]
    assert first["broken"].startswith("TrainwrightError: trainer.micro_batch_size: auto: the trial failed on rank 1.")
    assert second["broken"] == "KeyError: 'labels'"
