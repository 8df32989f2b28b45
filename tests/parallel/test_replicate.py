"""Gradients are summed over replicas once, also where sums begin beside the last backward; on two real ranks."""

import torch
import torch.distributed as dist
from tests.parallel.forked_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.errors import TrainwrightError
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.replicate import GradientSum


class Shared(nn.Module):
    """One layer that is used twice, in blocks that are recomputed."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return x.square().sum()


def made(**options):
    torch.manual_seed(0)
    return Shared(**options)


def updates(mesh, model):
    """Returns the gradients of three updates of one backward each, and whether sums ran beside the last of them."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), mesh=mesh)
    gradient_sum = GradientSum(list(model.parameters()), ranks)
    # A bucket for each parameter, so that the first sums begin long before the backward ends.
    gradient_sum._buckets = [[number] for number in reversed(range(len(gradient_sum._parameters)))]
    seen = []
    for step in range(3):
        model.zero_grad()
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + ranks.rank))
        gradient_sum.begin_last_backward()
        model(x.requires_grad_()).backward()
        begun = len(gradient_sum._pending)
        gradient_sum.reduce(torch.zeros(2))
        seen.append([parameter.grad.clone() for parameter in model.parameters()])
    return seen, begun


def expected(model):
    seen = []
    for step in range(3):
        model.zero_grad()
        for rank in range(2):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x.requires_grad_()).backward()
        seen.append([parameter.grad.clone() for parameter in model.parameters()])
    return seen


def assert_equal(found, wanted):
    for step, other in zip(found, wanted, strict=True):
        for one, two in zip(step, other, strict=True):
            torch.testing.assert_close(one, two)


def test_reductions_start_during_the_backward_and_are_right(tmp_path):
    for found, begun in on_ranks(tmp_path, {"replicate": 2}, lambda mesh: updates(mesh, made(use_reentrant=False))):
        assert begun == 4
        assert_equal(found, expected(made(use_reentrant=False)))


def test_a_gradient_accumulated_several_times_is_reduced_when_complete(tmp_path):
    for found, begun in on_ranks(tmp_path, {"replicate": 2}, lambda mesh: updates(mesh, made(use_reentrant=True))):
        assert begun == 0
        assert_equal(found, expected(made(use_reentrant=True)))


def late(mesh):
    """A model that begins to use its layer in parts when sums already run beside backwards."""
    ranks = Ranks(dist.get_rank(), 2, mesh=mesh)
    model = made(use_reentrant=False)
    gradient_sum = GradientSum(list(model.parameters()), ranks)
    gradient_sum._buckets = [[number] for number in reversed(range(4))]
    for use_reentrant in (False, True):
        model.use_reentrant = use_reentrant
        model.zero_grad()
        gradient_sum.begin_last_backward()
        try:
            model(torch.ones(2, 4, requires_grad=True)).backward()
        except TrainwrightError as error:
            return str(error)
        gradient_sum.reduce(torch.zeros(2))
    return None


def test_a_gradient_accumulated_again_after_its_reduction_started_is_rejected(tmp_path):
    for error in on_ranks(tmp_path, {"replicate": 2}, late):
        assert error is not None
        assert "use_reentrant=False" in error
