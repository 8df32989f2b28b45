import os

import pytest
from tests.messages import raises

from trainwright.config import RunConfig, files
from trainwright.errors import ConfigError


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_later_extended_files_win_and_the_extending_file_wins_over_all(tmp_path):
    write(tmp_path / "one.yaml", "seed: 1\ntrainer: {max_steps: 1, max_grad_norm: 1.0}\nhooks: [a, b]\n")
    write(tmp_path / "two.yaml", "seed: 2\ntrainer: {max_steps: 2, optimizer: {type: adamw, lr: 1}}\n")
    run = write(
        tmp_path / "run.yaml",
        "extends: [one.yaml, two.yaml]\ntrainer:\n  max_steps: 3\n  optimizer: {type: sgd}\nhooks: [c]\n",
    )
    config = RunConfig.load(run)
    assert (config.seed, config.trainer.max_steps, config.trainer.max_grad_norm) == (2, 3, 1.0)
    assert config.trainer.optimizer == {"type": "sgd"}
    assert [hook.type for hook in config.hooks] == ["c"]
    assert config.name == "run"
    assert str(config.origin("seed")).endswith("two.yaml:1")
    assert str(config.origin("trainer.max_steps")).endswith("run.yaml:3")


def test_an_extended_files_components_are_found_from_the_given_file(tmp_path):
    write(
        tmp_path / "base" / "base.yaml",
        "model: {type: models/net.py:Net}\nhooks: [hooks/info.py:InfoHook, {type: every, call: ../act.py:do}]\n",
    )
    config = RunConfig.load(write(tmp_path / "project" / "run.yaml", "extends: ../base/base.yaml\n"))
    assert config.model.type == "../base/models/net.py:Net"
    assert [hook.type for hook in config.hooks] == ["../base/hooks/info.py:InfoHook", "every"]
    assert config.hooks[1].call == "../act.py:do"
    assert config.project_dir == tmp_path / "project"


def test_a_circle_is_rejected_with_its_chain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.yaml", "extends: b.yaml\n")
    write(tmp_path / "b.yaml", "seed: 1\nextends: [a.yaml]\n")
    with pytest.raises(ConfigError) as rejection:
        RunConfig.load("a.yaml")
    assert str(rejection.value) == (
        "b.yaml:2: extends: the files extend each other: a.yaml → b.yaml → a.yaml. Remove one of these extends."
    )


def test_two_files_may_extend_the_same_one(tmp_path):
    write(tmp_path / "root.yaml", "seed: 7\n")
    write(tmp_path / "a.yaml", "extends: root.yaml\n")
    write(tmp_path / "b.yaml", "extends: root.yaml\n")
    assert RunConfig.load(write(tmp_path / "run.yaml", "extends: [a.yaml, b.yaml]\n")).seed == 7


def test_packaged_configs_are_extended_by_name(tmp_path, monkeypatch):
    packaged = {
        "experiments/digits.yaml": write(tmp_path / "packaged" / "digits.yaml", "seed: 9\n"),
        "model/small.yaml": tmp_path,
        "data/small.yaml": tmp_path,
    }
    monkeypatch.setattr(files, "_packaged_files", lambda: packaged)
    assert RunConfig.load(write(tmp_path / "run.yaml", "extends: digits\n")).seed == 9
    assert RunConfig.load(write(tmp_path / "run.yaml", "extends: experiments/digits\n")).seed == 9
    with raises(ConfigError, "model/small", at="run.yaml:1"):
        RunConfig.load(write(tmp_path / "run.yaml", "extends: small\n"))
    with raises(ConfigError, "digts", "digits"):
        RunConfig.load(write(tmp_path / "run.yaml", "extends: [digts]\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml:1: the file is empty. A run needs at least data and trainer."),
        ("# nothing\n", "run.yaml:1: the file is empty. A run needs at least data and trainer."),
        ("- a\n", "run.yaml:1: the file must be a mapping (key: value), got a list of 1."),
        ("hello\n", 'run.yaml:1: the file must be a mapping (key: value), got the text "hello".'),
        ("seed: 1\nextends: 3\n", "run.yaml:2: extends: must be a name, a file or a list of them; got 3."),
        ("seed: 1\nproject_dir: 3\n", "run.yaml:2: project_dir: must be text, got 3."),
    ],
)
def test_a_file_that_is_not_a_config_is_rejected(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run.yaml", text)
    with pytest.raises(ConfigError) as rejection:
        RunConfig.load("run.yaml")
    assert str(rejection.value) == message


def test_a_missing_file_names_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "digits.yaml", "seed: 1\n")
    with pytest.raises(ConfigError) as rejection:
        RunConfig.load("digit.yaml")
    assert (
        str(rejection.value) == 'digit.yaml:1: there is no such file. Did you mean "digits.yaml"? Known: digits.yaml.'
    )


def test_a_folder_and_foreign_bytes_are_rejected(tmp_path):
    with raises(ConfigError):
        RunConfig.load(tmp_path)
    (tmp_path / "run.yaml").write_bytes(b"seed: 1\nname: \xff\n")
    with raises(ConfigError, "8", at="run.yaml:2"):
        RunConfig.load(tmp_path / "run.yaml")


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbfseed: 3\n")
    assert RunConfig.load(tmp_path / "run.yaml").seed == 3


def test_saving_leaves_the_earlier_file_when_it_fails(tmp_path, monkeypatch):
    target = write(tmp_path / "config.yaml", "seed: 1\n")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.save_document(target, {"seed": 2})
    assert target.read_text() == "seed: 1\n"
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_an_extending_file_removes_settings(tmp_path):
    write(
        tmp_path / "base.yaml",
        "trainer:\n  max_steps: 3\n  schedule: {type: cosine, warmup_steps: 3}\n  optimizer: {type: sgd, lr: 1}\n",
    )
    run = write(tmp_path / "run.yaml", "extends: base.yaml\ntrainer:\n  ~schedule:\n  optimizer: {~lr: }\n")
    config = RunConfig.load(run)
    assert (config.trainer.max_steps, config.trainer.schedule) == (3, None)
    assert config.trainer.optimizer == {"type": "sgd"}


def test_a_removal_in_a_later_file_of_extends_applies_to_the_earlier_ones(tmp_path):
    write(tmp_path / "base.yaml", "trainer: {max_steps: 3, max_grad_norm: 1.0}\n")
    write(tmp_path / "free.yaml", "trainer: {~max_grad_norm: }\n")
    config = RunConfig.load(write(tmp_path / "run.yaml", "extends: [base.yaml, free.yaml]\n"))
    assert (config.trainer.max_steps, config.trainer.max_grad_norm) == (3, None)
    with raises(ConfigError, "trainer.~max_grad_norm", at="free.yaml:1"):
        RunConfig.load(tmp_path / "free.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("extends: base.yaml\ntrainer:\n  ~max_stepz:\n", 3),
        ("extends: base.yaml\ntrainer:\n  ~max_steps: 3\n", 3),
        ("~writers:\n", 1),
        ("hooks:\n- {type: ema, ~decay: }\n", 2),
        ("extends: base.yaml\ntrainer:\n  optimizer:\n    type: adamw\n    ~lr:\n", 5),
    ],
)
def test_a_removal_without_effect_is_rejected(tmp_path, text, line):
    write(tmp_path / "base.yaml", "trainer: {max_steps: 3, optimizer: {type: sgd, lr: 1}}\n")
    with raises(ConfigError, "~", at=f"run.yaml:{line}"):
        RunConfig.load(write(tmp_path / "run.yaml", text))
