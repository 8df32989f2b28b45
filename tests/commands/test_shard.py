"""`trainwright shard`: what it prints, how it exits, and that it leaves the folder alone."""

import json

import pytest
from tests.analysis.runs import small_run
from tests.messages import mentions
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.errors import ConfigError


@pytest.fixture
def run_file(in_tmp):
    (in_tmp / "run.yaml").write_text(small_run().to_yaml())
    return in_tmp / "run.yaml"


def invoke(*arguments):
    return CliRunner().invoke(app, ["shard", *map(str, arguments)], env={"COLUMNS": "200"})


def test_layouts_and_collectives_are_shown(run_file, in_tmp):
    done = invoke(run_file, "--world", 64, "--length", 32, "runtime.mesh={fsdp: -1, tensor: 4}")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].startswith("64 ranks = fsdp 16 × tensor 4; ")
    assert "model.layers.*.mlp.down_proj.weight 2 × 64 × 192 [fsdp, tensor] 4 × 48 1.5 kB float32" in lines
    assert any(line.startswith("all-gather tensor 4 ") for line in lines)
    assert any(line.startswith("reduce-scatter fsdp 16 ") for line in lines)
    assert "One step, of one micro-batch of 2 (input_ids 2 × 32, labels 2 × 32):" in lines
    assert lines[-1].startswith("Sent by a rank in a step: ")
    assert [path.name for path in in_tmp.iterdir()] == ["run.yaml"]


def test_every_layer_is_shown_on_demand(run_file):
    done = invoke(run_file, "--world", 2, "--length", 32, "--all", "runtime.mesh={fsdp: -1}")
    assert "model.layers.1.mlp.down_proj.weight" in done.stdout
    assert "model.layers.*" not in done.stdout


def test_one_rank_sends_nothing(run_file):
    done = invoke(run_file, "--length", 32)
    assert done.stdout.startswith("1 rank; ")
    assert "Nothing is sent." in done.stdout


def test_json_is_one_object(run_file):
    done = invoke(run_file, "--world", 8, "--length", 32, "--json", "runtime.mesh={fsdp: -1}")
    told = json.loads(done.stdout)
    assert told["axes"] == {"fsdp": 8}
    assert told["rank_bytes"] * 8 == told["num_bytes"]
    assert {each["kind"] for each in told["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert told["layouts"][0]["axes"] == ["fsdp", "-"]


def test_rules_without_effect_are_listed(run_file):
    rules = "model.sharding={parameters: {no.such.*: [fsdp]}}"
    done = invoke(run_file, "--world", 2, "--length", 32, "runtime.mesh={fsdp: -1}", rules)
    assert mentions(done.stdout, "no.such.*")


def test_a_world_that_does_not_fit_is_rejected(run_file):
    done = invoke(run_file, "--world", 6, "--length", 32, "runtime.mesh={fsdp: -1, tensor: 4}")
    assert isinstance(done.exception, ConfigError)
    assert "6 is not a multiple of 4" in str(done.exception)


def test_without_data_and_length_the_data_is_missed_by_name(run_file):
    done = invoke(run_file, "--world", 2)
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("run.yaml:13: data.train is required")
