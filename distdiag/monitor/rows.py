"""Make the rows of run.db from snapshots: ranks, steps, loaders, DDP modules."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from distdiag.diagnosis.model.findings import Finding, at_least
from distdiag.diagnosis.model.snapshot import DdpTime, Life, RankState, Snapshot, Step
from distdiag.diagnosis.step_times import self_ms
from distdiag.monitor.fields import names, shared
from distdiag.monitor.ranks.state import RankView
from distdiag.store.frames import RankRow
from distdiag.store.rows import DdpRow, LoaderRow, StepRow, StepTimesRow

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
                r = s.ranks.get(q)
                measured = self._measured.pop((step, q), None) if self._measured else None
                fields = shared(StepRow, x)
                fields.update(
                    rank=q,
                    t_end_s=x.end_s,
                    self_ms=self_ms(x),
                    late_ms=late_ms.get(q),
                    samples=x.samples or None,
                    rss_bytes=r.rss_bytes if r else None,
                    device_bytes=r.device_bytes if r else None,
                    comm_ms=measured.comm_ms if measured else None,
                    exposed_ms=measured.exposed_ms if measured else None,
                )
                out.append(StepRow(**fields))
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


def _median(values: Sequence[float]) -> float | None:
    # written out: `statistics.median` doubles the time of a frame of thousands of ranks
    if not values:
        return None
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Window:
    """What rows show of a rank's last steps; kept while they are the same."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.first, self.last, self.length = (steps[0], steps[-1], len(steps)) if steps else (None, None, 0)
        # written out: of thousands of ranks, function calls would take a third of the time
        self.own = [(x.step, ms if (ms := x.step_ms - x.wait_ms) > 0.0 else 0.0) for x in steps]
        self.self_ms = _median([ms for _, ms in self.own])
        columns = zip(*map(attrgetter(*_TIMES), steps), strict=True)
        self.medians = {
            name: _median([v for v in column if v is not None] if None in column else column)
            for name, column in zip(_TIMES, columns, strict=False)
        }
        timed = [x for x in steps if x.step > 1] or steps  # the first step has the start of DDP and compilation in it
        total_s = sum([x.step_ms for x in timed]) / 1e3
        samples = sum([x.samples for x in timed])
        self.samples_per_s = samples / total_s if samples and total_s else None
        self.loss = steps[-1].loss if steps else None

    def holds(self, steps: Sequence[Step]) -> bool:
        """True if it was made of these steps."""
        if not steps:
            return not self.length
        return self.length == len(steps) and self.last is steps[-1] and self.first is steps[0]


def rank_rows(
    s: Snapshot, views: Mapping[int, RankView], findings: list[Finding], windows: dict[int, Window] | None = None
) -> list[RankRow]:
    """Return one row per rank of the job, also for ranks that have not reported.

    Args:
        windows: Kept by the caller between calls.
    """
    windows = {} if windows is None else windows
    worst: dict[int, str] = {}
    for f in findings:
        for q in f.culprits or f.victims:
            if q not in worst or at_least(f.severity, worst[q]):
                worst[q] = str(f.severity)
    for q, r in s.ranks.items():
        steps = r.steps[-WINDOW:]
        if q not in windows or not windows[q].holds(steps):
            windows[q] = Window(steps)
    selfs = sorted(m for q in s.ranks if (m := windows[q].self_ms) is not None)
    slowest: dict[int, int] = dict.fromkeys(s.ranks, 0)
    longest: dict[int, tuple[float, int]] = {}
    seen: dict[int, int] = {}
    for q in s.ranks:
        for step, ms in windows[q].own:
            seen[step] = seen.get(step, 0) + 1
            if step not in longest or ms > longest[step][0]:
                longest[step] = ms, q
    for step, (_, q) in longest.items():
        if seen[step] > 1:
            slowest[q] += 1
    return [
        RankRow(rank=q)
        if (r := s.ranks.get(q)) is None
        else _row(s, r, views.get(q), windows[q], selfs, slowest[q], worst.get(q))
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
    changed = {
        "t_s": s.t_s,
        "phase": "collective" if b is not None else r.phase,
        "phase_age_s": s.t_s - r.phase_since_s if r.phase_since_s is not None else None,
        "file": r.current_site.file if r.current_site else None,
        "line": r.current_site.line if r.current_site else None,
        "function": r.current_site.function if r.current_site else None,
        "waiting_op": (b.op or "collective") if b else None,
        "waiting_group": b.group if b else None,
        "waiting_seq": b.seq if b else None,
        "waiting_bytes": b.bytes if b else None,
        "waiting_age_s": s.t_s - b.entered_s if b is not None and b.entered_s is not None else None,
        "self_ms": own,
        "delta_self_ms": own - others if own is not None and others is not None else None,
        "samples_per_s": window.samples_per_s,
        "loss": window.loss,
        "last_op": last.op if last else None,
        "last_group": last.group if last else None,
        "last_seq": max(r.enqueued.get(last.group, 0), last.seq or 0) or None if last else None,
        "last_bytes": last.bytes if last else None,
        "severity": severity,
        "slowest_in": slowest if len(selfs) > 1 else None,
        "activity": r.activity if r.life != Life.MISSING else None,
    }
    fields: dict[str, Any] = {**shared(RankRow, r), **window.medians, **changed}
    return RankRow(**fields, **(view.recorder() if view is not None else {}))


_TIMES = tuple(name for name in names(RankRow, Step) if name.endswith("_ms"))


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
                    epoch=x.iterations_started,
                    fingerprint=x.first_fingerprints[0] if x.first_fingerprints else None,
                    previous_fingerprint=x.previous_fingerprints[0] if x.previous_fingerprints else None,
                    **shared(LoaderRow, x),
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
            **(
                shared(DdpRow, m.buckets)
                | {
                    "bucket_bytes": ",".join(map(str, m.buckets.bucket_bytes)),
                    "dtypes": m.buckets.dtypes or None,
                }
            ),
        )
        for r in s.ranks.values()
        for i, m in enumerate(r.models)
        if m.buckets is not None
    ]
