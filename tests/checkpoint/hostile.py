"""File systems of fsspec that fail on purpose: at the n-th call, in one of several ways."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

CALLS = ("ls", "info", "cat_file", "open", "put_file", "pipe_file", "rm_file", "rmdir", "makedirs")
PUTS = ("put_file", "pipe_file")
CHANGES = (*PUTS, "rm_file")

FAULTS = ("rejects", "loses the answer", "dies", "drops", "truncates", "breaks off")


class Plan:
    """Which call goes wrong, and how; shared by every instance, for fsspec makes many."""

    fault: str | None = None
    at = -1
    calls = 0
    depth = 0
    has_struck = False

    @classmethod
    def set(cls, fault, at):
        cls.fault, cls.at, cls.calls, cls.has_struck = fault, at, 0, False

    @classmethod
    def take(cls):
        """Counts a call and says whether it is to go wrong."""
        number, cls.calls = cls.calls, cls.calls + 1
        strikes = cls.fault is not None and (number >= cls.at if cls.fault == "dies" else number == cls.at)
        cls.has_struck = cls.has_struck or strikes
        return strikes


class HostileFile:
    """A file whose every read, write and close is a call of its own."""

    def __init__(self, file, *, is_read):
        self.file, self.is_read = file, is_read

    def write(self, content):
        self.change(self.file.write, content)

    def close(self):
        if not self.file.closed:
            self.change(self.file.close)

    def discard(self):
        self.file.discard()

    def change(self, act, *arguments):
        """Writes or closes; going wrong, does less of it than it says, or more."""
        if not Plan.take():
            act(*arguments)
            return
        if Plan.fault == "loses the answer":
            act(*arguments)
        elif Plan.fault in ("truncates", "breaks off") and arguments:
            act(arguments[0][: len(arguments[0]) // 2])
        if Plan.fault not in ("truncates", "drops"):
            raise ConnectionError("the line went dead while writing")

    def read(self, size):
        if Plan.take():
            if Plan.fault == "truncates":
                return b""
            raise ConnectionError("the line went dead while reading")
        return self.file.read(size)

    def __enter__(self):
        if self.is_read:
            self.file.seek(0)
        return self

    def __exit__(self, *_):
        return None


def hostile(name):
    """Wraps one method of a file system; what it calls of its own is not counted again."""

    def call(self, *arguments, **options):
        act = functools.partial(getattr(super(type(self), self), name), *arguments, **options)
        if Plan.depth:
            return act()
        Plan.depth += 1
        try:
            if Plan.take():
                return go_wrong(name, act, arguments)
            answer = act()
        finally:
            Plan.depth -= 1
        return HostileFile(answer, is_read="rb" in arguments) if name == "open" else answer

    return call


def go_wrong(name, act, arguments):
    if Plan.fault == "loses the answer" and name in CHANGES:
        act()
    elif Plan.fault == "drops" and name in CHANGES:
        return
    elif Plan.fault in ("truncates", "breaks off") and name in PUTS:
        act.func(*halved(name, arguments))
        if Plan.fault == "truncates":
            return
    # Not an OSError: clients of object stores have errors of their own.
    raise RuntimeError(f"{name} went wrong")


def halved(name, arguments):
    if name == "pipe_file":
        path, content = arguments
        return path, content[: len(content) // 2]
    source, target = arguments
    half = Path(f"{source}.half")
    half.write_bytes(Path(source).read_bytes()[: Path(source).stat().st_size // 2])
    return str(half), target


class HostileMemory(MemoryFileSystem):
    """An object store."""

    protocol = "hostile"
    cachable = False
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("hostile://"))


class HostileDisk(LocalFileSystem):
    """A disk, which needs folders before files."""

    protocol = "hostiledisk"
    cachable = False


for one in (HostileMemory, HostileDisk):
    for name in CALLS:
        setattr(one, name, hostile(name))
    fsspec.register_implementation(one.protocol, one, clobber=True)
