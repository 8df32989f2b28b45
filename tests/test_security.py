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
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.export.runs import TEXT, train_run
from tests.messages import raises
from typer.testing import CliRunner

from trainwright import AutoModel, RunConfig, build_trainer, load_checkpoint, run_experiment
from trainwright.build.run import build_model
from trainwright.checkpoint.encoding import decode
from trainwright.checkpoint.manifest import read_manifest, render_manifest
from trainwright.checkpoint.remote_files import RemoteFolder, StepFolder
from trainwright.checkpoint.remote_store import open_store
from trainwright.cli import app
from trainwright.config import Origin
from trainwright.config.schema import layered_config
from trainwright.data.sources.files import text as text_files
from trainwright.data.sources.tokens import Tokens
from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import CheckpointError, ConfigError, DataError, TrainwrightError, TrustError
from trainwright.export.huggingface import export_run
from trainwright.export.text import load_text_model
from trainwright.registry.trust import reject_untrusted

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


# Run folders of other people.


CODE = {
    "imports": {"imports": ["evil"]},
    "imports of a file": {"imports": ["evil.py"]},
    "model": {"model": {"type": "evil.py:act"}},
    "model of a module": {"model": {"type": "evil:act"}},
    "model of a folder": {"model": {"type": "evil.act"}},
    "model.replace": {"model": {"replace": {"*.mlp": "evil.py:act"}}},
    "model.replace in full": {"model": {"replace": {"*.mlp": {"type": "evil.py:act"}}}},
    "trainer": {"trainer": {"type": "evil.py:act"}},
    "task": {"task": {"type": "evil.py:act"}},
    "data.train": {"data": {"train": {"type": "evil.py:act"}}},
    "data.train.source": {"data": {"train": {"source": {"type": "evil.py:act"}}}},
    "data.eval": {"data": {"eval": {"valid": {"type": "evil.py:act"}}}},
    "data.test": {"data": {"test": "evil.py:act"}},
    "data.process": {"data": {"process": {"type": "evil.py:act"}}},
    "data.collator": {"data": {"collator": "evil.py:act"}},
    "optimizer": {"trainer": {"optimizer": {"type": "evil.py:act"}}},
    "schedule": {"trainer": {"schedule": "evil.py:act"}},
    "hooks": {"hooks": ["evil.py:act"]},
    "hooks, every": {"hooks": [{"type": "every", "steps": 1, "call": "evil.py:act"}]},
    "hooks, callback": {"hooks": [{"type": "callback", "before_train": "evil.py:act"}]},
    "a hook in a dataset's argument": {
        "data": {"train": {"path": {"hook": {"type": "every", "steps": 1, "call": "evil.py:act"}}}}
    },
    "weights of a sampler in an argument": {
        "trainer": {
            "schedule": {
                "type": "constant",
                "warmup_steps": {"sampler": {"type": "weighted", "weights": "evil.py:act", "dataset": [1]}},
            }
        }
    },
    "functions of a schedule": {
        "trainer": {"schedule": {"type": "reduce_on_plateau", "metric": "valid/loss", "lr_lambda": ["evil.py:act"]}}
    },
    "hooks, by path": {"hooks": [{"type": "trainwright.hooks.callback:every_from_config", "call": "evil.py:act"}]},
    "writers": {"writers": ["evil.py:act"]},
    "metrics": {"evaluation": {"metrics": {"m": {"type": "evil.py:act"}}}},
    "the package's own loader": {
        "data": {"train": {"type": "trainwright.registry.resolve:import_modules", "names": ["evil"]}}
    },
    "benchmarks": {"evaluation": {"benchmarks": [{"type": "evil.py:act"}]}},
    "a metric of a benchmark": {
        "evaluation": {"benchmarks": [{"type": "generate", "path": "x", "tokenizer": "bytes", "metric": "evil.py:act"}]}
    },
    "metrics of a benchmark in an argument": {
        "data": {
            "train": {
                "path": {
                    "benchmark": {"type": "generate", "path": "x", "tokenizer": "bytes", "metric": ["evil.py:act"]}
                }
            }
        }
    },
    "extends": {"extends": ["evil.py"]},
    "extends twice": {"extends": ["evil.yaml"]},
}


def merged(settings, changes):
    for key, value in changes.items():
        is_mapping = isinstance(value, dict) and isinstance(settings.get(key), dict)
        settings = {**settings, key: merged(settings[key], value) if is_mapping else value}
    return settings


@pytest.fixture
def foreign(run, mark, monkeypatch):
    """Makes a run folder of somebody else: with code next to the config, which names it."""

    def make(changes):
        for folder in (run, run / "models"):
            folder.mkdir(exist_ok=True)
            (folder / "evil.py").write_text(f"{evil_code(mark)}def act(*args, **kwargs): pass\nconfig = {{}}\n")
        (run / "evil.yaml").write_text("extends: [evil.py]\n")
        (run / "text.txt").write_text(TEXT, encoding="utf-8")
        settings = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump({**merged(settings, changes), "project_dir": str(run)}))
        return run

    monkeypatch.setenv("NO_COLOR", "1")
    return make


def commands_for(run, *flags):
    folder, out = str(run), str(run.parent / "out")
    return [
        ["evaluate", folder, *flags],
        ["export", folder, "--to", out, *flags],
        ["generate", folder, "--prompt", "x", "--max-new-tokens", "1", "--device", "cpu", *flags],
        ["check", folder, *flags],
        ["data", folder, *flags],
        ["explain", folder, *flags],
        ["shard", folder, *flags],
        ["estimate", folder, *flags],
        ["train", f"{folder}/config.yaml", f"output_dir={out}/runs", *flags],
        ["launch", f"{folder}/config.yaml", "--slurm", "--file", f"{out}.slurm", *flags],
    ]


# All commands for each place take a second; in the suite every other place.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if number % 2 else []) for number, name in enumerate(CODE)],
)
def test_code_that_a_foreign_run_folder_names_is_never_run(foreign, mark, name):
    run = foreign(CODE[name])
    for words in [*commands_for(run), ["runs", str(run.parent)], ["checkpoints", str(run)], ["config", str(run)]]:
        CliRunner().invoke(app, words)
        assert not mark.exists(), words[0]
    for act in (
        lambda: load_checkpoint(run),
        lambda: export_run(run, run.parent / "export"),
        lambda: run_experiment(RunConfig.load(run / "config.yaml"), mode="train"),
        lambda: build_trainer(RunConfig.load(run / "config.yaml", ["trainer.max_steps=6"])),
    ):
        with suppress(TrainwrightError):
            act()
        assert not mark.exists()
    with raises(TrustError, at="evil.yaml:1" if name == "extends twice" else "config.yaml", golden=False):
        build_trainer(RunConfig.load(run / "config.yaml"))


@pytest.mark.parametrize("command", [words[0] for words in commands_for(Path("RUN"))])
def test_every_command_runs_the_code_of_a_foreign_run_folder_with_trust_alone(foreign, mark, command):
    run = foreign({"imports": ["evil.py"]})
    words = next(words for words in commands_for(run) if words[0] == command)
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
    assert not mark.exists()
    assert isinstance(done.exception, TrustError) or (words[0] == "check" and "imports.0: evil.py" in done.output)
    CliRunner().invoke(app, [*words, "--trust"])
    assert mark.exists() or words[0] == "launch"
    if words[0] == "launch":
        assert "--trust" in Path(words[-1]).read_text()


def test_a_foreign_run_folder_of_built_in_parts_needs_no_trust(foreign):
    run = foreign({"seed": 1})
    assert RunConfig.load(run / "config.yaml").untrusted_file is not None
    load_checkpoint(run)
    for words in commands_for(run):
        if words[0] not in ("evaluate", "launch"):  # no evaluation set; no cluster
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, (words, done.output, done.exception)


@pytest.mark.parametrize("settings", ["lora", {"type": "lora", "r": 2, "target_modules": "all-linear"}])
def test_the_name_of_an_adapter_needs_no_trust(tmp_path, settings):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"type": "gpt2", "peft": settings}}))
    reject_untrusted(RunConfig.load(tmp_path / "config.yaml", trust=False))


def test_the_type_of_quantized_weights_needs_no_trust(tmp_path):
    quantize = {"type": "nf4", "match": "*_proj"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"type": "gpt2", "quantize": quantize}}))
    reject_untrusted(RunConfig.load(tmp_path / "config.yaml", trust=False))


@pytest.mark.parametrize("name", ["megatron_core", "tokenizer_name_or_path"])
def test_settings_of_an_adapter_that_import_code_need_trust(tmp_path, name):
    settings = {"model": {"type": "gpt2", "peft": {"peft_type": "lora", name: "evil"}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    with raises(TrustError, f"model.peft.{name}: evil", at="config.yaml", golden=False):
        reject_untrusted(RunConfig.load(tmp_path / "config.yaml", trust=False))


def test_a_foreign_model_loads_although_its_data_needs_trust(foreign, mark, tmp_path):
    run = foreign({"data": {"train": {"type": "evil.py:act"}}})
    load_checkpoint(run)
    export_run(run, tmp_path / "out")  # without its tokenizer
    assert not mark.exists()
    with raises(TrustError, "data.train.type", "evil.py:act", at="config.yaml", golden=False):
        load_text_model(run)


def test_an_override_does_not_lift_the_rule(foreign, mark):
    # A relative name would be found in the folder that the foreign file chooses.
    run = foreign({"seed": 1})
    with raises(TrustError, golden=False):
        build_trainer(RunConfig.load(run / "config.yaml", ["hooks=[evil.py:act]"]))
    assert not mark.exists()


def test_a_file_that_extends_a_foreign_run_folder_is_untrusted_too(foreign, mark, tmp_path):
    run = foreign({"imports": ["evil.py"]})
    (tmp_path / "mine.yaml").write_text("extends: [run/config.yaml]\n")
    (tmp_path / "mine.py").write_text(
        f"from trainwright import RunConfig\nconfig = RunConfig.load({str(run / 'config.yaml')!r})\n"
    )
    for file in ("mine.yaml", "mine.py"):
        with raises(TrustError, golden=False):
            build_trainer(RunConfig.load(tmp_path / file))
    config = load_experiment_of(run)
    with raises(TrustError, golden=False):
        build_trainer(config)
    assert not mark.exists()


def load_experiment_of(run):
    where = Origin("here.py", 1)
    return layered_config(RunConfig.load(run / "config.yaml"), name="x", folder=run.parent, where=where)


def test_saving_foreign_settings_does_not_sign_them(foreign, tmp_path):
    run = foreign({"imports": ["evil.py"]})
    RunConfig.load(run / "config.yaml").derive({"seed": 3}).save(tmp_path / "copy" / "config.yaml")
    assert RunConfig.load(tmp_path / "copy" / "config.yaml").untrusted_file is not None
    RunConfig.load(run / "config.yaml", trust=True).save(tmp_path / "copy" / "config.yaml")
    assert RunConfig.load(tmp_path / "copy" / "config.yaml").untrusted_file is None


def test_own_runs_need_no_trust_wherever_they_are(in_tmp, monkeypatch):
    project = shutil.copytree(PROJECT, in_tmp / "project")
    run_experiment(RunConfig.load(project / "run.yaml", ["trainer.max_steps=2"]))
    moved = shutil.move(in_tmp / "runs" / "small", in_tmp / "elsewhere")
    load_checkpoint(moved)
    done = CliRunner().invoke(app, ["evaluate", str(moved)])
    assert done.exit_code == 0, done.output
    # Another account, or an edited file.
    copied = shutil.copytree(moved, in_tmp / "edited")
    text = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(text.replace("seed: 42", "seed: 43") if "seed: 42" in text else f"# x\n{text}")
    with raises(TrustError, golden=False):
        load_checkpoint(copied)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(in_tmp / "of-another"))
    with raises(TrustError, golden=False):
        load_checkpoint(moved)
    load_checkpoint(moved, trust=True)


def test_resuming_in_a_foreign_folder_signs_it(in_tmp):
    project = shutil.copytree(PROJECT, in_tmp / "project")
    load = [project / "run.yaml", ["trainer.max_steps=4", "checkpoint.every_steps=2"]]
    run_experiment(RunConfig.load(load[0], [*load[1], "trainer.max_steps=2"]))
    file = in_tmp / "runs" / "small" / "config.yaml"
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    assert RunConfig.load(file).untrusted_file is not None
    run_experiment(RunConfig.load(*load))
    assert RunConfig.load(file).untrusted_file is None


def test_a_run_file_of_the_user_needs_no_trust(tmp_path):
    (tmp_path / "config.yaml").write_text("imports: [evil.py]\n")
    assert RunConfig.load(tmp_path / "config.yaml").untrusted_file is None
    assert RunConfig.load(tmp_path / "config.yaml", trust=False).untrusted_file is not None


def test_the_registry_is_asked_in_known_files_only():
    # A new file that imports what a config names has to call reject_untrusted first, or be called by one that has.
    asks = {
        file
        for file, node in NODES
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("registry.find", "registry.instantiate", "registry.import_modules")
    }
    assert asks == {
        *("analysis/check.py", "analysis/explain.py", "api/experiments.py", "build/components.py", "build/data.py"),
        *("build/run.py", "export/huggingface.py", "export/load.py", "hooks/callback.py", "models/from_config.py"),
        # What a program passes; what build/ passes on, of which reject_untrusted knows where it names a function.
        *("api/train_arguments.py", "data/samplers.py", "benchmarks/generate.py"),
    }


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


INDEX = "model.safetensors.index.json"
OUTSIDE = ["../outside.safetensors", "{outside}", "sub/../../outside.safetensors", "..", ".", "", "/etc/passwd"]


@pytest.mark.parametrize(
    "name", [*OUTSIDE, "weights.bin", "weights.pt", "weights", "x\\0.safetensors", "..\\\\w.safetensors"]
)
@pytest.mark.parametrize("target", [None, "transformers:LlamaForCausalLM"])
def test_an_index_names_safetensors_of_its_own_folder_only(run, tmp_path, mark, name, target):
    folder = export_run(run, tmp_path / "hf", max_shard_bytes=20_000)
    outside = tmp_path / "outside.safetensors"
    shutil.copyfile(next(folder.glob("*-00001-*.safetensors")), outside)
    for file in ("weights.bin", "weights.pt", "weights"):
        (folder / file).write_bytes(pickle.dumps(Evil(mark)))
    name = name.encode().decode("unicode_escape").format(outside=outside)
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = name
    (folder / INDEX).write_text(json.dumps(content))
    with raises(CheckpointError, INDEX, golden=False):
        if target is None:
            AutoModel.from_pretrained(folder, allow_pickle=True)
        else:
            pytest.importorskip("transformers")
            section = {"type": target, "pretrained": str(folder)}
            build_model(RunConfig.from_dict({"model": section}))
    assert not mark.exists()


def test_an_index_of_pickles_names_files_of_its_own_folder_only(run, tmp_path):
    folder = export_run(run, tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "part.bin")
    torch.save(weights, tmp_path / "outside.bin")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "part.bin")}))
    AutoModel.from_pretrained(folder, allow_pickle=True)
    for name in ("../outside.bin", str(tmp_path / "outside.bin")):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, name)}))
        with raises(CheckpointError, index.name, golden=False):
            AutoModel.from_pretrained(folder, allow_pickle=True)


def test_a_shard_may_be_a_link_as_in_the_cache_of_the_hub(run, tmp_path):
    folder = export_run(run, tmp_path / "hf", max_shard_bytes=20_000)
    for number, file in enumerate(folder.glob("*.safetensors")):
        file.rename(tmp_path / f"blob-{number}")
        file.symlink_to(tmp_path / f"blob-{number}")
    AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("arguments", [{"path": "pandas", "data_files": "x.pkl"}, {"trust_remote_code": True}])
def test_settings_of_a_dataset_that_run_programs_are_rejected(tmp_path, mark, arguments):
    pytest.importorskip("datasets")
    from trainwright.data.sources.huggingface import huggingface

    (tmp_path / "x.pkl").write_bytes(pickle.dumps(Evil(mark)))
    with raises(ConfigError, golden=False):
        huggingface(**{"path": "json", "project_dir": tmp_path, **arguments})[0]
    assert not mark.exists()


def test_an_export_copies_no_file_that_is_not_a_tokenizer(run, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("secretsecret")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["data"]["train"]["tokenizer"] = str(secret)
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    folder = export_run(run, tmp_path / "out")
    assert not any(b"secretsecret" in content for content in texts_below(folder).values())


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


# Files that ask for too much (found by `make fuzz`).


@pytest.mark.parametrize(
    "text",
    [
        "x0: &x0 [a, b]\n" + "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 30)),
        "x0: &x0 {a: b}\n" + "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 2)}]\n" for n in range(1, 40)),
        "a: " + "[" * 100_000,
        "a: " + "{" * 100_000,
        "- " * 5_000,
        'name: "\\ud800"\n',
        f"extends: {'a' * 5000}\n",
    ],
    ids=["aliases", "aliases of mappings", "brackets", "braces", "dashes", "half a character", "a long name"],
)
def test_a_config_that_asks_for_too_much_is_rejected_at_once(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    started = time.process_time()
    with raises(ConfigError, at="run.yaml", golden=False):
        RunConfig.load(tmp_path / "run.yaml")
    assert time.process_time() - started < 3.0


def test_a_config_without_end_is_rejected(tmp_path):
    (tmp_path / "config.yaml").symlink_to("/dev/zero")
    with raises(ConfigError, at="config.yaml:1", golden=False):
        RunConfig.load(tmp_path / "config.yaml")


@pytest.mark.parametrize("name", ["num_layers", "vocab_size", "hidden_size"])
def test_a_run_folder_of_an_impossibly_large_model_is_rejected_before_memory_is_allocated(run, name):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"][name] = 10**12 if name != "hidden_size" else 10**7
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    with raises(TrainwrightError, golden=False):
        load_checkpoint(run)


@pytest.mark.parametrize("tree", [b"[" * 5000 + b"]" * 5000, b'"x"', b"5", b"[]", b'{"lm_head.weight": {"a": 1}}'])
def test_a_state_of_another_form_is_rejected(run, tree):
    poison(run / "checkpoints" / "step-00000004", {"model.json": tree})
    with raises(CheckpointError, golden=False):
        load_checkpoint(run, 4)


def test_a_tokenizer_that_makes_its_library_panic_is_rejected(tmp_path):
    library = pytest.importorskip("tokenizers")
    model = library.models.Unigram([("a", 0.0)], None, False)  # no token for what is unknown
    library.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with raises(DataError, at="tokenizer.json", golden=False):
        load_tokenizer(tmp_path).encode("b")
    (tmp_path / "tokenizer_config.json").write_text("[" * 5000)
    with raises(DataError, at="tokenizer_config.json", golden=False):
        load_tokenizer(tmp_path).vocab_size  # noqa: B018  # it is read at its first use


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
    assert environment.keys() <= {"run_id", "python", "platform", "torch", "numpy", "device", "byteorder"}
    assert not any(str(Path.home()) in value for value in environment.values() if Path.home() != Path("/"))
