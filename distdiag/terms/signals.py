"""Names of signals, and those by which native code ends a process."""

from __future__ import annotations

import signal

NATIVE_CRASHES = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def signal_name(number: int) -> str:
    """Return `SIGTERM` of 15; `signal 99` of one that this system has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
