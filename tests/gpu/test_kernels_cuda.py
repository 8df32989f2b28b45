"""Kernels of attention and of the loss on a GPU: that their numbers are right, and that nobody waits."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from trainwright.memory.activation_checkpointing import recompute_layers
from trainwright.memory.repeated_blocks import compile_stacks
from trainwright.models.gpt2 import GPT2
from trainwright.models.layers import attention as masks
from trainwright.models.layers import document_attention as borders_module
from trainwright.models.layers.attention import WholeSequence
from trainwright.models.layers.document_attention import document_borders, visible_pairs
from trainwright.models.layers.losses import linear_cross_entropy
from trainwright.models.llama import Llama

if torch.cuda.is_available():
    from trainwright.models.layers.softmax_kernel import softmax_gradient

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

IGNORED = -100


@pytest.fixture(autouse=True)
def fresh_kernels():
    """No test counts the compilations of another."""
    torch._dynamo.reset()
    borders_module._compiled_flex.cache_clear()
    yield
    torch.cuda.set_sync_debug_mode(0)


def drawn(length=1024, *, width=64, heads=8, kv_heads=2, batch=2, dtype=torch.bfloat16):
    """Queries, keys, values as a model's projections lie, and a gradient [B, S, heads × width]."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(count):
        return torch.randn(batch, length, count, width, device="cuda", generator=generator).to(dtype)

    tensors = [draw(count).transpose(1, 2).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    return tensors, draw(heads).flatten(2)


def packed(length, *, batch=2, seed=0):
    """Rows of documents of about 100 tokens, and some padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(batch, length, generator=generator) < 0.01).cumsum(dim=1)
    ids[:, length - 50 :] = -1
    return ids.cuda()


def joined(mixed):
    """Heads side by side, as a model goes on with them: the gradient then reaches attention as a model's does.

    Gradients that lie otherwise are not for this test: cuDNN's plans, as torch keeps them, do not tell them apart.
    """
    return mixed.transpose(1, 2).flatten(2)


def attend(*tensors, **settings):
    has_groups = tensors[0].shape[1] != tensors[1].shape[1]
    return joined(WholeSequence().attend(*tensors, enable_gqa=has_groups, **settings))


def exact(tensors, gradient, *, mask=None):
    """Attention and its gradients in float64."""
    precise = [each.detach().double().requires_grad_() for each in tensors]
    has_groups = tensors[0].shape[1] != tensors[1].shape[1]
    mixed = F.scaled_dot_product_attention(*precise, attn_mask=mask, is_causal=mask is None, enable_gqa=has_groups)
    mixed = joined(mixed)
    return [mixed.detach(), *torch.autograd.grad(mixed, precise, gradient.double())]


def both(attend, tensors, gradient, **settings):
    mixed = attend(*tensors, **settings)
    return [mixed.detach(), *torch.autograd.grad(mixed, tensors, gradient)]


def assert_near(found, expected, limit=0.015):
    for one, two in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert float((one.double() - two).norm() / two.norm()) < limit


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("length", [512, 1024, 1000, 333])
def test_causal_attention_and_its_gradients_are_right(width, kv_heads, length):
    tensors, gradient = drawn(length, width=width, kv_heads=kv_heads)
    assert_near(both(attend, tensors, gradient, is_causal=True), exact(tensors, gradient))


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_compiled_causal_attention_is_right_after_eager(kv_heads):
    tensors, gradient = drawn(kv_heads=kv_heads)
    both(attend, tensors, gradient, is_causal=True)
    found = both(torch.compile(attend, fullgraph=True), tensors, gradient, is_causal=True)
    assert_near(found, exact(tensors, gradient))


def test_deterministic_algorithms_give_equal_bits():
    tensors, gradient = drawn()
    torch.use_deterministic_algorithms(True)  # torch then leaves cuDNN's kernel out
    try:
        first, second = (both(attend, tensors, gradient, is_causal=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))
    assert_near(first, exact(tensors, gradient))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_borders_in_blocks_equal_the_mask_of_all_pairs(width, kv_heads, compiled):
    tensors, gradient = drawn(width=width, kv_heads=kv_heads)
    documents = packed(1024)
    assert borders_module.has_blocks(documents)

    def attend_within(*tensors, documents):
        return attend(*tensors, mask=document_borders(documents))

    run = torch.compile(attend_within, fullgraph=True) if compiled else attend_within
    found = both(run, tensors, gradient, documents=documents)
    assert not borders_module._compiled_flex().failed
    assert_near(found, exact(tensors, gradient, mask=visible_pairs(documents)))
    first, second = (both(run, tensors, gradient, documents=documents) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_blocks_of_other_documents_take_no_memory_of_scores():
    tensors, gradient = drawn(8192, heads=4, kv_heads=4)
    borders = document_borders(packed(8192))
    both(attend, tensors, gradient, mask=borders)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both(attend, tensors, gradient, mask=borders)
    assert torch.cuda.max_memory_allocated() - before < 2 * 8192 * 8192  # bytes: of a mask alone


def test_neither_borders_nor_attention_nor_the_loss_wait_for_the_device():
    tensors, gradient = drawn()
    documents = packed(1024)
    hidden = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1003, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 1003, (512,), device="cuda")
    for mode in (0, 0, "error"):
        torch.cuda.set_sync_debug_mode(mode)
        both(attend, tensors, gradient, mask=document_borders(documents))
        both(attend, tensors, gradient, is_causal=True)
        linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED, chunk_rows=128).backward()
        torch.cuda.set_sync_debug_mode(0)


def test_a_captured_graph_follows_the_borders_of_each_batch():
    tensors, gradient = drawn()
    documents = packed(1024)

    def work():
        return both(attend, tensors, gradient, mask=document_borders(documents))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    for seed in (1, 2):
        documents.copy_(packed(1024, seed=seed))
        graph.replay()
        assert_near(found, exact(tensors, gradient, mask=visible_pairs(documents)))


@pytest.mark.parametrize("settings", [{"dropout": 0.1}, {"dtype": torch.float32}], ids=str)
def test_where_flex_attention_cannot_be_the_mask_of_all_pairs_stands_in(settings):
    tensors, gradient = drawn(512, dtype=settings.get("dtype", torch.bfloat16))
    borders = document_borders(packed(512))
    found = both(attend, tensors, gradient, mask=borders, dropout=settings.get("dropout", 0.0))
    assert all(each.isfinite().all() for each in found)
    if not settings.get("dropout"):
        assert_near(found, exact(tensors, gradient, mask=visible_pairs(borders.document_ids)), limit=1e-3)


def loss_and_grads(model, batch, *, run=None):
    run = model if run is None else run
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = run(**batch)["loss"]
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def recomputed(model):
    recompute_layers(model, {"layers": ["DecoderLayer"]})
    return model


def kept_attention(model):
    recompute_layers(model, {"layers": ["DecoderLayer"], "save": ["mm", "scaled_dot_product_attention"]})
    return model


def scanned(model):
    compile_stacks(model, "model.layers")
    return model


WAYS = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, fullgraph=True),
    "activation_checkpointing": recomputed,
    "activation_checkpointing that keeps": kept_attention,
    "compile_repeated_blocks": scanned,
    "activation_checkpointing and compile_repeated_blocks": lambda model: scanned(recomputed(model)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_learns_the_same_by_borders_and_by_mask(way, monkeypatch):
    torch.manual_seed(0)
    sizes = {"vocab_size": 1003, "hidden_size": 256, "num_layers": 2, "num_heads": 4, "max_positions": 1024}
    with torch.device("cuda"):
        model = Llama(**sizes, num_kv_heads=2, initializer_range=0.1)
    tokens = torch.randint(0, 1003, (2, 1024), device="cuda")
    batch = {"input_ids": tokens, "labels": tokens, "document_ids": packed(1024)}
    assert borders_module.has_blocks(batch["document_ids"])
    with monkeypatch.context() as patch:
        patch.setattr(masks, "has_blocks", lambda *_, **__: False)
        expected = loss_and_grads(model, batch)
    found = loss_and_grads(model, batch, run=WAYS[way](model))
    assert not borders_module._compiled_flex().failed
    assert_near(found, [each.double() for each in expected], limit=0.03)


@pytest.mark.parametrize("compiled", [False, True])
def test_gpt2_takes_head_and_loss_in_one_by_itself(compiled):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50257, "hidden_size": 128, "num_layers": 1, "num_heads": 2, "max_positions": 512}
    with torch.device("cuda"):
        model = GPT2(**sizes)
    tokens = torch.randint(0, 50257, (8, 512), device="cuda")
    batch = {"input_ids": tokens, "labels": tokens}
    model.fused_loss = False
    expected = loss_and_grads(model, batch)
    model.fused_loss = None
    assert model(**batch)["logits"] is None
    found = loss_and_grads(model, batch, run=torch.compile(model, fullgraph=True) if compiled else None)
    torch.testing.assert_close(found[0], expected[0], atol=2e-3, rtol=0)
    assert_near(found[1:], [each.double() for each in expected[1:]], limit=0.03)


@pytest.mark.parametrize("classes", [32000, 50257])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_is_exact_and_the_logits_are_never_whole(classes, compiled):
    torch.manual_seed(0)
    hidden = torch.randn(16384, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, 256, device="cuda") * 0.05).bfloat16().requires_grad_()
    targets = torch.randint(0, classes, (16384,), device="cuda")
    targets[::7] = IGNORED

    def loss_of(hidden, weight):
        return linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED)

    run = torch.compile(loss_of, fullgraph=True) if compiled else loss_of
    torch.autograd.grad(run(hidden, weight), (hidden, weight))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = run(hidden, weight)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert torch.cuda.max_memory_allocated() - before < 4 * 16384 * classes  # bytes: of all logits in float32
    precise = [each.detach().float().requires_grad_() for each in (hidden, weight)]
    expected = F.cross_entropy(F.linear(*precise), targets, ignore_index=IGNORED)
    torch.testing.assert_close(loss, expected, atol=2e-3, rtol=0)
    assert_near(grads, [each.double() for each in torch.autograd.grad(expected, precise)], limit=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("classes", [7, 8192, 50304])
def test_shares_and_their_gradients_are_right(dtype, classes):
    torch.manual_seed(0)
    logits = (10 * torch.randn(33, classes, device="cuda")).to(dtype)
    logits[1, : classes // 2] = -float("inf")
    logits[2, 0] = float("nan")
    targets = torch.randint(classes // 2, classes, (33, 1), device="cuda")
    kept = logits.clone()
    of_target, gradients = softmax_gradient(logits, targets)
    precise = logits.double().requires_grad_()
    log_shares = torch.log_softmax(precise, dim=-1)
    torch.testing.assert_close(of_target.double(), log_shares.gather(1, targets), equal_nan=True, rtol=1e-5, atol=1e-4)
    shares = log_shares.detach().exp().scatter_add_(1, targets, -torch.ones_like(precise[:, :1]))
    torch.testing.assert_close(gradients.double(), shares, equal_nan=True, rtol=0, atol=1e-5 + torch.finfo(dtype).eps)
    assert torch.equal(logits.nan_to_num(), kept.nan_to_num())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("classes", "label"), [(512, -1), (512, 512), (512, 520), (500, 505), (500, 2**40)])
def test_a_label_outside_of_the_classes_gives_a_loss_and_gradients_of_nan(classes, label, compiled):
    hidden = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.arange(256, device="cuda")
    targets[3] = label
    function = torch.compile(linear_cross_entropy) if compiled else linear_cross_entropy
    loss = function(hidden, weight, targets, ignore_index=IGNORED)
    loss.backward()
    assert loss.isnan()
    assert hidden.grad[3].isnan().all()
    assert hidden.grad[4].isfinite().all()
    targets[3] = IGNORED
    assert linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED).isfinite()


def test_a_loss_is_planned_without_memory():
    with FakeTensorMode():
        hidden = torch.empty(256, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(100, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(256, dtype=torch.long, device="cuda")
        linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED).backward()
        assert weight.grad.shape == weight.shape
