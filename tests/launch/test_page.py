"""docs/launching.md, done as a reader would; see tests/test_docs.py."""

import os
import re
from pathlib import Path

import pytest
from tests.test_docs import DOCS, ForkingReader, blocks_of

from trainwright.launch.slurm import SETTINGS

PAGE = (DOCS / "launching.md").read_text("utf-8")


class Typist(ForkingReader):
    """A reader who also shows files and sets variables for one command; the launcher itself is test_local.py's."""

    def type(self, line):
        variables = dict(re.findall(r"^(\w+)=(\S+) ", line))
        words = line.removeprefix(" ".join(f"{name}={value}" for name, value in variables.items())).strip()
        with pytest.MonkeyPatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            if words.startswith("cat "):
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
