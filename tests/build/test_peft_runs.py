"""Runs with adapters of peft: what a checkpoint holds, exact resuming, and adapter folders that peft loads."""

import json
import logging
import re

import pytest
import torch
from tests.messages import mentions, raises

from trainwright import RunConfig, build_trainer, cli, load_checkpoint
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError, ConfigError
from trainwright.export.huggingface import export_run
from trainwright.models.layers.quantized_linear import quantized_layers
from trainwright.models.quantize import dequantize_model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
LORA = "{type: lora, r: 4, target_modules: all-linear}"
KINDS = {
    "lora": LORA,
    "dora": "{type: dora, r: 4, target_modules: all-linear}",
    "rslora": "{type: LoraConfig, r: 4, use_rslora: true, target_modules: [q_proj, v_proj], lora_dropout: 0.1}",
    "ia3": "{peft_type: IA3, target_modules: [k_proj, v_proj, down_proj], feedforward_modules: [down_proj]}",
    "prompt_tuning": "{type: prompt_tuning, num_virtual_tokens: 4, task_type: CAUSAL_LM}",
    "modules_to_save": "{type: lora, r: 4, target_modules: [q_proj], modules_to_save: [lm_head]}",
}


class Rows(torch.utils.data.Dataset):
    """Rows of 8 tokens; some labels are not to be learned."""

    def __init__(self, size=32, classes=0):
        self.size, self.classes = size, classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        row = torch.randint(1, 60, (8,), generator=torch.Generator().manual_seed(index))
        if self.classes:
            return {"input_ids": row, "labels": torch.tensor(index % self.classes)}
        labels = row.clone()
        labels[: index % 4] = -100
        return {"input_ids": row, "labels": labels}


def base(folder, kind="Llama", head="ForCausalLM", **changes):
    """Writes a model of transformers with random weights."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    torch.manual_seed(3)
    getattr(transformers, f"{kind}{head}")(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return base(tmp_path_factory.mktemp("llama"), num_key_value_heads=2)


def load(folder, pretrained, adapter, *overrides, kind="LlamaForCausalLM", classes=0, steps=4):
    folder.mkdir(exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(
        f"""name: run
output_dir: {folder}
model:
  type: transformers:{kind}
  pretrained: {pretrained}
  peft: {adapter}
data:
  train: {{type: "{__name__}:Rows", size: 32, classes: {classes}}}
  eval: {{valid: {{type: "{__name__}:Rows", size: 6, classes: {classes}}}}}
trainer:
  max_steps: {steps}
  global_batch_size: 4
  optimizer: {{type: adamw, lr: 1e-2}}
  schedule: {{type: constant}}
evaluation: {{every_steps: 2}}
checkpoint: {{every_steps: 2}}
writers: [json]
log: {{every_steps: 1}}
runtime: {{device: cpu}}
"""
    )
    return RunConfig.load(file, list(overrides))


def lines(folder):
    """The lines of metrics.json without times."""
    found = [json.loads(line) for line in (folder / "run" / "metrics.json").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in found]


def batch():
    return {"input_ids": torch.stack([Rows()[index]["input_ids"] for index in range(3)])}


def trained_names(model):
    return {name for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_saves_the_trained_weights_alone_resumes_exactly_and_exports_what_peft_loads(tmp_path, llama, kind):
    whole = build_trainer(load(tmp_path / "whole", llama, KINDS[kind]))
    trained = trained_names(whole.model)
    before = {name: each.detach().clone() for name, each in whole.model.named_parameters() if name not in trained}
    whole.train()
    assert all(torch.equal(before[name], each) for name, each in whole.model.named_parameters() if name in before)
    store = CheckpointStore(tmp_path / "whole" / "run" / "checkpoints")
    assert set(store.read(4, "model")) == trained
    assert store.read(4, "base")["source"] == str(llama)

    build_trainer(load(tmp_path / "parts", llama, KINDS[kind], steps=2)).train()
    resumed = build_trainer(load(tmp_path / "parts", llama, KINDS[kind]))
    assert resumed.step == 2
    resumed.train()
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    for (name, first), (_, second) in zip(
        whole.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(first, second), name

    expected = whole.model.eval()(**batch()).logits
    loaded = load_checkpoint(tmp_path / "whole" / "run")
    assert torch.equal(loaded(**batch()).logits, expected)
    folder = export_run(tmp_path / "whole" / "run", tmp_path / "adapter")
    plain = transformers.LlamaForCausalLM.from_pretrained(llama).eval()
    theirs = peft.PeftModel.from_pretrained(plain, folder).eval()
    torch.testing.assert_close(theirs(**batch()).logits, expected, rtol=1e-5, atol=1e-6)
    unadapted = transformers.LlamaForCausalLM.from_pretrained(llama)(**batch()).logits
    assert (unadapted - expected[:, -8:]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "prompt_tuning"])
def test_a_quantized_base_resumes_exactly_and_only_the_adapter_is_saved(tmp_path, llama, kind):
    settings = ["model.quantize=nf4", "model.dtype=bf16"]
    whole = build_trainer(load(tmp_path / "whole", llama, KINDS[kind], *settings))
    whole.train()
    layers = dict(quantized_layers(whole.model))
    assert layers
    assert all(name.endswith(".base_layer") for name in layers)
    store = CheckpointStore(tmp_path / "whole" / "run" / "checkpoints")
    assert set(store.read(4, "model")) == trained_names(whole.model)
    assert {f"{name}.weight_codes" for name in layers} < set(store.read(4, "base")["hashes"])
    build_trainer(load(tmp_path / "parts", llama, KINDS[kind], *settings, steps=2)).train()
    build_trainer(load(tmp_path / "parts", llama, KINDS[kind], *settings)).train()
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    loaded = load_checkpoint(tmp_path / "whole" / "run")
    assert torch.equal(loaded(**batch()).logits, whole.model.eval()(**batch()).logits)
    dequantize_model(loaded)
    assert torch.equal(loaded(**batch()).logits, whole.model(**batch()).logits)
    folder = export_run(tmp_path / "whole" / "run", tmp_path / "adapter")
    plain = transformers.LlamaForCausalLM.from_pretrained(llama)
    peft.PeftModel.from_pretrained(plain, folder)


def test_globs_of_quantized_layers_are_names_without_peft(tmp_path, llama):
    trainer = build_trainer(load(tmp_path, llama, LORA, "model.quantize={type: int8, match: ['*.q_proj', lm_head]}"))
    names = [f"model.layers.{layer}.self_attn.q_proj.base_layer" for layer in (0, 1)]
    assert [name for name, _ in quantized_layers(trainer.model)] == [*names, "lm_head"]
    with raises(ConfigError, "model.quantize", "model.lora"):
        build_trainer(load(tmp_path / "prompts", llama, KINDS["prompt_tuning"], "model.quantize=nf4"))


def test_a_checkpoint_of_an_adapter_is_a_small_share_of_its_base(tmp_path, llama):
    build_trainer(load(tmp_path, llama, "{type: lora, r: 1, target_modules: [q_proj]}")).train()
    path = CheckpointStore(tmp_path / "run" / "checkpoints").path(4)
    saved = sum(file.stat().st_size for file in path.glob("model*"))
    assert 0 < saved < (llama / "model.safetensors").stat().st_size / 20


def test_a_changed_base_is_rejected(tmp_path):
    folder = base(tmp_path / "base", num_key_value_heads=2)
    build_trainer(load(tmp_path / "run", folder, LORA, steps=2)).train()
    other = transformers.LlamaForCausalLM.from_pretrained(folder)
    torch.nn.init.normal_(other.model.layers[0].self_attn.q_proj.weight)
    other.save_pretrained(folder)
    with raises(CheckpointError, "q_proj", "frozen weights by reference", golden=False):
        build_trainer(load(tmp_path / "run", folder, LORA)).train()


def test_an_initialization_that_changes_base_weights_saves_these(tmp_path, llama):
    adapter = "{type: lora, r: 4, target_modules: [q_proj], init_lora_weights: pissa}"
    whole = build_trainer(load(tmp_path / "whole", llama, adapter))
    whole.train()
    saved = CheckpointStore(tmp_path / "whole" / "run" / "checkpoints").read(4, "model")
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in saved
    assert "model.layers.0.self_attn.k_proj.weight" not in saved
    loaded = load_checkpoint(tmp_path / "whole" / "run")
    assert torch.equal(loaded(**batch()).logits, whole.model.eval()(**batch()).logits)


def test_a_head_without_pretrained_weights_is_trained_and_exported(tmp_path):
    folder = base(tmp_path / "base", "Bert", "ForMaskedLM")
    kind = "BertForSequenceClassification"
    trainer = build_trainer(load(tmp_path / "run", folder, LORA, kind=kind, classes=2))
    trained = trained_names(trainer.model)
    assert any("classifier" in name for name in trained)
    assert not any(name.endswith("base_layer.weight") for name in trained)
    trainer.train()
    adapter = export_run(tmp_path / "run" / "run", tmp_path / "adapter")
    torch.manual_seed(11)
    plain = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    theirs = peft.PeftModel.from_pretrained(plain, adapter).eval()
    torch.testing.assert_close(theirs(**batch()).logits, trainer.model.eval()(**batch()).logits, rtol=1e-5, atol=1e-6)


def test_averaged_weights_are_those_of_the_adapter(tmp_path, llama):
    trainer = build_trainer(load(tmp_path, llama, LORA, "hooks=[{type: ema, decay: 0.5}]"))
    trainer.train()
    raw, averaged = (load_checkpoint(tmp_path / "run", weights=each) for each in ("raw", "ema"))
    pairs = dict(raw.named_parameters()), dict(averaged.named_parameters())
    changed = {name for name, each in pairs[0].items() if not torch.equal(each, pairs[1][name])}
    assert changed == trained_names(trainer.model)


EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


def skipped(caplog):
    return [each.getMessage() for each in caplog.records if "fused experts" in each.getMessage()]


@pytest.mark.parametrize(
    "adapter", [LORA, "{type: ia3, target_modules: [k_proj, down_proj], feedforward_modules: [down_proj]}"]
)
def test_fused_experts_that_an_adapter_skips_are_reported(tmp_path, caplog, adapter):
    """peft adapts the experts of Mixtral with LoRA, but not with IA³, and not those of GptOss."""
    name = "GptOss" if adapter == LORA else "Mixtral"
    folder = base(tmp_path / "base", name, **EXPERTS, **({"head_dim": 8} if name == "GptOss" else {}))
    with caplog.at_level(logging.WARNING):
        build_trainer(load(tmp_path / "run", folder, adapter, kind=f"{name}ForCausalLM"))
    [text] = skipped(caplog)
    assert mentions(text, "model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj")
    assert ("target_parameters: [mlp.experts.down_proj, mlp.experts.gate_up_proj]" in text) == (adapter == LORA)


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("Mixtral", LORA),
        ("GptOss", "{type: lora, r: 4, target_modules: all-linear, target_parameters: [experts.down_proj]}"),
    ],
)
def test_experts_with_adapters_are_trained_and_saved(tmp_path, caplog, name, adapter):
    folder = base(tmp_path / "base", name, **EXPERTS, **({"head_dim": 8} if name == "GptOss" else {}))
    with caplog.at_level(logging.WARNING):
        trainer = build_trainer(load(tmp_path / "run", folder, adapter, kind=f"{name}ForCausalLM"))
    assert not any("experts.down_proj" in text for text in skipped(caplog))
    trained = trained_names(trainer.model)
    assert any("experts" in each and "lora_A" in each for each in trained)
    trainer.train()
    assert set(CheckpointStore(tmp_path / "run" / "run" / "checkpoints").read(4, "model")) == trained
    adapter = export_run(tmp_path / "run" / "run", tmp_path / "adapter")
    plain = getattr(transformers, f"{name}ForCausalLM").from_pretrained(folder, dtype=torch.float32).eval()
    theirs = peft.PeftModel.from_pretrained(plain, adapter).eval()
    torch.testing.assert_close(theirs(**batch()).logits, trainer.model.eval()(**batch()).logits, rtol=1e-5, atol=1e-5)


NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 64)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, input_ids, labels=None):
        logits = self.head(self.body(self.embed(input_ids)))
        return {"loss": self.criterion(logits.flatten(0, 1), input_ids.flatten()), "logits": logits}
"""


def test_a_plain_module_is_adapted(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    settings = "model={type: 'net.py:Net', peft: {type: lora, target_modules: [body.0, body.2]}}"
    trainer = build_trainer(load(tmp_path, "unused", LORA, settings))
    adapters = {f"body.{layer}.lora_{letter}.default.weight" for layer in (0, 2) for letter in "AB"}
    assert trained_names(trainer.model) == adapters
    trainer.train()
    found = load_checkpoint(tmp_path / "run")(**batch())["logits"]
    assert torch.equal(found, trainer.model.eval()(**batch())["logits"])


@pytest.mark.parametrize(
    ("adapter", "setting"),
    [
        ("{type: lora, rank: 4}", 'Did you mean "r"?'),
        ("{type: loar, r: 4}", "model.peft.type"),
        ("{r: 4}", "model.peft"),
        ("{type: lora, r: 0}", "model.peft"),
        ("{type: lora, target_modules: [q_porj]}", "model.peft"),
        ("{type: prompt_tuning, num_virtual_tokens: 4}", "model.peft"),
    ],
)
def test_wrong_settings_name_the_line_and_the_closest_match(tmp_path, llama, adapter, setting):
    golden = "loar" not in adapter  # it lists what the installed peft has
    with raises(ConfigError, setting, at="run.yaml:6", golden=golden):
        build_trainer(load(tmp_path, llama, adapter))


def test_peft_and_lora_together_are_rejected(tmp_path, llama):
    with raises(ConfigError, "peft", "lora", at="run.yaml:6"):
        build_trainer(load(tmp_path, llama, LORA, "model.lora={match: '*.q_proj', rank: 2}"))


def test_an_adapter_is_not_exported_as_a_whole_model(tmp_path, llama):
    build_trainer(load(tmp_path, llama, LORA, steps=2)).train()
    with raises(CheckpointError, "--format", "merge_and_unload"):
        export_run(tmp_path / "run", tmp_path / "out", file_format="safetensors")


@pytest.mark.parametrize("kind", ["lora", "prompt_tuning"])
@pytest.mark.parametrize("command", ["check", "explain", "estimate"])
def test_commands_that_do_not_train_accept_an_adapter(tmp_path, llama, capfd, monkeypatch, kind, command):
    load(tmp_path, llama, KINDS[kind])
    monkeypatch.setattr("sys.argv", ["trainwright", command, str(tmp_path / "run.yaml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    said = capfd.readouterr().out
    if command == "explain":
        assert mentions(said, "peft", "LoraConfig" if kind == "lora" else "PromptTuningConfig")
    elif command == "check":
        assert mentions(said, "bit-equal")
    else:
        model = build_trainer(load(tmp_path, llama, KINDS[kind])).model
        trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
        [[number, unit]] = re.findall(r"A checkpoint takes ([\d.]+) (kB|bytes) on disk", said)
        size = float(number) * (1000 if unit == "kB" else 1)
        assert size == pytest.approx(3 * trained, rel=0.05)  # the weights and two moments, without the frozen base


def test_a_model_without_pretrained_weights_is_adapted(tmp_path, llama):
    sizes = ", ".join(f"{name}: {value}" for name, value in SIZES.items())
    settings = f"model={{type: 'transformers:LlamaForCausalLM', {sizes}, peft: {LORA}}}"
    trainer = build_trainer(load(tmp_path, llama, LORA, settings))
    trainer.train()
    found = load_checkpoint(tmp_path / "run")(**batch()).logits
    assert torch.equal(found, trainer.model.eval()(**batch()).logits)
