"""What of a run must be equal on all ranks."""

from trainwright.config import RunConfig
from trainwright.parallel.processes import facts_of


def test_every_setting_is_a_fact_by_its_dotted_name(tmp_path):
    config = RunConfig.from_dict({"trainer": {"optimizer": {"type": "adamw", "betas": [0.9, 0.95]}}, "seed": 3})
    settings = facts_of(config).settings
    assert settings["seed"] == "3"
    assert settings["trainer.optimizer.betas"] == "[0.9, 0.95]"
    assert facts_of(config.derive({"seed": 4})).settings != settings


def test_names_differ_unless_a_clock_has_made_them():
    def facts(name):
        return facts_of(RunConfig.from_dict({"name": name})).settings

    assert facts("mine") != facts("another")
    assert facts("run-1") != facts("run-2")
    assert facts("run-11-16-23-59") == facts("run-11-17-00-00")
    assert facts("run-11-16-23-59") != facts("another-11-16-23-59")


def test_the_code_is_ours_that_next_to_the_file_and_what_it_names(tmp_path):
    for name in ("parts.py", "trainers/mine.py", "my_package/deep/optim.py", "elsewhere/net.py", "data/huge/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    settings = {
        "model": {"type": "elsewhere/net.py:Net"},
        "trainer": {"optimizer": {"type": "my_package.deep.optim:Lion"}},
        "imports": ["hypothesis", "json"],
    }
    code = facts_of(RunConfig.from_dict(settings, project_dir=tmp_path)).code
    own = {name for name in code if not name.startswith(("trainwright/", "hypothesis/"))}
    assert own == {"parts.py", "trainers/mine.py", "my_package/deep/optim.py", "elsewhere/net.py"}
    assert {"trainwright/loop/trainer.py", "hypothesis/core.py"} <= code.keys()


def test_a_changed_file_is_another_fact_and_an_equal_one_elsewhere_is_the_same(tmp_path):
    def code(folder, text):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "parts.py").write_text(text)
        return facts_of(RunConfig.from_dict({}, project_dir=tmp_path / folder)).code["parts.py"]

    assert code("one", "a") == code("two", "a") != code("one", "b")
