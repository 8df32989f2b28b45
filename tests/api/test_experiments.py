"""Experiments by name: registering them, finding them, and what is laid over their configs."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.forked_program import run_command
from tests.messages import mentions
from typer.testing import CliRunner

from trainwright import RunConfig, experiment
from trainwright.api import experiments
from trainwright.api.experiments import load_experiment, split_overrides
from trainwright.cli import app
from trainwright.errors import ConfigError

PROJECT = Path(__file__).parents[1] / "project"

SETTINGS = """{
        "model": {"type": "parts.py:Net", "width": 8},
        "data": {
            "train": {"type": "parts.py:Points", "size": 50},
            "eval": {"valid": {"type": "parts.py:Points", "size": 9, "seed": 1}},
        },
        "trainer": {"max_steps": 4, "global_batch_size": 8, "optimizer": {"type": "adamw", "lr": 1e-2}},
        "checkpoint": {"every_steps": 2},
        "writers": ["json"],
        "runtime": {"device": "cpu"},
    }"""
POINTS = f"""from trainwright import experiment


@experiment("points")
def points():
    return {SETTINGS}
"""


@pytest.fixture(autouse=True)
def _no_experiments(monkeypatch):
    """What other tests have registered is not known here, and the package's log is shown as before."""
    monkeypatch.setattr(experiments, "_registered", {})
    package = logging.getLogger("trainwright")
    handlers, level = list(package.handlers), package.level
    yield
    package.handlers[:] = handlers
    package.setLevel(level)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder, with an experiment "points" in experiments/points.py."""
    shutil.copy(PROJECT / "parts.py", tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "points.py").write_text(POINTS, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def rejection(call, *arguments, **options):
    with pytest.raises(ConfigError) as rejected:
        call(*arguments, **options)
    return str(rejected.value)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


# files and names


@pytest.mark.parametrize("line", ["from .base import settings", "from base import settings", "import experiments.base"])
def test_experiments_may_be_split_over_two_files(project, line):
    (project / "experiments" / "base.py").write_text("def settings():\n    return {'seed': 9}\n", "utf-8")
    use = "experiments.base.settings()" if line.startswith("import") else "settings()"
    text = f"from trainwright import experiment\n{line}\n\n\n@experiment('two')\ndef two():\n    return {use}\n"
    (project / "experiments" / "two.py").write_text(text, "utf-8")
    before = {name for name in sys.modules if not name.startswith("trainwright")}
    assert load_experiment("two").seed == 9
    left = {name for name in sys.modules if not name.startswith("trainwright")} - before
    assert not left & {"base", "experiments", "experiments.base"}


def test_a_named_file_imports_modules_of_its_folder(project):
    (project / "elsewhere").mkdir()
    (project / "elsewhere" / "base.py").write_text("SEED = 8\n", "utf-8")
    text = "from base import SEED\nfrom trainwright import experiment\n\n\n@experiment('named')\ndef named():\n"
    (project / "elsewhere" / "named.py").write_text(f"{text}    return {{'seed': SEED}}\n", "utf-8")
    assert load_experiment("named", imports=["elsewhere/named.py"]).seed == 8


def test_an_experiment_without_a_name_is_rejected_with_its_line():
    def bare():
        """Has no name."""

    code = bare.__code__
    text = rejection(experiment, bare)
    assert text.startswith(f"{code.co_filename}:{code.co_firstlineno}: ")
    assert "@experiment needs a name" in text
    assert 'Write @experiment("bare").' in text
    assert '@experiment needs a name, got the text ""' in rejection(experiment, "")


# finding


def test_an_experiment_is_found_in_the_folder_experiments(project):
    config = load_experiment("points")
    assert (config.name, config.model.width, config.trainer.max_steps) == ("points", 8, 4)
    assert config.project_dir == project


def test_an_experiment_is_found_in_the_file_experiments_py(project):
    shutil.rmtree(project / "experiments")
    (project / "experiments.py").write_text(POINTS.replace('"points"', '"other"'), "utf-8")
    assert load_experiment("other").project_dir == project


@pytest.mark.parametrize("name", ["deep/er/mine.py", "mine_of_experiments"])
def test_imports_name_a_file_or_a_module(project, name):
    path = project / (name if name.endswith(".py") else f"{name}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(POINTS.replace('"points"', '"mine"'), "utf-8")
    config = load_experiment("mine", imports=[name])
    assert (config.name, config.project_dir) == ("mine", path.parent)
    assert "points" not in experiments._registered  # only what was named is imported


def test_an_experiment_of_the_program_itself_needs_no_import():
    @experiment("of this test")
    def points():
        return RunConfig.from_dict({"trainer": {"max_steps": 3}})

    config = load_experiment("of this test")
    assert (config.name, config.trainer.max_steps) == ("of this test", 3)
    assert points().trainer.max_steps == 3  # it is still a function


def test_an_unknown_experiment_is_answered_with_the_known_ones(project):
    text = rejection(load_experiment, "pionts")
    place = Path("experiments/points.py")
    assert text.startswith(f'experiment: there is no "pionts". Did you mean "points"? Known: points ({place}:4).')


def test_without_any_experiment_the_error_says_where_they_are_looked_for(in_tmp):
    text = rejection(load_experiment, "points")
    assert "none is defined" in text
    assert mentions(text, "points")
    assert "experiments.py" in text
    assert "--imports" in text


def test_two_experiments_of_one_name_name_both_files_and_lines(project):
    (project / "experiments" / "second.py").write_text("\n" + POINTS, "utf-8")
    text = rejection(load_experiment, "points")
    first, second = Path("experiments/points.py"), Path("experiments/second.py")
    assert text == (f'{second}:5: the experiment "points" is already defined at {first}:4. Rename one of the two.')


def test_a_file_that_is_run_again_registers_the_same_experiment(project):
    load_experiment("points")
    code = compile(POINTS, str(project / "experiments" / "points.py"), "exec")
    exec(code, {"__name__": "again"})
    assert load_experiment("points").trainer.max_steps == 4


def test_a_file_that_cannot_be_imported_names_its_line(project):
    (project / "experiments" / "wrong.py").write_text("x = 1\ny = x / 0\n", "utf-8")
    text = rejection(load_experiment, "points")
    assert f"{Path('experiments/wrong.py')} cannot be imported: ZeroDivisionError" in text
    assert "wrong.py:2" in text


def test_an_experiment_that_needs_arguments_is_rejected_where_it_is_defined():
    def register():
        @experiment("needy")
        def needy(width):
            return {}

    text = rejection(register)
    line = register.__code__.co_firstlineno + 1
    assert text.startswith(f"{os.path.relpath(__file__)}:{line}: ") or f"{Path(__file__).name}:{line}: " in text
    assert mentions(text, "width")


def test_an_experiment_that_returns_no_config_names_its_line(project):
    path = project / "experiments" / "points.py"
    path.write_text(POINTS.replace("return {", "3 if True else {"), "utf-8")
    text = rejection(load_experiment, "points")
    assert text.startswith(f'{Path("experiments/points.py")}:4: the experiment "points" returned null (nothing).')


# what is laid over


def test_config_files_are_laid_over_in_order_and_overrides_last(project):
    (project / "a.yaml").write_text("trainer: {max_steps: 5, optimizer: {lr: 0.5}}\nseed: 1\n", "utf-8")
    (project / "b.yaml").write_text("seed: 2\nlog: {every_steps: 3}\n", "utf-8")
    files = ["a.yaml", "b.yaml"]
    overrides = ["{trainer: {optimizer: {weight_decay: 0.25}}, log: {every_steps: 4}}", "log.every_steps=6"]
    config = load_experiment("points", config_files=files, overrides=overrides)
    assert config.trainer.optimizer == {"type": "adamw", "lr": 0.5, "weight_decay": 0.25}
    assert (config.trainer.max_steps, config.seed, config.log.every_steps, config.name) == (5, 2, 6, "points")


def test_files_of_components_stay_relative_to_the_config_file_that_names_them(project):
    (project / "more").mkdir()
    (project / "more" / "a.yaml").write_text("model: {type: net.py:Net}\n", "utf-8")
    assert load_experiment("points", config_files=["more/a.yaml"]).model.type == "more/net.py:Net"


def test_a_problem_names_the_file_that_it_is_written_in(project):
    (project / "a.yaml").write_text("trainer:\n  max_step: 5\n", "utf-8")
    assert rejection(load_experiment, "points", config_files=["a.yaml"]).startswith("a.yaml:2: trainer.max_step: ")
    (project / "experiments" / "points.py").write_text(POINTS.replace("max_steps", "max_step"), "utf-8")
    place = f"{Path('experiments/points.py')}:4"
    experiments._registered.clear()
    sys.modules.pop("trainwright_project.experiments.points", None)
    assert rejection(load_experiment, "points").startswith(f"{place}: trainer.max_step: ")


def test_a_run_config_keeps_the_lines_of_the_file_that_it_was_loaded_from(project):
    (project / "base.yaml").write_text("trainer:\n  max_steps: 5\n", "utf-8")

    @experiment("loaded")
    def loaded():
        return RunConfig.load("base.yaml")

    config = load_experiment("loaded", overrides=["seed=3"])
    assert str(config.origin("trainer.max_steps")) == "base.yaml:2"
    assert (config.name, config.seed) == ("base", 3)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("a.b=1", ["a.b=1"]),
        ("a.b=1,c=2", ["a.b=1", "c=2"]),
        ("a.b=1, c=x,y", ["a.b=1", "c=x,y"]),
        ("a={type: lion, lr: 1e-4},c=[1, 2],d='x,y=1'", ["a={type: lion, lr: 1e-4}", "c=[1, 2]", "d='x,y=1'"]),
        ("{a: {b: 1}, c: 2}", ["{a: {b: 1}, c: 2}"]),
        ("a.b=1,~c.d, ~e", ["a.b=1", "~c.d", "~e"]),
    ],
)
def test_overrides_in_one_word_are_split_at_their_commas(text, overrides):
    assert split_overrides(text) == overrides


# the command line


def test_the_flags_of_an_orbit_driver_train_an_experiment(project):
    (project / "a.yaml").write_text("trainer: {optimizer: {lr: 0.5}}\n", "utf-8")
    flags = ["--experiment=points", "--mode=train_and_eval", "--model_dir=here", "--config_file=a.yaml"]
    done = invoke("train", *flags, "--params_override=trainer.max_steps=2,log.every_steps=1", "seed=3")
    assert done.exit_code == 0, done.output
    config = RunConfig.load(project / "here" / "config.yaml")
    assert (config.name, config.seed, config.trainer.max_steps, config.trainer.optimizer.lr) == ("here", 3, 2, 0.5)
    assert [line["step"] for line in lines_of(project / "here")] == [1, 2]
    assert "valid/loss" in lines_of(project / "here")[-1]


def test_eval_only_prints_the_logs_of_the_newest_checkpoint(project):
    assert invoke("train", "--experiment", "points").exit_code == 0
    done = invoke("train", "--experiment", "points", "--eval-only", "evaluation.batch_size=3")
    logs = json.loads(done.stdout)
    assert logs["valid/loss"] == pytest.approx(lines_of(project / "runs/points")[-1]["valid/loss"], rel=1e-6)


def test_continuous_eval_from_the_command_line_ends_with_the_training(project):
    assert invoke("train", "--experiment", "points", "--mode", "train").exit_code == 0
    done = invoke("train", "--experiment", "points", "--mode", "continuous_eval", "--timeout", "60")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout).keys() == {"valid/loss"}


def test_resume_continues_and_logs_if_there_is_no_checkpoint(project, caplog):
    invoke("train", "--experiment", "points", "--resume", "trainer.max_steps=2")
    assert mentions(caplog.text, "--resume", "0", Path("runs/points"))
    caplog.clear()
    invoke("train", "--experiment", "points", "--resume")
    assert "has no checkpoint" not in caplog.text
    assert "Resumed from" in caplog.text
    assert lines_of(project / "runs/points")[-1]["step"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run.yaml", "--experiment", "points"], "got both run.yaml and points"),
        ([], "got neither"),
        (["run.yaml", "--config-file", "a.yaml"], "--config-file goes with --experiment"),
        (["run.yaml", "--imports", "a"], "--imports goes with --experiment"),
        (["run.yaml", "--params-override", "{a: 1}"], "a YAML mapping requires --experiment"),
        (["--experiment", "points", "--resume", "--fresh"], "--resume continues a run and --fresh starts it over"),
        (["--experiment", "points", "--eval-only", "--mode", "train"], "--eval-only is --mode eval"),
        (["--experiment", "points", "--mode", "trian"], "--mode: 'trian' is unknown"),
        (["--experiment", "points", "--mode", "eval", "--fast-dev-run"], "there is nothing to evaluate"),
    ],
)
def test_flags_that_contradict_each_other_are_rejected(project, arguments, words):
    done = invoke("train", *arguments)
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)


def test_a_process_of_its_own_runs_an_experiment(project):
    done = run_command("train", "--experiment", "points", "--mode", "train_and_post_eval", cwd=project)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lines_of(project / "runs/points") if "valid/loss" in line] == [4]
