"""What Model Garden's users were promised works here, and what broke there does not: one test a promise."""

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.api.folders import on_two_ranks
from tests.faults.runs import config_of, store_of, train
from tests.loop.small_runs import AnomalyRecorder, CountEvaluations, make
from tests.loop.small_runs import run as run_small
from tests.messages import raises

from trainwright import Hook, RunConfig, Task, Trainer, build_trainer, experiment, run_experiment
from trainwright.api import experiments
from trainwright.api.experiments import load_experiment
from trainwright.errors import AnomalyError, ConfigError, TrainwrightError
from trainwright.hooks.ema import EMA

PROJECT = Path(__file__).parents[1] / "project"
NO_METRICS = "evaluation.metrics={}"


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=6", *overrides])


def lines_of(tmp_path, name="small"):
    return [json.loads(line) for line in (tmp_path / name / "metrics.json").read_text().splitlines()]


class Orbit(Trainer):
    """A trainer as Orbit's users write it: a constructor of its own, and every override point used."""

    def __init__(self, config, task, model, optimizer, train_dataset, validation_dataset=None, **rest):
        self.calls = []
        super().__init__(config, task, model, optimizer, train_dataset, validation_dataset, **rest)
        self.scale = 2.0

    def next_train_inputs(self, iterator):
        self.calls.append("next_train_inputs")
        batch = next(iterator)
        return {**batch, "x": self.scale * batch["x"]}

    def train_step(self, batch):
        self.calls.append("train_step")
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            update.backward(self.model(**micro_batch)["loss"])
        result = update.apply()
        result.metrics["largest"] = batch["x"].abs().max()
        return result

    def next_eval_inputs(self, iterator):
        batch = next(iterator)
        return batch, {"number": float(len(batch["labels"])), "names": ["on", "the", "host"]}

    def eval_begin(self):
        self.calls.append(f"eval_begin {self.eval_name}")

    def eval_step(self, batch):
        outputs = self.model(**batch)
        return {"loss": outputs["loss"], "right": (outputs["logits"].argmax(-1) == batch["labels"]).float()}

    def eval_end(self, aggregated):
        return {**super().eval_end(aggregated), "doubled": 2 * self.eval_averages["loss"]}

    def train_loop_end(self):
        logs = super().train_loop_end()
        return {**logs, "learning_rate": logs["lr"], "window": self.global_step}


class Names(Task):
    """A task that keeps what came through, and reduces it at the end."""

    def aggregate_logs(self, state, outputs):
        return [*(state or []), (outputs["right"], outputs["names"])]

    def reduce_aggregated_logs(self, state, step):
        right = torch.cat([each for each, _ in state])
        return {"samples": float(len(right)), "words": float(sum(len(names) for _, names in state)), "at": float(step)}


# promises


def test_every_override_point_of_an_orbit_trainer_is_called_with_its_meaning(tmp_path):
    config = load(tmp_path, NO_METRICS, "log.every_steps=2")
    trainer = build_trainer(config, Orbit)
    _, logs = run_experiment(config, trainer=trainer)
    assert trainer.calls[:2] == ["next_train_inputs", "train_step"]
    assert trainer.calls.count("train_step") == trainer.global_step == 6
    assert trainer.calls.count("eval_begin valid") == 2
    lines = [line for line in lines_of(tmp_path) if "loss" in line]
    assert [line["window"] for line in lines] == [2, 4, 6]
    assert all(line["learning_rate"] == line["lr"] and line["largest"] > 0 for line in lines)
    assert logs["valid/doubled"] == pytest.approx(2 * logs["valid/loss"])


class Whole(Trainer):
    """A trainer whose constructor has Model Garden's arguments, and passes them on by position."""

    def __init__(self, config, task, model, optimizer, train_dataset, validation_dataset, **rest):
        self.given = [config, task, model, optimizer, train_dataset, validation_dataset]
        super().__init__(*self.given, **rest)


def test_the_whole_constructor_is_called_and_the_best_checkpoint_is_kept_by_a_setting(tmp_path):
    best = "checkpoint.keep_best={metric: valid/loss, mode: max}"
    config = load(tmp_path, best, "checkpoint.keep_last=1", "checkpoint.every_steps=1", "evaluation.every_steps=1")
    trainer = build_trainer(config, Whole)
    own = [trainer.config, trainer.task, trainer.model, trainer.optimizers, trainer.train_data, trainer.eval_data]
    assert trainer.given == own
    trainer.train()
    assert trainer.best.step == 1
    assert store_of(tmp_path / "small").steps() == [1, 6]


def test_passthrough_logs_stay_on_the_host_and_join_the_step_s_logs(tmp_path):
    _, logs = run_experiment(load(tmp_path, NO_METRICS), trainer=Orbit, task=Names())
    # Batches of 4 and one of 1 make 33: a number is averaged over samples, other objects reach the task alone.
    assert logs["valid/number"] == pytest.approx((8 * 4 * 4 + 1) / 33)
    assert logs["valid/words"] == 3 * 9


def test_eval_end_adds_what_the_task_reduces(tmp_path):
    _, logs = run_experiment(load(tmp_path, NO_METRICS), trainer=Orbit, task=Names())
    assert (logs["valid/samples"], logs["valid/at"]) == (33, 6)
    assert logs["valid/doubled"] == pytest.approx(2 * logs["valid/loss"])


def test_next_train_inputs_may_take_several_batches_for_one_step(tmp_path):
    class Two(Trainer):
        def next_train_inputs(self, iterator):
            first, second = next(iterator), next(iterator)
            return {name: torch.cat([first[name], second[name]]) for name in first}

        def train_step(self, batch):
            assert len(batch["x"]) == 16
            update = self.begin_update()
            update.backward(self.run_forward(batch))
            return update.apply()

    trainer = build_trainer(load(tmp_path), Two)
    trainer.train()
    assert trainer.train_data.order_position == 6 * 16


def test_a_driver_builds_params_from_an_experiment_files_and_overrides(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "_registered", {})

    @experiment("garden")
    def garden():
        return load(tmp_path, "name=garden")

    (tmp_path / "a.yaml").write_text("trainer: {max_steps: 4}\n")
    config = load_experiment("garden", config_files=[tmp_path / "a.yaml"], overrides=["seed=3"])
    config.save(tmp_path / "params.yaml")
    assert RunConfig.load(tmp_path / "params.yaml") == config
    model, logs = run_experiment(config, mode="train_and_eval", model_dir=tmp_path / "here")
    assert isinstance(model, torch.nn.Module)
    assert lines_of(tmp_path, "here")[-1]["step"] == 4
    assert logs["valid/loss"] == lines_of(tmp_path, "here")[-1]["valid/loss"]


class Precise(Trainer):
    """Notes in which precision it computes, and how many of its parameters a rank has."""

    def forward(self, **batch):
        outputs = self.model(**batch)
        self.dtype = str(outputs["logits"].dtype)
        return outputs

    def after(self):
        kept = [getattr(each, "to_local", lambda each=each: each)() for each in self.model.parameters()]
        return {"dtype": self.dtype, "share": sum(each.numel() for each in kept)}


def test_a_driver_chooses_mixed_precision_and_distribution(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "_registered", {})
    experiment("garden")(lambda: load(tmp_path, "name=garden", "model.dropout=0.0", "data.train.noise=0.0"))

    def drive(precision, strategy, name):
        chosen = [f"runtime.precision={precision}", f"runtime.mesh={{{strategy}: -1}}"]
        trainer = build_trainer(load_experiment("garden", overrides=[*chosen, f"name={name}"]), Precise)
        _, logs = run_experiment(trainer.config, trainer=trainer)
        return {**trainer.after(), "loss": logs["valid/loss"]}

    def act(rank):
        told = [drive("bf16", "fsdp", "two"), drive("fp32", "replicate", "copies")]
        (tmp_path / f"told-{rank}").write_text(json.dumps(told))

    on_two_ranks(tmp_path, act)
    plain = drive("fp32", "fsdp", "one")
    ranks = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(2)]
    for mixed, copies in ranks:
        assert (mixed["dtype"], copies["dtype"], plain["dtype"]) == ("torch.bfloat16", "torch.float32", "torch.float32")
        assert mixed["loss"] != plain["loss"] == pytest.approx(mixed["loss"], rel=0.05)
        assert copies["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert copies["share"] == plain["share"]
    assert sum(mixed["share"] for mixed, _ in ranks) == plain["share"]


def test_each_mode_that_evaluates_returns_the_logs_of_one_evaluation(tmp_path):
    evaluations = []

    class Counts(Trainer):
        def eval_begin(self):
            evaluations.append(self.step)

    def run(mode, **options):
        evaluations.clear()
        return run_experiment(load(tmp_path, "evaluation.every_steps=3"), mode=mode, trainer=Counts, **options)[1]

    expected = {
        "train": ([], False),
        "continuous_eval": ([4, 6], True),
        "eval": ([6], True),
        "train_and_eval": ([6], True),
    }
    found = {mode: (run(mode), list(evaluations)) for mode in expected}
    assert {mode: (steps, bool(logs)) for mode, (logs, steps) in found.items()} == expected
    assert found["eval"][0] == found["continuous_eval"][0] == found["train_and_eval"][0]
    assert run("train_and_eval", fresh=True) == found["eval"][0]
    assert evaluations == [3, 6]
    assert run("train_and_post_eval", fresh=True) == found["eval"][0]
    assert evaluations == [6]


@pytest.mark.parametrize(("mode", "pick"), [("min", min), ("max", max)])
def test_the_best_checkpoint_is_kept_by_a_metric_higher_or_lower(tmp_path, mode, pick):
    best = f"checkpoint.keep_best={{metric: valid/loss, mode: {mode}}}"
    periods = ("evaluation.every_steps=1", "log.every_steps=1", "checkpoint.every_steps=100", "checkpoint.keep_last=1")
    run_experiment(load(tmp_path, best, *periods))
    losses = {line["step"]: line["valid/loss"] for line in lines_of(tmp_path)}
    _, logs = run_experiment(load(tmp_path, best), mode="eval", step="best")
    assert logs["valid/loss"] == pick(losses.values())


def test_a_run_rolls_back_from_a_nan_loss_up_to_n_times(tmp_path):
    recorder = AnomalyRecorder()
    back = ("anomalies={non_finite: rollback, max_anomalies: 2}", "checkpoint.every_steps=2", "data.train.size=400")
    trainer = run_small(tmp_path / "two", *back, bad=(16, 32), hooks=[recorder])
    assert len(recorder.anomalies) == 2
    assert trainer.step == 6
    assert all(bool(each.isfinite().all()) for each in trainer.model.parameters())
    with pytest.raises(AnomalyError):
        run_small(tmp_path / "three", *back, bad=(16, 32, 40))


def test_an_exploding_loss_is_rolled_back_too(tmp_path):
    recorder = AnomalyRecorder()
    back = "anomalies={spike: rollback, spike_window: 8, spike_threshold: 100}"
    settings = (back, "trainer.max_steps=12", "checkpoint.every_steps=2", "data.train.size=400", "model.dropout=0.0")
    trainer = run_small(tmp_path / "run", *settings, bad=(72,), times={72: 1e6}, hooks=[recorder])
    assert [kind for _, kind in recorder.anomalies] == ["spike"]
    assert trainer.step == 12


def test_averaged_weights_are_swapped_in_for_evaluation_and_the_swap_loses_no_bit(tmp_path):
    seen = []

    class Watching(Trainer):
        def eval_begin(self):
            seen.append({name: each.detach().clone() for name, each in self.model.named_parameters()})

    hooks = "hooks=[{type: ema, decay: 0.9}]"
    trainer = build_trainer(load(tmp_path, hooks), Watching)
    trainer.train()
    plain = build_trainer(load(tmp_path, "name=plain"))
    plain.train()
    assert all(map(torch.equal, trainer.model.parameters(), plain.model.parameters()))
    assert not any(map(torch.equal, seen[-1].values(), trainer.model.parameters()))


def test_averaged_weights_begin_at_the_weights_and_not_at_zero(tmp_path):
    config = load(tmp_path, "hooks=[{type: ema, decay: 0.999}]", "trainer.max_steps=1")
    begun = [each.detach().clone() for each in build_trainer(config).model.parameters()]
    trainer = build_trainer(config)
    trainer.train()
    averages = next(hook for hook in trainer.hooks if isinstance(hook, EMA)).state_dict()
    found = list(_tensors(averages))
    for start, now in zip(begun, trainer.model.parameters(), strict=True):
        low, high = torch.minimum(start, now), torch.maximum(start, now)
        near = [each for each in found if each.shape == start.shape]
        assert any(bool(((each >= low - 1e-6) & (each <= high + 1e-6)).all()) for each in near)


def _tensors(nest):
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from _tensors(value)


def test_actions_run_before_the_save_so_that_a_bad_state_is_never_saved(tmp_path):
    class Rejects(Hook):
        def after_step(self):
            if self.trainer.step == 4:
                raise ValueError("a bad state")

    with pytest.raises(ValueError, match="a bad state"):
        run_small(tmp_path / "run", "checkpoint.every_steps=2", hooks=[Rejects()])
    assert store_of(tmp_path / "run").steps() == [2]


def test_a_preempted_run_saves_its_step_and_resumes_to_the_same_end(tmp_path):
    class Preempted(Trainer):
        def train_step(self, batch):
            if self.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
            return super().train_step(batch)

    assert train(tmp_path / "run", "checkpoint.every_steps=100", trainer=Preempted) == 128 + signal.SIGTERM
    assert store_of(tmp_path / "run").steps() == [3]
    _, logs = run_experiment(config_of(tmp_path / "run", "checkpoint.every_steps=100"))
    assert logs == run_experiment(config_of(tmp_path / "whole", "checkpoint.every_steps=100"))[1]


# what broke there


def test_eval_mode_returns_real_logs(tmp_path):
    run_experiment(load(tmp_path))
    _, logs = run_experiment(load(tmp_path), mode="eval")
    assert logs["valid/loss"] == lines_of(tmp_path)[-1]["valid/loss"]


def test_the_lock_is_deep(tmp_path):
    config = load(tmp_path)
    for change in (
        lambda: setattr(config, "seed", 1),
        lambda: setattr(config.trainer, "max_steps", 1),
        lambda: setattr(config.trainer.optimizer, "lr", 1),
        lambda: config.data.eval["valid"].__setitem__("size", 1),
    ):
        with pytest.raises((AttributeError, TypeError, ValueError)):
            change()
    assert config == load(tmp_path)


@pytest.mark.parametrize("wrong", ["trainer.max_steps=many", "seed=1.5", "trainer.max_grad_norm=yes", "log=3"])
def test_a_value_of_the_wrong_type_is_rejected_with_its_location(tmp_path, wrong):
    with raises(ConfigError, wrong):
        load(tmp_path, wrong)


def test_scientific_notation_is_a_number(tmp_path):
    (tmp_path / "run.yaml").write_text("trainer: {max_steps: 1.5e3, optimizer: {type: adamw, lr: 1e-4}}\n")
    config = RunConfig.load(tmp_path / "run.yaml")
    assert (config.trainer.max_steps, config.trainer.optimizer.lr) == (1500, 1e-4)


def test_a_checkpoint_holds_the_data_and_the_random_state(tmp_path):
    # The project's samples draw from three generators and its model from a fourth: only an exact resume agrees.
    run_experiment(load(tmp_path, "trainer.schedule=null", "name=halves", "trainer.max_steps=3"))
    for name in ("halves", "whole"):
        run_experiment(load(tmp_path, "trainer.schedule=null", f"name={name}"))
    halves, whole = (store_of(tmp_path / name).read(6, "model") for name in ("halves", "whole"))
    assert all(torch.equal(halves[name], whole[name]) for name in whole)


def test_a_nan_loss_is_noticed_in_its_own_step(tmp_path):
    with raises(AnomalyError, "3"):
        run_small(tmp_path / "run", "log.every_steps=1000", bad=(16,))


def test_finite_data_neither_crashes_nor_loops(tmp_path):
    stream = "data.train={type: parts.py:PointStream, size: 20}"
    once = load(tmp_path, stream, "trainer.max_steps=50", "trainer.max_epochs=1", "data.shuffle=false")
    trainer = build_trainer(once)
    run_experiment(once, trainer=trainer)
    assert trainer.step == 3  # batches of 8, 8 and 4
    assert "valid/loss" in lines_of(tmp_path)[-1]
    again = build_trainer(load(tmp_path, "name=again", stream, "data.shuffle=false", "trainer.max_epochs=3"))
    again.train()
    assert (again.step, again.epoch) == (6, 1)  # two passes of 8, 8 and 4


def test_a_nan_first_metric_is_beaten_as_best(tmp_path):
    class NanFirst(Trainer):
        def eval_end(self, aggregated):
            logs = super().eval_end(aggregated)
            return {**logs, "loss": float("nan")} if self.step == 2 else logs

    best = "checkpoint.keep_best={metric: valid/loss, mode: min}"
    trainer = build_trainer(load(tmp_path, best, "evaluation.every_steps=2"), NanFirst)
    trainer.train()
    assert trainer.best.step in (4, 6)
    assert math.isfinite(trainer.best.value)


def test_gradients_are_accumulated_exactly(tmp_path):
    plain = ("model.dropout=0.0", "data.train.noise=0.0")
    _, whole = run_experiment(load(tmp_path, *plain, "trainer.micro_batch_size=8"))
    _, pieces = run_experiment(load(tmp_path, *plain, "name=pieces", "trainer.micro_batch_size=2"))
    assert pieces["valid/loss"] == pytest.approx(whole["valid/loss"], rel=1e-5)


def test_a_run_stops_early(tmp_path):
    hook = "hooks=[{type: early_stopping, metric: valid/loss, patience: 2, mode: max}]"
    counts = CountEvaluations()

    class WithCount(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), counts]

    settings = (hook, "evaluation.every_steps=1", "trainer.max_steps=50", "model.dropout=0.0", "trainer.schedule=null")
    trainer = build_trainer(load(tmp_path, *settings), WithCount)
    trainer.train()
    assert trainer.step == counts.count < 50


# bad input


def test_a_trainer_that_forgets_its_super_constructor_names_the_user_s_line(tmp_path):
    class Forgets(Trainer):
        def __init__(self, config, task, model, optimizer, train_dataset, **rest):
            self.steps_per_loop = 3

    code = Forgets.__init__.__code__
    with pytest.raises(TrainwrightError) as rejected:
        run_experiment(load(tmp_path), trainer=Forgets)
    assert str(rejected.value).startswith(f"{code.co_filename}:{code.co_firstlineno}: Forgets.__init__")


def test_join_and_global_step_are_there(tmp_path):
    trainer = make(tmp_path / "run")
    trainer.train()
    trainer.join()
    assert trainer.global_step == trainer.step == 6
    with pytest.raises(AttributeError):
        trainer.global_step = 3


# several ranks


def test_the_modes_agree_on_two_ranks_with_one(tmp_path):
    def act(rank):
        places = ("checkpoint.every_steps=2", "checkpoint.keep_last=null", "evaluation.every_steps=2")
        config = load(tmp_path, "name=two", *places)
        _, posted = run_experiment(config, mode="train_and_post_eval", task=Task())
        _, logs = run_experiment(config, mode="continuous_eval", timeout_seconds=60)
        assert posted == logs == run_experiment(config, mode="eval")[1]
        (tmp_path / f"logs-{rank}").write_text(json.dumps(logs))

    on_two_ranks(tmp_path, act)
    first, second = (json.loads((tmp_path / f"logs-{rank}").read_text()) for rank in range(2))
    assert first == second
    results = [json.loads(line) for line in (tmp_path / "two" / "evaluations.json").read_text().splitlines()]
    assert [line["step"] for line in results] == [2, 4, 6]
    _, alone = run_experiment(load(tmp_path, "name=two"), mode="eval")
    assert alone == pytest.approx(first, rel=1e-6)
