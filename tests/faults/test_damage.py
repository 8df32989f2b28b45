"""Every file of the newest checkpoint damaged in every way: it is named and set aside, the one before is used.

All checkpoints damaged: the run begins again, says so, and nothing is deleted.
"""

import os
import shutil
import signal

import pytest
from tests.faults.damage import DAMAGE, cut
from tests.faults.hooks import AfterSave, die, kill_at
from tests.faults.runs import assert_same_end, copy_run, log_of, store_of, train
from tests.faults.two_ranks import Run, train_two

from trainwright.checkpoint.store import CheckpointStore

FILES = [
    *("MANIFEST.json", "model.json", "model.safetensors", "optimizers.json", "optimizers.safetensors"),
    *("training.json", "training.safetensors"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    run = tmp_path_factory.mktemp("damage") / "whole"
    assert train(run) == 0
    return run


@pytest.fixture(scope="module")
def killed(whole):
    """The same run, killed at step 5 with checkpoints of steps 2 and 4."""
    run = whole.with_name("killed")
    assert train(run, "checkpoint.asynchronous=false", hooks=[kill_at(5)]) == -signal.SIGKILL
    assert store_of(run).steps() == [2, 4]
    assert sorted(path.name for path in store_of(run).path(4).iterdir()) == FILES
    return run


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ways_to_harm(file, which):
    """Two of the ways, so that each way is two files', or the other five."""
    ways, place = list(DAMAGE), FILES.index(file)
    two = {ways[place], ways[(place + 3) % len(ways)]}
    return [kind for kind in ways if (kind in two) == (which == "two ways")]


@pytest.mark.parametrize("which", ["two ways", pytest.param("the other ways", marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_one_before_used(
    file, which, whole, killed, tmp_path, tried
):
    kinds = ways_to_harm(file, which)
    tried("a file of the newest checkpoint truncated, corrupted or deleted", cases=len(kinds))
    for number, kind in enumerate(kinds):
        run = copy_run(killed, tmp_path / f"run-{number}")
        DAMAGE[kind](store_of(run).path(4) / file)
        before = content_of(store_of(run).path(4))
        assert train(run) == 0, kind
        log = log_of(run)
        [warning] = [line for line in log.splitlines() if "Damaged checkpoint" in line]
        assert "step-00000004" in warning, kind
        assert file in warning, kind
        assert "kept as damaged-step-00000004. Using step-00000002 instead." in warning, kind
        assert "Resumed from" in log, kind
        assert content_of(run / "checkpoints" / "damaged-step-00000004") == before, kind
        assert_same_end(whole, run)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_run_whose_checkpoints_are_all_damaged_begins_again_and_deletes_nothing(kind, whole, killed, tmp_path, tried):
    tried("every checkpoint damaged", cases=1)
    run = copy_run(killed, tmp_path / "run")
    for number, step in enumerate((2, 4)):
        DAMAGE[kind](store_of(run).path(step) / FILES[1 + number])
    before = [content_of(store_of(run).path(step)) for step in (2, 4)]
    assert train(run) == 0
    log = log_of(run)
    assert log.count("There is no intact checkpoint: training starts at step 0.") == 2
    assert "Resumed" not in log
    damaged = [run / "checkpoints" / f"damaged-step-{step:08d}" for step in (2, 4)]
    assert [content_of(folder) for folder in damaged] == before
    assert_same_end(whole, run)


SAMPLED = ("model.json", "optimizers.safetensors")  # the other files' are `make test-slow`'s


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[] if file in SAMPLED else [pytest.mark.slow]) for file in FILES[1:]]
)
def test_a_write_that_the_disk_dropped_after_the_commit_costs_one_checkpoint(file, whole, tmp_path, tried):
    tried("a disk that loses data that it had confirmed, then kill -9")

    def drop(path):
        cut(path / file, lambda size: size // 2)
        die()

    run = tmp_path / "run"
    assert train(run, "checkpoint.asynchronous=false", hooks=[AfterSave(4, drop)]) == -signal.SIGKILL
    assert train(run) == 0
    assert "Using step-00000002 instead." in log_of(run)
    assert_same_end(whole, run)


def test_a_second_damage_gets_a_name_of_its_own(whole, killed, tmp_path, tried):
    tried("a damaged checkpoint whose replacement is damaged too", cases=1)
    run = copy_run(killed, tmp_path / "run")
    DAMAGE["cut to half"](store_of(run).path(4) / "model.safetensors")
    assert train(run, "checkpoint.asynchronous=false", hooks=[kill_at(5)]) == -signal.SIGKILL
    DAMAGE["deleted"](store_of(run).path(4) / "model.safetensors")
    assert train(run) == 0
    names = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("damaged")]
    assert sorted(names) == ["damaged-step-00000004", "damaged-step-00000004-2"]
    assert_same_end(whole, run)


@pytest.mark.parametrize("rest", ['{"step": 5, "lo', '{"step": 6, "loss": 0.5}\n', "\x00" * 100])
def test_a_log_line_that_was_half_written_is_written_again(rest, whole, killed, tmp_path, tried):
    tried("a log line truncated, written too early, or filled with zeros")
    run = copy_run(killed, tmp_path / "run")
    with (run / "metrics.json").open("a", encoding="utf-8") as file:
        file.write(rest)
    assert train(run) == 0
    assert_same_end(whole, run)


def read_elsewhere(copy):
    """Lets rank 1 read the checkpoints from a folder of its own, as on another machine, once rank 0 has verified."""
    read_split = CheckpointStore.read_split

    def read(self, step, part):
        here = CheckpointStore(copy) if os.environ["RANK"] == "1" else self
        return read_split(here, step, part)

    CheckpointStore.read_split = read


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("mesh", "read", "unread"),
    [
        ("replicate", ("model.safetensors", "training.json"), ()),
        # A rank reads its own shards; damage in those of the other is that rank's to find.
        ("fsdp", ("optimizers.rank-00001.safetensors",), ("model.rank-00000.safetensors",)),
    ],
)
def test_damage_that_only_one_rank_sees_ends_all_ranks(tmp_path, mesh, read, unread):
    run, overrides = tmp_path / "run", (f"runtime.mesh={{{mesh}: 2}}", "checkpoint.asynchronous=false")
    assert train_two(run, *overrides, "trainer.max_steps=2") == [0, 0]
    for name in (*read, *unread):
        case, copy = copy_run(run, tmp_path / "case" / name), tmp_path / "copies" / name
        shutil.copytree(store_of(case).folder, copy)
        flip_last_byte(copy / "step-00000002" / name)
        resumed = Run(case, *overrides, "trainer.max_steps=3", prepare=lambda copy=copy: read_elsewhere(copy))
        codes = resumed.wait(seconds=30)
        if name in unread:
            assert codes == [0, 0]
            continue
        assert codes == [2, 2], name
        for rank in range(2):
            assert f"copies/{name}/step-00000002" in resumed.said(rank)
            assert f"/{name}: The content" in resumed.said(rank)
        assert "Rank 1: " in resumed.said(0)
