"""`trainwright config`: origins, the schema, and the differences of two runs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import RunConfig
from trainwright.cli import app
from trainwright.commands.config import schema_of_runs
from trainwright.config.component import ModelSection
from trainwright.config.yaml_text import parse
from trainwright.errors import ConfigError, TrainwrightError

ROOT = Path(__file__).parents[2]
BASE = "seed: 3\nwriters: [json]\nmodel: llama\n"
RUN = """\
extends: base.yaml
trainer:
  max_steps: 12
  optimizer:
    type: adamw
    lr: 1e-3
data:
  eval:
    type: digits
    part: valid
hooks:
  - time_steps
  - type: early_stopping
    metric: eval/loss
log:
"""


@pytest.fixture
def project(in_tmp):
    (in_tmp / "base.yaml").write_text(BASE)
    (in_tmp / "run.yaml").write_text(RUN)
    return in_tmp


def ask(*arguments):
    return CliRunner().invoke(app, ["config", *map(str, arguments)])


def origins(*arguments):
    """What is printed: the text of a setting's line → its origin."""
    lines = [line.rpartition("  # ") for line in ask(*arguments).stdout.splitlines()]
    return {text.strip(): origin for text, mark, origin in lines if mark}


# origins


def test_each_value_has_the_line_where_it_was_written(project):
    found = origins("run.yaml")
    assert found["max_steps: 12"] == "run.yaml:3"
    assert found["lr: 0.001"] == "run.yaml:6"
    assert found["seed: 3"] == "base.yaml:1"
    assert found["part: valid"] == "run.yaml:10"
    assert found["metric: eval/loss"] == "run.yaml:14"


def test_a_bare_component_has_the_line_of_its_type(project):
    found = origins("run.yaml")
    assert found["- type: json"] == "base.yaml:2"
    assert found["type: llama"] == "base.yaml:3"
    assert found["- type: time_steps"] == "run.yaml:12"


def test_a_setting_that_is_not_in_a_file_is_a_default(project):
    found = origins("run.yaml")
    assert found["type: trainer"] == "default"
    assert found["max_epochs: null"] == "default"
    assert found["every_steps: 10"] == "default"  # of `log:`, which is there and empty
    assert found["type: stack"] == "default"
    assert found["name: run"] == "default"


def test_an_override_is_named(project):
    found = origins("run.yaml", "trainer.max_steps=5", "trainer.optimizer={type: sgd, lr: 2}", "hooks.0.x=[1, {a: b}]")
    assert found["max_steps: 5"] == found["lr: 2"] == found["type: sgd"] == "override"
    assert found["x: [1, {a: b}]"] == "override"
    assert found["- type: time_steps"] == "run.yaml:12"


def test_every_line_has_an_origin_or_opens_a_section(project):
    lines = ask("run.yaml").stdout.splitlines()
    assert len(lines) > 50
    assert [line for line in lines if "  # " not in line and not line.endswith(":")] == []


def test_what_is_printed_is_a_run_file_that_loads_back_equal(project):
    (project / "again.yaml").write_text(ask("run.yaml", "trainer.max_steps=7").stdout)
    assert RunConfig.load("again.yaml") == RunConfig.load("run.yaml", ["trainer.max_steps=7"])


def test_odd_texts_survive(project):
    (project / "odd.yaml").write_text('model: {type: a.py:B, text: "a: b # c", "true": "no\\n", list: ["x, y", 1.0]}\n')
    (project / "again.yaml").write_text(ask("odd.yaml", "name=odd").stdout)
    assert RunConfig.load("again.yaml") == RunConfig.load("odd.yaml", ["name=odd"])


def test_a_run_folder_may_be_given(project):
    RunConfig.load("run.yaml").save("runs/mine/config.yaml")
    assert "max_steps: 12" in ask("runs/mine").stdout
    assert ask("run.yaml", "--diff", "runs/mine").exit_code == 0
    (project / "runs" / "other").mkdir()
    assert "it has no config.yaml" in str(ask("runs/other").exception)


def test_a_wrong_file_is_explained_and_no_file_too(project):
    (project / "bad.yaml").write_text("trainer: {max_step: 3}\n")
    assert "bad.yaml:1: trainer.max_step: " in str(ask("bad.yaml").exception)
    assert "config needs a run" in str(ask().exception)


# differences


def test_equal_runs_differ_in_nothing_and_exit_with_0(project):
    (project / "same.yaml").write_text("extends: run.yaml\ntrainer: {max_steps: 12.0}\n")
    done = ask("run.yaml", "--diff", "same.yaml")
    assert done.exit_code == 0, done.output
    assert done.stdout == "No setting differs between run.yaml and same.yaml.\n"


def test_each_difference_has_both_values_and_origins_and_exits_with_1(project):
    (project / "other.yaml").write_text(
        "extends: run.yaml\ntrainer: {max_steps: 20}\nhooks: []\ntask: {type: a.py:T, x: null}\n"
    )
    done = ask("run.yaml", "seed=4", "--diff", "other.yaml")
    assert done.exit_code == 1
    rows = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    assert rows[0] == ["setting", "run.yaml", "other.yaml"]
    assert {row[0]: row[1:] for row in rows[1:]} == {
        "seed": ["4 (override)", "3 (base.yaml:1)"],
        "task.type": ["–", "a.py:T (other.yaml:4)"],
        "task.x": ["–", "null (other.yaml:4)"],
        "trainer.max_steps": ["12 (run.yaml:3)", "20 (other.yaml:2)"],
        "hooks.0.type": ["time_steps (run.yaml:12)", "–"],
        "hooks.1.type": ["early_stopping (run.yaml:13)", "–"],
        "hooks.1.metric": ["eval/loss (run.yaml:14)", "–"],
    }


def test_names_differ_only_where_they_are_set(project):
    (project / "other.yaml").write_text("extends: run.yaml\nname: mine\n")
    assert "mine (other.yaml:2)" in ask("run.yaml", "--diff", "other.yaml").stdout


# the schema


def fits(value, schema, root):
    """A small reader of JSON Schema: does the value fit? Rejects a word that it does not know."""
    known = {"$schema", "$defs", "title", "description", "default", "minLength", "minItems", "maxItems", "pattern"}
    for word, rule in schema.items():
        if word == "$ref":
            good = fits(value, root["$defs"][rule.removeprefix("#/$defs/")], root)
        elif word == "anyOf":
            good = any(fits(value, each, root) for each in rule)
        elif word == "type":
            good = is_of(value, rule)
        elif word in ("enum", "const"):
            good = value in (rule if word == "enum" else [rule])
        elif word == "required":
            good = not isinstance(value, dict) or set(rule) <= value.keys()
        elif word == "properties":
            good = not isinstance(value, dict) or all(
                fits(value[key], each, root) for key, each in rule.items() if key in value
            )
        elif word == "additionalProperties":
            extra = (
                []
                if not isinstance(value, dict)
                else [
                    value[key]
                    for key in value.keys() - schema.get("properties", {})
                    if not any(re.search(pattern, key) for pattern in schema.get("patternProperties", ()))
                ]
            )
            good = not extra if rule is False else rule is True or all(fits(each, rule, root) for each in extra)
        elif word == "patternProperties":
            items = value.items() if isinstance(value, dict) else ()
            good = all(
                fits(item, each, root)
                for pattern, each in rule.items()
                for key, item in items
                if re.search(pattern, key)
            )
        elif word == "propertyNames":
            good = not isinstance(value, dict) or all(fits(key, rule, root) for key in value)
        elif word == "not":
            good = not fits(value, rule, root)
        elif word == "items":
            good = not isinstance(value, list) or all(fits(each, rule, root) for each in value)
        elif word in ("minimum", "exclusiveMinimum"):
            good = not is_of(value, "number") or value > rule or (word == "minimum" and value == rule)
        elif word == "if":
            good = not fits(value, rule, root) or fits(value, schema["then"], root)
        else:
            assert word in known | {"then"}, word
            good = word != "pattern" or not isinstance(value, str) or re.search(rule, value) is not None
        if not good:
            return False
    return True


def is_of(value, name):
    kinds = {"string": str, "object": dict, "array": list, "null": type(None), "boolean": bool}
    if name in ("integer", "number"):
        whole = isinstance(value, float) and value.is_integer()
        return not isinstance(value, bool) and (
            isinstance(value, int) or whole or (name == "number" and isinstance(value, float))
        )
    return isinstance(value, kinds[name])


GROUPS = {
    "trainer/often.yaml": "max_steps: 3\n",
    "checkpoint/often.yaml": "{every_steps: 1, keep_last: 2}\n",
    "hooks/usual.yaml": "- ema\n",
    "model/tiny.yaml": "type: llama\n",
}
GOOD = [
    RUN,
    BASE,
    (ROOT / "tests" / "project" / "run.yaml").read_text(),
    (ROOT / "examples" / "quickstart" / "run.yaml").read_text(),
    "trainer: {type: a.py:T, my_option: {x: 1}}\n",
    "data: {eval: digits, split: [90, 5, 5]}\nruntime: {mesh: {fsdp: -1, tensor: 2}}\n",
    "data:\ntrainer:\nruntime: {mesh: }\n",
    "data: {process: clean.tokenize}\n",
    "data: {process: {type: clean.tokenize, max_length: 3, version: 1.5, num_workers: 4}}\n",
    "data: {process: {type: clean.tokenize, version: b, num_workers: 0}}\n",
    "trainer: {max_steps: 1e3, optimizers: {a: {optimizer: sgd, match: x.*}, b: {optimizer: {type: sgd}}}}\n",
    "evaluation: {metrics: {accuracy: accuracy}}\ncheckpoint: {keep_best: {metric: valid/loss, mode: max}}\n",
    "name: x-${seed}\nlog: {every_steps: '${checkpoint.every_steps}'}\nhooks: '${writers}'\n"
    "runtime: {mesh: {fsdp: '${seed}'}}\n",
    "trainer: often\ncheckpoint: {extends: often, every_steps: 3, ~keep_last: }\n",
    "hooks: usual\nmodel: tiny\n",
]
BAD = [
    "trainer: {max_step: 3}\n",
    "trainer: {type: classification, my_option: 1}\n",
    "trainer: {max_steps: 0}\n",
    "trainer: {max_steps: 1.5}\n",
    "trainer: {max_steps: many}\n",
    "trainer: {optimizer: {lr: 1}}\n",
    "runtime: {precision: fp4}\n",
    "runtime: {mesh: {fsdp: 0}}\n",
    "data: {eval: {train: digits}}\n",
    "data: {loader: {batch_size: 3}}\n",
    "data: {process: {version: 1}}\n",
    "data: {process: {type: clean.tokenize, version: [1]}}\n",
    "data: {process: {type: clean.tokenize, num_workers: -1}}\n",
    "hooks: {type: every}\n",
    "trainer: {max_steps: x$}\n",
    "trainer: {~max_steps: 3}\n",
    "trainer: a/b\n",
    "seed: -1\n",
    "checkpoint: {keep_best: {mode: max}}\n",
    "nmae: x\n",
]


@pytest.mark.parametrize("text", GOOD)
def test_the_schema_accepts_what_load_accepts(project, text):
    (project / "this.yaml").write_text(text)
    for name, contents in GROUPS.items():
        (project / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "configs" / name).write_text(contents)
    RunConfig.load("this.yaml")
    assert fits(parse(text, lambda line: None).plain(), schema_of_runs(), schema_of_runs())


@pytest.mark.parametrize("text", BAD)
def test_the_schema_rejects_what_load_rejects(project, text):
    (project / "this.yaml").write_text(text)
    with pytest.raises(ConfigError):
        RunConfig.load("this.yaml")
    assert not fits(parse(text, lambda line: None).plain(), schema_of_runs(), schema_of_runs())


def test_the_schema_is_printed_without_a_run(in_tmp):
    done = ask("--schema")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == schema_of_runs()
    assert json.loads(done.stdout)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_every_key_of_the_schema_is_described_and_nothing_of_pydantic_shows():
    schema = schema_of_runs()
    sections = {"run": schema, **{name: each for name, each in schema["$defs"].items() if "properties" in each}}
    for name, section in sections.items():
        for key, value in section["properties"].items():
            assert value.get("description"), f"{name}.{key}"
    text = json.dumps(schema)
    for word in ('"gt"', '"ge"', '"component"', "None", "pydantic", "Annotated"):
        assert word not in text
    assert '"title"' not in text.replace('"title": "trainwright run file"', "")


def test_editors_can_complete_the_built_in_components():
    kinds = schema_of_runs()["$defs"]
    assert "adamw" in kinds["optimizer"]["anyOf"][1]["anyOf"][0]["enum"]
    assert "digits" in kinds["dataset"]["anyOf"][0]["properties"]["type"]["anyOf"][0]["enum"]


def test_groups_and_references_are_shown_with_their_origin(project):
    for name, contents in GROUPS.items():
        (project / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "configs" / name).write_text(contents)
    (project / "this.yaml").write_text("name: lm-${seed}\nmodel: {type: x, text: '$${seed}'}\ncheckpoint: often\n")
    done = ask("this.yaml", "trainer=often", "~checkpoint.keep_last", "seed=5")
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "name: lm-5 # this.yaml:1: lm-${seed}" in lines
    assert "max_steps: 3 # configs/trainer/often.yaml:1" in lines
    assert "every_steps: 1 # configs/checkpoint/often.yaml:1" in lines
    assert "keep_last: 3 # default" in lines
    assert "text: $${seed} # this.yaml:2" in lines
    (project / "printed.yaml").write_text(done.stdout)
    overrides = ["trainer=often", "~checkpoint.keep_last", "seed=5"]
    assert RunConfig.load("printed.yaml") == RunConfig.load("this.yaml", overrides)


# the reference


def test_the_reference_is_generated_from_the_schema():
    path = ROOT / "docs" / "generate_configuration.py"
    spec = importlib.util.spec_from_file_location("generate_configuration", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == module.generate(), "Run: python docs/generate_configuration.py"


def test_the_reference_has_every_key_but_the_arguments_of_models():
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = written.partition("## model\n")[2].partition("\n## ")[0]
    assert [key for key in ("preset", *ModelSection.reserved_keys) if f"\n| `{key}` |" not in section] == []


def test_explained_errors_are_ours(project):
    assert isinstance(ask("nowhere.yaml").exception, TrainwrightError)
