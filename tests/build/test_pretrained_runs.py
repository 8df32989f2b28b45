"""Runs that begin with pretrained weights: after their first checkpoint they live without the folder."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.forked_launch import launch_well
from tests.export.runs import TEXT
from tests.messages import raises

from trainwright import RunConfig, build_trainer, load_checkpoint, run_experiment
from trainwright.build.run import build_model
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError
from trainwright.export.huggingface import export_run
from trainwright.models.llama import Llama
from trainwright.models.lora import save_lora

transformers = pytest.importorskip("transformers")

PARTS = """
import random

import torch
from torch import nn

from trainwright.models.llama import Llama
from trainwright.trainers.language_model import LanguageModelTrainer


class Own(Llama):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.register_buffer("halves", torch.arange(4) / 2, persistent=False)


class Noisy(Llama):
    '''Draws a buffer that no checkpoint holds.'''
    def __init__(self, **settings):
        super().__init__(**settings)
        self.register_buffer("noise", torch.rand(4), persistent=False)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(260, 8)
        self.head = nn.Linear(8, 260)

    def forward(self, input_ids, labels=None, **rest):
        logits = self.head(self.embed(input_ids))
        shifted = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": shifted, "logits": logits}


class Scaled(nn.Module):
    '''Computes a number and a buffer from the layer that it replaces.'''
    def __init__(self, *, replaces):
        super().__init__()
        self.inner = replaces
        self.scale = float(replaces.weight.detach().abs().mean())
        self.register_buffer("first", replaces.weight.detach()[:, 0].clone(), persistent=False)

    def forward(self, hidden):
        return self.inner(hidden) * self.scale + self.first


class ReadsWeights(LanguageModelTrainer):
    @classmethod
    def build_model(cls, build):
        model = super().build_model(build)
        model.register_buffer("first", model.lm_head.weight.detach().abs().mean() + 1, persistent=False)
        model.lm_head.register_forward_hook(lambda module, args, output: output * model.first)
        return model


class Sounds:
    def __init__(self):
        self.sounds = torch.randn(8, 80, 60) / 10

    def __len__(self):
        return len(self.sounds)

    def __getitem__(self, index):
        return {"input_features": self.sounds[index], "labels": torch.arange(4) + index}


class Sentences:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"input_ids": torch.arange(6) + index, "labels": torch.arange(4) + index}


class NoisyNorm(nn.Module):
    '''Takes the place of a norm, and draws a buffer that no checkpoint holds.'''
    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.rand(32), persistent=False)

    def forward(self, hidden):
        return hidden * self.noise


class Rows:
    '''Draws its rows in the constructor.'''
    def __init__(self):
        self.rows = torch.randint(0, 260, (40, 16))
        self.shift = random.randint(0, 9)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = (self.rows[index] + self.shift) % 260
        return {"input_ids": row, "labels": row}
"""

RUN = """
name: tuned
model: MODEL
data:
  train: DATA
  eval: {valid: DATA}
trainer:
  type: language_model
  max_steps: 6
  global_batch_size: 4
  optimizer: {type: adamw, lr: 1e-2}
checkpoint: {every_steps: 2, keep_last: 3}
writers: []
runtime: {device: cpu}
"""

PACKED = "{type: pack, length: 32, tokenizer: bytes, source: {type: text, path: text.txt}}"
DRAWN = "{type: parts.py:Rows}"

MODELS = {
    "ours": "{type: llama, pretrained: published}",
    "ours in 16 bits": "{type: llama, pretrained: {folder: published, dtype: bf16}}",
    "a user's subclass": "{type: parts.py:Own, pretrained: published}",
    "a user's subclass that draws": "{type: parts.py:Noisy, pretrained: published}",
    "a replacement that draws": (
        "{type: llama, pretrained: published, replace: {model.norm: {type: parts.py:NoisyNorm}}}"
    ),
    "transformers'": "{type: transformers:AutoModelForCausalLM, pretrained: published}",
    "transformers' in 16 bits": ("{type: transformers:LlamaForCausalLM, pretrained: {folder: published, dtype: bf16}}"),
    "a plain module": "{type: parts.py:Plain, pretrained: plain}",
}


@pytest.fixture
def project(tmp_path):
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.LlamaConfig(vocab_size=260, max_position_embeddings=64, initializer_range=0.3, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "published")
    (tmp_path / "plain").mkdir()
    plain = {"embed.weight": torch.randn(260, 8), "head.weight": torch.randn(260, 8), "head.bias": torch.randn(260)}
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def configured(project, model, *overrides, name="tuned", data=DRAWN):
    (project / "run.yaml").write_text(RUN.replace("MODEL", model).replace("DATA", data))
    return RunConfig.load(project / "run.yaml", [f"output_dir={project / 'runs'}", f"name={name}", *overrides])


def remove_folders(project):
    for name in ("published", "plain"):
        shutil.rmtree(project / name)


def all_tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(first, second):
    first, second = all_tensors(first), all_tensors(second)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_resumes_bit_equal_without_its_pretrained_folder(project, kind):
    whole = build_trainer(configured(project, MODELS[kind], name="whole"))
    whole.train()
    build_trainer(configured(project, MODELS[kind], "trainer.max_steps=3")).train()
    remove_folders(project)
    resumed = build_trainer(configured(project, MODELS[kind]))
    assert resumed.step == 3
    resumed.train()
    assert_same(resumed.model, whole.model)


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_is_evaluated_and_loaded_without_its_folder(project, kind):
    config = configured(project, MODELS[kind], data=PACKED)
    trained, logs = run_experiment(config)
    remove_folders(project)
    evaluated, again = run_experiment(config, mode="eval")
    assert again == pytest.approx(logs)
    assert_same(evaluated, trained)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loaded = load_checkpoint(project / "runs" / "tuned")
    assert_same(loaded, trained)
    assert {name for name, one in loaded.named_parameters() if one.requires_grad} == {
        name for name, one in trained.named_parameters() if one.requires_grad
    }
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("kind", ["ours", "transformers'"])
def test_an_export_needs_no_folder_and_names_no_path(project, kind):
    run_experiment(configured(project, MODELS[kind], data=PACKED))
    read = json.loads((project / "published" / "config.json").read_text())
    remove_folders(project)
    export_run(project / "runs" / "tuned", project / "exported")
    written = (project / "exported" / "config.json").read_text()
    assert str(project) not in written
    assert json.loads(written)["use_cache"] is read["use_cache"] is True
    theirs = transformers.LlamaForCausalLM.from_pretrained(project / "exported")
    loaded = load_checkpoint(project / "runs" / "tuned")
    tokens = torch.arange(12)[None]
    logits = loaded(input_ids=tokens)["logits"]
    torch.testing.assert_close(theirs(tokens).logits, logits, atol=1e-5, rtol=1e-5)


def test_the_run_folder_keeps_the_facts_and_no_path(project):
    config = json.loads((project / "published" / "config.json").read_text())
    inner = {"model_type": "x", "_name_or_path": "/home/somebody"}
    (project / "published" / "config.json").write_text(
        json.dumps({**config, "_name_or_path": "/home/somebody", "extra_config": inner})
    )
    build_trainer(configured(project, MODELS["ours"]))
    text = (project / "runs" / "tuned" / "pretrained.json").read_text()
    assert "somebody" not in text
    assert str(project) not in text
    facts = json.loads(text)
    assert facts["config"]["hidden_size"] == 32
    assert (facts["missing"], facts["unexpected"], facts["dtypes"]) == ([], [], {})
    assert not list((project / "runs" / "tuned").glob(".pretrained*"))


def test_a_run_without_pretrained_weights_keeps_no_facts(project):
    build_trainer(configured(project, "{type: llama, preset: tiny, vocab_size: 260}"))
    assert not (project / "runs" / "tuned" / "pretrained.json").exists()


def test_weights_are_not_read_if_a_checkpoint_has_them(project):
    build_trainer(configured(project, MODELS["ours"], "trainer.max_steps=2")).train()
    (project / "published" / "model.safetensors").write_bytes(b"no weights")
    resumed = build_trainer(configured(project, MODELS["ours"]))
    assert resumed.step == 2
    with raises(CheckpointError, "model.safetensors"):
        build_trainer(configured(project, MODELS["ours"]), fresh=True)


def test_a_run_without_a_checkpoint_says_that_it_needs_the_folder(project):
    build_trainer(configured(project, MODELS["ours"]))  # which writes its facts, and no checkpoint
    remove_folders(project)
    for kind in ("ours", "transformers'", "a plain module"):
        with raises(CheckpointError, "model.pretrained", at="run.yaml:3"):
            build_trainer(configured(project, MODELS[kind]))


READERS = {
    "parts.py:Scaled": (
        "{type: llama, pretrained: published, replace: {'model.layers.*.mlp.down_proj': {type: parts.py:Scaled}}}",
        [],
    ),
    "ReadsWeights.build_model": (MODELS["ours"], ["trainer.type=parts.py:ReadsWeights"]),
}


@pytest.mark.parametrize("reader", READERS)
def test_objects_made_from_loaded_weights_are_the_same_at_every_start(project, reader):
    model, overrides = READERS[reader]
    whole = build_trainer(configured(project, model, *overrides, name="whole"))
    whole.train()
    build_trainer(configured(project, model, *overrides, "trainer.max_steps=3")).train()
    resumed = build_trainer(configured(project, model, *overrides))
    assert resumed.step == 3
    resumed.train()
    tokens = torch.arange(12)[None]
    expected = whole.model.eval()(input_ids=tokens)["logits"]
    assert torch.equal(resumed.model.eval()(input_ids=tokens)["logits"], expected)
    loaded = load_checkpoint(project / "runs" / "tuned")
    assert_same(loaded, whole.model)
    assert torch.equal(loaded(input_ids=tokens)["logits"], expected)


@pytest.mark.parametrize("reader", READERS)
def test_objects_made_from_loaded_weights_need_their_folder(project, reader):
    model, overrides = READERS[reader]
    build_trainer(configured(project, model, *overrides, "trainer.max_steps=2")).train()
    settings = json.loads((project / "published" / "config.json").read_text())
    (project / "published" / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))
    with raises(CheckpointError, reader):
        build_trainer(configured(project, model, *overrides))
    remove_folders(project)
    for start in (
        lambda: build_trainer(configured(project, model, *overrides)),
        lambda: load_checkpoint(project / "runs" / "tuned"),
    ):
        with raises(CheckpointError, reader):
            start()


TINY = {
    **{"vocab_size": 61, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2},
}


@pytest.mark.parametrize(
    ("name", "changes", "data"),
    [
        ("WhisperForConditionalGeneration", {"max_source_positions": 30}, "{type: parts.py:Sounds}"),
        # So few that they are stored in full.
        ("MarianMTModel", {"max_position_embeddings": 16}, "{type: parts.py:Sentences}"),
    ],
)
def test_a_class_that_freezes_its_positions_resumes_bit_equal(project, name, changes, data):
    target = getattr(transformers, name)
    target(target.config_class(**TINY, **changes)).save_pretrained(project / "frozen")
    model = f"{{type: transformers:{name}, pretrained: frozen}}"
    options = ["trainer.type=trainer", "trainer.global_batch_size=2"]
    whole = build_trainer(configured(project, model, *options, name="whole", data=data))
    begun = {key: value.clone() for key, value in whole.model.state_dict().items()}
    whole.train()
    positions = whole.model.get_encoder().embed_positions.weight
    assert not positions.requires_grad
    assert torch.equal(positions, begun["model.encoder.embed_positions.weight"])
    build_trainer(configured(project, model, *options, "trainer.max_steps=3", data=data)).train()
    shutil.rmtree(project / "frozen")
    resumed = build_trainer(configured(project, model, *options, data=data))
    resumed.train()
    assert_same(resumed.model, whole.model)
    assert not resumed.model.get_encoder().embed_positions.weight.requires_grad


def test_facts_that_are_lost_or_damaged_are_read_from_the_folder_again(project):
    build_trainer(configured(project, MODELS["ours"], "trainer.max_steps=2")).train()
    facts = project / "runs" / "tuned" / "pretrained.json"
    kept = facts.read_text()
    facts.write_text(kept[:-40])
    with raises(CheckpointError, "pretrained.json"):
        build_trainer(configured(project, MODELS["ours"]))
    facts.unlink()
    assert build_trainer(configured(project, MODELS["ours"])).step == 2
    assert facts.read_text() == kept


def test_a_run_whose_checkpoints_are_all_damaged_starts_with_the_pretrained_weights(project, caplog):
    first = build_trainer(configured(project, MODELS["ours"]))
    begun = {name: tensor.clone() for name, tensor in all_tensors(first.model).items()}
    first.train()
    for part in (project / "runs" / "tuned" / "checkpoints").glob("step-*/model.safetensors"):
        part.write_bytes(part.read_bytes()[:-8])
    with caplog.at_level(logging.WARNING):
        again = build_trainer(configured(project, MODELS["ours"]))
    assert "There is no intact checkpoint" in caplog.text
    assert again.step == 0
    assert all(torch.equal(tensor, begun[name]) for name, tensor in all_tensors(again.model).items())


HEAD = (
    "{type: transformers:AutoModelForSequenceClassification, pretrained: published, num_labels: 3, pad_token_id: 0, "
    "lora: {match: q_proj, rank: 2}}"
)


def test_a_head_that_was_drawn_is_among_the_saved_adapters_of_a_loaded_run(project):
    store = CheckpointStore(project / "runs" / "tuned" / "checkpoints")
    trainer = build_trainer(configured(project, HEAD, "trainer.type=trainer"))
    store.write(1, {"model": trainer.model.state_dict()}, metrics={})
    remove_folders(project)
    loaded = load_checkpoint(project / "runs" / "tuned")
    saved = load_file(save_lora(loaded, project / "adapters") / "adapter_model.safetensors")
    assert torch.equal(saved["base_model.model.score.weight"], trainer.model.score.weight)


def test_weights_that_keep_another_dtype_have_it_again(project):
    """T5 of transformers keeps some layers in float32 whatever is asked for."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 260}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(project / "t5")
    model = "{type: transformers:T5ForConditionalGeneration, pretrained: {folder: t5, dtype: fp16}}"
    config = configured(project, model, "trainer.type=trainer")
    trainer = build_trainer(config)
    dtypes = {name: one.dtype for name, one in trainer.model.named_parameters()}
    assert set(dtypes.values()) == {torch.float16, torch.float32}
    CheckpointStore(project / "runs" / "tuned" / "checkpoints").write(
        1, {"model": trainer.model.state_dict()}, metrics={}
    )
    shutil.rmtree(project / "t5")
    assert {name: one.dtype for name, one in build_model(config).named_parameters()} == dtypes
    assert {name: one.dtype for name, one in load_checkpoint(trainer.folder).named_parameters()} == dtypes


def test_a_run_is_loaded_from_where_it_was_moved_to(project):
    trained, _ = run_experiment(configured(project, MODELS["ours"]))
    remove_folders(project)
    (project / "runs" / "tuned").rename(project / "moved")
    loaded = load_checkpoint(project / "moved")
    assert isinstance(loaded, Llama)
    assert_same(loaded, trained)


def test_two_ranks_resume_without_the_folder(project):
    build_trainer(configured(project, MODELS["ours"], "trainer.max_steps=3")).train()
    remove_folders(project)
    config = configured(project, MODELS["ours"])

    def act(_):
        trainer = build_trainer(config)
        assert trainer.step == 3
        assert trainer.ranks.size == 2
        trainer.train()
        sums = trainer.ranks.gather(float(sum(one.double().sum() for one in trainer.model.parameters())))
        assert len(set(sums)) == 1

    launch_well(project, 2, act)
    assert CheckpointStore(project / "runs" / "tuned" / "checkpoints").steps()[-1] == 6


# memory

MEASURE = """
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch._dynamo

from trainwright import AutoModel, load_checkpoint
from trainwright.models.llama import Llama


class Own(Llama):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.register_buffer("halves", torch.arange(4) / 2, persistent=False)


def megabytes(field):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1000


def measure(folder, how, dtype):
    load = {"own": Own.from_pretrained, "shipped": Llama.from_pretrained, "checkpoint": load_checkpoint}[how]
    load(folder / "small")  # whatever is imported at first use
    gc.collect()
    before = megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begins the high-water mark anew
    model = load(folder / "large")
    size = sum(one.nbytes for one in model.parameters()) / 1e6
    assert {one.dtype for one in model.parameters()} == {getattr(torch, dtype)}
    assert getattr(model, "halves", torch.arange(4) / 2).tolist() == [0.0, 0.5, 1.0, 1.5]
    return size, megabytes("VmHWM") - before


for folder, how, dtype in json.loads(sys.argv[1]):
    if not os.fork():  # a process of its own, which has loaded nothing yet
        code = 1
        try:
            Path(folder, "measured.json").write_text(json.dumps(measure(Path(folder), how, dtype)))
            code = 0
        finally:
            sys.excepthook(*sys.exc_info()) if code else None
            os._exit(code)
    assert os.wait()[1] == 0, (folder, how)
"""

LARGE = {"hidden_size": 1024, "num_layers": 4, "num_heads": 8, "vocab_size": 512, "intermediate_size": 2048}
SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 512}


linux_only = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the high-water mark of memory is Linux's"
)


LOADED = {
    "shipped": ("shipped", None, torch.bfloat16),
    "a user's subclass": ("own", None, torch.float32),
    "a checkpoint in 16 bits": ("checkpoint", "llama", torch.bfloat16),
    "a checkpoint": ("checkpoint", "llama", torch.float32),
    "a user's checkpoint": ("checkpoint", "parts.py:Own", torch.float32),
}


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """The size of each model and how far memory rose while it was loaded, in a process of its own: megabytes."""
    folders = {name: tmp_path_factory.mktemp("loaded") for name in LOADED}
    for name, (_, section, dtype) in LOADED.items():
        if section is None:
            write_folders(folders[name], dtype)
        else:
            write_runs(folders[name], {"type": section}, dtype=dtype)
    cases = [(str(folders[name]), how, str(dtype)[6:]) for name, (how, _, dtype) in LOADED.items()]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(cases)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: json.loads((folder / "measured.json").read_text()) for name, folder in folders.items()}


def write_folders(folder, dtype):
    for name, sizes in (("large", LARGE), ("small", SMALL)):
        Llama(**sizes).to(dtype).save_pretrained(folder / name, max_shard_bytes=10_000_000)


def write_runs(folder, section, *, dtype):
    (folder / "parts.py").write_text(PARTS)
    for name, sizes in (("large", LARGE), ("small", SMALL)):
        (folder / name).mkdir()
        config = RunConfig.from_dict({"name": name, "model": {**section, **sizes}}, project_dir=folder)
        config.save(folder / name / "config.yaml")
        state = Llama(**sizes).to(dtype).state_dict()
        CheckpointStore(folder / name / "checkpoints").write(1, {"model": state}, metrics={})


@linux_only
def test_a_shipped_model_is_loaded_with_memory_for_the_model_and_one_shard(peaks):
    size, peak = peaks["shipped"]
    assert size > 70
    # A shard is there twice, mapped and copied; built in float32 first, the model alone would be 2 × its size.
    assert peak < size + 2 * 10 + 20


@linux_only
def test_a_user_s_subclass_is_filled_in_place(peaks):
    size, peak = peaks["a user's subclass"]
    assert size > 140
    # One shard is mapped; the largest weight has one of its own.
    assert peak < size + 10 + 20


@linux_only
@pytest.mark.parametrize("kind", ["a checkpoint in 16 bits", "a checkpoint", "a user's checkpoint"])
def test_a_checkpoint_is_loaded_with_memory_for_the_model_and_its_file(peaks, kind):
    size, peak = peaks[kind]
    assert size > 70
    # The file is mapped. A model that was built in float32 first would be 2 × the size of one in 16 bits beside it.
    assert peak < 2 * size + 20
