"""Make the rows of run.db from snapshots: ranks, steps, loaders, DDP modules."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from distdiag.diagnosis.model.findings import Finding, at_least
from distdiag.diagnosis.model.snapshot import DdpTime, Life, RankState, Snapshot, Step
from distdiag.diagnosis.step_times import self_ms
from distdiag.monitor.fields import shared
from distdiag.monitor.ranks.state import RankView
from distdiag.monitor.windows import WINDOW, Window, Windows
from distdiag.store.frames import RankRow
from distdiag.store.rows import DdpRow, LoaderRow, StepRow, StepTimesRow

LATE_STEP_S = 5.0  # the rows of a step wait this long for the slowest rank
# Of a job of so many ranks whose steps are more rows than this in a second, every second, third, … step is written, and
# every long one.
MANY_RANKS, ROWS_PER_S, LONG_STEP = 512, 4096, 2.0


class Steps:
    """Makes the rows of a step once every rank has reported it, or after `LATE_STEP_S`."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, Step]] = {}
        self._measured: dict[tuple[int, int], DdpTime] = {}  # by step and rank, of steps without rows
        self._slowest: deque[int] = deque(maxlen=WINDOW)  # the rank that worked longest in each of the last steps

    def add(self, rank: int, steps: list[Step]) -> None:
        for x in steps:
            self._waiting.setdefault(x.step, {})[rank] = x

    def measured(self, rank: int, times: list[DdpTime]) -> list[StepTimesRow]:
        """Keep what DDP measured; return the rows for steps that are already written."""
        written = []
        for x in times:
            if rank in self._waiting.get(x.step, ()):
                self._measured[x.step, rank] = x
            else:
                written.append(StepTimesRow(rank=rank, step=x.step, comm_ms=x.comm_ms, exposed_ms=x.exposed_ms))
        return written

    @property
    def slowest(self) -> Mapping[int, int]:
        """Of the last steps with rows, how many each rank was the slowest of."""
        return Counter(self._slowest)

    def rows(self, world: int, now_s: float, s: Snapshot, final: bool = False) -> list[StepRow]:
        out: list[StepRow] = []
        for step in list(self._waiting):
            by_rank = self._waiting[step]
            if len(by_rank) < world and not final and now_s - max(x.end_s for x in by_rank.values()) < LATE_STEP_S:
                continue
            if _written(step, by_rank, s):
                self._of_step(step, by_rank, s, out)
            elif self._measured:
                self._measured = {key: x for key, x in self._measured.items() if key[0] != step}
            del self._waiting[step]
        return out

    def _of_step(self, step: int, by_rank: dict[int, Step], s: Snapshot, out: list[StepRow]) -> None:
        late_ms, longest, slowest = _late_ms(by_rank), -1.0, 0
        for q, x in by_rank.items():
            r = s.ranks.get(q)
            measured = self._measured.pop((step, q), None) if self._measured else None
            own = self_ms(x)
            if own > longest:
                longest, slowest = own, q
            # written out: ten thousand rows a second
            out.append(
                StepRow(
                    rank=q, step=step, epoch=x.epoch, t_end_s=x.end_s, step_ms=x.step_ms, data_ms=x.data_ms, h2d_ms=x.h2d_ms,
                    forward_ms=x.forward_ms, backward_ms=x.backward_ms, optimizer_ms=x.optimizer_ms, other_ms=x.other_ms,
                    wait_ms=x.wait_ms, self_ms=own, late_ms=late_ms.get(q), samples=x.samples or None, loss=x.loss,
                    rss_bytes=r.rss_bytes if r else None, device_bytes=r.device_bytes if r else None,
                    comm_ms=measured.comm_ms if measured else None, exposed_ms=measured.exposed_ms if measured else None,
                )
            )  # fmt: skip
        if len(by_rank) > 1:
            self._slowest.append(slowest)


def _written(step: int, by_rank: Mapping[int, Step], s: Snapshot) -> bool:
    """True if the rows of a step are written: always, but for a job of thousands of ranks."""
    usual_s = s.usual_step_s
    if len(by_rank) < MANY_RANKS or not usual_s or len(by_rank) <= ROWS_PER_S * usual_s:
        return True
    long = next(iter(by_rank.values())).step_ms >= LONG_STEP * usual_s * 1e3  # a pause is in the step of every rank
    return long or step % math.ceil(len(by_rank) / usual_s / ROWS_PER_S) == 0


def _late_ms(step: dict[int, Step]) -> dict[int, float]:
    """Return by rank how long after the first rank it arrived at the step's first or last synchronisation, whichever is later.

    Ranks that wait for each other in the forward (DDP's buffers) leave it together: the last synchronisation hides that wait.
    """
    late: dict[int, float] = {}
    if len(step) < 2:
        return late
    for times in ([x.arrived_s for x in step.values()], [x.ready_s for x in step.values()]):
        known = [t for t in times if t is not None]
        if len(known) == len(step):
            first = min(known)
            late = {q: max(late.get(q, 0.0), (t - first) * 1e3) for q, t in zip(step, known, strict=True)}
    return late


def rank_rows(
    s: Snapshot,
    views: Mapping[int, RankView],
    findings: list[Finding],
    windows: Windows | None = None,
    slowest: Mapping[int, int] | None = None,
) -> list[RankRow]:
    """Return one row per rank of the job, also for ranks that have not reported."""
    windows = windows or Windows()
    worst: dict[int, str] = {}
    for f in findings:
        for q in f.culprits or f.victims:
            if q not in worst or at_least(f.severity, worst[q]):
                worst[q] = str(f.severity)
    of = {q: windows.of(r) for q, r in s.ranks.items()}
    selfs = sorted(w.self_ms for w in of.values() if w.self_ms is not None)
    return [
        RankRow(rank=q)
        if (r := s.ranks.get(q)) is None
        else _row(s, r, views.get(q), of[q], selfs, (slowest or {}).get(q, 0), worst.get(q))
        for q in range(max(s.world_size, max(s.ranks, default=0) + 1))
    ]


def _median_low_of_others(ordered: Sequence[float], own: float) -> float | None:
    """Return the lower median of sorted values without one of them, without a list of the others for each rank."""
    n = len(ordered) - 1
    if n < 1:
        return None
    at = (n - 1) // 2
    return ordered[at + (bisect_left(ordered, own) <= at)]


def _row(
    s: Snapshot, r: RankState, view: RankView | None, window: Window, selfs: Sequence[float], slowest: int, severity: str | None
) -> RankRow:  # fmt: skip
    own = window.self_ms
    others = _median_low_of_others(selfs, own) if own is not None else None
    last = r.calls[-1] if r.calls else None
    b = r.blocked
    numbered = b is not None and b.op != "init_process_group"  # that has no group yet
    changed = {
        "t_s": s.t_s,
        "phase": "collective" if b is not None else r.phase,
        "phase_age_s": s.t_s - r.phase_since_s if r.phase_since_s is not None else None,
        "waiting_op": (b.op or "collective") if b else None,
        "waiting_group": b.group if b and numbered else None,
        "waiting_seq": b.seq if b and numbered else None,
        "waiting_bytes": b.bytes if b else None,
        "waiting_age_s": s.t_s - b.entered_s if b is not None and b.entered_s is not None else None,
        "delta_self_ms": own - others if own is not None and others is not None else None,
        "last_op": last.op if last else None,
        "last_group": last.group if last else None,
        "last_seq": max(r.enqueued.get(last.group, 0), last.seq or 0) or None if last else None,
        "last_bytes": last.bytes if last else None,
        "severity": severity,
        "slowest_in": slowest if len(selfs) > 1 else None,
        "activity": r.activity if r.life != Life.MISSING else None,
    }
    of_site = shared(RankRow, r.current_site)
    fields: dict[str, Any] = {**shared(RankRow, r), **shared(RankRow, window), **of_site, **changed}
    return RankRow(**fields, **(view.recorder() if view is not None else {}))


def loader_rows(s: Snapshot) -> list[LoaderRow]:
    return [
        LoaderRow(
            rank=r.rank,
            loader=i,
            **shared(LoaderRow, x.site),
            epoch=x.iterations_started,
            fingerprint=x.first_fingerprints[0] if x.first_fingerprints else None,
            previous_fingerprint=x.previous_fingerprints[0] if x.previous_fingerprints else None,
            **shared(LoaderRow, x),
        )
        for r in s.ranks.values()
        for i, x in enumerate(r.loaders)
    ]


def ddp_rows(s: Snapshot) -> list[DdpRow]:
    return [
        DdpRow(
            rank=r.rank,
            model=i,
            name=m.name,
            pgroup=m.group,
            backwards=m.synced_backwards,
            **shared(DdpRow, m.buckets)
            | {"bucket_bytes": ",".join(map(str, m.buckets.bucket_bytes)), "dtypes": m.buckets.dtypes or None},
        )
        for r in s.ranks.values()
        for i, m in enumerate(r.models)
        if m.buckets is not None
    ]
