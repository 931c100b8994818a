"""What is known of a death by memory: the kernel's count of kills in the job's cgroup, and whose memory grew before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from distdiag import cgroups
from distdiag.diagnosis.model.findings import rank_list
from distdiag.store.reader import Run
from distdiag.terms.units import counted, is_number, rough_duration, size_text
from distdiag.terms.untrusted import is_rank

WINDOW_S = 60.0  # before the last sample
GREW_BYTES = 64 << 20  # less is not named
KEY = "memory_cgroup"


def noted() -> str:
    """Return this process's memory cgroup and its kills so far, for table `meta`; empty if the kernel counts none."""
    found = cgroups.memory_cgroup()
    kills = None if found is None else cgroups.oom_kills(found)
    return "" if found is None or kills is None else json.dumps([str(found), found.stat().st_ino, kills])


def oom_kills(meta: Mapping[str, str | None]) -> int | None:
    """Return how many processes of the job's cgroup the kernel has killed for memory; None if not known.

    The cgroup must be the very directory that the monitor saw: a container's is another after its restart.
    """
    try:
        path, inode, before = json.loads(meta.get(KEY) or "")
        folder = Path(path)
        if not folder.is_relative_to(cgroups.ROOT) or ".." in folder.parts or folder.stat().st_ino != inode:
            return None
        now = cgroups.oom_kills(folder)
        return None if now is None or now < before else now - int(before)
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def killed_text(kills: int) -> str:
    return f"the kernel's out-of-memory killer ended {counted(kills, 'process', 'processes')} of the job's cgroup"


def killer(meta: Mapping[str, str | None]) -> Iterator[str]:
    """Yield what the kernel's count of kills for memory shows."""
    kills = oom_kills(meta)
    if kills is None:
        yield "the kernel's count of memory kills in the job's cgroup cannot be read here"
    elif kills:
        yield killed_text(kills)
    else:
        yield "the kernel killed no process of the job's cgroup for memory"


def who_grew(run: Run, ended_s: float | None = None) -> list[str]:
    """Return whose memory grew in the last minute that was sampled, in a sentence; nothing without two samples.

    What grew after the last sample, until the ranks were last heard of (`ended_s`), is not known.
    """
    rows = run.query(
        "SELECT rank, t_s, rss_bytes FROM process WHERE rss_bytes IS NOT NULL"
        " AND t_s >= (SELECT max(t_s) FROM process) - ? ORDER BY t_s",
        (WINDOW_S,),
    )
    first: dict[int, tuple[float, float]] = {}
    last: dict[int, tuple[float, float]] = {}
    for rank, t_s, rss in rows:
        if not (is_rank(rank) and is_number(t_s) and is_number(rss)):
            continue
        first.setdefault(rank, (t_s, rss))
        last[rank] = t_s, rss
    grew = {q: last[q][1] - first[q][1] for q in last if last[q][0] > first[q][0]}
    if not grew:
        return []
    most = max(grew, key=lambda q: grew[q])
    others = max((n for q, n in grew.items() if q != most), default=0)
    over = rough_duration(last[most][0] - first[most][0])
    at = f"(sampled until {rough_duration(last[most][0])} after the start)"
    if ended_s is not None:
        at = f"(the last sample is from {rough_duration(max(0.0, ended_s - last[most][0]))} before the end)"
    if grew[most] < GREW_BYTES:
        return [f"memory: no rank grew by more than {size_text(max(0, grew[most]))} in the last {over} {at}"]
    named = sorted(q for q, n in grew.items() if n * 2 > grew[most])
    to = (
        f"by {size_text(grew[most])} to {size_text(last[most][1])}"
        if len(named) == 1
        else f"by up to {size_text(grew[most])}"
    )
    rest = f"; the others by at most {size_text(max(0, others))}" if len(grew) > len(named) == 1 else ""
    return [f"memory: {rank_list(named)} grew {to} in the last {over}{rest} {at}"]
