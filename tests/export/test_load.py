"""Loading a trained model from anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from trainwright import RunConfig, build_trainer, load_checkpoint
from trainwright.errors import CheckpointError, TrainwrightError

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
    [(5, r"has no step 5\. It has 2, 4, 6"), ("newest", "'newest' is neither latest, nor best, nor a number")],
)
def test_a_step_that_is_not_there_is_a_clear_error(trained, step, problem):
    with pytest.raises(CheckpointError, match=problem):
        load_checkpoint(trained[0], step)


def test_a_folder_that_is_no_run_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"is no run folder: it has no config\.yaml"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is no run folder"):
        load_checkpoint(tmp_path / "nowhere")


def test_a_run_without_checkpoints_is_a_clear_error(tmp_path):
    build_trainer(RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}"]))
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_checkpoint(tmp_path / "small")


def test_a_step_beside_a_checkpoint_that_names_another_is_refused(trained):
    with pytest.raises(CheckpointError, match=r"step-00000004 is one checkpoint, but step 6"):
        load_checkpoint(trained[0] / "checkpoints" / "step-00000004", 6)


def test_a_run_moved_elsewhere_still_loads(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "moved")
    assert is_last(load_checkpoint(tmp_path / "moved"), trained[1])


def test_a_model_whose_file_is_gone_is_named(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "moved")
    config = tmp_path / "moved" / "config.yaml"
    config.write_text(config.read_text().replace("type: nets.Net", "type: lost.Net"))
    with pytest.raises(TrainwrightError, match=r'config\.yaml:\d+: model\.type: no model "lost\.Net"'):
        load_checkpoint(tmp_path / "moved")


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
    with pytest.raises(CheckpointError, match=r"more\.bias: not in the checkpoint"):
        load_checkpoint(tmp_path / "moved")
    model = load_checkpoint(tmp_path / "moved", strict=False)
    assert torch.equal(model.layers[0].weight, trained[1]["layers.0.weight"])


def test_the_weights_are_where_they_are_asked_for(trained):
    assert {value.device.type for value in load_checkpoint(trained[0], device="meta").state_dict().values()} == {"meta"}
