"""From a config to a trainer: the order of parts, the limits, and what is rejected."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.messages import raises

from trainwright import Hook, RunConfig, Task, Trainer, build_trainer
from trainwright.build.run import build_evaluator, build_model
from trainwright.data.loader import TrainData
from trainwright.errors import CheckpointError, ConfigError, DataError, TrainwrightError

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=2", *overrides])


def lines_of(tmp_path, name="small"):
    return [json.loads(line) for line in (tmp_path / name / "metrics.json").read_text().splitlines()]


# the whole


def test_the_resolved_config_is_saved_and_loads_back_equal(tmp_path):
    config = load(tmp_path, "trainer.max_steps=null", "trainer.max_epochs=2", "trainer.micro_batch_size=null")
    trainer = build_trainer(config)
    saved = RunConfig.load(tmp_path / "small" / "config.yaml")
    assert saved == trainer.config
    assert saved.project_dir == PROJECT
    # 100 samples in batches of 8, of which the last has 4.
    assert (saved.trainer.max_steps, saved.trainer.micro_batch_size) == (13, 8)
    assert config.trainer.max_steps is None
    assert build_trainer(saved).config == saved


def test_objects_are_built_in_order(tmp_path):
    order = []

    class Ordered(Trainer):
        def post_init(self):
            order.append("post_init")

    def noting(name):
        inherited = getattr(Trainer, name).__func__

        def build(cls, *arguments):
            order.append(name)
            return inherited(cls, *arguments)

        return classmethod(build)

    names = ["build_task", "build_model", "build_collator", "build_train_data", "build_eval_data"]
    names += ["build_optimizers", "build_hooks", "build_writers"]
    for name in names:
        setattr(Ordered, name, noting(name))
    build_trainer(load(tmp_path), Ordered)
    assert order == [*names, "post_init"]


def test_two_builds_start_with_equal_weights(tmp_path):
    first = build_trainer(load(tmp_path, "name=a"))
    torch.manual_seed(1234)
    random.random(), np.random.rand()
    second = build_trainer(load(tmp_path, "name=b"))
    other_seed = build_trainer(load(tmp_path, "name=c", "seed=8"))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert not torch.equal(first.model.layers[0].weight, other_seed.model.layers[0].weight)


def test_random_numbers_of_the_model_change_no_later_object(tmp_path):
    class Drawing(Trainer):
        @classmethod
        def build_model(cls, build):
            torch.rand(3), random.random(), np.random.rand()
            return build.model()

        @classmethod
        def build_hooks(cls, build):
            numbers.append((float(torch.rand(1)), random.random(), np.random.rand()))
            return build.hooks()

    class Plain(Drawing):
        @classmethod
        def build_model(cls, build):
            return build.model()

    numbers = []
    build_trainer(load(tmp_path, "name=a"), Drawing)
    build_trainer(load(tmp_path, "name=b"), Plain)
    assert numbers[0] == numbers[1]


def test_build_model_has_the_weights_of_the_run_and_does_not_change_the_generators(tmp_path):
    config = load(tmp_path)
    expected = build_trainer(config).model.state_dict()
    states = torch.get_rng_state(), random.getstate()
    weights = build_model(config).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_a_trainer_class_may_be_given_or_named(tmp_path):
    (tmp_path / "trainers").mkdir()
    (tmp_path / "parts.py").write_text((PROJECT / "parts.py").read_text())
    (tmp_path / "trainers" / "mine.py").write_text(
        "from trainwright import Trainer\n\n\nclass MyTrainer(Trainer):\n    is_mine = True\n"
    )
    text = (PROJECT / "run.yaml").read_text().replace("trainer:\n", "trainer:\n  type: mine.MyTrainer\n  warmth: 3\n")
    (tmp_path / "run.yaml").write_text(text)
    trainer = build_trainer(RunConfig.load(tmp_path / "run.yaml", [f"output_dir={tmp_path}"]))
    assert trainer.is_mine
    assert trainer.config.trainer.warmth == 3


def test_a_trainer_type_that_is_not_a_trainer_is_rejected(tmp_path):
    with raises(ConfigError, "override trainer.type=", "parts.py"):
        build_trainer(load(tmp_path, "trainer.type=parts.py:Net"))


def test_a_trainer_constructed_by_hand_is_rejected_with_build_trainer(tmp_path):
    with raises(TrainwrightError, "build_trainer"):
        Trainer(load(tmp_path), Task(), torch.nn.Linear(1, 1), None)


def test_a_user_s_constructor_passes_the_rest_on(tmp_path):
    class Mine(Trainer):
        def __init__(self, config, task, model, optimizer, train_dataset=None, validation_dataset=None, **rest):
            super().__init__(config, task, model, optimizer, train_dataset, validation_dataset, **rest)
            self.seen = (list(optimizer), type(train_dataset), list(validation_dataset))

    trainer = build_trainer(load(tmp_path), Mine)
    assert trainer.seen == (["main"], TrainData, ["valid"])
    trainer.train()


def test_an_evaluator_has_no_training_data_and_writes_no_file(tmp_path):
    trainer = build_evaluator(load(tmp_path))
    with trainer.storage:
        logs = trainer.evaluate()
    assert set(logs) == {"valid/loss", "valid/accuracy"}
    assert list(tmp_path.iterdir()) == []
    with raises(ConfigError):
        trainer.train()


def test_build_model_builds_the_model_of_the_run(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.py").write_text(
        "import torch\nfrom trainwright import Task\n\n\n"
        "class MyTask(Task):\n    def build_model(self):\n        return torch.nn.Linear(3, 5)\n"
    )
    config = RunConfig.from_dict({"task": "mine.MyTask", "output_dir": str(tmp_path)}, project_dir=tmp_path)
    assert build_model(config).weight.shape == (5, 3)


# what cannot be is rejected by name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("runtime.precision=fp16", "runtime.mode=graph"), ("runtime.mode", "graph", "fp16")),
        (("runtime.max_graph_breaks=0",), ("runtime.max_graph_breaks", "runtime.mode", "eager")),
    ],
)
def test_an_impossible_mode_is_rejected_by_name(tmp_path, settings, said):
    with raises(ConfigError, *said, settings[-1]):
        build_trainer(load(tmp_path, *settings))
    assert list(tmp_path.iterdir()) == []


def test_more_ranks_in_the_mesh_than_processes_are_rejected(tmp_path):
    with raises(ConfigError, "runtime.mesh", "2", "1"):
        build_trainer(load(tmp_path, "runtime.mesh={fsdp: 2}"))


def test_an_unknown_device_is_rejected_by_name(tmp_path):
    with raises(ConfigError, "gpu", "runtime.device"):
        build_trainer(load(tmp_path, "runtime.device=gpu"))


# limits


def seen_by(trainer):
    """Trains and returns the number of samples of each step."""
    sizes = []
    original = trainer.train_step

    def train_step(batch):
        sizes.append(len(batch["labels"]))
        return original(batch)

    trainer.train_step = train_step
    trainer.train()
    return sizes


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        (["trainer.max_epochs=1"], [8] * 6 + [2]),
        (["trainer.max_epochs=0.5"], [8, 8, 8, 1]),
        (["trainer.max_samples=20"], [8, 8, 4]),
        (["trainer.max_samples=24"], [8, 8, 8]),
        (["trainer.max_steps=2", "trainer.max_epochs=1", "trainer.max_samples=20"], [8, 8]),
        (["trainer.max_steps=9", "trainer.max_epochs=1", "trainer.max_samples=20"], [8, 8, 4]),
    ],
)
def test_the_first_limit_that_is_reached_ends_the_run_exactly_there(tmp_path, limits, sizes):
    trainer = build_trainer(load(tmp_path, "trainer.max_steps=null", *limits))
    assert trainer.max_steps == len(sizes)
    assert seen_by(trainer) == sizes
    assert trainer.step == len(sizes)
    assert lines_of(tmp_path)[-1]["step"] == len(sizes)


def test_an_epoch_sees_each_sample_once(tmp_path):
    seen = []

    class Noting(Trainer):
        def train_step(self, batch):
            seen.extend(batch["x"].sum(1).tolist())
            return super().train_step(batch)

    overrides = ["trainer.max_steps=null", "trainer.max_epochs=2", "data.train.noise=0"]
    trainer = build_trainer(load(tmp_path, *overrides), Noting)
    trainer.train()
    each = sorted(trainer.train_data.dataset.x.sum(1).tolist())
    assert sorted(seen[:50]) == pytest.approx(each)
    assert sorted(seen[50:]) == pytest.approx(each)
    assert seen[:50] != seen[50:]


def test_max_tokens_counts_tokens_per_sample(tmp_path):
    overrides = ["trainer.max_steps=null", "trainer.max_tokens=100", "data.train.noise=0"]

    class Tokens(Trainer):
        @classmethod
        def build_train_data(cls, build):
            data = build.train_data()
            data.tokens_per_sample = 5
            return data

    trainer = build_trainer(load(tmp_path, *overrides), Tokens)
    assert (trainer.max_steps, trainer.train_data.num_samples) == (3, 20)
    with raises(ConfigError, "override trainer.max_tokens=", "100", "tokens_per_sample"):
        build_trainer(load(tmp_path, *overrides))


def test_a_run_without_a_limit_is_rejected(tmp_path):
    with raises(ConfigError, "max_steps", "max_epochs", at="run.yaml"):
        build_trainer(load(tmp_path, "trainer.max_steps=null"))


def test_a_run_with_a_short_last_batch_continues_after_it(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=null", "trainer.max_epochs=1")).train()
    trainer = build_trainer(load(tmp_path, "trainer.max_steps=null", "trainer.max_epochs=2"))
    assert (trainer.step, trainer.train_data.samples_seen) == (7, 50)
    trainer.train()
    assert trainer.train_data.samples_seen == 100


# batches


def test_a_batch_that_contradicts_itself_is_rejected_before_the_model_is_built(tmp_path):
    class Unbuilt(Trainer):
        @classmethod
        def build_model(cls, build):
            raise AssertionError("built")

    with raises(ConfigError, "8", "micro_batch_size", "3", "1"):
        build_trainer(load(tmp_path, "trainer.micro_batch_size=3"), Unbuilt)


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_the_micro_batch_size_changes_no_loss(tmp_path, micro):
    overrides = ["model.dropout=0", "log.every_steps=1"]
    build_trainer(load(tmp_path, *overrides, "name=four")).train()
    build_trainer(load(tmp_path, *overrides, f"trainer.micro_batch_size={micro}", "name=other")).train()
    for ours, theirs in zip(lines_of(tmp_path, "four"), lines_of(tmp_path, "other"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


# data


def test_a_split_has_three_disjoint_sets_that_cover_all(tmp_path):
    trainer = build_trainer(load(tmp_path, "data.eval={}", "data.split=[80, 10, 10]", "data.train.noise=0"))
    sets = [trainer.train_data, trainer.eval_data["valid"], trainer.context.test_data]
    assert [len(each) for each in sets] == [40, 5, 5]
    rows = [tuple(each.dataset[index]["x"].tolist()) for each in sets for index in range(len(each))]
    assert len(set(rows)) == 50


def test_more_splits_than_names_are_rejected(tmp_path):
    with raises(ConfigError, "data.split", "3", "4"):
        build_trainer(load(tmp_path, "data.eval={}", "data.split=[1, 1, 1, 1]"))


def test_without_evaluation_sets_nothing_is_evaluated(tmp_path):
    assert build_trainer(load(tmp_path, "data.eval={}")).train() == {}
    assert not any("/" in key for line in lines_of(tmp_path) for key in line)


def test_sets_without_a_period_are_evaluated_once_at_the_end(tmp_path):
    evaluations = []

    class Counting(Hook):
        def after_eval(self, logs):
            evaluations.append(self.trainer.step)

    class WithHook(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Counting()]

    build_trainer(load(tmp_path, "evaluation={}", "trainer.max_steps=4"), WithHook).train()
    assert evaluations == [4]


def test_an_empty_dataset_is_rejected_by_name(tmp_path):
    with raises(TrainwrightError, "data.train"):
        build_trainer(load(tmp_path, "data.train.size=0"))


# the run folder


def test_a_run_folder_has_the_documented_files(tmp_path):
    from trainwright import run_experiment

    run_experiment(load(tmp_path))
    names = {path.name for path in (tmp_path / "small").iterdir()}
    written = {"log.txt", "metrics.json", "system.json", "checkpoints", "report.html"}
    assert names == {"config.yaml", "environment.json", "model.json", ".lock", *written}
    assert "Finished at step 2." in (tmp_path / "small" / "log.txt").read_text()


def test_output_dir_is_relative_to_the_current_folder(in_tmp):
    config = RunConfig.load(PROJECT / "run.yaml", ["trainer.max_steps=1"])
    build_trainer(config).train()
    assert (in_tmp / "runs" / "small" / "metrics.json").exists()


def test_each_logged_value_is_a_finite_number(tmp_path):
    build_trainer(load(tmp_path)).train()
    values = [value for line in lines_of(tmp_path) for value in line.values()]
    assert values
    assert all(math.isfinite(value) for value in values)


def test_data_that_has_changed_since_the_checkpoint_is_rejected_unless_accepted(tmp_path):
    trainer = build_trainer(load(tmp_path, "trainer.max_steps=4"))
    trainer.train()

    class Larger(Trainer):
        @classmethod
        def build_train_data(cls, build):
            return [*build.train_data(), *build.train_data()]

    with raises(DataError, "data.train", "100", "50"):
        build_trainer(load(tmp_path), Larger)
    assert build_trainer(load(tmp_path), Larger, accept_changes=True).step == 4


def test_a_data_loader_is_rejected_by_name(tmp_path):
    class Loader(Trainer):
        @classmethod
        def build_train_data(cls, build):
            return torch.utils.data.DataLoader(build.train_data(), batch_size=4)

    with raises(DataError, "data.train", "DataLoader"):
        build_trainer(load(tmp_path), Loader)


def test_grouping_by_length_is_rejected_if_it_has_no_effect(tmp_path):
    for train in ("{type: parts.py:PointStream}", "{type: mix, sources: {a: {type: parts.py:Points}}}"):
        with raises(ConfigError, "data.group_by_length", "data.train"):
            build_trainer(load(tmp_path, f"data.train={train}", "data.group_by_length=true"))


def test_a_stream_needs_a_limit_and_whole_epochs(tmp_path):
    stream = "data.train={type: parts.py:PointStream}"
    with raises(ConfigError, "max_steps"):
        build_trainer(load(tmp_path, stream, "trainer.max_steps=null", "trainer.max_epochs=2"))
    with raises(ConfigError, "trainer.max_epochs", "1.5", "data.train"):
        build_trainer(load(tmp_path, stream, "trainer.max_epochs=1.5"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("torch.optim:Adam", torch.optim.Adam), ("torch.optim:RMSprop", torch.optim.RMSprop), ("own.py:Slow", "Slow")],
)
def test_a_run_trains_with_an_optimizer_of_torch_or_of_a_user(tmp_path, name, expected):
    for file in PROJECT.glob("*.*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "own.py").write_text("import torch\n\n\nclass Slow(torch.optim.SGD):\n    pass\n")
    overrides = [
        f"output_dir={tmp_path / 'runs'}",
        "trainer.max_steps=2",
        f"trainer.optimizer={{type: '{name}', lr: 0.1}}",
    ]
    trainer = build_trainer(RunConfig.load(tmp_path / "run.yaml", overrides))
    [optimizer] = trainer.optimizers.values()
    assert type(optimizer) is expected or type(optimizer).__name__ == expected
    before = [one.detach().clone() for one in trainer.model.parameters()]
    trainer.train()
    assert not any(map(torch.equal, before, trainer.model.parameters()))
    resumed = build_trainer(RunConfig.load(tmp_path / "run.yaml", [*overrides, "trainer.max_steps=4"]))
    assert resumed.step == 2
    resumed.train()


def test_runs_that_share_a_checkpoint_folder_are_separate(tmp_path):
    shared = (f"checkpoint.folder={tmp_path}/shared", f"output_dir={tmp_path}", "trainer.max_steps=3")
    for seed in (1, 2):
        run = RunConfig.load(PROJECT / "run.yaml", [*shared, f"name=run{seed}", f"seed={seed}"])
        trainer = build_trainer(run)
        assert trainer.step == 0
        trainer.train()
        assert build_trainer(run).step == 3
    assert build_trainer(run, fresh=True).step == 0
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["run1", "run2", "run2.old"]


def test_checkpoints_without_known_settings_are_rejected(tmp_path):
    shared = [f"checkpoint.folder={tmp_path}/shared", "trainer.max_steps=3"]
    build_trainer(RunConfig.load(PROJECT / "run.yaml", [*shared, f"output_dir={tmp_path}/one"])).train()
    other = RunConfig.load(PROJECT / "run.yaml", [*shared, f"output_dir={tmp_path}/two"])
    with raises(CheckpointError):
        build_trainer(other)
    assert build_trainer(other, accept_changes=True).step == 3


def test_a_checkpoint_folder_that_cannot_be_written_is_rejected_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    run = RunConfig.load(PROJECT / "run.yaml", [f"checkpoint.folder={tmp_path}/file", f"output_dir={tmp_path}"])
    with raises(ConfigError, "checkpoint.folder"):
        build_trainer(run)


def test_a_warmup_that_is_longer_than_the_run_is_a_warning(tmp_path, caplog):
    for steps, is_warned in ((6, True), (5, False)):
        caplog.clear()
        schedule = f"trainer.schedule={{type: cosine, warmup_steps: {steps}}}"
        build_trainer(load(tmp_path / str(steps), "trainer.max_steps=6", schedule))
        found = [each.getMessage() for each in caplog.records if "warmup_steps" in each.getMessage()]
        assert bool(found) is is_warned
