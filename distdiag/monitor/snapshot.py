"""Build the snapshot that the diagnosis judges, from the ranks' pages and the host's samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import msgspec

from distdiag.diagnosis.model.snapshot import Group, RankState, Snapshot
from distdiag.monitor.collectives import Collectives
from distdiag.monitor.evidence.on_suspicion import SUSPECT_S, Gatherer
from distdiag.monitor.host import processes
from distdiag.monitor.host.samples import Sampling
from distdiag.monitor.ranks.state import RankView
from distdiag.terms import launchers

Idle = Mapping[int, tuple[bool | None, str | None]]


def make_snapshot(
    now_s: float, views: Mapping[int, RankView], idle: Idle, gatherer: Gatherer, calls: Collectives, sampled: Sampling
) -> Snapshot:
    """Return the state of the job on this node.

    Args:
        idle: By rank: (main thread sleeps and has used no CPU since the last poll, its state in /proc).
    """
    ranks = {}
    for q, v in sorted(views.items()):
        state = v.state(now_s, *idle[q], gatherer.record(q), gatherer.host_waits.of(q))
        ranks[q] = _with_locks(now_s, gatherer.with_stack(state, now_s), views)
    return msgspec.structs.replace(
        of_pages(now_s, views, ranks),
        arrivals=tuple(calls.arrivals),
        completed_conflicts=tuple(calls.completed_conflicts),
        gpus=sampled.gpus.states(),
        host_cpu_pct=max(sampled.cpu_pct, default=None),
        host_memory_bytes=sampled.hosts.memory_bytes,
        host_available_bytes=sampled.hosts.available_bytes,
    )


def of_pages(now_s: float, views: Mapping[int, RankView], ranks: dict[int, RankState]) -> Snapshot:
    """Return the state of the job as far as the pages have it."""
    groups: dict[str, Group] = {}
    headers = [v.header for v in views.values()]
    world = _of_most([h.world_size for h in headers], least=max(views) + 1)
    for v in views.values():
        for _, group in v.decoder.groups():
            groups.setdefault(group.name, group)
        for name, (number, members, site) in v.history.new_groups.items():
            made = Group(name=name, ranks=members, description="new_group", number=number, site=site)
            groups.setdefault(name, made)
    for _, name, _ in (x for v in views.values() for x in v.decoder.unfollowed if x[0] != "new_window"):
        if name in groups:
            groups[name] = msgspec.structs.replace(groups[name], unfollowed=True)
    every = tuple(range(world))
    for r in ranks.values():
        for name in r.enqueued:
            if name not in groups:
                base = groups.get(name.removesuffix(" (monitored_barrier)"))
                groups[name] = Group(name=name, ranks=base.ranks if base else every)
    steps = sorted(x.step_ms for r in ranks.values() for x in r.steps[-20:])
    return Snapshot(
        t_s=now_s,
        world_size=world,
        expected=_of_most([h.local_world_size for h in headers]) or None,
        attempt=_of_most([h.attempt for h in headers]),
        # torchrun's, in the environment of the rank that has started this monitor
        restarts_left=(launchers.number("TORCHELASTIC_MAX_RESTARTS") or 0)
        - (launchers.number("TORCHELASTIC_RESTART_COUNT") or 0),
        ranks=ranks,
        groups=groups,
        usual_step_s=steps[len(steps) // 2] / 1e3 if steps else None,
    )


def _of_most(sizes: list[int], least: int = 0) -> int:
    """Return the number that most pages have, the smallest in a tie: a damaged page must not add 65,536 ranks."""
    return max(least, min(statistics.multimode(sizes)))


def _with_locks(now_s: float, r: RankState, views: Mapping[int, RankView]) -> RankState:
    """Return the rank's state with the ranks that hold the file lock it waits for, from the kernel's lock table."""
    if r.activity not in ("lock", "user_code") or not r.host_blocked or r.blocked is not None:
        return r
    if views[r.rank].still_s(now_s) < SUSPECT_S or r.pid is None:
        return r
    holders = processes.file_lock_waits().get(r.pid)
    if not holders:
        return r
    by_pid = {v.header.pid: k for k, v in views.items()}
    found = tuple(sorted(by_pid[p] for p in holders if p in by_pid))
    return msgspec.structs.replace(r, activity="lock", lock_holders=found) if found else r
