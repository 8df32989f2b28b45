from pathlib import Path

import pytest
from tests.messages import raises

from trainwright.config import RunConfig, groups
from trainwright.errors import ConfigError

BASE = "model: {type: llama}\ntrainer:\n  max_steps: 3\n  optimizer: {type: sgd, lr: 0.1}\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with run.yaml and group files; the current directory."""
    monkeypatch.chdir(tmp_path)
    write("run.yaml", BASE)
    write("configs/trainer/lm-xl.yaml", "max_steps: 1000\nmax_grad_norm: 1.0\noptimizer: adamw-big\n")
    write("configs/trainer/lm.yaml", "max_steps: 10\nmicro_batch_size: 4\n")
    write("configs/trainer/optimizer/adamw-big.yaml", "type: adamw\nlr: 3e-4\n")
    write("configs/model/small.yaml", "# a comment\ntype: models/net.py:Net\nwidth: 8\n")
    return tmp_path


def write(name, text):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


def origin(config, name):
    return str(config.origin(name))


def test_an_override_with_the_name_of_a_group_replaces_the_section(project):
    config = RunConfig.load("run.yaml", ["trainer=lm-xl", "model=small"])
    assert (config.trainer.max_steps, config.trainer.max_grad_norm) == (1000, 1.0)
    assert config.trainer.optimizer == {"type": "adamw", "lr": 3e-4}
    assert config.model == {"type": "models/net.py:Net", "width": 8}
    assert origin(config, "trainer.max_steps") == "configs/trainer/lm-xl.yaml:1"
    assert origin(config, "trainer.optimizer.lr") == "configs/trainer/optimizer/adamw-big.yaml:2"
    assert origin(config, "model.width") == "configs/model/small.yaml:3"
    assert {each.name: each.path for each in config.groups} == {
        "lm-xl": ("trainer",),
        "adamw-big": ("trainer", "optimizer"),
        "small": ("model",),
    }


def test_a_group_replaces_what_the_file_sets_and_later_overrides_change_it(project):
    config = RunConfig.load("run.yaml", ["trainer=lm", "trainer.max_steps=7"])
    assert (config.trainer.max_steps, config.trainer.micro_batch_size, config.trainer.optimizer) == (7, 4, None)
    assert origin(config, "trainer.max_steps") == "override trainer.max_steps=7"


def test_a_nested_section_has_its_own_groups(project):
    config = RunConfig.load("run.yaml", ["trainer.optimizer=adamw-big"])
    assert config.trainer.max_steps == 3
    assert config.trainer.optimizer == {"type": "adamw", "lr": 3e-4}


def test_a_file_uses_groups_by_name_and_extends_them_in_a_section(project):
    write("named.yaml", "model: small\ntrainer: lm-xl\n")
    assert RunConfig.load("named.yaml").trainer == RunConfig.load("run.yaml", ["trainer=lm-xl"]).trainer
    write("changed.yaml", "trainer:\n  extends: [lm, lm-xl]\n  max_steps: 5\n  ~max_grad_norm:\n")
    config = RunConfig.load("changed.yaml")
    assert (config.trainer.max_steps, config.trainer.micro_batch_size, config.trainer.max_grad_norm) == (5, 4, None)
    assert config.trainer.optimizer.lr == 3e-4
    assert origin(config, "trainer.max_steps") == "changed.yaml:3"


def test_an_extending_file_changes_the_group_of_its_base(project):
    write("base.yaml", "trainer: lm-xl\n")
    write("next.yaml", "extends: base.yaml\ntrainer: {max_steps: 4}\n")
    config = RunConfig.load("next.yaml")
    assert (config.trainer.max_steps, config.trainer.max_grad_norm) == (4, 1.0)


def test_groups_extend_others_of_their_folder(project):
    write("configs/trainer/huge.yaml", "extends: lm-xl\nmax_steps: 2000\noptimizer: {lr: 1e-5}\n")
    config = RunConfig.load("run.yaml", ["trainer=huge"])
    assert (config.trainer.max_steps, config.trainer.max_grad_norm) == (2000, 1.0)
    assert config.trainer.optimizer == {"type": "adamw", "lr": 1e-5}


def test_items_of_lists_and_whole_lists_have_groups(project):
    write("configs/hooks/slow-ema.yaml", "type: ema\ndecay: 0.999\n")
    write("configs/hooks/usual.yaml", "- slow-ema\n- early_stopping\n")
    write("run.yaml", BASE + "hooks: [time_steps, slow-ema]\n")
    assert [hook.type for hook in RunConfig.load("run.yaml").hooks] == ["time_steps", "ema"]
    config = RunConfig.load("run.yaml", ["hooks.0=slow-ema"])
    assert [hook.type for hook in config.hooks] == ["ema", "ema"]
    assert origin(config, "hooks.0.decay") == "configs/hooks/slow-ema.yaml:2"
    assert [hook.type for hook in RunConfig.load("run.yaml", ["hooks=usual"]).hooks] == ["ema", "early_stopping"]


def test_groups_are_found_from_the_file_that_uses_them(project):
    write("base/base.yaml", "model: tiny\n")
    write("base/configs/model/tiny.yaml", "type: net.py:Net\n")
    write("runs/mine.yaml", "extends: ../base/base.yaml\n")
    config = RunConfig.load("runs/mine.yaml")
    assert config.model.type == "../base/net.py:Net"
    assert origin(config, "model.type") == "base/configs/model/tiny.yaml:1"


def test_a_run_file_in_the_folder_configs_uses_its_siblings(project):
    write("configs/here.yaml", "trainer: lm\n")
    assert RunConfig.load("configs/here.yaml").trainer.max_steps == 10


def test_packaged_groups_are_used_after_those_of_the_project(project, monkeypatch):
    monkeypatch.setattr(groups, "packaged_folder", lambda: project / "packaged")
    write("packaged/trainer/lm.yaml", "max_steps: 1\n")
    write("packaged/trainer/other.yaml", "max_steps: 2\n")
    assert RunConfig.load("run.yaml", ["trainer=lm"]).trainer.max_steps == 10
    assert RunConfig.load("run.yaml", ["trainer=other"]).trainer.max_steps == 2


def test_the_saved_config_has_the_contents_of_the_groups(project):
    config = RunConfig.load("run.yaml", ["trainer=lm-xl", "model=small"])
    config.save("saved/config.yaml")
    for name in ("lm-xl", "lm"):
        Path(f"configs/trainer/{name}.yaml").unlink()
    loaded = RunConfig.load("saved/config.yaml")
    assert loaded == config
    assert loaded.project_dir == project
    assert "lm-xl" not in Path("saved/config.yaml").read_text("utf-8")


def test_a_saved_run_uses_the_groups_of_its_project(project):
    RunConfig.load("run.yaml").save("saved/config.yaml")
    assert RunConfig.load("saved/config.yaml", ["trainer=lm"]).trainer.max_steps == 10


def test_python_files_and_dicts_use_groups(project):
    write("run.py", "config = {'trainer': 'lm', 'model': 'small'}\n")
    assert RunConfig.load("run.py").trainer.max_steps == 10
    assert RunConfig.load("run.py", ["trainer=lm-xl"]).trainer.max_steps == 1000
    assert RunConfig.from_dict({"trainer": {"optimizer": "adamw-big"}}).trainer.optimizer.lr == 3e-4


@pytest.mark.parametrize(
    ("override", "mentions"),
    [
        ("trainer=lm-xxl", ("trainer", "lm-xxl.yaml", '"lm-xl"', "lm, lm-xl")),
        ("checkpoint=often", ("checkpoint", "often", "configs/checkpoint")),
        ("trainer={extends: lm-x}", ("trainer.extends", "lm-x.yaml", "lm-xl")),
        ("trainer={extends: [1]}", ("trainer.extends", "1")),
    ],
)
def test_an_unknown_group_is_rejected_with_the_closest_name(project, override, mentions):
    with raises(ConfigError, *mentions, at=f"override {override}"):
        RunConfig.load("run.yaml", [override])


def test_an_unknown_group_in_a_file_is_rejected_with_its_line(project):
    write("run.yaml", "seed: 1\ntrainer: lm-xk\n")
    with raises(ConfigError, "trainer", "lm-xl", at="run.yaml:2"):
        RunConfig.load("run.yaml")


@pytest.mark.parametrize(("path", "name"), [("trainer.optimizer", "adamw"), ("model", "llama"), ("hooks.0", "ema")])
def test_a_name_of_a_group_and_a_component_is_rejected(project, path, name):
    write("run.yaml", BASE + "hooks: [time_steps]\n")
    write(f"configs/{path.removesuffix('.0').replace('.', '/')}/{name}.yaml", "type: adamw\n")
    with raises(ConfigError, path.removesuffix(".0"), f"{name}.yaml", at=f"override {path}={name}"):
        RunConfig.load("run.yaml", [f"{path}={name}"])
    assert RunConfig.load("run.yaml", [f"{path}={{type: {name}}}"])


def test_a_trainer_of_the_same_name_is_rejected_too(project):
    write("configs/trainer/classification.yaml", "max_steps: 1\n")
    write("run.yaml", "trainer: classification\n")
    with raises(ConfigError, "trainer", "classification", at="run.yaml:1"):
        RunConfig.load("run.yaml")


@pytest.mark.parametrize(
    ("text", "at", "mentions"),
    [
        ("max_stepz: 3\n", "configs/trainer/bad.yaml:1", ("trainer.max_stepz", "max_steps")),
        ("max_steps: 3\nmicro_batch_size: -1\n", "configs/trainer/bad.yaml:2", ("trainer.micro_batch_size",)),
        ("", "configs/trainer/bad.yaml:1", ("trainer",)),
        ("just text\n", "configs/trainer/bad.yaml:1", ("trainer", "just text")),
        ("a: [\n", "configs/trainer/bad.yaml:2", ()),
        ("max_steps: 1\nextends: bad\n", "configs/trainer/bad.yaml:2", ("trainer.extends", "bad → bad")),
        ("max_steps: 1\nextends: badd\n", "configs/trainer/bad.yaml:2", ("trainer.extends", "badd", '"bad"')),
        ("~max_steps:\n", "configs/trainer/bad.yaml:1", ("trainer.~max_steps",)),
        ("max_steps: 1\nmax_epochs: ${seedd}\n", "configs/trainer/bad.yaml:2", ("trainer.max_epochs", "seedd", "seed")),
    ],
)
def test_errors_in_a_group_file_name_its_line(project, text, at, mentions):
    write("configs/trainer/bad.yaml", text)
    with raises(ConfigError, *mentions, at=at):
        RunConfig.load("run.yaml", ["trainer=bad"])


def test_endless_groups_are_rejected(project):
    Path("configs/trainer/a").symlink_to(".", target_is_directory=True)
    Path("configs/trainer/b").symlink_to(".", target_is_directory=True)
    write("configs/trainer/endless.yaml", "a: endless\nb: endless\n")
    with raises(ConfigError, "endless.yaml", golden=False):
        RunConfig.load("run.yaml", ["trainer=endless"])


def test_odd_names_are_not_looked_up(project):
    write("configs/secret.yaml", "type: adamw\n")
    for name in ("../secret", "/etc/passwd", "a" * 5000, "x\0", ".", ".."):
        assert RunConfig.from_dict({"model": name}).model.type == name
        assert RunConfig.from_dict({"model": {"type": "x", name or "a": "small"}}).model.type == "x"
