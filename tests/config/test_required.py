"""Required settings, and the packaged recipes that leave some to the user."""

import pytest
from tests.config.test_files import write
from tests.messages import raises

from trainwright.config import RunConfig
from trainwright.config.required import example_lines, packaged_recipes
from trainwright.errors import ConfigError

BASE = """
model: {type: net.py:Net, width: "${required:the width, such as 8}", sizes: ["${required:the first size}", 2]}
data: {train: {type: digits, part: "${required:the part, such as train, such as valid}"}}
"""


@pytest.fixture
def base(tmp_path):
    return write(tmp_path / "base.yaml", BASE)


def test_all_missing_settings_are_in_one_error_at_the_line_that_extends(base):
    run = write(base.with_name("run.yaml"), "seed: 1\nextends: base.yaml\nmodel: {sizes: [1]}\n")
    with raises(
        ConfigError,
        "model.width",
        "data.train.part",
        "the part, such as train",
        "width: 8",
        at="run.yaml:2: extends: base.yaml",
    ):
        RunConfig.load(run)
    with raises(ConfigError, "model.width: the width", "model.sizes.0", "{width: 8, sizes: …}", at="base.yaml:2"):
        RunConfig.load(base)


def test_a_required_setting_is_set_by_a_file_an_override_or_a_removal(base):
    run = write(base.with_name("run.yaml"), "extends: base.yaml\nmodel: {width: 3, sizes: []}\n")
    config = RunConfig.load(run, ["data.train.part=valid"])
    assert (config.model.width, config.data.train.part) == (3, "valid")
    assert "part" not in RunConfig.load(run, ["~data.train.part"]).data.train
    middle = write(base.with_name("middle.yaml"), "extends: run.yaml\n")
    with raises(ConfigError, "data.train.part", at="middle.yaml:1: extends: run.yaml", golden=False):
        RunConfig.load(middle)


def test_a_saved_config_has_no_required_settings(base):
    run = write(base.with_name("run.yaml"), "extends: base.yaml\nmodel: {width: 3, sizes: []}\n")
    config = RunConfig.load(run, ["data.train.part=valid"])
    config.save(base.with_name("saved.yaml"))
    assert RunConfig.load(base.with_name("saved.yaml")) == config


@pytest.mark.parametrize("pretrained", ["base", "{folder: base, strict: false}", "${output_dir}"])
def test_a_reference_finds_the_folder_of_pretrained_weights_in_both_forms(tmp_path, pretrained):
    text = f"output_dir: base\nmodel:\n  type: bert\n  pretrained: {pretrained}\n  name: ${{model.pretrained.folder}}\n"
    assert RunConfig.load(write(tmp_path / "run.yaml", text)).model.name == "base"


RECIPES = {recipe.name: recipe for recipe in packaged_recipes()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_needs_what_it_says_and_loads_with_its_example(tmp_path, name):
    recipe = RECIPES[name]
    assert recipe.summary[0].isupper()
    assert not recipe.summary.endswith(".")
    assert recipe.required
    assert all(each.example is not None for each in recipe.required)
    run = write(tmp_path / "run.yaml", f"extends: {name}\n")
    with raises(ConfigError, *(each.name for each in recipe.required), at=f"run.yaml:1: extends: {name}"):
        RunConfig.load(run)
    run.write_text("\n".join([f"extends: {name}", *example_lines(recipe.required)]))
    config = RunConfig.load(run)
    assert config.name == "run"
    assert all(f"{each.path[0]}:" in run.read_text() for each in recipe.required)
    short = write(tmp_path / "short.yaml", run.read_text().replace("recipes/", "", 1))
    assert RunConfig.load(short, ["name=run"]) == config


def test_a_recipe_that_does_not_exist_is_rejected_with_the_nearest(tmp_path):
    for wrong in ("recipes/sft-lra", "sft-lra"):
        with raises(
            ConfigError, wrong, '"recipes/sft-lora"' if "/" in wrong else '"sft-lora"', at="run.yaml:1", golden=False
        ):
            RunConfig.load(write(tmp_path / "run.yaml", f"extends: {wrong}\n"))
    with raises(ConfigError, "extends: recipes/sft-lora", at="recipes/sft-lora:1"):
        RunConfig.load("recipes/sft-lora")
