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
        self.count, self.is_counting = 0, False
        self.fsync, self.write = os.fsync, os.write

    def watch(self):
        """Begins to hear of acts. There is no way back: only for children."""
        os.fsync, os.write = self.counted_fsync, self.counted_write
        sys.addaudithook(self.hear)

    def hear(self, event, arguments):
        if event in ACTS or (event == "open" and arguments[2] & WRITES):
            self.act()

    def act(self):
        if self.is_counting and threading.current_thread().name == self.thread_name:
            if self.count == self.number:
                die()
            self.count += 1

    def counted_fsync(self, descriptor):
        self.act()
        self.fsync(descriptor)

    def counted_write(self, descriptor, content):
        self.act()
        half = len(content) // 2
        if half:
            self.write(descriptor, content[:half])
            self.act()
        return half + self.write(descriptor, content[half:])
