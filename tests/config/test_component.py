import collections
import copy
import pickle
import subprocess
import sys

import pytest
from tests.messages import raises

from trainwright.config import Component, Frozen, ModelSection, Origin, ProcessSection, RunConfig
from trainwright.errors import ConfigError


def test_reads_as_a_mapping_and_as_attributes():
    component = Component("adamw", lr=1e-3, betas=[0.9, 0.95])
    assert component == {"type": "adamw", "lr": 1e-3, "betas": [0.9, 0.95]}
    assert (component.type, component.lr, component["betas"]) == ("adamw", 1e-3, (0.9, 0.95))
    assert component.arguments == {"lr": 1e-3, "betas": [0.9, 0.95]}


def test_repr_reads_like_the_call_that_made_it():
    assert repr(Component("adamw", lr=0.1)) == "Component('adamw', lr=0.1)"
    assert repr(Component("x", **{"a-b": 1})) == "Component('x', **{'a-b': 1})"


def test_a_class_becomes_its_import_path():
    assert Component(collections.OrderedDict).type == "collections:OrderedDict"


def test_a_class_of_the_main_script_becomes_its_file(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from trainwright.config import Component\nclass Net: pass\nprint(Component(Net, width=3).type)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{script}:Net"


def test_a_class_inside_a_function_is_rejected():
    class Local:
        pass

    with raises(ConfigError):
        Component(Local)


def test_two_types_are_rejected():
    with pytest.raises(TypeError, match="has one type"):
        Component("a", **{"type": "b"})


def test_origin_pickles_and_is_not_compared():
    here = Component("a", x=1).located_at(Origin("run.yaml", 3))
    back = pickle.loads(pickle.dumps(here))
    assert str(back.origin) == "run.yaml:3"
    assert back == Component("a", x=1)
    assert Component("a").origin is None


def test_a_component_cannot_be_changed():
    with pytest.raises(AttributeError, match="read-only"):
        Component("a", x=1).x = 2
    with pytest.raises(TypeError, match="read-only"):
        Component("a", x=1)["type"] = "b"


def test_the_models_reserved_keys_are_not_arguments():
    model = ModelSection("llama", width=64, freeze="embed.*", sharding={"a": 1})
    assert model.arguments == {"width": 64}
    assert model.reserved == {"freeze": "embed.*", "sharding": {"a": 1}}
    assert model.freeze == "embed.*"
    assert pickle.loads(pickle.dumps(model)).reserved == model.reserved


def test_null_removes_a_reserved_key_of_the_model(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {type: llama, width: 3, lora: {match: a}, freeze: b, pretrained: c}\n")
    file = tmp_path / "run.yaml"
    file.write_text("extends: base.yaml\nmodel: {lora: null, pretrained: null}\ntrainer: {max_steps: 1}\n")
    config = RunConfig.load(file, ["model.freeze=null", "model.width=null"])
    assert config.model == {"type": "llama", "width": None}
    assert config.model == RunConfig.load(file, ["model={type: llama, width: null}"]).model
    assert ModelSection("llama", lora=None) == ModelSection("llama")


def test_the_settings_of_process_are_not_arguments():
    config = RunConfig.from_dict({"data": {"process": {"type": "a.b", "x": 1, "version": 2, "num_workers": 3.0}}})
    process = config.data.process
    assert process.arguments == {"x": 1}
    assert (process.options.version, process.options.num_workers) == (2, 3)
    assert pickle.loads(pickle.dumps(process)).options == process.options
    assert (ProcessSection("a.b").options.version, ProcessSection("a.b").options.num_workers) == (None, 0)


@pytest.mark.parametrize(("key", "value"), [("version", [1]), ("version", True), ("num_workers", -1)])
def test_a_wrong_setting_of_process_is_named_with_its_line(tmp_path, key, value):
    file = tmp_path / "run.yaml"
    file.write_text(f"data:\n  process:\n    type: a.b\n    {key}: {value}\n")
    with raises(ConfigError, f"data.process.{key}", at="run.yaml:4"):
        RunConfig.load(file)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (3, "task: must be a component: a mapping with type, or the type alone; got 3."),
        ("", 'task: must be a component: a mapping with type, or the type alone; got the text "".'),
        ({"lr": 1}, "task: a component needs a type, got only lr. Add one, such as type: my_file.py:Name."),
        ({"type": 3}, "task.type: must be text, such as adamw or my_file.py:Name; got 3."),
    ],
)
def test_a_value_that_is_not_a_component_is_rejected(written, message):
    with pytest.raises(ConfigError) as rejection:
        RunConfig.from_dict({"task": written})
    assert str(rejection.value) == message


def test_nested_values_read_as_attributes_and_items():
    settings = Frozen({"a": {"b": [1, {"c": 2}]}})
    assert settings.a.b[1].c == settings["a"]["b"][1]["c"] == 2
    assert settings.a.b == (1, {"c": 2})


def test_equals_plain_mappings_with_lists():
    assert Frozen({"a": [1, 2]}) == {"a": [1, 2]} == Frozen({"a": (1, 2)})
    assert Frozen({"a": 1}) != {"a": 2}
    assert Frozen({"a": 1}) != {"a": True}
    assert Frozen({"a": float("nan")}) == {"a": float("nan")}


@pytest.mark.parametrize("change", ["s.a = 2", "s['a'] = 2", "del s.a", "del s['a']", "s.n.b = 2", "s.n['b'] = 2"])
def test_any_change_is_rejected_with_advice(change):
    with pytest.raises((TypeError, AttributeError), match=r"read-only.*derive"):
        exec(change, {"s": Frozen({"a": 1, "n": {"b": 1}})})


def test_a_missing_attribute_names_the_known_ones():
    with pytest.raises(AttributeError, match=r"no setting 'c' here\. Known: a, b"):
        _ = Frozen({"a": 1, "b": 2}).c


def test_pickles_and_copies():
    settings = Frozen({"a": {"b": [1]}})
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert copy.deepcopy(settings) == copy.copy(settings) == settings


def test_to_dict_returns_mutable_containers():
    settings = Frozen({"a": {"b": [1]}})
    plain = settings.to_dict()
    plain["a"]["b"].append(2)
    assert plain == {"a": {"b": [1, 2]}}
    assert settings.a.b == (1,)


def test_a_key_that_is_not_text_is_rejected():
    with pytest.raises(TypeError, match="key is text, got 1"):
        Frozen({1: 2})
