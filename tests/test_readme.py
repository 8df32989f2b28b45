"""The README's files and commands, run as a reader would: written into an empty folder and typed in order."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line for language, text in BLOCKS if not language for line in text.splitlines() if line.startswith("trainwright ")
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    for language, text in BLOCKS:
        if language:
            name = re.match(r"# (\S+)\n", text)
            assert name, f"a {language} block of the README does not begin with its file's name"
            path = folder / name[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return folder


def run(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def test_every_command_works_in_order(project):
    assert len(COMMANDS) == 6
    outputs = [
        run([sys.executable, "-m", *shlex.split(command, comments=True)], project).stdout for command in COMMANDS
    ]
    assert '"valid/accuracy": 0.9' in outputs[2]


def test_the_notebook_script_trains(project):
    done = run([sys.executable, "notebook.py"], project)
    assert "eval/loss" in done.stdout
