"""`trainwright runs`: the state of real run folders, and of broken ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.messages import mentions
from tests.terminals import command
from typer.testing import CliRunner

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.checkpoint import listing
from trainwright.checkpoint import run_folder as run_folders
from trainwright.cli import app
from trainwright.commands.terminal import age_text
from trainwright.errors import TrainwrightError
from trainwright.watch import listing as watched
from trainwright.watch.listing import find_runs, summarize
from trainwright.watch.run_reader import RunReader
from trainwright.writers import json_lines

RUN = str(Path(__file__).parents[1] / "project" / "run.yaml")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of 12 steps with a best checkpoint, and one of 8 steps in a folder of its own; both long ago."""
    root = tmp_path_factory.mktemp("runs")
    for name, steps in (("whole", 12), ("vision/half", 8)):
        overrides = [f"trainer.max_steps={steps}", f"name={name}", f"output_dir={root}"]
        overrides += ["checkpoint.keep_best={metric: valid/loss}"]
        build_trainer(RunConfig.load(RUN, overrides)).train()
    # As though it had been killed on its way to 12.
    path = root / "vision" / "half" / "config.yaml"
    path.write_text(path.read_text().replace("max_steps: 8", "max_steps: 12"))
    return root


@pytest.fixture
def root(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs")
    grow_old(tmp_path / "runs")
    return tmp_path / "runs"


def grow_old(folder, seconds=7300):
    then = time.time() - seconds
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then, then))


def state_of(root, name):
    return summarize(root / name, root)


def rows(root):
    done = CliRunner().invoke(app, ["runs", str(root)])
    assert done.exit_code == 0, done.output
    header, *lines = done.stdout.splitlines()
    columns = re.split(r"  +", header)
    return {cells[0]: dict(zip(columns, cells, strict=True)) for cells in (re.split(r"  +", line) for line in lines)}


def test_each_run_has_a_line(root):
    found = rows(root)
    assert found.keys() == {"whole", "vision/half"}
    last = [json.loads(line) for line in (root / "whole" / "metrics.json").read_text().splitlines()][-1]
    whole = found["whole"]
    assert whole["state"] == "finished"
    assert whole["step"] == "12/12"
    assert whole["saved"] == "12"
    assert whole["loss"] == f"{last['loss']:.4g}"
    assert whole["best"].startswith("valid/loss 0.")
    assert whole["last write"] == "2 hours ago"
    assert found["vision/half"]["state"] == "resumable"
    assert found["vision/half"]["step"] == "8/12"


def test_the_best_is_the_one_that_resume_would_take(root):
    values = {}
    for line in (root / "whole" / "metrics.json").read_text().splitlines():
        line = json.loads(line)
        if "valid/loss" in line:
            values[line["step"]] = line["valid/loss"]
    step = min(values, key=values.get)
    assert state_of(root, "whole").best == f"valid/loss {values[step]:.4g} at {step}"


def test_a_run_that_wrote_just_now_may_be_running(root):
    (root / "vision" / "half" / "metrics.json").touch()
    assert state_of(root, "vision/half").state == "running?"


def test_a_run_with_long_steps_may_be_running_though_quiet(root):
    path = root / "vision" / "half" / "metrics.json"
    path.write_text(json.dumps({"step": 8, "loss": 1.0, "seconds_per_step": 3000.0}) + "\n")
    grow_old(root)  # two hours; three log lines of three steps each take longer
    assert state_of(root, "vision/half").state == "running?"


def test_a_run_that_called_stop_is_stopped(root):
    class StopsAtThree(Trainer):
        def train_step(self, batch):
            if self.step == 2:
                self.stop("enough")
            return super().train_step(batch)

    build_trainer(RunConfig.load(RUN, ["name=early", f"output_dir={root}"]), StopsAtThree).train()
    summary = state_of(root, "early")
    assert (summary.state, summary.step, summary.max_steps) == ("stopped", 3, 12)


def test_a_run_without_a_checkpoint_is_empty(root):
    shutil.rmtree(root / "whole" / "checkpoints")
    summary = state_of(root, "whole")
    assert (summary.state, summary.step, summary.saved_step) == ("empty", 12, None)
    RunConfig().save(root / "fresh" / "config.yaml")
    fresh = state_of(root, "fresh")
    assert (fresh.state, fresh.step, fresh.loss) == ("empty", None, None)


def test_checkpoints_in_another_folder_are_not_missing(root):
    for name, state in (("whole", "finished"), ("vision/half", "resumable")):
        shutil.rmtree(root / name / "checkpoints")
        config = root / name / "config.yaml"
        RunConfig.load(config, ["checkpoint.folder=s3://bucket/runs"]).save(config)
        grow_old(root)
        assert state_of(root, name).state == state
        assert RunReader(root / name, name).summary().state == state


@pytest.mark.parametrize("content", [None, "", "trainer: [", "trainer: {max_steps: many}", "\0"])
def test_a_run_whose_settings_cannot_be_read_is_damaged(root, content):
    path = root / "whole" / "config.yaml"
    path.unlink() if content is None else path.write_text(content)
    done = CliRunner().invoke(app, ["runs", str(root)])
    assert done.exit_code == 0, done.output
    assert re.search(r"^whole +damaged +12 ", done.stdout, re.MULTILINE)
    assert "warning: whole: its settings cannot be read: " in done.stderr
    assert "vision/half" in done.stdout


def test_a_damaged_newest_checkpoint_is_named_and_the_older_one_counts(root):
    path = root / "whole" / "checkpoints" / "step-00000012" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    summary = state_of(root, "whole")
    assert summary.saved_step < 12
    assert summary.step == 12
    assert mentions(summary.problems[0], "00000012", "model.safetensors")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff", None])
def test_a_run_without_a_whole_checkpoint_is_damaged(root, content):
    for path in root.glob("whole/checkpoints/step-*/MANIFEST.json"):
        path.unlink() if content is None else path.write_bytes(content)
    summary = state_of(root, "whole")
    assert summary.state == "damaged"
    assert all("step-0000" in problem for problem in summary.problems)


@pytest.mark.parametrize("tail", [b'{"step": 13, "lo', b"\xff\xfe\n", b"[]\n", b"3\n", b'{"step": "x"}\n', b"\n\n"])
def test_a_half_written_last_line_is_passed_over(root, tail):
    before = state_of(root, "whole")
    with (root / "whole" / "metrics.json").open("ab") as file:
        file.write(tail)
    grow_old(root)
    assert state_of(root, "whole").loss == before.loss
    assert state_of(root, "whole").step == 12


def test_only_the_end_of_a_large_log_is_read(root, monkeypatch):
    path = root / "whole" / "metrics.json"
    line = json.dumps({"step": 1, "loss": 9.0, "text": "x" * 1000}) + "\n"
    path.write_text(
        line * 5000 + json.dumps({"step": 12, "loss": 0.25}) + "\n" + '{"step": 12, "valid/loss": 1}\n' * 3000
    )
    read = []
    original = watched.lines_from_end

    def count(given):
        for each in original(given):
            read.append(len(each))
            yield each

    monkeypatch.setattr(watched, "lines_from_end", count)
    assert state_of(root, "whole").loss == 0.25
    assert sum(read) < 100_000


def test_lines_come_whole_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(watched, "_BLOCK", 7)
    path = tmp_path / "lines"
    lines = [b"a" * length for length in (1, 6, 7, 8, 20, 3)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert list(watched.lines_from_end(path)) == lines[::-1]


def test_a_nan_is_shown(root):
    (root / "whole" / "metrics.json").write_text('{"step": 12, "loss": null}\n')
    assert rows(root)["whole"]["loss"] == "nan"


def test_only_run_folders_are_listed_and_one_may_be_passed(root):
    (root / "notes").mkdir()
    (root / "notes" / "todo.txt").touch()
    (root / "a file").touch()
    assert [path.name for path in find_runs(root)] == ["half", "whole"]
    assert rows(root / "whole").keys() == {"whole"}


def test_a_folder_of_another_user_is_left_out():
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:  # not tmp_path, which is closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "closed").mkdir(mode=0)
        try:
            if user == 0:
                os.seteuid(65534)
            assert list(find_runs(folder)) == []
        finally:
            os.seteuid(user)


def test_an_empty_and_a_missing_folder_are_reported(tmp_path):
    done = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert done.exit_code == 0
    assert done.stdout == f"There is no run in {tmp_path}.\n"
    missing = CliRunner().invoke(app, ["runs", str(tmp_path / "nowhere")])
    assert "there is no folder" in str(missing.exception)


def test_nothing_is_changed_and_torch_is_not_imported(root):
    before = {path: path.stat().st_mtime for path in root.rglob("*")}
    program = (
        "import sys\nfrom trainwright.cli import main\n"
        f"sys.argv = ['trainwright', 'runs', {str(root)!r}]\n"
        "try:\n    main()\nfinally:\n    assert not {'torch', 'numpy'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "whole" in done.stdout
    assert {path: path.stat().st_mtime for path in root.rglob("*")} == before


def test_the_names_of_files_are_those_that_a_run_writes():
    assert watched.CONFIG_FILE == run_folders.CONFIG_FILE
    assert watched.LOG_FILE == run_folders.LOG_FILE
    assert listing.CHECKPOINTS == run_folders.CHECKPOINTS
    assert watched.METRICS_FILE == json_lines.FILE_NAME


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "just now"),
        (1, "1 second ago"),
        (59, "59 seconds ago"),
        (60, "1 minute ago"),
        (7300, "2 hours ago"),
        (2e6, "23 days ago"),
    ],
)
def test_an_age_is_in_its_largest_unit(seconds, words):
    assert age_text(seconds) == words


def test_runs_are_sorted_by_a_metric_and_its_curve_is_shown(root):
    losses = {name: json.loads((root / name / "metrics.json").read_text().splitlines()[-1]) for name in RUNS}
    order = sorted(RUNS, key=lambda name: losses[name]["valid/loss"])
    done = CliRunner().invoke(app, ["runs", str(root), "--sort", "valid/loss"])
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0][4:6] == ["valid/loss", "curve"]
    assert [row[0] for row in rows[1:]] == order
    assert any(re.fullmatch("[▁▂▃▄▅▆▇█]{3}", row[5]) for row in rows[1:])
    done = CliRunner().invoke(app, ["runs", str(root), "--sort", "valid/loss", "--reverse", "--json"])
    assert [run["name"] for run in json.loads(done.stdout)["runs"]] == order[::-1]
    done = CliRunner().invoke(app, ["runs", str(root), "--sort", "name"])
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == sorted(RUNS)


def test_the_curve_of_a_log_with_long_lines_is_drawn(root):
    many = {f"metric_{number}": 0.123456789 for number in range(500)}
    with (root / "whole" / "metrics.json").open("w") as file:
        file.writelines(json.dumps({"step": step, "loss": step, **many}) + "\n" for step in range(1, 101))
    assert re.fullmatch("[▁▂▃▄▅▆▇█]{16}", rows(root)["whole"]["curve"])


def test_a_narrow_terminal_has_one_line_for_each_run(root):
    for columns, header in (
        (130, "run state step saved loss curve best last write"),
        (80, "run state step loss curve last write"),
        (55, "run state step loss last write"),
    ):
        terminal = command("runs", str(root), "--sort", "name", columns=columns, rows=20)
        assert terminal.wait() == 0
        lines = [line.split() for line in terminal.shown().splitlines() if line.strip()]
        assert lines[0] == header.split()
        assert [line[0] for line in lines[1:]] == ["vision/half", "whole"]
    (root / "whole").rename(root / ("long-name-" * 6))
    terminal = command("runs", str(root), columns=80, rows=20)
    assert terminal.wait() == 0
    assert "2 hours ago" in next(line for line in terminal.shown().splitlines() if line.startswith("long-name-"))


def test_an_unknown_metric_names_the_closest(root):
    error = CliRunner().invoke(app, ["runs", str(root), "--metric", "valid/los"]).exception
    assert isinstance(error, TrainwrightError)
    assert 'Did you mean "valid/loss"?' in str(error)


RUNS = ("whole", "vision/half")
