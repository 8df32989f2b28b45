"""What is read from a checkpoint, a dataset, a model's folder or a YAML file runs nothing, and no secret is written."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.export.runs import train_run
from tests.messages import raises
from typer.testing import CliRunner

from trainwright import AutoModel, RunConfig, load_checkpoint, run_experiment
from trainwright.checkpoint.encoding import decode
from trainwright.checkpoint.manifest import read_manifest, render_manifest
from trainwright.checkpoint.remote_files import RemoteFolder, StepFolder
from trainwright.checkpoint.remote_store import open_store
from trainwright.cli import app
from trainwright.data.sources.files import text as text_files
from trainwright.data.sources.tokens import Tokens
from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError
from trainwright.export.huggingface import export_run

PACKAGE = Path(__file__).parents[1] / "src" / "trainwright"
PROJECT = Path(__file__).parent / "project"
SECRETS = {
    "HF_TOKEN": "hf_secretsecretsecret",
    "WANDB_API_KEY": "wandbsecretsecretsecret",
    "AWS_SECRET_ACCESS_KEY": "awssecretsecretsecret",
    "MY_PASSWORD": "passwordsecretsecret",
}


class Evil:
    """An object that, unpickled, makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """The file that is there if anything was executed."""
    return tmp_path / "executed"


def evil_code(mark):
    return f"import os\nos.makedirs({str(mark)!r}, exist_ok=True)\n"


def test_the_trap_works(mark):
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.is_dir()


# The package itself.


NODES = [
    (path.relative_to(PACKAGE).as_posix(), node)
    for path in PACKAGE.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text("utf-8")))
    if isinstance(node, (ast.Call, ast.keyword, ast.Attribute))
]


def test_the_package_executes_no_text_and_trusts_no_remote_code():
    wrong = []
    for file, node in NODES:
        runs_text = isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "os.system", "os.popen")
        # A constant False rejects; anything else would leave it to chance or to a caller.
        trusts = (
            isinstance(node, ast.keyword)
            and node.arg in ("shell", "trust_remote_code")
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        )
        if runs_text or trusts:
            wrong.append(f"{file}: {ast.unparse(node)}")
    assert wrong == []


def test_pickles_are_read_in_one_file_and_tensors_only():
    calls = [(file, ast.unparse(node)) for file, node in NODES if isinstance(node, ast.Call)]
    found = [(file, text) for file, text in calls if text.startswith(("torch.load(", "pickle.load(", "pickle.loads("))]
    assert [file for file, _ in found] == ["models/pretrained.py"]
    assert "weights_only=True" in found[0][1]


def test_yaml_is_read_safely_everywhere():
    unsafe = {"load", "load_all", "unsafe_load", "full_load", "UnsafeLoader", "FullLoader", "Loader"}
    used = {node.attr for _, node in NODES if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml"}
    assert used & unsafe == set()


# YAML.

TAGS = [
    "!!python/object/apply:os.mkdir [{mark}]",
    "!!python/object/new:os.mkdir [{mark}]",
    "!!python/object:os.mkdir {{}}",
    "!!python/name:os.mkdir",
    "!!python/module:os",
    "!mine x",
]


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_that_would_make_an_object_is_rejected(tmp_path, mark, tag):
    text = tag.format(mark=mark)
    path = tmp_path / "run.yaml"
    path.write_text(f"name: x\nmodel: {text}\n")
    with raises(ConfigError, at="run.yaml:2"):
        RunConfig.load(path)
    path.write_text("name: x\n")
    with raises(ConfigError):
        RunConfig.load(path, [f"model={text}"])
    (tmp_path / "below.yaml").write_text(f"model: {text}\n")
    path.write_text("extends: [below.yaml]\n")
    with raises(ConfigError, at="below.yaml:1"):
        RunConfig.load(path)
    assert not mark.exists()


# Checkpoints.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a built-in model, and the folder that it was trained in."""
    return train_run(tmp_path_factory.mktemp("project"))[0]


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def poison(folder, files):
    """Puts files into a checkpoint and makes its manifest fit them, as somebody who wishes harm would."""
    content = read_manifest(folder)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
        content["files"][name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "MANIFEST.json").write_bytes(render_manifest(content))


def use_everywhere(run):
    """Does with a run what people do; returns the errors that were raised."""
    errors = []
    acts = [
        lambda: load_checkpoint(run),
        lambda: export_run(run, run.parent / "export"),
        lambda: run_experiment(RunConfig.load(run / "config.yaml", ["trainer.max_steps=6"]), mode="train"),
        lambda: open_store(run / "checkpoints").read(4, "model"),
        lambda: open_store(run / "checkpoints").read(4, "training"),
    ]
    for act in acts:
        try:
            act()
        except TrainwrightError as error:
            errors.append(error)
    CliRunner().invoke(app, ["checkpoints", str(run), "--verify"])
    CliRunner().invoke(app, ["runs", str(run.parent)])
    return errors


def test_pickles_in_a_checkpoint_are_never_loaded(run, mark):
    harmful = pickle.dumps(Evil(mark))
    for step in (2, 4):
        names = ("model.safetensors", "optimizers.safetensors", "training.safetensors", ".metadata", "model.pt")
        poison(run / "checkpoints" / f"step-{step:08d}", dict.fromkeys(names, harmful))
    errors = use_everywhere(run)
    assert not mark.exists()
    assert len(errors) >= 3
    assert all(isinstance(error, CheckpointError) for error in errors)


def test_code_beside_a_checkpoint_is_never_run(run, mark):
    names = ("model.py", "__init__.py", "sitecustomize.py", "conftest.py", "modeling_llama.py", "json.py", "torch.py")
    for folder in (run, run / "checkpoints", run / "checkpoints" / "step-00000004"):
        for name in names:
            (folder / name).write_text(evil_code(mark))
    # The run itself is whole; its own code was named by nobody.
    assert use_everywhere(run) == []
    assert not mark.exists()


TREES = {
    "unknown tag": {"$eval": "__import__('os').mkdir('executed')"},
    "python tag": {"$python/object": "os.mkdir"},
    "too large an array": {"$array": "x", "dtype": "<f8", "shape": [10**12]},
    "function for a dtype": {"$tensor": "x", "dtype": "load", "shape": [1]},
    "no such dtype": {"$tensor": "x", "dtype": "__import__", "shape": [1]},
    "no tensor": {"$tensor": "../../secret"},
    "number for a tuple": {"$tuple": 5},
    "words for a number": {"$int": "__import__('os')"},
    "odd hex": {"$str": "zz"},
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_makes_nothing_but_plain_values(name):
    with pytest.raises((CheckpointError, AttributeError, LookupError, TypeError, ValueError)):
        decode({"inner": [TREES[name]]}, {"x": torch.arange(8, dtype=torch.uint8)})


@pytest.mark.parametrize("tree", [{"$scalar": "41" * 8, "dtype": "O"}, {"$array": "x", "dtype": "O", "shape": [1]}])
def test_bytes_of_a_checkpoint_never_become_addresses_of_objects(tree):
    # In a process of its own: following such an address ends it.
    program = (
        "import torch\nfrom trainwright.checkpoint.encoding import decode\n"
        "from trainwright.errors import CheckpointError\n"
        f"try:\n    repr(decode({tree!r}, {{'x': torch.full((8,), 65, dtype=torch.uint8)}}))\n"
        "except CheckpointError:\n    print('rejected')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "rejected\n"


WHOLE = {"format": 1, "step": 1, "created": "2026-01-01", "metrics": {}, "parts": [], "files": {}}


@pytest.mark.parametrize(
    "change",
    [
        *({"files": {name: {"size": 1, "sha256": "0"}}} for name in ("../../secret", "/etc/passwd", "..", "", "a/b")),
        {"files": []},
        {"files": {"x": 5}},
        {"files": {"x": {"size": "1", "sha256": ""}}},
        {"metrics": {"loss": "low"}},
        {"metrics": None},
        {"parts": "model"},
        {"step": "1"},
        {"created": 5},
    ],
)
def test_a_remote_manifest_of_another_shape_is_damaged(change):
    remote, folder = RemoteFolder("memory://security"), StepFolder(1, 1)
    remote.put("step-00000001/MANIFEST.json", render_manifest(WHOLE))
    assert remote.manifest(folder) == WHOLE
    remote.put("step-00000001/MANIFEST.json", render_manifest({**WHOLE, **change}))
    with raises(CheckpointError, "security/step-00000001/MANIFEST.json"):
        remote.manifest(folder)


# Datasets, models' folders, projects.


def test_code_in_a_dataset_s_folder_is_never_run(tmp_path, mark):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("texts.py", "__init__.py", "dataset.py", "loading.py"):
        (folder / name).write_text(evil_code(mark))
    (folder / "data.txt").write_text("one\ntwo\n")
    (folder / "data.pkl").write_bytes(pickle.dumps(Evil(mark)))
    assert len(text_files(path=folder, unit="line")) == 2
    assert not mark.exists()


def test_code_in_a_folder_of_hugging_face_s_datasets_is_never_run(tmp_path, mark):
    pytest.importorskip("datasets")
    from trainwright.data.sources.huggingface import huggingface

    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(evil_code(mark))
    (folder / "data.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with_script = huggingface(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    # Versions of the library differ in whether they pass a script over or reject the folder; none may run it.
    with suppress(TrainwrightError, RuntimeError):
        assert with_script[0]["text"] == "one"
    assert not mark.exists()


def test_a_file_of_pickled_tokens_is_rejected(tmp_path, mark):
    np.save(tmp_path / "tokens.npy", np.array([Evil(mark)], dtype=object), allow_pickle=True)
    with pytest.raises((TrainwrightError, ValueError)):
        Tokens(path=tmp_path / "tokens.npy", sequence_length=1)[0]
    assert not mark.exists()


def test_code_in_a_model_s_folder_is_never_run(run, tmp_path, mark):
    folder = export_run(run, tmp_path / "hf")
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.Mine", "AutoConfig": "modeling_mine.Settings"}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "modeling_mine.py").write_text(evil_code(mark))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(mark)))
    AutoModel.from_pretrained(folder)
    assert not mark.exists()
    (folder / "model.safetensors").unlink()
    with raises(TrainwrightError):
        AutoModel.from_pretrained(folder)
    with pytest.raises(Exception, match=r"pickle|Weights only|tensors"):
        AutoModel.from_pretrained(folder, allow_pickle=True)
    assert not mark.exists()


def test_code_in_a_tokenizer_s_folder_is_never_run(tmp_path, mark):
    pytest.importorskip("transformers")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": settings["auto_map"]}))
    (folder / "tokenization_mine.py").write_text(evil_code(mark))
    with raises(TrainwrightError):
        load_tokenizer(folder).vocab_size  # noqa: B018  # it is read at its first use
    assert not mark.exists()


def test_nobody_is_asked_whether_a_tokenizer_s_code_may_run(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "n")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}}')
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    (tmp_path / "mine.py").write_text("")
    with suppress(TrainwrightError):
        load_tokenizer(tmp_path).vocab_size  # noqa: B018  # it is read at its first use
    assert asked == []


def test_only_the_files_that_the_config_names_are_run(in_tmp, mark, monkeypatch):
    project = shutil.copytree(PROJECT, in_tmp / "project")
    for kind in ("hooks", "models", "datasets", "trainers", "optimizers", "collators", "tasks"):
        (project / kind).mkdir(exist_ok=True)
        (project / kind / "evil.py").write_text(evil_code(mark) + "class Thing:\n    pass\n")
    (project / "conftest.py").write_text(evil_code(mark))
    run_experiment(RunConfig.load(project / "run.yaml", ["trainer.max_steps=1"]), mode="train")
    monkeypatch.chdir(project)
    listed = CliRunner().invoke(app, ["components", "hook"])
    assert listed.exit_code == 0, listed.output
    assert not mark.exists()


# Secrets and paths.


def texts_below(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_variable_of_the_environment_is_written_anywhere(in_tmp, monkeypatch, capfd, caplog):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.DEBUG):
        run_experiment(RunConfig.load(PROJECT / "run.yaml", ["trainer.max_steps=4", "writers=[console, json]"]))
    shown = capfd.readouterr()
    written = texts_below(in_tmp / "runs")
    names = {path.name for path in written}
    assert {"environment.json", "log.txt", "config.yaml", "metrics.json"} <= names
    everything = {**written, "shown": (shown.out + shown.err + caplog.text).encode()}
    for name, value in SECRETS.items():
        assert [str(path) for path, content in everything.items() if value.encode() in content] == [], name


def test_an_error_s_report_holds_no_variable_of_the_environment(in_tmp, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    config = RunConfig.load(PROJECT / "run.yaml", ["model.width=-1", "trainer.max_steps=1"])
    with pytest.raises(Exception) as caught:  # whichever it is, it must not tell
        run_experiment(config)
    written = b"".join(texts_below(in_tmp).values()) + str(caught.value).encode()
    assert not [name for name, value in SECRETS.items() if value.encode() in written]


@pytest.mark.parametrize("file_format", ["huggingface", "safetensors"])
def test_an_export_holds_no_path_of_this_machine_and_no_secret(run, trained, tmp_path, monkeypatch, file_format):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    folder = export_run(run, tmp_path / "out", file_format=file_format)
    local = {str(trained), str(trained.parents[1]), str(run), str(tmp_path), str(Path.home()), str(Path.cwd())} - {"/"}
    for path, content in texts_below(folder).items():
        for word in (*local, *SECRETS.values()):
            assert word.encode() not in content, f"{path.name} holds {word}"


def test_a_copied_run_names_no_user_in_its_environment(run):
    environment = json.loads((run / "environment.json").read_text())
    assert environment.keys() <= {"python", "platform", "torch", "numpy", "device", "byteorder"}
    assert not any(str(Path.home()) in value for value in environment.values() if Path.home() != Path("/"))
