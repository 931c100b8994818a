"""File descriptors that the recorder keeps open in the job: with high numbers, and used only while they are still ours.

A script may expect the lowest numbers to be free, may limit itself to few files, and may close what it did not open. A number that
it then gets again names its own file: a stack written there would damage it, a lock taken there would be the script's.
"""

from __future__ import annotations

import fcntl
import os
import resource

BELOW = 1024  # a limit of `select()`, and mostly of open files; ours are the highest below it
ROOM = 64


class Kept:
    """An open file of the recorder. Takes over the descriptor `fd`; `.fd` is its new number."""

    def __init__(self, fd: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = BELOW if limit < 0 else min(limit, BELOW)
        try:
            self.fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(limit - ROOM, limit // 2))
            os.close(fd)
        except OSError:  # no number is left up there
            self.fd = fd
        found = os.fstat(self.fd)
        self._file = found.st_dev, found.st_ino

    def is_ours(self) -> bool:
        """True if the number still names the file that it was made for."""
        try:
            found = os.fstat(self.fd)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._file

    def close(self) -> None:
        """Close it, unless the script has."""
        if self.is_ours():
            os.close(self.fd)

    def mute(self) -> None:
        """Discard what is still written to it: in a forked child, whose signal handlers write to the same number."""
        if self.is_ours():
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nothing, self.fd, inheritable=False)
            os.close(nothing)
