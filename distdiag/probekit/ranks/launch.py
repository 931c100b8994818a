"""Fork the ranks on this host, and leave none behind.

torchrun's agent starts a Python per rank, and each imports torch: with two ranks on two cores, that is half of a quick
probe. With a fork torch is imported once, before it has threads, and each rank starts 20 ms later. The parent does what the
agent would do: it hosts the store, watches the ranks, ends all if one fails, and takes them with it when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command import catalog
from distdiag.probekit.command.options import Options
from distdiag.probekit.measure.probe import load_probe
from distdiag.probekit.ranks.environment import RankPlace
from distdiag.probekit.ranks.watchdog import timed_out
from distdiag.probekit.ranks.work import run_rank
from distdiag.probekit.verdict.result import Result
from distdiag.terms.signals import signal_name

_ARRIVAL_LIMIT_S = 10.0  # forked ranks arrive sooner or never
_GRACE_S = 1.5  # for the other ranks to report, or to destroy their process group
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LIKELIEST_FIRST = ("timeout", "usage", "no_data", "crashed", "backend", "rank_lost", "dropped")  # kinds of errors


def launch(options: Options, nproc: int, deadline_s: float) -> list[Result]:
    """Run the probe on `nproc` forked ranks, until `deadline_s` of time.monotonic(); return the results of rank 0.

    Raises:
        DistdiagError: an error of a rank, a rank that died (with its signal), or a hang (with the missing ranks).
        KeyboardInterrupt: Ctrl-C; all ranks have been ended.
    """
    # a fork after CUDA was initialised breaks the ranks: then start new interpreters, which is slower
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    # the store has a thread, so it starts after the fork; its socket listens already
    listener = socket.create_server(("127.0.0.1", 0), backlog=nproc + 16)
    port = listener.getsockname()[1]
    outcomes: Any = context.SimpleQueue()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; one thread per rank
    if context.get_start_method() == "fork":
        for name in catalog.PROBES if options.name == catalog.ALL else [options.name]:
            load_probe(name).preload()
    sys.stdout.flush()
    sys.stderr.flush()
    main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, _end) for number in _ENDING} if main_thread else {}
    started: list[BaseProcess] = []
    with _no_interrupt_lost():
        try:
            # ranks must not collect objects of this process: some have threads that do not exist after a fork
            gc.collect()
            gc.freeze()
            for rank in range(nproc):
                place = RankPlace("distdiag", rank, nproc, rank, nproc, "127.0.0.1", port)
                process = context.Process(target=_rank_main, args=(place, os.getpid(), deadline_s, options, outcomes))
                process.start()
                started.append(process)
            # the store closes its descriptor
            store = dist.TCPStore(
                "127.0.0.1", port, None, True, datetime.timedelta(seconds=30), wait_for_workers=False,
                master_listen_fd=os.dup(listener.fileno()),
            )  # fmt: skip
            return _supervise(started, outcomes, store, deadline_s + 2 * options.timeout_s + 30)
        except (KeyboardInterrupt, SystemExit):
            for number in handlers:  # a second Ctrl-C must not leave ranks behind, a third not change the exit code
                signal.signal(number, signal.SIG_IGN)
            handlers.clear()  # the command ends now
            _end_gently(started)
            raise
        finally:
            gc.unfreeze()
            for process in started:
                process.kill()  # also a stopped one
                process.join(timeout=5)
            listener.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _end(number: int, _frame: object) -> None:
    """Raise what ends the command: KeyboardInterrupt, or the exit code of any other signal."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _rank_main(place: RankPlace, parent: int, deadline_s: float, options: Options, outcomes: Any) -> None:
    _die_with(parent)
    for number in _ENDING[1:]:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, _interrupt_once)
    os.environ |= {
        "RANK": str(place.rank), "LOCAL_RANK": str(place.rank), "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.world_size), "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        with _no_interrupt_lost():
            outcome: list[Result] | DistdiagError = run_rank(place, options, deadline_s, _ARRIVAL_LIMIT_S)
    except KeyboardInterrupt:
        return
    except DistdiagError as e:
        outcome = e
    outcomes.put((place.rank, outcome))


def _interrupt_once(*_: object) -> None:
    """Let Ctrl-C end a rank through `finally`, which destroys the group; ignore the parent's second signal meanwhile."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Repeat a signal that arrives during a callback of the garbage collector, where Python prints and drops it."""
    before = sys.unraisablehook

    def again(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            before(unraisable)
            return
        number = int(error.code or 0) - 128 if isinstance(error, SystemExit) else signal.SIGINT
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


def _supervise(ranks: Sequence[BaseProcess], outcomes: Any, store: dist.TCPStore, last_moment: float) -> list[Result]:
    """Wait for the ranks and return rank 0's results. The first failure ends all ranks.

    `last_moment`: time.monotonic() until which nothing in a rank waits.
    """
    seen: dict[int, list[Result] | DistdiagError] = {}
    failed_at: float | None = None
    while True:
        # read before the queue: what a rank has put there is complete when it ends
        ended = {rank: p.exitcode for rank, p in enumerate(ranks) if p.exitcode is not None}
        while not outcomes.empty():
            rank, outcome = outcomes.get()
            seen[rank] = outcome
        dead = {rank: status for rank, status in ended.items() if rank not in seen}
        errors = [o for _, o in sorted(seen.items()) if isinstance(o, DistdiagError)]
        if len(seen) == len(ranks) and not errors:
            for p in ranks:
                p.join(_GRACE_S)
            return seen[0]  # type: ignore[return-value]
        now = time.monotonic()
        if failed_at is None and (dead or errors):
            failed_at = now
        if failed_at is not None and (now - failed_at > _GRACE_S or len(seen) + len(dead) == len(ranks)):
            raise _likeliest(errors, dead, store)
        if now > last_moment:
            names = ", ".join(str(r) for r in range(len(ranks)) if r not in seen)
            raise timed_out(f"rank {names} did not end", "see its output above")
        time.sleep(0.02)


def _likeliest(errors: Sequence[DistdiagError], dead: dict[int, int], store: dist.TCPStore) -> DistdiagError:
    """Return the most likely cause: first a death by a signal, then a hang with names, then errors by kind."""
    for rank, status in sorted(dead.items()):
        if status < 0:
            name = signal_name(-status)
            memory = "SIGKILL is often the kernel's, out of memory: `dmesg | tail`"
            hint = memory if name == "SIGKILL" else "see its output above"
            return DistdiagError(f"rank {rank} was killed by {name}", hint, ExitCode.FAILED, "rank_lost")
    report = dist.PrefixStore("distdiag-probe/0", store)
    if report.check(["report"]):  # from a watchdog that ended its process
        return timed_out(*json.loads(report.get("report")))
    if errors:
        order = _LIKELIEST_FIRST
        return min(errors, key=lambda e: order.index(e.kind) if e.kind in order else 2)
    rank, status = min(dead.items())
    text = f"rank {rank} ended with exit code {status}"
    return DistdiagError(text, "see its output above", ExitCode.FAILED, "rank_lost")


def _end_gently(ranks: Sequence[BaseProcess]) -> None:
    """Send SIGINT to the ranks, so that they destroy their process group, and wait a moment."""
    for p in ranks:
        if p.exitcode is None and p.pid is not None:
            os.kill(p.pid, signal.SIGINT)
    end = time.monotonic() + _GRACE_S
    for p in ranks:
        p.join(max(0.0, end - time.monotonic()))
