"""What a step sends with each mesh, compared with theory."""

import pytest
from tests.analysis.runs import LENGTH, MODEL, small_run

from trainwright.analysis.shard import plan_shards


def sent(found, *, kind=None, axis=None):
    chosen = [
        each for each in found.collectives if (kind or each.kind) == each.kind and (axis or each.axis) == each.axis
    ]
    return sum(each.sent_bytes for each in chosen)


def test_replicas_send_their_gradients_once_whatever_the_accumulation():
    for gradient_accumulation_steps in (1, 3):
        config = small_run({"replicate": -1}, trainer__gradient_accumulation_steps=gradient_accumulation_steps)
        config = config.derive({"trainer.micro_batch_size": 2})
        found = plan_shards(config, world_size=8, sequence_length=LENGTH)
        assert sent(found) == pytest.approx(2 * 7 / 8 * found.num_bytes, rel=0.01)


def test_along_data_parameters_are_gathered_twice_and_gradients_scattered_once_per_micro_batch():
    once, thrice = (
        plan_shards(
            small_run({"fsdp": -1}, trainer__gradient_accumulation_steps=number), world_size=8, sequence_length=LENGTH
        )
        for number in (1, 3)
    )
    whole = once.num_bytes * 7 / 8
    assert sent(once, kind="reduce-scatter") == pytest.approx(whole, rel=0.01)
    assert whole < sent(once, kind="all-gather") <= 2 * whole * 1.01
    assert sent(thrice, kind="reduce-scatter") == pytest.approx(3 * whole, rel=0.01)
    assert thrice.gradient_accumulation_steps == 3


def test_accumulating_whole_gradients_scatters_them_once():
    config = small_run({"fsdp": -1}, trainer__gradient_accumulation_steps=3, runtime__accumulate_unsharded=True)
    found = plan_shards(config, world_size=8, sequence_length=LENGTH)
    assert sent(found, kind="reduce-scatter") == pytest.approx(found.num_bytes * 7 / 8, rel=0.01)


def test_hybrid_sharding_sends_a_part_between_groups():
    found = plan_shards(small_run({"replicate": 2, "fsdp": 4}), world_size=8, sequence_length=LENGTH)
    assert sent(found, axis="replicate") == pytest.approx(2 * 1 / 2 * found.num_bytes / 4, rel=0.05)
    assert found.axes == {"replicate": 2, "fsdp": 4}


def test_tensor_ranks_exchange_activations():
    found = plan_shards(small_run({"tensor": -1}), world_size=4, sequence_length=LENGTH)
    activations = 2 * LENGTH * MODEL["hidden_size"] * 4
    gathers = [each for each in found.collectives if (each.kind, each.axis) == ("all-gather", "tensor")]
    # In each of two layers one before the attention and one before the MLP, in the forward alone.
    assert gathers
    assert sum(each.num_bytes for each in gathers) >= 4 * activations


def test_rules_that_match_nothing_and_parameters_without_rules_are_named():
    rules = {"parameters": {"lm_head.weight": ["tensor", None], "no.such.*": [None]}}
    config = small_run({"fsdp": -1}, model__sharding=rules)
    found = plan_shards(config, world_size=4, sequence_length=LENGTH)
    assert found.unmatched == ["no.such.*"]
    assert "model.embed_tokens.weight" in found.uncovered
    assert "lm_head.weight" not in found.uncovered


def test_stages_of_a_pipeline_send_activations_forth_and_gradients_back():
    config = small_run({"pipeline": -1}, trainer__gradient_accumulation_steps=6)
    found = plan_shards(config, world_size=2, rank=0, sequence_length=LENGTH)
    states = 2 * LENGTH * MODEL["hidden_size"] * 4
    [sending] = [each for each in found.collectives if each.kind == "send"]
    [receiving] = [each for each in found.collectives if each.kind == "receive"]
    assert (sending.axis, sending.count, sending.num_bytes) == ("pipeline", 6, 6 * states)
    assert receiving.num_bytes == pytest.approx(6 * states, rel=0.01)
    assert {each.name.split(".")[2] for each in found.layouts if "layers" in each.name} == {"0"}
