"""`python -m distdiag.monitor RUN_DIR --pages DIR --node K`: started by the first rank of a node, not by people.

It forks before it imports anything: the rank waits only for the fork, and has no child process afterwards.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from argparse import Namespace


# Of thousands of ranks, a poll makes as many containers, and nearly none in a cycle: with Python's 700, collections took a third of its time.
COLLECT = 50_000, 20, 20


def kept_bytes() -> int:
    """Return the size bound of run.db that the environment sets; the default for what is no size of at least 1 MiB."""
    from distdiag.errors import DistdiagError
    from distdiag.store.writer import KEEP_BYTES
    from distdiag.terms.units import parse_keep

    try:
        return parse_keep(os.environ["DISTDIAG_KEEP_BYTES"])
    except (KeyError, DistdiagError):
        return KEEP_BYTES


def nodes_port() -> int:
    """Return the port for other nodes that the environment sets; 0, any, for what is none."""
    given = os.environ.get("DISTDIAG_NODES_PORT", "")
    return int(given) if given.isascii() and given.isdigit() and len(given) <= 5 and int(given) < 65536 else 0


def _options(argv: list[str]) -> Namespace:
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(prog="distdiag.monitor")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--pages", type=Path, required=True)
    parser.add_argument("--overflow", type=Path, help="second directory of pages, for ranks that found no room")
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--keep", type=int, default=kept_bytes(), help="size bound of run.db, bytes")
    parser.add_argument("--for-reader", action="store_true", help="a reader waits for its verdict: ordinary priority")
    parser.add_argument("--quiet", action="store_true", default=os.environ.get("DISTDIAG_QUIET") == "1")
    parser.add_argument("--tape", action="store_true", help="write RUN/run.tape")
    parser.add_argument("--metrics", default=os.environ.get("DISTDIAG_METRICS", ""), help="PORT, HOST:PORT, otlp")
    parser.add_argument("--nodes-port", type=int, default=nodes_port(), help="port of node 0 for other nodes; 0: any")
    parser.add_argument("--foreground", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    if "--foreground" not in argv and os.fork():
        return 0
    from distdiag.streams import open_closed

    open_closed()
    import faulthandler
    import signal
    import traceback

    options = _options(argv)
    # ignore the job's Ctrl-C: the monitor ends after the last rank, and reports how it ended
    for s in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(s, signal.SIG_IGN)
    from distdiag import files
    from distdiag.store.liveness import MONITOR_LOG

    def log() -> TextIO:
        return open(files.open_own(options.run_dir, MONITOR_LOG, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")

    try:
        faulthandler.enable(log())
    except OSError:
        faulthandler.disable()
    import gc

    from distdiag.monitor.loop import Monitor
    from distdiag.monitor.priority import Priority
    from distdiag.store import rundir

    gc.set_threshold(*COLLECT)
    try:
        if not options.node:  # the runs of other nodes are inside the run of node 0
            base = options.run_dir.parent if options.run_dir.name.startswith("attempt_") else options.run_dir
            rundir.mark_latest(base)
        Monitor(
            options.run_dir, options.pages, options.node, quiet=options.quiet, keep_bytes=options.keep,
            overflow=options.overflow, priority=Priority(always_ordinary=options.for_reader), tape=options.tape,
            metrics=options.metrics, nodes_port=options.nodes_port,
        ).run()  # fmt: skip
    except Exception:
        # the job's output must not show our failure: it goes to the log, and readers see that the monitor is gone
        try:
            with log() as f:
                traceback.print_exc(file=f)
        except OSError:
            traceback.print_exc()
        return 1
    return 0


def run() -> NoReturn:
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # its threads wait on pidfds and sockets and need no cleanup


if __name__ == "__main__":
    run()
