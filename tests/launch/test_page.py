"""docs/launching.md, done as a reader would; see tests/test_docs.py."""

import os
import re
from pathlib import Path

import pytest
from tests.test_docs import DOCS, ForkingReader, blocks_of

from trainwright.launch.slurm import SETTINGS

PAGE = (DOCS / "launching.md").read_text("utf-8")
DOCKER_ARGUMENTS = set(re.findall(r"^ARG (\w+)=", (DOCS.parent / "Dockerfile").read_text("utf-8"), re.MULTILINE))


class Typist(ForkingReader):
    """A reader who also shows files and sets variables for one command; the launcher itself is test_local.py's."""

    def type(self, line):
        variables = dict(re.findall(r"^(\w+)=(\S+) ", line))
        words = line.removeprefix(" ".join(f"{name}={value}" for name, value in variables.items())).strip()
        with pytest.MonkeyPatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            if words.startswith("docker "):  # no engine here: options and commands are compared with the Dockerfile
                assert set(re.findall(r"--build-arg (\w+)=", words)) <= DOCKER_ARGUMENTS
                assert re.search(r" (\.|trainwright(:cuda)? (doctor|train .*))$", words)
            elif words.startswith("cat "):
                self.shown += Path(words.removeprefix("cat ")).read_text("utf-8")
            else:
                super().type(words)


@pytest.fixture
def reader(in_tmp, monkeypatch, capfd):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Typist(monkeypatch, capfd)


def test_the_page_on_launching_works_from_the_first_line_to_the_last(reader):
    reader.read(blocks_of(PAGE))
    assert reader.exit_code == 0
    assert "TRAINWRIGHT_LAUNCHED" not in os.environ


def test_the_page_names_every_setting_of_a_job():
    missing = [name for name in SETTINGS if f"`{name}`" not in PAGE]
    assert missing == []


def test_the_page_names_every_build_argument_of_the_dockerfile():
    assert DOCKER_ARGUMENTS
    assert {name for name in DOCKER_ARGUMENTS if f"`{name}`" not in PAGE and f"{name}=" not in PAGE} == set()
