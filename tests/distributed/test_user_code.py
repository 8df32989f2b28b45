"""User code that computes with sharded parameters logs, evaluates and trains what one process does."""

import json
from functools import partial
from pathlib import Path

import pytest
from tests.distributed import user_code_cases
from tests.distributed.forked_launch import launch_well
from tests.distributed.test_layouts import assert_like_one, lines


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """What this process, two ranks and, for slow tests, four ranks leave, of one launch each."""
    folder = tmp_path_factory.mktemp("user_code")
    here = (item for item in request.session.items if item.path == request.path)
    has_slow = any(item.get_closest_marker("slow") for item in here)
    act = partial(user_code_cases.main, left_out=()) if has_slow else user_code_cases.main
    act(folder)
    for world in (2, 4) if has_slow else (2,):
        launch_well(folder, world, act)
    return folder


def is_slow(name, layout):
    return layout in ("fsdp-tensor", "replicate-fsdp") or (name, layout) in user_code_cases.SLOW


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[pytest.mark.slow] if is_slow(name, layout) else [])
        for name, (layouts, *_) in user_code_cases.CASES.items()
        for layout in layouts
    ],
)
def test_losses_metrics_evaluations_and_weights_are_those_of_one_process(folder, name, layout):
    assert_like_one(folder, layout, name)


def test_every_way_of_logging_has_the_full_value(folder):
    for line in lines(folder, "fsdp", "penalized"):
        assert {"put", "last/put", "penalty", "tripled", "read", "weight_norm", "first_norm", "largest"} <= line.keys()
        assert line["put"] == pytest.approx(line["penalty"])
        assert line["read"] == pytest.approx(line["penalty"])
        assert len(line["head"]) == 5
    assert {"in_evaluation", "at_first"} <= lines(folder, "fsdp", "penalized")[-1].keys()
    last = lines(folder, "fsdp", "first")[-1]
    assert {"largest_weight", "total", "valid/penalty", "valid/end", "end"} <= last.keys()


@pytest.mark.parametrize(("kind", "value"), [("OneRankPuts", "weight_norm"), ("OneRankReturns", "weight")])
def test_a_sharded_value_of_one_rank_raises_on_all_ranks_instead_of_waiting(folder, kind, value):
    said = json.loads((folder / "said.json").read_text())[kind]
    assert len(said) == 2
    for text in said:
        assert repr(value) in text
        assert "only rank 0" in text


@pytest.mark.parametrize(
    ("kind", "line"), [("PenalizedFirst", '"read": penalty.item()'), ("Directly", "embedding(batch")]
)
def test_a_compiled_forward_that_mixes_split_and_plain_tensors_raises_with_the_line(folder, kind, line):
    file = Path(user_code_cases.__file__)
    number = next(number for number, text in enumerate(file.read_text().splitlines(), start=1) if line in text)
    said = json.loads((folder / "said-compiled.json").read_text())[kind]
    assert len(said) == 2
    for text in said:
        assert f"{file.name}:{number}: runtime.mode compile" in text
