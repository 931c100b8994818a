"""Makes snapshots of ranks that wait in a collective, for tests of the wait-for graph and its findings."""

from __future__ import annotations

from typing import Any

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, Group, RankState, Site, Snapshot
from tests.diagnosis.made import proved

TRAIN, EVAL, SAVE, SEND = (
    Site("/job/train.py", n, f) for n, f in ((88, "step"), (120, "evaluate"), (58, "save"), (40, "pass_on"))
)


def call(
    op: str = "all_reduce", seq: int | None = 7, site: Site | None = TRAIN, group: str = "default_pg", **more: Any
) -> Call:
    shape = more.pop("shape", None if op == "barrier" else (1024,))
    dtype = more.pop("dtype", None if op == "barrier" else "float32")
    return Call(op=op, group=group, seq=seq, site=site, shape=shape, dtype=dtype, **more)


def key(site: Site) -> str:
    return f"{site.file}:{site.line}"


def rank(r: int, blocked: Call | None = None, **more: Any) -> RankState:
    """Return a rank that waits in `blocked`; it has completed all earlier calls, and been at that site ten times."""
    enqueued: dict[str, int] = dict(more.pop("enqueued", {}))
    completed: dict[str, int] = dict(more.pop("completed", {}))
    if blocked is not None and blocked.seq is not None:
        enqueued.setdefault(blocked.group, blocked.seq)
        completed.setdefault(blocked.group, blocked.seq - 1)
    sites = more.pop("sites", {key(blocked.site): 10} if blocked is not None and blocked.site is not None else {})
    return RankState(rank=r, blocked=blocked, enqueued=enqueued, completed=completed, sites=sites, **more)


def snapshot(
    *ranks: RankState, groups: dict[str, tuple[int, ...]] | None = None, backend: str = "gloo", **more: Any
) -> Snapshot:
    members = {"default_pg": tuple(range(len(ranks))), **(groups or {})}
    return Snapshot(
        t_s=50.0,
        world_size=len(ranks),
        ranks={r.rank: r for r in ranks},
        groups={g: Group(name=g, ranks=m, backend=backend) for g, m in members.items()},
        stable_since_s=more.pop("stable_since_s", 49.0),
        **more,
    )


def only(s: Snapshot, **more: Any) -> Finding:
    found = proved(s, **more)
    assert len(found) == 1, found
    return found[0]


def summary(f: Finding) -> tuple[str, str | None, tuple[int, ...], tuple[int, ...]]:
    return f.kind, f.cause, f.culprits, f.victims
