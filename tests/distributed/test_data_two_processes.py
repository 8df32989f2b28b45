"""Two real processes over every kind of data: each sample once, an end for all together, and exact resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.kinds import SOURCES
from tests.project.parts import Points
from tests.test_exact_resume import assert_same, what_is_left

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What one launch of two processes leaves."""
    folder = tmp_path_factory.mktemp("two")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, HERE / "data_cases.py", folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_a_run_that_was_stopped_ends_with_the_bits_of_an_undisturbed_one(folder, source, workers):
    number = list(SOURCES).index(source)
    whole, parts = (what_is_left(folder / f"{name}-{number}-{workers}") for name in ("whole", "parts"))
    assert_same(whole, parts)


@pytest.mark.parametrize("name", ["PointStream", "ShardedPoints"])
def test_a_stream_that_ends_unevenly_ends_the_run_on_all_ranks_together_and_loses_nothing(folder, name):
    given, steps, position = json.loads((folder / "results.json").read_text())[name]
    expected = sorted(round(point["x"][0].item(), 5) for point in Points(23))
    assert sorted(round(value, 5) for share in given for value in share) == expected
    assert len(set(steps)) == 1
    assert position == 23
    assert json.loads((folder / "results.json").read_text())[f"{name} equal"]
