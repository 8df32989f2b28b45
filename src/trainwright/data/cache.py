"""The cache folder, and folders in it that are built once however many processes ask for them at the same time."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trainwright.errors import DataError

logger = logging.getLogger(__name__)


def cache_root(cache_dir: str | Path | None) -> Path:
    """Returns the folder that holds all caches: `cache_dir`, or `trainwright` in $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trainwright"


def sync_folder(folder: Path) -> None:
    """Puts the names in `folder` on the disk; without it a rename may be undone by a power cut."""
    if os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network mounts cannot sync folders; there a power cut is the server's concern.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def rename_unless_taken(staging: Path, folder: Path) -> None:
    """Moves the finished folder into place in one act; where another process was first, its folder stands."""
    try:
        staging.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextmanager
def staged_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file to write that appears at `path` when the block ends well, in one act, and not at all otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with staging.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # without it a crash of the machine can leave the name on an empty file
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


try:
    import fcntl
except ImportError:  # Windows: every process builds for itself, and the last one's build is read
    fcntl = None  # type: ignore[assignment]

MAKER_FILE = "made_by.json"
_LOCK_FILE = "lock"
_BUILD, _STAGING = "build-", ".staging-"
# What backup tools and describe_path (fingerprint.py) know a cache by: https://bford.info/cachedir
CACHE_TAG = "CACHEDIR.TAG"
_CACHE_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by trainwright; may be deleted at any time.\n"

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _SAY_EVERY_SECONDS = 0.02, 0.5, 30.0

Report = Callable[[str], None]
"""Tells the waiting processes how far the build is."""


@dataclass(frozen=True)
class _Job:
    """The launch that a process belongs to, as torchrun and its like write it into the environment."""

    name: str
    num_ranks: int

    @classmethod
    def of_this_process(cls) -> _Job:
        words = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")
        ranks = os.environ.get("WORLD_SIZE", "1")
        return cls(" ".join(os.environ.get(word, "") for word in words), int(ranks) if ranks.isdigit() else 1)


def build_once(entry: Path, write: Callable[[Path, Report], None], *, rebuild: bool = False) -> Path:
    """Returns the newest build of `entry`, made by `write(folder, report)` if there is none.

    One process writes, the others wait for it and then read the same. With `rebuild` a further build is made and
    takes the place of the earlier ones, which are removed once nobody reads them; the ranks of one launch make one
    between them. If `write` raises, nothing is left and the next process that waits tries for itself.
    """
    before = find_build(entry)
    if before is not None and not rebuild:
        return before
    tag_as_cache(entry.parent)
    entry.mkdir(exist_ok=True)
    with _lock(entry, unless_other_than=before) as (report, is_alone):
        found = find_build(entry)
        if found is not None and (not rebuild or found != before or _was_made_by_our_job(found)):
            return found
        if is_alone:
            _remove_abandoned(entry)
        staging = entry / f"{_STAGING}{_this_process()}-{secrets.token_hex(4)}"
        staging.mkdir()
        try:
            write(staging, report)
            _write_maker(staging)
            _sync_all(staging)
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
    """Returns an open descriptor that keeps a build from being removed until it is closed.

    None where the file system has no locks: there no build is ever removed. A build that is already gone raises
    FileNotFoundError.
    """
    if fcntl is None:
        return None
    descriptor = os.open(build, os.O_RDONLY)
    try:
        # flock, not a record lock: it is on a folder, and forked workers shall hold it too.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        os.close(descriptor)
        return None
    if not (build / MAKER_FILE).exists():  # removed between the two calls
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(build))
    return descriptor


def _builds(entry: Path) -> list[Path]:
    # The maker's file goes first when a build is removed, so what is left of a half-removed one does not count.
    return [path for path in entry.glob(f"{_BUILD}*") if (path / MAKER_FILE).exists()]


def tag_as_cache(folder: Path) -> None:
    """Makes a folder of caches, marked so that it is not taken for data where it stands among it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tag = folder / CACHE_TAG
        if not tag.exists():
            tag.write_text(_CACHE_TAG_TEXT, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"The cache folder {folder} cannot be written ({error.strerror}). Choose another with cache_dir, "
            "or set XDG_CACHE_HOME."
        ) from error


@contextmanager
def _lock(entry: Path, *, unless_other_than: Path | None) -> Iterator[tuple[Report, bool]]:
    """Waits for the entry's lock, unless another build than the given one appears; see `_wait`.

    Gives a way to report progress, and whether the lock surely keeps others out. A POSIX record lock belongs to one
    process: what a user's function forks and a kill leaves behind does not hold it. (Two threads of a process may
    therefore build the same at once, each in a folder of its own.)
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
    """Returns True once the lock is ours; False where there are no locks, or when somebody else's build is there.

    The build is looked for too, since its maker may hold the lock again at once, for a further one.
    """
    wait, said_at = _FIRST_WAIT_SECONDS, -_SAY_EVERY_SECONDS
    while (is_free := _try_lock(descriptor)) is False:
        if find_build(entry) not in (None, before):
            break
        if time.monotonic() - said_at >= _SAY_EVERY_SECONDS:
            said_at = time.monotonic()
            holder = os.pread(descriptor, 400, 0).decode("utf-8", "replace") or "another process"
            logger.info("Waiting for %s, being made by %s", entry, holder)
        time.sleep(wait)
        wait = min(wait * 2, _LONGEST_WAIT_SECONDS)
    return bool(is_free)


def _try_lock(descriptor: int) -> bool | None:
    """Takes the lock; returns whether it was free, or None where there are no locks (some network mounts)."""
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
    """Returns a word of this process: its id alone does not tell, for a container that starts again often has the same.

    What a process forks has the word too, but another id.
    """
    return secrets.token_hex(4)


def _process_started() -> float:
    """Returns the time at which this process loaded `logging`, which notes it: about when it started."""
    record = logging.makeLogRecord({})
    return record.created - record.relativeCreated / 1000


def _write_maker(staging: Path) -> None:
    job = _Job.of_this_process()
    maker = {"process": _this_process(), "job": job.name, "ranks": job.num_ranks, "at": time.time()}
    (staging / MAKER_FILE).write_text(json.dumps(maker), encoding="utf-8")


def _was_made_by_our_job(build: Path) -> bool:
    """Was it made since we started, by another rank of our launch? Then that rank was asked to rebuild as we are."""
    job = _Job.of_this_process()
    if job.num_ranks < 2:
        return False
    maker: dict[str, Any] = json.loads((build / MAKER_FILE).read_text(encoding="utf-8"))
    is_of_our_launch = maker["job"] == job.name and maker["at"] > _process_started()
    return bool(is_of_our_launch and maker["process"] != _this_process())


def _rename_into_place(staging: Path, entry: Path) -> Path:
    """Gives the build the next number; it is there whole, from one moment to the next."""
    newest = max((int(path.name.removeprefix(_BUILD)) for path in entry.glob(f"{_BUILD}*")), default=0)
    for number in range(newest + 1, newest + 1000):
        built = entry / f"{_BUILD}{number:06}"
        try:
            staging.rename(built)
        except OSError as error:
            # Without locks another process may have taken the number; any other trouble is real.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES) or not built.exists():
                raise
        else:
            sync_folder(entry)
            return built
    raise DataError(f"No free build number in {entry}. Remove that folder.")


def _remove_abandoned(entry: Path) -> None:
    """Removes what killed builders left, of this entry (whose lock we hold) and of those beside it."""
    for staging in entry.parent.glob(f"*/{_STAGING}*"):
        # Another thread of ours may be writing it; and record locks do not keep a process out of its own.
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
            continue  # another user's: not ours to remove


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
            continue  # somebody reads it, or there are no locks to tell
        finally:
            os.close(descriptor)


def _sync_all(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
