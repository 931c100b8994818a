"""Computes how long a living rank has kept the others waiting, and which operations do not complete although no rank is late.

Ranks may wait for a rank that continues to train: in a staged job, only some ranks train while the others wait in a barrier. Who
waits for whom changes: ranks in that barrier have not waited all the time for the rank that is late now. So the delay of a rank
counts from its newest step or collective. Exception: another rank waits for it within a step, since ranks that train together
make their steps together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distdiag.diagnosis.model.snapshot import DEAD, Call, Life, RankState, Snapshot
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.diagnosis.waits.wait import Wait, other_end_of

_IN_STEP = ("forward", "backward", "optimizer")


def kept_waiting(s: Snapshot, graph: WaitGraph, rank: int) -> tuple[list[int], float] | None:
    """Return (ranks that wait for this one, seconds that it has kept them waiting); None if the start is not known."""
    victims = waiting_since(s, graph, rank)
    since = {v: t for v, t in victims.items() if t is not None}
    if not since:
        return None
    state = s.ranks.get(rank)
    begun_s = min(since.values())
    moved_s = _moved_s(state) if state is not None else None
    if moved_s is not None:
        direct = {v for w in graph.waits if rank in w.missing for v in w.ranks if v in since}
        in_step = [since[v] for v in direct if s.ranks[v].phase in _IN_STEP]
        begun_s = min([max(begun_s, moved_s), *in_step])
    return list(victims), s.t_s - begun_s


def waiting_since(s: Snapshot, graph: WaitGraph, ranks: int | Iterable[int]) -> dict[int, float | None]:
    """Return since when each rank waits, directly or through others, for any of these; None if that is not known."""
    waiting = ((v, s.ranks[v].blocked) for v in sorted(graph.victims_of(ranks)))
    return {v: call.entered_s for v, call in waiting if call is not None}


def outpaced(s: Snapshot, graph: WaitGraph, rank: int) -> tuple[list[int], float, int] | None:
    """Return (ranks that wait for this one, seconds that all of them have waited, steps by which it is ahead of them).

    None unless it trains on alone: the others have trained, too, it has made more steps than any of them, and it has used no
    group without them. A stage that only some ranks train, or a team of some ranks, does not count.
    """
    state, victims = s.ranks.get(rank), waiting_since(s, graph, rank)
    since = [t for t in victims.values() if t is not None]
    if state is None or not victims or len(since) < len(victims) or not state.steps:
        return None
    ahead = state.step - max(s.ranks[v].step for v in victims)
    used = (s.groups[name] for name, issued in state.enqueued.items() if issued and name in s.groups)
    if ahead <= 0 or not all(s.ranks[v].step for v in victims) or not all(victims.keys() <= {*g.ranks} for g in used):
        return None
    return list(victims), s.t_s - max(since), ahead


def incomplete(s: Snapshot, graph: WaitGraph) -> Iterator[tuple[dict[int, Call], float]]:
    """Yield (calls by rank, run time at which the last was issued) of each open device operation that all its ranks have issued."""
    seen: set[tuple] = set()
    for wait in graph.waits:
        if wait.missing or wait.conflict or wait.any_of or not wait.ranks:
            continue
        calls = _ends(s, wait) if wait.p2p else wait.calls if {*wait.ranks} == {*s.groups[wait.group].ranks} else {}
        name = (wait.group, wait.seq, *sorted((r, c.op, c.tag) for r, c in calls.items() if wait.p2p))
        if name in seen:  # both ends of a message wait in it
            continue
        seen.add(name)
        entered = [c.entered_s for c in calls.values() if c.on_device and c.entered_s is not None]
        if len(calls) > 1 and len(entered) == len(calls):
            yield calls, max(entered)


def motionless_s(s: Snapshot) -> float | None:
    """Return for how many seconds no rank has moved: each is at one line and has issued nothing new.

    None if there is one rank only, or a rank has ended, has not reported, or has made no step and waits for no key of a store.
    """
    ranks = list(s.ranks.values())
    if len(ranks) < max(2, s.world_size):
        return None
    since = [r.activity_since_s for r in ranks if r.life in (Life.RUNNING, Life.STARTING) and (r.step or r.store_key)]
    known = [t for t in since if t is not None]
    return s.t_s - max(known) if len(known) == len(ranks) else None


def _ends(s: Snapshot, wait: Wait) -> dict[int, Call]:
    """Return both ends of a message; nothing if the other one is not known, or its process has ended."""
    rank, peer = wait.key[3], wait.key[4]
    end = other_end_of(s, wait)
    return {} if end is None or s.ranks[peer].life in DEAD else {rank: wait.calls[rank], peer: end}


def _moved_s(r: RankState) -> float | None:
    """Return when this rank last ended a step or called a collective."""
    times = [x.end_s for x in r.steps[-1:]]
    times += (t for c in r.calls[-1:] for t in (c.entered_s, c.completed_s) if t is not None)
    return max(times, default=None)
