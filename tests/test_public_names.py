"""The names that users import from trainwright."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trainwright


def test_importing_trainwright_imports_no_torch():
    program = "import sys, trainwright; assert dir(trainwright); assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", trainwright.__all__)
def test_each_public_name_resolves(name):
    assert getattr(trainwright, name).__name__ == name
    assert name in dir(trainwright)


def test_the_names_that_the_design_promises_are_there():
    promised = {
        "Trainer",
        "Task",
        "Hook",
        "Writer",
        "Every",
        "Mean",
        "StepResult",
        "RunConfig",
        "Component",
        "AutoModel",
        "CallbackHook",
        "Interrupted",
        "experiment",
        "load_experiment",
        "training_main",
        "get_args",
        "add_training_args",
        "train",
        "register",
        "run_experiment",
        "build_component",
        "build_trainer",
        "load_checkpoint",
        "load_hf_dataset",
        "EventStorage",
        "get_event_storage",
    }
    assert promised <= set(trainwright.__all__)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"trainwright has no 'Trianer'.*Trainer"):
        _ = trainwright.Trianer
    with pytest.raises(ImportError, match="Trianer"):
        from trainwright import Trianer  # noqa: F401


def test_two_ways_to_a_name_give_one_object():
    from trainwright import Trainer
    from trainwright.loop.trainer import Trainer as FromItsFile

    assert Trainer is FromItsFile
