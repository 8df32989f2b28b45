import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.config import RunConfig
from trainwright.config.frozen import same
from trainwright.config.interpolation import escape_plain, escape_text, interpolate
from trainwright.config.yaml_text import Node, to_tree
from trainwright.errors import ConfigError, TrustError


def load(tmp_path, text, overrides=(), **options):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return RunConfig.load(path, overrides, **options)


def resolved(settings, defaults=None):
    return interpolate(to_tree(settings, {}), to_tree(defaults or {}, {})).plain()


def test_references_follow_overrides_and_defaults(tmp_path):
    text = "name: lm-${seed}-${trainer.optimizer.lr}\ntrainer: {optimizer: {type: adamw, lr: 1e-3}}\n"
    assert load(tmp_path, text).name == "lm-42-0.001"
    assert load(tmp_path, text, ["seed=7", "trainer.optimizer.lr=5e-05"]).name == "lm-7-5e-05"
    assert load(tmp_path, text, ["name='${output_dir}-${trainer.type}'"]).name == "runs-trainer"


def test_references_follow_groups_and_extended_files(tmp_path):
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "wide.yaml").write_text("type: net.py:Net\nwidth: 9\ndepth: ${model.width}\n")
    (tmp_path / "base.yaml").write_text("name: w${model.width}\nmodel: {type: net.py:Net, width: 1}\n")
    assert load(tmp_path, "extends: base.yaml\n").name == "w1"
    config = load(tmp_path, "extends: base.yaml\nmodel: {width: 2}\n", ["model=wide"])
    assert (config.name, config.model.depth) == ("w9", 9)


def test_a_whole_reference_keeps_the_type():
    settings = {"a": {"i": 1, "f": 0.5, "b": True, "n": None, "t": "x", "l": [1, {"x": 2}], "m": {"y": [3]}}}
    for key, value in settings["a"].items():
        found = resolved({**settings, "copy": f"${{a.{key}}}"})["copy"]
        assert same(found, value)
        assert type(found) is type(value)
    assert resolved({**settings, "copy": "${a.l.1.x}"})["copy"] == 2


def test_a_mapping_is_copied_with_the_references_in_it(tmp_path):
    text = (
        "trainer: {optimizers: {a: {optimizer: {type: sgd, lr: '${seed}'}}, b: '${trainer.optimizers.a}'}}\nseed: 3\n"
    )
    config = load(tmp_path, text)
    assert config.trainer.optimizers.b.optimizer.lr == 3
    assert config.trainer.optimizers.b == config.trainer.optimizers.a


def test_a_bare_component_has_a_type():
    assert resolved({"optimizer": "adamw", "name": "${optimizer.type}"})["name"] == "adamw"


def test_references_lead_through_references():
    settings = {"a": "${b.c}", "b": "${d}", "d": {"c": "${e}x", "f": "${a}"}, "e": "${g}", "g": 5}
    assert resolved(settings) == {"a": "5x", "b": {"c": "5x", "f": "5x"}, "d": {"c": "5x", "f": "5x"}, "e": 5, "g": 5}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$${a}", "${a}"),
        ("$$${a}", "$${a}"),
        ("x$${a}-${b}", "x${a}-true"),
        ("$b $ {b} {b}", "$b $ {b} {b}"),
        ("${ b }", True),
        ("${b}${b}", "truetrue"),
    ],
)
def test_escapes_are_literal(text, result):
    assert resolved({"b": True, "text": text})["text"] == result


@given(st.text(alphabet="${}ab.:", max_size=12) | st.text(max_size=6))
def test_escaped_text_is_resolved_to_itself(text):
    assert resolved({"text": escape_text(text)}) == {"text": text}
    assert escape_plain([{"x": (text, 1)}]) == [{"x": [escape_text(text), 1]}]


keys = st.sampled_from("abcd")
trees = st.dictionaries(
    keys,
    st.recursive(
        st.integers(0, 3)
        | st.builds(lambda *path: f"${{{'.'.join(path)}}}", keys, keys)
        | st.builds("${{{}}}x".format, keys),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(trees)
def test_any_references_are_resolved_or_rejected(plain):
    try:
        found = resolved(plain)
    except ConfigError:
        return
    assert "${" not in repr(found)
    assert same(resolved(found), found)


@pytest.mark.parametrize(
    ("text", "line", "mentions"),
    [
        ("seed: 1\nname: ${sede}\n", 2, ("name", "${sede}", '"seed"')),
        (
            "name: x\nhooks:\n- {type: ema, decay: '${trainer.max_step}'}\n",
            3,
            ("hooks.0.decay", "trainer", "max_steps"),
        ),
        ("name: ${seed.x}\nseed: 3\n", 1, ("name", "seed is 3")),
        ("name: ${hooks.1}\nhooks: [a]\n", 1, ("name", "hooks", "1")),
        ("name: a-${trainer}\n", 1, ("name", "${trainer}")),
        ("name: a-${trainer.max_steps}\n", 1, ("name", "${trainer.max_steps}", "null")),
        ("name: ${seed\n", 1, ("name", "${")),
        ("name: ${}\n", 1, ("name", "${}")),
        ("name: ${.seed}\n", 1, ("name", "${.seed}")),
        ("name: ${oc.env:HOME}\n", 1, ("name", "${oc.env:HOME}", "${env:NAME}")),
        ("name: ${name}\n", 1, ("name → name",)),
        ("trainer:\n  a: ${trainer.b}\n  b: x${trainer.c}\n  c: ${trainer.a}\n", 2, ("a → trainer.b → trainer.c",)),
        ("trainer:\n  type: x.py:T\n  a: ${trainer}\n", 3, ("trainer.a",)),
        ("seed: ${output_dir}\n", 1, ("seed", "runs")),
    ],
)
def test_a_wrong_reference_is_rejected_with_its_line(tmp_path, text, line, mentions):
    with raises(ConfigError, *mentions, at=f"run.yaml:{line}"):
        load(tmp_path, text)


def test_a_wrong_reference_in_an_override_is_rejected_with_it(tmp_path):
    with raises(ConfigError, "name", "sed", at="override name=${sed}"):
        load(tmp_path, "seed: 1\n", ["name=${sed}"])


def test_the_origin_of_a_resolved_value_has_its_reference(tmp_path):
    config = load(tmp_path, "seed: 1\nname: lm-${seed}\n")
    assert str(config.origin("name")).endswith("run.yaml:2: lm-${seed}")
    assert config.origin("name").line == 2


@pytest.mark.parametrize("kind", ["lists", "mappings", "text", "chain"])
def test_references_cannot_grow_without_limit(tmp_path, kind):
    first = {"lists": "[a, b]", "mappings": "{k: 1}", "text": "aaaaaaaa", "chain": "1"}[kind]
    pattern = {"lists": "['{0}', '{0}']", "mappings": "{{x: '{0}', y: '{0}'}}", "text": "'{0}{0}'", "chain": "'{0}'"}[
        kind
    ]
    lines = [f"  x0: {first}"] + [f"  x{n}: {pattern.format(f'${{model.x{n - 1}}}')}" for n in range(1, 80)]
    if kind == "chain":
        lines.reverse()
    with raises(ConfigError, "model.x", golden=False):
        load(tmp_path, "model:\n  type: net.py:Net\n" + "\n".join(lines))


def test_references_cannot_nest_without_limit():
    deep = {"x": {"y": "${b}"}, "b": {}}
    for index in range(200):
        deep[f"k{index}"] = {"in": {"in": f"${{k{index + 1}}}"}}
    deep["k200"] = 1
    with raises(ConfigError, "64", golden=False):
        resolved(deep)


def test_environment_variables_are_text(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_NUMBER", "17")
    monkeypatch.delenv("NOT_SET", raising=False)
    text = "name: ${env:RUN_NUMBER}\noutput_dir: ${env:NOT_SET,a,b}/${env:RUN_NUMBER}\n"
    config = load(tmp_path, text)
    assert (config.name, config.output_dir) == ("17", "a,b/17")
    with raises(ConfigError, "name", "NOT_SET", at="run.yaml:1"):
        load(tmp_path, "name: ${env:NOT_SET}\n")


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "SSH_KEY"])
def test_secrets_are_not_read(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "hunter2")
    with raises(ConfigError, "name", name, at="run.yaml:1") as caught:
        load(tmp_path, f"name: ${{env:{name}}}\n")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "AUTHOR", "KEYBOARD"])
def test_similar_names_are_no_secrets(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "x")
    assert load(tmp_path, f"name: ${{env:{name}}}\n").name == "x"


def test_an_untrusted_run_folder_cannot_read_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("VISIBLE", "x")
    text = "name: ${env:VISIBLE}\n"
    with raises(TrustError, "VISIBLE", at="run.yaml:1"):
        load(tmp_path, text, trust=False)
    assert load(tmp_path, text, trust=True).name == "x"
    assert load(tmp_path, text, ["name=${env:VISIBLE}"], trust=False).name == "x"


def test_saved_and_derived_settings_are_not_resolved_again(tmp_path):
    config = load(tmp_path, "model: {type: x, text: '$${seed}', other: 'a$$$${b', number: '${seed}'}\n")
    assert config.model.text == "${seed}"
    config.save(tmp_path / "saved.yaml")
    assert RunConfig.load(tmp_path / "saved.yaml") == config
    (tmp_path / "printed.yaml").write_text(config.to_yaml())
    assert RunConfig.load(tmp_path / "printed.yaml") == config
    assert config.derive({"seed": 3}).model.text == "${seed}"
    assert config.derive({"seed": 3}).model.number == 42
    assert config.derive({"model.text": "${name}"}).model.text == "${name}"


def test_python_files_have_references(tmp_path):
    (tmp_path / "run.py").write_text(
        "config = {\n  'name': 'lm-${seed}',\n  'model': {'type': 'x', 'a': '${nam}'},\n}\n"
    )
    with raises(ConfigError, "model.a", "nam", at="run.py:3"):
        RunConfig.load(tmp_path / "run.py")
    config = RunConfig.load(tmp_path / "run.py", ["seed=9", "model.a=${name}"])
    assert (config.name, config.model.a) == ("lm-9", "lm-9")
    (tmp_path / "made.py").write_text(
        "from trainwright import RunConfig\n"
        "config = RunConfig.from_dict({'name': 'lm-${seed}', 'model': {'type': 'x', 'a': '$${seed}'}})\n"
    )
    config = RunConfig.load(tmp_path / "made.py", ["seed=9"])
    assert (config.name, config.model.a) == ("lm-42", "${seed}")


def test_nodes_without_references_are_unchanged():
    tree = Node({"a": Node("$x {y}"), "b": Node((Node(1), Node("z")))})
    assert interpolate(tree, Node({})) == tree


def test_a_reference_in_braces_without_quotes_is_explained(tmp_path):
    with raises(ConfigError, "'${seed}'", at="run.yaml:1"):
        load(tmp_path, "model: {type: x, a: ${seed}}\n")
