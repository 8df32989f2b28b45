"""`trainwright estimate`: what it prints and how it exits."""

import json

import pytest
from tests.analysis.runs import small_run
from tests.messages import mentions, raises
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.commands.estimate import read_size
from trainwright.errors import ConfigError


@pytest.fixture
def run_file(in_tmp):
    (in_tmp / "run.yaml").write_text(small_run({"fsdp": -1}).to_yaml())
    return in_tmp / "run.yaml"


def invoke(*arguments):
    return CliRunner().invoke(app, ["estimate", *map(str, arguments)], env={"COLUMNS": "200"})


def test_every_kind_of_memory_is_shown(run_file, in_tmp):
    done = invoke(run_file, "--world", 4, "--length", 32)
    assert done.exit_code == 0, done.output
    shown = [line.split("  ")[0] for line in done.stdout.splitlines()]
    for kind in ("parameters", "gradients", "optimizer states", "activations", "gathered parameters", "total"):
        assert kind in shown
    assert "A checkpoint takes " in done.stdout
    assert "fits" not in done.stdout
    assert [path.name for path in in_tmp.iterdir()] == ["run.yaml"]


def test_what_fits_exits_with_0_and_what_does_not_with_1(run_file):
    fits = invoke(run_file, "--world", 4, "--length", 32, "--memory", "80GB")
    assert (fits.exit_code, "It fits 80.0 GB, with " in fits.stdout) == (0, True)
    tight = invoke(run_file, "--world", 4, "--length", 32, "--memory", "10 kB")
    assert (tight.exit_code, "It does not fit 10.0 kB" in tight.stdout) == (1, True)
    assert "has about 0 samples" in tight.stdout


def test_what_does_not_fit_gets_advice_that_the_run_does_not_follow_yet(run_file):
    tight = ("--world", 4, "--length", 32, "--memory", "10 kB")
    full = (*tight, "runtime.precision=fp32")
    (advice,) = [line for line in invoke(run_file, *full).stdout.splitlines() if line.startswith("To try: ")]
    assert "model.activation_checkpointing" in advice
    assert "runtime.mesh.tensor" in advice
    assert "trainer.optimizer.state: 8bit" in advice
    assert "gather_precision" not in advice, "the run is in fp32"
    wiser = (
        "model.activation_checkpointing=[DecoderLayer]",
        "trainer.optimizer.state_dtype=bf16",
        "runtime.precision=bf16",
        "runtime.gather_precision=fp32",
        "runtime.mesh={fsdp: -1, tensor: 2}",
    )
    (advice,) = [line for line in invoke(run_file, *wiser, *tight).stdout.splitlines() if line.startswith("To try: ")]
    assert "more data ranks" in advice
    assert "remove runtime.gather_precision" in advice
    assert "model.activation_checkpointing" not in advice
    assert "8bit" not in advice
    assert "runtime.mesh.tensor" not in advice


def test_offload_is_remarked_on_and_not_warned_of(run_file, caplog):
    offloads = ("model.activation_checkpointing=[DecoderLayer]", "model.offload=[decoder_input]")
    done = invoke(run_file, *offloads, "--world", 4, "--length", 32)
    assert done.exit_code == 0, done.output
    assert mentions(done.stdout, "model.offload")
    assert "waits on the host" not in caplog.text


def test_without_data_the_error_names_the_length(run_file):
    done = invoke(run_file, "--world", 4)
    assert isinstance(done.exception, ConfigError)
    assert mentions(str(done.exception), "data.train")
    assert "Or use --length N" in str(done.exception)


def test_a_model_that_cannot_be_built_is_reported_once(run_file, caplog):
    done = invoke(run_file, "model.preset=wrong", "--world", 4, "--length", 32)
    assert mentions(str(done.exception), "wrong")
    assert "preset" not in caplog.text


def test_json_is_one_object(run_file):
    done = invoke(run_file, "--world", 4, "--length", 32, "--json", "--memory", "1GiB")
    told = json.loads(done.stdout)
    assert told["peak_bytes"] == sum(told["at_peak"].values()) > 0
    assert (told["fits"], told["memory_bytes"]) == (True, 2**30)
    assert told["batch_shapes"] == {"input_ids": [2, 32], "labels": [2, 32]}


@pytest.mark.parametrize(("text", "size"), [("80GB", 80 * 10**9), ("1.5 GiB", 3 * 2**29), ("512mb", 512 * 10**6)])
def test_sizes_are_read_with_their_units(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["80", "GB", "80 apples", "-3GB", ""])
def test_a_size_without_a_unit_is_rejected(text):
    with raises(ConfigError):
        read_size(text)
