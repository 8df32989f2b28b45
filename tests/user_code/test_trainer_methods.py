"""Methods of a user's trainer that nobody would call are rejected by name."""

import re

import pytest
from tests.messages import mentions

from trainwright import Trainer
from trainwright.errors import ConfigError
from trainwright.user_code.methods import ALTERNATIVES, OVERRIDE_POINTS, TRAINER_METHODS_ELSEWHERE, reject_wrong_methods


def rejection_of(trainer_class):
    with pytest.raises(ConfigError) as caught:
        reject_wrong_methods(trainer_class, Trainer)
    return str(caught.value)


def test_a_misspelt_method_is_answered_with_the_nearest_and_its_place():
    class Mine(Trainer):
        def train_stpe(self, batch):
            """Would never be called."""

    text = rejection_of(Mine)
    assert re.match(r".*test_trainer_methods\.py:\d+: Mine\.train_stpe is never called", text)
    assert "Did you mean train_step?" in text


@pytest.mark.parametrize(("theirs", "ours"), TRAINER_METHODS_ELSEWHERE.items())
def test_another_frameworks_name_is_answered_with_ours(theirs, ours):
    mine = type("Mine", (Trainer,), {theirs: lambda self, batch: None})
    assert mentions(rejection_of(mine), theirs, ours)


@pytest.mark.parametrize("theirs", ALTERNATIVES)
def test_what_only_another_framework_has_is_answered_with_what_is_done_instead(theirs):
    mine = type("Mine", (Trainer,), {theirs: lambda self, *given: None})
    assert mentions(rejection_of(mine), theirs, ALTERNATIVES[theirs])
    as_class_method = type("Mine", (Trainer,), {theirs: classmethod(lambda cls, *given: None)})
    assert mentions(rejection_of(as_class_method), theirs)


def test_orbit_s_and_libai_s_methods_are_not_left_out_in_silence():
    assert {"eval_reduce", "initialize", "build_train_loader"} <= {*TRAINER_METHODS_ELSEWHERE, *ALTERNATIVES}


def test_what_a_trainer_calls_itself_is_its_own():
    class Mine(Trainer):
        def post_init(self):
            self._prepare()

        def _prepare(self):
            self.configure_optimizers()
            self.validation_step()

        def configure_optimizers(self):
            """Called above."""

        def validation_step(self):
            """Called above."""

    assert reject_wrong_methods(Mine, Trainer) is None


def test_another_frameworks_name_may_stand_beside_ours():
    class Mine(Trainer):
        def run_step(self, batch):
            return super().train_step(batch)

        def train_step(self, batch):
            return self.run_step(batch)

    assert reject_wrong_methods(Mine, Trainer) is None


def test_a_build_method_of_an_object_is_rejected_with_what_to_write():
    class Mine(Trainer):
        def build_hooks(self):
            return []

    text = rejection_of(Mine)
    assert mentions(text, "Mine.build_hooks")
    assert "Write @classmethod above it, and (cls, build) as its arguments." in text


def test_the_mistake_of_a_base_is_named_with_the_base():
    class Base(Trainer):
        def eval_stop(self, batch):
            """Would never be called."""

    assert mentions(rejection_of(type("Mine", (Base,), {})), "Base.eval_stop")


def test_methods_of_one_s_own_are_left_alone():
    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return build.hooks()

        def forward(self, **batch):
            return self.critic_loss(batch)

        def critic_loss(self, batch):
            return batch

        def _train_stpe(self):
            """Private."""

    assert reject_wrong_methods(Mine, Trainer) is None


def test_every_override_point_is_trainers():
    assert all(hasattr(Trainer, name) for name in OVERRIDE_POINTS)
