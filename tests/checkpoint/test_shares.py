"""Who writes what, and how the trees of a pipeline's stages become one."""

import torch
from tests.checkpoint.layouts import parts_of, trained
from tests.checkpoint.ranks import on_ranks
from tests.messages import raises
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainwright.checkpoint.store import CheckpointStore
from trainwright.checkpoint.together import encode_share, merge_trees, reject_unshared_folder
from trainwright.errors import CheckpointError


def stage(*names, settings, hooks=None):
    groups = [{"lr": 0.1, **each, "params": list(names)} for each in settings]
    state = {name: {"step": {"$tensor": f"main.{name}.step"}} for name in names}
    return {
        "model": {name: {"$tensor": name} for name in names},
        "optimizers": {"main": {"class": "AdamW", "state": state, "groups": groups}},
        "training": {"step": 4, "hooks": hooks or {}},
    }


def test_the_union_of_the_stages_is_saved_in_their_order():
    first = stage("embed", "blocks.0", settings=[{}], hooks={"Averages": {"averages": {"embed": 1}, "count": 3}})
    last = stage("blocks.1", "embed", settings=[{}], hooks={"Averages": {"averages": {"blocks.1": 2}, "count": 9}})
    merged = merge_trees([first, last])
    assert list(merged["model"]) == ["embed", "blocks.0", "blocks.1"]
    assert list(merged["optimizers"]["main"]["state"]) == ["embed", "blocks.0", "blocks.1"]
    # The tied weight is in its group once.
    assert [group["params"] for group in merged["optimizers"]["main"]["groups"]] == [["embed", "blocks.0", "blocks.1"]]
    assert merged["training"]["hooks"] == {"Averages": {"averages": {"embed": 1, "blocks.1": 2}, "count": 3}}


def test_a_group_that_one_stage_lacks_is_found_by_its_settings():
    decayed, plain = {"weight_decay": 0.1}, {"weight_decay": 0.0}
    merged = merge_trees([stage("a", settings=[plain]), stage("b", settings=[decayed, plain])])
    groups = merged["optimizers"]["main"]["groups"]
    assert [(group["weight_decay"], group["params"]) for group in groups] == [(0.0, ["a", "b"]), (0.1, ["b"])]


def test_tagged_values_are_not_taken_apart():
    left, right = {"a": {"$tuple": [1]}, "b": {"$dict": [[1, 2]]}}, {"a": {"$tuple": [2]}, "b": {"x": 1}}
    assert merge_trees([{"training": left}, {"training": right}]) == {"training": left}


def writers_of(ranks):
    """Which rank writes what, of tensors that lie on some axes of the mesh only."""
    mesh = ranks.mesh
    along = mesh.layers["replicate", "shard"]
    made = {
        "split": DTensor.from_local(torch.ones(2), mesh.along("shard"), [Shard(0)]),
        "copied": DTensor.from_local(torch.ones(2), along, [Replicate(), Replicate()], run_check=False),
        "hybrid": DTensor.from_local(torch.ones(2), along, [Replicate(), Shard(0)], run_check=False),
        "plain": torch.ones(2),
    }
    share = encode_share({"model": made}, ranks)
    tree, tensors, *_ = share.parts["model"]
    return sorted(tensors), None if tree is None else sorted(tree)


def test_replicas_take_turns_in_writing(tmp_path):
    def act(ranks):
        writers = writers_of(ranks)
        with raises(CheckpointError, "1", "2", "3"):
            reject_unshared_folder(CheckpointStore(tmp_path / str(ranks.rank)), ranks, patience=0.0)
        reject_unshared_folder(CheckpointStore(tmp_path / "shared"), ranks)
        return writers

    assert on_ranks(4, act, replicate=2, fsdp=2) == [
        (["hybrid", "plain", "split"], ["copied", "hybrid", "plain", "split"]),
        (["hybrid", "split"], None),
        (["copied"], None),  # the third by size, and the third of four replicas
        ([], None),
    ]
    assert list((tmp_path / "shared").iterdir()) == list((tmp_path / "0").iterdir()) == []


def test_replicas_with_different_tensors_save_those_of_the_first_rank():
    def act(ranks):
        parts = {"model": {"a": torch.ones(2), "b": torch.ones(3)}, "training": {"seen": torch.ones(2)}}
        alike = encode_share(parts, ranks)
        parts["model"][f"of-{ranks.rank}"] = torch.ones(1)
        different = encode_share(parts, ranks)
        return [sorted(key for each in share.parts.values() for key in each.tensors) for share in (alike, different)]

    assert on_ranks(2, act, replicate=2) == [[["b", "seen"], ["a", "b", "of-0", "seen"]], [["a"], []]]


def test_one_process_writes_all():
    from trainwright.parallel.collectives import Ranks

    parts = parts_of(*trained())
    share = encode_share(parts, Ranks())
    assert set(share.parts["model"].tensors) == {*(key for key in parts["model"] if key != "last.weight")}
    assert not any(encoded.shard_locations for encoded in share.parts.values())
