"""Evaluation: what is counted, what is disturbed, and what happens when it fails."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.faults.runs import assert_same_end, store_of
from tests.faults.two_ranks import Run, train_two
from tests.loop.small_runs import own_rank
from tests.messages import mentions, raises
from torch import nn

from trainwright import Hook, Mean, RunConfig, Task, Trainer, build_trainer, get_event_storage
from trainwright.errors import ConfigError, TrainwrightError

PROJECT = Path(__file__).parents[1] / "project"
TIMES = {"seconds_per_step", "samples_per_second"}


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=6", *overrides])


def lines_of(tmp_path, name="small"):
    lines = [json.loads(line) for line in (tmp_path / name / "metrics.json").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def evaluated(tmp_path, trainer_class=Trainer, *overrides, task=None):
    """The logs of one evaluation of 33 samples (batches of 4, the last of 1), and the trainer."""

    class WithTask(trainer_class):
        @classmethod
        def build_task(cls, build):
            return task or build.task()

    trainer = build_trainer(load(tmp_path, *overrides), WithTask)
    with trainer.storage:
        return trainer.evaluate(), trainer


def whole_set(trainer):
    dataset = trainer.eval_data["valid"].dataset
    return dataset.x, dataset.y


# what is counted


def test_each_sample_of_a_ragged_set_counts_once(tmp_path):
    logs, trainer = evaluated(tmp_path)
    x, y = whole_set(trainer)
    trainer.model.eval()
    logits = trainer.model(x)["logits"]
    assert len(x) == 33
    assert logs["valid/loss"] == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-6)
    assert logs["valid/accuracy"] == pytest.approx((logits.argmax(1) == y).float().mean().item())


@pytest.mark.parametrize("batch_size", [1, 7, 32, 33, 100])
def test_the_batch_size_changes_no_value(tmp_path, batch_size):
    logs, _ = evaluated(tmp_path / "a")
    others, _ = evaluated(tmp_path / "b", Trainer, f"evaluation.batch_size={batch_size}")
    assert others == pytest.approx(logs, rel=1e-6)


def test_max_batches_ends_a_set_early(tmp_path):
    class Counting(Trainer):
        def eval_step(self, batch):
            return {"samples": Mean(len(batch["labels"]), 1)}

    logs, _ = evaluated(tmp_path, Counting, "evaluation={max_batches: 2}")
    assert logs == {"valid/samples": 4.0}


def test_scalars_weigh_their_samples_means_their_count_and_per_sample_values_are_averaged(tmp_path):
    class Values(Trainer):
        def eval_step(self, batch):
            y = batch["labels"].float()
            return {
                "scalar": y.mean(),
                "number": float(y.mean()),
                "one_element": y.mean().reshape(1, 1),
                "mean": Mean(y.sum(), len(y)),
                "device_count": Mean(y.sum(), torch.tensor(len(y))),
                "per_sample": y,
                "right": batch["labels"] > 0,
                "batches": Mean(1.0, 1.0),
                "text": "no mean",
                "matrix": torch.zeros(len(y), 3),
            }

    logs, trainer = evaluated(tmp_path, Values, "evaluation={}")
    share = whole_set(trainer)[1].float().mean().item()
    expected = ("scalar", "number", "one_element", "mean", "device_count", "per_sample", "right")
    assert logs.keys() == {*(f"valid/{name}" for name in expected), "valid/batches"}
    for name in expected:
        assert logs[f"valid/{name}"] == pytest.approx(share), name
    assert logs["valid/batches"] == 1.0


def test_an_eval_step_that_returns_no_mapping_is_rejected(tmp_path):
    class Wrong(Trainer):
        def eval_step(self, batch):
            return torch.tensor(1.0)

    with raises(TrainwrightError, "eval_step"):
        evaluated(tmp_path, Wrong, "evaluation={}")


def test_gradients_are_off(tmp_path):
    class Noting(Trainer):
        def eval_step(self, batch):
            assert not torch.is_grad_enabled()
            assert not self.model.training
            return super().eval_step(batch)

    evaluated(tmp_path, Noting)


def test_events_of_an_evaluation_come_in_order_for_each_set(tmp_path):
    moments = []

    class Telling(Trainer):
        def eval_begin(self):
            moments.append(("begin", self.eval_name))

        def eval_end(self, aggregated):
            moments.append(("end", self.eval_name, aggregated))
            return {**super().eval_end(aggregated), "more": torch.tensor(2.0)}

    sets = "data.eval={a: {type: parts.py:Points, size: 5}, b-2: {type: parts.py:Points, size: 3}}"
    logs, trainer = evaluated(tmp_path, Telling, sets)
    assert moments == [("begin", "a"), ("end", "a", None), ("begin", "b-2"), ("end", "b-2", None)]
    assert trainer.eval_name is None
    assert logs["b-2/more"] == 2.0
    assert all(type(value) is float for value in logs.values())


# aggregating


class Collects(Task):
    """Gathers what `eval_step` returns, to judge all of it at once."""

    def aggregate_logs(self, state, outputs):
        return [*(state or []), outputs]

    def reduce_aggregated_logs(self, state, step):
        self.state = state
        return {"batches": len(state), "step": step}


class PerSample(Trainer):
    def next_eval_inputs(self, iterator):
        batch = next(iterator)
        return batch, {"host_number": 3, "names": [f"sample {index}" for index in range(len(batch["x"]))], "note": "hi"}

    def eval_step(self, batch):
        return {"x": batch["x"], "class": batch["labels"], "size": torch.tensor(float(len(batch["x"])))}


def test_per_sample_values_reach_the_task_in_order_on_the_host(tmp_path):
    task = Collects()
    logs, trainer = evaluated(tmp_path, PerSample, "evaluation={}", task=task)
    x, y = whole_set(trainer)
    assert torch.equal(torch.cat([batch["x"] for batch in task.state]), x)
    assert torch.equal(torch.cat([batch["class"] for batch in task.state]), y)
    assert [len(batch["names"]) for batch in task.state] == [4] * 8 + [1]
    assert [batch["size"] for batch in task.state] == [4.0] * 8 + [1.0]
    assert {batch["note"] for batch in task.state} == {"hi"}
    assert (logs["valid/batches"], logs["valid/step"]) == (9, 0)


def test_passthrough_numbers_are_averaged_and_objects_stay_out_of_the_logs(tmp_path):
    class Passing(Trainer):
        def next_eval_inputs(self, iterator):
            batch = next(iterator)
            return batch, {"length": len(batch["x"]), "words": ["a", "b"], "object": object()}

    logs, _ = evaluated(tmp_path, Passing)
    # 32 samples in batches of 4 and one alone, each batch weighing its samples.
    assert logs["valid/length"] == pytest.approx((32 * 4 + 1) / 33)
    assert logs.keys() == {"valid/loss", "valid/accuracy", "valid/length"}


# configured metrics


class MinAndMax:
    """A metric that gives several numbers."""

    def reset(self):
        self.values = []

    def update(self, outputs, labels):
        self.values.append(outputs.sum(1))

    def compute(self):
        values = torch.cat(self.values)
        return {"min": values.min(), "max": values.max().item(), "mean": Mean(values.sum(), len(values))}


def test_torchmetrics_and_metrics_of_several_numbers(tmp_path):
    pytest.importorskip("torchmetrics")

    class WithMetrics(Task):
        def build_metrics(self):
            return {"range": MinAndMax()}

    metrics = "{torch: {type: 'torchmetrics.classification:MulticlassAccuracy', num_classes: 2, average: micro}}"
    logs, trainer = evaluated(tmp_path, Trainer, f"evaluation.metrics={metrics}", task=WithMetrics())
    x, y = whole_set(trainer)
    trainer.model.eval()
    logits = trainer.model(x)["logits"].detach()
    assert logs["valid/torch"] == pytest.approx((logits.argmax(1) == y).float().mean().item())
    assert logs["valid/range/min"] == pytest.approx(logits.sum(1).min().item())
    assert logs["valid/range/max"] == pytest.approx(logits.sum(1).max().item())
    assert logs["valid/range/mean"] == pytest.approx(logits.sum(1).mean().item(), abs=1e-6)
    with trainer.storage:
        assert trainer.evaluate() == logs  # reset between two evaluations


def test_outputs_that_forward_does_not_give_are_rejected_at_the_first_step(tmp_path):
    trainer = build_trainer(load(tmp_path, "evaluation.metrics.accuracy.outputs=scores"))
    with raises(ConfigError, "scores", "evaluation.metrics.accuracy.outputs", "eval_step") as caught:
        trainer.train()
    assert "run.yaml:" in str(caught.value) or "override " in str(caught.value)
    assert trainer.step == 0


def test_a_forward_that_gives_a_loss_alone_is_rejected_with_the_metric_s_line(tmp_path):
    class LossOnly(Trainer):
        def forward(self, **batch):
            return self.model(**batch)["loss"], {"seen": 1.0}

    with raises(ConfigError, at="run.yaml"):
        build_trainer(load(tmp_path), LossOnly).train()


def test_an_eval_step_may_give_the_metrics_what_forward_does_not(tmp_path):
    class OwnStep(Trainer):
        def forward(self, **batch):
            return self.model(**batch)["loss"]

        def eval_step(self, batch):
            return {"logits": self.model(**batch)["logits"]}

    build_trainer(load(tmp_path), OwnStep).train()
    assert lines_of(tmp_path)[-1].keys() >= {"valid/accuracy"}
    assert "valid/loss" not in lines_of(tmp_path)[-1]


def test_labels_that_the_batch_lacks_are_rejected_by_name(tmp_path):
    with raises(ConfigError, "target", "accuracy.labels"):
        evaluated(tmp_path, Trainer, "evaluation.metrics.accuracy.labels=target")


# what is disturbed: nothing


class Noisy(Trainer):
    """Draws from every generator in training and evaluation, and has modules in both modes."""

    @classmethod
    def build_model(cls, build):
        model = build.model()
        model.layers.insert(1, nn.BatchNorm1d(8))
        model.layers.insert(2, nn.BatchNorm1d(8).eval())
        return model

    def forward(self, **batch):
        result = self.model(**batch)
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return {**result, "loss": result["loss"] * (1 + 0.1 * noise)}


def test_evaluating_changes_no_weight_and_no_later_loss(tmp_path):
    every = "evaluation={every_steps: 1, metrics: {accuracy: accuracy}}"
    data = "data.eval={valid: {type: parts.py:Points, size: 9, noise: 0.5}}"
    often = build_trainer(load(tmp_path, "name=often", "log.every_steps=1", every, data), Noisy)
    often.train()
    never = build_trainer(load(tmp_path, "name=never", "log.every_steps=1", "evaluation={}", "data.eval={}"), Noisy)
    never.train()
    for name, value in never.model.state_dict().items():
        assert torch.equal(value, often.model.state_dict()[name]), name
    assert [line["loss"] for line in lines_of(tmp_path, "often")] == [
        line["loss"] for line in lines_of(tmp_path, "never")
    ]


def test_each_module_gets_its_own_mode_back(tmp_path):
    trainer = build_trainer(load(tmp_path), Noisy)
    before = {name: module.training for name, module in trainer.model.named_modules()}
    assert set(before.values()) == {True, False}
    with trainer.storage:
        trainer.evaluate()
    assert {name: module.training for name, module in trainer.model.named_modules()} == before


def test_what_a_model_puts_during_an_evaluation_stays_out_of_the_training_line(tmp_path):
    class Putting(Trainer):
        def forward(self, **batch):
            get_event_storage().put_scalar("is_training", float(self.model.training))
            return super().forward(**batch)

    build_trainer(load(tmp_path, "evaluation.every_steps=1"), Putting).train()
    assert [line["is_training"] for line in lines_of(tmp_path) if "loss" in line] == [1.0, 1.0]


def test_evaluating_twice_gives_the_same(tmp_path):
    logs, trainer = evaluated(tmp_path, Noisy)
    with trainer.storage:
        assert trainer.evaluate() == logs


# when it fails


class Fails(Trainer):
    """Fails in the evaluation after step 5, in the midst of its set."""

    fails = True

    def eval_step(self, batch):
        if self.fails and self.step == 5 and len(batch["x"]) == 1:
            raise RuntimeError("out of luck")
        return super().eval_step(batch)


class Counts(Hook):
    def __init__(self):
        self.steps = 0

    def after_step(self):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class FailsOnce(Fails):
    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), Counts()]


class Fixed(FailsOnce):
    fails = False


@pytest.mark.parametrize("hooks", ["hooks=[]", "hooks=[{type: ema, decay: 0.5}]"])
@pytest.mark.parametrize("log_every", [2, 5])
def test_a_failed_evaluation_saves_the_step_and_the_fixed_run_goes_on_as_if_nothing_had_been(
    tmp_path, hooks, log_every
):
    settings = [hooks, f"log.every_steps={log_every}", "trainer.max_steps=8", "checkpoint.every_steps=100"]
    with pytest.raises(RuntimeError, match="out of luck"):
        build_trainer(load(tmp_path, *settings), FailsOnce).train()
    assert (tmp_path / "small" / "checkpoints" / "step-00000005" / "MANIFEST.json").exists()
    resumed = build_trainer(load(tmp_path, *settings), Fixed)
    assert resumed.step == 5
    resumed.train()
    undisturbed = build_trainer(load(tmp_path, *settings, "name=undisturbed"), Fixed)
    undisturbed.train()
    assert lines_of(tmp_path) == lines_of(tmp_path, "undisturbed")
    assert resumed.hooks[-1].steps == undisturbed.hooks[-1].steps == 8
    for name, value in undisturbed.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


class RaisesAfter(Hook):
    def after_eval(self, logs):
        raise ValueError("in a hook")


class RaisesBefore(Hook):
    def before_eval(self):
        raise ValueError("in a hook")


@pytest.mark.parametrize(
    ("raising", "comes_first"), [(RaisesBefore, False), (RaisesAfter, True)], ids=["before_eval", "after_eval"]
)
def test_a_hook_that_fails_leaves_no_averaged_weights_in_the_checkpoint(tmp_path, raising, comes_first):
    class Averaging(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [raising(), *build.hooks()] if comes_first else [*build.hooks(), raising()]

    settings = ["hooks=[{type: ema, decay: 0.5}]", "trainer.schedule=null"]
    trainer = build_trainer(load(tmp_path, *settings), Averaging)
    with pytest.raises(ValueError, match="in a hook"):
        trainer.train()
    plain = build_trainer(load(tmp_path, "trainer.max_steps=5", "trainer.schedule=null", "name=plain"))
    plain.train()
    saved = trainer.context.store.read(5, "model")
    assert all(torch.equal(saved[name], value) for name, value in plain.model.state_dict().items())


def test_modes_and_generators_are_put_back_after_a_failure(tmp_path):
    class FailsDrawing(Noisy):
        def eval_step(self, batch):
            random.random()
            np.random.rand()
            raise RuntimeError("out of luck")

    trainer = build_trainer(load(tmp_path), FailsDrawing)
    modes = [module.training for module in trainer.model.modules()]
    expected = (random.getstate(), np.random.get_state()[1].tolist())
    with trainer.storage, pytest.raises(RuntimeError):
        trainer.evaluate()
    assert [module.training for module in trainer.model.modules()] == modes
    assert (random.getstate(), np.random.get_state()[1].tolist()) == expected
    assert trainer.eval_name is None


# when it is due, and what it decides


def test_periods_of_evaluating_and_logging_need_not_align(tmp_path):
    build_trainer(load(tmp_path, "evaluation.every_steps=2", "log.every_steps=3", "trainer.max_steps=7")).train()
    shown = [(line["step"], "loss" in line, "valid/loss" in line) for line in lines_of(tmp_path)]
    assert shown == [
        (2, False, True),
        (3, True, False),
        (4, False, True),
        (6, True, True),
        (7, True, True),
    ]


def test_an_evaluation_between_two_lines_does_not_close_the_window(tmp_path):
    settings = ["log.every_steps=3", "trainer.max_steps=6"]
    build_trainer(load(tmp_path, *settings, "evaluation.every_steps=2")).train()
    build_trainer(load(tmp_path, *settings, "evaluation={}", "data.eval={}", "name=never")).train()
    windows = [[line["loss"] for line in lines_of(tmp_path, name) if "loss" in line] for name in ("small", "never")]
    assert windows[0] == windows[1]


class TestSet(Hook):
    __test__ = False

    def __init__(self):
        self.sets = []

    def after_eval(self, logs):
        self.sets.append((self.trainer.step, sorted({name.split("/")[0] for name in logs})))


class WithTestSet(Trainer):
    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), TestSet()]


def test_the_test_set_is_evaluated_once_at_the_end(tmp_path):
    trainer = build_trainer(
        load(tmp_path, "data.test={type: parts.py:Points, size: 5}", "evaluation.every_steps=3"), WithTestSet
    )
    logs = trainer.train()
    assert trainer.hooks[-1].sets == [(3, ["valid"]), (6, ["valid"]), (6, ["test"])]
    assert logs.keys() >= {"valid/loss", "test/loss"}
    assert [line["step"] for line in lines_of(tmp_path) if "test/loss" in line] == [6]
    assert lines_of(tmp_path)[-1].keys() >= {"loss", "valid/loss", "test/loss"}


def test_the_test_set_is_evaluated_once_where_a_run_stops_early(tmp_path):
    class Stops(WithTestSet):
        def train_step(self, batch):
            if self.step == 3:
                self.stop("enough")
            return super().train_step(batch)

    trainer = build_trainer(load(tmp_path, "data.test={type: parts.py:Points, size: 5}"), Stops)
    trainer.train()
    assert trainer.hooks[-1].sets == [(4, ["valid"]), (4, ["test"])]


def test_the_test_set_never_chooses(tmp_path):
    with raises(ConfigError):
        load(tmp_path, "data.test={type: parts.py:Points}", "checkpoint.keep_best={metric: test/loss}")


class Scripted(Trainer):
    """Gives one loss after another."""

    losses = (float("nan"), 3.0, 1.0, float("nan"), 2.0, float("-inf"))

    def post_init(self):
        self.saved_steps = []

    def eval_step(self, batch):
        return {"loss": self.losses[self.step - 1]}

    def save(self):
        self.saved_steps.append(self.step)
        return super().save()


def test_nan_is_never_best_and_the_best_is_kept(tmp_path):
    settings = [
        "checkpoint={every_steps: null, keep_last: 1, keep_best: {metric: valid/loss}}",
        "evaluation={every_steps: 1}",
    ]
    trainer = build_trainer(load(tmp_path, *settings), Scripted)
    trainer.train()
    assert trainer.saved_steps == [2, 3, 6]
    assert trainer.context.store.steps() == [3, 6]
    assert trainer.best.step == 3
    resumed = build_trainer(load(tmp_path, *settings))
    assert resumed.best.step == 3


def test_a_best_metric_that_no_evaluation_gives_is_rejected_by_name(tmp_path):
    settings = ["checkpoint.keep_best={metric: valid/los}", "evaluation.every_steps=1"]
    with raises(ConfigError, "checkpoint.keep_best.metric", "valid/loss"):
        build_trainer(load(tmp_path, *settings)).train()


def test_a_script_may_evaluate_a_model_that_puts_scalars(tmp_path):
    class Putting(Trainer):
        def forward(self, **batch):
            get_event_storage().put_scalar("seen", 1.0)
            return super().forward(**batch)

    assert build_trainer(load(tmp_path), Putting).evaluate().keys() == {"valid/loss", "valid/accuracy", "valid/seen"}


def test_a_column_of_per_sample_values_is_averaged_like_a_row(tmp_path):
    class Columns(Trainer):
        def eval_step(self, batch):
            return {"row": batch["x"][:, 0], "column": batch["x"][:, :1]}

    logs = build_trainer(load(tmp_path, "evaluation={batch_size: 8}"), Columns).evaluate()
    assert logs["valid/row"] == pytest.approx(logs["valid/column"])


def test_two_sets_named_test_are_rejected(tmp_path):
    overrides = ["data.eval={test: {type: 'parts.py:Points'}}", "data.test={type: 'parts.py:Points'}"]
    with raises(ConfigError, "data.eval.test", "data.test"):
        build_trainer(load(tmp_path, *overrides))


# when it fails on one rank of two


def failing(place, rank, *, aggregates):
    """A trainer whose evaluation at step 4 fails on one rank, and a hook that does."""

    def strike(here, trainer):
        if here == place and own_rank() == rank and trainer.step == 4:
            raise OSError(f"no {here}")

    class Aggregating(Task):
        def forward(self, model, batch):
            return model(**batch)

        def aggregate_logs(self, state, logs):
            strike("aggregate_logs", self.trainer)
            return (state or 0) + 1

        def reduce_aggregated_logs(self, aggregated, step):
            return {"batches": aggregated}

    class FailsOnARank(Trainer):
        @classmethod
        def build_task(cls, build):
            return Aggregating() if aggregates else build.task()

        def post_init(self):
            self.task.trainer = self

        def eval_begin(self):
            strike("eval_begin", self)

        def next_eval_inputs(self, iterator):
            strike("next_eval_inputs", self)
            return super().next_eval_inputs(iterator)

        def eval_step(self, batch):
            strike("eval_step", self)
            return super().eval_step(batch)

        def eval_end(self, aggregated):
            strike("eval_end", self)
            logs = super().eval_end(aggregated)
            return {**logs, "text": "no number"} if place == "no number" and own_rank() == rank else logs

    class FailingHook(Hook):
        def before_eval(self):
            strike("before_eval", self.trainer)

        def after_eval(self, logs):
            if logs:
                strike("after_eval", self.trainer)

    return {"trainer": FailsOnARank, "hooks": [FailingHook]}


PLACES = ("before_eval", "eval_begin", "next_eval_inputs", "eval_step", "metric", "eval_end", "no number", "after_eval")
STREAM = "data.eval.valid={type: tests.project.parts:PointStream, size: 33, seed: 1}"


KINDS = [(0, True, ()), (1, True, (STREAM,)), (1, False, (STREAM,))]
CASES = [(place, *kind) for place in PLACES for kind in KINDS] + [("aggregate_logs", *kind) for kind in KINDS[:2]]
# Every place once, on this rank or that, and one place in every way.
EVERY_PLACE = [("aggregate_logs", *KINDS[1])] + [(place, *KINDS[number % 3]) for number, place in enumerate(PLACES)]
QUICK = [case for case in CASES if case in EVERY_PLACE or case[0] == "eval_step"]


@pytest.mark.parametrize(
    ("place", "rank", "aggregates", "data"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_an_evaluation_that_fails_anywhere_on_one_rank_fails_on_all_and_the_step_is_saved(
    place, rank, aggregates, data, tmp_path
):
    metric = f"evaluation.metrics={{m: {{type: 'tests.loop.small_runs:FailingMetric', rank: {rank}}}}}"
    settings = ("checkpoint.every_steps=100", *data, *([metric] if place == "metric" else []))
    run = Run(tmp_path / "run", *settings, **failing(place, rank, aggregates=aggregates))
    codes = run.wait(seconds=120)
    said = "could not convert string" if place == "no number" else f"no {place}"
    own = 2 if place == "no number" else 1  # an error that is explained in words
    assert (codes[rank], codes[1 - rank]) == (own, 2), run.said(0)  # its own error there, and a word about it elsewhere
    assert said in run.said(rank)
    assert mentions(run.said(1 - rank), rank)
    assert said in run.said(1 - rank)
    assert store_of(tmp_path / "run").steps() == [4]
    assert store_of(tmp_path / "run").read(4, "training")["has_unfinished_step"]


@pytest.mark.parametrize("place", ["before_eval", "after_eval"])
def test_a_run_whose_evaluation_failed_on_one_rank_goes_on_as_if_it_had_not(place, tmp_path):
    averages = "hooks=[{type: ema, decay: 0.8}]"  # swapped out again before the step is saved
    assert train_two(tmp_path / "whole", averages) == [0, 0]
    assert Run(tmp_path / "run", averages, **failing(place, 1, aggregates=False)).wait(seconds=120) == [2, 1]
    assert train_two(tmp_path / "run", averages) == [0, 0]
    assert_same_end(tmp_path / "whole", tmp_path / "run")
