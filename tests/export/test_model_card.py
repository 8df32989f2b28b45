"""The model card of an export, and the upload to the hub."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

import pytest
import yaml
from tests.export.runs import RUN, train_run
from tests.messages import raises
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.errors import CheckpointError, ConfigError
from trainwright.export.huggingface import check_hub, export_run, push_export
from trainwright.export.model_card import card_metrics, hub_name

EVALUATED = RUN.replace(
    "  train:",
    "  eval: {valid: {type: pack, length: 32, tokenizer: bytes, source: {type: text, path: text.txt}}}\n  train:",
).replace("runtime:", "evaluation: {every_steps: 2}\nruntime:")


def facts_of(card):
    found = re.match(r"---\n(.*?)---\n", card, flags=re.DOTALL)
    return yaml.safe_load(found[1])


def code_of(card):
    return re.search(r"```python\n(.*?)```", card, flags=re.DOTALL)[1]


def settings_of(card):
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", card, flags=re.DOTALL)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_run(tmp_path_factory.mktemp("project"), EVALUATED, ["writers=[json]"])[0]


@pytest.mark.parametrize("step", [2, "latest"])
def test_the_card_has_the_settings_the_data_and_the_metrics_of_its_step(run, tmp_path, step):
    card = (export_run(run, tmp_path / "out", step=step) / "README.md").read_text("utf-8")
    assert facts_of(card) == {
        "library_name": "transformers",
        "tags": ["trainwright"],
        "pipeline_tag": "text-generation",
    }
    number = 4 if step == "latest" else step
    assert f"for {number} steps" in card
    lines = [json.loads(line) for line in (run / "metrics.json").read_text().splitlines()]
    [line] = [line for line in lines if line["step"] == number]
    assert f"| valid/loss | {line['valid/loss']:.6g} |" in card
    data, settings = settings_of(card)
    assert data["data"]["train"]["source"] == {"type": "text", "path": "text.txt"}
    assert settings["model"]["type"] == "llama"
    assert settings["trainer"]["optimizer"] == {"type": "adamw", "lr": 0.01}
    assert settings["trainer"]["global_batch_size"] == 4
    assert str(run.parent) not in card


def test_the_code_of_the_card_loads_the_export(run, tmp_path):
    pytest.importorskip("transformers")
    for file_format, variable, expected in (
        ("huggingface", "model", "LlamaForCausalLM"),
        ("safetensors", "weights", "dict"),
    ):
        folder = export_run(run, tmp_path / file_format, file_format=file_format)
        code = code_of((folder / "README.md").read_text("utf-8")).replace("path/to/this/folder", str(folder))
        names = {}
        exec(code, names)
        assert type(names[variable]).__name__ == expected


def test_a_finetuned_model_names_its_base(tmp_path, run):
    folder = export_run(run, tmp_path / "base")
    text = RUN.replace(
        re.search(r"^model: .*$", RUN, flags=re.MULTILINE)[0],
        f"model: {{type: llama, pretrained: {folder}, peft: {{type: lora, r: 2, target_modules: all-linear}}}}",
    )
    pytest.importorskip("peft")
    tuned, _ = train_run(tmp_path, text, ["name=tuned"])
    card = (export_run(tuned, tmp_path / "adapter") / "README.md").read_text("utf-8")
    assert facts_of(card)["library_name"] == "peft"
    assert "base_model" not in facts_of(card)  # a folder of this machine
    assert "trained from other weights" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("gpt2", "gpt2"),
        ("/data/llama", None),
        ("~/llama", None),
        ("./llama", None),
        ("../a", None),
        ("a/b/c", None),
        (None, None),
    ],
)
def test_only_names_on_the_hub_are_base_models(source, name):
    assert hub_name(source) == name


def test_metrics_of_later_steps_and_of_the_best_checkpoint_are_left_out():
    history = {
        "loss": [(1, 3.0), (2, 2.0), (3, 1.0)],
        "valid/loss": [(2, 2.5), (4, 1.5)],
        "valid/nan": [(2, float("nan"))],
        "test/loss": [(2, 9.0)],
        "lr": [(1, 0.1)],
        "lr/body": [(1, 0.1)],
    }
    assert card_metrics(history, 3, has_best=True) == {"loss": 1.0, "valid/loss": 2.5}
    assert card_metrics(history, 2, has_best=False) == {"loss": 2.0, "valid/loss": 2.5, "test/loss": 9.0}


def test_another_readme_is_kept_and_an_earlier_card_replaced(run, tmp_path, caplog):
    (tmp_path / "README.md").write_text("mine")
    with caplog.at_level(logging.INFO):
        export_run(run, tmp_path, overwrite=True)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "README.md is kept" in caplog.text
    folder = export_run(run, tmp_path / "out", step=2)
    assert "for 2 steps" in (folder / "README.md").read_text()
    assert "for 4 steps" in (export_run(run, folder) / "README.md").read_text()


class Hub:
    """What the hub has received."""

    def __init__(self):
        self.created, self.uploaded = [], []

    def create_repo(self, _api, repo_id, *, repo_type=None, private=None, exist_ok=False):
        self.created.append((repo_id, repo_type, private, exist_ok))
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, _api, *, repo_id, folder_path, repo_type, allow_patterns, commit_message):
        from huggingface_hub.utils import filter_repo_objects

        names = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        self.uploaded.append((repo_id, sorted(filter_repo_objects(names, allow_patterns=allow_patterns))))


@pytest.fixture
def hub(monkeypatch):
    package = pytest.importorskip("huggingface_hub")
    hub = Hub()
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    for name in ("create_repo", "upload_folder"):
        method = getattr(hub, name)
        monkeypatch.setattr(package.HfApi, name, lambda api, *a, _method=method, **k: _method(api, *a, **k))
    return hub


@pytest.mark.parametrize("public", [False, True])
def test_an_export_is_pushed_without_files_of_others(run, tmp_path, hub, public):
    folder = tmp_path / "out"
    arguments = ["export", str(run), "--to", str(folder)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (folder / "notes.txt").write_text("mine")
    done = CliRunner().invoke(app, [*arguments, "--push", "me/tiny", *(["--public"] if public else [])])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [str(folder), "https://huggingface.co/me/tiny"]
    assert hub.created == [("me/tiny", "model", not public, True)]
    files = {path.name for path in folder.iterdir()} - {"notes.txt"}
    assert hub.uploaded == [("me/tiny", sorted(files))]
    assert "README.md" in files


def test_a_push_that_fails_says_that_the_export_is_complete(run, tmp_path, hub, monkeypatch):
    folder = export_run(run, tmp_path / "out")

    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", fail)
    with raises(CheckpointError, "me/tiny", "no network", str(folder)):
        push_export(folder, "me/tiny")
    with raises(CheckpointError, "not an export"):
        push_export(run, "me/tiny")


def test_without_a_token_nothing_is_exported(run, tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    done = CliRunner().invoke(app, ["export", str(run), "--to", str(tmp_path / "out"), "--push", "me/tiny"])
    assert isinstance(done.exception, ConfigError)
    assert "HF_TOKEN" in str(done.exception)
    assert not (tmp_path / "out").exists()
    with raises(ConfigError, "owner/name"):
        check_hub("tiny")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with raises(ConfigError, "pip install"):
        check_hub("me/tiny")
    done = CliRunner().invoke(app, ["export", str(run), "--to", str(tmp_path / "out"), "--public"])
    assert "--push" in str(done.exception)
