"""Ctrl-C and SIGTERM: the step is completed and saved, and the run resumes exactly."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from trainwright import Hook, RunConfig, Trainer, build_trainer
from trainwright.hooks import preemption as obey_preemption

PROJECT = Path(__file__).parents[1] / "project"
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


class Signalling(Hook):
    """Sends signals to the process in the middle of a step."""

    def __init__(self, *numbers):
        self.numbers = numbers
        self.finished = False

    def before_step(self):
        if self.trainer.step == 2:
            for number in self.numbers:
                os.kill(os.getpid(), number)

    def after_train(self):
        self.finished = True


def build(tmp_path, *numbers):
    hook = Signalling(*numbers)

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), hook]

    config = RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=6"])
    return build_trainer(config, Mine), hook


def handlers():
    return [signal.getsignal(number) for number in obey_preemption.SIGNALS]


@BOTH
def test_the_current_step_is_completed_and_saved(tmp_path, number):
    before = handlers()
    trainer, hook = build(tmp_path, number)
    trainer.train()
    assert trainer.step == 3
    assert trainer.interrupted
    assert trainer.stop_reason == signal.Signals(number).name
    assert trainer.context.store.newest_intact() == 3
    assert not hook.finished
    assert handlers() == before


@BOTH
def test_the_rebuilt_run_ends_with_identical_weights(tmp_path, number):
    whole, _ = build(tmp_path / "whole")
    logs = whole.train()
    build(tmp_path / "halves", number)[0].train()
    resumed, hook = build(tmp_path / "halves")
    assert resumed.step == 3
    assert resumed.train() == logs
    assert not resumed.interrupted
    assert hook.finished
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_forwarded_signal_is_the_same_request(tmp_path):
    # Ctrl-C reaches torchrun and its workers, and torchrun sends it to the workers once more.
    trainer, _ = build(tmp_path, signal.SIGINT, signal.SIGTERM, signal.SIGINT)
    trainer.train()
    assert trainer.interrupted
    assert trainer.context.store.newest_intact() == 3


def test_a_later_second_signal_ends_the_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(obey_preemption, "ECHO_SECONDS", -1.0)
    before = handlers()
    trainer, _ = build(tmp_path, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.context.store.newest_intact() is None
    assert handlers() == before


def test_the_handlers_are_restored_after_an_error(tmp_path):
    class Failing(Trainer):
        def train_step(self, batch):
            raise ValueError("no step today")

    before = handlers()
    config = RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}"])
    with pytest.raises(ValueError, match="no step today"):
        build_trainer(config, Failing).train()
    assert handlers() == before


def test_a_run_in_another_thread_has_no_handlers(tmp_path):
    trainer, _ = build(tmp_path)
    before = handlers()
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.step == 6
    assert handlers() == before
