"""Functions at events of the run."""

from pathlib import Path

import pytest
from tests.messages import raises

from trainwright import Every, RunConfig, Trainer, build_trainer
from trainwright.errors import ComponentError, ConfigError
from trainwright.hooks.callback import CallbackHook
from trainwright.loop.hook import HOOK_EVENTS, HookCalls

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=2", *overrides])


def test_each_function_gets_the_trainer_and_the_arguments_of_its_event(tmp_path):
    calls = []
    hook = CallbackHook(
        before_train=lambda trainer: calls.append(("before_train", trainer.step)),
        after_step=lambda trainer: calls.append(("after_step", trainer.step)),
        after_eval=lambda trainer, logs: calls.append(("after_eval", "valid/loss" in logs)),
        after_save=lambda trainer, path: calls.append(("after_save", path.name)),
        close=lambda trainer: calls.append(("close", trainer.step)),
    )

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), hook]

    build_trainer(load(tmp_path), Mine).train()
    assert calls == [
        ("before_train", 0),
        ("after_step", 1),
        ("after_step", 2),
        ("after_eval", True),
        ("after_save", "step-00000002"),
        ("close", 2),
    ]


def test_an_event_without_a_function_costs_nothing():
    hooks = HookCalls([CallbackHook(after_train=print)])
    assert hooks.before_step == hooks.after_step == []


@pytest.mark.parametrize("event", HOOK_EVENTS)
def test_every_event_accepts_a_function(event):
    calls = []
    hook = CallbackHook(**{event: lambda trainer, *told: calls.append(trainer)})
    hook.trainer = "the trainer"
    HookCalls([hook]).call(event)
    assert calls == ["the trainer"]


def test_a_config_names_the_functions(tmp_path):
    for name in ("parts.py", "run.yaml"):
        (tmp_path / name).write_text((PROJECT / name).read_text())
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "acts.py").write_text(
        "def note(trainer, logs):\n    (trainer.folder / 'noted').write_text(str(sorted(logs)))\n"
    )
    overrides = [f"output_dir={tmp_path}", "trainer.max_steps=2", "hooks=[{type: callback, after_eval: acts.note}]"]
    build_trainer(RunConfig.load(tmp_path / "run.yaml", overrides)).train()
    assert (tmp_path / "small" / "noted").read_text() == "['valid/accuracy', 'valid/loss']"


def test_a_missing_function_is_named_with_its_event(tmp_path):
    with raises(ComponentError, "hooks.callback.after_step"):
        build_trainer(load(tmp_path, "hooks=[{type: callback, after_step: parts.py:missing}]"))


def test_an_unknown_event_is_rejected_with_the_closest_match(tmp_path):
    with raises(ConfigError, "after_stp", "after_step"):
        build_trainer(load(tmp_path, "hooks=[{type: callback, after_stp: parts.py:Net}]"))


def test_a_hook_without_functions_is_rejected():
    with raises(ConfigError):
        CallbackHook()


def test_a_value_that_is_not_a_function_is_rejected():
    with raises(ConfigError, "after_step", "3"):
        CallbackHook(after_step=3)


def test_every_calls_its_function_after_each_multiple_of_n(tmp_path):
    steps = []

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Every(3)(lambda trainer: steps.append(trainer.step))]

    build_trainer(load(tmp_path, "trainer.max_steps=7"), Mine).train()
    assert steps == [3, 6]


def test_every_decorates_a_function():
    @Every(2)
    def log(trainer):
        pass

    assert isinstance(log, CallbackHook)


def test_a_config_names_the_function_of_every(tmp_path):
    (tmp_path / "parts.py").write_text((PROJECT / "parts.py").read_text())
    (tmp_path / "run.yaml").write_text((PROJECT / "run.yaml").read_text())
    (tmp_path / "acts.py").write_text(
        "def note(trainer):\n"
        "    with open(trainer.folder / 'noted', 'a') as file:\n"
        "        print(trainer.step, file=file)\n"
    )
    hook = "hooks=[{type: every, steps: 2, call: acts.py:note}]"
    config = RunConfig.load(tmp_path / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=7", hook])
    build_trainer(config).train()
    assert (tmp_path / "small" / "noted").read_text().split() == ["2", "4", "6"]


def test_a_missing_function_of_every_is_named(tmp_path):
    config = load(tmp_path, "hooks=[{type: every, steps: 2, call: parts.py:missing}]")
    with raises(ComponentError):
        build_trainer(config)


@pytest.mark.parametrize("steps", [0, -1, 2.5, "2"])
def test_every_needs_a_positive_integer(steps):
    with raises(ConfigError):
        Every(steps)
