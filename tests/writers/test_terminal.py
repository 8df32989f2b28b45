"""`trainwright train` in a terminal: the panel, the live line, what user code prints, Ctrl-C and resizing."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.forked_program import run_command
from tests.terminals import Terminal, command

from trainwright import RunConfig, build_trainer
from trainwright import progress as progress_module
from trainwright.errors import HANG_EXIT_CODE
from trainwright.progress import BottomRows, progress, sparkline
from trainwright.writers.curves import decimate

PACKED = """
model: {type: llama, vocab_size: 260, hidden_size: 16, num_layers: 1, num_heads: 2, max_positions: 32}
data:
  train: {type: pack, length: 32, source: {type: json_lines, path: texts.jsonl}, tokenizer: bytes}
  eval: {valid: {type: pack, length: 32, source: {type: json_lines, path: texts.jsonl}, tokenizer: bytes}}
trainer: {type: language_model, global_batch_size: 2, optimizer: {type: adamw, lr: 1e-3}}
checkpoint: {every_steps: 2}
writers: [json]
runtime: {device: cpu, mode: graph}
"""
RUN = Path(__file__).parents[1] / "project" / "run.yaml"
HOOKS = """
import os, time
from pathlib import Path
from trainwright import Hook

class Noisy(Hook):
    def after_step(self):
        step = self.trainer.step
        time.sleep(0.03)
        if step == 6:
            print("printed by user code")
            print("in two ", end="", flush=True)
            print("parts")
            os.system("echo from another process")
            for number in range(60):
                print("burst", number)
        while step == 9 and not Path("resized").exists():
            time.sleep(0.01)

class Long(Hook):
    def after_step(self):
        while self.trainer.step == 4 and not Path("continue").exists():
            time.sleep(0.01)

class Waiting(Hook):
    def after_step(self):
        time.sleep(0.35 if self.trainer.step > 3 else 0)

class Stuck(Hook):
    def after_step(self):
        time.sleep(0.02)
        if self.trainer.step == 8:
            time.sleep(600)

class Lost(Hook):
    def after_step(self):
        ranks = self.trainer.ranks
        print(f"rank {ranks.rank} at {self.trainer.step}")
        time.sleep(0.1)
        while self.trainer.step == 8 and ranks.is_first:
            if Path("continue").exists():
                os.kill(os.getpid(), 9)
            time.sleep(0.01)

class Failing(Hook):
    def after_step(self):
        time.sleep(0.1)
        print("no line break", end="")
        if self.trainer.step == 5:
            raise ValueError("of user code")
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "noise.py").write_text(HOOKS)
    for name in ("parts.py", "run.yaml"):
        (tmp_path / name).write_text((RUN.parent / name).read_text())
    return tmp_path


def train(project, *overrides, hook, **options):
    given = ["writers=[console, json]", "log.every_steps=1", f"hooks=[noise.{hook}, time_steps]", *overrides]
    return command("train", "run.yaml", *given, cwd=project, **options)


def test_a_wide_terminal_shows_the_panel_below_all_other_output(project):
    terminal = train(project, hook="Noisy")
    terminal.wait_for("step 8/12", "burst 59")
    lines = terminal.shown().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("── small"))
    assert head == 28  # the last 12 of 40
    assert "67%" in lines[head + 1]
    assert "━" in lines[head + 1]
    panel = "\n".join(lines[head:])
    assert re.search(r"loss [\d.]+", panel)
    assert re.search(r"[\u2801-\u28ff]", panel), "the curve"
    assert re.search(r"valid/loss [\d.]+ at 5 \(best\)", panel)
    assert "samples/s" in panel
    assert "GiB" in panel
    assert "eta 0:" in panel
    assert lines[head - 2].startswith(("burst 59", "step"))
    text = terminal.all_text()  # the emulator drops lines when it shrinks
    for line in ("printed by user code", "in two parts", "from another process", *(f"burst {n}" for n in range(60))):
        assert text.splitlines().count(line) == 1, line
    terminal.wait_for("step 9 in progress", "since the last line")
    assert terminal.shown().splitlines()[-1].startswith("Training")
    terminal.resize(120, 30)
    time.sleep(0.4)  # the next drawing is due
    (project / "resized").touch()
    terminal.wait_for("step 12/12")
    assert terminal.wait() == 0
    text = terminal.all_text()
    assert "──" not in terminal.shown(), "the panel is gone"
    assert re.search(r"\nstep 12/12  loss .*  best valid/loss", text)
    assert re.search(r"\nstep 5  valid/loss", text)
    assert "Finished at step 12." in text
    assert all_rows_scroll(terminal)


def test_a_narrow_terminal_shows_a_live_line_which_a_wide_one_replaces_by_the_panel(project):
    terminal = train(project, "trainer.max_steps=30", hook="Waiting", columns=80, rows=24)
    terminal.wait_for("step 5/30")
    assert "──" not in terminal.shown()
    terminal.resize(130, 30)
    terminal.wait_for("── small", "samples/s", "GiB")
    terminal.type("\x03")
    terminal.wait()
    # The line on receipt is left out if the step ends first.
    assert "SIGINT: step " in terminal.all_text()
    assert "── small" not in terminal.shown()
    assert re.search(r"\nstep \d+/30  loss", terminal.all_text())


def test_a_narrow_terminal_shows_the_time_of_a_long_step_without_moving_the_cursor(project):
    terminal = train(project, hook="Long", columns=80, rows=24)
    terminal.wait_for("step 4 in progress", "since the last line")
    cursor = (terminal.screen.cursor.x, terminal.screen.cursor.y)
    terminal.wait_for("0:03 since the last line")
    assert (terminal.screen.cursor.x, terminal.screen.cursor.y) == cursor  # it may be in the prompt of a debugger
    (project / "continue").touch()
    assert terminal.wait() == 0
    assert "in progress" not in terminal.shown()
    assert re.search(r"\nstep 12/12  loss", terminal.all_text())
    assert all_rows_scroll(terminal)


def test_an_error_is_shown_below_the_last_values_and_no_output_is_lost(project):
    terminal = train(project, hook="Failing", columns=80, rows=24)
    assert terminal.wait() == 1
    text = terminal.all_text()
    assert "ValueError: of user code" in text
    assert "no line break" in text
    assert "── small" not in text


def test_a_panel_can_be_turned_off(project):
    overrides = ["writers=[{type: console, panel: false}, json]", "trainer.max_steps=6"]
    terminal = command("train", "run.yaml", *overrides, cwd=project)
    assert terminal.wait() == 0
    assert "──" not in terminal.raw.decode()
    assert "\x1b[1;" not in terminal.raw.decode()


def test_quiet_runs_and_pipes_have_no_control_characters(project):
    terminal = command("train", "run.yaml", "-q", "writers=[console, json]", "trainer.max_steps=3", cwd=project)
    assert terminal.wait() == 0
    assert b"\x1b" not in terminal.raw
    assert b"step 3" not in terminal.raw
    done = run_command("train", "run.yaml", "writers=[console, json]", "name=other", cwd=project)
    assert done.returncode == 0
    assert "step 12/12  loss" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def all_rows_scroll(terminal):
    margins = terminal.screen.margins
    return margins is None or (margins.top, margins.bottom) == (0, terminal.screen.lines - 1)


def test_ranks_share_a_terminal_and_the_launcher_frees_it_if_the_first_one_is_killed(project):
    terminal = command(
        *("train", "run.yaml", "--nproc", "2", "writers=[console, json]", "log.every_steps=1", "hooks=[noise.Lost]"),
        cwd=project,
        env={"OMP_NUM_THREADS": "1"},
    )
    terminal.wait_for("── small", "rank 0 at 8", "rank 1 at 8", "in progress")
    assert not all_rows_scroll(terminal)
    text = terminal.all_text()
    for rank in (0, 1):
        for step in range(1, 9):
            assert text.count(f"rank {rank} at {step}") == 1
    assert terminal.shown().count("── small") == 1
    (project / "continue").touch()
    assert terminal.wait() == 128 + signal.SIGKILL
    assert all_rows_scroll(terminal)
    assert "── small" not in terminal.shown()
    assert "Rank 0" in terminal.shown()


@pytest.mark.parametrize(
    ("setting", "number", "code"),
    [
        ("preemption.deadline_seconds=0.3", signal.SIGTERM, 128 + signal.SIGTERM),
        ("watchdog.min_seconds=1.0", None, HANG_EXIT_CODE),
    ],
)
def test_a_stuck_run_that_leaves_frees_the_terminal(setting, number, code, project):
    terminal = train(project, setting, "evaluation=null", hook="Stuck")
    terminal.wait_for("── small", "step 8 in progress")
    assert not all_rows_scroll(terminal)
    if number is not None:
        os.kill(terminal.process, number)
    assert terminal.wait() == code
    assert all_rows_scroll(terminal)
    assert "── small" not in terminal.shown()


def test_a_resumed_run_continues_the_curve(project):
    overrides = ["writers=[console, json]", "log.every_steps=1"]
    assert run_command("train", "run.yaml", *overrides, "trainer.max_steps=8", cwd=project).returncode == 0
    terminal = train(project, "trainer.max_steps=30", hook="Waiting")
    terminal.wait_for("step 9/30", "checkpoint at step 8", "└1─")
    os.kill(terminal.process, signal.SIGKILL)
    terminal.wait()


def in_terminal(act, **options):
    return Terminal(act, columns=60, rows=10, **options)


def test_long_work_is_a_bar_in_the_last_row_while_output_scrolls_above_it():
    def act():
        from trainwright.log import show_log

        show_log()
        with progress("Tokenizing", total=8, unit="rows") as advance:
            for number in range(8):
                print("row", number)
                advance()
                time.sleep(0.3)
        print("after")

    terminal = in_terminal(act)
    terminal.wait_for("Tokenizing  ━", "4/8 rows", "row 3")
    assert terminal.shown().splitlines()[-1].startswith("Tokenizing")
    assert terminal.wait() == 0
    lines = terminal.all_text().split("\n")
    assert [f"row {number}" for number in range(8)] == lines[:8]
    assert re.fullmatch(r"Tokenizing: done in 2\.\d s \(8 rows\)\.", lines[8])
    assert lines[9] == "after"
    assert "Tokenizing  ━" not in terminal.shown()


def test_a_new_process_shows_that_it_imports_torch(project):
    def act():
        os.execv(sys.executable, [sys.executable, "-m", "trainwright", "train", "run.yaml", "trainer.max_steps=2"])

    terminal = Terminal(act, cwd=project)
    terminal.wait_for("Importing torch")
    assert terminal.wait() == 0
    assert "Importing torch  " not in terminal.shown()
    assert "Finished at step 2." in terminal.all_text()


def test_each_kind_of_long_work_of_a_run_has_a_bar(tmp_path, monkeypatch):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": "a b c " * 9}) + "\n" for _ in range(40)))
    path = tmp_path / "run.yaml"
    path.write_text(PACKED)
    began = []
    begin = progress_module._Status.begin

    def record(status, phase):
        began.append(phase.what)
        begin(status, phase)

    monkeypatch.setattr(progress_module._Status, "begin", record)
    monkeypatch.chdir(tmp_path)
    for steps in (2, 3):
        build_trainer(RunConfig.load(path, [f"trainer.max_steps={steps}"])).train()
    expected = (
        "Building the model, Building the data, Building the trainer, Tokenizing to pack, Packing documents into rows, "
    )
    expected += "Compiling and starting, Evaluating valid, Saving a checkpoint, Verifying a checkpoint, "
    expected += "Loading the checkpoint"
    assert set(expected.split(", ")) <= set(began)


def test_short_work_leaves_nothing(capfd):
    def act():
        with progress("Packing"):
            time.sleep(0.05)

    terminal = in_terminal(act)
    assert terminal.wait() == 0
    assert terminal.raw == b""


def test_work_in_a_pipe_is_logged_after_two_seconds_and_repeated_work_once_a_minute(tmp_path):
    program = (
        "import time\n"
        "from trainwright.log import show_log\n"
        "from trainwright.progress import progress\n"
        "show_log()\n"
        "for _ in range(2):\n"
        "    with progress('Evaluating valid', total=4, unit='batches') as advance:\n"
        "        advance(2)\n"
        "        time.sleep(2.2)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = done.stderr.splitlines()
    assert re.fullmatch(r"Evaluating valid: 2/4 batches  0:02 left after 2 s", first)
    assert re.fullmatch(r"Evaluating valid: done in 2\.\d s \(2 batches\)\.", second)


def test_rows_are_given_up_where_the_terminal_is_too_small():
    def act():
        rows = BottomRows(2)
        rows.show(["one", "two"])
        print("text", flush=True)
        while os.get_terminal_size(2).lines > 4:
            time.sleep(0.01)
        rows.show(["one", "two"])
        print("more", flush=True)
        rows.close()

    terminal = in_terminal(act)
    terminal.wait_for("one", "two", "text")
    terminal.resize(60, 4)
    assert terminal.wait() == 0
    assert "more" in terminal.shown()
    assert "two" not in terminal.shown()


def test_a_sparkline_has_the_course_of_its_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, math.nan, 2]) == "▁ █"
    assert sparkline([3, 3]) == "▁▁"
    assert sparkline([]) == sparkline([math.nan]) == ""
    assert len(sparkline(range(1000), 24)) == 24
    assert sparkline([0, math.nan, 2, 2], 2) == "▁█"  # a value that is not finite does not hide the others


def test_a_chart_needs_few_points():
    assert len(decimate([(step, step % 7) for step in range(100_000)], 400)) <= 402
