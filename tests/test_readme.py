"""The README and docs/apis.md, followed as a reader would: files are written, commands are typed in order."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.test_docs import Reader

from trainwright.checkpoint.store import CheckpointStore

ROOT = Path(__file__).parents[1]
README, APIS = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/apis.md"))
BLOCK = re.compile(r"```(\w*)\n(.*?)```", flags=re.DOTALL)
COMMANDS = [
    line
    for language, text in BLOCK.findall(APIS)
    if not language
    for line in text.splitlines()
    if line.startswith("trainwright ")
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    for language, text in BLOCK.findall(README + APIS):
        if language:
            name = re.match(r"# (\S+)\n", text)
            assert name, f"a {language} block does not begin with its file's name"
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


def start(script, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, script], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    shown, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return shown


def test_the_script_of_the_page_trains_in_a_process_of_its_own(project):
    assert "eval/loss" in finish(start("notebook.py", project))


def test_the_script_ends_with_the_same_bits_after_a_kill(project, tmp_path):
    assert "'eval/accuracy': 0.9" in finish(start("digits.py", project))
    shutil.copy(project / "digits.py", tmp_path)
    killed, log = start("digits.py", tmp_path), tmp_path / "runs" / "notebook" / "metrics.json"
    while not (log.is_file() and log.read_text().count("\n") > 4):
        assert killed.poll() is None
        time.sleep(0.005)
    killed.kill()
    killed.communicate()
    assert "'eval/accuracy': 0.9" in finish(start("digits.py", tmp_path))
    whole, resumed = (
        CheckpointStore(folder / "runs" / "notebook" / "checkpoints").read(225, "model")
        for folder in (project, tmp_path)
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_at_most_two_screens_come_before_the_links():
    above = README.partition("\n## Documentation")[0]
    assert len(above.splitlines()) <= 80
