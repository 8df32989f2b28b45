"""Loading a trained model from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.forked_launch import launch_well
from tests.forked_program import run_script
from tests.messages import raises
from typer.testing import CliRunner

from trainwright import RunConfig, build_trainer, load_checkpoint, train
from trainwright.cli import app
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError

PROJECT = Path(__file__).parents[1] / "project"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A project with its model in models/, trained for 6 steps in a folder of its own: (run folder, weights)."""
    project = tmp_path_factory.mktemp("project")
    (project / "models").mkdir()
    shutil.copy(PROJECT / "parts.py", project / "parts.py")
    shutil.copy(PROJECT / "parts.py", project / "models" / "nets.py")
    text = (PROJECT / "run.yaml").read_text().replace("type: parts.py:Net", "type: nets.Net")
    (project / "run.yaml").write_text(text)
    output = tmp_path_factory.mktemp("runs")
    overrides = [
        f"output_dir={output}",
        "trainer.max_steps=6",
        "trainer.schedule=null",
        "checkpoint={every_steps: 2, keep_last: 3, keep_best: {metric: valid/loss, mode: max}}",
        "evaluation.every_steps=2",
    ]
    trainer = build_trainer(RunConfig.load(project / "run.yaml", overrides))
    trainer.train()
    return output / "small", {name: value.clone() for name, value in trainer.model.state_dict().items()}


def is_last(model, weights):
    return all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_run_is_loaded_from_another_folder_with_its_own_classes(trained, in_tmp):
    folder, weights = trained
    model = load_checkpoint(folder)
    assert type(model).__name__ == "Net"
    assert is_last(model, weights)
    assert not model.training
    assert model(torch.zeros(1, 4))["logits"].shape == (1, 2)


def test_a_run_is_loaded_by_text_by_checkpoints_and_by_one_checkpoint(trained):
    folder, weights = trained
    assert is_last(load_checkpoint(str(folder)), weights)
    assert is_last(load_checkpoint(folder / "checkpoints"), weights)
    assert is_last(load_checkpoint(folder / "checkpoints" / "step-00000006"), weights)
    assert not is_last(load_checkpoint(folder / "checkpoints" / "step-00000004"), weights)


def test_a_run_is_loaded_from_inside_it(trained, monkeypatch):
    folder, weights = trained
    monkeypatch.chdir(folder)
    assert is_last(load_checkpoint("."), weights)
    assert is_last(load_checkpoint("checkpoints/step-00000006"), weights)


def test_a_step_is_chosen_by_word_or_number(trained):
    folder, weights = trained
    assert is_last(load_checkpoint(folder, "latest"), weights)
    assert is_last(load_checkpoint(folder, 6), weights)
    # The largest loss is kept as the best, so the best is not the last.
    best, fourth = load_checkpoint(folder, "best"), load_checkpoint(folder, 2)
    assert is_last(best, fourth.state_dict())
    assert not is_last(best, weights)


@pytest.mark.parametrize(
    ("step", "problem"),
    [(5, ("5", "2", "4", "6")), ("newest", ("newest",))],
)
def test_a_step_that_is_not_there_is_a_clear_error(trained, step, problem):
    with raises(CheckpointError, *problem):
        load_checkpoint(trained[0], step)


def test_a_folder_that_is_not_a_run_is_a_clear_error(tmp_path):
    with raises(CheckpointError, "config.yaml"):
        load_checkpoint(tmp_path)
    with raises(CheckpointError):
        load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "config.yaml").touch()
    with raises(CheckpointError, 'Did you mean "chat"?'):
        load_checkpoint(tmp_path / "chta")


def test_a_run_without_checkpoints_is_a_clear_error(tmp_path):
    build_trainer(RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}"]))
    with raises(CheckpointError):
        load_checkpoint(tmp_path / "small")


def test_a_step_with_a_checkpoint_of_another_step_is_rejected(trained):
    with raises(CheckpointError, "00000004", "6"):
        load_checkpoint(trained[0] / "checkpoints" / "step-00000004", 6)


def test_a_run_moved_elsewhere_still_loads(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "moved")
    assert is_last(load_checkpoint(tmp_path / "moved"), trained[1])


def test_a_model_whose_file_is_gone_is_named(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "moved")
    config = tmp_path / "moved" / "config.yaml"
    config.write_text(config.read_text().replace("type: nets.Net", "type: lost.Net"))
    with raises(TrainwrightError, "lost.Net", "model.type", at="config.yaml"):
        load_checkpoint(tmp_path / "moved", trust=True)


def test_without_strict_differences_are_accepted(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "moved")
    project = tmp_path / "project"
    shutil.copytree(RunConfig.load(trained[0] / "config.yaml").project_dir, project)
    nets = project / "models" / "nets.py"
    nets.write_text(
        nets.read_text().replace("self.criterion =", "self.more = nn.Linear(1, 1)\n        self.criterion =")
    )
    config = tmp_path / "moved" / "config.yaml"
    lines = config.read_text().splitlines()
    config.write_text("\n".join([f"project_dir: {project}", *lines[1:]]))
    with raises(CheckpointError, "more.bias"):
        load_checkpoint(tmp_path / "moved", trust=True)
    model = load_checkpoint(tmp_path / "moved", strict=False, trust=True)
    assert torch.equal(model.layers[0].weight, trained[1]["layers.0.weight"])


def test_the_weights_are_where_they_are_asked_for(trained):
    assert {value.device.type for value in load_checkpoint(trained[0], device="meta").state_dict().values()} == {"meta"}


def test_the_best_step_is_exported_by_its_word(trained, tmp_path):
    done = CliRunner().invoke(
        app, ["export", str(trained[0]), "--step", "best", "--format", "safetensors", "--to", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert is_last(load_checkpoint(trained[0], 2), written)
    assert not is_last(load_checkpoint(trained[0]), written)


# what a user's constructor does beside its weights

NETS = """
import torch
from torch import nn


class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"features": torch.arange(4.0) + index, "labels": torch.tensor(index % 2)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.make()

    def between(self, hidden):
        return hidden

    def forward(self, features, labels=None):
        logits = self.head(self.between(self.layer(features)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class DrawsNumber(Net):
    def make(self):
        self.scale = float(torch.rand(()))

    def between(self, hidden):
        return hidden * self.scale


class DrawsOrder(Net):
    def make(self):
        self.order = torch.randperm(4).tolist()

    def between(self, hidden):
        return hidden[..., self.order] * torch.arange(4)


class DrawsTensors(Net):
    def make(self):
        self.noise = [torch.rand(4)]

    def between(self, hidden):
        return hidden * self.noise[0]


class DrawsBuffer(Net):
    def make(self):
        self.register_buffer("turn", nn.init.kaiming_uniform_(torch.empty(4, 4)), persistent=False)

    def between(self, hidden):
        return hidden @ self.turn


class KeepsWeights(Net):
    def make(self):
        weight = self.layer.weight
        self.held = [weight]
        self.add = lambda hidden: hidden + weight.mean(0)

    def between(self, hidden):
        return self.add(hidden) * self.held[0].mean()


class Freezes(Net):
    def make(self):
        weight = nn.Parameter(torch.ones(4))
        self.weight = weight
        weight.requires_grad_(False)

    def between(self, hidden):
        return hidden * self.weight


TEACHER = nn.Linear(4, 4)
nn.init.eye_(TEACHER.weight)


class Learns(Net):
    def make(self):
        pass

    def between(self, hidden):
        return hidden + TEACHER(hidden).detach() * 0
"""

NETS_RUN = """
name: NAME
model: {type: nets.py:NAME}
data: {train: {type: nets.py:Rows}}
trainer: {max_steps: 2, global_batch_size: 4, optimizer: {type: sgd, lr: 0.1}}
checkpoint: {every_steps: 2}
writers: []
runtime: {device: cpu}
"""

LOAD = """
import sys

import torch

from trainwright import load_checkpoint

model = load_checkpoint(sys.argv[1])
assert not torch.distributed.is_initialized()
expected = torch.tensor(eval(sys.argv[2]))
assert torch.equal(model(torch.ones(1, 4))["logits"], expected), (model(torch.ones(1, 4))["logits"], expected)
"""


def net_run(tmp_path, name, *overrides):
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "run.yaml").write_text(NETS_RUN.replace("NAME", name))
    return RunConfig.load(tmp_path / "run.yaml", [f"output_dir={tmp_path / 'runs'}", *overrides])


@pytest.mark.parametrize(
    "name", ["DrawsNumber", "DrawsOrder", "DrawsTensors", "DrawsBuffer", "KeepsWeights", "Freezes"]
)
def test_what_a_constructor_draws_keeps_and_freezes_is_as_it_was_in_the_run(tmp_path, name):
    trainer = build_trainer(net_run(tmp_path, name))
    trainer.train()
    loaded = load_checkpoint(trainer.folder)
    features = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert torch.equal(loaded(features)["logits"], trainer.model.eval()(features)["logits"])
    trains = [{key: one.requires_grad for key, one in each.named_parameters()} for each in (loaded, trainer.model)]
    assert trains[0] == trains[1]


def in_a_process(*command):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_modules_that_a_user_s_file_makes_when_it_is_imported_have_weights(tmp_path):
    trainer = build_trainer(net_run(tmp_path, "Learns"))
    trainer.train()
    expected = trainer.model.eval()(torch.ones(1, 4))["logits"].tolist()
    done = in_a_process("-c", LOAD, trainer.folder, expected)  # which imports the file by loading
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_run_of_two_ranks_is_loaded_by_one_process_without_a_group(tmp_path):
    config = net_run(tmp_path, "DrawsBuffer", "runtime.mesh={replicate: 2}")

    def train(_):
        trainer = build_trainer(config)
        trainer.train()
        if trainer.ranks.is_first:
            said = trainer.model.eval()(torch.ones(1, 4))["logits"].tolist()
            (tmp_path / "said").write_text(str(said))

    launch_well(tmp_path, 2, train)
    (tmp_path / "load.py").write_text(LOAD)  # into a process that has never seen the file of the model
    loaded = run_script(tmp_path / "load.py", tmp_path / "runs" / "DrawsBuffer", (tmp_path / "said").read_text())
    assert loaded.returncode == 0, loaded.stderr[-4000:]


@pytest.mark.parametrize("lora", ["", ", lora: {match: '*.q_proj', rank: 2}"])
def test_of_a_shipped_model_no_weight_is_drawn(tmp_path, monkeypatch, lora):
    text = NETS_RUN.replace("{type: nets.py:NAME}", f"{{type: llama, preset: tiny, vocab_size: 61{lora}}}")
    (tmp_path / "run.yaml").write_text(text.replace("NAME", "ours"))
    trainer = build_trainer(net_and_tokens(tmp_path))
    trainer.train()

    def reject(*arguments, **options):
        raise AssertionError("a weight is drawn")

    monkeypatch.setattr("trainwright.export.load.build_model", reject)
    loaded = load_checkpoint(trainer.folder)
    assert is_last(loaded, trainer.model.state_dict())
    trains = [{key: one.requires_grad for key, one in each.named_parameters()} for each in (loaded, trainer.model)]
    assert trains[0] == trains[1]


def net_and_tokens(tmp_path):
    rows = 'return {"features": torch.arange(4.0) + index, "labels": torch.tensor(index % 2)}'
    (tmp_path / "nets.py").write_text(
        NETS.replace(rows, 'return {"input_ids": torch.arange(4) + index, "labels": torch.arange(4) + index}')
    )
    return RunConfig.load(tmp_path / "run.yaml", [f"output_dir={tmp_path / 'runs'}"])


def test_a_device_that_is_not_there_is_rejected_first(trained, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(TrainwrightError, "cuda"):
        load_checkpoint(trained[0], device="cuda")


def test_a_run_of_a_model_object_is_loaded_into_another_object(in_tmp):
    data = [{"x": torch.randn(4), "y": torch.tensor(float(index))} for index in range(16)]

    def forward(model, batch):
        return (model(batch["x"])[:, 0] - batch["y"]).square().mean()

    trained = train(torch.nn.Linear(4, 1), data, forward=forward, max_steps=2, batch_size=4, name="object").model
    with raises(ConfigError, "load_checkpoint", at="runs/object/config.yaml:15"):
        load_checkpoint("runs/object")
    other = torch.nn.Linear(4, 1)
    assert load_checkpoint("runs/object", model=other) is other
    assert not other.training
    assert torch.equal(other.weight, trained.weight)
    assert torch.equal(other.bias, trained.bias)
    with raises(CheckpointError, "weight"):
        load_checkpoint("runs/object", model=torch.nn.Linear(5, 1))


def test_a_given_model_receives_weights_without_code_of_the_folder(trained, tmp_path):
    folder, weights = trained
    copy = tmp_path / "runs" / "small"
    shutil.copytree(folder, copy)
    (copy / "config.yaml").write_text((folder / "config.yaml").read_text().replace("nets.Net", "gone.Net"))
    model = load_checkpoint(folder)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert is_last(load_checkpoint(copy, model=model), weights)
