"""Counts a process's acts on the file system, and kills it before the n-th.

Acts that only read are left out: they change nothing for whoever comes after, so that a death before one of them is a
death before the next one that writes. Each write is two acts, with half of it done between them.
"""

import os
import sys
import threading

from tests.faults.hooks import die

ACTS = {
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "os.symlink", "os.link", "os.utime"),
    *("fcntl.flock", "fcntl.lockf"),
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Acts:
    """The acts of one thread while `is_counting`; it dies before number `number`, or never (None)."""

    def __init__(self, number, *, thread_name="MainThread"):
        self.number, self.thread_name = number, thread_name
        self.is_counting = False
        self.kinds = []  # of the acts so far
        self.fsync, self.write = os.fsync, os.write

    def watch(self):
        """Begins to hear of acts. There is no way back: only for children."""
        os.fsync, os.write = self.counted_fsync, self.counted_write
        sys.addaudithook(self.hear)

    def hear(self, event, arguments):
        if event in ACTS or (event == "open" and arguments[2] & WRITES):
            self.act()

    def act(self, kind="change"):
        if self.is_counting and threading.current_thread().name == self.thread_name:
            if len(self.kinds) == self.number:
                die()
            self.kinds.append(kind)

    def counted_fsync(self, descriptor):
        self.act("sync")
        self.fsync(descriptor)

    def counted_write(self, descriptor, content):
        self.act("write")
        half = len(content) // 2
        if half:
            self.write(descriptor, content[:half])
            self.act("write")
        return half + self.write(descriptor, content[half:])


def telling(kinds):
    """The numbers of the acts before which a death leaves something else than before the act before, by their kinds.

    A sync changes nothing for whoever comes after a process that was killed. Of one write after another to a file the
    first is told from no write, and the second from a whole file.
    """
    return [
        number
        for number in range(len(kinds))
        if kinds[max(number - 1, 0)] != "sync" and kinds[max(number - 2, 0) : number + 1] != ["write"] * 3
    ]
