"""Start the ranks on this host with torchrun's process API, and leave none behind.

torchrun's agent starts a Python per rank, and each imports torch: with two ranks on two cores, that is half of a quick
probe. `torch.distributed.elastic.multiprocessing.start_processes`, the layer below the agent, can fork instead: torch is
imported once, before it has threads, and each rank starts 20 ms later. The parent does what the agent would do: it hosts
the store, watches the ranks, ends all if one fails, and takes them with it when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command import catalog
from distdiag.probekit.command.options import Options
from distdiag.probekit.measure.probe import load_probe
from distdiag.probekit.ranks.environment import RankPlace
from distdiag.probekit.ranks.work import RankError, run_rank
from distdiag.probekit.verdict.result import Result

_ARRIVAL_LIMIT_S = 10.0  # forked ranks arrive sooner or never
_GRACE_S = 1.5  # for the other ranks to report, or to destroy their process group
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Outcome:
    """Results or error of one rank."""

    rank: int
    results: list[Result] | None = None
    error: RankError | None = None


def launch(options: Options, nproc: int, deadline_s: float) -> list[Result]:
    """Run the probe on `nproc` forked ranks; return the results of rank 0.

    Args:
        deadline_s: time.monotonic() at which measuring should end.

    Raises:
        DistdiagError: an error of a rank, a rank that died (with its signal), or a hang (with the missing ranks).
        KeyboardInterrupt: Ctrl-C; all ranks have been ended.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # errors are reported below
    # a fork after CUDA was initialised breaks the ranks: then start new interpreters, which is slower
    method = "spawn" if torch.cuda.is_initialized() else "fork"
    # the store has a thread, so it starts after the fork; its socket listens already
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(nproc + 16)
    port = listener.getsockname()[1]
    outcomes: Any = torch.multiprocessing.get_context(method).SimpleQueue()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; one thread per rank
    env = {
        rank: {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for rank in range(nproc)
    }
    if method == "fork":
        for name in catalog.PROBES if options.name == catalog.ALL else [options.name]:
            load_probe(name).preload()
    sys.stdout.flush()
    sys.stderr.flush()
    # start_processes replaces these handlers
    main_thread = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if main_thread else ()
    handlers = {s: signal.getsignal(s) for s in numbers}
    with tempfile.TemporaryDirectory(prefix="distdiag-probe-") as logs, _no_interrupt_lost():
        arguments = {r: (r, nproc, port, os.getpid(), deadline_s, options, outcomes) for r in range(nproc)}
        context = None
        try:
            # ranks must not collect objects of this process: some have threads that do not exist after a fork
            gc.collect()
            gc.freeze()
            context = start_processes(
                "distdiag-probe", _rank_main, arguments, env, DefaultLogsSpecs(log_dir=logs), start_method=method
            )
            store = _serve(listener, port)
            return _supervise(context, outcomes, store, nproc, deadline_s, options)
        except (SignalException, KeyboardInterrupt) as e:
            received = getattr(e, "sigval", signal.SIGINT)
            for number in numbers:  # a second Ctrl-C must not leave ranks behind
                signal.signal(number, signal.SIG_IGN)
            if context is not None:
                _end_gently(context)
            if received == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + int(received)) from None
        finally:
            gc.unfreeze()
            if context is not None:
                _kill(context)
            listener.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _serve(listener: socket.socket, port: int) -> dist.TCPStore:
    """Return the rendezvous store, on a socket that already listens."""
    descriptor = os.dup(listener.fileno())  # the store closes it
    limit = datetime.timedelta(seconds=30)
    return dist.TCPStore("127.0.0.1", port, None, True, limit, wait_for_workers=False, master_listen_fd=descriptor)


def _rank_main(
    rank: int, nproc: int, port: int, parent: int, deadline_s: float, options: Options, outcomes: Any
) -> None:
    """Body of a forked rank."""
    _die_with(parent)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, _interrupt_once)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    place = RankPlace("distdiag", rank, nproc, rank, nproc, "127.0.0.1", port)
    try:
        with _no_interrupt_lost():
            results, error = run_rank(place, options, deadline_s, _ARRIVAL_LIMIT_S)
    except KeyboardInterrupt:
        return
    outcomes.put(_Outcome(rank, results, error))


def _interrupt_once(*_: object) -> None:
    """Let Ctrl-C end a rank through `finally`, which destroys the group; ignore the parent's second signal meanwhile."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Repeat a signal that arrives during a callback of the garbage collector, where Python prints and drops it."""
    before = sys.unraisablehook

    def again(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt | SignalException):
            before(unraisable)
            return
        number = getattr(unraisable.exc_value, "sigval", signal.SIGINT)
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _interrupt_once)
        timer = threading.Timer(0.01, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _die_with(parent: int) -> None:
    """End this process when its parent ends, even by SIGKILL, which no handler sees."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has already ended
        os._exit(1)


def _supervise(
    context: PContext, outcomes: Any, store: dist.TCPStore, nproc: int, deadline_s: float, options: Options
) -> list[Result]:
    """Wait for the ranks and return rank 0's results. The first failure ends all ranks."""
    seen: dict[int, _Outcome] = {}
    dead: dict[int, int] = {}
    failed_at: float | None = None
    last_moment = deadline_s + 2 * options.timeout_s + 30  # nothing in a rank waits longer than its limit
    pids = context.pids()
    while True:
        while not outcomes.empty():
            outcome: _Outcome = outcomes.get()
            seen[outcome.rank] = outcome
        for rank, code in _exited(pids).items():
            if rank not in seen and outcomes.empty():
                dead.setdefault(rank, code)
        if len(seen) == nproc and not any(o.error for o in seen.values()):
            context.wait(timeout=_GRACE_S, period=0.02)  # for the ranks to exit
            return seen[0].results or []
        if failed_at is None and (dead or any(o.error for o in seen.values())):
            failed_at = time.monotonic()
        if failed_at is not None and (time.monotonic() - failed_at > _GRACE_S or len(seen) + len(dead) == nproc):
            raise _worst_error(seen, dead, store)
        if time.monotonic() > last_moment:
            left = [r for r in range(nproc) if r not in seen]
            names = ", ".join(map(str, left))
            raise DistdiagError(f"rank {names} did not end", "see its output above", ExitCode.TIMEOUT, "timeout")
        time.sleep(0.02)


def _exited(pids: dict[int, int]) -> dict[int, int]:
    """Return the exit status of the ranks that have ended; torch reaps them later."""
    found: dict[int, int] = {}
    for rank, pid in pids.items():
        try:
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if info is not None:
            found[rank] = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
    return found


def _worst_error(seen: dict[int, _Outcome], dead: dict[int, int], store: dist.TCPStore) -> DistdiagError:
    """Return the most likely cause: first a death by a signal, then a hang with names, then errors by kind."""
    for rank, status in sorted(dead.items()):
        if status < 0:
            name = signal.Signals(-status).name
            return DistdiagError(
                f"rank {rank} was killed by {name}",
                "SIGKILL is often the kernel's, out of memory: `dmesg | tail`"
                if name == "SIGKILL"
                else "see its output above",
                ExitCode.FAILED,
                "rank_lost",
            )
    report = dist.PrefixStore("distdiag-probe/0", store)
    if report.check(["report"]):  # from a watchdog that ended its process
        left = json.loads(report.get("report"))
        return DistdiagError(left["message"], left["hint"], ExitCode.TIMEOUT, left["kind"])
    errors = [o.error for _, o in sorted(seen.items()) if o.error is not None]
    order = ["timeout", "usage", "no_data", "crashed", "backend", "rank_lost", "dropped"]
    errors.sort(key=lambda e: order.index(e.kind) if e.kind in order else 2)
    if errors:
        return errors[0].as_error()
    rank, status = sorted(dead.items())[0]
    return DistdiagError(
        f"rank {rank} ended with exit code {status}", "see its output above", ExitCode.FAILED, "rank_lost"
    )


def _end_gently(context: PContext) -> None:
    """Send SIGINT to the ranks, so that they destroy their process group, and wait a moment."""
    for pid in context.pids().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    end = time.monotonic() + _GRACE_S
    while time.monotonic() < end and len(_exited(context.pids())) < len(context.pids()):
        time.sleep(0.02)


def _kill(context: PContext) -> None:
    """Kill the remaining ranks, also stopped ones, and reap them."""
    gone = _exited(context.pids())
    for rank, pid in context.pids().items():
        if rank not in gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    context.close(signal.SIGKILL, timeout=5)
