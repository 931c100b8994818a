"""Make the rows of run.db from snapshots: ranks, steps, collectives, loaders."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from distdiag.diagnosis.model.findings import Finding, at_least
from distdiag.diagnosis.model.snapshot import Arrival, Call, CompletedConflict, DdpTime, Life, RankState, Snapshot, Step
from distdiag.diagnosis.step_times import self_ms
from distdiag.diagnosis.waits.compatible import conflict, signature
from distdiag.monitor.ranks.state import RankView
from distdiag.store.frames import RankRow
from distdiag.store.rows import CollectiveRow, DdpRow, LoaderRow, StepRow, StepTimesRow

WINDOW = 50
LATE_STEP_S = 5.0  # the rows of a step wait this long for the slowest rank


class Steps:
    """Makes the rows of a step once every rank has reported it, or after `LATE_STEP_S`."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, Step]] = {}
        self._measured: dict[tuple[int, int], DdpTime] = {}  # by step and rank, of steps without rows

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

    def rows(self, world: int, now_s: float, s: Snapshot, final: bool = False) -> list[StepRow]:
        out: list[StepRow] = []
        for step in list(self._waiting):
            by_rank = self._waiting[step]
            if len(by_rank) < world and not final and now_s - max(x.end_s for x in by_rank.values()) < LATE_STEP_S:
                continue
            late_ms = _late_ms(by_rank)
            for q, x in by_rank.items():
                r, measured = s.ranks.get(q), self._measured.pop((step, q), None)
                out.append(
                    StepRow(
                        rank=q,
                        step=step,
                        epoch=r.epoch if r else None,
                        t_end_s=x.end_s,
                        step_ms=x.step_ms,
                        data_ms=x.data_ms,
                        h2d_ms=x.h2d_ms,
                        forward_ms=x.forward_ms,
                        backward_ms=x.backward_ms,
                        optimizer_ms=x.optimizer_ms,
                        other_ms=x.other_ms,
                        wait_ms=x.wait_ms,
                        self_ms=self_ms(x),
                        late_ms=late_ms.get(q),
                        samples=x.samples or None,
                        loss=x.loss,
                        rss_bytes=r.rss_bytes if r else None,
                        device_bytes=r.device_bytes if r else None,
                        comm_ms=measured.comm_ms if measured else None,
                        exposed_ms=measured.exposed_ms if measured else None,
                    )
                )
            del self._waiting[step]
        return out


def _late_ms(step: dict[int, Step]) -> dict[int, float]:
    """Return by rank how long after the first rank it arrived at the step's first or last synchronisation, whichever is later.

    Ranks that wait for each other in the forward (DDP's buffers) leave it together: the last synchronisation hides that wait.
    """
    late: dict[int, float] = {}
    for times in ({q: x.arrived_s for q, x in step.items()}, {q: x.ready_s for q, x in step.items()}):
        known = {q: t for q, t in times.items() if t is not None}
        if len(known) == len(step) > 1:
            first = min(known.values())
            late = {q: max(late.get(q, 0.0), (t - first) * 1e3) for q, t in known.items()}
    return late


class Collectives:
    """Matches the ranks' calls by group and number, for collectives that all members (or their devices) have completed."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], dict[int, tuple[Call, float]]] = {}
        self._on_device: dict[tuple[str, int], dict[int, Call | None]] = {}
        self.arrivals: deque[Arrival] = deque(maxlen=256)
        self.completed_conflicts: list[CompletedConflict] = []

    def add(self, rank: int, closed: list[tuple[Call, float]]) -> None:
        for call, waited_s in closed:
            if call.seq is None or call.failed or call.entered_s is None:
                continue
            if call.on_device:  # the host leaves the call before the collective is complete
                calls = self._on_device.setdefault((call.group, call.seq), {})
                calls[rank] = None if rank in calls else call  # operations of a coalesced group share a number
            else:
                self._open.setdefault((call.group, call.seq), {})[rank] = (call, waited_s)
        for kept in (self._open, self._on_device):
            while len(kept) > 4096:
                del kept[next(iter(kept))]

    def compare_on_device(self, s: Snapshot) -> None:
        """Compare the ranks' calls of collectives that all devices have completed."""
        done = {
            name: min((s.ranks[q].completed.get(name, -1) if q in s.ranks else -1 for q in group.ranks), default=-1)
            for name, group in s.groups.items()
        }
        for key in [k for k in self._on_device if k[1] <= done.get(k[0], -1)]:
            found = self._on_device.pop(key)
            calls = {q: call for q, call in found.items() if call is not None}
            group = s.groups[key[0]]
            if len(calls) == len(found) == len(group.ranks):
                self._compare(key, calls, group.backend)

    def _compare(self, key: tuple[str, int], calls: dict[int, Call], backend: str) -> None:
        """Keep a collective that completed although the ranks' arguments differ: the values are wrong, and nothing raised."""
        if len(self.completed_conflicts) >= 8:
            return
        ranks = list(calls)
        first = signature(calls[ranks[0]])
        for q in ranks[1:]:
            cause = conflict(first, signature(calls[q]), backend)
            if cause in ("op", "dtype", "root"):
                self.completed_conflicts.append(CompletedConflict(key[0], key[1], cause, calls))
                return

    def rows(self, members: Mapping[str, int], step: int | None, backends: Mapping[str, str]) -> list[CollectiveRow]:
        """Return the rows of complete collectives.

        Args:
            members: Size of each group.
            step: Step number of the rows.
            backends: Backend of each group.
        """
        out = []
        for key in [k for k, v in self._open.items() if len(v) >= members.get(k[0], 1 << 30)]:
            by_rank = self._open.pop(key)
            entered = {q: c.entered_s or 0.0 for q, (c, _) in by_rank.items()}
            first, last = min(entered.values()), max(entered.values())
            late = max(entered, key=lambda q: entered[q])
            call, waited_s = by_rank[late]
            self._compare(key, {q: c for q, (c, _) in by_rank.items()}, backends.get(key[0], ""))
            out.append(
                CollectiveRow(
                    pgroup=key[0],
                    seq=key[1],
                    op=call.op,
                    dtype=call.dtype,
                    bytes=call.bytes,
                    ranks=len(by_rank),
                    t_s=first,
                    duration_us=waited_s * 1e6 if waited_s > 0 else None,
                    skew_us=(last - first) * 1e6,
                    late_rank=late if last > first else None,
                    step=step,
                )
            )
            waited = max((w for q, (_, w) in by_rank.items() if q != late), default=0.0)
            shared = min(w for _, w in by_rank.values())
            self.arrivals.append(
                Arrival(key[0], key[1], call.op, first, (last - first) * 1e3, late, waited * 1e3, shared * 1e3)
            )
        return out


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def rank_rows(s: Snapshot, views: Mapping[int, RankView], findings: list[Finding]) -> list[RankRow]:
    """Return one row per rank of the job, also for ranks that have not reported."""
    worst: dict[int, str] = {}
    for f in findings:
        for q in f.culprits or f.victims:
            if q not in worst or at_least(f.severity, worst[q]):
                worst[q] = str(f.severity)
    windows = {q: list(r.steps)[-WINDOW:] for q, r in s.ranks.items()}
    own = {q: [(x.step, self_ms(x)) for x in xs] for q, xs in windows.items()}
    selfs = {q: m for q, xs in own.items() if (m := _median([ms for _, ms in xs])) is not None}
    slowest: dict[int, int] = dict.fromkeys(windows, 0)
    by_step: dict[int, dict[int, float]] = {}
    for q, xs in own.items():
        for step, ms in xs:
            by_step.setdefault(step, {})[q] = ms
    for by_rank in by_step.values():
        if len(by_rank) > 1:
            slowest[max(by_rank, key=lambda q: by_rank[q])] += 1
    rows = []
    for q in range(max(s.world_size, max(s.ranks, default=0) + 1)):
        r = s.ranks.get(q)
        rows.append(
            RankRow(rank=q) if r is None else _row(s, r, views.get(q), windows[q], selfs, slowest[q], worst.get(q))
        )
    return rows


def _row(
    s: Snapshot, r: RankState, view: RankView | None, window: list[Step], selfs: dict[int, float], slowest: int, severity: str | None
) -> RankRow:  # fmt: skip
    others = [v for q, v in selfs.items() if q != r.rank]
    own = selfs.get(r.rank)
    delta = own - statistics.median_low(others) if own is not None and others else None
    timed = [x for x in window if x.step > 1] or window  # the first step has the start of DDP and compilation in it
    total_s = sum(x.step_ms for x in timed) / 1e3
    samples = sum(x.samples for x in timed)
    last = r.calls[-1] if r.calls else None
    b = r.blocked
    h = view.page.header if view is not None and view.page is not None else None
    return RankRow(
        rank=r.rank,
        node=r.node,
        local_rank=r.local_rank,
        host=r.host,
        pid=r.pid,
        gpu=h.gpu if h is not None and h.gpu >= 0 else None,
        life=r.life,
        exit_code=r.exit_code,
        signal=r.signal,
        exception=r.exception,
        t_s=s.t_s,
        heartbeat_age_s=r.heartbeat_age_s,
        phase="collective" if b is not None else r.phase,
        phase_age_s=s.t_s - r.phase_since_s if r.phase_since_s is not None else None,
        step=r.step,
        epoch=r.epoch,
        file=r.current_site.file if r.current_site else None,
        line=r.current_site.line if r.current_site else None,
        function=r.current_site.function if r.current_site else None,
        waiting_op=(b.op or "collective") if b else None,
        waiting_group=b.group if b else None,
        waiting_seq=b.seq if b else None,
        waiting_bytes=b.bytes if b else None,
        waiting_age_s=s.t_s - b.entered_s if b is not None and b.entered_s is not None else None,
        rss_bytes=r.rss_bytes,
        dropped=h.dropped + view.missed + view.missed_calls if view is not None and h is not None else None,
        recorder_errors=h.errors if h is not None else None,
        recorder_error=(view.text(h.error) or None) if view is not None and h is not None else None,
        step_ms=_median([x.step_ms for x in window]),
        self_ms=own,
        delta_self_ms=delta,
        wait_ms=_median([x.wait_ms for x in window]),
        data_ms=_median([x.data_ms for x in window]),
        h2d_ms=_median([x.h2d_ms for x in window if x.h2d_ms is not None]),
        forward_ms=_median([x.forward_ms for x in window]),
        backward_ms=_median([x.backward_ms for x in window]),
        optimizer_ms=_median([x.optimizer_ms for x in window]),
        other_ms=_median([x.other_ms for x in window]),
        samples_per_s=samples / total_s if samples and total_s else None,
        loss=window[-1].loss if window else None,
        device_bytes=r.device_bytes,
        last_op=last.op if last else None,
        last_group=last.group if last else None,
        last_seq=max(r.enqueued.get(last.group, 0), last.seq or 0) or None if last else None,
        last_bytes=last.bytes if last else None,
        severity=severity,
        cpu_pct=r.cpu_pct,
        slowest_in=slowest if len(selfs) > 1 else None,
        activity=r.activity if r.life != Life.MISSING else None,
    )


def loader_rows(s: Snapshot) -> list[LoaderRow]:
    """Return the newest state of every rank's loaders."""
    out = []
    for r in s.ranks.values():
        for i, x in enumerate(r.loaders):
            out.append(
                LoaderRow(
                    rank=r.rank,
                    loader=i,
                    file=x.site.file if x.site else None,
                    line=x.site.line if x.site else None,
                    length=x.length,
                    batch_size=x.batch_size,
                    dataset_length=x.dataset_length,
                    drop_last=x.drop_last,
                    distributed_sampler=x.distributed_sampler,
                    sampler_epoch=x.sampler_epoch,
                    shuffle=x.shuffle,
                    epoch=x.iterations_started,
                    batches=x.batches,
                    exhausted=x.exhausted,
                    in_training=x.in_training,
                    workers=x.workers,
                    fingerprint=x.first_fingerprints[0] if x.first_fingerprints else None,
                    previous_fingerprint=x.previous_fingerprints[0] if x.previous_fingerprints else None,
                )
            )
    return out


def ddp_rows(s: Snapshot) -> list[DdpRow]:
    """Return the buckets of every rank's DDP modules, where they are known."""
    return [
        DdpRow(
            rank=r.rank,
            model=i,
            name=m.name,
            pgroup=m.group,
            backwards=m.synced_backwards,
            bytes=m.buckets.bytes,
            buckets=m.buckets.buckets,
            bucket_bytes=",".join(map(str, m.buckets.bucket_bytes)),
            bucket_cap_bytes=m.buckets.bucket_cap_bytes,
            gradient_as_bucket_view=m.buckets.gradient_as_bucket_view,
            comm_hook=m.buckets.comm_hook,
            dtypes=m.buckets.dtypes or None,
        )
        for r in s.ranks.values()
        for i, m in enumerate(r.models)
        if m.buckets is not None
    ]
