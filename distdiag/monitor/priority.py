"""The monitor's priority: low while the job runs well, so that the ranks come first; ordinary while something may be wrong.

A process cannot raise its priority again without a privilege, but every thread of Linux has its own: what has low priority runs
in a separate thread. On a kernel with autogroups, only the nice value of the monitor's autogroup counts.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LOW = 10
ORDINARY = 0
_AUTOGROUP = Path("/proc/self/autogroup")


class Priority:
    """Runs polls at low or at ordinary priority."""

    def __init__(self, always_ordinary: bool = False) -> None:
        self._always_ordinary = always_ordinary
        self._thread: ThreadPoolExecutor | None = None
        self._autogroup = ORDINARY

    def run(self, poll: Callable[[], bool], low: bool) -> bool:
        if self._always_ordinary:
            return poll()
        self._set_autogroup(LOW if low else ORDINARY)
        if not low:
            return poll()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="low", initializer=_lower)
        return self._thread.submit(poll).result()

    def _set_autogroup(self, nice: int) -> None:
        if nice != self._autogroup:
            # fails on other kernels, and too soon after the last change: then the next poll tries again
            with contextlib.suppress(OSError):
                _AUTOGROUP.write_text(str(nice))
                self._autogroup = nice


def _lower() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW)
