"""Head and loss in one: the numbers of the two apart, without all logits, and only where nothing would be missed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright.loop.outputs import ForwardResult
from trainwright.models.layers import losses as module
from trainwright.models.layers.losses import (
    CHUNK_ELEMENTS,
    is_plain_head,
    is_plain_mean,
    linear_cross_entropy,
    rows_of_chunk,
)

IGNORED = -100


def drawn(num_rows, *, width=6, classes=11, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(classes, width, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, classes, (num_rows,), generator=generator)
    return hidden, weight, targets


def apart(hidden, weight, targets, bias=None):
    return F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, ignore_index=IGNORED)


@settings(max_examples=25, deadline=None)
@given(num_rows=st.integers(1, 20), chunk_rows=st.integers(1, 25), seed=st.integers(0, 99), data=st.data())
def test_loss_and_gradients_are_those_of_head_and_loss_apart(num_rows, chunk_rows, seed, data):
    hidden, weight, targets = drawn(num_rows, seed=seed)
    ignored = data.draw(st.lists(st.integers(1, num_rows - 1), max_size=num_rows - 1)) if num_rows > 1 else []
    targets[ignored] = IGNORED
    loss = linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED, chunk_rows=chunk_rows)
    expected = apart(hidden, weight, targets)
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(3 * loss, (hidden, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(3 * expected, (hidden, weight)))


def test_in_16_bits_the_loss_is_in_full_precision_and_gradients_keep_their_dtype():
    hidden, weight, targets = drawn(64, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED, chunk_rows=16)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, apart(hidden, weight, targets), atol=1e-5, rtol=1e-5)
    exact = [each.detach().float().requires_grad_() for each in (hidden, weight)]
    expected = torch.autograd.grad(apart(*exact, targets), exact)
    for grad, reference in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad.float() - reference).norm() < 0.01 * reference.norm()


def test_gradients_in_float16_do_not_vanish_among_many_tokens():
    hidden, weight, targets = drawn(3000, dtype=torch.float16)
    loss = linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED) * 2.0**14
    exact = [each.detach().float().requires_grad_() for each in (hidden, weight)]
    expected = torch.autograd.grad(apart(*exact, targets) * 2.0**14, exact)
    for grad, reference in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        assert (grad.float() - reference).norm() < 0.01 * reference.norm()


def test_without_any_counted_target_the_loss_is_nan_and_the_gradients_are_zero():
    hidden, weight, targets = drawn(4)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED), ignore_index=IGNORED)
    assert loss.isnan()
    assert all(grad.eq(0).all() for grad in torch.autograd.grad(loss, (hidden, weight)))


def test_no_rows_have_a_total_of_zero_over_no_target_and_zero_gradients():
    hidden, weight, targets = drawn(0)
    bias = torch.zeros(len(weight), requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED, bias=bias)
    mean = ForwardResult(loss, 0, count=(targets != IGNORED).sum()).mean
    assert (float(mean.total.detach()), int(mean.count)) == (0.0, 0)
    grads = torch.autograd.grad(mean.total, (hidden, weight, bias))
    assert [each.shape for each in grads] == [(0, 6), (11, 6), (11,)]
    assert not any(each.any() for each in grads)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen):
    inputs = [*drawn(5)]
    inputs[frozen] = inputs[frozen].detach()
    loss = linear_cross_entropy(*inputs, ignore_index=IGNORED)
    loss.backward()
    torch.testing.assert_close(inputs[1 - frozen].grad, torch.autograd.grad(apart(*inputs), inputs[1 - frozen])[0])


def test_autocast_rounds_as_a_linear_layer_would():
    hidden, weight, targets = drawn(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED)
        expected = apart(hidden, weight, targets)
    torch.testing.assert_close(loss, expected)
    assert [grad.dtype for grad in torch.autograd.grad(loss, (hidden, weight))] == [torch.float32] * 2


def test_a_second_derivative_is_rejected_instead_of_wrong():
    hidden, weight, targets = drawn(3)
    loss = linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED)
    [grad] = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_bias_counts_and_classes_that_fill_up_a_head_do_not(compiled, dtype, on_gpu, monkeypatch):
    monkeypatch.setattr(module, "waits_for_memory", lambda device: on_gpu)  # where heads are filled up
    hidden, weight, targets = drawn(20, dtype=dtype)
    bias = torch.randn(11, generator=torch.Generator().manual_seed(5)).to(dtype).requires_grad_()
    targets[3:6] = IGNORED

    def loss_of(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED, bias=bias, chunk_rows=8)

    run = torch.compile(loss_of, backend="aot_eager", fullgraph=True) if compiled else loss_of
    exact = [each.detach().float().requires_grad_() for each in (hidden, weight, bias)]
    loss, expected = run(hidden, weight, bias), apart(exact[0], exact[1], targets, exact[2])
    close = {} if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.02}
    torch.testing.assert_close(loss, expected, **close)
    grads = torch.autograd.grad(loss, (hidden, weight, bias))
    for grad, reference in zip(grads, torch.autograd.grad(expected, exact), strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), reference, **close)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_the_logits_are_never_whole(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 256 * 500)
    hidden, weight, targets = drawn(1024, classes=500)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED).backward()
    assert largest.elements == 256 * 500
    with Largest() as largest:
        apart(hidden, weight, targets).backward()
    assert largest.elements == 1024 * 500


@given(num_rows=st.integers(1, 10**6), num_classes=st.integers(1, 3 * 10**5))
def test_chunks_are_few_and_within_their_size(num_rows, num_classes):
    rows = rows_of_chunk(num_rows, num_classes)
    assert rows % 128 == 0
    assert rows * num_classes <= CHUNK_ELEMENTS + 128 * num_classes
    assert -(-num_rows // rows) <= -(-num_rows * num_classes // CHUNK_ELEMENTS)


def test_tinyllama_and_gpt2_get_equal_chunks():
    assert rows_of_chunk(8 * 2048, 32000) == 4096
    assert rows_of_chunk(32 * 1024, 50257) == 2560


def hooked(module):
    module.register_forward_hook(lambda *_: None)
    return module


def test_only_a_bare_linear_layer_is_a_plain_head():
    assert is_plain_head(nn.Linear(2, 3, bias=False))
    assert is_plain_head(nn.Linear(2, 3))
    others = [hooked(nn.Linear(2, 3, bias=False)), nn.Sequential(nn.Linear(2, 3, bias=False))]
    assert not any(map(is_plain_head, others))


def test_only_the_mean_over_counted_targets_is_a_plain_mean():
    assert is_plain_mean(nn.CrossEntropyLoss())
    kinds = [{"reduction": "sum"}, {"ignore_index": 0}, {"label_smoothing": 0.1}, {"weight": torch.ones(3)}]
    assert not any(is_plain_mean(nn.CrossEntropyLoss(**kind)) for kind in kinds)
    assert not is_plain_mean(nn.NLLLoss())
    assert not is_plain_mean(hooked(nn.CrossEntropyLoss()))
