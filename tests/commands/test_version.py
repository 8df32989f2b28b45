"""`trainwright --version` and shell completion."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version

from typer.testing import CliRunner

import trainwright
from trainwright.cli import app


def test_the_version_names_what_runs_here_without_importing_torch():
    program = (
        "import sys\nfrom trainwright.cli import main\nsys.argv = ['trainwright', '--version']\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"trainwright {trainwright.__version__}"
    assert lines[1].startswith(f"Python {platform.python_version()} ")
    assert lines[2] == f"torch {version('torch')}"
    assert platform.system() in lines[3]


def complete(words, incomplete):
    """What bash would be offered."""
    line = " ".join(["trainwright", *words, incomplete])
    environment = {
        **os.environ,
        "_TRAINWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) + 1),
    }
    program = "from trainwright.cli import app\napp(prog_name='trainwright')\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    return done.stdout.split()


def test_a_shell_completes_commands_kinds_and_names():
    assert complete([], "compo") == ["components"]
    assert complete(["components"], "opt") == ["optimizer"]
    assert complete(["components", "schedule"], "cos") == ["cosine"]


def test_completion_can_be_installed():
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).stdout
