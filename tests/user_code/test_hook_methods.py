"""Hooks with the events of another framework: what would never be called is rejected by name, with ours."""

import pytest
from tests.messages import mentions

from trainwright import CallbackHook, Every, Hook
from trainwright.errors import ConfigError
from trainwright.loop.hook import HOOK_EVENTS, HookCalls
from trainwright.user_code.methods import HOOK_METHODS_ELSEWHERE


def rejection_of(hook):
    with pytest.raises(ConfigError) as rejected:
        HookCalls([hook])
    return str(rejected.value)


@pytest.mark.parametrize(("theirs", "ours"), HOOK_METHODS_ELSEWHERE.items())
def test_another_framework_s_event_is_answered_with_ours(theirs, ours):
    assert ours in HOOK_EVENTS
    hook = type("Mine", (Hook,), {theirs: lambda self, *given: None})()
    text = rejection_of(hook)
    assert mentions(text, theirs, ours)
    assert text.startswith(f"{__file__}:")


@pytest.mark.parametrize("theirs", ["before_epoch", "after_epoch", "on_epoch_end", "on_train_epoch_start"])
def test_epochs_are_no_events(theirs):
    hook = type("Mine", (Hook,), {theirs: lambda self: None, "after_step": lambda self: None})()
    assert mentions(rejection_of(hook), theirs)


def test_a_hook_of_which_nothing_is_ever_called_is_rejected():
    class Mine:
        def on_weather(self):
            """Nobody calls it."""

    assert mentions(rejection_of(Mine()), "Mine.on_weather")


def test_a_method_of_a_base_is_seen_too():
    class Base(Hook):
        def on_step_end(self):
            """Nobody calls it."""

    assert mentions(rejection_of(type("Mine", (Base,), {})()), "Mine.on_step_end")


def test_what_a_hook_calls_itself_is_its_own_and_the_rest_is_said(caplog):
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
