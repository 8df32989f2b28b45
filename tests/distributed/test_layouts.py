"""Whatever the layout: evaluations, metrics, anomalies, adapters and reductions are those of one process, or promised.

Real ranks and the whole loop; the runs are layout_cases.py's.
"""

import json
from functools import partial

import pytest
import torch
from tests.distributed.forked_launch import launch, launch_well
from tests.distributed.layout_cases import (
    CASES,
    FAILURES,
    LAYOUTS,
    PARTS,
    REPEATED,
    fail_alone,
    fails_in,
    is_run,
    main,
)

from trainwright.checkpoint.store import CheckpointStore

TIMED = ("_per_second", "_per_step", "slowest_rank_share")
SPLIT = [layout for layout in LAYOUTS if layout != "one"]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """What this process, two ranks and four ranks leave, of one launch each."""
    folder = tmp_path_factory.mktemp("layouts")
    here = (item for item in request.session.items if item.path == request.path)
    has_slow = any(item.get_closest_marker("slow") for item in here)
    act = partial(main, left_out=frozenset() if has_slow else REPEATED)
    act(folder)
    for world in (2, 4):
        launch_well(folder, world, act)
    return folder


def lines(folder, layout, name):
    read = [json.loads(line) for line in (folder / layout / name / "metrics.json").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.endswith(TIMED) and not key.startswith("compile/")}
        for line in read
    ]


def weights(folder, layout, name):
    store = CheckpointStore(folder / layout / name / "checkpoints")
    return store.read(store.steps()[-1], "model")


def results(folder, layout):
    return json.loads((folder / layout / "results.json").read_text())


def assert_like_one(folder, layout, name, *, one=None, limit=1e-9):
    """Log lines, and weights at the end, are those of one process."""
    assert_close(lines(folder, "one", one or name), lines(folder, layout, name), limit)
    expected, found = weights(folder, "one", one or name), weights(folder, layout, name)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=limit, atol=limit)


def assert_close(expected, found, limit):
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for left, right in zip(expected, found, strict=True):
        lists = {key: left.pop(key) for key in list(left) if isinstance(left[key], list)}
        for key, values in lists.items():
            assert right.pop(key) == pytest.approx(values, rel=limit)
        for key in [key for key, value in left.items() if value is None]:  # not finite
            assert (left.pop(key), right.pop(key)) == (None, None)
        assert right == pytest.approx(left, rel=limit)


def cases(*names):
    return [marked(name, layout) for name in names for layout in SPLIT if is_run(name, layout)]


def marked(name, layout):
    return pytest.param(name, layout, marks=[pytest.mark.slow] if (name, layout) in REPEATED else [])


@pytest.mark.parametrize(("name", "layout"), cases("evaluated", "tiny"))
def test_every_row_is_evaluated_once_and_in_order(folder, name, layout):
    """Loss, accuracy, a metric of torchmetrics and what a task aggregates; sets of 7 rows and of 1, and streams."""
    assert_like_one(folder, layout, name)
    last = lines(folder, layout, name)[-1]
    sizes = {"evaluated": {"valid": 7, "stream": 5}, "tiny": {"tiny": 1, "few": 1}}[name]
    for each, size in sizes.items():
        assert last[f"{each}/num_rows"] == size
        assert {f"{each}/loss", f"{each}/accuracy", f"{each}/order"} <= last.keys()
        assert name == "tiny" or last[f"{each}/words/rows"] == size


@pytest.mark.parametrize(("name", "layout"), [marked("left", layout) for layout in ("fsdp", "tensor", "pipeline")])
def test_an_evaluation_that_a_signal_ends_is_left_by_all_and_made_anew(folder, name, layout):
    for left in results(folder, layout)[name]:
        assert left == [3, True, "SIGTERM", True]  # the last: it did not end the evaluation first
    assert lines(folder, layout, name) == lines(folder, layout, "evaluated")
    undisturbed, found = (weights(folder, layout, each) for each in ("evaluated", name))
    assert all(torch.equal(value, found[key]) for key, value in undisturbed.items())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        marked(name, layout)
        for name in FAILURES
        for layout in ("fsdp", "tensor", "pipeline")
        if name.startswith("fails") and fails_in(name, layout)
    ],
)
def test_an_evaluation_that_fails_is_heard_of_by_all_ranks_and_the_step_is_saved(folder, name, layout):
    said, saved = results(folder, layout)[name]
    cause = {
        "fails-data": "no such row here",
        "fails-stream": "no such row here",
        "fails-everywhere": "logits",
    }.get(name, "this metric is broken")
    assert len(said) == 2
    assert all(cause in words for words in said), said
    assert saved == [2]


def test_a_rank_that_fails_where_the_others_wait_for_it_ends_them_all(tmp_path):
    codes, errors = launch(tmp_path, 2, fail_alone)
    assert codes == [1, 1]
    assert "KeyError: 'logits'" in errors[1]
    assert not CheckpointStore(tmp_path / "data/alone/checkpoints").steps()


def test_torchmetrics_that_a_rank_had_nothing_for_are_those_of_the_other_ranks(folder):
    for name, layout in (("few", "fsdp"), ("small-batch", "fsdp"), ("small-batch", "tensor"), ("few", "pipeline")):
        assert results(folder, layout)[name] == [["", ""], [2]]


@pytest.mark.parametrize(("name", "layout"), cases("talk"))
def test_names_that_some_ranks_put_are_averaged_over_those(folder, name, layout):
    for line in lines(folder, layout, name):
        assert line["everywhere"] == 0.5
        assert line["last_rank_only"] == 5.0
        assert ("odd_steps" in line) == (line["step"] % 2 == 0)


@pytest.mark.parametrize(("name", "layout"), cases("metrics", "lora", "frozen", "streamed", "dropout", "graphed"))
def test_metrics_adapters_frozen_parameters_streams_and_graphs_are_as_in_one_process(folder, name, layout):
    assert_like_one(folder, layout, name)


@pytest.mark.parametrize(
    ("name", "layout"), [marked("compiled", layout) for layout in ("one", "replicate", "fsdp", "tensor")]
)
def test_a_compiled_forward_makes_the_updates_of_eager_mode(folder, name, layout):
    assert_close(lines(folder, "one", "reduced-2-false"), lines(folder, layout, name), 1e-9)


@pytest.mark.parametrize(("name", "layout"), [marked("frozen", layout) for layout in ("one", *PARTS, "pipeline")])
def test_frozen_parameters_stay_and_others_move(folder, name, layout):
    begun, found = (weights(folder, layout, each) for each in ("lora", name))  # adapters leave the rest alone
    for fixed in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert torch.equal(found[fixed], begun[fixed])
    assert not torch.equal(found["model.layers.1.mlp.down_proj.weight"], begun["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("layout", ["fsdp", "tensor", "context", "fsdp-tensor"])
def test_ranks_with_samples_of_their_own_draw_numbers_of_their_own(folder, layout):
    by_samples = {}
    for draws, data_rank in results(folder, layout)["metrics"]:
        assert len(set(draws)) == len(draws)
        by_samples.setdefault(data_rank, []).append(draws)
    assert len(by_samples) == LAYOUTS[layout].get("fsdp", 1)
    for shared in by_samples.values():
        assert all(draws == shared[0] for draws in shared)
    assert len({draws[0][0] for draws in by_samples.values()}) == len(by_samples)


@pytest.mark.parametrize(("name", "layout"), cases("skip", "rollback"))
def test_all_ranks_decide_alike_on_an_anomaly_of_one(folder, name, layout):
    found = results(folder, layout)[name]
    culprit = len(found) - 1
    for each in found:
        assert each["step"] == 5
        assert each["decided"] == [[4, "non_finite", name, [culprit]]]
        # The update of step 4 left the weights alone; going back, steps 3 and 4 are made again.
        assert each["kept"] == [False, False, False, True, False, *([False] * 2 if name == "rollback" else [])]
    if name == "rollback":
        assert_like_one(folder, layout, name)
        return
    # A rank that shares its samples spoils the gradient, not the loss that is written.
    one, many = (
        [{key: value for key, value in line.items() if line["step"] != 4} for line in lines(folder, place, name)]
        for place in ("one", layout)
    )
    assert many == [pytest.approx(line, rel=1e-9) for line in one]
    expected, weighed = weights(folder, "one", name), weights(folder, layout, name)
    for key, value in expected.items():
        torch.testing.assert_close(weighed[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "layout"), [marked("raise", layout) for layout in PARTS])
def test_an_anomaly_that_is_to_end_the_run_ends_it_on_all_ranks_in_the_same_words(folder, name, layout):
    first, second = results(folder, layout)[name]
    assert first == second
    step, decided, said = first
    assert (step, decided) == (4, [[4, "non_finite", "raise", [1]]])
    assert said.startswith("AnomalyError: ")
    assert "The newest checkpoint is step-00000002." in said


@pytest.mark.parametrize(("name", "layout"), cases("bf16", "fp16"))
def test_lower_precisions_train_split_models(folder, name, layout):
    """Rounding differs with the order of sums, so that only the course is the same."""
    one, found = lines(folder, "one", name), lines(folder, layout, name)
    assert_close(one, found, 2e-2)
    assert ("loss_scale" in found[-1]) == (name == "fp16")


@pytest.mark.parametrize(("name", "layout"), cases(*(name for name in CASES if name.startswith("reduced"))))
def test_however_gradients_are_reduced_the_updates_are_those_of_one_process(folder, name, layout):
    assert_like_one(folder, layout, name, one="reduced-2-false")


def reductions(folder, layout, name):
    """The messages of an update that hold gradients, by kind and axis: their number and bytes, on every rank."""
    by_rank = [
        {(kind, axis): (count, size) for kind, axis, count, size in found if kind != "all-gather"}
        for found in results(folder, layout)[name]
    ]
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


def test_gradients_are_reduced_once_an_update_where_that_is_promised(folder):
    # One micro-batch, then two; fsdp: 2 ranks.
    once, twice = (reductions(folder, "fsdp", f"reduced-{micro}-true") for micro in (4, 2))
    assert once == twice
    assert once["reduce-scatter", "fsdp"][0] > 0
    scatters = [reductions(folder, "fsdp", f"reduced-{micro}-false")["reduce-scatter", "fsdp"] for micro in (4, 2)]
    assert scatters[0] == once["reduce-scatter", "fsdp"]
    assert scatters[1] == tuple(2 * each for each in scatters[0])
    # Copies of the model are summed once an update, in any case.
    assert reductions(folder, "replicate", "reduced-4-false") == reductions(folder, "replicate", "reduced-2-false")
    # Hybrid: along replicate once an update, along fsdp once a micro-batch, or once too.
    hybrid = {
        (micro, how): reductions(folder, "replicate-fsdp", f"reduced-{micro}-{how}")
        for micro in (2, 1)
        for how in ("false", "true")
    }
    sums = {each["all-reduce", "replicate"] for each in hybrid.values()}
    assert len(sums) == 1
    scatters = {key: each["reduce-scatter", "fsdp"][0] for key, each in hybrid.items()}
    number = scatters[2, "false"]
    assert number > 0
    assert scatters == {(2, "false"): number, (2, "true"): number, (1, "false"): 2 * number, (1, "true"): number}
