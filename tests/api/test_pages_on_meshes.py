"""The examples of the README, docs/customisation.md and the pages "Coming from", trained on two ranks of each mesh.

Each training command of a page runs on forked ranks, with parameters replicated or sharded.
"""

from pathlib import Path

import pytest
from tests.api.test_pages import CHANGES, COMMUNITIES, PROJECT, QuickReader, lines, reader, text_of  # noqa: F401  # the fixture
from tests.distributed.forked_launch import command, launch
from tests.test_docs import DOCS, _package_log_as_before, blocks_of  # noqa: F401  # the fixture acts by itself

from trainwright.api import experiments

MESHES = ("replicate", "fsdp")
ALONE = ("--print-config", "--fast-dev-run", "--nproc", "--profile", "runtime.mode=graph")
"""Options of `trainwright train` that do not just train, that choose the processes, or that are for one process."""
FAST = ("the optimizer", "a function every n steps")
"""The changes that read sharded weights: a hook and an optimizer. The others are slow tests."""


class MeshReader(QuickReader):
    """A reader who adds a mesh of two ranks to every training command."""

    axis = "replicate"

    def run(self, arguments):
        if arguments[0] not in ("train", "evaluate") or any(option in arguments for option in ALONE):
            return super().run(arguments)
        self.capfd.readouterr()
        mesh = [f"runtime.mesh={{{self.axis}: 2}}"] if arguments[0] == "train" else []
        codes, errors = launch(Path.cwd(), 2, command(*arguments, *mesh))
        self.exit_code = max(codes)
        for path in Path.cwd().glob("rank-*.error"):
            path.unlink()
        return "".join([*self.capfd.readouterr(), *errors])


@pytest.fixture
def mesh_reader(reader, monkeypatch, capfd):  # noqa: F811  # pytest's way
    return MeshReader(monkeypatch, capfd)


def train_page(mesh_reader, blocks, axis):
    mesh_reader.axis = axis
    mesh_reader.read_well([(language, text) for language, text in blocks if language != "text"])


@pytest.mark.parametrize("axis", MESHES)
@pytest.mark.parametrize(
    "heading", [pytest.param(each, marks=[] if each in FAST else [pytest.mark.slow]) for each in CHANGES]
)
def test_each_change_trains_on_a_mesh(heading, axis, mesh_reader):
    for _, text in PROJECT:
        mesh_reader.write(text)
    train_page(mesh_reader, blocks_of(CHANGES[heading]), axis)


@pytest.mark.parametrize("axis", MESHES)
@pytest.mark.parametrize(
    "page",
    [pytest.param(each, marks=[] if each == "easy_torch_tpu" else [pytest.mark.slow]) for each in COMMUNITIES],
)
def test_each_page_of_a_community_trains_on_a_mesh(page, axis, mesh_reader, monkeypatch):
    monkeypatch.setattr(experiments, "_registered", {})
    train_page(mesh_reader, blocks_of(text_of(page)), axis)


@pytest.mark.parametrize("axis", MESHES)
def test_the_readme_trains_on_a_mesh(axis, mesh_reader):
    blocks = blocks_of((DOCS.parent / "README.md").read_text("utf-8"))
    commands = [text for language, text in blocks if not language and "run.yaml" in text]
    mesh_reader.axis = axis
    for language, text in blocks:
        if language:
            mesh_reader.write(text)
    mesh_reader.read_well([("", text.replace("run.yaml", "run.yaml trainer.max_epochs=1")) for text in commands[-1:]])
    assert lines("watched")[-1]["weight_norm"] > 0
