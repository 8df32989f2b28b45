"""Methods of user trainers and hooks that the loop does not call are rejected, with our names."""

import re

import pytest
from tests.messages import mentions, raises

from trainwright import CallbackHook, Every, Hook, Task, Trainer
from trainwright.errors import ConfigError
from trainwright.loop.hook import HOOK_EVENTS, HookCalls
from trainwright.user_code.constructors import explain_attribute
from trainwright.user_code.methods import (
    ALTERNATIVES,
    ATTRIBUTES_ELSEWHERE,
    HOOK_METHODS_ELSEWHERE,
    OFTEN_OWN,
    OVERRIDE_POINTS,
    TASK_METHODS_ELSEWHERE,
    TRAINER_METHODS_ELSEWHERE,
    reject_task_methods,
    reject_wrong_methods,
)

# trainers


def trainer_rejection(trainer_class):
    with pytest.raises(ConfigError) as caught:
        reject_wrong_methods(trainer_class, Trainer)
    return str(caught.value)


def test_a_misspelled_method_raises_with_the_nearest_name_and_its_location():
    class Mine(Trainer):
        def train_stpe(self, batch):
            """Would never be called."""

    text = trainer_rejection(Mine)
    assert re.match(r".*test_methods\.py:\d+: Mine\.train_stpe is never called", text)
    assert "Did you mean train_step?" in text


@pytest.mark.parametrize(("theirs", "ours"), TRAINER_METHODS_ELSEWHERE.items())
def test_a_method_of_another_framework_raises_with_our_name(theirs, ours):
    mine = type("Mine", (Trainer,), {theirs: lambda self, batch: None})
    assert mentions(trainer_rejection(mine), theirs, ours)


@pytest.mark.parametrize("theirs", sorted(ALTERNATIVES.keys() - OFTEN_OWN))
def test_a_method_without_a_counterpart_raises_with_the_alternative(theirs):
    mine = type("Mine", (Trainer,), {theirs: lambda self, *given: None})
    assert mentions(trainer_rejection(mine), theirs, ALTERNATIVES[theirs])
    as_class_method = type("Mine", (Trainer,), {theirs: classmethod(lambda cls, *given: None)})
    assert mentions(trainer_rejection(as_class_method), theirs)


@pytest.mark.parametrize("theirs", sorted(OFTEN_OWN))
def test_a_method_that_scripts_may_call_is_reported_with_the_alternative(theirs, caplog):
    mine = type("Mine", (Trainer,), {theirs: lambda self, *given: None})
    reject_wrong_methods(mine, Trainer)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert mentions(record.getMessage(), f"Mine.{theirs}", ALTERNATIVES[theirs])


def test_methods_of_orbit_and_libai_are_known():
    assert {"eval_reduce", "initialize", "build_train_loader"} <= {*TRAINER_METHODS_ELSEWHERE, *ALTERNATIVES}


def test_general_names_are_rejected_only_with_the_parameters_of_other_frameworks():
    class Theirs(Trainer):
        def setup(self, stage):
            """Would never be called."""

    class Logging(Trainer):
        def log(self, logs, start_time=None):
            """Would never be called."""

    class Mine(Trainer):
        def setup(self, path):
            """For a script to call."""

        def log(self, logs):
            """For a hook to call."""

        def save_model(self, output_dir):
            """For a script to call."""

    assert mentions(trainer_rejection(Theirs), "Theirs.setup", "post_init")
    assert mentions(trainer_rejection(Logging), "Logging.log", "train_loop_end")
    assert reject_wrong_methods(Mine, Trainer) is None


@pytest.mark.parametrize("theirs", ["on_train_batch_end", "on_evaluate", "on_fit_start"])
def test_an_event_of_a_hook_in_a_trainer_is_rejected(theirs):
    mine = type("Mine", (Trainer,), {theirs: lambda self, *given: None})
    assert mentions(trainer_rejection(mine), f"Mine.{theirs}", f"Add a hook with {HOOK_METHODS_ELSEWHERE[theirs]}")


def test_attributes_of_other_trainers_are_answered():
    for name, instead in ATTRIBUTES_ELSEWHERE.items():
        with pytest.raises(AttributeError, match=re.escape(instead)):
            explain_attribute(object(), name)
    assert explain_attribute(object(), "mine") is None


def test_methods_that_a_trainer_calls_are_accepted():
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


def test_a_name_of_another_framework_is_accepted_next_to_ours():
    class Mine(Trainer):
        def run_step(self, batch):
            return super().train_step(batch)

        def train_step(self, batch):
            return self.run_step(batch)

    assert reject_wrong_methods(Mine, Trainer) is None


def test_a_build_method_without_classmethod_is_rejected():
    class Mine(Trainer):
        def build_hooks(self):
            return []

    text = trainer_rejection(Mine)
    assert mentions(text, "Mine.build_hooks")
    assert "Write @classmethod above it, and (cls, build) as its arguments." in text


def test_a_wrong_method_of_a_base_names_the_base():
    class Base(Trainer):
        def eval_stop(self, batch):
            """Would never be called."""

    assert mentions(trainer_rejection(type("Mine", (Base,), {})), "Base.eval_stop")


def test_other_methods_are_accepted():
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


# hooks


def hook_rejection(hook):
    with pytest.raises(ConfigError) as rejected:
        HookCalls([hook])
    return str(rejected.value)


@pytest.mark.parametrize(("theirs", "ours"), HOOK_METHODS_ELSEWHERE.items())
def test_an_event_of_another_framework_raises_with_ours(theirs, ours):
    assert ours in HOOK_EVENTS
    hook = type("Mine", (Hook,), {theirs: lambda self, *given: None})()
    text = hook_rejection(hook)
    assert mentions(text, theirs, ours)
    assert text.startswith(f"{__file__}:")


def test_setup_with_a_stage_is_an_event_of_another_framework():
    theirs = type("Theirs", (Hook,), {"setup": lambda self, trainer, pl_module, stage: None})()
    assert mentions(hook_rejection(theirs), "Theirs.setup", "before_train")
    HookCalls([type("Mine", (Hook,), {"setup": lambda self, path: None})()])


@pytest.mark.parametrize("theirs", ["after_training_epoch", "on_epoch_end", "on_train_epoch_start"])
def test_another_name_of_the_events_of_epochs_is_rejected(theirs):
    hook = type("Mine", (Hook,), {theirs: lambda self: None, "after_step": lambda self: None})()
    assert mentions(hook_rejection(hook), theirs, "_epoch")


def test_a_hook_without_events_is_rejected():
    class Mine:
        def on_weather(self):
            """Is never called."""

    assert mentions(hook_rejection(Mine()), "Mine.on_weather")


def test_a_method_of_a_base_is_checked_too():
    class Base(Hook):
        def on_step_end(self):
            """Is never called."""

    assert mentions(hook_rejection(type("Mine", (Base,), {})()), "Mine.on_step_end")


def test_methods_that_a_hook_calls_are_accepted_and_others_are_a_warning(caplog):
    class Mine(Hook):
        def after_step(self):
            self.on_step_end()

        def on_step_end(self):
            """Called above."""

    class Both(Mine):
        def on_new_best(self):
            """For others to call."""

    HookCalls([Mine(), Both(), Every(1)(print), CallbackHook(after_step=print)])
    (record,) = caplog.records
    assert mentions(record.getMessage(), "Both.on_new_best")


@pytest.mark.parametrize("name", TASK_METHODS_ELSEWHERE)
def test_methods_of_tasks_elsewhere_are_rejected(name):
    kind = type("Theirs", (Task,), {name: lambda self, *rest: None})
    with raises(ConfigError, f"Theirs.{name}", at="test_methods.py"):
        reject_task_methods(kind, Task)


def test_a_task_may_call_a_method_of_that_name():
    class Mine(Task):
        def build_losses(self, labels, outputs):
            return outputs.sum()

        def forward(self, model, batch):
            return self.build_losses(batch["labels"], model(batch["x"]))

    assert reject_task_methods(Mine, Task) is None
