"""Two real processes over every kind of data: each sample once, an end for all together, and exact resume."""

import json
from functools import partial

import pytest
from tests.distributed import data_cases
from tests.distributed.forked_launch import launch_well
from tests.project.parts import Points
from tests.test_exact_resume import assert_same, what_is_left

ALL = [*data_cases.RUNS, *data_cases.OTHER_RUNS]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """What one launch of two processes leaves."""
    folder = tmp_path_factory.mktemp("two")
    here = (item for item in request.session.items if item.path == request.path)
    has_slow = any(item.get_closest_marker("slow") for item in here)
    launch_well(folder, 2, partial(data_cases.main, runs=ALL if has_slow else data_cases.RUNS))
    return folder


@pytest.mark.parametrize(
    ("source", "workers"),
    [*data_cases.RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in data_cases.OTHER_RUNS)],
)
def test_a_run_that_was_stopped_ends_with_the_bits_of_an_undisturbed_one(folder, source, workers):
    number = ALL.index((source, workers))
    whole, parts = (what_is_left(folder / f"{name}-{number}") for name in ("whole", "parts"))
    assert_same(whole, parts)


@pytest.mark.parametrize("name", ["PointStream", "ShardedPoints"])
def test_a_stream_that_ends_unevenly_ends_the_run_on_all_ranks_together_and_loses_nothing(folder, name):
    given, steps, position = json.loads((folder / "results.json").read_text())[name]
    expected = sorted(round(point["x"][0].item(), 5) for point in Points(23))
    assert sorted(round(value, 5) for share in given for value in share) == expected
    assert len(set(steps)) == 1
    assert position == 23
    assert json.loads((folder / "results.json").read_text())[f"{name} equal"]
