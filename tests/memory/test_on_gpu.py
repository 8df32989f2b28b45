"""What only a GPU can show: memory that is given back, copies beside the computation, inductor's kernels."""

import pytest
import torch
from tests.memory.models import Stack, assert_same_bits, make, update_of
from torch import nn

from trainwright.memory.activation_checkpointing import recompute_layers
from trainwright.memory.offload import offload_tensors, offloading
from trainwright.memory.repeated_blocks import compile_stacks
from trainwright.models.layers.annotations import name_tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BATCH = 2**18
MIB = 2**20


def batch():
    return {"x": torch.linspace(-1, 1, 8 * BATCH, device="cuda").reshape(BATCH, 8)}


def on_gpu(rewrite=lambda model: None, **sizes):
    model = make(lambda: Stack(8, **sizes)).cuda()
    rewrite(model)
    return model


def recompute(model):
    recompute_layers(model, "Layer")


def recompute_and_offload(model):
    offload_tensors(model, ["layer_input"])
    recompute_layers(model, "Layer")


def held(model, points):
    """The bytes on the device that wait for the backward pass."""
    update_of(model, points)
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = model(**points)["loss"]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_allocated() - before
    loss.backward()
    return taken


@pytest.mark.parametrize(
    "rewrite", [recompute, recompute_and_offload, lambda model: offload_tensors(model, "layer_input")]
)
def test_on_a_gpu_the_bits_are_the_same(rewrite):
    points = batch()
    before = update_of(on_gpu(), points)
    model = on_gpu(rewrite)
    for _ in range(3):
        assert_same_bits(update_of(model, points), before)


def test_each_setting_leaves_less_on_the_gpu():
    points = batch()
    plain, recomputed, offloaded = (
        held(on_gpu(rewrite), points) for rewrite in (lambda model: None, recompute, recompute_and_offload)
    )
    one_input = 4 * 8 * BATCH
    assert plain > 4 * recomputed
    # The inputs of eight layers; what scales them is a view of the same, and what stays is the end of the stack.
    assert recomputed - offloaded >= 7 * one_input
    assert offloaded < 3 * one_input


def test_memory_that_is_used_again_is_not_taken_for_the_named_tensor():
    x = torch.linspace(-1, 1, MIB, device="cuda").requires_grad_()

    def act():
        total = torch.zeros_like(x)
        for number in range(8):
            hidden = x * (number + 1)
            if number % 2 == 0:
                name_tensor(hidden, "hidden")
            total = total + hidden.square()
            del hidden  # one that was named is given back here, and the next takes its place
        return total.sum()

    act().backward()
    plain, x.grad = x.grad, None
    with offloading(["hidden"]) as watch:
        loss = act()
    loss.backward()
    assert torch.equal(x.grad, plain)
    assert watch.moved == {"hidden"}


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_stack_compiled_by_inductor_agrees(is_recomputed):
    points = {"x": batch()["x"][:64]}
    before = update_of(on_gpu(chance=0.0), points)
    model = on_gpu(recompute if is_recomputed else nn.Module.train, chance=0.0)
    compile_stacks(model, "layers")
    for name, value in update_of(model, points).items():
        torch.testing.assert_close(value, before[name], rtol=1e-4, atol=1e-5)


def test_offloaded_inputs_of_compiled_and_recomputed_blocks_agree():
    points = {"x": batch()["x"][:64]}
    before = update_of(on_gpu(chance=0.0), points)
    model = on_gpu(recompute_and_offload, chance=0.0)
    compile_stacks(model, "layers")
    for name, value in update_of(model, points).items():
        torch.testing.assert_close(value, before[name], rtol=1e-4, atol=1e-5)
