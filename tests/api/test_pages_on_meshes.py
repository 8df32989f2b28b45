"""The examples of the README and the docs, trained on two ranks of each mesh, and compared with one process.

Each training command of a page runs on forked ranks, with parameters replicated, sharded or, for shipped models, split.
The last loss of each run is that of the same command in one process, but for what draws other numbers on each rank.
"""

import json
from pathlib import Path

import pytest
from tests.api.test_pages import CHANGES, COMMUNITIES, PROJECT, QuickReader, lines, reader, text_of  # noqa: F401  # the fixture
from tests.distributed.forked_launch import command, launch
from tests.test_docs import DOCS, _package_log_as_before, blocks_of  # noqa: F401  # the fixture acts by itself

from trainwright.api import experiments

MESHES = ("replicate", "fsdp")
NUM_RANKS = 2
ALONE = ("--print-config", "--fast-dev-run", "--nproc", "--profile", "runtime.mode=graph")
"""Options of `trainwright train` that do not just train, that choose the processes, or that are for one process."""
EVALUATING = ("--eval-only", "eval", "continuous_eval")
"""Words of `trainwright train` that train nothing."""
FAST = ("the optimizer", "a function every n steps")
"""The changes that read sharded weights: a hook and an optimizer. The others are slow tests."""
SHIPPED = ("data", "models", "memory", "performance")
"""The pages that train shipped models, which have rules for `tensor`; models of the other pages would need
`model.sharding`."""
SHORTER = {
    "README": {"max_epochs: 8": "max_epochs: 1", "max_epochs=12": "max_epochs=2"},
    "getting_started": {"train run.yaml": "train run.yaml trainer.max_epochs=1", "max_epochs=15": "max_epochs=11"},
}
"""What makes the runs of a page short."""
NO_RULES = {("models", "net"), ("models", "theirs"), ("models", "their_class"), ("memory", "tower")}
"""The runs of these pages whose model is not a shipped one: `tensor` rejects them, because they have no rules."""
DRAWS = {
    "inputs": "mixes samples by random numbers of the rank's batch",
    "collator": "adds noise, drawn for the rank's batch",
    "stream": "no numbers, but rounding grows to 2e-4 within its 40 steps",
    "counting": "each rank reads its shard of the stream, so that samples have another order",
    "made": "makes random batches on each rank",
    "state": "centers by the running mean of the rank's own samples",
    "finetune": "dropout",
    "theirs": "dropout",
    "plain": "dropout",
    "activation_checkpointing": "dropout",
}
"""The runs that draw other numbers on two ranks than in one process, and why."""


def last_losses(folder):
    """The last training loss of each run in a folder."""
    found = {}
    for path in Path(folder).glob("*/metrics.json"):
        written = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        found[path.parent.name] = [line["loss"] for line in written if "loss" in line][-1]
    return found


class MeshReader(QuickReader):
    """A reader who adds a mesh of two ranks to every training command, and types it for one process, too."""

    axis = "replicate"
    page = None

    def run(self, arguments):
        if arguments[0] not in ("train", "evaluate") or any(option in arguments for option in ALONE):
            return super().run(arguments)
        mesh = []
        if arguments[0] == "train":
            mesh = [f"runtime.mesh={{{self.axis}: {NUM_RANKS}}}"]
            if not any(word in arguments for word in EVALUATING):
                alone = [each.replace("runs/", "alone/") for each in arguments]
                shown = super().run([*alone, "output_dir=alone"])
                if self.exit_code:
                    return shown
        shown = self.launch([*arguments, *mesh])
        if self.axis == "tensor" and mesh and (self.page, self.name_of(arguments)) in NO_RULES:
            assert self.exit_code
            assert "model.sharding" in shown
            return self.launch([*arguments, f"runtime.mesh={{replicate: {NUM_RANKS}}}"])
        return shown

    def launch(self, arguments):
        self.capfd.readouterr()
        codes, errors = launch(Path.cwd(), NUM_RANKS, command(*arguments))
        self.exit_code = max(map(abs, codes))
        for path in Path.cwd().glob("rank-*.error"):
            path.unlink()
        return "".join([*self.capfd.readouterr(), *errors])

    @staticmethod
    def name_of(arguments):
        named = [each.removeprefix("name=") for each in arguments if each.startswith("name=")]
        return named[0] if named else Path(arguments[1]).stem


@pytest.fixture
def mesh_reader(reader, monkeypatch, capfd):  # noqa: F811  # pytest's way
    return MeshReader(monkeypatch, capfd)


def train_page(mesh_reader, blocks, axis):
    mesh_reader.axis = axis
    mesh_reader.read_well([(language, text) for language, text in blocks if language != "text"])
    alone, found = (
        {n: loss for n, loss in last_losses(folder).items() if n not in DRAWS} for folder in ("alone", "runs")
    )
    assert {name: found[name] for name in alone} == pytest.approx(alone, rel=1e-4)


def training_blocks(page):
    """The files of a page, and its commands that train or that a later training needs."""
    needed = (
        "trainwright train",
        "trainwright evaluate",
        "trainwright export",
        "trainwright new",
        "cd ",
        "python make",
    )
    path = DOCS.parent / "README.md" if page == "README" else DOCS / f"{page}.md"
    for language, text in blocks_of(path.read_text("utf-8")):
        for before, after in SHORTER.get(page, {}).items():
            text = text.replace(before, after)
        yield language, text if language else "\n".join(line for line in text.splitlines() if line.startswith(needed))


@pytest.mark.parametrize("axis", MESHES)
@pytest.mark.parametrize(
    "heading", [pytest.param(each, marks=[] if each in FAST else [pytest.mark.slow]) for each in CHANGES]
)
def test_each_change_trains_on_a_mesh(heading, axis, mesh_reader):
    for _, text in PROJECT:
        mesh_reader.write(text)
    train_page(mesh_reader, blocks_of(CHANGES[heading]), axis)


@pytest.mark.parametrize("axis", MESHES)
@pytest.mark.parametrize("page", [pytest.param(each, marks=[pytest.mark.slow]) for each in COMMUNITIES])
def test_each_page_of_a_community_trains_on_a_mesh(page, axis, mesh_reader, monkeypatch):
    monkeypatch.setattr(experiments, "_registered", {})
    train_page(mesh_reader, blocks_of(text_of(page)), axis)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "axis"),
    [
        *((page, axis) for page in ("README", "getting_started", *SHIPPED) for axis in MESHES),
        *((page, "tensor") for page in SHIPPED),
    ],
)
def test_each_page_trains_on_a_mesh(page, axis, mesh_reader, monkeypatch, tmp_path):
    if page in SHIPPED:
        pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mesh_reader.page = page
    train_page(mesh_reader, training_blocks(page), axis)
    if page == "README":
        assert lines("watched")[-1]["weight_norm"] > 0
