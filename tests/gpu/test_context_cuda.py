"""torch's ring attention on a GPU, as context parallelism calls it: with a ring of one rank it is plain attention."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainwright.parallel.context import ring_attention, ring_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def ring_of_one(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 5e-3), (torch.float16, 6e-4), (torch.float32, 2e-6)], ids=str
)
def test_the_ring_gives_attention_and_its_gradients(ring_of_one, dtype, limit):
    torch.manual_seed(0)
    queries, gradient = torch.randn(2, 2, 8, 512, 64, device="cuda").to(dtype)
    keys, values = torch.randn(2, 2, 2, 512, 64, device="cuda").to(dtype)
    tensors = [each.requires_grad_() for each in (queries, keys, values)]
    kernel = ring_kernel(queries, keys)
    assert kernel is not None
    mixed = ring_attention(*tensors, group=ring_of_one, kernel=kernel)
    found = [mixed.detach(), *torch.autograd.grad(mixed, tensors, gradient)]
    precise = [each.detach().double().requires_grad_() for each in tensors]
    whole = F.scaled_dot_product_attention(*precise, is_causal=True, enable_gqa=True)
    expected = [whole.detach(), *torch.autograd.grad(whole, precise, gradient.double())]
    for one, two in zip(found, expected, strict=True):
        assert float((one.double() - two).norm() / two.norm()) < limit
