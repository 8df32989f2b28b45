"""Exports of a run: transformers reads them and gives equal logits; plain weights for all other models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, load_model
from tests.export.runs import RUN, train_run
from tests.messages import raises
from tokenizers import Tokenizer, models, pre_tokenizers

from trainwright import AutoModel, RunConfig, load_checkpoint
from trainwright.data.tokenizer import TextTokenizer, load_tokenizer
from trainwright.errors import CheckpointError, ConfigError
from trainwright.export.huggingface import export_run, find_tokenizer, save_tokenizer
from trainwright.models.llama import Llama

PROJECT = Path(__file__).parents[1] / "project"
ADAPTED = """
from trainwright.models.llama import Llama
from trainwright.models.lora import add_lora

def adapted(**settings):
    model = Llama(**settings)
    add_lora(model, match="*.q_proj", rank=2)
    return model
"""
LARGE = """
from trainwright.models.llama import Llama

def large(**settings):
    model = Llama(**settings)
    model.model.norm.weight.data.fill_(1e6)
    return model
"""
THEIRS = """
from transformers import LlamaConfig, LlamaForCausalLM

def theirs(vocab_size, hidden_size, num_layers, num_heads, **_):
    sizes = {"num_hidden_layers": num_layers, "num_attention_heads": num_heads, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, hidden_size=hidden_size, use_cache=False, **sizes))
"""
MINE = """
import torch
from trainwright.models.llama import Llama

class Mine(Llama):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        return {**outputs, "loss": None if outputs["loss"] is None else 2 * outputs["loss"]}

class Norm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, hidden):
        return hidden * self.weight
"""
TOKENS = torch.arange(40).view(2, 20)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_run(tmp_path_factory.mktemp("project"))[0]


def test_transformers_loads_an_export_with_equal_logits(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = export_run(run, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model = load_checkpoint(run)
    torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS)["logits"], atol=1e-5, rtol=1e-5)
    again = AutoModel.from_pretrained(folder).eval()
    assert torch.equal(again(TOKENS)["logits"], model(TOKENS)["logits"])


def test_the_step_is_the_one_asked_for(run, tmp_path):
    second, last = (AutoModel.from_pretrained(export_run(run, tmp_path / str(step), step=step)) for step in (2, 4))
    assert torch.equal(second.lm_head.weight, load_checkpoint(run, 2).lm_head.weight)
    assert not torch.equal(second.lm_head.weight, last.lm_head.weight)


def test_weights_can_be_rounded_and_split(run, tmp_path):
    folder = export_run(run, tmp_path / "hf", dtype="bf16", max_shard_bytes=20_000)
    model = AutoModel.from_pretrained(folder)
    assert torch.equal(model.lm_head.weight, load_checkpoint(run).lm_head.weight.bfloat16())
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def test_an_export_may_be_in_the_run_but_not_replace_it(run):
    assert export_run(run, run / "exports" / "hf").is_dir()
    for place in (run, run.parent):
        with raises(CheckpointError):
            export_run(run, place, overwrite=True)
    with raises(CheckpointError):
        export_run(run, run / "checkpoints" / "step-00000004", overwrite=True)
    assert (run / "config.yaml").exists()
    load_checkpoint(run)


def test_a_link_to_the_run_is_not_written_over(run, tmp_path):
    (tmp_path / "link").symlink_to(run.parent)
    with raises(CheckpointError):
        export_run(run, tmp_path / "link" / run.name, overwrite=True)
    with raises(CheckpointError):
        export_run(run, tmp_path / "link" / run.name / "checkpoints" / "x", overwrite=True)
    with raises(CheckpointError):
        export_run(tmp_path / "link" / run.name, run, overwrite=True)
    assert not (run / "export.json").exists()


def test_weights_that_would_be_infinite_are_rejected_by_name(tmp_path):
    (tmp_path / "large.py").write_text(LARGE)
    folder, _ = train_run(tmp_path, RUN.replace("type: llama", "type: large.py:large"), ["trainer.max_steps=2"])
    with raises(CheckpointError, "model.norm.weight", "06"):
        export_run(folder, tmp_path / "hf", dtype="fp16")
    assert not (tmp_path / "hf").exists()
    export_run(folder, tmp_path / "hf", dtype="bf16")


@pytest.mark.parametrize("kind", ["llama", "transformers:AutoModelForCausalLM"])
def test_what_was_read_of_generation_is_written_as_it_was(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=48))
    model.save_pretrained(tmp_path / "published")
    # Published folders have such, though transformers itself rejects to write it: sampling settings without sampling.
    told = {"eos_token_id": [2, 7], "temperature": 0.3, "top_p": 0.9, "do_sample": False, "bos_token_id": 1}
    (tmp_path / "published" / "generation_config.json").write_text(json.dumps(told))
    start, end = RUN.index("model: "), RUN.index("data:")
    text = f"{RUN[:start]}model: {{type: {kind}, pretrained: published}}\n{RUN[end:]}"
    folder, trainer = train_run(tmp_path, text, ["trainer.max_steps=2"])
    shutil.rmtree(tmp_path / "published")
    if kind != "llama":
        again = load_checkpoint(folder)
        assert again.generation_config.to_dict() == trainer.model.generation_config.to_dict()
    written = export_run(folder, tmp_path / "hf")
    kept = json.loads((written / "generation_config.json").read_text())
    assert {key: kept.get(key, False) for key in told} == told
    assert transformers.AutoModelForCausalLM.from_pretrained(written).generation_config.eos_token_id == [2, 7]


def test_a_subclass_with_a_forward_of_its_own_is_plain_weights_only(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    folder, _ = train_run(tmp_path, RUN.replace("type: llama", "type: mine.py:Mine"), ["trainer.max_steps=2"])
    with raises(CheckpointError, "Mine.forward", "--format"):
        export_run(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    written = export_run(folder, tmp_path / "plain", file_format="safetensors")
    assert yaml.safe_load((written / "model.yaml").read_text())["model"]["type"] == "mine.py:Mine"
    assert (written / "model.safetensors").is_file()


def test_a_replaced_module_is_plain_weights_only(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    text = RUN.replace("max_positions: 64}", 'max_positions: 64, replace: {"*.norm": {type: mine.py:Norm, width: 32}}}')
    folder, _ = train_run(tmp_path, text, ["trainer.max_steps=2"])
    with raises(CheckpointError, "model.norm"):
        export_run(folder, tmp_path / "hf")
    written = export_run(folder, tmp_path / "plain", file_format="safetensors")
    assert yaml.safe_load((written / "model.yaml").read_text())["model"]["replace"]


def test_the_settings_of_plain_weights_build_the_model_again(run, tmp_path):
    written = export_run(run, tmp_path / "plain", file_format="safetensors")
    section = yaml.safe_load((written / "model.yaml").read_text())["model"]
    assert section.pop("type") == "llama"
    model = Llama(**section)
    load_model(model, written / "model.safetensors")
    assert torch.equal(model.lm_head.weight, load_checkpoint(run).lm_head.weight)


def test_nothing_of_this_machine_goes_along(tmp_path):
    transformers = pytest.importorskip("transformers")
    words = Tokenizer(models.WordLevel({"def": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    config = tmp_path / "words" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "name_or_path": str(tmp_path / "words")}))
    (tmp_path / "theirs.py").write_text(THEIRS)
    for kind in ("llama", "theirs.py:theirs"):
        text = RUN.replace("type: llama", f"type: {kind}").replace("tokenizer: bytes", "tokenizer: words")
        folder, _ = train_run(tmp_path, text, ["trainer.max_steps=2", f"name={kind[:5]}"])
        for file_format in ("huggingface", "safetensors"):
            written = export_run(folder, tmp_path / f"{kind[:5]}-{file_format}", file_format=file_format)
            assert (written / "tokenizer_config.json").is_file()
            for path in written.iterdir():
                assert str(tmp_path).encode() not in path.read_bytes(), path
                assert str(Path.home()).encode() not in path.read_bytes(), path


def test_any_model_can_be_exported_as_plain_weights(tmp_path):
    shutil.copy(PROJECT / "parts.py", tmp_path / "parts.py")
    folder, trainer = train_run(tmp_path, (PROJECT / "run.yaml").read_text(), ["trainer.max_steps=4"])
    with raises(CheckpointError, "save_pretrained", "--format"):
        export_run(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    written = export_run(folder, tmp_path / "weights", file_format="safetensors")
    assert sorted(path.name for path in written.iterdir()) == [
        "README.md",
        "export.json",
        "model.safetensors",
        "model.yaml",
    ]
    fresh = load_checkpoint(folder, 4)
    for parameter in fresh.parameters():
        torch.nn.init.zeros_(parameter)
    load_model(fresh, written / "model.safetensors")
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], weight)
    assert export_run(folder, tmp_path / "weights", file_format="safetensors") == written  # it may be made again


def test_the_tokenizer_of_the_data_goes_along(tmp_path):
    words = Tokenizer(models.WordLevel({"def": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    folder, _ = train_run(tmp_path, RUN.replace("tokenizer: bytes", "tokenizer: words.json"), ["trainer.max_steps=2"])
    written = export_run(folder, tmp_path / "hf")
    assert Tokenizer.from_file(str(written / "tokenizer.json")).token_to_id("def") == 0
    (tmp_path / "text.txt").unlink()
    shutil.rmtree(written)
    assert (export_run(folder, tmp_path / "hf") / "tokenizer.json").exists()  # no data is read for it


def test_an_export_without_its_tokenizer_is_logged(run, tmp_path, caplog):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("type: text", "type: nowhere.py:Text"))
    export_run(copy, tmp_path / "hf")
    assert "The export has no tokenizer" in caplog.text


def test_adapters_are_merged(tmp_path):
    (tmp_path / "adapted.py").write_text(ADAPTED)
    folder, trainer = train_run(tmp_path, RUN.replace("type: llama", "type: adapted.py:adapted"))
    assert any("lora" in name for name in trainer.model.state_dict())
    written = export_run(folder, tmp_path / "hf")
    assert not any("lora" in key for key in load_file(written / "model.safetensors"))
    trainer.model.eval()
    ours = AutoModel.from_pretrained(written).eval()
    torch.testing.assert_close(ours(TOKENS)["logits"], trainer.model(TOKENS)["logits"], atol=1e-5, rtol=1e-5)


def test_a_model_of_transformers_is_written_by_its_own_class(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "theirs.py").write_text(THEIRS)
    folder, trainer = train_run(tmp_path, RUN.replace("type: llama", "type: theirs.py:theirs"))
    written = export_run(folder, tmp_path / "hf", dtype="bf16")
    again = transformers.AutoModelForCausalLM.from_pretrained(written)
    assert type(again) is type(trainer.model)
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.lm_head.weight, trainer.model.lm_head.weight.bfloat16())


def test_an_unknown_format_and_dtype_are_rejected(run, tmp_path):
    with raises(ConfigError, "onnx"):
        export_run(run, tmp_path / "x", file_format="onnx")
    with raises(ConfigError, "int4"):
        export_run(run, tmp_path / "x", dtype="int4")


# tokenizers


def config_with(tmp_path, data):
    (tmp_path / "run.yaml").write_text(f"model: {{type: llama, vocab_size: 9}}\ndata: {data}\n")
    return RunConfig.load(tmp_path / "run.yaml")


@pytest.fixture
def words():
    return Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))


@pytest.mark.parametrize(
    "data",
    [
        "{train: {type: pack, length: 8, tokenizer: bytes, source: {type: text, path: no.txt}}}",
        "{train: {type: text, path: no.txt}, collator: {type: tokenize, tokenizer: bytes}}",
    ],
)
def test_a_tokenizer_is_found_in_the_data_or_the_collator_though_no_data_is_there(tmp_path, data):
    found = find_tokenizer(config_with(tmp_path, data))
    assert isinstance(found, TextTokenizer)
    assert found.name == "bytes"


def test_a_run_without_a_tokenizer_has_none(tmp_path):
    assert find_tokenizer(config_with(tmp_path, "{train: {type: digits}}")) is None
    assert find_tokenizer(config_with(tmp_path, "{}")) is None


def test_each_kind_of_tokenizer_is_saved_as_files(tmp_path, words):
    first, second, third = (tmp_path / name for name in "abc")
    for folder in (first, second, third):
        folder.mkdir()
    assert save_tokenizer(words, first) == [first / "tokenizer.json"]
    (first / "tokenizer_config.json").write_text('{"unk_token": "[UNK]"}')
    assert len(save_tokenizer(load_tokenizer(first), second)) == 2
    assert load_tokenizer(second).encode("a") == [0]
    save_tokenizer(load_tokenizer(second / "tokenizer.json"), third)
    assert load_tokenizer(third).encode("a") == [0]
    assert save_tokenizer(load_tokenizer("bytes"), tmp_path) == []
    assert save_tokenizer(object(), tmp_path) == []


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_the_template_of_conversations_and_added_tokens_go_along(tmp_path, words, name):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    words.save(str(tmp_path / "from" / "tokenizer.json"))
    (tmp_path / "from" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "from" / "added_tokens.json").write_text("{}")
    (tmp_path / "from" / "notes.txt").write_text("mine")
    save_tokenizer(load_tokenizer(tmp_path / "from" / name), tmp_path / "to")
    written = {path.name for path in (tmp_path / "to").iterdir()}
    assert written == {"tokenizer.json", "chat_template.jinja", "added_tokens.json"}


TOKENIZING = """
from pathlib import Path

from tokenizers import Tokenizer


def tokenize(row, tokenizer="base"):
    ids = Tokenizer.from_file(str(Path(__file__).with_name(tokenizer) / "tokenizer.json")).encode(row["text"]).ids
    ids = (ids * 8)[:8]
    return {"input_ids": ids, "labels": ids}
"""


@pytest.mark.parametrize("source", ["process", "pretrained"])
def test_a_tokenizer_of_the_processing_or_the_base_goes_along_with_its_chat_template(tmp_path, source):
    folder = tmp_path / ("words" if source == "process" else "base")
    sizes = {"vocab_size": 260, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 32}
    Llama(**sizes).save_pretrained(tmp_path / "base")
    folder.mkdir(exist_ok=True)
    words = Tokenizer(models.WordLevel({"def": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text('{"unk_token": "[UNK]"}')
    (tmp_path / "chat.py").write_text(TOKENIZING)
    named = ", tokenizer: words" if source == "process" else ""
    data = f"{{train: {{type: text, path: text.txt}}, process: {{type: chat.py:tokenize{named}}}}}"
    model = "{type: llama, pretrained: base}"
    text = f"name: chat\nmodel: {model}\ndata: {data}\n" + RUN[RUN.index("trainer:") :]
    run_folder, _ = train_run(tmp_path, text, ["trainer.max_steps=2", "trainer.global_batch_size=1"])
    written = export_run(run_folder, tmp_path / "hf")
    assert (written / "chat_template.jinja").read_text() == "{{ messages }}"
    assert Tokenizer.from_file(str(written / "tokenizer.json")).token_to_id("def") == 0
