"""Models of transformers on a GPU: fast and stock kernels agree, plain rows get no mask, and nothing waits."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright import RunConfig, build_trainer
from trainwright.backends import pick_backend
from trainwright.models import transformers_kernels as kernels
from trainwright.models.layers import attention as masks
from trainwright.models.layers import document_attention, varlen_attention
from trainwright.models.layers.attention import attention
from trainwright.models.layers.varlen_attention import attend_by_starts, attend_within_window, band, document_starts
from trainwright.models.transformers_models import build_transformers

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTH = 1024
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 512,
    "initializer_range": 0.05,
}
WINDOWS = {"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "LlamaForCausalLM": SIZES,
    "Qwen3ForCausalLM": SIZES,
    "Gemma3ForCausalLM": {**SIZES, **WINDOWS},
    "MistralForCausalLM": {**SIZES, "sliding_window": 256},
}
KINDS = ("plain", "ones", "padded right", "padded left", "packed")


@pytest.fixture(autouse=True)
def fresh_kernels():
    """No test counts the compilations of another."""
    torch._dynamo.reset()
    document_attention._compiled_flex.cache_clear()
    yield
    torch.cuda.set_sync_debug_mode(0)


def batch_of(kind, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 512, (2, length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if kind == "ones":
        batch["attention_mask"] = torch.ones_like(tokens)
    if kind.startswith("padded"):
        mask = torch.ones_like(tokens)
        mask[0, -length // 3 :] = 0
        mask[1, -7:] = 0
        mask = mask.flip(1) if kind == "padded left" else mask
        batch |= {"attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    if kind == "packed":
        cuts = (length // 3, length // 2 + 5)
        rows = [torch.cat([torch.arange(cut), torch.arange(length - cut)]) for cut in cuts]
        batch["position_ids"] = torch.stack(rows)
        batch["document_ids"] = (batch["position_ids"] == 0).cumsum(dim=1)
    marked = masks.mark_full_rows(batch)
    (on_device,) = pick_backend("cuda").to_device(iter([marked]))
    assert kind != "ones" or masks.is_full(on_device["attention_mask"])
    return on_device


def build(name, *, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    return build_transformers(getattr(transformers, name), MODELS[name], **options)[0].to("cuda", dtype)


def step(model, batch, run=None):
    """Returns the loss and the gradients."""
    model.zero_grad()
    loss = (model if run is None else run)(**batch).loss
    loss.backward()
    return loss.detach().float(), [each.grad.float().clone() for each in model.parameters()]


def distance(found, expected):
    """Returns how far the gradients are apart, as a share."""
    apart = sum((one - two).square().sum() for one, two in zip(found, expected, strict=True))
    return float((apart / sum(each.square().sum() for each in expected)).sqrt())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_as_exact_as_the_stock_model_s(name, kind, compiled):
    batch = batch_of(kind)
    exact_loss, exact = step(build(name, dtype=torch.float32, kernels="stock"), batch)
    stock_loss, stock = step(build(name, kernels="stock"), batch)
    ours = build(name)
    ours(**batch)  # the test whether documents stay apart runs outside of compiled code
    run = torch.compile(lambda **given: ours(**given), fullgraph=True) if compiled else None
    loss, found = step(ours, batch, run)
    assert isinstance(ours.forward, kernels.FusedForward)
    assert abs(loss - exact_loss) < max(2 * abs(stock_loss - exact_loss), 0.01)
    assert distance(found, exact) < max(1.5 * distance(stock, exact), 0.02)


class Squares(TorchDispatchMode):
    """Notes operations that make a tensor of all pairs of tokens."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor) and each.shape[-2:] == (LENGTH, LENGTH):
                self.found.append(str(function))
        return result


@pytest.mark.parametrize("kind", ["plain", "ones"])
@pytest.mark.parametrize("name", MODELS)
def test_plain_rows_make_no_mask(name, kind):
    model, batch = build(name), batch_of(kind)
    with Squares() as seen:
        step(model, batch)
    assert seen.found == []
    nodes = []

    def backend(graph, inputs):
        nodes.extend(node for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention)
        return graph

    step(model, batch, torch.compile(lambda **given: model(**given), backend=backend, fullgraph=True))
    assert [(node.kwargs["is_causal"], node.kwargs.get("attn_mask")) for node in nodes] == [(True, None)] * len(nodes)
    num_windows = {"Gemma3ForCausalLM": 1, "MistralForCausalLM": 2}.get(name, 0)
    assert len(nodes) == 2 - num_windows


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_no_step_waits_for_the_device(name, kind):
    """For packed rows, transformers itself asks the positions whether there are several documents, unless compiled."""
    model, batch = build(name), batch_of(kind)
    for _ in range(2):
        step(model, batch)
    torch.cuda.set_sync_debug_mode("error")
    step(model, batch)


def test_batches_with_and_without_padding_are_two_graphs():
    model = build("LlamaForCausalLM")
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    run = torch.compile(lambda **given: model(**given), backend=backend, fullgraph=True)
    for kind in ("ones", "padded left", "ones", "padded right", "padded left", "ones"):
        step(model, batch_of(kind), run)
    assert len(compilations) == 2


def drawn(width=64, length=512):
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(2, length, heads, width, device="cuda", generator=generator, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (8, 2, 2)
    ]


def with_gradients(function, tensors):
    mixed = function(*tensors)
    weights = torch.linspace(-1, 1, mixed.numel(), device="cuda", dtype=mixed.dtype).view(mixed.shape)
    return [mixed.detach().float(), *(each.float() for each in torch.autograd.grad(mixed, tensors, weights))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 100])
def test_documents_by_their_starts_and_windows_equal_their_masks(width, window, compiled):
    tensors = drawn(width)
    ids = (torch.rand(2, 512, device="cuda") < 0.02).cumsum(dim=1)

    def by_starts(*tensors):
        documents = document_starts(ids, window=window)
        return attend_by_starts(*tensors, documents.starts, window=window, scale=None)

    def by_mask(*tensors):
        return attention(*tensors, mask=document_starts(ids, window=window).visible())

    found = with_gradients(torch.compile(by_starts, fullgraph=True) if compiled else by_starts, tensors)
    assert distance(found, with_gradients(by_mask, tensors)) < 0.015


@pytest.mark.parametrize("width", [64, 256])
def test_a_window_equals_its_mask(width):
    tensors = drawn(width)
    expected = with_gradients(lambda *each: attention(*each, mask=band(512, 100, device="cuda")), tensors)
    found = with_gradients(lambda *each: attend_within_window(*each, 100, scale=None), tensors)
    assert distance(found, expected) < 0.015
    assert "window_size" in varlen_attention._arguments()


def test_a_recorded_step_keeps_the_strides_of_full_rows():
    backend = pick_backend("cuda")
    backend.claim()
    seen = []

    def run(inputs):
        seen.append([each.stride() for each in inputs])
        return [inputs[0].sum() + inputs[1].sum()]

    mask = masks.full_rows(2, 8, device=backend.device, dtype=torch.long)
    values = torch.arange(16, device=backend.device).view(2, 8)
    recording, (first,) = backend.record(run, [mask, values])
    assert seen == [[(0, 0), (8, 1)]]
    assert first.item() == 16 + 120
    assert recording.replay([mask, values + 1])[0].item() == 16 + 136


RUN = """
model: {{type: "transformers:{name}", {sizes}}}
data: {{train: {{type: parts.py:Rows, padding: {padding}}}, collator: {{type: padded, pad_token_id: 0}}}}
trainer: {{type: language_model, max_steps: 6, global_batch_size: 4, optimizer: {{type: adamw, lr: 1e-3}}}}
checkpoint: {{every_steps: null}}
log: {{every_steps: 1}}
writers: [json]
runtime: {{device: cuda, precision: bf16}}
"""
PARTS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __init__(self, padding=0):
        self.padding = padding

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 1024 - (index * 37 % self.padding if self.padding and index % 4 else 0)
        return {"input_ids": torch.randint(1, 512, (length,), generator=generator)}
"""
PACKED = "data.train={type: pack, length: 1024, source: {type: parts.py:Rows, padding: 900}}"


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_runs_have_the_losses_of_the_stock_model_in_every_mode(tmp_path, name, kind, mode):
    sizes = ", ".join(f"{key}: {value}" for key, value in MODELS[name].items())
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(RUN.format(name=name, sizes=sizes, padding=900 if kind == "padded" else 0))
    more = [PACKED, "data.collator=stack"] if kind == "packed" else []
    losses = {}
    for which in ("stock", "fast"):
        settings = [f"name={which}", f"output_dir={tmp_path}", f"model.kernels={which}", f"runtime.mode={mode}", *more]
        trainer = build_trainer(RunConfig.load(tmp_path / "run.yaml", settings))
        trainer.train()
        lines = (tmp_path / which / "metrics.json").read_text("utf-8").splitlines()
        losses[which] = json.loads(lines[-1])["loss"]
    assert losses["fast"] == pytest.approx(losses["stock"], rel=5e-3)
