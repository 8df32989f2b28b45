"""Eager, compile and graph mode on two ranks: the run of one process, with the messages that the layout needs.

Real ranks and the whole loop; the runs are mode_cases.py's.
"""

import json

import pytest
import torch
from tests.distributed.forked_launch import launch_well
from tests.distributed.mode_cases import AXES, MODES, NUM_STEPS, main
from tests.distributed.test_layouts import assert_like_one, lines, results, weights
from tests.messages import raises

from trainwright.compile.graph import reject_ungraphable
from trainwright.config import RunConfig
from trainwright.errors import ConfigError
from trainwright.models.llama import Llama
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import ALONE, Mesh

SIZES = {"vocab_size": 24, "hidden_size": 16, "num_heads": 2, "num_layers": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What this process and two ranks leave, of one launch."""
    folder = tmp_path_factory.mktemp("modes")
    main(folder)
    launch_well(folder, 2, main)
    return folder


CASES = [
    *((mode, "eager") for mode in MODES),
    ("widened", "eager"),
    ("fused-compile", "eager"),
    ("fused-graph", "eager"),
    ("fused-untied", "untied"),
]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("name", "one"), CASES, ids=[name for name, _ in CASES])
def test_every_mode_makes_the_updates_of_one_process(folder, axis, name, one):
    assert_like_one(folder, axis, name, one=one, limit=1e-9)


@pytest.mark.parametrize("axis", AXES)
def test_blocks_that_are_compiled_by_themselves_are_not_reported_as_breaks(folder, axis):
    read = [json.loads(line) for line in (folder / axis / "compile/metrics.json").read_text().splitlines()]
    compiled = [line for line in read if line.get("compile/graphs")]
    assert compiled
    assert all(line.get("compile/graph_breaks", 0) == 0 for line in compiled)


@pytest.mark.parametrize("axis", AXES)
def test_ranks_capture_and_replay_in_the_same_steps(folder, axis):
    """NCCL requires it. Where the shapes of one rank alternate, all ranks have a graph for each of the two."""
    same, other = ([each["replayed"] for each in results(folder, axis)[name]] for name in ("graph", "widened"))
    assert same[0] == same[1]
    assert len(same[0]) >= 2
    assert other == [[7, 8, 9]] * 2  # each shape warms up twice and is captured, in turns
    # After a change on one rank all warm up again.
    assert [each["replayed"] for each in results(folder, axis)["changing"]] == [[4, 5, 9]] * 2


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_an_anomaly_that_the_device_finds_in_a_replay_is_that_of_one_process(folder, axis, policy):
    assert_like_one(folder, axis, policy, limit=1e-9)
    [alone], together = results(folder, "one")[policy], results(folder, axis)[policy]
    assert alone["decided"][:3] == together[0]["decided"][:3] == together[1]["decided"][:3]
    assert together[0]["decided"] == together[1]["decided"]
    assert together[0]["replayed"] == together[1]["replayed"] != []


@pytest.mark.parametrize("axis", AXES)
def test_a_signal_to_one_rank_ends_a_graph_run_on_all_and_it_resumes(folder, axis):
    first, second = results(folder, axis)["interrupted"]
    assert len({each["step"] for each in first}) == 1
    assert first[0]["step"] < NUM_STEPS
    assert [each["step"] for each in second] == [NUM_STEPS] * 2
    found, undisturbed = (weights(folder, axis, name) for name in ("interrupted", "graph"))
    assert all(torch.equal(value, found[key]) for key, value in undisturbed.items())


@pytest.mark.parametrize(("axis", "name"), [(axis, f"bf16-{mode}") for axis in AXES for mode in ("eager", "graph")])
def test_bf16_runs_stay_near_that_of_one_process(folder, axis, name):
    one, found = lines(folder, "one", "bf16"), lines(folder, axis, name)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in one], rel=1e-2)


def test_gathering_in_fp32_is_nearer_to_one_process_than_in_bf16(folder):
    """With weights gathered in fp32 a rank computes as one process does; only sums have another order."""
    one, wide, narrow = (
        torch.tensor([line["loss"] for line in lines(folder, *place)])
        for place in (("one", "bf16"), ("fsdp", "bf16-wide"), ("fsdp", "bf16-eager"))
    )
    assert (wide - one).abs().max() < 2e-3
    assert (wide - one).abs().max() < (narrow - one).abs().max()


def elements():
    """Returns the elements of all parameters, of those in blocks, and the number of parameters."""
    sizes = {name: parameter.numel() for name, parameter in Llama(**SIZES).named_parameters()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers." in name), len(sizes)


def messages(folder, axis, name):
    """Returns number and bytes of each kind of message of one update, which are the same on both ranks."""
    first, second = (
        {kind: (count, size) for kind, _, count, size in each["collectives"]} for each in results(folder, axis)[name]
    )
    assert first == second
    return first


def expected(axis, *, mode, micro_batches, gather_bytes, reduce_bytes):
    """Returns the messages that a layout needs: docs/distributed.md has the formulas."""
    all_elements, in_blocks, num_parameters = elements()
    # The sum of the losses and of their weights; which parameters have a gradient; what graph mode agrees on.
    small = (3, 16 + 4 * num_parameters + 32) if mode == "graph" else (2, 16 + 4 * num_parameters)
    if axis == "replicate":
        return {"all-reduce": (1 + small[0], reduce_bytes * all_elements + small[1])}
    num_blocks = SIZES["num_layers"]
    return {
        "all-gather": (micro_batches * (1 + 2 * num_blocks), micro_batches * gather_bytes * (all_elements + in_blocks)),
        "reduce-scatter": (micro_batches * (1 + num_blocks), micro_batches * reduce_bytes * all_elements),
        "all-reduce": (small[0] + 1, small[1] + 8),  # and the norm of the gradients
    }


COUNTED = [
    *((mode, 2, 8, 8) for mode in MODES),
    ("widened", 1, 8, 8),
    ("bf16-eager", 1, 2, 4),
    ("bf16-graph", 1, 2, 4),
    ("bf16-wide", 1, 4, 4),
]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("name", "micro_batches", "gather", "reduce"), COUNTED, ids=[case[0] for case in COUNTED])
def test_every_mode_sends_what_the_layout_needs(folder, axis, name, micro_batches, gather, reduce):
    if name == "bf16-wide" and axis == "replicate":
        pytest.skip("nothing is gathered")
    mode = "graph" if name == "widened" else name.rpartition("-")[2]
    wanted = expected(axis, mode=mode, micro_batches=micro_batches, gather_bytes=gather, reduce_bytes=reduce)
    assert messages(folder, axis, name) == wanted


@pytest.mark.parametrize("axis", AXES)
def test_a_parameter_without_a_gradient_ends_a_graph_run_on_both_ranks(folder, axis):
    for error in results(folder, axis)["unused"]:
        assert error.startswith("TrainwrightError: runtime.mode graph: ")
        assert "no gradient in this step on this rank" in error
    first, second = results(folder, axis)["unused"]
    assert "spare.1" in first
    assert "spare.0" in second


def test_a_sharded_metric_ends_a_graph_run(folder):
    for error in results(folder, "fsdp")["shard"]:
        assert "sharded tensor" in error


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_graph_mode_rejects_axes_with_collectives_inside_of_layers(axis, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: x\nruntime:\n  mode: graph\n")
    ranks = Ranks(0, 4, mesh=Mesh({**ALONE, "fsdp": 2, axis: 2}))
    with raises(ConfigError, "runtime.mode graph", axis, "run.yaml:3"):
        reject_ungraphable(RunConfig.load(path), ranks)
