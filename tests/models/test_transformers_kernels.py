"""Models of transformers give the stock model's losses and gradients with our attention and the fused head."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from tests.messages import raises

from trainwright.config import RunConfig
from trainwright.errors import ConfigError
from trainwright.models import transformers_kernels as kernels
from trainwright.models.from_config import build_model_section
from trainwright.models.layers import attention as masks
from trainwright.models.layers import document_attention
from trainwright.models.transformers_models import build_transformers

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
    "initializer_range": 0.2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
WITHOUT_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "initializer_range": 0.2, **WITHOUT_DROPOUT}
DECODERS = {
    "LlamaForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 16},
    "MistralForCausalLM": {**GROUPED, "sliding_window": 64},
    "GemmaForCausalLM": {**GROUPED, "head_dim": 8},
    "Gemma3ForCausalLM": {**GROUPED, "head_dim": 8, **WINDOWS},
    "Phi3ForCausalLM": {**GROUPED, "pad_token_id": None},
    "GPT2LMHeadModel": GPT2,
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1},
}
FUSED = set(DECODERS) - {"MixtralForCausalLM"}  # which may add a loss of its routers
DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2, "vocab_size": 61, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0, "initializer_factor": 0.3}
LENGTH = 256


def batch_of(kind, length=LENGTH):
    torch.manual_seed(1)
    tokens = torch.randint(1, 61, (2, length))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if kind in ("padded right", "padded left"):
        mask = torch.ones_like(tokens)
        mask[0, -50:] = 0
        mask[1, -7:] = 0
        mask = mask.flip(1) if kind == "padded left" else mask
        batch |= {"attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    if kind == "packed":
        cuts = (100, 37)
        batch["position_ids"] = torch.stack(
            [torch.cat([torch.arange(cut), torch.arange(length - cut)]) for cut in cuts]
        )
    if kind == "mask":
        documents = torch.arange(length).expand(2, -1) // 100
        batch["attention_mask"] = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    return batch


def pair(name, settings, **more):
    """Returns the stock model and ours, with the same weights."""
    target = getattr(transformers, name)
    torch.manual_seed(0)
    stock = build_transformers(target, {**settings, **more}, kernels="stock")[0]
    torch.manual_seed(0)
    ours = build_transformers(target, {**settings, **more})[0]
    assert ours.config._attn_implementation == kernels.ATTENTION
    return stock, ours


def assert_equal_steps(stock, ours, batch, run=None, **tolerance):
    expected = stock(**batch).loss
    expected.backward()
    found = (ours if run is None else run)(**batch).loss
    found.backward()
    torch.testing.assert_close(found, expected, **tolerance)
    gradients = {name: each.grad for name, each in stock.named_parameters()}
    for name, each in ours.named_parameters():
        torch.testing.assert_close(
            each.grad, gradients[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


@pytest.fixture
def blocks(monkeypatch):
    """Makes padding and documents borders in blocks, as on a GPU; without its kernel they become masks late."""
    for module in (kernels, masks):
        monkeypatch.setattr(module, "has_blocks", lambda rows: not rows.shape[1] % document_attention.BLOCK)


@pytest.mark.parametrize("kind", ["plain", "padded right", "padded left", "packed", "mask"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_has_the_stock_loss_and_gradients(name, kind, blocks):
    stock, ours = pair(name, DECODERS[name])
    tolerance = {"atol": 2e-5, "rtol": 2e-4}
    assert_equal_steps(stock, ours, batch_of(kind), **tolerance)


@pytest.mark.parametrize("kind", ["plain", "padded right", "mask"])
def test_encoders_have_the_stock_loss_and_gradients(kind):
    batch = batch_of(kind)
    if kind == "mask":  # of an encoder
        mask = batch["attention_mask"]
        batch["attention_mask"] = mask | mask.transpose(2, 3)
    settings = {**SIZES, **DROPOUT}
    assert_equal_steps(*pair("BertForMaskedLM", settings), batch, atol=2e-5, rtol=2e-4)
    assert_equal_steps(*pair("T5ForConditionalGeneration", T5), batch, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("kind", ["plain", "padded right", "packed"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_compiled_models_have_the_stock_loss_and_build_no_mask_of_plain_rows(name, kind, blocks):
    stock, ours = pair(name, {**DECODERS[name], "num_hidden_layers": 1})
    calls = []

    def note(graph, inputs):
        called = [node for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention]
        calls.extend(node.kwargs for node in called)
        return graph

    torch._dynamo.reset()
    run = torch.compile(ours, backend=note, fullgraph=True)
    stock(**batch_of(kind))  # the test whether documents stay apart runs outside of compiled code
    ours(**batch_of(kind))
    assert_equal_steps(stock, ours, batch_of(kind, 128), run, atol=2e-5, rtol=2e-4)
    is_free = kind == "plain" and name == "LlamaForCausalLM"  # on a CPU a window is a mask
    assert [bool(each["is_causal"]) for each in calls] == [is_free]
    assert [each["attn_mask"] is None for each in calls] == [is_free]


def test_keys_and_values_are_not_repeated(monkeypatch):
    heads = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, **rest: heads.append(k.shape[1]) or attend(q, k, v, **rest)
    )
    _, ours = pair("LlamaForCausalLM", GROUPED)
    for kind in ("mask", "mask", "padded right", "packed", "plain"):  # the first packed batch is tested in addition
        heads.clear()
        ours(**batch_of(kind))
    assert heads == [2, 2]


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_head_and_loss_in_one_have_the_stock_loss_and_gradients(name):
    stock, ours = pair(name, DECODERS[name])
    assert isinstance(vars(ours).get("forward"), kernels.FusedForward) == (name in FUSED)
    if name in FUSED:
        kernels.fuse_head(ours, wanted=True)
        assert not hasattr(ours(**batch_of("plain")), "logits")
        for kind in ("plain", "padded right"):
            stock.zero_grad(), ours.zero_grad()
            assert_equal_steps(stock, ours, batch_of(kind), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", ["GraniteForCausalLM", "CohereForCausalLM", "OPTForCausalLM"])
def test_forwards_that_change_the_logits_are_not_fused(name):
    assert not kernels._is_plain_forward(getattr(transformers, name).forward)


def test_a_cap_of_the_logits_is_not_fused():
    settings = {**GROUPED, "head_dim": 8, "final_logit_softcapping": 30.0}
    ours = build_transformers(transformers.Gemma3ForCausalLM, settings)[0]
    assert "forward" not in vars(ours)


def test_evaluation_hooks_and_other_losses_get_logits():
    _, ours = pair("LlamaForCausalLM", GROUPED)
    assert ours(**batch_of("plain")).logits is not None  # by itself, only on a GPU
    kernels.fuse_head(ours, wanted=True)
    batch = batch_of("plain")
    assert ours(**batch, num_items_in_batch=torch.tensor(7)).logits is not None
    assert ours(input_ids=batch["input_ids"]).logits is not None
    assert ours(batch["input_ids"], labels=batch["labels"]).logits is not None
    ours.eval()
    assert ours(**batch).logits is not None


def test_a_copied_or_pickled_model_calls_itself():
    _, ours = pair("LlamaForCausalLM", GROUPED)
    kernels.fuse_head(ours, wanted=True)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        with torch.no_grad():
            other.lm_head.weight.zero_()
        assert other(**batch_of("plain")).loss.item() == pytest.approx(torch.tensor(61.0).log().item())
    assert ours(**batch_of("plain")).loss.item() > 4.5


def test_generated_tokens_are_those_of_the_stock_model():
    stock, ours = pair("LlamaForCausalLM", GROUPED)
    tokens = torch.randint(1, 61, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(stock.eval().generate(tokens, **options), ours.eval().generate(tokens, **options))


def test_a_saved_config_does_not_name_the_kernels(tmp_path):
    _, ours = pair("LlamaForCausalLM", GROUPED)
    ours.save_pretrained(tmp_path)
    assert "trainwright" not in (tmp_path / "config.json").read_text("utf-8")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"


def section(text, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {text}\n")
    config = RunConfig.load(file)
    return build_model_section(config.model, project_dir=tmp_path, origin=config.origin)[0]


def test_the_setting_selects_the_kernels(tmp_path):
    small = "hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16, vocab_size: 61"
    llama = "type: 'transformers:LlamaForCausalLM', " + small
    assert section(f"{{{llama}}}", tmp_path).config._attn_implementation == kernels.ATTENTION
    assert section(f"{{{llama}, attn_implementation: eager}}", tmp_path).config._attn_implementation == "eager"
    stock = section(f"{{{llama}, kernels: stock}}", tmp_path)
    assert (stock.config._attn_implementation, "forward" in vars(stock)) == ("sdpa", False)
    with raises(ConfigError, "model.kernels", "fast, stock"):
        section(f"{{{llama}, kernels: quick}}", tmp_path)
    with raises(ConfigError, "model.kernels", "vit"):
        section("{type: vit, preset: tiny, kernels: stock}", tmp_path)
