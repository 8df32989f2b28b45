"""Averages of split parameters: each rank's part, laid out as the parameter, the same as in one process."""

from types import SimpleNamespace

import pytest
import torch
from tests.parallel.forked_ranks import on_ranks
from tests.parallel.split_training import CPU, assert_equal, make_batches, make_net, torch_adamw, whole, whole_tensor
from torch.distributed.tensor import DTensor

from trainwright.hooks.ema import EMA
from trainwright.loop.evaluation import replaced_weights
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters
from trainwright.parallel.mesh import Mesh


def watch(model):
    hook = EMA(decay=0.8)
    hook.trainer = SimpleNamespace(model=model, step=0)
    return hook


def average(mesh):
    """Three updates with averages, an evaluation amid them, and averages that are loaded whole."""
    model = make_net()
    sync = shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
    hook, optimizer = watch(model), torch_adamw(model)
    hook.before_train()
    losses, num_ranks = [], mesh.size("fsdp")
    for batch in make_batches(3):
        optimizer.zero_grad()
        own = batch.chunk(num_ranks, dim=1)[mesh.rank("fsdp")]
        model(*own).backward()
        sync.finish()
        optimizer.step()
        hook.trainer.step += 1
        hook.after_step()
        weights = whole(model)
        with replaced_weights(model, hook.averaged_weights()), torch.no_grad():
            losses.append(model(*batch).item())
        assert_equal(whole(model), weights, tolerance=0.0)
    averages = {name: whole_tensor(value) for name, value in hook.averages.items()}
    laid_out = all(isinstance(hook.averages[name], DTensor) == isinstance(p, DTensor) for name, p in named(model))
    other = watch(model)
    other.load_state_dict({"averages": averages})
    other.before_train()
    laid_out &= all(isinstance(other.averages[name], DTensor) == isinstance(p, DTensor) for name, p in named(model))
    again = {name: whole_tensor(value) for name, value in other.averages.items()}
    return losses, averages, again, laid_out, whole(model)


def named(model):
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_averages_evaluations_and_loaded_averages_are_those_of_one_process(tmp_path):
    losses, averages, again, _, weights = average(Mesh())
    assert_equal(again, averages, tolerance=0.0)
    for rank in on_ranks(tmp_path, {"fsdp": 3}, average):
        assert rank[0] == pytest.approx(losses, rel=1e-10)
        assert_equal(rank[1], averages)
        assert_equal(rank[2], rank[1], tolerance=0.0)
        assert rank[3]
        assert_equal(rank[4], weights)
