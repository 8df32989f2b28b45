"""Signs the config of a run folder with a key of this user, so that only files written by the user's own runs can name
code.

The signature is the last line of the file, a comment. It covers the text above it, but not the path. registry/trust.py
decides what a file without a valid signature may do. The key never leaves the user's config directory.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

KEY_FILE = "signing-key"
_KEY_BYTES = 32
_PURPOSE = b"trainwright run config\n"
_SIGNATURE = re.compile(r"# signature: hmac-sha256 ([0-9a-f]{64})\n?")


class _KeyError(Exception):
    """The key cannot be used; the text says why."""


class _UnsafeKey(_KeyError):  # noqa: N818  # a kind of _KeyError
    """The user's own key file is readable by others or damaged, and can be replaced."""


def sign(text: str) -> str:
    """Returns the text with its signature; unchanged, with a warning, if the user's key cannot be created."""
    try:
        key = _own_key(creates=True)
    except (_KeyError, OSError) as error:
        _warn_once(
            f"Run folders are not signed, because there is no key: {error}. The run is not affected; commands that "
            "load its code need --trust. Set XDG_CONFIG_HOME to a folder that only you can write."
        )
        return text
    return f"{text}# signature: hmac-sha256 {_digest(key, text)}\n"


def is_signed(text: str) -> bool:
    """Returns True if the text ends with a signature by this user."""
    body, newline, last = text.removesuffix("\n").rpartition("\n")
    found = _SIGNATURE.fullmatch(last)
    if found is None:
        return False
    try:
        key = _own_key(creates=False)
    except FileNotFoundError:
        return False
    except (_KeyError, OSError) as error:
        _warn_once(f"Signatures of run folders cannot be checked: {error}.")
        return False
    return hmac.compare_digest(found[1], _digest(key, body + newline))


def key_path() -> Path:
    """Returns the file of the key: trainwright/signing-key in XDG_CONFIG_HOME, or in ~/.config."""
    chosen = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification says that relative paths are ignored.
    folder = Path(chosen) if Path(chosen).is_absolute() else Path("~/.config").expanduser()
    return folder / "trainwright" / KEY_FILE


def _digest(key: bytes, text: str) -> str:
    return hmac.new(key, _PURPOSE + text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _own_key(*, creates: bool) -> bytes:
    """Returns the key; with `creates`, a missing key is created, and a key that others could read is replaced."""
    try:
        path = key_path()
    except RuntimeError as error:
        raise _KeyError("this user has no home directory") from error
    try:
        return _read_key(path)
    except (FileNotFoundError, _UnsafeKey):
        if not creates:
            raise
    home = path.parents[2]
    if path.parents[1].name == ".config" and not home.is_dir():
        raise _KeyError(f"the home directory {home} does not exist")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path.parent):
        try:
            return _read_key(path)  # another process has created it in the meantime
        except FileNotFoundError:
            return _create_key(path, replaces=False)
        except _UnsafeKey as error:
            logger.warning(
                "%s. It is replaced, so run folders that were signed with it need --trust, or one more training step.",
                error,
            )
            return _create_key(path, replaces=True)


def _read_key(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise _KeyError(f"{path} is not a file")
        if facts.st_uid != os.geteuid():
            raise _KeyError(f"{path} belongs to another user")
        if facts.st_mode & 0o077:
            raise _UnsafeKey(f"{path} was readable or writable by others (mode {stat.S_IMODE(facts.st_mode):04o})")
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise _UnsafeKey(f"{path} is damaged")
    return key


def _create_key(path: Path, *, replaces: bool) -> bytes:
    """Creates the file atomically. Unless `replaces`, an existing file of a faster process is
    kept."""
    if path.parent.stat().st_uid == os.geteuid():
        path.parent.chmod(0o700)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # independent of the umask
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        if not replaces:
            try:
                os.link(draft, path)
            except FileExistsError:
                return _read_key(path)
            except OSError:  # a file system without hard links
                draft.replace(path)
        else:
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return _read_key(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Prevents other processes of this user from creating a key; if the file system does not support locks, none is
    used."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
