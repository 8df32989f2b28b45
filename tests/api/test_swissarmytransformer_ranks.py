"""What SwissArmyTransformer promised of several ranks, and what broke there: one launch, and a test a promise."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.api.function_runs import lines, losses, run_cases
from tests.distributed.forked_launch import launch_well

STAGES = ("zero0", "zero2", "zero3")


class Runs(NamedTuple):
    """The runs of function_runs.py on one rank and on two: their folders, and what handle_metrics_function got."""

    one: Path
    two: Path
    gathered_by_one: dict[str, list[int]]
    gathered_by_two: dict[str, list[int]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))

    def act(folder):
        gathered = run_cases(folder, batch_size=4)
        if os.environ["RANK"] == "0":
            (folder / "gathered.json").write_text(json.dumps(gathered))

    launch_well(two, 2, act)
    return Runs(one, two, run_cases(one, batch_size=8), json.loads((two / "gathered.json").read_text()))


def test_two_ranks_and_any_stage_of_zero_are_the_mathematics_of_one_rank(runs):
    for name in STAGES:
        assert losses(name, runs.two) == pytest.approx(losses("zero0", runs.one), rel=1e-5)


def test_the_validation_loss_is_that_of_all_ranks(runs):
    for name in STAGES:
        whole, shared = (lines(name, folder)[-1] for folder in (runs.one, runs.two))
        assert shared["valid/loss"] == pytest.approx(whole["valid/loss"], rel=1e-5)
        assert shared["valid/sum"] == sum(range(50, 59))


def test_the_samples_of_all_ranks_reach_handle_metrics_function_each_once(runs):
    assert runs.gathered_by_one["zero0"] == list(range(50, 59))
    assert runs.gathered_by_two == runs.gathered_by_one


def test_a_metric_is_averaged_over_the_ranks_that_have_it(runs):
    for line in lines("zero0", runs.two)[:4]:
        assert line["rank"] == 0.5  # both have it
        assert line["of_last"] == 5.0  # only the second has it


def test_an_update_that_one_rank_spoils_is_skipped_by_all_together(runs):
    spoilt, plain = losses("spoilt", runs.two), losses("zero0", runs.two)
    assert spoilt[0] == plain[0]
    assert spoilt[1] is None  # JSON has no NaN
    # The third update begins with the weights that the second began with, on both ranks: as one rank alone does.
    assert spoilt[2:] == pytest.approx(losses("spoilt", runs.one)[2:], rel=1e-5)
    assert spoilt[2] != pytest.approx(plain[2], rel=1e-5)
    assert "non_finite: skip" in (runs.two / "spoilt" / "config.yaml").read_text("utf-8")


def test_ranks_agree_on_the_run_folder_where_each_names_it_by_its_own_clock(runs):
    [folder] = runs.two.glob("at-*")
    assert folder.name.endswith("-0")  # the first rank's
    assert len(losses(folder.name, runs.two)) == 1
    assert (folder / "checkpoints").is_dir()
