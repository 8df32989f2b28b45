"""Gradients of 16-bit weights are summed over micro-batches and ranks in fp32, and measured so."""

import weakref

import pytest
import torch
import torch.distributed as dist
from tests.parallel.forked_ranks import on_ranks
from tests.parallel.split_training import CPU
from torch import nn
from torch.overrides import TorchFunctionMode

from trainwright.loop.update import ScheduledOptimizer, Updater
from trainwright.optim.adamw import AdamW
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters
from trainwright.parallel.mesh import is_split, local
from trainwright.parallel.replicate import GradientNorm, GradientSum

NUM_MICRO_BATCHES = 48  # its reciprocal is not a number of bf16


class Weights(nn.Module):
    """One weight in a block, one outside, one that is not sharded, and one that the last micro-batch alone uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Scaled(), Scaled()])
        self.outside = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
        self.late = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))

    def forward(self, x, is_last):
        total = (self.outside * x).sum(dtype=torch.float32) + (self.scalar * x[0]).float()
        for layer in self.layers:
            total = total + layer(x)
        return total + (self.late * x[:2]).sum(dtype=torch.float32) if is_last else total


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ParameterList([nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))])
        self.child = nn.Identity()

    def forward(self, x):
        return (self.inner[0] * self.child(x)).sum(dtype=torch.float32)


def inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    return 0.5 + torch.rand(NUM_MICRO_BATCHES, 6, generator=generator).bfloat16()


def expected(num_ranks):
    """The gradients of the mean over all samples, in float64."""
    x = torch.stack([inputs(rank) for rank in range(num_ranks)]).double()
    mean = x.mean((0, 1))
    late = x[:, -1].sum(0) / (num_ranks * NUM_MICRO_BATCHES)
    return [mean, mean[0], late[:2], mean, mean]


def gradients(mesh, *, masters=True, **settings):
    """Returns the norm and the gradients that an optimizer gets."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), mesh=mesh)
    model = Weights()
    sync = None
    if mesh.size("fsdp") > 1:
        sync = shard_parameters(model, mesh, settings=SplitSettings(**settings), device=CPU)
    found = {}

    class Seeing(AdamW):
        def step(self):
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                found[name] = (gradient.full_tensor() if is_split(gradient) else gradient).clone()
            return super().step()

    optimizer = Seeing(model.parameters(), lr=0.0, master_weights=masters)
    updater = Updater(
        {"main": ScheduledOptimizer(optimizer, lambda step, max_steps: 1.0)},
        global_batch_size=NUM_MICRO_BATCHES * ranks.size,
        max_steps=10,
        ranks=ranks,
        sync=sync,
    )
    updater.begin_step(0)
    for _ in range(2):  # the second update has the dtypes that the first one left
        update = updater.begin(1, num_backwards=NUM_MICRO_BATCHES)
        for number, x in enumerate(inputs(ranks.rank)):
            update.backward(model(x, number == NUM_MICRO_BATCHES - 1), 1)
        norm = update.apply().grad_norm
    return norm, [found[name] for name in ("outside", "scalar", "late", "layers.0.inner.0", "layers.1.inner.0")]


@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        ({"replicate": 2}, {}),
        ({"fsdp": 2}, {}),
        ({"fsdp": 2}, {"accumulate_unsharded": True}),
        ({"replicate": 2, "fsdp": 2}, {}),
    ],
)
def test_sums_over_micro_batches_and_ranks_are_those_of_fp64(tmp_path, axes, settings):
    size = 4 if len(axes) == 2 else 2
    wanted = expected(size)
    total = torch.cat([each.flatten() for each in wanted]).norm()
    for norm, found in on_ranks(tmp_path, axes, lambda mesh: gradients(mesh, **settings)):
        assert norm.dtype == torch.float32
        assert float(norm) == pytest.approx(float(total), rel=1e-5)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("axis", ["replicate", "fsdp"])
def test_an_optimizer_without_masters_gets_the_sum_rounded_once(tmp_path, axis):
    for _, found in on_ranks(tmp_path, {axis: 2}, lambda mesh: gradients(mesh, masters=False)):
        for one, other in zip(found, expected(2), strict=True):
            assert one.dtype == torch.bfloat16
            torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=0)


def norms(mesh):
    found = []
    for kinds in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float64)):
        parameters = [nn.Parameter(torch.ones(300, dtype=kind)) for kind in kinds]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 999.0)
        found.append(GradientNorm(parameters, mesh).measure())
    return found


def test_the_norm_of_shards_is_not_rounded_to_16_bits(tmp_path):
    rounded = float(torch.tensor(999.0).bfloat16())
    mixed = (300 * (999.0**2 + rounded**2)) ** 0.5
    for found in on_ranks(tmp_path, {"tensor": 2}, norms):
        assert [float(norm) for norm in found] == pytest.approx([mixed, mixed, 999.0 * 600**0.5], rel=1e-6)
        assert [norm.dtype for norm in found] == [torch.float32, torch.float32, torch.float64]


def buckets(mesh):
    """Returns whether gradients share the memory of their bucket, whether the old memory is free, and host reads."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), mesh=mesh)
    parameters = [nn.Parameter(torch.zeros(5)) for _ in range(3)]
    frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
    gradient_sum = GradientSum([*parameters, frozen], ranks)
    sum((parameter * (ranks.rank + 1)).sum() for parameter in parameters).backward()
    before = [weakref.ref(parameter.grad) for parameter in parameters]
    seen = []
    start = gradient_sum._start_next

    def start_and_look():
        start()
        flat = gradient_sum._pending[-1][0]
        storage = flat.untyped_storage().data_ptr()
        seen.append([each.grad.untyped_storage().data_ptr() == storage for each in parameters])
        seen.append([each() is None for each in before])

    gradient_sum._start_next = start_and_look
    with HostReads() as reads:
        gradient_sum.reduce(torch.zeros(2))
    return seen, [parameter.grad for parameter in parameters], frozen.grad, reads.found


class HostReads(TorchFunctionMode):
    """Notes each read of values by the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("tolist", "item", "__bool__", "__float__", "__int__", "numpy", "cpu"):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_gradients_are_views_of_their_bucket_and_not_held_twice(tmp_path):
    for seen, summed, frozen, reads in on_ranks(tmp_path, {"replicate": 2}, buckets):
        assert seen == [[True] * 3] * 2
        assert all(torch.equal(gradient, torch.full((5,), 3.0)) for gradient in summed)
        assert frozen is None
        assert reads == []


def frozen_flags(mesh):
    """Trains a sharded model of which most is frozen; returns the flags that the ranks exchange, and host reads."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    sync = shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
    sync.begin_backward(is_last=True)
    model(torch.ones(2, 8)).sum().backward()
    flags = []
    reduce = sync._reduce
    sync._reduce = lambda tensor: (flags.append(tensor.clone()), reduce(tensor))
    with HostReads() as reads:
        sync.finish()
    assert reads.found == []
    return [each.tolist() for each in flags], [
        local(each).shape for each in model.parameters() if each.grad is not None
    ]


def test_frozen_parameters_do_not_count_as_missing(tmp_path):
    for flags, trained in on_ranks(tmp_path, {"fsdp": 2}, frozen_flags):
        assert flags == [[1, 1]]
        assert len(trained) == 2
