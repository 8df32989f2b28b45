"""Each part from its section; who wins, and that a section which loses is rejected by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.messages import mentions, raises

from trainwright import RunConfig, Task, Trainer, Writer, build_trainer
from trainwright.build.components import Build, describe_dtypes
from trainwright.errors import ConfigError
from trainwright.hooks.preemption import ObeyPreemption
from trainwright.hooks.throughput import TimeSteps

PROJECT = Path(__file__).parents[1] / "project"


def line_of(text):
    """The number of the first line of run.yaml that begins with a text."""
    lines = (PROJECT / "run.yaml").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=2", *overrides])


def points(size=10):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 4, generator=generator)
    return [{"x": row, "labels": (row.sum() > 0).long()} for row in x]


def net():
    model = torch.nn.Linear(4, 2)
    model.forward = None  # never called: these tests only build
    return model


# a Trainer's own build methods


class OwnModel(Trainer):
    @classmethod
    def build_model(cls, build):
        return net()


class OwnOptimizer(Trainer):
    @classmethod
    def build_optimizers(cls, build, model):
        return torch.optim.SGD(model.parameters(), lr=0.5)


class OwnTrainData(Trainer):
    @classmethod
    def build_train_data(cls, build):
        return points()


class OwnEvalData(Trainer):
    @classmethod
    def build_eval_data(cls, build):
        return {"mine": points()}


class OwnCollator(Trainer):
    @classmethod
    def build_collator(cls, build):
        return torch.utils.data.default_collate


class OwnHooks(Trainer):
    @classmethod
    def build_hooks(cls, build):
        return []


class OwnWriters(Trainer):
    @classmethod
    def build_writers(cls, build):
        return [Writer()]


class OwnTask(Trainer):
    @classmethod
    def build_task(cls, build):
        return Task()


@pytest.mark.parametrize(
    ("trainer_class", "overrides", "line", "section", "offer"),
    [
        (OwnModel, [], "model:", "model", "model()"),
        (OwnOptimizer, [], "optimizer:", "trainer.optimizer", "optimizers(model)"),
        (OwnTrainData, [], "train:", "data.train", "train_data()"),
        (OwnEvalData, [], "eval:", "data.eval", "eval_data()"),
        (OwnCollator, ["data.collator={type: parts.py:Net}"], None, "data.collator", "collator()"),
        (OwnHooks, ["hooks=[time_steps]"], None, "hooks", "hooks()"),
        (OwnWriters, [], "writers:", "writers", "writers()"),
        (OwnTask, ["task=task"], None, "task", "task()"),
    ],
)
def test_a_section_that_a_trainer_does_not_use_is_rejected_with_its_line(
    tmp_path, trainer_class, overrides, line, section, offer
):
    with pytest.raises(ConfigError) as caught:
        build_trainer(load(tmp_path, *overrides), trainer_class)
    message = str(caught.value)
    where = f"project/run.yaml:{line_of(line)}" if line else f"override {overrides[0]}"
    assert mentions(message, where, section)
    assert f"build.{offer}" in message
    assert list(tmp_path.iterdir()) == []


def test_optimizers_that_a_trainer_does_not_use_are_rejected_by_name(tmp_path):
    overrides = ["trainer.optimizer=null", "trainer.schedule=null", "trainer.optimizers={a: {optimizer: sgd}}"]
    with raises(ConfigError, "trainer.optimizers"):
        build_trainer(load(tmp_path, *overrides), OwnOptimizer)


def test_a_split_that_nothing_uses_is_rejected(tmp_path):
    class Own(OwnTrainData, OwnEvalData):
        pass

    overrides = ["data.train=null", "data.eval={}", "data.split=[9, 1]", "data.test={type: parts.py:Points}"]
    with raises(ConfigError, "data.split"):
        build_trainer(load(tmp_path, *overrides), Own)


def test_a_trainer_that_builds_on_the_section_keeps_it(tmp_path):
    class Wrapping(Trainer):
        @classmethod
        def build_model(cls, build):
            model = build.model()
            model.is_wrapped = True
            return model

        @classmethod
        def build_optimizers(cls, build, model):
            return build.optimizers(model)["main"]

        @classmethod
        def build_hooks(cls, build):
            return build.hooks()[:1]

    trainer = build_trainer(load(tmp_path), Wrapping)
    assert trainer.model.is_wrapped
    assert list(trainer.optimizers) == ["main"]
    assert [type(hook) for hook in trainer.hooks] == [TimeSteps]


def test_a_trainer_s_own_objects_are_used_without_the_section(tmp_path):
    trainer = build_trainer(load(tmp_path, "trainer.optimizer=null"), OwnOptimizer)
    assert isinstance(trainer.optimizers["main"], torch.optim.SGD)
    trainer.train()
    trainer = build_trainer(load(tmp_path, "name=b", "data.eval={}"), OwnEvalData)
    assert trainer.train().keys() == {"mine/loss", "mine/accuracy"}


# a Task's own build methods


class Builds(Task):
    def build_model(self):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        model.criterion = torch.nn.CrossEntropyLoss()
        return model

    def build_dataset(self, split):
        return {"train": points(20), "valid": points(5), "test": None}[split]

    def forward(self, model, batch):
        return {"logits": model(batch["x"])}


class WithTask(Trainer):
    @classmethod
    def build_task(cls, build):
        return Builds()


def test_a_task_s_model_and_data_replace_sections(tmp_path):
    trainer = build_trainer(load(tmp_path, "model=null", "data.train=null", "data.eval={}"), WithTask)
    assert isinstance(trainer.model, torch.nn.Linear)
    assert (len(trainer.train_data), len(trainer.eval_data["valid"])) == (20, 5)
    assert trainer.context.test_data is None
    assert trainer.train().keys() == {"valid/loss", "valid/accuracy"}


@pytest.mark.parametrize(
    ("overrides", "rejected"),
    [
        ([], f"run.yaml:{line_of('model:')}: model"),
        (["model=null"], f"run.yaml:{line_of('train:')}: data.train"),
        (["model=null", "data.train=null"], f"run.yaml:{line_of('eval:')}: data.eval"),
        (["model=null", "data.train=null", "data.eval={}", "data.test=parts.py:Points"], "data.test"),
        (["model=null", "data.train=null", "data.eval={}", "data.split=[9, 1]"], "data.split"),
    ],
)
def test_sections_that_a_task_does_not_use_are_rejected(tmp_path, overrides, rejected):
    with raises(ConfigError, rejected):
        build_trainer(load(tmp_path, *overrides), WithTask)


def test_a_trainer_s_model_replaces_a_task_s(tmp_path):
    class Both(WithTask):
        @classmethod
        def build_model(cls, build):
            model = build.model()
            return torch.nn.Sequential(model)

    trainer = build_trainer(load(tmp_path, "model=null", "data.train=null", "data.eval={}"), Both)
    assert isinstance(trainer.model[0], torch.nn.Linear)


def test_a_task_is_found_by_its_section(tmp_path):
    trainer = build_trainer(load(tmp_path, "task=task"))
    assert type(trainer.task) is Task


# the model


def test_a_missing_model_is_rejected(tmp_path):
    with raises(ConfigError):
        build_trainer(load(tmp_path, "model=null"))


def test_a_wrong_argument_is_rejected_with_its_location_and_the_closest_match(tmp_path):
    with raises(ConfigError, "override model.widht=", "width", "3"):
        build_trainer(load(tmp_path, "model.widht=3"))


def test_the_error_for_a_frozen_model_names_the_setting(tmp_path):
    with raises(ConfigError, "override model.freeze="):
        build_trainer(load(tmp_path, 'model.freeze=["*"]'))


@pytest.mark.parametrize(
    ("dtypes", "said", "is_warned"),
    [
        ([torch.float32, torch.float32], "", False),
        ([torch.bfloat16, torch.float32], " in bfloat16 and float32", False),
        ([torch.float16, torch.float16], " in float16", True),
    ],
)
def test_dtypes_other_than_float32_are_named_and_trained_float16_is_warned_of(caplog, dtypes, said, is_warned):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, dtype=dtype) for dtype in dtypes))
    assert describe_dtypes(model) == said
    assert ("Trained weights are float16" in caplog.text) == is_warned
    caplog.clear()
    assert describe_dtypes(model.requires_grad_(False)) == said
    assert not caplog.text


def test_frozen_parameters_do_not_move_and_have_no_optimizer_state(tmp_path):
    trainer = build_trainer(load(tmp_path, "model.freeze=['layers.0.*']"))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    moved = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"layers.3.weight", "layers.3.bias"}
    assert len(trainer.optimizers["main"].param_groups[0]["params"]) == 2


def test_freeze_accepts_a_single_glob(tmp_path):
    trainer = build_trainer(load(tmp_path, "model.freeze=layers.0.bias"))
    assert [name for name, each in trainer.model.named_parameters() if not each.requires_grad] == ["layers.0.bias"]


def test_a_glob_that_freezes_nothing_is_rejected(tmp_path):
    with raises(ConfigError, "override model.freeze=", "head.*"):
        build_trainer(load(tmp_path, "model.freeze=['head.*']"))


def test_a_model_that_is_frozen_whole_is_rejected(tmp_path):
    with raises(ConfigError):
        build_trainer(load(tmp_path, "model.freeze=['*']"))


# optimizers


def several(**globs):
    entries = ", ".join(f"{name}: {{optimizer: {{type: sgd, lr: 0.1}}, match: {glob}}}" for name, glob in globs.items())
    return ["trainer.optimizer=null", "trainer.schedule=null", f"trainer.optimizers={{{entries}}}"]


def test_each_parameter_is_assigned_to_the_optimizer_that_matches_it(tmp_path):
    trainer = build_trainer(load(tmp_path, *several(body="'layers.0.*'", head="['layers.3.w*', 'layers.3.b*']")))
    names = {id(each): name for name, each in trainer.model.named_parameters()}
    owned = {
        name: sorted(names[id(each)] for each in optimizer.param_groups[0]["params"])
        for name, optimizer in trainer.optimizers.items()
    }
    assert owned == {
        "body": ["layers.0.bias", "layers.0.weight"],
        "head": ["layers.3.bias", "layers.3.weight"],
    }
    trainer.train()
    assert trainer.storage.latest().keys() >= {"lr/body", "lr/head"}


@pytest.mark.parametrize(
    ("globs", "problem"),
    [
        ({"body": "'layers.0.*'"}, ("layers.3.weight",)),
        ({"all": "'*'", "head": "'layers.3.*'"}, ("layers.3.weight",)),
        ({"all": "'*'", "none": "'head.*'"}, ("optimizers.none.match",)),
    ],
    ids=["unowned", "owned twice", "empty"],
)
def test_parameters_need_one_owner_each(tmp_path, globs, problem):
    with raises(ConfigError, *problem, "override trainer.optimizers="):
        build_trainer(load(tmp_path, *several(**globs)))


def test_a_frozen_parameter_needs_no_owner(tmp_path):
    trainer = build_trainer(load(tmp_path, "model.freeze=['layers.3.*']", *several(body="'layers.0.*'")))
    assert list(trainer.optimizers) == ["body"]


def test_a_run_without_an_optimizer_is_rejected(tmp_path):
    with raises(ConfigError, line_of("trainer:"), "trainer.optimizer", at="run.yaml"):
        build_trainer(load(tmp_path, "trainer.optimizer=null"))


# hooks, writers, metrics, imports


def test_the_default_hooks_come_first(tmp_path):
    hooks = build_trainer(load(tmp_path, "hooks=[{type: early_stopping, metric: valid/loss}, time_steps]")).hooks
    assert [type(hook).__name__ for hook in hooks] == [
        "TimeSteps",
        "ObeyPreemption",
        "Watchdog",
        "EarlyStopping",
        "TimeSteps",
    ]
    assert isinstance(hooks[1], ObeyPreemption)


def test_a_hook_from_a_file_next_to_the_config_is_called(tmp_path):
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "info.py").write_text(
        "from trainwright import Hook\n\n\nclass InfoHook(Hook):\n"
        "    def __init__(self, word):\n        self.words = []\n        self.word = word\n\n"
        "    def after_step(self):\n        self.words.append(f'{self.word} {self.trainer.step}')\n\n\n"
        "def note(trainer):\n    trainer.noted = trainer.step\n"
    )
    (tmp_path / "parts.py").write_text((PROJECT / "parts.py").read_text())
    text = (PROJECT / "run.yaml").read_text()
    hooks = "hooks: [{type: info.InfoHook, word: step}, {type: every, steps: 2, call: hooks/info.py:note}]\n"
    (tmp_path / "run.yaml").write_text(text + "\n" + hooks)
    overrides = [f"output_dir={tmp_path}", "trainer.max_steps=3"]
    trainer = build_trainer(RunConfig.load(tmp_path / "run.yaml", overrides))
    trainer.train()
    assert trainer.hooks[3].words == ["step 1", "step 2", "step 3"]
    assert trainer.noted == 2


def test_a_hook_that_does_not_inherit_works(tmp_path):
    class Duck:
        def __init__(self):
            self.steps = 0

        def after_step(self):
            self.steps += 1

    class WithDuck(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Duck()]

    trainer = build_trainer(load(tmp_path), WithDuck)
    trainer.train()
    assert trainer.hooks[-1].steps == 2


def test_a_wrong_hook_argument_is_rejected_with_its_location(tmp_path):
    with raises(ConfigError, "override hooks=", "metrics", "hooks.0", "EarlyStopping"):
        build_trainer(load(tmp_path, "hooks=[{type: early_stopping, metrics: valid/loss}]"))


def test_a_wrong_metric_argument_is_rejected_with_its_override(tmp_path):
    override = "evaluation.metrics.accuracy.top=5"
    with raises(ConfigError, "metrics.accuracy") as rejected:
        build_trainer(load(tmp_path, override))
    assert str(rejected.value).startswith(f"override {override}: ")


def test_imported_modules_register_components(tmp_path):
    (tmp_path / "more_parts.py").write_text(
        "import torch\nfrom trainwright import register\n\n\n"
        "@register('optimizer', 'parts_test_sgd')\nclass Mine(torch.optim.SGD):\n    pass\n"
    )
    (tmp_path / "parts.py").write_text((PROJECT / "parts.py").read_text())
    text = (PROJECT / "run.yaml").read_text().replace("type: adamw", "type: parts_test_sgd")
    (tmp_path / "run.yaml").write_text("imports: [more_parts]\n" + text)
    trainer = build_trainer(RunConfig.load(tmp_path / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=1"]))
    assert type(trainer.optimizers["main"]).__name__ == "Mine"
    trainer.train()


def test_a_missing_import_is_rejected_with_its_location(tmp_path):
    with raises(ConfigError, "override imports=", "nowhere_at_all"):
        build_trainer(load(tmp_path, "imports=[nowhere_at_all]"))


# data


def documents_of(packed):
    return set(packed.source.indices_in_whole(range(len(packed.source))))


def test_packed_data_is_split_by_document_not_by_row(tmp_path):
    packed = "data.train={type: pack, length: 16, source: {type: parts.py:Documents}}"
    build = Build(load(tmp_path, packed, "data.eval={}", "data.split={valid: 30, test: 10}"))
    train, valid, test = build.train_data(), build.eval_data()["valid"], build.test_data()
    assert [len(each.source) for each in (train, valid, test)] == [80, 30, 10]
    assert documents_of(train) | documents_of(valid) | documents_of(test) == set(range(120))


def test_a_stream_and_a_mixture_cannot_be_split(tmp_path):
    for train in ("{type: parts.py:PointStream}", "{type: mix, sources: {a: {type: parts.py:Points}}}"):
        build = Build(load(tmp_path, f"data.train={train}", "data.eval={}", "data.split=[9, 1]"))
        with raises(ConfigError, "data.split", "data.train"):
            build.train_data()


def test_a_split_without_samples_is_left_out(tmp_path, caplog):
    build = Build(load(tmp_path, "data.train.size=9", "data.eval={}", "data.split=[98, 1, 1]"))
    assert len(build.train_data()) == 9
    assert build.eval_data() == {}
    assert build.test_data() is None
    assert "9 samples are too few for a set valid" in caplog.text


def test_a_split_that_leaves_no_training_data_is_rejected(tmp_path):
    build = Build(load(tmp_path, "data.eval={}", "data.split={valid: 40, test: 10}"))
    with raises(ConfigError, "40", "10", "50"):
        build.train_data()
    with raises(ConfigError, "data.split"):
        load(tmp_path, "data.split={}")


def test_weights_of_an_evaluation_set_are_rejected(tmp_path):
    valid = "data.eval={valid: {type: mix, sources: {a: {type: parts.py:Points, weight: 1}}}}"
    with raises(ConfigError, "data.eval.valid"):
        Build(load(tmp_path, valid)).eval_data()


def test_process_is_rejected_if_a_trainer_builds_the_data(tmp_path):
    with raises(ConfigError, "data.process"):
        build_trainer(load(tmp_path, "data.train=null", "data.eval={}", "data.process={type: x.y}"), OwnTrainData)
