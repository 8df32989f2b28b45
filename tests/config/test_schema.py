import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.config import Component, RunConfig
from trainwright.config.interpolation import escape_plain
from trainwright.config.problems import Problem, describe, nearest, raise_all, suggest
from trainwright.config.yaml_text import Origin
from trainwright.errors import ConfigError

EXAMPLE = """\
name: digits-vit
seed: 7
imports: [my_pkg.parts]
task: {type: tasks/mine.py:MyTask}
model: {type: models/net.py:Net, width: 64, freeze: "embed.*"}
data:
  train: {type: digits, part: train}
  eval: {valid: {type: digits, part: valid}}
  test: {type: digits, part: test}
  loader: {prefetch_factor: 4}
trainer:
  type: trainers/mine.py:MyTrainer
  max_steps: 1e3
  my_option: {deep: [1, {deeper: 2}]}
  optimizer: {type: adamw, lr: 1e-3}
  schedule:
    type: cosine
    warmup_steps: 20
evaluation: {every_steps: 100, metrics: {accuracy: {type: accuracy, outputs: logits, labels: labels}}}
checkpoint: {every_steps: null, keep_best: {metric: valid/loss}}
hooks: [{type: hooks/info.py:InfoHook}]
runtime: {precision: bf16, mesh: {fsdp: -1}}
"""


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(EXAMPLE)
    return RunConfig.load("run.yaml")


def test_settings_read_as_attributes(example):
    assert example.trainer.max_steps == 1000
    assert isinstance(example.trainer.max_steps, int)
    assert example.trainer.optimizer.lr == 1e-3
    assert example.trainer.my_option.deep[1].deeper == 2
    assert example.trainer.options == {"my_option": {"deep": [1, {"deeper": 2}]}}
    assert example.data.eval.valid.part == "valid"
    assert example.model.reserved == {"freeze": "embed.*"}
    assert example.checkpoint.every_steps is None
    assert [writer.type for writer in example.writers] == ["console", "json"]


def test_origins_are_lines_of_the_file(example):
    assert str(example.origin("trainer.optimizer.lr")) == "run.yaml:15"
    assert str(example.origin("trainer.schedule")) == "run.yaml:16"
    assert str(example.origin("trainer.schedule.warmup_steps")) == "run.yaml:18"
    assert str(example.origin("trainer.global_batch_size")) == "run.yaml:11"
    assert str(example.origin("log.every_steps")) == "run.yaml:1"
    assert str(example.trainer.schedule.origin) == "run.yaml:17"  # where its type stands
    assert str(example.hooks[0].origin) == "run.yaml:21"


def test_an_override_is_its_own_origin(tmp_path, example):
    config = RunConfig.load("run.yaml", ["trainer.max_steps=5", "writers.0.width=80", "hooks.0.steps=5"])
    assert str(config.origin("trainer.max_steps")) == "override trainer.max_steps=5"
    assert config.writers == (Component("console", width=80), Component("json"))
    assert config.hooks[0].steps == 5


@pytest.mark.parametrize(
    "change",
    [
        "c.seed = 1",
        "del c.seed",
        "c.trainer.max_steps = 1",
        "c.trainer.my_option = 1",
        "c.trainer.another = 1",
        "c.trainer.my_option['deep'] = 1",
        "c.trainer.optimizer.lr = 1",
        "c.trainer.optimizer['lr'] = 1",
        "c.model.width = 1",
        "c.data.eval['more'] = 1",
        "c.data.eval.valid.part = 1",
        "c.hooks[0] = 1",
        "c.runtime.mesh.fsdp = 1",
        "c.project_dir = 1",
    ],
)
def test_nothing_can_be_changed(example, change):
    before = copy.deepcopy(example)
    with pytest.raises((TypeError, AttributeError, ValueError)):
        exec(change, {"c": example})
    assert example == before


def test_saved_and_loaded_again_it_is_equal_and_remembers_its_project(tmp_path, example):
    example.save(tmp_path / "runs" / "digits" / "config.yaml")
    again = RunConfig.load(tmp_path / "runs" / "digits" / "config.yaml")
    assert again == example
    assert again.project_dir == example.project_dir == tmp_path
    assert again.name == "digits-vit"


def test_pickled_it_keeps_settings_origins_and_project(example):
    again = pickle.loads(pickle.dumps(example))
    assert again == example
    assert again.origin("trainer.max_steps") == example.origin("trainer.max_steps")
    assert again.project_dir == example.project_dir
    assert again.hooks[0].origin == example.hooks[0].origin


def test_equality_compares_settings_only(example):
    assert RunConfig.from_dict(example.to_dict(), project_dir="elsewhere") == example
    assert RunConfig.from_dict({"seed": 1}) != RunConfig.from_dict({"seed": 2})


def test_derive_changes_some_values_and_keeps_origins(example):
    derived = example.derive({"trainer.max_steps": 100, "hooks": [Component("every", steps=2)], "data.test": None})
    assert (derived.trainer.max_steps, derived.hooks[0].steps, derived.data.test) == (100, 2, None)
    assert example.trainer.max_steps == 1000
    assert derived.origin("trainer.schedule.warmup_steps") == example.origin("trainer.schedule.warmup_steps")
    assert derived.project_dir == example.project_dir
    with raises(ConfigError, "trainer.max_steps", "0", "1", at="run.yaml:13"):
        example.derive({"trainer.max_steps": -1})


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(
        "trainer:\n  max_step: 3\n  max_samples: '5'\nhooks: console\nsed: 1\nname: 3\nlog: {every_steps: 1.5}\n"
    )
    with pytest.raises(ConfigError) as rejection:
        RunConfig.load("bad.yaml")
    lines = str(rejection.value).splitlines()
    assert lines[0].startswith(
        'bad.yaml:2: trainer.max_step: there is no such setting. Did you mean "max_steps"? Known: '
    )
    assert lines[1] == 'bad.yaml:3: trainer.max_samples: must be a whole number, got the text "5". Remove the quotes.'
    assert lines[2] == 'bad.yaml:4: hooks: must be a list, got the text "console". Write [console].'
    assert lines[3].startswith(
        'bad.yaml:5: sed: there is no such setting. Did you mean "seed"? Known: name, output_dir,'
    )
    assert lines[4] == "bad.yaml:6: name: must be text, got 3. Put it in quotes to make it text."
    assert lines[5] == "bad.yaml:7: log.every_steps: must be a whole number, got 1.5."
    assert len(lines) == 6
    assert str(rejection.value.where) == "bad.yaml:2"


def test_a_wrong_override_is_rejected_under_the_same_checks(example):
    with pytest.raises(ConfigError) as rejection:
        RunConfig.load("run.yaml", ["log.every_step=5"])
    assert str(rejection.value) == (
        'override log.every_step=5: log.every_step: there is no such setting. Did you mean "every_steps"? '
        "Known: every_steps, every_epochs."
    )


def test_a_job_that_could_not_resume_is_not_requeued(example):
    saved = "checkpoint.contents=weights"
    with pytest.raises(ConfigError) as rejection:
        RunConfig.load("run.yaml", [saved, "preemption.requeue=true"])
    assert rejection.value.where.file == "override preemption.requeue=true"
    assert "preemption.requeue" in str(rejection.value)
    assert RunConfig.load("run.yaml", [saved]).checkpoint.contents == "weights"


def test_an_override_may_empty_the_evaluation_sets(example):
    assert RunConfig.load("run.yaml", ["data.eval={}", "checkpoint.keep_best=null"]).data.eval == {}


def test_a_dict_without_a_file_has_no_origins(tmp_path):
    with pytest.raises(ConfigError) as rejection:
        RunConfig.from_dict({"seed": "x"})
    assert str(rejection.value) == 'seed: must be a whole number, got the text "x".'
    assert RunConfig.from_dict({}).origin("seed") is None
    assert RunConfig.from_dict({}, project_dir=tmp_path).project_dir == tmp_path


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"task": Component("x", f=print)}, "task.f: a builtin_function_or_method cannot be saved as YAML"),
        ({"model": {"type": "x", "names": {1: "a"}}}, "model.names: a key must be text, got 1. Use '1'."),
        ([1], "A config must be a mapping"),
    ],
)
def test_what_yaml_cannot_hold_is_rejected_by_name(value, message):
    with pytest.raises(ConfigError) as rejection:
        RunConfig.from_dict(value)
    assert str(rejection.value).startswith(message)


def test_paths_become_text():
    assert RunConfig.from_dict({"task": Component("x", root=Path("a/b"))}).task.root == "a/b"


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "/tmp/x", "../x", ".", "..", "./x", "x/.", "x/", "x//y", "x/../y", "x\\y", " x", "x/ y"),
        *("x\x1b[31m", "x\ny", "x\u202ey", "x" * 300, "é" * 130),
    ],
)
def test_a_name_that_leaves_the_output_folder_is_rejected(name):
    with raises(ConfigError):
        RunConfig.from_dict({"name": name})


def test_empty_sections_mean_their_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text("data:\ntrainer:\nevaluation:\ncheckpoint:\nlog:\nruntime:\n")
    assert RunConfig.load(tmp_path / "run.yaml") == RunConfig.from_dict({"name": "run"})


def test_every_field_has_a_docstring():
    assert all(field.description for field in RunConfig.model_fields.values())


def test_importing_the_config_imports_no_torch():
    code = "import sys, trainwright.config, trainwright.registry.resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


names = st.from_regex(r"[a-z][a-z0-9_-]{0,6}", fullmatch=True).filter(lambda name: name not in ("train", "type"))
texts = st.text(max_size=6) | st.text("${}:.a", max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
arguments = st.dictionaries(
    st.text(min_size=1, max_size=6).filter(lambda key: key != "type" and not key.startswith("~")),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2)),
    max_size=3,
)
components = st.builds(lambda name, rest: {"type": name, **rest}, st.text(min_size=1), arguments)
counts = st.none() | st.integers(1, 10**12)
options = st.dictionaries(st.from_regex(r"my_[0-9]{3}_[xyz]{1,9}", fullmatch=True), scalars | arguments, max_size=2)
whole_configs = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text("abc on0.", min_size=1, max_size=5).filter(
            lambda name: name == name.strip(" ") and name.strip(".")
        ),
        "seed": st.integers(0, 2**64),
        "task": components,
        "model": components,
        "hooks": st.lists(components | st.text(min_size=1), max_size=2),
        "writers": st.lists(components, max_size=2),
        "data": st.fixed_dictionaries(
            {},
            optional={
                "train": components,
                "eval": st.dictionaries(names, components, max_size=2),
                "collator": components,
            },
        ),
        "trainer": st.builds(
            lambda known, more: {"type": "mine.py:T", **known, **more},
            st.fixed_dictionaries(
                {}, optional={"max_steps": counts, "optimizer": components, "micro_batch_size": counts}
            ),
            options,
        ),
        "checkpoint": st.fixed_dictionaries({}, optional={"every_steps": counts, "keep_last": counts}),
    },
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(whole_configs)
def test_every_config_is_equal_after_save_and_load(tmp_path, plain):
    config = RunConfig.from_dict(escape_plain(plain))
    assert config == RunConfig.from_dict({"name": config.name}).derive(plain)
    config.save(tmp_path / "saved.yaml")
    assert RunConfig.load(tmp_path / "saved.yaml") == config
    assert config.derive({}) == config == pickle.loads(pickle.dumps(config))


# messages


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null (nothing)"),
        (True, "true"),
        (1.5, "1.5"),
        ("é", 'the text "é"'),
        ({}, "an empty mapping"),
        ({"a": 1, "b": 2}, "a mapping with a, b"),
        ([1, 2], "a list of 2"),
        ((), "an empty list"),
    ],
)
def test_values_are_described_as_in_yaml(value, words):
    assert describe(value) == words


def test_long_text_is_cut():
    assert len(describe("x" * 1000)) < 80


def test_the_nearest_word_ignores_case_and_hyphens():
    assert nearest("Max-Steps", ["max_epochs", "max_steps"]) == "max_steps"
    assert nearest("zebra", ["max_steps"]) is None
    assert suggest("zebra", ["max_steps"]) == "Known: max_steps."


def test_problems_are_raised_together_in_the_order_of_the_file():
    lines = {("b",): Origin("run.yaml", 10), ("a",): Origin("run.yaml", 9)}
    with pytest.raises(ConfigError) as rejection:
        raise_all([Problem(("b",), "is wrong."), Problem(("a",), "is too.")], lines.get)
    assert str(rejection.value) == "run.yaml:9: a: is too.\nrun.yaml:10: b: is wrong."
    assert rejection.value.where == Origin("run.yaml", 9)


def test_without_a_problem_nothing_is_raised():
    assert raise_all([], lambda path: None) is None
