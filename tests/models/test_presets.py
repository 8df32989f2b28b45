"""Presets: their sizes are counted, and a name that is none is rejected where it was written, with the nearest."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises
from tests.models.test_shipped_models import model_class

from trainwright import RunConfig
from trainwright.analysis.check import check_run
from trainwright.build.components import Build
from trainwright.config import builtin as built_ins
from trainwright.errors import ConfigError
from trainwright.models.llama import Llama
from trainwright.models.presets import preset_settings, preset_sizes, presets


def test_every_preset_of_every_model_has_its_size():
    files = {name: place.partition(":")[0].rpartition(".")[2] for name, place in built_ins.BUILT_INS["model"].items()}
    assert {name: set(sizes) for name, sizes in preset_sizes().items()} == {
        name: set(presets()[file]) for name, file in files.items()
    }


@pytest.mark.parametrize("name", built_ins.BUILT_INS["model"])
def test_the_sizes_are_those_of_the_models(name):
    for preset, size in preset_sizes()[name].items():
        with torch.device("meta"):
            model = model_class(name).from_preset(preset)
        assert sum(parameter.numel() for parameter in model.parameters()) == size, preset


def rejection(tmp_path, section):
    file = tmp_path / "run.yaml"
    file.write_text(f"seed: 1\nmodel: {section}\n")
    with pytest.raises(ConfigError) as caught:
        Build(RunConfig.load(file)).model()
    where, _, problem = str(caught.value).partition(": ")
    assert where.endswith("run.yaml:2")
    return problem


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            "{type: llama, preset: tinny}",
            "model: llama has no preset 'tinny'. Did you mean \"tiny\"? Known: tiny, 125m,",
        ),
        ("{type: llama, preset: [tiny]}", "model: preset must be the name of one, got ['tiny']. Known: tiny, 125m,"),
        ("{type: cnn, preset: 3}", "model: preset must be the name of one, got 3. Known: tiny, small."),
        ("{type: llama, preset: tiny, num_heads: 3}", "model: hidden_size 64 does not split into 3 heads"),
        ("{type: llama, preset: tiny, num_kv_heads: 3}", "model: num_heads 4 is not a multiple of num_kv_heads 3"),
        ("{type: gpt2, vocab_size: 9, dropout: 1}", "model: dropout is 1. Use a probability"),
        ("{type: bert, vocab_size: -9}", "model: vocab_size is -9. Use a whole number of at least 1."),
        (
            "{type: llama, preset: tiny, rope_scaling: {rope_type: yarn, factor: 2}}",
            "model: rope_scaling: the rope_type 'yarn' is not supported. Known: linear, llama3.",
        ),
    ],
)
def test_what_cannot_be_is_rejected_where_it_was_written(tmp_path, section, problem):
    assert rejection(tmp_path, section).startswith(problem)


def test_check_shows_an_unknown_preset(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 1\nmodel: {type: llama, preset: tinny}\n")
    found = [each for each in check_run(tmp_path / "run.yaml").findings if "tinny" in each.problem]
    assert [each.location.line for each in found] == [2]


def test_a_class_that_is_called_like_a_shipped_file_has_no_presets():
    class Own:
        """In a user's models/llama.py."""

    Own.__module__ = "trainwright_project.models.llama"
    with raises(ConfigError):
        preset_settings(Own, "tiny")


def test_overrides_change_single_settings():
    assert preset_settings(Llama, "tiny", num_layers=7) == {**presets()["llama"]["tiny"], "num_layers": 7}
