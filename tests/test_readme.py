"""The README's files and commands, run as a reader would: written into an empty folder and typed in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_docs import Reader

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


def test_every_command_works_in_order(project, monkeypatch, capfd):
    monkeypatch.chdir(project)
    reader = Reader(monkeypatch, capfd)
    outputs = []
    for command in COMMANDS:
        reader.shown = ""
        reader.type(command)
        assert reader.exit_code == 0, f"{command}\n{reader.shown}"
        outputs.append(reader.shown)
    assert len(outputs) == 6
    assert '"valid/accuracy": 0.9' in outputs[2]


def test_the_notebook_script_trains_in_a_process_of_its_own(project):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "eval/loss" in done.stdout
