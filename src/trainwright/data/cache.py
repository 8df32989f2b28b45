"""The cache folder, and folders in it that are built once by any number of concurrent processes."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from trainwright.errors import DataError

logger = logging.getLogger(__name__)


def cache_root(cache_dir: str | Path | None) -> Path:
    """Returns the folder of all caches: `cache_dir`, or `trainwright` in $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trainwright"


def sync_folder(folder: Path) -> None:
    """Syncs the names in `folder` to the disk, so that a rename survives a power failure."""
    if os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network mounts cannot sync folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def rename_unless_taken(staging: Path, folder: Path) -> None:
    """Renames the finished folder; if another process was first, its folder is kept."""
    try:
        staging.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextmanager
def staged_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing that is renamed to `path` if the block succeeds, and removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with staging.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise, a crash of the machine could leave an empty file
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


try:
    import fcntl
except ImportError:  # Windows: every process builds, and the last build is used
    fcntl = None  # type: ignore[assignment]

MAKER_FILE = "made_by.json"
_LOCK_FILE = "lock"
_BUILD, _STAGING = "build-", ".staging-"
# Marks a cache for backup tools and for process.py: https://bford.info/cachedir
CACHE_TAG = "CACHEDIR.TAG"
_CACHE_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by trainwright; may be deleted at any time.\n"

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _REPORT_EVERY_SECONDS = 0.02, 0.5, 30.0

Report = Callable[[str], None]
"""Reports the progress of the build to the waiting processes."""


def _launch_id() -> tuple[str, int]:
    """Returns an identifier of the launch of this process, from the launcher's variables, and its number of ranks."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")
    ranks = os.environ.get("WORLD_SIZE", "1")
    return " ".join(os.environ.get(name, "") for name in names), int(ranks) if ranks.isdigit() else 1


def build_once(entry: Path, write: Callable[[Path, Report], None], *, rebuild: bool = False) -> Path:
    """Returns the newest build of `entry`, which `write(folder, report)` creates if there is none.

    One process writes while the others wait. With `rebuild`, a new build replaces the earlier ones, which are removed
    when no process reads them; the ranks of one launch create only one. If `write` raises, its files are removed and
    the next waiting process builds.
    """
    before = find_build(entry)
    if before is not None and not rebuild:
        return before
    tag_as_cache(entry.parent)
    entry.mkdir(exist_ok=True)
    with _lock(entry, unless_other_than=before) as (report, is_alone):
        found = find_build(entry)
        if found is not None and (not rebuild or found != before or _is_built_by_launch(found)):
            return found
        if is_alone:
            _remove_abandoned(entry)
        staging = entry / f"{_STAGING}{_this_process()}-{secrets.token_hex(4)}"
        staging.mkdir()
        try:
            write(staging, report)
            launch, num_ranks = _launch_id()
            maker = {"process": _this_process(), "job": launch, "ranks": num_ranks, "at": time.time()}
            (staging / MAKER_FILE).write_text(json.dumps(maker), encoding="utf-8")
            for path in staging.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            sync_folder(staging)
            built = _rename_into_place(staging, entry)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if is_alone:
            _remove_unread(entry, but=built)
    return built


def find_build(entry: Path) -> Path | None:
    """Returns the newest build of an entry, or None."""
    return max(_builds(entry), default=None)


def hold_for_reading(build: Path) -> int | None:
    """Returns an open descriptor that prevents the removal of a build until it is closed.

    None if the file system has no locks, in which case builds are never removed. A missing build raises
    FileNotFoundError.
    """
    if fcntl is None:
        return None
    descriptor = os.open(build, os.O_RDONLY)
    try:
        # flock instead of a record lock, because it works on a folder and forked workers inherit it.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        os.close(descriptor)
        return None
    if not (build / MAKER_FILE).exists():  # removed between the two calls
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(build))
    return descriptor


def _builds(entry: Path) -> list[Path]:
    # This file is removed first, so that a partly removed build does not count.
    return [path for path in entry.glob(f"{_BUILD}*") if (path / MAKER_FILE).exists()]


def tag_as_cache(folder: Path) -> None:
    """Creates a folder of caches with a tag that distinguishes it from data."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tag = folder / CACHE_TAG
        if not tag.exists():
            tag.write_text(_CACHE_TAG_TEXT, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"The cache folder {folder} cannot be written ({error.strerror}). Set cache_dir or XDG_CACHE_HOME."
        ) from error


@contextmanager
def _lock(entry: Path, *, unless_other_than: Path | None) -> Iterator[tuple[Report, bool]]:
    """Waits for the entry's lock, or until another build than the given one appears; see `_wait`.

    Yields a function to report progress, and whether the lock excludes other processes. A POSIX record lock belongs to
    one process, so processes that user code forks do not hold it. (Two threads may build at the same time, in different
    folders.)
    """
    with (entry / _LOCK_FILE).open("a+", encoding="utf-8") as file:

        def report(progress: str) -> None:
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {platform.node()}{progress and ': '}{progress}")
            file.flush()

        is_alone = _wait(file.fileno(), entry, before=unless_other_than)
        if is_alone:
            report("")
        yield report, is_alone


def _wait(descriptor: int, entry: Path, *, before: Path | None) -> bool:
    """Returns True when the lock is acquired; False without locks, or when another process's build exists.

    The build is checked too, because its process may immediately hold the lock again for another build.
    """
    wait, reported_at = _FIRST_WAIT_SECONDS, -_REPORT_EVERY_SECONDS
    while (is_free := _try_lock(descriptor)) is False:
        if find_build(entry) not in (None, before):
            break
        if time.monotonic() - reported_at >= _REPORT_EVERY_SECONDS:
            reported_at = time.monotonic()
            holder = os.pread(descriptor, 400, 0).decode("utf-8", "replace") or "another process"
            logger.info("Waiting for %s, which is built by %s", entry, holder)
        time.sleep(wait)
        wait = min(wait * 2, _LONGEST_WAIT_SECONDS)
    return bool(is_free)


def _try_lock(descriptor: int) -> bool | None:
    """Acquires the lock; returns whether it was free, or None without locks (some network mounts)."""
    if fcntl is None:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _this_process() -> str:
    return f"{platform.node()}-{os.getpid()}-{_process_token()}"


@functools.cache
def _process_token() -> str:
    """Returns a token of this process, because a restarted container often has the same process id."""
    return secrets.token_hex(4)


def _process_started() -> float:
    """Returns about the start time of this process: when it imported `logging`."""
    record = logging.makeLogRecord({})
    return record.created - record.relativeCreated / 1000


def _is_built_by_launch(build: Path) -> bool:
    """Returns True if another rank of this launch has built it since the start, in which case it is the requested
    rebuild."""
    launch, num_ranks = _launch_id()
    if num_ranks < 2:
        return False
    maker: dict[str, Any] = json.loads((build / MAKER_FILE).read_text(encoding="utf-8"))
    is_of_launch = maker["job"] == launch and maker["at"] > _process_started()
    return bool(is_of_launch and maker["process"] != _this_process())


def _rename_into_place(staging: Path, entry: Path) -> Path:
    """Renames the build to the next number."""
    newest = max((int(path.name.removeprefix(_BUILD)) for path in entry.glob(f"{_BUILD}*")), default=0)
    for number in range(newest + 1, newest + 1000):
        built = entry / f"{_BUILD}{number:06}"
        try:
            staging.rename(built)
        except OSError as error:
            # Without locks another process may have used the number.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES) or not built.exists():
                raise
        else:
            sync_folder(entry)
            return built
    raise DataError(f"No free build number in {entry}. Remove that folder.")


def _remove_abandoned(entry: Path) -> None:
    """Removes leftovers of killed processes, of this entry (whose lock is held) and of the entries next to it."""
    for staging in entry.parent.glob(f"*/{_STAGING}*"):
        # Another thread of this process may be writing it; record locks do not exclude it.
        if staging.name.startswith(f"{_STAGING}{_this_process()}-"):
            continue
        if staging.parent == entry:
            shutil.rmtree(staging, ignore_errors=True)
            continue
        try:
            with (staging.parent / _LOCK_FILE).open("r+", encoding="utf-8") as file:
                if _try_lock(file.fileno()):
                    shutil.rmtree(staging, ignore_errors=True)
        except OSError:
            continue  # another user's


def _remove_unread(entry: Path, *, but: Path) -> None:
    """Removes the earlier builds that no process has open."""
    for build in entry.glob(f"{_BUILD}*"):
        if build == but or fcntl is None:
            continue
        descriptor = os.open(build, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (build / MAKER_FILE).unlink(missing_ok=True)
            shutil.rmtree(build, ignore_errors=True)
        except OSError:
            continue  # it is read, or there are no locks
        finally:
            os.close(descriptor)
