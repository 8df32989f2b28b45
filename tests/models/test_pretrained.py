"""Reading a model folder: shard by shard, exactly, and with one clear error for each kind of damage."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from tests.messages import raises
from tests.models.folders import our_llama, reference, tensors_in

from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.llama import Llama
from trainwright.models.pretrained import (
    LoadReport,
    allocate,
    as_dtype,
    load_weights,
    on_meta,
    read_config_file,
    weight_files,
)


@pytest.fixture
def folder(tmp_path):
    return our_llama(tie_embeddings=False).save_pretrained(tmp_path / "model")


def change(folder, edit):
    tensors = tensors_in(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_shards_give_the_same_weights_as_one_file(tmp_path):
    model = our_llama()
    one = Llama.from_pretrained(model.save_pretrained(tmp_path / "one"))
    many = Llama.from_pretrained(model.save_pretrained(tmp_path / "many", max_shard_bytes=5000))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    for name, weight in model.state_dict().items():
        assert torch.equal(one.state_dict()[name], weight)
        assert torch.equal(many.state_dict()[name], weight)
    assert many.lm_head.weight is many.model.embed_tokens.weight


def test_weights_keep_the_dtype_of_the_file_unless_another_is_asked_for(tmp_path):
    folder = our_llama().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    assert {each.dtype for each in Llama.from_pretrained(folder).parameters()} == {torch.bfloat16}
    assert {each.dtype for each in Llama.from_pretrained(folder, dtype="fp32").parameters()} == {torch.float32}
    assert read_config_file(folder)["dtype"] == "bfloat16"


def test_parameters_keep_their_attributes(folder):
    with torch.device("meta"):
        model = our_llama(tie_embeddings=False)
    model.lm_head.weight.no_weight_decay = True
    model.model.norm.weight.requires_grad_(False)
    load_weights(model, folder)
    assert model.lm_head.weight.no_weight_decay
    assert not model.lm_head.weight.is_meta
    assert not model.model.norm.weight.requires_grad


def test_weights_do_not_depend_on_the_file_after_loading(folder):
    model = Llama.from_pretrained(folder)
    expected = model.lm_head.weight.clone()
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(b"\0" * 60_000)
    assert torch.equal(model.lm_head.weight, expected)


def test_missing_and_unexpected_keys_are_one_error_that_lists_them(folder):
    change(folder, lambda tensors: tensors.update(other=tensors.pop("model.norm.weight")))
    with raises(CheckpointError, "model.norm.weight"):
        Llama.from_pretrained(folder)


def test_what_does_not_fit_is_reported_and_drawn_without_strict(folder, caplog):
    saved = tensors_in(folder)
    change(folder, lambda tensors: tensors.update(other=tensors.pop("lm_head.weight")))
    with caplog.at_level(logging.WARNING):
        model = Llama.from_pretrained(folder, strict=False)
    assert "lm_head.weight" in caplog.text
    assert 0.01 < model.lm_head.weight.std() < 0.03
    assert torch.equal(model.model.norm.weight, saved["model.norm.weight"])
    assert not any(each.is_meta for each in model.parameters())
    report = load_weights(our_llama(tie_embeddings=False), folder, strict=False)
    assert report == LoadReport(missing=("lm_head.weight",), unexpected=("other",))


def test_a_module_that_has_weights_keeps_those_that_the_files_lack(folder):
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    model = our_llama(tie_embeddings=False)
    kept = model.lm_head.weight.clone()
    load_weights(model, folder, strict=False)
    assert torch.equal(model.lm_head.weight, kept)


def test_wrong_shapes_name_the_key_and_both_shapes(folder):
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with raises(CheckpointError, "model.norm.weight", "7", "32"):
        Llama.from_pretrained(folder)


def test_a_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with raises(CheckpointError, "model.safetensors"):
        Llama.from_pretrained(folder)


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with raises(CheckpointError, "config.json"):
        Llama.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("files", "asked", "advice"),
    [
        (["config.yaml"], ".", ("--to",)),
        (
            ["config.yaml", "checkpoints/step-00000005/model.safetensors"],
            "checkpoints/step-00000005",
            ("00000005", "--to"),
        ),
        (
            ["model.safetensors", "model.yaml"],
            ".",
            ("--format",),
        ),
    ],
)
def test_a_run_a_checkpoint_and_plain_weights_are_told_from_a_model_folder(tmp_path, files, asked, advice):
    for name in files:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).touch()
    with raises(CheckpointError, *advice, "config.json"):
        Llama.from_pretrained(tmp_path / "run" / asked)


def test_a_folder_without_weights_is_named(folder):
    (folder / "model.safetensors").unlink()
    with raises(CheckpointError):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize("content", ["{", "[1]", "\udcff"])
def test_a_damaged_config_is_named(folder, content):
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with raises(CheckpointError, "config.json"):
        Llama.from_pretrained(folder)


def test_a_shard_that_is_not_there_is_named(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model", max_shard_bytes=20_000)
    first = sorted(folder.glob("model-00001-*"))[0]
    first.unlink()
    with raises(CheckpointError, first.name):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map_is_named(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with raises(CheckpointError, "weight_map"):
        weight_files(folder)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_pickle_is_rejected_unless_it_is_allowed(folder, sharded):
    tensors = tensors_in(folder)
    (folder / "model.safetensors").unlink()
    name = "pytorch_model-00001-of-00001.bin" if sharded else "pytorch_model.bin"
    torch.save(tensors, folder / name)
    if sharded:
        index = {"weight_map": dict.fromkeys(tensors, name)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with raises(CheckpointError, "allow_pickle"):
        Llama.from_pretrained(folder)
    model = Llama.from_pretrained(folder, allow_pickle=True)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_files_of_a_body_alone_load_without_strict(tmp_path):
    theirs = reference(tie_word_embeddings=False)
    theirs.model.save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path, strict=False)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, theirs.model.layers[0].mlp.up_proj.weight)
    with raises(CheckpointError, "1", "lm_head.weight"):
        Llama.from_pretrained(tmp_path)


def test_a_tied_weight_loads_from_any_of_its_names(tmp_path):
    model = our_llama()
    folder = model.save_pretrained(tmp_path / "model")
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert torch.equal(Llama.from_pretrained(folder).model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_dtypes_have_short_names():
    assert [as_dtype(name) for name in ("bf16", "float16", None)] == [torch.bfloat16, torch.float16, None]
    with raises(ConfigError, "int8"):
        as_dtype("int8")
    with raises(ConfigError):
        as_dtype({"a": 1})


def test_building_on_the_meta_device_draws_nothing_and_imports_no_compiler():
    program = (
        "import sys, torch\n"
        "from trainwright.models.llama import Llama\n"
        "from trainwright.models.pretrained import on_meta\n"
        "with on_meta(): model = Llama.from_preset('tiny')\n"
        "assert all(one.is_meta for one in model.parameters())\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_other_tensors_are_drawn_as_ever():
    with on_meta():
        drawn = torch.empty(100, device="cpu").normal_()
    assert 0.5 < drawn.std() < 2.0


class Statistics(torch.nn.Module):
    """Two layers that share their numbers."""

    def __init__(self):
        super().__init__()
        shared = torch.zeros(3)
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.first.register_buffer("mean", shared)
        self.second.register_buffer("mean", shared)
        self.held = shared


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_buffer_at_two_places_is_loaded_at_both(tmp_path, dtype, is_empty):
    saved = {name: tensor + 5 for name, tensor in Statistics().state_dict().items()}
    del saved["second.mean"]
    save_file(saved, tmp_path / "model.safetensors")
    with torch.device("meta" if is_empty else "cpu"):
        model = Statistics()
    load_weights(model, tmp_path, dtype=dtype)
    assert model.first.mean is model.second.mean
    assert model.second.mean.tolist() == [5.0, 5.0, 5.0]
    assert is_empty or model.held is model.first.mean


def test_weights_with_memory_are_filled_in_place(folder):
    model = our_llama(tie_embeddings=False)
    places = {name: one.data_ptr() for name, one in model.named_parameters()}
    torch.nn.init.zeros_(model.lm_head.weight)
    load_weights(model, folder)
    assert {name: one.data_ptr() for name, one in model.named_parameters()} == places
    assert torch.equal(model.lm_head.weight, our_llama(tie_embeddings=False).lm_head.weight)


def test_empty_weights_get_memory_and_stay_tied_and_marked():
    with on_meta():
        model = our_llama(tie_embeddings=True)
    model.lm_head.weight.no_weight_decay = True
    allocate(model, {"lm_head.weight": torch.bfloat16})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.lm_head.weight.dtype, model.lm_head.weight.no_weight_decay) == (torch.bfloat16, True)
    assert {one.device.type for one in model.parameters()} == {"cpu"}
    assert model.model.norm.weight.dtype == torch.float32


def test_a_weight_of_whole_numbers_is_rejected_with_its_file_and_key(folder):
    def edit(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    change(folder, edit)
    with raises(CheckpointError, "model.safetensors", "model.norm.weight"):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", ()),
        (b"\n<!DOCTYPE html><html></html>", ()),
        (b"PK\x03\x04" + bytes(60), ()),
        (b"\x80\x02}q\x00." + bytes(60), ()),
        (b"\xff" * 64, ()),
    ],
)
def test_what_is_no_safetensors_file_is_recognised_by_its_first_bytes(folder, content, what):
    (folder / "model.safetensors").write_bytes(content)
    with raises(CheckpointError, *what, "model.safetensors"):
        Llama.from_pretrained(folder)
