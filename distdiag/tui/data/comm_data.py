"""Collectives of the last steps by operation, group and size; those in flight; what a probe reached for the same."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from distdiag.diagnosis.model.findings import Gradients, State
from distdiag.store.frames import Frame
from distdiag.store.gradients import read_gradients
from distdiag.store.reader import Run
from distdiag.store.rows import CollectiveRow, ProbeResult
from distdiag.terms.operations import algorithm_bandwidth, bus_factor, family, message_bytes, moves_bytes
from distdiag.terms.quantiles import median_low, quantile
from distdiag.tui.data.snapshot import Request

WINDOW_STEPS = 50
ARRIVALS = 20  # newest collectives whose arrivals are read, of one operation, group and size
GRADIENTS = "gradients"  # DDP's all-reduces of one backward pass, as its reducer times them

_SMALLEST_BYTES = 4096  # below it latency is all there is, and a bandwidth says nothing


@dataclass(frozen=True)
class OpStats:
    """All collectives of one operation, group and size in the window."""

    op: str
    group: str
    ranks: int
    bytes: int | None
    count: int
    per_step: float | None
    p50_us: float | None
    p99_us: float | None = None  # None under 100 samples
    skew_p50_us: float | None = None
    late_rank: int | None = None  # the one that came last most often
    late_count: int = 0
    late_of: int = 0
    newest_seq: int = 0
    exposed_us: float | None = None  # of DDP's gradients: the part of `p50_us` that no computation hides
    exposed_share: float | None = None  # of step time
    buckets: int | None = None  # of DDP's gradients: `bytes` and times are of all of them
    history: tuple[tuple[float, float | None, float | None], ...] = ()  # time in s, duration and skew in us
    arrivals: tuple[tuple[int, float], ...] = ()  # rank, and its median arrival after the first rank in ms

    @property
    def key(self) -> tuple[str, str, int | None]:
        return self.op, self.group, self.bytes

    @property
    def message_bytes(self) -> int | None:
        """The size that probes and nccl-tests count: `bytes`, or those of all ranks together."""
        return message_bytes(self.op, self.bytes, self.ranks)

    @property
    def algbw_gbps(self) -> float | None:
        """GB/s (10^9 bytes) on the rank that arrived last: waiting for it is not in it."""
        size = self.message_bytes
        return (
            algorithm_bandwidth(size, self.p50_us / 1e6) if size and size >= _SMALLEST_BYTES and self.p50_us else None
        )

    @property
    def busbw_gbps(self) -> float | None:
        op = "all_reduce" if self.op == GRADIENTS else self.op
        if self.algbw_gbps is None or self.ranks < 2 or not moves_bytes(op):
            return None
        return self.algbw_gbps * bus_factor(op, self.ranks)


@dataclass(frozen=True)
class InFlight:
    """One collective that some ranks are in."""

    op: str
    group: str
    seq: int | None
    bytes: int | None
    age_s: float | None
    entered: tuple[int, ...]
    size: int | None  # of the group
    missing: tuple[int, ...]  # members that have not entered it yet


@dataclass(frozen=True)
class CommData:
    ops: tuple[OpStats, ...] = ()
    steps: int = 0
    groups: tuple[tuple[str, int, str], ...] = ()  # name, ranks, description
    in_flight: tuple[InFlight, ...] = ()
    probed: dict[tuple[str, int], float] = field(default_factory=dict)  # (op, bytes) -> busbw, GB/s


def _stats(
    key: tuple[str, str, int | None], rows: list[CollectiveRow], steps: int, members: tuple[int, ...]
) -> OpStats:
    durations = sorted(r.duration_us for r in rows if r.duration_us is not None)
    late = Counter(r.late_rank for r in rows if r.late_rank is not None)
    rank, times = late.most_common(1)[0] if late else (None, 0)
    return OpStats(
        op=key[0],
        group=key[1],
        ranks=len(members) or max((r.ranks or 0 for r in rows), default=0),
        bytes=key[2],
        count=len(rows),
        per_step=len(rows) / steps if steps else None,
        p50_us=quantile(durations, 0.5),
        p99_us=quantile(durations, 0.99) if len(durations) >= 100 else None,
        skew_p50_us=median_low([r.skew_us for r in rows if r.skew_us is not None]),
        late_rank=rank,
        late_count=times,
        late_of=sum(late.values()),
        newest_seq=max(r.seq for r in rows),
        history=tuple(
            sorted(((r.t_s, r.duration_us, r.skew_us) for r in rows if r.t_s is not None), key=lambda h: h[0])
        ),
        arrivals=_arrivals([r.arrivals_us for r in rows if r.arrivals_us][:ARRIVALS], members),
    )


def _arrivals(texts: list[str], members: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """Return the median arrival of each rank, in ms after the first rank; of rows that hold another number of ranks, nothing."""
    by_row = [t.split(",") for t in texts]
    try:
        times = [[int(us) for us in row] for row in by_row if len(row) == len(members)]
    except ValueError:  # another program's table
        return ()
    if not times:
        return ()
    return tuple(
        (rank, (median_low(list(us)) or 0.0) / 1e3) for rank, us in zip(members, zip(*times, strict=True), strict=True)
    )


def _gradients(g: Gradients | None) -> list[OpStats]:
    """Return DDP's gradients as one operation; nothing if they were not measured."""
    if g is None or g.comm_ms is None or g.exposed_ms is None:
        return []
    return [
        OpStats(
            op=GRADIENTS, group=g.pgroup or "", ranks=g.ranks, bytes=g.bytes, count=g.steps, per_step=1.0,
            p50_us=g.comm_ms * 1e3, exposed_us=g.exposed_ms * 1e3, exposed_share=g.exposed_share, buckets=g.buckets,
        )
    ]  # fmt: skip


def _weight(o: OpStats) -> tuple[float, float]:
    """Return a key that sorts what takes most of the time of a step first, and what has no times by bytes."""
    times = o.per_step if o.per_step is not None else o.count  # where no step is known, of all
    return -(o.p50_us or 0.0) * times, -(o.bytes or 0) * times


def in_flight(frame: Frame, members: dict[str, tuple[int, ...]]) -> tuple[InFlight, ...]:
    """Collectives that ranks of this frame wait in, the oldest first."""
    table = frame.table
    ops = table.words("waiting_op")
    if not any(ops):
        return ()
    ranks, groups, seqs = table.numbers("rank"), table.words("waiting_group"), table.numbers("waiting_seq")
    sizes, ages = table.numbers("waiting_bytes"), table.numbers("waiting_age_s")
    found: dict[tuple[str, str, int | None], list[int]] = {}
    for i, op in enumerate(ops):
        if op:
            seq = int(seqs[i]) if seqs[i] == seqs[i] else None
            found.setdefault((op, groups[i] or "", seq), []).append(i)
    last_groups, last_seqs = table.words("last_group"), table.numbers("last_seq")
    past: dict[str, dict[int, int]] = {}
    for i, group in enumerate(last_groups):
        if group and last_seqs[i] == last_seqs[i]:
            past.setdefault(group, {})[int(ranks[i])] = int(last_seqs[i])
    for (_, group, seq), rows in found.items():  # who is in another collective of the same number is not past it
        past.setdefault(group, {}).update((int(ranks[i]), seq - 1) for i in rows if seq is not None)
    out = []
    for (op, group, seq), rows in found.items():
        inside = tuple(int(ranks[i]) for i in rows)
        everyone = members.get(group, ())
        gone_past = past.get(group, {})
        missing = tuple(r for r in everyone if r not in inside and (seq is None or gone_past.get(r, -1) < seq))
        age = max((ages[i] for i in rows if ages[i] == ages[i]), default=None)
        nbytes = next((int(sizes[i]) for i in rows if sizes[i] == sizes[i]), None)
        out.append(InFlight(op, group, seq, nbytes, age, inside, len(everyone) or None, missing))
    return tuple(sorted(out, key=lambda f: -(f.age_s or 0.0)))


def decoded(p: ProbeResult) -> dict[str, Any]:
    """Return the whole result of a probe; empty if it is damaged, or of another version."""
    try:
        body = msgspec.json.decode(p.json)
    except (msgspec.DecodeError, TypeError):
        return {}
    return body if isinstance(body, dict) else {}


def rows_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a probe measured for each size."""
    rows = body.get("rows")
    return [r for r in rows if isinstance(r, dict)] if isinstance(rows, list) else []


def as_number(v: Any) -> float | None:
    return float(v) if isinstance(v, (int, float)) and math.isfinite(v) else None


def _probed(run: Run) -> dict[tuple[str, int], float]:
    rows = [
        (p.name, as_number(r.get("bytes")), as_number(r.get("busbw_gbps")))
        for p in run.probes()
        for r in rows_of(decoded(p))
    ]
    return {(name, int(nbytes)): busbw_gbps for name, nbytes, busbw_gbps in rows if nbytes is not None and busbw_gbps}


def probe_for(data: CommData, op: OpStats) -> float | None:
    """Return the bus bandwidth that a probe recorded in this run for the operation, at a size within a factor of two."""
    operation, size = family(op.op), op.message_bytes
    near = [
        (abs(probed - size), busbw)
        for (name, probed), busbw in data.probed.items()
        if size and operation is not None and name == operation.probe and 0.5 <= probed / size <= 2
    ]
    return min(near)[1] if near else None


def _steps_during(run: Run, rows: list[CollectiveRow]) -> int:
    """Return how many steps ended between the first and the last of these collectives.

    The step of a row is that of the poll which saw it complete: a rough place to look.
    """
    seen, times = [r.step for r in rows if r.step is not None], [r.t_s for r in rows if r.t_s is not None]
    if not seen or not times:
        return 0
    return run.query(
        "SELECT coalesce(max(step) - min(step) + 1, 0) FROM step WHERE step > ? AND step <= ? AND t_end_s >= ? AND t_end_s <= ?",
        (min(seen) - 1000, max(seen), min(times), max(times)),
    )[0][0]


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any], every_s: float = 1.0) -> CommData:
    """Read and aggregate; completed collectives of a running job are read every `every_s` seconds, those in flight always."""
    at_s = request.at_s
    now = (at_s, frame.state, run.data_version())
    read, read_at_s = cache.get("comm_read", ((), 0.0))
    live = at_s is None and frame.state not in (State.ENDED, State.FAILED)
    recent = live and now[:2] == read[:2] and 0 <= frame.t_s - read_at_s < every_s
    if now != read and not recent:
        cache["comm_read"] = (now, frame.t_s)
        rows = run.collectives(WINDOW_STEPS, at_s)
        steps = _steps_during(run, rows)
        groups = run.groups()
        members = {g.name: g.ranks for g in groups}
        by: dict[tuple[str, str, int | None], list[CollectiveRow]] = {}
        for r in rows:
            by.setdefault((r.op, r.pgroup, r.bytes), []).append(r)
        ops = [_stats(k, v, steps, members.get(k[1], ())) for k, v in by.items()]
        ops += _gradients(read_gradients(run, at_s))
        ops.sort(key=_weight)
        cache["comm"] = (tuple(ops), steps, tuple((g.name, len(g.ranks), g.description) for g in groups), _probed(run))
        cache["comm_members"] = members
    ops, steps, groups, probed = cache["comm"]
    return CommData(ops, steps, groups, in_flight(frame, cache["comm_members"]), probed)
