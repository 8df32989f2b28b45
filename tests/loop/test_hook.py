"""Hooks: which events are called, in which order, and how their state is keyed."""

from __future__ import annotations

import pytest
from tests.messages import raises

from trainwright.errors import ConfigError
from trainwright.loop.hook import HOOK_EVENTS, Hook, HookCalls


class Recorder(Hook):
    def __init__(self, name, calls):
        self.name = name
        self.calls = calls

    def after_step(self):
        self.calls.append(self.name)

    def after_eval(self, logs):
        self.calls.append((self.name, dict(logs)))


class Quiet(Hook):
    """Overrides nothing."""


class Failing(Hook):
    def close(self):
        raise OSError("no space")


def test_hooks_are_called_in_the_order_of_registration():
    calls = []
    hooks = HookCalls([Recorder("b", calls), Quiet(), Recorder("a", calls)])
    hooks.call("after_eval", {"valid/loss": 1.0})
    for act in hooks.after_step:
        act()
    assert calls == [("b", {"valid/loss": 1.0}), ("a", {"valid/loss": 1.0}), "b", "a"]


def test_an_event_that_nobody_overrides_costs_nothing():
    hooks = HookCalls([Quiet(), Recorder("a", [])])
    assert hooks.before_step == []
    assert len(hooks.after_step) == 1


@pytest.mark.parametrize("event", HOOK_EVENTS)
def test_every_event_of_a_hook_may_be_left_alone(event):
    assert HookCalls([Quiet()]).call_all(event) == []


def test_closing_goes_on_past_a_hook_that_raises():
    closed = []

    class Closes(Hook):
        def close(self):
            closed.append(True)

    errors = HookCalls([Failing(), Closes(), Failing()]).call_all("close")
    assert [str(error) for error in errors] == ["no space", "no space"]
    assert closed == [True]


def test_call_lets_an_error_through():
    with pytest.raises(OSError, match="no space"):
        HookCalls([Failing()]).call("close")


def test_states_are_keyed_by_class_name_and_ordinal():
    class InfoHook(Hook):
        pass

    first, quiet, second, third = InfoHook(), Quiet(), InfoHook(), InfoHook()
    keyed = HookCalls([first, quiet, second, third]).keyed()
    assert keyed == {"InfoHook": first, "Quiet": quiet, "InfoHook#2": second, "InfoHook#3": third}


def test_a_hook_without_state_has_an_empty_one():
    assert Quiet().state_dict() == {}
    Quiet().load_state_dict({"anything": 1})


def test_a_hook_need_not_inherit():
    class Duck:
        def after_step(self):
            calls.append("quack")

    calls = []
    hooks = HookCalls([Duck()])
    hooks.after_step[0]()
    hooks.call("before_train")
    assert calls == ["quack"]


def test_an_event_may_be_given_to_one_object():
    calls = []
    hook = Quiet()
    hook.after_step = lambda: calls.append("here")
    hooks = HookCalls([Quiet(), hook])
    assert len(hooks.after_step) == 1
    hooks.after_step[0]()
    assert calls == ["here"]


def test_a_hook_that_does_not_inherit_and_keeps_nothing_has_no_state():
    class Duck:
        pass

    assert HookCalls([Duck(), Quiet()]).keyed().keys() == {"Quiet"}


def test_a_method_that_is_almost_an_event_is_rejected():
    class Misspelt(Hook):
        def after_stp(self):
            """Would never be called."""

    with raises(ConfigError, "Misspelt.after_stp", "after_step"):
        HookCalls([Misspelt()])


def test_a_class_in_a_hooks_place_is_rejected():
    with raises(ConfigError):
        HookCalls([Quiet])


def test_a_function_in_a_hooks_place_is_answered_with_what_makes_it_one():
    def act(trainer):
        """Would never be called."""

    with raises(ConfigError, "CallbackHook", "after_step"):
        HookCalls([act])


@pytest.mark.parametrize("returned", [None, Quiet()])
def test_hooks_that_are_no_list_are_rejected(returned):
    with raises(ConfigError, "build_hooks"):
        HookCalls(returned)
