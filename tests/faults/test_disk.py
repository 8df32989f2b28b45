"""A disk that is full, gone, read-only or too small: training goes on, says so, and saves again when it can.

The limits are the system's own: RLIMIT_FSIZE, a small tmpfs in a mount namespace of the child, modes of folders that
hold for root too once the child has given up the right to pass them.
"""

import ctypes
import os
import resource
import shutil
import signal
from contextlib import suppress

import pytest
from tests.faults.hooks import At, kill_at
from tests.faults.runs import assert_same_end, config_of, in_child, log_of, stderr_of, store_of, train
from tests.messages import mentions

from trainwright.api.run import run_experiment

WIDE = ("model.width=512",)  # so that weights are larger than the log
LIMIT = 12_000
SAVING = {"asynchronous": ("checkpoint.asynchronous=true",), "synchronous": ("checkpoint.asynchronous=false",)}
CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000


def limit_files(trainer):
    trainer._finish_save()  # the save before is not meant
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))


def lift_limit(trainer):
    trainer._finish_save()  # the save under way is to meet the limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    run = tmp_path_factory.mktemp("disk") / "whole"
    assert train(run, *WIDE) == 0
    return run


@pytest.mark.parametrize("saving", SAVING)
def test_a_save_that_does_not_fit_is_told_and_the_next_one_is_made(saving, whole, tmp_path, tried):
    tried("files cannot grow (RLIMIT_FSIZE) during one save")
    run = tmp_path / "run"
    hooks = [At(3, limit_files), At(5, lift_limit)]
    assert train(run, *WIDE, *SAVING[saving], hooks=hooks) == 0
    log = log_of(run)
    assert log.count("Saving step 4 failed, retrying in") == 2
    assert "Step 4 is not saved (failure 1 of 3 in a row before the run ends); the newest checkpoint is step 2" in log
    assert "File too large" in log
    assert store_of(run).steps() == [2, 6]
    assert_same_end(whole, run)


@pytest.mark.parametrize("saving", SAVING)
def test_the_run_ends_after_max_failures_and_goes_on_when_there_is_room(saving, whole, tmp_path, tried):
    tried("files cannot grow (RLIMIT_FSIZE) until checkpoint.max_failures")
    run = tmp_path / "run"
    settings = (*WIDE, "checkpoint.max_failures=2", "checkpoint.every_steps=1", *SAVING[saving])
    assert train(run, *settings, hooks=[At(3, limit_files)]) == 2
    assert mentions(stderr_of(run), "2", "checkpoint.max_failures")
    assert store_of(run).steps() == [1, 2]
    assert train(run, *WIDE) == 0
    assert_same_end(whole, run)


@pytest.mark.parametrize("saving", SAVING)
def test_a_run_whose_last_save_fails_does_not_end_as_if_it_were_safe(saving, whole, tmp_path, tried):
    tried("files cannot grow (RLIMIT_FSIZE) during the last save")
    run = tmp_path / "run"
    assert train(run, *WIDE, *SAVING[saving], hooks=[At(5, limit_files)]) == 2
    assert "step-00000006: The checkpoint could not be written" in stderr_of(run)
    assert store_of(run).steps() == [2, 4]
    assert train(run, *WIDE) == 0
    assert_same_end(whole, run)


def test_a_log_that_cannot_be_written_ends_the_run_and_the_same_command_goes_on(whole, tmp_path, tried):
    tried("metrics.json on a full device (/dev/full)")
    run = tmp_path / "run"

    def fill(trainer):
        (trainer.folder / "metrics.json").symlink_to("/dev/full")

    assert train(run, *WIDE, hooks=[At(1, fill)]) == 2
    assert mentions(stderr_of(run), "metrics.json")
    (run / "metrics.json").unlink()
    assert train(run, *WIDE) == 0
    assert_same_end(whole, run)


@pytest.mark.parametrize("saving", SAVING)
def test_a_checkpoints_folder_that_is_removed_is_made_again(saving, whole, tmp_path, tried):
    tried("the checkpoints folder is removed during a run, then kill -9")
    run = tmp_path / "run"

    def remove(trainer):
        trainer._finish_save()
        shutil.rmtree(trainer.folder / "checkpoints")

    settings = (*WIDE, *SAVING[saving])
    hooks = [At(3, remove), At(5, lambda trainer: trainer._finish_save()), kill_at(5)]
    assert train(run, *settings, hooks=hooks) == -signal.SIGKILL
    assert store_of(run).steps() == [4]
    assert train(run, *settings) == 0
    assert_same_end(whole, run)


@pytest.mark.parametrize("saving", SAVING)
def test_a_mount_that_is_lost_for_a_while_costs_the_saves_of_that_time(saving, whole, tmp_path, tried):
    tried("the checkpoints folder is temporarily replaced by a file")
    run = tmp_path / "run"

    def lose(trainer):
        trainer._finish_save()
        (trainer.folder / "checkpoints").rename(trainer.folder / "elsewhere")
        (trainer.folder / "checkpoints").touch()

    def find(trainer):
        trainer._finish_save()
        (trainer.folder / "checkpoints").unlink()
        (trainer.folder / "elsewhere").rename(trainer.folder / "checkpoints")

    assert train(run, *WIDE, *SAVING[saving], hooks=[At(3, lose), At(5, find)]) == 0
    assert "Step 4 is not saved" in log_of(run)
    assert store_of(run).steps() == [2, 6]
    assert_same_end(whole, run)


@pytest.mark.parametrize("saving", SAVING)
def test_a_read_only_folder_costs_the_saves_of_that_time(saving, whole, tmp_path, tried):
    tried("the checkpoints folder is temporarily read-only")
    run = tmp_path / "run"

    def change_mode(mode):
        def act(trainer):
            trainer._finish_save()
            (trainer.folder / "checkpoints").chmod(mode)

        return act

    hooks = [At(3, change_mode(0o555)), At(5, change_mode(0o755))]
    assert train(run, *WIDE, *SAVING[saving], hooks=hooks, prepare=obey_modes) == 0
    log = log_of(run)
    assert "Permission denied" in log
    assert "Step 4 is not saved" in log
    assert store_of(run).steps() == [2, 6]
    assert_same_end(whole, run)


@pytest.mark.parametrize("options", [{}, {"fresh": True}])
def test_a_run_in_a_read_only_folder_is_one_sentence(options, whole, tmp_path):
    run = tmp_path / "runs" / "run"
    shutil.copytree(whole, run, symlinks=True)
    for folder in (run, run.parent):
        folder.chmod(0o555)
    (run / ".lock").chmod(0o444)
    config = config_of(run, *WIDE, "trainer.max_steps=8")
    code = in_child(lambda: run_experiment(config, **options), tmp_path / "told", obey_modes)
    for folder in (run, run.parent):
        folder.chmod(0o755)
    assert code == 2
    (line,) = stderr_of(tmp_path / "told").splitlines()
    assert mentions(line, "output_dir", run)


def obey_modes():
    """Gives up root's right to write where modes forbid it."""
    if os.geteuid() != 0:
        return

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    class Sets(ctypes.Structure):
        _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))

    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = Header(0x20080522, 0), (Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    sets[0].effective &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(ctypes.byref(header), sets) == 0


# a small disk of its own


def mount_small_disk(folder, num_bytes):
    """Mounts a tmpfs that this process alone sees, and that goes with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        raise PermissionError(ctypes.get_errno(), "unshare")
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    folder.mkdir(parents=True, exist_ok=True)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={num_bytes}".encode()) != 0:
        raise PermissionError(ctypes.get_errno(), "mount")


@pytest.fixture(scope="module")
def _can_mount(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mount")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mount_small_disk(folder, 2**16)
            code = 0
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        pytest.skip("a child may not mount a disk here")


class CopyAtTheEnd(At):
    """Copies the checkpoints from the small disk when the run has ended."""

    def __init__(self):
        super().__init__(-1, None)

    def after_train(self):
        folder = self.trainer.folder
        shutil.copytree(folder / "checkpoints", folder / "copied", symlinks=True)


def bring_back(run):
    (run / "checkpoints").rmdir()
    (run / "copied").rename(run / "checkpoints")


def pages(folder):
    """What a tmpfs needs for a folder's files."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


@pytest.mark.usefixtures("_can_mount")
@pytest.mark.parametrize("saving", SAVING)
def test_a_full_disk_costs_the_saves_until_there_is_room(saving, whole, tmp_path, tried):
    tried("a full disk (tmpfs) during one save")
    run = tmp_path / "run"
    ballast = run / "checkpoints" / "ballast"

    def fill(trainer):
        trainer._finish_save()
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
                file.flush()

    def empty(trainer):
        trainer._finish_save()
        ballast.unlink()

    hooks = [At(3, fill), At(5, empty), CopyAtTheEnd()]
    disk = lambda: mount_small_disk(run / "checkpoints", 2**21)  # noqa: E731
    assert train(run, *WIDE, *SAVING[saving], hooks=hooks, prepare=disk) == 0
    bring_back(run)
    log = log_of(run)
    assert "No space left on device" in log
    assert "Free some space; earlier checkpoints are unchanged." in log
    assert "Step 4 is not saved (failure 1 of 3" in log
    assert store_of(run).steps() == [2, 6]
    assert_same_end(whole, run)


@pytest.mark.usefixtures("_can_mount")
@pytest.mark.parametrize("saving", SAVING)
def test_on_a_disk_with_room_for_the_kept_checkpoints_alone_the_oldest_makes_room(saving, whole, tmp_path, tried):
    tried("a disk (tmpfs) with room for only `keep_last` checkpoints")
    run = tmp_path / "run"
    size = pages(store_of(whole).path(6))
    disk = lambda: mount_small_disk(run / "checkpoints", int(2.5 * size))  # noqa: E731
    assert train(run, *WIDE, *SAVING[saving], hooks=[CopyAtTheEnd()], prepare=disk) == 0
    bring_back(run)
    log = log_of(run)
    assert mentions(log, "checkpoint.keep_last", "2")
    assert "is not saved" not in log
    assert store_of(run).steps() == [4, 6]
    assert_same_end(whole, run)
