"""The commands that look at a run accept one whose trainer makes its batches."""

import json
from pathlib import Path

import pytest
from tests.forked_program import run_command
from tests.messages import mentions, raises

from trainwright import RunConfig
from trainwright.analysis.check import check_run
from trainwright.analysis.estimate import estimate
from trainwright.analysis.shard import plan_shards
from trainwright.errors import ConfigError

PARTS = """
import torch
from torch import nn

from trainwright import Trainer


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x).log_softmax(-1)


class Points:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"places": torch.ones(4) * index, "rewards": torch.tensor(1.0)}


class Reinforce(Trainer):
    def post_init(self):
        self.place = torch.zeros(4)

    def next_train_inputs(self, iterator):
        self.place = 0.9 * self.place + torch.randn(4)
        places = self.place + torch.randn(5, 4)
        return {"places": places, "rewards": places.sum(1)}

    def forward(self, places, rewards):
        return -(self.model(places)[:, 0] * rewards).mean()

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class WithGraph(Reinforce):
    def next_train_inputs(self, iterator):
        batch = super().next_train_inputs(iterator)
        return {"scores": self.model(batch["places"])[:, 0], **batch}

    def forward(self, scores, places, rewards):
        return -(scores * rewards).mean()


class Forgets(Reinforce):
    def state_dict(self):
        return {"steps": self.step}

    def load_state_dict(self, state):
        pass


class Chooses(Reinforce):
    def next_train_inputs(self, iterator):
        batch = super().next_train_inputs(iterator)
        return {"places": batch["places"], "rewards": torch.from_numpy(self.model(batch["places"]).numpy())}
"""
RUN = """\
model: {type: parts.py:Policy}
data: {train: null}
trainer: {type: parts.py:Reinforce, max_steps: 6, optimizer: {type: sgd, lr: 0.01}}
"""


@pytest.fixture
def project(in_tmp):
    Path("parts.py").write_text(PARTS)
    Path("run.yaml").write_text(RUN)
    return in_tmp


@pytest.mark.parametrize("kind", ["Reinforce", "WithGraph"])
def test_check_runs_it(project, kind):
    report = check_run("run.yaml", [f"trainer.type=parts.py:{kind}"])
    assert list(report.findings) == []
    assert "batches made by next_train_inputs" in report.facts
    assert "6 steps of as many samples as it returns" in report.facts
    assert "a step after the checkpoint" in report.checked


@pytest.mark.parametrize("sizes", ["global_batch_size=5", "micro_batch_size=2", "gradient_accumulation_steps=5"])
def test_check_splits_its_batches_as_the_run_does(project, sizes):
    assert check_run("run.yaml", [f"trainer.{sizes}"]).is_ok


def test_check_finds_settings_that_need_a_dataset(project):
    for setting in ("trainer.max_epochs=2", "trainer.micro_batch_size=auto", "trainer.global_batch_size=7"):
        (finding,) = [each for each in check_run("run.yaml", [setting]).findings if each.severity == "error"]
        assert mentions(finding.problem, setting.partition("=")[0])


def test_check_finds_the_state_of_a_game_that_is_not_saved(project):
    report = check_run("run.yaml", ["trainer.type=parts.py:Forgets"])
    (finding,) = report.findings
    assert mentions(finding.problem, "Forgets.place", "no checkpoint contains")
    assert finding.location.text.strip().startswith("self.place = 0.9")


def test_check_says_that_a_dataset_is_not_read(project):
    report = check_run("run.yaml", ["data.train={type: parts.py:Points}", "trainer.global_batch_size=5"])
    (finding,) = report.findings
    assert (finding.severity, finding.location.text.strip()) == ("remark", "def next_train_inputs(self, iterator):")
    assert mentions(finding.problem, "data.train")


def test_explain_says_who_makes_the_batches_and_what_is_saved(project):
    done = run_command("explain", "run.yaml")
    assert done.returncode == 0
    assert mentions(done.stdout, "data.train", "next_train_inputs makes the batches")
    assert mentions(done.stdout, "The loop", "as many samples per step as next_train_inputs returns")
    lines = done.stdout.splitlines()
    for event in ("state_dict", "load_state_dict"):
        after = lines[next(number for number, line in enumerate(lines) if line.split()[:1] == [event]) + 1]
        assert f"Reinforce.{event}" in after


def test_data_says_that_there_is_none(project):
    done = run_command("data", "run.yaml")
    assert done.returncode == 0
    assert mentions(done.stdout, "next_train_inputs makes the batches")
    assert json.loads(run_command("data", "run.yaml", "--json").stdout)["sets"] == []
    evaluated = run_command("data", "run.yaml", "data.eval={valid: {type: parts.py:Points}}")
    assert evaluated.returncode == 0
    assert mentions(evaluated.stdout, "valid", "data.eval.valid")
    assert mentions(evaluated.stdout, "next_train_inputs makes the batches")


def test_estimate_and_shard_run_its_step(project):
    config = RunConfig.load("run.yaml")
    found = estimate(config, world_size=2)
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (5, 1)
    assert found.batch_shapes == {"places": [5, 4], "rewards": [5]}
    split = estimate(RunConfig.load("run.yaml", ["trainer.micro_batch_size=2"]), world_size=1)
    assert (split.micro_batch_size, split.gradient_accumulation_steps) == (2, 3)
    assert plan_shards(RunConfig.load("run.yaml", ["runtime.mesh={fsdp: 2}"]), world_size=2).num_parameters == 10


@pytest.mark.parametrize("kind", ["WithGraph", "Chooses"])
def test_estimate_says_what_it_cannot_do(project, kind):
    with raises(ConfigError, "next_train_inputs", "--length", golden=False):
        estimate(RunConfig.load("run.yaml", [f"trainer.type=parts.py:{kind}"]), world_size=1)


def test_a_job_of_any_number_of_processes_is_accepted(project):
    done = run_command("launch", "run.yaml", "--slurm", "nodes=3", "runtime.device=cpu")
    assert done.returncode == 0, done.stderr + done.stdout
