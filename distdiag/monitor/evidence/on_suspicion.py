"""Evidence of stuck ranks: flight records and stacks, requested only on suspicion."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from distdiag import files, procfs
from distdiag.diagnosis.model.snapshot import Life, RankState, Site, Snapshot
from distdiag.monitor.evidence import ask
from distdiag.monitor.evidence.host_waits import HostWaits
from distdiag.monitor.host import processes
from distdiag.monitor.ranks.state import RankView
from distdiag.page.layout import Blocked, Phase
from distdiag.recorder.frames import USER, is_users, kind_of_file
from distdiag.store import stacks

SUSPECT_S = 0.3  # a rank stuck in one wait for this long is asked for evidence
# A rank's flight record is renewed once a second until this long after its last progress: on a busy machine the watchdog of
# a device notices completions seconds late.
RENEWED_S = 5.0
SILENT_S = 1.5  # the pulse has missed six beats
STACK_KEPT_S = 30.0
LOADING_S = 3.0  # after this long in data loading, where the rank's workers are is evidence of what it waits for now
WORKERS_KEPT_S = 10.0
MOST_WORKERS = 4  # each takes the monitor some 50 ms
THREADS = 4


def _started(pool: ThreadPoolExecutor) -> ThreadPoolExecutor:
    """Start all threads of a pool now: a thread inherits the priority of the one that starts it, which may be low later."""
    together = threading.Barrier(THREADS)
    for future in [pool.submit(together.wait) for _ in range(THREADS)]:
        future.result()
    return pool


def waits_for_data(v: RankView) -> bool:
    """True of a rank in its loader, whose workers can be asked."""
    return v.header.phase == Phase.DATA and bool(v.header.trace_signal) and v.header.blocked == Blocked.NO


def workers_of(v: RankView) -> tuple[Site | None, ...]:
    """Return where in the user's code the forked workers of a rank's DataLoaders are; None for one that is in none of it."""
    h, found = v.header, []
    # a child without the handler would die of the signal
    children = procfs.children(h.pid, of_any_thread=True)
    for pid in [c for c in children if processes.catches(c, h.trace_signal)][:MOST_WORKERS]:
        try:
            threads = ask.stacks_by_signal(v.reader.path, h.pid, h.trace_signal, 0.2, worker=pid)
        except OSError:
            continue
        frames = ask.in_worker(ask.main_stack(threads))
        if frames is not None:
            found.append(next((Site(f, n, name) for f, n, name in frames if kind_of_file(f) == USER), None))
    return tuple(found)


class Gatherer:
    """Gathers evidence of stuck ranks, and keeps it in the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.records: dict[int, tuple[tuple[Any, ...], ask.FlightRecord]] = {}
        self.stuck_stacks: dict[int, tuple[float, tuple[Site, ...]]] = {}
        self.pool = _started(ThreadPoolExecutor(THREADS, thread_name_prefix="evidence"))
        self.active = False  # a rank waits long enough that evidence is wanted
        self._asked: dict[int, float] = {}
        self.host_waits = HostWaits()
        self.workers: dict[int, tuple[tuple[Any, ...], tuple[Site | None, ...]]] = {}
        self._workers_asked: dict[int, float] = {}

    def gather(
        self, now_s: float, views: Mapping[int, RankView], stopped: Collection[int], elsewhere: bool = False
    ) -> None:
        """Ask stuck ranks for their flight record if a rank waits; those `stopped` by a signal cannot answer."""
        self.host_waits.sample(now_s, views, stopped)
        for q, (mark, _) in list(self.records.items()):
            if q not in views or views[q].history.still_mark != mark:
                del self.records[q]
        alive = [v for v in views.values() if v.ending is None]
        still = [v for v in alive if v.still_s(now_s) >= SUSPECT_S]
        waiting = elsewhere or any(
            v.header.blocked != Blocked.NO or v.history.in_cpp_wait() or self.host_waits.of(v.rank) is not None
            for v in still
        )
        self.active = waiting or self.host_waits.asks
        answering = [v for v in alive if v.rank not in stopped]
        for v in answering:
            self._ask_workers(v, now_s)
        if not waiting:
            self._asked.clear()
            return
        futures = {}
        for v in still:
            known = v.rank in self.records and not (v.device.groups and v.still_s(now_s) < RENEWED_S)
            recent = now_s - self._asked.get(v.rank, -1e9) <= 1.0
            if known or recent or v.rank in stopped or not v.header.witness:
                continue
            self._asked[v.rank] = now_s
            of_device, recorders = v.device.known(), ask.Recorders.of(v.decoder.facts)
            future = self.pool.submit(ask.flight_record, v.text(v.header.witness), 1.0, of_device, recorders)
            futures[v.rank] = v.history.still_mark, future
        for v in answering:
            silent_s = now_s - (v.s(v.header.heartbeat_ns) or 0.0)
            if silent_s > SILENT_S and now_s - self.stuck_stacks.get(v.rank, (-1e9, ()))[0] > 4.0:
                self._stack_of_silent(v, now_s)
        for q, (mark, future) in futures.items():
            record = future.result()
            if record is not None:
                self.records[q] = (mark, record)

    def _ask_workers(self, v: RankView, now_s: float) -> None:
        """Get the stacks of the DataLoader workers that a rank waits for: now and then in short waits, in long ones always."""
        still_s = v.still_s(now_s)
        if still_s < SUSPECT_S or not waits_for_data(v):
            self.workers.pop(v.rank, None)
            return
        kept, asked_s = self.workers.get(v.rank), self._workers_asked.get(v.rank, -1e9)
        known = kept is not None and kept[0] == v.history.still_mark
        if now_s - asked_s < WORKERS_KEPT_S and (known or still_s < LOADING_S):
            return
        self._workers_asked[v.rank] = now_s
        found = workers_of(v)
        v.history.worker_sites.update(site for site in found if site is not None)
        if still_s >= LOADING_S:
            self.workers[v.rank] = v.history.still_mark, found

    def _stack_of_silent(self, v: RankView, now_s: float) -> None:
        """Get the main thread's user frames by signal: the GIL is held, so Python code cannot answer."""
        h = v.header
        if not h.trace_signal:
            return
        try:
            threads = ask.stacks_by_signal(v.reader.path, h.pid, h.trace_signal, 0.3)
        except OSError:
            return
        self._keep_stack(v, now_s, ask.main_stack(threads))

    def _keep_stack(self, v: RankView, now_s: float, frames: list[tuple[str, int, str]]) -> None:
        known = v.decoder.path_of
        mine = tuple(Site(known(f), n, name) for f, n, name in frames if is_users(f, v.decoder.backend_files))
        if mine:
            self.stuck_stacks[v.rank] = (now_s, mine)

    def of_death(self, v: RankView, now_s: float) -> None:
        """Get the stack that a rank's own signal handler wrote when a signal killed it."""
        try:
            text = files.text(v.reader.path.parent, v.file("fatal").name)
        except OSError:
            return
        if v.ending is not None and v.ending.signal is None and v.ending.exit_code is None:
            v.ending.signal = ask.fatal_signal(text)  # its parent has already reaped it
        threads = ask.parse_stacks(text)
        current = next((frames for heading, frames in threads if heading.startswith("Current")), None)
        # a thread unknown to Python has no heading
        v.died_in_background = bool(threads) and not current
        self._keep_stack(v, now_s, current or ask.main_stack(threads))

    def keep(self, s: Snapshot) -> tuple[list[str], str | None]:
        """Write flight records, and the stacks of all ranks; return (paths below the run directory, failures)."""
        kept = [p for q, (_, record) in sorted(self.records.items()) if record.raw
                and (p := ask.save(self.run_dir, q, record))]  # fmt: skip
        found = {}
        for q, r in s.ranks.items():
            stack = tuple(f"{x.function} {x.file}:{x.line}" for x in reversed(r.user_stack))
            op = ask.in_flight(r.blocked) if r.blocked is not None else None
            found[str(q)] = stacks.RankStack(stack=stack, op=op, note=None if stack else r.life)
        try:
            path = stacks.write(self.run_dir, stacks.Stacks(t_s=s.t_s, ranks=found))
        except OSError as e:
            return kept, f"evidence could not be kept: {e.strerror}"
        return [*kept, str(path.relative_to(self.run_dir))], None

    def with_stack(self, r: RankState, now_s: float) -> RankState:
        """Return the rank's state, with the stack obtained by signal if the rank could not record its own."""
        loading = self.workers.get(r.rank)
        if loading is not None and loading[1]:
            r = msgspec.structs.replace(r, workers=loading[1])
        stuck = self.stuck_stacks.get(r.rank)
        fatal = r.life == Life.KILLED and r.signal not in (None, 9, 15)
        if stuck is not None and (fatal or (r.activity == "gil_held" and now_s - stuck[0] < STACK_KEPT_S)):
            return msgspec.structs.replace(r, current_site=stuck[1][0], user_stack=stuck[1])
        return r

    def record(self, rank: int) -> ask.FlightRecord | None:
        """Return the rank's flight record if it was taken after the rank's last progress."""
        kept = self.records.get(rank)
        return kept[1] if kept else None

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
