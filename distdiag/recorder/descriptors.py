"""File descriptors that the recorder keeps open in the job: they have high numbers, and are used only while they are still ours.

A script may expect the lowest numbers to be free, may limit itself to few files, and may close files that it did not open. If it
then gets one of these numbers again, the number refers to the script's file: a stack written there would damage it.
"""

from __future__ import annotations

import fcntl
import os
import resource

BELOW = 1024  # limit of `select()`, and often of open files; ours are the highest numbers below it
ROOM = 64


class KeptFile:
    """An open file of the recorder. Takes over the descriptor `fd`; `.fd` is its new number."""

    def __init__(self, fd: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = BELOW if limit < 0 else min(limit, BELOW)
        try:
            self.fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(limit - ROOM, limit // 2))
            os.close(fd)
        except OSError:  # all high numbers are in use
            self.fd = fd
        self._file = os.fstat(self.fd)

    def is_ours(self) -> bool:
        """True if the number still refers to the file that was opened."""
        try:
            return os.path.samestat(os.fstat(self.fd), self._file)
        except OSError:
            return False

    def close(self) -> None:
        if self.is_ours():
            os.close(self.fd)

    def mute(self) -> None:
        """Discard further writes: for a forked child, whose signal handlers write to the same number."""
        if self.is_ours():
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nothing, self.fd, inheritable=False)
            os.close(nothing)
