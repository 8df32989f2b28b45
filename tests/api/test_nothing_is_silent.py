"""The API for functions: what would have no effect, or another one than it seems to have, is said."""

import argparse
from pathlib import Path

import pytest
import torch
from tests.api.function_runs import Classifier, Points, flags, forward_step, lines, losses, run, same, weights
from tests.messages import mentions, raises
from torch.nn.functional import cross_entropy

from trainwright import RunConfig, run_experiment, train
from trainwright.api.training_main import config_of
from trainwright.errors import ConfigError, DataError

HERE = Path(__file__)


@pytest.fixture(autouse=True)
def _in_tmp(in_tmp):
    """Runs land in an empty folder."""


def line_of(text):
    return next(number for number, line in enumerate(HERE.read_text("utf-8").splitlines(), 1) if text in line)


# --mode inference


def start_over(args, model):
    """An init_function as one makes a new head for finetuning: what it sets is what training begins with."""
    torch.nn.init.zeros_(model.head.weight)


def test_inference_undoes_no_training_by_the_init_function():
    words = ("--train-iters", "2", "--lr", "0.1", "--valid-data", "9")
    trained = weights(run(*words, init_function=start_over))
    assert trained["head.weight"].any()
    for load in (("--load", "runs/run", "--experiment-name", "other"), ()):
        inferred = run("--mode", "inference", "--valid-data", "9", *load, init_function=start_over)
        assert same(weights(inferred), trained)


def test_init_function_receives_the_loaded_weights_in_finetune():
    trained = weights(run("--train-iters", "2", "--experiment-name", "first"))
    words = ("--train-iters", "1", "--lr", "1e-9", "--mode", "finetune", "--load", "runs/first")
    tuned = weights(run(*words, init_function=start_over))
    assert torch.equal(tuned["layers.0.0.weight"].round(decimals=6), trained["layers.0.0.weight"].round(decimals=6))
    assert tuned["head.weight"].abs().max() < 1e-6


def test_inference_returns_the_model_without_any_set():
    trained = weights(run("--train-iters", "1"))
    assert same(weights(run("--mode", "inference")), trained)


# metrics of a training step


def noting(value_of):
    def step(data_iterator, model, args, timers):
        x, labels, _ = next(data_iterator)
        step.calls += 1
        step.weights.append(weights(model))
        return cross_entropy(model(x), labels), {"odd": value_of(x, step.calls)}

    step.calls, step.weights = 0, []
    return step


def test_a_metric_with_a_value_a_sample_is_averaged_in_training():
    step = noting(lambda x, call: torch.arange(len(x), dtype=torch.float32).reshape(-1, 1))
    run("--train-iters", "1", forward_step_function=step)
    assert lines()[-1]["odd"] == 1.5


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3)])
def test_a_nan_in_a_metric_of_any_shape_skips_the_update(shape):
    step = noting(lambda x, call: torch.full(shape, float("nan") if call == 2 else 1.0))
    run("--train-iters", "4", forward_step_function=step)
    before = step.weights
    assert not same(before[0], before[1])
    assert same(before[1], before[2])
    assert not same(before[2], before[3])


# collate_fn and accumulation


class Held:
    def __init__(self, samples):
        self.x = torch.stack([x for x, _, _ in samples])


def collate_object(samples):
    return {"held": Held(samples), "labels": torch.stack([labels for _, labels, _ in samples])}


def collate_ragged(samples):
    labels = torch.stack([labels for _, labels, _ in samples])
    return {"rows": [x[: 1 + int(y)] for x, y, _ in samples], "labels": labels}


def test_a_batch_that_cannot_be_cut_into_micro_batches_names_the_collate_fn_s_line():
    def step(data_iterator, model, args, timers):
        batch = next(data_iterator)
        return cross_entropy(model(batch["held"].x), batch["labels"])

    run("--train-iters", "1", forward_step_function=step, collate_fn=collate_object)
    words = ("--train-iters", "1", "--gradient-accumulation-steps", "2", "--fresh")
    with raises(DataError, "2") as rejected:
        run(*words, forward_step_function=step, collate_fn=collate_object)
    assert f"{HERE}:{line_of('def collate_object')}" in str(rejected.value)


def test_a_list_with_an_entry_a_sample_goes_with_its_rows():
    def step(data_iterator, model, args, timers):
        batch = next(data_iterator)
        assert [len(row) for row in batch["rows"]] == [1 + label for label in batch["labels"].tolist()]
        padded = torch.nn.utils.rnn.pad_sequence([*batch["rows"], torch.zeros(4)], batch_first=True)[:-1]
        return cross_entropy(model(padded), batch["labels"])

    words = ("--train-iters", "2", "--batch-size", "2", "--gradient-accumulation-steps", "4")
    run(*words, forward_step_function=step, collate_fn=collate_ragged)
    whole = ("--train-iters", "2", "--batch-size", "8", "--experiment-name", "whole")
    run(*whole, forward_step_function=step, collate_fn=collate_ragged)
    assert losses() == pytest.approx(losses("whole"), rel=1e-5)


# flags, stopwatches, and runs that only a program knows


def test_a_flag_that_is_misspelt_in_a_namespace_is_rejected_with_the_nearest():
    with raises(ConfigError, "args.train_iter", "train_iters"):
        config_of(argparse.Namespace(train_iter=2, epochs=1, train_data=["24"], device="cpu"))
    with raises(ConfigError, "args.batchsize", "batch_size"):
        config_of(argparse.Namespace(train_iters=2, batchsize=8, train_data=["24"], device="cpu"))
    # Beside every flag, an argument of one's own may look like one.
    both = argparse.Namespace(**vars(flags("--train-iters", "2")), text_data="a", batch_sizes=3)
    assert config_of(both).trainer.arguments.batch_sizes == 3


def test_timers_are_not_metrics_of_an_evaluation():
    run("--train-iters", "1", "--valid-data", "9", forward_step_function=forward_step)
    (line,) = lines()
    assert mentions(line, "time/batch")
    assert {"valid/loss", "valid/acc"} == {name for name in line if name.startswith("valid/")}


def test_evaluating_a_run_of_train_says_how():
    def forward(model, batch):
        x, labels, _ = batch
        return cross_entropy(model(x), labels)

    train(Classifier(), Points(24), forward=forward, eval_data=Points(9), max_steps=1, batch_size=4)
    with raises(ConfigError):
        run_experiment(RunConfig.load("runs/notebook/config.yaml"), mode="eval")
    with raises(ConfigError, "trainer.type", "mine.py"):
        train(Classifier(), Points(24), max_steps=1, overrides=["trainer.type=mine.py:Mine"])


def test_evaluating_a_run_of_training_main_says_how():
    run("--train-iters", "1", "--valid-data", "9")
    with raises(ConfigError, "training_main", "--mode"):
        run_experiment(RunConfig.load("runs/run/config.yaml"), mode="eval")
