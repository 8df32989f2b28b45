"""Models of transformers give the stock model's losses and gradients with our attention and the fused head."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from tests.messages import raises
from tests.parallel.forked_ranks import on_ranks

from trainwright import build_trainer
from trainwright.config import RunConfig
from trainwright.errors import ConfigError
from trainwright.models import transformers_kernels as kernels
from trainwright.models.from_config import build_model_section
from trainwright.models.layers import attention as masks
from trainwright.models.layers import document_attention, kernel_table, varlen_attention
from trainwright.models.transformers_models import build_transformers, find_crossings
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters

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
        monkeypatch.setattr(module, "has_blocks", lambda rows, *_, **__: not rows.shape[1] % document_attention.BLOCK)


@pytest.mark.parametrize("kind", ["plain", "padded right", "padded left", "packed", "mask"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_has_the_stock_loss_and_gradients(name, kind, blocks):
    stock, ours = pair(name, DECODERS[name])
    tolerance = {"atol": 2e-5, "rtol": 2e-4}
    assert_equal_steps(stock, ours, batch_of(kind), **tolerance)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"])
def test_documents_by_their_starts_have_the_stock_loss_and_gradients(name, monkeypatch):
    by_starts = (kernel_table.Row("varlen", 0, kernel_table.FLASH_WIDTHS),)
    monkeypatch.setattr(kernel_table, "FASTEST", dict.fromkeys(kernel_table.FASTEST, by_starts))
    seen = []
    make_mask = kernels.make_mask
    monkeypatch.setattr(kernels, "make_mask", lambda **given: seen.append(make_mask(**given)) or seen[-1])
    monkeypatch.setattr(kernels, "ATTENTION", "by_starts")
    kernels._register.cache_clear()
    stock, ours = pair(name, DECODERS[name])
    assert_equal_steps(stock, ours, batch_of("packed"), atol=2e-5, rtol=2e-4)
    assert {type(each) for each in seen} == {varlen_attention.DocumentStarts}
    windows = {"LlamaForCausalLM": {None}, "MistralForCausalLM": {64}, "Gemma3ForCausalLM": {None, 64}}
    assert {each.window for each in seen} == windows[name]
    kernels._register.cache_clear()


@pytest.mark.parametrize("kind", ["plain", "padded right", "mask"])
def test_encoders_have_the_stock_loss_and_gradients(kind):
    batch = batch_of(kind)
    if kind == "mask":  # of an encoder
        mask = batch["attention_mask"]
        batch["attention_mask"] = mask | mask.transpose(2, 3)
    settings = {**SIZES, **DROPOUT}
    assert_equal_steps(*pair("BertForMaskedLM", settings), batch, atol=2e-5, rtol=2e-4)
    assert_equal_steps(*pair("T5ForConditionalGeneration", T5), batch, atol=2e-5, rtol=2e-4)


class Compiled:
    """A compiled model, and the attention in its graphs."""

    def __init__(self, model):
        torch._dynamo.reset()
        self.num_graphs = 0
        self.attention = []
        self._run = torch.compile(lambda batch: model(**batch), backend=self._note, fullgraph=True)

    def __call__(self, **batch):
        return self._run(batch)

    def _note(self, graph, inputs):
        self.num_graphs += 1
        called = [node for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention]
        self.attention += [(node.kwargs["is_causal"], node.kwargs["attn_mask"] is not None) for node in called]
        return graph

    @property
    def has_masks(self):
        return any(has_mask for _, has_mask in self.attention)


def shallow(settings):
    depth = "n_layer" if "n_layer" in settings else "num_hidden_layers"
    return settings if "layer_types" in settings else {**settings, depth: 1}


@pytest.mark.parametrize("kind", ["plain", "padded left", "packed"])
@pytest.mark.parametrize("name", DECODERS)
def test_compiled_decoders_have_the_stock_loss_and_no_masks_for_plain_rows(name, kind, blocks):
    stock, ours = pair(name, shallow(DECODERS[name]))
    run = Compiled(ours)
    batch = batch_of(kind, 128)
    stock(**batch)  # the test whether documents stay apart runs outside of compiled code
    ours(**batch)
    assert_equal_steps(stock, ours, batch, run, atol=2e-5, rtol=2e-4)
    has_window = "sliding_window" in DECODERS[name]  # which is a mask on the CPU
    assert run.has_masks == (kind != "plain" or has_window)
    assert run.num_graphs == 1


@pytest.mark.parametrize(("name", "settings"), [("BertForMaskedLM", {**SIZES, **DROPOUT}), ("T5Model", T5)])
def test_compiled_encoders_have_the_stock_loss(name, settings):
    name = name.replace("T5Model", "T5ForConditionalGeneration")
    stock, ours = pair(name, {**settings, "num_layers" if name.startswith("T5") else "num_hidden_layers": 1})
    run = Compiled(ours)
    for kind in ("plain", "padded right"):
        stock.zero_grad(), ours.zero_grad()
        assert_equal_steps(stock, ours, batch_of(kind, 32), run, atol=2e-5, rtol=2e-4)
    assert run.num_graphs == 2


def test_a_mask_of_ones_is_as_good_as_none_and_other_batches_compile_once():
    stock, ours = pair("LlamaForCausalLM", shallow(GROUPED))
    run = Compiled(ours)
    ones = {**batch_of("plain", 128), "attention_mask": torch.ones(2, 128, dtype=torch.long)}
    marked = masks.mark_full_rows(ones)
    assert torch.equal(marked["attention_mask"], ones["attention_mask"])
    assert marked["attention_mask"].dtype == torch.long
    assert_equal_steps(stock, ours, ones, lambda **_: run(**marked), atol=2e-5, rtol=2e-4)
    assert (run.num_graphs, run.has_masks) == (1, False)
    for number in range(4):
        padded = batch_of("padded right", 128)
        padded["attention_mask"][:, 60 + number :] = 0
        run(**masks.mark_full_rows(padded))
        run(**masks.mark_full_rows(ones))
    assert (run.num_graphs, run.has_masks) == (2, True)


def test_only_masks_without_padding_are_marked():
    ones = torch.ones(2, 6, dtype=torch.long)
    padded = ones.clone()
    padded[1, 5] = 0
    batch = {"attention_mask": padded, "decoder_attention_mask": ones.bool(), "labels": ones, "x": [1]}
    marked = masks.mark_full_rows(batch)
    assert [name for name in batch if marked[name] is not batch[name]] == ["decoder_attention_mask"]
    assert masks.is_full(marked["decoder_attention_mask"])
    assert masks.is_full(marked["decoder_attention_mask"][1:])  # a micro-batch
    for other in (
        {"attention_mask": padded},
        {"attention_mask": ones[None, None]},
        {"attention_mask": 2 * ones},
        [ones],
    ):
        assert masks.mark_full_rows(other) is other


def test_a_window_of_both_sides_is_not_taken_for_documents(blocks):
    settings = {**SIZES, "vocab_size": 61, "local_attention": 2 * LENGTH, "pad_token_id": 0, "cls_token_id": 1}
    settings |= {"layer_types": ["sliding_attention", "full_attention"], "sep_token_id": 2, "eos_token_id": 2}
    stock, ours = pair("ModernBertForMaskedLM", settings)
    for kind in ("plain", "padded right"):
        stock.zero_grad(), ours.zero_grad()
        assert_equal_steps(stock, ours, batch_of(kind), atol=2e-5, rtol=2e-4)


def test_layers_that_compute_with_their_mask_keep_their_attention():
    class Layer(torch.nn.Module):
        def forward(self, states, attention_mask):
            return states + attention_mask.sum()

    class Passing(torch.nn.Module):
        def forward(self, states, attention_mask=None):
            return self.attend(states, attention_mask=attention_mask)

    assert kernels._computes_with_mask(Layer.forward)
    assert not kernels._computes_with_mask(Passing.forward)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    model.model.layers.append(Layer())
    assert not kernels.use_fast_attention(model)
    assert model.config._attn_implementation == "sdpa"


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


def test_a_forward_without_source_is_not_fused():
    scope = {}
    exec("def forward(self, labels):\n    logits = self.lm_head(hidden_states)\n", scope)
    assert not kernels._is_plain_forward(scope["forward"])


def test_evaluation_hooks_and_other_losses_get_logits():
    _, ours = pair("LlamaForCausalLM", GROUPED)
    assert ours(**batch_of("plain")).logits is not None  # by itself, only on a GPU
    kernels.fuse_head(ours, wanted=True)
    batch = batch_of("plain")
    assert ours(**batch, num_items_in_batch=torch.tensor(7)).logits is not None
    assert ours(input_ids=batch["input_ids"]).logits is not None
    assert ours(batch["input_ids"], labels=batch["labels"]).logits is not None
    assert isinstance(ours(**batch, return_dict=False), tuple)
    assert not hasattr(ours(**batch), "logits")
    ours.eval()
    assert ours(**batch).logits is not None


def test_reading_logits_that_were_not_computed_names_the_setting():
    ours = build_transformers(transformers.LlamaForCausalLM, {**GROUPED, "fused_loss": True})[0]
    outputs = ours(**batch_of("plain"))
    assert dict(outputs) == {"loss": outputs.loss, "logits": None}
    with raises(AttributeError, "model.fused_loss"):
        outputs.logits  # noqa: B018
    loss = copy.deepcopy(ours)(**batch_of("plain")).loss
    assert torch.equal(loss, outputs[0])


def test_fused_loss_is_a_setting_of_its_own():
    llama, t5 = transformers.LlamaForCausalLM, transformers.T5ForConditionalGeneration
    without = build_transformers(llama, {**GROUPED, "fused_loss": False})[0]
    assert (without.config._attn_implementation, "forward" in vars(without)) == (kernels.ATTENTION, False)
    with raises(ConfigError, "kernels: stock"):
        build_transformers(llama, {**GROUPED, "fused_loss": False}, kernels="stock")
    for value in (True, False):
        with raises(ConfigError, "fused_loss", "T5ForConditionalGeneration"):
            build_transformers(t5, {**T5, "fused_loss": value})
    with raises(ConfigError, "fused_loss", "'yes'"):
        build_transformers(llama, {**GROUPED, "fused_loss": "yes"})
    adapted = build_transformers(llama, {**GROUPED, "fused_loss": True})[0]
    adapted.lm_head = torch.nn.Sequential(adapted.lm_head)
    with raises(ConfigError, "fused_loss"):
        adapted(**batch_of("plain"))


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


def shard_and_compare(mesh):
    """Returns, on each rank, how far loss and gradients of a sharded model are from those of the stock model."""
    differences = []
    for fused_loss in (None, True):
        stock, ours = pair("LlamaForCausalLM", GROUPED)
        if fused_loss:
            kernels.fuse_head(ours, wanted=True)
        find_crossings(ours, is_on_meta=False, broadcast=lambda found: found)
        shard_parameters(ours, mesh, settings=SplitSettings(), device=torch.device("cpu"))
        for kind in ("plain", "padded left", "packed"):
            batch = batch_of(kind)
            if kind == "packed":
                batch["document_ids"] = (batch["position_ids"] == 0).cumsum(dim=1)
            stock.zero_grad(), ours.zero_grad()
            expected, found = stock(**batch).loss, ours(**batch).loss
            expected.backward(), found.backward()
            differences.append((expected - found).item())
            weights = dict(ours.named_parameters())
            for name, each in stock.named_parameters():
                differences.append((each.grad - weights[name].grad.full_tensor()).abs().max().item())
    return differences


def test_a_sharded_model_has_the_stock_loss_and_gradients(tmp_path):
    for differences in on_ranks(tmp_path, {"fsdp": 2}, shard_and_compare):
        assert max(map(abs, differences)) < 2e-5


RUN = """
model: {type: "transformers:LlamaForCausalLM", hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, intermediate_size: 16, vocab_size: 50}
data: {train: {type: parts.py:Rows}, eval: {valid: {type: parts.py:Rows}}, collator: {type: padded, pad_token_id: 0}}
trainer: {type: language_model, max_steps: 4, global_batch_size: 4, micro_batch_size: 2}
evaluation: {metrics: {ppl: {type: perplexity, shift: true}}}
writers: [json]
runtime: {device: cpu}
"""
PACKED = "{type: pack, length: 16, source: {type: parts.py:Rows}}"
PARTS = """
import torch
from trainwright import Trainer

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"input_ids": torch.arange(10 - index % 3) % 7 + index}

class Reader(Trainer):
    def forward(self, **batch):
        outputs = self.model(**batch)
        return outputs.loss, {"highest": outputs.logits.max()}
"""


def train(folder, *overrides, builds_only=False):
    (folder / "run.yaml").write_text(RUN)
    (folder / "parts.py").write_text(PARTS)
    settings = [f"output_dir={folder}", "trainer.optimizer={type: adamw, lr: 0.1}", *overrides]
    trainer = build_trainer(RunConfig.load(folder / "run.yaml", settings))
    return trainer if builds_only else trainer.train()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.activation_checkpointing=[LlamaDecoderLayer]",),
        ("model.lora={match: '*.q_proj', rank: 2}",),
        ("model.lora={match: lm_head, rank: 2}",),
        ("model.peft={type: lora, r: 2, target_modules: all-linear}",),
        ("model.peft={type: prompt_tuning, num_virtual_tokens: 3, task_type: CAUSAL_LM}", "evaluation.metrics={}"),
        ("runtime.mode=compile", "runtime.compile_backend=aot_eager"),
        (f"data.train={PACKED}", f"data.eval={{valid: {PACKED}}}", "data.collator=stack"),
    ],
    ids=["plain", "recomputed", "lora", "lora of the head", "peft", "prompts", "compiled", "packed"],
)
def test_a_run_has_the_losses_and_metrics_of_the_stock_model(tmp_path, overrides):
    is_plain_head = not any("lm_head" in each or "all-linear" in each for each in overrides)
    expected = train(tmp_path, "name=stock", "model.kernels=stock", *overrides)
    fused = ("model.fused_loss=true",) if is_plain_head else ()
    found = train(tmp_path, "name=fast", *fused, *overrides)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found["valid/loss"] < 4


def test_a_run_marks_masks_without_padding_for_models_that_recognize_them(tmp_path):
    def masks_of(*overrides):
        trainer = train(tmp_path, *overrides, builds_only=True)
        batches = ({"attention_mask": torch.ones(2, length).tril(3).long()} for length in (4, 6))
        return [masks.is_full(batch["attention_mask"]) for batch in trainer.batches_to_device(batches)]

    assert masks_of("name=fast") == [True, False]
    assert masks_of("name=shipped", "model={type: llama, preset: tiny, vocab_size: 50}") == [True, False]
    assert masks_of("name=stock", "model.kernels=stock") == [False, False]


def test_a_trainer_that_reads_logits_while_training_is_told_of_the_setting(tmp_path):
    settings = ("trainer.type=parts.py:Reader", "evaluation.metrics={}", "trainer.micro_batch_size=4")
    train(tmp_path, "name=computed", *settings)
    with raises(AttributeError, "model.fused_loss"):
        train(tmp_path, "name=missing", "model.fused_loss=true", *settings)


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
