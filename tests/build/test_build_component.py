"""`build_component`: one object of a config, without a trainer."""

import random
from pathlib import Path

import pytest
import torch
from tests.messages import raises
from tests.project.parts import Net, Points

from trainwright import RunConfig, build_component, build_trainer
from trainwright.errors import ComponentError, ConfigError, TrustError
from trainwright.hooks.throughput import CountProgress
from trainwright.writers.json_lines import JsonLinesWriter

RUN = Path(__file__).parents[1] / "project" / "run.yaml"


def load(*overrides):
    return RunConfig.load(RUN, overrides)


def kind_of(made):
    return type(made).__name__


def test_a_dataset_from_a_config_and_from_a_path():
    for config in (load(), RUN, str(RUN)):
        data = build_component(config, "data.train")
        assert (kind_of(data), len(data)) == ("Points", 50)


def test_evaluation_sets_by_name():
    assert len(build_component(load(), "data.eval.valid")) == 33
    assert len(build_component(load(), "data.eval")) == 33  # the only one
    assert len(build_component(load("data.test={type: parts.py:Points, size: 5}"), "data.test")) == 5
    two = load("data.eval={a: {type: parts.py:Points, size: 3}, b: {type: parts.py:Points, size: 4}}")
    assert len(build_component(two, "data.eval.b")) == 4
    with raises(ConfigError, "data.eval", "data.eval.a", "data.eval.b"):
        build_component(two, "data.eval")


def test_the_parts_of_a_split_are_those_of_the_run(tmp_path):
    config = load("data.eval={}", "data.split=[8, 1, 1]", f"output_dir={tmp_path}", "data.train.noise=0")
    trainer = build_trainer(config)
    for section, own in (("data.train", trainer.train_data), ("data.eval.valid", trainer.eval_data["valid"])):
        made = build_component(config, section)
        assert len(made) == len(own.dataset)
        assert torch.equal(made[0]["x"], own.dataset[0]["x"])
    assert len(build_component(config, "data.test")) == 5


def test_a_dataset_is_processed_as_in_the_run(in_tmp):
    (in_tmp / "datasets").mkdir()
    (in_tmp / "datasets" / "rows.py").write_text(
        "rows = lambda: [{'x': n} for n in range(4)]\n\ndef double(row):\n    return {'x': 2 * row['x']}\n"
    )
    (in_tmp / "run.yaml").write_text("data: {train: {type: rows.rows}, process: {type: rows.double}}\n")
    assert [row["x"] for row in build_component("run.yaml", "data.train")] == [0, 2, 4, 6]


def test_the_model_has_the_weights_with_which_the_run_begins(tmp_path):
    config = load(f"output_dir={tmp_path}")
    model = build_component(config, "model")
    own = build_trainer(config).model
    for name, value in own.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_the_caller_s_generators_are_not_changed():
    before = torch.get_rng_state(), random.getstate()
    build_component(load(), "model")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_an_optimizer_needs_its_model():
    model = build_component(load(), "model")
    optimizer = build_component(load(), "trainer.optimizer", model=model)
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == {
        id(each) for each in model.parameters()
    }
    with raises(ConfigError, "trainer.optimizer", "model=", at="run.yaml:12"):
        build_component(load(), "trainer.optimizer")
    with raises(ConfigError, "model", "data.train"):
        build_component(load(), "data.train", model=model)


def test_one_of_several_optimizers():
    first = "a: {optimizer: {type: sgd, lr: 0.1}, match: '*.weight'}"
    second = "b: {optimizer: {type: adamw, lr: 0.2}, match: '*.bias', schedule: cosine}"
    two = f"trainer={{max_steps: 1, optimizers: {{{first}, {second}}}}}"
    config = load(two)
    optimizer = build_component(config, "trainer.optimizers.b", model=build_component(config, "model"))
    assert [group["lr"] for group in optimizer.param_groups] == [0.2]
    assert build_component(config, "trainer.optimizers.b.schedule")(0, 10) == 1.0


def test_the_other_components():
    config = load("hooks=[{type: count_progress}]", "task={type: 'trainwright:Task'}")
    assert kind_of(build_component(config, "task")) == "Task"
    assert build_component(config, "data.collator")([{"x": torch.ones(2)}])["x"].shape == (1, 2)
    assert callable(build_component(config, "trainer.schedule"))
    assert isinstance(build_component(config, "hooks.0"), CountProgress)
    assert isinstance(build_component(config, "writers.0"), JsonLinesWriter)
    metric = build_component(config, "evaluation.metrics.accuracy")
    metric.reset()
    metric.update(torch.eye(2), torch.tensor([0, 1]))
    assert float(metric.compute().value) == 1.0


@pytest.mark.parametrize("section", ["trainer", "data.trian", "data.test", "nothing", "model.width", "hooks.0"])
def test_what_is_no_component_is_rejected_with_the_known_ones(section):
    with raises(ConfigError, section, "data.train"):
        build_component(load(), section)


def test_errors_of_a_component_are_those_of_the_run():
    with raises(ComponentError, "data.train.type", "Pionts", at="Pionts}"):
        build_component(load("data.train={type: parts.py:Pionts}"), "data.train")


def test_imports_are_imported_first(in_tmp):
    (in_tmp / "more.py").write_text(
        "from trainwright import register\n\n@register('dataset', 'numbers')\ndef numbers():\n    return [1, 2]\n"
    )
    (in_tmp / "run.yaml").write_text("imports: [more]\ndata: {train: {type: numbers}}\n")
    assert build_component("run.yaml", "data.train") == [1, 2]


def test_the_code_of_an_untrusted_run_folder_is_not_imported(tmp_path):
    config = load(f"output_dir={tmp_path}", "trainer.max_steps=1")
    build_trainer(config).train()
    path = tmp_path / "small" / "config.yaml"
    assert len(build_component(path, "data.train")) == 50  # signed by this user
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "signature" not in line))
    with raises(TrustError, "data.train.type", golden=False):
        build_component(path, "data.train")
    assert build_component(path, "data.collator") is not None  # built in
    assert len(build_component(RunConfig.load(path, trust=True), "data.train")) == 50


def test_the_classes_are_those_of_the_project():
    assert kind_of(build_component(load(), "model")) == Net.__name__
    assert kind_of(build_component(load(), "data.train")) == Points.__name__


@pytest.mark.parametrize(
    ("section", "value", "argument"),
    [
        ("data.train", "{type: parts.py:Points, size: 5, source: {type: digits}}", "source"),
        (
            "data.sampler",
            "{type: 'torch.utils.data:RandomSampler', sampler: {type: weighted, weights: [1]}}",
            "sampler",
        ),
    ],
)
def test_a_nested_component_that_its_owner_does_not_accept_is_rejected(section, value, argument):
    config = load("data.train={type: parts.py:Points, size: 1}", f"{section}={value}")
    with raises(ComponentError, section, argument):
        build_component(config, section)
