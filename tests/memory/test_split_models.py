"""Recomputed, compiled and offloaded layers of a model that is split over two ranks: the same bits as without."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.faults.runs import fork
from tests.memory.models import SHIPPED, TEXT, make, update_of
from tests.messages import raises
from torch.distributed.tensor import DTensor, Shard

from trainwright.errors import ConfigError
from trainwright.memory.offload import offloading
from trainwright.memory.rewrite import apply_memory_settings
from trainwright.models.layers.annotations import name_tensor
from trainwright.models.llama import Llama
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters
from trainwright.parallel.mesh import lay_out, local
from trainwright.parallel.sharding import packaged_rules, plan_sharding
from trainwright.parallel.tensor import split_tensors

CASES = {
    "activation_checkpointing": {"activation_checkpointing": ["DecoderLayer"]},
    "save": {"activation_checkpointing": {"layers": ["DecoderLayer"], "save": ["mm", "scaled_dot_product_attention"]}},
    "inner": {"activation_checkpointing": ["mlp"]},
    "offload": {"offload": ["decoder_input"]},
    "compile_repeated_blocks": {"compile_repeated_blocks": "model.layers"},
    "all": {
        "offload": ["decoder_input"],
        "activation_checkpointing": ["DecoderLayer"],
        "compile_repeated_blocks": "model.layers",
    },
}


TILED = {"tile": {"layers": ["SwiGLU"], "tokens": 7}, "activation_checkpointing": ["DecoderLayer"]}
"""Rounded otherwise, because the products have other shapes."""
TENSOR_CASES = {name: CASES[name] for name in ("activation_checkpointing", "save", "compile_repeated_blocks")} | {
    "offload": {"offload": ["decoder_input"], "activation_checkpointing": ["DecoderLayer"]}
}


def split_llama():
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 24}
    return Llama(vocab_size=24, max_positions=16, dropout=0.2, **sizes)


def update_along_tensor(reserved, mesh):
    """One update of matrices that are split, of one batch for both: the loss, and this rank's part of the gradients."""
    model = make(split_llama)
    plan = plan_sharding(model, packaged_rules(model), mesh.sizes)
    split_tensors(model, plan, mesh)
    apply_memory_settings(model, reserved, origin=lambda label: None)
    return {name: local(value).clone() for name, value in update_of(model, TEXT).items()}


def offload_a_split_tensor(mesh):
    """Saves a tensor that lies on both ranks, and a view of it, by way of the host."""
    part = torch.arange(6.0).reshape(2, 3) + 1
    x = DTensor.from_local(part, mesh.along("tensor"), [Shard(0)]).requires_grad_()
    with offloading(["hidden"]) as watch:
        hidden = name_tensor(x * 2, "hidden")
        loss = hidden.square().sum() + hidden.t().pow(3).sum()
    loss.backward()
    assert watch.moved == {"hidden"}
    assert torch.equal(local(x.grad), 8 * part + 24 * part.square())


def updates(reserved, mesh, rank):
    """Two updates of each rank's own batch: losses, and this rank's part of the gradients."""
    build, batch, _, _, _ = SHIPPED["llama"]
    model = make(build)
    apply_memory_settings(model, reserved, origin=lambda label: None)
    sync = shard_parameters(model, mesh, settings=SplitSettings(), device=torch.device("cpu"))
    batch = {name: (tensor + rank) % 23 for name, tensor in batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(2):
        sync.begin_backward(is_last=True)
        values = update_of(model, batch, seed=10 * number + rank)
        found.append({name: local(value).clone() for name, value in values.items()})
        optimizer.step()
    return found


def compare(folder, rank):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    mesh = lay_out({"fsdp": 2}, device_type="cpu")
    plain = updates({}, mesh, rank)
    assert any(plain[0][name].numel() < weight.numel() for name, weight in make(SHIPPED["llama"][0]).named_parameters())
    said = []
    for name, reserved in CASES.items():
        for number, (before, after) in enumerate(zip(plain, updates(reserved, mesh, rank), strict=True)):
            wrong = [key for key in before if not torch.equal(before[key], after[key])]
            if wrong:
                said.append(f"{name}, update {number}: {wrong[:3]}")
    for before, after in zip(plain, updates(TILED, mesh, rank), strict=True):
        said += [f"tile: {key}" for key in before if not torch.allclose(before[key], after[key], atol=1e-6)]
    mesh = lay_out({"tensor": 2}, device_type="cpu")
    before = update_along_tensor({}, mesh)
    for name, reserved in TENSOR_CASES.items():
        after = update_along_tensor(reserved, mesh)
        said += [f"{name} along tensor: {key}" for key in before if not torch.equal(before[key], after[key])]
    with raises(ConfigError, "model.layers", "tensor"):
        update_along_tensor(CASES["all"], mesh)
    with raises(ConfigError, "model.layers.0.mlp", "tensor"):
        update_along_tensor(TILED, mesh)
    offload_a_split_tensor(mesh)
    (folder / f"{rank}.txt").write_text("\n".join(said))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that begin as a copy of this one")
def test_a_split_model_has_the_same_bits_however_its_memory_is_spared(tmp_path):
    children = [fork(lambda rank=rank: compare(tmp_path, rank), tmp_path / f"rank-{rank}") for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0], [(tmp_path / f"rank-{rank}.stderr").read_text("utf-8") for rank in range(2)]
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["", ""]
