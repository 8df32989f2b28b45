"""Functions at events of the run."""

from pathlib import Path

import pytest
from tests.messages import raises

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.errors import ComponentError, ConfigError
from trainwright.hooks.callback import CallbackHook
from trainwright.loop.hook import HOOK_EVENTS, HookCalls

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=2", *overrides])


def test_each_function_gets_the_trainer_at_its_event_and_what_the_event_tells(tmp_path):
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
def test_every_event_of_a_hook_takes_a_function(event):
    calls = []
    hook = CallbackHook(**{event: lambda trainer, *told: calls.append(trainer)})
    hook.trainer = "the trainer"
    HookCalls([hook]).call(event)
    assert calls == ["the trainer"]


def test_a_file_names_the_functions(tmp_path):
    for name in ("parts.py", "run.yaml"):
        (tmp_path / name).write_text((PROJECT / name).read_text())
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "acts.py").write_text(
        "def note(trainer, logs):\n    (trainer.folder / 'noted').write_text(str(sorted(logs)))\n"
    )
    overrides = [f"output_dir={tmp_path}", "trainer.max_steps=2", "hooks=[{type: callback, after_eval: acts.note}]"]
    build_trainer(RunConfig.load(tmp_path / "run.yaml", overrides)).train()
    assert (tmp_path / "small" / "noted").read_text() == "['valid/accuracy', 'valid/loss']"


def test_a_function_that_is_not_there_is_named_with_its_event(tmp_path):
    with raises(ComponentError, "hooks.callback.after_step"):
        build_trainer(load(tmp_path, "hooks=[{type: callback, after_step: parts.py:missing}]"))


def test_an_event_that_is_none_is_answered_with_the_nearest(tmp_path):
    with raises(ComponentError, "after_stp", "after_step"):
        build_trainer(load(tmp_path, "hooks=[{type: callback, after_stp: parts.py:Net}]"))


def test_no_function_at_all_is_rejected():
    with raises(ConfigError):
        CallbackHook()


def test_what_is_no_function_is_rejected():
    with raises(ConfigError, "after_step", "3"):
        CallbackHook(after_step=3)
