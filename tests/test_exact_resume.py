"""kill -9 at a step, run the same command again: every later loss, metric, rate and weight is bit-identical.

Real processes and real signals. The children are forked from this process, which has torch imported, so
that a case costs a tenth of a second instead of three.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from tests.data.kinds import SOURCES
from tests.faults import runs  # noqa: F401  # imports, before the fork, what each child would
from tests.trainers import grpo_runs, preference_runs

from trainwright import Hook, RunConfig, build_trainer
from trainwright.build.components import Build
from trainwright.checkpoint.store import CheckpointStore

PROJECT = Path(__file__).parent / "project"
TIMED = ("_per_second", "_per_step", "slowest_rank_share")


class KillAt(Hook):
    """Sends this very process a signal after a step."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def after_step(self):
        if self.trainer.step == self.step:
            os.kill(os.getpid(), self.number)


def run_in_child(config, *, signal_at=None, number=signal.SIGKILL):
    """Trains in a forked child and returns how it ended: an exit code, or minus the signal."""

    class Killed(Build(config).trainer_class()):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), *([KillAt(signal_at, number)] if signal_at else [])]

    child = os.fork()
    if child == 0:
        try:
            os.fsync = lambda descriptor: None  # what was written survives a process that is killed, synced or not
            trainer = build_trainer(config, Killed)
            trainer.train()
            os._exit(7 if trainer.interrupted else 0)
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def what_is_left(folder):
    """Everything of a run that must be equal: the log without its clock, and every bit of the last checkpoint."""
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    lines = [{key: value for key, value in line.items() if not key.endswith(TIMED)} for line in lines]
    store = CheckpointStore(folder / "checkpoints")
    last = store.steps()[-1]
    training = store.read(last, "training")
    events = training["events"]["histories"]
    training["events"] = {name: values for name, values in events.items() if not name.endswith(TIMED)}
    return lines, last, store.read(last, "model"), store.read(last, "optimizers"), training


def assert_same(left, right, path=""):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}[{number}]")
    elif hasattr(left, "tolist"):
        assert left.tolist() == right.tolist(), path
    else:
        assert left == right, path


EVERYTHING = ("model.dropout=0.3", "hooks=[{type: ema, decay: 0.8}]", "checkpoint.keep_last=null")
CASES = {
    "accumulation, dropout, averaged weights": (),
    "fp16 with its scale": ("runtime.precision=fp16",),
    "bf16": ("runtime.precision=bf16",),
    "two workers": ("data.num_workers=2",),
    "one worker, no shuffle": ("data.num_workers=1", "data.shuffle=false"),
    "no accumulation": ("trainer.micro_batch_size=8",),
    "ragged epochs": ("trainer.max_steps=null", "trainer.max_epochs=1.7"),
}


SLOW_CASES = ("one worker, no shuffle", "bf16", "no accumulation")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW_CASES else []) for case in CASES]
)
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(case, tmp_path):
    def config(name):
        overrides = (f"name={name}", f"output_dir={tmp_path}", *EVERYTHING, *CASES[case])
        return RunConfig.load(PROJECT / "run.yaml", overrides)

    assert run_in_child(config("undisturbed")) == 0
    assert run_in_child(config("killed"), signal_at=6) == -signal.SIGKILL
    assert run_in_child(config("killed"), signal_at=10) == -signal.SIGKILL
    assert run_in_child(config("killed")) == 0
    assert_same(what_is_left(tmp_path / "undisturbed"), what_is_left(tmp_path / "killed"))


# Worker processes take long to start: in the suite they read the sources in which most depends on them.
WITH_WORKERS = ("a mixture of streams", "a packed stream")


@pytest.mark.parametrize(
    ("source", "workers"),
    [
        pytest.param(source, workers, marks=[pytest.mark.slow] if workers and source not in WITH_WORKERS else [])
        for source in SOURCES
        for workers in (0, 2)
    ],
)
def test_a_killed_run_over_any_source_ends_with_the_bits_of_an_undisturbed_one(source, workers, tmp_path):
    def config(name):
        overrides = (f"name={name}", f"output_dir={tmp_path}", f"data.num_workers={workers}", "data.shuffle_buffer=20")
        return RunConfig.load(PROJECT / "run.yaml", (*overrides, *SOURCES[source]))

    assert run_in_child(config("undisturbed")) == 0
    assert run_in_child(config("killed"), signal_at=6) == -signal.SIGKILL
    assert run_in_child(config("killed"), signal_at=10) == -signal.SIGKILL
    assert run_in_child(config("killed")) == 0
    assert_same(what_is_left(tmp_path / "undisturbed"), what_is_left(tmp_path / "killed"))


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        *((signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGTERM, 2)),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_finishes_the_step_and_saves_it(number, workers, tmp_path):
    def config(name):
        overrides = (f"name={name}", f"output_dir={tmp_path}", f"data.num_workers={workers}", *EVERYTHING)
        return RunConfig.load(PROJECT / "run.yaml", overrides)

    assert run_in_child(config("undisturbed")) == 0
    assert run_in_child(config("asked"), signal_at=7, number=number) == 7
    assert CheckpointStore(tmp_path / "asked" / "checkpoints").steps() == [4, 7]
    assert run_in_child(config("asked")) == 0
    assert_same(what_is_left(tmp_path / "undisturbed"), what_is_left(tmp_path / "asked"))


def test_a_run_may_go_on_with_other_workers_and_micro_batches(tmp_path):
    def config(name, *overrides):
        overrides = (f"name={name}", f"output_dir={tmp_path}", "model.dropout=0.0", *overrides)
        return RunConfig.load(PROJECT / "run.yaml", overrides)

    assert run_in_child(config("undisturbed")) == 0
    assert run_in_child(config("changed"), signal_at=6) == -signal.SIGKILL
    assert run_in_child(config("changed", "data.num_workers=2")) == 0
    assert_same(what_is_left(tmp_path / "undisturbed"), what_is_left(tmp_path / "changed"))


PACKED = {"type": "pack", "length": 48, "source": {"type": "chat", "path": "rows.jsonl", "tokenizer": "base"}}
# The settings of the trainer, of the model and of the data; the recipes have further runs (test_recipes.py).
POST_TRAINING = {
    "a frozen copy": ({}, {}, {}),
    "adapters with dropout": ({}, {"lora": {"match": "*_proj", "rank": 4, "dropout": 0.3}}, {}),
    "a precomputed reference": ({"precompute_reference": True}, {}, {}),
    "kto": ({"loss_type": "kto"}, {}, {}),
    "orpo": ({"loss_type": "orpo"}, {}, {}),
    "ipo": ({"loss_type": "ipo"}, {}, {}),
    "hinge": ({"loss_type": "hinge"}, {}, {}),
    "simpo": ({"loss_type": "simpo", "beta": 2.0}, {}, {}),
    "reward": preference_runs.REWARD,
    "distill": preference_runs.DISTILL,
    "sft": ({"type": "sft"}, {}, {"train": PACKED}),
}
SINGLE_ANSWERS = ("kto", "sft")
SLOW_POST_TRAINING = ("ipo", "hinge")  # they keep no state that sigmoid has not


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW_POST_TRAINING else []) for case in POST_TRAINING],
)
def test_a_killed_post_training_run_ends_with_the_bits_of_an_undisturbed_one(case, tmp_path):
    preference_runs.prepare(tmp_path, paired=case not in SINGLE_ANSWERS, number=30)
    trainer, model, data = POST_TRAINING[case]
    model = {"type": "llama", **model}
    content = preference_runs.settings_of(tmp_path, trainer, model, data, steps=8, micro_batch_size=2)
    if case == "sft":
        del content["data"]["collator"]
    content["trainer"]["optimizer"] = {"type": "adamw", "lr": 0.01}
    content["data"]["shuffle"] = True
    content["checkpoint"] = {"every_steps": 2}

    def config(name):
        return preference_runs.load(tmp_path, content, f"name={name}", f"output_dir={tmp_path}")

    assert run_in_child(config("undisturbed")) == 0
    assert run_in_child(config("killed"), signal_at=3) == -signal.SIGKILL
    assert run_in_child(config("killed"), signal_at=6) == -signal.SIGKILL
    assert run_in_child(config("killed")) == 0
    assert_same(what_is_left(tmp_path / "undisturbed"), what_is_left(tmp_path / "killed"))


# The settings of the trainer. A stop after the third step is between two updates that use the same completions.
GRPO = {
    "the same completions twice": {"num_iterations": 2, "beta": 0.1, "micro_batch_size": 1},
    "new completions": {"temperature": 0.8, "top_k": 12, "scale_rewards": "batch"},
}


@pytest.mark.parametrize("case", GRPO)
def test_a_killed_grpo_run_ends_with_the_bits_of_an_undisturbed_one(case, tmp_path):
    grpo_runs.prepare(tmp_path)
    content = grpo_runs.with_evaluation(grpo_runs.settings(tmp_path, **GRPO[case], max_steps=8))
    content["model"] |= {"lora": {"match": "*_proj", "rank": 4, "dropout": 0.3}}
    content["trainer"]["optimizer"] = {"type": "adamw", "lr": 0.01}
    content["checkpoint"] = {"every_steps": 3}

    def config(name):
        return preference_runs.load(tmp_path, content, f"name={name}", f"output_dir={tmp_path}")

    assert run_in_child(config("undisturbed")) == 0
    assert run_in_child(config("killed"), signal_at=4) == -signal.SIGKILL
    assert run_in_child(config("killed"), signal_at=7) == -signal.SIGKILL
    assert run_in_child(config("killed")) == 0
    assert_same(what_is_left(tmp_path / "undisturbed"), what_is_left(tmp_path / "killed"))
