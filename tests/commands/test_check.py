"""`trainwright check`: what it prints, how it exits, and that it imports no torch before it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked_program import run_command
from tests.messages import mentions
from typer.testing import CliRunner

from trainwright.cli import app

RUN = str(Path(__file__).parents[1] / "project" / "run.yaml")


def invoke(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def test_a_good_run_exits_with_0_and_one_line_that_sums_it_up(in_tmp):
    done = invoke(RUN)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (
        0,
        "ok: Net with 58 parameters; 50 samples, valid 33; 12 steps of 8 samples (micro-batch 4 × "
        "gradient_accumulation_steps 2).",
    )
    assert list(in_tmp.iterdir()) == []


def test_a_run_with_errors_exits_with_1_and_names_the_line(in_tmp):
    done = invoke(RUN, "model.width=-3", "trainer.optimizer.type=adamw")
    assert done.exit_code == 1
    assert mentions(done.stdout, "RuntimeError", "3", "tensor", "parts.py:36")
    assert done.stdout.rstrip().splitlines()[-3].startswith("1 error")


def test_remarks_alone_exit_with_0(in_tmp):
    (in_tmp / "net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 2)\n        self.criterion = nn.CrossEntropyLoss()\n\n"
        "    def forward(self, x):\n        print(x.mean())\n        return self.layer(x)\n"
    )
    text = Path(RUN).read_text().replace("parts.py:Net, width: 8, dropout: 0.1", "net.py:Net")
    parts = Path(RUN).with_name("parts.py")
    (in_tmp / "run.yaml").write_text(text.replace("parts.py:Points", f"{parts}:Points"))
    done = invoke("run.yaml", "evaluation.metrics={}")
    assert done.exit_code == 0, done.stdout
    assert mentions(done.stdout, "graph", "tensor", "net.py:11")
    assert "ok, 1 remark: Net with 10 parameters" in done.stdout
    assert invoke("run.yaml", "evaluation.metrics={}", "runtime.mode=graph").exit_code == 1


def test_a_file_that_is_not_there_is_an_error_and_no_traceback(in_tmp):
    done = invoke("missing.yaml")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (1, "missing.yaml:1: error: there is no such file.")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {}])
def test_nothing_is_coloured_without_a_terminal(in_tmp, environment):
    done = run_command("check", RUN, "seed=x", env=environment)
    assert done.returncode == 1
    assert "\033[" not in done.stdout
    assert done.stdout.startswith('override seed=x: error: seed: must be a whole number, got the text "x".\n')
    assert done.stderr == ""


def test_the_command_imports_no_torch_before_it_runs():
    program = "import sys, trainwright.commands.check\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
