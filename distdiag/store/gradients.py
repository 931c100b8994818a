"""Read the cost of DDP's gradient exchange from a run."""

from __future__ import annotations

import statistics

from distdiag.diagnosis.model.findings import Gradients
from distdiag.store.database import Database
from distdiag.terms.steps import exposed_share

LAST_STEPS = 1000  # DDP times one step in 8, 32 or 100
WARM_UP = 5  # first steps, left out if there are others: buckets are rebuilt, caches are cold


def read_gradients(run: Database, t_s: float | None = None) -> Gradients | None:
    """Return the cost of DDP's gradient exchange, in steps that ended by `t_s` if given; None if no DDP module was measured."""
    models = run.ddp()
    if not models:
        return None
    first_rank = min(m.rank for m in models)
    own = [m for m in models if m.rank == first_rank]
    ranks = len({m.rank for m in models})
    main = max(own, key=lambda m: m.bytes or 0)
    sizes = [n for m in own for n in (m.bucket_bytes or "").split(",") if n.isascii() and n.isdigit() and len(n) < 16]
    known = [m.bytes for m in own if m.bytes is not None]
    times = _times(run, ranks, t_s)
    return Gradients(
        ranks=ranks,
        pgroup=main.pgroup,
        bytes=sum(known) if known else None,
        buckets=sum(m.buckets or 0 for m in own) or None,
        bucket_bytes=tuple(map(int, sizes[:256])),
        bucket_cap_bytes=main.bucket_cap_bytes,
        gradient_as_bucket_view=main.gradient_as_bucket_view,
        comm_hook=main.comm_hook,
        dtypes=main.dtypes,
        steps=len(times),
        **_medians(times),
    )


def _times(run: Database, ranks: int, t_s: float | None) -> list[tuple[float, float, float]]:
    """Return (step, communication, exposed) in ms of the last steps that DDP timed on the rank with the least exposed.

    The others also wait for late ranks. Empty if a rank has timed none.
    """
    comm, exposed = run.named("step", ("comm_ms", "exposed_ms"))
    if comm == "NULL":
        return []
    found = run.step_range(t_s)
    if found is None:
        return []
    first, last = max(found[0], found[1] - LAST_STEPS + 1), found[1]
    timed = f"FROM step WHERE step BETWEEN ? AND ? AND {comm} IS NOT NULL AND {exposed} IS NOT NULL AND step_ms > 0"
    for begin in (max(first, WARM_UP + 1), first):
        by_share = run.query(
            f"SELECT rank {timed} GROUP BY rank ORDER BY sum({exposed}) / sum(step_ms), rank", (begin, last)
        )
        if by_share and len(by_share) >= ranks:
            query = f"SELECT step_ms, {comm}, {exposed} {timed} AND rank = ? ORDER BY step"
            return run.query(query, (begin, last, by_share[0][0]))
    return []


def _medians(times: list[tuple[float, float, float]]) -> dict[str, float]:
    if not times:
        return {}
    step_ms, comm_ms, exposed_ms = (statistics.median(column) for column in zip(*times, strict=True))
    share = exposed_share((exposed, step) for step, _, exposed in times)
    return {"step_ms": step_ms, "comm_ms": comm_ms, "exposed_ms": exposed_ms, "exposed_share": share}
