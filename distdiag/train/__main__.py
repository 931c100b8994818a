"""`torchrun … -m distdiag.train`, or `python -m distdiag.train` for one process."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from distdiag.errors import DistdiagError, ExitCode, need_torch
from distdiag.streams import say_error
from distdiag.train.config import parse_arguments

STUCK_GRACE_S = 3.0  # a rank that waits in a collective cannot be interrupted from Python: after this time it is ended
RANK_ZERO_GRACE_S = 20.0  # for rank 0 to print the error, before another rank's exit makes the launcher end all


def main(argv: Sequence[str] | None = None) -> NoReturn:
    try:
        _interruptible()
        code = _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # outside of _run
        code = int(ExitCode.INTERRUPTED)
    leave(code)


def _run(argv: Sequence[str]) -> int:
    rank = int(os.environ.get("RANK", "0") or 0)
    if rank != 0 and ("-h" in argv or "--help" in argv):  # only rank 0 prints the help
        return ExitCode.OK
    try:
        config = parse_arguments(argv)
        need_torch("the reference job")
        from distdiag.train.loop import train

        train(config)
    except DistdiagError as e:
        return _refuse(e, rank)
    except KeyboardInterrupt:
        if rank == 0:
            print("distdiag: interrupted; continue from a checkpoint with --resume DIR", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else ExitCode.OK
    except BaseException as e:
        _ignore_interrupts()  # the launcher ends all ranks when one fails; print the traceback first
        # the recorder's hook, if it is attached, records the exception and prints it
        sys.excepthook(type(e), e, e.__traceback__)
        return ExitCode.FAILED
    return ExitCode.OK


def leave(code: int) -> NoReturn:
    """Run the exit functions, flush, and end the process without interpreter shutdown.

    gloo's threads may still hold tensors after the process group is destroyed. Releasing them needs the GIL, and a thread
    that requests it during interpreter shutdown is unwound by force: "terminate called without an active exception",
    SIGABRT (https://github.com/pytorch/pytorch/pull/179291).
    """
    _ignore_interrupts()
    try:
        atexit._run_exitfuncs()
    except BaseException as e:
        sys.excepthook(type(e), e, e.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has ended
            stream.flush()
    os._exit(code)


def _refuse(error: DistdiagError, rank: int) -> int:
    """Print the error on rank 0. The other ranks wait, so that the launcher does not end rank 0 before it has printed."""
    code = int(error.code)
    if rank == 0:
        say_error(error.message, error.hint, flush=True)
        return code
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(RANK_ZERO_GRACE_S)
    return code


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interruptible() -> None:
    """Handle SIGTERM like Ctrl-C, and both even if the main thread waits in a collective."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    signal.set_wakeup_fd(sending, warn_on_full_buffer=False)  # the C signal handler writes to it at once

    def watch() -> None:
        while number := os.read(receiving, 1):
            if number[0] in (signal.SIGTERM, signal.SIGINT):
                time.sleep(STUCK_GRACE_S)
                os._exit(ExitCode.INTERRUPTED)

    threading.Thread(target=watch, name="distdiag-interrupt", daemon=True).start()


if __name__ == "__main__":
    main()
