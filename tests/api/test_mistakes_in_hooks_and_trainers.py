"""Hooks and trainers with methods that could not be called as they are: rejected at the start, with file and line."""

import pytest
import torch
from tests.api.function_runs import Classifier, Points
from tests.api.mistakes import place, rejection
from tests.messages import mentions, raises
from torch.nn.functional import cross_entropy

from trainwright import Hook, RunConfig, Task, Trainer, build_trainer, train
from trainwright.errors import ConfigError
from trainwright.hooks.callback import CallbackHook
from trainwright.loop.hook import HookCalls


@pytest.fixture(autouse=True)
def _in_tmp(in_tmp):
    """Runs land in an empty folder."""


def settings(**more):
    trainer = {"max_steps": 1, "global_batch_size": 4, "optimizer": {"type": "adamw", "lr": 0.1}}
    return RunConfig.from_dict({"trainer": trainer, "writers": [], "runtime": {"device": "cpu"}, **more})


class Complete(Trainer):
    @classmethod
    def build_model(cls, build):
        return Classifier()

    @classmethod
    def build_train_data(cls, build):
        return Points(24)

    def forward_batch(self, batch):
        return cross_entropy(self.model(batch[0]), batch[1])


# hooks


class Deaf(Hook):
    def after_eval(self):
        """Would be told the logs."""


class Curious(Hook):
    def after_step(self, logs):
        """Is told nothing."""


class Misspelt(Hook):
    def after_stepp(self):
        """Is never called."""


def test_an_event_of_other_arguments_is_rejected_where_it_is_written():
    text = rejection(HookCalls, [Deaf()])
    assert text.startswith(place(__file__, "def after_eval(self):"))
    assert mentions(text, "Deaf.after_eval")
    assert text.endswith("Let it accept (self, logs).")
    text = rejection(HookCalls, [Curious()])
    assert text.startswith(place(__file__, "def after_step(self, logs):"))
    assert mentions(text, "logs")


def test_the_run_does_not_wait_for_the_first_evaluation_to_find_it():
    def forward(model, batch):
        raise AssertionError("It has begun to train.")

    words = {"forward": forward, "eval_data": Points(4), "max_steps": 1, "batch_size": 4}
    assert "Deaf.after_eval" in rejection(train, Classifier(), Points(24), hooks=[Deaf()], **words)


def test_a_misspelt_event_names_its_line():
    text = rejection(HookCalls, [Misspelt()])
    assert text.startswith(place(__file__, "def after_stepp") + "Misspelt.after_stepp is not an event of a hook.")
    assert "Did you mean after_step?" in text


def test_events_with_stars_or_defaults_and_those_of_plain_objects_are_accepted():
    class Loose:
        def after_eval(self, *told):
            pass

        def after_step(self, now=True):
            pass

    assert len(HookCalls([Loose()]).hooks) == 1


def test_a_callback_hook_s_misspelt_event_names_the_line_and_the_nearest():
    text = rejection(lambda: CallbackHook(after_stepp=print))  # misspelt
    assert text.startswith(place(__file__, "  # misspelt") + "CallbackHook: after_stepp is not an event of a hook.")
    assert 'Did you mean "after_step"?' in text


def act_of_none():
    """Would be told the trainer."""


def test_a_callback_of_other_arguments_is_rejected_where_it_is_written():
    text = rejection(CallbackHook, after_eval=act_of_none)
    assert text.startswith(place(__file__, "def act_of_none"))
    assert mentions(text, "CallbackHook", "after_eval")


# the constructors of trainers


class WithoutRest(Complete):
    def __init__(self, config, task, model, optimizer, train_dataset=None, validation_dataset=None):  # no rest
        super().__init__(config, task, model, optimizer, train_dataset, validation_dataset)


class OfConfig(Complete):
    def __init__(self, config):
        self.config = config


class WithRest(Complete):
    def __init__(self, config, task, model, optimizer, train_dataset=None, validation_dataset=None, **rest):
        super().__init__(config, task, model, optimizer, train_dataset, validation_dataset, **rest)


class WithStars(Complete):
    def __init__(self, *given, **rest):
        super().__init__(*given, **rest)


@pytest.mark.parametrize(
    ("kind", "line", "what"),
    [(WithoutRest, "  # no rest", "'context'"), (OfConfig, "def __init__(self, config):", "'task'")],
)
def test_a_constructor_that_does_not_take_what_it_gets_is_rejected_where_it_is_written(kind, line, what, tmp_path):
    text = rejection(build_trainer, settings(), kind)
    assert text.startswith(
        place(__file__, line) + f"{kind.__name__}.__init__ does not accept the arguments of a trainer"
    )
    assert mentions(text, what)
    assert mentions(text, "__init__")
    assert not list(tmp_path.iterdir())


class WithMore(Complete):
    def __init__(self, *given, **rest):  # passes more
        super().__init__(*given, scheduler=None, **rest)


def test_an_argument_that_a_trainer_does_not_have_is_rejected_where_it_is_passed():
    text = rejection(build_trainer, settings(), WithMore)
    assert text.startswith(place(__file__, "  # passes more"))
    assert mentions(text, "WithMore", "scheduler")


@pytest.mark.parametrize("kind", [WithRest, WithStars])
def test_a_constructor_that_passes_the_rest_on_is_fine(kind):
    assert build_trainer(settings(), kind).train() == {}


# what an evaluation gives


class Silent(Complete):
    @classmethod
    def build_eval_data(cls, build):
        return {"valid": Points(4)}

    def eval_end(self, aggregated):
        """Forgets to return the logs."""


class Verbose(Silent):
    def eval_end(self, aggregated):  # a matrix
        return {"confusion": torch.ones(2, 2)}


def test_logs_that_are_not_numbers_name_eval_end():
    text = rejection(build_trainer(settings(), Silent).train)
    assert text == place(__file__, "def eval_end") + "Silent.eval_end returned None. Return the logs by name."
    text = rejection(build_trainer(settings(name="other"), Verbose).train)
    assert text.startswith(place(__file__, "  # a matrix") + "Verbose.eval_end: confusion is a Tensor of shape (2, 2)")


# metrics


class Measured(Task):
    def build_metrics(self):
        return {"accuracy": torch.nn.Linear(1, 1)}


class OfTask(Complete):
    @classmethod
    def build_task(cls, build):
        return Measured()


class OfGarden(Complete):
    @classmethod
    def build_task(cls, build):
        return type("Listed", (Task,), {"build_metrics": lambda self, training=True: []})()  # a list


def test_a_list_of_metrics_is_rejected_before_training():
    with raises(ConfigError, "Listed.build_metrics", "dict", at="test_mistakes_in_hooks_and_trainers.py"):
        build_trainer(settings(), OfGarden)


def test_a_value_that_is_not_a_metric_is_rejected_before_training():
    metrics = {"mine": {"type": "torch.nn:Identity"}}
    text = rejection(build_trainer, settings(evaluation={"metrics": metrics}), Complete)
    assert mentions(text, "evaluation.metrics.mine")
    text = rejection(build_trainer, settings(), OfTask)
    assert text.startswith(
        place(__file__, "def build_metrics") + "Measured.build_metrics, accuracy: Linear is not a metric"
    )
