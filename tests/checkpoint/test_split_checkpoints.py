"""A checkpoint of any layout is read in any other, bit for bit: by four ranks, one process, and torch's own reader."""

import hashlib
import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from tests.checkpoint.hostile import HostileDisk, Plan
from tests.checkpoint.layouts import (
    LAYOUTS,
    Net,
    differences,
    everything,
    make_optimizer,
    parts_of,
    restored,
    save,
    saver_for,
    step,
    trained,
)
from tests.checkpoint.ranks import along, on_ranks
from tests.messages import raises
from torch.distributed.tensor import DTensor

from trainwright.checkpoint import contents
from trainwright.checkpoint.encoding import SplitTensor, encode
from trainwright.checkpoint.manifest import read_manifest, render_manifest
from trainwright.checkpoint.remote_store import open_store
from trainwright.checkpoint.snapshot import HostBuffers
from trainwright.checkpoint.store import CheckpointStore
from trainwright.checkpoint.together import encode_share, reject_unshared_folder
from trainwright.errors import CheckpointError

WHOLE = 9
"""The step that one process saved."""
NUMBERS = {name: 10 + number for number, name in enumerate(LAYOUTS)}


def names_of_all(ranks, model):
    return sorted({name for names in ranks.gather(list(model.state_dict())) for name in names})


def act_on_four(ranks, folder):
    """Saves in each layout, then reads each of them in each; returns what went wrong."""
    store = CheckpointStore(folder)
    places = {name: along(ranks, axes) for name, axes in LAYOUTS.items()}
    for name, placed in places.items():
        save(placed, store, NUMBERS[name], name)
    return [*read_differences(places, store), *snapshot_differences(places["fsdp-tensor"])]


def read_differences(places, store):
    expected = everything(*trained())
    further = everything_after_a_step(*trained())
    wrong = []
    for target, placed in places.items():
        names = []
        if placed.mesh.size("pipeline") > 1:
            names = names_of_all(placed, trained(placed.mesh)[0])
        for source, number in {"whole": WHOLE, **NUMBERS}.items():
            found = restored(lambda part, number=number: store.read_split(number, part), placed.mesh, names)
            wrong += [f"{source} → {target}: {name}" for name in differences(everything(*found), expected)]
            wrong += [f"{source} → {target}: averages of {name}" for name in badly_laid_out(*found)]
            if source == "whole":  # all were equal before, and gathering takes most of the time
                after = everything_after_a_step(*found)
                wrong += [f"{source} → {target}, a step later: {name}" for name in differences(after, further)]
    return wrong


def everything_after_a_step(model, optimizer, averages):
    step(model, optimizer)
    return everything(model, optimizer, averages)


def badly_laid_out(model, optimizer, averages):
    for name, parameter in model.named_parameters():
        for value in (averages.averages[name], optimizer.state[parameter]["exp_avg"]):
            if getattr(value, "placements", None) != getattr(parameter, "placements", None):
                yield name


def snapshot_differences(ranks):
    """A copy in main memory holds this rank's parts, whatever becomes of the state meanwhile."""
    model, optimizer, averages = trained(ranks.mesh)
    buffers = HostBuffers()
    snapshot = buffers.copy_to_host(parts_of(model, optimizer, averages))
    step(model, optimizer)
    assert snapshot.num_bytes < buffers_of_whole().num_bytes / 1.5
    found = restored(snapshot.to_state().__getitem__, ranks.mesh)
    return [f"snapshot: {name}" for name in differences(everything(*found), everything(*trained()))]


def buffers_of_whole():
    return HostBuffers().copy_to_host(parts_of(*trained()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which one process and four ranks have saved the same state in every layout."""
    folder = tmp_path_factory.mktemp("layouts") / "checkpoints"
    CheckpointStore(folder).write(WHOLE, parts_of(*trained()), metrics={"loss": 1.0})
    answers = on_ranks(4, lambda ranks: act_on_four(ranks, folder), fsdp=4)
    assert answers == [[], [], [], []]
    return folder


def test_every_layout_reads_every_other_and_continues_equally(folder):
    """The fixture has compared them on four ranks; every file is as its manifest says."""
    store = CheckpointStore(folder)
    assert store.steps() == [WHOLE, *NUMBERS.values()]
    for number in store.steps():
        store.verify(number)


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_process_reads_a_split_checkpoint_as_if_it_were_whole(folder, name):
    store = CheckpointStore(folder)
    expected = everything(*trained())
    for read in (store.read, store.read_split):
        found = restored(lambda part, read=read: read(NUMBERS[name], part))
        assert differences(everything(*found), expected) == []
    plain = store.read(NUMBERS[name], "model")
    assert all(type(value) is torch.Tensor for value in plain.values())
    assert plain["last.weight"] is plain["first.weight"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_split_checkpoint_holds_each_value_once(folder, name):
    store = CheckpointStore(folder)

    def weigh(number):
        files = store.path(number).glob("optimizers*.safetensors")
        return sum(tensor.nbytes for file in files for tensor in read_file(file).values())

    assert weigh(NUMBERS[name]) == weigh(WHOLE)


def read_file(path):
    from safetensors.torch import load_file

    return load_file(path)


def test_replicas_share_the_writing(folder):
    files = list(CheckpointStore(folder).path(NUMBERS["hybrid"]).glob("*.rank-*.safetensors"))
    # Ranks 2 and 3 are replicas of ranks 0 and 1.
    assert {path.name for path in files} == {
        f"{part}.rank-0000{rank}.safetensors" for part in ("model", "optimizers", "training") for rank in range(4)
    }
    values = [0, 0]
    for path in files:
        rank = int(path.stem.rpartition("-")[2])
        values[rank // 2] += sum(tensor.numel() for tensor in read_file(path).values())
    assert min(values) > 0.3 * sum(values)


def test_the_ranks_of_a_replicated_model_share_the_writing(folder):
    path = CheckpointStore(folder).path(NUMBERS["replicate"])
    for part in ("model", "optimizers"):
        files = [path / f"{part}.safetensors", *(path / f"{part}.rank-0000{rank}.safetensors" for rank in (1, 2, 3))]
        values = [sum(tensor.nbytes for tensor in read_file(file).values()) for file in files]
        assert max(values) < 0.35 * sum(values)
    # What hooks have may differ between ranks.
    assert not list(path.glob("training.rank-*"))


def test_torch_reads_a_split_model(folder):
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    expected = Net()
    optimizer = make_optimizer(expected)
    step(expected, optimizer)
    step(expected, optimizer)
    state = {name: torch.zeros_like(value) for name, value in expected.state_dict().items() if name != "last.weight"}
    reader = HuggingFaceStorageReader(str(CheckpointStore(folder).path(NUMBERS["fsdp-tensor"])))
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, value in state.items():
        assert torch.equal(value, expected.state_dict()[name]), name


def test_only_the_region_that_is_asked_for_is_read(folder):
    found = CheckpointStore(folder).read_split(NUMBERS["tensor"], "model")["blocks.0.weight"]
    assert isinstance(found, SplitTensor)
    assert len(found.shards) == 4
    # As if the others were not there; which rank wrote a shard first decides their order.
    found.shards = [shard for shard in found.shards if shard[0][0] == 2]
    row = torch.empty(2, 6)
    found.copy_into(row, (2, 0))
    with raises(CheckpointError):
        found.whole()


def test_a_whole_checkpoint_is_written_as_ever(tmp_path):
    store = CheckpointStore(tmp_path)
    parts = parts_of(*trained())
    store.write(1, parts, metrics={})
    expected = {"MANIFEST.json", "model.json", "model.safetensors", "optimizers.json", "optimizers.safetensors"}
    assert {path.name for path in store.path(1).iterdir()} == {*expected, "training.json", "training.safetensors"}
    assert all(each.shape == parts["model"][name].shape for name, each in store.read_split(1, "model").items())


def test_a_dtensor_is_rejected_where_one_process_writes_alone(folder):
    def act(ranks):
        model = trained(ranks.mesh)[0]
        with raises(CheckpointError):
            encode(model.state_dict())
        return rejections(ranks)

    assert on_ranks(2, act, fsdp=2) == [[True] * 3] * 2


def rejections(ranks):
    """What cannot be saved together is rejected on every rank, with the rank that is the reason."""
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    split = distribute_tensor(torch.ones(4), ranks.mesh.along("shard"), [Shard(0)])
    summed = DTensor.from_local(torch.ones(4), ranks.mesh.along("shard"), [Partial()])
    cases = (
        {"a": split, "b": split.clone()} if ranks.rank else {"a": split},  # different tensors
        {"a": summed},  # waits for a sum
        {"a": object()} if ranks.rank else {"a": 1},  # cannot be saved
    )
    found = []
    for state in cases:
        with raises(CheckpointError):
            encode_share({"model": state}, ranks)
        found.append(True)
    return found


def test_another_model_is_rejected_by_name(folder):
    state = CheckpointStore(folder).read_split(NUMBERS["fsdp"], "model")
    state["blocks.0.weight"] = state["blocks.1.bias"]
    with raises(CheckpointError, "blocks.0.weight", "7", "6"):
        contents.load_model_state(state, Net(), source="here")


def test_followers_share_the_fate_of_the_save(tmp_path):
    """A rank that cannot write fails the save on all, and the next attempt is whole."""
    from trainwright.checkpoint import store as store_module

    def act(ranks):
        store = CheckpointStore(tmp_path / "checkpoints")
        share = encode_share(parts_of(*trained(ranks.mesh)), ranks)
        saver = saver_for(store, ranks, "fate")
        write_share, failures = store_module.write_share, [2]

        def fail(*arguments, **options):
            if ranks.rank == 1 and failures[0]:
                failures[0] -= 1
                raise OSError(28, "No space left on device")
            return write_share(*arguments, **options)

        store_module.write_share = fail
        saver.save(1, share, metrics={})
        saver.wait(must_succeed=True)
        first = store.steps()
        failures[0] = 3
        saver.save(2, share, metrics={})
        saver.wait()
        problem = ""
        try:
            saver.wait(must_succeed=True)
        except CheckpointError as error:
            problem = str(error)
        saver.save(3, share, metrics={})
        saver.wait(must_succeed=True)
        saver.close()
        return first, problem, store.steps()

    for first, problem, steps in on_ranks(2, act, fsdp=2):
        assert first == [1]
        assert "Rank 1" in problem
        assert "No space left" in problem
        assert steps == [1, 3]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_ranks_save_together_behind_an_address(tmp_path):
    """Each rank uploads its files, the first the manifest, last."""
    Plan.set(None, -1)
    address = f"{HostileDisk.protocol}://{tmp_path}/bucket/run"

    def act(ranks):
        store = open_store(address)
        reject_unshared_folder(store, ranks)
        for topic, number in {"first": 1, "replaced": 1, "next": 2}.items():
            save(ranks, store, number, topic)
        found = restored(lambda part: store.read_split(1, part), ranks.mesh)
        wrong = differences(everything(*found), everything(*trained()))
        with raises(CheckpointError):
            reject_unshared_folder(open_store("memory://bucket/run"), ranks, patience=0.0)  # each process has its own
        return wrong

    assert on_ranks(2, act, fsdp=2) == [[], []]
    store = open_store(address)
    assert store.steps() == [1, 2]
    store.verify(2)
    assert differences(everything(*restored(lambda part: store.read(2, part))), everything(*trained())) == []
    assert not list((tmp_path / "bucket" / "run").glob(".shared*"))


DAMAGE = {
    "no word of it": lambda info: None,
    "another shape": lambda info: {**info, "blocks.0.weight": {**info["blocks.0.weight"], "whole_shape": [7, 60]}},
    "beyond the end": lambda info: {**info, "blocks.0.weight": {**info["blocks.0.weight"], "saved_offsets": [6, 0]}},
    "no numbers": lambda info: {**info, "blocks.0.weight": {"saved_offsets": [-1, True], "whole_shape": "x"}},
    "too few": lambda info: {key: value for key, value in info.items() if key != "blocks.0.weight"},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_shards_that_do_not_fit_together_are_rejected(folder, name, tmp_path):
    """What describes them is anybody's text: it is checked before a byte is copied."""
    store = CheckpointStore(tmp_path)
    shutil.copytree(CheckpointStore(folder).path(NUMBERS["tensor"]), store.path(1))
    path = store.path(1) / "model.rank-00001.safetensors"
    with safe_open(path, "pt") as file:
        info = DAMAGE[name](json.loads(file.metadata()["DCP_SHARDING_INFO"]))
        tensors = {key: file.get_tensor(key).clone() for key in file.keys() if info is None or key in info}  # noqa: SIM118
    path.unlink()
    metadata = {} if info is None else {"DCP_SHARDING_INFO": json.dumps(info)}
    if name == "too few":
        save_file(tensors, path, metadata)
    else:
        save_file(load_all(CheckpointStore(folder).path(NUMBERS["tensor"]) / path.name), path, metadata)
    vouch_for(path)
    for read in (store.read, store.read_split):
        with raises(CheckpointError):
            read(1, "model")


def vouch_for(path):
    """Writes a manifest that matches a changed file, as anybody can."""
    manifest = read_manifest(path.parent)
    content = path.read_bytes()
    manifest["files"][path.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path.parent / "MANIFEST.json").write_bytes(render_manifest(manifest))


def load_all(path):
    return {key: value.clone() for key, value in read_file(path).items()}
