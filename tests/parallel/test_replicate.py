"""Gradients are summed over replicas once, also where sums begin beside the last backward; on two real ranks."""

import torch
import torch.distributed as dist
from tests.parallel.forked_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.errors import TrainwrightError
from trainwright.memory.repeated_blocks import compile_blocks, keep_apart
from trainwright.models.llama import Llama
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


def compiled_nodes(loss):
    """Returns the compiled backwards behind a loss, and how many parameters get their gradients from each."""
    found, pending, seen = [], [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        after = [each for each, _ in node.next_functions if each is not None]
        if "CompiledFunction" in node.name():
            found.append(sum("AccumulateGrad" in each.name() for each in after))
        pending += after
    return found


def compiled_updates(mesh):
    """Trains compiled blocks; returns the compiled backwards, how many sums ran beside them, and the gradients."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), mesh=mesh)
    torch.manual_seed(0)
    model = Llama(vocab_size=23, hidden_size=16, num_layers=3, num_heads=2).double()
    compile_blocks(model, "aot_eager", {})
    assert keep_apart(model)
    run = torch.compile(lambda batch: model(**batch)["loss"], backend="aot_eager")
    gradient_sum = GradientSum(list(model.parameters()), ranks)
    gradient_sum._buckets = [[number] for number in reversed(range(len(gradient_sum._parameters)))]
    for step in range(3):
        ids = torch.randint(23, (2, 5), generator=torch.Generator().manual_seed(10 * step + ranks.rank))
        model.zero_grad()
        gradient_sum.begin_last_backward()
        loss = run({"input_ids": ids, "labels": ids})
        nodes = compiled_nodes(loss)
        loss.backward()
        begun = len(gradient_sum._pending)
        gradient_sum.reduce(torch.zeros(2))
    return nodes, begun, [parameter.grad for parameter in model.parameters()]


def test_each_compiled_block_has_a_backward_of_its_own_beside_which_sums_run(tmp_path):
    """The gradients of one compiled backward exist only at its end: with one for the model nothing could overlap."""
    first, second = on_ranks(tmp_path, {"replicate": 2}, compiled_updates)
    for nodes, begun, gradients in (first, second):
        in_block = (len(gradients) - 2) // 3  # all but the embedding and the last norm, in three blocks
        assert nodes.count(in_block) == 3
        assert max(nodes) == in_block
        assert begun == len(gradients)
    for one, other in zip(first[2], second[2], strict=True):
        assert torch.equal(one, other)
