"""Modules, parameters and optimizers that a trainer or a task keeps: trained ones belong to the model."""

import copy
from pathlib import Path

import pytest
import torch
from tests.checkpoint.test_resume import same, weights
from tests.faults.runs import config_of
from tests.messages import raises

from trainwright import Task, Trainer, build_trainer
from trainwright.errors import ConfigError


def train(folder, kind, *overrides):
    trainer = build_trainer(config_of(folder, "evaluation={}", "data.eval={}", *overrides), kind)
    trainer.train()
    return trainer


class Head(Trainer):
    def post_init(self):
        self.head = torch.nn.Linear(2, 2)

    def forward(self, x, labels):
        return torch.nn.functional.cross_entropy(self.head(self.model(x)["logits"]), labels)


class Sigma(Trainer):
    def post_init(self):
        self.parts = {"sigma": torch.nn.Parameter(torch.zeros(()))}

    def forward(self, **batch):
        return self.model(**batch)["loss"] * self.parts["sigma"].exp()


class Scaled(Task):
    def __init__(self):
        self.scale = torch.nn.Linear(4, 4)

    def forward(self, model, batch):
        return model(self.scale(batch["x"]), batch["labels"])


class WithTask(Trainer):
    @classmethod
    def build_task(cls, build):
        return Scaled()


@pytest.mark.parametrize(("kind", "name"), [(Head, "Head.head"), (Sigma, "Sigma.parts"), (WithTask, "Scaled.scale")])
def test_what_gets_a_gradient_outside_the_model_is_rejected_after_the_first_step(tmp_path, kind, name):
    trainer = build_trainer(config_of(tmp_path / "run", "log.every_steps=100", "evaluation={}"), kind)
    with raises(ConfigError, name, "build_model", at="test_outside_model.py") as caught:
        trainer.train()
    assert f"self.{name.partition('.')[2]} =" in _line(str(caught.value.where))
    assert trainer.step == 1


def _line(where):
    file, _, number = where.rpartition(":")
    return Path(file).read_text("utf-8").splitlines()[int(number) - 1]


class Teacher(Trainer):
    """Learns from an average of itself, which it saves."""

    def post_init(self):
        self.teacher = copy.deepcopy(self.model)
        self.loss = torch.nn.CrossEntropyLoss(weight=torch.ones(2))

    def forward(self, x, labels):
        logits = self.model(x)["logits"]
        with torch.no_grad():
            target = self.teacher(x)["logits"].softmax(-1)
            for own, other in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                own.lerp_(other, 0.1)
        return self.loss(logits, labels) + torch.nn.functional.cross_entropy(logits, target)

    def state_dict(self):
        return {"teacher": self.teacher.state_dict()}

    def load_state_dict(self, state):
        self.teacher.load_state_dict(state["teacher"])


def test_a_teacher_and_a_loss_without_gradients_work_and_resume_exactly(tmp_path):
    settings = ("trainer.schedule=null", "checkpoint.every_steps=null")
    whole = train(tmp_path / "whole", Teacher, *settings)
    train(tmp_path / "halves", Teacher, *settings, "trainer.max_steps=2")
    assert same(weights(train(tmp_path / "halves", Teacher, *settings)), weights(whole))


class OwnOptimizer(Trainer):
    """Trains a critic with an optimizer of its own."""

    def post_init(self):
        self.critic = torch.nn.Linear(4, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)

    def train_step(self, batch):
        self.critic_optimizer.zero_grad()
        (self.critic(batch["x"]) - 1).square().mean().backward()
        self.critic_optimizer.step()
        return super().train_step(batch)

    def forward(self, x, labels):
        return self.model(x + self.critic(x).detach(), labels)


def test_an_optimizer_that_no_checkpoint_contains_is_rejected(tmp_path):
    with raises(ConfigError, "OwnOptimizer.critic_optimizer", "trainer.optimizers", at="test_outside_model.py"):
        train(tmp_path / "run", OwnOptimizer)


class Saved(OwnOptimizer):
    def state_dict(self):
        return {"critic": self.critic.state_dict(), "optimizer": self.critic_optimizer.state_dict()}

    def load_state_dict(self, state):
        self.critic.load_state_dict(state["critic"])
        self.critic_optimizer.load_state_dict(state["optimizer"])


def test_an_optimizer_in_state_dict_works_and_resumes_exactly(tmp_path):
    settings = ("trainer.schedule=null", "checkpoint.every_steps=null")
    whole = train(tmp_path / "whole", Saved, *settings)
    train(tmp_path / "halves", Saved, *settings, "trainer.max_steps=2")
    halves = train(tmp_path / "halves", Saved, *settings)
    assert same(weights(halves), weights(whole))
    assert torch.equal(halves.critic.weight, whole.critic.weight)


def test_parts_of_the_model_and_of_its_optimizers_may_be_attributes(tmp_path):
    class Names(Trainer):
        def post_init(self):
            self.layers = self.model.layers
            self.first = self.model.layers[0].weight
            self.adam = self.optimizers["main"]
            self.wrapped = torch.nn.Sequential(self.model)

    assert train(tmp_path / "run", Names).step == 6
